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
from flowrt.kernels.table import Attrs, Call, View, host_only, jitable, kernel, pieces
from flowrt.kernels.twin import THREADS, cuda
from flowrt.spec import Spec, normal_axes

if TYPE_CHECKING:
    from flowrt.spec import Shape


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


def _form(shape: Shape, axes: Sequence[int]) -> tuple[tuple[int, ...], bool]:
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
            return (sizes[0], sizes[1], 1, 1, sizes[2]), False
        case 4, True:
            return (sizes[0], sizes[1], sizes[2], 1, sizes[3]), True
        case 5, False:
            return (sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]), False
    raise SpecError(f"axes {tuple(axes)} of {shape} lie in more than two groups; reduce some of them first")


def _axes(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, ...]:
    return normal_axes(attrs["axis"], inputs[0].rank)


def _call(sizes: tuple[int, ...], last: bool, ignored: Sequence[Spec]) -> Call:
    outer, _, middle, _, tail = sizes
    kept = 1 if last else tail
    views = (View.dense(sizes), *(View.dense(s.concrete) for s in ignored), View.dense((outer, middle, kept)))
    return Call((*views, View.dense((middle, kept)), View.dense((1,))), (int(last),))


def _layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return _call(*_form(inputs[0].concrete, _axes(inputs, attrs)), ())


def _held(dtype: Any, sizes: tuple[int, ...], last: bool) -> list[Spec]:
    return [Spec(dtype, (sizes[2], 1 if last else sizes[4])), Spec(dtype, (1,))]


def _scratch(wide: Callable[[np.dtype[Any]], Any]) -> Any:
    def scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        return _held(wide(inputs[0].dtype), *_form(inputs[0].concrete, _axes(inputs, attrs)))

    return scratch


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
    return x if x >= y or x != x else y


@jitable
def smaller(x: Any, y: Any) -> Any:
    return x if x <= y or x != x else y


@jitable
def either(x: Any, y: Any) -> Any:
    return x | (y != 0)


@jitable
def both(x: Any, y: Any) -> Any:
    return x & (y != 0)


@jitable
def as_it_is(found: Any, count: Any) -> Any:
    return found


@jitable
def over_count(found: Any, count: Any) -> Any:
    return found / count


def row_reduction(combine: Any) -> Callable[..., Any]:
    """Folds one row, from ``neutral``, in eight strands: a single one would wait for each entry's result."""

    def row(x: Any, o: int, k: int, m: int, neutral: Any) -> Any:
        tail = x.shape[4]
        blocks = tail // 8
        found = neutral
        if blocks > 0:
            a = b = c = d = e = f = g = h = neutral
            for j in range(blocks):
                t = np.uint64(j * 8)  # unsigned: no check for indices that count from the end
                a = combine(a, x[o, k, m, 0, t])
                b = combine(b, x[o, k, m, 0, t + np.uint64(1)])
                c = combine(c, x[o, k, m, 0, t + np.uint64(2)])
                d = combine(d, x[o, k, m, 0, t + np.uint64(3)])
                e = combine(e, x[o, k, m, 0, t + np.uint64(4)])
                f = combine(f, x[o, k, m, 0, t + np.uint64(5)])
                g = combine(g, x[o, k, m, 0, t + np.uint64(6)])
                h = combine(h, x[o, k, m, 0, t + np.uint64(7)])
            found = combine(combine(combine(a, b), combine(c, d)), combine(combine(e, f), combine(g, h)))
        for last in range(blocks * 8, tail):
            found = combine(found, x[o, k, m, 0, last])
        return found

    return jitable(row)


def reduction(combine: Any, start: int | None, finish: Any = as_it_is) -> Callable[..., Any]:
    """The kernel that folds entries by ``combine``, from ``start`` or, if None, from the first, counted twice."""
    first = start is None
    begin = 0 if start is None else start
    row = row_reduction(combine)

    def reduce(x: Any, y: Any, found: Any, neutral: Any, last: int) -> None:
        outer, a, middle, b, tail = x.shape
        kept = found.shape[1]
        count = a * b * tail if last != 0 else a * b
        for o in range(outer):
            for m in range(middle):
                for t in range(kept):
                    found[m, t] = x[o, 0, m, 0, t] if first else begin
            for k in range(a):
                for m in range(middle):
                    if last != 0:
                        neutral[0] = x[o, k, m, 0, 0] if first else begin
                        found[m, 0] = combine(found[m, 0], row(x, o, k, m, neutral[0]))
                        continue
                    for r in range(b):
                        for t in range(tail):
                            found[m, t] = combine(found[m, t], x[o, k, m, r, t])
            for m in range(middle):
                for t in range(kept):
                    y[o, m, t] = finish(found[m, t], count)

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

    def reduce(x: Any, y: Any, found: Any, neutral: Any, last: int) -> None:
        folded = cuda.shared.array(THREADS, found.dtype)
        for entry in range(cuda.blockIdx.x, y.size, cuda.gridDim.x):
            fold_strand(x, folded, entry, y.shape[2], last, cuda.threadIdx.x)
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                fold_strands(x, y, folded, entry, last)
            cuda.syncthreads()

    return reduce


def _register(
    op: str, combine: Any, start: int | None, wide: Callable[[np.dtype[Any]], Any], finish: Any = as_it_is
) -> None:
    kernel(op, layout=_layout, scratch=_scratch(wide))(reduction(combine, start, finish))
    kernel(op, "cuda", layout=_layout, scratch=_scratch(wide))(reduction_on_cuda(combine, start, finish))


_register("sum", plus, 0, _sum_dtype)
_register("mean", plus, 0, lambda dtype: "float64", over_count)
_register("max", larger, None, lambda dtype: dtype)
_register("min", smaller, None, lambda dtype: dtype)
_register("prod", times, 1, _sum_dtype)
_register("any", either, 0, lambda dtype: "bool")
_register("all", both, 1, lambda dtype: "bool")


def _position_sizes(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, int, int]:
    shape = inputs[0].concrete
    if attrs["axis"] is None:
        return 1, inputs[0].size, 1
    axis = _axes(inputs, attrs)[0]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _position_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    outer, count, inner = _position_sizes(inputs, attrs)
    return Call((View.dense((outer, count, inner)), View.dense((outer, inner)), View.dense((inner,))))


def _position_scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [Spec(inputs[0].dtype, (_position_sizes(inputs, attrs)[2],))]


@jitable
def beats_as_larger(x: Any, y: Any) -> Any:
    return x > y or (x != x and y == y)


@jitable
def beats_as_smaller(x: Any, y: Any) -> Any:
    return x < y or (x != x and y == y)


def position(beats: Any) -> Callable[..., Any]:
    """The kernel that finds where the first entry is that no other beats."""

    def find(x: Any, y: Any, best: Any) -> None:
        outer, count, inner = x.shape
        for o in range(outer):
            for i in range(inner):
                best[i] = x[o, 0, i]
                y[o, i] = 0
            for k in range(1, count):
                for i in range(inner):
                    if beats(x[o, k, i], best[i]):
                        best[i] = x[o, k, i]
                        y[o, i] = k

    return find


kernel("argmax", layout=_position_layout, scratch=_position_scratch)(position(beats_as_larger))
kernel("argmin", layout=_position_layout, scratch=_position_scratch)(position(beats_as_smaller))


def _running_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    view = View.dense(_position_sizes(inputs, attrs))
    return Call((view, view), (int(attrs["reverse"]),))


@kernel("cumsum", layout=_running_layout)
def cumsum(x: Any, y: Any, reverse: int) -> None:
    outer, count, inner = x.shape
    begin, step = (count - 1, -1) if reverse != 0 else (0, 1)
    for o in range(outer):
        for i in range(inner if count > 0 else 0):
            y[o, begin, i] = x[o, begin, i]
        for k in range(1, count):
            at = begin + k * step
            for i in range(inner):
                y[o, at, i] = y[o, at - step, i] + x[o, at, i]


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
    form = _form(inputs[0].concrete, _summed_axes(inputs[0], outputs[0]))
    return _call(*form, inputs[1:])


def _sum_to_scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return _held(_sum_dtype(inputs[0].dtype), *_form(inputs[0].concrete, _summed_axes(inputs[0], outputs[0])))


_add_up = jitable(reduction(plus, 0))


def sum_to(x: Any, shape: Any, y: Any, found: Any, neutral: Any, last: int) -> None:
    _add_up(x, y, found, neutral, last)


kernel("sum_to", layout=_sum_to_layout, scratch=_sum_to_scratch)(sum_to)
_add_strand, _add_strands = strands_on_cuda(plus, 0, as_it_is)


@kernel("sum_to", "cuda", layout=_sum_to_layout, scratch=_sum_to_scratch)
def sum_to_on_cuda(x: Any, shape: Any, y: Any, found: Any, neutral: Any, last: int) -> None:
    folded = cuda.shared.array(THREADS, found.dtype)
    for entry in range(cuda.blockIdx.x, y.size, cuda.gridDim.x):
        _add_strand(x, folded, entry, y.shape[2], last, cuda.threadIdx.x)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            _add_strands(x, y, folded, entry, last)
        cuda.syncthreads()


host_only("argmax", "argmin", "cumsum")
