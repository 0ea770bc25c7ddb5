"""What a run waits for beside its work: that others are lost or suspect than were, or that it has other news."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from flowrt.base.valueclass import valueclass
from flowrt.finishing import first

if TYPE_CHECKING:
    from flowrt.session.runners import Runner

T = TypeVar("T")


@valueclass
class Changes:
    """Those of the nodes of ``runner``, and ``news``, which this clears."""

    runner: Runner
    news: asyncio.Event

    async def wait(self) -> None:
        """Wait for the next one. Raises why nothing can be done any more, if so."""
        self.news.clear()
        changed = asyncio.ensure_future(self.runner.wait_changed(self.runner.lost, self.runner.suspects))
        await first(changed, self.news.wait())
        if not changed.cancelled():
            changed.result()

    async def until(self, sign: Callable[[], object]) -> None:
        """Wait for a ``sign``, which is looked for at each change. Raises what that does."""
        while not sign():
            await self.wait()

    async def unless(self, work: Coroutine[Any, Any, T], stopped: Callable[[], object]) -> T:
        """What ``work`` answers, which is cancelled once it is ``stopped``; then raises `TimeoutError`, or as that."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.until(stopped))
        await first(working, watching)
        if not working.cancelled():
            return working.result()
        watching.result()
        raise TimeoutError
