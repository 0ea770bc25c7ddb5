"""Matrices with a short side turned around in a core's nearest cache, so that loops over their long side vectorise.

Law: as in `micro`, names and what is made of them; `flowrt.kernels.squarecode` makes the machine code. Squares of one
vector's lanes are turned in registers. Where a side is no multiple of these, the last squares lie over those before;
where it is shorter than one, what squares read too much is left out, and what they write too much is written over by
the next. Nothing beyond either matrix is read or written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from flowrt.kernels import micro
from flowrt.kernels.table import jitable

LANES = 8  # of a square at most: larger ones would be mostly empty

_REVISION = hashlib.blake2b(Path(__file__).with_name("squarecode.py").read_bytes(), digest_size=8).hexdigest()


@cache
def turn_part(width: int) -> Callable[..., None]:
    """``turn_part(like, (source, across, read, target, below, written))`` turns a square of one vector's lanes around.

    Only so many of its lines are read and written, each as a whole vector. Addresses are in bytes, steps in elements.
    """
    return micro.stub("turn_part", 1, 1, width, _REVISION)


@cache
def turning(itemsize: int) -> Callable[..., None]:
    """``turn(like, source, across, target, below, rows, columns)`` for arrays ``like`` of such entries.

    Entry (i, j) of the target, at ``i * below + j``, is the source's at ``i + j * across``. Both are addresses. Where
    there are fewer columns than a square has, rows of the target lie one after another.
    """
    lanes = min(micro.native().width // itemsize, LANES)
    square, move = turn_part(lanes * itemsize), micro.move()

    @jitable
    def turn(like: Any, source: int, across: int, target: int, below: int, rows: int, columns: int) -> None:
        size, tall, broad = like.itemsize, rows >= lanes, columns >= lanes
        high = rows if broad else rows - (lanes - columns + below - 1) // below
        wide = columns if tall else columns - (lanes - rows + across - 1) // across
        if (tall and high < lanes) or (broad and wide < lanes) or not (tall or broad):
            high, wide = 0, 0
        for j in range(0, wide, lanes):
            left = max(min(j, wide - lanes), 0)
            for i in range(0, high, lanes):
                top = max(min(i, high - lanes), 0)
                begin, out = source + (top + left * across) * size, target + (top * below + left) * size
                square(like, (begin, across, min(columns, lanes), out, below, min(rows, lanes)))
        if high < rows:
            move(like, (source + high * size, 1, across, target + high * below * size, below, rows - high, columns))
        if wide < columns and high > 0:
            rest = source + wide * across * size, 1, across, target + wide * size, below, rows, columns - wide
            move(like, rest)

    return turn
