"""Moving entries: strided copies from views of the inputs to windows of the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import index_steps, normal_axes
from flowrt.kernels.language.table import Attrs, Call, View, jitable, kernel, pieces
from flowrt.kernels.language.twin import cuda

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def _transpose(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    view, axes = View.dense(inputs[0].concrete), attrs["axes"]
    order = tuple(reversed(range(inputs[0].rank))) if axes is None else [a % inputs[0].rank for a in axes]
    return Call((view.permute(order), View.dense(outputs[0].concrete)))


pieces("transpose", _transpose)


def _concat(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    axis = normal_axes(attrs["axis"], outputs[0].rank)[0]
    whole, views, start = View.dense(outputs[0].concrete), [], 0
    for spec in inputs:
        views += [View.dense(spec.concrete), _window(whole, axis, start, spec.concrete)]
        start += spec.concrete[axis]
    return Call(tuple(views))


def _window(whole: View, axis: int, start: int, shape: tuple[int, ...]) -> View:
    return whole.window([start if i == axis else 0 for i in range(len(shape))], shape)


pieces("concat", _concat)


def _along(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """The moved operands as (outer, axis, inner); the axis is the only one whose sizes differ. Rows are units."""
    axis = normal_axes(attrs["axis"], inputs[0].rank)[0]
    views = [View.dense(s.concrete) for s in (*inputs, *outputs)]
    for i in (0, len(views) - 1):
        shape = views[i].shape
        views[i] = views[i].reshape((math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])))
    outer, along, _ = views[-1].shape
    return Call(tuple(views), units=outer * along)


@jitable
def run_of_rows(place: int, end: int, rows: int) -> Any:
    """Where the ``place``-th of all rows is, in groups of ``rows``, and how many follow in its group before ``end``."""
    return place // rows, place % rows, min(rows - place % rows, end - place)


@kernel("slice_along", layout=_along, moved=(0, 3))
def slice_along(x: Any, start: Any, count: Any, y: Any, begin: int, end: int, run: Any) -> None:
    first, inner = start.item(), y.shape[2]
    if first < 0 or first + y.shape[1] > x.shape[1]:
        run[0] = 1
        return
    place = begin
    while place < end:
        o, k, many = run_of_rows(place, end, y.shape[1])
        source, out = x[o, np.uint64(first + k)], y[o, k]
        for i in range(many * inner):  # of rows that lie one after another
            out[np.uint64(i)] = source[np.uint64(i)]
        place += many


@kernel("place_along", layout=_along, moved=(0, 3))
def place_along(x: Any, start: Any, shape: Any, y: Any, begin: int, end: int, run: Any) -> None:
    first, inner = start.item(), y.shape[2]
    if first < 0 or first + x.shape[1] > y.shape[1]:
        run[0] = 1
        return
    place = begin
    while place < end:
        o, k, many = run_of_rows(place, end, y.shape[1])
        out, source = y[o, k], x[o, 0] if x.shape[1] > 0 else y[o, k]
        before = min(max(first - k, 0), many) * inner
        inside = min(max(first + x.shape[1] - k, 0), many) * inner
        skipped = max(k - first, 0) * inner
        for i in range(before):
            out[np.uint64(i)] = 0
        for i in range(before, inside):
            out[np.uint64(i)] = source[np.uint64(skipped + i - before)]
        for i in range(max(before, inside), many * inner):
            out[np.uint64(i)] = 0
        place += many


@kernel("slice_along", "cuda", layout=_along)
def slice_along_on_cuda(x: Any, start: Any, count: Any, y: Any, run: Any) -> None:
    first, along, inner = start[()], y.shape[1], y.shape[2]
    if first < 0 or first + along > x.shape[1]:
        run[0] = 1
    else:
        entry = cuda.grid(1)
        while entry < y.size:
            i, k, o = entry % inner, entry // inner % along, entry // inner // along
            y[o, k, i] = x[o, first + k, i]
            entry += cuda.gridsize(1)


@kernel("place_along", "cuda", layout=_along)
def place_along_on_cuda(x: Any, start: Any, shape: Any, y: Any, run: Any) -> None:
    first, along, inner = start[()], y.shape[1], y.shape[2]
    if first < 0 or first + x.shape[1] > along:
        run[0] = 1
    else:
        entry = cuda.grid(1)
        while entry < y.size:
            i, k, o = entry % inner, entry // inner % along, entry // inner // along
            y[o, k, i] = x[o, k - first, i] if k >= first and k < first + x.shape[1] else 0
            entry += cuda.gridsize(1)


def _stack(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    axis = normal_axes(attrs["axis"], outputs[0].rank)[0]
    whole, shape = View.dense(outputs[0].concrete), inputs[0].concrete
    slot = (*shape[:axis], 1, *shape[axis:])
    source = View.dense(slot)
    return Call(tuple(v for i in range(len(inputs)) for v in (source, _window(whole, axis, i, slot))))


pieces("stack", _stack)


def part(view: View, key: Sequence[object]) -> View:
    """The part of a dense view that an index expression names."""
    shape, strides, offset = [], [], view.offset
    for step in index_steps(key, view.shape):
        assert step.start is not None
        assert step.count is not None
        stride = 0 if step.axis is None else view.strides[step.axis]
        offset += step.start * stride
        if step.kept:
            shape.append(step.count)
            strides.append(stride * step.step)
    return View(tuple(shape), tuple(strides), offset)


def _getitem(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return Call((part(View.dense(inputs[0].concrete), attrs["key"]), View.dense(outputs[0].concrete)))


def _place(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return Call((View.dense(inputs[0].concrete), part(View.dense(outputs[0].concrete), attrs["key"])), (0,))


pieces("getitem", _getitem)
pieces("place", _place)


def _pad(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    before = [pair[0] for pair in attrs["paddings"]]
    window = View.dense(outputs[0].concrete).window(before, inputs[0].concrete)
    return Call((View.dense(inputs[0].concrete), window), (attrs["value"],))


pieces("pad", _pad)


def _roll(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """A copy for each choice between the front and the back of every axis that is shifted."""
    shape = outputs[0].concrete
    shifts = [0] * len(shape)
    for shift, axis in zip(attrs["shift"], attrs["axis"], strict=True):
        shifts[axis] = (shifts[axis] + shift) % max(shape[axis], 1)
    stretches = [((0, k, n - k), (n - k, 0, k))[: 1 + (k > 0)] for n, k in zip(shape, shifts, strict=True)]
    whole, views = View.dense(shape), []
    for chosen in product(*stretches):  # of each axis where it is taken from, where it goes, and its size
        sources, targets, sizes = zip(*chosen, strict=True) if chosen else ((), (), ())
        views += [whole.window(sources, sizes), whole.window(targets, sizes)]
    return Call(tuple(views))


pieces("roll", _roll)
