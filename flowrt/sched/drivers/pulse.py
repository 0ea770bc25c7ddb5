"""For how long a node was held: its loop did not turn, as that of a process that is stopped, or frozen by the system.

Law: a beat that is late by less than `HELD` was late for no cause. Kernels that compute for long do so in lanes, so a
loop that computes keeps its beat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEAT = 0.01  # seconds
HELD = 0.01


class Pulse:
    """Beats once it is started, while it is ``wanted``: so it costs nothing where nobody computes for long."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._loop = asyncio.get_running_loop()
        self._held = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat from now on, as long as ``wanted`` says."""
        if self._timer is None:
            self._due = self._loop.time() + BEAT
            self._timer = self._loop.call_at(self._due, self._beat)

    def stop(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._held += self._overdue()
        self._timer = None
        if self._wanted():
            self.start()

    def _overdue(self) -> float:
        if self._timer is None:
            return 0.0
        late = self._loop.time() - self._due
        return late if late > HELD else 0.0

    def held(self) -> float:
        """Seconds for which the loop did not turn while this beat, up to now."""
        return self._held + self._overdue()
