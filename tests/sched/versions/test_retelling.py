"""Which batches are handed to whom when a history is trained again."""

from __future__ import annotations

import random

import pytest

from flowrt.sched.policies import (
    AllOf,
    Close,
    FirstOf,
    Offer,
    Record,
    WaitUntil,
    asking,
    policy_from_data,
    policy_to_data,
    recorded,
)
from flowrt.sched.versions.retelling import Retelling


def test_a_recorded_policy_keeps_the_sets_one_after_another_and_waits_for_them() -> None:
    policy = policy_from_data(policy_to_data(recorded(FirstOf(2), [(0, 9), (3,)], replicas=10)))
    assert policy.least(10) == 2
    assert policy.decide([Offer(9, 1.0), Offer(4, 1.0)], (0,), 99.0) == WaitUntil(offers=3)
    assert policy.decide([Offer(9, 1.0), Offer(4, 1.0), Offer(0, 2.0)], (), 99.0) == Close((0, 9), "as recorded")
    after = policy.after(Record((), (), (), 0.0, 0.0))
    assert (after.least(10), after.decide([Offer(3, 0.0)], (), 0.0)) == (1, Close((3,), "as recorded"))
    beyond = after.after(Record((), (), (), 0.0, 0.0))
    assert (beyond.least(10), beyond.decide([Offer(3, 0.0)], (), 0.0)) == (1, WaitUntil(offers=2))


@pytest.mark.parametrize(("replicas", "width"), [(1, 1), (8, 1), (9, 2), (16, 2)])
def test_a_recorded_set_takes_a_bit_for_each_replica(replicas: int, width: int) -> None:
    everybody = tuple(range(replicas))
    policy = recorded(AllOf(), [everybody, ()], replicas)
    assert (policy.width, len(policy.sets), policy.wanted) == (width, 2 * width, everybody)


def test_a_recorded_set_may_have_fewer_replicas_than_are_there_now() -> None:
    policy, offers = recorded(AllOf(), [(0, 2)], replicas=3), [Offer(replica, 1.0) for replica in range(3)]
    assert asking.decide(policy, 3, offers, (), 2.0) == Close((0, 2), "as recorded")


@pytest.mark.parametrize("seed", range(100))
def test_nobody_is_handed_a_batch_while_a_version_is_open_that_it_is_not_in(seed: int) -> None:
    rng = random.Random(seed)
    replicas, identity, versions = rng.randint(1, 5), 0, []
    for _ in range(30):
        kept = {}
        for replica in sorted(rng.sample(range(replicas), rng.randint(1, replicas))):
            kept[replica] = (identity,)
            identity += 1
        versions.append(kept)
    handing = Retelling(replicas, rng.randint(1, 4), versions)
    waiting: list[list[int]] = [[] for _ in range(replicas)]
    for at, kept in enumerate(versions):
        for replica, number, handed in iter(handing.next, None):
            assert number == handing.given[replica]
            waiting[replica].append(handed)
        for replica in range(replicas):
            if replica in kept:
                assert waiting[replica].pop(0) == kept[replica][0]
            else:
                assert not waiting[replica], f"replica {replica} would begin version {at}"
        for replica in rng.sample(sorted(kept), len(kept)):
            handing.spend(replica, handing.spent[replica] + 1)
    assert handing.over
    assert handing.new == identity


def test_a_replica_has_as_many_batches_as_it_may_in_its_order_and_versions_end_by_their_receipts() -> None:
    handing = Retelling(2, 2, [{0: (5,), 1: (6,)}, {0: (7,)}, {0: (8,), 1: (9,)}])
    assert handing.identity == 5
    assert list(iter(handing.next, None)) == [(0, 1, 5), (0, 2, 7), (1, 1, 6)]
    assert handing.identity is None
    assert handing.spend(0, 1) == [5]
    assert list(iter(handing.next, None)) == [(0, 3, 8)]
    assert handing.spend(1, 1) == [6]
    assert handing.next() is None, "the second version is open, and replica 1 is not in it"
    assert handing.spend(0, 2) == [7]
    assert handing.next() == (1, 2, 9)
    assert handing.over
    assert [handing.spend(0, 3), handing.spend(1, 2), handing.spend(1, 2)] == [[8], [9], []]
