"""Steps over processes that send early what others wait for compute what they would whole."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from places import ROOT
from step_world import DEAD, RandomGraph, meaning

import flowrt as fr
from flowrt.base.device import Device
from flowrt.base.errors import DeadTensorError, PlacementError

GRAPHS, STEPS = 12, 4
SLOW = fr.placement.Auto(profile={"*": 1.0})  # by which whatever is sent is worth sending early
QUICK = fr.placement.Auto(profile={"*": 0.0})  # by which nothing is


async def _agree(cluster: fr.LocalCluster, devices: tuple[Device, ...], seed: int) -> tuple[int, int]:
    """How many values of a random graph went ahead, and how many steps agreed with what it means."""
    made = RandomGraph(seed, devices, nodes=10 + seed % 12)
    wanted: list[Any] = []
    agreed = 0
    options = fr.Options(soft_placement=True)  # no device but a host has switches
    async with fr.Session(made.graph, cluster=cluster, placement=SLOW, options=options) as session:
        names = [v.name for v in made.variables]
        state = dict(zip(names, await session.run(made.variables), strict=True))
        for number in range(STEPS):
            fed = {t: value if value.dtype == bool else value + number for t, value in made.feeds.items()}
            wanted, after = meaning(made.graph, made.fetches, made.targets, fed, state)
            with contextlib.suppress(DeadTensorError):
                found = await session.run([*made.fetches, *made.targets], fed)
                for one, other in zip(found, wanted, strict=False):
                    assert np.array_equal(one, other), f"seed {seed}"
                agreed += 1
            held = await session.run(made.variables)
            for name, value in zip(names, held, strict=True):
                assert np.array_equal(value, after[name]), f"seed {seed}: {name}"
            assert agreed == number + 1 or any(value is DEAD for value in wanted), f"seed {seed}"
            state = after
        report = str(await session.explain([*made.fetches, *made.targets], list(made.feeds)))
        await session.reset("")
    return report.count("µs behind"), agreed


@pytest.mark.parametrize(("workers", "kind"), [(2, "cpu"), (3, "cpu"), (2, "arena")])
async def test_random_graphs_compute_what_they_mean(workers: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import_module("arena")
    devices = tuple(Device("worker", task, kind, 0) for task in range(workers))
    ahead = agreed = 0
    there: Any = {"imports": ["arena"], "devices": ("cpu:0", "arena:0")} if kind == "arena" else {}
    async with fr.LocalCluster(worker=workers, threads=1, **there) as cluster:
        for seed in range(100 * workers, 100 * workers + GRAPHS):
            with contextlib.suppress(PlacementError):  # random colocation may contradict random devices
                values, steps = await _agree(cluster, devices, seed)
                ahead, agreed = ahead + values, agreed + steps
    assert ahead > 0
    assert agreed > GRAPHS * STEPS // 2


def _model() -> tuple[Any, Any, list[Any]]:
    """A model whose layers lie on two nodes by turns, and that is fetched along with its training."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (64, 256), name="x")
        h, norms = x, []
        for layer in range(4):
            with fr.device(f"/job:worker/task:{layer % 2}"):
                start = fr.random.normal((256, 256), stddev=1 / 16, seed=layer)
                h = fr.nn.relu(h @ fr.Variable(start, name=f"w{layer}"))
                norms.append(fr.mean(fr.square(h)))
        loss = fr.add_n(norms)
        train = fr.optim.Momentum(0.01, 0.9).minimize(loss)
    return graph, x, [loss, h, train]


async def test_a_model_over_two_nodes_learns_the_same_to_the_bit() -> None:
    data = np.random.default_rng(3).normal(size=(64, 256)).astype(np.float32)
    found, cuts = [], []
    async with fr.LocalCluster(worker=2, threads=1) as cluster:
        for placement in (SLOW, QUICK):
            graph, x, fetches = _model()
            async with fr.Session(graph, cluster=cluster, placement=placement) as session:
                steps = [await session.run(fetches, {x: data + step}) for step in range(6)]
                variables = await session.run(list(graph.variables))
                found.append([np.asarray(value).tobytes() for step in (*steps, variables) for value in step[:2]])
                cuts.append(str(await session.explain(fetches)).count("µs behind"))
                await session.reset()
    assert found[0] == found[1]
    assert cuts[0] > 2
    assert cuts[1] == 0


async def test_a_step_that_fails_behind_an_early_send_fails_as_a_whole_and_the_next_one_runs() -> None:
    with fr.Graph() as graph:
        row = fr.placeholder("int64", (1,), name="row")
        with fr.device("/job:worker/task:0"):
            w = fr.Variable(np.ones((64, 64), np.float32), name="w")
            sent = fr.matmul(w, fr.astype(row[0], "float32") * w, name="sent")
            late = fr.sum(fr.take(sent, row), name="late")
        with fr.device("/job:worker/task:1"):
            far = fr.sum(fr.matmul(sent, sent), name="far")
    async with (
        fr.LocalCluster(worker=2, threads=1) as cluster,
        fr.Session(graph, cluster=cluster, placement=SLOW) as session,
    ):
        report = str(await session.explain([late, far]))
        assert "send_early: µs behind sent 2000000" in report
        assert "/job:worker/task:1 waits for it, so the tape ends with what it needs" in report
        for _ in range(3):
            assert [float(value) for value in await session.run([late, far], {row: [1]})] == [4096.0, 64.0**5]
            with pytest.raises(fr.FlowrtError, match=r"take.* 64 rows"):
                await session.run([late, far], {row: [64]})
