"""Local steps on processes: the slow, the dead and the interrupted, against the same in NumPy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from test_local_steps import INPUTS, MOMENTUM, RATE, TRUTH, Batch, DiLoCo, batches, loss_fn, rounds

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path


def build(policy: Any, replicas: int, servers: int = 1) -> tuple[fr.Graph, Any]:
    with fr.Graph() as graph:
        optimizer = fr.optim.Momentum(RATE, MOMENTUM)
        return graph, fr.train.Replicated(loss_fn, INPUTS, optimizer, replicas, policy, servers=servers)


def without_end() -> Iterator[Batch]:
    while True:
        yield from batches(100)


def assert_are(got: Any, expected: list[Any]) -> None:
    for value, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-3, atol=1e-5)


async def test_it_is_diloco_on_processes_and_what_is_left_and_restored_goes_on(tmp_path: Path) -> None:
    """With uneven batches. The outer optimiser's state is saved; what the inner one keeps begins anew."""
    given, expected = batches(3 * 4 * 6, sizes=(4, 12, 8, 8, 30)), DiLoCo(3)
    all_of_them = list(rounds(given, 3, 4))
    async with fr.LocalCluster(ps=2, worker=3) as cluster:
        graph, trainer = build(fr.train.LocalSteps(4), 3, servers=2)
        checkpoints = fr.Checkpoints(str(tmp_path))
        async with fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session:
            async for report in trainer.steps(session, given):
                if report.step == 3:
                    await session.save()
                    break
            for each in all_of_them[:3]:
                expected.round(each)
            assert_are(await session.run(trainer.variables), expected.theta)
            others = [report.step async for report in trainer.steps(session, given)]  # to be forgotten
            assert others == [4, 5, 6, 7, 8, 9]
            await session.restore()
            expected.inner = DiLoCo(3).inner
            again = [(report.step, report.kept) async for report in trainer.steps(session, given[36:])]
            assert again == [(step, (0, 1, 2)) for step in (4, 5, 6)]
            for each in all_of_them[3:]:
                expected.round(each)
            assert_are(await session.run(trainer.variables), expected.theta)


async def test_the_slow_are_late_the_dead_are_lost_and_the_others_train_on() -> None:
    graph, trainer = build(fr.train.LocalSteps(5, fr.train.FirstOf(2), outer=fr.optim.SGD(1.0)), 4)
    slow, dead = "/job:worker/task:3", "/job:worker/task:0"
    async with (
        fr.LocalCluster(ps=1, worker=4, delays={slow: "30"}) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, without_end())
        reports = [await anext(steps) for _ in range(20)]
        assert all(len(report.kept) == 2 and 3 not in report.kept for report in reports)
        assert any(3 in report.late for report in reports)
        cluster.processes[dead].kill()
        await cluster.processes[dead].wait()
        reports = [await anext(steps) for _ in range(30)]
        assert reports[-1].kept == (1, 2)
        async with asyncio.timeout(10):
            while trainer.statistics().lost != (dead,):  # steps may be reported before the client hears of it
                await anext(steps)
        await steps.aclose()
        w, b = await session.run(trainer.variables)
    np.testing.assert_allclose(w, TRUTH, atol=0.2)
    np.testing.assert_allclose(b, [1.0], atol=0.2)


async def test_a_grace_keeps_those_who_are_a_little_late() -> None:
    graph, trainer = build(fr.train.LocalSteps(2, fr.train.FirstOf(1), grace=60.0), 2)
    slow = {"/job:worker/task:1": "0.02"}
    async with (
        fr.LocalCluster(ps=1, worker=2, delays=slow) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        async with asyncio.timeout(30):
            reports = [report async for report in trainer.steps(session, batches(2 * 2 * 5))]
    assert [report.kept for report in reports] == [(0, 1)] * 5
    assert all(report.why == "the first 1 are there, and 1 within the grace" for report in reports)
