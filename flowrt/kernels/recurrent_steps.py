"""What the launches of a recurrent layer compute: weights packed, inputs added up, and time steps, forward and back.

A step is computed for a rectangle of the batch's rows and the layer's units: a panel's columns of all gates at a time,
first their sums, then what is made of them while they are near. States and all that is kept of a step lie as it is
computed: in blocks of rows, of these a panel's columns, of these one of the six after another, its rows side by side.
So loops of elementary functions are long however narrow a panel is. What products read lies row by row.

Elementwise work is cut into loops over few arrays: LLVM vectorises a loop only where it has few pairs to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from flowrt.kernels import micro
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry
from flowrt.kernels.panels import address, banding, panelling, repeat_last
from flowrt.kernels.table import jitable

KEPT, GATES = 6, 4  # what is kept of each step: i, f, g, o, the c before and the tanh of c
BLOCK = 16  # rows of the batch: a panel is used several times while it is near, and so are its sums
GROUP = 8  # column panels that are packed together: rows of weights are far apart, on pages of their own
DEEP = 2048  # terms that are multiplied together: a second cache holds a panel of them beside some rows
ONE = np.float32(1)  # float64 where what it meets is


# ── what kernels call ────────────────────────────────────────────────────────────────────────────────────────────────


@jitable
def put(target: Any, source: Any) -> None:
    """Copy a row."""
    for k in range(target.size):
        target[k] = source[k]


@jitable
def fill(table: Any, count: int, step: int, across: int) -> None:
    """A table of ``count`` rows that lie ``step`` apart, their results ``across``."""
    half = table.size // 2
    for r in range(count):
        table[r], table[half + r] = r * step, r * across
    repeat_last(table, count)


@cache
def multiplying(geometry: Geometry) -> Callable[..., None]:
    """``multiply(like, (rows, panel, results), shape, table, (start, edges), memory)``: rows times a column panel.

    ``shape`` is (count, depth, columns): of rows, of numbers in a row, of columns. Rows and results lie as ``table``
    says, from two addresses on; sums begin with ``start``, the bias with ``edges``.
    """
    band, full = banding(geometry), geometry.vectors * geometry.width

    @jitable
    def multiply(like: Any, at: Any, shape: Any, table: Any, begin: Any, memory: Any) -> None:
        (count, depth, columns), (taps, stage, places) = shape, memory
        reach, how = (1, depth, 1, full // like.itemsize), (begin[0], begin[1], 0)
        band(like, at, table, count, taps, reach, columns, stage, places, how)

    return multiply


@cache
def moving(geometry: Geometry) -> Callable[..., None]:
    """``carry(like, (source, step), (target, target_step), rows, columns)``: the columns of a panel, as they lie."""
    copy, move = micro.copy(geometry.vectors, geometry.width), micro.move()
    full = geometry.vectors * geometry.width

    @jitable
    def carry(like: Any, source: Any, target: Any, rows: int, columns: int) -> None:
        if columns * like.itemsize == full:
            copy(like, (source[0], source[1], target[0], target[1], rows))
        else:
            move(like, (source[0], source[1], 1, target[0], target[1], rows, columns))

    return carry


@cache
def trading(geometry: Geometry) -> Callable[..., None]:
    """``trade(blocks, whole, span, inward)``: some rows and columns of a state from where it lies whole, or there.

    A state in blocks lies as each of the six does that are kept, but for their number.
    """
    carry, full = moving(geometry), geometry.vectors * geometry.width

    @jitable
    def trade(blocks: Any, whole: Any, span: Any, inward: bool) -> None:
        (begin, end, first, last), (batch, units), size = span, whole.shape, whole.itemsize
        for start in range(begin, end, BLOCK):
            count = min(BLOCK, batch - start)
            for j in range(first, last, full // size):
                columns = min(full // size, units - j)
                near = address(blocks) + (start * units + j * count) * size, columns
                far = address(whole) + (start * units + j) * size, units
                carry(whole, far if inward else near, near if inward else far, count, columns)

    return trade


def gating(sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    @jitable
    def gates(kept: Any, at: int, apart: int, cell: Any, y: Any) -> None:
        """From sums to the gates, the cell after what it was before, which is kept, and the output.

        What is kept lies ``apart``, from ``at`` on.
        """
        n = cell.size
        i, f, g = kept[at : at + n], kept[at + apart : at + apart + n], kept[at + 2 * apart : at + 2 * apart + n]
        o, before = kept[at + 3 * apart : at + 3 * apart + n], kept[at + 4 * apart : at + 4 * apart + n]
        bent = kept[at + 5 * apart : at + 5 * apart + n]
        for k in range(n):
            i[k] = sigmoid(i[k])
        for k in range(n):
            f[k] = sigmoid(f[k])
        for k in range(n):
            g[k] = tanh(g[k])
        for k in range(n):
            o[k] = sigmoid(o[k])
        for k in range(n):
            before[k] = cell[k]
        for k in range(n):
            cell[k] = f[k] * cell[k] + i[k] * g[k]
        for k in range(n):
            bent[k] = tanh(cell[k])
        for k in range(n):
            y[k] = o[k] * bent[k]

    return gates


@jitable
def ungates(kept: Any, at: int, apart: int, dh: Any, dc: Any, fresh: Any) -> None:
    """From what is known of a step and the gradients of h and c behind it to those of its sums and of the c before.

    The sums' are the first four parts of ``fresh``; the last one is the gradient of the step's own output.
    """
    n = dh.size
    i, f, g = kept[at : at + n], kept[at + apart : at + apart + n], kept[at + 2 * apart : at + 2 * apart + n]
    o, before = kept[at + 3 * apart : at + 3 * apart + n], kept[at + 4 * apart : at + 4 * apart + n]
    bent = kept[at + 5 * apart : at + 5 * apart + n]
    di, df, dg, do, dy = fresh[:n], fresh[n : 2 * n], fresh[2 * n : 3 * n], fresh[3 * n : 4 * n], fresh[4 * n : 5 * n]
    for k in range(n):
        dh[k] += dy[k]
    for k in range(n):
        do[k] = dh[k] * bent[k] * (o[k] * (ONE - o[k]))
    for k in range(n):
        dc[k] += dh[k] * o[k] * (ONE - bent[k] * bent[k])
    for k in range(n):
        di[k] = dc[k] * g[k] * (i[k] * (ONE - i[k]))
    for k in range(n):
        df[k] = dc[k] * before[k] * (f[k] * (ONE - f[k]))
    for k in range(n):
        dg[k] = dc[k] * i[k] * (ONE - g[k] * g[k])
    for k in range(n):
        dc[k] *= f[k]


# ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def lstm_weights(geometry: Geometry) -> Callable[..., None]:
    """Packs both weights and the bias, each gate's by itself, and the cell; some panels of a gate are a unit."""
    pack_all, trade, full = panelling(geometry), trading(geometry), geometry.vectors * geometry.width

    def lstm_weights(arrays: Any, words: Any, begin: int, end: int) -> None:
        c, w_x, w_h, bias, from_x, from_h, edges, cells = arrays
        size, batch, units = c.itemsize, c.shape[0], c.shape[1]
        wide, groups = full // size, words[0]
        for unit in range(begin, end):
            gate, first = unit // groups, unit % groups * GROUP * wide
            count, at = min(GROUP * wide, units - first), gate * units + first
            for w, panels in ((w_x, from_x), (w_h, from_h)):
                to = address(panels[gate]) + first * w.shape[0] * size
                pack_all(w, address(w) + at * size, bias.size, 1, w.shape[0], count, to)
            put(edges[gate][first : first + count], bias[at : at + count])
            trade(cells, c, (0, batch if gate == 0 else 0, first, first + count), True)

    return lstm_weights


def lstm_inputs(geometry: Geometry) -> Callable[..., None]:
    """Adds up what the inputs of all steps come to, and the bias; some blocks of a step's rows are a unit."""
    multiply, full = multiplying(geometry), geometry.vectors * geometry.width

    def lstm_inputs(arrays: Any, words: Any, begin: int, end: int) -> None:
        x, from_x, edges, kept, table = arrays[:5]
        memory, some, (steps, batch, width), units = arrays[5:], words[0], x.shape, words[1]
        blocks, size, rows, across = (batch + BLOCK - 1) // BLOCK, x.itemsize, 0, 0
        memory[0][0] = memory[0][1] = 0
        for first in range(begin * some, min(end * some, steps * blocks), some):
            for gate in range(GATES):
                for j in range(0, units, full // size):
                    columns = min(full // size, units - j)
                    panel, edge = address(from_x[gate]) + j * width * size, address(edges[gate]) + j * size
                    for block in range(first, min(first + some, steps * blocks)):
                        t, start = block // blocks, block % blocks * BLOCK
                        count = min(BLOCK, batch - start)
                        if count != rows or columns != across:
                            fill(table, count, width, columns)
                            rows, across = count, columns
                        to = address(kept[t]) + (KEPT * (start * units + j * count) + gate * count * columns) * size
                        at = address(x) + (t * batch + start) * width * size, panel, to
                        multiply(x, at, (count, width, columns), table, (START_BIAS, edge), memory)

    return lstm_inputs


@cache
def turning(geometry: Geometry, sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """``turn((h, from_h, cells, kept, fresh, table), to, span, memory)``: one step of some rows and columns.

    ``to`` are the addresses of the h after it, the last c, the output and the h before; ``span`` is from which row, to
    which, from which column, to which.
    """
    multiply, carry, gates = multiplying(geometry), moving(geometry), gating(sigmoid, tanh)
    full = geometry.vectors * geometry.width

    @jitable
    def leave(h: Any, cell: int, fresh: int, to: Any, span: Any) -> None:
        """Put the h before, the one after and the cell in their places."""
        (following, last_c, y, before), (j, columns, start, count) = to, span
        units, size = h.shape[1], h.itemsize
        at = (start * units + j) * size
        carry(h, (address(h) + at, units), (before + at, units), count, columns)
        carry(h, (cell, columns), (last_c + at, units), count, columns)
        carry(h, (fresh, columns), (y + at, units), count, columns)
        carry(h, (fresh, columns), (following + at, units), count, columns)

    @jitable
    def turn(arrays: Any, to: Any, span: Any, memory: Any) -> None:
        (h, from_h, cells, kept, fresh, table), (begin, end, first, last) = arrays, span
        (batch, units), size, rows, across = h.shape, h.itemsize, 0, 0
        for j in range(first, last, full // size):
            columns = min(full // size, units - j)
            for gate in range(GATES):
                panel = address(from_h[gate]) + j * units * size
                for start in range(begin, end, BLOCK):
                    count = min(BLOCK, batch - start)
                    if count != rows or columns != across:
                        fill(table, count, units, columns)
                        rows, across = count, columns
                    sums = address(kept) + (KEPT * (start * units + j * count) + gate * count * columns) * size
                    where = address(h) + start * units * size, panel, sums
                    multiply(h, where, (count, units, columns), table, (START_STORED, 0), memory)
            for start in range(begin, end, BLOCK):
                count = min(BLOCK, batch - start)
                at, some = start * units + j * count, count * columns
                gates(kept, KEPT * at, some, cells[at : at + some], fresh[:some])
                leave(h, address(cells) + at * size, address(fresh), to, (j, columns, start, count))

    return turn


def lstm_turn(geometry: Geometry, sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """One step of all rows; a panel's columns of each gate are a unit."""
    turn, full = turning(geometry, sigmoid, tanh), geometry.vectors * geometry.width

    def lstm_turn(arrays: Any, words: Any, begin: int, end: int) -> None:
        h, from_h, cells, following, last_c, y, before, kept, fresh, table = arrays[:10]
        memory, near, wide = arrays[10:], words[0], full // h.itemsize
        first, last = begin * wide, min(end * wide, h.shape[1])
        memory[0][0] = memory[0][1] = 0
        to = address(following), address(last_c), address(y), address(before)
        for start in range(0, h.shape[0], near):
            span = start, min(start + near, h.shape[0]), first, last
            turn((h, from_h, cells, kept, fresh, table), to, span, memory)

    return lstm_turn


def lstm_rows(geometry: Geometry, sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """All steps of some rows; `BLOCK` rows are a unit."""
    turn = turning(geometry, sigmoid, tanh)

    def lstm_rows(arrays: Any, words: Any, begin: int, end: int) -> None:
        h, c, from_h, cells, last_h, last_c, y, before, kept, fresh, table = arrays[:11]
        memory, near, (batch, units), steps = arrays[11:], words[0], h.shape, y.shape[0]
        first, last = min(begin * BLOCK, batch), min(end * BLOCK, batch)
        memory[0][0] = memory[0][1] = 0
        for r in range(first, last if steps == 0 else first):
            put(last_h[r], h[r])
            put(last_c[r], c[r])
        for start in range(first, last, near):
            span = start, min(start + near, last), 0, units
            for t in range(steps):
                now, following = before[t] if t > 0 else h, before[t + 1] if t + 1 < steps else last_h
                to = address(following), address(last_c), address(y[t]), address(before[t])
                turn((now, from_h, cells, kept[t], fresh, table), to, span, memory)

    return lstm_rows


# ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lstm_weights_grad(geometry: Geometry) -> Callable[..., None]:
    """Packs the transposed weights: a unit is a panel of all gates' columns."""
    pack_all, full = panelling(geometry), geometry.vectors * geometry.width

    def lstm_weights_grad(arrays: Any, words: Any, begin: int, end: int) -> None:
        w_h, panels = arrays
        size, units, sums = w_h.itemsize, w_h.shape[0], w_h.shape[1]
        wide = full // size
        for j in range(begin * wide, min(end * wide, units), wide):
            here, to = address(w_h) + j * sums * size, address(panels) + j * sums * size
            pack_all(w_h, here, 1, sums, sums, min(wide, units - j), to)

    return lstm_weights_grad


@cache
def returning(geometry: Geometry) -> Callable[..., None]:
    """``back((later, panels, dy, kept, dh, dc, ds, fresh, table), how, span, memory)``: some rows and columns.

    The product that ends the step after, and one step down to its sums; ``how`` says which of the two, ``span`` is as
    in `turning`. States lie as what is kept does; ``fresh`` is as in `ungates`.
    """
    multiply, carry, full = multiplying(geometry), moving(geometry), geometry.vectors * geometry.width

    @jitable
    def product(arrays: Any, j: int, begin: int, end: int, memory: Any) -> None:
        """Some gates' terms after another, so that a second cache holds a panel of them beside the rows."""
        (later, panels, dh, table), size = arrays, arrays[0].itemsize
        (batch, sums), wide, rows = later.shape, full // size, 0
        units = sums // GATES
        columns, some = min(wide, units - j), max(min(DEEP // max(units, 1), GATES), 1)
        for gate in range(0, GATES, some):
            depth, how = units * min(some, GATES - gate), START_STORED if gate else START_ZERO
            panel = address(panels) + (j * GATES + gate * wide) * units * size
            for start in range(begin, end, BLOCK):
                count = min(BLOCK, batch - start)
                if count != rows:
                    fill(table, count, sums, columns)
                    rows = count
                left, to = address(later) + (start * sums + gate * units) * size, (start * units + j * count) * size
                multiply(later, (left, panel, address(dh) + to), (count, depth, columns), table, (how, 0), memory)

    @jitable
    def step(dy: Any, kept: Any, dh: Any, dc: Any, ds: Any, fresh: Any, span: Any) -> None:
        (j, columns, start, count), units, size = span, dy.shape[1], dy.itemsize
        at, some = start * units + j * count, count * columns
        own = address(fresh) + GATES * some * size, columns
        carry(dy, (address(dy) + (start * units + j) * size, units), own, count, columns)
        ungates(kept, KEPT * at, some, dh[at : at + some], dc[at : at + some], fresh)
        for gate in range(GATES):
            to = address(ds) + ((start * GATES + gate) * units + j) * size, GATES * units
            carry(dy, (address(fresh) + gate * some * size, columns), to, count, columns)

    @jitable
    def back(arrays: Any, how: Any, span: Any, memory: Any) -> None:
        (later, panels, dy, kept, dh, dc, ds, fresh, table), (begin, end, first, last) = arrays, span
        (batch, units), wide = dy.shape, full // dy.itemsize
        for j in range(first, last, wide):
            if how[0]:
                product((later, panels, dh, table), j, begin, end, memory)
            for start in range(begin, end if how[1] else begin, BLOCK):
                own = j, min(wide, units - j), start, min(BLOCK, batch - start)
                step(dy, kept, dh, dc, ds, fresh, own)

    return back


def lstm_turn_grad(geometry: Geometry) -> Callable[..., None]:
    """The product that ends the step after, and one step; a panel's columns are a unit.

    The words say how many rows are multiplied together, and whether the gradients of the last h and c are taken, there
    is a product, there is a step, and the gradients of the first h and c are left.
    """
    back, trade, full = returning(geometry), trading(geometry), geometry.vectors * geometry.width

    def lstm_turn_grad(arrays: Any, words: Any, begin: int, end: int) -> None:
        later, panels, given_h, given_c, dy, kept, dhs, dcs, ds, dh, dc, fresh, table = arrays[:13]
        memory, (near, taken, multiplied, stepped, left) = arrays[13:], words
        (batch, units), wide = dy.shape, full // dy.itemsize
        memory[0][0] = memory[0][1] = 0
        for start in range(0, batch, near):
            span = start, min(start + near, batch), begin * wide, min(end * wide, units)
            if taken:
                trade(dhs, given_h, span, True)
                trade(dcs, given_c, span, True)
            arrays_here = later, panels, dy, kept, dhs, dcs, ds, fresh, table
            back(arrays_here, (multiplied, stepped), span, memory)
            if left:
                trade(dhs, dh, span, False)
                trade(dcs, dc, span, False)

    return lstm_turn_grad


def lstm_rows_grad(geometry: Geometry) -> Callable[..., None]:
    """All steps of some rows; `BLOCK` rows are a unit."""
    back, trade = returning(geometry), trading(geometry)

    def lstm_rows_grad(arrays: Any, words: Any, begin: int, end: int) -> None:
        panels, given_h, given_c, dy, kept, dhs, dcs, ds, dh, dc, fresh, table = arrays[:12]
        memory, near, (batch, units), steps = arrays[12:], words[0], dh.shape, dy.shape[0]
        first, last = min(begin * BLOCK, batch), min(end * BLOCK, batch)
        memory[0][0] = memory[0][1] = 0
        for start in range(first, last, near):
            span = start, min(start + near, last), 0, units
            trade(dhs, given_h, span, True)
            trade(dcs, given_c, span, True)
            for t in range(steps - 1, -2 if steps > 0 else -1, -1):
                now, how = max(t, 0), (t + 1 < steps, t >= 0)
                later = ds[min(t + 1, steps - 1)]
                back((later, panels, dy[now], kept[now], dhs, dcs, ds[now], fresh, table), how, span, memory)
            trade(dhs, dh, span, False)
            trade(dcs, dc, span, False)

    return lstm_rows_grad
