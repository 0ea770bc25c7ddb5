"""Who is slow, found in real processes: delays that are large beside everything else, and what is told of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.train.times import PARTS

if TYPE_CHECKING:
    from pathlib import Path

LONG = 0.2  # seconds
WORKER = "/job:worker/task:1"


def build(policy: Any, **where: str) -> tuple[fr.Graph, fr.train.Replicated]:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
        return fr.mean(fr.square(inputs["x"] @ w))

    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float32", (None, 3))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.01), 3, policy=policy, **where)
    return graph, trainer


def batches() -> Iterator[dict[str, Any]]:
    return itertools.repeat({"x": np.ones((4, 3), np.float32)})


def of(slow: tuple[fr.train.Slow, ...]) -> set[tuple[int | None, str, bool]]:
    return {(found.replica, found.cause, found.helps) for found in slow}


Enough = Callable[[fr.train.StepReport, fr.train.Statistics], bool]


async def until(policy: Any, delays: dict[str, Any], enough: Enough) -> None:
    """Train until a report and the statistics then are ``enough``: meanwhile a busy machine may slow others."""
    graph, trainer = build(policy)
    cluster = fr.LocalCluster(ps=1, worker=3, threads=1, delays=delays)
    async with cluster, fr.Session(graph, cluster=cluster) as session:
        async for report in trainer.steps(session, batches()):
            if enough(report, trainer.statistics()):
                return
    raise AssertionError("the reports came to an end")


async def test_a_replica_that_computes_slowly_is_named_in_the_report_the_log_and_the_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "flowrt.train")

    def is_clear(report: fr.train.StepReport, statistics: fr.train.Statistics) -> bool:
        first, times, last = [replica.times for replica in statistics.replicas]
        if None in (first, times, last) or not of(report.slow) == of(statistics.slow) == {(1, "compute", True)}:
            return False
        assert times.compute > LONG
        return (
            max(times.input, times.pull, times.push, times.wait, times.server) < LONG
            and all(other.wait > LONG / 2 > other.compute for other in (first, last))
            and report.times[1].seconds > LONG
        )

    await until(fr.train.AllOf(), {WORKER: LONG}, is_clear)
    told = [record.getMessage() for record in caplog.records if record.name == "flowrt.train.watching"]
    assert any("replica 1 is slow" in text and WORKER in text for text in told), told


async def test_a_replica_that_is_always_cut_off_is_named_all_the_same() -> None:
    await until(fr.train.FirstOf(2), {WORKER: LONG}, lambda report, _: of(report.slow) == {(1, "compute", True)})


@pytest.mark.parametrize(
    ("place", "task", "found"),
    [("push", WORKER, (1, "link", True)), ("server", "/job:ps/task:0", (None, "server", False))],
)
async def test_a_slow_way_and_a_slow_server_are_told_apart(place: str, task: str, found: Any) -> None:
    delay = fr.delays.Constant(LONG, at=place)
    await until(fr.train.AllOf(), {task: delay}, lambda report, _: of(report.slow) == {found})


class Telling(logging.Handler):
    """Sets an event when a replica is said to be frozen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.frozen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "replica 1 is frozen" in record.getMessage():
            self.frozen.set()


@pytest.fixture
def told() -> Iterator[asyncio.Event]:
    log, handler = logging.getLogger("flowrt.train.watching"), Telling()
    log.addHandler(handler)
    yield handler.frozen
    log.removeHandler(handler)


async def test_a_node_that_is_stopped_is_frozen_while_everybody_waits_for_it(told: asyncio.Event) -> None:
    graph, trainer = build(fr.train.AllOf())
    cluster = fr.LocalCluster(ps=1, worker=3, threads=1)
    async with asyncio.timeout(40), cluster, fr.Session(graph, cluster=cluster) as session:
        reports = trainer.steps(session, batches())
        for _ in range(5):
            await anext(reports)
        process = cluster.processes[WORKER]
        process.send_signal(signal.SIGSTOP)
        try:
            going = asyncio.ensure_future(_go_on(reports))
            await told.wait()
            assert (1, "frozen", True) in of(trainer.statistics().slow)
        finally:
            process.send_signal(signal.SIGCONT)
        await going
        await reports.aclose()


async def _go_on(reports: Any) -> None:
    """Until some reports have come in a row that name nobody as frozen."""
    fine = 0
    async for report in reports:
        fine = 0 if any(slow.cause == "frozen" for slow in report.slow) else fine + 1
        if fine == 20:
            return


async def test_a_picture_takes_matplotlib_and_shows_where_time_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, trainer = build(fr.train.AllOf(), server_device="", worker_device="")
    async with fr.Session(graph) as session:
        async for report in trainer.steps(session, batches()):
            if report.step == 10:
                break
    statistics = trainer.statistics()
    assert set(PARTS) <= set(statistics.records)
    assert statistics.records["version"].tolist() == [step for step in range(10) for _ in range(3)]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fr.GraphError, match=r"pip install 'flowrt\[stragglers\]'"):
        statistics.plot(tmp_path / "times.svg")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    statistics.plot(tmp_path / "times.svg")
    assert "<svg" in (tmp_path / "times.svg").read_text()
