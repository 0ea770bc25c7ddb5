"""Updates that are some versions old: what policies make of them, what servers keep, and what becomes of each tower."""

from __future__ import annotations

import random
from typing import Any

import pytest
from policy_world import Hasty
from schedule_world import Faults, World, batches
from sim_loop import simulate

from flowrt.base.errors import GraphError, InternalError
from flowrt.sched.drivers.messages import ApplyOrder, NewVersion, Update
from flowrt.sched.policies import (
    AllOf,
    Async,
    BoundedStaleness,
    Close,
    Offer,
    Policy,
    Record,
    WaitUntil,
    fixed_size,
    policy_from_data,
    policy_to_data,
)
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Outcome, Receipt
from flowrt.sched.versions.quorum import Verdict
from flowrt.sched.versions.shard import Shard

# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_async_keeps_the_first_update_and_weighs_it_by_its_age() -> None:
    policy = Async()
    offers = (Offer(2, 0.0, 3), Offer(0, 0.1))
    assert policy.decide(offers, (1,), 0.1) == Close((2,), "that of replica 2, 3 versions old")
    assert policy.weights(offers[:1]) == (0.25,)
    assert policy.weights(offers[1:]) == (1.0,)
    assert (policy.least(4), policy.size(4), fixed_size(policy, 4)) == (1, 1, None)


BEHIND = "nobody else is 2 versions behind"


def record(kept: tuple[int, ...], missing: tuple[int, ...]) -> Record:
    return Record(tuple(Offer(r, 0.0) for r in kept), kept, tuple((r, 1.0) for r in missing), 1.0, 1.0)


def test_a_bound_waits_for_those_who_would_become_older_than_it() -> None:
    policy = BoundedStaleness(2)
    assert policy.decide((Offer(0, 0.0),), (1, 2), 0.0) == Close((0,), BEHIND)
    once = policy.after(record((0,), (1, 2)))
    assert once.decide((Offer(0, 0.0), Offer(2, 0.0, 1)), (1,), 0.0) == Close((0, 2), BEHIND)
    twice = once.after(record((0, 2), (1,)))
    assert twice.decide((Offer(0, 0.0), Offer(2, 0.0)), (1,), 0.0) == WaitUntil(offers=3)
    assert twice.decide((Offer(0, 0.0), Offer(1, 0.0, 2)), (2,), 0.0) == Close((0, 1), BEHIND)
    assert twice.decide((Offer(0, 0.0),), (2,), 0.0) == Close((0,), BEHIND)  # 1 is lost
    assert twice.after(record((0, 1), (2,))).behind == ((2, 1),)
    assert repr(twice) == "BoundedStaleness(bound=2)"
    assert BoundedStaleness(1).decide((Offer(0, 0.0),), (1,), 0.0) == Close((0,), "nobody else is 1 versions behind")


def test_a_bound_of_zero_waits_for_all_and_averages() -> None:
    policy = BoundedStaleness(0)
    assert policy.decide((Offer(2, 0.0),), (0, 1), 0.0) == WaitUntil(offers=3)
    assert policy.decide((Offer(2, 0.0), Offer(0, 0.0)), (), 0.0) == Close((2, 0), "nobody else is 0 versions behind")
    assert policy.after(record((0,), (1, 2))) == policy
    assert policy.weights((Offer(0, 0.0), Offer(2, 0.0))) is None


def test_stale_updates_of_a_set_share_its_weight_by_their_age() -> None:
    assert BoundedStaleness(3).weights((Offer(0, 0.0), Offer(2, 0.0, 3))) == (0.5, 0.125)


@pytest.mark.parametrize("bound", [-1, 1.0, True, None, "2"])
def test_a_bound_that_is_no_number_of_versions_is_an_error_at_its_line(bound: Any) -> None:
    with pytest.raises(GraphError, match=r"test_staleness.py:\d+: BoundedStaleness\(.*expected a number of versions"):
        BoundedStaleness(bound)


@pytest.mark.parametrize("policy", [Async(), BoundedStaleness(3), BoundedStaleness(1, ((2, 1),))])
def test_they_travel(policy: Policy) -> None:
    assert policy_from_data(policy_to_data(policy)) == policy


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def held(*updates: tuple[int, int], version: int = 3, staleness: int = 2) -> Shard[str]:
    """What a server holds that was given (replica, version) in turn; each must be news."""
    shard: Shard[str] = Shard.start(3, 0, staleness)
    for made in range(version):
        shard = shard.take(made, ())[0].applied(made)
    for replica, computed in updates:
        shard, verdict = shard.hold(computed, replica, f"{replica} of {computed}", True)
        assert verdict is Verdict.HELD
    return shard


def test_a_server_keeps_what_may_still_count_and_of_each_replica_the_newest() -> None:
    shard = held((0, 1), (1, 2), (1, 3))
    assert shard.held == ("0 of 1", "1 of 3", None)
    assert shard.hold(0, 2, "too old", True)[1] is Verdict.LATE
    assert shard.hold(2, 1, "older than what is there", True)[1] is Verdict.LATE
    assert shard.hold(1, 0, "again", True)[1] is Verdict.REPEAT
    with pytest.raises(InternalError, match="pushed version 4, this server is at 3"):
        shard.hold(4, 0, "of a version to come", True)


def test_a_server_forgets_what_it_applied_and_what_became_too_old_and_nothing_else() -> None:
    shard, updates = held((0, 1), (1, 2), (2, 3)).take(3, (2,), (3,))
    assert updates == ("2 of 3",)
    assert shard.expects(2, 0)
    assert not shard.expects(1, 0)  # too old for the next version already
    after = shard.applied(3)
    assert after.held == (None, "1 of 2", None)
    assert after.hold(3, 2, "2 of 3", True)[1] is Verdict.LATE
    assert after.hold(2, 1, "1 of 2", True)[1] is Verdict.REPEAT


def test_what_comes_while_a_set_is_applied_is_kept_for_the_next_version() -> None:
    shard = held((2, 3)).take(3, (2,), (3,))[0]
    shard, verdict = shard.hold(3, 0, "0 of 3", True)
    assert verdict is Verdict.HELD
    assert shard.applied(3).take(4, (0,), (3,))[1] == ("0 of 3",)


def test_an_order_names_the_very_updates() -> None:
    with pytest.raises(InternalError, match="its update is not held here; it was computed from version 3"):
        held((1, 2)).take(3, (1,), (3,))
    assert held((1, 2), (0, 3)).take(3, (1, 0), (2, 3))[1] == ("0 of 3", "1 of 2")


def test_a_refused_update_is_refused_again_while_it_might_count() -> None:
    shard, verdict = held().hold(2, 1, "nan", False)
    assert verdict is Verdict.REFUSED
    shard = shard.take(3, ())[0].applied(3)
    assert shard.hold(2, 1, "fine now", True)[1] is Verdict.REFUSED
    shard = shard.take(4, ())[0].applied(4)
    assert shard.hold(2, 1, "fine now", True)[1] is Verdict.LATE
    assert shard.hold(5, 1, "another", True)[1] is Verdict.HELD


def test_a_finite_update_after_one_that_was_refused_is_held_and_known_again() -> None:
    refused = held().hold(2, 1, "nan", False)[0].hold(2, 0, "nan", False)[0]
    shard, verdict = refused.hold(3, 1, "fine", True)
    assert (verdict, shard.refused) == (Verdict.HELD, {0})
    assert shard.hold(3, 1, "fine", True)[1] is Verdict.REPEAT
    assert shard.hold(2, 0, "nan", False)[1] is Verdict.REFUSED


# ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────────


def began(policy: Policy, replicas: int = 3, servers: int = 1) -> Coordinator:
    coordinator = Coordinator.start(policy, replicas, servers, allowed=99)
    for replica in range(replicas):
        coordinator = coordinator.ready(replica, 9, 0.0)
    return coordinator


def offered(coordinator: Coordinator, replica: int, version: int) -> Coordinator:
    for server in range(coordinator.servers):
        coordinator = coordinator.held(server, version, replica, True, 0.0)[0]
    return coordinator


def applied(coordinator: Coordinator, *expected: tuple[int, int]) -> Coordinator:
    """Have the set that is fixed applied, which is of (replica, version)."""
    version = coordinator.version
    coordinator, chosen = coordinator.order(0.0)
    assert chosen is not None
    versions = coordinator.versions or (version,) * len(chosen)
    assert tuple(zip(chosen, versions, strict=True)) == expected
    for server in range(coordinator.servers):
        coordinator = coordinator.publish(server, version, 0.0)
    return coordinator


def test_a_tower_goes_on_and_has_one_receipt_with_the_version_that_keeps_it() -> None:
    opened = applied(offered(began(Async()), 1, 0), (1, 0))
    assert opened.receipts(0) == (Receipt(1, 1, Outcome.KEPT),)
    assert [opened.begun(replica) for replica in range(3)] == [1, 2, 1]
    assert [opened.oldest(replica) for replica in range(3)] == [0, 1, 0]
    after = applied(offered(opened, 2, 0), (2, 0))
    assert after.receipts(1) == (Receipt(2, 1, Outcome.KEPT, 1),)
    assert after.held(0, 0, 2, True, 0.0) == (after, Verdict.LATE)  # said again
    assert after.held(0, 0, 1, True, 0.0) == (after, Verdict.LATE)


def test_what_becomes_too_old_is_cut_off_and_its_replica_begins_anew() -> None:
    opened = began(Hasty(1))
    for version in range(2):
        assert opened.begun(2) == 1
        opened = applied(offered(opened, 0, version), (0, version))
    assert opened.receipts(1) == (
        Receipt(0, 2, Outcome.KEPT),
        Receipt(1, 1, Outcome.LATE, 1),
        Receipt(2, 1, Outcome.LATE, 1),
    )
    assert (opened.begun(2), opened.oldest(2)) == (2, 2)
    assert opened.held(0, 1, 2, True, 0.0) == (opened, Verdict.LATE)


def test_what_is_whole_after_the_set_was_fixed_is_offered_to_the_next_version() -> None:
    fixed = offered(began(Async(), servers=2), 0, 0)
    later, verdict = offered(fixed, 2, 0).held(0, 0, 1, True, 0.0)
    assert verdict is Verdict.HELD
    opened = applied(later, (0, 0))
    assert opened.quorum.offers == (Offer(2, 0.0, 1),)
    assert opened.weights == (0.5,)  # and it is closed with it
    after = applied(opened, (2, 0))
    assert applied(after.held(1, 0, 1, True, 0.0)[0], (1, 0)).receipts(2) == (Receipt(1, 1, Outcome.KEPT, 2),)


def test_who_is_lost_once_the_set_is_fixed_has_a_receipt_and_begins_anew_when_it_is_back() -> None:
    fixed = offered(began(Async()), 0, 0).lost(2).joined(2)
    opened = applied(fixed, (0, 0))
    assert opened.receipts(0) == (Receipt(0, 1, Outcome.KEPT), Receipt(2, 1, Outcome.LOST))
    again = opened.ready(2, 9, 0.0)
    assert (again.begun(2), again.oldest(2)) == (2, 1)


def test_who_joins_again_while_its_update_may_count_has_the_receipt_of_the_batch_that_it_was_made_of() -> None:
    held = offered(began(AllOf()), 1, 0)
    back = held.lost(1).joined(1, 3).lost(1).joined(1, 5)
    opened = applied(offered(offered(back, 0, 0), 2, 0), (0, 0), (1, 0), (2, 0))
    assert opened.receipts(0) == tuple(Receipt(replica, 1, Outcome.KEPT) for replica in range(3))
    assert (opened.spent[1], opened.was) == (5, ())


def test_an_update_that_goes_on_keeps_its_batch_though_its_replica_joined_again() -> None:
    waiting = offered(offered(began(Async()), 0, 0), 2, 0)
    opened = applied(waiting.lost(2).joined(2, 5), (0, 0))
    assert opened.was == ((2, 1),)
    after = applied(opened, (2, 0))
    assert after.receipts(1) == (Receipt(2, 1, Outcome.KEPT, 1),)
    assert after.was == ()


def test_a_batch_that_was_claimed_with_an_older_version_counts_from_that() -> None:
    opened = Coordinator.start(Async(), 2, 1, allowed=99).ready(0, 9, 0.0)
    opened = applied(offered(opened, 0, 0), (0, 0))
    claimed, verdict = opened.ready(1, 1, 0.0).held(0, 0, 1, True, 0.0)  # it had not heard of version 1
    assert verdict is Verdict.CLOSE
    assert applied(claimed, (1, 0)).receipts(1) == (Receipt(1, 1, Outcome.KEPT, 1),)


# ── on the way ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("servers", [1, 2])
def test_an_update_costs_a_version_down_and_not_one_to_everybody(servers: int) -> None:
    said: list[Any] = []

    def note(message: Any) -> bool:
        said.append(message)
        return False

    async def train() -> list[int]:
        world = World(random.Random(0), Async(), replicas=4, servers=servers, faults=Faults(at=note))
        training = world.client("one").run(batches())
        kept = [(await anext(training)).kept[0] for _ in range(200)]
        await training.aclose()
        await world.aclose()
        return kept

    kept = simulate(random.Random(0), train)
    assert set(kept) == {0, 1, 2, 3}
    told, updates = (sum(isinstance(message, kind) for message in said) for kind in (NewVersion, Update))
    assert told <= updates + 8 * servers  # and each replica's first, and what is on its way at the end
    assert all(order.versions or order.weights == (1.0,) for order in said if isinstance(order, ApplyOrder))
