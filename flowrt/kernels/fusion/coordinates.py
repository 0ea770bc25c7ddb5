"""Fused programs over rows of a few entries, as points' coordinates are: each entry becomes a value of its own.

Law: pure; from concrete shapes it decides whether a program is such a one, and writes it anew. A loop over three
entries takes most of its time to begin and to end. Where such rows are reduced, to squared distances, say, the
reduction becomes an expression of three values, and loops go along the axis before, which vectors fill. What the
program reads is put apart by coordinates first, before it is repeated; results that have them are put together behind.
For 512 points and what all their differences come to that took 3.2 ms, and takes 0.2 (Xeon, two threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.spec import NAMES, Spec, normal_axes
from flowrt.base.traits import RowForm, RowSpace, reduces_rows, reduction_of
from flowrt.base.valueclass import valueclass
from flowrt.kernels.fusion.program import FusedProgram, Member, is_reduction, specs_of
from flowrt.kernels.fusion.rowwise import Key, SpaceReading, reductions_read_again, row_space, rows_under
from flowrt.kernels.language.table import View
from flowrt.kernels.launch import Application, apply_kernel, copy_step

if TYPE_CHECKING:
    from flowrt.kernels.fusion.pieces import Assembly

MOST = 4  # entries of a row; code grows with them
MOST_MEMBERS = 64
FEW = 1 << 10  # rows that any loop passes in no time
COPIED = 1 << 24  # bytes put apart and together; more than that goes to memory and back, which takes longer than is won

Numbers: TypeAlias = "tuple[int, ...]"
"""The numbers of a value's coordinates; a single one where it is the same for all."""


@valueclass
class OperandPlace:
    """An operand of the program as it was, by number, and where in it a value of the program of coordinates lies."""

    operand: int
    view: View

    @property
    def apart(self) -> bool:
        """Whether the value does not lie there by itself, from the beginning and in order."""
        return not self.view.contiguous or self.view.offset > 0


@valueclass
class Coordinates:
    """A program of coordinates: what it reads (places and numbers), what it computes, where its results belong."""

    read: tuple[tuple[OperandPlace | float, ...], tuple[Spec, ...]]
    members: tuple[Member, ...]
    results: tuple[int, ...]
    written: tuple[tuple[OperandPlace, ...], tuple[Spec, ...]]

    @property
    def copied(self) -> int:
        """The bytes that are put apart and together."""
        both = (*zip(*self.read, strict=True), *zip(*self.written, strict=True))
        return sum(spec.nbytes for place, spec in both if isinstance(place, OperandPlace) and place.apart)


def by_coordinates(program: FusedProgram) -> Coordinates | None:
    """The program with every entry of a row as a value; None where its rows are not of a few entries."""
    space = row_space(program) or _reduced_space(program)
    if space is None or not 1 < space.length <= MOST or space.rows < FEW:
        return None
    reading = SpaceReading(space, program)
    if not reading.read() or any(n not in reading.kinds for n in program.results):
        return None
    return _Writing(reading).program()


def _reduced_space(program: FusedProgram) -> RowSpace | None:
    """The space of the rows that results are reductions of; None where that is not one."""
    spaces = {rows_under(program, n) for n in program.made if reduces_rows(program.op(n))} - {None}
    return spaces.pop() if len(spaces) == 1 and not reductions_read_again(program) else None


def apply_coordinates(parts: Assembly, thin: Coordinates, device: str) -> Application:
    """The application of a program of coordinates, between copies that put apart what it reads, and together again."""
    given = [_given(parts, place, spec, device) for place, spec in zip(*thin.read, strict=True)]
    made = [parts.take(spec) if place.apart else place.operand for place, spec in zip(*thin.written, strict=True)]
    _, inputs = thin.read
    _, outputs = thin.written
    program = {"members": thin.members, "results": thin.results}
    parts.add(apply_kernel("fused", inputs, outputs, program, device), [*given, *made])
    for at, place, spec in zip(made, *thin.written, strict=True):
        if place.apart:
            dense = View.dense(spec.concrete)
            parts.steps.append(copy_step(at, place.operand, spec.dtype, dense, place.view, device))
    return parts.application()


def _given(parts: Assembly, place: OperandPlace | float, spec: Spec, device: str) -> int:
    """The operand that is what a program of coordinates reads."""
    if not isinstance(place, OperandPlace):
        return parts.fill(spec, place)
    if not place.apart:
        return place.operand
    at, dense = parts.take(spec), View.dense(spec.concrete)
    parts.steps.append(copy_step(place.operand, at, spec.dtype, place.view, dense, device))
    return at


@dataclass(slots=True, eq=False)
class _Writing:
    """A program of coordinates in the making."""

    reading: SpaceReading
    inputs: list[Spec] = field(default_factory=list)
    sources: list[OperandPlace | float] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    numbers: dict[Key, Numbers] = field(default_factory=dict)
    divisors: dict[str, int] = field(default_factory=dict)  # of means, by dtype

    def program(self) -> Coordinates | None:
        reading, program = self.reading, self.reading.program
        for key, view in reading.sources.items():
            self._take(key, view)
        reductions = ((reduction_of(op), dtype) for op, _, dtype, _ in program.members)
        for dtype in dict.fromkeys(
            dtype for reduction, dtype in reductions if reduction is not None and reduction.mean
        ):
            self.divisors[dtype] = len(self.inputs)
            self.sources.append(float(reading.space.length))
            self.inputs.append(Spec(dtype, ()))
        if not all(self._make(n, op, keys, dtype) for n, op, keys, dtype in reading.made):
            return None
        answers = [self._answer(at, n) for at, n in enumerate(program.results, program.first)]
        found = specs_of(self.inputs, self.members)
        entries = zip(found[len(self.inputs) :], self.members, strict=True)
        if any(spec.concrete != reading.space.bare for spec, (op, *_) in entries if not is_reduction(op)):
            return None
        if None in answers or len(self.members) > MOST_MEMBERS:
            return None
        made = [one for answer in answers if answer is not None for one in answer]
        written = (tuple(place for _, place in made), tuple(found[n] for n, _ in made))
        read = (tuple(self.sources), tuple(self.inputs))
        thin = Coordinates(read, tuple(self.members), tuple(n for n, _ in made), written)
        return thin if thin.copied <= COPIED else None

    def _take(self, key: Key, rows: View) -> None:
        """Read a source of rows by coordinates, as small as it is before it is repeated."""
        program, (value, _) = self.reading.program, key
        operand = value if value < program.first else program.taken(value)[0]
        *strides, step = rows.strides
        shape = tuple(n if stride else 1 for n, stride in zip(rows.shape[:-1], strides, strict=True))
        begin = len(self.inputs)
        for at in range(rows.shape[-1] if step else 1):
            self.sources.append(OperandPlace(operand, View(shape, tuple(strides), rows.offset + at * step)))
            self.inputs.append(Spec(program.specs[value].dtype, shape))
        self.numbers[key] = tuple(range(begin, len(self.inputs)))

    def _make(self, n: int, op: str, keys: Sequence[Key], dtype: str) -> bool:
        """Compute a member of the program, coordinate by coordinate; answers whether it can be."""
        taken = [self.numbers[key] for key in keys]
        if is_reduction(op):
            self.numbers[n, False] = (self._reduced(op, taken[0], dtype),)
            return reduces_rows(op) and dtype == self._dtype(keys[0])
        attrs = tuple(self.reading.program.attrs(n).items())
        each = zip(*(self._each(numbers) for numbers in taken), strict=True)
        shared = all(len(numbers) == 1 for numbers in taken)
        made = [self._put(op, operands, dtype, attrs) for operands in (list(each)[:1] if shared else each)]
        self.numbers[n, False] = tuple(made)
        return True

    def _each(self, numbers: Numbers) -> Numbers:
        """A value's numbers, one for each coordinate."""
        return numbers * self.reading.space.length if len(numbers) == 1 else numbers

    def _reduced(self, op: str, numbers: Numbers, dtype: str) -> int:
        """The number of what a value's coordinates come to."""
        total, *rest = self._each(numbers)
        reduction = reduction_of(op)
        assert reduction is not None
        for number in rest:
            total = self._put(reduction.by, (total, number), dtype, ())
        return self._put("divide", (total, self.divisors[dtype]), dtype, ()) if reduction.mean else total

    def _put(self, op: str, operands: Sequence[int], dtype: str, attrs: Any) -> int:
        self.members.append((op, tuple(operands), dtype, attrs))
        return len(self.inputs) + len(self.members) - 1

    def _answer(self, operand: int, n: int) -> list[tuple[int, OperandPlace]] | None:
        """The numbers of a result, and where in the operand they belong; None where that is not known."""
        reading, space = self.reading, self.reading.space
        if reading.kinds[n] is RowForm.TOTAL:
            return self._total(operand, n)
        numbers, dense = self.numbers[reading.key(n)], View.dense(space.bare)
        if reading.kinds[n] is not RowForm.ENTRY:
            return [(numbers[0], OperandPlace(operand, dense))]
        return [
            (number, OperandPlace(operand, _every(dense, space.length, at)))
            for at, number in enumerate(self._each(numbers))
        ]

    def _total(self, operand: int, n: int) -> list[tuple[int, OperandPlace]] | None:
        """What is reduced over other axes than the row's, or over more."""
        space, program, key = self.reading.space, self.reading.program, self.reading.taken_by(n)
        op, spec = program.op(n), program.specs[n]
        over = normal_axes(program.attrs(n)["axis"], len(space.dims))
        outside = tuple(axis for axis in over if axis < len(space.bare))
        along = len(over) - len(outside)
        if along not in (0, space.along):
            return None
        numbers = self.numbers[key]
        if along:
            if not reduces_rows(op) or self._dtype(key) != NAMES[spec.dtype]:
                return None
            numbers = (self._reduced(op, numbers, NAMES[spec.dtype]),)
        attrs = (("axis", outside), ("keepdims", False))
        reductions = [self._put(op, (number,), NAMES[spec.dtype], attrs) for number in numbers]
        left = View.dense([size for axis, size in enumerate(space.bare) if axis not in outside])
        if along:
            return [(reductions[0], OperandPlace(operand, left))]
        every = enumerate(self._each(tuple(reductions)))
        return [(number, OperandPlace(operand, _every(left, space.length, at))) for at, number in every]

    def _dtype(self, key: Key) -> str:
        return NAMES[self.reading.program.specs[key[0]].dtype]


def _every(view: View, length: int, at: int) -> View:
    """What a dense view shows, as entry ``at`` of rows of that length."""
    return View(view.shape, tuple(stride * length for stride in view.strides), at)
