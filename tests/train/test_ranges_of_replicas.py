"""Replicas that come and go: training with those that are there, waiting for enough of them, at the user's word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.cluster.cluster import LocalCluster

INPUTS = {"x": fr.Spec("float32", (None, 3))}
WORKERS = tuple(f"/job:worker/task:{number}" for number in range(4))


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    """One whose gradient is what it is fed: updates are counted by what they leave."""
    w = fr.Variable(np.zeros((3,), np.float32), name="w")
    return fr.sum(w * fr.mean(inputs["x"], axis=0))


def batches() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones((2, 3), np.float32)}


def trainer_of(replicas: Any, policy: Any = None) -> tuple[fr.Graph, Any]:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=replicas, policy=policy)
    return graph, trainer


@pytest.mark.parametrize(
    "replicas", [(3, 2), (0, 2), (1, 2, 3), (True, 2), (1.5, 2), "2", 0, True, (2,), None], ids=repr
)
def test_a_number_of_replicas_that_makes_no_sense_is_refused_at_the_users_line(replicas: Any) -> None:
    with pytest.raises(GraphError, match=r"test_ranges_of_replicas\.py:\d+: replicas=.*or the fewest and the most"):
        trainer_of(replicas)


def test_a_range_begins_where_the_policy_can_be_met() -> None:
    assert trainer_of((1, 4), fr.train.FirstOf(3))[1].least == 3
    assert trainer_of((2, 4), fr.train.AllOf())[1].least == 2
    with pytest.raises(GraphError, match=r"FirstOf\(5\) of 4 replicas can never be met"):
        trainer_of((1, 4), fr.train.FirstOf(5))


POLICIES = [fr.train.AllOf(), fr.train.FirstOf(1), fr.train.Adaptive(), fr.train.BoundedStaleness(2)]


@pytest.mark.parametrize(
    "policy", [*POLICIES, pytest.param(fr.train.LocalSteps(2, outer=fr.optim.SGD(1.0)), id="LocalSteps")], ids=str
)
async def test_who_is_there_trains_and_who_is_not_is_awaited(policy: Any) -> None:
    graph, trainer = trainer_of((1, 4), policy)
    async with LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with asyncio.timeout(60):
            steps, seen = trainer.steps(session, batches()), set()
            async for report in steps:
                seen |= {*report.kept}
                if report.step >= 3 and seen == {0, 1}:
                    break
            await steps.aclose()
            if policy == fr.train.AllOf():
                assert report.kept == (0, 1)
            assert trainer.statistics().lost == WORKERS[2:]
            step, w = await session.run([trainer.step, trainer.variables[0]])
            if not policy.staleness:  # which weighs updates by their age
                assert (w == -step * trainer.local_steps).all()


class Heard(logging.Handler):
    """The warnings about runs, and a wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.news = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.news.set()

    async def wait(self, part: str) -> str:
        """The first that contains ``part``."""
        while not (said := [text for text in self.texts if part in text]):
            self.news.clear()
            await self.news.wait()
        return said[0]


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    logging.getLogger("flowrt.train").addHandler(handler)
    yield handler
    logging.getLogger("flowrt.train").removeHandler(handler)


async def test_training_waits_for_as_many_as_it_needs_and_says_for_whom(heard: Heard) -> None:
    graph, trainer = trainer_of((2, 3), fr.train.AllOf())
    async with LocalCluster(ps=1, worker=2) as cluster, asyncio.timeout(60):
        cluster.processes[WORKERS[1]].kill()
        await cluster.processes[WORKERS[1]].wait()
        async with fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            first = asyncio.ensure_future(anext(steps))
            assert await heard.wait("waits for replicas") == (
                f"replicated waits for replicas: 1 of at least 2 are there; awaited are {WORKERS[1]}, {WORKERS[2]}"
            )
            assert not first.done()
            await cluster.respawn(WORKERS[1])
            assert (await first).kept == (0, 1)


async def test_an_iteration_that_waits_for_replicas_may_be_left(heard: Heard) -> None:
    graph, trainer = trainer_of((2, 3))
    async with LocalCluster(ps=1, worker=1) as cluster, asyncio.timeout(60):
        async with fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            first = asyncio.ensure_future(anext(steps))
            await heard.wait("waits for replicas")
        with pytest.raises(fr.ClosedError):
            await first
