"""Work that is done to its end: whoever is cancelled meanwhile, or fails beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await cleanup to its end; a cancellation meanwhile is delivered afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all; raises the first error, once all have ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
