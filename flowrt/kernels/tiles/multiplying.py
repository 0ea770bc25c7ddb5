"""How register tiles compute a product of matrices: units of blocks, slab by slab, near rows by column panels.

`flowrt.kernels.tiles.products` says why, and lays out what is read here by name: a launch's words are `How`, a
thread's own memory is `ProductMemory`, and a unit's part of the operands is a `ProductBlock`. Places are addresses;
steps are between entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.micro import START_BIAS, START_STORED, START_ZERO, Tiles, call
from flowrt.kernels.tiles.panels import address, band, pack, pack_all, repeat_last
from flowrt.kernels.tiles.products import LONG, PANELS
from flowrt.kernels.tiles.rowmoves import fetch

EARLY, ASKED, PAGE = 8, 128, 2048  # rows that lie a page apart are asked for so many before their turn, in such bytes
DIRECT = 256  # rows of the right operand, far apart, that a few tiles read as well as packed ones


OWN = len(Tiles._fields)  # of a launch's tiles; `Tools` are behind those


class How(NamedTuple):
    """A launch's words: whether what is negative becomes 0 and there is a bias, the flags, `Blocks`."""

    floor: int
    biased: int
    transpose_a: int
    transpose_b: int
    rows: int
    columns: int
    deep: int
    near: int
    shared: int


class ProductMemory(NamedTuple):
    """A thread's own memory, as `Tiled.local` says it."""

    table: Any
    taps: Any
    panels: Any
    left: Any
    edge: Any
    stage: Any
    places: Any


class ProductBlock(NamedTuple):
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


class Tools(NamedTuple):
    """What products call beside `Tiles`.

    ``row`` is a tile of a single long row; ``one_dot`` and ``four_dots`` take ``(a, b, step, c, across, start, depth)``
    and multiply a vector with others that are ``step`` apart: ``c[r * across] = sum over p < depth of
    a[p] * b[r * step + p]``, plus what is there if ``start`` says so. ``copy_rows`` is `Tiles.copy` of as many vectors
    as hold a tile's rows.
    """

    row: int
    one_dot: int
    four_dots: int
    copy_rows: int


@jitable
def transpose_rows(
    tiles: Tiles, tools: Tools, like: Any, source: int, step: int, sizes: Any, beyond: int, deep: int, target: int
) -> None:
    """Near rows of a transposed left operand.

    They become panels of as many rows as a tile has, term by term, with room for ``deep`` terms and one more: vectors
    are written whole, and what is beyond a panel's rows is written over by the next term. ``sizes`` are how many rows
    and how many terms, ``beyond`` how many rows of the operand may be read.
    """
    (rows, depth), size, lanes, most = sizes, tiles.size, tiles.lanes, tiles.rows
    reach = (most + lanes - 1) // lanes * lanes
    whole = min((rows + most - 1) // most * most, max(beyond - reach + most, 0) // most * most)
    for p in range(depth):
        here, there = source + p * step * size, target + p * most * size
        for byte in range(0, rows * size if step * size >= PAGE else 0, ASKED):
            fetch(like, (here + EARLY * step * size + byte, rows * size - byte))
        call(tools.copy_rows, (here, most, there, (deep + 1) * most, whole // most))
    for r in range(whole, rows, most):
        here, there = source + r * size, target + r * (deep + 1) * size
        call(tiles.move, (here, step, 1, there, most, depth, min(most, rows - r)))


@jitable
def lone_row(
    tiles: Tiles, tools: Tools, at: Any, step: int, across: int, table: Any, taps: Any, depth: int, n: int, how: Any
) -> int:
    """A row times a matrix, unpacked: of ``n`` columns as many as need no packing; answers how many.

    ``at`` are the addresses of the row, the matrix and the result; ``how`` is that of `band`.
    """
    a, b, c = at
    size, j = tiles.size, 0
    if across == 1:
        long = LONG * tiles.wide
        while j + long <= n:
            reach, places = (1, depth, 1, step), address(table) + 4 * table.size
            there = b + j * size, address(taps), *reach, c + j * size, places, how[0], how[1] + j * size, how[2]
            call(tools.row, (a, address(table), *there))
            j += long
        return j
    if how[0] == START_BIAS or how[2] != 0:
        return 0
    while j + 4 <= n:
        call(tools.four_dots, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
        j += 4
    while j < n:
        call(tools.one_dot, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
        j += 1
    return j


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
def matrix_at(x: Any, outer: int, inner: int, size: int) -> Any:
    """Where that begins."""
    return address(x) + batch_number(x, outer, inner) * x.shape[2] * x.shape[3] * size


@jitable
def right_steps(b: Any, transposed: int) -> Any:
    """The right operand's steps between terms and between columns."""
    return (1, b.shape[3]) if transposed else (b.shape[3], 1)


@jitable
def block_of(tiles: Tiles, unit: int, operands: Any, how: How) -> ProductBlock:
    """What a unit computes: units follow each other down the rows of a result, so that they meet the same panels."""
    a, b, bias, packed, y = operands
    size, wide, m, n = tiles.size, tiles.wide, y.shape[2], y.shape[3]
    terms = a.shape[2] if how.transpose_a else a.shape[3]
    down, over = (m + how.rows - 1) // how.rows, (n + how.columns - 1) // how.columns
    batch, place = unit // (down * over), unit % (down * over)
    outer, inner = batch // y.shape[1], batch % y.shape[1]
    i, j = place % down * how.rows, place // down * how.columns
    padded = (n + wide - 1) // wide * wide if how.shared else 0
    return ProductBlock(
        matrix_at(a, outer, inner, size) + i * (1 if how.transpose_a else a.shape[3]) * size,
        matrix_at(b, outer, inner, size) + j * right_steps(b, how.transpose_b)[1] * size,
        address(bias) + j * size if how.biased else 0,
        address(y) + ((batch * m + i) * n + j) * size,
        address(packed) + batch_number(b, outer, inner) * terms * padded * size,
        j,
        min(how.rows, m - i),
        m - i,
        min(how.columns, n - j),
        terms,
    )


@jitable
def meet(
    tiles: Tiles, tools: Tools, at: Any, steps: Any, sizes: Any, kept: int, memory: ProductMemory, ends: Any
) -> None:
    """Rows of a slab times column panels; ``at`` are the addresses of both and the result.

    ``steps`` are the left operand's between terms, then the right one's between terms and columns; ``sizes`` how many
    rows, terms and columns. ``kept`` is where all panels are packed already, or 0; ``ends`` is `band`'s ``how`` for the
    first column.
    """
    table, taps, edge = memory.table, memory.taps, address(memory.edge)
    (a, b, c), (a_step, step, across), (rows, depth, columns), (start, bias, floor) = at, steps, sizes, ends
    size, wide = tiles.size, tiles.wide
    alone = rows == 1 and a_step == 1
    done = lone_row(tiles, tools, at, step, across, table, taps, depth, columns, ends) if alone else 0
    for j in range(done, columns, wide):
        over, b_step, b_here = min(wide, columns - j), step, b + j * across * size
        if kept != 0:
            b_step, b_here = wide, kept + j * depth * size
        elif across != 1 or over < wide or rows > 6 * tiles.rows or depth > DIRECT:
            b_step, b_here = wide, address(memory.panels)
            pack(tiles, b + j * across * size, step, across, depth, over, b_here)
        biases = bias + j * size
        if start == START_BIAS and over < wide:  # a tile reads a whole panel's
            call(tiles.move, (biases, 0, 1, edge, 0, 1, over))
            biases = edge
        where, reach = (a, b_here, c + j * size), (1, depth, a_step, b_step)
        band(tiles, where, table, rows, taps, reach, over, memory.stage, memory.places, (start, biases, floor))


@jitable
def near_rows(
    tiles: Tiles, tools: Tools, a: Any, source: int, sizes: Any, beyond: int, memory: ProductMemory, how: How
) -> Any:
    """Where near rows of a slab lie, turned if they are columns.

    ``sizes`` are how many rows and how many terms; of a transposed operand rows ``beyond`` may be read.
    """
    if how.transpose_a == 0:
        return source
    left = address(memory.left)
    transpose_rows(tiles, tools, a, source, a.shape[3], sizes, beyond, how.deep, left)
    return left


@jitable
def slab_panels(
    tiles: Tiles, b: Any, block: ProductBlock, first: int, depth: int, padded: int, memory: ProductMemory, how: How
) -> Any:
    """Where a slab's panels lie, from term ``first`` on.

    They are the shared ones, or packed now; 0 where it is better to pack one as it is met.
    """
    size = tiles.size
    if how.shared:
        return block.panels + (first * padded + block.column * depth) * size
    if block.rows == 1 or block.columns <= tiles.wide:
        return 0
    step, across = right_steps(b, how.transpose_b)
    kept = address(memory.panels)
    pack_all(tiles, block.b + first * step * size, step, across, depth, block.columns, kept)
    return kept


@jitable
def multiply_block(
    tiles: Tiles, tools: Tools, operands: Any, block: ProductBlock, memory: ProductMemory, how: How, filled: int
) -> Any:
    """A block of the result, slab by slab. The table is that of ``filled`` rows; the answer is of how many now."""
    a, b, _, _, y = operands
    size, n, wide, most = tiles.size, y.shape[3], tiles.wide, tiles.rows
    padded = (n + wide - 1) // wide * wide if how.shared else 0
    step, across = right_steps(b, how.transpose_b)
    a_step, apart = (most, how.deep + 1) if how.transpose_a else (1, a.shape[3])
    for p in range(0, max(block.terms, 1), how.deep):
        depth = min(how.deep, block.terms - p)
        there = block.b + p * step * size
        start = START_STORED if p > 0 else (START_BIAS if how.biased else START_ZERO)
        ends = start, block.bias, how.floor if p + how.deep >= block.terms else 0
        kept = slab_panels(tiles, b, block, p, depth, padded, memory, how)
        for i in range(0, block.rows, how.near):
            count = min(how.near, block.rows - i)
            if count != filled:
                fill(memory.table, count, a_step, apart, n)
                filled = count
            source = block.a + (p * a.shape[3] + i if how.transpose_a else i * a.shape[3] + p) * size
            here = near_rows(tiles, tools, a, source, (count, depth), block.beyond - i, memory, how)
            where = here, there, block.c + i * n * size
            meet(tiles, tools, where, (a_step, step, across), (count, depth, block.columns), kept, memory, ends)
    return filled


@jitable
def multiply(tiles: Tiles, tools: Tools, operands: Any, memory: ProductMemory, how: How, units: Any) -> None:
    """The units [begin, end) of a product of both factors, with the bias, the shared panels and the result."""
    memory.taps[0] = memory.taps[1] = 0
    filled = 0
    for unit in range(units[0], units[1]):
        filled = multiply_block(tiles, tools, operands, block_of(tiles, unit, operands, how), memory, how, filled)


def multiply_blocks(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The step that computes a product of matrices, as `Tiled.layout` lays it out."""
    operands = arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]
    made, tools = Tiles(*tiles[:OWN]), Tools(*tiles[OWN:])
    multiply(made, tools, operands, ProductMemory(*arrays[5:]), How(*words), (begin, end))


def share_panels(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The step before, as `Tiled.packing` lays it out: the right operand's panels, some of a matrix a unit."""
    (b, packed), how, made = arrays, How(*words), Tiles(*tiles[:OWN])
    size, wide = made.size, made.wide
    k, n = (b.shape[3], b.shape[2]) if how.transpose_b else (b.shape[2], b.shape[3])
    step, across = right_steps(b, how.transpose_b)
    group = PANELS * wide
    groups, padded = (n + group - 1) // group, (n + wide - 1) // wide * wide
    for unit in range(begin, end):
        batch, j = unit // groups, unit % groups * group
        source = address(b) + (batch * k * n + j * across) * size
        target = address(packed) + batch * k * padded * size
        for p in range(0, k, how.deep):
            depth = min(how.deep, k - p)
            place = target + (p * padded + j * depth) * size
            pack_all(made, source + p * step * size, step, across, depth, min(group, n - j), place)


def multiply_tiny(arrays: Any, words: Any, begin: int, end: int) -> None:
    """Whole products of few numbers, one multiply-add after another."""
    (a, b, bias, y), (floor, biased, transpose_a, transpose_b) = arrays, words
    terms, none = a.shape[2] if transpose_a else a.shape[3], y.dtype.type(0)
    for unit in range(begin, end):
        outer, inner = unit // y.shape[1], unit % y.shape[1]
        left = a[min(outer, a.shape[0] - 1), min(inner, a.shape[1] - 1)]
        right, out = b[min(outer, b.shape[0] - 1), min(inner, b.shape[1] - 1)], y[outer, inner]
        for i in range(y.shape[2]):
            for j in range(y.shape[3]):
                total = bias[j] if biased else none
                for p in range(terms):
                    x = left[p, i] if transpose_a else left[i, p]
                    total += x * (right[j, p] if transpose_b else right[p, j])
                out[i, j] = none if floor and total < none else total
