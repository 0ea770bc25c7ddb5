"""The wait that no cancellation cuts short: what is waited for is given up in order first, or cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def shielded(
    over: Callable[[], object], wait: Callable[[], Awaitable[Any]], stop: Callable[[], None] | None = None
) -> asyncio.CancelledError | None:
    """Await what ``wait`` answers until it is ``over``. A cancellation meanwhile calls ``stop``, and is the answer."""
    cancelled: asyncio.CancelledError | None = None
    while not over():
        try:
            await wait()
        except asyncio.CancelledError as error:
            cancelled = error
            if stop is not None:
                stop()
    try:
        return cancelled
    finally:
        del cancelled  # whose frames refer to this one
