"""For how long a node was held: its loop did not turn, as that of a process that is stopped, or frozen by the system.

Law: a beat that is late by less than `HELD` was late for no cause. Kernels that compute for long do so in lanes, so a
loop that computes keeps its beat. Each beat takes the processor from a kernel, so the longer one computes, the rarer
they are: a pause is found to within a twentieth of what had been computed when it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEAT, LONGEST = 0.01, 0.1  # seconds between two beats, at least and at most
SHARE = 0.05  # of what has been computed
HELD = 0.01  # seconds


def next_beat(computed: float) -> float:
    """In how many seconds the next beat is due, of one who has computed for so many."""
    return min(max(BEAT, SHARE * computed), LONGEST)


class Pulse:
    """Beats once it is started, while it is ``wanted``: so it costs nothing where nobody computes for long."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._loop = asyncio.get_running_loop()
        self._held = 0.0
        self._began = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Something is begun to be computed: beat from now on, as long as ``wanted`` says."""
        self._began = self._loop.time()
        if self._timer is None:
            self._arm(self._began)

    def _arm(self, now: float) -> None:
        self._due = now + next_beat(now - self._began)
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
            self._arm(self._loop.time())

    def _overdue(self) -> float:
        if self._timer is None:
            return 0.0
        late = self._loop.time() - self._due
        return late if late > HELD else 0.0

    def held(self) -> float:
        """Seconds for which the loop did not turn while this beat, up to now."""
        return self._held + self._overdue()
