"""Loops and branches whose bodies are on a device: the host decides how often, the device computes each iteration as
one.

Law: called in the device's lane, from within an issued region. A body is a region of its own, laid out and recorded as
others are. What is carried stays on the device from one iteration to the next; of a condition one bool is read. Two
recordings of a body take turns, as what one iteration has made the next one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import SpecError, StepCancelled
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.launch import STATUS
from flowrt.sched.devices.memory import Arena, DeviceArray
from flowrt.sched.loops.structured import stack_specs
from flowrt.sched.regions.regions import find_regions

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.devices.driver import Array
    from flowrt.sched.regions.regions import Name, Region

Value: TypeAlias = "DeviceArray | Array"
Run: TypeAlias = "Callable[[BodyUnit, Sequence[Value], Array], list[Value]]"  # with the run's words
COND = "cond"
FIRST = 16  # rows that a stack has space for whose length is not known


@dataclass(frozen=True, slots=True, eq=False)
class BodyUnit:
    """A body as what is issued as one."""

    issued: Region
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    begins: frozenset[Name] = frozenset()


class Body:
    """A body on one device. ``make`` answers what carries out its region."""

    def __init__(self, body: Plan, device: str, make: Callable[[Plan], Run]) -> None:
        here = replace(body, nodes=tuple([replace(node, device=device) for node in body.nodes]))
        regions = find_regions(here, lambda node: False)
        self._fetches = here.fetches
        self._unit = next((BodyUnit(r, r.nodes, r.inputs, r.outputs) for r in regions), None)
        self._run = make(here)

    def __call__(self, inputs: Sequence[Value], words: Array) -> list[Value]:
        """What the body answers."""
        values: dict[int, Value] = dict(enumerate(inputs))
        unit = self._unit
        if unit is not None:
            made = self._run(unit, [values[v] for v in unit.inputs], words)
            values.update(zip(unit.outputs, made, strict=True))
        return [values[v] for v in self._fetches]


class Bodies:
    """The bodies of the loops and branches of one plan."""

    def __init__(self, arena: Arena, make: Callable[[Plan], Run]) -> None:
        self._arena, self._device, self._make = arena, arena.device.name, make
        self._known: dict[int, tuple[Plan, Body]] = {}

    def carry_out(self, node: PlanNode, inputs: Sequence[Value], words: Array) -> list[Value]:
        """The outputs of a loop or a branch."""
        attrs = node.attrs
        if node.op == COND:
            return self._body(attrs["if_true"] if self._truth(inputs[0]) else attrs["if_false"])(inputs[1:], words)
        return self._loop(node, attrs, inputs, words)

    def _body(self, plan: Plan) -> Body:
        if id(plan) not in self._known:
            self._known[id(plan)] = plan, Body(plan, self._device, self._make)
        return self._known[id(plan)][1]

    def _loop(self, node: PlanNode, attrs: Mapping[str, Any], inputs: Sequence[Value], words: Array) -> list[Value]:
        counted, carried, scanned = int(attrs["counted"]), attrs["carried"], attrs["scanned"]
        state = list(inputs[counted : counted + carried])
        rows = [self._arena.here(value, node) for value in inputs[counted + carried : counted + carried + scanned]]
        captured = list(inputs[counted + carried + scanned :])
        body, cond = self._body(attrs["body"]), None if attrs["cond"] is None else self._body(attrs["cond"])
        length = rows[0].shape[0] if rows else attrs["limit"]
        most = self._most_iterations(length, attrs["limit"], inputs[0] if counted else None)
        space = most if cond is None else None
        stacks = [_Stack(node, length, space, self._arena) for _ in attrs["body"].fetches[carried:]]
        done = 0
        while most is None or done < most:
            if words[STATUS]:
                raise StepCancelled(f"{node.where()} was stopped after {done} iterations")
            if cond is not None and not self._truth(cond([*state, *captured], words)[0]):
                break
            at = most - 1 - done if attrs["reverse"] and most is not None else done
            answers = body([*state, *(self._row(row, at, node) for row in rows), *captured], words)
            state = answers[:carried]
            for stack, answer in zip(stacks, answers[carried:], strict=True):
                stack.put(at if attrs["reverse"] else done, self._arena.here(answer, node))
            done += 1
        specs = [value.spec if isinstance(value, DeviceArray) else spec_of(value) for value in inputs]
        made = stack_specs(node.op, specs, attrs) if stacks else ()
        whole = [stack.whole(spec, done) for stack, spec in zip(stacks, made, strict=True)]
        return [*state, np.array(done, np.int64), *whole]

    def _most_iterations(self, length: int | None, limit: int | None, count: Value | None) -> int | None:
        """How often a loop iterates at most, by its rows, its limit and its count; None where nothing bounds it."""
        bounds = [bound for bound in (length, limit) if bound is not None]
        bounds += [] if count is None else [int(self._read(count))]
        return max(min(bounds), 0) if bounds else None

    def _truth(self, value: Value) -> bool:
        return bool(self._read(value))

    def _read(self, value: Value) -> Array:
        if not isinstance(value, DeviceArray):
            return value
        found = np.empty(value.shape, value.dtype)
        self._arena.read(value, found)
        return found

    def _row(self, rows: DeviceArray, at: int, node: PlanNode) -> DeviceArray:
        """A copy of a row, since kernels may want one to begin where memory does."""
        row = self._arena.empty(Spec(rows.dtype, rows.shape[1:]), f"{node.where()}, a row")
        if row.nbytes:
            copy_part(self._arena, rows, at * row.nbytes, row, 0, row.nbytes)
        return row


class _Stack:
    """What the iterations of a loop answer beyond what it carries, as rows of one tensor, zeros where there is none.

    ``length`` is how many rows it has, None where that is told by the end of the loop. There is space for ``most``
    then, if so many come without a condition; else for twice as many whenever there is none left.
    """

    def __init__(self, node: PlanNode, length: int | None, most: int | None, arena: Arena) -> None:
        self._node, self._length, self._arena = node, length, arena
        self._space = FIRST if most is None else most
        self._rows: DeviceArray | None = None

    def put(self, at: int, row: DeviceArray) -> None:
        """Put a row in its place."""
        rows = self._rows or self._zeros((self._space if self._length is None else self._length, *row.shape), row.dtype)
        if row.shape != rows.shape[1:]:
            raise SpecError(
                f"{self._node.where()}: its iterations stack rows of different shapes: "
                f"{sorted({str(list(row.shape)), str(list(rows.shape[1:]))})}; carry one tensor of the largest shape, "
                "and take parts of it, x[:n] (gradients go through that, too)"
            )
        self._rows = rows if at < rows.shape[0] else self._of_length(rows, 2 * at)
        if row.nbytes:
            copy_part(self._arena, row, 0, self._rows, at * row.nbytes, row.nbytes)

    def whole(self, spec: Spec, done: int) -> DeviceArray:
        """The tensor after so many iterations, of which inference finds ``spec``."""
        length = done if self._length is None else self._length
        if self._rows is None:
            return self._zeros((length, *(n or 0 for n in spec.shape[1:])), spec.dtype)
        return self._rows if length == self._rows.shape[0] else self._of_length(self._rows, length)

    def _zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
        return self._arena.hold(np.zeros(shape, dtype), self._node.where())

    def _of_length(self, rows: DeviceArray, length: int) -> DeviceArray:
        """The same rows with space for more, or fewer of them."""
        made = self._arena.empty(Spec(rows.dtype, (length, *rows.shape[1:])), self._node.where())
        if nbytes := min(rows.nbytes, made.nbytes):
            with self._arena.naming(made, "copied on"):
                self._arena.driver.copy(rows.storage.memory, made.storage.memory, nbytes)
        return made


def copy_part(arena: Arena, source: DeviceArray, start: int, target: DeviceArray, at: int, nbytes: int) -> None:
    """Copy some bytes of one tensor to where they belong in another; by way of the host where memory has no parts."""
    driver, taken, given = arena.driver, source.storage.memory, target.storage.memory
    part: Callable[[Any, int, int], Any] | None = getattr(driver, "part", None)
    with arena.naming(target, "copied on"):
        if part is not None:
            driver.copy(part(taken, start, nbytes), part(given, at, nbytes), nbytes)
            return
        here, there = np.empty(target.nbytes, np.uint8), np.empty(source.nbytes, np.uint8)
        driver.read(given, here)
        driver.read(taken, there)
        here[at : at + nbytes] = there[start : start + nbytes]
        driver.write(given, here)
