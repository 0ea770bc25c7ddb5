"""What carries out the part of a plan that is on a device with a driver: its nodes are issued one by one, in its lane.

Law: a value on a device never changes while somebody refers to it. Before a variable is written, what may fail is
waited for, as tapes wait: a step that fails has written nothing that came after. What can be laid out beforehand is
carried out as one (`replaying`): here is what is left, where sizes are values of the step, or where memory is so short
that every tensor is better asked for by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import SpecError, StepCancelled
from flowrt.base.spec import Spec, spec_of
from flowrt.base.traits import is_alias, traits_of, writes
from flowrt.kernels.launch import STATUS, check
from flowrt.sched.devices.blame import Naming, finish, finished_though_it_fails, prepared
from flowrt.sched.devices.holding import Holding
from flowrt.sched.devices.looping import Bodies, BodyUnit
from flowrt.sched.devices.memory import Arena, DeviceArray
from flowrt.sched.devices.replaying import WholeRegions, has_bodies, may_size
from flowrt.sched.host.latest import Latest
from flowrt.sched.regions.lives import BRING, infer, inferred_whole, known_array
from flowrt.sched.regions.regions import (
    CONSTANT,
    READ,
    resource_of,
    resources_of,
    size_operands,
    variable_spec,
    variable_specs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.devices.driver import Array, Kernel
    from flowrt.sched.host.variables import Variables
    from flowrt.sched.units import Unit

Value: TypeAlias = "DeviceArray | Array"
PREPARED_PER_NODE = 64


@dataclass(slots=True)
class _UnitRun:
    """One unit being carried out: the run's words, those of each kernel that may fail, and what is not waited for.

    The device may look at the words of any kernel until it is.
    """

    words: Array
    failing: list[tuple[PlanNode, Array]]
    issued: list[tuple[PlanNode, Array]]


class Issuer:
    """Carries out units of one plan on one device. `carry_out` is called in its lane."""

    def __init__(self, plan: Plan, arena: Arena, variables: Variables) -> None:
        self._plan, self._arena, self._variables = plan, arena, variables
        self._holding = Holding(plan, arena, variables)
        self._regions = WholeRegions(plan, arena, self._holding)
        self._starts = plan.value_starts()
        self._kernels: defaultdict[int, Latest[Any, tuple[Kernel, Sequence[Spec]]]] = defaultdict(
            partial(Latest, PREPARED_PER_NODE)
        )
        self._sizes: dict[int, Sequence[int]] = {}
        self._constants: dict[int, DeviceArray] = {}
        self._last: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self._bodies = Bodies(arena, lambda body: Issuer(body, arena, variables).carry_out)

    def carry_out(self, unit: Unit | BodyUnit, inputs: Sequence[Value], words: Array) -> list[Value]:
        """The outputs of a unit whose variables are held, once all of it is done.

        Raises `StepCancelled` where the run was stopped, `ResourceError` where memory is short, and `FlowrtError` with
        the kernel's reason where one fails.
        """
        found = self._regions.carry_out(unit, inputs, words)
        if found is not None:
            return found
        values: dict[int, Value] = dict(zip(unit.inputs, inputs, strict=True))
        last, run = self._last_uses(unit), _UnitRun(words, [], [])
        with finished_though_it_fails(self._arena.driver):
            for position in unit.nodes:
                node = self._plan.nodes[position]
                if words[STATUS]:
                    raise StepCancelled(f"{node.where()} was not begun")
                made = self._issue(position, node, [values[v] for v in node.inputs], run)
                values.update(zip(range(self._starts[position], self._starts[position + 1]), made, strict=True))
                for value in last.get(position, ()):
                    values.pop(value, None)
        self._finish(run)
        return [values[v] for v in unit.outputs]

    def _last_uses(self, unit: Unit | BodyUnit) -> Mapping[int, list[int]]:
        """By node, the values that nobody looks at after it."""
        found = self._last.get(unit.nodes)
        if found is None:
            used: dict[int, int] = {}
            for position in unit.nodes:
                made = range(self._starts[position], self._starts[position + 1])
                used.update(dict.fromkeys((*self._plan.nodes[position].inputs, *made), position))
            found, kept = self._last.setdefault(unit.nodes, {}), frozenset(unit.outputs)
            for value, position in used.items():
                if value not in kept:
                    found.setdefault(position, []).append(value)
        return found

    def _issue(self, position: int, node: PlanNode, inputs: Sequence[Value], run: _UnitRun) -> Sequence[Value]:
        if node.op == CONSTANT:
            return (self._constant(position, node),)
        if node.op == BRING:
            value = inputs[0]  # what may decide sizes stays where those who infer shapes see it
            return (value if isinstance(value, np.ndarray) and may_size(value) else self._arena.here(value, node),)
        if node.op == READ:
            spec = variable_spec(node)
            return (self._holding.held(resource_of(node), spec).seen_as(spec),)
        if writes(node.op):
            self._write(position, node, inputs, run)
            return ()
        if node.op == "shape_of":
            return (np.array(inputs[0].shape, np.int64),)
        if node.op == "no_op":
            return ()
        if has_bodies(node):
            return self._bodies.carry_out(node, inputs, run.words)
        if is_alias(node.op):
            (spec,) = self._infer(node, inputs)
            return (self._arena.here(inputs[0], node).seen_as(spec),)
        return self._inferred(node, inputs) or self._compute(position, node, inputs, run)

    def _constant(self, position: int, node: PlanNode) -> Value:
        found = self._constants.get(position)
        if found is None:
            array = np.asarray(node.attrs["value"])
            if may_size(array):
                return array  # which those who infer shapes must see
            found = self._constants[position] = self._arena.hold(array, node.where())
        return found

    def _inferred(self, node: PlanNode, inputs: Sequence[Value]) -> list[Value]:
        """What inference finds of what the host has, as it does of shapes; nothing where that is not all."""
        if not all(isinstance(value, np.ndarray) for value in inputs):
            return []
        outputs = self._infer(node, inputs)
        return [known_array(spec) for spec in outputs] if inferred_whole(node, outputs) else []

    def _infer(self, node: PlanNode, inputs: Sequence[Value]) -> tuple[Spec, ...]:
        return infer(node, [_known_spec(value) for value in inputs])

    # ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compute(self, position: int, node: PlanNode, inputs: Sequence[Value], run: _UnitRun) -> list[DeviceArray]:
        specs = [_spec(value) for value in inputs]
        for place in self._sizing(position, node):
            specs[place] = _known_spec(inputs[place])
        key = tuple([(spec.dims, spec.value) for spec in specs])
        kernel, outputs = self._kernel(position, key, node.op, specs, lambda: infer(node, specs))
        made = [self._arena.empty(spec, node.where()) for spec in outputs]
        self._launch(kernel, node, [*(self._arena.here(v, node) for v in inputs), *made], run)
        return made

    def _sizing(self, position: int, node: PlanNode) -> Sequence[int]:
        """Which of a node's inputs decide by their values what is computed."""
        if position not in self._sizes:
            self._sizes[position] = tuple(size_operands(node))
        return self._sizes[position]

    def _kernel(
        self, position: int, key: Any, op: str, inputs: Sequence[Spec], outputs: Callable[[], Sequence[Spec]]
    ) -> tuple[Kernel, Sequence[Spec]]:
        """The kernel of a node for inputs of one ``key``, and what it makes of them."""
        known = self._kernels[position]
        if key not in known:
            node, made = self._plan.nodes[position], outputs()
            known[key] = prepared(self._arena.driver, node, op, inputs, made, node.attrs), made
        return known[key]

    def _launch(self, kernel: Kernel, node: PlanNode, operands: Sequence[DeviceArray], run: _UnitRun) -> None:
        scratch = [self._arena.empty(spec, f"{node.where()}, scratch") for spec in kernel.scratch]
        words = run.words.copy()
        with Naming([node]):
            kernel.launch([array.storage.memory for array in (*operands, *scratch)], words)
        run.issued.append((node, words))
        if kernel.may_fail:
            run.failing.append((node, words))

    def _finish(self, run: _UnitRun) -> None:
        """Wait for what was issued, and look what became of it."""
        finish(self._arena.driver, (node for node, _ in run.issued))
        run.issued.clear()
        for node, words in run.failing:
            check(words, node.op, node.where)
        run.failing.clear()

    # ── variables ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, position: int, node: PlanNode, inputs: Sequence[Value], run: _UnitRun) -> None:
        """Carry out a write to variables that are held."""
        if run.failing:
            self._finish(run)
        update = traits_of(node.op).update
        assert update is not None
        if update.rows:
            self._write_rows(position, node, inputs, run)
            return
        name, spec, value = resource_of(node), variable_spec(node), self._arena.here(inputs[0], node)
        if not spec.accepts(value.dtype, value.shape):
            raise SpecError(f"{node.where()}: the variable holds {spec}, the step gives {value.spec}")
        if update.whole is not None:
            old = self._holding.held(name, spec)
            updated = self._arena.empty(spec, self._holding.where(name))
            kernel, _ = self._kernel(position, spec.dims, update.whole, [spec, spec], lambda: [spec])
            self._launch(kernel, node, [old, value, updated], run)
            value = updated
        self._variables.begin(name, value.seen_as(spec))

    def _write_rows(self, position: int, node: PlanNode, inputs: Sequence[Value], run: _UnitRun) -> None:
        held, names, specs = variable_specs(node), resources_of(node), [_spec(value) for value in inputs]
        self._infer(node, inputs)
        tables = [self._holding.own(name, spec) for name, spec in zip(names, held, strict=True)]
        key = tuple(each.dims for each in specs)
        kernel, _ = self._kernel(position, key, node.op, specs, lambda: held)
        self._launch(kernel, node, [*(self._arena.here(v, node) for v in inputs), *tables], run)


def _spec(value: Value) -> Spec:
    return value.spec if isinstance(value, DeviceArray) else Spec(value.dtype, value.shape)


def _known_spec(value: Value) -> Spec:
    """The same, with the value of what the host has that may decide sizes."""
    return value.spec if isinstance(value, DeviceArray) else spec_of(value)
