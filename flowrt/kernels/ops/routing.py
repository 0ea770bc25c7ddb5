"""Where rows go that are sent to their parts: counted, then dealt out in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base import partitioning
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, Form, View, host_only, jitable, kernel, natural, pieces, require_kernel
from flowrt.kernels.launch import Application, LaunchStep, apply_kernel
from flowrt.kernels.ops.slices import ABSENT, OUT_OF_RANGE, find_groups, lay_groups, row_number, table_bits
from flowrt.kernels.tiles.rowmoves import AHEAD, fetch, move_bytes

BLOCK = 256  # indices that are looked at together, in a cache

padded_rows = jitable(partitioning.padded_rows)


def _routing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(spec.concrete) for spec in (*inputs, *outputs, *_cursors(inputs, outputs, attrs))]
    return Call(tuple(views), (int(attrs["wraps"]), int(attrs["padded"])))


@jitable
def rows_within(indices: Any, begin: int, size: int, wraps: int, at: Any) -> bool:
    """Fill ``at`` by indices from ``begin`` on; whether all are rows of ``size``, or no row's where they wrap.

    No branch is taken by what they are, so that loops are of vectors.
    """
    beyond = 0
    for j in range(at.size):
        index = row_number(indices[np.uint64(begin + j)])
        absent = (index == ABSENT) & (wraps != 0)
        row = index + (size if (index < 0) & (wraps != 0) else 0)
        beyond += int(((row < 0) | (row >= size)) & (not absent))
        at[np.uint64(j)] = ABSENT if absent else row
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
    padded: int,
    run: Any,
) -> None:
    """Until they are dealt out, ``back`` holds each index's part and ``order`` its row."""
    parts, size = bounds.size - 1, bounds[bounds.size - 1]
    for first in range(0, indices.size, BLOCK):
        last = min(first + BLOCK, indices.size)
        at, part = order[first:last], back[first:last]
        if not rows_within(indices, first, size, wraps, at):
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


@kernel("part_of", layout=_stretch)
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


def _laying(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    table = inputs[0].concrete
    return Call(
        (View.dense((table[0], math.prod(table[1:]))), View.dense(outputs[0].concrete)),
        (attrs["part"], attrs["first"], attrs["end"]),
    )


@kernel("lay_part", layout=_laying)
def lay_part(table: Any, places: Any, part: int, first: int, end: int) -> None:
    """Note the bounds of a part's rows, and where the first row of all would lie if all lay as its own do."""
    parts = (places.size - 1) // 2
    places[part], places[part + 1] = first, end
    places[parts + 1 + part] = table.ctypes.data - first * table.shape[1] * table.itemsize


@kernel("take_among", layout=natural)
def take_among(indices: Any, places: Any, y: Any, rows: Any, begin: int, end: int, run: Any) -> None:
    """Rows wherever ``places`` say that they lie; each is asked for some before its turn."""
    parts, nbytes = (places.size - 1) // 2, y.shape[1] * y.itemsize
    addresses, size, target = places[parts + 1 :], places[parts], y.ctypes.data + begin * nbytes
    for start in range(begin, end, BLOCK):
        count = min(end - start, BLOCK)
        at, lies = rows[:count], rows[BLOCK : BLOCK + count]
        if not rows_within(indices, start, size, 1, at):
            run[0] = OUT_OF_RANGE
            return
        for j in range(count):
            lies[np.uint64(j)] = addresses[0] + at[np.uint64(j)] * nbytes
        for p in range(1, parts):
            bound, further = places[p], addresses[p] - addresses[p - 1]
            for j in range(count):
                lies[np.uint64(j)] += further if at[np.uint64(j)] >= bound else 0
        for j in range(count):
            fetch(y, (lies[np.uint64(min(j + AHEAD, count - 1))], nbytes))
            if at[np.uint64(j)] == ABSENT:
                y[start + j] = 0
            else:
                move_bytes(y, (lies[np.uint64(j)], target, nbytes))
            target += nbytes


def _taken_bytes(specs: Sequence[Spec]) -> int:
    """Of the tables no more than the rows that are asked for."""
    return specs[-2].nbytes + 2 * specs[-1].nbytes


@kernel("take_parts", form=Form.PROGRAM, moves=_taken_bytes)
def take_parts(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    """A step for each table, which says where it lies, and one that takes the rows."""
    *tables, indices = inputs
    parts, bounds, out = len(tables), attrs["bounds"], outputs[0].concrete
    places, memory = Spec("int64", (2 * parts + 1,)), Spec("int64", (2 * BLOCK,))
    told = parts + 2  # the operand that the places are, behind the tables, the indices and the result
    steps = []
    for part, table in enumerate(tables):
        one = apply_kernel(
            "lay_part", [table], [places], {"part": part, "first": bounds[part], "end": bounds[part + 1]}
        )
        steps += [replace(step, operands=(part, told)) for step in one.steps if isinstance(step, LaunchStep)]
    views = *(View.dense(table.concrete) for table in tables), View.dense((indices.size,)), View.dense(places.concrete)
    views += View.dense((out[0], math.prod(out[1:]))), View.dense(memory.concrete)
    dtypes = *(spec.dtype for spec in inputs), places.dtype, outputs[0].dtype, memory.dtype
    steps.append(
        LaunchStep(
            require_kernel("take_among", device, [indices.dtype]),
            (*range(parts + 1), told, parts + 1, told + 1),
            dtypes,
            Call(views, units=indices.size, order=tuple(range(parts, parts + 4))),
            parts + 2,
        )
    )
    return Application(tuple(steps), (places,), (memory,))


def _part_table(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    count = inputs[1].size  # at most so many of the indices are the part's
    return Spec("int32", (1 << table_bits(count),)), Spec("int32", (count,)), Spec("int64", (count,))


def _grouping_part(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(s.concrete) for s in (*inputs, *outputs, *_part_table(inputs, outputs, attrs))]
    return Call(tuple(views), (attrs["part"], attrs["size"]))


@kernel("group_part", layout=_grouping_part, scratch=_part_table)
def group_part(
    starts: Any,
    found: Any,
    order: Any,
    back: Any,
    groups: Any,
    table: Any,
    member: Any,
    cursor: Any,
    part: int,
    size: int,
    run: Any,
) -> None:
    """As `group_rows`, of a stretch: an occurrence is told by its index's place before all were dealt out."""
    begin, end, bits = starts[part], starts[part + 1], 1
    if begin < 0 or end < begin or end > min(found.size, order.size):
        run[0] = OUT_OF_RANGE
        return
    while 1 << bits < 2 * (end - begin):
        bits += 1
    slots = table[: 1 << bits]
    for i in range(slots.size):
        slots[i] = 0
    many = find_groups(found[begin:end], groups, slots, member, cursor, size, bits)
    if many < 0:
        run[0] = OUT_OF_RANGE
        return
    lay_groups(groups, cursor, many)
    for j in range(end - begin):
        g = member[np.uint64(j)]
        if g >= 0:
            groups[np.uint64(cursor[np.uint64(g)])] = order[begin + j]
            cursor[np.uint64(g)] += 1


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
    *("route_rows", "part_of", "join_parts", "lay_part", "take_among", "take_parts", "group_part", "last_places"),
    why="rows on their way to the servers that have them, through the network",
)
