"""Workers that read their batches themselves: the same training as by a client's batches, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import reading_world as world

import flowrt as fr
from flowrt.data.sources import source_to_data
from flowrt.sched.drivers.beginning import BeginReplica
from flowrt.sched.drivers.way import Unread
from flowrt.sched.replica import reading
from flowrt.sched.replica.reading import Reader

WORKERS = [f"/job:worker/task:{number}" for number in range(2)]


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "reader" in thread.name]


def open_maps(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(path.name) if Path("/proc/self/maps").exists() else 0


async def weights(session: fr.Session, trainer: fr.train.Replicated) -> Any:
    return await session.run(trainer.variables[0])


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", [fr.train.AllOf(), fr.train.LocalSteps(3)], ids=["every step", "local steps"])
async def test_replicas_that_read_train_to_the_same_bits_as_with_a_clients_batches(policy: Any) -> None:
    source = fr.data.arrays(world.columns(), batch=8, seed=2, epochs=6)
    found = []
    for batches in (source, iter(source)):
        graph, trainer = world.build(2, policy)
        async with fr.Session(graph) as session:
            reports = [report async for report in trainer.steps(session, batches)]
            found.append((len(reports), reports[-1].loss, (await weights(session, trainer)).tobytes()))
        assert not readers()
    assert found[0] == found[1]
    assert found[0][0] == 24 // trainer.local_steps


async def test_local_steps_go_on_where_a_group_of_batches_has_no_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", 1)
    graph, trainer = world.build(2, fr.train.LocalSteps(4))
    async with fr.Session(graph) as session, asyncio.timeout(40):
        source = fr.data.arrays(world.columns(), batch=8, epochs=2)
        assert len([report async for report in trainer.steps(session, source)]) == 2


async def test_workers_of_a_cluster_read_files_and_functions(tmp_path: Path) -> None:
    np.savez(tmp_path / "lines.npz", **world.columns())
    sources = {
        "npz": fr.data.npz(tmp_path / "lines.npz", batch=8, epochs=4),
        "arrays": fr.data.arrays(world.columns(), batch=8, epochs=4),
        "function": fr.data.function(world.lines, rows=64, batch=8, epochs=4),
    }
    graph, trainer = world.build(2, fr.train.FirstOf(1), cluster=True)
    async with (
        fr.LocalCluster(ps=1, worker=2, imports=["reading_world"]) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        for source in sources.values():
            reports = [report async for report in trainer.steps(session, source)]
            assert sum(len(r.kept) + len(r.late) for r in reports) >= 31, "the last one may be under way at the end"
        assert reports[-1].loss < 0.05
        assert np.allclose(await weights(session, trainer), [2.0, -1.0], atol=0.2)


async def test_an_iteration_that_is_left_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "left-behind.npz", **world.columns())
    source = fr.data.npz(tmp_path / "left-behind.npz", batch=8)
    graph, trainer = world.build(2)
    async with fr.Session(graph) as session:
        async for report in trainer.steps(session, source):
            assert open_maps(tmp_path / "left-behind.npz")
            if report.step == 5:
                break
        await session.run(trainer.variables[0])
    assert not readers()
    assert not open_maps(tmp_path / "left-behind.npz")


async def test_a_replica_that_comes_again_reads_again(tmp_path: Path) -> None:
    np.savez(tmp_path / "lines.npz", **world.columns())
    source = fr.data.npz(tmp_path / "lines.npz", batch=8)
    graph, trainer = world.build(2, fr.train.FirstOf(1), cluster=True)
    async with (
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(40),
    ):
        killed = returned = False
        async for report in trainer.steps(session, source):
            if report.step == 20:
                cluster.processes[WORKERS[1]].kill()
                killed = True
            if killed and not returned and trainer.statistics().lost:
                await cluster.respawn(WORKERS[1])
                returned = True
            if returned and 1 in report.kept:
                break
        assert returned


async def test_time_that_a_replica_waits_for_its_reading_is_input() -> None:
    source = fr.data.function(world.slow, rows=240, batch=8, epochs=1, seconds=0.1)  # far more than a step
    graph, trainer = world.build(1)
    async with fr.Session(graph) as session:
        reports = [report async for report in trainer.steps(session, source)][-20:]
    waited = sum(report.times[0].input for report in reports)
    assert waited > 0.5 * sum(report.seconds for report in reports)


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def reading_session(imports: list[str]) -> AsyncIterator[Any]:
    graph, trainer = world.build(2, cluster=True)
    async with (
        fr.LocalCluster(ps=1, worker=2, imports=imports) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):

        async def train(source: fr.data.Source) -> int:
            return len([report async for report in trainer.steps(session, source)])

        yield train


async def test_what_cannot_be_read_is_named_with_source_batch_and_node(tmp_path: Path) -> None:
    path = tmp_path / "moved.npz"
    np.savez(path, **world.columns())
    moved = fr.data.npz(path, batch=8, epochs=1)
    path.unlink()
    async with reading_session(["reading_world"]) as train:
        with pytest.raises(
            fr.FeedError, match=rf"batch \d of the source npz {path} cannot be read on /job:worker/task:\d"
        ):
            await train(moved)
        failing = fr.data.function(world.failing, rows=64, batch=8, shuffle=False, at=26, epochs=1)
        with pytest.raises(
            fr.FeedError, match=r"batch 3 of the source failing.* /job:worker/task:1: ValueError: row 26"
        ):
            await train(failing)
        wide = fr.data.function(world.wide, rows=64, batch=8)
        with pytest.raises(fr.FeedError, match=r"'x': expected float32\[\?, ?2\], got float64\[8, 2\]; convert it"):
            await train(wide)


async def test_a_function_that_a_node_does_not_know_is_named_with_how_to_bring_it() -> None:
    async with reading_session([]) as train:
        with pytest.raises(
            fr.FeedError, match=r"'lines'.*not known.*--import MODULE.*LocalCluster\(imports=\[MODULE\]\)"
        ):
            await train(fr.data.function(world.lines, rows=64, batch=8))


async def test_a_source_that_does_not_fit_the_trainer_is_refused_at_the_line() -> None:
    graph, trainer = world.build(2)
    given = world.columns()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"test_reading.py.*\['x', 'y'\], got \['x'\]"):
            trainer.steps(session, fr.data.arrays({"x": given["x"]}, batch=8))
        wrong = {"x": given["x"].astype("float64"), "y": given["y"]}
        with pytest.raises(
            fr.FeedError, match=r"test_reading.py.*'x' of a source of arrays.*expected float32.*float64"
        ):
            trainer.steps(session, fr.data.arrays(wrong, batch=8))


# ── a reader by itself ───────────────────────────────────────────────────────────────────────────────────────────────


class Admitted(list[Any]):
    """What a reader has admitted: (number, values)."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Event()

    def admit(self, number: int, values: Any) -> None:
        self.append((number, values))
        self._came.set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self) < count:
                self._came.clear()
                await self._came.wait()


def reader_of(source: fr.data.Source, admitted: Admitted, given: int = 0) -> Reader:
    unused: dict[str, Any] = dict.fromkeys(("feeds", "wants", "parts", "finite", "servers"), ())
    numbers = dict.fromkeys(("run", "replica", "replicas", "version", "plan", "staleness", "ask", "told", "seed"), 0)
    role = BeginReplica(
        **numbers,
        **unused,
        container="",
        group="",
        given=given,
        source=source_to_data(source),
        inputs=tuple((name, spec.dtype.name, spec.dims) for name, spec in source.specs.items()),
    )
    return Reader(role, "/job:worker/task:0", admitted.admit)


async def test_batches_are_admitted_in_order_and_told_twice_are_read_once() -> None:
    source = fr.data.arrays({"x": np.arange(100)}, batch=1, shuffle=False, epochs=1)
    admitted = Admitted()
    reader = reader_of(source, admitted, given=10)
    work = asyncio.ensure_future(reader.run())
    reader.draw(12, [99])  # one before it is still to come
    reader.draw(11, [7, 3, 50])
    reader.draw(11, [7, 3, 50])
    reader.draw(13, [50, 200, 8])
    await admitted.reach(5)
    work.cancel()
    await asyncio.wait([work])
    assert [number for number, _ in admitted] == [11, 12, 13, 14, 15]
    unread = admitted.pop(3)[1]
    assert isinstance(unread, Unread)
    assert "batches are 0 to 99, not 200" in str(unread.error)
    assert [int(values[0][0]) for _, values in admitted] == [7, 3, 50, 8]
    assert not readers()


@dataclass(frozen=True)
class Opened(fr.data.Source):
    """Takes its time to open, and counts how often it is."""

    inner: fr.data.Source
    times: ClassVar[list[int]] = []

    @property
    def order(self) -> Any:
        return self.inner.order

    def table(self) -> fr.data.Table:
        self.times.append(1)
        time.sleep(0.05)
        return self.inner.table()

    @property
    def specs(self) -> Any:
        return self.inner.specs


async def test_a_source_is_opened_once_for_all_threads_of_a_replica() -> None:
    source = Opened(fr.data.arrays({"x": np.arange(100)}, batch=1, shuffle=False, epochs=1))
    admitted = Admitted()
    reader = reader_of(source, admitted)
    work = asyncio.ensure_future(reader.run())
    reader.draw(1, range(20))
    await admitted.reach(20)
    work.cancel()
    await asyncio.wait([work])
    assert len(source.times) == 1


async def test_what_is_read_ahead_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", 3 << 20)
    source = fr.data.arrays({"x": np.zeros((20, 1 << 20), np.uint8)}, batch=1, shuffle=False, epochs=1)
    admitted = Admitted()
    reader = reader_of(source, admitted)
    work = asyncio.ensure_future(reader.run())
    reader.draw(1, range(20))
    for used in range(18):
        await admitted.reach(used + 3)
        assert len(admitted) <= used + 4, "as many as there is room for, and one before its size was known"
        reader.use(used + 1)
    work.cancel()
    await asyncio.wait([work])


async def test_a_reader_that_is_cancelled_waits_for_what_is_being_read() -> None:
    world.gate.clear()
    source = fr.data.function(
        world.gated, rows=64, batch=1, shuffle=False, size=8, specs={"x": fr.Spec("uint8", (None, 8))}
    )
    admitted = Admitted()
    reader = reader_of(source, admitted)
    work = asyncio.ensure_future(reader.run())
    reader.draw(1, range(8))
    assert await asyncio.to_thread(world.asked.wait, 20)
    work.cancel()
    await asyncio.sleep(0)
    assert not work.done()
    assert readers()
    world.gate.set()
    await asyncio.wait([work])
    assert work.cancelled()
    assert not readers()
    assert not admitted
