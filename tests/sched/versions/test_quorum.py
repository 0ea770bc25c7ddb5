"""The quorum and its two users, tested by equality of what they answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

from flowrt.base.errors import GraphError, InternalError
from flowrt.sched.policies import AllOf, Close, Deadline, FirstOf, Offer, Policy, Record, WaitUntil
from flowrt.sched.versions.book import Book
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import AppliedVersion, Cause, Outcome, Receipt, Stuck
from flowrt.sched.versions.quorum import Quorum, Verdict
from flowrt.sched.versions.shard import Shard, ShardStatistics, Untold
from flowrt.sched.versions.standing import Standing

HELD, OFFERED, CLOSE = Verdict.HELD, Verdict.OFFERED, Verdict.CLOSE
TWO = FirstOf(2)
LATE, REPEAT, REFUSED = Verdict.LATE, Verdict.REPEAT, Verdict.REFUSED


def offered(quorum: Quorum, *replicas: int, now: float = 0.0, of: int = 3) -> Quorum:
    """These offer, one after another; of the others all may yet."""
    for replica in replicas:
        others = [r for r in range(of) if r != replica and all(r != offer.replica for offer in quorum.offers)]
        quorum = quorum.offer(Offer(replica, now - quorum.opened), lambda others=others: others)
    return quorum


def test_the_first_of_n_close_the_set() -> None:
    quorum = Quorum.start(FirstOf(2), replicas=3, opened=1.0)
    one = offered(quorum, 2, now=1.5)
    assert (one.offers, one.decided, one.due) == ((Offer(2, 0.5),), None, None)
    two = offered(one, 0, now=2.0)
    assert (two.decided, two.closed_at, two.why) == ((0, 2), 2.0, "the first 2 are there")
    assert two.offers == (Offer(2, 0.5), Offer(0, 1.0))


def test_all_of_n_wait_for_everybody() -> None:
    quorum, decided = Quorum.start(AllOf(), 3), []
    for replica in (2, 0, 1):
        quorum = offered(quorum, replica)
        decided.append(quorum.decided)
    assert decided == [None, None, (0, 1, 2)]
    assert offered(Quorum.start(AllOf(), 1), 0, now=5.0, of=1).closed_at == 5.0


@dataclass(frozen=True)
class Saying(Policy):
    """Always waits, and says until when."""

    wait: Any

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> WaitUntil:
        return self.wait


def test_the_policy_is_asked_when_it_is_time_and_with_the_offers_that_it_named() -> None:
    quorum = Quorum.start(Deadline(0.5), 4, opened=10.0)
    assert (quorum.version, quorum.enough, quorum.due) == (0, 1, None)
    one = offered(quorum, 1, now=10.25, of=4)
    assert (one.offers, one.due, one.enough) == ((Offer(1, 0.25),), 10.5, 4)
    two = offered(one, 0, now=10.3, of=4)
    assert (two.due, two.decided, len(two.offers)) == (10.5, None, 2)
    assert two.ask((2, 3), 10.4).due == 10.5
    closed = two.ask((2, 3), 10.5)
    assert (closed.decided, closed.closed_at, closed.due) == ((0, 1), 10.5, None)
    four = offered(two, 2, 3, now=10.4, of=4)
    assert (four.decided, four.why) == ((0, 1, 2, 3), "nobody else can come")


@pytest.mark.parametrize(
    ("wait", "due", "enough"),
    [
        (WaitUntil(), None, 2),
        (WaitUntil(0.25), None, 2),  # which it is
        (WaitUntil(0.1), None, 2),  # which is past
        (WaitUntil(0.5, 1), 10.5, 2),
        (WaitUntil(offers=3), None, 3),
    ],
)
def test_a_policy_is_asked_again_at_a_time_to_come_or_with_more_offers(wait: Any, due: Any, enough: int) -> None:
    quorum = offered(Quorum.start(Saying(wait), 4, opened=10.0), 1, now=10.25, of=4)
    assert (quorum.due, quorum.enough) == (due, enough)


def test_a_time_that_has_come_has_come_for_the_policy_whatever_a_sum_is_rounded_to() -> None:
    opened, seconds = 1e6 + 0.1, 0.7
    assert (opened + seconds) - opened < seconds
    quorum = offered(Quorum.start(Deadline(seconds), 3, opened=opened), 1, now=opened)
    assert quorum.due == opened + seconds
    assert quorum.ask((0, 2), opened + seconds).decided == (1,)


def test_a_policy_is_asked_at_once_when_somebody_is_lost_if_there_is_anything_to_ask() -> None:
    quorum = Quorum.start(Deadline(0.5, at_least=2), 4)
    assert quorum.stir() is quorum
    one = offered(quorum, 3, of=4)
    assert one.stir() is one
    two = offered(one, 1, of=4)
    assert (two.due, two.stir().due) == (0.5, -inf)
    assert two.stir().ask((), 0.25).decided == (1, 3)
    assert two.stir().ask((0,), 0.25).due == 0.5


def test_nobody_is_asked_once_the_set_is_fixed() -> None:
    closed = offered(Quorum.start(FirstOf(1), 2, version=7), 1, of=2)
    for asks in (lambda: closed.ask((0,), 1.0), lambda: offered(closed, 0, of=2), lambda: closed.abandon(0.0)):
        with pytest.raises(InternalError, match=r"version 7 .*its set \(1,\) is fixed"):
            asks()
    assert closed.stir() is closed
    assert closed.due is None


def test_a_version_follows_once_the_one_before_is_decided() -> None:
    quorum = Quorum.start(FirstOf(1), 2, version=7)
    with pytest.raises(InternalError, match="version 7 is not decided"):
        quorum.next(1.0)
    assert offered(quorum, 1, of=2).next(3.0) == Quorum.start(FirstOf(1), 2, version=8, opened=3.0)
    assert quorum.abandon(3.0).decided == ()


@pytest.mark.parametrize(
    ("policy", "replicas", "message"),
    [
        (lambda: FirstOf(0), 4, r"FirstOf\(0\): expected a number of updates, 1 or more"),
        (lambda: FirstOf(-1), 4, "1 or more"),
        (lambda: FirstOf(2.5), 4, r"FirstOf\(2.5\): expected a number of updates, 1 or more"),
        (lambda: FirstOf(True), 4, "1 or more"),
        (
            lambda: FirstOf(5),
            4,
            r"FirstOf\(5\) of 4 replicas can never be met; use FirstOf\(4\) or fewer, or replicas=5",
        ),
        (AllOf, 0, "expected at least one replica, got replicas=0"),
    ],
)
def test_a_policy_that_cannot_be_met_names_the_fix(policy: type[Policy], replicas: int, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Quorum.start(policy(), replicas)


@pytest.mark.parametrize("seed", [1])
def test_every_order_of_offers_closes_with_exactly_the_needed_updates(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        replicas = rng.randint(1, 6)
        needed = rng.randint(1, replicas)
        quorum, order = Quorum.start(FirstOf(needed), replicas), rng.sample(range(replicas), replicas)
        for count, replica in enumerate(order[:needed], start=1):
            assert quorum.decided is None
            quorum = offered(quorum, replica, of=replicas)
            assert len(quorum.offers) == count
        assert quorum.decided == tuple(sorted(order[:needed]))


# One server.


def shard_with(*held: str | None, version: int = 0) -> Shard[str]:
    computed = tuple(version - (update is None) for update in held)
    return replace(Shard[str].start(len(held), version), held=held, computed=computed)


def test_where_replicas_come_and_go_a_policy_is_asked_about_those_that_are_there() -> None:
    quorum = Quorum.start(AllOf(), 4, floor=2)
    assert (quorum.least, quorum.enough) == (4, 4)
    three = offered(quorum.follow(3), 2, 0, of=3)
    assert (three.least, three.enough, three.decided) == (3, 3, None)
    two = three.follow(2)
    assert two.due == -inf
    assert two.ask((), 5.0).decided == (0, 2)
    one = two.follow(1)
    assert (one.least, one.due) == (2, -inf), "as two had offered before"
    again = offered(quorum.follow(2), 1).follow(3)
    assert (again.least, offered(again, 0).decided) == (3, None), "one has come, and is waited for"
    assert offered(again, 0, 2).decided == (0, 1, 2)


def test_fewer_replicas_than_the_floor_make_no_version() -> None:
    quorum = offered(Quorum.start(Deadline(1.0), 4, floor=2).follow(1), 3)
    assert quorum.least == 2
    assert quorum.ask((), 9.0).decided is None
    assert quorum.follow(2).least == 1, "as the policy says of as many as are needed"
    assert offered(quorum.follow(2), 0).ask((), 9.0).decided == (0, 3)


def test_a_lost_replica_is_not_waited_for_where_they_come_and_go_and_one_that_joins_is() -> None:
    coordinator = Coordinator.start(AllOf(), 3, 2, allowed=9, floor=1)
    for replica in range(3):
        coordinator = coordinator.ready(replica, 9, 0.0)
    coordinator = whole(whole(coordinator, 0)[0], 1)[0].lost(2)
    assert coordinator.due == -inf
    coordinator = applied(coordinator.tick(1.0))
    assert coordinator.receipts(0) == (
        Receipt(0, 1, Outcome.KEPT),
        Receipt(1, 1, Outcome.KEPT),
        Receipt(2, 1, Outcome.LOST),
    )
    coordinator = whole(whole(coordinator.joined(2, 1), 0)[0], 1)[0]
    assert coordinator.tick(2.0).decided(1) is None, "the third has begun with the version"
    coordinator, verdict = whole(coordinator.ready(2, 9, 2.0), 2)
    assert (verdict, coordinator.decided(1)) == (CLOSE, (0, 1, 2))


def test_what_a_replica_that_leaves_has_begun_may_count_and_it_begins_nothing_more() -> None:
    coordinator = Coordinator.start(FirstOf(2), 3, 2, allowed=9)
    for replica in range(2):
        coordinator = coordinator.ready(replica, 9, 0.0)
    coordinator = coordinator.left(1).left(2)
    assert (coordinator.spent, coordinator.stuck()) == ((1, 1, 0), None)
    assert coordinator.left(0).left(1).stuck() is None, "both have begun"
    coordinator, verdict = whole(whole(coordinator, 1)[0], 0)
    assert (verdict, coordinator.decided(0)) == (CLOSE, (0, 1))
    after = applied(coordinator)
    assert after.ready(1, 9, 0.0) == after
    assert (after.spent, after.begun(0), after.begun(1)) == ((2, 1, 0), 2, 0)
    assert coordinator.lost(1).decided(0) == (0, 1)
    assert started(0, 1).left(1).lost(1).standing[1] is Standing.LOST


def test_too_few_replicas_are_stuck_where_they_come_and_go() -> None:
    coordinator = Coordinator.start(AllOf(), 3, 1, allowed=9, floor=2).lost(0).lost(2)
    assert coordinator.stuck() == Stuck(0, 2, (1,), (), (0, 2), ())
    assert coordinator.joined(0).stuck() == Stuck(0, 2, (1,), (), (0, 2), ()), "in that version it is gone"


def test_a_server_hands_out_the_set_once_in_replica_order() -> None:
    shard = shard_with("a", "b", "c")
    taken, updates = shard.take(0, (2, 0))
    assert updates == ("a", "c")
    assert taken.take(0, (0, 2)) == (taken, None)
    after = taken.applied(0)
    assert after == shard_with(None, None, None, version=1)
    assert after.take(0, (0, 2)) == (after, None)


def test_an_apply_that_failed_is_taken_again_and_counted_once() -> None:
    shard = shard_with("a", "b")
    taken, _ = shard.take(0, (0, 1))
    again, updates = taken.give_back(0).take(0, (0, 1))
    assert updates == ("a", "b")
    assert again.applied(0).statistics().applied == 1
    for done in (shard.applied, shard.give_back, taken.applied(0).applied):
        with pytest.raises(InternalError, match="but not taken"):
            done(0)


def test_a_server_holds_the_first_push_and_drops_what_follows() -> None:
    shard: Shard[str] = Shard.start(3, version=1)
    assert shard.counts == ShardStatistics(1, 0, 0, 0, 0, (0, 0, 0))
    shard, first = shard.hold(1, 0, "a", True)
    shard, again = shard.hold(1, 0, "other", True)
    shard, late = shard.hold(0, 1, "old", True)
    assert (first, again, late) == (HELD, REPEAT, LATE)
    assert shard == shard_with("a", None, None, version=1)
    shard, _ = shard.take(1, (0,))
    assert shard.hold(1, 2, "c", True)[1] is LATE
    assert shard.hold(1, 0, "a", True)[1] is REPEAT
    counts = shard.statistics()
    assert (counts.buffered, counts.repeats, counts.late) == (1, 1, 1)


def test_a_server_refuses_and_attributes_what_is_not_finite() -> None:
    shard: Shard[str] = Shard.start(2)
    shard, first = shard.hold(0, 1, "nan", False)
    shard, again = shard.hold(0, 1, "fine now", True)
    assert (first, again) == (REFUSED, REFUSED)
    assert shard.held == (None, None)
    assert shard.statistics().refused == (0, 1)
    with pytest.raises(InternalError, match="replica 1 is in the set, its update is not held here"):
        shard.take(0, (1,))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_server_that_is_told_of_updates_together_holds_what_it_would_one_by_one(staleness: int, seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    shard: Shard[str] = Shard.start(4, 3, staleness)
    untold = Untold(shard)
    fresh = 0
    for number in range(400):
        version, replica, finite = shard.version - draw.choice((0, 0, 0, 1, 2)), draw.randrange(4), draw.random() < 0.9
        update = f"update {number}"
        if draw.random() < 0.02:
            with pytest.raises(InternalError, match="this server is at"):
                untold.expects(shard.version + 1, replica)
        assert untold.expects(version, replica) == shard.expects(version, replica)
        if shard.expects(version, replica):
            shard, verdict = shard.keep(version, replica, update, finite)
            assert untold.keep(version, replica, update, finite) is verdict
        fresh += untold.of != shard
        if draw.random() < 0.2:
            assert untold.told() == shard
            assert untold.of is untold.told()
        held = [r for r in range(4) if shard.held[r] is not None]
        if draw.random() < 0.3 and held and shard.taken is None:
            shard, updates = shard.take(shard.version, tuple(held), [shard.computed[r] for r in held])
            untold.of, same = untold.told().take(shard.version, tuple(held), [shard.computed[r] for r in held])
            assert updates == same
        elif shard.taken is not None and draw.random() < 0.5:
            shard, untold.of = shard.applied(shard.version), untold.told().applied(shard.version)
    assert untold.told() == shard
    assert untold.told().statistics() == shard.statistics()
    assert fresh
    assert shard.version > 10


def test_a_replica_that_was_refused_is_heard_again_in_the_next_version() -> None:
    shard = shard_with(None, "b")
    shard, verdict = shard.hold(0, 0, "nan", False)
    assert verdict is REFUSED
    after = shard.take(0, (1,))[0].applied(0)
    assert after == shard_with(None, None, version=1)
    shard, verdict = after.hold(1, 0, "fine now", True)
    assert verdict is HELD
    assert shard.statistics().refused == (1, 0)


def test_a_server_raises_for_a_version_it_has_not_published() -> None:
    shard: Shard[str] = Shard.start(2)
    with pytest.raises(InternalError, match="replica 0 pushed version 1, this server is at 0"):
        shard.hold(1, 0, "a", True)
    with pytest.raises(InternalError, match="version 1 is to be applied, this server is at 0"):
        shard.take(1, (0,))
    with pytest.raises(InternalError, match="replica 2, expected 0 to 1"):
        shard.hold(0, 2, "a", True)


# The book of batches.


def test_a_batch_is_spent_once_and_in_order() -> None:
    book = Book.start(2)
    assert not book.waits(0)
    with pytest.raises(InternalError, match="replica 0 is to begin, its 0 batches are spent"):
        book.spend(0)
    book = book.give(0, 2)
    assert book == Book(given=(2, 0), spent=(0, 0))
    assert (book.give(0, 1), book.give(0, 2)) == (book, book)
    assert (book.waits(0), book.waits(1)) == (True, False)
    book = book.give(1, 1).spend(0, 1)
    assert book == Book(given=(2, 1), spent=(1, 1))
    assert (book.waits(0), book.waits(1)) == (True, False)
    assert not book.spend(0).waits(0)


def test_a_replica_expects_batches_until_the_last_is_spent() -> None:
    book = Book.start(2)
    assert book.expects(0)
    book = book.exhausted((1, 0))
    assert (book.expects(0), book.expects(1)) == (True, False)
    assert not book.give(0, 1).spend(0).expects(0)
    more = book.exhausted((0, 2))
    assert more.totals == (1, 2)
    with pytest.raises(InternalError, match="the batches of 3 replicas are counted, expected 2"):
        book.exhausted((1, 1, 1))


def test_what_a_replica_had_is_gone_with_it_and_its_place_in_the_count_is_not() -> None:
    book = Book.start(1).give(0, 3).spend(0).withdraw(0)
    assert book == Book(given=(1,), spent=(1,))
    assert book.expects(0)
    assert book.give(0, 2).waits(0)


# The coordinator.


def started(*replicas: int, of: int = 3, policy: Policy = TWO, servers: int = 2, **settings: int) -> Coordinator:
    """A coordinator of which these replicas have begun version 0, each with its only batch."""
    coordinator = Coordinator.start(policy, of, servers, **{"allowed": 9, **settings})
    for replica in replicas:
        coordinator = coordinator.ready(replica, 1, 0.0)
        assert coordinator.begun(replica) == 1
    return coordinator


def whole(coordinator: Coordinator, replica: int, now: float = 0.0) -> tuple[Coordinator, Verdict]:
    verdict = LATE
    for server in range(coordinator.servers):
        coordinator, verdict = coordinator.held(server, coordinator.version, replica, True, now)
    return coordinator, verdict


def closed(coordinator: Coordinator, *replicas: int, now: float = 0.0) -> Coordinator:
    """The updates of these replicas are whole; they are what its quorum needs."""
    verdict = LATE
    for replica in replicas:
        coordinator, verdict = whole(coordinator, replica, now)
    assert verdict is CLOSE
    return coordinator


def applied(coordinator: Coordinator) -> Coordinator:
    """The set is ordered, and every server has applied it."""
    coordinator, chosen = coordinator.order(0.0)
    assert chosen is not None
    version = coordinator.version
    for server in range(coordinator.servers):
        coordinator = coordinator.publish(server, version, 0.0)
    return coordinator


def test_a_replica_counts_once_every_server_holds_its_update() -> None:
    coordinator = started(0, 1, 2)
    coordinator, first = coordinator.held(1, 0, 2, True, 0.0)
    assert first is HELD
    assert coordinator.held(1, 0, 2, True, 0.0) == (coordinator, REPEAT)
    coordinator, second = coordinator.held(0, 0, 2, True, 0.0)
    assert second is OFFERED
    assert coordinator.held(0, 0, 2, True, 0.0) == (coordinator, REPEAT)
    assert coordinator.decided(0) is None
    coordinator, verdict = whole(coordinator, 0, now=4.0)
    assert verdict is CLOSE
    assert coordinator.decided(0) == (0, 2)
    assert coordinator.held(0, 0, 1, True, 5.0) == (coordinator, LATE)
    assert coordinator.receipts(0) is None
    assert applied(coordinator).history == (
        AppliedVersion(
            0, (0, 2), (Receipt(0, 1, Outcome.KEPT), Receipt(1, 1, Outcome.LATE), Receipt(2, 1, Outcome.KEPT)), 4.0
        ),
    )


def test_the_next_version_opens_when_every_server_has_applied() -> None:
    coordinator = closed(started(0, 1), 0, 1)
    with pytest.raises(InternalError, match="server 0 published version 0, which was not ordered"):
        coordinator.publish(0, 0, 0.0)
    half = coordinator.order(0.0)[0].publish(1, 0, 0.0)
    assert (half.version, half.publish(1, 0, 0.0), half.receipts(0)) == (0, half, None)
    opened = half.publish(0, 0, 0.0)
    assert opened.receipts(0) == (Receipt(0, 1, Outcome.KEPT), Receipt(1, 1, Outcome.KEPT))
    fresh = Coordinator.start(FirstOf(2), 3, 2, version=1, allowed=9)
    assert replace(opened, history=(), book=fresh.book) == fresh
    assert opened.publish(0, 0, 0.0) == opened
    assert opened.held(0, 0, 2, True, 0.0) == (opened, LATE)


def test_a_set_is_ordered_once_and_only_as_far_as_was_allowed() -> None:
    coordinator = Coordinator.start(FirstOf(1), 1, 1, version=3)
    assert coordinator.allow(2).order(0.0) == (coordinator, None)
    coordinator = coordinator.allow(4)
    assert coordinator.order(0.0) == (coordinator, None)
    coordinator = closed(coordinator, 0)
    assert coordinator.settled
    ordered, chosen = coordinator.order(0.0)
    assert chosen == (0,)
    assert not ordered.settled
    assert ordered.order(0.0) == (ordered, None)
    opened = ordered.publish(0, 3, 0.0)
    assert opened.settled
    ahead = closed(opened, 0)
    assert ahead.order(0.0) == (ahead, None)
    assert ahead.allow(5).order(0.0)[1] == (0,)


def test_a_run_that_closes_applies_what_was_ordered_and_nothing_else() -> None:
    coordinator = closed(started(0, 1, 2).ready(2, 2, 0.0), 0, 1)
    assert coordinator.close().order(0.0) == (coordinator.close(), None)
    closing = coordinator.order(0.0)[0].close()
    assert not closing.settled
    done = closing.publish(0, 0, 0.0).publish(1, 0, 0.0)
    assert (done.version, done.settled, done.begun(2)) == (1, True, 0)
    assert done.receipts(0) is not None
    assert done.ready(0, 2, 0.0).begun(0) == 0
    assert done.held(0, 1, 2, True, 0.0) == (done, LATE)


def test_only_the_last_versions_are_remembered() -> None:
    coordinator = Coordinator.start(FirstOf(1), 2, 1, allowed=9, remember=2)
    for version in range(5):
        coordinator = applied(closed(coordinator, version % 2))
    assert [ledger.version for ledger in coordinator.history] == [3, 4]
    assert (coordinator.decided(4), coordinator.decided(5)) == ((0,), None)
    with pytest.raises(InternalError, match="version 2 is forgotten: 2 before 5 are remembered"):
        coordinator.decided(2)
    with pytest.raises(InternalError, match="version 6 is not open yet, the newest is 5"):
        coordinator.receipts(6)
    forgetful = applied(closed(Coordinator.start(FirstOf(1), 1, 1, allowed=1, remember=0), 0))
    assert (forgetful.history, forgetful.decided(1)) == ((), None)


def test_an_update_that_is_not_finite_on_one_server_counts_on_none() -> None:
    coordinator, _ = started(0, 1, 2).held(0, 0, 1, True, 0.0)
    coordinator, verdict = coordinator.held(1, 0, 1, False, 0.0)
    assert verdict is REFUSED
    assert coordinator.held(1, 0, 1, True, 0.0) == (coordinator, REFUSED)
    coordinator = closed(coordinator, 0, 2)
    assert coordinator.decided(0) == (0, 2)
    receipts = applied(coordinator).receipts(0)
    assert receipts is not None
    assert [receipt.outcome for receipt in receipts] == [Outcome.KEPT, Outcome.REFUSED, Outcome.KEPT]


def test_a_lost_replica_counts_only_if_its_update_was_whole() -> None:
    coordinator, _ = whole(started(0, 1, of=4), 0)
    coordinator, _ = coordinator.held(0, 0, 1, True, 0.0)
    coordinator = coordinator.lost(0).lost(1).lost(2)
    assert coordinator.standing == (Standing.WHOLE, Standing.LOST, Standing.ABSENT, Standing.IDLE)
    assert coordinator.held(1, 0, 1, True, 0.0) == (coordinator, LATE)
    assert coordinator.ready(2, 1, 0.0) == coordinator
    back = coordinator.joined(1)
    assert back.held(1, 0, 1, True, 0.0) == (back, LATE)
    assert [back.begun(replica) for replica in range(4)] == [1, 0, 0, 0]
    back = closed(back.ready(1, 2, 0.0), 3)
    assert back.decided(0) == (0, 3)
    opened = applied(back)
    assert [opened.begun(replica) for replica in range(4)] == [0, 2, 0, 0]
    assert opened.held(0, 1, 0, True, 0.0) == (opened, LATE)
    assert opened.receipts(0) == (
        Receipt(0, 1, Outcome.KEPT),
        Receipt(1, 1, Outcome.LOST),
        Receipt(3, 1, Outcome.KEPT),
    )


def test_a_replica_that_is_lost_after_the_set_was_fixed_has_its_receipt_as_it_stood() -> None:
    coordinator = closed(started(0, 1, 2).ready(2, 2, 0.0), 0, 1).lost(2)
    opened = applied(coordinator)
    receipts = opened.receipts(0)
    assert receipts is not None
    assert receipts[2] == Receipt(2, 1, Outcome.LATE)
    assert opened.begun(2) == 0
    assert opened.joined(2).ready(2, 2, 0.0).begun(2) == 2


def test_every_replica_that_has_a_batch_begins_with_the_version() -> None:
    coordinator = closed(started(0, 1).ready(0, 3, 0.0), 0, 1)
    waiting = coordinator.ready(2, 1, 0.0)
    assert waiting.begun(2) == 0
    opened = applied(waiting)
    assert [opened.begun(replica) for replica in range(3)] == [2, 0, 1]
    assert opened.spent == (2, 1, 1)
    assert opened.ready(0, 2, 0.0) == opened
    assert opened.ready(1, 2, 0.0).begun(1) == 2


def test_an_update_begins_its_version_where_it_comes_before_the_announcement() -> None:
    coordinator, verdict = started(0).held(1, 0, 2, True, 0.0)
    assert (verdict, coordinator.begun(2), coordinator.spent) == (HELD, 1, (1, 0, 1))
    assert coordinator.ready(2, 1, 0.0) == coordinator
    refused, verdict = started(0).held(1, 0, 2, False, 0.0)
    assert (verdict, refused.begun(2)) == (REFUSED, 1)


def test_a_version_that_can_never_close_says_why_and_may_be_abandoned() -> None:
    coordinator, _ = whole(started(0, 1, 2, policy=AllOf()), 0)
    with pytest.raises(InternalError, match="it is decided or may still be"):
        coordinator.abandon(0.0)
    coordinator, _ = coordinator.held(1, 0, 1, False, 0.0)
    coordinator = coordinator.lost(2)
    stuck = coordinator.stuck()
    assert stuck == Stuck(0, needed=3, able=(0,), refused=(1,), lost=(2,), exhausted=())
    assert str(stuck) == (
        "version 0 needs 3 updates, only 1 can come: replicas lost [2], updates not finite [1], left [0]"
    )
    nodes = [f"/job:worker/task:{task}" for task in range(3)]
    assert stuck.told(nodes) == f"{stuck}; replica 1 is {nodes[1]}, replica 2 is {nodes[2]}"
    assert stuck.told(["", nodes[1], ""]) == f"{stuck}; replica 1 is {nodes[1]}", "one has no node yet"
    assert stuck.told([""] * 3) == str(stuck)
    given_up = coordinator.abandon(9.0)
    assert given_up.stuck() is None
    assert given_up.decided(0) == ()
    assert given_up.order(0.0)[1] == ()
    assert applied(given_up).receipts(0) == (
        Receipt(0, 1, Outcome.ABANDONED),
        Receipt(1, 1, Outcome.REFUSED),
        Receipt(2, 1, Outcome.LOST),
    )
    assert shard_with("a", None).take(0, ())[1] == ()


def test_first_of_m_is_not_stuck_while_m_remain() -> None:
    coordinator = started(0, 1, of=4).lost(0).lost(3)
    assert coordinator.stuck() is None
    stuck = coordinator.lost(1).stuck()
    assert stuck == Stuck(0, needed=2, able=(2,), refused=(), lost=(0, 1, 3), exhausted=())
    assert stuck.cause is Cause.LOST


def test_a_version_is_stuck_when_too_few_replicas_can_still_have_a_batch() -> None:
    coordinator = started(0, 1).exhausted((1, 1, 1))
    assert coordinator.stuck() is None
    opened = applied(closed(coordinator, 0, 1))
    stuck = opened.stuck()
    assert stuck == Stuck(1, needed=2, able=(2,), refused=(), lost=(), exhausted=(0, 1))
    assert stuck.cause is Cause.EXHAUSTED
    assert str(stuck) == (
        "version 1 needs 2 updates, only 1 can come: "
        "replicas lost [], updates not finite [], out of batches [0, 1], left [2]"
    )
    assert opened.exhausted((1, 2, 1)).stuck() is None


@pytest.mark.parametrize(
    ("able", "refused", "exhausted", "lost", "cause"),
    [
        ((0, 1, 2), (3,), (), (), Cause.REFUSED),
        ((0,), (1,), (2,), (3,), Cause.EXHAUSTED),
        ((0, 1), (), (2, 3), (), Cause.EXHAUSTED),
        ((0, 1), (), (), (2, 3), Cause.LOST),
        ((0,), (1,), (), (2, 3), Cause.LOST),
    ],
)
def test_why_a_version_is_stuck_tells_what_was_refused_from_the_end_of_the_batches_and_from_losses(
    able: tuple[int, ...], refused: tuple[int, ...], exhausted: tuple[int, ...], lost: tuple[int, ...], cause: Cause
) -> None:
    needed = 4 if able == (0, 1, 2) else 3
    assert Stuck(0, needed, able, refused, lost, exhausted).cause is cause


def test_what_does_not_exist_is_an_error() -> None:
    coordinator = started(0)
    with pytest.raises(InternalError, match="version 1 is not open yet"):
        coordinator.held(0, 1, 0, True, 0.0)
    for report in (lambda: coordinator.held(2, 0, 0, True, 0.0), lambda: coordinator.order(0.0)[0].publish(2, 0, 0.0)):
        with pytest.raises(InternalError, match="server 2 does not exist"):
            report()
    with pytest.raises(InternalError, match="version 1 is not open yet"):
        coordinator.publish(0, 1, 0.0)
    for event in (
        coordinator.lost,
        coordinator.joined,
        coordinator.begun,
        lambda replica: coordinator.ready(replica, 1, 0.0),
    ):
        with pytest.raises(InternalError, match="replica 3 does not exist"):
            event(3)
    with pytest.raises(GraphError, match="at least 1 server"):
        Coordinator.start(AllOf(), 1, 0)


def test_where_nobody_is_there_yet_all_that_are_needed_are_waited_for() -> None:
    alone = Quorum.start(AllOf(), 3, floor=2, there=0)
    assert (alone.there, alone.least) == (0, 2)
    assert Quorum.start(AllOf(), 3, floor=2).there == 3


@dataclass(frozen=True)
class Noting(Policy):
    """Keeps the first update, and what it is told of versions."""

    records: tuple[Record, ...] = ()

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close:
        return Close((offers[0].replica,))

    def after(self, record: Record) -> Policy:
        return Noting((*self.records, record))


def test_a_record_has_the_squares_of_all_servers_and_no_time_in_which_the_client_was_awaited() -> None:
    coordinator = Coordinator.start(Noting(), 2, 2, now=10.0, allowed=0)
    for server in (0, 1):
        coordinator, _ = coordinator.held(server, 0, 1, True, 11.0)
    assert coordinator.order(11.0)[1] is None
    coordinator, ordered = coordinator.allow(1).order(15.0)
    assert ordered == (1,)
    coordinator = coordinator.publish(0, 0, 15.5, square=2.0).publish(1, 0, 16.0, square=3.0)
    assert isinstance(coordinator.quorum.policy, Noting)
    (record,) = coordinator.quorum.policy.records
    assert (record.square, record.closed, record.seconds) == (5.0, 1.0, 2.0)
