from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from session_world import assert_quiet, cancel_everywhere, every_way, host_of

import flowrt as fr
from flowrt.base.errors import GraphError, QueueClosedError
from flowrt.sched.host.queues import Queue

if TYPE_CHECKING:
    from flowrt.sched.host.orders import Element


def element(value: float) -> Element:
    return (np.float32([value]),)


def numbers(elements: list[Element]) -> list[int]:
    return [int(array[0]) for (array,) in elements]


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_elements_come_out_in_the_order_they_went_in() -> None:
    queue = Queue("q", 3)
    await queue.enqueue([element(1)])
    await queue.enqueue([element(2), element(3)])
    assert len(queue) == 3
    assert numbers(await queue.dequeue(2)) == [1, 2]
    assert numbers(await queue.dequeue(1)) == [3]
    assert await queue.dequeue(0) == []


async def test_an_enqueue_waits_for_room_and_a_dequeue_for_elements() -> None:
    queue = Queue("q", 1)
    async with asyncio.TaskGroup() as group:
        put = group.create_task(queue.enqueue([element(1)]))
        late = group.create_task(queue.enqueue([element(2)]))
        await settled()
        assert (put.done(), late.done()) == (True, False)
        assert queue.statistics().waiting_enqueues == 1
        assert numbers(await queue.dequeue(1)) == [1]
        assert numbers(await queue.dequeue(1)) == [2]
        take = group.create_task(queue.dequeue(1))
        await settled()
        assert queue.statistics().waiting_dequeues == 1
        await queue.enqueue([element(3)])
    assert numbers(take.result()) == [3]


async def test_who_asked_first_is_served_first_however_much_it_asked_for() -> None:
    queue = Queue("q", 4)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(queue.dequeue(3))
        await settled()
        small = group.create_task(queue.dequeue(1))
        await settled()
        await queue.enqueue([element(1), element(2)])
        await settled()
        assert not small.done()
        await queue.enqueue([element(3), element(4)])
    assert (numbers(large.result()), numbers(small.result())) == ([1, 2, 3], [4])


async def test_a_place_in_the_line_is_told_its_turn_and_filled_then() -> None:
    queue, told = Queue("q", 1), list[str]()
    await queue.enqueue([element(1)])
    queue.line_up("a", 1, lambda: told.append("a"))
    queue.line_up("b", 1, lambda: told.append("b"))
    async with asyncio.TaskGroup() as group:
        late = group.create_task(queue.enqueue([element(4)]))
        early = group.create_task(queue.enqueue_made(1, lambda: [element(3)], "b"))
        await asyncio.sleep(0)
        assert told == []
        assert numbers(await queue.dequeue(1)) == [1]
        await asyncio.sleep(0)
        assert told == ["a"]  # whose element all wait for
        assert not early.done()
        await queue.enqueue_made(1, lambda: [element(2)], "a")
        assert numbers(await queue.dequeue(1)) == [2]
        assert numbers(await queue.dequeue(1)) == [3]
        assert numbers(await queue.dequeue(1)) == [4]
        await late
    assert told == ["a"]


async def test_who_steps_back_from_a_place_lets_the_next_one_through() -> None:
    queue, told = Queue("q", 1), list[str]()
    queue.line_up("a", 1, lambda: told.append("a"))
    queue.line_up("b", 1, lambda: told.append("b"))
    assert told == ["a"]
    queue.step_back("a")
    queue.step_back("a")
    assert told == ["a", "b"]
    queue.close(cancel_pending_enqueues=True)
    queue.line_up("c", 1, lambda: told.append("c"))  # to hear of the end
    assert told == ["a", "b", "c"]
    with pytest.raises(QueueClosedError):
        await queue.enqueue_made(1, lambda: [element(1)], "b")


async def test_a_place_for_more_than_a_queue_holds_is_told_at_once_and_given_up() -> None:
    queue, told = Queue("q", 2), list[str]()
    queue.line_up("large", 3, lambda: told.append("large"))  # to hear of the error
    assert told == ["large"]
    queue.line_up("grown", 1, lambda: told.append("grown"))
    queue.line_up("next", 1, lambda: told.append("next"))
    for holder in ("large", "grown"):
        with pytest.raises(GraphError, match="3 elements never fit into a capacity of 2"):
            await queue.enqueue_made(3, list, holder)
    assert told == ["large", "grown", "next"]
    assert queue.statistics().waiting_enqueues == 1


async def test_who_waits_in_line_hears_that_a_queue_was_closed() -> None:
    queue, told = Queue("q", 1), list[str]()
    await queue.enqueue([element(1)])
    queue.line_up("a", 1, lambda: told.append("a"))
    assert told == []
    queue.close(cancel_pending_enqueues=True)
    assert told == ["a"]
    with pytest.raises(QueueClosedError):
        await queue.enqueue_made(1, list, "a")


async def test_elements_are_made_when_there_is_room_and_an_error_of_that_is_the_enqueues() -> None:
    queue, made = Queue("q", 1), list[int]()
    await queue.enqueue([element(1)])

    def make() -> list[Element]:
        made.append(2)
        raise MemoryError("no room")

    put = asyncio.ensure_future(queue.enqueue_made(1, make))
    await asyncio.sleep(0)
    assert made == []
    assert numbers(await queue.dequeue(1)) == [1]
    with pytest.raises(MemoryError, match="no room"):
        await put
    assert (made, len(queue)) == ([2], 0)


async def test_a_large_enqueue_and_a_large_dequeue_do_not_wait_for_each_other() -> None:
    queue = Queue("q", 4)
    await queue.enqueue([element(1), element(2)])
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        put = group.create_task(queue.enqueue([element(3), element(4), element(5)]))
        await settled()
        assert not put.done()
        take = group.create_task(queue.dequeue(3))
    assert numbers(take.result()) == [1, 2, 3]
    assert len(queue) == 2


async def test_what_can_never_be_served_is_an_error() -> None:
    queue = Queue("q", 2)
    with pytest.raises(GraphError, match="3 elements never fit into a capacity of 2"):
        await queue.enqueue([element(i) for i in range(3)])
    with pytest.raises(GraphError, match="never gather"):
        await queue.dequeue(3)
    with pytest.raises(GraphError, match="cannot take -1"):
        await queue.dequeue(-1)
    with pytest.raises(GraphError, match="at least 1"):
        Queue("q", 0)


async def test_a_closed_queue_drains_and_then_says_so() -> None:
    queue = Queue("q", 2)
    await queue.enqueue([element(1), element(2)])
    async with asyncio.TaskGroup() as group:
        pending = group.create_task(queue.enqueue([element(3)]))
        await settled()
        queue.close()
        queue.close()
        with pytest.raises(QueueClosedError, match="nothing can be enqueued"):
            await queue.enqueue([element(4)])
        assert numbers(await queue.dequeue(2)) == [1, 2]
        assert pending.done() or len(queue) == 1
        with pytest.raises(QueueClosedError, match="1 elements are left, 2 were asked for"):
            await queue.dequeue(2)
        assert numbers(await queue.dequeue(2, up_to=True)) == [3]
        with pytest.raises(QueueClosedError):
            await queue.dequeue(1, up_to=True)


async def test_closing_wakes_who_waits_in_vain() -> None:
    queue = Queue("q", 1)
    takes = [asyncio.ensure_future(queue.dequeue(1)) for _ in range(2)]
    await settled()
    queue.close()
    for take in takes:
        async with asyncio.timeout(5):
            with pytest.raises(QueueClosedError):
                await take
    other = Queue("q", 1)
    await other.enqueue([element(1)])
    put = asyncio.ensure_future(other.enqueue([element(2)]))
    await settled()
    other.close(cancel_pending_enqueues=True)
    with pytest.raises(QueueClosedError, match="pending enqueue was cancelled"):
        await put
    assert numbers(await other.dequeue(1)) == [1]


async def test_who_was_cancelled_in_the_same_breath_is_passed_over() -> None:
    queue = Queue("q", 1)
    takes = [asyncio.ensure_future(queue.dequeue(1)) for _ in range(3)]
    await settled()
    takes[0].cancel()
    takes[1].cancel()
    await queue.enqueue([element(1)])  # before those that were cancelled have woken
    assert numbers(await takes[2]) == [1]
    await queue.enqueue([element(2)])
    puts = [asyncio.ensure_future(queue.enqueue([element(i)])) for i in (3, 4, 5)]
    await settled()
    puts[0].cancel()
    puts[1].cancel()
    assert numbers(await queue.dequeue(1)) == [2]
    async with asyncio.timeout(5):
        await puts[2]
        assert numbers(await queue.dequeue(1)) == [5]
    assert all(waiter.cancelled() for waiter in (*takes[:2], *puts[:2]))
    assert queue.statistics().waiting_enqueues == queue.statistics().waiting_dequeues == len(queue) == 0


async def test_a_cancelled_enqueue_is_taken_back_from_behind_others() -> None:
    queue = Queue("q", 3)
    await queue.enqueue([element(i) for i in (1, 2, 3)])
    put = asyncio.ensure_future(queue.enqueue([element(4), element(5)]))
    await settled()
    assert numbers(await queue.dequeue(2)) == [1, 2]  # before the enqueue, which is served, has woken
    put.cancel()
    await settled()
    assert (put.cancelled(), len(queue)) == (True, 1)
    assert numbers(await queue.dequeue(1)) == [3]


async def test_a_cancelled_enqueue_some_of_which_was_taken_stands() -> None:
    queue = Queue("q", 2)
    await queue.enqueue([element(1), element(2)])
    put = asyncio.ensure_future(queue.enqueue([element(3), element(4)]))
    await settled()
    assert numbers(await queue.dequeue(2)) == [1, 2]  # before the enqueue, which is served, has woken
    assert numbers(await queue.dequeue(1)) == [3]
    put.cancel()
    await settled()
    assert put.cancelled()
    assert numbers(await queue.dequeue(1)) == [4]


async def test_a_cancelled_waiter_changed_nothing_and_lets_the_next_one_through() -> None:
    queue = Queue("q", 2)
    await queue.enqueue([element(1), element(2)])
    first = asyncio.ensure_future(queue.enqueue([element(3), element(4)]))
    second = asyncio.ensure_future(queue.enqueue([element(5)]))
    await settled()
    assert numbers(await queue.dequeue(1)) == [1]
    assert not second.done()
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert numbers(await queue.dequeue(2)) == [2, 5]


async def test_a_cancelled_dequeue_lets_the_next_one_through() -> None:
    queue = Queue("q", 3)
    await queue.enqueue([element(1)])
    first, second = (asyncio.ensure_future(queue.dequeue(count)) for count in (3, 1))
    await settled()
    assert not second.done()
    first.cancel()
    async with asyncio.timeout(5):
        assert numbers(await second) == [1]
    assert first.cancelled()


async def test_who_waits_behind_others_and_is_cancelled_waits_no_more() -> None:
    full, empty = Queue("full", 1), Queue("empty", 1)
    await full.enqueue([element(1)])
    puts = [asyncio.ensure_future(full.enqueue([element(i)])) for i in range(2)]
    takes = [asyncio.ensure_future(empty.dequeue(1)) for _ in range(2)]
    await settled()
    for number in (1, 0):
        puts[number].cancel()
        takes[number].cancel()
        await settled()
        waiting = full.statistics().waiting_enqueues, empty.statistics().waiting_dequeues
        assert waiting == (number, number)


async def test_who_is_cancelled_as_the_queue_closes_is_cancelled() -> None:
    full, empty = Queue("full", 1), Queue("empty", 1)
    await full.enqueue([element(1)])
    waiting = [asyncio.ensure_future(full.enqueue([element(2)])), asyncio.ensure_future(empty.dequeue(1))]
    await settled()
    for queue, waiter in zip((full, empty), waiting, strict=True):
        queue.close(cancel_pending_enqueues=True)
        waiter.cancel()
    await asyncio.wait(waiting)
    assert [waiter.cancelled() for waiter in waiting] == [True, True]


async def test_a_cancelled_enqueue_takes_back_what_nobody_took() -> None:
    queue = Queue("q", 1)
    await queue.enqueue([element(1)])
    put = asyncio.ensure_future(queue.enqueue([element(2)]))
    await settled()
    assert numbers(await queue.dequeue(1)) == [1]
    assert len(queue) == 1
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert len(queue) == 0


async def test_a_closed_queue_waits_for_no_cancelled_enqueue() -> None:
    queue = Queue("q", 2)
    await queue.enqueue([element(1)])
    put = asyncio.ensure_future(queue.enqueue([element(2), element(3)]))
    await settled()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert queue.statistics().waiting_enqueues == 0
    queue.close()
    async with asyncio.timeout(5):
        with pytest.raises(QueueClosedError, match="1 elements are left, 2 were asked for"):
            await queue.dequeue(2)


async def test_elements_given_to_a_cancelled_dequeue_go_back_to_the_front() -> None:
    queue = Queue("q", 2)
    take = asyncio.ensure_future(queue.dequeue(2))
    await settled()
    await queue.enqueue([element(1), element(2)])
    take.cancel()
    with pytest.raises(asyncio.CancelledError):
        await take
    assert numbers(await queue.dequeue(2)) == [1, 2]


async def test_two_dequeues_cancelled_at_once_give_their_elements_back_in_order() -> None:
    queue = Queue("q", 2)
    takes = [asyncio.ensure_future(queue.dequeue(1)) for _ in range(2)]
    await settled()
    await queue.enqueue([element(1), element(2)])
    for take in takes:
        take.cancel()
    await asyncio.wait(takes)
    assert numbers(await queue.dequeue(2)) == [1, 2]


async def test_a_cancelled_enqueue_raises_even_where_its_elements_were_taken() -> None:
    queue = Queue("q", 1)
    await queue.enqueue([element(1)])
    put = asyncio.ensure_future(queue.enqueue([element(2)]))
    await settled()
    assert numbers(await queue.dequeue(1)) == [1]
    taken = numbers(await queue.dequeue(1))
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert taken == [2]


@pytest.mark.parametrize("seed", range(30))
async def test_random_producers_consumers_and_cancellations_lose_and_repeat_nothing(seed: int) -> None:
    rng = random.Random(seed)
    queue = Queue("q", 4)
    next_number = iter(range(1, 10_000))
    put: list[int] = []
    maybe: set[int] = set()
    taken: list[int] = []

    async def producer() -> None:
        for _ in range(20):
            batch = [next(next_number) for _ in range(rng.randint(1, 4))]
            work = asyncio.ensure_future(queue.enqueue([element(n) for n in batch]))
            await _perhaps_cancel(work)
            try:
                await work
                put.extend(batch)
            except asyncio.CancelledError:
                maybe.update(batch)

    async def _perhaps_cancel(work: asyncio.Future[Any]) -> None:
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            work.cancel()

    async def consumer() -> None:
        while True:
            work = asyncio.ensure_future(queue.dequeue(rng.randint(1, 4), up_to=True))
            await _perhaps_cancel(work)
            try:
                taken.extend(numbers(await work))
            except asyncio.CancelledError:
                pass
            except QueueClosedError:
                return

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        consumers = [group.create_task(consumer()) for _ in range(3)]
        async with asyncio.TaskGroup() as producers:
            for _ in range(3):
                producers.create_task(producer())
        queue.close()
        await asyncio.wait(consumers)
    assert len(set(taken)) == len(taken), seed
    assert set(put) <= set(taken) <= set(put) | maybe, seed
    assert (queue.statistics().waiting_dequeues, queue.statistics().waiting_enqueues, len(queue)) == (0, 0, 0)


# ── in sessions ──


def pipe(capacity: int = 2, shape: Any = (2,)) -> Any:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", shape, name="x")
        queue = fr.FIFOQueue(capacity, "float32", shapes=shape, name="q")
        return graph, x, queue, queue.enqueue(x), queue.dequeue()


@every_way
async def test_steps_hand_elements_to_each_other_under_back_pressure(options: fr.Options) -> None:
    graph, x, queue, put, got = pipe(3)
    with graph:
        double, size = got * 2.0, queue.size()
    seen: deque[float] = deque()
    async with fr.Session(graph, options=options) as session:

        async def produce() -> None:
            for i in range(20):
                await session.run(put, {x: [i, i]})
                assert await session.run(size) <= 3

        async def consume() -> None:
            for _ in range(20):
                seen.append(float((await session.run(double))[0]))

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        assert list(seen) == [2.0 * i for i in range(20)]
        assert_quiet(session)


async def test_batches_of_elements_go_in_and_out_together() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(8, ["float32", "int64"], shapes=[(2,), ()], name="pairs")
        images, labels = fr.placeholder("float32", (None, 2)), fr.placeholder("int64", (None,))
        put = queue.enqueue_many([images, labels])
        n = fr.placeholder("int64", ())
        three, rest = queue.dequeue_many(3), queue.dequeue_up_to(n)
        close = queue.close()
    async with fr.Session(graph) as session:
        await session.run(put, {images: np.arange(10, dtype=np.float32).reshape(5, 2), labels: np.arange(5)})
        left, right = await session.run(three)
        np.testing.assert_array_equal(left, [[0, 1], [2, 3], [4, 5]])
        np.testing.assert_array_equal(right, [0, 1, 2])
        await session.run(close)
        left, right = await session.run(rest, {n: 8})
        assert (left.shape, right.tolist()) == ((2, 2), [3, 4])
        with pytest.raises(fr.QueueClosedError, match="'pairs' is closed"):
            await session.run(rest, {n: 1})
        left, _ = await session.run(rest, {n: 0})
        assert left.shape == (0, 2)
        with pytest.raises(fr.GraphError, match="cannot take -1"):
            await session.run(rest, {n: -1})
        with pytest.raises(fr.QueueClosedError):
            await session.run(put, {images: [[0, 0]], labels: [0]})


async def test_components_of_different_lengths_are_refused() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(8, ["float32", "int64"], name="pairs")
        left, right = fr.placeholder("float32", (None,)), fr.placeholder("int64", (None,))
        put = queue.enqueue_many([left, right])
        size = queue.size()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match="different numbers of elements"):
            await session.run(put, {left: [1, 2], right: [1]})
        assert await session.run(size) == 0


async def test_a_scalar_is_not_many_elements() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", None)
        put = fr.FIFOQueue(8, "float32").enqueue_many(x)
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match="a scalar holds no elements"):
            await session.run(put, {x: 1.0})
        await session.run(put, {x: []})


async def test_elements_are_copies_of_what_was_enqueued() -> None:
    graph, x, _, put, got = pipe()
    fed = np.float32([1, 2])
    async with fr.Session(graph) as session:
        await session.run(put, {x: fed})
        fed[:] = 9
        np.testing.assert_array_equal(await session.run(got), [1, 2])


async def test_elements_of_an_open_shape_are_checked_where_they_are_stacked() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        queue = fr.FIFOQueue(4, "float32", shapes=(None,), name="ragged")
        put, two = queue.enqueue(x), queue.dequeue_many(2)
    async with fr.Session(graph) as session:
        await session.run(put, {x: [1]})
        await session.run(put, {x: [1, 2]})
        with pytest.raises(fr.FeedError, match=r"different shapes cannot be stacked: \[1\], \[2\]"):
            await session.run(two)


async def test_a_step_cancelled_while_it_waits_for_an_element_leaves_nothing() -> None:
    graph, x, queue, put, got = pipe()
    with graph:
        size = queue.size()
    async with fr.Session(graph) as session:
        await cancel_everywhere_without_element(session, got)
        await session.run(put, {x: [1, 2]})
        assert await session.run(size) == 1

        async def check() -> None:
            assert_quiet(session)
            if await session.run(size) == 0:  # it was taken before the cancellation came
                await session.run(put, {x: [1, 2]})

        assert await cancel_everywhere(lambda: session.run(got), check) >= 1


async def cancel_everywhere_without_element(session: fr.Session, got: Any) -> None:
    for turns in range(6):
        task = asyncio.ensure_future(session.run(got))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_quiet(session)


async def test_a_queue_of_another_form_under_the_same_name_is_refused() -> None:
    graph, x, _, put, _ = pipe(2)
    other = pipe(3)
    async with fr.Session(graph) as session:
        await session.run(put, {x: [1, 2]})
        step = other[0]
        with pytest.raises(fr.GraphError, match="belongs to another graph"):
            await session.run(other[3], {other[1]: [1, 2]})
        host = host_of(session)
        with pytest.raises(fr.GraphError, match=r"exists .* capacity 2 .* not with capacity 3"):
            host.queue(("", "q"), 3, host._queues[("", "q")].specs)
        with pytest.raises(fr.GraphError, match=r"for \(float32\[2\]\), not with capacity 2 for \(int64\[\]\)"):
            host.queue(("", "q"), 2, [fr.Spec("int64", ())])
        assert not step.finalized


# ── producing ──


@pytest.mark.parametrize("kind", ["list", "generator", "async"])
async def test_a_source_fills_a_queue_and_closes_it_at_its_end(kind: str) -> None:
    graph, _, queue, _, got = pipe(2)

    async def slowly() -> Any:
        for i in range(7):
            await asyncio.sleep(0)
            yield np.float32([i, i])

    source: Any = slowly() if kind == "async" else [[float(i), i] for i in range(7)]
    if kind == "generator":
        source = (np.float32([i, i]) for i in range(7))
    seen = []
    async with fr.Session(graph) as session:
        async with session.producing(queue, source):
            while len(seen) < 7:
                seen.append(int((await session.run(got))[0]))
            with pytest.raises(fr.QueueClosedError):
                await session.run(got)
        assert seen == list(range(7))
        assert_quiet(session)


async def test_tuples_of_a_source_are_components() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, ["float32", "int64"], shapes=[(2,), ()])
        got = queue.dequeue()
    async with fr.Session(graph) as session, session.producing(queue, [([1, 2], 3), ([4, 5], 6)]):
        image, label = await session.run(got)
        assert (image.tolist(), label) == ([1, 2], 3)


async def consume_for_ever(session: fr.Session, queue: Any, source: Any, got: Any) -> None:
    async with session.producing(queue, source):
        await session.run(got)
        await asyncio.Event().wait()


async def test_an_error_of_the_source_is_raised_from_the_block_and_closes_the_queue() -> None:
    graph, _, queue, _, got = pipe(2)

    def broken() -> Any:
        yield [1, 2]
        raise OSError("disk gone")

    async with fr.Session(graph) as session:
        with pytest.raises(OSError, match="disk gone"):
            await consume_for_ever(session, queue, broken(), got)
        with pytest.raises(fr.QueueClosedError):
            await session.run(got)
        assert_quiet(session)


async def test_an_element_that_does_not_fit_is_an_error_from_the_block() -> None:
    graph, _, queue, _, got = pipe(2)
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"expected float32\[2\]"):
            await consume_for_ever(session, queue, [[1, 2], [1, 2, 3]], got)


async def test_leaving_the_block_early_stops_the_source_and_closes_the_queue() -> None:
    graph, _, queue, _, got = pipe(2)
    with graph:
        size = queue.size()
    made = 0

    def endless() -> Any:
        nonlocal made
        while True:
            made += 1
            yield [made, made]

    async def consume_some(session: fr.Session) -> None:
        async with session.producing(queue, endless()):
            for _ in range(5):
                await session.run(got)
            raise KeyError("mine")

    async with fr.Session(graph) as session:
        with pytest.raises(KeyError, match="mine"):
            await consume_some(session)
        assert made <= 5 + 2 + 2
        left = int(await session.run(size))
        for _ in range(left):
            await session.run(got)
        with pytest.raises(fr.QueueClosedError):
            await session.run(got)
        assert left <= 2
        assert_quiet(session)


async def test_closing_the_queue_ends_the_production() -> None:
    graph, _, queue, _, _ = pipe(1)
    with graph:
        close = queue.close(cancel_pending_enqueues=True)
    async with fr.Session(graph) as session, session.producing(queue, ([i, i] for i in range(9))):
        await session.run(close)


def failing_after(count: int) -> Any:
    for i in range(count):
        yield [i, i]
    raise OSError("disk on fire")


async def drain(session: fr.Session, got: Any, seen: list[int] | None = None) -> None:
    while True:
        first = int((await session.run(got))[0])
        if seen is not None:
            seen.append(first)


async def drain_what(session: fr.Session, queue: Any, source: Any, got: Any, seen: list[int] | None = None) -> None:
    async with session.producing(queue, source):
        await drain(session, got, seen)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("capacity", [1, 2, 64])
async def test_an_error_of_the_source_is_told_to_who_waits_for_elements(capacity: int, count: int) -> None:
    graph, _, queue, _, got = pipe(capacity)
    seen: list[int] = []
    async with fr.Session(graph) as session:
        with pytest.raises(OSError, match="disk on fire"):
            await drain_what(session, queue, failing_after(count), got, seen)
        with pytest.raises(fr.QueueClosedError) as told:  # and to who asks later
            await drain(session, got, seen)
        assert isinstance(told.value.__cause__, OSError)
        assert seen == list(range(count))
        assert_quiet(session)


async def test_a_consumer_in_another_task_has_the_sources_error_as_its_cause() -> None:
    graph, _, queue, _, got = pipe(2)
    async with fr.Session(graph) as session:
        consumer = asyncio.ensure_future(drain(session, got))
        with pytest.raises(OSError, match="disk on fire") as told:
            async with session.producing(queue, failing_after(3)):
                await asyncio.Event().wait()
        with pytest.raises(fr.QueueClosedError) as closed:
            await consumer
        assert closed.value.__cause__ is told.value


async def test_a_source_that_fails_before_the_block_does_is_the_cause_of_that() -> None:
    graph, _, queue, _, got = pipe(2)

    async def fail_in_turn(session: fr.Session) -> None:
        async with session.producing(queue, failing_after(1)):
            try:
                await drain(session, got)
            finally:
                raise KeyError("mine")

    async with fr.Session(graph) as session:
        with pytest.raises(KeyError, match="mine") as told:
            await fail_in_turn(session)
        assert isinstance(told.value.__cause__, OSError)
        assert_quiet(session)


async def test_a_source_that_fails_at_its_end_is_heard_although_nobody_waits_any_more() -> None:
    graph, _, queue, _, got = pipe(1)

    async def source() -> Any:
        try:
            while True:
                yield [1, 1]
        finally:
            raise OSError("cannot close the file")

    async def take_one(session: fr.Session) -> None:
        async with session.producing(queue, source()):
            await session.run(got)

    async with fr.Session(graph) as session:
        with pytest.raises(OSError, match="cannot close the file"):
            await take_one(session)
        assert_quiet(session)


async def test_a_source_that_is_cancelled_by_itself_does_not_end_in_silence() -> None:
    graph, _, queue, _, got = pipe(1)

    async def source() -> Any:
        yield [1, 1]
        raise asyncio.CancelledError

    async with fr.Session(graph) as session:
        with pytest.raises(fr.StepCancelled, match=r"test_queues.py:\d+: the source of queue '.*' was cancelled"):
            await drain_what(session, queue, source(), got)
        assert_quiet(session)


async def test_the_end_of_a_queue_that_a_source_reads_is_its_end_and_a_failure_there_is_its_own() -> None:
    with fr.Graph() as graph:
        first, second = (fr.FIFOQueue(2, "float32", shapes=(2,)) for _ in range(2))
        got = [queue.dequeue() for queue in (first, second)]

    async def relayed(session: fr.Session) -> Any:
        while True:
            yield await session.run(got[0])

    for source, ends_with in (([[i, i] for i in range(5)], fr.QueueClosedError), (failing_after(5), OSError)):
        seen: list[int] = []
        async with fr.Session(graph) as session:
            with pytest.raises(ends_with) as told:
                async with session.producing(first, source):
                    await drain_what(session, second, relayed(session), got[1], seen)
            assert told.value.__cause__ is None
        assert seen == list(range(len(seen)))
        assert len(seen) == 5 or ends_with is OSError  # which stops the block where it is


async def test_one_of_two_producers_that_fails_is_heard_whichever_block_is_within() -> None:
    for broken in (0, 1):
        graph, _, queue, _, got = pipe(2)
        outer, inner = [([i, i] for i in range(1000)), failing_after(3)][:: 1 if broken else -1]
        async with fr.Session(graph) as session:
            with pytest.raises(OSError, match="disk on fire"):
                async with session.producing(queue, outer):
                    await drain_what(session, queue, inner, got)
            assert_quiet(session)


async def test_a_queue_that_is_filled_again_after_a_reset_has_no_old_causes() -> None:
    graph, _, queue, _, got = pipe(2)
    async with fr.Session(graph) as session:
        with pytest.raises(OSError, match="disk on fire"):
            await drain_what(session, queue, failing_after(0), got)
        await session.reset()
        with pytest.raises(fr.QueueClosedError) as told:
            await drain_what(session, queue, [[1, 1]], got)
        assert told.value.__cause__ is None


def test_an_element_of_one_component_needs_no_list_around_it() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(4, ["float32"], shapes=[(3,)])
        x = fr.Variable(np.arange(3, dtype=np.float32))
        put = [queue.enqueue(x), queue.enqueue([x + 1]), queue.enqueue(np.zeros(3, np.float32))]
        more = queue.enqueue_many(np.ones((1, 3), np.float32))
        (got,) = queue.dequeue_many(4)
    with fr.BlockingSession(graph) as session:
        for operation in (*put, more):
            session.run(operation)
        np.testing.assert_array_equal(session.run(got), [[0, 1, 2], [1, 2, 3], [0, 0, 0], [1, 1, 1]])


async def test_a_source_may_give_the_components_as_a_list() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, ["float32", "int64"], shapes=[(2,), ()])
        got = queue.dequeue()
    async with fr.Session(graph) as session, session.producing(queue, [[[1.0, 2.0], 3]]):
        rows, label = await session.run(got)
    assert (rows.tolist(), label) == ([1, 2], 3)


@pytest.mark.parametrize("wrong", [np.ones(2, np.float32), [np.ones(2, np.float32)], (1, 2, 3)])
async def test_an_element_with_other_components_names_the_queue_and_the_line(wrong: Any) -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, ["float32", "int64"], shapes=[(2,), ()], name="samples")
        got = queue.dequeue()
    says = r"test_queues.py:\d+: an element of queue 'samples' is a tuple of 2 components, but the source gave "
    with pytest.raises(fr.FeedError, match=says):
        async with fr.Session(graph) as session, session.producing(queue, [wrong]):
            await session.run(got)
