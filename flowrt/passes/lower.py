"""Loops and branches as the primitives they are made of, for the step machine to run node by node.

Law: a plan in, a plan out; values keep their meaning, and only loops' merges refer to what comes after them. A loop is
a frame: what it carries goes ENTER → MERGE → SWITCH, around by NEXT_ITERATION or out by EXIT; what it captures enters
as a constant. A branch switches what it captures. Nodes without inputs wait for a *pivot*, so that they live and die
with their branch and iteration, and effects run in the order of their body. See Yu et al., EuroSys 2018, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.device import is_apart
from flowrt.base.errors import GraphError
from flowrt.base.plan import Plan, PlanNode
from flowrt.base.spec import Spec
from flowrt.base.traits import writes
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.ops.body import has_effect
from flowrt.ops.control import choose, loop, stateful_cond, stateful_loop

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr

PURE = frozenset({loop.name, choose.name})
STATEFUL = frozenset({stateful_loop.name, stateful_cond.name})
LOOPS = frozenset({loop.name, stateful_loop.name})
STRETCH_ITERATIONS, STRETCH_BYTES = 256, 4 << 20
"""The most iterations of a stretch, and the most memory of its rows: filling what is not used costs as much as an
iteration of the machine, tens of microseconds an op."""

Value: TypeAlias = int  # of the plan in the making: a feed, or (node, output) in the order of `_Lowering.made`


def lower(plan: Plan, *, everything: bool = False) -> Plan:
    """``plan`` without loops and branches that have effects, or, if ``everything``, without any.

    Loops whose condition alone says how many rows they stack are left in stretches that have a bound; those of another
    device than the host's own are left as they are.
    """
    kinds = STATEFUL | PURE if everything else STATEFUL
    if not any(node.op in kinds or _in_stretches(node, node.device) for node in plan.nodes):
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
            device = place.device or node.device
            taken_apart = node.op in self.kinds or _in_stretches(node, device)
            if taken_apart or not (node.inputs or control):
                control = tuple(dict.fromkeys((*control, *place.pivot)))
            here = replace(node, name=place.prefix + node.name, device=device, control=control)
            if taken_apart:
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
        if node.op in LOOPS and node.op in self.kinds:
            return _LoopLowering(self, node, inputs).outputs()
        return _Stretches(self, node, inputs).outputs()

    def enter(self, node: PlanNode, value: Value, parallel: int, *, constant: bool = False) -> Value:
        """``value`` inside the frame of ``node``."""
        attrs: dict[str, Attr] = {"frame": node.name, "is_constant": constant, "parallel_iterations": parallel}
        return self._put(node, "enter", [value], attrs, node.control)[0]

    def frame(
        self,
        node: PlanNode,
        parallel: int,
        first: Sequence[Value],
        specs: Sequence[Spec],
        goes_on: Callable[[Sequence[Value], int], Value],
        iteration: Callable[[Sequence[Value], _Place], Sequence[Value]],
    ) -> list[Value]:
        """What goes around, beginning with ``first``, as it leaves the frame; ``specs`` are those of any iteration.

        ``goes_on`` says of what has come around, and the node it came by, whether there is another iteration;
        ``iteration`` makes of that what goes around next, in a place that lives and dies with the iteration.
        """
        entered = [self.enter(node, value, parallel) for value in first]
        merged = [self._merge(node, [value], spec) for value, spec in zip(entered, specs, strict=True)]
        merges = list(range(len(self.made) - len(merged), len(self.made)))
        pred = self._one(node, "loop_cond", goes_on(merged, merges[0]))
        sides = [self._put(node, "switch", [value, pred]) for value in merged]
        inside = [side[1] for side in sides]
        inside[0] = self._one(node, "identity", inside[0])
        place = _Place(f"{node.name}/", (self._last,), node.device)
        for merge, value in zip(merges, iteration(inside, place), strict=True):
            back = self._one(node, "next_iteration", value)
            draft = self.made[merge]
            draft.inputs.append(back)
            draft.node = replace(draft.node, attrs={"_many": 2})
        return [self._one(node, "exit", side[0]) for side in sides]

    def no_rows(self, node: PlanNode, stack: Spec) -> Value:
        """A stack as it begins."""
        shape = None if stack.dims is None else stack.dims[1:]
        return self._one(node, "no_rows", control=node.control, dtype=stack.dtype.name, shape=shape)


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
        self.captured = [self._constant(v) for v in inputs[counted + carried + scanned :]]
        self._stack_specs = node.outputs[carried + 1 :]
        self.most = self._most()

    def outputs(self) -> list[Value]:
        low, node = self.lowering, self.node
        stacks = [low.no_rows(node, spec) for spec in self._stack_specs]
        first = [low._constant(node, np.int64(0), node.control), *self.first, *stacks]
        specs = [Spec("int64", ()), *node.outputs[: self.carried], *(low.specs[v] for v in stacks)]
        exits = low.frame(node, self.parallel, first, specs, self._goes_on, self._iteration)
        length = self._length() or exits[0]
        whole = [
            low._one(node, "stack_rows", rows, length, reverse=self.attrs["reverse"])
            for rows in exits[1 + self.carried :]
        ]
        # what waits for the loop waits for the counter's exit, which comes last
        exits[0] = low._one(node, "identity", exits[0])
        return [*exits[1 : 1 + self.carried], exits[0], *whole]

    def _goes_on(self, merged: Sequence[Value], pivot: int) -> Value:
        low, node = self.lowering, self.node
        pred = None if self.most is None else low._one(node, "less", merged[0], self.most)
        if self.attrs["cond"] is not None:
            place = _Place(f"{node.name}/", (pivot,), node.device)
            (goes_on,), _ = low._inline(self.attrs["cond"], [*merged[1 : 1 + self.carried], *self.captured], place)
            goes_on = low._alive(node, goes_on, place)
            pred = goes_on if pred is None else low._one(node, "logical_and", pred, goes_on)
        if pred is None:
            raise GraphError(f"{node.where()}: nothing ends this loop")
        return pred

    def _iteration(self, inside: Sequence[Value], place: _Place) -> list[Value]:
        low, node, carried = self.lowering, self.node, self.carried
        iteration = inside[0]
        one = low._constant(node, np.int64(1), place.pivot)
        row = iteration
        if self.attrs["reverse"] and self.most is not None:
            row = low._one(node, "subtract", low._one(node, "subtract", self.most, one), iteration)
        rows = [low._one(node, "take", value, row, axis=0, absent=False) for value in self.rows]
        answers, effects = low._inline(self.attrs["body"], [*inside[1 : 1 + carried], *rows, *self.captured], place)
        stacks = [
            low._one(node, "append_row", stack, answer)
            for stack, answer in zip(inside[1 + carried :], answers[carried:], strict=True)
        ]
        following = low._one(node, "add", iteration, one, control=effects)
        return [*(low._alive(node, value, place) for value in (following, *answers[:carried])), *stacks]

    def _constant(self, value: Value) -> Value:
        return self.lowering.enter(self.node, value, self.parallel, constant=True)

    def _enter_rows(self, value: Value) -> Value:
        """What is scanned, of a length that inference need not know: of nothing it would find no row to be taken."""
        low = self.lowering
        spec = low.specs[value]
        low.specs[value] = spec if spec.dims is None else Spec(spec.dtype, (None, *spec.dims[1:]))
        entered = self._constant(value)
        low.specs[value] = spec
        return entered

    def _most(self) -> Value | None:
        """The most iterations, inside the frame, where anything but the condition says so."""
        low, node = self.lowering, self.node
        bounds: list[Value] = []
        if self.attrs["limit"] is not None:
            bounds.append(self._constant(low._constant(node, np.int64(self.attrs["limit"]), node.control)))
        if self.rows:
            sizes = low._one(node, "shape_of", self.rows[0])
            zero = low._constant(node, np.int64(0), [low._last])
            bounds.append(low._one(node, "take", sizes, zero, axis=0, absent=False))
        if self.count is not None:
            bounds.append(self._constant(self.count))
        most = None
        for bound in bounds:
            most = bound if most is None else low._one(node, "minimum", most, bound)
        return most

    def _length(self) -> Value | None:
        """How long the stacks are, outside the frame, where anything but the number of iterations says so."""
        low, node, length = self.lowering, self.node, self._stack_specs[0].shape[0] if self._stack_specs else None
        if length is not None:
            return low._constant(node, np.int64(length), node.control)
        if not self.scanned or not self._stack_specs:
            return None
        sizes = low._one(node, "shape_of", self.scanned[0])
        return low._one(node, "take", sizes, low._constant(node, np.int64(0), [low._last]), axis=0, absent=False)


class _Stretches:
    """A loop that stacks rows and that only its condition ends, in stretches of a bounded number of iterations.

    Each stretch is a loop whose sizes are known, which a tape can run; the machine puts their rows behind one another.
    """

    def __init__(self, lowering: _Lowering, node: PlanNode, inputs: Sequence[Value]) -> None:
        self.lowering, self.node, self.carried = lowering, node, int(node.attrs["carried"])
        self.first = inputs[: self.carried]
        self.captured = [lowering.enter(node, v, 1, constant=True) for v in inputs[self.carried :]]
        self.iterations = stretch_iterations(node.outputs[self.carried + 1 :])

    def outputs(self) -> list[Value]:
        low, node = self.lowering, self.node
        stacks = [low.no_rows(node, spec) for spec in node.outputs[self.carried + 1 :]]
        beginning = [low._constant(node, np.int64(0), node.control), low._constant(node, np.True_, node.control)]
        first = [*beginning, *self.first, *stacks]
        specs = [Spec("int64", ()), Spec("bool", ()), *node.outputs[: self.carried], *(low.specs[v] for v in stacks)]
        exits = low.frame(node, 1, first, specs, lambda merged, _: merged[1], self._iteration)
        whole = [low._one(node, "stack_rows", rows, exits[0], reverse=False) for rows in exits[2 + self.carried :]]
        done = low._one(node, "identity", exits[0])  # what waits for the loop waits for this, which comes last
        return [*exits[2 : 2 + self.carried], done, *whole]

    def _iteration(self, inside: Sequence[Value], place: _Place) -> list[Value]:
        low, node, carried = self.lowering, self.node, self.carried
        attrs: dict[str, Attr] = {**node.attrs, "limit": self.iterations}
        answers = low._put(node, node.op, [*inside[2 : 2 + carried], *self.captured], attrs, place.pivot)
        done, rows = answers[carried], answers[carried + 1 :]
        more = low._one(node, "equal", done, low._constant(node, np.int64(self.iterations), place.pivot))
        stacks = [
            low._one(node, "append_rows", stack, made, done)
            for stack, made in zip(inside[2 + carried :], rows, strict=True)
        ]
        return [low._one(node, "add", inside[0], done), more, *answers[:carried], *stacks]


def stretch_iterations(stacks: Sequence[Spec]) -> int:
    """How many iterations a stretch has: enough for the machine's part to be small, and no more memory than needed."""
    rows = [Spec(s.dtype, s.shape[1:]).nbytes for s in stacks if s.dims is not None and None not in s.dims[1:]]
    return min(max(STRETCH_BYTES // max(sum(rows), 1), 1), STRETCH_ITERATIONS)


def _in_stretches(node: PlanNode, device: str) -> bool:
    """Whether a loop is on the host's own device, stacks rows, and its condition alone says how many."""
    attrs: Any = node.attrs
    if node.op != loop.name or is_apart(device):
        return False
    if attrs["limit"] is not None or attrs["scanned"] or attrs["counted"]:
        return False
    return len(attrs["body"].fetches) > int(attrs["carried"])


def _writes_variables(*bodies: Plan | None) -> bool:
    """Whether iterations must follow one another, for one may read what another wrote."""
    return any(
        writes(node.op) or _writes_variables(*(v for v in node.attrs.values() if isinstance(v, Plan)))
        for body in bodies
        if body is not None
        for node in body.nodes
    )
