"""What waits for a consumer stays where it was made, or is not made: the memory of all processes beside what waits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrt as fr

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much memory a process took")

SIZE, STEPS = 1_000_000, 60  # float64: 458 MiB in all
MOST = 160.0  # MiB: credits of 64 of who makes and of who reads, whose values lie with it; all take 480
PS, MAKER, READER = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"


class Memory:
    """How much more the processes took at most than when this was made, in MiB, by task."""

    def __init__(self, cluster: fr.LocalCluster) -> None:
        self._pids = {task: process.pid for task, process in cluster.processes.items()} | {"client": os.getpid()}
        self._before = {task: self._read(pid, "VmRSS") for task, pid in self._pids.items()}
        for pid in self._pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew

    def grown(self) -> dict[str, float]:
        return {task: self._read(pid, "VmHWM") - self._before[task] for task, pid in self._pids.items()}

    @staticmethod
    def _read(pid: int, what: str) -> float:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


class Program:
    """A queue of two elements on the server that a worker and the client fill, and a reader on another worker."""

    def __init__(self) -> None:
        with fr.Graph() as self.graph:
            self.x = fr.placeholder("float64", (None,), name="x")
            self.s = fr.placeholder("float64", (), name="s")
            with fr.device(MAKER):
                made = fr.random.normal((SIZE,), dtype="float64") + self.s
                self.local = fr.sum(made)
            with fr.device(PS):
                queue = fr.FIFOQueue(2, ["float64"], [(None,)], name="queue")
                never = fr.FIFOQueue(2, ["float64"], [()], name="gate")
                self.feed, self.put = queue.enqueue([self.x]), queue.enqueue([made])
                self.take = fr.sum(queue.dequeue())
                self.gate = never.enqueue([self.s])
                self.stalled = fr.sum(made * never.dequeue())
            with fr.device(READER):
                self.read = fr.sum(made * 2.0)


async def begun(session: fr.Session, program: Program, what: Any, feeds: Any) -> list[asyncio.Future[Any]]:
    """So many runs at once; those who make the values have had the time to make all of them."""
    runs = [asyncio.ensure_future(session.run(what, feeds)) for _ in range(STEPS)]
    for _ in range(4):  # behind them in the lanes, which take turns
        await session.run(program.local, {program.s: 0.0})
    return runs


async def all_wait(session: fr.Session) -> None:
    """Wait until all steps are in progress on the server."""
    master: Any = session._runner._master  # type: ignore[union-attr]
    async with asyncio.timeout(20):
        while (await master.statistics())[PS]["steps"] < STEPS - 2:  # two may be through
            pass


@pytest.fixture(params=["shared", "tcp"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FLOWRT_TRANSPORT", request.param)
    return str(request.param)


async def test_values_that_wait_for_room_in_a_queue_or_for_another_value_take_no_more_than_their_credit(
    way: str,
) -> None:
    program = Program()
    async with (
        asyncio.timeout(60),
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(program.graph, cluster=cluster) as session,
    ):
        await session.run(program.local, {program.s: 0.0})  # what is compiled then takes memory, too
        data, one = {program.x: np.ones(SIZE)}, {program.s: 1.0}
        for what, feeds, consume, its in (
            (program.feed, data, program.take, {}),
            (program.put, one, program.take, {}),
            (program.stalled, one, program.gate, one),
        ):
            first = asyncio.ensure_future(session.run(what, feeds))
            await session.run(consume, its)
            await first
            memory = Memory(cluster)
            runs = await begun(session, program, what, feeds)
            await all_wait(session)
            for _ in range(STEPS):
                await session.run(consume, its)
            await asyncio.gather(*runs)
            assert max(memory.grown().values()) < MOST, memory.grown()


@pytest.mark.parametrize(("way", "asked"), [("shared", True), ("tcp", False)], indirect=["way"])
async def test_values_for_a_task_that_is_stopped_take_no_more_than_their_credit(way: str, asked: bool) -> None:
    """Also where it has asked for them before."""
    program = Program()
    one = {program.s: 1.0}
    async with (
        asyncio.timeout(60),
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(program.graph, cluster=cluster) as session,
    ):
        await session.run([program.read, program.local], one)
        memory, reader = Memory(cluster), cluster.processes[READER].pid
        runs = await begun(session, program, program.read, one) if asked else []
        os.kill(reader, signal.SIGSTOP)
        try:
            runs += await begun(session, program, program.read, one)
        finally:
            os.kill(reader, signal.SIGCONT)
        await asyncio.gather(*runs)
        assert max(memory.grown().values()) < MOST, memory.grown()
