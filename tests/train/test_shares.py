"""Training without parameter servers: every worker holds a share of the variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.train import sharing

SHARES = {"server_device": "/job:worker/task:{}"}


@pytest.fixture
def of_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is of variables, it is shared."""
    monkeypatch.setattr(sharing, "SHARE", 1)


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


@pytest.mark.usefixtures("of_little")
@pytest.mark.timeout(120)
async def test_shares_on_the_workers_are_moved_to_the_bits_of_one_server() -> None:
    losses, variables = await trained({"worker": 3}, 12, servers=3, **SHARES)
    others, wanted = await trained({"ps": 1, "worker": 3}, 12, servers=1)
    assert losses == others
    assert len(losses) == 12
    for share, whole in zip(variables, wanted, strict=True):
        np.testing.assert_array_equal(share, whole)


@pytest.mark.usefixtures("of_little")
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


@pytest.mark.usefixtures("of_little")
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


def held_by(*sizes: int, optimizer: Any = None, **where: Any) -> tuple[list[int], tuple[str, ...]]:
    """How many floats each share has of a model of variables of these sizes, and who holds one."""

    def loss(given: dict[str, fr.Tensor]) -> fr.Tensor:
        return fr.add_n([fr.sum(fr.Variable(fr.zeros((size,)), name=f"v{n}")) for n, size in enumerate(sizes)])

    with fr.Graph():
        trainer = fr.train.Replicated(loss, {}, optimizer or fr.optim.SGD(0.1), 4, servers=4, **where)
    return [sum(variable.spec.nbytes // 4 for variable in shard.variables) for shard in trainer.shards], trainer.servers


def test_no_more_workers_hold_a_share_than_variables_are_worth_a_message() -> None:
    tasks = tuple(f"/job:worker/task:{number}" for number in range(4))
    few, many = [100] * 8, [3000, 5, 9000, 7, 9000, 3000]
    assert held_by(*few, **SHARES) == ([800], tasks[:1])
    assert held_by(*many, **SHARES) == ([3012, 9000, 9000, 3000], tasks)
    assert held_by(*few, copies=2, **SHARES) == ([400, 400], tasks[:2])
    two = SHARES | {"server_device": ["/job:worker/task:0"] * 2 + ["/job:worker/task:1"] * 2}
    assert held_by(*few, copies=2, **two)[1] == (tasks[0], tasks[0], tasks[1])
    assert held_by(*few) == ([200] * 4, tuple(f"/job:ps/task:{number}" for number in range(4)))
    assert held_by(*few, server_device="/job:worker/task:0") == ([200] * 4, tasks[:1] * 4)
    assert held_by(2000, split_above=4000, **SHARES) == ([500] * 4, tasks)
    scaled = fr.LossScaled(fr.optim.SGD(0.1), 8.0, grow_every=9)
    assert held_by(*few, optimizer=scaled, **SHARES) == ([802], tasks[:1])  # with a count of skipped steps
    assert held_by(5, **SHARES, worker_device="") == ([5, 0, 0, 0], tasks)  # replicas may be anywhere
