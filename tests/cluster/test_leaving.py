"""Nodes that are told to end: they say so, end what they are at, and leave nothing to be missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from process_world import until_lost
from test_ranges_of_replicas import WORKERS, Heard, batches, heard, trainer_of

import flowrt as fr
from flowrt.base.errors import NodeLost
from flowrt.cluster.cluster import LocalCluster
from flowrt.worker import LEAVE_SECONDS

__all__ = ["heard"]
PS = "/job:ps/task:0"
COUNT = 60


def told_apart(inputs: dict[str, fr.Tensor]) -> Any:
    """One whose gradient is what it is fed: a batch that counted leaves its entry below zero."""
    w = fr.Variable(np.zeros(COUNT, np.float32), name="w")
    return fr.sum(w * inputs["x"])


def each_once() -> Iterator[dict[str, np.ndarray]]:
    for number in range(COUNT):
        yield {"x": np.eye(1, COUNT, number, dtype=np.float32)[0]}


async def test_a_worker_that_is_told_to_end_loses_no_batch_and_one_that_comes_again_takes_part() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            told_apart,
            {"x": fr.Spec("float32", (COUNT,))},
            fr.optim.SGD(1.0),
            replicas=(1, 2),
            policy=fr.train.AllOf(),
        )
    async with LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with asyncio.timeout(90):
            steps, kept = trainer.steps(session, each_once()), []
            async for report in steps:
                kept.append(report.kept)
                assert not report.lost, "it ends what it is at"
                if report.step == 5:
                    cluster.processes[WORKERS[1]].terminate()
                    assert await cluster.processes[WORKERS[1]].wait() == 0
                    await until_lost(session._open_here(), WORKERS[1])
                if report.step == 10:
                    await cluster.respawn(WORKERS[1])
                    await until_lost(session._open_here())
            assert {(0, 1), (0,)} == {*kept}
            assert (0, 1) in kept[10:], "it takes part again"
            w = await session.run(trainer.variables[0])
            left = np.flatnonzero(w == 0)
            assert len(left) <= 1, f"batches {left} did not count: more than one is too few for two replicas"
            assert sum(map(len, kept)) == COUNT - len(left)


async def test_a_second_signal_ends_a_node_at_once() -> None:
    graph, trainer = trainer_of((1, 2), fr.train.FirstOf(1))
    slow = {WORKERS[1]: 60.0}
    async with LocalCluster(ps=1, worker=2, delays=slow) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with asyncio.timeout(60):
            steps = trainer.steps(session, batches())
            await anext(steps)
            process, runner = cluster.processes[WORKERS[1]], session._open_here()
            began = time.monotonic()
            process.terminate()
            while WORKERS[1] not in runner.suspects:
                await runner.wait_changed(runner.lost, runner.suspects)
            process.terminate()
            assert await process.wait() == 0
            assert time.monotonic() - began < LEAVE_SECONDS, "after one signal it waits so long for its batch"
            assert (await anext(steps)).kept == (0,)
            await steps.aclose()


async def test_a_parameter_server_that_is_terminated_is_named_so() -> None:
    graph, trainer = trainer_of(1)
    async with LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with asyncio.timeout(60):
            steps = trainer.steps(session, batches())
            await anext(steps)
            cluster.processes[PS].terminate()
            with pytest.raises(
                NodeLost, match=rf"lost the parameter servers {PS}: {PS} \(.*\) was lost: it was terminat"
            ):
                async for _ in steps:
                    pass


async def test_a_run_that_has_too_few_replicas_left_waits_for_others_and_goes_on(heard: Heard) -> None:
    graph, trainer = trainer_of((2, 3), fr.train.FirstOf(2))
    async with LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with asyncio.timeout(60):
            steps, count = trainer.steps(session, batches()), 0
            for _ in range(3):
                count = (await anext(steps)).step
            cluster.processes[WORKERS[0]].kill()
            waits = asyncio.ensure_future(until(steps, count + 20))
            said = await heard.wait("waits for replicas")
            assert f"1 of at least 2 are there; awaited are {WORKERS[0]}" in said
            assert not waits.done()
            await cluster.respawn(WORKERS[0])
            last = await waits
            assert last.kept == (0, 1)
            await steps.aclose()
            step, w = await session.run([trainer.step, trainer.variables[0]])
            assert (w == -step).all()


async def until(steps: Any, step: int) -> Any:
    async for report in steps:
        if report.step >= step:
            return report
    raise AssertionError("it ended")
