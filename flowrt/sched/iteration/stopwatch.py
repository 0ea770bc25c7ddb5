"""What a replica spends its time on, from a version that it has whole to its update, by its own clock.

Law: stamps mean nothing beside those of another clock: whoever reads them takes differences. A version counts as there
once its rows are there, too, as these travel. Whoever waits waits for one thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What a replica does for the newest version that it has begun."""

    POSTED = 0  # nothing: its update is on its way, or arrived
    INPUT = 1  # it waits for a batch
    ROWS = 2  # it waits for rows of tables
    COMPUTE = 3
    PUSH = 4  # its update is computed, and not posted yet


@dataclass(slots=True)
class Stopwatch:
    """Times one version after the other."""

    clock: Callable[[], float] = time.monotonic
    version: int = -1  # what the rest is of
    phase: Phase = Phase.POSTED
    arrived: float = 0.0  # when the newest version was there whole
    since: float = 0.0  # when the phase began
    input: float = 0.0  # seconds
    compute: float = 0.0  # seconds
    pulled: float = 0.0  # when ``version`` was there, its rows included

    def arrive(self) -> None:
        """A version is there whole."""
        self.arrived = self.clock()

    def wait(self, version: int, phase: Phase) -> None:
        """``version`` waits for its batch, for which an older one may have waited already, or for its rows."""
        if phase is self.phase is Phase.INPUT:
            self.version, self.pulled, self.input, self.compute = version, self.arrived, 0.0, 0.0
        elif phase is not self.phase or version != self.version:
            self.since = self._begin(version)
            self.phase = phase

    def start(self, version: int) -> None:
        """``version`` has all that it needs and begins to be computed."""
        self.since = self._begin(version)
        self.phase = Phase.COMPUTE

    def _begin(self, version: int) -> float:
        now = self.clock()
        if version != self.version:
            self.version, self.pulled, self.input, self.compute = version, self.arrived, 0.0, 0.0
        elif self.phase is Phase.INPUT:
            self.input += now - self.since
        elif self.phase is Phase.COMPUTE:  # a local step is done, and the next one's batch is not there
            self.compute += now - self.since
        elif self.phase is Phase.ROWS:
            self.pulled += now - self.since
        return now

    def stop(self) -> None:
        """The update is computed."""
        now = self.clock()
        self.phase, self.compute, self.since = Phase.PUSH, self.compute + now - self.since, now

    def post(self) -> tuple[float, ...]:
        """The update is posted: when its version was there, the seconds it waited for a batch and was computed, and
        when that was done."""
        if self.phase is Phase.COMPUTE:
            self.stop()
        self.phase = Phase.POSTED
        return self.pulled, self.input, self.compute, self.since

    def so_far(self) -> tuple[float, ...]:
        """The version, the phase, what `post` says as if computing ended now, and the seconds that the phase took."""
        now = self.clock()
        spent = now - self.since
        head = (self.version, int(self.phase), self.pulled)
        match self.phase:
            case Phase.INPUT:
                return *head, self.input + spent, self.compute, now, spent
            case Phase.ROWS:
                return *head, self.input, 0.0, now, spent
            case Phase.COMPUTE:
                return *head, self.input, self.compute + spent, now, spent
            case _:
                return *head, self.input, self.compute, self.since, spent
