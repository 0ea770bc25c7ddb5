"""What a run that failed, was cancelled or stopped leaves behind: nothing, without the collector's help."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, OUTSIDE = 4, 9
SHORT, LONG = 8, 1 << 22  # entries of a feed: a tape of the loop's own thread, and one of a lane


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Cycles stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def failing() -> Any:
    """A sum of what is fed and a row of a table, which fails where there is no such row."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        i = fr.placeholder("int64", (), name="i")
        y = fr.sum(fr.exp(x) * fr.take(fr.constant(np.ones(ROWS, np.float32)), i))
    return graph, x, i, y


def fed(size: int) -> tuple[np.ndarray[Any, Any], weakref.ref[Any]]:
    array = np.ones(size, np.float32)
    return array, weakref.ref(array)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_blocking_run_that_failed_holds_nothing(size: int, tapes: bool, compiled: bool) -> None:
    graph, x, i, y = failing()
    with fr.BlockingSession(graph, options=fr.Options(tapes=tapes)) as session:
        step = session.compile(y, [x, i])
        run: Callable[[Any, int], Any] = step if compiled else lambda a, b: session.run(y, {x: a, i: b})
        for turn in range(6):
            if turn % 2:
                run(np.ones(size, np.float32), 0)
            array, alive = fed(size)
            with pytest.raises(fr.FlowrtError, match="out of range"):
                run(array, OUTSIDE)
            del array
            session.reset("no container")  # the loop's thread has ended its turn then
            assert alive() is None, turn


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
async def test_an_awaited_run_that_failed_holds_nothing(size: int, tapes: bool, compiled: bool) -> None:
    graph, x, i, y = failing()
    async with fr.Session(graph, options=fr.Options(tapes=tapes)) as session:
        step = session.compile(y, [x, i])
        for turn in range(6):
            if turn % 2:
                await step(np.ones(size, np.float32), 0)
            array, alive = fed(size)
            with pytest.raises(fr.FlowrtError, match="out of range"):
                await (step(array, OUTSIDE) if compiled else session.run(y, {x: array, i: OUTSIDE}))
            del array
            assert alive() is None, turn


def waiting() -> Any:
    """A sum of what is fed, added to what a queue that stays empty would give."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        queue = fr.FIFOQueue(1, ["float32"], [()])
        y = fr.sum(x) + queue.dequeue()
    return graph, x, y


@pytest.mark.usefixtures("uncollected")
async def test_a_run_whose_time_is_over_holds_nothing() -> None:
    graph, x, y = waiting()
    async with fr.Session(graph) as session:
        array, alive = fed(LONG)
        with pytest.raises(fr.StepTimeout):
            await session.run(y, {x: array}, timeout=0.05)
        del array
        assert alive() is None


@pytest.mark.usefixtures("uncollected")
async def test_a_run_that_is_cancelled_holds_nothing() -> None:
    graph, x, y = waiting()
    async with fr.Session(graph) as session:
        array, alive = fed(LONG)
        running = asyncio.ensure_future(session.run(y, {x: array}))
        del array
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        del running
        await asyncio.sleep(0)  # what woke this task up refers to the one that ended
        assert alive() is None


@pytest.mark.usefixtures("uncollected")
def test_a_blocking_run_whose_time_is_over_holds_nothing() -> None:
    graph, x, y = waiting()
    with fr.BlockingSession(graph) as session:
        array, alive = fed(LONG)
        with pytest.raises(fr.StepTimeout):
            session.run(y, {x: array}, timeout=0.05)
        del array
        session.reset("no container")
        assert alive() is None
