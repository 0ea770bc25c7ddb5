"""What products of matrices and convolutions share: packing operands into panels, and a column panel tile by tile.

A panel holds as many columns as a tile, its rows one after another, so that a tile reads it from beginning to end; what
a panel has beyond the operand's columns is 0 and its results are dropped. A *table* of int64 holds where each row of
the left operand begins, then where each row of the result begins; `rows_beyond` more of each repeat the last one, since
a tile always has all its rows. Arrays of floats are seen as bytes: `Tiles` says how large an entry is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.micro import START_STORED, Geometry, Tiles, call

PIECE = 16  # rows that are packed into all panels together


def table_size(geometry: Geometry, rows: int) -> int:
    """The length of a table for so many rows."""
    return 2 * (rows + geometry.rows)


def stage(geometry: Geometry, dtype: Any) -> tuple[Spec, Spec]:
    """Local memory of `band`: a tile of results of which only some columns count, and where its rows begin."""
    return Spec(dtype, (geometry.rows * geometry.columns(dtype),)), Spec("int64", (geometry.rows,))


@jitable
def pack(tiles: Tiles, source: int, step: int, across: int, depth: int, count: int, target: int) -> None:
    """A panel of ``count`` columns and ``depth`` rows.

    Its entry (p, j) is the source's at ``p * step + j * across``, where one of the two is 1. Both are addresses.
    """
    size, wide, lanes = tiles.size, tiles.wide, tiles.lanes
    if count == wide and across == 1:
        call(tiles.copy, (source, step, target, wide, depth))
        return
    done = 0
    if count == wide:
        done = depth // lanes * lanes
        for p in range(0, done, lanes):
            for j in range(0, wide, lanes):
                here, there = source + (p + j * across) * size, target + (p * wide + j) * size
                call(tiles.turn, (here, across, there, wide))
    else:
        call(tiles.clear, (target, depth * wide))
    place = target + done * wide * size
    call(tiles.move, (source + done * step * size, step, across, place, wide, depth - done, count))


@jitable
def pack_all(tiles: Tiles, source: int, step: int, across: int, depth: int, count: int, target: int) -> None:
    """All column panels of a matrix, in order."""
    size, wide = tiles.size, tiles.wide
    whole = count // wide * wide if across == 1 else 0
    for p in range(0, depth, PIECE):  # rows are far apart, on pages of their own: some are read from end to end
        for j in range(0, whole, wide):
            place = target + (j * depth + p * wide) * size
            call(tiles.copy, (source + (p * step + j) * size, step, place, wide, min(PIECE, depth - p)))
    for j in range(whole, count, wide):
        here, place = source + j * across * size, target + j * depth * size
        pack(tiles, here, step, across, depth, min(wide, count - j), place)


@jitable
def tile_rows(tiles: Tiles, half: bool, words: Any, left: int) -> int:
    """One tile, perhaps ``half`` as wide, of as few rows as ``left`` needs; how many it has.

    Half as wide it sums two terms apart: of fewer rows these have registers, and fill the processor as well.
    """
    if half or left <= tiles.fewer or tiles.rows < left <= 2 * tiles.fewer:
        call(tiles.half if half else tiles.small, words)
        return tiles.fewer
    call(tiles.large, words)
    return tiles.rows


@jitable
def band(
    tiles: Tiles,
    at: Any,
    table: Any,
    count: int,
    taps: Any,
    reach: Any,
    columns: int,
    stage: Any,
    places: Any,
    how: Any,
) -> None:
    """One column panel: ``at`` are the addresses of ``a``, ``b`` and ``c``.

    Computes ``count`` rows as `Tiles` says it; ``reach`` is (taps, depth, a_step, b_step), ``how`` (start, bias,
    floor). Of each row of the result ``columns`` entries count; where half a panel has them all, tiles are as narrow.
    """
    (a, b, c), wide = at, tiles.wide
    rows, half = address(table), table.size // 2
    narrow = 2 * columns <= wide
    staged = columns < (wide // 2 if narrow else wide)
    to, most = address(stage) if staged else c, tiles.fewer if narrow else tiles.rows
    if staged:
        for r in range(most):
            places[r] = r * wide
    i = 0
    while i < count:
        targets = address(places) if staged else rows + 8 * (half + i)
        if staged and how[0] == START_STORED:
            call(tiles.move_listed, (c, rows + 8 * (half + i), to, targets, min(count - i, most), columns))
        done = tile_rows(tiles, narrow, (a, rows + 8 * i, b, address(taps), *reach, to, targets, *how), count - i)
        if staged:
            call(tiles.move_listed, (to, targets, c, rows + 8 * (half + i), min(count - i, done), columns))
        i += done


@jitable
def duplicate(tiles: Tiles, source: int, target: int, count: int) -> None:
    """So many entries, from one address to another."""
    lanes = tiles.lanes
    whole = count // lanes
    done = whole * lanes * tiles.size
    call(tiles.copy_vector, (source, lanes, target, lanes, whole))
    call(tiles.move, (source + done, 0, 1, target + done, 0, 1, count - whole * lanes))


@jitable
def address(array: Any) -> Any:
    """Where an array begins, as a signed integer: with an unsigned one sums would be floats."""
    return np.int64(array.ctypes.data)


@jitable
def repeat_last(table: Any, count: int) -> None:
    """Let a table of ``count`` rows repeat its last one as often as a tile may reach beyond it."""
    half = table.size // 2
    for r in range(count, half):
        table[r], table[half + r] = table[count - 1], table[half + count - 1]
