"""What server 0 is spared: updates that the coordinator is told of together come to the value of one by one."""

from __future__ import annotations

import random

import pytest

from flowrt.sched.policies import AllOf, Deadline, FirstOf, Policy
from flowrt.sched.versions.batched import Plain
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.standing import Standing

REPLICAS = 6


class Both:
    """One coordinator that hears every event by itself, and one that is told of plain updates when it is looked at."""

    def __init__(self, policy: Policy) -> None:
        self.one = self.start(policy)
        self.plain = Plain(self.start(policy))
        self.spared = 0

    def start(self, policy: Policy) -> Coordinator:
        return Coordinator.start(policy, REPLICAS, 1, allowed=10_000)

    def look(self) -> Coordinator:
        found = self.plain.told() if self.plain else self.plain.of
        assert found == self.one
        return found

    def update(self, replica: int, version: int, total: int, now: float) -> None:
        self.one = self.one.ready(replica, total, now).held(0, version, replica, True, now)[0]
        if not self.plain.give(replica, version, total):
            self.plain.of = self.told().ready(replica, total, now)
        if self.plain.hold(replica, version, now, 0):
            self.spared += 1
        else:
            self.plain.of = self.told().held(0, version, replica, True, now)[0]

    def told(self) -> Coordinator:
        return self.plain.told() if self.plain else self.plain.of

    def go_on(self, now: float) -> None:
        """Whatever is due and ordered happens."""
        for _ in range(2):
            value = self.look().tick(now)
            value = value if value.stuck() is None else value.abandon(now)
            value, replicas = value.order(now)
            self.one = self.plain.of = value if replicas is None else value.publish(0, value.version, now)


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
                both.one = both.plain.of = both.look().lost(replica)
            case "joined":
                both.one = both.plain.of = both.look().joined(replica, given[replica])
            case "ready":
                given[replica] += 2
                both.one = both.plain.of = both.look().ready(replica, given[replica], now)
            case "look":
                both.look()
        if both.one.quorum.closed_at is not None or draw.random() < 0.2:
            both.go_on(now)
    both.look()
    assert both.spared
    assert both.one.version > 3


def test_the_update_that_may_close_a_version_is_told_at_once() -> None:
    both = Both(AllOf())
    for replica in range(REPLICAS):
        both.one = both.plain.of = both.told().ready(replica, 2, 0.0)
    for replica in range(REPLICAS):
        both.update(replica, 0, 2, 0.1 * replica)
        assert both.spared == min(replica + 1, REPLICAS - 1)
    assert both.plain.of.decided(0) == tuple(range(REPLICAS))


def test_an_update_of_nobody_that_computes_it_is_told_at_once() -> None:
    plain = Plain(Coordinator.start(AllOf(), 2, 1).ready(0, 1, 0.0))
    assert plain.of.standing == (Standing.RUNNING, Standing.IDLE)
    assert not plain.give(1, 0, 1)  # it begins with it
    assert not plain.give(0, 1, 1)  # of another version
    assert not plain.give(2, 0, 1)  # there is no such replica
    assert not plain.give(-1, 0, 1)
    assert not plain.hold(0, 0, 0.0, 0)
