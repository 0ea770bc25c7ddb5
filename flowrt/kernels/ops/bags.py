"""Sums and means of rows of a table: to the bit what the sum makes of rows that `index.take` has laid side by side.

So it makes no difference whether a pass joined the two, and where the rows came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.reductions import along_row
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.ops.partials import count_parts
from flowrt.kernels.ops.reduce import SUM, form_over, reduced_in_order
from flowrt.kernels.ops.slices import NO_ROW, NOT_THERE, OUT_OF_RANGE, row_of
from flowrt.kernels.teams.standing import divided
from flowrt.kernels.tiles.rowmoves import AHEAD, add_fours, fetch

PIECE = 64  # rows, which are asked for before they are added up; a multiple of the four that are added up at once

_add_along = along_row(SUM)


@valueclass
class _Bags:
    """So many bags of ``many`` rows of so many columns, each bag in ``parts``, as the sum of rows has them."""

    bags: int
    many: int
    columns: int
    parts: int
    loosely: bool  # single entries, which are added up in any order

    @property
    def row(self) -> int:
        """The entries of the row that is held: zeros, or the entries of a part side by side."""
        return -(-self.many // self.parts) if self.loosely else self.columns


def _bags(inputs: Sequence[Spec], attrs: Mapping[str, Any]) -> _Bags:
    table, indices = (spec.concrete for spec in inputs)
    kept = len(indices) - attrs["axes"]
    form = form_over((*indices, *table[1:]), tuple(range(kept, len(indices))))
    parts, loosely = count_parts(form.sizes, form.last), form.last and not reduced_in_order(form)
    return _Bags(math.prod(indices[:kept]), math.prod(indices[kept:]), math.prod(table[1:]), parts, loosely)


def _bagging(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    made, rows = _bags(inputs, attrs), inputs[0].concrete[0]
    shapes = (rows, made.columns), (made.bags * made.many,), (made.bags, made.columns)
    memory = (spec.concrete for spec in _memory(inputs, outputs, attrs))
    words = made.many, made.parts, int(made.loosely), int(attrs["mean"]), int(attrs["absent"])
    return Call(tuple(View.dense(shape) for shape in (*shapes, *memory)), words, units=made.bags)


def _memory(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    """Where rows lie, a row, and two rows of sums: of a part, and of all parts so far."""
    made = _bags(inputs, attrs)
    return Spec("int64", (PIECE,)), Spec(inputs[0].dtype, (made.row,)), Spec("float64", (2, made.columns))


def _bagged_bytes(specs: Sequence[Spec]) -> int:
    table, indices, sums = specs
    return indices.nbytes + sums.nbytes + indices.size * table.nbytes // max(table.concrete[0], 1)


@jitable
def add_rows_of(x: Any, indices: Any, lies: Any, zeros: Any, total: Any, absent: int, begin: int, end: int) -> bool:
    """Leave the sum of the rows of these indices in ``total``; whether all are there."""
    first, nbytes, last = x.ctypes.data, x.shape[1] * x.itemsize, indices.size - 1
    for start in range(begin, max(end, begin + 1), PIECE):
        count = min(end - start, PIECE)
        for j in range(count):
            ahead = np.int64(indices[np.uint64(min(start + j + AHEAD, last))])
            fetch(x, (first + ahead * nbytes, nbytes))
            at = row_of(indices[np.uint64(start + j)], x.shape[0], absent)
            if at == NOT_THERE:
                return False
            lies[np.uint64(j)] = zeros.ctypes.data if at == NO_ROW else first + at * nbytes
        add_fours(x, (lies.ctypes.data, count, total.ctypes.data, total.size, start - begin))
    return True


@jitable
def add_entries_of(x: Any, indices: Any, line: Any, sums: Any, absent: int, begin: int, end: int) -> bool:
    """The same of a table of one column, whose entries are added up as those of a row."""
    for j in range(begin, end):
        at = row_of(indices[np.uint64(j)], x.shape[0], absent)
        if at == NOT_THERE:
            return False
        line[np.uint64(j - begin)] = 0 if at == NO_ROW else x[np.uint64(at), 0]
    sums[0, 0] = _add_along(line, 0, end - begin, 0.0, sums)
    return True


@kernel("bag", layout=_bagging, local=_memory, moves=_bagged_bytes)
def bag(
    x: Any, indices: Any, y: Any, lies: Any, row: Any, sums: Any,
    many: int, parts: int, loosely: int, mean: int, absent: int, begin: int, end: int, run: Any,
) -> None:  # fmt: skip
    if absent != 0:
        row[:] = 0
    part, total = sums[0], sums[1]
    for b in range(begin, end):
        for p in range(parts):
            at, stop = b * many + many * p // parts, b * many + many * (p + 1) // parts
            if loosely != 0:
                there = add_entries_of(x, indices, row, sums, absent, at, stop)
            else:
                there = add_rows_of(x, indices, lies, row, part, absent, at, stop)
            if not there:
                run[0] = OUT_OF_RANGE
                return
            for k in range(part.size):
                total[np.uint64(k)] = part[np.uint64(k)] + (total[np.uint64(k)] if p > 0 else 0.0)
        out = y[b]
        for k in range(total.size):
            out[np.uint64(k)] = total[np.uint64(k)] / many if mean != 0 else total[np.uint64(k)]


def _bagging_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _bagging(inputs, outputs, attrs)
    many, *_, mean, absent = call.words
    return Call(call.views[:3], (many, mean, absent))


@kernel("bag", "cuda", layout=_bagging_on_cuda)
def bag_on_cuda(x: Any, indices: Any, y: Any, many: int, mean: int, absent: int, run: Any) -> None:
    """Every thread adds up one entry of the result at a time, in the order of the indices, and holds it in float64."""
    entry = cuda.grid(1)
    while entry < y.size:
        b, k = divided(entry, y.shape[1])
        total = 0.0
        for j in range(b * many, b * many + many):
            at = row_of(indices[j], x.shape[0], absent)
            if at == NOT_THERE:
                run[0] = OUT_OF_RANGE
            elif at >= 0:
                total += x[at, k]
        y[b, k] = total / many if mean != 0 else total
        entry += cuda.gridsize(1)
