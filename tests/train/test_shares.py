"""Training without parameter servers: every worker holds a share of the variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import flowrt as fr

SHARES = {"server_device": "/job:worker/task:{}"}


def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
    hidden = given["x"]
    for layer, (inputs, units) in enumerate([(8, 16), (16, 16), (16, 1)]):
        w = fr.Variable(fr.random.normal((inputs, units), stddev=0.3, seed=layer), name=f"w{layer}")
        hidden = fr.tanh(hidden) @ w + fr.Variable(np.zeros(units, "float32"), name=f"b{layer}")
    return fr.mean(fr.square(hidden - given["y"]))


def batches(count: int | None = None) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    while count is None or (count := count - 1) >= 0:
        x = rng.normal(size=(32, 8)).astype("float32")
        yield {"x": x, "y": x.sum(1, keepdims=True)}


def build(policy: fr.train.Policy, **where: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    inputs = {"x": fr.Spec("float32", (None, 8)), "y": fr.Spec("float32", (None, 1))}
    with fr.Graph() as graph:
        return graph, fr.train.Replicated(loss_fn, inputs, fr.optim.Adam(0.01), 3, policy, **where)


async def trained(nodes: dict[str, int], steps: int, **where: Any) -> tuple[list[float], list[np.ndarray]]:
    """The losses of so many steps, and the variables after them."""
    graph, trainer = build(fr.train.AllOf(), **where)
    async with fr.LocalCluster(**nodes) as cluster, fr.Session(graph, cluster=cluster) as session:
        losses = [report.loss async for report in trainer.steps(session, batches(3 * steps))]
        return losses, list(await session.run(trainer.variables))


@pytest.mark.timeout(120)
async def test_shares_on_the_workers_are_moved_to_the_bits_of_one_server() -> None:
    losses, variables = await trained({"worker": 3}, 12, servers=3, **SHARES)
    others, wanted = await trained({"ps": 1, "worker": 3}, 12, servers=1)
    assert losses == others
    assert len(losses) == 12
    for share, whole in zip(variables, wanted, strict=True):
        np.testing.assert_array_equal(share, whole)


@pytest.mark.timeout(120)
async def test_a_worker_that_dies_takes_its_share_from_nobody() -> None:
    graph, trainer = build(fr.train.FirstOf(2), servers=3, copies=2, **SHARES)
    async with fr.LocalCluster(worker=3) as cluster, fr.Session(graph, cluster=cluster) as session:
        reports = []
        async with aclosing(trainer.steps(session, batches())) as steps:
            async for report in steps:
                reports.append(report)
                if report.step == 10:
                    cluster.processes["/job:worker/task:2"].kill()
                if report.step == 40:
                    break
    assert [report.step for report in reports] == list(range(1, 41))
    assert not any(report.rolled_back for report in reports)
    assert reports[-1].kept == (0, 1)
    assert reports[-1].loss < reports[0].loss


@pytest.mark.timeout(120)
async def test_a_slow_worker_with_a_share_delays_nobody() -> None:
    graph, trainer = build(fr.train.FirstOf(2), servers=3, **SHARES)
    slow = {"/job:worker/task:2": fr.delays.Constant(60.0)}
    async with (
        fr.LocalCluster(worker=3, delays=slow) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        aclosing(trainer.steps(session, batches())) as steps,
    ):
        kept = [(await anext(steps)).kept for _ in range(20)]
    assert kept == [(0, 1)] * 20
