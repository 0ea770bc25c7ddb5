"""Pooling of images, channels vectorised: every inner loop runs along them, or along whole lines of images.

Of the largest entries those above each other are found first, for a whole line at once, and then the largest of these
beside each other, window by window; those of small windows at once. Entries are taken four at a time, as a loop over
few channels costs as much to enter as to run. Where there are fewer, the last one stands in for those that are missing,
which changes no maximum. Gradients go to where the largest are; those of means are written where windows tile the
images, and added to zeros, image by image, where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec, pair, sliding
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.ops.along import exceeds
from flowrt.kernels.teams.standing import divided


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


def _flat(view: View) -> View:
    """Images as (images, entries): most loops run along whole lines."""
    return view.reshape((view.shape[0], math.prod(view.shape[1:])))


def _lines_with_room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _lines(inputs, outputs, attrs)
    x, y = call.views
    return replace(call, views=(_flat(x), y, *(View.dense(s.concrete) for s in _room(inputs, outputs, attrs))))


def _room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """For the largest of entries above each other, twice to take turns, and for those of a window so far."""
    _, _, width, channels = inputs[0].concrete
    return Spec(inputs[0].dtype, (2, width * channels)), Spec(inputs[0].dtype, (channels,))


def _spreading(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _windows(inputs, outputs, attrs)
    x, dy, dx = call.views
    return replace(
        call, views=(_flat(x), dy, _flat(dx), *(View.dense(s.concrete) for s in _memory(inputs, outputs, attrs)))
    )


def _picking(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _windows(inputs, outputs, attrs)
    x, values, y = call.views
    return replace(
        call, views=(_flat(x), _flat(values), y, *(View.dense(s.concrete) for s in _memory(inputs, outputs, attrs)))
    )


def _memory(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    """For the largest of entries above each other and their places, then for those of one window.

    The third row of the former is for what comes next; else two take turns.
    """
    _, height, width, channels = inputs[0].concrete
    line, one = (3, width * channels), (3, channels)
    place = "int32" if height * width * channels < 2**31 else "int64"
    return Spec(inputs[0].dtype, line), Spec(place, line), Spec(inputs[0].dtype, one), Spec(place, one)


@jitable
def inside(first: int, count: int, size: int) -> Any:
    """The first of ``count`` places from ``first`` on that is within ``size``, and the end of those that are."""
    return max(first, 0), min(first + count, size)


@jitable
def larger_or_nan(x: Any, y: Any) -> Any:
    return x if (x > y) | (x != x) else y


@jitable
def four_from(at: int, stop: int, step: int) -> Any:
    """Where four lines or places begin, the last of them standing in for those from ``stop`` on."""
    last = stop - 1
    return at * step, min(at + 1, last) * step, min(at + 2, last) * step, min(at + 3, last) * step


@jitable
def largest_of_four(entries: Any, starts: Any, before: Any, out: Any, first: bool) -> None:
    """Put the largest of four entries, and of those ``before`` unless they are the first, into ``out``, one by one."""
    a, b, c, d = starts
    if first:
        for k in range(out.size):
            upper = larger_or_nan(entries[np.uint64(a + k)], entries[np.uint64(b + k)])
            out[k] = larger_or_nan(upper, larger_or_nan(entries[np.uint64(c + k)], entries[np.uint64(d + k)]))
    else:
        for k in range(out.size):
            upper = larger_or_nan(entries[np.uint64(a + k)], entries[np.uint64(b + k)])
            four = larger_or_nan(upper, larger_or_nan(entries[np.uint64(c + k)], entries[np.uint64(d + k)]))
            out[k] = larger_or_nan(four, before[k])


@jitable
def largest_above(image: Any, hs: Any, room: Any) -> int:
    """Find the largest of the entries above each other in some lines; the answer is which row of ``room`` tells."""
    turn = 0
    for h in range(hs[0], hs[1], 4):
        old, new = room[turn], room[1 - turn]
        largest_of_four(image, four_from(h, hs[1], new.size), old, new, h == hs[0])
        turn = 1 - turn
    return turn


@jitable
def largest_beside(line: Any, ws: Any, room: Any, out: Any) -> None:
    """Put the largest of a window's places into ``out``, in turns with ``room``."""
    for w in range(ws[0], ws[1], 4):
        starts, first = four_from(w, ws[1], out.size), w == ws[0]
        if (ws[1] - 1 - w) // 4 % 2 == 0:  # the last of them goes to the output
            largest_of_four(line, starts, room, out, first)
        else:
            largest_of_four(line, starts, out, room, first)


@jitable
def corners(hs: Any, ws: Any, wide: int, channels: int) -> Any:
    """Where the four corners of a window begin."""
    upper, lower, left, right = hs[0] * wide, (hs[1] - 1) * wide, ws[0] * channels, (ws[1] - 1) * channels
    return upper + left, upper + right, lower + left, lower + right


@kernel("max_pool2d", layout=_lines_with_room, local=_room)
def max_pool2d(arrays: Any, words: Any, begin: int, end: int) -> None:
    x, y, lines, room = arrays
    rows, columns, down, across, top, left = words
    _, height, width, channels = y.shape
    for unit in range(begin, end if channels > 0 else begin):
        n, i = unit // height, unit % height
        wide = lines.shape[1]
        hs, small = inside(i * down - top, rows, x.shape[1] // wide), rows <= 2 and columns <= 2
        line = lines[0 if small else largest_above(x[n], hs, lines)]
        for j in range(width):
            ws = inside(j * across - left, columns, wide // channels)
            if small:
                largest_of_four(x[n], corners(hs, ws, wide, channels), room, y[n, i, j], True)
            else:
                largest_beside(line, ws, room, y[n, i, j])


@jitable
def precedes(x: Any, y: Any, here: Any, there: Any) -> Any:
    """Whether ``x`` at one place comes before ``y`` at another as the first largest."""
    return exceeds(x, y) | ((here < there) & (not exceeds(y, x)))


@jitable
def first_of_four(image: Any, starts: Any, right: int, down: int, best: Any, at: Any) -> None:
    """The first largest of four entries of an image, and their places in it.

    The second and fourth lie ``right`` of the others and the last two ``down``; unless the last stands in for others,
    which never comes first.
    """
    (a, b, c, d), zero = starts, at.dtype.type(0)
    aside, below = at.dtype.type(right), at.dtype.type(down)
    for t in range(at.size):
        first, second = image[np.uint64(a + t)], image[np.uint64(b + t)]
        third, fourth = image[np.uint64(c + t)], image[np.uint64(d + t)]
        upper, lower = second if exceeds(second, first) else first, fourth if exceeds(fourth, third) else third
        above, under = aside if exceeds(second, first) else zero, aside if exceeds(fourth, third) else zero
        best[t] = lower if exceeds(lower, upper) else upper
        moved = at.dtype.type((under if exceeds(lower, upper) else above) + (below if exceeds(lower, upper) else zero))
        at[t] = at.dtype.type(moved + at.dtype.type(a + t))


@jitable
def first_beside(line: Any, places: Any, starts: Any, at: Any) -> None:
    """The places of the first largest of four neighbours in a line, whose entries come from ``places``."""
    a, b, c, d = starts
    for k in range(at.size):
        i, j, m, n = np.uint64(a + k), np.uint64(b + k), np.uint64(c + k), np.uint64(d + k)
        second, fourth = (
            precedes(line[j], line[i], places[j], places[i]),
            precedes(line[n], line[m], places[n], places[m]),
        )
        upper, lower = line[j] if second else line[i], line[n] if fourth else line[m]
        above, below = places[j] if second else places[i], places[n] if fourth else places[m]
        at[k] = below if precedes(lower, upper, below, above) else above


@jitable
def take_larger(best: Any, at: Any, turn: int) -> None:
    """Take what is in the last rows into account, from row ``turn`` to the other."""
    old, new, before, after = best[turn], best[1 - turn], at[turn], at[1 - turn]
    more, there = best[2], at[2]
    for t in range(new.size):
        after[t] = there[t] if precedes(more[t], old[t], there[t], before[t]) else before[t]
    for t in range(new.size):
        new[t] = larger_or_nan(old[t], more[t])


@jitable
def find_above(image: Any, hs: Any, best: Any, at: Any) -> int:
    """Find the first largest of the entries above each other; the answer is which row of ``best`` and ``at`` tells."""
    turn = 0
    for h in range(hs[0], hs[1], 4):
        starts, to = four_from(h, hs[1], at.shape[1]), 0 if h == hs[0] else 2
        first_of_four(image, starts, at.shape[1], 2 * at.shape[1], best[to], at[to])
        if to == 2:
            take_larger(best, at, turn)
            turn = 1 - turn
    return turn


@jitable
def find_beside(line: Any, places: Any, ws: Any, best: Any, at: Any) -> int:
    """As `find_above`, of a window's places in a line."""
    turn = 0
    for w in range(ws[0], ws[1], 4):
        starts, to = four_from(w, ws[1], at.shape[1]), 0 if w == ws[0] else 2
        first_beside(line, places, starts, at[to])
        if ws[1] - ws[0] > 4:
            largest_of_four(line, starts, best[to], best[to], True)
        if to == 2:
            take_larger(best, at, turn)
            turn = 1 - turn
    return turn


@kernel("max_pool2d_spread", layout=_spreading, local=_memory)
def max_pool2d_spread(arrays: Any, words: Any, begin: int, end: int) -> None:
    x, dy, dx, lines, places, best, at = arrays
    rows, columns, down, across, top, left = words
    _, height, width, channels = dy.shape
    for n in range(begin, end if channels > 0 else begin):
        out, wide, small = dx[n], lines.shape[1], rows <= 2 and columns <= 2
        out[:] = 0
        for i in range(height):
            hs = inside(i * down - top, rows, out.size // wide)
            turn = 0 if small else find_above(x[n], hs, lines, places)
            line, froms = lines[turn], places[turn]
            for j in range(width):
                ws, slopes = inside(j * across - left, columns, wide // channels), dy[n, i, j]
                if small:
                    first_of_four(x[n], corners(hs, ws, wide, channels), channels, wide, best[0], at[0])
                found = at[0 if small else find_beside(line, froms, ws, best, at)]
                for k in range(channels):
                    out[np.uint64(found[k])] += slopes[k]


@kernel("max_pool2d_pick", layout=_picking, local=_memory)
def max_pool2d_pick(arrays: Any, words: Any, begin: int, end: int) -> None:
    x, values, y, lines, places, best, at = arrays
    rows, columns, down, across, top, left = words
    _, height, width, channels = y.shape
    for n in range(begin, end if channels > 0 else begin):
        wide, given = lines.shape[1], values[n]
        for i in range(height):
            turn = find_above(x[n], inside(i * down - top, rows, given.size // wide), lines, places)
            line, froms = lines[turn], places[turn]
            for j in range(width):
                ws, out = inside(j * across - left, columns, wide // channels), y[n, i, j]
                found = at[find_beside(line, froms, ws, best, at)]
                for k in range(channels):
                    out[k] = given[np.uint64(found[k])]


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


@jitable
def mean_of_corners(upper: Any, lower: Any, left: int, right: int, out: Any) -> None:
    """Put the mean of a small window's corners into ``out``: of fewer entries, each stands in as often as others."""
    kind = out.dtype.type
    a, b, c, d, share = upper[left], upper[right], lower[left], lower[right], kind(0.25)
    for k in range(out.size):
        out[k] = (kind(a[k]) * share + kind(b[k]) * share) + (kind(c[k]) * share + kind(d[k]) * share)


@kernel("avg_pool2d", layout=_lines)
def avg_pool2d(
    x: Any, y: Any, rows: int, columns: int, down: int, across: int, top: int, left: int, begin: int, end: int
) -> None:
    for line in range(begin, end):
        n, i = line // y.shape[1], line % y.shape[1]
        first_h, last_h = inside(i * down - top, rows, x.shape[1])
        for j in range(y.shape[2]):
            first_w, last_w = inside(j * across - left, columns, x.shape[2])
            if rows <= 2 and columns <= 2:
                mean_of_corners(x[n, first_h], x[n, last_h - 1], first_w, last_w - 1, y[n, i, j])
                continue
            out, count = y[n, i, j], y.dtype.type((last_h - first_h) * (last_w - first_w))
            for h in range(first_h, last_h):
                line = x[n, h]
                for w in range(first_w, last_w - 1, 2):
                    add_two(line[w], line[w + 1], out, h == first_h and w == first_w)
                if (last_w - first_w) % 2 != 0:
                    add_one(line[last_w - 1], out, h == first_h and last_w - first_w == 1)
            for k in range(out.size):
                out[k] /= count


@jitable
def tiles(x: Any, y: Any, window: Any, strides: Any, before: Any) -> bool:
    """Whether every entry of ``x`` lies in exactly one window."""
    rows, columns = window
    whole = y.shape[1] * rows == x.shape[1] and y.shape[2] * columns == x.shape[2]
    return bool(whole and strides == window and before == (0, 0))


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


# ── on CUDA: every thread has one window of a channel at a time, or one entry of the images ──────────────────────────


@jitable
def place_of(entry: int, shape: Any) -> Any:
    """The indices of an entry of four axes."""
    place, k = divided(entry, shape[3])
    row, j = divided(place, shape[2])
    n, i = divided(row, shape[1])
    return n, i, j, k


@jitable
def largest_on_cuda(x: Any, n: int, k: int, hs: Any, ws: Any) -> Any:
    """The largest entry of a window, and its place: NaN, and the first, before all others."""
    best, row, column = x[n, hs[0], ws[0], k], hs[0], ws[0]
    for h in range(hs[0], hs[1]):
        for w in range(ws[0], ws[1]):
            if exceeds(x[n, h, w, k], best):
                best, row, column = x[n, h, w, k], h, w
    return best, row, column


@kernel("max_pool2d", "cuda", layout=_windows)
def max_pool2d_on_cuda(x: Any, y: Any, rows: int, columns: int, down: int, across: int, top: int, left: int) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        n, i, j, k = place_of(entry, y.shape)
        hs, ws = inside(i * down - top, rows, x.shape[1]), inside(j * across - left, columns, x.shape[2])
        y[n, i, j, k] = largest_on_cuda(x, n, k, hs, ws)[0]
        entry += cuda.gridsize(1)


@kernel("max_pool2d_pick", "cuda", layout=_windows)
def max_pool2d_pick_on_cuda(
    x: Any, values: Any, y: Any, rows: int, columns: int, down: int, across: int, top: int, left: int
) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        n, i, j, k = place_of(entry, y.shape)
        hs, ws = inside(i * down - top, rows, x.shape[1]), inside(j * across - left, columns, x.shape[2])
        _, row, column = largest_on_cuda(x, n, k, hs, ws)
        y[n, i, j, k] = values[n, row, column, k]
        entry += cuda.gridsize(1)


@jitable
def windows_over(at: int, before: int, size: int, stride: int, count: int) -> Any:
    """The first window that sees a place, and the end of those that do."""
    seen = at + before
    first = divided(seen - size, stride)[0] + 1 if seen >= size else 0
    return first, min(divided(seen, stride)[0] + 1, count)


@kernel("max_pool2d_spread", "cuda", layout=_windows)
def max_pool2d_spread_on_cuda(
    x: Any, dy: Any, dx: Any, rows: int, columns: int, down: int, across: int, top: int, left: int
) -> None:
    """An entry of the images adds up the slopes of the windows in which it is the largest, in their order."""
    entry = cuda.grid(1)
    while entry < dx.size:
        n, h, w, k = place_of(entry, dx.shape)
        total = dx.dtype.type(0)
        first_i, last_i = windows_over(h, top, rows, down, dy.shape[1])
        first_j, last_j = windows_over(w, left, columns, across, dy.shape[2])
        for i in range(first_i, last_i):
            for j in range(first_j, last_j):
                hs, ws = inside(i * down - top, rows, x.shape[1]), inside(j * across - left, columns, x.shape[2])
                _, row, column = largest_on_cuda(x, n, k, hs, ws)
                if row == h and column == w:
                    total += dy[n, i, j, k]
        dx[n, h, w, k] = total
        entry += cuda.gridsize(1)


@kernel("avg_pool2d", "cuda", layout=_windows)
def avg_pool2d_on_cuda(x: Any, y: Any, rows: int, columns: int, down: int, across: int, top: int, left: int) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        n, i, j, k = place_of(entry, y.shape)
        first_h, last_h = inside(i * down - top, rows, x.shape[1])
        first_w, last_w = inside(j * across - left, columns, x.shape[2])
        total = y.dtype.type(0)
        for h in range(first_h, last_h):
            for w in range(first_w, last_w):
                total += x[n, h, w, k]
        y[n, i, j, k] = total / ((last_h - first_h) * (last_w - first_w))
        entry += cuda.gridsize(1)


@kernel("avg_pool2d_spread", "cuda", layout=_sharing)
def avg_pool2d_spread_on_cuda(
    dy: Any, shape: Any, dx: Any, rows: int, columns: int, down: int, across: int, top: int, left: int
) -> None:
    entry = cuda.grid(1)
    while entry < dx.size:
        n, h, w, k = place_of(entry, dx.shape)
        total = dx.dtype.type(0)
        first_i, last_i = windows_over(h, top, rows, down, dy.shape[1])
        first_j, last_j = windows_over(w, left, columns, across, dy.shape[2])
        for i in range(first_i, last_i):
            for j in range(first_j, last_j):
                hs, ws = inside(i * down - top, rows, dx.shape[1]), inside(j * across - left, columns, dx.shape[2])
                total += dy[n, i, j, k] / ((hs[1] - hs[0]) * (ws[1] - ws[0]))
        dx[n, h, w, k] = total
        entry += cuda.gridsize(1)
