"""Values that their sender pushes: what a step costs, what comes too early or never, and what breaks on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, WORKERS, Writer, chain, counter, echo, relay
from test_brief import read
from test_faults import TASKS, world

from flowrt.base.errors import LinkBroken, NodeLost
from flowrt.base.spec import Spec
from flowrt.net.link import SMALL, TensorLink
from flowrt.net.master.master import Master
from flowrt.net.stream.connection import Connection
from flowrt.net.wire.messages import Announce
from flowrt.net.wire.steps import Done, Push, Start
from flowrt.sched.executor import Executor
from flowrt.sched.host.shielded import EndedAnyway

SCALAR, OPEN = Spec("float64", ()), Spec("float64", (None,))
WORKER = WORKERS[0]
KEY = ("epoch", 1)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many messages of each kind are written meanwhile, on whatever connection, and how many tasks begin."""
    counts: Counter[str] = Counter()
    loop = asyncio.get_running_loop()

    def noting(say: Callable[..., Any]) -> Callable[..., Any]:
        def note(connection: Connection, framed: list[Any], *args: Any) -> Any:
            counts[type(read(framed)[0]).__name__] += 1
            return say(connection, framed, *args)

        return note

    def note_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        counts["tasks"] += 1
        return asyncio.Task(work, loop=loop, **options)

    with pytest.MonkeyPatch.context() as patch:
        for way in ("send_at_once", "send_frame", "post_frame"):
            patch.setattr(Connection, way, noting(getattr(Connection, way)))
        loop.set_task_factory(note_task)
        try:
            yield counts
        finally:
            loop.set_task_factory(None)
    for beat in ("Ping", "Pong"):
        counts.pop(beat, None)


async def test_a_repeated_step_of_two_nodes_takes_a_message_to_each_one_between_them_one_end_and_no_task() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, SCALAR))
        for _ in range(20):  # until its tapes are made and known to be short
            await made.run(step, 1.0)
        with counted() as counts:
            for number in range(5):
                assert (await made.run(step, number))[0] == 4 * number
        assert counts == {"Start": 10, "Push": 5, "Done": 5}
        await made.assert_well()


async def test_of_nodes_in_a_row_the_last_says_for_all_that_they_have_ended() -> None:
    tasks = (PS, *WORKERS)
    async with world(*tasks) as made:
        step = await made.master.register(**chain(*tasks, SCALAR))
        for _ in range(20):
            await made.run(step, 1.0)
        with counted() as counts:
            for number in range(5):
                assert (await made.run(step, number))[0] == 8 * number
        assert counts == {"Start": 15, "Push": 10, "Done": 5}
        await made.assert_well()


async def test_a_step_that_is_cancelled_after_silent_ends_is_whole_if_the_last_had_ended_it_too() -> None:
    tasks = (PS, *WORKERS)
    async with world(*tasks) as made:
        step = await made.master.register(**chain(*tasks, SCALAR))
        for _ in range(20):
            await made.run(step, 1.0)
        finish, late, answered = Master._finish, [], set()

        def hear_the_last_late(master: Master, open_step: Any, task: str, done: Done) -> None:
            if task == tasks[-1]:
                late.append((master, open_step, task, done))
                if len(late) == 1:
                    run.cancel()
                return
            finish(master, open_step, task, done)
            answered.add(task)
            if answered == {*tasks[:-1]}:
                for each in late:
                    finish(*each)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Master, "_finish", hear_the_last_late)
            run = asyncio.ensure_future(made.run(step, 2.0))
            with pytest.raises(EndedAnyway) as ended:
                await run
        assert ended.value.values[0] == 16.0
        await made.assert_well()


async def test_a_repeated_step_of_one_node_takes_a_message_each_way_and_no_machine() -> None:
    async with world() as made:
        step = await made.master.register(**echo(PS, SCALAR))
        for _ in range(20):
            await made.run(step, 1.0)
        with counted() as counts, pytest.MonkeyPatch.context() as patch:
            patch.delattr(Executor, "begin")
            for number in range(5):
                assert (await made.run(step, number))[0] == 2 * number
        assert counts == {"Start": 5, "Done": 5}
        await made.assert_well()


async def test_a_step_that_is_cancelled_and_ended_all_the_same_says_what_came_of_it() -> None:
    async with world() as made:
        wanted = await made.master.register(**echo(PS, SCALAR))
        counts = {name: await made.master.register(**step) for name, step in counter(PS, "ended").items()}
        await made.run(counts["assign"], np.zeros(3))

        async def outcome(step: Any, value: Any) -> Any:
            try:
                return await made.run(step, value)
            except EndedAnyway as ended:
                return ended.values
            except asyncio.CancelledError:
                return None

        async def cancelled(step: Any, value: Any, when: Callable[[asyncio.Task[Any]], Any]) -> Any:
            """What comes of a step whose task is cancelled then; it is whole, if it is not said to be cancelled."""
            (before,) = await made.run(counts["read"])
            running = asyncio.ensure_future(outcome(step, value))
            await asyncio.sleep(0)
            await when(running)
            came = await running
            (after,) = await made.run(counts["read"])
            whole = came == [42.0] if step is wanted else (after == before + 1).all()
            assert came is None or whole
            return came

        def after(turns: int) -> Callable[[asyncio.Task[Any]], Any]:
            async def when(running: asyncio.Task[Any]) -> None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                running.cancel()

            return when

        async def as_its_end_is_heard(running: asyncio.Task[Any]) -> None:
            finish = Master._finish
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Master, "_finish", lambda *heard: (finish(*heard), running.cancel()))
                await asyncio.wait([running])

        for step, value in ((wanted, 21.0), (counts["assign_add"], np.ones(3))):
            for turns in range(20):
                await cancelled(step, value, after(turns))
            assert await cancelled(step, value, as_its_end_is_heard) is not None
        await made.assert_well()


async def test_what_turns_out_small_is_pushed_and_large_is_announced_once_and_then_asked_for_ahead() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, OPEN))
        for size in (0, 3, SMALL // 8, SMALL // 8 + 1, 1 << 20):
            with counted() as counts:
                got = await made.run(step, np.full(size, 1.5))
            assert np.array_equal(got[0], np.full(size, 6.0))
            assert np.array_equal(got[1], np.full(size, 1.5))
            announced = 1 if size > SMALL else 2  # what comes back to the client is always
            ways = {"Push": 2} if 8 * size <= SMALL else {"Announce": announced, "Pull": 3, "Value": 3}
            assert {kind: counts[kind] for kind in ways} == ways
            assert counts["TooLarge"] >= (8 * size > SMALL)  # the client's feed, which is asked for ahead
        for size in (3, 1 << 20, 0, 600, 5, 3, 700, 700):  # asked for ahead, it may be small, and pushed all the same
            got = await made.run(step, np.full(size, 2.5))
            assert np.array_equal(got[0], np.full(size, 10.0))
        await made.assert_well()


async def test_what_is_announced_before_it_is_made_may_be_pushed_once_it_turns_out_small() -> None:
    push = TensorLink.push

    def announce_first(link: TensorLink, key: Any, edge: int, value: Any) -> bool:
        push(link, key, edge, None)
        return push(link, key, edge, value)

    async with world() as made:
        step = await made.master.register(**relay(*TASKS, OPEN))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorLink, "push", announce_first)
            for size in (3, 0, SMALL // 8, 1 << 14, 3):
                for _ in range(5):
                    got = await made.run(step, np.full(size, 1.5))
                    assert np.array_equal(got[0], np.full(size, 6.0))
        await made.assert_well()


def gather(sender: str, receiver: str, count: int) -> dict[str, Any]:
    """``sender`` sends many values that ``receiver`` passes on; beside one more, that it waits for."""
    a, b = Writer(sender), Writer(receiver)
    for edge in range(count):
        a.send(a.recv(edge, CLIENT, SCALAR), count + edge, receiver)
        b.send(b.recv(count + edge, sender, SCALAR), 2 * count + edge, CLIENT)
    return {
        "plans": {sender: a.plan(), receiver: b.plan()},
        "feeds": [[(edge, sender)] for edge in range(count)],
        "fetches": [(2 * count + edge, receiver) for edge in range(count)],
    }


def but_starts(at_once: Callable[[list[Any]], bool]) -> Callable[[list[Any]], bool]:
    """Sends at once what is no start of a step."""
    return lambda framed: not isinstance(read(framed)[0], Start) and at_once(framed)


async def test_values_may_come_before_their_step_has_begun() -> None:
    async with world() as made:
        step = await made.master.register(**gather(PS, WORKER, 40))
        peer = made.master.peers[WORKER]
        told, send, at_once = asyncio.Event(), peer.control.send_frame, peer.control.send_at_once

        async def send_later(framed: list[Any], begun: Callable[[], None] | None = None) -> None:
            if isinstance(read(framed)[0], Start):
                await told.wait()
            await send(framed, begun)

        peer.control.send_frame = send_later  # type: ignore[method-assign]
        peer.control.send_at_once = but_starts(at_once)  # type: ignore[method-assign]
        run = asyncio.ensure_future(made.run(step, *range(40)))
        meet = made.hosts[WORKER].rendezvous
        await until(lambda: meet._early_values == 40)
        told.set()
        assert [float(value) for value in await run] == list(range(40))
        assert meet._early_values == 0
        await made.assert_well()


async def test_a_step_that_is_cancelled_before_all_are_told_of_it_leaves_nothing_of_what_came() -> None:
    async with world() as made:
        step = await made.master.register(**gather(PS, WORKER, 40))
        peer = made.master.peers[WORKER]
        send, at_once = peer.control.send_frame, peer.control.send_at_once

        async def never(framed: list[Any], begun: Callable[[], None] | None = None) -> None:
            await (asyncio.Event().wait() if isinstance(read(framed)[0], Start) else send(framed, begun))

        peer.control.send_frame = never  # type: ignore[method-assign]
        peer.control.send_at_once = but_starts(at_once)  # type: ignore[method-assign]
        run = asyncio.ensure_future(made.run(step, *range(40)))
        meet = made.hosts[WORKER].rendezvous
        await until(lambda: meet._early_values == 40)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        peer.control.send_frame = send  # type: ignore[method-assign]
        await until(lambda: meet.open_steps == 0)
        await made.assert_well()


async def test_what_is_lost_with_a_link_fails_its_step_though_its_sender_has_ended_it() -> None:
    async with world() as made:
        async with losing_pushes(made) as (run, link):
            await until(lambda: len(made.nodes[WORKER]._reigns[made.master.epoch].steps) == 1)
            await until(lambda: link.pushed[-1][1] == made.number)
            await until(lambda: made.nodes[PS].statistics()["steps"] == 0)
            assert not run.done()
            link._connection.cut()
            with pytest.raises(LinkBroken, match=f"what {PS} sent to {WORKER} may be lost"):
                await run
        await made.assert_well()


@asynccontextmanager
async def losing_pushes(made: Any) -> AsyncIterator[tuple[asyncio.Future[Any], TensorLink]]:
    """A run of a step in which what the server pushes to the worker goes nowhere, and the link that it goes on."""
    step = await made.master.register(**relay(*TASKS, SCALAR))
    await made.run(step, 1.0)
    (link,) = made.nodes[PS]._links._links.values()
    post = TensorLink.post

    def lose(sender: TensorLink, message: Any) -> None:
        if not (sender is link and type(message).__name__ == "Push"):
            post(sender, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorLink, "post", lose)
        yield asyncio.ensure_future(made.run(step, 2.0)), link


async def test_a_step_is_not_waited_for_where_a_task_is_lost_that_had_ended_it() -> None:
    async with world() as made, losing_pushes(made) as (run, link):
        await until(lambda: link.pushed[-1][1] == made.number)
        await until(lambda: made.nodes[PS].statistics()["steps"] == 0)
        peer = made.master.peers[PS]
        made.master.peers._give_up(peer, NodeLost(f"{PS} was lost"))
        with pytest.raises(NodeLost, match=f"{PS} was lost"):
            await run


@pytest.mark.parametrize(
    ("illegal", "why"),
    [
        (Push(*KEY, 1, np.zeros(SMALL // 8 + 1)), f"pushed {SMALL + 8} bytes; more than {SMALL} are to be asked for"),
        (Announce(*KEY, 1, -1), "a value of -1 bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_pushed_unasked_is_small_or_the_link_ends(illegal: Any, why: str) -> None:
    async with world() as made:
        await made.run(await made.master.register(**relay(*TASKS, SCALAR)), 1.0)
        (link,) = made.nodes[PS]._links._links.values()
        with pytest.MonkeyPatch.context() as patch:
            ends: list[str] = []
            end = TensorLink._end
            patch.setattr(TensorLink, "_end", lambda link: (ends.append(str(link._ending)), end(link)))
            link.post(illegal)
            await until(lambda: any(why in text for text in ends))
        await until(lambda: link.closed)
        await made.assert_well()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)
