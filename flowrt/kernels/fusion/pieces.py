"""Applications made of others, one after another: a program's members in pieces, each with its launches.

Law: pure. Values that a later piece takes lie in scratch, which is taken again when its value is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flowrt.base.spec import Spec
from flowrt.base.traits import is_alias
from flowrt.kernels.launch import COPY_OP, Application, apply_kernel

if TYPE_CHECKING:
    from flowrt.kernels.fusion.program import FusedProgram, Whole
    from flowrt.kernels.store.background import CompileOrder


class Assembly:
    """Steps of other applications as they are put together: operands are inputs, outputs, scratch, then local ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs, self._first = inputs, inputs + outputs
        self.steps: list[Any] = []
        self._scratch: list[Spec] = []
        self._local: list[Spec] = []
        self._orders: list[CompileOrder] = []
        self._wishes: list[tuple[CompileOrder, int]] = []

    def take(self, spec: Spec) -> int:
        """The operand of new scratch."""
        self._scratch.append(spec)
        return self._first + len(self._scratch) - 1

    def fill(self, spec: Spec, value: float) -> int:
        """The operand of new scratch whose entries are all ``value``."""
        place, padding = self.take(spec), {"paddings": ((spec.size, 0),), "value": value}
        self.add(apply_kernel("pad", [Spec(spec.dtype, (0,))], [Spec(spec.dtype, (spec.size,))], padding), [0, place])
        return place

    def begin(self, whole: Whole) -> None:
        """Put in the launch of a program, whose operands lie as this application's do."""
        self.steps += [*whole.before, whole.step]
        self._local += whole.local

    def add(self, part: Application, places: Sequence[int]) -> None:
        """Put in an application whose operands lie at ``places``; its own memory comes behind all others."""
        at = [*places, *(self.take(spec) for spec in part.scratch)]
        at += [-1 - len(self._local) - n for n in range(len(part.local))]
        self._local += part.local
        self._orders += part.orders
        self._wishes += part.wishes
        steps: Sequence[Any] = part.steps
        self.steps += [step.on([at[n] for n in step.operands]) for step in steps]

    def application(self) -> Application:
        end = self._first + len(self._scratch)
        steps = [step.on([n if n >= 0 else end - 1 - n for n in step.operands]) for step in self.steps]
        orders, wishes = tuple(self._orders), tuple(self._wishes)
        return Application(tuple(steps), tuple(self._scratch), tuple(self._local), orders=orders, wishes=wishes)


def apart(parts: Assembly, program: FusedProgram, pieces: Sequence[Sequence[int]], device: str) -> Application:
    """The program's members in pieces, one after another, each a program of its own where it has several."""
    taken_by = [{n for at in piece for n in program.taken(at)}.difference(piece) for piece in pieces]
    places = _ValuePlaces(parts, program, taken_by)
    for number, (piece, taken) in enumerate(zip(pieces, taken_by, strict=True)):
        later = set(program.results).union(*taken_by[number + 1 :])
        made = [n for n in piece if n in later] or [piece[-1]]
        part, given = _piece(program, piece, sorted(taken), made, device)
        parts.add(part, [*(places.of[n] for n in given), *(places.begin(n) for n in made)])
        places.end(number)
    for value, target in places.copies:
        part = apply_kernel(COPY_OP, [program.specs[value]], [program.specs[value]], {}, device)
        parts.add(part, [places.of[value], target])
    return parts.application()


def _piece(
    program: FusedProgram, piece: Sequence[int], taken: Sequence[int], made: Sequence[int], device: str
) -> tuple[Application, Sequence[int]]:
    """The application of some members, which answers the values ``made``, and the values that it takes in order."""
    specs, members = program.specs, [program.members[n - program.first] for n in piece]
    op, operands, dtype, attrs = members[0]
    outputs = [specs[n] for n in made]
    if len(piece) > 1:
        number = {n: at for at, n in enumerate((*taken, *piece))}
        renumbered = tuple((op, tuple(number[n] for n in given), dtype, attrs) for op, given, dtype, attrs in members)
        own = {"members": renumbered, "results": tuple(number[n] for n in made)}
        return apply_kernel("fused", [specs[n] for n in taken], outputs, own, device), taken
    if is_alias(op):
        return apply_kernel(COPY_OP, [Spec(dtype, outputs[0].concrete)], outputs, {}, device), operands[:1]
    return apply_kernel(op, [specs[n] for n in operands], outputs, dict(attrs), device), operands


class _ValuePlaces:
    """The operand that holds each value: inputs, results, then scratch, which is taken again when its value is dead."""

    def __init__(self, parts: Assembly, program: FusedProgram, taken_by: Sequence[Iterable[int]]) -> None:
        self._parts, self._specs, inputs = parts, program.specs, parts.inputs
        self._first = inputs + len(program.results)
        self._last: dict[int, int] = {n: at for at, taken in enumerate(taken_by) for n in taken}
        self.of = {n: n for n in range(inputs)}
        self.copies: list[tuple[int, int]] = []  # what is answered twice, or as it came in
        self._results: dict[int, int] = {}
        for target, value in enumerate(program.results, inputs):
            if value < inputs or value in self._results:
                self.copies.append((value, target))
            else:
                self._results[value] = target
        self._free: dict[Spec, list[int]] = {}

    def begin(self, value: int) -> int:
        """Where a value is to be computed."""
        spec = self._specs[value]
        if value in self._results:
            self.of[value] = self._results[value]
        elif self._free.get(spec):
            self.of[value] = self._free[spec].pop()
        else:
            self.of[value] = self._parts.take(spec)
        return self.of[value]

    def end(self, number: int) -> None:
        """Give back the scratch of what piece ``number`` was the last to take."""
        for value, last in self._last.items():
            if last == number and self.of[value] >= self._first:
                self._free.setdefault(self._specs[value], []).append(self.of[value])
