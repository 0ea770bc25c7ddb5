"""Rows of tables split by rows, where passes know what lies where: taken, put together, packed and grouped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, Form, View, host_only, kernel, natural, require_kernel
from flowrt.kernels.launch import Application, LaunchStep, apply_kernel
from flowrt.kernels.ops.shards.routing import BLOCK, rows_within
from flowrt.kernels.ops.slices import ABSENT, OUT_OF_RANGE, find_groups, lay_groups, table_bits
from flowrt.kernels.tiles.rowmoves import AHEAD, fetch, move_bytes


def _laying(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    table = inputs[0].concrete
    return Call(
        (View.dense((table[0], math.prod(table[1:]))), View.dense(outputs[0].concrete)),
        (attrs["part"], attrs["first"], attrs["end"]),
    )


@kernel("lay_part", layout=_laying, moved=(0,))
def lay_part(table: Any, places: Any, part: int, first: int, end: int) -> None:
    """Note the bounds of a part's rows, and where the first row of all would lie if all lay as its own do."""
    parts = (places.size - 1) // 2
    places[part], places[part + 1] = first, end
    places[parts + 1 + part] = table.ctypes.data - first * table.shape[1] * table.itemsize


@kernel("take_among", layout=natural, moved=(2,))
def take_among(indices: Any, places: Any, y: Any, rows: Any, absent: int, begin: int, end: int, run: Any) -> None:
    """Rows wherever ``places`` say that they lie; each is asked for some before its turn."""
    parts, nbytes = (places.size - 1) // 2, y.shape[1] * y.itemsize
    addresses, size, target = places[parts + 1 :], places[parts], y.ctypes.data + begin * nbytes
    for start in range(begin, end, BLOCK):
        count = min(end - start, BLOCK)
        at, lies = rows[:count], rows[BLOCK : BLOCK + count]
        if not rows_within(indices, start, size, 1, absent, at):
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
            Call(views, (int(attrs["absent"]),), units=indices.size, order=tuple(range(parts, parts + 4))),
            parts + 2,
        )
    )
    return Application(tuple(steps), (places,), (memory,))


def _packing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return replace(natural(inputs, outputs, attrs), words=(attrs["part"], attrs["home"]))


@kernel("pack_part", layout=_packing)
def pack_part(starts: Any, numbers: Any, ends: Any, part: int, home: int, run: Any) -> None:
    """Number a part's rows behind those of the parts before it in its home; the first part begins all homes."""
    if part == 0:
        ends[:] = 0
    first, last, number = starts[part], starts[part + 1], ends[2 * home + 1]
    if first < 0 or last < first or last > numbers.size:
        run[0] = OUT_OF_RANGE
        return
    for j in range(last - first):
        numbers[np.uint64(first + j)] = number + j
    ends[2 * home + 1] = number + last - first


@kernel("pack_parts", form=Form.PROGRAM)
def pack_parts(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    """A step for each part, one after another."""
    steps: list[LaunchStep] = []
    for part, home in enumerate(attrs["homes"]):
        one = apply_kernel("pack_part", inputs[:1], outputs, {"part": part, "home": home})
        steps += [replace(step, operands=(0, 2, 3)) for step in one.steps if isinstance(step, LaunchStep)]
    return Application(tuple(steps), ())


def _stretch_views(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    (size, *inner), rows = inputs[0].concrete, outputs[0].concrete[0]
    columns = math.prod(inner)
    vectors = [View.dense(spec.concrete) for spec in inputs[1:]]
    return Call((View.dense((size, columns)), *vectors, View.dense((rows, columns))), (attrs["part"],), units=rows)


@kernel("move_part", layout=_stretch_views, moved=(0, 4))
def move_part(
    source: Any, starts: Any, rows: Any, places: Any, y: Any, part: int, begin: int, end: int, run: Any
) -> None:
    """A unit is as much of the stretch as of what is made; rows are asked for some before their turn."""
    first, count, nbytes = starts[part], starts[part + 1] - starts[part], y.shape[1] * y.itemsize
    if first < 0 or count < 0 or first + count > min(rows.size, places.size):
        run[0] = OUT_OF_RANGE
        return
    units = max(y.shape[0], 1)
    low, high = first + count * begin // units, first + count * end // units
    base, target = source.ctypes.data, y.ctypes.data
    for j in range(low, high):
        fetch(source, (base + rows[np.uint64(min(j + AHEAD, high - 1))] * nbytes, nbytes))
        at, to = rows[np.uint64(j)], places[np.uint64(j)]
        if to == ABSENT:
            continue
        if to < 0 or to >= y.shape[0] or ((at < 0 or at >= source.shape[0]) and at != ABSENT):
            run[0] = OUT_OF_RANGE
            return
        if at == ABSENT:
            y[to] = 0
        else:
            move_bytes(y, (base + at * nbytes, target + to * nbytes, nbytes))


def _moved_bytes(specs: Sequence[Spec]) -> int:
    """Of the sources no more than the rows that there is room for."""
    return 2 * specs[-1].nbytes


@kernel("move_parts", form=Form.PROGRAM, moves=_moved_bytes)
def move_parts(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    """A step for each part."""
    *sources, starts, found, order, _, numbers = inputs
    many = len(sources)
    steps: list[LaunchStep] = []
    vectors = {"found": (many + 1, found), "order": (many + 2, order), "numbers": (many + 4, numbers)}
    to, places = vectors[attrs["places"]]
    for source, (part, way) in enumerate(zip(attrs["parts"], attrs["rows"], strict=True)):
        at, rows = vectors[way]
        one = apply_kernel("move_part", [sources[source], starts, rows, places], outputs, {"part": part})
        operands = (source, many, at, to, many + 5)
        steps += [replace(step, operands=operands) for step in one.steps if isinstance(step, LaunchStep)]
    return Application(tuple(steps), ())


def _part_table(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    count = inputs[1].size  # at most so many of the indices are the part's
    return Spec("int32", (1 << table_bits(count),)), Spec("int32", (count,)), Spec("int64", (count,))


def _grouping_part(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(s.concrete) for s in (*inputs, *outputs, *_part_table(inputs, outputs, attrs))]
    return Call(tuple(views), (attrs["part"], attrs["size"]), order=(0, 1, 2, *range(4, len(views))))


@kernel("group_part", layout=_grouping_part, scratch=_part_table)
def group_part(
    starts: Any,
    found: Any,
    numbers: Any,
    groups: Any,
    table: Any,
    member: Any,
    cursor: Any,
    part: int,
    size: int,
    run: Any,
) -> None:
    """As `group_rows`, of a stretch: an occurrence is told by the number of its value."""
    begin, end, bits = starts[part], starts[part + 1], 1
    if begin < 0 or end < begin or end > min(found.size, numbers.size):
        run[0] = OUT_OF_RANGE
        return
    while 1 << bits < 2 * (end - begin):
        bits += 1
    if 1 << bits > table.size:
        run[0] = OUT_OF_RANGE
        return
    slots = table[: 1 << bits]
    for i in range(slots.size):
        slots[i] = 0
    many = find_groups(found[begin:end], groups, slots, member, cursor, size, 1, bits)
    if many < 0:
        run[0] = OUT_OF_RANGE
        return
    lay_groups(groups, cursor, many)
    for j in range(end - begin):
        g = member[np.uint64(j)]
        if g >= 0:
            groups[np.uint64(cursor[np.uint64(g)])] = numbers[begin + j]
            cursor[np.uint64(g)] += 1


host_only(
    *("lay_part", "take_among", "take_parts", "pack_part", "pack_parts", "move_part", "move_parts", "group_part"),
    why="rows on their way to the servers that have them, through the network",
)
