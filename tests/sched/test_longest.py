"""How long a tape may take: a loop whose iterations values count is never taken for short, whatever it was so far."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.sched.running import INLINE_SECONDS


def bounded(limit: int | None, body: Any = lambda v: v * 0.5 + 1.0) -> Any:
    return lambda x: fr.while_loop(lambda v: fr.sum(v) > 1.0, body, x, maximum_iterations=limit)


def nested(x: Any) -> Any:
    return fr.scan(lambda v, row: (bounded(None)(v), row), x, np.zeros((3, 2), np.float32))[0]


def in_a_branch(x: Any) -> Any:
    return fr.cond(fr.sum(x) > 0, lambda: bounded(None)(x), lambda: x)


def row_by_row(x: Any) -> Any:
    return fr.scan(lambda v, row: (v + row, v), x, np.zeros((100, 2), np.float32))[0]


def counted(x: Any) -> Any:
    return fr.while_loop(lambda i, v: i < fr.astype(fr.sum(x), "int64"), lambda i, v: (i + 1, v), (np.int64(0), x))[1]


LONGEST = {
    "endless": (bounded(None), math.inf),
    "a thousand of a hundred": (bounded(1000, lambda v: fr.matmul(fr.ones((2, 400)), fr.ones((400, 2)))[0] + v), 1e-3),
    "few": (bounded(5), INLINE_SECONDS),
    "nested": (nested, math.inf),
    "in a branch": (in_a_branch, math.inf),
    "counted by a value": (counted, math.inf),
    "row by row": (row_by_row, INLINE_SECONDS),
}


@pytest.mark.parametrize("name", LONGEST)
async def test_a_step_is_short_only_if_its_loops_cannot_be_long(name: str) -> None:
    program, longest = LONGEST[name]
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        y = program(x)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        for _ in range(3):
            await session.run(y, {x: np.zeros(2, np.float32)})
        (step,) = session._steps.values()
        (tape,) = step.registered.tapes._tapes.values()  # type: ignore[union-attr]
    if longest <= INLINE_SECONDS:
        assert tape.expected_seconds <= longest
    else:
        assert tape.expected_seconds >= longest


async def test_a_loop_that_was_short_and_turns_long_leaves_the_event_loop_to_others() -> None:
    with fr.Graph() as graph:
        n = fr.placeholder("int64", ())
        y = fr.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, v * 3 + i), (np.int64(0), np.int64(1)))[1]
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        step = session.compile(y, feeds=[n])
        for _ in range(5):
            await step(np.int64(3))
        long = asyncio.ensure_future(step(np.int64(10**10)))  # half a minute
        for _ in range(20):
            await asyncio.sleep(0)
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
