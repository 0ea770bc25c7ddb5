from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cluster_plans import PS, Writer
from session_world import assert_quiet, cancel_everywhere, every_way, host_of, lanes, world_checked, world_slow

import flowrt as fr
from flowrt.base.errors import FlowrtError, GraphError, ResourceError, SpecError, StepCancelled
from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.spec import Spec
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.rendezvous import DEAD
from flowrt.sched.running import own

F2 = Spec("float32", (2,))
CONTEXT = RunContext(("test", 1), 1, 1)


async def run(plan: Plan, *feeds: Any, tapes: bool = True) -> list[Any]:
    host = Host(threads=1)
    try:
        return await Executor(plan, host, tapes=tapes).run([np.asarray(a) for a in feeds], CONTEXT)
    finally:
        await host.aclose()


# ── control flow ──


def choice() -> Any:
    with fr.Graph() as graph:
        x, pred = fr.placeholder("float32", (2,), name="x"), fr.placeholder("bool", (), name="pred")
        if_false, if_true = fr.switch(x, pred, name="which")
        down, up = fr.negative(if_false, name="down"), fr.add(if_true, 10.0, name="up")
        value, index = fr.merge([down, up])
        after = value * 2.0
    return graph, x, pred, down, up, value, index, after


@every_way
async def test_a_merge_takes_the_side_that_lives(options: fr.Options) -> None:
    graph, x, pred, _, _, value, index, after = choice()
    async with fr.Session(graph, options=options) as session:
        for side, expected in ((True, [11, 12]), (False, [-1, -2])):
            got = await session.run([value, index, after], {x: [1, 2], pred: side})
            np.testing.assert_array_equal(got[0], expected)
            assert got[1] == int(side)
            np.testing.assert_array_equal(got[2], 2 * np.float32(expected))
        assert_quiet(session)


@every_way
async def test_fetching_a_dead_tensor_names_the_switch_and_its_line(options: fr.Options) -> None:
    graph, x, pred, down, up, value, *_ = choice()
    async with fr.Session(graph, options=options) as session:
        with pytest.raises(fr.DeadTensorError, match=r"add 'up' .* switch 'which' \(.*test_executor.py:\d+\) took the"):
            await session.run([value, up], {x: [1, 2], pred: False})
        with pytest.raises(fr.DeadTensorError, match="negative 'down'"):
            await session.run(down, {x: [1, 2], pred: True})
        assert (await session.run(up, {x: [1, 2], pred: True})).tolist() == [11, 12]
        assert_quiet(session)


@every_way
async def test_the_switch_that_is_named_is_the_one_that_was_alive(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x, a, b = fr.placeholder("float32", ()), fr.placeholder("bool", ()), fr.placeholder("bool", ())
        _, outer = fr.switch(x, a, name="outer")
        _, inner = fr.switch(outer + 1.0, b, name="inner")
        y = inner * 2.0
    async with fr.Session(graph, options=options) as session:
        with pytest.raises(fr.DeadTensorError, match="switch 'outer'"):
            await session.run(y, {x: 1, a: False, b: True})
        with pytest.raises(fr.DeadTensorError, match="switch 'inner'"):
            await session.run(y, {x: 1, a: True, b: False})
        assert await session.run(y, {x: 1, a: True, b: True}) == 4.0


async def test_what_an_effect_answers_dead_is_dead_for_all_that_follows() -> None:
    """A tensor that another task did not make: it is passed on, nothing computes with it, nothing waits for it."""
    host, scalar = Host(PS, threads=1), Spec("float64", ())
    variable = {"resource": "v", "container": "", "dtype": "float64", "shape": ()}
    w = Writer(PS)
    came = w.recv(0, PS, scalar)
    w.send(w.node("add", came, came, out=scalar), 1, PS)
    alive = w.recv(2, PS, scalar)
    w.node("assign", alive, **variable)
    w.node("assign", alive, control=(0,), **(variable | {"resource": "never"}))
    merged = w.merge("either", came, alive, scalar)
    w.send(merged, 3, PS)
    try:
        async with asyncio.timeout(10):
            host.rendezvous.open(CONTEXT.key, {2: np.asarray(5.0)})
            dead = asyncio.ensure_future(host.rendezvous.send(CONTEXT.key, 0, DEAD))
            taken = [host.rendezvous.expect(CONTEXT.key, edge) for edge in (1, 3)]
            await Executor(w.plan(), host).run((), CONTEXT)
            await dead
        assert taken[0].result() is DEAD
        assert taken[1].result() == 5.0
        assert set(host.inventory()) == {("", "v")}
    finally:
        await host.aclose()


@every_way
async def test_writes_on_the_dead_side_do_not_happen(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable([0.0, 0.0])
        x, pred = fr.placeholder("float32", (2,)), fr.placeholder("bool", ())
        _, if_true = fr.switch(x, pred)
        write = v.assign(if_true)
        queue = fr.FIFOQueue(3, "float32", shapes=(2,))
        put, size = queue.enqueue(if_true), queue.size()
    async with fr.Session(graph, options=options) as session:
        await session.run([write, put], {x: [1, 2], pred: False})
        assert (await session.run(v)).tolist() == [0, 0]
        assert await session.run(size) == 0
        await session.run([write, put], {x: [1, 2], pred: True})
        assert (await session.run(v)).tolist() == [1, 2]
        assert await session.run(size) == 1


@every_way
async def test_control_dependencies_decide_what_a_read_sees(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(1.0, name="v")
        first = v.assign(5.0)
        with fr.control_dependencies([first]):
            between = v.read()
        with fr.control_dependencies([between]):
            second = v.assign_add(2.0)
        with fr.control_dependencies([second]):
            last = v.read()
        old = v * 1.0
    async with fr.Session(graph, options=options) as session:
        assert await session.run([v, old, between, last]) == [1, 1, 5, 7]
        assert await session.run([v, old, between, last]) == [7, 7, 5, 7]
        assert await session.run(last) == 7


@every_way
async def test_groups_and_chains_of_operations_run_in_order(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(1.0)
        done = v.assign(2.0)
        for factor in (3.0, 5.0, 7.0):
            with fr.control_dependencies([done]):
                done = v.assign(v.read() * factor)
        everything = fr.group(done)
    async with fr.Session(graph, options=options) as session:
        assert await session.run(everything) is None
        assert await session.run(v) == 210.0


@pytest.mark.parametrize("seed", range(12))
async def test_every_way_to_run_a_random_step_answers_the_same(seed: int) -> None:
    rng = random.Random(seed)
    with fr.Graph() as graph:
        x, pred = fr.placeholder("float32", (None, 3)), fr.placeholder("bool", ())
        v = fr.Variable(np.float32([1, 2, 3]))
        values = [x, x + v, v * 2.0]
        for _ in range(15):
            a, b = rng.choice(values), rng.choice(values)
            match rng.randrange(6):
                case 0:
                    values.append(a + b)
                case 1:
                    values.append(fr.tanh(a))
                case 2:
                    values.append(fr.maximum(a, b) - 1.0)
                case 3:
                    off, on = fr.switch(a, pred)
                    values.append(fr.merge([off * 2.0, on])[0])
                case 4:
                    values.append(fr.reshape(a, fr.shape_of(a)))
                case 5:
                    values.append(fr.where(fr.greater(a, 0.0), b * 0.5, a * 0.25) + x)
        write = v.assign_add(fr.reshape(fr.sum(values[-1] + x, axis=0), (3,)))
    fetches = rng.sample(values, 4)
    answers = []
    for optimize in (True, False):
        for tapes in (True, False):
            async with fr.Session(graph, options=fr.Options(optimize=optimize, tapes=tapes)) as session:
                got = []
                for i in range(3):
                    fed = np.float32(np.arange(3 * (1 + i)).reshape(-1, 3)) / 7
                    out = await session.run([*fetches, v, write], {x: fed, pred: i % 2 == 0})
                    got += out[:-1]
                answers.append(got)
    for other in answers[1:]:
        for expected, actual in zip(answers[0], other, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")


# ── failures and cancellation ──


@every_way
async def test_a_cancelled_step_stops_its_kernels_and_holds_nothing(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (1,))
        v = fr.Variable(np.zeros(1), name="v")
        y = x
        for _ in range(400):
            y = world_slow(y)
        write = v.assign_add(y)
    async with fr.Session(graph, options=options) as session:
        step = session.compile([y, write], [x])
        for _ in range(3):
            task = asyncio.ensure_future(step([1.0]))
            for _ in range(10):
                await asyncio.sleep(0)
            await asyncio.wait([task], timeout=0.05)
            began = time.process_time()  # however long others have the processor
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.process_time() - began < 6.0  # a kernel or so, not four hundred, which take 12 s at least
            assert_quiet(session)
        assert (await session.run(v)).tolist() == [0]


async def test_a_long_tape_that_is_cancelled_anywhere_has_run_or_not_and_holds_nothing() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (1,))
        v = fr.Variable(np.float64(0), name="v")
        grow = v.assign_add(fr.sum(world_slow(x)) * 0.0 + 1.0)
    async with fr.Session(graph) as session:
        step, data, seen = session.compile(grow, [x]), np.ones(1), [0.0]
        for _ in range(2):
            await step(data)

        async def check() -> None:
            assert_quiet(session)
            seen.append(float(await session.run(v)))

        assert await cancel_everywhere(lambda: step(data), check) == 1
        assert all(now - before in (0, 1) for before, now in pairwise(seen[1:]))
        with pytest.raises(fr.StepTimeout):
            await session.run(grow, {x: data}, timeout=0.001)
        assert_quiet(session)


async def test_two_awaited_steps_that_need_lanes_take_turns() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (1,))
        one, other = world_slow(x), world_slow(x * 2.0)
    finished: list[str] = []
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        steps = {"one": session.compile(one, [x]), "other": session.compile(other, [x])}
        data, both = np.ones(1), asyncio.Barrier(2)

        async def run(label: str) -> None:
            await steps[label](data)
            await both.wait()
            for _ in range(6):
                await steps[label](data)
                finished.append(label)

        async with asyncio.TaskGroup() as group:
            for label in steps:
                group.create_task(run(label))
    for number in range(1, 12):
        assert abs(finished[:number].count("one") - finished[:number].count("other")) <= 1


@every_way
async def test_cancelling_at_any_point_leaves_nothing_held(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x, pred = fr.placeholder("float64", (2,)), fr.placeholder("bool", ())
        v = fr.Variable(np.zeros(100_000), name="v")
        off, on = fr.switch(world_slow(x * 0.0)[:1], pred)
        value, _ = fr.merge([off + 1.0, on + 2.0])
        write = v.assign_add(fr.broadcast_to(value, (100_000,)))
    async with fr.Session(graph, options=options) as session:
        await session.run(write, {x: [0, 0], pred: True})

        async def check() -> None:
            assert_quiet(session)
            assert np.unique(await session.run(v)).size == 1

        points = await cancel_everywhere(lambda: session.run([value, write], {x: [0, 0], pred: False}), check)
        assert points >= 2
    assert lanes() == []


@every_way
async def test_one_failure_ends_what_runs_beside_it(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x, bad = fr.placeholder("float64", (1,)), fr.placeholder("float32", (2,))
        queue = fr.FIFOQueue(1, "float32")
        waits = queue.dequeue()
        slow = x
        for _ in range(50):
            slow = world_slow(slow)
        guarded = world_checked(bad, name="guard")
    async with fr.Session(graph, options=options) as session:
        with pytest.raises(FlowrtError, match="'guard'"):
            await session.run([waits, guarded], {bad: [1, -1]}, timeout=30)
        with pytest.raises(FlowrtError, match="'guard'"):
            await session.run([slow, guarded, waits], {bad: [1, -1], x: [1]}, timeout=30)
        assert_quiet(session)


async def test_a_failure_beside_a_running_kernel_is_named_after_the_node_that_failed() -> None:
    with fr.Graph() as graph:
        bad = fr.placeholder("float32", (None,))
        good = fr.placeholder("float32", (None,))
        one, two = world_checked(bad, name="one"), world_checked(good, name="two")
    async with fr.Session(graph, options=fr.Options(tapes=False, threads=2)) as session:
        for size in range(1, 30):
            fed = {bad: -np.ones(size, np.float32), good: np.ones(size, np.float32)}
            with pytest.raises(FlowrtError, match="'one'"):
                await session.run([two, one], fed)


@every_way
async def test_shapes_that_do_not_fit_at_step_time_name_the_node(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder("float32", (None,)), fr.placeholder("float32", (None,))
        z = fr.add(x, y, name="both")
        v = fr.Variable([0.0, 0.0], name="v")
        write = v.assign(fr.negative(x))
    async with fr.Session(graph, options=options) as session:
        with pytest.raises(SpecError, match=r"add 'both' \(.*test_executor.py:\d+\)"):
            await session.run(z, {x: [1, 2], y: [1, 2, 3]})
        for wrong in ([1], [1, 2, 3]):
            with pytest.raises(SpecError, match=r"assign 'v/assign'"):
                await session.run(write, {x: wrong})
        assert (await session.run(z, {x: [1, 2], y: [3]})).tolist() == [4, 5]
        assert (await session.run(v)).tolist() == [0, 0]
        assert_quiet(session)


async def test_memory_that_is_not_there_is_a_resource_error() -> None:
    for tapes in (True, False):
        with fr.Graph() as graph:
            n = fr.placeholder("int64", (1,))
            y = fr.zeros(n, dtype="float64") + 1.0
        async with fr.Session(graph, options=fr.Options(tapes=tapes)) as session:
            with pytest.raises(ResourceError, match="memory"):
                await session.run(y, {n: [1 << 46]})
            assert (await session.run(y, {n: [2]})).tolist() == [1, 1]


# ── plans and hosts ──


def negated(op: str = "negative", **attrs: Any) -> Plan:
    return Plan("/job:local/task:0", (PlanNode(op, "n", (0,), (F2,), attrs),), (PlanFeed("x", F2),), (1,))


async def test_an_op_that_nothing_carries_out_is_refused_when_the_plan_is_made_ready() -> None:
    host = Host(threads=1)
    with pytest.raises(GraphError, match="no_such_op 'n'"):
        Executor(negated("no_such_op"), host)
    await host.aclose()


async def test_an_empty_plan_is_done_at_once() -> None:
    assert await run(Plan("t", ())) == []
    feed = np.float32([1, 2])
    (got,) = await run(Plan("t", (), (PlanFeed("x", F2),), (0,)), feed)
    assert got.tolist() == [1, 2]
    assert not np.shares_memory(got, feed)


async def test_a_closed_host_runs_nothing() -> None:
    host = Host(threads=1)
    executor = Executor(negated(), host)
    assert (await executor.run([np.float32([1, 2])], CONTEXT))[0].tolist() == [-1, -2]
    await host.aclose()
    await host.aclose()
    with pytest.raises(fr.ClosedError):
        await executor.run([np.float32([1, 2])], CONTEXT)


async def test_running_now_compiles_nothing_and_waits_for_nobody() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        v = fr.Variable([1.0, 1.0], name="v")
        y, write = x + v, v.assign_add(x)
    async with fr.Session(graph) as session:
        step = session.compile([y, write], [x])
        fed = [np.float32([1, 2])]
        await step(*fed)
        registered = step._step.registered
        number = 99
        assert registered.run_now([np.float32([1, 2])], number, 0)[0].tolist() == [3, 5]
        variables, name = host_of(session).variables, frozenset([("", "v")])
        for reads, writes in ((frozenset(), name), (name, frozenset())):
            assert variables.try_hold(reads, writes)
            assert registered.run_now(fed, number, 0) is None
            waiting = asyncio.ensure_future(step(*fed))
            await asyncio.sleep(0)
            assert not waiting.done()
            variables.release(reads, writes)
            await waiting
        assert_quiet(session)


def test_answers_are_copied_only_where_they_are_shared() -> None:
    fed, mine = np.ones(2), np.ones(2)
    frozen = np.ones(2)
    frozen.setflags(write=False)
    out = own([mine, mine, fed, mine[:1], frozen], [fed])
    assert out[0] is mine
    for i, a in enumerate(out):
        assert a.flags.writeable
        assert not np.shares_memory(a, fed)
        assert not any(np.shares_memory(a, b) for b in out[i + 1 :])


async def test_a_stopped_run_begins_no_kernel() -> None:
    from flowrt.sched.running import run_words
    from flowrt.sched.single import NodeRunner
    from flowrt.sched.tape.tape import CANCELLED

    words = run_words(1, 1)
    words[0] = CANCELLED
    with pytest.raises(StepCancelled, match="was not begun"):
        NodeRunner(negated().nodes[0], Memory())([np.float32([1, 2])], words)


@pytest.mark.parametrize("tapes", [True, False])
async def test_scalars_of_numpy_are_fed_as_arrays(tapes: bool) -> None:
    scalar = Spec("float32", ())
    node = PlanNode("negative", "n", (0,), (scalar,), {})
    host = Host(threads=1)
    executor = Executor(Plan("/job:local/task:0", (node,), (PlanFeed("x", scalar),), (1,)), host, tapes=tapes)
    for number in range(3):
        assert [a.tolist() for a in await executor.run([np.float32(number)], CONTEXT)] == [-number]
    assert tapes == (executor.run_now([np.float32(2)], 1, 1) is not None)
    await host.aclose()
