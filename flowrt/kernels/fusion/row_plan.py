"""What is computed when, along one row: loops over its entries, and what stands between them.

Law: pure; it knows an expression and which of its inputs repeat along a row, and emits nothing. A value is *fixed*
where it is the same all along a row: read from what repeats, reduced, or made of such. What a loop reduces is known
behind it, and what is made of that belongs to the next loop. All entries that leave are written by the last loop,
behind which nothing is read, so that an output may lie in an input's memory.

An entry that a later loop needs again is computed again where that costs little, else kept in memory for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.traits import adds_up
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

KEEPING = 4
"""What it may cost to compute an entry again, in additions or reads: to keep it costs a write and a read."""


@valueclass
class Loop:
    """One loop over a row's entries. Values are numbers of the expression's, results and reductions positions there."""

    before: tuple[int, ...]  # fixed members that are computed ahead of it
    reads: tuple[int, ...]  # inputs
    again: tuple[int, ...]  # what earlier loops kept
    computes: tuple[int, ...]  # members, entry by entry
    keeps: tuple[int, ...]
    reductions: tuple[int, ...]  # members that reduce what this loop computes
    totals: tuple[int, ...]  # the expression's own reductions
    writes: tuple[int, ...]


@valueclass
class RowPlan:
    """The loops over one row, the members fixed behind the last, the results of rows, and what is kept, by number."""

    loops: tuple[Loop, ...]
    behind: tuple[int, ...]
    row_results: tuple[int, ...]
    kept: tuple[int, ...]


def plan_rows(expression: Expression, repeats: Sequence[bool], by_row: Sequence[bool]) -> RowPlan:
    """The plan for inputs that ``repeats`` says are the same all along a row, and results that are one ``by_row``."""
    return _Planning(expression, repeats).plan(by_row)


def narrow_totals(expression: Expression, pattern: Sequence[int]) -> tuple[int, ...]:
    """The expression's own reductions, by position, that add up columns of float32: those of some rows may be narrow.

    ``pattern`` holds the strides of all operands along a row.
    """
    first = len(expression.inputs) + len(expression.results)
    return tuple(
        at
        for at, (n, op) in enumerate(expression.reductions)
        if adds_up(op) and expression.dtypes[n] == np.float32 and pattern[first + at]
    )


@dataclass(slots=True, eq=False)
class _Demand:
    """What one loop must do, as it is found out."""

    reads: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    computes: set[int] = field(default_factory=set)


class _Planning:
    """Where each value belongs: whether it is fixed, and the first loop it can be computed in."""

    def __init__(self, expression: Expression, repeats: Sequence[bool]) -> None:
        self._expression, self._inputs = expression, len(expression.inputs)
        self._fixed, self._stage = list(repeats), [0] * self._inputs
        for member in expression.members:
            reductions, taken = member.reduces_row, member.operands
            self._fixed.append(reductions or all(self._fixed[n] for n in taken))
            self._stage.append(max((self._stage[n] for n in taken), default=0) + reductions)
        self._made_in: dict[int, int] = {}  # entry → the first loop that computes it
        self._kept: set[int] = set()

    def plan(self, by_row: Sequence[bool]) -> RowPlan:
        expression, stage = self._expression, self._stage
        entries = [at for at, row in enumerate(by_row) if not row]
        reducing = [n for n, member in enumerate(expression.members, self._inputs) if member.reduces_row]
        last = max(
            (
                *(stage[n] - 1 for n in reducing),
                *(stage[n] for n, _ in expression.reductions),
                *(stage[expression.results[at]] for at in entries),
            )
        )
        demands, reductions, totals = [], [], []
        for number in range(last + 1):
            reductions.append(tuple(n for n in reducing if stage[n] - 1 == number))
            totals.append(tuple(at for at, (n, _) in enumerate(expression.reductions) if stage[n] == number))
            roots = [self._member(n).operands[0] for n in reductions[-1]] + [
                expression.reductions[at][0] for at in totals[-1]
            ]
            if number == last:
                roots += [expression.results[at] for at in entries]
            demands.append(self._demanded(roots, number))
        writes = [*[()] * last, tuple(entries)]
        loops = tuple(
            Loop(
                self._fixed_at(number),
                tuple(sorted(demand.reads)),
                tuple(sorted(demand.again)),
                tuple(sorted(demand.computes)),
                tuple(n for n in sorted(self._kept) if self._made_in[n] == number),
                reductions[number],
                totals[number],
                writes[number],
            )
            for number, demand in enumerate(demands)
        )
        row_results = tuple(at for at, row in enumerate(by_row) if row)
        return RowPlan(loops, self._fixed_at(last + 1), row_results, tuple(sorted(self._kept)))

    def _member(self, n: int) -> Any:
        return self._expression.members[n - self._inputs]

    def _fixed_at(self, stage: int) -> tuple[int, ...]:
        """The fixed members that are no reductions and can be computed from there on."""
        members = enumerate(self._expression.members, self._inputs)
        return tuple(n for n, m in members if self._fixed[n] and not m.reduces_row and self._stage[n] == stage)

    def _demanded(self, roots: Sequence[int], number: int) -> _Demand:
        """What loop ``number`` does to have the values ``roots``."""
        demand = _Demand()
        stack = list(roots)
        while stack:
            n = stack.pop()
            if self._fixed[n]:
                continue
            if n < self._inputs:
                demand.reads.add(n)
            elif self._made_in.get(n, number) < number and (n in self._kept or self._cost(n) > KEEPING):
                self._kept.add(n)
                demand.again.add(n)
            elif n not in demand.computes:
                demand.computes.add(n)
                stack += self._member(n).operands
        for n in demand.computes:
            self._made_in.setdefault(n, number)
        return demand

    def _cost(self, n: int) -> int:
        """What it costs to compute an entry from what is read or kept; each of what it is made of counts once."""
        seen: set[int] = set()
        stack, cost = [n], 0
        while stack:
            found = stack.pop()
            if found in seen or self._fixed[found]:
                continue
            seen.add(found)
            if found < self._inputs or found in self._kept:
                cost += 1
                continue
            cost += self._member(found).cost
            stack += self._member(found).operands
        return cost
