from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from session_world import assert_quiet, cancel_everywhere, every_way, host_of, lanes, until, world_checked, world_slow

import flowrt as fr
from flowrt.kernels.store.background import wait_compiled
from flowrt.session.session import MAX_STEPS, YIELD_EVERY

Pair = namedtuple("Pair", "left right")


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


@every_way
async def test_answers_have_the_form_of_what_was_fetched(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        v = fr.Variable([1.0, 2.0], name="v")
        y, total = x + v, fr.sum(x)
        bump = v.assign_add([1.0, 1.0])
    async with fr.Session(graph, options=options) as session:
        asked = {"a": [y, (total, y)], "p": Pair(x, {"op": bump, 3: v}), "none": []}
        got = await session.run(asked, {x: [1, 2]})
        turned = await session.run(OrderedDict(y=y, x=x), {x: [1, 2]})
        assert type(turned) is OrderedDict
        assert list(turned) == ["y", "x"]
        assert list(got) == ["a", "p", "none"]
        assert isinstance(got["p"], Pair)
        np.testing.assert_array_equal(got["a"][0], [2, 4])
        assert isinstance(got["a"][1], tuple)
        assert got["a"][1][0] == 3.0
        np.testing.assert_array_equal(got["a"][1][1], [2, 4])
        np.testing.assert_array_equal(got["p"].left, [1, 2])
        assert got["p"].right["op"] is None
        np.testing.assert_array_equal(got["p"].right[3], [1, 2])
        assert got["none"] == []
        np.testing.assert_array_equal(await session.run(v), [2, 3])
        assert await session.run([]) == []
        assert await session.run(bump) is None
        assert (await session.run({"deep": [[[bump]]]})) == {"deep": [[[None]]]}
        scalar = await session.run(total, {x: [1, 2]})
        assert type(scalar) is np.float32


@every_way
async def test_any_tensor_may_be_fed(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        v = fr.Variable([5.0, 5.0])
        c = fr.constant(np.float32([10, 10]))
        middle = x * 2.0
        y = middle + v + c
        bump = v.assign_add([1.0, 1.0])
    async with fr.Session(graph, options=options) as session:
        np.testing.assert_array_equal(await session.run(y, {x: [1, 2]}), [17, 19])
        np.testing.assert_array_equal(await session.run(y, {middle: [0, 0]}), [15, 15])
        np.testing.assert_array_equal(await session.run(y, {middle: [0, 0], c: [1, 1]}), [6, 6])
        got, _ = await session.run([y, bump], {middle: [0, 0], v: [100, 100]})
        np.testing.assert_array_equal(got, [110, 110])
        np.testing.assert_array_equal(await session.run(v), [6, 6])  # fed reads, not fed state
        np.testing.assert_array_equal(await session.run(y, {y: [3, 4]}), [3, 4])


@every_way
async def test_feeds_may_be_any_data_that_fits(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 2), name="x")
        s = fr.placeholder("float64", ())
        n = fr.placeholder("uint8", (2,))
        y, t, m = x * 2.0, s + 1.0, n + np.uint8(1)
    strided = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    frozen = ones(1, 2)
    frozen.setflags(write=False)
    async with fr.Session(graph, options=options) as session:
        for value in (
            [[1, 2], [3, 4]],
            ((1.5, 2.5),),
            [[True, False]],
            strided,
            strided[::-1],
            np.asfortranarray(ones(3, 2)),
            frozen,
            np.zeros((0, 2), np.float32),
            np.array([[1, 2]], ">f4"),
            np.broadcast_to(np.float32(3), (4, 2)),
            [np.float32([1, 2]), [3.0, 4]],
        ):
            expected = 2 * np.asarray(value, np.float32)
            for _ in range(2):
                np.testing.assert_array_equal(await session.run(y, {x: value}), expected)
        for scalar in (2, 2.0, True, np.float64(2), np.array(2.0), np.array(2.0, ">f8")):
            assert await session.run(t, {s: scalar}) == float(scalar) + 1
        np.testing.assert_array_equal(await session.run(m, {n: [254, 1]}), [255, 2])


@every_way
async def test_fetched_arrays_are_nobody_elses_memory(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        v = fr.Variable([1.0, 2.0], name="v")
        c = fr.constant(np.float32([7, 7]))
        y = x + v
        fetches = [x, fr.identity(x), v, v.read(), c, fr.identity(c), y, y, fr.identity(y), fr.reshape(y, (1, 2))]
    fed = ones(2)
    async with fr.Session(graph, options=options) as session:
        step = session.compile(fetches, [x])
        for _ in range(4):
            got = await step(fed)
            for i, a in enumerate(got):
                assert a.flags.writeable
                assert not np.shares_memory(a, fed)
                for b in got[i + 1 :]:
                    assert not np.shares_memory(a, b)
            np.testing.assert_array_equal(got[6], [2, 3])
            for a in got:
                a[...] = -1
        np.testing.assert_array_equal(fed, [1, 1])
        np.testing.assert_array_equal(await session.run(v), [1, 2])
        np.testing.assert_array_equal(await session.run(c), [7, 7])
        passed_on = session.compile(fetches[1], [x])
        for _ in range(3):
            assert not np.shares_memory(await passed_on(fed), fed)


@every_way
async def test_a_hundred_steps_at_once_share_variables(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        small = fr.Variable(np.zeros(3, np.float32))
        large = fr.Variable(np.zeros(300_000, np.float32))
        bump = fr.group(small.assign_add(x), large.assign_add(fr.ones((300_000,))))
        with fr.control_dependencies([bump]):
            read = small.read()
    async with fr.Session(graph, options=options) as session:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for i in range(100):
                group.create_task(session.run([bump, read] if i % 3 == 0 else bump, {x: [1, 2, i]}))
        np.testing.assert_array_equal(await session.run(small), [100, 200, 4950])
        np.testing.assert_array_equal(await session.run(large), np.full(300_000, 100, np.float32))
        assert_quiet(session)


async def test_threads_and_tasks_add_to_one_variable_exactly() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(0.0)
        bump = v.assign_add(1.0)

    def work(session: fr.BlockingSession) -> None:
        step = session.compile(bump)
        for _ in range(200):
            step()

    def script() -> float:
        with fr.BlockingSession(graph) as session:
            threads = [threading.Thread(target=work, args=(session,)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return float(session.run(v))

    assert await asyncio.to_thread(script) == 1200.0


async def test_a_compiled_step_leaves_the_loop_to_others() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        y = x + 1.0
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with fr.Session(graph) as session:
        step = session.compile(y, [x])
        await step(ones(2))
        task = asyncio.ensure_future(other())
        for _ in range(4 * YIELD_EVERY):
            await step(ones(2))
        task.cancel()
        await asyncio.wait([task])
    assert turns >= 3


async def test_a_step_that_takes_too_long_is_cancelled() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(1, "float32", name="q")
        got = queue.dequeue()
        v = fr.Variable(1.0)
    async with fr.Session(graph) as session:
        with pytest.raises(fr.StepTimeout, match=r"'q/dequeue:0' did not finish within 0.01 s"):
            await session.run(got, timeout=0.01)
        assert_quiet(session)
        assert await session.run(v, timeout=10) == 1.0
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("waits", [False, True])
async def test_whenever_the_time_of_a_step_is_up_what_it_takes_is_its_answer_or_still_there(waits: bool) -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(1, "float32", shapes=())
        got, put = queue.dequeue(), queue.enqueue(7.0)
    answered = 0
    async with fr.Session(graph) as session:
        for turns in range(12):
            if not waits:
                await session.run(put)
            taking = asyncio.ensure_future(session.run(got, timeout=50))
            await asyncio.sleep(0)
            putting = [asyncio.ensure_future(session.run(put))] if waits else []
            for _ in range(turns):
                await asyncio.sleep(0)
            for scope in session._running:
                if scope.when() is not None:
                    scope.reschedule(0)  # in the next turn of the loop
            await asyncio.wait([taking, *putting])
            try:
                value = await taking
                answered += 1
            except fr.StepTimeout:
                value = await session.run(got, timeout=10)
            assert value == 7.0, turns
        assert_quiet(session)
    assert answered


async def test_whoever_is_cancelled_as_its_step_ends_is_cancelled() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(12, "float32", shapes=())
        got, put = queue.dequeue(), queue.enqueue(7.0)
    answered = 0
    async with fr.Session(graph) as session:
        for turns in range(12):
            await session.run(put)
            taking = asyncio.ensure_future(session.run(got, timeout=50))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked = taking.cancel()
            await asyncio.wait([taking])
            assert taking.cancelled() == asked, turns
            answered += not asked
        assert_quiet(session)
    assert 0 < answered < 12


async def test_an_outer_timeout_is_not_taken_for_the_steps_own() -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32").dequeue()
    async with fr.Session(graph) as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await session.run(got, timeout=50)
        assert_quiet(session)


async def test_leaving_the_session_ends_its_steps_and_not_their_tasks() -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32", name="q").dequeue()
    afterwards: list[str] = []

    async def waits(session: fr.Session) -> None:
        with pytest.raises(fr.ClosedError, match="closed while the step that fetches 'q/dequeue:0' ran"):
            await session.run(got)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        afterwards.append("went on")

    async with asyncio.TaskGroup() as group:
        async with fr.Session(graph) as session:
            for _ in range(3):
                group.create_task(waits(session))
            await until(lambda: host_of(session)._queues and len(session._running) == 3)
        assert not session._running
    assert afterwards == ["went on"] * 3
    assert lanes() == []


async def test_leaving_waits_for_a_kernel_that_runs() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None,))
        y = world_slow(x)
    async with asyncio.TaskGroup() as group:
        async with fr.Session(graph) as session:
            step = session.compile(y, [x])
            await step(np.zeros(0))
            task = group.create_task(_closed_error(step(np.zeros(3))))
            await until(lambda: session._running)
        assert lanes() == []
    assert task.result()


async def _closed_error(work: Any) -> bool:
    try:
        await work
    except fr.ClosedError:
        return True
    return False


async def test_a_session_cannot_be_used_before_or_after() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        y = x + 1.0
    session = fr.Session(graph)
    with pytest.raises(fr.ClosedError, match="async with"):
        await session.run(y, {x: [1, 2]})
    async with session:
        step = session.compile(y, [x])
        await step([1, 2])
        await step([1, 2])
    for use in (session.run(y, {x: [1, 2]}), step([1, 2]), session.reset(), session.explain(y, [x])):
        with pytest.raises(fr.ClosedError):
            await use
    with pytest.raises(fr.ClosedError, match="opened once"):
        await session.__aenter__()
    await session.__aexit__(None, None, None)  # closing twice is closing once


async def test_a_failed_opening_leaves_nothing() -> None:
    with fr.Graph() as graph:
        fr.Variable(np.zeros(10_000), name="large")
    with pytest.raises(fr.ResourceError):
        await fr.Session(graph, options=fr.Options(memory_limit=4096)).__aenter__()
    assert lanes() == []


async def test_steps_of_a_session_may_be_cancelled_anywhere() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,))
        v = fr.Variable(np.zeros(200_000, np.float32), name="large")
        queue = fr.FIFOQueue(2, "float32", shapes=(4,))
        put = queue.enqueue(fr.tanh(x))
        with fr.control_dependencies([put]):
            got = queue.dequeue()
        with fr.control_dependencies([got]):
            bump = v.assign_add(fr.ones((200_000,)))
        size, drain = queue.size(), queue.dequeue()
    async with fr.Session(graph, options=fr.Options(tapes=False)) as session:

        async def check() -> None:
            assert_quiet(session)
            while await session.run(size):  # put, and the step cancelled before it was taken
                await session.run(drain)

        assert await cancel_everywhere(lambda: session.run([bump, got], {x: ones(4)}), check) >= 3
        assert np.unique(await session.run(v)).size == 1


async def test_a_cancelled_session_run_inside_a_task_group_ends_the_group() -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32").dequeue()
    async with fr.Session(graph) as session:
        task = asyncio.ensure_future(session.run(got))
        await until(lambda: host_of(session)._queues)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_quiet(session)


@every_way
async def test_a_failed_kernel_names_op_node_and_line_and_the_session_goes_on(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        v = fr.Variable([0.0, 0.0])
        y = world_checked(x, name="guard") + 1.0
        done = v.assign_add(y)
    async with fr.Session(graph, options=options) as session:
        for _ in range(2):
            with pytest.raises(fr.FlowrtError, match=r"world_checked 'guard' \(.*test_session.py:\d+\): an index"):
                await session.run([y, done], {x: [-1, 2]})
            assert_quiet(session)
            np.testing.assert_array_equal((await session.run([y], {x: [1, 2]}))[0], [2, 3])
        np.testing.assert_array_equal(await session.run(v), [0, 0])


async def test_an_initial_value_whose_kernel_fails_leaves_the_variable_without_one() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(world_checked(fr.constant(np.float32([-1, 0])), name="bad"), name="v")
        fr.sum(v)
    with pytest.raises(fr.FlowrtError, match="'bad'"):
        await fr.Session(graph, options=fr.Options(optimize=False)).__aenter__()
    assert lanes() == []


async def test_initial_values_are_drawn_once_and_by_the_seed() -> None:
    def model() -> tuple[fr.Graph, Any, Any]:
        with fr.Graph() as graph:
            a = fr.Variable(fr.random.normal((50,)), name="a")
            b = fr.Variable(fr.random.normal((50,)), name="b")
        return graph, a, b

    async def drawn(seed: int | None) -> list[Any]:
        graph, a, b = model()
        async with fr.Session(graph, options=fr.Options(seed=seed)) as session:
            first = await session.run([a, b])
            again = await session.run([a, b])
            np.testing.assert_array_equal(first, again)
            return list(first)

    one, two, three, free = await drawn(3), await drawn(3), await drawn(4), await drawn(None)
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one[0], three[0])
    assert not np.array_equal(free[0], (await drawn(None))[0])
    for seed in (-1, 2**64, 2**63 - 1):
        np.testing.assert_array_equal(await drawn(seed), await drawn(seed))


@every_way
async def test_a_variable_may_start_from_others(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(fr.random.normal((3,)), name="v")
        slot = fr.Variable(fr.zeros_like(v), name="slot")
        twice = fr.Variable(v * 2.0, name="twice")
        both = fr.Variable(twice.read() + v, name="both")
        bump = v.assign_add(fr.ones((3,)))
    async with fr.Session(graph, options=options) as session:
        start, zeros, doubled, tripled = await session.run([v, slot, twice, both])
        np.testing.assert_array_equal(zeros, 0)
        np.testing.assert_array_equal(doubled, start * 2)
        np.testing.assert_array_equal(tripled, start * 2 + start)
        await session.run(bump)
        np.testing.assert_array_equal(await session.run(twice), doubled)


async def test_a_random_op_draws_anew_in_every_step() -> None:
    with fr.Graph(seed=5) as graph:
        noise = fr.random.uniform((8,))
    async with fr.Session(graph) as session:
        draws = [await session.run(noise) for _ in range(3)]
    async with fr.Session(graph) as session:
        np.testing.assert_array_equal(draws[0], await session.run(noise))
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[1], draws[2])


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_is_drawn_does_not_depend_on_how_a_step_ran(size: int) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (size,))
        noise = x + fr.random.normal((size,), dtype="float64", seed=3)
    zeros = np.zeros(size)

    async def awaited(limit: float | None) -> list[Any]:
        async with fr.Session(graph) as session:
            return [await session.run(noise, {x: zeros}, timeout=limit) for _ in range(4)]

    async def compiled() -> list[Any]:
        async with fr.Session(graph) as session:
            step = session.compile(noise, [x])
            return [await step(zeros) for _ in range(4)]

    expected = asyncio.run(awaited(30))
    np.testing.assert_array_equal(asyncio.run(awaited(None)), expected)
    np.testing.assert_array_equal(asyncio.run(compiled()), expected)
    with fr.BlockingSession(graph) as session:
        step = session.compile(noise, [x])
        np.testing.assert_array_equal([step(zeros) for _ in range(4)], expected)


async def test_resetting_a_container_forgets_its_variables_and_no_others() -> None:
    with fr.Graph() as graph:
        with fr.container("mine"):
            a = fr.Variable(1.0, name="a")
        b = fr.Variable(2.0, name="b")
    async with fr.Session(graph) as session:
        await session.reset("mine")
        assert await session.run(b) == 2.0
        with pytest.raises(fr.GraphError, match=r"variable 'a' has no value .* reset"):
            await session.run(a)
        await session.run(a.initializer)
        assert await session.run(a) == 1.0


async def test_a_session_keeps_a_bounded_number_of_compiled_steps() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(1.0)
        tensors = [v + float(i) for i in range(MAX_STEPS + 20)]
    async with fr.Session(graph, options=fr.Options(optimize=False, tapes=False)) as session:
        kept = session.compile(tensors[0])
        for i, tensor in enumerate(tensors):
            assert await session.run(tensor) == 1.0 + i
        assert len(session._steps) == MAX_STEPS
        assert len(session._retired) <= 1 + 1
        assert await kept() == 1.0


async def test_two_thousand_steps_leave_memory_tasks_and_threads_flat() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        v = fr.Variable(0.0)
        y = fr.sum(fr.tanh(x)) + v
        bump = v.assign_add(1.0)
    async with fr.Session(graph) as session:
        step = session.compile([y, bump], [x])

        async def many(n: int) -> None:
            for i in range(n):
                await session.run(y, {x: np.zeros(1 + i % 3, np.float32)})
                await step(np.zeros(1 + i % 3, np.float32))

        await many(100)
        assert wait_compiled(100)  # what is fused then is larger, once
        await many(100)
        tasks, threads = len(asyncio.all_tasks()), len(threading.enumerate())
        tracemalloc.start()
        try:
            await many(100)
            before = tracemalloc.get_traced_memory()[0]
            await many(1000)
            after = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert after - before < 150_000  # 4,096 remembered step keys are the one thing that still grows
        assert (len(asyncio.all_tasks()), len(threading.enumerate())) == (tasks, threads)
        assert_quiet(session)
