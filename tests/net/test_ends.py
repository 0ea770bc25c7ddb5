"""Whose end of a step says that others have ended it: who is silent, and what comes of a step however it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, WORKERS, Writer, chain, echo, relay

from flowrt.base.errors import LinkBroken, NodeLost, ResourceError, StepCancelled
from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace, valueclass
from flowrt.net.link import SMALL
from flowrt.net.master.ends import ends_of, reader_of
from flowrt.net.master.steps import OpenStep, describe

FEW, MANY, OPEN = Spec("float64", (3,)), Spec("float64", (SMALL,)), Spec("float64", (None,))
FIRST, SECOND = WORKERS


# ── who is silent ────────────────────────────────────────────────────────────────────────────────────────────────────


def sending(*peers: str, spec: Spec = FEW) -> Writer:
    """A plan that sends what another sent it to each of ``peers``."""
    w = Writer(PS)
    value = w.recv(0, SECOND, spec)
    for edge, peer in enumerate(peers, 1):
        w.send(value, edge, peer)
    return w


def test_the_reader_of_a_plan_is_the_one_that_all_of_it_goes_to() -> None:
    assert reader_of(sending(FIRST).plan()) == FIRST
    assert reader_of(sending(FIRST, FIRST).plan()) == FIRST
    assert reader_of(sending(FIRST, SECOND).plan()) is None
    assert reader_of(sending(FIRST, CLIENT).plan()) is None
    assert reader_of(sending().plan()) is None


@pytest.mark.parametrize("reader", [PS, CLIENT])
def test_who_sends_to_nobody_else_says_its_own_end(reader: str) -> None:
    assert ends_of({PS: sending(reader).plan(), FIRST: sending().plan()}) == {PS: (PS,), FIRST: (FIRST,)}


@pytest.mark.parametrize("spec", [MANY, OPEN], ids=str)
def test_what_is_not_always_pushed_has_no_reader_that_speaks_for_its_sender(spec: Spec) -> None:
    assert reader_of(sending(FIRST, spec=spec).plan()) is None
    mixed = sending(FIRST)
    mixed.send(mixed.recv(9, SECOND, spec), 8, FIRST)
    assert reader_of(mixed.plan()) is None


def test_what_the_client_fetches_is_said_by_who_makes_it() -> None:
    plan = sending(FIRST).plan()
    assert reader_of(Plan(PS, plan.nodes, fetches=(0,))) is None


def test_a_plan_does_nothing_but_what_it_sends_or_says_its_own_end() -> None:
    w = sending(FIRST)
    w.node("assign", w.recv(5, SECOND, FEW), resource="v")
    assert reader_of(w.plan()) is None


def test_what_a_value_waits_for_goes_into_it() -> None:
    w = Writer(PS)
    written = w.node("queue_close", resource="q")
    w.send(w.node("constant", out=FEW, control=(written,), value=np.zeros(3)), 1, FIRST)
    assert reader_of(w.plan()) == FIRST


def test_one_of_several_results_that_is_used_is_enough_and_feeds_are_none() -> None:
    pair = PlanNode("split", "split", (0,), (FEW, FEW))
    send = PlanNode("send", "send", (2,), (), {"peer": FIRST, "edge": 1})
    fed = (PlanFeed("x", FEW, ""),)
    assert reader_of(Plan(PS, (pair, send), fed)) == FIRST
    assert reader_of(Plan(PS, (pair, replace(send, inputs=(0,))), fed)) is None


def test_who_sends_all_to_one_has_ended_with_it_and_so_have_those_before() -> None:
    assert ends_of(relay(PS, FIRST, FEW)["plans"]) == {PS: (PS,), FIRST: (FIRST, PS)}
    assert ends_of(chain(PS, FIRST, SECOND, FEW)["plans"]) == {
        PS: (PS,),
        FIRST: (FIRST, PS),
        SECOND: (SECOND, FIRST, PS),
    }
    assert ends_of({PS: sending(FIRST).plan()}) == {PS: (PS,)}


def test_two_may_have_the_same_reader() -> None:
    a, b, c = Writer(PS), Writer(FIRST), Writer(SECOND)
    for edge, w in enumerate((a, b)):
        w.send(w.node("constant", out=FEW, value=np.zeros(3)), edge, SECOND)
        c.recv(edge, w.task, FEW)
    plans = {w.task: w.plan() for w in (a, b, c)}
    assert ends_of(plans) == {PS: (PS,), FIRST: (FIRST,), SECOND: (SECOND, PS, FIRST)}


def test_plans_that_wait_for_each_other_are_each_said_by_the_other() -> None:
    a, b = Writer(PS), Writer(FIRST)
    a.send(a.recv(0, FIRST, FEW), 1, FIRST)
    b.send(b.recv(1, PS, FEW), 0, PS)
    assert ends_of({PS: a.plan(), FIRST: b.plan()}) == {PS: (PS, FIRST), FIRST: (FIRST, PS)}


@pytest.mark.parametrize("where", [PS, FIRST, SECOND])
def test_where_nodes_may_be_passed_over_each_says_its_own_end(where: str) -> None:
    plans = chain(PS, FIRST, SECOND, FEW)["plans"]
    w = Writer(where)
    w.switch("choice", w.node("constant", out=FEW), w.node("constant", out=Spec("bool", ())), FEW)
    extended = {**plans, where: Plan(where, (*plans[where].nodes, *w.plan().nodes))}
    assert ends_of(extended) == {task: (task,) for task in plans}


# ── what comes of a step ─────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class State:
    """A step on its way: what each task is at, what it said and is told that is not heard yet, and what is known."""

    at: tuple[str, ...]  # "on", "ended", "failed", "aborted" or "gone"
    said: tuple[tuple[str, ...], ...]
    told: tuple[bool, ...]  # to abort it
    astray: tuple[bool, ...]  # whether what it sent was lost with the link
    waiting: frozenset[str]
    excused: frozenset[str] = frozenset()
    failed: bool = False
    aborted: bool = False
    suspected: bool = False


ERRORS = {"failed": ResourceError("full"), "aborted": StepCancelled("as told"), "astray": LinkBroken("the link")}


def changed(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])


class Search:
    """All that can happen to a step of some plans, each of which goes on once it has all that is sent it."""

    def __init__(self, plans: dict[str, Plan]) -> None:
        self.tasks = tuple(plans)
        self.step = OpenStep(1, describe(1, plans, [], []))
        self.silent = [self.step.registered.is_silent(task) for task in plans]
        readers = [reader_of(plan) for plan in plans.values()]
        self.senders = [[n for n, reader in enumerate(readers) if reader == task] for task in plans]

    def run(self) -> int:
        """Check every state; answers how many there are."""
        count = len(self.tasks)
        look = [State(("on",) * count, ((),) * count, (False,) * count, (False,) * count, frozenset(self.tasks))]
        seen = set(look)
        while look:
            state = look.pop()
            due = [*self.due(state)] if state.waiting else []
            self.check(state, due)
            new = {*due, *(self.chance(state) if state.waiting else ())} - seen
            seen |= new
            look += new
        return len(seen)

    def check(self, state: State, due: list[State]) -> None:
        """A step is over at last, and whole only if all tasks ended it; then surely, if nothing is in doubt."""
        assert due or not state.waiting, state
        if state.waiting:
            return
        well, whole = set(state.at) == {"ended"}, self.known(state).is_whole
        assert well or not whole, state
        assert whole or state.failed or state.suspected or not well, state
        assert whole or state.failed or state.aborted, state

    def due(self, state: State) -> Iterator[State]:
        """What happens by itself."""
        for n, at in enumerate(state.at):
            if at == "on" and all(state.at[m] == "ended" and not state.astray[m] for m in self.senders[n]):
                yield self.say(state, n, "ended", () if self.silent[n] else ("ended",))
            if state.told[n]:
                heard = replace(state, told=changed(state.told, n, False))
                yield self.say(heard, n, "aborted" if at == "on" else at, ("aborted",))
            if state.said[n]:
                yield self.hear(state, n)
        if state.failed and not state.aborted:
            yield self.abort(state)

    def chance(self, state: State) -> Iterator[State]:
        """What may happen besides."""
        for n, (task, at) in enumerate(zip(self.tasks, state.at, strict=True)):
            if at == "on":
                yield self.say(state, n, "failed", ("failed",))
            if at == "ended" and self.silent[n] and not state.astray[n]:
                yield self.say(replace(state, astray=changed(state.astray, n, True)), n, at, ("astray",))
            if at != "gone":
                gone = replace(state, at=changed(state.at, n, "gone"), said=changed(state.said, n, ()))
                yield self.learn(replace(gone, told=changed(state.told, n, False)), "settle", task, NodeLost("it died"))
            if state.aborted:
                yield self.learn(replace(state, suspected=True), "excuse", task)
        if not state.aborted:
            yield self.abort(state)

    def say(self, state: State, n: int, at: str, said: tuple[str, ...]) -> State:
        return replace(state, at=changed(state.at, n, at), said=changed(state.said, n, (*state.said[n], *said)))

    def hear(self, state: State, n: int) -> State:
        what, *later = state.said[n]
        heard, task = replace(state, said=changed(state.said, n, tuple(later))), self.tasks[n]
        return self.learn(heard, "end", task) if what == "ended" else self.learn(heard, "settle", task, ERRORS[what])

    def abort(self, state: State) -> State:
        return replace(state, aborted=True, told=tuple([task in state.waiting for task in self.tasks]))

    def learn(self, state: State, what: str, *about: Any) -> State:
        """What the master knows of a step once it has been told something of it."""
        step = self.known(state)
        step.next_news()
        getattr(step, what)(*about)
        assert step.news.done() or (step.waiting and bool(step.errors) == state.failed), state
        known = frozenset(step.waiting), frozenset(step.excused), bool(step.errors)
        return replace(state, **dict(zip(("waiting", "excused", "failed"), known, strict=True)))

    def known(self, state: State) -> OpenStep:
        step = self.step
        step.waiting, step.excused, step.aborted = {*state.waiting}, {*state.excused}, state.aborted
        step.errors = [(0, ResourceError("before"))] if state.failed else []
        return step


def apart(*shapes: dict[str, Any]) -> dict[str, Plan]:
    return {task: plan for shape in shapes for task, plan in shape["plans"].items()}


@pytest.mark.parametrize(
    "plans",
    [
        relay(PS, FIRST, FEW)["plans"],
        chain(PS, FIRST, SECOND, FEW)["plans"],
        apart(relay(PS, FIRST, FEW), echo(SECOND, FEW)),
    ],
    ids=["two in a row", "three in a row", "two in a row and one beside them"],
)
async def test_however_a_step_goes_it_is_over_and_whole_if_all_ended_it(plans: dict[str, Plan]) -> None:
    assert Search(plans).run() > 100
