"""Entries chosen by integers. Axes before and after the indexed one are seen as one each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec, normal_axes
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.reductions import along_row
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.ops.partials import count_parts
from flowrt.kernels.ops.reduce import SUM, form_over, reduced_in_order
from flowrt.kernels.ops.slices import ABSENT, NO_ROW, NOT_THERE, OUT_OF_RANGE, note_rows, row_number, row_of
from flowrt.kernels.teams.grouping import compare_rows, found_of, number_rows, place_rows, teams_comparing
from flowrt.kernels.teams.standing import divided
from flowrt.kernels.tiles.rowmoves import (
    AHEAD,
    add_fours,
    add_to_rows_by_int32,
    add_to_rows_by_int64,
    fetch,
    gather_rows_by_int32,
    gather_rows_by_int64,
    move_bytes,
)

PIECE = 64  # of a bag's rows, which are asked for before they are added up, four at once
FEW, ROWS = 32, 256  # entries taken of rows that are not worth a loop of their own, and rows that stay in a near cache
PARTS = 16  # into which the rows that are added to are cut
WORTH_SHARING = 256  # entries added for an index, of which each part looks at all

_add_along = along_row(SUM)


def around(shape: Sequence[int], axis: Any) -> tuple[int, int, int]:
    """``shape`` as (what lies before ``axis``, its size, what lies after it)."""
    at = normal_axes(axis, len(shape))[0]
    return math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])


def _taking(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    x, indices = inputs
    before, size, after = around(x.concrete, attrs["axis"])
    many = indices.size
    views = View.dense((before, size, after)), View.dense((many,)), View.dense((before, many, after))
    return Call(views, (int(attrs["absent"]),), units=many)


@jitable
def within(indices: Any, size: int, begin: int, end: int) -> bool:
    """Whether all indices are row numbers as they are, small enough for the signed integers of their size."""
    limit = min(size, 2**31) if indices.itemsize == 4 else size
    beyond = 0
    for j in range(begin, end):
        at = np.int64(indices[np.uint64(j)])
        beyond += int((at < 0) | (at >= limit))
    return beyond == 0


@jitable
def take_entries(x: Any, indices: Any, y: Any, begin: int, end: int) -> None:
    """`take` along the last axis, of indices that are there or absent: one row of ``x`` after another."""
    size = x.shape[1]
    as_they_are = within(indices, size, begin, end)
    if as_they_are and end - begin <= FEW:
        for first in range(0, x.shape[0], ROWS):
            rows, others = x[first : first + ROWS], y[first : first + ROWS]
            for j in range(begin, end):
                column = np.uint64(indices[np.uint64(j)])
                for i in range(rows.shape[0]):
                    others[np.uint64(i), np.uint64(j), 0] = rows[np.uint64(i), column, 0]
        return
    for i in range(x.shape[0]):
        row, out = x[i], y[i]
        if as_they_are:
            for j in range(begin, end):
                out[np.uint64(j), 0] = row[np.uint64(indices[np.uint64(j)]), 0]
            continue
        for j in range(begin, end):
            at = np.int64(indices[np.uint64(j)])
            entry = row[np.uint64(0 if at == ABSENT else at + size if at < 0 else at), 0]
            out[np.uint64(j), 0] = 0 if at == ABSENT else entry


@jitable
def take_rows(x: Any, indices: Any, y: Any, absent: int, begin: int, end: int) -> int:
    """`take` along the first axis, moving whole rows; answers the run's status."""
    size, nbytes = x.shape[1], x.shape[2] * x.itemsize
    source, target = x.ctypes.data, y.ctypes.data + begin * nbytes
    if indices.itemsize >= 4 and within(indices, size, begin, end):
        words = (source, indices.ctypes.data + begin * indices.itemsize, target, nbytes, end - begin)
        if indices.itemsize == 4:
            gather_rows_by_int32(x, words)
        else:
            gather_rows_by_int64(x, words)
        return 0
    for j in range(begin, end):
        fetch(x, (source + np.int64(indices[np.uint64(min(j + AHEAD, end - 1))]) * nbytes, nbytes))
        at = row_of(indices[np.uint64(j)], size, absent)
        if at >= 0:
            move_bytes(x, (source + at * nbytes, target, nbytes))
        elif at == NO_ROW:
            y[0, j] = 0
        else:
            return OUT_OF_RANGE
        target += nbytes
    return 0


def _taken_bytes(specs: Sequence[Spec]) -> int:
    """Of a table no more than the rows that are asked for."""
    return specs[1].nbytes + 2 * specs[2].nbytes


@kernel("take", layout=_taking, moved=(0, 2), moves=_taken_bytes)
def take(x: Any, indices: Any, y: Any, absent: int, begin: int, end: int, run: Any) -> None:
    size = x.shape[1]
    if x.shape[2] == 1 and size > 0:
        for j in range(begin, end):
            if row_of(indices[j], size, absent) == NOT_THERE:
                run[0] = OUT_OF_RANGE
                return
        take_entries(x, indices, y, begin, end)
        return
    if x.shape[0] == 1:
        if take_rows(x, indices, y, absent, begin, end) != 0:
            run[0] = OUT_OF_RANGE
        return
    for j in range(begin, end):
        at = row_of(indices[j], size, absent)
        if at == NO_ROW:
            for i in range(x.shape[0]):
                y[i, j] = 0
            continue
        if at == NOT_THERE:
            run[0] = OUT_OF_RANGE
            return
        for i in range(x.shape[0]):
            target, source = y[i, j], x[i, at]
            for k in range(target.size):
                target[k] = source[k]


@kernel("take", "cuda", layout=_taking)
def take_on_cuda(x: Any, indices: Any, y: Any, absent: int, run: Any) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        row, k = divided(entry, y.shape[2])
        i, j = divided(row, y.shape[1])
        at = row_of(indices[j], x.shape[1], absent)
        if at == NOT_THERE:
            run[0] = OUT_OF_RANGE
        elif at == NO_ROW:
            y[i, j, k] = 0
        else:
            y[i, j, k] = x[i, at, k]
        entry += cuda.gridsize(1)


@valueclass
class _Bags:
    """So many bags of ``many`` rows of so many columns, each in ``parts``: as a sum of rows side by side has them.

    To the bit it comes to what that does, so it makes no difference whether a pass joined `take` and the sum.
    """

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


def _scattering(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    _, indices, shape = inputs
    before, size, after = around(outputs[0].concrete, attrs["axis"])
    many = indices.size
    sources = View.dense((before, many, after)), View.dense((many,)), View.dense((shape.size,))
    units = max(min(size, PARTS), 1) if before * after >= WORTH_SHARING else 1
    return Call((*sources, View.dense((before, size, after))), (units, int(attrs["absent"])), units=units)


@kernel("scatter_add", layout=_scattering)
def scatter_add(
    updates: Any, indices: Any, shape: Any, y: Any, units: int, absent: int, begin: int, end: int, run: Any
) -> None:
    """A unit is some of the rows added to: whoever has it looks at every index, and adds in their order."""
    size = y.shape[1]
    first, last = size * begin // units, size * end // units
    for i in range(y.shape[0]):
        target = y[i, first]
        for k in range((last - first) * y.shape[2]):  # of rows that lie one after another
            target[np.uint64(k)] = 0
    plain = y.shape[0] == 1 and last - first == size and indices.itemsize >= 4
    if plain and y.dtype.type(2) != y.dtype.type(1) and within(indices, size, 0, indices.size):  # and no bools
        words = (updates.ctypes.data, indices.ctypes.data, indices.size, y.ctypes.data, y.shape[2])
        if indices.itemsize == 4:
            add_to_rows_by_int32(y, words)
        else:
            add_to_rows_by_int64(y, words)
        return
    for j in range(indices.size):
        at = row_of(indices[j], size, absent)
        if at == NOT_THERE:
            run[0] = OUT_OF_RANGE
            return
        if at < first or at >= last:  # another's, or no row
            continue
        for i in range(y.shape[0]):
            target, source = y[i, at], updates[i, j]
            for k in range(target.size):
                target[k] += source[k]


def _found_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> list[Spec]:
    """What equal rows are found by, and the groups of these; see `group_rows`."""
    count = inputs[1].size
    return [found_of(count), Spec("int64", (3 * count + 2,))]


def _scattering_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """All flat; a thread for each entry."""
    (updates, indices, shape), (_, size, after) = inputs, around(outputs[0].concrete, attrs["axis"])
    flat = (View.dense((spec.size,)) for spec in (updates, indices, shape, *outputs))
    found = (View.dense(spec.concrete) for spec in _found_on_cuda(inputs, outputs, attrs))
    words = size, after, int(attrs["absent"]), *teams_comparing(indices.size).words
    return Call((*flat, *found), words)


def _comparing_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """A team for each index, and one for the end."""
    count = inputs[1].size
    return replace(_scattering_on_cuda(inputs, outputs, attrs), blocks=teams_comparing(count).blocks(count + 1))


def clear_on_cuda(
    updates: Any, indices: Any, shape: Any, y: Any, found: Any, groups: Any,
    size: int, after: int, absent: int, width: int, apart: int, run: Any,
) -> None:  # fmt: skip
    note_rows(indices, found, size, absent, run)
    i = cuda.grid(1)
    while i < y.size:
        y[i] = 0
        i += cuda.gridsize(1)


def compare_on_cuda(
    updates: Any, indices: Any, shape: Any, y: Any, found: Any, groups: Any,
    size: int, after: int, absent: int, width: int, apart: int,
) -> None:  # fmt: skip
    compare_rows(found, indices.size, width, apart)


def number_on_cuda(
    updates: Any, indices: Any, shape: Any, y: Any, found: Any, groups: Any,
    size: int, after: int, absent: int, width: int, apart: int,
) -> None:  # fmt: skip
    number_rows(groups, found, indices.size, width, apart)


def place_on_cuda(
    updates: Any, indices: Any, shape: Any, y: Any, found: Any, groups: Any,
    size: int, after: int, absent: int, width: int, apart: int,
) -> None:  # fmt: skip
    place_rows(groups, found, indices.size, 1)


def add_on_cuda(
    updates: Any, indices: Any, shape: Any, y: Any, found: Any, groups: Any,
    size: int, after: int, absent: int, width: int, apart: int,
) -> None:  # fmt: skip
    """A thread adds up an entry of one of the rows that occur, in the order of the indices."""
    many, line = indices.size, groups[0] * after
    entry = cuda.grid(1)
    while entry < divided(y.size, size * after)[0] * line:
        outer, inside = divided(entry, line)
        group, k = divided(inside, after)
        total = y.dtype.type(0)
        for n in range(groups[1 + group], groups[2 + group]):
            total = y.dtype.type(total + updates[(outer * many + groups[2 * many + 2 + n]) * after + k])
        y[(outer * size + groups[many + 2 + group]) * after + k] = total
        entry += cuda.gridsize(1)


kernel(
    "scatter_add",
    "cuda",
    layout=_scattering_on_cuda,
    scratch=_found_on_cuda,
    then=(
        (compare_on_cuda, _comparing_on_cuda),
        (number_on_cuda, _comparing_on_cuda),
        (place_on_cuda, _scattering_on_cuda),
        (add_on_cuda, _scattering_on_cuda),
    ),
)(clear_on_cuda)


def _coding(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    many = inputs[0].size
    return Call((View.dense((many,)), View.dense((many, attrs["depth"]))), units=many)


@kernel("one_hot", layout=_coding)
def one_hot(indices: Any, y: Any, begin: int, end: int) -> None:
    for i in range(begin, end):
        row, at = y[i], row_number(indices[i])
        row[:] = 0
        if at >= 0 and at < row.size:
            row[at] = 1


@kernel("one_hot", "cuda", layout=_coding)
def one_hot_on_cuda(indices: Any, y: Any) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        i, k = divided(entry, y.shape[1])
        y[i, k] = 1 if row_number(indices[i]) == k else 0
        entry += cuda.gridsize(1)
