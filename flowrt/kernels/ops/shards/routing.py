"""Where rows go that are sent to their parts: counted, then dealt out in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base import partitioning
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, host_only, jitable, kernel, pieces
from flowrt.kernels.ops.slices import ABSENT, OUT_OF_RANGE, row_number

BLOCK = 256  # indices that are looked at together, in a cache

padded_rows = jitable(partitioning.padded_rows)


def _routing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(spec.concrete) for spec in (*inputs, *outputs, *_cursors(inputs, outputs, attrs))]
    return Call(tuple(views), (int(attrs["wraps"]), int(attrs["absent"]), int(attrs["padded"])))


@jitable
def rows_within(indices: Any, begin: int, size: int, wraps: int, absent: int, at: Any) -> bool:
    """Fill ``at`` by indices from ``begin`` on; whether all are rows of ``size``, or no row's where they may be absent.

    No branch is taken by what they are, so that loops are of vectors.
    """
    beyond = 0
    for j in range(at.size):
        index = row_number(indices[np.uint64(begin + j)])
        none = (index == ABSENT) & (absent != 0)
        row = index + (size if (index < 0) & (wraps != 0) else 0)
        beyond += int(((row < 0) | (row >= size)) & (not none))
        at[np.uint64(j)] = ABSENT if none else row
    return beyond == 0


@jitable
def rows_alike(counts: Any, room: int) -> int:
    """The padded rows that are enough for each of these counts, where there is room for so many of all; else 0."""
    most = 0
    for p in range(counts.size):
        most = max(most, counts[p])
    alike = padded_rows(most)
    return alike if alike * counts.size <= room else 0


def _cursors(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    return (Spec("int64", (inputs[1].size - 1,)),)


@kernel("route_rows", layout=_routing, scratch=_cursors)
def route_rows(
    indices: Any,
    bounds: Any,
    starts: Any,
    found: Any,
    order: Any,
    back: Any,
    cursor: Any,
    wraps: int,
    absent: int,
    padded: int,
    run: Any,
) -> None:
    """Until they are dealt out, ``back`` holds each index's part and ``order`` its row."""
    parts, size = bounds.size - 1, bounds[bounds.size - 1]
    for first in range(0, indices.size, BLOCK):
        last = min(first + BLOCK, indices.size)
        at, part = order[first:last], back[first:last]
        if not rows_within(indices, first, size, wraps, absent, at):
            run[0] = OUT_OF_RANGE
            return
        part[:] = 0
        for p in range(1, parts):
            bound = bounds[p]
            for j in range(at.size):
                part[np.uint64(j)] += np.int64(at[np.uint64(j)] >= bound)
    for p in range(parts):
        cursor[p] = 0
    for j in range(indices.size):
        cursor[np.uint64(back[np.uint64(j)])] += 1
    alike = rows_alike(cursor, order.size) if padded != 0 and back.size > 0 else -1
    starts[0] = 0
    for p in range(parts):
        starts[p + 1] = starts[p] + (max(alike, padded_rows(cursor[p])) if alike >= 0 else cursor[p])
        for place in range(starts[p] + cursor[p], starts[p + 1]):
            order[place] = found[place] = ABSENT
        cursor[p] = starts[p]
    for place in range(starts[parts], order.size):
        order[place] = found[place] = ABSENT
    for j in range(indices.size):
        whose, row = np.uint64(back[np.uint64(j)]), row_number(indices[np.uint64(j)])
        to = np.uint64(cursor[whose])
        cursor[whose] += 1
        order[to], back[np.uint64(j)] = j, to
        found[to] = row if row == ABSENT else (row + size if row < 0 else row) - bounds[whose]


def _stretch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    x, y = inputs[0].concrete, outputs[0].concrete
    inner = math.prod(x[1:])
    views = View.dense((x[0], inner)), View.dense(inputs[1].concrete), View.dense((y[0], inner))
    return Call(views, (attrs["part"],))


@kernel("part_of", layout=_stretch, moved=(0, 2))
def part_of(x: Any, starts: Any, y: Any, part: int, run: Any) -> None:
    first = starts[part]
    if first < 0 or first + y.shape[0] > x.shape[0]:
        run[0] = OUT_OF_RANGE
        return
    for i in range(y.shape[0]):
        for k in range(y.shape[1]):
            y[i, k] = x[first + i, k]


def _joining(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    whole, views, start = View.dense(outputs[0].concrete), [], 0
    inner = whole.shape[1:]
    for spec in inputs[:-2]:
        views += [View.dense(spec.concrete), whole.window((start, *(0 for _ in inner)), spec.concrete)]
        start += spec.concrete[0]
    return Call(tuple(views), (0,))


pieces("join_parts", _joining, on=("cpu",))


def _placing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call((View.dense(inputs[0].concrete), View.dense((1,)), View.dense(outputs[0].concrete)))


@kernel("last_places", layout=_placing)
def last_places(indices: Any, size: Any, places: Any, run: Any) -> None:
    for n in range(places.size):
        places[n] = np.int64(ABSENT)
    for j in range(indices.size):
        at = row_number(indices[j])
        if at < 0 or at >= places.size:
            run[0] = OUT_OF_RANGE
            return
        places[at] = j


host_only(
    *("route_rows", "part_of", "join_parts", "last_places"),
    why="rows on their way to the servers that have them, through the network",
)
