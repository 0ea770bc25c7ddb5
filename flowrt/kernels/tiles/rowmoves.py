"""What kernels do with rows that lie anywhere in memory: ask for them ahead of time, move them, add them up.

Law: names alone, as in `micro`; `flowrt.kernels.emit.rowcode` makes the machine code. Addresses and lengths are in
bytes, steps and columns in elements. Asking changes nothing but when memory arrives, and may be for memory that
nobody has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.kernels.store.sources import revision
from flowrt.kernels.tiles.micro import stub

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD = 12
"""How many rows before its use one is asked for: as many as a core of today has requests under way, about."""

WIDTH = 32
"""Bytes of the vectors that rows are added up in; LLVM splits those that are too wide."""

_REVISION = revision("flowrt.kernels.emit.rowcode") + revision("flowrt.kernels.emit.vectors")


def _row_stub(kind: str, rows: int = 1, vectors: int = 1, width: int = WIDTH) -> Callable[..., Any]:
    return stub(kind, rows, vectors, width, _REVISION)


fetch = _row_stub("fetch")
"""``fetch(like, (address, nbytes))`` asks for the beginning of a row that is going to be read."""

claim = _row_stub("claim")
"""``claim(like, (address, nbytes))`` asks for the beginning of a row that is going to be written too."""

move_bytes = _row_stub("move_bytes")
"""``move_bytes(like, (source, target, nbytes))`` copies what does not overlap."""

move_rows = _row_stub("move_rows")
"""``move_rows(like, (source, down, target, below, nbytes, rows))`` copies rows whose beginnings are so far apart.

Where rows are short that takes a load or two and as many stores each. Nothing overlaps.
"""

gather_rows_by_int32 = _row_stub("gather_rows", 4)
gather_rows_by_int64 = _row_stub("gather_rows", 8)
"""``gather_rows_by_int64(like, (table, numbers, target, nbytes, count))`` puts rows of a table behind one another.

``numbers`` is the address of their numbers, of 64 bits or for the other one of 32, none of them negative.
"""

add_row = _row_stub("add_row")
"""``add_row(like, (a, count, total))``: ``total``, a float64, becomes the sum of ``count`` float32 from ``a`` on.

``like`` is any array; where it holds something else than float32 nothing is done.
"""

add_rows_by_int32 = _row_stub("add_rows", 4, 8)
add_rows_by_int64 = _row_stub("add_rows", 8, 8)
"""``add_rows_by_int64(like, (a, step, rows, count, y, columns))``.

``y[k] = sum over j < count of a[rows[j] * step + k]``, in the order of j. ``rows`` is the address of numbers of 64
bits, or for the other one of 32. ``like`` is any array of the dtype.
"""

add_fours = _row_stub("add_fours", vectors=4)
"""``add_fours(like, (rows, count, total, columns, start))``: sums of ``count`` rows of floats, held in float64.

``rows`` is the address of the rows' addresses. ``total``, so many float64, becomes ``start + ((a + b) + (c + d)) + …``,
four rows at a time and then one by one, where ``start`` is 0, or what ``total`` holds.
"""

add_to_rows_by_int32 = _row_stub("add_to_rows", 4)
add_to_rows_by_int64 = _row_stub("add_to_rows", 8)
"""``add_to_rows_by_int64(like, (a, rows, count, y, columns))`` adds ``count`` rows of ``a`` to rows of ``y``, in order.

``rows`` is the address of their numbers, of 64 bits or for the other one of 32, none of them negative.
"""
