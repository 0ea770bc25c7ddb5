"""Rows of variables moved where they lie. The outputs are the variable and its slots, read and written in place.

A rule sees one entry: the summed gradient, the variable's, its slots', then the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec, is_half
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.linalg import as_it_is
from flowrt.kernels.ops.precision import BITS
from flowrt.kernels.ops.slices import part
from flowrt.kernels.teams.standing import Teams, add_team, divided, stand
from flowrt.kernels.tiles.rowmoves import add_rows_by_int32, add_rows_by_int64, claim, fetch, move_bytes

AHEAD = 8  # how many groups before its turn a group's rows are asked for
SHARING = 8  # threads of a GPU's that add up an entry of a row together
UNIT_ENTRIES = 1 << 12  # of the values, about what is worth a unit of work


def _total(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    dtype = outputs[0].dtype
    return (Spec("float32" if is_half(dtype) else dtype, (_columns(outputs[0]),)),)


def _moved_bytes(specs: Sequence[Spec]) -> int:
    """Of tables no more than as many rows as there are values."""
    return sum(spec.nbytes for spec in specs[:3]) + 2 * len(specs[3:]) * specs[0].nbytes


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
def ask(values: Any, groups: Any, group: int, last: int) -> Any:
    """Ask for what a group that comes `AHEAD` later needs of ``values``; the number of the row that it moves."""
    count, group = (groups.size - 2) // 3, min(group + AHEAD, last - 1)
    value = values.ctypes.data + groups[2 * count + 2 + groups[1 + group]] * values.shape[1] * values.itemsize
    fetch(values, (value, values.shape[1] * values.itemsize))
    return groups[count + 2 + group]


@jitable
def ask_row(table: Any, number: int) -> None:
    """Ask for a row to write."""
    nbytes = table.shape[1] * table.itemsize
    claim(table, (table.ctypes.data + number * nbytes, nbytes))


@jitable
def sum_group(values: Any, groups: Any, group: int, total: Any) -> Any:
    """The number of the row of a group, the sum of whose values is left in ``total``."""
    count, columns = (groups.size - 2) // 3, total.size
    first, last = groups[1 + group], groups[2 + group]
    order = groups.ctypes.data + (2 * count + 2 + first) * groups.itemsize
    words = (values.ctypes.data, columns, order, last - first, total.ctypes.data, columns)
    if groups.itemsize == 4:
        add_rows_by_int32(values, words)
    else:
        add_rows_by_int64(values, words)
    return groups[count + 2 + group]


@kernel("add_rows", layout=_moving, local=_total, moves=_moved_bytes)
def add_rows(values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int, begin: int, end: int) -> None:
    factor, last = settings[0], part(groups, end, units)
    for group in range(part(groups, begin, units), last):
        ask_row(table, ask(values, groups, group, last))
        row = table[sum_group(values, groups, group, total)]
        for k in range(row.size):
            row[k] += factor * total[k]


def _moving_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """A team for each entry that may be moved, those of a row side by side."""
    call = _moving(inputs, outputs, attrs)
    teams = Teams(SHARING, THREADS // SHARING, 1)
    lines = (inputs[1].concrete[0] - 2) // 3 * _columns(outputs[0])
    return Call(call.views[:-1], teams.words, blocks=teams.blocks(lines))


def _summed_on_cuda(read: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of what is ``read`` of a group's values, of which some rows have very many: an entry by each team."""

    @jitable
    def sum_entry(values: Any, groups: Any, group: int, k: int, held: Any, rank: int, width: int, apart: int) -> Any:
        count, total = (groups.size - 2) // 3, held.dtype.type(0)
        j = groups[1 + group] + rank
        while j < groups[2 + group]:
            total += read(values[groups[2 * count + 2 + j], k])
            j += width
        return add_team(held, total, rank, width, apart)

    return sum_entry


sum_on_cuda = _summed_on_cuda(as_it_is)


def _adding_on_cuda(
    read: Callable[..., Any], write: Callable[..., Any], summed: Callable[..., Any]
) -> Callable[..., None]:
    def add(values: Any, groups: Any, settings: Any, table: Any, width: int, apart: int) -> None:
        """Every team moves one entry at a time: no row is in two groups."""
        held, columns, count = cuda.shared.array(THREADS, settings.dtype), table.shape[1], (groups.size - 2) // 3
        (team, rank, teams), lines = stand(width, apart), groups[0] * columns
        line = cuda.blockIdx.x * teams
        while line < lines:
            group, k = divided(min(line + team, lines - 1), columns)
            found = summed(values, groups, group, k, held, rank, width, apart)
            if rank == 0 and line + team < lines:
                at = groups[count + 2 + group]
                table[at, k] = write(read(table[at, k]) + settings[0] * found)
            line += cuda.gridDim.x * teams

    return add


kernel("add_rows", "cuda", layout=_moving_on_cuda)(_adding_on_cuda(as_it_is, as_it_is, sum_on_cuda))


@kernel("assign_rows", layout=_moving, local=_total, moves=_moved_bytes, moved=(0, 2, 3, 4))
def assign_rows(
    values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int, begin: int, end: int
) -> None:
    count, nbytes, last = (groups.size - 2) // 3, values.shape[1] * values.itemsize, part(groups, end, units)
    for group in range(part(groups, begin, units), last):
        ask_row(table, ask(values, groups, group, last))
        source = values[groups[2 * count + 1 + groups[2 + group]]]
        move_bytes(values, (source.ctypes.data, table[groups[count + 2 + group]].ctypes.data, nbytes))


@kernel("assign_rows", "cuda", layout=_moving, local=_total, takes_bits=True)
def assign_rows_on_cuda(values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int) -> None:
    columns, count, entry = table.shape[1], (groups.size - 2) // 3, cuda.grid(1)
    while entry < groups[0] * columns:
        g, k = divided(entry, columns)
        table[groups[count + 2 + g], k] = values[groups[2 * count + 1 + groups[2 + g]], k]
        entry += cuda.gridsize(1)


def _with_one_slot(rule: Callable[..., Any], summed: Callable[..., Any] = sum_group) -> Callable[..., None]:
    """A kernel that moves rows of a variable and of one slot by ``rule``, each group's values as ``summed``."""

    def move(
        values: Any, groups: Any, settings: Any, table: Any, slot: Any, total: Any, units: int, begin: int, end: int
    ) -> None:
        a, b, c, d = settings[0], settings[1], settings[2], settings[3]
        last = part(groups, end, units)
        for group in range(part(groups, begin, units), last):
            soon = ask(values, groups, group, last)
            ask_row(table, soon)
            ask_row(slot, soon)
            number = summed(values, groups, group, total)
            row, kept = table[number], slot[number]
            for k in range(row.size):
                row[k], kept[k] = rule(total[k], row[k], kept[k], a, b, c, d)

    return move


def _with_one_slot_on_cuda(rule: Callable[..., Any], summed: Callable[..., Any] = sum_on_cuda) -> Callable[..., None]:
    def move(values: Any, groups: Any, settings: Any, table: Any, slot: Any, width: int, apart: int) -> None:
        held, columns, count = cuda.shared.array(THREADS, settings.dtype), table.shape[1], (groups.size - 2) // 3
        a, b, c, d = settings[0], settings[1], settings[2], settings[3]
        (team, rank, teams), lines = stand(width, apart), groups[0] * columns
        line = cuda.blockIdx.x * teams
        while line < lines:
            group, k = divided(min(line + team, lines - 1), columns)
            found = summed(values, groups, group, k, held, rank, width, apart)
            if rank == 0 and line + team < lines:
                at = groups[count + 2 + group]
                table[at, k], slot[at, k] = rule(found, table[at, k], slot[at, k], a, b, c, d)
            line += cuda.gridDim.x * teams

    return move


def _with_two_slots(rule: Callable[..., Any], summed: Callable[..., Any] = sum_group) -> Callable[..., None]:
    """A kernel that moves rows of a variable and of two slots by ``rule``, likewise."""

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
        last = part(groups, end, units)
        for group in range(part(groups, begin, units), last):
            soon = ask(values, groups, group, last)
            ask_row(table, soon)
            ask_row(first, soon)
            ask_row(second, soon)
            number = summed(values, groups, group, total)
            row, one, two = table[number], first[number], second[number]
            for k in range(row.size):
                row[k], one[k], two[k] = rule(total[k], row[k], one[k], two[k], a, b, c, d, e, f, g)

    return move


def _with_two_slots_on_cuda(rule: Callable[..., Any], summed: Callable[..., Any] = sum_on_cuda) -> Callable[..., None]:
    def move(
        values: Any, groups: Any, settings: Any, table: Any, first: Any, second: Any, width: int, apart: int
    ) -> None:
        held, columns, count = cuda.shared.array(THREADS, settings.dtype), table.shape[1], (groups.size - 2) // 3
        a, b, c, d = settings[0], settings[1], settings[2], settings[3]
        e, f, g = settings[4], settings[5], settings[6]
        (team, rank, teams), lines = stand(width, apart), groups[0] * columns
        line = cuda.blockIdx.x * teams
        while line < lines:
            group, k = divided(min(line + team, lines - 1), columns)
            found = summed(values, groups, group, k, held, rank, width, apart)
            if rank == 0 and line + team < lines:
                at = groups[count + 2 + group]
                moved = rule(found, table[at, k], first[at, k], second[at, k], a, b, c, d, e, f, g)
                table[at, k], first[at, k], second[at, k] = moved
            line += cuda.gridDim.x * teams

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


kernel("momentum_rows", layout=_moving, local=_total, moves=_moved_bytes)(_with_one_slot(momentum))
kernel("adagrad_rows", layout=_moving, local=_total, moves=_moved_bytes)(_with_one_slot(adagrad))
kernel("rmsprop_rows", layout=_moving, local=_total, moves=_moved_bytes)(_with_two_slots(rmsprop))
kernel("adam_rows", layout=_moving, local=_total, moves=_moved_bytes)(_with_two_slots(adam))
for _op, _rule in (("momentum_rows", momentum), ("adagrad_rows", adagrad)):
    kernel(_op, "cuda", layout=_moving_on_cuda)(_with_one_slot_on_cuda(_rule))
for _op, _rule in (("rmsprop_rows", rmsprop), ("adam_rows", adam)):
    kernel(_op, "cuda", layout=_moving_on_cuda)(_with_two_slots_on_cuda(_rule))


# ── of floats of 16 bits: each entry read as float32, and rounded once where it is written; slots are of float32 ─────


def _summed(read: Callable[..., Any]) -> Callable[..., Any]:
    """As `sum_group`, of bits into float32."""

    @jitable
    def sum_bits(values: Any, groups: Any, group: int, total: Any) -> Any:
        count = (groups.size - 2) // 3
        for k in range(total.size):
            total[k] = np.float32(0)
        for j in range(groups[1 + group], groups[2 + group]):
            row = values[groups[2 * count + 2 + j]]
            for k in range(total.size):
                total[k] += read(row[k])
        return groups[count + 2 + group]

    return sum_bits


def _adding(read: Callable[..., Any], write: Callable[..., Any], summed: Callable[..., Any]) -> Callable[..., None]:
    def add(values: Any, groups: Any, settings: Any, table: Any, total: Any, units: int, begin: int, end: int) -> None:
        factor, last = settings[0], part(groups, end, units)
        for group in range(part(groups, begin, units), last):
            ask_row(table, ask(values, groups, group, last))
            row = table[summed(values, groups, group, total)]
            for k in range(row.size):
                row[k] = write(read(row[k]) + factor * total[k])

    return add


def _of_one_slot(rule: Callable[..., Any], read: Callable[..., Any], write: Callable[..., Any]) -> Callable[..., Any]:
    @jitable
    def moved(g: Any, p: Any, one: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        found, kept = rule(g, read(p), one, a, b, c, d)
        return write(found), kept

    return moved


def _of_two_slots(rule: Callable[..., Any], read: Callable[..., Any], write: Callable[..., Any]) -> Callable[..., Any]:
    @jitable
    def moved(
        g: Any, p: Any, one: Any, two: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, h: Any
    ) -> Any:  # fmt: skip
        found, first, second = rule(g, read(p), one, two, a, b, c, d, e, f, h)
        return write(found), first, second

    return moved


def _rows_of(half: str) -> Callable[[Sequence[Any]], bool]:
    """Whether operands are values and perhaps a table of that dtype, settings and slots of float32."""

    def are(dtypes: Sequence[Any]) -> bool:
        values, _, settings, *table = map(str, dtypes)
        return [values, *table[:1]] == [half] * len([values, *table[:1]]) and {settings, *table[1:]} == {"float32"}

    return are


for _half, (_read, _write) in BITS.items():
    _how: dict[str, Any] = {"layout": _moving, "local": _total, "moves": _moved_bytes, "takes_bits": True}
    _how["dtypes"], _sum = _rows_of(_half), _summed(_read)
    _on_cuda: dict[str, Any] = {"layout": _moving_on_cuda, "takes_bits": True, "dtypes": _rows_of(_half)}
    _sum_there = _summed_on_cuda(_read)
    kernel("add_rows", **_how)(_adding(_read, _write, _sum))
    kernel("add_rows", "cuda", **_on_cuda)(_adding_on_cuda(_read, _write, _sum_there))
    for _op, _rule in (("momentum_rows", momentum), ("adagrad_rows", adagrad)):
        _moved_by = _of_one_slot(_rule, _read, _write)
        kernel(_op, **_how)(_with_one_slot(_moved_by, _sum))
        kernel(_op, "cuda", **_on_cuda)(_with_one_slot_on_cuda(_moved_by, _sum_there))
    for _op, _rule in (("rmsprop_rows", rmsprop), ("adam_rows", adam)):
        _moved_by = _of_two_slots(_rule, _read, _write)
        kernel(_op, **_how)(_with_two_slots(_moved_by, _sum))
        kernel(_op, "cuda", **_on_cuda)(_with_two_slots_on_cuda(_moved_by, _sum_there))
