from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from session_world import cancel_everywhere

from flowrt.base.errors import ResourceError, StepCancelled
from flowrt.sched.host import rendezvous as rendezvous_module
from flowrt.sched.host.rendezvous import DEAD, REMEMBERED_STEPS, Announced, Budget, Listeners, Rendezvous, Waiter

KEY = ("epoch", 1)
VALUE = np.float32([1, 2])


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_value_waits_for_its_taker_and_a_taker_for_its_value() -> None:
    meet = Rendezvous()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        sent = group.create_task(meet.send(KEY, 7, VALUE))
        await settled()
        assert meet.holds(KEY, 7)
        assert not sent.done()
        assert await meet.take(KEY, 7) is VALUE
        taken = group.create_task(meet.take(KEY, 8))
        await settled()
        assert not meet.holds(KEY, 8)
        await meet.send(KEY, 8, DEAD)
    assert taken.result() is DEAD
    assert meet.open_steps == 1
    meet.close(KEY)
    meet.close(KEY)
    assert meet.open_steps == 0


async def test_values_that_come_with_the_start_are_there_at_once() -> None:
    meet = Rendezvous()
    early = asyncio.ensure_future(meet.take(KEY, 1))
    await settled()
    meet.open(KEY, {1: VALUE, 2: VALUE})
    assert await early is VALUE
    assert meet.holds(KEY, 2)
    assert await meet.take(KEY, 2) is VALUE
    assert not meet.holds(KEY, 2)


async def test_closing_a_step_ends_all_who_wait_on_it_and_it_never_returns() -> None:
    meet = Rendezvous()
    waiting = [asyncio.ensure_future(meet.take(KEY, 1)), asyncio.ensure_future(meet.send(KEY, 2, VALUE))]
    other = asyncio.ensure_future(meet.take(("epoch", 2), 1))
    await settled()
    meet.close(KEY)
    for task in waiting:
        with pytest.raises(StepCancelled, match="step 1 has ended"):
            await task
    for late in (meet.take(KEY, 3), meet.send(KEY, 3, VALUE)):
        with pytest.raises(StepCancelled):
            await late
    assert not other.done()
    meet.close_epoch("epoch")
    with pytest.raises(StepCancelled, match="step 2"):
        await other
    assert meet.open_steps == 0


async def test_a_step_ends_with_values_that_nobody_waits_on_and_takers_that_gave_up() -> None:
    meet = Rendezvous()
    meet.open(KEY, {1: VALUE})
    given_up = meet.expect(KEY, 2)
    given_up.cancel()
    meet.close(KEY)
    assert meet.open_steps == 0


async def test_a_bounded_number_of_ended_steps_is_remembered() -> None:
    meet = Rendezvous()
    for number in range(REMEMBERED_STEPS + 10):
        meet.close(("epoch", number))
    assert len(meet._closed) == REMEMBERED_STEPS
    meet.open(("epoch", 9))  # the oldest are forgotten
    with pytest.raises(StepCancelled, match=f"step {REMEMBERED_STEPS + 9}"):
        meet.open(("epoch", REMEMBERED_STEPS + 9))


async def test_a_cancelled_sender_takes_its_value_back_and_a_cancelled_taker_its_claim() -> None:
    meet = Rendezvous()
    sent = asyncio.ensure_future(meet.send(KEY, 1, VALUE))
    taken = asyncio.ensure_future(meet.take(KEY, 2))
    await settled()
    for task in (sent, taken):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not meet.holds(KEY, 1)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(meet.send(KEY, 2, VALUE))
        assert await meet.take(KEY, 2) is VALUE


async def test_a_step_that_never_began_ends_with_its_last_taker_and_one_that_did_goes_on() -> None:
    meet = Rendezvous()
    for begins in (False, True):
        taken = asyncio.ensure_future(meet.take(KEY, 1))
        await settled()
        if begins:
            meet.open(KEY)
        taken.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taken
        assert meet.open_steps == int(begins)


async def test_a_cancelled_taker_leaves_a_later_claim_alone() -> None:
    meet = Rendezvous()
    taken = asyncio.ensure_future(meet.take(KEY, 1))
    await settled()
    later = meet.expect(KEY, 1)
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken
    async with asyncio.timeout(5):
        await meet.send(KEY, 1, VALUE)
        assert await later is VALUE


async def test_cancelling_either_end_at_any_point_leaves_no_step_behind() -> None:
    number = 0
    meet = Rendezvous()

    async def step() -> None:
        nonlocal number
        number += 1
        key = ("epoch", number)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(meet.send(key, 1, VALUE))
                await asyncio.sleep(0)
                await meet.take(key, 1)
                group.create_task(meet.take(key, 2))
                await asyncio.sleep(0)
                await meet.send(key, 2, VALUE)
        finally:
            meet.close(key)

    def check() -> None:
        assert meet.open_steps == 0

    assert await cancel_everywhere(step, check) >= 2


# ── the budget ──


async def test_credit_is_given_in_the_order_it_was_asked_for() -> None:
    budget, order = Budget(10), []

    async def use(label: str, nbytes: int) -> None:
        async with budget.reserve(nbytes):
            order.append(label)
            await settled()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for label, nbytes in (("a", 6), ("b", 6), ("c", 1), ("huge", 1000), ("d", 10)):
            group.create_task(use(label, nbytes))
        await settled()
        assert order == ["a"]
        assert budget.used == 6
    assert order == ["a", "b", "c", "huge", "d"]
    assert budget.used == 0


async def test_a_cancelled_request_does_not_hold_up_those_behind_it() -> None:
    budget = Budget(10)
    done: list[int] = []

    async def use(nbytes: int) -> None:
        async with budget.reserve(nbytes):
            done.append(nbytes)

    async with budget.reserve(6):
        large, small = asyncio.ensure_future(use(8)), asyncio.ensure_future(use(2))
        await settled()
        assert done == []
        large.cancel()
        await small
        assert done == [2]
        with pytest.raises(asyncio.CancelledError):
            await large
    assert (budget.used, len(budget._waiting)) == (0, 0)


async def test_a_request_cancelled_as_room_is_made_gives_everything_back() -> None:
    budget = Budget(10)
    for turns in range(4):
        async with budget.reserve(6):
            waiting = asyncio.ensure_future(hold(budget, 8))
            await settled()
            waiting.cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (budget.used, len(budget._waiting)) == (0, 0)


async def hold(budget: Budget, nbytes: int) -> None:
    async with budget.reserve(nbytes):
        await asyncio.Event().wait()


@pytest.mark.parametrize("seed", range(20))
async def test_random_requests_and_cancellations_keep_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    budget = Budget(10)

    async def use() -> None:
        nbytes = rng.randint(0, 14)
        async with budget.reserve(nbytes):
            assert budget.used <= 10, seed
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.ensure_future(use()))
        await asyncio.sleep(0)
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(tasks)
    assert all(task.cancelled() or task.exception() is None for task in tasks), seed
    assert (budget.used, len(budget._waiting)) == (0, 0), seed


def test_values_that_are_gathered_stay_until_they_are_taken() -> None:
    meet = Rendezvous()
    told: list[object] = []
    meet.arrive(KEY, 1, VALUE)
    assert meet.here(KEY, (1,)) == [VALUE]
    assert meet.here(KEY, (2, 1)) is None
    meet.open(KEY)
    meet.gather(KEY, (2, 1, 3), Waiter(told.append))
    meet.arrive(KEY, 4, VALUE)
    meet.arrive(KEY, 3, DEAD)
    assert told == []
    meet.arrive(KEY, 2, Announced(9))
    assert told == [None]
    assert meet.here(KEY, (2, 1, 3)) == [Announced(9), VALUE, DEAD]
    assert meet.pick(KEY, 3) is DEAD
    meet.close(KEY)
    assert meet.here(KEY, (1,)) is None
    assert told == [None]


def test_who_gathers_is_told_that_the_step_has_ended() -> None:
    meet = Rendezvous()
    told: list[object] = []
    meet.open(KEY)
    meet.gather(KEY, (1, 2), Waiter(told.append))
    meet.arrive(KEY, 1, VALUE)
    meet.close(KEY)
    assert [str(each) for each in told] == ["step 1 has ended"]
    with pytest.raises(StepCancelled):
        meet.gather(KEY, (1,), Waiter(told.append))


async def test_a_value_that_was_pushed_is_taken_before_or_after_the_step_begins_but_not_after_it_ended() -> None:
    meet = Rendezvous()
    early = meet.expect(KEY, 1)
    for edge, value in enumerate((np.ones(2), DEAD, Announced(1 << 20), np.zeros(3)), 1):
        meet.arrive(KEY, edge, value)
    assert (await early == 1).all()
    meet.open(KEY)
    assert await meet.take(KEY, 2) is DEAD
    assert meet.pick(KEY, 3) == Announced(1 << 20)
    meet.close(KEY)
    meet.arrive(KEY, 5, np.ones(1))
    assert meet.open_steps == 0
    with pytest.raises(StepCancelled):
        meet.open(KEY)


async def test_an_error_that_comes_in_place_of_a_value_is_raised_where_it_is_taken() -> None:
    meet = Rendezvous()
    meet.open(KEY)
    taken = meet.expect(KEY, 1)
    for edge in (1, 2):
        meet.arrive(KEY, edge, ResourceError("full"))
    for taking in (taken, meet.take(KEY, 2)):
        with pytest.raises(ResourceError, match="full"):
            await taking


async def test_values_of_steps_that_do_not_begin_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "EARLY", 10)
    meet = Rendezvous()
    for number in range(6):
        for edge in range(3):
            meet.arrive(("epoch", number), edge, np.ones(1))
    assert meet._early_values <= 10
    with pytest.raises(ResourceError, match="step 0: more than 10 values"):
        meet.open(("epoch", 0))
    meet.open(("epoch", 5))
    assert all(meet.holds(("epoch", 5), edge) for edge in range(3))
    meet.close_epoch("epoch")
    assert (meet._early_values, meet.open_steps) == (0, 0)


class Listening:
    """Who notes all that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def hear(self, peer: str, message: Any) -> None:
        self.told.append((peer, message))

    def broken(self, peer: str, epoch: str) -> None:
        self.told.append((peer, epoch))

    def ended(self, epoch: str) -> None:
        self.told.append((epoch,))


def test_what_is_said_is_said_to_all_that_listen_then() -> None:
    listeners, one, other = Listeners(), Listening(), Listening()
    with listeners.listening(one):
        listeners.hear("a", "first")
        with listeners.listening(other):
            listeners.hear("a", "second")
            listeners.broken("b", "epoch")
            listeners.ended("epoch")
        listeners.hear("a", "third")
    listeners.hear("a", "fourth")
    assert other.told == [("a", "second"), ("b", "epoch"), ("epoch",)]
    assert one.told == [("a", "first"), *other.told, ("a", "third")]


def test_only_what_nobody_took_of_steps_that_have_not_begun_is_early() -> None:
    meet, other = Rendezvous(), ("epoch", 2)
    meet.wait(KEY, 1, Waiter(lambda value: None))
    meet.arrive(KEY, 1, VALUE)
    assert meet._early_values == 0, "it is taken at once"
    meet.arrive(KEY, 2, VALUE)
    meet.arrive(other, 2, VALUE)
    assert meet._early_values == 2
    meet.gather(KEY, (2, 3), Waiter(lambda value: None))
    assert meet._early_values == 1
    meet.open(("epoch", 3))
    for key in (KEY, ("epoch", 3)):
        meet.arrive(key, 4, VALUE)
    assert meet._early_values == 1, "of the other step"


def test_who_asks_whether_a_value_is_awaited_is_told_once_it_is() -> None:
    meet, told = Rendezvous(), list[str]()
    meet.open(KEY)
    taker = Waiter(lambda value: None)
    assert not meet.awaited(KEY, 1)
    meet.when_awaited(KEY, 1, lambda: told.append("awaited"))
    meet.wait(KEY, 2, Waiter(lambda value: None))
    assert not told
    meet.wait(KEY, 1, taker)
    assert told == ["awaited"]
    assert meet.awaited(KEY, 1)
    taker.withdraw()
    assert not meet.awaited(KEY, 1)
