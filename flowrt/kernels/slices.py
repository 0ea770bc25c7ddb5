"""Equal indices found by hashing, in time and memory that the number of rows has no part in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.kernels.table import Call, View, host_only, jitable, kernel
from flowrt.spec import Spec

OUT_OF_RANGE = 1  # of launch.FAILURES
ABSENT = -(1 << 63)  # an index that is no row's
GOLDEN = np.int64(0x9E3779B1)  # 2**32 over the golden ratio: consecutive rows are spread evenly
LOW = np.int64(0xFFFFFFFF)


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
    return Call((*views, *scratch), (attrs["size"], bits))


@kernel("group_rows", layout=_grouping, scratch=_table)
def group_rows(
    indices: Any, values: Any, groups: Any, table: Any, member: Any, cursor: Any, size: int, bits: int, run: Any
) -> None:
    count = indices.size
    starts, rows, order = 1, count + 2, 2 * count + 2
    for i in range(table.size):
        table[i] = 0
    found = 0
    mask = table.size - 1
    for i in range(count):
        at = np.int64(indices[i])
        if at == ABSENT:
            member[i] = -1
            continue
        if at < -size or at >= size:
            run[0] = OUT_OF_RANGE
            return
        at = at + size if at < 0 else at
        place = ((at * GOLDEN) & LOW) >> (32 - bits) if bits <= 32 else at & mask
        group = table[place]
        while group != 0 and groups[rows + group - 1] != at:
            place = (place + 1) & mask
            group = table[place]
        if group == 0:
            groups[rows + found] = at
            cursor[found] = 0
            found += 1
            table[place] = group = found
        cursor[group - 1] += 1
        member[i] = group - 1
    groups[0] = found
    total = 0
    for g in range(found):
        groups[starts + g] = total
        total += cursor[g]
        cursor[g] = groups[starts + g]
    groups[starts + found] = total
    repeat = count // max(values[0], 1)
    for i in range(count):
        g = member[i]
        if g >= 0:
            groups[order + cursor[g]] = i if repeat <= 1 else i // repeat
            cursor[g] += 1


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


host_only("group_rows", "sum_rows")
