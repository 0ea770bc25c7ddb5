"""What server 0 is spared: what the coordinator is told together comes to the value of events one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from flowrt.base.valueclass import replace
from flowrt.sched.policies import AllOf, Deadline, FirstOf, Policy
from flowrt.sched.policies.policy import Close, Offer, WaitUntil
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.standing import Standing
from flowrt.sched.versions.steady import Steady

REPLICAS = 6


class Both:
    """One coordinator that hears every event by itself, and one that is told of what is plain when it is looked at."""

    def __init__(self, policy: Policy) -> None:
        self.one = Coordinator.start(policy, REPLICAS, 1, allowed=10_000)
        self.steady = Steady(self.one)
        self.spared = 0  # updates that were noted
        self.usual = 0  # versions that went as usual
        self.why = ""  # of the newest version

    def look(self) -> Coordinator:
        one = self.one
        for replica in range(REPLICAS):
            booked = one.spent[replica], one.begun(replica) > 0, one.oldest(replica)
            assert self.steady.booked(replica) == booked
            assert self.steady.oldest(replica) == booked[2]
        found = self.steady.told()
        assert found == self.one
        return found

    def both(self, value: Coordinator) -> None:
        self.one = self.steady.of = value

    def update(self, replica: int, version: int, total: int, now: float) -> None:
        self.one = self.one.ready(replica, total, now).held(0, version, replica, True, now)[0]
        if not self.steady.give(replica, version, total):
            self.steady.of = self.steady.of.ready(replica, total, now)
        if self.steady.hold(replica, version, now, 0):
            self.spared += 1
        else:
            self.steady.of = self.steady.of.held(0, version, replica, True, now)[0]

    def order(self, now: float) -> bool:
        self.one, expected = self.one.order(now)
        assert expected is None or not self.steady.waits
        replicas = self.steady.order(now)
        assert replicas == expected
        return replicas is not None

    def publish(self, now: float) -> None:
        before, version = self.one, self.one.version
        self.one = before.publish(0, version, now)
        self.usual += self.steady.fixed is not None
        made = self.steady.publish(0, version, now, 0.0)
        assert made is not None
        self.why = made.why
        assert made.receipts == self.one.receipts(version)
        assert (made.version, made.opened, made.decided) == (version, before.quorum.opened, before.quorum.closed_at)
        assert (made.ordered, made.began, made.why) == (before.ordered_at, before.began, before.why)

    def go_on(self, now: float) -> None:
        """Whatever is due and ordered happens."""
        if not self.steady.usual:
            value = self.look().tick(now)
            self.both(value if value.stuck() is None else value.abandon(now))
        if self.order(now):
            self.publish(now)


@pytest.mark.parametrize("policy", [AllOf(), FirstOf(4), Deadline(0.5, at_least=3)], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_updates_that_are_told_together_come_to_the_same_coordinator(policy: Policy, seed: int) -> None:
    draw, both, now = random.Random(seed), Both(policy), 0.0
    print(f"seed {seed}")
    given = [0] * REPLICAS
    for _ in range(600):
        now += draw.choice((0.0, 0.01, 0.3))
        replica, version = draw.randrange(REPLICAS), both.one.version
        match draw.choice(("update",) * 40 + ("again", "late", "lost", "joined", "joined", "look", "ready")):
            case "update":
                given[replica] += 1
                both.update(replica, version, given[replica], now)
            case "again":
                both.update(replica, version, given[replica], now)
            case "late" if version:
                both.update(replica, version - 1, given[replica], now)
            case "lost":
                both.both(both.look().lost(replica))
            case "joined":
                both.both(both.look().joined(replica, given[replica]))
            case "ready":
                given[replica] += 2
                both.both(both.look().ready(replica, given[replica], now))
            case "look":
                both.look()
        if both.one.quorum.closed_at is not None or draw.random() < 0.2:
            both.go_on(now)
    both.look()
    assert both.spared
    assert both.one.version > 3


def go_as_usual(both: Both, versions: int, given: int, now: float) -> float:
    """So many versions, of which all replicas have batches for the next."""
    for version in range(both.one.version, both.one.version + versions):
        for replica in random.Random(version).sample(range(REPLICAS), REPLICAS):
            now += 0.1
            both.update(replica, version, given, now)
        both.go_on(now + 0.01)
    return now


def began(policy: Policy) -> Both:
    both = Both(policy)
    for replica in range(REPLICAS):
        both.both(both.look().ready(replica, 1, 0.0))
    return both


@pytest.mark.parametrize("looks", [False, True])
def test_versions_that_go_as_usual_come_to_the_same_coordinator(looks: bool) -> None:
    both, now = began(AllOf()), 0.0
    for given in range(2, 40):
        now = go_as_usual(both, 1, given, now)
        if looks:
            both.look()
    assert both.look().version == both.usual == 38
    assert both.spared == 38 * REPLICAS


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_usual_finds_the_same_coordinator_wherever_it_comes(seed: int) -> None:
    draw, both, now = random.Random(seed), began(AllOf()), 0.0
    print(f"seed {seed}")
    given = [1] * REPLICAS
    for _ in range(1500):
        now += 0.01
        version, standing = both.one.version, both.one.standing
        replica = draw.randrange(REPLICAS)
        if both.one.quorum.closed_at is None and (standing[replica] is Standing.RUNNING or draw.random() < 0.02):
            given[replica] = both.one.spent[replica] + draw.choice((1,) * 60 + (0, 2))
            both.update(replica, version, given[replica], now)
        match draw.choice(("on",) * 200 + ("ready", "look", "lost", "joined", "joined", "late", "end", "order")):
            case "ready":
                given[replica] += 1
                both.both(both.look().ready(replica, given[replica], now))
            case "look":
                both.look()
            case "lost":
                both.both(both.look().lost(replica))
            case "joined":
                for each in range(REPLICAS):
                    both.both(both.look().joined(each, given[each]).ready(each, given[each] + 1, now))
            case "late" if version:
                both.update(replica, version - 1, given[replica], now)
            case "end":
                both.both(both.look().exhausted(tuple(max(given) + 50 for _ in given)))
            case "order" if both.one.quorum.closed_at is not None:
                assert both.order(now) or both.one.ordered_at is not None
                both.look()
                both.publish(now)
            case _:
                both.go_on(now)
    both.look()
    assert both.usual
    assert both.one.version > both.usual


def test_the_set_of_all_is_ordered_once_it_is_allowed() -> None:
    both = began(AllOf())
    both.both(replace(both.look(), allowed=0))
    for replica in range(REPLICAS):
        both.update(replica, 0, 2, 0.1 * replica)
    assert both.steady.fixed is not None
    assert not both.order(1.0)
    both.one = both.one.allow(1)
    both.steady.allow(1)
    assert both.order(2.0)
    assert not both.order(3.0)
    both.publish(4.0)
    assert both.look().version == 1


class Timed(AllOf):
    """One that answers otherwise in each version, and so has to be asked in each."""

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        answer = super().decide(offers, able, now)
        return Close(answer.replicas, f"after {now:.2f} s") if isinstance(answer, Close) else answer


def test_who_may_answer_otherwise_to_the_updates_of_all_is_asked_in_each_version() -> None:
    both, now = began(Timed()), 0.0
    whys = set()
    for given in range(2, 7):
        now = go_as_usual(both, 1, given, now + given)
        whys.add(both.why)
    assert both.usual == len(whys) == 5


def test_an_update_that_is_not_of_whom_computes_it_is_told_at_once() -> None:
    steady = Steady(Coordinator.start(AllOf(), 2, 1).ready(0, 1, 0.0))
    assert steady.of.standing == (Standing.RUNNING, Standing.IDLE)
    assert not steady.give(1, 0, 1)  # it begins with it
    assert not steady.give(0, 1, 1)  # of another version
    assert not steady.give(2, 0, 1)  # there is no such replica
    assert not steady.give(-1, 0, 1)
    assert not steady.hold(0, 0, 0.0, 0)  # nobody else computes: it decides


@dataclass(frozen=True)
class Hesitant(Policy):
    """Wants something else than all when all have offered."""

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return WaitUntil(now + 1.0)

    def least(self, replicas: int) -> int:
        return replicas


def computing(policy: Policy, servers: int, replicas: int) -> Steady:
    """Some of the replicas compute, of several servers' parts."""
    of = Coordinator.start(policy, REPLICAS, servers, allowed=10)
    for replica in range(replicas):
        of = of.ready(replica, 1, 0.0)
    return Steady(of)


def test_what_several_servers_have_to_hold_is_told_at_once() -> None:
    one, several = (computing(AllOf(), servers, REPLICAS) for servers in (1, 2))
    assert (one.usual, several.usual) == (True, False)
    assert (one.hold(0, 0, 0.0, 0), several.hold(0, 0, 0.0, 0)) == (True, False)
    one, several = (computing(FirstOf(4), servers, REPLICAS) for servers in (1, 2))
    assert (one.hold(0, 0, 0.0, 0), several.hold(0, 0, 0.0, 0)) == (True, False)


def test_the_last_update_that_there_may_be_is_told_at_once_though_it_makes_no_set() -> None:
    steady = computing(FirstOf(4), 1, 3)
    assert [steady.hold(replica, 0, 0.0, 0) for replica in range(3)] == [True, True, False]


def test_a_policy_that_waits_though_all_have_offered_is_obeyed() -> None:
    both = began(Hesitant())
    for replica in range(REPLICAS):
        both.update(replica, 0, 2, 0.1 * replica)
        assert both.spared == min(replica + 1, REPLICAS - 1)
    assert both.look().due == pytest.approx(1.5)
