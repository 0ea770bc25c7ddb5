"""What the launches of a recurrent layer compute: weights packed, inputs added up, and time steps, forward and back.

A step is computed for a rectangle of the batch's rows and the layer's units: a panel's columns of all gates at a time,
first their sums, then what is made of them while they are near. States and all that is kept of a step lie as it is
computed: in blocks of rows, of these a panel's columns, of these one of the six after another, its rows side by side.
So loops of elementary functions are long however narrow a panel is. What products read lies row by row.

All but the elementwise work is compiled once for both dtypes: it sees floats as bytes, and knows sizes and addresses.
That is a kernel of each dtype, which the others call. It is cut into loops over few arrays: LLVM vectorises a loop only
where it has few pairs to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.micro import START_BIAS, START_STORED, START_ZERO, Tiles, call
from flowrt.kernels.tiles.panels import address, band, duplicate, pack_all, repeat_last

KEPT, GATES = 6, 4  # what is kept of each step: i, f, g, o, the c before and the tanh of c
BLOCK = 16  # rows of the batch: a panel is used several times while it is near, and so are its sums
GROUP = 8  # column panels that are packed together: rows of weights are far apart, on pages of their own
DEEP = 2048  # terms that are multiplied together: a second cache holds a panel of them beside some rows
ONE = np.float32(1)  # float64 where what it meets is
OWN = len(Tiles._fields)  # of a launch's tiles; behind those is the elementwise kernel


class Product(NamedTuple):
    """What products need of a thread's own memory."""

    table: Any
    taps: Any
    stage: Any
    places: Any


class RecurrentMemory(NamedTuple):
    """A thread's own memory: room for what it makes of some sums, for an elementwise kernel's block, for products."""

    fresh: Any
    asked: Any
    product: Product


ASKED = 21  # words for the addresses of four operands, behind a word that nobody reads, and a block


# ── elementwise ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gating(sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """What is elementwise in a step of an LSTM, by way of these functions of one dtype."""

    def lstm_gates(kept: Any, cells: Any, outputs: Any) -> None:
        """From sums to the gates, the cell after what it was before, which is kept, and the output."""
        i, f, g, o, before, bent = kept[0], kept[1], kept[2], kept[3], kept[4], kept[5]
        cell, y, n = cells[0], outputs[0], kept.shape[1]
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

    return lstm_gates


def lstm_gates_grad(kept: Any, dhs: Any, dcs: Any, fresh: Any) -> None:
    """From what is known of a step and the gradients of h and c behind it to those of its sums and of the c before.

    The sums' are the first four rows of ``fresh``; the last one is the gradient of the step's own output.
    """
    i, f, g, o, before, bent = kept[0], kept[1], kept[2], kept[3], kept[4], kept[5]
    di, df, dg, do, dy = fresh[0], fresh[1], fresh[2], fresh[3], fresh[4]
    dh, dc, n = dhs[0], dcs[0], kept.shape[1]
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


@jitable
def ask(entry: int, asked: Any, operands: Any, count: int) -> None:
    """Have an elementwise kernel compute on ``operands``: addresses, and how many rows of ``count`` entries are there.

    ``asked`` becomes the bases and the block of its launch.
    """
    slots = 1 + len(operands)
    dims = slots + 2 * len(operands)
    for n in range(len(operands)):
        asked[1 + n] = operands[n][0]
        asked[slots + 2 * n], asked[slots + 2 * n + 1] = 1 + n, 0
        asked[dims + 2 * n], asked[dims + 2 * n + 1] = operands[n][1], count
    call(entry, (address(asked), address(asked) + 8 * slots, 0, 1))


# ── what both directions do ──────────────────────────────────────────────────────────────────────────────────────────


@jitable
def fill(table: Any, count: int, step: int, across: int) -> None:
    """A table of ``count`` rows that lie ``step`` apart, their results ``across``."""
    half = table.size // 2
    for r in range(count):
        table[r], table[half + r] = r * step, r * across
    repeat_last(table, count)


@jitable
def multiply(tiles: Tiles, at: Any, shape: Any, own: Product, start: int, edges: int) -> None:
    """Rows times a column panel: ``at`` are the addresses of the rows, the panel and the results.

    ``shape`` is (count, depth, columns): of rows, of numbers in a row, of columns. Rows and results lie as the table
    says; sums begin with ``start``, the bias with ``edges``.
    """
    count, depth, columns = shape
    reach, how = (1, depth, 1, tiles.wide), (start, edges, 0)
    band(tiles, at, own.table, count, own.taps, reach, columns, own.stage, own.places, how)


@jitable
def carry(tiles: Tiles, source: Any, target: Any, rows: int, columns: int) -> None:
    """The columns of a panel, as they lie, between pairs of an address and the step from row to row."""
    if columns == tiles.wide:
        call(tiles.copy, (source[0], source[1], target[0], target[1], rows))
    else:
        call(tiles.move, (source[0], source[1], 1, target[0], target[1], rows, columns))


@jitable
def trade(tiles: Tiles, blocks: int, whole: int, sizes: Any, span: Any, inward: bool) -> None:
    """Some rows and columns of a state from where it lies whole, or there.

    A state in blocks lies as each of the six does that are kept, but for their number.
    """
    (begin, end, first, last), (batch, units), size = span, sizes, tiles.size
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, batch - start)
        for j in range(first, last, tiles.wide):
            columns = min(tiles.wide, units - j)
            near = blocks + (start * units + j * count) * size, columns
            far = whole + (start * units + j) * size, units
            carry(tiles, far if inward else near, near if inward else far, count, columns)


@jitable
def share(tiles: Tiles, sizes: Any, by_rows: int, begin: int, end: int) -> Any:
    """Which rows and columns units are, from which to which: `BLOCK` rows each, or a panel's columns of each gate."""
    batch, units = sizes
    if by_rows:
        return min(begin * BLOCK, batch), min(end * BLOCK, batch), 0, units
    return 0, batch, begin * tiles.wide, min(end * tiles.wide, units)


# ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def lstm_weights(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """Packs both weights and the bias, each gate's by itself, and the cell; some panels of a gate are a unit."""
    c, w_x, w_h, bias, from_x, from_h, edges, cells = arrays
    (batch, width, units, groups), made = words, Tiles(*tiles)
    size, some = made.size, GROUP * made.wide
    padded = (units + made.wide - 1) // made.wide * made.wide
    for unit in range(begin, end):
        gate, first = unit // groups, unit % groups * some
        count, at, to = min(some, units - first), gate * units + first, gate * padded + first
        weights = (address(w_x), address(from_x), width), (address(w_h), address(from_h), units)
        for source, target, depth in weights:
            pack_all(made, source + at * size, GATES * units, 1, depth, count, target + to * depth * size)
        duplicate(made, address(bias) + at * size, address(edges) + to * size, count)
        span = 0, batch if gate == 0 else 0, first, first + count
        trade(made, address(cells), address(c), (batch, units), span, True)


def lstm_inputs(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """Adds up what the inputs of all steps come to, and the bias; some blocks of a step's rows are a unit."""
    (x, from_x, edges, kept, table, taps, stage, places), made = arrays, Tiles(*tiles)
    (steps, batch, width, units, some), own = words, Product(table, taps, stage, places)
    size, wide, rows, across = made.size, made.wide, 0, 0
    padded, blocks = (units + wide - 1) // wide * wide, (batch + BLOCK - 1) // BLOCK
    taps[0] = taps[1] = 0
    for first in range(begin * some, min(end * some, steps * blocks), some):
        for gate in range(GATES):
            for j in range(0, units, wide):
                columns = min(wide, units - j)
                column = gate * padded + j
                panel, edge = address(from_x) + column * width * size, address(edges) + column * size
                for block in range(first, min(first + some, steps * blocks)):
                    t, start = block // blocks, block % blocks * BLOCK
                    count = min(BLOCK, batch - start)
                    if count != rows or columns != across:
                        fill(table, count, width, columns)
                        rows, across = count, columns
                    sums = KEPT * (t * batch * units + start * units + j * count) + gate * count * columns
                    at = address(x) + (t * batch + start) * width * size, panel, address(kept) + sums * size
                    multiply(made, at, (count, width, columns), own, START_BIAS, edge)


class RecurrentStep(NamedTuple):
    """Addresses of what a step reads and writes: of the h before it and after it, and where the first is kept."""

    h: int
    following: int
    last_c: int
    y: int
    before: int
    from_h: int
    cells: int
    kept: int


@jitable
def leave(tiles: Tiles, at: RecurrentStep, units: int, own: Any, fresh: int, count: int, columns: int) -> None:
    """Put the h before, the one after and the cell of a block in their places; ``own`` are its entry and its cell."""
    here, cell = own
    if at.h != at.before:  # the step before has put it there
        carry(tiles, (at.h + here, units), (at.before + here, units), count, columns)
    carry(tiles, (cell, columns), (at.last_c + here, units), count, columns)
    carry(tiles, (fresh, columns), (at.y + here, units), count, columns)
    carry(tiles, (fresh, columns), (at.following + here, units), count, columns)


@jitable
def turn(tiles: Tiles, gates: int, at: RecurrentStep, sizes: Any, span: Any, memory: RecurrentMemory) -> None:
    """One step of some rows and columns; ``span`` is from which row, to which, from which column, to which."""
    (batch, units), (begin, end, first, last) = sizes, span
    size, rows, across = tiles.size, 0, 0
    padded = (units + tiles.wide - 1) // tiles.wide * tiles.wide
    for j in range(first, last, tiles.wide):
        columns = min(tiles.wide, units - j)
        for gate in range(GATES):
            panel = at.from_h + (gate * padded + j) * units * size
            for start in range(begin, end, BLOCK):
                count = min(BLOCK, batch - start)
                if count != rows or columns != across:
                    fill(memory.product.table, count, units, columns)
                    rows, across = count, columns
                sums = at.kept + (KEPT * (start * units + j * count) + gate * count * columns) * size
                where = at.h + start * units * size, panel, sums
                multiply(tiles, where, (count, units, columns), memory.product, START_STORED, 0)
        for start in range(begin, end, BLOCK):
            count = min(BLOCK, batch - start)
            place, fresh = (start * units + j * count) * size, address(memory.fresh)
            operands = (at.kept + KEPT * place, KEPT), (at.cells + place, 1), (fresh, 1)
            ask(gates, memory.asked, operands, count * columns)
            leave(tiles, at, units, ((start * units + j) * size, at.cells + place), fresh, count, columns)


def lstm_turns(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """Steps one after another, of as many of its rows or columns as `share` says."""
    h, c, from_h, cells, last_h, last_c, y, before, kept, fresh, asked, table, taps, stage, places = arrays
    (steps, batch, units, near, by_rows), made, gates = words, Tiles(*tiles[:OWN]), tiles[OWN]
    memory, sizes = RecurrentMemory(fresh, asked, Product(table, taps, stage, places)), (batch, units)
    first, last, left, right = share(made, sizes, by_rows, begin, end)
    state, row = batch * units * made.size, units * made.size
    taps[0] = taps[1] = 0
    if steps == 0:
        duplicate(made, address(h) + first * row, address(last_h) + first * row, (last - first) * units)
        duplicate(made, address(c) + first * row, address(last_c) + first * row, (last - first) * units)
    for start in range(first, last, near):
        for t in range(steps):
            here = address(before) + t * state
            at = RecurrentStep(
                here if t > 0 else address(h),
                here + state if t + 1 < steps else address(last_h),
                address(last_c),
                address(y) + t * state,
                here,
                address(from_h),
                address(cells),
                address(kept) + KEPT * t * state,
            )
            turn(made, gates, at, sizes, (start, min(start + near, last), left, right), memory)


# ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lstm_weights_grad(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """Packs the transposed weights: a unit is a panel of all gates' columns."""
    (w_h, panels), units, made = arrays, words[0], Tiles(*tiles)
    sums, wide = GATES * units, made.wide
    first, last = begin * wide, min(end * wide, units)
    to = first * sums * made.size
    pack_all(made, address(w_h) + to, 1, sums, sums, last - first, address(panels) + to)


class Back(NamedTuple):
    """Addresses of what a step back reads and writes: of the later step's sums' gradients, and of its own."""

    later: int
    panels: int
    dy: int
    kept: int
    dh: int
    dc: int
    ds: int


@jitable
def product_back(tiles: Tiles, at: Back, sizes: Any, j: int, begin: int, end: int, own: Product) -> None:
    """The product that ends the step after: some gates' terms after another, so that a second cache holds a panel of
    them beside the rows."""
    (batch, units), size, rows = sizes, tiles.size, 0
    columns, some = min(tiles.wide, units - j), max(min(DEEP // max(units, 1), GATES), 1)
    for gate in range(0, GATES, some):
        depth, how = units * min(some, GATES - gate), START_STORED if gate else START_ZERO
        panel = at.panels + (j * GATES + gate * tiles.wide) * units * size
        for start in range(begin, end, BLOCK):
            count = min(BLOCK, batch - start)
            if count != rows:
                fill(own.table, count, GATES * units, columns)
                rows = count
            left, to = at.later + (start * GATES + gate) * units * size, (start * units + j * count) * size
            multiply(tiles, (left, panel, at.dh + to), (count, depth, columns), own, how, 0)


@jitable
def step_back(
    tiles: Tiles, gates: int, at: Back, units: int, j: int, start: int, block: Any, memory: RecurrentMemory
) -> None:
    """A block of a step, down to its sums; ``block`` is how many rows and columns."""
    (count, columns), size, fresh = block, tiles.size, address(memory.fresh)
    place, some = (start * units + j * count) * size, count * columns
    carry(tiles, (at.dy + (start * units + j) * size, units), (fresh + GATES * some * size, columns), count, columns)
    operands = (at.kept + KEPT * place, KEPT), (at.dh + place, 1), (at.dc + place, 1), (fresh, GATES + 1)
    ask(gates, memory.asked, operands, some)
    for gate in range(GATES):
        to = at.ds + ((start * GATES + gate) * units + j) * size, GATES * units
        carry(tiles, (fresh + gate * some * size, columns), to, count, columns)


@jitable
def turn_back(tiles: Tiles, gates: int, at: Back, how: Any, sizes: Any, span: Any, memory: RecurrentMemory) -> None:
    """The product that ends the step after, and one step down to its sums, of some rows and columns.

    ``how`` says which of the two; ``span`` is as in `turn`. States lie as what is kept does.
    """
    (multiplied, stepped), (batch, units), (begin, end, first, last) = how, sizes, span
    for j in range(first, last, tiles.wide):
        if multiplied:
            product_back(tiles, at, sizes, j, begin, end, memory.product)
        for start in range(begin, end if stepped else begin, BLOCK):
            block = min(BLOCK, batch - start), min(tiles.wide, units - j)
            step_back(tiles, gates, at, units, j, start, block, memory)


def lstm_turns_grad(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """Turns back one after another, of as many of its rows or columns as `share` says.

    Of the turns from 0 to ``steps``, those from ``turn`` to before ``beyond``. The first one begins with the gradients
    of the last h and c and has no product; the last one has no step, and leaves the gradients of the first h and c.
    Where units are columns, operands are given as the rows that a turn needs.
    """
    later, panels, given_h, given_c, dy, kept, dhs, dcs, ds, dh, dc, fresh, asked, table, taps, stage, places = arrays
    (steps, batch, units, near, by_rows, first_turn, beyond), made, gates = words, Tiles(*tiles[:OWN]), tiles[OWN]
    memory, sizes = RecurrentMemory(fresh, asked, Product(table, taps, stage, places)), (batch, units)
    first, last, left, right = share(made, sizes, by_rows, begin, end)
    state = batch * units * made.size if by_rows else 0
    taps[0] = taps[1] = 0
    for start in range(first, last, near):
        span = start, min(start + near, last), left, right
        if first_turn == 0:
            trade(made, address(dhs), address(given_h), sizes, span, True)
            trade(made, address(dcs), address(given_c), sizes, span, True)
        for number in range(first_turn, beyond):
            there = (steps - 1 - number) * state  # a turn without a step, or without one later, reads nothing of it
            at = Back(
                address(later) + GATES * (there + state),
                address(panels),
                address(dy) + there,
                address(kept) + KEPT * there,
                address(dhs),
                address(dcs),
                address(ds) + GATES * there,
            )
            turn_back(made, gates, at, (number > 0, number < steps), sizes, span, memory)
        if beyond > steps:
            trade(made, address(dhs), address(dh), sizes, span, False)
            trade(made, address(dcs), address(dc), sizes, span, False)
