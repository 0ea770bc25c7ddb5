"""The orders in which elements leave queues, alone, in queues and in sessions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from session_world import assert_quiet

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.sched.host.orders import Element, ElementOrder, order_of
from flowrt.sched.host.queues import Queue

FIFO, PRIORITY = ("fifo",), ("priority",)


def shuffle(kept: int, seed: int = 0) -> tuple[Any, ...]:
    return ("shuffle", kept, seed, 0)


def element(value: int) -> Element:
    return (np.asarray(value),)


def filled(form: tuple[Any, ...], values: Any) -> ElementOrder:
    order = order_of(form, 0)
    for value in values:
        order.add(element(value))
    return order


def drain(order: ElementOrder) -> list[int]:
    return [number(order.take()[-1]) for _ in range(len(order))]


def number(found: Element) -> int:
    return int(found[0])


def numbers(found: list[Element]) -> list[int]:
    return [number(one) for one in found]


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_elements_leave_in_the_order_that_the_attribute_names() -> None:
    assert drain(filled(FIFO, [3, 1, 2])) == [3, 1, 2]
    assert drain(filled(PRIORITY, [3, -1, 2])) == [-1, 2, 3]
    assert sorted(drain(filled(shuffle(2), range(50)))) == list(range(50))


@pytest.mark.parametrize("form", [(), ("lifo",), ("shuffle",), ("shuffle", 0, 0, 0), ("shuffle", 1, "a", 0)])
def test_an_order_that_there_is_not_is_an_error(form: Any) -> None:
    with pytest.raises(GraphError, match="there is no order"):
        order_of(form, 0)


def test_elements_of_one_priority_leave_in_the_order_in_which_they_came() -> None:
    order = order_of(PRIORITY, 0)
    for priority, name in ((1, 0), (0, 1), (1, 2), (0, 3)):
        order.add((np.int64(priority), np.asarray(name)))  # type: ignore[arg-type]
    assert [int(order.take()[-1][1]) for _ in range(4)] == [1, 3, 0, 2]


@pytest.mark.parametrize("form", [FIFO, PRIORITY, shuffle(3)])
def test_what_is_given_back_leaves_again_as_if_it_never_had(form: Any) -> None:
    values = [5, 1, 4, 1, 3, 9, 2, 6]
    expected = drain(filled(form, values))
    for rng in map(random.Random, range(20)):
        order, seen = filled(form, values), []
        while len(order):
            taken = [order.take() for _ in range(rng.randint(1, len(order)))]
            keep = rng.randint(0, len(taken))
            seen += [number(one[-1]) for one in taken[:keep]]
            for one in rng.sample(taken[keep:], len(taken) - keep):
                order.give_back(one)
        assert seen == expected


@pytest.mark.parametrize("form", [FIFO, PRIORITY, shuffle(3)])
def test_what_is_taken_back_was_never_there_unless_some_of_it_has_left(form: Any) -> None:
    mine = [element(7), element(0)]
    order = filled(form, [5, 1, 4])
    for one in mine:
        order.add(one)
    order.remove(mine)
    assert drain(order) == drain(filled(form, [5, 1, 4]))
    other = filled(form, [])
    for one in mine:
        other.add(one)
    first = number(other.take()[-1])
    other.remove(mine)
    assert drain(other) == [7 - first]


def test_what_was_drawn_and_given_back_is_taken_back_too() -> None:
    order, mine = order_of(shuffle(9), 0), [element(i) for i in range(6)]
    for one in mine:
        order.add(one)
    for one in [order.take(), order.take(), order.take()]:
        order.give_back(one)
    order.remove(mine)
    assert len(order) == 0


def test_what_was_given_back_leaves_in_the_order_of_its_draws_when_some_of_it_is_taken_back() -> None:
    order = order_of(shuffle(9), 0)
    for value in range(9):
        order.add(element(value))
    drawn = [order.take() for _ in range(7)]
    for place in (0, 4, 1, 5, 6, 2, 3):
        order.give_back(drawn[place])
    order.remove([drawn[0][-1]])
    assert drain(order)[:6] == numbers([one[-1] for one in drawn[1:]])


def test_a_heap_out_of_which_some_are_taken_back_is_one_still() -> None:
    order, mine = order_of(PRIORITY, 0), [element(0), element(2)]
    for one in (mine[0], element(9), mine[1], element(8), element(7), element(6)):
        order.add(one)
    order.remove(mine)
    assert drain(order) == [6, 7, 8, 9]


def test_the_order_of_a_shuffle_hangs_on_the_seed_alone_and_not_on_when_elements_come() -> None:
    kept, values = 4, list(range(30))
    expected = drain(filled(shuffle(kept), values))
    assert expected != drain(filled(shuffle(kept, seed=1), values)) != values
    for rng in map(random.Random, range(20)):
        order, left, seen = order_of(shuffle(kept), 0), list(values), []
        while left or len(order):
            for _ in range(rng.randint(0, 9)):
                if left:
                    order.add(element(left.pop(0)))
            while len(order) > (kept if left else 0) and rng.random() < 0.8:
                seen.append(number(order.take()[-1]))
        assert seen == expected


def test_an_order_without_a_seed_has_the_sessions_and_streams_differ() -> None:
    unseeded = [order_of(("shuffle", 5, None, stream), seed) for stream, seed in ((0, 3), (0, 4), (1, 3))]
    found = []
    for order in unseeded:
        for value in range(30):
            order.add(element(value))
        found.append(drain(order))
    assert found[0] == drain(filled(shuffle(5, seed=3), range(30)))
    assert found[0] != found[1] != found[2] != found[0]


def test_an_element_is_drawn_from_those_kept_and_one_more_and_all_orders_of_these_are_alike_likely() -> None:
    counts = Counter(tuple(drain(filled(shuffle(2, seed), range(3)))) for seed in range(1200))
    assert set(counts) == set(permutations(range(3)))
    assert all(150 < count < 250 for count in counts.values())  # 200 expected, standard deviation 13
    for seed in range(50):
        found = drain(filled(shuffle(2, seed), range(20)))
        assert all(value <= place + 2 for place, value in enumerate(found))
    assert any(drain(filled(shuffle(2, seed), range(20)))[0] == 2 for seed in range(20))


def test_a_shuffle_with_a_seed_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert drain(filled(shuffle(5, seed=7), range(12))) == [0, 5, 2, 7, 8, 3, 6, 11, 1, 9, 10, 4]


async def test_a_shuffle_gives_nothing_until_enough_stay_and_all_once_it_is_closed() -> None:
    queue = Queue("q", 5, order=shuffle(3))
    await queue.enqueue([element(0), element(1)])
    await queue.enqueue([element(2)])
    take = asyncio.ensure_future(queue.dequeue(1))
    both = asyncio.ensure_future(queue.dequeue(2, up_to=True))
    await settled()
    assert not take.done()
    await queue.enqueue([element(3)])
    await settled()
    assert (take.done(), both.done(), len(queue)) == (True, False, 3)
    queue.close()
    rest = [number(one) for one in await both]
    assert len(rest) == 2
    assert sorted([*numbers(await take), *rest, *numbers(await queue.dequeue(1))]) == [0, 1, 2, 3]
    with pytest.raises(fr.QueueClosedError, match="0 elements are left, 1 were asked for"):
        await queue.dequeue(1)


async def test_a_closed_shuffle_keeps_its_elements_while_some_wait_to_come_in() -> None:
    queue = Queue("q", 3, order=shuffle(2, seed=5))
    await queue.enqueue([element(0)])
    await queue.enqueue([element(1)])
    await queue.enqueue([element(2)])
    pending = [asyncio.ensure_future(queue.enqueue([element(i)])) for i in range(3, 9)]
    await settled()
    queue.close()
    found = [numbers(await queue.dequeue(1))[0] for _ in range(9)]
    assert found == drain(filled(shuffle(2, seed=5), range(9)))
    await asyncio.wait_for(asyncio.gather(*pending), 5)


async def test_what_goes_in_or_out_at_once_is_what_need_not_stay() -> None:
    queue = Queue("q", 10, order=shuffle(8))
    with pytest.raises(GraphError, match="3 elements never fit into a capacity of 10, of which 8 stay"):
        await queue.enqueue([element(i) for i in range(3)])
    with pytest.raises(GraphError, match="3 elements never gather in a capacity of 10, of which 8 stay"):
        await queue.dequeue(3)
    told: list[str] = []
    queue.line_up("three", 3, lambda: told.append("three"))  # to hear of the error
    assert told == ["three"]
    for i in range(5):
        await queue.enqueue([element(2 * i), element(2 * i + 1)])
    assert len(await queue.dequeue(2)) == 2
    with pytest.raises(GraphError, match="at least 1"):
        Queue("q", 0, order=shuffle(1))


@pytest.mark.parametrize("seed", range(20))
async def test_producers_and_consumers_of_a_shuffle_never_wait_for_each_other_nor_hold_too_much(seed: int) -> None:
    rng = random.Random(seed)
    kept, at_once = rng.randint(1, 6), rng.randint(1, 4)
    queue = Queue("q", kept + at_once, order=shuffle(kept, seed))
    values, seen = iter(range(200)), []

    async def produce() -> None:
        while batch := [element(value) for _, value in zip(range(rng.randint(1, at_once)), values, strict=False)]:
            await queue.enqueue(batch)
            assert len(queue) <= kept + at_once
        queue.close()

    async def consume() -> None:
        while True:
            work = asyncio.ensure_future(queue.dequeue(rng.randint(1, at_once), up_to=True))
            await settled()
            if rng.random() < 0.3:
                work.cancel()
            try:
                seen.extend(numbers(await work))
            except asyncio.CancelledError:
                pass
            except fr.QueueClosedError:
                return

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
    assert seen == drain(filled(shuffle(kept, seed), range(200)))


async def test_a_cancelled_dequeue_leaves_the_most_urgent_in_front() -> None:
    queue = Queue("q", 4, order=PRIORITY)
    take = asyncio.ensure_future(queue.dequeue(2))
    await settled()
    await queue.enqueue([element(5), element(3)])
    take.cancel()
    await asyncio.wait([take])
    await queue.enqueue([element(4)])
    assert numbers(await queue.dequeue(3)) == [3, 4, 5]


# ── in sessions ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def all_of(session: fr.Session, got: Any) -> list[Any]:
    found = []
    try:
        while True:
            found.append(await session.run(got))
    except fr.QueueClosedError:
        return found


def shuffling(seed: int | None = None, graph_seed: int | None = None, name: str = "rows") -> tuple[Any, Any, Any]:
    with fr.Graph(graph_seed) as graph:
        queue = fr.ShuffleQueue(12, 5, "int64", (), seed=seed, name=name)
        return graph, queue, queue.dequeue()


async def shuffled(made: tuple[Any, Any, Any], **options: Any) -> list[int]:
    graph, queue, got = made
    async with fr.Session(graph, options=fr.Options(**options)) as session:
        async with session.producing(queue, range(30)):
            found = [int(value) for value in await all_of(session, got)]
        assert_quiet(session)
    assert sorted(found) == list(range(30)) != found
    return found


async def test_a_shuffle_queue_draws_by_its_seed_else_the_graphs_else_the_sessions() -> None:
    assert await shuffled(shuffling(3)) == await shuffled(shuffling(3, 9, "other"), seed=1)
    assert await shuffled(shuffling(3)) != await shuffled(shuffling(4))
    assert await shuffled(shuffling(None, 3), seed=1) == await shuffled(shuffling(None, 3), seed=2)
    assert await shuffled(shuffling(None, 3)) != await shuffled(shuffling(None, 3, "other"))
    assert await shuffled(shuffling(), seed=1) == await shuffled(shuffling(), seed=1)
    assert await shuffled(shuffling(), seed=1) != await shuffled(shuffling(), seed=2)
    assert await shuffled(shuffling(), seed=1) != await shuffled(shuffling(name="other"), seed=1)


async def test_batches_of_a_shuffle_queue_hold_whole_elements_and_the_rest_comes_at_the_end() -> None:
    with fr.Graph() as graph:
        queue = fr.ShuffleQueue(10, 3, ["float32", "int64"], [(2,), ()], seed=1)
        images, labels = fr.placeholder("float32", (None, 2)), fr.placeholder("int64", (None,))
        put, close, size = queue.enqueue_many((images, labels)), queue.close(), queue.size()
        four, rest = queue.dequeue_many(4), queue.dequeue_up_to(7)
    async with fr.Session(graph) as session:
        await session.run(put, {images: [[i, i] for i in range(7)], labels: range(7)})
        batches = [await session.run(four)]
        await session.run(close)
        batches.append(await session.run(rest))
        assert await session.run(size) == 0
    assert [len(ids) for _, ids in batches] == [4, 3]
    assert sorted(np.concatenate([ids for _, ids in batches])) == list(range(7))
    assert all(np.array_equal(rows, np.stack([ids, ids], 1)) for rows, ids in batches)


async def test_the_priority_is_the_first_component_and_comes_out_again() -> None:
    with fr.Graph() as graph:
        queue = fr.PriorityQueue(8, ["float32", "int32"], [(2,), ()])
        bare = fr.PriorityQueue(8, "float32", name="bare")
        put = [queue.enqueue((priority, [priority, 0.5], place)) for place, priority in enumerate((2, 1, 2, 0))]
        several = queue.enqueue_many(([1, -5], np.ones((2, 2)), [7, 8]))
        got, batch = queue.dequeue(), queue.dequeue_many(5)
        one, other = bare.enqueue((3, [1.0])), bare.dequeue()
    assert [str(spec) for spec in queue.specs] == ["int64[]", "float32[2]", "int32[]"]
    assert [str(spec) for spec in bare.specs] == ["int64[]", "float32[...]"]
    async with fr.Session(graph) as session:
        for operation in [*put, several, one]:
            await session.run(operation)
        first, _, place = await session.run(got)
        priorities, _, places = await session.run(batch)
        assert await session.run(other) == (3, [1.0])
    assert (first, place) == (-5, 8)
    assert (priorities.tolist(), places.tolist()) == ([0, 1, 1, 2, 2], [3, 1, 7, 0, 2])


async def test_a_priority_queue_of_nothing_else_holds_priorities() -> None:
    with fr.Graph() as graph:
        queue = fr.PriorityQueue(8, ())
        put, got = queue.enqueue_many(([3, 1, 2],)), queue.dequeue_many(3)
    async with fr.Session(graph) as session:
        await session.run(put)
        (found,) = await session.run(got)
    assert found.tolist() == [1, 2, 3]


async def test_queues_of_other_orders_under_one_name_are_told_apart() -> None:
    async with fr.Session(shuffling(1)[0]) as session:
        pass
    graph, queue, _ = shuffling(1)
    with graph:
        size = queue.size()
    with fr.Graph() as other:
        plain = fr.FIFOQueue(12, "int64", (), name="rows").size()
    async with fr.LocalCluster(worker=1) as cluster:
        async with fr.Session(graph, cluster=cluster) as session:
            assert await session.run(size) == 0
        async with fr.Session(other, cluster=cluster) as session:
            says = r"'rows' exists on .* for \(int64\[\]\) in order shuffle 5 1 0, not with .* for"
            with pytest.raises(fr.GraphError, match=says):
                await session.run(plain)


async def test_a_cluster_gives_elements_in_the_same_order_and_forgets_them_when_reset() -> None:
    expected = await shuffled(shuffling(3))
    with fr.Graph() as graph:
        with fr.device("/job:ps"):
            rows = fr.ShuffleQueue(12, 5, "int64", (), seed=3)
            urgent = fr.PriorityQueue(8, "int64", ())
        with fr.device("/job:worker"):
            row, first = rows.dequeue() + 0, urgent.dequeue()
            put, size = urgent.enqueue_many(([3, 1, 2], [30, 10, 20])), urgent.size()
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with session.producing(rows, range(30)):
            assert await all_of(session, row) == expected
        await session.run(put)
        assert await session.run(first) == (1, 10)
        await session.reset()
        assert await session.run(size) == 0
        async with session.producing(rows, range(30)):
            assert await all_of(session, row) == expected


async def test_a_graph_that_came_back_from_bytes_has_the_same_order() -> None:
    graph, queue, got = shuffling(3)
    with graph:
        x = fr.placeholder("int64", (), name="x")
        queue.enqueue(x, name="put")
        queue.close(name="close")
    back = fr.Graph.from_bytes(graph.to_bytes())
    assert back.to_bytes() == graph.to_bytes()
    put, close, again = (back.get_operation_by_name(name) for name in ("put", "close", got.op.name))
    async with fr.Session(back) as session:

        async def produce() -> None:
            for i in range(30):
                await session.run(put, {back.get_tensor_by_name("x:0"): i})
            await session.run(close)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            found = await all_of(session, again.outputs[0])
    assert found == await shuffled(shuffling(3))


def test_what_makes_no_queue_is_an_error_at_its_line() -> None:
    with fr.Graph():
        with pytest.raises(
            fr.SpecError, match=r"a queue \(.*\): min_after_dequeue is .* at least 1, not 0; .*FIFOQueue"
        ):
            fr.ShuffleQueue(4, 0, "float32")
        with pytest.raises(fr.SpecError, match=r"ShuffleQueue\(capacity: int, .*\): missing .* 'min_after_dequeue'"):
            fr.ShuffleQueue(4, dtypes="float32")  # type: ignore[call-arg]
        with pytest.raises(fr.SpecError, match="min_after_dequeue=4 leaves nothing to dequeue"):
            fr.ShuffleQueue(4, 4, "float32")
        with pytest.raises(fr.SpecError, match="room for at least one element, got capacity='a'"):
            fr.ShuffleQueue("a", 4, "float32")  # type: ignore[arg-type]
        with pytest.raises(fr.SpecError, match="2 dtypes need as many shapes, got 1"):
            fr.PriorityQueue(4, ["float32", "int32"], [()])
        queue = fr.PriorityQueue(4, "float32", ())
        with pytest.raises(fr.SpecError, match="takes 2 components, of which the priority is the first, not 1"):
            queue.enqueue(1.0)
        with pytest.raises(fr.SpecError, match="does not fit int64"):
            queue.enqueue((1.5, 1.0))
        assert repr(queue) == "<PriorityQueue 'queue' of (int64[], float32[])>"
