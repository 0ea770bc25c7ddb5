"""How register tiles compute a product of matrices: units of blocks, slab by slab, near rows by column panels.

`flowrt.kernels.products` says why, and lays out what is read here by name: a launch's words are `How`, a thread's own
memory is `Memory`, and a unit's part of the operands is a `Block`. Places are addresses; steps are between entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from flowrt.kernels import micro
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry
from flowrt.kernels.panels import address, banding, packing, panelling, repeat_last
from flowrt.kernels.products import LONG, PANELS
from flowrt.kernels.rowmoves import fetch
from flowrt.kernels.table import jitable

EARLY, ASKED, PAGE = 8, 128, 2048  # rows that lie a page apart are asked for so many before their turn, in such bytes
DIRECT = 256  # rows of the right operand, far apart, that a few tiles read as well as packed ones


class How(NamedTuple):
    """A launch's words: whether what is negative becomes 0 and a column is computed as a row, the flags, `Blocks`."""

    floor: int
    swapped: int
    transpose_a: int
    transpose_b: int
    rows: int
    columns: int
    deep: int
    near: int
    shared: int
    tiny: int


class Memory(NamedTuple):
    """A thread's own memory, as `Tiled.local` says it."""

    table: Any
    taps: Any
    panels: Any
    left: Any
    edge: Any
    stage: Any
    places: Any


class Block(NamedTuple):
    """A unit's part: where it begins in the operands, the bias (or 0), the result and the shared panels; its sizes.

    ``beyond`` is how many rows there are down to the last one, ``terms`` how many a sum has.
    """

    a: int
    b: int
    bias: int
    c: int
    panels: int
    column: int
    rows: int
    beyond: int
    columns: int
    terms: int


@cache
def turning(geometry: Geometry) -> Callable[..., None]:
    """``turn(like, source, step, sizes, beyond, deep, target)``: near rows of a transposed left operand.

    They become panels of as many rows as a tile has, term by term, with room for ``deep`` terms and one more: vectors
    are written whole, and what is beyond a panel's rows is written over by the next term. ``sizes`` are how many rows
    and how many terms, ``beyond`` how many rows of the operand may be read.
    """
    most, vectors = geometry.rows, geometry.width
    copy = {size: micro.copy(-(-most * size // vectors), vectors) for size in (4, 8)}
    single, double, move = copy[4], copy[8], micro.move()

    @jitable
    def turn(like: Any, source: int, step: int, sizes: Any, beyond: int, deep: int, target: int) -> None:
        rows, depth = sizes
        size = like.itemsize
        lanes = vectors // size
        reach = (most + lanes - 1) // lanes * lanes
        whole = min((rows + most - 1) // most * most, max(beyond - reach + most, 0) // most * most)
        for p in range(depth):
            here, there = source + p * step * size, target + p * most * size
            for byte in range(0, rows * size if step * size >= PAGE else 0, ASKED):
                fetch(like, (here + EARLY * step * size + byte, rows * size - byte))
            if size == 4:
                single(like, (here, most, there, (deep + 1) * most, whole // most))
            else:
                double(like, (here, most, there, (deep + 1) * most, whole // most))
        for r in range(whole, rows, most):
            here, there = source + r * size, target + r * (deep + 1) * size
            move(like, (here, step, 1, there, most, depth, min(most, rows - r)))

    return turn


@cache
def lone_rows(geometry: Geometry) -> Callable[..., int]:
    """``lone_row(like, (a, b, c), step, across, table, taps, depth, n, how)``: a row times a matrix, unpacked.

    Computes as many of ``n`` columns as need no packing and answers how many; ``how`` is that of `banding`.
    """
    row = micro.tile(1, LONG * geometry.vectors, geometry.width)
    one_dot, four_dots = micro.dots(1, 2, geometry.width), micro.dots(4, 2, geometry.width)
    full = geometry.vectors * geometry.width

    @jitable
    def lone_row(
        like: Any, at: Any, step: int, across: int, table: Any, taps: Any, depth: int, n: int, how: Any
    ) -> int:
        a, b, c = at
        size, j = like.itemsize, 0
        if across == 1:
            long = LONG * full // size
            while j + long <= n:
                reach, places = (1, depth, 1, step), address(table) + 4 * table.size
                there = b + j * size, address(taps), *reach, c + j * size, places, how[0], how[1] + j * size, how[2]
                row(like, (a, address(table), *there))
                j += long
            return j
        if how[0] == START_BIAS or how[2] != 0:
            return 0
        while j + 4 <= n:
            four_dots(like, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
            j += 4
        while j < n:
            one_dot(like, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
            j += 1
        return j

    return lone_row


@jitable
def fill(table: Any, rows: int, panel: int, step: int, across: int) -> None:
    """The table of near rows: the left ones ``step`` apart, within panels of ``panel`` rows; their results' rows."""
    half = table.size // 2
    for r in range(rows):
        table[r] = r // panel * panel * step + r % panel
        table[half + r] = r * across
    repeat_last(table, rows)


@jitable
def batch_number(x: Any, outer: int, inner: int) -> Any:
    """Which of its matrices an operand has in a batch; a batch of one stands for every one."""
    return min(outer, x.shape[0] - 1) * x.shape[1] + min(inner, x.shape[1] - 1)


@jitable
def matrix_at(x: Any, outer: int, inner: int) -> Any:
    """Where that begins."""
    return address(x) + batch_number(x, outer, inner) * x.shape[2] * x.shape[3] * x.itemsize


@jitable
def right_steps(b: Any, transposed: int) -> Any:
    """The right operand's steps between terms and between columns."""
    return (1, b.shape[3]) if transposed else (b.shape[3], 1)


@jitable
def block_of(unit: int, operands: Any, how: How, wide: int) -> Block:
    """What a unit computes: units follow each other down the rows of a result, so that they meet the same panels."""
    a, b, bias, packed, y = operands
    size, m, n = y.itemsize, y.shape[2], y.shape[3]
    terms = a.shape[2] if how.transpose_a else a.shape[3]
    down, over = (m + how.rows - 1) // how.rows, (n + how.columns - 1) // how.columns
    batch, place = unit // (down * over), unit % (down * over)
    outer, inner = batch // y.shape[1], batch % y.shape[1]
    i, j = place % down * how.rows, place // down * how.columns
    padded = (n + wide - 1) // wide * wide
    return Block(
        matrix_at(a, outer, inner) + i * (1 if how.transpose_a else a.shape[3]) * size,
        matrix_at(b, outer, inner) + j * right_steps(b, how.transpose_b)[1] * size,
        address(bias) + j * size if bias.size > 0 else 0,
        address(y) + ((batch * m + i) * n + j) * size,
        address(packed) + batch_number(b, outer, inner) * terms * padded * size,
        j,
        min(how.rows, m - i),
        m - i,
        min(how.columns, n - j),
        terms,
    )


@cache
def meeting(geometry: Geometry) -> Callable[..., None]:
    """``meet(like, (a, b, c), steps, sizes, kept, memory, ends)``: rows of a slab times column panels.

    ``steps`` are the left operand's between terms, then the right one's between terms and columns; ``sizes`` how many
    rows, terms and columns. ``kept`` is where all panels are packed already, or 0; ``ends`` is `banding`'s ``how`` for
    the first column.
    """
    pack, band, lone_row = packing(geometry), banding(geometry), lone_rows(geometry)
    most, full, move = geometry.rows, geometry.vectors * geometry.width, micro.move()

    @jitable
    def meet(like: Any, at: Any, steps: Any, sizes: Any, kept: int, memory: Memory, ends: Any) -> None:
        table, taps = memory.table, memory.taps
        a, b, c = at
        a_step, step, across = steps
        rows, depth, columns = sizes
        start, bias, floor = ends
        size = like.itemsize
        wide = full // size
        alone = rows == 1 and a_step == 1
        done = lone_row(like, at, step, across, table, taps, depth, columns, ends) if alone else 0
        for j in range(done, columns, wide):
            over, b_step, b_here = min(wide, columns - j), step, b + j * across * size
            if kept != 0:
                b_step, b_here = wide, kept + j * depth * size
            elif across != 1 or over < wide or rows > 6 * most or depth > DIRECT:
                b_step, b_here = wide, address(memory.panels)
                pack(like, b + j * across * size, step, across, depth, over, b_here)
            biases = bias + j * size
            if start == START_BIAS and over < wide:  # a tile reads a whole panel's
                move(like, (biases, 0, 1, address(memory.edge), 0, 1, over))
                biases = address(memory.edge)
            where, reach = (a, b_here, c + j * size), (1, depth, a_step, b_step)
            band(like, where, table, rows, taps, reach, over, memory.stage, memory.places, (start, biases, floor))

    return meet


@cache
def left_rows(geometry: Geometry) -> Callable[..., Any]:
    """``near_rows(a, source, sizes, beyond, memory, how)``: where near rows of a slab lie, turned if they are columns.

    ``sizes`` are how many rows and how many terms; of a transposed operand rows ``beyond`` may be read.
    """
    turn = turning(geometry)

    @jitable
    def near_rows(a: Any, source: int, sizes: Any, beyond: int, memory: Memory, how: How) -> Any:
        if how.transpose_a == 0:
            return source
        left = address(memory.left)
        turn(a, source, a.shape[3], sizes, beyond, how.deep, left)
        return left

    return near_rows


@cache
def right_panels(geometry: Geometry) -> Callable[..., Any]:
    """``slab_panels(b, block, first, depth, padded, memory, how)``: where a slab's panels lie, from term ``first`` on.

    They are the shared ones, or packed now; 0 where it is better to pack one as it is met.
    """
    pack_all, full = panelling(geometry), geometry.vectors * geometry.width

    @jitable
    def slab_panels(b: Any, block: Block, first: int, depth: int, padded: int, memory: Memory, how: How) -> Any:
        size = b.itemsize
        if how.shared:
            return block.panels + (first * padded + block.column * depth) * size
        if block.rows == 1 or block.columns * size <= full:
            return 0
        step, across = right_steps(b, how.transpose_b)
        kept = address(memory.panels)
        pack_all(b, block.b + first * step * size, step, across, depth, block.columns, kept)
        return kept

    return slab_panels


@jitable
def multiply_tiny(operands: Any, how: How, units: Any) -> None:
    """Whole products, one multiply-add after another."""
    a, b, bias, _, y = operands
    terms, none = a.shape[2] if how.transpose_a else a.shape[3], y.dtype.type(0)
    for unit in range(units[0], units[1]):
        outer, inner = unit // y.shape[1], unit % y.shape[1]
        left = a[min(outer, a.shape[0] - 1), min(inner, a.shape[1] - 1)]
        right, out = b[min(outer, b.shape[0] - 1), min(inner, b.shape[1] - 1)], y[outer, inner]
        for i in range(y.shape[2]):
            for j in range(y.shape[3]):
                total = bias[j] if bias.size > 0 else none
                for p in range(terms):
                    x = left[p, i] if how.transpose_a else left[i, p]
                    total += x * (right[j, p] if how.transpose_b else right[p, j])
                out[i, j] = none if how.floor and total < none else total


@cache
def multiplying(geometry: Geometry) -> Callable[..., None]:
    """``multiply(operands, memory, how, units)``: the units [begin, end) of a product.

    The operands are both factors, the bias (empty if there is none), the shared panels and the result.
    """
    near_rows, slab_panels, meet = left_rows(geometry), right_panels(geometry), meeting(geometry)
    most, full = geometry.rows, geometry.vectors * geometry.width

    @jitable
    def multiply_block(operands: Any, block: Block, memory: Memory, how: How, filled: int) -> Any:
        """A block of the result, slab by slab. The table is that of ``filled`` rows; the answer is of how many now."""
        a, b, _, _, y = operands
        size, n, wide = y.itemsize, y.shape[3], full // y.itemsize
        padded = (n + wide - 1) // wide * wide
        step, across = right_steps(b, how.transpose_b)
        a_step, apart = (most, how.deep + 1) if how.transpose_a else (1, a.shape[3])
        for p in range(0, max(block.terms, 1), how.deep):
            depth = min(how.deep, block.terms - p)
            there = block.b + p * step * size
            start = START_STORED if p > 0 else (START_BIAS if block.bias != 0 else START_ZERO)
            ends = start, block.bias, how.floor if p + how.deep >= block.terms else 0
            kept = slab_panels(b, block, p, depth, padded, memory, how)
            for i in range(0, block.rows, how.near):
                count = min(how.near, block.rows - i)
                if count != filled:
                    fill(memory.table, count, a_step, apart, n)
                    filled = count
                source = block.a + (p * a.shape[3] + i if how.transpose_a else i * a.shape[3] + p) * size
                here = near_rows(a, source, (count, depth), block.beyond - i, memory, how)
                where = here, there, block.c + i * n * size
                meet(y, where, (a_step, step, across), (count, depth, block.columns), kept, memory, ends)
        return filled

    @jitable
    def multiply(operands: Any, memory: Memory, how: How, units: Any) -> None:
        memory.taps[0] = memory.taps[1] = 0
        if how.tiny:
            multiply_tiny(operands, how, units)
            return
        filled = 0
        for unit in range(units[0], units[1]):
            block = block_of(unit, operands, how, full // operands[0].itemsize)
            filled = multiply_block(operands, block, memory, how, filled)

    return multiply


@cache
def sharing(geometry: Geometry) -> Callable[..., None]:
    """``share(b, packed, how, units)``: the units [begin, end) of packing a shared right operand."""
    pack_all, full = panelling(geometry), geometry.vectors * geometry.width

    @jitable
    def share(b: Any, packed: Any, how: How, units: Any) -> None:
        size, wide = b.itemsize, full // b.itemsize
        k, n = (b.shape[3], b.shape[2]) if how.transpose_b else (b.shape[2], b.shape[3])
        step, across = right_steps(b, how.transpose_b)
        group = PANELS * wide
        groups, padded = (n + group - 1) // group, (n + wide - 1) // wide * wide
        for unit in range(units[0], units[1]):
            batch, j = unit // groups, unit % groups * group
            source = address(b) + (batch * k * n + j * across) * size
            target = address(packed) + batch * k * padded * size
            for p in range(0, k, how.deep):
                depth = min(how.deep, k - p)
                place = target + (p * padded + j * depth) * size
                pack_all(b, source + p * step * size, step, across, depth, min(group, n - j), place)

    return share
