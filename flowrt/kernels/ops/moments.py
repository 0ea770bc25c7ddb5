"""Mean and variance in one pass, in the form of `reduce`: kept, reduced, kept, reduced and last axis.

Entries are taken in short stretches. A stretch is added up in the entries' own type, less what the mean was so far, and
so are its squares: that loses nothing that matters, however far the mean is from zero. What stretches come to is held
in float64, as a sum and the squares about the mean, and put together after Chan, Golub and LeVeque. Work is cut into
parts whose number follows from the sizes alone, as in `partials`; a second step puts them together. The sums that
gradients need are added up likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.reductions import add_loosely
from flowrt.kernels.language.table import Attrs, Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.partials import FormOf, Reduced, count_parts
from flowrt.kernels.ops.reduce import form_of, form_over
from flowrt.kernels.teams.reductions import LaidOnCuda, entry_on_cuda, first_entry, strand_by
from flowrt.kernels.teams.standing import add_team, added, divided, stand

ROWS = 64  # in a stretch of columns
ALONG = 1024  # entries in a stretch of a row
COLUMNS = 256  # at a time: what is held of them stays in a core's nearest cache
WIDE = 128  # columns, from which rows are long enough to be added up one by one
ROUNDED = 1e-15  # of a mean: what two are apart where only float64's rounding tells them apart
FOUND = 2  # the sum, and the squares about the mean


@dataclass(frozen=True, slots=True)
class Cut:
    """How the entries of a ``form``, seen in ``sizes``, are cut into units of work; the last axis is reduced or kept.

    Where columns are few, so many rows are taken ``together`` as one; they are told apart again at the end.
    """

    form: Reduced
    sizes: tuple[int, ...]
    last: bool
    together: int

    @property
    def groups(self) -> int:
        return self.sizes[0] * self.sizes[2]

    @property
    def wide(self) -> int:
        return 1 if self.last else self.sizes[4]

    @property
    def parts(self) -> int:
        return count_parts(self.sizes, self.last)

    @property
    def units(self) -> int:
        """Blocks of columns of each part of a group."""
        return self.groups * self.parts * max(-(-self.wide // COLUMNS), 1)

    def call(self, given: int, columns: int, units: int) -> Call:
        """For so many operands of all entries, then so many of one for each result, and what is held of both."""
        entries, results = self.form.seen(self.sizes), View.dense((self.groups, self.wide // self.together))
        found = View.dense((self.groups, self.parts, FOUND, self.wide)), View.dense((3, min(self.wide, COLUMNS)))
        views = (*[entries] * given, *[results] * columns, *found)
        return Call(views, (int(self.last),), units, copied=(self.sizes,) * given)


def _cut(form: Reduced) -> Cut:
    (outer, a, middle, b, tail), last = form.sizes, form.last
    together = 1
    while not last and a == 1 and b > 0 and b % 2 == 0 and 0 < tail < WIDE:
        b, tail, together = b // 2, tail * 2, together * 2
    return Cut(form, (outer, a, middle, b, tail), last, together)


class Laid:
    """How a kernel of so many operands with all entries, and so many with the results' shape, is laid out."""

    def __init__(self, given: int, columns: int, form: FormOf) -> None:
        self._given, self._columns, self._form = given, columns, form

    def first(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        """Of the first step, in which parts are units of work."""
        cut = _cut(self._form(inputs, attrs))
        return cut.call(self._given, self._columns, cut.units)

    def second(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        """Of the second step, in which results are."""
        return _cut(self._form(inputs, attrs)).call(self._given, self._columns, outputs[0].size)

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """What was found of every part."""
        return [Spec("float64", self.first(inputs, outputs, attrs).views[-2].shape)]

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        """For each column of a block two sums of a stretch, and what is taken off."""
        return [Spec(outputs[0].dtype, self.first(inputs, outputs, attrs).views[-1].shape)]

    def enter(self, op: str, measure: Callable[..., None], join: Callable[..., None]) -> None:
        """Have the op's kernel ``measure`` parts and ``join`` them."""
        then = ((join, self.second),)
        kernel(op, layout=self.first, scratch=self.scratch, local=self.local, then=then)(measure)


@jitable
def about(middle: float, kind: Any) -> Any:
    """A mean as an entry of the array ``kind``; 0 where it is not finite."""
    near = kind.dtype.type(middle)
    return near if abs(near) < np.inf else kind.dtype.type(0)


@jitable
def join(found: Any, at: int, held: int, total: float, squares: float, count: int) -> None:
    """Put what ``count`` more entries come to together with what was found of ``held`` others of column ``at``."""
    share, weight = 1.0 / max(held, 1), held * (1.0 / (held + count)) * count
    middle = found[0, np.uint64(at)] * share
    apart = total * (1.0 / count) - middle
    apart = 0.0 if held == 0 or abs(apart) <= ROUNDED * abs(middle) else apart
    found[0, np.uint64(at)] += total
    found[1, np.uint64(at)] += squares + apart * apart * weight


@jitable
def measure_row(row: Any, start: int, stop: int, held: int, found: Any, kind: Any) -> int:
    """Add up a row's entries from ``start`` to ``stop``; the answer is how many there are now."""
    for low in range(start, stop, ALONG):
        high = min(low + ALONG, stop)
        shift = about(found[0, 0] / held if held > 0 else np.float64(row[low]), kind)
        total, squares = kind.dtype.type(0), kind.dtype.type(0)
        for t in range(low, high):
            apart = kind.dtype.type(row[np.uint64(t)]) - shift
            total = add_loosely(total, apart)
            squares = add_loosely(squares, apart * apart)
        count, wide = high - low, np.float64(total)
        join(found, 0, held, wide + count * np.float64(shift), squares - wide * wide / count, count)
        held += count
    return held


@jitable
def add_row(row: Any, start: int, width: int, room: Any) -> None:
    """Add some columns of a row to the sums in ``room``, less what is taken off, and their squares."""
    totals, squares, shift = room[0], room[1], room[2]
    for i in range(width):
        apart = totals.dtype.type(row[np.uint64(start + i)]) - shift[i]
        totals[i] += apart
        squares[i] += apart * apart


@jitable
def measure_columns(rows: Any, start: int, width: int, held: int, found: Any, room: Any) -> None:
    """Add up some columns of a stretch of rows, to what was found of ``held`` rows."""
    first, count, share = rows[0], rows.shape[0], 1.0 / max(held, 1)
    for i in range(width):
        at = np.uint64(start + i)
        room[0, i] = room[1, i] = 0
        room[2, i] = about(found[0, at] * share if held > 0 else np.float64(first[at]), room)
    for r in range(count):
        add_row(rows[r], start, width, room)
    each = 1.0 / count
    for i in range(width):
        total, shift = np.float64(room[0, i]), np.float64(room[2, i])
        join(found, start + i, held, total + count * shift, np.float64(room[1, i]) - total * total * each, count)


def measure_parts(x: Any, mean: Any, variance: Any, parts: Any, room: Any, last: int, begin: int, end: int) -> None:
    """The first step: what each part comes to."""
    _, a, middle, b, tail = x.shape
    count, width = parts.shape[1], room.shape[1]
    blocks = max((parts.shape[3] + width - 1) // width, 1)
    for unit in range(begin, end):
        group, part, start = unit // blocks // count, unit // blocks % count, unit % blocks * width
        o, m, found, held = group // middle, group % middle, parts[group, part], 0
        for i in range(start, min(start + width, parts.shape[3])):
            found[0, i] = found[1, i] = 0
        for k in range(a):
            if last != 0:
                held = measure_row(x[o, k, m, 0], tail * part // count, tail * (part + 1) // count, held, found, room)
                continue
            rows, stop = x[o, k, m], b * (part + 1) // count
            for low in range(b * part // count, stop, ROWS):
                high = min(low + ROWS, stop)
                measure_columns(rows[low:high], start, min(tail - start, width), held, found, room)
                held += high - low


def join_parts(x: Any, mean: Any, variance: Any, parts: Any, room: Any, last: int, begin: int, end: int) -> None:
    """The second step: each result of its parts, and of the rows that were taken as one, in the first part's place."""
    rows, columns = (x.shape[4] if last != 0 else x.shape[3]), mean.shape[1]
    count, together = parts.shape[1], parts.shape[3] // max(columns, 1)
    at = begin
    while at < end:
        group, start = at // columns, at % columns
        width, found, held = min(columns - start, end - at), parts[group, 0], 0
        for number in range(count * together):
            part, shift = parts[group, number // together], number % together * columns
            many = x.shape[1] * (rows * (number // together + 1) // count - rows * (number // together) // count)
            for i in range(start, start + width if number > 0 else start):
                join(found, i, held, part[0, np.uint64(shift + i)], part[1, np.uint64(shift + i)], many)
            held += many
        for i in range(start, start + width):
            squares = found[1, np.uint64(i)]
            mean[group, np.uint64(i)] = found[0, np.uint64(i)] / held
            variance[group, np.uint64(i)] = (0.0 if squares < 0 else squares) / held
        at += width


Laid(1, 2, form_of).enter("moments", measure_parts, join_parts)


@jitable
def size_of_part(count: int, part: int, parts: int) -> Any:
    """How many of ``count`` entries are in a part."""
    return divided(count * (part + 1), parts)[0] - divided(count * part, parts)[0]


sum_strand = strand_by(added, 0)


def measure_on_cuda(x: Any, mean: Any, variance: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
    """Find the mean of a part, then the squares about it."""
    held = cuda.shared.array(THREADS, np.float64)
    parts, count = found.shape[1], sizes[0] * sizes[2]
    (team, rank, teams), lines = stand(width, apart), found.shape[1] * mean.size
    line = cuda.blockIdx.x * teams
    while line < lines:
        own = min(line + team, lines - 1)
        part, result = divided(own, mean.size)
        begin, size = first_entry(result, sizes), size_of_part(count, part, parts)
        start, end = divided(count * part, parts)[0] + rank, divided(count * (part + 1), parts)[0]
        about = add_team(held, sum_strand(x, found, begin, start, end, width, sizes), rank, width, apart) / size
        squares = 0.0
        at = start
        while at < end:
            away = entry_on_cuda(x, begin, at, sizes) - about
            squares += away * away
            at += width
        squares = add_team(held, squares, rank, width, apart)
        if rank == 0 and line + team < lines:
            if parts > 1:
                found[0, part, result], found[1, part, result] = about, squares
            else:
                mean[result], variance[result] = about, squares / size
        line += cuda.gridDim.x * teams


def join_on_cuda(x: Any, mean: Any, variance: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
    """The mean of the parts' means; then the squares about these, and these about that (Chan, Golub and LeVeque)."""
    held = cuda.shared.array(THREADS, np.float64)
    parts, count = found.shape[1], sizes[0] * sizes[2]
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < mean.size:
        result, total, squares = min(line + team, mean.size - 1), 0.0, 0.0
        part = rank
        while part < parts:
            total += size_of_part(count, part, parts) * found[0, part, result]
            part += width
        about = add_team(held, total, rank, width, apart) / count
        part = rank
        while part < parts:
            away = found[0, part, result] - about
            squares += found[1, part, result] + size_of_part(count, part, parts) * away * away
            part += width
        squares = add_team(held, squares, rank, width, apart)
        if rank == 0 and line + team < mean.size:
            mean[result], variance[result] = about, squares / count
        line += cuda.gridDim.x * teams


LaidOnCuda(lambda inputs, outputs, attrs: form_of(inputs, attrs), lambda dtype: "float64", columns=2, kinds=2).enter(
    "moments", measure_on_cuda, join_on_cuda
)


@jitable
def sum_row(x: Any, weights: Any, start: int, stop: int, middle: Any, found: Any, kind: Any) -> None:
    """Add up what a row has from ``start`` to ``stop``."""
    for low in range(start, stop, ALONG):
        total, product = kind.dtype.type(0), kind.dtype.type(0)
        for t in range(low, min(low + ALONG, stop)):
            at = np.uint64(t)
            total = add_loosely(total, weights[at])
            product = add_loosely(product, weights[at] * (x[at] - middle))
        found[0, 0] += total
        found[1, 0] += product


@jitable
def sum_columns(rows: Any, weights: Any, start: int, width: int, found: Any, room: Any) -> None:
    """Add up some columns of a stretch of rows."""
    totals, products, middle = room[0], room[1], room[2]
    for i in range(width):
        totals[i] = products[i] = 0
    for r in range(rows.shape[0]):
        row, weight = rows[r], weights[r]
        for i in range(width):
            at = np.uint64(start + i)
            totals[i] += weight[at]
            products[i] += weight[at] * (row[at] - middle[i])
    for i in range(width):
        found[0, np.uint64(start + i)] += totals[i]
        found[1, np.uint64(start + i)] += products[i]


def sum_parts(
    x: Any, weights: Any, mean: Any, total: Any, product: Any, parts: Any, room: Any, last: int, begin: int, end: int
) -> None:
    """The first step: what each part comes to."""
    _, a, middle, b, tail = x.shape
    count, width = parts.shape[1], room.shape[1]
    blocks = max((parts.shape[3] + width - 1) // width, 1)
    for unit in range(begin, end):
        group, part, start = unit // blocks // count, unit // blocks % count, unit % blocks * width
        o, m, found, near = group // middle, group % middle, parts[group, part], mean[group]
        columns = min(parts.shape[3] - start, width)
        for i in range(columns):
            found[0, start + i] = found[1, start + i] = 0
            room[2, i] = near[(start + i) % near.size]
        for k in range(a):
            if last != 0:
                edges = tail * part // count, tail * (part + 1) // count
                sum_row(x[o, k, m, 0], weights[o, k, m, 0], edges[0], edges[1], near[0], found, room)
                continue
            stop = b * (part + 1) // count
            for low in range(b * part // count, stop, ROWS):
                high = min(low + ROWS, stop)
                sum_columns(x[o, k, m, low:high], weights[o, k, m, low:high], start, columns, found, room)


def add_parts(
    x: Any, weights: Any, mean: Any, total: Any, product: Any, parts: Any, room: Any, last: int, begin: int, end: int
) -> None:
    """The second step: each result of its parts, and of the rows that were taken as one."""
    columns = mean.shape[1]
    for result in range(begin, end):
        group, column, one, other = result // columns, result % columns, 0.0, 0.0
        for part in range(parts.shape[1]):
            for at in range(column, parts.shape[3], columns):
                one += parts[group, part, 0, at]
                other += parts[group, part, 1, at]
        total[group, column], product[group, column] = one, other


def _form_about(inputs: Sequence[Spec], attrs: Attrs) -> Reduced:
    """The form where the axes are those along which the mean repeats."""
    shape, mean = inputs[0].concrete, inputs[2].concrete
    kept = (1,) * (len(shape) - len(mean)) + mean
    return form_over(shape, tuple(i for i, n in enumerate(kept) if n == 1))


Laid(2, 3, _form_about).enter("sums_about", sum_parts, add_parts)


def sum_about_on_cuda(
    x: Any, weights: Any, mean: Any, total: Any, product: Any, found: Any, sizes: Any, width: int, apart: int
) -> None:
    """Add up the weights of a part, and their products with what the entries are from the mean."""
    held = cuda.shared.array(THREADS, np.float64)
    parts, count = found.shape[1], sizes[0] * sizes[2]
    (team, rank, teams), lines = stand(width, apart), found.shape[1] * mean.size
    line = cuda.blockIdx.x * teams
    while line < lines:
        own = min(line + team, lines - 1)
        part, result = divided(own, mean.size)
        begin, about, one, other = first_entry(result, sizes), mean[result], 0.0, 0.0
        at, end = divided(count * part, parts)[0] + rank, divided(count * (part + 1), parts)[0]
        while at < end:
            weight = entry_on_cuda(weights, begin, at, sizes)
            one += weight
            other += weight * (entry_on_cuda(x, begin, at, sizes) - about)
            at += width
        one, other = add_team(held, one, rank, width, apart), add_team(held, other, rank, width, apart)
        if rank == 0 and line + team < lines:
            if parts > 1:
                found[0, part, result], found[1, part, result] = one, other
            else:
                total[result], product[result] = one, other
        line += cuda.gridDim.x * teams


def join_about_on_cuda(
    x: Any, weights: Any, mean: Any, total: Any, product: Any, found: Any, sizes: Any, width: int, apart: int
) -> None:
    held = cuda.shared.array(THREADS, np.float64)
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < mean.size:
        result, one, other = min(line + team, mean.size - 1), 0.0, 0.0
        part, stop = rank, found.shape[1]
        while part < stop:
            one += found[0, part, result]
            other += found[1, part, result]
            part += width
        one, other = add_team(held, one, rank, width, apart), add_team(held, other, rank, width, apart)
        if rank == 0 and line + team < mean.size:
            total[result], product[result] = one, other
        line += cuda.gridDim.x * teams


LaidOnCuda(
    lambda inputs, outputs, attrs: _form_about(inputs, attrs), lambda dtype: "float64", given=2, columns=3, kinds=2
).enter("sums_about", sum_about_on_cuda, join_about_on_cuda)
