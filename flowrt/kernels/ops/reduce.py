"""Reductions over axes, in one form: kept, reduced, kept, reduced and last axis, each merged of neighbours.

The last axis is contiguous and either reduced (then the fourth is 1) or kept. Where neighbours come to more groups of
reduced axes than two, a copy has these side by side. Short rows are turned around some at a
time, so that a loop takes an entry of each: one over a row would take most of its time to begin and to end. Sums of
floats are held in float64: a float32 sum of millions of entries is right to its last digit, and costs no more than
reading them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec, normal_axes
from flowrt.kernels.language.reductions import (
    Reducer,
    add_loosely,
    along_row,
    larger_loosely,
    multiply_loosely,
    smaller_loosely,
)
from flowrt.kernels.language.table import Attrs, Call, View, jitable, kernel, pieces
from flowrt.kernels.launch import in_ways
from flowrt.kernels.ops.partials import Parted, Reduced, register_parted
from flowrt.kernels.teams.reductions import LaidOnCuda, reduction_on_cuda
from flowrt.kernels.tiles.rowmoves import add_row
from flowrt.kernels.tiles.squares import LANES, transpose_rows

if TYPE_CHECKING:
    from flowrt.base.spec import Shape

COLUMNS = 1024  # reduced at a time, so that what is held of them stays in a core's nearest cache
SHORT = 32  # entries of rows that are reduced side by side


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


@lru_cache(256)  # asked by whoever chooses a kernel, lays it out and gives it memory
def form_over(shape: tuple[int, ...], axes: tuple[int, ...]) -> Reduced:
    """The form of what has this shape and is reduced over these axes."""
    sizes = [n for _, n in _groups(shape, axes)]
    match len(sizes):
        case 1:
            return _in_order((1, 1, 1, 1, sizes[0]), False)
        case 2:
            return _in_order((sizes[0], 1, 1, 1, sizes[1]), True)
        case 3:
            return _in_order((sizes[0], 1, 1, sizes[1], sizes[2]), False)
        case 4 if sizes[1] == 0:  # nothing at all is as well reduced in rows of nothing
            return _in_order((sizes[0] * sizes[2], 1, 1, 1, 0), True)
        case 4:
            return _in_order((sizes[0], sizes[1], sizes[2], 1, sizes[3]), True)
        case 5:
            return _in_order((sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), False)
    return _rearranged(shape, axes, len(sizes) % 2 == 0)


def _in_order(sizes: tuple[int, ...], last: bool) -> Reduced:
    return Reduced(sizes, last, View.dense(sizes))


def _rearranged(shape: Shape, axes: Sequence[int], last: bool) -> Reduced:
    """The form with the reduced axes side by side: last if one of them is, else behind the kept ones before them."""
    view, reduced = View.dense([n or 0 for n in shape]), [i for i in range(len(shape)) if i in axes]
    kept = [i for i in range(len(shape)) if i not in axes]
    head = [i for i in kept if last or i < reduced[0]]
    tail = kept[len(head) :]
    outer, within, inner = (math.prod(view.shape[i] for i in some) for some in (head, reduced, tail))
    sizes = (outer, 1, 1, 1, within) if last else (outer, 1, 1, within, inner)
    return Reduced(sizes, last, view.permute([*head, *reduced, *tail]))


def axes_taken(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, ...]:
    """The axes that are reduced, each counted from the first."""
    return normal_axes(attrs["axis"], inputs[0].rank)


def _call(form: Reduced, ignored: Sequence[Spec]) -> Call:
    """Each result is a unit of work."""
    sizes, last = form.sizes, form.last
    outer, _, middle, _, tail = sizes
    results = (outer, middle, 1 if last else tail)
    views = (form.seen(sizes), *(View.dense(s.concrete) for s in ignored), View.dense(results))
    memory = View.dense((2, _columns(sizes, last))), View.dense(_lines(sizes, last))
    return Call((*views, *memory), (int(last),), math.prod(results), copied=(sizes,))


def form_of(inputs: Sequence[Spec], attrs: Attrs) -> Reduced:
    return form_over(inputs[0].concrete, axes_taken(inputs, attrs))


def _layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return _call(form_of(inputs, attrs), ())


def _without_words(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return replace(_layout(inputs, outputs, attrs), words=())


def _columns(sizes: tuple[int, ...], last: bool) -> int:
    """How many columns, or short rows, are reduced at a time."""
    if not last:
        return min(sizes[4], COLUMNS)
    outer, _, middle, _, tail = sizes
    together = min(outer * middle, 2 * COLUMNS // max(tail, 1))
    return together if 1 < tail <= SHORT and together >= LANES else 1


def reduced_in_order(form: Reduced) -> bool:
    """Whether the entries of each result are combined in their order, by fours: those of columns and of short rows."""
    return not form.last or _columns(form.sizes, True) > 1


def _lines(sizes: tuple[int, ...], last: bool) -> tuple[int, int]:
    """The shape of what short rows are turned around into: for each of their entries a line of those of all."""
    together = _columns(sizes, last)
    return (sizes[4], together) if last and together > 1 else (1, 1)


def _memory(form: Reduced, entry: Any, wide: Any) -> list[Spec]:
    return [Spec(wide, (2, _columns(form.sizes, form.last))), Spec(entry, _lines(form.sizes, form.last))]


def _local(wide: Callable[[np.dtype[Any]], Any]) -> Any:
    def local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        return _memory(form_of(inputs, attrs), inputs[0].dtype, wide(inputs[0].dtype))

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


def row_reducer(reducer: Reducer) -> Callable[..., Any]:
    """Reduces rows into ``found[turn]``, entry by entry, four rows at a time: each visit costs a load and a store.

    The answer is which of the two rows of ``found`` they end in. Extremes let these take turns: what is chosen between
    an entry and what is there, and stored there, the compiler stores only where it is the entry, by an instruction
    that takes ten times as long. Columns are reduced strictly in order, so that one comes out the same wherever those
    beside it are reduced.
    """
    combine, take, turns = reducer.combine, reducer.take, int(reducer.chooses)

    def reduce_rows(rows: Any, start: int, width: int, found: Any, turn: int) -> Any:
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

    return jitable(reduce_rows)


def _by_columns(take: Any, reduce_rows: Any, first: bool, neutral: Any, finish: Any) -> Callable[..., Any]:
    def columns(x: Any, y: Any, found: Any, lines: Any, begin: int, end: int) -> None:
        a, middle, b, kept, at = x.shape[1], x.shape[2], x.shape[3], y.shape[2], begin
        while at < end:
            group, t = at // kept, at % kept
            o, m = group // middle, group % middle
            width = min(min(kept - t, end - at), found.shape[1])
            for i in range(width):
                found[0, i] = take(x[o, 0, m, 0, np.uint64(t + i)], found) if first else neutral
            turn = 0
            for k in range(a):
                turn = reduce_rows(x[o, k, m], t, width, found, turn)
            totals = found[turn]
            for i in range(width):
                y[o, m, np.uint64(t + i)] = finish(totals[i], a * b)
            at += width

    return columns


def reduction(reducer: Reducer, start: int | None, finish: Any = as_it_is) -> dict[str, Callable[..., Any]]:
    """The kernels that reduce entries from ``start`` or, if None, from the first, which then counts twice.

    They are for what `_way` tells apart: columns, short rows, and rows.
    """
    first = start is None
    neutral = 0 if start is None else start
    reduce_along, take, reduce_rows = along_row(reducer), reducer.take, row_reducer(reducer)

    @jitable
    def reduce_lines(rows: Any, found: Any, lines: Any, again: bool, turn: int) -> Any:
        """Fold short rows into ``found[turn]``, each into its own entry; see `row_reduction` for the answer."""
        transpose_rows(rows, lines)
        if not again:
            for i in range(rows.shape[0]):
                found[0, i] = take(lines[0, i], found) if first else neutral
        return reduce_rows(lines, 0, rows.shape[0], found, turn)

    def short(x: Any, y: Any, found: Any, lines: Any, begin: int, end: int) -> None:
        a, middle, at = x.shape[1], x.shape[2], begin
        while at < end:
            o, m, turn = at // middle, at % middle, 0
            width = min(end - at, found.shape[1])
            if a > 1:  # else there are no axes between
                width = min(width, middle - m)
            for k in range(a):
                rows = x[o, k, m : m + width, 0] if a > 1 else x[at : at + width, 0, 0, 0]
                turn = reduce_lines(rows, found, lines, k > 0, turn)
            totals, out = found[turn], y[o, m:, 0] if a > 1 else y[at:, 0, 0]
            for i in range(width):
                out[i] = finish(totals[i], a * x.shape[4])
            at += width

    def along(x: Any, y: Any, found: Any, lines: Any, begin: int, end: int) -> None:
        a, middle, tail = x.shape[1], x.shape[2], x.shape[4]
        for result in range(begin, end):
            o, m = result // middle, result % middle
            held = take(x[o, 0, m, 0, 0], found) if first else found.dtype.type(neutral)
            for k in range(a):
                held = reduce_along(x[o, k, m, 0], 0, tail, held, found)
            y[o, m, 0] = finish(held, a * tail)

    columns = _by_columns(take, reduce_rows, first, neutral, finish)
    return {"columns": columns, "short": short, "along": along}


def _way(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> str:
    """Which of the kernels of a `reduction` is for these operands."""
    form = form_of(inputs, attrs)
    return "columns" if not form.last else "short" if reduced_in_order(form) else "along"


def _register(
    op: str,
    reducer: Reducer,
    on_cuda: Callable[..., Any],
    start: int | None,
    wide: Callable[[np.dtype[Any]], Any],
    finish: Any = as_it_is,
) -> None:
    at_once = f"{op}_at_once"
    in_ways(at_once, _way, reduction(reducer, start, finish), layout=_without_words, local=_local(wide))
    register_parted(op, at_once, form_of, Parted(reducer, start, finish, wide, row_reducer(reducer)))
    laid = LaidOnCuda(lambda inputs, outputs, attrs: form_of(inputs, attrs), wide)
    laid.enter(op, *reduction_on_cuda(on_cuda, start, finish))


SUM = Reducer(plus, add_loosely, singles=add_row)
_register("sum", SUM, plus, 0, _sum_dtype)
_register("mean", SUM, plus, 0, lambda dtype: "float64", over_count)
_register("max", Reducer(larger, larger_loosely, chooses=True), larger, None, lambda dtype: dtype)
_register("min", Reducer(smaller, smaller_loosely, chooses=True), smaller, None, lambda dtype: dtype)
_register("prod", Reducer(times, multiply_loosely), times, 1, _sum_dtype)
_register("any", Reducer(either, either, as_truth), either, 0, lambda dtype: "bool")
_register("all", Reducer(both, both, as_truth), both, 1, lambda dtype: "bool")


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


def _summed(x: Spec, y: Spec) -> Reduced:
    pad = x.rank - y.rank
    return form_over(x.concrete, (*range(pad), *(i + pad for i, n in enumerate(y.concrete) if n == 1)))


def _sum_to_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return _call(_summed(inputs[0], outputs[0]), inputs[1:])


def _sum_to_local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return _memory(_summed(inputs[0], outputs[0]), inputs[0].dtype, _sum_dtype(inputs[0].dtype))


_add_columns, _add_short, _add_along = map(jitable, reduction(SUM, 0).values())


def sum_to(x: Any, shape: Any, y: Any, found: Any, lines: Any, last: int, begin: int, end: int) -> None:
    if last == 0:
        _add_columns(x, y, found, lines, begin, end)
    elif found.shape[1] > 1:
        _add_short(x, y, found, lines, begin, end)
    else:
        _add_along(x, y, found, lines, begin, end)


kernel("sum_to", layout=_sum_to_layout, local=_sum_to_local)(sum_to)
_on_cuda = LaidOnCuda(lambda inputs, outputs, attrs: _summed(inputs[0], outputs[0]), _sum_dtype, ignored=1)
_sum_on_cuda, _join_on_cuda = map(jitable, reduction_on_cuda(plus, 0, as_it_is))


def sum_to_on_cuda(x: Any, shape: Any, y: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
    _sum_on_cuda(x, y, found, sizes, width, apart)


def join_sums_on_cuda(x: Any, shape: Any, y: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
    _join_on_cuda(x, y, found, sizes, width, apart)


_on_cuda.enter("sum_to", sum_to_on_cuda, join_sums_on_cuda)
