"""What the master of a step knows of it: how values travel, what is over and how, and which error explains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, WORKERS, Writer, chain, relay

from flowrt.base.errors import DeadTensorError, LinkBroken, NodeLost, ResourceError, StepCancelled
from flowrt.base.plan import Plan, PlanFeed
from flowrt.base.spec import Spec
from flowrt.net.link import SMALL
from flowrt.net.master.steps import Feed, OpenStep, Registered, describe
from flowrt.sched.host.rendezvous import DEAD

if TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY, FLAG = Spec("float64", (3,)), Spec("float64", (SMALL,)), Spec("bool", ())
FIRST, SECOND = WORKERS
ONE, TWO = np.ones(3), np.full(3, 2.0)


def described(step: dict[str, Any]) -> Registered:
    return describe(7, step["plans"], step["feeds"], step["fetches"])


# ── how values travel ────────────────────────────────────────────────────────────────────────────────────────────────


def test_small_values_go_with_the_start_and_the_end_of_a_task() -> None:
    step = described(relay(PS, FIRST, FEW))
    assert (step.plan, step.tasks, [*step.plans]) == (7, (PS, FIRST), [PS, FIRST])
    assert (step.feeds, step.sent) == (((0,), ()), ())
    assert (step.fetches, step.fetched, step.pulled) == ((2, Feed(0)), {PS: (), FIRST: (2,)}, ())
    assert step.specs == {2: FEW}
    assert [len(plan.nodes) for plan in step.plans.values()] == [2, 2]


def test_large_ones_are_sent_and_pulled_by_their_edges() -> None:
    step = described(relay(PS, FIRST, MANY))
    assert (step.feeds, step.sent) == (((), ()), ((0, 0, PS),))
    assert (step.fetches, step.fetched, step.pulled) == ((2, Feed(0)), {PS: (), FIRST: ()}, ((2, FIRST),))
    assert step.specs == {2: MANY}


def test_a_feed_goes_to_each_task_that_takes_it_as_that_task_numbers_its_own() -> None:
    a, b = Writer(PS), Writer(FIRST)
    large, few, other = a.recv(0, CLIENT, MANY), a.recv(1, CLIENT, FEW), b.recv(0, CLIENT, FEW)
    for w, value, edge in ((a, large, 2), (a, few, 3), (b, other, 4)):
        w.send(value, edge, SECOND)
    step = describe(7, {PS: a.plan(), FIRST: b.plan()}, [[(1, PS)], [(0, FIRST)], [(0, PS)]], [])
    assert (step.feeds, step.sent) == (((0,), (1,)), ((2, 0, PS),))


def test_only_a_task_whose_end_another_says_is_silent() -> None:
    step = described(chain(PS, FIRST, SECOND, FEW))
    assert [step.is_silent(task) for task in (PS, FIRST, SECOND)] == [True, True, False]


def test_what_is_sent_to_other_tasks_is_not_the_clients() -> None:
    w = Writer(PS)
    x = w.recv(0, CLIENT, FEW)
    w.send(x, 1, FIRST)
    w.send(w.node("negative", x, out=FEW), 2, CLIENT)
    step = describe(7, {PS: w.plan()}, [[(0, PS)]], [(2, PS)])
    assert step.specs == {2: FEW}
    assert step.names.keys() == {2}


# ── what is said of what is dead ─────────────────────────────────────────────────────────────────────────────────────


def why_dead(w: Writer, value: int, feeds: tuple[PlanFeed, ...] = ()) -> str:
    w.send(value, 9, CLIENT)
    plan = Plan(PS, w.plan().nodes, feeds)
    return describe(7, {PS: plan}, [], [(9, PS)]).names[9]


def test_of_what_is_dead_the_switch_is_named_that_it_depends_on() -> None:
    w = Writer(PS)
    x, pred = w.recv(0, FIRST, FEW), w.recv(1, FIRST, FLAG)
    other = w.recv(2, FIRST, FLAG)
    w.switch("another", x, other, FEW)
    taken = w.switch("choice", x, pred, FEW)[1]
    made = w.node("add", w.node("negative", taken, out=FEW), x, out=FEW)
    said = why_dead(w, made)
    assert said == "add 'add_6' (plans.py:1) was fetched, but switch 'choice' (plans.py:1) took the other side"


def test_where_the_switch_is_another_tasks_only_the_fetch_is_named() -> None:
    w = Writer(PS)
    said = why_dead(w, w.recv(0, FIRST, FEW))
    assert said.startswith("recv 'recv_0' (plans.py:1) was fetched, but it lies on the side of a switch")


def test_a_loop_that_holds_no_switch_is_looked_through_once() -> None:
    w = Writer(PS)
    x = w.recv(0, FIRST, FEW)
    turn = w.merge("turn", x, 3, FEW)
    assert w.node("negative", turn, out=FEW) == 3
    assert "merge 'turn' (plans.py:1) was fetched, but it lies on the side" in why_dead(w, turn)


def test_a_feed_that_is_fetched_is_called_by_its_name() -> None:
    assert why_dead(Writer(PS), 0, (PlanFeed("the feed", FEW, ""),)).startswith("the feed was fetched")


# ── what is over ─────────────────────────────────────────────────────────────────────────────────────────────────────


def opened(step: dict[str, Any] | None = None) -> OpenStep:
    return OpenStep(1, described(step or relay(PS, FIRST, MANY)))


def ended(step: OpenStep) -> OpenStep:
    step.values[2] = ONE
    step.end(FIRST)
    return step


async def test_a_step_is_over_once_all_have_ended_it_and_whole_if_all_came_that_was_fetched() -> None:
    w, v = Writer(PS), Writer(FIRST)
    for each, edge in ((w, 1), (v, 2)):
        each.send(each.node("constant", out=MANY), edge, CLIENT)
    step = opened({"plans": {PS: w.plan(), FIRST: v.plan()}, "feeds": [], "fetches": [(1, PS), (2, FIRST)]})
    step.end(PS)
    assert not step.news.done()
    step.end(FIRST)
    assert step.news.done()
    step.values[1] = ONE
    assert not step.is_whole
    step.values[2] = DEAD
    assert step.is_whole


async def test_a_step_of_no_task_is_over_at_once() -> None:
    step = opened({"plans": {}, "feeds": [[]], "fetches": [0]})
    assert step.news.done()
    assert step.is_whole
    assert not opened().news.done()


async def test_there_are_news_once_after_they_were_asked_for() -> None:
    step = opened()
    step.fail(LinkBroken("broken"))
    step.fail(LinkBroken("broken, too"))
    assert step.news.done()
    news = step.next_news()
    assert not news.done()
    step.settle(PS, NodeLost("lost"))
    assert news.done()
    assert step.news is news


async def test_who_is_excused_is_not_waited_for_and_leaves_it_in_doubt_until_its_end_is_heard() -> None:
    w, v = Writer(PS), Writer(FIRST)
    step = opened({"plans": {PS: w.plan(), FIRST: v.plan()}, "feeds": [], "fetches": []})
    step.end(PS)
    step.excuse(PS)  # which has ended it: that is known
    assert (step.waiting, step.excused, step.news.done()) == ({FIRST}, set(), False)
    step.excuse(FIRST)
    assert (step.waiting, step.excused, step.news.done()) == (set(), {FIRST}, True)
    assert not step.is_whole
    step.end(FIRST)
    assert step.is_whole


async def test_one_of_two_that_is_excused_is_no_news() -> None:
    step = opened({"plans": {task: Writer(task).plan() for task in (PS, FIRST)}, "feeds": [], "fetches": []})
    step.excuse(PS)
    assert not step.news.done()


@pytest.mark.parametrize(("aborted", "error", "fails"), [
    (False, StepCancelled("so"), True), (True, StepCancelled("so"), False), (True, ResourceError("full"), True),
])  # fmt: skip
async def test_an_abort_that_was_asked_for_is_no_failure(aborted: bool, error: Any, fails: bool) -> None:
    step = opened()
    if aborted:
        step.aborted = True
    step.settle(PS, error)
    assert step.waiting == {FIRST}
    assert (len(step.errors), step.excused, step.news.done()) == ((1, set(), True) if fails else (0, {PS}, False))
    assert not ended(step).is_whole or not fails


FULL, CUT = ResourceError("full"), LinkBroken("cut")


@pytest.mark.parametrize(("told", "best"), [
    ([lambda s: s.settle(PS, CUT), lambda s: s.settle(FIRST, FULL)], FULL),  # the other follows from it
    ([lambda s: s.settle(PS, FULL, remote=True), lambda s: s.settle(FIRST, CUT)], FULL),
    ([lambda s: s.settle(PS, NodeLost("a"), remote=True), lambda s: s.settle(FIRST, NodeLost("b"))], "b"),  # we saw it
    ([lambda s: s.settle(PS, NodeLost("a")), lambda s: s.settle(FIRST, NodeLost("b"))], "a"),  # it came first
    ([lambda s: s.fail(NodeLost("a")), lambda s: s.settle(FIRST, NodeLost("b"))], "b"),
    ([lambda s: s.fail(NodeLost("a")), lambda s: s.settle(FIRST, NodeLost("b"), remote=True)], "a"),
    ([lambda s: s.fail(NodeLost("a")), lambda s: s.settle(FIRST, CUT)], "a"),
    ([lambda s: s.fail(CUT), lambda s: s.settle(FIRST, NodeLost("b"))], "b"),
])  # fmt: skip
async def test_the_error_of_a_step_is_the_one_that_the_others_follow_from(
    told: list[Callable[[OpenStep], None]], best: Any
) -> None:
    step = opened()
    for each in told:
        each(step)
    assert str(step.error()) == str(best)


# ── what was fetched ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_feed_that_is_fetched_is_the_clients_own_copy_and_what_came_is_not_copied() -> None:
    step = ended(opened())
    value, feed = step.fetches([TWO])
    assert value is ONE
    assert feed.tolist() == TWO.tolist()
    assert not np.shares_memory(feed, TWO)


async def test_what_is_fetched_twice_has_memory_of_its_own_each_time() -> None:
    relayed = relay(PS, FIRST, FEW)
    one, other = ended(opened(relayed | {"fetches": relayed["fetches"][:1] * 2})).fetches([TWO])
    assert one.tolist() == other.tolist() == ONE.tolist()
    assert not np.shares_memory(one, other)


async def test_to_fetch_what_is_dead_says_why() -> None:
    step = opened()
    step.values[2] = DEAD
    with pytest.raises(DeadTensorError, match="add 'add_1'"):
        step.fetches([TWO])
