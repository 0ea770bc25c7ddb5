"""Devices of a cluster's nodes: what a node is told to look for, and replicas whose towers are on them."""

from __future__ import annotations

import sys
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = str(ROOT / "examples")
WORKERS = [f"/job:worker/task:{n}" for n in range(2)]


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes find the example where this process does, which places steps and so has to know the device, too."""
    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    import_module("arena")
    import_module("fragile")


def build(device: str, replicas: int = 2, policy: Any = None) -> tuple[fr.Graph, Any]:
    def loss_fn(inputs: dict[str, Any]) -> Any:
        w = fr.Variable(fr.random.normal((5, 8), seed=1), name="w")
        v = fr.Variable(fr.random.normal((8, 3), seed=2), name="v")
        return fr.mean(fr.nn.softmax_cross_entropy(fr.tanh(inputs["x"] @ w) @ v, inputs["y"]))

    with fr.Graph(seed=1) as graph, fr.container(device):  # nodes keep variables, which each begins anew
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"x": fr.Spec("float32", (None, 5)), "y": fr.Spec("int32", (None,))},
            optimizer=fr.optim.Momentum(0.1, 0.9),
            replicas=replicas,
            policy=policy or fr.train.AllOf(),
            servers=1,
            server_device="/job:ps/task:{}",
            worker_device=f"/job:worker/task:{{}}{device}",
        )
    return graph, trainer


def batches() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(5)
    while True:
        x = rng.normal(size=(8, 5)).astype(np.float32)
        yield {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}


async def losses(cluster: Any, device: str) -> list[float]:
    graph, trainer = build(device)
    found: list[float] = []
    async with fr.Session(graph, cluster) as session, aclosing(trainer.steps(session, batches())) as reports:
        async for report in reports:
            found.append(report.loss)
            if len(found) == 6:
                return found
    raise AssertionError("it ended before its sixth step")


@pytest.mark.timeout(120)
async def test_towers_on_workers_devices_train_what_their_cores_do_with_variables_on_the_servers() -> None:
    devices = dict.fromkeys(WORKERS, ("cpu:0", "arena:0"))
    async with fr.LocalCluster(ps=1, worker=2, imports=["arena"], devices=devices) as cluster:
        there, here = await losses(cluster, "/device:arena:0"), await losses(cluster, "")
        with fr.Graph() as graph, fr.device("/job:worker/task:1/device:arena:0"):
            x = fr.placeholder("float32", (2,))
            y = fr.exp(x)
        async with fr.Session(graph, cluster) as session:
            np.testing.assert_allclose(await session.run(y, {x: [0.0, 1.0]}), np.exp([0.0, 1.0]), rtol=1e-6)
    np.testing.assert_allclose(there, here, rtol=1e-5)


@pytest.mark.timeout(240)
async def test_towers_on_workers_simulated_gpus_train_what_their_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")  # of the nodes: here Numba may be imported already
    devices = dict.fromkeys(WORKERS, ("cpu:0", "cuda:1"))
    async with fr.LocalCluster(ps=1, worker=2, devices=devices) as cluster:
        there, here = await losses(cluster, "/device:cuda:1"), await losses(cluster, "")
    np.testing.assert_allclose(there, here, rtol=1e-4)


@pytest.mark.timeout(120)
async def test_a_replica_whose_device_is_lost_is_a_lost_replica_and_its_node_goes_on() -> None:
    graph, trainer = build("/device:fragile:0", replicas=3, policy=fr.train.FirstOf(2))
    devices = dict.fromkeys([*WORKERS, "/job:worker/task:2"], ("cpu:0", "fragile:0"))
    without: list[int] = []
    async with fr.LocalCluster(ps=1, worker=3, imports=["fragile"], devices=devices) as cluster:
        async with fr.Session(graph, cluster) as session, aclosing(trainer.steps(session, batches())) as reports:
            async for report in reports:
                without = [*without, report.step] if 1 not in (*report.kept, *report.late) else []
                if len(without) == 20:
                    break
        assert cluster.processes["/job:worker/task:1"].returncode is None
        with fr.Graph() as other, fr.device("/job:worker/task:1"):
            x = fr.placeholder("float32", (2,))
            y = x + 1
        async with fr.Session(other, cluster) as session:
            assert (await session.run(y, {x: [0.0, 1.0]})).tolist() == [1, 2]


async def train_on(graph: fr.Graph, trainer: Any, cluster: Any) -> None:
    async with fr.Session(graph, cluster) as session, aclosing(trainer.steps(session, batches())) as reports:
        async for _ in reports:
            pass


@pytest.mark.timeout(120)
async def test_where_all_replicas_are_counted_on_a_lost_device_ends_training_and_says_so() -> None:
    graph, trainer = build("/device:fragile:0")
    devices = dict.fromkeys(WORKERS, ("cpu:0", "fragile:0"))
    async with fr.LocalCluster(ps=1, worker=2, imports=["fragile"], devices=devices) as cluster:
        with pytest.raises(fr.NodeLost, match=r"training stopped at step \d+: .*/job:worker/task:1"):
            await train_on(graph, trainer, cluster)


@pytest.mark.timeout(120)
async def test_a_replica_without_memory_for_its_tower_is_gone_without_as_long_as_others_have_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = dict.fromkeys([*WORKERS, "/job:worker/task:2"], ("cpu:0", "narrow:0"))
    without: list[Any] = []
    async with fr.LocalCluster(ps=1, worker=3, imports=["fragile"], devices=devices) as cluster:
        graph, trainer = build("/device:narrow:0", replicas=3, policy=fr.train.FirstOf(2))
        async with fr.Session(graph, cluster) as session, aclosing(trainer.steps(session, batches())) as reports:
            async for report in reports:
                assert report.kept == (0, 2)
                without += [report] if report.errors else []
                if len(without) == 3:
                    break
            await session.reset()
        graph, all_of = build("/device:narrow:0", replicas=2)
        with pytest.raises(fr.ResourceError, match=r"on /job:worker/task:1: .*no memory on narrow:0 for"):
            await train_on(graph, all_of, cluster)
    for report in without:
        assert (report.lost, [*report.errors]) == ((1,), [1])
        assert isinstance(report.errors[1], fr.ResourceError)
        assert "test_device_nodes.py" in str(report.errors[1])
    assert caplog.text.count("without replica 1, on /job:worker/task:1: ") == 1
    statistics = trainer.statistics()
    assert (statistics.lost, statistics.replicas[1].kept) == ((), 0)
    assert statistics.replicas[1].lost >= 3


@pytest.mark.timeout(120)
async def test_a_device_that_no_node_has_is_told_with_those_there_are() -> None:
    graph, trainer = build("/device:arena:0")
    wanted = r"there is no device .*arena:0; there are /job:ps/task:0/device:arena:0, /job:ps/task:0/device:cpu:0"
    devices = {"/job:ps/task:0": ("arena:0", "cpu:0")}
    async with fr.LocalCluster(ps=1, worker=2, imports=["arena"], devices=devices) as cluster:
        with pytest.raises(fr.PlacementError, match=wanted):
            await train_on(graph, trainer, cluster)
        with pytest.raises(fr.GraphError, match=r"ps/task:0: variable .* is on arena:0, .* add /device:cpu:0 to"):
            await train_on(*build(""), cluster)


def test_servers_keep_their_variables_in_their_hosts_memory() -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"nodes.py:\d+: server_device='.*arena:0': .* leave out arena"):
        fr.train.Replicated(lambda inputs: None, {}, fr.optim.SGD(0.1), 1, server_device="/job:ps/device:arena:0")


def test_devices_are_for_tasks_of_the_cluster() -> None:
    with pytest.raises(fr.GraphError, match="devices are given for /job:worker/task:7"):
        fr.LocalCluster(ps=1, worker=2, devices={"/job:worker/task:7": "cuda"})
    with pytest.raises(fr.GraphError, match=r"test_device_nodes.py:\d+: devices are named as in cpu:0"):
        fr.LocalCluster(worker=1, devices=("the fast one",))
