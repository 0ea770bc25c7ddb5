"""The batcher: requests joined into runs, and what becomes of those that fail, are too many, or are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from serving_world import Held, X, doubling, frozen, until

import flowrt as fr
from flowrt.base.errors import ClosedError, FeedError, FlowrtError, GraphError, StepTimeout, WouldBlock
from flowrt.serving import batcher as batcher_module
from flowrt.serving.batcher import LARGE, Batcher
from flowrt.serving.batching import Batching
from flowrt.serving.endpoint import Endpoint

LONG = 1000.0  # seconds that a batch may wait for others: here, until it is full


@asynccontextmanager
async def batcher_of(model: Any, **settings: Any) -> AsyncIterator[Batcher]:
    batcher, ready = Batcher(model, Batching(**settings)), asyncio.Future[None]()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(batcher.serve(ready))
        await ready
        try:
            yield batcher
        finally:
            batcher.close()


def spinning(x: Any) -> Any:
    """A model that goes on for as long as the largest number that it is given."""
    count, _ = fr.while_loop(lambda i, v: i < fr.max(x), lambda i, v: (i + 1, v * 0.5), (np.float32(0), np.float32(1)))
    return x + count * 0


def alone(model: Any, rows: Any) -> Any:
    with model:
        return model(x=rows)["y"]


async def test_requests_that_come_together_run_together_and_each_gets_its_own_rows() -> None:
    model = doubling()
    async with batcher_of(model, max_batch=16, max_delay=LONG) as batcher:
        parts = [X[:3], X[3:4], X[4:4], X[4:16]]
        answers = await asyncio.gather(*[batcher.infer({"x": part}) for part in parts])
        assert dict(batcher.metrics.sizes) == {4: 1}
    for part, answer in zip(parts, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], part * 2 + 1)


@pytest.mark.parametrize("part", ["joined", "cut"])
async def test_large_requests_are_put_together_and_apart_beside_the_event_loop(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(getattr(batcher_module, part))
    monkeypatch.setattr(batcher_module, part, held)
    rows = np.zeros((LARGE // X[:1].nbytes, 8), "float32")
    async with batcher_of(doubling(), max_batch=2 * len(rows), max_delay=LONG) as batcher, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(batcher.infer({"x": rows})) for _ in range(2)]
        await until(held.called.is_set)
        held.may.set()  # which the event loop comes to
    for task in asked:
        np.testing.assert_array_equal(task.result()["y"], rows + 1)


async def test_what_others_hold_does_not_matter_to_the_bit() -> None:
    weights = np.random.default_rng(3).normal(size=(8, 1500)).astype("float32")
    model = frozen(lambda x: fr.nn.softmax(x @ fr.constant(weights)))
    strange = np.full((3, 8), np.nan, "float32")
    async with batcher_of(model, max_batch=4, max_delay=LONG) as batcher:
        (one, _), (other, _) = [
            await asyncio.gather(batcher.infer({"x": X[:1]}), batcher.infer({"x": rest})) for rest in (X[1:4], strange)
        ]
    assert one["y"].tobytes() == other["y"].tobytes()
    assert np.isfinite(one["y"]).all()


@pytest.mark.parametrize("rows", [1, 5, 64])
async def test_without_joining_an_answer_has_the_bits_of_a_lone_run(rows: int) -> None:
    weights = np.random.default_rng(3).normal(size=(8, 1500)).astype("float32")
    model = frozen(lambda x: x @ fr.constant(weights))
    async with batcher_of(model, max_batch=1) as batcher:
        answers = await asyncio.gather(*[batcher.infer({"x": X[:rows]}) for _ in range(4)])
    expected = alone(model, X[:rows])
    assert {answer["y"].tobytes() for answer in answers} == {expected.tobytes()}


async def test_a_request_of_more_rows_than_go_together_is_run_in_pieces() -> None:
    async with batcher_of(doubling(), max_batch=16, max_delay=LONG) as batcher:
        answer = await batcher.infer({"x": X[:50]})
    np.testing.assert_array_equal(answer["y"], X[:50] * 2 + 1)


async def test_zero_rows_have_an_answer_of_zero_rows() -> None:
    for settings in ({"max_batch": 8, "max_delay": 0}, {"max_batch": 1}):
        async with batcher_of(doubling(), **settings) as batcher:
            assert (await batcher.infer({"x": X[:0]}))["y"].shape == (0, 8)


async def test_rows_of_other_shapes_run_apart() -> None:
    model = frozen(lambda x: x * 2, shape=(None, None))
    async with batcher_of(model, max_batch=4, max_delay=LONG) as batcher:
        parts = [X[:2, :3], X[:2, :5], X[2:4, :3], X[2:4, :5]]
        answers = await asyncio.gather(*[batcher.infer({"x": part}) for part in parts])
        assert dict(batcher.metrics.sizes) == {2: 2}
    for part, answer in zip(parts, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], part * 2)


async def test_a_request_that_fails_fails_alone() -> None:
    table = np.arange(20, dtype="float32").reshape(10, 2)
    model = frozen(lambda x: fr.take(fr.constant(table), x), shape=(None,), dtype="int64")
    asked = [np.array(ids) for ids in ([1], [99], [3])]
    async with batcher_of(model, max_batch=3, max_delay=LONG) as batcher:
        first, wrong, last = await asyncio.gather(*[batcher.infer({"x": ids}) for ids in asked], return_exceptions=True)
        assert batcher.metrics.ended == {"ok": 2, "invalid": 1}
    assert isinstance(wrong, FlowrtError)
    assert "out of range" in str(wrong)
    np.testing.assert_array_equal(first["y"], table[[1]])
    np.testing.assert_array_equal(last["y"], table[[3]])


async def test_scalars_and_what_has_no_rows_run_alone() -> None:
    scalar = frozen(lambda x: x * 2, shape=())
    async with batcher_of(scalar, max_batch=8, max_delay=LONG) as batcher:
        assert (await batcher.infer({"x": np.float32(3)}))["y"] == 6
    whole = frozen(lambda x: fr.sum(x))
    async with batcher_of(whole, max_batch=8, max_delay=LONG) as batcher:
        answers = await asyncio.gather(*[batcher.infer({"x": np.ones((n, 8), "float32")}) for n in (1, 2)])
        assert [float(answer["y"]) for answer in answers] == [8, 16]
        assert dict(batcher.metrics.sizes) == {1: 2}


async def test_inputs_with_different_numbers_of_rows_run_alone() -> None:
    with fr.Graph() as graph:
        a, b = (fr.placeholder("float32", (None, 8), name=name) for name in "ab")
        both = fr.concat([a, b], axis=0)
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, [a, b], {"y": both})
    async with batcher_of(model, max_batch=1) as batcher:
        assert (await batcher.infer({"a": X[:2], "b": X[:3]}))["y"].shape == (5, 8)


async def test_a_model_whose_rows_hang_on_one_another_is_not_joined() -> None:
    mixing = frozen(lambda x: x - fr.mean(x, axis=0))
    with pytest.raises(ExceptionGroup) as raised:
        async with batcher_of(mixing, max_batch=8):
            raise AssertionError
    (error,) = raised.value.exceptions
    assert isinstance(error, GraphError)
    assert "a row of 'y' hangs on the others" in str(error)
    async with batcher_of(mixing, max_batch=1) as batcher:
        np.testing.assert_array_equal((await batcher.infer({"x": X}))["y"], alone(mixing, X))


async def test_beyond_what_may_wait_a_request_is_refused_at_once() -> None:
    async with batcher_of(doubling(), max_delay=LONG, max_waiting=2) as batcher:
        waiting = [asyncio.ensure_future(batcher.infer({"x": X[:1]})) for _ in range(2)]
        await until(lambda: batcher.waiting == 2)
        with pytest.raises(WouldBlock, match="2 requests of 64 bytes wait"):
            await batcher.infer({"x": X[:1]})
        batcher.close()
        assert [answer["y"].shape for answer in await asyncio.gather(*waiting)] == [(1, 8)] * 2
        assert batcher.metrics.ended == {"ok": 2, "overload": 1}
        assert (batcher.waiting, batcher.waiting_bytes) == (0, 0)


async def test_what_waits_is_bounded_in_bytes_and_one_request_always_may() -> None:
    async with batcher_of(doubling(), max_delay=LONG, max_bytes=100) as batcher:
        large = asyncio.ensure_future(batcher.infer({"x": X[:10]}))
        await until(lambda: batcher.waiting == 1)
        with pytest.raises(WouldBlock):
            await batcher.infer({"x": X[:1]})
        batcher.close()
        assert (await large)["y"].shape == (10, 8)


async def test_one_that_is_cancelled_is_dropped_and_the_others_are_answered() -> None:
    async with batcher_of(doubling(), max_batch=2, max_delay=LONG) as batcher:
        given_up = asyncio.ensure_future(batcher.infer({"x": X[:1]}))
        await until(lambda: bool(batcher._forming._forming))
        (forming,) = batcher._forming._forming.values()
        given_up.cancel()
        await asyncio.wait([given_up])
        assert (batcher.waiting, batcher.waiting_bytes) == (0, 0)
        assert [request.arrays for request in forming] == [()]  # in no batch yet, and holding nothing
        other = await batcher.infer({"x": X[1:2]})
        np.testing.assert_array_equal(other["y"], X[1:2] * 2 + 1)
        assert batcher.metrics.ended == {"cancelled": 1, "ok": 1}


async def test_a_run_that_nobody_waits_for_any_more_is_stopped() -> None:
    endless = np.full((1, 8), 1e30, "float32")
    async with batcher_of(frozen(spinning), max_batch=1) as batcher:
        running = asyncio.ensure_future(batcher.infer({"x": endless}))
        await until(lambda: batcher._running is not None)
        running.cancel()
        assert (await batcher.infer({"x": X[:1]}))["y"].shape == (1, 8)


async def test_one_without_an_answer_in_time_is_given_up_and_stopped() -> None:
    endless = np.full((1, 8), 1e30, "float32")
    async with batcher_of(frozen(spinning), max_batch=1, timeout=0.05) as batcher:
        with pytest.raises(StepTimeout, match=r"within 0\.05 s"):
            await batcher.infer({"x": endless})
    assert batcher.metrics.ended == {"timeout": 1}


async def test_what_does_not_fit_is_refused_and_does_not_wait() -> None:
    async with batcher_of(doubling(), max_delay=LONG) as batcher:
        for values in ({"x": X[0]}, {"x": X.astype("float64")}, {"z": X}, {}, {"x": np.array(["a"])}):
            with pytest.raises(FeedError):
                await batcher.infer(values)
        assert batcher.waiting == 0
        batcher.close()
        with pytest.raises(ClosedError):
            await batcher.infer({"x": X})


async def test_random_orders_and_sizes_give_everyone_their_own() -> None:
    rng = np.random.default_rng(8)
    async with batcher_of(doubling(), max_batch=8, max_delay=0.001) as batcher:

        async def ask(start: int, rows: int, pause: int) -> None:
            for _ in range(pause):
                await asyncio.sleep(0)
            part = X[start : start + rows]
            answer = await batcher.infer({"x": part})
            np.testing.assert_array_equal(answer["y"], part * 2 + 1)

        async with asyncio.TaskGroup() as tasks:
            for start, rows, pause in zip(*(rng.integers(0, top, 300) for top in (50, 14, 40)), strict=True):
                tasks.create_task(ask(int(start), int(rows), int(pause)))
        assert batcher.metrics.ended == {"ok": 300}
        assert batcher.metrics.runs < 300


async def test_a_newer_version_whose_opening_is_given_up_at_any_moment_ends() -> None:
    model, moment, cancelled = doubling(), 0, True
    while cancelled:
        moment += 1
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            endpoint = Endpoint(model, Batching(max_batch=2), None)
            await endpoint.open(tasks)
            opening = asyncio.create_task(endpoint._put(model, tasks))
            for _ in range(moment):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            cancelled = opening.cancelled()
            endpoint.close()
    assert moment > 2


async def test_outputs_whose_sizes_hang_on_what_is_fed_fail_their_request_alone() -> None:
    def present(x: Any) -> Any:  # for each row, which of the numbers that are anywhere it holds
        found = fr.unique(x)
        return fr.astype(fr.any(fr.equal(fr.expand_dims(x, 2), fr.reshape(found, (1, 1, -1))), 1), "float32")

    rows = np.arange(16, dtype="float32").reshape(8, 2)
    rows[4:] = 1
    async with batcher_of(frozen(present, shape=(None, None)), max_batch=4) as batcher:
        with pytest.raises(FlowrtError, match=r"sizes hang on what is fed.*ask for fewer rows"):
            await batcher.infer({"x": rows})
        assert (await batcher.infer({"x": rows[:4]}))["y"].shape == (4, 8)


async def test_those_that_wait_while_a_run_is_stopped_are_given_up_as_any_other() -> None:
    model = frozen(spinning)
    async with batcher_of(model, max_batch=1) as batcher:
        running = asyncio.create_task(batcher.infer({"x": np.full((1, 8), 1e9, "float32")}))
        await until(lambda: batcher.metrics.runs == 1)
        others = [asyncio.create_task(batcher.infer({"x": np.full((1, 8), 1e9, "float32")})) for _ in range(50)]
        await until(lambda: batcher.waiting == 51)
        running.cancel()
        outcomes = []
        for task in others:  # one a turn of the loop, some of which find the run ended by its time, and not yet over
            await asyncio.sleep(0)
            task.cancel()
            outcomes += await asyncio.gather(task, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        assert (await batcher.infer({"x": X[:1] * 0}))["y"].shape == (1, 8)
