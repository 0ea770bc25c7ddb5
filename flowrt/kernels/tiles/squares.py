"""Matrices with a short side turned around in a core's nearest cache, so that loops over their long side vectorise.

Law: as in `micro`, names and what is made of them; `flowrt.kernels.emit.squarecode` makes the machine code. Squares
of one vector's lanes are turned in registers. Where a side is no multiple of these, the last squares lie over
those before; where it is shorter than one, what squares read too much is left out, and what they write too much
is written over by the next. Nothing beyond either matrix is read or written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.language.table import jitable
from flowrt.kernels.store.sources import revision
from flowrt.kernels.tiles import micro

LANES = 8  # of a square at most: larger ones would be mostly empty
_WIDTH = micro.native().width
_REVISION = revision("flowrt.kernels.emit.squarecode") + revision("flowrt.kernels.emit.vectors")

transpose_part = micro.stub("transpose_part", LANES, 1, _WIDTH, _REVISION)
"""``transpose_part(like, (source, across, read, target, below, written))`` turns a square of one vector's lanes around.

Only so many of its lines are read and written, each as a whole vector. Addresses are in bytes, steps in elements.
"""

_move = micro.move()


@jitable
def turn(like: Any, source: int, across: int, target: int, below: int, rows: int, columns: int) -> None:
    """Entry (i, j) of the target, at ``i * below + j``, becomes the source's at ``i + j * across``.

    Both are addresses of entries of ``like``. Where there are fewer columns than a square has, rows of the target lie
    one after another.
    """
    size = like.itemsize
    lanes = min(_WIDTH // size, LANES)
    tall, broad = rows >= lanes, columns >= lanes
    high = rows if broad else rows - (lanes - columns + below - 1) // below
    wide = columns if tall else columns - (lanes - rows + across - 1) // across
    if (tall and high < lanes) or (broad and wide < lanes) or not (tall or broad):
        high, wide = 0, 0
    for j in range(0, wide, lanes):
        left = max(min(j, wide - lanes), 0)
        for i in range(0, high, lanes):
            top = max(min(i, high - lanes), 0)
            begin, out = source + (top + left * across) * size, target + (top * below + left) * size
            transpose_part(like, (begin, across, min(columns, lanes), out, below, min(rows, lanes)))
    if high < rows:
        _move(like, (source + high * size, 1, across, target + high * below * size, below, rows - high, columns))
    if wide < columns and high > 0:
        _move(like, (source + wide * across * size, 1, across, target + wide * size, below, rows, columns - wide))


@jitable
def transpose_rows(rows: Any, lines: Any) -> None:
    """Put rows that lie one after another into ``lines``, which has room for more of them: line j has each row's j-th.

    Rows of another type are converted.
    """
    count, length, kind = rows.shape[0], rows.shape[1], lines.dtype.type
    same = rows.itemsize == lines.itemsize and (rows.dtype.type(0.5) != 0) == (kind(0.5) != 0)
    if same and kind(2) != kind(1):  # and no bools
        turn(lines, rows.ctypes.data, length, lines.ctypes.data, lines.shape[1], length, count)
        return
    for j in range(length):
        for i in range(count):
            lines[np.uint64(j), np.uint64(i)] = kind(rows[np.uint64(i), np.uint64(j)])


@jitable
def transpose_lines(lines: Any, rows: Any) -> None:
    """Put lines back into rows of their type that lie one after another."""
    count, length = rows.shape[0], rows.shape[1]
    turn(lines, lines.ctypes.data, lines.shape[1], rows.ctypes.data, length, count, length)
