"""Runs of a plan one after another that a lane takes together: the same as each by itself, as far as they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from session_world import assert_quiet, cancel_everywhere, host_of, world_slow

import flowrt as fr
from flowrt.sched.host.host import RunContext

if TYPE_CHECKING:
    from flowrt.sched.executor import Executor

CONTEXT = RunContext(("several", 1), number=7, seed=3)
ONE = [np.ones(1)]


@asynccontextmanager
async def counting(threads: int = 1) -> AsyncIterator[tuple[fr.Session, Executor, fr.Variable]]:
    """A session, a long plan that was run, which adds what it is fed to a variable, and that."""
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None,), name="x")
        v = fr.Variable(np.float64(0), name="v")
        late = world_slow(x)
        write = v.assign_add(fr.sum(x) + 0.0 * fr.sum(late))
        drawn = fr.random.uniform((3,), seed=1) + np.float32(0) * fr.astype(fr.sum(late), "float32")
    async with fr.Session(graph, options=fr.Options(threads=threads)) as session:
        step = session.compile([drawn, write], [x])
        for _ in range(2):
            await step(np.zeros(1))
        executor = step._step.registered
        assert executor is not None
        yield session, executor, v


async def test_they_are_the_runs_that_would_follow_one_another() -> None:
    async with counting() as (session, executor, v):
        found = await executor.run_several([[np.full(1, float(n))] for n in range(1, 5)], CONTEXT)
        assert float(await session.run(v)) == 1 + 2 + 3 + 4
        alone = [await executor.run(ONE, RunContext(("alone", n), number=7 + n, seed=3)) for n in range(4)]
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
        assert len({each[0].tobytes() for each in found}) == 4
        assert_quiet(session)


async def test_they_end_where_somebody_waits_for_the_lane() -> None:
    async with counting() as (session, executor, v):
        lanes, go_on = host_of(session).lanes, threading.Event()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(lanes.run(go_on.wait, 30))
            await asyncio.sleep(0)
            several = group.create_task(executor.run_several([ONE] * 5, CONTEXT))
            await asyncio.sleep(0)
            group.create_task(lanes.run(threading.get_ident))
            await asyncio.sleep(0)
            go_on.set()
        assert len(several.result()) == float(await session.run(v)) == 1
        assert len(await executor.run_several([ONE] * 5, CONTEXT)) == 5


async def test_what_has_other_shapes_is_left_to_another_time() -> None:
    async with counting() as (session, executor, v):
        fed: list[Any] = [ONE, ONE, [np.ones(2)], ONE]
        assert len(await executor.run_several(fed, CONTEXT)) == 2
        assert len(await executor.run_several(fed[2:], CONTEXT)) == 1
        assert float(await session.run(v)) == 4


async def test_cancelled_anywhere_each_has_run_or_not_and_nothing_is_held() -> None:
    async with counting() as (session, executor, v):
        seen = [0.0]

        async def check() -> None:
            assert_quiet(session)
            seen.append(float(await session.run(v)))

        assert await cancel_everywhere(lambda: executor.run_several([ONE] * 3, CONTEXT), check) == 1
        assert all(now - before in (0, 1, 2, 3) for before, now in pairwise(seen))


async def test_what_does_not_fit_is_refused_before_any_is_begun() -> None:
    async with counting() as (session, executor, v):
        with pytest.raises(fr.SpecError, match="x"):
            await executor.run_several([ONE, [np.ones((1, 1))]], CONTEXT)
        assert float(await session.run(v)) == 0
        assert_quiet(session)
