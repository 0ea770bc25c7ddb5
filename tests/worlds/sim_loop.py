"""An event loop whose clock is virtual and whose turns come in a seeded order: thousands of schedules in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random


class _Nothing(selectors.BaseSelector):
    """Has nothing to wait for."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class Deadlock(AssertionError):
    """Something is awaited, and nothing will ever happen."""


class SimLoop(asyncio.SelectorEventLoop):
    """A loop whose ready callbacks are shuffled by ``rng`` and whose seconds pass at once.

    It has no files to wait for, and only what a schedule needs, as most of its time is this. What a callback raises
    ends the schedule.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now, self._number = rng, 0.0, 0
        super().__init__(_Nothing())

    def time(self) -> float:
        return self._now

    def _make_self_pipe(self) -> None:
        """Nobody wakes it."""

    def _close_self_pipe(self) -> None:
        """There is none."""

    def _write_to_self(self) -> None:
        """It never sleeps."""

    def _process_events(self, events: Any) -> None:
        """There are none."""

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heappush(self._scheduled, (when, self._number, timer))
        return timer

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0][2]._cancelled:
            heappop(scheduled)
        if not (ready or self._stopping):
            if not scheduled:
                raise Deadlock("nothing is left that could happen")
            self._now = max(self._now, scheduled[0][0]) + 1e-9
        while scheduled and scheduled[0][0] <= self._now:
            ready.append(heappop(scheduled)[2])
        if len(ready) > 1:
            self._rng.shuffle(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._context.run(handle._callback, *handle._args)

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """What is to be called in time."""
        return [timer for _, _, timer in self._scheduled if not timer._cancelled]


def simulate(rng: random.Random, work: Callable[[], Coroutine[Any, Any, Any]], limit: float = 1e4) -> Any:
    """What ``work`` answers, which takes at most ``limit`` virtual seconds. Raises `Deadlock` where it never would."""

    async def bounded() -> Any:
        async with asyncio.timeout(limit):
            return await work()

    with asyncio.Runner(loop_factory=lambda: SimLoop(rng)) as runner:
        return runner.run(bounded())
