"""What tests of drivers stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowrt.sched.drivers.tasks import Tasks
from flowrt.sched.drivers.way import Way
from flowrt.sched.host.host import Host


@pytest.fixture(params=[1, 3])
async def way(request: pytest.FixtureRequest) -> AsyncIterator[Way]:
    """A way to nobody, from hosts of one thread and of several."""
    host, tasks = Host(threads=request.param), Tasks()
    async with asyncio.timeout(60):
        yield Way(host, "epoch", 1, 0, tasks, lambda peer, epoch, message: None)
    await tasks.aclose()
    await host.aclose()
