"""What one run makes ahead, asked of it directly: `test_credit` has whole programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowrt.base.plan import PlanNode
from flowrt.sched.ahead import Ahead
from flowrt.sched.demand import Demands, Goal
from flowrt.sched.host.credit import Credit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECEIVED, COMPUTED, SENT = range(3)
"""A large value is received, another is computed of it, and what comes of that is sent."""
LIMIT = 10


class Runner:
    """Who carries out the units, and what it was told."""

    def __init__(self) -> None:
        self.over: set[int] = set()
        self.called: dict[int, Callable[[], None]] = {}
        self.withdrawn: list[int] = []
        self.went: list[int] = []

    def is_over(self, unit: int) -> bool:
        return unit in self.over

    def call(self, goal: Goal, then: Callable[[], None]) -> Callable[[], None]:
        self.called[goal.unit] = then
        return lambda: self.withdrawn.append(goal.unit)

    def go(self, units: Iterable[int]) -> None:
        self.went += units


class Run:
    """A run whose task's credit has room for one of its two values."""

    def __init__(self, op: str = "send", sizes: int | None = LIMIT - 2) -> None:
        attrs = {"peer": "/job:ps/task:0", "edge": 0, "resource": "queue", "container": ""}
        goal = Goal(SENT, PlanNode(op, "s", (COMPUTED,), (), attrs), 1, (), (RECEIVED, COMPUTED), (RECEIVED,))
        large, concerns = {RECEIVED: (SENT,), COMPUTED: (SENT,)}, dict.fromkeys(range(3), (SENT,))
        self.due: list[Callable[[], None]] = []
        self.credit = Credit(LIMIT, self.due.append)
        self.runner = Runner()
        self.demands = Demands({SENT: goal}, large, concerns, dict.fromkeys(large, sizes))
        self.sizes: dict[int, int] = {}
        self.ahead = self.begin()

    def begin(self) -> Ahead:
        return Ahead(self.demands, self.credit, ("epoch", 1), self.sizes, self.runner)

    def settle(self) -> None:
        while self.due:
            self.due.pop()()


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_unit_has_its_credit_once_however_often_it_is_asked_for(run: Run) -> None:
    assert run.ahead.may_start(SENT)  # not large: nobody's concern
    assert run.credit.held == 0
    assert run.ahead.may_start(RECEIVED)
    assert run.ahead.may_start(RECEIVED)
    assert run.credit.held == LIMIT - 2


def test_a_unit_without_credit_is_put_off_and_goes_on_when_its_goal_is_wanted(run: Run) -> None:
    assert run.ahead.may_start(RECEIVED)
    assert not run.ahead.may_start(COMPUTED)
    run.ahead.announced(RECEIVED)
    run.runner.called[SENT]()
    run.settle()
    assert run.runner.went == [COMPUTED]
    assert run.ahead.may_start(COMPUTED)
    assert run.credit.held == 2 * (LIMIT - 2)  # beyond the limit: the oldest of its way


def test_a_goal_is_sure_as_soon_as_what_was_put_off_is_announced(run: Run) -> None:
    run.credit.hold(LIMIT)
    assert not run.ahead.may_start(RECEIVED)
    assert not run.runner.called
    run.ahead.announced(RECEIVED)
    assert [*run.runner.called] == [SENT]


def test_nobody_is_asked_about_goals_before_something_is_put_off(run: Run) -> None:
    run.ahead.announced(RECEIVED)
    run.ahead.completed(RECEIVED)
    assert run.ahead.may_start(COMPUTED)
    assert not run.runner.called


def test_who_is_to_have_a_place_in_a_line_takes_it_as_soon_as_it_is_sure() -> None:
    run = Run("enqueue")
    run.ahead.announced(RECEIVED)
    assert run.ahead.may_start(COMPUTED)
    assert [*run.runner.called] == [SENT]


def test_a_goal_is_sure_as_soon_as_what_it_lacks_is_over() -> None:
    for announced in (True, False):
        run = Run()
        if announced:
            run.ahead.announced(RECEIVED)
        run.credit.hold(LIMIT)
        assert not run.ahead.may_start(COMPUTED)
        assert [*run.runner.called] == [SENT] * announced
        run.runner.over.add(RECEIVED)
        run.ahead.completed(RECEIVED)
        assert [*run.runner.called] == [SENT]


def test_what_is_put_off_when_its_goal_was_called_for_goes_on_in_its_turn() -> None:
    run = Run("enqueue")
    run.ahead.announced(RECEIVED)
    assert run.ahead.may_start(RECEIVED)
    run.runner.called[SENT]()
    run.settle()
    assert (run.credit.held, run.credit.ways) == (LIMIT - 2, 0)  # nothing is put off yet
    assert not run.ahead.may_start(COMPUTED)
    run.settle()
    assert run.runner.went == [COMPUTED]


def test_what_comes_before_it_is_asked_for_does_not_go_again(run: Run) -> None:
    run.credit.hold(LIMIT)
    assert not run.ahead.may_start(RECEIVED)
    run.ahead.announced(RECEIVED)
    run.runner.called[SENT]()
    run.runner.over.add(RECEIVED)
    run.ahead.made(RECEIVED, {7: 3})
    assert run.credit.held == LIMIT + 3
    run.settle()
    assert run.runner.went == []


def test_what_is_over_is_not_waited_for_room_for(run: Run) -> None:
    run.credit.want("to /job:ps/task:0", ("epoch", 0), 1, lambda: None)  # else this one would go whatever it takes
    run.settle()
    run.credit.hold(5)
    run.runner.over.add(RECEIVED)
    assert not run.ahead.may_start(COMPUTED)
    run.runner.called[SENT]()
    run.settle()
    assert run.runner.went == []
    run.credit.hold(-5)
    run.settle()
    assert run.runner.went == [COMPUTED]


def test_values_of_unknown_sizes_are_taken_to_be_as_they_were_last() -> None:
    run = Run(sizes=None)
    run.credit.limit = 16
    assert run.ahead.may_start(RECEIVED)
    assert run.credit.held == 2  # an eighth
    run.ahead.made(RECEIVED, {7: 5})
    run.ahead.close()
    assert run.begin().may_start(RECEIVED)
    assert run.credit.held == 5


def test_a_goal_that_is_over_is_withdrawn_and_no_other(run: Run) -> None:
    run.credit.hold(LIMIT)
    assert not run.ahead.may_start(RECEIVED)
    run.ahead.announced(RECEIVED)
    run.ahead.completed(SENT)
    assert run.runner.withdrawn == []
    run.runner.over.add(SENT)
    run.ahead.completed(SENT)
    assert run.runner.withdrawn == [SENT]


def test_what_began_when_there_was_credit_again_does_not_go_again(run: Run) -> None:
    run.credit.hold(LIMIT)
    assert not run.ahead.may_start(RECEIVED)
    run.ahead.announced(RECEIVED)
    run.runner.called[SENT]()
    run.credit.hold(-LIMIT)
    assert run.ahead.may_start(RECEIVED)
    run.settle()
    assert run.runner.went == []
    assert run.credit.held == 2 * (LIMIT - 2)  # its own, and that of what is yet to be computed


def test_values_give_their_credit_back_once_whether_freed_or_left_at_the_end(run: Run) -> None:
    assert run.ahead.may_start(RECEIVED)
    run.ahead.made(RECEIVED, {7: 3, 8: 2})
    assert run.credit.held == 5
    run.ahead.freed(7)
    run.ahead.freed(7)
    assert run.credit.held == 2
    run.ahead.close()
    run.ahead.freed(8)  # what outlives its run
    run.ahead.close()
    assert run.credit.held == 0
    assert run.ahead.may_start(RECEIVED)
    run.ahead.close()
    run.ahead.close()
    assert run.credit.held == 0


def test_the_end_of_a_run_withdraws_calls_and_wants(run: Run) -> None:
    run.credit.hold(LIMIT)
    older = run.credit.want("to /job:ps/task:0", ("epoch", 0), 1, lambda: None)
    run.settle()
    assert not run.ahead.may_start(RECEIVED)
    run.ahead.announced(RECEIVED)
    for _ in range(2):
        run.runner.called[SENT]()
    run.settle()
    run.ahead.close()
    assert run.runner.withdrawn == [SENT]
    run.credit.end(older)
    run.settle()
    assert run.runner.went == []
    assert run.credit.ways == 0
