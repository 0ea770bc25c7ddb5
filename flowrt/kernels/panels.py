"""What products of matrices and convolutions share: packing operands into panels, and a column panel tile by tile.

A panel holds as many columns as a tile, its rows one after another, so that a tile reads it from beginning to end; what
a panel has beyond the operand's columns is 0 and its results are dropped. A *table* of int64 holds where each row of
the left operand begins, then where each row of the result begins; `rows_beyond` more of each repeat the last one, since
a tile always has all its rows. All of it is made for a `Geometry` by functions that answer helpers for kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from flowrt.kernels import micro
from flowrt.kernels.micro import START_STORED, Geometry
from flowrt.kernels.table import jitable
from flowrt.spec import Spec

PIECE = 16  # rows that are packed into all panels together


def table_size(geometry: Geometry, rows: int) -> int:
    """The length of a table for so many rows."""
    return 2 * (rows + geometry.rows)


def stage(geometry: Geometry, dtype: Any) -> tuple[Spec, Spec]:
    """Local memory of `band`: a tile of results of which only some columns count, and where its rows begin."""
    return Spec(dtype, (geometry.rows * geometry.columns(dtype),)), Spec("int64", (geometry.rows,))


@cache
def packing(geometry: Geometry) -> Callable[..., None]:
    """``pack(like, source, step, across, depth, count, target)``: a panel of ``count`` columns and ``depth`` rows.

    Its entry (p, j) is the source's at ``p * step + j * across``, where one of the two is 1. Both are addresses.
    """
    width, full = geometry.width, geometry.vectors * geometry.width
    copy, turn = micro.copy(geometry.vectors, width), micro.transpose(width)
    move, clear = micro.move(), micro.clear(width)

    @jitable
    def pack(like: Any, source: int, step: int, across: int, depth: int, count: int, target: int) -> None:
        size = like.itemsize
        wide, lanes = full // size, width // size
        if count == wide and across == 1:
            copy(like, (source, step, target, wide, depth))
            return
        done = 0
        if count == wide:
            done = depth // lanes * lanes
            for p in range(0, done, lanes):
                for j in range(0, wide, lanes):
                    turn(like, (source + (p + j * across) * size, across, target + (p * wide + j) * size, wide))
        else:
            clear(like, (target, depth * (wide // lanes)))
        place = target + done * wide * size
        move(like, (source + done * step * size, step, across, place, wide, depth - done, count))

    return pack


@cache
def panelling(geometry: Geometry) -> Callable[..., None]:
    """``pack_all(like, source, step, across, depth, count, target)``: all column panels of a matrix, in order."""
    pack, copy = packing(geometry), micro.copy(geometry.vectors, geometry.width)
    full = geometry.vectors * geometry.width

    @jitable
    def pack_all(like: Any, source: int, step: int, across: int, depth: int, count: int, target: int) -> None:
        size = like.itemsize
        wide = full // size
        whole = count // wide * wide if across == 1 else 0
        for p in range(0, depth, PIECE):  # rows are far apart, on pages of their own: some are read from end to end
            for j in range(0, whole, wide):
                place = target + (j * depth + p * wide) * size
                copy(like, (source + (p * step + j) * size, step, place, wide, min(PIECE, depth - p)))
        for j in range(whole, count, wide):
            here, place = source + j * across * size, target + j * depth * size
            pack(like, here, step, across, depth, min(wide, count - j), place)

    return pack_all


@cache
def stacking(geometry: Geometry, *, apart: bool = False) -> Callable[..., int]:
    """``tile_rows(like, words, left)``: one tile, of as few rows as ``left`` needs; how many it has."""
    most, fewer = geometry.rows, geometry.fewer
    tile = micro.beside if apart else micro.tile
    large, small = (tile(rows, geometry.vectors, geometry.width) for rows in (most, fewer))

    @jitable
    def tile_rows(like: Any, words: Any, left: int) -> int:
        if left <= fewer or most < left <= 2 * fewer:
            small(like, words)
            return fewer
        large(like, words)
        return most

    return tile_rows


@cache
def banding(geometry: Geometry, *, apart: bool = False) -> Callable[..., None]:
    """``band(like, (a, b, c), table, count, taps, reach, columns, stage, places, how)``: one column panel.

    Computes ``count`` rows as `micro.tile` says it; ``reach`` is (taps, depth, a_step, b_step), ``how`` (start, bias,
    floor). Of each row of the result ``columns`` entries count; where half a panel has them all, tiles are as narrow.
    Columns ``apart`` are as `micro.beside` has them.
    """
    most, full = geometry.rows, geometry.vectors * geometry.width
    tile_rows, move = stacking(geometry, apart=apart), micro.move()
    tile_narrow = stacking(replace(geometry, vectors=geometry.vectors // 2), apart=apart)

    @jitable
    def band(
        like: Any,
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
        a, b, c = at
        wide, size = full // like.itemsize, like.itemsize
        rows, half = address(table), table.size // 2
        narrow = 2 * columns <= wide
        staged = columns < (wide // 2 if narrow else wide)
        to = address(stage) if staged else c
        if staged:
            for r in range(most):
                places[r] = r * wide
        i = 0
        while i < count:
            targets = address(places) if staged else rows + 8 * (half + i)
            if staged and how[0] == START_STORED:
                for r in range(min(count - i, most)):
                    move(like, (c + table[half + i + r] * size, 0, 1, to + r * wide * size, 0, 1, columns))
            words = (a, rows + 8 * i, b, address(taps), *reach, to, targets, *how)
            done = tile_narrow(like, words, count - i) if narrow else tile_rows(like, words, count - i)
            if staged:
                for r in range(min(count - i, done)):
                    move(like, (to + r * wide * size, 0, 1, c + table[half + i + r] * size, 0, 1, columns))
            i += done

    return band


@cache
def duplicating(geometry: Geometry) -> Callable[..., None]:
    """``duplicate(like, source, target, count)``: so many entries, from one address to another."""
    copy, move, width = micro.copy(1, geometry.width), micro.move(), geometry.width

    @jitable
    def duplicate(like: Any, source: int, target: int, count: int) -> None:
        lanes = width // like.itemsize
        whole = count // lanes
        done = whole * lanes * like.itemsize
        copy(like, (source, lanes, target, lanes, whole))
        move(like, (source + done, 0, 1, target + done, 0, 1, count - whole * lanes))

    return duplicate


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
