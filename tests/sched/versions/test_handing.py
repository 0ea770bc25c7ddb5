"""What `Handing` hands out, over random histories of replicas that use, lose and join."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from flowrt.base.errors import InternalError
from flowrt.sched.versions.handing import Handing


def all_of(handing: Handing) -> list[tuple[int, int, int]]:
    """What it hands out until nobody may have more."""
    return list(iter(handing.next, None))


def test_replicas_have_batches_in_turn_each_so_many_beyond_what_it_has_spent() -> None:
    handing = Handing(2, 2)
    assert all_of(handing) == [(0, 1, 0), (1, 1, 1), (0, 2, 2), (1, 2, 3)]
    assert handing.spend(1, 1) == [1]
    assert all_of(handing) == [(1, 3, 4)]
    assert handing.held(1) == {2: 3, 3: 4}
    assert handing.open == [0, 2, 3, 4]


def test_a_turn_begins_with_whoever_follows_the_one_that_was_served_last() -> None:
    handing = Handing(3, 1)
    assert [handing.next(), handing.next()] == [(0, 1, 0), (1, 1, 1)]
    handing.spend(0, 1)
    assert [handing.next(), handing.next()] == [(2, 1, 2), (0, 2, 3)]


def test_whoever_has_spent_some_is_handed_as_many_unless_it_is_excused() -> None:
    handing = Handing(2, 4)
    assert len(all_of(handing)) == 8
    assert all_of(handing) == []
    handing.spend(1, 2)
    assert all_of(handing) == [(1, 5, 8), (1, 6, 9)]
    handing.excuse(0)
    handing.spend(0, 3)
    assert all_of(handing) == []
    handing.include(0)
    assert all_of(handing) == [(0, 5, 10), (0, 6, 11), (0, 7, 12)]


def test_somebody_lacks_batches_who_may_have_one_and_holds_fewer_than_enough() -> None:
    handing = Handing(2, 3)
    assert handing.lacks(1)
    all_of(handing)
    assert not handing.lacks(3)
    assert handing.lacks(4)
    handing.spend(1, 2)
    assert (handing.lacks(1), handing.lacks(2)) == (False, True)
    handing.excuse(1)
    assert not handing.lacks(2)


def test_what_a_lost_replica_had_not_spent_comes_back_once_that_is_known_and_goes_before_new_ones() -> None:
    handing = Handing(2, 3)
    all_of(handing)
    handing.lose(0)
    handing.spend(1, 2)
    assert handing.next() == (1, 4, 6)
    assert handing.confirm_lost(0, 1) == [2, 4]
    assert handing.confirm_lost(0, 0) == []
    assert handing.next() == (1, 5, 2)
    handing.join(0, 3)
    assert handing.next() == (0, 4, 4)
    assert handing.next() == (0, 5, 7)
    assert handing.spend(0, 1) == [0]  # the receipt of what the lost one had spent


def test_a_replica_does_not_join_while_it_is_not_known_what_the_lost_one_had_spent() -> None:
    handing = Handing(1, 3)
    all_of(handing)
    handing.lose(0)
    with pytest.raises(InternalError, match="replica 0 joins after batch 3: it was handed 3, and it is not known"):
        handing.join(0, 3)
    handing.confirm_lost(0, 0)
    with pytest.raises(InternalError, match="joins after batch 2: it was handed 3"):
        handing.join(0, 2)


def test_who_is_excused_or_leaves_keeps_what_it_has_and_is_handed_nothing() -> None:
    handing = Handing(3, 1)
    handing.excuse(0)
    handing.leave(1)
    assert all_of(handing) == [(2, 1, 0)]
    handing.include(0)
    assert all_of(handing) == [(0, 1, 1)]
    handing.excuse(0)
    assert handing.held(0) == {1: 1}


def test_it_is_over_when_nothing_is_left_and_nothing_is_in_doubt() -> None:
    handing = Handing(2, 2, total=3)
    assert all_of(handing) == [(0, 1, 0), (1, 1, 1), (0, 2, 2)]
    assert handing.over
    handing.lose(0)
    assert not handing.over
    assert handing.confirm_lost(0, 1) == [2]
    assert not handing.over
    assert all_of(handing) == [(1, 2, 2)]
    assert handing.over
    handing.requeue(*handing.spend(1, 1))
    assert not handing.over
    assert all_of(handing) == [(1, 3, 1)]


def test_it_goes_on_counting_and_another_run_begins_with_what_is_not_accounted_for() -> None:
    handing = Handing(2, 2, first=100, returned=[7, 3])
    assert all_of(handing) == [(0, 1, 3), (1, 1, 7), (0, 2, 100), (1, 2, 101)]
    handing.spend(0, 1)
    handing.lose(1)
    handing.begin_again()
    assert handing.given == [0, 0]
    assert all_of(handing) == [(0, 1, 7), (1, 1, 100), (0, 2, 101), (1, 2, 102)]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_a_batch_is_with_one_replica_at_a_time_and_none_vanishes(seed: int) -> None:
    rng = random.Random(seed)
    replicas, depth, total = rng.randint(1, 5), rng.randint(1, 4), rng.choice([None, rng.randint(0, 60)])
    handing = Handing(replicas, depth, total=total)
    drawn: set[int] = set()
    used: Counter[int] = Counter()  # how often each batch was used
    requeued: Counter[int] = Counter()
    booked, said = [0] * replicas, [0] * replicas  # by replica: what it has spent, and what was said of that
    gone: set[int] = set()

    def receipts(replica: int) -> None:
        while said[replica] < booked[replica]:
            said[replica] += 1
            spent = handing.spend(replica, said[replica])
            used.update(spent)
            if rng.random() < 0.2:
                handing.requeue(*spent)
                requeued.update(spent)

    for _ in range(200):
        replica, before = rng.randrange(replicas), list(handing.given)
        match rng.choice(["hand", "hand", "use", "use", "lose", "confirm", "join", "run"]):
            case "hand":
                for receiver, number, identity in all_of(handing):
                    before[receiver] += 1
                    assert number == before[receiver]
                    assert receiver not in gone
                    drawn.add(identity)
            case "use" if replica not in gone:
                booked[replica] = rng.randint(booked[replica], handing.given[replica])
                receipts(replica)
            case "use":
                receipts(replica)
            case "lose" if replica not in gone:
                booked[replica] = rng.randint(booked[replica], handing.given[replica])  # of which nothing is said yet
                gone.add(replica)
                handing.lose(replica)
            case "confirm" if replica in gone:
                handing.confirm_lost(replica, booked[replica])
            case "join" if replica in gone:
                handing.confirm_lost(replica, booked[replica])
                receipts(replica)
                number = handing.given[replica] + rng.randint(0, 2)
                handing.join(replica, number)
                booked[replica] = said[replica] = number
                gone.discard(replica)
            case "run" if rng.random() < 0.1:
                for each in range(replicas):
                    receipts(each)
                handing.begin_again()
                gone.clear()
                booked[:] = said[:] = [0] * replicas
        assert drawn == set(range(handing.new))
        assert len(handing.open) == len(set(handing.open))
        for identity in drawn:
            assert used[identity] + (identity in handing.open) == 1 + requeued[identity]
        assert all(given - spent <= depth for given, spent in zip(handing.given, handing.spent, strict=True))
        assert total is None or handing.new <= total
