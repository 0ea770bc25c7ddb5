"""The wait that no cancellation cuts short: what is waited for is given up in order first, or cannot be.

What came to its end all the same before it could be given up is told with the cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class EndedAnyway(asyncio.CancelledError):
    """Who waited is cancelled, but what was waited for had ended: its ``values``.

    Whoever cancelled may want them, as a timeout does: what a step took from a queue, nobody else has.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__()
        self.values = values


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
