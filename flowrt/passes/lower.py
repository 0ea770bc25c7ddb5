"""Loops and branches as the primitives they are made of, for the step machine to run node by node.

Law: a plan in, a plan out; values keep their meaning, and only loops' merges refer to what comes after them. A loop is
a frame: what it carries goes ENTER → MERGE → SWITCH, around by NEXT_ITERATION or out by EXIT; what it captures enters
as a constant. A branch switches what it captures. Nodes without inputs wait for a *pivot*, so that they live and die
with their branch and turn, and effects run in the order of their body. See Yu et al., EuroSys 2018, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.errors import GraphError
from flowrt.op import lookup
from flowrt.ops.body import has_effect
from flowrt.ops.control import choose, loop, stateful_cond, stateful_loop
from flowrt.plan import Plan, PlanNode
from flowrt.spec import Spec
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.op import Attr

PURE = frozenset({loop.name, choose.name})
STATEFUL = frozenset({stateful_loop.name, stateful_cond.name})
LOOPS = frozenset({loop.name, stateful_loop.name})
VARIABLE_WRITES = ("assign", "scatter")

Value: TypeAlias = int  # of the plan in the making: a feed, or (node, output) in the order of `_Lowering.made`


def lower(plan: Plan, *, everything: bool = False) -> Plan:
    """``plan`` without loops and branches that have effects, or, if ``everything``, without any."""
    kinds = STATEFUL | PURE if everything else STATEFUL
    if not any(node.op in kinds for node in plan.nodes):
        return plan
    lowering = _Lowering(kinds, [feed.spec for feed in plan.feeds])
    fetches = lowering.inline(plan, list(range(len(plan.feeds))), _Place("", (), ""))
    return Plan(plan.task, lowering.nodes(), plan.feeds, tuple(fetches))


@valueclass
class _Place:
    """Where nodes are put: the prefix of their names, what those without inputs wait for, and their device."""

    prefix: str
    pivot: tuple[int, ...]
    device: str


@dataclass(slots=True)
class _Draft:
    """A node in the making: its inputs may yet change, and its outputs' values are known."""

    node: PlanNode
    inputs: list[Value]
    outputs: range


@dataclass(slots=True)
class _Lowering:
    kinds: frozenset[str]
    specs: list[Spec]
    made: list[_Draft] = field(default_factory=list)

    def nodes(self) -> tuple[PlanNode, ...]:
        return tuple(replace(draft.node, inputs=tuple(draft.inputs)) for draft in self.made)

    # Building

    def _put(
        self,
        like: PlanNode,
        op: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, Attr] | None = None,
        control: Sequence[int] = (),
        outputs: Sequence[Spec] | None = None,
        name: str = "",
    ) -> list[Value]:
        """Add a node named after ``like``; answers its outputs."""
        known = dict(attrs or {})
        found = lookup(op).infer([self.specs[v] for v in inputs], known) if outputs is None else outputs
        first = len(self.specs)
        self.specs += [spec.without_value() for spec in found]
        full = f"{like.name}/{name or op}_{len(self.made)}"
        node = PlanNode(op, full, (), tuple(self.specs[first:]), known, tuple(control), like.device, like.site)
        self.made.append(_Draft(node, list(inputs), range(first, len(self.specs))))
        return list(self.made[-1].outputs)

    @property
    def _last(self) -> int:
        return len(self.made) - 1

    def _one(self, like: PlanNode, op: str, *inputs: Value, control: Sequence[int] = (), **attrs: Attr) -> Value:
        return self._put(like, op, inputs, attrs, control)[0]

    def _constant(self, like: PlanNode, value: Any, control: Sequence[int]) -> Value:
        array = np.asarray(value)
        array.setflags(write=False)
        return self._one(like, "constant", control=control, value=array)

    # Bodies

    def inline(self, body: Plan, inputs: Sequence[Value], place: _Place) -> list[Value]:
        """Put the nodes of ``body`` here; answers its fetches."""
        return self._inline(body, inputs, place)[0]

    def _inline(self, body: Plan, inputs: Sequence[Value], place: _Place) -> tuple[list[Value], list[int]]:
        """The fetches of ``body``, and the last nodes of everything in it that has an effect."""
        values = list(inputs)
        positions: list[int] = []
        effects: list[int] = []
        for node in body.nodes:
            taken = [values[v] for v in node.inputs]
            control = tuple(positions[n] for n in node.control)
            if node.op in self.kinds or not (node.inputs or control):
                control = tuple(dict.fromkeys((*control, *place.pivot)))
            here = replace(node, name=place.prefix + node.name, device=place.device or node.device, control=control)
            if node.op in self.kinds:
                values += self._loop(here, taken) if node.op in LOOPS else self._cond(here, taken)
            else:
                first = len(self.specs)
                self.specs += node.outputs
                self.made.append(_Draft(here, taken, range(first, len(self.specs))))
                values += self.made[-1].outputs
            positions.append(self._last)
            if has_effect(node):
                effects.append(self._last)
        return [values[v] for v in body.fetches], effects

    # Branches

    def _cond(self, node: PlanNode, inputs: Sequence[Value]) -> list[Value]:
        pred, captured = inputs[0], inputs[1:]
        sides = self._switch(node, pred, pred)
        switched = [self._switch(node, value, pred) for value in captured]
        answers, done = [], []
        for side, name in ((1, "if_true"), (0, "if_false")):
            pivot = self._one(node, "identity", sides[side])
            place = _Place(f"{node.name}/", (self._last,), node.device)
            body: Any = node.attrs[name]
            made, effects = self._inline(body, [pair[side] for pair in switched], place)
            answers.append([self._alive(node, value, place) for value in made])
            done.append(self._one(node, "identity", pivot, control=effects))
        merged = [
            self._merge(node, list(pair), spec)
            for pair, spec in zip(zip(*answers, strict=True), node.outputs, strict=True)
        ]
        self._put(node, "merge", done, {"_many": 2})  # what waits for the cond waits for this
        return merged

    def _switch(self, node: PlanNode, value: Value, pred: Value) -> list[Value]:
        return self._put(node, "switch", [value, pred], control=node.control)

    def _alive(self, node: PlanNode, value: Value, place: _Place) -> Value:
        """``value``, which dies with the branch even if nothing in it made it."""
        return self._one(node, "identity", value, control=place.pivot)

    def _merge(self, node: PlanNode, values: Sequence[Value], spec: Spec) -> Value:
        return self._put(node, "merge", values, {"_many": len(values)}, outputs=[spec, Spec("int64", ())])[0]

    # Loops

    def _loop(self, node: PlanNode, inputs: Sequence[Value]) -> list[Value]:
        return _LoopLowering(self, node, inputs).outputs()


class _LoopLowering:
    """One loop: a counter, what it carries and a stack of each thing it stacks go around; the rest is constant."""

    def __init__(self, lowering: _Lowering, node: PlanNode, inputs: Sequence[Value]) -> None:
        attrs: Any = node.attrs
        counted, carried, scanned = (int(attrs[name]) for name in ("counted", "carried", "scanned"))
        self.lowering, self.node, self.attrs, self.carried = lowering, node, attrs, carried
        self.parallel = 1 if _writes_variables(attrs["body"], attrs["cond"]) else attrs["parallel_iterations"]
        self.count = inputs[0] if counted else None
        self.first = list(inputs[counted : counted + carried])
        self.scanned = inputs[counted + carried : counted + carried + scanned]
        self.rows = [self._enter_rows(v) for v in self.scanned]
        self.captured = [self._enter(v, constant=True) for v in inputs[counted + carried + scanned :]]
        self._stack_specs = node.outputs[carried + 1 :]

    def outputs(self) -> list[Value]:
        low, node, attrs = self.lowering, self.node, self.attrs
        most = self._most()
        stacks = [self._no_rows(spec) for spec in self._stack_specs]
        first = [low._constant(node, np.int64(0), node.control), *self.first, *stacks]
        entered = [self._enter(value) for value in first]
        specs = [Spec("int64", ()), *node.outputs[: self.carried], *(low.specs[v] for v in stacks)]
        merged = [low._merge(node, [value], spec) for value, spec in zip(entered, specs, strict=True)]
        merges = list(range(len(low.made) - len(merged), len(low.made)))
        turn, state = merged[0], merged[1 : 1 + self.carried]
        pred = None if most is None else low._one(node, "less", turn, most)
        if attrs["cond"] is not None:
            place = _Place(f"{node.name}/", (merges[0],), node.device)
            (goes_on,), _ = low._inline(attrs["cond"], [*state, *self.captured], place)
            goes_on = low._alive(node, goes_on, place)
            pred = goes_on if pred is None else low._one(node, "logical_and", pred, goes_on)
        if pred is None:
            raise GraphError(f"{node.where()}: nothing ends this loop")
        pred = low._one(node, "loop_cond", pred)
        sides = [low._put(node, "switch", [value, pred]) for value in merged]
        self._go_around(merges, [side[1] for side in sides], most)
        exits = [low._one(node, "exit", side[0]) for side in sides]
        length = self._length() or exits[0]
        whole = [
            low._one(node, "stack_rows", rows, length, reverse=self.attrs["reverse"])
            for rows in exits[1 + self.carried :]
        ]
        # what waits for the loop waits for the counter's exit, which comes last
        exits[0] = low._one(node, "identity", exits[0])
        return [*exits[1 : 1 + self.carried], exits[0], *whole]

    def _go_around(self, merges: Sequence[int], inside: Sequence[Value], most: Value | None) -> None:
        """Build the body, and lead its answers back into the merges."""
        low, node, carried = self.lowering, self.node, self.carried
        turn = low._one(node, "identity", inside[0])
        place = _Place(f"{node.name}/", (low._last,), node.device)
        one = low._constant(node, np.int64(1), place.pivot)
        row = turn
        if self.attrs["reverse"] and most is not None:
            row = low._one(node, "subtract", low._one(node, "subtract", most, one), turn)
        rows = [low._one(node, "take", value, row, axis=0) for value in self.rows]
        answers, effects = low._inline(self.attrs["body"], [*inside[1 : 1 + carried], *rows, *self.captured], place)
        stacks = [
            low._one(node, "append_row", stack, answer)
            for stack, answer in zip(inside[1 + carried :], answers[carried:], strict=True)
        ]
        following = low._one(node, "add", turn, one, control=effects)
        carried_on = [low._alive(node, value, place) for value in (following, *answers[:carried])]
        for merge, value in zip(merges, [*carried_on, *stacks], strict=True):
            back = low._one(node, "next_iteration", value)
            draft = low.made[merge]
            draft.inputs.append(back)
            draft.node = replace(draft.node, attrs={"_many": 2})

    def _enter(self, value: Value, constant: bool = False) -> Value:
        attrs = {"frame": self.node.name, "is_constant": constant, "parallel_iterations": self.parallel}
        return self.lowering._put(self.node, "enter", [value], attrs, self.node.control)[0]

    def _enter_rows(self, value: Value) -> Value:
        """What is scanned, of a length that inference need not know: of nothing it would find no row to be taken."""
        low = self.lowering
        spec = low.specs[value]
        low.specs[value] = spec if spec.dims is None else Spec(spec.dtype, (None, *spec.dims[1:]))
        entered = self._enter(value, constant=True)
        low.specs[value] = spec
        return entered

    def _most(self) -> Value | None:
        """The most turns, inside the frame, where anything but the condition says so."""
        low, node = self.lowering, self.node
        bounds: list[Value] = []
        if self.attrs["limit"] is not None:
            bounds.append(self._enter(low._constant(node, np.int64(self.attrs["limit"]), node.control), constant=True))
        if self.rows:
            sizes = low._one(node, "shape_of", self.rows[0])
            zero = low._constant(node, np.int64(0), [low._last])
            bounds.append(low._one(node, "take", sizes, zero, axis=0))
        if self.count is not None:
            bounds.append(self._enter(self.count, constant=True))
        most = None
        for bound in bounds:
            most = bound if most is None else low._one(node, "minimum", most, bound)
        return most

    def _no_rows(self, stack: Spec) -> Value:
        """A stack as it begins."""
        shape = None if stack.dims is None else stack.dims[1:]
        return self.lowering._one(self.node, "no_rows", control=self.node.control, dtype=stack.dtype.name, shape=shape)

    def _length(self) -> Value | None:
        """How long the stacks are, outside the frame, where anything but the number of turns says so."""
        low, node, length = self.lowering, self.node, self._stack_specs[0].shape[0] if self._stack_specs else None
        if length is not None:
            return low._constant(node, np.int64(length), node.control)
        if not self.scanned or not self._stack_specs:
            return None
        sizes = low._one(node, "shape_of", self.scanned[0])
        return low._one(node, "take", sizes, low._constant(node, np.int64(0), [low._last]), axis=0)


def _writes_variables(*bodies: Plan | None) -> bool:
    """Whether turns must follow one another, for one may read what another wrote."""
    return any(
        node.op.startswith(VARIABLE_WRITES)
        or _writes_variables(*(v for v in node.attrs.values() if isinstance(v, Plan)))
        for body in bodies
        if body is not None
        for node in body.nodes
    )
