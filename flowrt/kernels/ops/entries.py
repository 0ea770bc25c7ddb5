"""Entries chosen one by one. Axes before and after the indexed one are seen as one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec, normal_axes
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.ops.index import around, within
from flowrt.kernels.ops.slices import NOT_THERE, OUT_OF_RANGE, row_of
from flowrt.kernels.teams.standing import divided

ADDING = 1 << 16  # threads of a device that share lines which are added to


def _along(spec: Spec, beside: Sequence[int], axis: Any) -> tuple[View, tuple[int, int, int]]:
    """How an operand is seen that has, but for ``axis``, the sizes ``beside``, or broadcasts to them and is copied.

    That is as (before, axis, after), which is answered, too.
    """
    at = normal_axes(axis, spec.rank)[0]
    whole = (*beside[:at], spec.concrete[at], *beside[at + 1 :])
    view, sizes = View.dense(spec.concrete).broadcast_to(whole), around(whole, axis)
    return view.reshape(sizes) if view.contiguous else view, sizes


def _taking_along(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    y, axis = outputs[0].concrete, attrs["axis"]
    views, copied = zip(*(_along(spec, y, axis) for spec in inputs), strict=True)
    before, many, after = around(y, axis)
    return Call((*views, View.dense((before, many, after))), units=before * many, copied=copied)


@jitable
def take_from_row(row: Any, indices: Any, out: Any) -> Any:
    """Where lines have entries side by side; answers a number below 0 where an index is out of range."""
    size, wrong = row.shape[0], np.int64(0)
    if within(indices, size, 0, indices.shape[0]):
        for j in range(np.uint64(indices.shape[0])):
            out[j] = row[np.uint64(indices[j]), 0]
        return wrong
    for j in range(np.uint64(indices.shape[0])):
        at = row_of(indices[j], size, 0)
        wrong |= at
        out[j] = row[np.uint64(max(at, 0)), 0]
    return wrong


@kernel("take_along_axis", layout=_taking_along, moved=(0, 2))
def take_along_axis(x: Any, indices: Any, y: Any, begin: int, end: int, run: Any) -> None:
    """A unit is an index, or all those of one place along the axis. There is an entry if there is an index."""
    size, many, after = x.shape[1], y.shape[1], np.uint64(x.shape[2])
    i, start, left, wrong = np.uint64(begin // many), begin % many, end - begin, np.int64(0)
    while left > 0:
        stop = min(many, start + left)
        if after == np.uint64(1):
            wrong |= take_from_row(x[i], indices[i, start:stop, 0], y[i, start:stop, 0])
        else:
            for j in range(np.uint64(start), np.uint64(stop)):
                for k in range(after):
                    row = row_of(indices[i, j, k], size, 0)
                    wrong |= row
                    y[i, j, k] = x[i, np.uint64(max(row, 0)), k]
        left -= stop - start
        i, start = i + np.uint64(1), 0
    if wrong < 0:
        run[0] = OUT_OF_RANGE


@kernel("take_along_axis", "cuda", layout=_taking_along)
def take_along_axis_on_cuda(x: Any, indices: Any, y: Any, run: Any) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        place, k = divided(entry, y.shape[2])
        i, j = divided(place, y.shape[1])
        row = row_of(indices[i, j, k], x.shape[1], 0)
        if row == NOT_THERE:
            run[0] = OUT_OF_RANGE
        else:
            y[i, j, k] = x[i, row, k]
        entry += cuda.gridsize(1)


def _adding_along(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """Each line that is added to is a unit; a device's threads share the entries of one, of which there may be few."""
    (_, indices, shape), axis = inputs, attrs["axis"]
    before, size, after = around(outputs[0].concrete, axis)
    chosen, sizes = _along(indices, outputs[0].concrete, axis)
    views = View.dense(sizes), chosen, View.dense((shape.size,)), View.dense((before, size, after))
    parts = max(min(size, ADDING // max(before * after, 1)), 1)
    return Call(views, (parts,), units=before * after, copied=(sizes, sizes, (shape.size,)))


@jitable
def add_to_row(row: Any, indices: Any, updates: Any) -> Any:
    """Where lines have entries side by side; answers a number below 0 where an index is out of range."""
    size, wrong = row.shape[0], np.int64(0)
    for k in range(np.uint64(size)):
        row[k, 0] = 0
    for j in range(np.uint64(indices.shape[0])):
        at = row_of(indices[j, 0], size, 0)
        wrong |= at
        if at >= 0:
            row[np.uint64(at), 0] += updates[j, 0]
    return wrong


@kernel("add_along_axis", layout=_adding_along)
def add_along_axis(updates: Any, indices: Any, shape: Any, y: Any, parts: int, begin: int, end: int, run: Any) -> None:
    size, many, after = y.shape[1], np.uint64(updates.shape[1]), y.shape[2]
    i, start, left, wrong = begin // after, begin % after, end - begin, np.int64(0)
    while left > 0:
        stop = min(after, start + left)
        line, chosen, added = y[i], indices[i], updates[i]
        if after == 1:
            wrong |= add_to_row(line, chosen, added)
        else:
            for row in range(np.uint64(size)):
                for k in range(np.uint64(start), np.uint64(stop)):
                    line[row, k] = 0
            for j in range(many):
                for k in range(np.uint64(start), np.uint64(stop)):
                    row = row_of(chosen[j, k], size, 0)
                    wrong |= row
                    if row >= 0:
                        line[np.uint64(row), k] += added[j, k]
        i, start, left = i + 1, 0, left - (stop - start)
    if wrong < 0:
        run[0] = OUT_OF_RANGE


@kernel("add_along_axis", "cuda", layout=_adding_along)
def add_along_axis_on_cuda(updates: Any, indices: Any, shape: Any, y: Any, parts: int, run: Any) -> None:
    """A thread adds to a part of a line, in the order of the indices, at all of which it looks."""
    size, many, after = y.shape[1], updates.shape[1], y.shape[2]
    mine = cuda.grid(1)
    while mine < y.shape[0] * after * parts:
        line, part = divided(mine, parts)
        i, k = divided(line, after)
        first, last = divided(size * part, parts)[0], divided(size * (part + 1), parts)[0]
        for row in range(first, last):
            y[i, row, k] = 0
        for j in range(many):
            row = row_of(indices[i, j, k], size, 0)
            if row == NOT_THERE:
                run[0] = OUT_OF_RANGE
            elif row >= first and row < last:
                y[i, row, k] += updates[i, j, k]
        mine += cuda.gridsize(1)


def _flattening(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    many, axes = outputs[0].size, inputs[0].concrete[-1]
    return Call((View.dense((many, axes)), View.dense((axes,)), View.dense((many,))), units=many)


@kernel("flat_indices", layout=_flattening)
def flat_indices(indices: Any, sizes: Any, y: Any, begin: int, end: int, run: Any) -> None:
    wrong = np.int64(0)
    for j in range(np.uint64(begin), np.uint64(end)):
        flat = np.int64(0)
        for k in range(np.uint64(indices.shape[1])):
            row = row_of(indices[j, k], sizes[k], 0)
            wrong |= row
            flat = flat * sizes[k] + row
        y[j] = flat
    if wrong < 0:
        run[0] = OUT_OF_RANGE


@kernel("flat_indices", "cuda", layout=_flattening)
def flat_indices_on_cuda(indices: Any, sizes: Any, y: Any, run: Any) -> None:
    j = cuda.grid(1)
    while j < y.size:
        flat = 0
        for k in range(indices.shape[1]):
            row = row_of(indices[j, k], sizes[k], 0)
            if row == NOT_THERE:
                run[0] = OUT_OF_RANGE
            flat = flat * sizes[k] + row
        y[j] = flat
        j += cuda.gridsize(1)
