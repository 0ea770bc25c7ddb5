"""Those whom a server leads, and how versions wait for one of them that would fall behind for ever.

Law: that a version was applied is said once nobody lags, so the next one is ordered no sooner. Who has yet to be told
what the variables were lags where too many bytes of updates wait for it; later who has more versions to catch up than
it had then, less one for each two that it has applied since. So training goes on, at half the pace of the slowest who
follows, until that has caught up. Who does nothing for `PATIENCE` seconds is waited for no more until it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.server.leading import Leader

PATIENCE = 0.2  # seconds


class Led:
    """All of one server."""

    def __init__(self) -> None:
        self._leaders: list[Leader] = []
        self._say: Callable[[], None] | None = None  # that a version was applied, which waits
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def add(self, leader: Leader) -> None:
        """Have one more told how the variables are moved."""
        self._leaders = [other for other in self._leaders if not other.over]
        self._leaders.append(leader)
        leader.changed = self._look

    def moved(self, version: int, updates: Sequence[Sequence[Array]], lasting: bool, say: Callable[[], None]) -> None:
        """A version was applied, by these updates, which are ``lasting`` or not: ``say`` so when it may be."""
        for leader in self._leaders:
            leader.moved(version, updates, lasting)
        if self._over or not self._leaders or not self._lags:
            say()
            return
        self._say = say
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._lose_patience)

    def close(self) -> None:
        """Wait for nobody any more. Who is led already hears of what is applied yet."""
        self._over = True
        self._take()
        for leader in self._leaders:
            if not leader.begun.done():
                leader.close()

    @property
    def _lags(self) -> bool:
        return any(leader.lags for leader in self._leaders)

    def _look(self) -> None:
        """Go on, if what that waited for has come about."""
        if self._say is not None and not self._lags and (say := self._take()) is not None:
            say()

    def _lose_patience(self) -> None:
        for leader in self._leaders:
            leader.excuse()
        self._look()

    def _take(self) -> Callable[[], None] | None:
        """What waits, which does so no more."""
        say, self._say = self._say, None
        if self._timer is not None:
            self._timer.cancel()
        return say
