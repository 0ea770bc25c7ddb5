"""Fused programs that read again what they reduced: each row of a tensor computed as a whole, in one launch.

Law: pure; from concrete shapes it decides whether a program is one of rows, and what its launch sees. Rows lie along
the last axes, those that every reduction read again is over. A value is an entry for each element or one for each row;
other reductions end the program, as `fused` has it.

A row is one thread's, so few rows of many elements are left to launches between the reductions, which threads can
share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.spec import NAMES, Spec
from flowrt.base.traits import Arranged, RowForm, RowSpace, last_axes, traits_of
from flowrt.kernels.fusion.program import (
    FusedProgram,
    Plain,
    Whole,
    fused_kernel,
    is_view,
    plain_members,
    source_view,
)
from flowrt.kernels.fusion.row_plan import narrow_totals, plan_rows
from flowrt.kernels.fusion.short_rows import are_too_short
from flowrt.kernels.fusion.stretches import stretches
from flowrt.kernels.language.table import NARROW, Call, RegisteredKernel, View
from flowrt.kernels.launch import LaunchStep
from flowrt.kernels.tiles.copies import merged

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

ENOUGH_ROWS, FEW_ELEMENTS = 4, 1 << 16
"""Rows that keep most machines' threads busy, and elements that are one thread's in no more time than sharing costs."""


NARROW_TOTALS = 1 << 15
"""Totals of columns that are added up in memory of a thread's own first, which must stay in a near cache."""


Key: TypeAlias = "tuple[int, bool]"
"""A value as members take it: its number, and whether as a source that is to be one for each row, `RowForm.BARE`."""


def suits(space: RowSpace) -> bool:
    """Whether the rows are not too few for several threads."""
    return space.rows >= ENOUGH_ROWS or space.rows * space.length <= FEW_ELEMENTS


def in_rows(space: RowSpace, view: View) -> View | None:
    """A view of the space's shape as one of (…, row); None where its entries along a row do not lie evenly."""
    cut = len(space.bare)
    dims = merged([View(space.dims[cut:], view.strides[cut:])])
    if len(dims) > 1 or (dims and dims[0][1][0] not in (0, 1)):
        return None
    stride = dims[0][1][0] if dims else 0
    return View((*space.bare, space.length), (*view.strides[:cut], stride), view.offset)


def each_row(space: RowSpace, view: View) -> View:
    """A view of the bare shape as one of (…, row)."""
    return View((*space.bare, space.length), (*view.strides, 0), view.offset)


def reductions_read_again(program: FusedProgram) -> list[int]:
    """The reductions, by number, whose results other members take."""
    taken = {n for at in program.made for n in program.taken(at)}
    return [n for n in program.made if program.reduces(n) and n in taken]


def rows_under(program: FusedProgram, n: int) -> RowSpace | None:
    """The space of the rows that a reduction is over; None where these are not its last axes."""
    shape = program.specs[program.taken(n)[0]].concrete
    axes = last_axes(program.op(n), len(shape), program.attrs(n)["axis"])
    return RowSpace(shape, axes) if axes else None


def row_space(program: FusedProgram) -> RowSpace | None:
    """The space of the rows that the reductions read again are over; None where that is not one."""
    spaces = {rows_under(program, n) for n in reductions_read_again(program)}
    return spaces.pop() if len(spaces) == 1 else None


# ── what a program's values are ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class SpaceReading:
    """What the members of a program are in one space, and what they take from outside."""

    space: RowSpace
    program: FusedProgram
    kinds: dict[int, RowForm] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)  # a value under another shape → the value
    sources: dict[Key, View] = field(default_factory=dict)
    made: list[tuple[int, str, tuple[Key, ...], str]] = field(default_factory=list)  # (value, op, operands, dtype)

    def read(self) -> bool:
        """Find out what every member is; answers whether all belong to this space."""
        return all(map(self._take, self.program.made))

    def _take(self, n: int) -> bool:
        op, before = self.program.op(n), self.kinds.get(self.program.taken(n)[0])
        if is_view(op) and before is None:
            return True  # a source, where it is taken
        if self.program.reduces(n):
            return self._reduction(n)
        if traits_of(op).view in (Arranged.REPEATED, Arranged.RESHAPED):
            return self._alias(n, before)
        kind = self.space.form_of(self.program.specs[n].concrete)
        return kind is not None and self._make(n, kind)

    def _reduction(self, n: int) -> bool:
        (source, *_), attrs = self.program.taken(n), self.program.attrs(n)
        if self.program.specs[source].concrete != self.space.dims:
            return False
        axes = last_axes(self.program.op(n), len(self.space.dims), attrs["axis"])
        form = self.space.form_reduced(axes, attrs["keepdims"])
        total = form is RowForm.TOTAL
        made = self._key(source, RowForm.ENTRY) is not None if total else self._make(n, RowForm.ENTRY)
        self.kinds[n] = form
        return made

    def _alias(self, n: int, before: RowForm | None) -> bool:
        """One for each row, under another shape or repeated along the row."""
        form, (source, *_) = self.space.form_of(self.program.specs[n].concrete), self.program.taken(n)
        if form is None or not self.space.links(self.program.op(n), self.program.attrs(n), form, before):
            return False
        self.kinds[n], self.same[n] = form, self.same.get(source, source)
        return True

    def _make(self, n: int, kind: RowForm) -> bool:
        taken = [self._key(i, kind) for i in self.program.taken(n)]
        if None in taken:
            return False
        self.kinds[n] = kind
        dtype = NAMES[self.program.specs[n].dtype]
        self.made.append((n, self.program.op(n), tuple(key for key in taken if key is not None), dtype))
        return True

    def _key(self, i: int, by: RowForm) -> Key | None:
        """Value ``i`` as a member of kind ``by`` takes it."""
        if i in self.kinds:
            fits = self.kinds[i] is by or (by is RowForm.ENTRY and self.kinds[i] is RowForm.KEPT)
            return (self.same.get(i, i), False) if fits else None
        view = source_view(self.program, i)
        key = (i, by is RowForm.BARE)
        if by is RowForm.BARE:
            seen = each_row(self.space, view.broadcast_to(self.space.bare))
        else:
            rows = in_rows(self.space, view.broadcast_to(self.space.dims))
            if rows is None:
                return None
            seen = rows
        self.sources[key] = seen
        return key

    def key(self, n: int) -> Key:
        """A value as a result, or as what is reduced into a total."""
        return (self.same.get(n, n), False)

    def taken_by(self, n: int) -> Key:
        """What the reduction ``n`` reduces."""
        return self.key(self.program.taken(n)[0])

    def plain(self) -> tuple[Plain, dict[Key, int]]:
        """The members as an expression has them, and the number that each value has in it."""
        return plain_members([((n, False), op, keys, dtype) for n, op, keys, dtype in self.made], self.sources)


# ── the launch ───────────────────────────────────────────────────────────────────────────────────────────────────────


def whole_rows(program: FusedProgram, device: str) -> Whole | None:
    """The program in one launch over its rows; None where it is none of rows, or they do not suit."""
    space, first, specs, results = row_space(program), program.first, program.specs, program.results
    if space is None or not space.length or not suits(space):
        return None
    if are_too_short(space.length, program.ops):
        return None
    reading = SpaceReading(space, program)
    if not reading.read() or any(n not in reading.kinds for n in results):
        return None
    ends = tuple((at, n) for at, n in enumerate(results, first) if reading.kinds[n] is RowForm.TOTAL)
    dense = [(at, n) for at, n in enumerate(results, first) if reading.kinds[n] is not RowForm.TOTAL]
    left = [program.kept(n, space.dims) for _, n in ends]
    totals = [in_rows(space, View.dense(shape).broadcast_to(space.dims)) for shape in left]
    if None in totals or len({n for _, n in ends}) < len(ends):
        return None
    made_kernel = _kernel(reading, [n for _, n in dense], [n for _, n in ends], device)
    made = made_kernel.expression
    assert made is not None
    if any(member.function in NARROW for member in made.members):
        return None  # loops over rows know no narrow functions
    views = [*reading.sources.values(), *(_result_view(space, reading.kinds[n]) for _, n in dense)]
    views += [view for view in totals if view is not None]
    pattern = [view.strides[-1] for view in views]
    kept = _kept(made_kernel, tuple(pattern))
    row = View.dense((space.length,)).broadcast_to((*space.bare, space.length))
    narrow = narrow_totals(made, pattern)
    in_turns = all(_take_turns(space, left[at]) for at in narrow)
    if not in_turns or sum(math.prod(left[at]) for at in narrow) > NARROW_TOTALS:
        narrow = ()
    local = tuple(Spec(made.dtypes[n], (space.length,)) for n in kept)
    local += tuple(Spec("float32", (math.prod(left[at]),)) for at in narrow)
    views += [*[row] * len(kept), *(views[len(views) - len(ends) + at] for at in narrow)]
    units, words = stretches(space.dims, left, space.length) if ends else (space.rows, (1, space.rows))
    operands = (
        *(i if i < first else program.taken(i)[0] for i, _ in reading.sources),
        *(at for at, _ in dense),
        *range(first + len(results), first + len(results) + len(ends)),
        *range(-1, -1 - len(local), -1),
    )
    dtypes = (*made.inputs, *(specs[n].dtype for _, n in dense), *made.held, *(spec.dtype for spec in local))
    call = Call(tuple(views), words, units)
    return Whole(LaunchStep(made_kernel, operands, dtypes, call, len(reading.sources)), ends, local)


def _take_turns(space: RowSpace, kept: tuple[int, ...]) -> bool:
    """Whether rows one after another go to each of the totals in turn, so that none of these takes more than others."""
    return any(kept == (1,) * first + space.dims[first:] for first in range(len(kept)))


def _kernel(reading: SpaceReading, results: Sequence[int], ends: Sequence[int], device: str) -> RegisteredKernel:
    plain, number = reading.plain()
    reductions = tuple((number[reading.taken_by(n)], reading.program.op(n)) for n in ends)
    dtypes = tuple(NAMES[reading.program.specs[i].dtype] for i, _ in reading.sources)
    return fused_kernel(dtypes, plain, tuple(number[reading.key(n)] for n in results), device, reductions)


@lru_cache(1024)
def _kept(kernel: RegisteredKernel, pattern: tuple[int, ...]) -> tuple[int, ...]:
    assert kernel.expression is not None
    return kept_entries(kernel.expression, pattern)


def kept_entries(expression: Expression, pattern: Sequence[int]) -> tuple[int, ...]:
    """The values that an expression of rows keeps, where its operands' strides along a row are ``pattern``."""
    repeats = [not stride for stride in pattern]
    sources = len(expression.inputs)
    return plan_rows(expression, repeats[:sources], repeats[sources : sources + len(expression.results)]).kept


def _result_view(space: RowSpace, kind: RowForm) -> View:
    view = View.dense((*space.bare, space.length))
    return view if kind is RowForm.ENTRY else each_row(space, View.dense(space.bare))


# ── where it is none ─────────────────────────────────────────────────────────────────────────────────────────────────


def in_stages(program: FusedProgram) -> list[list[int]]:
    """The members, by number, in pieces to be computed one after another: what is made of one shape between reductions.

    Views are in every piece that takes them, unless they are results. Whatever else has another shape is a piece
    ahead of those of its stage.
    """
    stage = [0] * program.first  # of each value, that of the first pieces that may take it
    pieces: dict[tuple[int, bool, int], list[int]] = {}
    largest = max((program.specs[n].concrete for n in program.made), key=math.prod)
    entries: set[int] = set()
    views = program.views.difference(program.results)
    for n in program.made:
        op, operands, reduces = program.op(n), program.taken(n), program.reduces(n)
        alone = program.specs[operands[0] if reduces else n].concrete != largest or traits_of(op).view is not None
        before = max((stage[i] + (alone and i in entries) for i in operands), default=0)
        stage.append(before + reduces)
        if not alone and not reduces:
            entries.add(n)
        if n not in views:
            pieces.setdefault((before, not alone, n if alone else 0), []).append(n)
    return [program.with_views(pieces[key], views) for key in sorted(pieces)]
