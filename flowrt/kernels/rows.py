"""Rows of variables moved where they lie. The outputs are the variable and its slots, read and written in place.

A rule sees one entry: the summed gradient, the variable's, its slots', then the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrt.kernels.slices import part
from flowrt.kernels.table import Call, View, host_only, jitable, kernel
from flowrt.spec import Spec

UNIT_ENTRIES = 1 << 12  # of the values, about what is worth a unit of work


def _total(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    return (Spec(outputs[0].dtype, (_columns(outputs[0]),)),)


def _columns(table: Spec) -> int:
    return math.prod(table.concrete[1:])


def _moving(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    values, groups, settings = (spec.concrete for spec in inputs)
    columns = _columns(outputs[0])
    tables = [View.dense((spec.concrete[0], columns)) for spec in outputs]
    views = View.dense((values[0], columns)), View.dense(groups), View.dense(settings), *tables, View.dense((columns,))
    units = max((groups[0] - 2) // 3 * columns // UNIT_ENTRIES, 1)
    return Call(views, (units,), units=units)


@jitable
def sum_group(values: Any, groups: Any, group: int, total: Any) -> Any:
    """The row of a group, the sum of whose values is left in ``total``."""
    count = (groups.size - 2) // 3
    rows, order = count + 2, 2 * count + 2
    first, last = groups[1 + group], groups[2 + group]
    source = values[groups[order + first]]
    for k in range(total.size):
        total[k] = source[k]
    for j in range(first + 1, last):
        source = values[groups[order + j]]
        for k in range(total.size):
            total[k] += source[k]
    return groups[rows + group]


@kernel("add_rows", layout=_moving, local=_total)
def add_rows(values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int, begin: int, end: int) -> None:
    factor = settings[0]
    for group in range(part(groups, begin, units), part(groups, end, units)):
        row = table[sum_group(values, groups, group, total)]
        for k in range(row.size):
            row[k] += factor * total[k]


@kernel("assign_rows", layout=_moving, local=_total)
def assign_rows(
    values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int, begin: int, end: int
) -> None:
    count = (groups.size - 2) // 3
    for group in range(part(groups, begin, units), part(groups, end, units)):
        row, source = table[groups[count + 2 + group]], values[groups[2 * count + 1 + groups[2 + group]]]
        for k in range(row.size):
            row[k] = source[k]


def _with_one_slot(rule: Callable[..., Any]) -> Callable[..., None]:
    """A kernel that moves rows of a variable and of one slot by ``rule``."""

    def move(
        values: Any, groups: Any, settings: Any, table: Any, slot: Any, total: Any, units: int, begin: int, end: int
    ) -> None:
        a, b, c, d = settings[0], settings[1], settings[2], settings[3]
        for group in range(part(groups, begin, units), part(groups, end, units)):
            number = sum_group(values, groups, group, total)
            row, kept = table[number], slot[number]
            for k in range(row.size):
                row[k], kept[k] = rule(total[k], row[k], kept[k], a, b, c, d)

    return move


def _with_two_slots(rule: Callable[..., Any]) -> Callable[..., None]:
    """A kernel that moves rows of a variable and of two slots by ``rule``."""

    def move(
        values: Any,
        groups: Any,
        settings: Any,
        table: Any,
        first: Any,
        second: Any,
        total: Any,
        units: int,
        begin: int,
        end: int,
    ) -> None:
        a, b, c, d = settings[0], settings[1], settings[2], settings[3]
        e, f, g = settings[4], settings[5], settings[6]
        for group in range(part(groups, begin, units), part(groups, end, units)):
            number = sum_group(values, groups, group, total)
            row, one, two = table[number], first[number], second[number]
            for k in range(row.size):
                row[k], one[k], two[k] = rule(total[k], row[k], one[k], two[k], a, b, c, d, e, f, g)

    return move


@jitable
def momentum(g: Any, p: Any, v: Any, rate: Any, kept: Any, along: Any, ahead: Any) -> Any:
    v = kept * v + g
    return p - rate * (along * v + ahead * g), v


@jitable
def adagrad(g: Any, p: Any, a: Any, rate: Any, epsilon: Any, *unused: Any) -> Any:
    a = a + g * g
    return p - rate * (g / (math.sqrt(a) + epsilon)), a


@jitable
def rmsprop(
    g: Any, p: Any, s: Any, v: Any, rate: Any, decay: Any, fresh: Any, epsilon: Any, kept: Any, *unused: Any
) -> Any:
    s = decay * s + fresh * g * g
    v = kept * v + rate * (g / (math.sqrt(s) + epsilon))
    return p - v, s, v


@jitable
def adam(
    g: Any, p: Any, m: Any, s: Any, rate: Any, beta1: Any, new1: Any, beta2: Any, new2: Any, epsilon: Any, decay: Any
) -> Any:
    m = beta1 * m + new1 * g
    s = beta2 * s + new2 * g * g
    return p - rate * m / (math.sqrt(s) + epsilon) - decay * p, m, s


kernel("momentum_rows", layout=_moving, local=_total)(_with_one_slot(momentum))
kernel("adagrad_rows", layout=_moving, local=_total)(_with_one_slot(adagrad))
kernel("rmsprop_rows", layout=_moving, local=_total)(_with_two_slots(rmsprop))
kernel("adam_rows", layout=_moving, local=_total)(_with_two_slots(adam))
host_only("add_rows", "assign_rows", "momentum_rows", "adagrad_rows", "rmsprop_rows", "adam_rows")
