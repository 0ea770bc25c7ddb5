"""Work that is done to its end: whoever is cancelled meanwhile, or fails beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

from flowrt.sched.host.shielded import shielded


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await cleanup to its end; a cancellation meanwhile is delivered afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = await shielded(task.done, lambda: asyncio.wait([task]))
    task.result()
    if cancelled is not None:
        raise cancelled


async def first(*works: Awaitable[Any]) -> None:
    """Wait until one of ``works`` has ended, and end the others. What they come to is for who holds them to see."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all; raises the first error, once all have ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def pipelined(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all, of which each is begun once the one before waits for something: what computes here and is then
    another's to do goes on there meanwhile. Raises the first error, which ends the others.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
