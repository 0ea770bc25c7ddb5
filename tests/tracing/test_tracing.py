"""Sessions of one process, traced: what is in the file, and what tracing refuses, bounds and leaves as it was."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT
from session_world import host_of, until
from trace_world import files_in, judged

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = fr.Options(optimize=False, threads=1)
X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


def chain() -> tuple[fr.Graph, Any, Any]:
    """A graph of which every op is one launch: its placeholder, and what it computes."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 32), name="x")
        weights = fr.constant(np.ones((32, 16), np.float32), name="weights")
        product = fr.matmul(x, weights)
        out = fr.sum(fr.tanh(product), axis=1)
    return graph, x, out


def queued() -> tuple[fr.Graph, Any, Any, Any]:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, ["float32"], [()], name="elements")
        x = fr.placeholder("float32", (), name="x")
        put, taken = queue.enqueue(x), queue.dequeue()[0] * 2
    return graph, x, put, taken


def waits(session: fr.Session) -> bool:
    """Whether a step of it waits for an element of a queue."""
    return any(queue.statistics().waiting_dequeues for queue in host_of(session)._queues.values())


# ── what is in the file ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.asyncio
async def test_each_node_of_a_known_graph_is_there_once_a_step(tapes: bool, tmp_path: Path) -> None:
    graph, x, out = chain()
    async with fr.Session(graph, options=fr.Options(optimize=False, threads=1, tapes=tapes)) as session:
        await session.run(out, {x: X})
        async with session.tracing(tmp_path / "step.json"):
            for _ in range(3):
                await session.run(out, {x: X})
    timeline = judged(tmp_path / "step.json")
    steps = [step["args"]["step"] for step in timeline.of("step")]
    assert len(set(steps)) == 3
    for step in steps:
        found = timeline.names("launch", step=step) + timeline.names("node", step=step)
        assert {name: found[name] for name in ("matmul", "tanh", "sum")} == {"matmul": 1, "tanh": 1, "sum": 1}
    (product, *_) = timeline.of("launch", name="matmul") or timeline.of("node", name="matmul")
    assert product["args"]["shapes"] == "float32[64,32], float32[32,16] → float32[64,16]"
    assert Path(__file__).name in product["args"]["line"]
    if tapes:
        assert product["args"]["tape"] == timeline.of("tape")[0]["name"]


def test_calls_of_a_compiled_step_are_there_and_direct_again_afterwards(tmp_path: Path) -> None:
    graph, x, out = chain()
    with fr.BlockingSession(graph, options=PLAIN) as session:
        step = session.compile(out, [x])
        expected = step(X)
        for _ in range(10):
            step(X)
        with session.tracing(tmp_path / "step.json"):
            assert np.array_equal(step(X), expected)
            step(X)
        calls = _python_calls(lambda: step(X))
    timeline = judged(tmp_path / "step.json")
    assert len(timeline.of("step")) == 2
    assert timeline.names("launch") == {"matmul": 2, "tanh": 2, "sum": 2}
    assert calls == 0


def _python_calls(call: Callable[[], Any]) -> int:
    """How many functions of Python's are entered in a call, beside the one that makes it."""
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(
        [frame for frame in entered if "flowrt" in frame.f_code.co_filename and frame.f_code is not call.__code__]
    )


@pytest.mark.asyncio
async def test_slices_add_up_to_what_steps_took(tmp_path: Path) -> None:
    """A slice lies within what it is part of; what nothing else interrupted is nearly all kernels."""
    graph, x, out = chain()
    large = np.ones((200_000, 32), np.float32)
    seconds = []
    async with fr.Session(graph, options=PLAIN) as session:
        await session.run(out, {x: large})
        async with session.tracing(tmp_path / "step.json"):
            for _ in range(20):
                began = time.perf_counter()
                await session.run(out, {x: large})
                seconds.append(time.perf_counter() - began)
    timeline = judged(tmp_path / "step.json")
    shares = []
    for step, measured in zip(timeline.of("step"), seconds, strict=True):
        number = step["args"]["step"]
        launches = sum(one["dur"] for one in timeline.of("launch", step=number)) / 1e6
        (tape,) = timeline.of("tape", step=number)
        assert launches <= tape["dur"] / 1e6 <= step["dur"] / 1e6 <= measured
        shares.append(launches / measured)
    assert max(shares) >= 0.5, shares  # the others waited for a processor


def test_a_tape_that_threads_share_shows_who_ran_what(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (600, 600), name="x")
        out = fr.mean(fr.tanh(x @ x) @ x)
    values = np.random.default_rng(1).normal(size=(600, 600)).astype(np.float32)
    with fr.BlockingSession(graph, options=fr.Options(threads=2)) as session:
        step = session.compile(out, [x])
        expected, tracks = [step(values) for _ in range(8)][-1], set[str]()
        while len(tracks) < 2:  # the helper may get no core for a while
            with session.tracing(tmp_path / "step.json"):
                for _ in range(20):
                    assert step(values) == expected
            timeline = judged(tmp_path / "step.json")
            tracks = {one["track"] for one in timeline.of("launch")}
    assert "helper 1" in tracks
    assert len(tracks) == 2
    for launch in timeline.of("launch"):
        (tape,) = timeline.of("tape", step=launch["args"]["step"])
        assert tape["ts"] <= launch["ts"] + 1e-3
        assert launch["ts"] + launch["dur"] <= tape["ts"] + tape["dur"] + 1e-3


@pytest.mark.asyncio
async def test_a_wait_for_a_queue_lasts_until_there_is_an_element(tmp_path: Path) -> None:
    graph, x, put, taken = queued()
    async with fr.Session(graph) as session:
        async with session.tracing(tmp_path / "step.json"), asyncio.TaskGroup() as group:
            waiting = group.create_task(session.run(taken))
            await until(lambda: waits(session))
            await session.run(put, {x: 21.0})
        assert waiting.result() == 42.0
    timeline = judged(tmp_path / "step.json")
    (dequeue,) = [one for one in timeline.of("wait") if one["args"]["op"] == "dequeue"]
    (enqueue,) = [one for one in timeline.of("wait") if one["args"]["op"] == "enqueue"]
    assert dequeue["ts"] < enqueue["ts"] < dequeue["ts"] + dequeue["dur"]
    assert len({step["track"] for step in timeline.of("step")}) == 2  # they overlap


@pytest.mark.asyncio
async def test_what_still_waits_when_its_step_is_cancelled_is_there_as_unfinished(tmp_path: Path) -> None:
    graph, _, _, taken = queued()
    async with fr.Session(graph) as session, session.tracing(tmp_path / "step.json"):
        waiting = asyncio.ensure_future(session.run(taken))
        await until(lambda: waits(session))
        waiting.cancel()
        await asyncio.wait([waiting])
    (wait,) = judged(tmp_path / "step.json").of("wait")
    assert wait["args"]["unfinished"] is True


@pytest.mark.asyncio
async def test_what_a_device_is_issued_is_on_the_track_of_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import_module("arena")
    graph, x, out = chain()
    devices = fr.Options(devices=("arena:0", "cpu:0"))
    async with fr.Session(graph, options=devices) as session, session.tracing(tmp_path / "step.json"):
        await session.run(out, {x: X})
    timeline = judged(tmp_path / "step.json")
    (device,) = timeline.of("device")
    assert "arena:0" in device["track"]
    assert device["args"]["device"] == "arena:0"
    assert "matmul" in device["args"]["nodes"]
    (step,) = timeline.of("step")
    assert step["ts"] <= device["ts"]


@pytest.mark.asyncio
async def test_training_in_one_process_shows_its_versions(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            lambda batch: fr.mean((batch["x"] @ fr.Variable(np.ones((32, 1), np.float32), name="w")) ** 2),
            inputs={"x": fr.Spec("float32", (None, 32))},
            optimizer=fr.optim.SGD(0.01),
            replicas=2,
            server_device="",
            worker_device="",
        )
    async with fr.Session(graph) as session, session.tracing(tmp_path / "step.json"):
        reports = [report async for report in trainer.steps(session, ({"x": X} for _ in range(6)))]
    versions = judged(tmp_path / "step.json").of("version")
    assert [one["args"]["step"] for one in versions] == [report.step for report in reports] == [1, 2, 3]
    for one, report in zip(versions, reports, strict=True):
        assert one["args"]["loss"] == pytest.approx(report.loss)
        assert [int(kept.split()[0]) for kept in one["args"]["kept"].split(", ")] == list(report.kept)


# ── what is refused, bounded and left as it was ──────────────────────────────────────────────────────────────────────


@pytest.mark.asyncio
async def test_a_session_is_traced_once_at_a_time(tmp_path: Path) -> None:
    graph, x, out = chain()
    async with fr.Session(graph) as session:
        async with session.tracing(tmp_path / "outer.json"):
            with pytest.raises(fr.GraphError, match=r"traced already, to .*outer\.json; leave that block first"):
                async with session.tracing(tmp_path / "inner.json"):
                    pytest.fail("it was entered")
            await session.run(out, {x: X})
        async with session.tracing(tmp_path / "next.json"):
            await session.run(out, {x: X})
    assert not (tmp_path / "inner.json").exists()
    assert [len(judged(tmp_path / f"{name}.json").of("step")) for name in ("outer", "next")] == [1, 1]


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_is_an_error_before_the_block_runs(tmp_path: Path) -> None:
    graph, _, _ = chain()
    async with fr.Session(graph) as session:
        for path, why in ((tmp_path / "none" / "step.json", "make the folder .* first"), (tmp_path, "is a folder")):
            with pytest.raises(fr.GraphError, match=why) as refused:
                async with session.tracing(path):
                    pytest.fail("it was entered")
            assert Path(__file__).name in str(refused.value)
        async with session.tracing(tmp_path / "step.json"):
            pass
    assert files_in(tmp_path) == ["step.json"]


def test_a_blocking_session_names_the_line_of_what_it_refuses(tmp_path: Path) -> None:
    graph, _, _ = chain()
    with (
        fr.BlockingSession(graph) as session,
        pytest.raises(fr.GraphError, match=f"{Path(__file__).name}.*make the folder"),
        session.tracing(tmp_path / "none" / "step.json"),
    ):
        pytest.fail("it was entered")


def test_what_is_no_path_is_refused() -> None:
    graph, _, _ = chain()
    with pytest.raises(fr.GraphError, match="the file of a trace is told by its path, not 3"):
        fr.Session(graph).tracing(3)  # type: ignore[arg-type]


def test_tracing_without_async_says_how_it_is_opened(tmp_path: Path) -> None:
    graph, _, _ = chain()
    with pytest.raises(fr.GraphError, match="with `async with`"), fr.Session(graph).tracing(tmp_path / "step.json"):
        pytest.fail("it was entered")


@pytest.mark.asyncio
async def test_a_name_that_ends_in_gz_is_packed(tmp_path: Path) -> None:
    graph, x, out = chain()
    async with fr.Session(graph) as session, session.tracing(tmp_path / "step.json.gz"):
        await session.run(out, {x: X})
    assert (tmp_path / "step.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert len(judged(tmp_path / "step.json.gz").of("step")) == 1


@pytest.mark.asyncio
async def test_a_file_is_whole_and_there_where_the_block_fails(tmp_path: Path) -> None:
    graph, x, out = chain()
    async with fr.Session(graph) as session:
        traced = session.tracing(tmp_path / "step.json")
        await traced.__aenter__()
        await session.run(out, {x: X})
        failure = ZeroDivisionError()
        await traced.__aexit__(ZeroDivisionError, failure, None)
        assert session._traced is None
    assert len(judged(tmp_path / "step.json").of("step")) == 1
    assert files_in(tmp_path) == ["step.json"]


@pytest.mark.asyncio
async def test_slices_beyond_the_bound_are_counted_and_left_out(tmp_path: Path) -> None:
    graph, x, out = chain()
    async with fr.Session(graph, options=PLAIN) as session:
        await session.run(out, {x: X})
        async with session.tracing(tmp_path / "step.json", slices=20):
            for _ in range(10):
                await session.run(out, {x: X})
    timeline = judged(tmp_path / "step.json")
    assert 10 < len(timeline.slices) <= 20
    assert sum(timeline.about["dropped"].values()) == 10 * 5 - len(timeline.slices)  # a step, its tape, three launches


@pytest.mark.asyncio
async def test_a_session_may_be_closed_inside_the_block(tmp_path: Path) -> None:
    graph, x, out = chain()
    session = fr.Session(graph)
    await session.__aenter__()
    async with session.tracing(tmp_path / "step.json"):
        await session.run(out, {x: X})
        await session.__aexit__(None, None, None)
    assert len(judged(tmp_path / "step.json").of("step")) == 1
    with pytest.raises(fr.ClosedError):
        await session.run(out, {x: X})
