"""A link between two tasks: nothing large is sent before there is room for it, whoever else has taken the room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from wire_world import on_both_loops, pair

from flowrt.base.errors import LinkBroken, ResourceError
from flowrt.base.spec import Spec
from flowrt.net.link import SMALL, Allowance, LinkStore, TensorLink
from flowrt.net.wire.frames import allocate_array
from flowrt.net.wire.messages import Announce, Forget, Grant, Pull, TooLarge, to_frame
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.rendezvous import Announced, Budget, Rendezvous

if TYPE_CHECKING:
    from flowrt.base.codec import Allocate

KEY = ("epoch", 1)
KIB = 1 << 10
BUDGET = 64 * KIB


def store(allowance: int = 0, allocate: Allocate = allocate_array) -> LinkStore:
    return LinkStore(Rendezvous(), Budget(BUDGET), Allowance(allowance), lambda epoch: True, allocate)


@asynccontextmanager
async def linked(here: LinkStore, there: LinkStore) -> AsyncIterator[TensorLink]:
    """This side of a link to a task whose values are in ``there``."""
    async with ends_of_a_link(here, there) as (link, _):
        yield link


@asynccontextmanager
async def ends_of_a_link(here: LinkStore, there: LinkStore) -> AsyncIterator[tuple[TensorLink, TensorLink]]:
    async with pair() as (mine, theirs), asyncio.TaskGroup() as tasks:
        ends = TensorLink(mine, "there", here), TensorLink(theirs, "here", there)
        for end in ends:
            tasks.create_task(end.run())
        await asyncio.sleep(0)
        try:
            yield ends
        finally:
            for end in ends:
                end.close()


def offer(there: LinkStore, sizes: dict[int, int]) -> None:
    there.rendezvous.open(KEY, {edge: np.full(size, edge, np.uint8) for edge, size in sizes.items()})


@on_both_loops
async def test_a_value_is_sent_when_there_is_room_for_it_and_not_before() -> None:
    for spec in (Spec("uint8", (BUDGET // 2,)), Spec("uint8", (None,))):
        here, there = store(), store()
        offer(there, {1: BUDGET // 2} | dict.fromkeys(range(2, 30), SMALL))
        async with linked(here, there) as link, asyncio.TaskGroup() as tasks:
            async with here.budget.reserve(BUDGET):
                pulling = tasks.create_task(link.pull(KEY, 1, spec))
                for edge in range(2, 30):  # behind it on the same link, and what is small needs no room
                    assert (await link.pull(KEY, edge, Spec("uint8", (SMALL,)))).size == SMALL
                assert not pulling.done()
                assert link._connection._stream.inbox_bytes == 0
                assert link._connection._stream.reader.idle
            assert (await pulling == 1).all()
            assert here.budget.used == 0


@on_both_loops
async def test_room_is_taken_until_the_value_has_come_and_its_grant_is_forgotten() -> None:
    here, there, used = store(), store(), list[int]()
    offer(there, {1: BUDGET})
    async with ends_of_a_link(here, there) as (link, other):
        settle = link._settle

        def note(message: Any) -> None:
            used.append(here.budget.used)
            settle(message)

        link._settle = note  # type: ignore[method-assign]
        assert (await link.pull(KEY, 1, Spec("uint8", (None,))) == 1).all()
        assert used == [0, BUDGET]  # as it is offered, and as it comes
        assert other._grants == {}


@on_both_loops
async def test_what_there_is_no_memory_for_is_not_sent_at_all() -> None:
    memory, said = Memory(limit=2 * BUDGET), []
    here, there = store(allocate=lambda dtype, shape: memory.empty(shape, dtype)), store()
    offer(there, {1: 4 * BUDGET, 2: BUDGET})
    async with linked(here, there) as link:
        post, spec = link.post, Spec("uint8", (None,))

        def note(message: Any) -> None:
            said.append(type(message))
            post(message)

        link.post = note  # type: ignore[method-assign]
        with pytest.raises(ResourceError, match=rf"edge 1 of there: no memory to receive uint8.*, {4 * BUDGET} bytes"):
            await link.pull(KEY, 1, spec)
        assert (await link.pull(KEY, 2, spec) == 2).all()
        assert said == [Pull, Forget, Pull, Grant] or said == [Pull, Pull, Forget, Grant]
        assert here.budget.used == 0


@on_both_loops
async def test_no_more_is_under_way_than_the_budget_has_on_all_links_together() -> None:
    """Each value is as large as the budget: one is received at a time, however many links there are."""
    here, expected = store(), []
    theirs = [store() for _ in range(3)]
    for there in theirs:
        offer(there, dict.fromkeys(range(4), BUDGET))
    reserve = here.budget._acquire

    async def note(share: int) -> None:
        await reserve(share)
        expected.append(here.budget.used)

    here.budget._acquire = note  # type: ignore[method-assign]
    async with (
        linked(here, theirs[0]) as a,
        linked(here, theirs[1]) as b,
        linked(here, theirs[2]) as c,
        asyncio.TaskGroup() as tasks,
    ):
        for link in (a, b, c):
            for edge in range(4):
                tasks.create_task(link.pull(KEY, edge, Spec("uint8", (None,))))
    assert expected == [BUDGET] * 12
    assert here.budget.used == 0


@on_both_loops
async def test_what_is_promised_ahead_is_bounded_too() -> None:
    here, there = store(allowance=BUDGET // 2), store()
    offer(there, dict.fromkeys(range(3), BUDGET // 2))
    spec = Spec("uint8", (BUDGET // 2,))
    async with linked(here, there) as link, asyncio.TaskGroup() as tasks:
        async with here.budget.reserve(BUDGET):
            first, *others = [tasks.create_task(link.pull(KEY, edge, spec)) for edge in range(3)]
            assert (await first == 0).all()
            there.rendezvous.open(("epoch", 2), {0: np.zeros(1, np.uint8)})
            await link.pull(("epoch", 2), 0, Spec("uint8", (1,)))
            assert not any(task.done() for task in others)
        for edge, task in enumerate(others, 1):
            assert (await task == edge).all()
    assert here.allowance.left == BUDGET // 2


@on_both_loops
async def test_what_is_asked_for_ahead_may_be_pushed_before_and_after_the_peers_part_is_over() -> None:
    spec, value, large = Spec("uint8", (None,)), np.ones(3, np.uint8), np.full(BUDGET, 2, np.uint8)
    here, there = store(allowance=2 * BUDGET), store()
    there.rendezvous.open(KEY)
    async with ends_of_a_link(here, there) as (link, other), asyncio.TaskGroup() as tasks:
        early, late, announced, given = (
            tasks.create_task(link.pull(KEY, edge, spec, expected=BUDGET + 8)) for edge in range(4)
        )
        here.rendezvous.arrive(KEY, 0, value)
        assert (await early == 1).all()
        there.rendezvous.open(("epoch", 2), {0: value, 1: value})
        assert (await link.pull(("epoch", 2), 0, spec) == 1).all()
        assert sorted(other._serving) == [1, 2, 3]  # the peer was told that the first came pushed
        here.rendezvous.arrive(KEY, 2, Announced(large.nbytes))  # on its way as we asked
        for edge in (2, 3):
            await there.rendezvous.send(KEY, edge, large)
        assert (await announced == 2).all()
        assert (await given == 2).all()
        there.rendezvous.close(KEY)  # what was pushed comes on another link, and may be behind the refusal
        assert (await link.pull(("epoch", 2), 1, spec) == 1).all()
        assert not late.done()
        here.rendezvous.arrive(KEY, 1, value)
        assert (await late == 1).all()
    assert (here.allowance.left, here.budget.used) == (2 * BUDGET, 0)
    assert not link._ahead


@on_both_loops
async def test_a_pull_that_was_given_up_lays_no_claim_to_what_comes_later() -> None:
    here, there = store(), store()
    offer(there, dict.fromkeys((1, 2), SMALL))
    async with linked(here, there) as link:
        given_up = asyncio.create_task(link.pull(KEY, 7, Spec("uint8", (8,))))
        await link.pull(KEY, 1, Spec("uint8", (SMALL,)))  # behind which it has asked
        given_up.cancel()
        await asyncio.wait([given_up])
        await link.pull(KEY, 2, Spec("uint8", (SMALL,)))
        again = asyncio.create_task(link.pull(KEY, 7, Spec("uint8", (8,))))
        await there.rendezvous.send(KEY, 7, np.full(8, 7, np.uint8))
        assert (await again == 7).all()


@on_both_loops
async def test_no_peer_has_more_pulls_unanswered_than_there_may_be() -> None:
    here, there = store(), store()
    offer(there, {1: SMALL})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrt.net.link.MAX_PULLS", 3)
        async with linked(here, there) as link, asyncio.TaskGroup() as tasks:

            def ask(edge: int) -> asyncio.Task[LinkBroken]:
                return tasks.create_task(failure_of(link.pull(KEY, edge, Spec("uint8", (8,)))))

            waiting = [ask(7), ask(8)]
            await link.pull(KEY, 1, Spec("uint8", (SMALL,)))  # one that is answered counts no more
            waiting += [ask(9), ask(10)]
            for each in waiting:
                assert "broke" in str(await each)


@on_both_loops
async def test_a_value_of_fewer_bytes_than_none_breaks_the_link_and_takes_no_room() -> None:
    for said in (TooLarge(0, -1), Announce(*KEY, 1, -1)):
        here = store()
        async with pair() as (mine, theirs), asyncio.TaskGroup() as tasks:
            link = TensorLink(mine, "there", here)
            tasks.create_task(link.run())
            pulling = tasks.create_task(failure_of(link.pull(KEY, 1, Spec("uint8", (None,)))))
            await theirs.receive()
            theirs.post_frame(to_frame(said))
            assert "has a value of -1 bytes" in str(await pulling)
        assert here.budget.used == 0


async def failure_of(work: Awaitable[Any]) -> LinkBroken:
    with pytest.raises(LinkBroken) as caught:
        await work
    return caught.value
