"""What leads is sent before the rest of its region is begun, and what a run takes is foretold."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_plans import PS
from session_world import cancel_everywhere
from tape_world import PlanMaker

from flowrt.base.spec import spec_of
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.regional import RegionRunner

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

EDGE, SIZE = 7, 200
PLAIN = {"transpose_a": False, "transpose_b": False}
X = np.random.default_rng(5).normal(size=(SIZE, SIZE)).astype(np.float32) / SIZE


def plan_of(*, lead: bool) -> Plan:
    """x @ x is sent to this very task, and (x @ x) @ x @ x is fetched."""
    make = PlanMaker()
    x = make.feed("float32", (SIZE, SIZE))
    sent = make.node("matmul", x, x, **PLAIN)
    late = make.node("matmul", make.node("matmul", sent, x, **PLAIN), x, **PLAIN)
    make.node("send", sent, edge=EDGE, peer=PS, **({"lead": 1} if lead else {}))
    return make.plan(late)


@asynccontextmanager
async def ready(*, lead: bool) -> AsyncIterator[tuple[Host, Executor]]:
    host = Host(PS, threads=1)
    try:
        yield host, Executor(plan_of(lead=lead), host)
    finally:
        await host.aclose()


async def run(host: Host, executor: Executor, number: int = 1, taken: list[Any] | None = None) -> list[bytes]:
    """What is fetched, and what is sent; ``taken`` is given who waits for that."""
    context = RunContext(("early", number), number, 0)
    host.rendezvous.open(context.key)
    try:
        waits = host.rendezvous.expect(context.key, EDGE)
        if taken is not None:
            taken.append(waits)
        (fetched,) = await executor.run([X], context)
        return [fetched.tobytes(), (await waits).tobytes()]
    finally:
        host.rendezvous.close(context.key)


@pytest.mark.parametrize("lead", [True, False])
async def test_what_leads_is_there_before_the_rest_is_begun(lead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_before: list[bool] = []
    taken: list[Any] = []
    begin = RegionRunner.run

    def note(self: RegionRunner, *of: Any) -> Any:
        sent_before.append(taken[-1].done())
        return begin(self, *of)

    monkeypatch.setattr(RegionRunner, "run", note)
    monkeypatch.setattr("flowrt.sched.running.INLINE_SECONDS", 0)  # however short they are here: what is, need not wait
    async with asyncio.timeout(60), ready(lead=lead) as (host, executor):
        for number in range(3):
            await run(host, executor, number, taken)
    assert sent_before == ([False, True] if lead else [False]) * 3


async def test_what_is_sent_early_is_what_is_sent_late_to_the_bit() -> None:
    found = []
    for lead in (True, False):
        async with asyncio.timeout(60), ready(lead=lead) as (host, executor):
            found += [await run(host, executor, number) for number in range(4)]
    assert all(each == found[0] for each in found)


async def test_the_memory_of_parts_is_what_was_predicted() -> None:
    async with asyncio.timeout(60), ready(lead=True) as (host, executor):
        predicted = executor.footprint([spec_of(X)])
        await run(host, executor)
        gc.collect()
        before = host.memory.held
        host.memory.forget_peak()
        await run(host, executor, 2)
        assert host.memory.statistics().peak - before <= predicted.peak - predicted.kept


async def test_a_run_that_is_stopped_between_parts_leaves_nothing() -> None:
    async with asyncio.timeout(60), ready(lead=True) as (host, executor):
        numbers = iter(range(10_000))
        whole = await run(host, executor, next(numbers))

        async def again() -> None:
            assert await run(host, executor, next(numbers)) == whole

        async def check() -> None:
            assert host.rendezvous.open_steps == 0
            await again()

        await cancel_everywhere(again, check)
