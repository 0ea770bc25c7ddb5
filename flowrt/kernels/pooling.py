"""Pooling of images, vectorised over the channels: every inner loop runs along them.

Entries of a window are taken two or four at a time: a loop over few channels costs as much to enter as to run. Where
there are fewer, the last one stands in for those that are missing, which changes no maximum. Windows that tile the
images write their gradient; others add theirs to zeros, image by image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.kernels.table import Call, View, host_only, jitable, kernel
from flowrt.spec import Spec, pair, sliding


def _windows(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """The window's sizes, strides and padding as words; each image is a unit of work."""
    window = pair("window", attrs["window"])
    strides = window if attrs["strides"] is None else attrs["strides"]
    down, across = sliding(inputs[0].concrete[1:3], window, strides, 1, attrs["padding"])
    words = (*window, down.stride, across.stride, down.before or 0, across.before or 0)
    views = tuple(View.dense(s.concrete) for s in (*inputs, *outputs))
    return Call(views, words, units=inputs[0].concrete[0])


def _lines(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """As `_windows`, but each line of windows is a unit."""
    batch, height, _, _ = outputs[0].concrete
    return replace(_windows(inputs, outputs, attrs), units=batch * height)


def _lines_with_room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _lines(inputs, outputs, attrs)
    return replace(call, views=(*call.views, View.dense(inputs[0].concrete[3:])))


def _room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec]:
    """For the largest entries so far, in turns with the output: see `reduce.row_fold`."""
    return (Spec(inputs[0].dtype, inputs[0].concrete[3:]),)


def _finding(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """As `_windows`, with what `_memory` declares."""
    call = _windows(inputs, outputs, attrs)
    twice = View.dense((2, inputs[0].concrete[3]))
    return replace(call, views=(*call.views, twice, twice))


def _memory(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """For every channel of a window its largest entry so far, and that entry's number in the window; to take turns."""
    twice = (2, inputs[0].concrete[3])
    return Spec(inputs[0].dtype, twice), Spec("int32", twice)


@jitable
def inside(first: int, count: int, size: int) -> Any:
    """The first of ``count`` places from ``first`` on that is within ``size``, and the end of those that are."""
    return max(first, 0), min(first + count, size)


@jitable
def larger_or_nan(x: Any, y: Any) -> Any:
    return x if (x > y) | (x != x) else y


@jitable
def exceeds(x: Any, y: Any) -> Any:
    """Whether ``x`` comes before ``y`` as the largest: it is larger, or the first NaN."""
    return (x > y) | ((x != x) & (y == y))


@jitable
def largest_of_four(a: Any, b: Any, c: Any, d: Any, before: Any, out: Any, first: bool) -> None:
    """Put the largest of four entries per channel, and of those ``before`` unless they are the first, into ``out``."""
    if first:
        for k in range(out.size):
            out[k] = larger_or_nan(larger_or_nan(a[k], b[k]), larger_or_nan(c[k], d[k]))
    else:
        for k in range(out.size):
            four = larger_or_nan(larger_or_nan(a[k], b[k]), larger_or_nan(c[k], d[k]))
            out[k] = larger_or_nan(four, before[k])


@kernel("max_pool2d", layout=_lines_with_room, local=_room)
def max_pool2d(
    x: Any,
    y: Any,
    room: Any,
    rows: int,
    columns: int,
    down: int,
    across: int,
    top: int,
    left: int,
    begin: int,
    end: int,
) -> None:
    for line in range(begin, end):
        n, i = line // y.shape[1], line % y.shape[1]
        first_h, last_h = inside(i * down - top, rows, x.shape[1])
        for j in range(y.shape[2]):
            first_w, last_w = inside(j * across - left, columns, x.shape[2])
            fours = ((last_h - first_h + 1) // 2) * ((last_w - first_w + 1) // 2)
            for h in range(first_h, last_h, 2):
                upper, lower = x[n, h], x[n, min(h + 1, last_h - 1)]
                for w in range(first_w, last_w, 2):
                    beside, first = min(w + 1, last_w - 1), h == first_h and w == first_w
                    four = upper[w], upper[beside], lower[w], lower[beside]
                    if fours % 2 != 0:  # the last of them goes to the output
                        largest_of_four(*four, room, y[n, i, j], first)
                    else:
                        largest_of_four(*four, y[n, i, j], room, first)
                    fours -= 1


@jitable
def first_of_four(a: Any, b: Any, c: Any, d: Any, width: int, at: Any) -> None:
    """The number of the first largest of the entries 0, 1, ``width`` and ``width + 1``, per channel."""
    one, two, three = np.int32(1), np.int32(width), np.int32(width + 1)
    for k in range(at.size):
        second, fourth = exceeds(b[k], a[k]), exceeds(d[k], c[k])
        upper, lower = b[k] if second else a[k], d[k] if fourth else c[k]
        above, below = one if second else np.int32(0), three if fourth else two
        at[k] = below if exceeds(lower, upper) else above


@jitable
def first_of_two_more(a: Any, b: Any, number: int, beside: int, best: Any, at: Any, turn: int) -> None:
    """Take the entries ``number`` and ``beside`` into account, from row ``turn`` of what is known to the other."""
    one, two = np.int32(number), np.int32(beside)
    old, new, before, after = best[turn], best[1 - turn], at[turn], at[1 - turn]
    for k in range(new.size):
        value = b[k] if exceeds(b[k], a[k]) else a[k]
        new[k] = value if exceeds(value, old[k]) else old[k]
    for k in range(new.size):
        second = exceeds(b[k], a[k])
        value, here = b[k] if second else a[k], two if second else one
        after[k] = here if exceeds(value, old[k]) else before[k]


@jitable
def find_largest(x: Any, n: int, hs: Any, ws: Any, best: Any, at: Any) -> Any:
    """Number the entries of a window line by line, and find each channel's first largest (or NaN).

    The answer is which row of ``at`` tells. They take turns: see `reduce.row_fold`.
    """
    (first_h, last_h), (first_w, last_w) = hs, ws
    width = last_w - first_w
    if last_h - first_h <= 2 and width <= 2:
        upper, lower, beside = x[n, first_h], x[n, last_h - 1], last_w - 1
        first_of_four(upper[first_w], upper[beside], lower[first_w], lower[beside], width, at[0])
        return 0
    corner, turn = x[n, first_h, first_w], 0
    for k in range(corner.size):
        best[0, k], at[0, k] = corner[k], 0
    for h in range(first_h, last_h):
        line, number = x[n, h], (h - first_h) * width
        for w in range(first_w, last_w, 2):
            beside = min(w + 1, last_w - 1)
            first_of_two_more(line[w], line[beside], number + w - first_w, number + beside - first_w, best, at, turn)
            turn = 1 - turn
    return turn


@jitable
def put_at_two(line: Any, w: int, number: int, at: Any, dy: Any, tiled: bool) -> None:
    """Write or add ``dy`` to two neighbours in a line, each for the channels whose largest entry it is."""
    one, two, zero = np.int32(number), np.int32(number + 1), line.dtype.type(0)
    if tiled:
        for k in range(at.size):
            line[w, k] = dy[k] if at[k] == one else zero
            line[w + 1, k] = dy[k] if at[k] == two else zero
    else:
        for k in range(at.size):
            line[w, k] += dy[k] if at[k] == one else zero
            line[w + 1, k] += dy[k] if at[k] == two else zero


@jitable
def put_at_one(line: Any, w: int, number: int, at: Any, dy: Any, tiled: bool) -> None:
    one, zero = np.int32(number), line.dtype.type(0)
    out = line[w]
    if tiled:
        for k in range(at.size):
            out[k] = dy[k] if at[k] == one else zero
    else:
        for k in range(at.size):
            out[k] += dy[k] if at[k] == one else zero


@jitable
def tiles(x: Any, y: Any, window: Any, strides: Any, before: Any) -> bool:
    """Whether every entry of ``x`` lies in exactly one window."""
    rows, columns = window
    whole = y.shape[1] * rows == x.shape[1] and y.shape[2] * columns == x.shape[2]
    return bool(whole and strides == window and before == (0, 0))


@kernel("max_pool2d_spread", layout=_finding, local=_memory)
def max_pool2d_spread(
    x: Any,
    dy: Any,
    dx: Any,
    best: Any,
    at: Any,
    rows: int,
    columns: int,
    down: int,
    across: int,
    top: int,
    left: int,
    begin: int,
    end: int,
) -> None:
    tiled = tiles(x, dy, (rows, columns), (down, across), (top, left))
    for n in range(begin, end):
        if not tiled:
            dx[n] = 0
        for i in range(dy.shape[1]):
            hs = inside(i * down - top, rows, x.shape[1])
            for j in range(dy.shape[2]):
                ws = inside(j * across - left, columns, x.shape[2])
                found = at[find_largest(x, n, hs, ws, best, at)]
                width, slopes = ws[1] - ws[0], dy[n, i, j]
                for h in range(hs[0], hs[1]):
                    line, number = dx[n, h], (h - hs[0]) * width
                    for w in range(ws[0], ws[1] - 1, 2):
                        put_at_two(line, w, number + w - ws[0], found, slopes, tiled)
                    if width % 2 != 0:
                        put_at_one(line, ws[1] - 1, number + width - 1, found, slopes, tiled)


@kernel("max_pool2d_pick", layout=_finding, local=_memory)
def max_pool2d_pick(
    x: Any,
    values: Any,
    y: Any,
    best: Any,
    at: Any,
    rows: int,
    columns: int,
    down: int,
    across: int,
    top: int,
    left: int,
    begin: int,
    end: int,
) -> None:
    for n in range(begin, end):
        for i in range(y.shape[1]):
            hs = inside(i * down - top, rows, x.shape[1])
            for j in range(y.shape[2]):
                ws = inside(j * across - left, columns, x.shape[2])
                found = at[find_largest(x, n, hs, ws, best, at)]
                width, out = ws[1] - ws[0], y[n, i, j]
                out[:] = 0
                for number in range((hs[1] - hs[0]) * width):
                    here = values[n, hs[0] + number // width, ws[0] + number % width]
                    for k in range(out.size):
                        out[k] += here[k] if found[k] == np.int32(number) else y.dtype.type(0)


@jitable
def add_two(a: Any, b: Any, out: Any, first: bool) -> None:
    """Add two entries per channel to ``out``, or put their sum there if they are the first."""
    kind = out.dtype.type
    if first:
        for k in range(out.size):
            out[k] = kind(a[k]) + kind(b[k])
    else:
        for k in range(out.size):
            out[k] += kind(a[k]) + kind(b[k])


@jitable
def add_one(a: Any, out: Any, first: bool) -> None:
    if first:
        for k in range(out.size):
            out[k] = a[k]
    else:
        for k in range(out.size):
            out[k] += out.dtype.type(a[k])


@kernel("avg_pool2d", layout=_lines)
def avg_pool2d(
    x: Any, y: Any, rows: int, columns: int, down: int, across: int, top: int, left: int, begin: int, end: int
) -> None:
    for line in range(begin, end):
        n, i = line // y.shape[1], line % y.shape[1]
        first_h, last_h = inside(i * down - top, rows, x.shape[1])
        for j in range(y.shape[2]):
            first_w, last_w = inside(j * across - left, columns, x.shape[2])
            out, count = y[n, i, j], y.dtype.type((last_h - first_h) * (last_w - first_w))
            for h in range(first_h, last_h):
                line = x[n, h]
                for w in range(first_w, last_w - 1, 2):
                    add_two(line[w], line[w + 1], out, h == first_h and w == first_w)
                if (last_w - first_w) % 2 != 0:
                    add_one(line[last_w - 1], out, h == first_h and last_w - first_w == 1)
            for k in range(out.size):
                out[k] /= count


def _sharing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    dy, shape = inputs
    call = _windows(outputs, (dy,), attrs)
    return replace(call, views=(call.views[1], View.dense(shape.concrete), call.views[0]))


@kernel("avg_pool2d_spread", layout=_sharing)
def avg_pool2d_spread(
    dy: Any,
    shape: Any,
    dx: Any,
    rows: int,
    columns: int,
    down: int,
    across: int,
    top: int,
    left: int,
    begin: int,
    end: int,
) -> None:
    tiled = tiles(dx, dy, (rows, columns), (down, across), (top, left))
    for n in range(begin, end):
        if not tiled:
            dx[n] = 0
        for i in range(dy.shape[1]):
            first_h, last_h = inside(i * down - top, rows, dx.shape[1])
            for j in range(dy.shape[2]):
                first_w, last_w = inside(j * across - left, columns, dx.shape[2])
                slopes, count = dy[n, i, j], dx.dtype.type((last_h - first_h) * (last_w - first_w))
                for h in range(first_h, last_h):
                    for w in range(first_w, last_w):
                        out = dx[n, h, w]
                        if tiled:
                            for k in range(out.size):
                                out[k] = slopes[k] / count
                        else:
                            for k in range(out.size):
                                out[k] += slopes[k] / count


host_only("max_pool2d", "max_pool2d_spread", "max_pool2d_pick", "avg_pool2d", "avg_pool2d_spread")
