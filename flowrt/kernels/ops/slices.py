"""Equal indices found by hashing, in time and memory that the number of rows has no part in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.teams.grouping import ROW, compare_rows, found_of, number_rows, place_rows, teams_comparing
from flowrt.kernels.teams.standing import divided

OUT_OF_RANGE = 1  # of launch.FAILURES
ABSENT = -(1 << 63)  # an index that is no row's, where a kernel is told that some may be absent
NO_ROW, NOT_THERE = -1, -2  # of `row_of`: for an absent index, and for one that is out of range
BEYOND = (1 << 63) - 1  # one that no table has
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: consecutive rows are spread evenly


@jitable
def row_number(index: Any) -> Any:
    """An index as a signed number; `BEYOND` for an unsigned one that is too large for that."""
    at = np.int64(index)
    return np.int64(BEYOND) if at < 0 and index > 0 else at


@jitable
def row_of(index: Any, size: int, absent: int) -> int:
    """The row of an index: `NO_ROW` for `ABSENT` where some may be ``absent``, `NOT_THERE` for one out of range."""
    at = row_number(index)
    if at == ABSENT and absent != 0:
        return NO_ROW
    return NOT_THERE if at < -size or at >= size else at + size if at < 0 else at


def table_bits(count: int) -> int:
    """A hash table of 2 to this power of slots is at most half full with ``count`` rows."""
    return max(2 * count - 1, 1).bit_length()


def _table(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    count = inputs[0].size
    return Spec("int32", (1 << table_bits(count),)), Spec("int32", (count,)), Spec("int64", (count,))


def _grouping(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(s.concrete) for s in (inputs[0], Spec("int64", (1,)), *outputs)]
    bits = table_bits(inputs[0].size)
    scratch = (View.dense(s.concrete) for s in _table(inputs, outputs, attrs))
    return Call((*views, *scratch), (attrs["size"], int(attrs["absent"]), bits))


@jitable
def slot_of(row: int, bits: int) -> Any:
    """Where in a hash table of 2 to the ``bits`` slots the search for a row begins."""
    return (np.uint64(row) * GOLDEN) >> np.uint64(64 - bits)


@jitable
def find_groups(
    indices: Any, groups: Any, table: Any, member: Any, counts: Any, size: int, absent: int, bits: int
) -> Any:
    """Tell each index its group, -1 where it is no row's; answers how many groups there are, -1 for a bad index.

    There may be fewer indices than ``groups`` have room for.
    """
    count, found = indices.size, np.uint64(0)
    rows, one, mask = np.uint64((groups.size - 2) // 3 + 2), np.uint64(1), np.uint64(table.size - 1)
    for i in range(count):
        at = row_of(indices[np.uint64(i)], size, absent)
        if at == NO_ROW:
            member[np.uint64(i)] = -1
            continue
        if at == NOT_THERE:
            return -1
        place = slot_of(at, bits)
        group = np.uint64(table[place])
        while group != 0 and groups[rows + group - one] != at:
            place = (place + one) & mask
            group = np.uint64(table[place])
        if group == 0:
            groups[rows + found], counts[found] = at, 0
            found += one
            table[place] = group = found
        counts[group - one] += 1
        member[np.uint64(i)] = np.int64(group) - 1
    return np.int64(found)


@jitable
def lay_groups(groups: Any, cursor: Any, found: int) -> None:
    """Say which range each of ``found`` groups has, of whose occurrences ``cursor`` has counts, then first places."""
    occurrences, total = 2 * ((groups.size - 2) // 3) + 2, 0
    groups[0] = found
    for g in range(found):
        groups[np.uint64(1 + g)] = total
        many = cursor[np.uint64(g)]
        cursor[np.uint64(g)] = occurrences + total
        total += many
    groups[1 + found] = total


@jitable
@kernel("group_rows", layout=_grouping, scratch=_table)
def group_rows(
    indices: Any,
    values: Any,
    groups: Any,
    table: Any,
    member: Any,
    cursor: Any,
    size: int,
    absent: int,
    bits: int,
    run: Any,
) -> None:
    """Indices unsigned, so that no index is looked at twice: once hashed, 8,192 of them take 50 µs."""
    count = indices.size
    for i in range(table.size):
        table[i] = 0
    found = find_groups(indices, groups, table, member, cursor, size, absent, bits)
    if found < 0:
        run[0] = OUT_OF_RANGE
        return
    lay_groups(groups, cursor, found)
    repeat = max(count // max(values[0], 1), 1)
    for i in range(0, count, repeat):
        value = i // repeat
        for j in range(i, min(i + repeat, count)):
            g = member[np.uint64(j)]
            if g >= 0:
                groups[np.uint64(cursor[np.uint64(g)])] = value
                cursor[np.uint64(g)] += 1


@jitable
def note_rows(indices: Any, found: Any, size: int, absent: int, run: Any) -> None:
    """Tell a table of `teams.grouping`'s the row of each index."""
    i = cuda.grid(1)
    while i < indices.size:
        at = row_of(indices[i], size, absent)
        found[ROW, i] = max(at, NO_ROW)
        if at == NOT_THERE:
            run[0] = OUT_OF_RANGE
        i += cuda.gridsize(1)


def _found_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> list[Spec]:
    return [found_of(inputs[0].size)]


def _each(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """A thread for each index."""
    specs = (inputs[0], Spec("int64", (1,)), *outputs, found_of(inputs[0].size))
    words = attrs["size"], int(attrs["absent"]), *teams_comparing(inputs[0].size).words
    return Call(tuple(View.dense(spec.concrete) for spec in specs), words, blocks=-(-inputs[0].size // THREADS))


def _compared(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """A team for each index, and one for the end."""
    count = inputs[0].size
    return replace(_each(inputs, outputs, attrs), blocks=teams_comparing(count).blocks(count + 1))


def note_on_cuda(
    indices: Any, values: Any, groups: Any, found: Any, size: int, absent: int, width: int, apart: int, run: Any
) -> None:
    note_rows(indices, found, size, absent, run)


def compare_on_cuda(
    indices: Any, values: Any, groups: Any, found: Any, size: int, absent: int, width: int, apart: int
) -> None:
    compare_rows(found, indices.size, width, apart)


def number_on_cuda(
    indices: Any, values: Any, groups: Any, found: Any, size: int, absent: int, width: int, apart: int
) -> None:
    number_rows(groups, found, indices.size, width, apart)


def place_on_cuda(
    indices: Any, values: Any, groups: Any, found: Any, size: int, absent: int, width: int, apart: int
) -> None:
    place_rows(groups, found, indices.size, max(divided(indices.size, max(values[0], 1))[0], 1))


kernel(
    "group_rows",
    "cuda",
    layout=_each,
    scratch=_found_on_cuda,
    then=((compare_on_cuda, _compared), (number_on_cuda, _compared), (place_on_cuda, _each)),
)(note_on_cuda)


def rows_of(groups: Any) -> Any:
    """The rows that occur in what `group_rows` has made, each once."""
    first = (groups.size - 2) // 3 + 2
    return groups[first : first + groups[0]]


@jitable
def part(groups: Any, unit: int, units: int) -> int:
    """The first of the groups that units from ``unit`` up see to: about equally many occurrences and rows each."""
    found = groups[0]
    goal = (groups[1 + found] + 4 * found) * unit // units
    low, high = 0, found
    while low < high:
        middle = (low + high) // 2
        if groups[1 + middle] + 4 * middle < goal:
            low = middle + 1
        else:
            high = middle
    return low


def _summing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    values, groups = inputs
    rows, columns = values.shape[0] or 0, Spec("int32", values.shape[1:]).size
    return Call(
        (View.dense((rows, columns)), View.dense(groups.concrete), View.dense((outputs[0].concrete[0], columns)))
    )


@kernel("sum_rows", layout=_summing)
def sum_rows(values: Any, groups: Any, y: Any) -> None:
    count = y.shape[0]
    found, order = groups[0], 2 * count + 2
    for g in range(found):
        first, last = groups[1 + g], groups[2 + g]
        for k in range(y.shape[1]):
            y[g, k] = values[groups[order + first], k]
        for j in range(first + 1, last):
            for k in range(y.shape[1]):
                y[g, k] += values[groups[order + j], k]
    for g in range(found, count):
        for k in range(y.shape[1]):
            y[g, k] = 0


@kernel("sum_rows", "cuda", layout=_summing)
def sum_rows_on_cuda(values: Any, groups: Any, y: Any) -> None:
    count, columns = y.shape
    found, order = groups[0], 2 * count + 2
    entry = cuda.grid(1)
    while entry < y.size:
        g, k = divided(entry, columns)
        total = y.dtype.type(0)
        if g < found:
            total = values[groups[order + groups[1 + g]], k]
            for j in range(groups[1 + g] + 1, groups[2 + g]):
                total += values[groups[order + j], k]
        y[g, k] = total
        entry += cuda.gridsize(1)
