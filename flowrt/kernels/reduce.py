"""Reductions over axes, in one form: kept, reduced, kept, reduced and last axis, each merged of neighbours.

The last axis is contiguous and either reduced (then the fourth is 1) or kept. Sums of floats are held in float64:
a float32 sum of millions of entries is right to its last digit, and costs no more than reading them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import SpecError
from flowrt.kernels.folds import Fold, add_loosely, along_row, larger_loosely, multiply_loosely, smaller_loosely
from flowrt.kernels.partials import Parted, register_parted
from flowrt.kernels.rowmoves import add_row
from flowrt.kernels.table import Attrs, Call, View, host_only, jitable, kernel, pieces
from flowrt.kernels.twin import THREADS, cuda
from flowrt.spec import Spec, normal_axes

if TYPE_CHECKING:
    from flowrt.spec import Shape

COLUMNS = 1024  # folded at a time, so that what is held of them stays in a core's nearest cache
SEARCHED = 64
SHORT, TOGETHER = 32, 256  # entries of rows that are searched side by side, and how many are


def _groups(shape: Shape, axes: Sequence[int]) -> list[tuple[bool, int]]:
    """``shape`` as alternating (reduced?, size), neighbours merged, beginning with kept ones."""
    out: list[tuple[bool, int]] = [(False, 1)]
    for i, n in enumerate(shape):
        assert n is not None
        reduced = i in axes
        if n == 1:
            continue
        if out[-1][0] == reduced:
            out[-1] = (reduced, out[-1][1] * n)
        else:
            out.append((reduced, n))
    return out


def five_sizes(shape: Shape, axes: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The five sizes of the form, and whether the last is reduced."""
    groups = _groups(shape, axes)
    last_reduced = groups[-1][0]
    sizes = [n for _, n in groups]
    match len(sizes), last_reduced:
        case 1, _:
            return (1, 1, 1, 1, sizes[0]), False
        case 2, True:
            return (sizes[0], 1, 1, 1, sizes[1]), True
        case 3, False:
            return (sizes[0], 1, 1, sizes[1], sizes[2]), False
        case 4, True:
            return (sizes[0], sizes[1], sizes[2], 1, sizes[3]), True
        case 5, False:
            return (sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), False
    raise SpecError(f"axes {tuple(axes)} of {shape} lie in more than two groups; reduce some of them first")


def _axes(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, ...]:
    return normal_axes(attrs["axis"], inputs[0].rank)


def _call(sizes: tuple[int, ...], last: bool, ignored: Sequence[Spec]) -> Call:
    """Each result is a unit of work."""
    outer, _, middle, _, tail = sizes
    results = (outer, middle, 1 if last else tail)
    views = (View.dense(sizes), *(View.dense(s.concrete) for s in ignored), View.dense(results))
    return Call((*views, View.dense((2, _columns(sizes, last)))), (int(last),), math.prod(results))


def form_of(inputs: Sequence[Spec], attrs: Attrs) -> tuple[tuple[int, ...], bool]:
    return five_sizes(inputs[0].concrete, _axes(inputs, attrs))


def _layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return _call(*form_of(inputs, attrs), ())


def _columns(sizes: tuple[int, ...], last: bool) -> int:
    """How many columns are folded at a time."""
    return 1 if last else min(sizes[4], COLUMNS)


def _local(wide: Callable[[np.dtype[Any]], Any]) -> Any:
    def local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        columns = _columns(*form_of(inputs, attrs))
        return [Spec(wide(inputs[0].dtype), (2, columns))]

    return local


def _sum_dtype(dtype: np.dtype[Any]) -> str:
    return {"f": "float64", "u": "uint64"}.get(dtype.kind, "int64")


@jitable
def plus(x: Any, y: Any) -> Any:
    return x + y


@jitable
def times(x: Any, y: Any) -> Any:
    return x * y


@jitable
def larger(x: Any, y: Any) -> Any:
    return x if (x >= y) | (x != x) else y


@jitable
def smaller(x: Any, y: Any) -> Any:
    return x if (x <= y) | (x != x) else y


@jitable
def either(x: Any, y: Any) -> Any:
    return x | (y != 0)


@jitable
def both(x: Any, y: Any) -> Any:
    return x & (y != 0)


@jitable
def as_truth(entry: Any, found: Any) -> Any:
    return entry != 0


@jitable
def as_it_is(found: Any, count: Any) -> Any:
    return found


@jitable
def over_count(found: Any, count: Any) -> Any:
    return found / count


def row_fold(fold: Fold) -> Callable[..., Any]:
    """Folds rows into ``found[turn]``, entry by entry, four rows at a time: each visit costs a load and a store.

    The answer is which of the two rows of ``found`` they end in. Extremes let these take turns: what is chosen between
    an entry and what is there, and stored there, the compiler stores only where it is the entry, by an instruction
    that takes ten times as long. Columns are folded strictly in order, so that one comes out the same wherever those
    beside it are folded.
    """
    combine, take, turns = fold.combine, fold.take, int(fold.chooses)

    def fold_rows(rows: Any, start: int, width: int, found: Any, turn: int) -> Any:
        fours = rows.shape[0] // 4 * 4
        for r in range(0, fours, 4):
            p, q, s, u = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
            old, new = found[turn], found[(1 - turn) * turns]
            for t in range(width):
                one, two = take(p[np.uint64(start + t)], found), take(q[np.uint64(start + t)], found)
                three, four = take(s[np.uint64(start + t)], found), take(u[np.uint64(start + t)], found)
                new[t] = combine(old[t], combine(combine(one, two), combine(three, four)))
            turn = (1 - turn) * turns
        for r in range(fours, rows.shape[0]):
            p, old, new = rows[r], found[turn], found[(1 - turn) * turns]
            for t in range(width):
                new[t] = combine(old[t], take(p[np.uint64(start + t)], found))
            turn = (1 - turn) * turns
        return turn

    return jitable(fold_rows)


def reduction(fold: Fold, start: int | None, finish: Any = as_it_is) -> Callable[..., Any]:
    """The kernel that folds entries from ``start`` or, if None, from the first, which then counts twice."""
    first = start is None
    neutral = 0 if start is None else start
    fold_along, take, fold_rows = along_row(fold), fold.take, row_fold(fold)

    def reduce(x: Any, y: Any, found: Any, last: int, begin: int, end: int) -> None:
        _, a, middle, b, tail = x.shape
        if last != 0:
            for result in range(begin, end):
                o, m = result // middle, result % middle
                held = take(x[o, 0, m, 0, 0], found) if first else found.dtype.type(neutral)
                for k in range(a):
                    held = fold_along(x[o, k, m, 0], 0, tail, held, found)
                y[o, m, 0] = finish(held, a * tail)
            return
        at, kept = begin, y.shape[2]
        while at < end:
            group, t = at // kept, at % kept
            o, m = group // middle, group % middle
            width = min(min(kept - t, end - at), found.shape[1])
            for i in range(width):
                found[0, i] = take(x[o, 0, m, 0, np.uint64(t + i)], found) if first else neutral
            turn = 0
            for k in range(a):
                turn = fold_rows(x[o, k, m], t, width, found, turn)
            folded = found[turn]
            for i in range(width):
                y[o, m, np.uint64(t + i)] = finish(folded[i], a * b)
            at += width

    return reduce


def strands_on_cuda(combine: Any, start: int | None, finish: Any) -> tuple[Any, Any]:
    """What one thread of a block folds of the entries of a result, and what the first then makes of all strands."""
    first = start is None
    begin = 0 if start is None else start

    def fold_strand(x: Any, folded: Any, entry: int, kept: int, last: int, thread: int) -> None:
        middle, run = x.shape[2], x.shape[4] if last != 0 else x.shape[3]
        t, m, o = entry % kept, entry // kept % middle, entry // kept // middle
        if first:
            folded[thread] = x[o, 0, m, 0, t]
        else:
            folded[thread] = begin
        for i in range(thread, x.shape[1] * run, THREADS):
            if last != 0:
                folded[thread] = combine(folded[thread], x[o, i // run, m, 0, i % run])
            else:
                folded[thread] = combine(folded[thread], x[o, i // run, m, i % run, t])

    def fold_strands(x: Any, y: Any, folded: Any, entry: int, last: int) -> None:
        middle, kept = y.shape[1], y.shape[2]
        for i in range(1, THREADS):
            folded[0] = combine(folded[0], folded[i])
        count = x.shape[1] * (x.shape[4] if last != 0 else x.shape[3])
        y[entry // kept // middle, entry // kept % middle, entry % kept] = finish(folded[0], count)

    return jitable(fold_strand), jitable(fold_strands)


def reduction_on_cuda(combine: Any, start: int | None, finish: Any = as_it_is) -> Callable[..., Any]:
    """The twin of `reduction`: a block folds the entries of one result at a time."""
    fold_strand, fold_strands = strands_on_cuda(combine, start, finish)

    def reduce(x: Any, y: Any, found: Any, last: int) -> None:
        folded = cuda.shared.array(THREADS, found.dtype)
        for entry in range(cuda.blockIdx.x, y.size, cuda.gridDim.x):
            fold_strand(x, folded, entry, y.shape[2], last, cuda.threadIdx.x)
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                fold_strands(x, y, folded, entry, last)
            cuda.syncthreads()

    return reduce


def _register(
    op: str,
    fold: Fold,
    on_cuda: Callable[..., Any],
    start: int | None,
    wide: Callable[[np.dtype[Any]], Any],
    finish: Any = as_it_is,
) -> None:
    whole = reduction(fold, start, finish), _layout, _local(wide)
    register_parted(op, whole, form_of, Parted(fold, start, finish, wide, row_fold(fold)))
    kernel(op, "cuda", layout=_layout, local=_local(wide))(reduction_on_cuda(on_cuda, start, finish))


SUM = Fold(plus, add_loosely, singles=add_row)
_register("sum", SUM, plus, 0, _sum_dtype)
_register("mean", SUM, plus, 0, lambda dtype: "float64", over_count)
_register("max", Fold(larger, larger_loosely, chooses=True), larger, None, lambda dtype: dtype)
_register("min", Fold(smaller, smaller_loosely, chooses=True), smaller, None, lambda dtype: dtype)
_register("prod", Fold(times, multiply_loosely), times, 1, _sum_dtype)
_register("any", Fold(either, either, as_truth), either, 0, lambda dtype: "bool")
_register("all", Fold(both, both, as_truth), both, 1, lambda dtype: "bool")


def _position_sizes(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, int, int]:
    shape = inputs[0].concrete
    if attrs["axis"] is None:
        return 1, inputs[0].size, 1
    axis = _axes(inputs, attrs)[0]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _position_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Rows if the axis is the last (or all there is), else columns. Each result is a unit of work."""
    outer, count, inner = _position_sizes(inputs, attrs)
    sizes, last = ((outer, 1, count), 1) if inner == 1 else ((outer, count, inner), 0)
    local = (View.dense(spec.concrete) for spec in _position_local(inputs, outputs, attrs))
    return Call((View.dense(sizes), View.dense((outer, inner)), *local), (last,), outer * inner)


def _position_local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """The best of each column or short row and where it is: in 32 bits where they suffice, as wide as most entries.

    The third line of the best is for an entry of each short row.
    """
    _, count, inner = _position_sizes(inputs, attrs)
    columns = TOGETHER if inner == 1 else min(inner, COLUMNS)
    return [Spec(inputs[0].dtype, (3, columns)), Spec("int32" if count < 2**31 else "int64", (2, columns))]


@jitable
def beats_as_larger(x: Any, y: Any) -> Any:
    return (x > y) | ((x != x) & (y == y))


@jitable
def beats_as_smaller(x: Any, y: Any) -> Any:
    return (x < y) | ((x != x) & (y == y))


@jitable
def first_equal(row: Any, value: Any) -> Any:
    """Where ``value`` (or NaN, if it is) first is in a row that holds it; by blocks, whose search vectorises."""
    start = 0
    for block in range(row.size // SEARCHED):
        there = False
        for t in range(SEARCHED):
            entry = row[np.uint64(block * SEARCHED + t)]
            there |= (entry == value) | (entry != entry)
        if there:
            break
        start += SEARCHED
    while start < row.size - 1 and row[start] != value and row[start] == row[start]:
        start += 1
    return start


def position(beats: Any, in_row: Any) -> Callable[..., Any]:
    """The kernel that finds where the first entry is that no other beats."""

    @jitable
    def beat(entries: Any, start: int, k: int, width: int, best: Any, where: Any) -> None:
        """Have the entries of line ``k`` beat the best before them, taking turns as in `row_fold`."""
        here = where.dtype.type(k)
        old, new, before, after = best[(k - 1) % 2], best[k % 2], where[(k - 1) % 2], where[k % 2]
        for i in range(width):
            after[i] = here if beats(entries[np.uint64(start + i)], old[i]) else before[i]
        for i in range(width):
            new[i] = entries[np.uint64(start + i)] if beats(entries[np.uint64(start + i)], old[i]) else old[i]

    @jitable
    def find_in_short(rows: Any, out: Any, best: Any, where: Any) -> None:
        """In rows whose loops would take most of their time to begin: an entry of each at a time."""
        width, count = rows.shape[0], rows.shape[1]
        for i in range(width):
            best[0, i], where[0, i] = rows[i, 0], 0
        for k in range(1, count):
            for i in range(width):
                best[2, i] = rows[i, k]
            beat(best[2], 0, k, width, best, where)
        for i in range(width):
            out[i] = where[(count - 1) % 2, i]

    def find(x: Any, y: Any, best: Any, where: Any, last: int, begin: int, end: int) -> None:
        if last != 0:
            if x.shape[2] <= SHORT:
                for o in range(begin, end, best.shape[1]):
                    stop = min(o + best.shape[1], end)
                    find_in_short(x[o:stop, 0], y[o:stop, 0], best, where)
                return
            for o in range(begin, end):
                row = x[o, 0]
                top = row[0]
                for t in range(row.size):
                    top = in_row(top, row[t])
                y[o, 0] = first_equal(row, top)
            return
        at, inner = begin, y.shape[1]
        while at < end:
            o, start = at // inner, at % inner
            width = min(min(inner - start, end - at), best.shape[1])
            row, out = x[o, 0], y[o]
            for i in range(width):
                best[0, i], where[0, i] = row[np.uint64(start + i)], 0
            for k in range(1, x.shape[1]):
                beat(x[o, k], start, k, width, best, where)
            for i in range(width):
                out[np.uint64(start + i)] = where[(x.shape[1] - 1) % 2, i]
            at += width

    return find


argmax = position(beats_as_larger, larger_loosely)
argmin = position(beats_as_smaller, smaller_loosely)
kernel("argmax", layout=_position_layout, local=_position_local)(argmax)
kernel("argmin", layout=_position_layout, local=_position_local)(argmin)


def _running_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Rows or columns as in `_position_layout`; each is a unit of work."""
    outer, count, inner = _position_sizes(inputs, attrs)
    view = View.dense((outer, 1, count) if inner == 1 else (outer, count, inner))
    return Call((view, view), (int(inner == 1), int(attrs["reverse"])), outer * inner)


@jitable
def run_four_rows(x: Any, y: Any, row: int, rows: int, reverse: int) -> None:
    """Running sums of four rows side by side: a single one would wait for each sum. The last stands in for missing."""
    here, last = x.shape[2] - 1 if reverse != 0 else 0, rows - 1
    step = -1 if reverse != 0 else 1
    p, q, s, u = row, min(row + 1, last), min(row + 2, last), min(row + 3, last)
    a = b = c = d = y.dtype.type(0)
    for _ in range(x.shape[2]):
        at = np.uint64(here)
        a, b = y.dtype.type(a + x[p, 0, at]), y.dtype.type(b + x[q, 0, at])
        c, d = y.dtype.type(c + x[s, 0, at]), y.dtype.type(d + x[u, 0, at])
        y[p, 0, at], y[q, 0, at], y[s, 0, at], y[u, 0, at] = a, b, c, d
        here += step


@kernel("cumsum", layout=_running_layout)
def cumsum(x: Any, y: Any, last: int, reverse: int, begin: int, end: int) -> None:
    if last != 0:
        for row in range(begin, end, 4):
            run_four_rows(x, y, row, end, reverse)
        return
    at, inner, count = begin, x.shape[2], x.shape[1]
    while at < end:
        o, start = at // inner, at % inner
        width = min(inner - start, end - at)
        for k in range(count):
            here = count - 1 - k if reverse != 0 else k
            source, out = x[o, here], y[o, here]
            before = y[o, here + 1 if reverse != 0 else max(here - 1, 0)] if k > 0 else out
            for i in range(width):
                t = np.uint64(start + i)
                out[t] = source[t] if k == 0 else before[t] + source[t]
        at += width


def _spread_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    shape = outputs[0].concrete
    axes = normal_axes(attrs["axis"], len(shape))
    reduced = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return Call((View.dense(reduced).broadcast_to(shape), View.dense(shape)))


def _broadcast_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    shape = outputs[0].concrete
    return Call((View.dense(inputs[0].concrete).broadcast_to(shape), View.dense(shape)))


pieces("spread", _spread_layout)
pieces("broadcast_to", _broadcast_layout)


def _summed_axes(x: Spec, y: Spec) -> tuple[int, ...]:
    pad = x.rank - y.rank
    return (*range(pad), *(i + pad for i, n in enumerate(y.concrete) if n == 1))


def _sum_to_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    form = five_sizes(inputs[0].concrete, _summed_axes(inputs[0], outputs[0]))
    return _call(*form, inputs[1:])


def _sum_to_local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    columns = _columns(*five_sizes(inputs[0].concrete, _summed_axes(inputs[0], outputs[0])))
    return [Spec(_sum_dtype(inputs[0].dtype), (2, columns))]


_add_up = jitable(reduction(SUM, 0))


def sum_to(x: Any, shape: Any, y: Any, found: Any, last: int, begin: int, end: int) -> None:
    _add_up(x, y, found, last, begin, end)


kernel("sum_to", layout=_sum_to_layout, local=_sum_to_local)(sum_to)
_add_strand, _add_strands = strands_on_cuda(plus, 0, as_it_is)


@kernel("sum_to", "cuda", layout=_sum_to_layout, local=_sum_to_local)
def sum_to_on_cuda(x: Any, shape: Any, y: Any, found: Any, last: int) -> None:
    folded = cuda.shared.array(THREADS, found.dtype)
    for entry in range(cuda.blockIdx.x, y.size, cuda.gridDim.x):
        _add_strand(x, folded, entry, y.shape[2], last, cuda.threadIdx.x)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            _add_strands(x, y, folded, entry, last)
        cuda.syncthreads()


host_only("argmax", "argmin", "cumsum")
