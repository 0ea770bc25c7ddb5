"""What one run makes ahead of those who will use it, and what it puts off until then.

Law: pure; see `flowrt.sched.demand` for who waits for what, and `flowrt.sched.host.credit` for the rule and why it
holds up nothing. Who drives the run asks before it carries out a large unit, tells what was made, freed and
announced, obeys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from flowrt.sched.host.credit import way_to

if TYPE_CHECKING:
    from flowrt.sched.demand import Demands, Goal
    from flowrt.sched.host.credit import Credit, Want
    from flowrt.sched.host.rendezvous import StepKey


UNKNOWN = 8  # values of sizes that nobody knows yet that are made ahead at once


class UnitRunner(Protocol):
    """Who carries out the units of a run."""

    def is_over(self, unit: int) -> bool:
        """Whether a unit has completed, or died."""

    def call(self, goal: Goal, then: Callable[[], None]) -> Callable[[], None]:
        """Have ``then`` called once a sure goal's value would be consumed at once, which may be now.

        Answers what withdraws that.
        """

    def go(self, units: Iterable[int]) -> None:
        """Carry out units that were put off."""


class Ahead:
    """What is made ahead in a run with these ``demands``; ``sizes`` are those that its units had last, to be kept."""

    def __init__(
        self, demands: Demands, credit: Credit, key: StepKey, sizes: dict[int, int], driver: UnitRunner
    ) -> None:
        self._demands = demands
        self._credit = credit
        self._key = key
        self._sizes = sizes
        self._driver = driver
        self._off: set[int] = set()
        self._announced: set[int] = set()
        self._expected: dict[int, int] = {}  # unit → the credit it has, taken or granted, until its values are there
        self._held: dict[int, int] = {}  # value instance → the credit it has
        self._called: dict[int, Callable[[], None]] = {}  # goals that are sure, and what withdraws the call
        self._called_for: set[int] = set()  # goals
        self._wants: dict[int, Want] = {}

    def may_start(self, unit: int) -> bool:
        """Whether a unit may be carried out now; one that may not is put off, and carried out when told to."""
        goals = self._demands.made_for.get(unit)
        if goals is None or unit in self._expected:
            return True
        nbytes = self._size(unit)
        if not self._credit.try_hold(nbytes):
            self._off.add(unit)
            self._look(goals)
            for goal in self._called_for.intersection(goals):
                self._want(self._demands.goals[goal])
            return False
        self._off.discard(unit)
        self._expected[unit] = nbytes
        self._look(goal for goal in goals if self._lines_up(goal))
        return True

    def announced(self, unit: int) -> None:
        """What a unit receives lies at its sender, or will as soon as it is asked for."""
        self._announced.add(unit)
        if self._off:
            self._look(self._demands.concerns.get(unit, ()))

    def made(self, unit: int, sizes: dict[int, int]) -> None:
        """A unit's values are there, of so many bytes by instance."""
        self._off.discard(unit)
        if unit in self._demands.made_for:
            self._sizes[unit] = total = sum(sizes.values())
            self._held |= sizes
            self._credit.hold(total - self._expected.pop(unit, 0))

    def freed(self, instance: int) -> None:
        """A value is held no more."""
        nbytes = self._held.pop(instance, 0)
        if nbytes:
            self._credit.hold(-nbytes)

    def completed(self, unit: int) -> None:
        """A unit is over, and all that died with it."""
        concerned = self._demands.concerns.get(unit, ())
        for goal in concerned:
            if self._driver.is_over(goal):
                self._end(goal)
        if self._off:
            self._look(concerned)

    def close(self) -> None:
        """The run is over: give everything back."""
        for goal in [*self._called]:
            self._end(goal)
        left = sum(self._expected.values()) + sum(self._held.values())
        self._expected.clear()
        self._held.clear()
        if left:
            self._credit.hold(-left)

    # ── goals ──

    def _size(self, unit: int) -> int:
        """The bytes of its values, or what they had last; before that, a guess of which some fit."""
        known = self._demands.sizes[unit]
        return self._sizes.get(unit, self._credit.limit // UNKNOWN) if known is None else known

    def _lines_up(self, goal: int) -> bool:
        """Whether a goal takes its place in a line as soon as it can: those that were begun first are first there."""
        node = self._demands.goals[goal].node
        return node is not None and node.op != "send"

    def _look(self, goals: Iterable[int]) -> None:
        for number in goals:
            goal = self._demands.goals[number]
            if number not in self._called and not self._driver.is_over(number) and self._is_sure(goal):
                self._called[number] = _nothing
                withdraw = self._driver.call(goal, partial(self._want, goal))
                if number in self._called:
                    self._called[number] = withdraw

    def _is_sure(self, goal: Goal) -> bool:
        over = self._driver.is_over
        return all(map(over, goal.waits)) and all(n in self._announced or over(n) for n in goal.receives)

    def _want(self, goal: Goal) -> None:
        """A goal is wanted: have what it lacks made when credit allows, now or once something is put off."""
        if goal.unit not in self._called:
            return
        self._called_for.add(goal.unit)
        if goal.unit in self._wants or self._off.isdisjoint(goal.makes):
            return
        over, large = self._driver.is_over, self._demands.made_for
        lacks = {n: self._size(n) for n in goal.makes if n in large and n not in self._expected and not over(n)}
        granted = partial(self._grant, goal, lacks)
        self._wants[goal.unit] = self._credit.want(_way(goal), self._key, sum(lacks.values()), granted)

    def _grant(self, goal: Goal, lacks: dict[int, int]) -> None:
        for unit, nbytes in lacks.items():
            if unit in self._expected or self._driver.is_over(unit):
                self._credit.hold(-nbytes)
            else:
                self._expected[unit] = nbytes
        ready = [unit for unit in lacks if unit in self._off]
        self._off.difference_update(ready)
        self._driver.go(ready)

    def _end(self, goal: int) -> None:
        withdraw = self._called.pop(goal, None)
        if withdraw is not None:
            withdraw()
        want = self._wants.pop(goal, None)
        if want is not None:
            self._credit.end(want)


def _way(goal: Goal) -> str:
    if goal.node is None:
        return "here"
    if goal.node.op == "send":
        return way_to(goal.node.attrs["peer"])
    return f"queue {goal.node.attrs['container']!r} {goal.node.attrs['resource']}"


def _nothing() -> None:
    """Withdraw nothing."""
