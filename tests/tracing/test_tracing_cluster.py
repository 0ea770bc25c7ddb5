"""Clusters of real processes, traced: transfers, clocks, versions, and nodes that are lost meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import PYTHONPATH
from trace_world import AHEAD, files_in, judged

import flowrt as fr
from flowrt.tracing.collecting import PERIOD

if TYPE_CHECKING:
    from pathlib import Path

    from trace_world import Timeline

SIZE = 1 << 16


def crossing() -> tuple[fr.Graph, Any, Any]:
    """A step from worker 0 over worker 1 back to worker 0, of tensors that are asked for and of one that is pushed."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (), name="x")
        with fr.device("/job:worker/task:0"):
            large, small = fr.ones((SIZE,)) * x, x + 1
        with fr.device("/job:worker/task:1"):
            back = fr.sum(large * small)
        with fr.device("/job:worker/task:0"):
            out = back + small
    return graph, x, out


async def traced(path: Path, steps: int = 5, **cluster: Any) -> Timeline:
    graph, x, out = crossing()
    async with fr.LocalCluster(worker=2, **cluster) as nodes, fr.Session(graph, cluster=nodes) as session:
        await session.run(out, {x: 1.0})
        async with session.tracing(path):
            for number in range(steps):
                assert await session.run(out, {x: float(number)}) == SIZE * number * (number + 1.0) + number + 1
    return judged(path)


@pytest.mark.asyncio
async def test_a_receive_comes_after_its_send_and_an_arrow_leads_there(tmp_path: Path) -> None:
    timeline = await traced(tmp_path / "step.json")
    assert {one["process"] for one in timeline.slices} == {"client", "/job:worker/task:0", "/job:worker/task:1"}
    assert len(timeline.of("step", process="client")) == 5
    between = [pair for pair in timeline.arrows if "client" not in (pair[0]["args"]["peer"], pair[1]["args"]["peer"])]
    assert len(between) == 15  # two one way, one back
    for send, recv in between:
        assert send["process"] == recv["args"]["peer"]
        assert recv["process"] == send["args"]["peer"]
        assert send["args"]["bytes"] == recv["args"]["bytes"]
        assert send["ts"] <= recv["ts"] + recv["dur"]
    assert sorted({send["args"]["bytes"] for send, _ in between}) == [4, 4 * SIZE]
    for clock in timeline.about["clocks"].values():
        assert clock == {"same as": "client", "uncertainty_us": 0}
    assert timeline.about["dropped"] == timeline.about["incomplete"] == {}


@pytest.mark.asyncio
async def test_the_clocks_of_other_machines_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    timeline = await traced(tmp_path / "step.json", imports=["skewed_clock"])
    for clock in timeline.about["clocks"].values():
        assert abs(clock["ahead_us"] - AHEAD / 1e3) <= clock["uncertainty_us"] < 1e6
    unsure = sum(clock["uncertainty_us"] for clock in timeline.about["clocks"].values())
    assert timeline.arrows
    for send, recv in timeline.arrows:
        assert send["ts"] <= recv["ts"] + recv["dur"] + unsure
    steps = {one["args"]["step"]: one for one in timeline.of("step", process="client")}
    for one in timeline.of("step", process="/job:worker/task:1"):
        around = steps[one["args"]["step"]]
        assert around["ts"] - unsure <= one["ts"] <= around["ts"] + around["dur"] + unsure


@pytest.mark.asyncio
async def test_versions_say_whose_updates_they_kept_and_updates_are_followed(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            lambda batch: fr.mean((batch["x"] @ fr.Variable(np.ones((64, 8), np.float32), name="w")) ** 2),
            inputs={"x": fr.Spec("float32", (None, 64))},
            optimizer=fr.optim.SGD(0.01),
            replicas=3,
            policy=fr.train.FirstOf(2),
        )
    x = np.ones((16, 64), np.float32)
    delays = {"/job:worker/task:2": fr.delays.Constant(0.02)}
    async with (
        fr.LocalCluster(ps=1, worker=3, delays=delays) as nodes,
        fr.Session(graph, cluster=nodes) as session,
        session.tracing(tmp_path / "step.json"),
    ):
        reports = [report async for report in trainer.steps(session, ({"x": x} for _ in range(30)))]
    timeline = judged(tmp_path / "step.json")
    versions = {one["args"]["step"]: one for one in timeline.of("version", process="/job:ps/task:0")}
    for report in reports:
        args = versions[report.step]["args"]
        for outcome in ("kept", "late"):
            told = [int(replica.split()[0]) for replica in args.get(outcome, "").split(", ") if replica]
            assert told == list(getattr(report, outcome))
    updates = [pair for pair in timeline.arrows if pair[0]["name"].startswith("update")]
    assert updates
    for sent, came in updates:
        assert came["process"] == "/job:ps/task:0"
        assert sent["name"] == came["name"]
        assert sent["args"]["bytes"] >= 64 * 8 * 4
    towers = {one["process"] for one in timeline.of("step")}
    assert "/job:ps/task:0" in towers
    assert len(towers) >= 3  # what the slow one computes may be cut off before it begins


async def forever(session: fr.Session, out: Any, feeds: Any) -> None:
    while True:
        await session.run(out, feeds)


@pytest.mark.asyncio
async def test_a_node_that_is_lost_leaves_a_whole_file_with_what_came(tmp_path: Path) -> None:
    graph, x, out = crossing()
    gone = "/job:worker/task:1"
    async with fr.LocalCluster(worker=2) as nodes, fr.Session(graph, cluster=nodes) as session:
        await session.run(out, {x: 1.0})
        async with session.tracing(tmp_path / "step.json"):
            async with asyncio.timeout(30):
                while session._traced is not None and not session._traced.holds(gone):
                    await session.run(out, {x: 1.0})
                    await asyncio.sleep(PERIOD / 10)
            os.kill(nodes.processes[gone].pid, signal.SIGKILL)
            with pytest.raises(fr.RemoteError):
                await forever(session, out, {x: 1.0})
    timeline = judged(tmp_path / "step.json")
    assert list(timeline.about["incomplete"]) == [gone]
    assert timeline.of("step", process=gone)
    assert timeline.of("step", process="/job:worker/task:0")


@pytest.mark.asyncio
async def test_a_node_is_traced_by_one_session_at_a_time(tmp_path: Path) -> None:
    graph, x, out = crossing()
    async with (
        fr.LocalCluster(worker=2) as nodes,
        fr.Session(graph, cluster=nodes) as first,
        fr.Session(graph, cluster=nodes) as second,
    ):
        async with first.tracing(tmp_path / "first.json"):
            with pytest.raises(fr.GraphError, match="being traced by another session"):
                async with second.tracing(tmp_path / "second.json"):
                    pytest.fail("it was entered")
            await second.run(out, {x: 1.0})
        async with second.tracing(tmp_path / "second.json"):
            await second.run(out, {x: 1.0})
    assert files_in(tmp_path) == ["first.json", "second.json"]
    assert judged(tmp_path / "first.json").of("step", process="/job:worker/task:1")  # whoever's step it was
    assert len(judged(tmp_path / "second.json").of("step", process="client")) == 1
