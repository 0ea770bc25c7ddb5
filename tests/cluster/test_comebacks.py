"""Sessions whose nodes end and are there again: what they held is restored, or said to be gone."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from cluster_plans import WORKERS

import flowrt as fr

ONES = np.ones(4, "float32")


def counting() -> tuple[fr.Graph, Any, list[fr.Variable], Any]:
    """A graph with a variable on each of two workers, and a step that adds what is fed to both."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,), name="x")
        held, added = [], []
        for place, name in enumerate("ab"):
            with fr.device(f"/job:worker/task:{place}"):
                held.append(fr.Variable(np.zeros(4, "float32"), name=name))
                added.append(held[-1].assign_add(x))
        step = fr.group(*added)
    return graph, x, held, step


@asynccontextmanager
async def opened(graph: fr.Graph, path: Any, **how: Any) -> AsyncIterator[tuple[fr.LocalCluster, fr.Session]]:
    """A cluster of two workers, and a session on it with checkpoints."""
    async with (
        fr.LocalCluster(worker=2) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(path), **how) as session,
    ):
        yield cluster, session


async def lose(cluster: fr.LocalCluster, session: fr.Session, task: str) -> None:
    """Kill a node, and wait until the session knows."""
    runner = session._open()
    cluster.processes[task].kill()
    await cluster.processes[task].wait()
    async with asyncio.timeout(20):
        while task not in runner.lost:
            await runner.wait_changed(runner.lost, runner.suspects)


async def find(cluster: fr.LocalCluster, session: fr.Session, task: str) -> None:
    """Start a node again, and wait until the session has met it."""
    runner = session._open()
    await cluster.respawn(task)
    async with asyncio.timeout(20):
        while task in runner.lost:
            await runner.wait_changed(runner.lost, runner.suspects)


async def again(cluster: fr.LocalCluster, session: fr.Session, task: str) -> None:
    await lose(cluster, session, task)
    await find(cluster, session, task)


async def failing(step: Callable[[], Awaitable[Any]]) -> str:
    with pytest.raises(fr.NodeLost) as caught:
        await step()
    return str(caught.value)


async def test_all_variables_go_back_to_the_newest_checkpoint(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    graph, x, held, step = counting()
    async with opened(graph, tmp_path) as (cluster, session):
        for _ in range(3):
            await session.run(step, {x: ONES})
        assert await session.save() == 3
        await session.run(step, {x: ONES})
        await again(cluster, session, WORKERS[1])
        with caplog.at_level(logging.WARNING):
            said = await failing(lambda: session.run(step, {x: ONES}))
        assert re.match(rf"{WORKERS[1]} had ended, and is back without what it held, as the variable 'b'; all", said)
        assert "put back to step 3: run the step again" in said
        assert sum("put back to step 3" in record.message for record in caplog.records) == 1
        await session.run(step, {x: ONES})
        np.testing.assert_array_equal(await session.run(held), np.full((2, 4), 4.0))


async def test_before_the_first_checkpoint_they_begin_anew(tmp_path: Any) -> None:
    graph, x, held, step = counting()
    async with opened(graph, tmp_path) as (cluster, session):
        compiled = session.compile(step, feeds=[x])
        await compiled(ONES)
        await again(cluster, session, WORKERS[0])
        assert "put back to step 0" in await failing(lambda: compiled(ONES))
        await compiled(ONES)
        np.testing.assert_array_equal(await session.run(held), np.ones((2, 4)))


async def test_without_checkpoints_it_is_said_what_is_gone_and_what_helps() -> None:
    graph, x, held, step = counting()
    async with fr.LocalCluster(worker=2) as cluster:
        async with fr.Session(graph, cluster=cluster) as session:
            await session.run(step, {x: ONES})
            await again(cluster, session, WORKERS[1])
            for _ in range(2):
                said = await failing(lambda: session.run(step, {x: ONES}))
                assert "back without what it held, as the variable 'b'; open the session again" in said
                assert "checkpoints=fr.Checkpoints(path)" in said
        async with fr.Session(graph, cluster=cluster) as session:
            await session.run(step, {x: ONES})
            assert (await session.run(held))[1].tolist() == [1, 1, 1, 1]


async def test_while_a_trainer_runs_variables_are_its_own_to_put_back(tmp_path: Any) -> None:
    graph, x, _, step = counting()
    async with opened(graph, tmp_path) as (cluster, session):
        await session.run(step, {x: ONES})

        async def end() -> None:
            del session._iterating["a trainer"]

        session._iterating["a trainer"] = end
        await again(cluster, session, WORKERS[1])
        for _ in range(2):
            said = await failing(lambda: session.run(step, {x: ONES}))
            assert said.endswith("as the variable 'b'; training puts that back: run the step again")
        await end()
        assert "put back to step 0" in await failing(lambda: session.run(step, {x: ONES}))


async def test_an_error_of_another_kind_stays_what_it_is(tmp_path: Any) -> None:
    with fr.Graph() as graph:
        rows = fr.placeholder("int64", (None,), name="rows")
        with fr.device(WORKERS[1]):
            taken = fr.take(np.ones((3, 2), "float32"), rows)
    async with opened(graph, tmp_path) as (cluster, session):
        await session.run(taken, {rows: [0]})
        await again(cluster, session, WORKERS[1])
        with pytest.raises(fr.FlowrtError, match=r"take .* out of range"):
            await session.run(taken, {rows: [7]})


async def test_a_session_closes_while_variables_are_put_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x, _, step = counting()
    begun, never = asyncio.Event(), asyncio.Event()

    async def go_back(session: fr.Session) -> None:
        begun.set()
        await never.wait()

    async with opened(graph, tmp_path) as (cluster, session):
        await session.run(step, {x: ONES})
        await again(cluster, session, WORKERS[1])
        monkeypatch.setattr(session.checkpoints, "go_back", go_back)
        running = asyncio.create_task(session.run(step, {x: ONES}))
        await begun.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_node_that_held_nothing_is_used_again() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,))
        with fr.device(WORKERS[0]):
            total = fr.Variable(np.zeros(4, "float32"))
        with fr.device(WORKERS[1]):
            y = fr.exp(x)
        step = total.assign_add(y)
    async with fr.LocalCluster(worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        await session.run(step, {x: 0 * ONES})
        await again(cluster, session, WORKERS[1])
        await session.run(step, {x: 0 * ONES})
        np.testing.assert_array_equal(await session.run(total), 2 * ONES)


async def test_where_prediction_had_placed_a_variable_is_where_it_comes_back(tmp_path: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (64, 256))
        ends = []
        for tower in range(2):
            w = fr.Variable(fr.random.normal((256, 256), stddev=0.06, seed=tower), name=f"w{tower}")
            ends.append(fr.sum(fr.matmul(x, w, name=f"product{tower}")))
        loss = fr.square(ends[0] - ends[1] - 1.0)
        train = fr.optim.SGD(1e-4).minimize(loss)
    feeds = {x: np.random.default_rng(0).normal(size=(64, 256)).astype("float32")}
    auto = fr.placement.Auto(profile={"product*": 0.01})
    async with opened(graph, tmp_path, placement=auto) as (cluster, session):
        placed = str(await session.explain(loss))
        assert all(f"{task}/" in placed for task in WORKERS[:2])
        await session.save()
        first = await session.run([loss, train], feeds)
        await lose(cluster, session, WORKERS[1])
        await failing(lambda: session.run([loss, train, ends[0]], feeds))  # a new step, while its variables are away
        await find(cluster, session, WORKERS[1])
        assert "put back to step 0" in await failing(lambda: session.run([loss, train], feeds))
        assert (await session.run([loss, train], feeds))[0] == first[0]
