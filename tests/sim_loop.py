"""An event loop whose clock is virtual and whose turns come in a seeded order: thousands of schedules in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random


class Deadlock(AssertionError):
    """Something is awaited, and nothing will ever happen."""


class _Skipping(selectors.BaseSelector):
    """Waits for nothing: the clock is put forward instead."""

    def __init__(self) -> None:
        self._map: dict[Any, selectors.SelectorKey] = {}
        self.skip: Callable[[float], None] = lambda seconds: None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._map[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is left that could happen")
        if timeout > 0:
            self.skip(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map


class SimLoop(asyncio.SelectorEventLoop):
    """A loop whose ready callbacks are shuffled by ``rng`` and whose seconds pass at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now = rng, 0.0
        selector = _Skipping()
        super().__init__(selector)
        selector.skip = self._skip

    def time(self) -> float:
        return self._now

    def _skip(self, seconds: float) -> None:
        self._now += seconds + 1e-9

    def _run_once(self) -> None:
        if len(self._ready) > 1:
            ready = list(self._ready)
            self._rng.shuffle(ready)
            self._ready: deque[Any] = deque(ready)
        super()._run_once()  # type: ignore[misc]


def simulate(rng: random.Random, work: Callable[[], Coroutine[Any, Any, Any]], limit: float = 1e4) -> Any:
    """What ``work`` answers, which takes at most ``limit`` virtual seconds. Raises `Deadlock` where it never would."""

    async def bounded() -> Any:
        async with asyncio.timeout(limit):
            return await work()

    with asyncio.Runner(loop_factory=lambda: SimLoop(rng)) as runner:
        return runner.run(bounded())
