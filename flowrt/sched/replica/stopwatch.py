"""What a replica spends its time on, from a version that it has whole to its update, by its own clock.

Law: stamps mean nothing beside those of another clock: whoever reads them takes differences. A version counts as there
once its rows are there, too, as these travel. Whoever waits waits for one thing.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from flowrt.sched.drivers.pulse import HELD


class Phase(IntEnum):
    """What a replica does for the newest version that it has begun."""

    POSTED = 0  # nothing: its update is on its way, or arrived
    INPUT = 1  # it waits for a batch
    ROWS = 2  # it waits for rows of tables
    COMPUTE = 3
    PUSH = 4  # its update is computed, and not posted yet


CUTS, CUT_SECONDS = 3, 0.5  # towers in a row, and for how long, that are cut off before one is spared
SPARED_SECONDS = 0.5  # that a spared tower may take longer
_TIMES = struct.Struct("=5d")


@dataclass(slots=True)
class Stopwatch:
    """Times one version after the other.

    Who is always cut off would never be seen to end, and nobody could tell a replica that is hardly slower than others
    from one that takes ten times as long. So once some towers in a row were cut off, one is spared: its update comes
    too late, as it would have, and tells.
    """

    clock: Callable[[], float] = time.monotonic
    held: Callable[[], float] = float  # seconds so far in which the node did nothing at all: see `Pulse`
    version: int = -1  # what the rest is of
    phase: Phase = Phase.POSTED
    arrived: float = 0.0  # when the newest version was there whole
    free: float = 0.0  # when what was computed before ended
    before: float = 0.0  # what `held` said when its computing began
    since: float = 0.0  # when the phase began
    input: float = 0.0  # seconds
    compute: float = 0.0  # seconds
    pulled: float = 0.0  # when ``version`` was there, its rows included
    cuts: int = 0  # towers in a row that were cut off
    first_cut: float = 0.0  # when the first of them was
    spared: float = 0.0  # since when a tower is, 0 where none is

    def arrive(self) -> None:
        """A version is there whole."""
        self.arrived = self.clock()

    def wait(self, version: int, phase: Phase) -> None:
        """``version`` waits for its batch, for which an older one may have waited already, or for its rows."""
        if phase is self.phase is Phase.INPUT:
            self.version, self.pulled, self.input, self.compute = version, self.arrived, 0.0, 0.0
        elif phase is not self.phase or version != self.version:
            self.start(version, phase)

    def start(self, version: int, phase: Phase = Phase.COMPUTE) -> None:
        """``version`` has all that it needs and begins to be computed, or what it is said to be in begins."""
        now = self.clock()
        if version != self.version:
            self.version, self.pulled, self.input = version, self.arrived, 0.0
            self.compute = max(0.0, self.free - self.arrived)  # it could not begin: an older one was computed still
        elif self.phase is Phase.INPUT:
            self.input += now - self.since
        elif self.phase is Phase.COMPUTE:  # a local step is done, and the next one's batch is not there
            self.compute += now - self.since
        elif self.phase is Phase.ROWS:
            self.pulled += now - self.since
        self.phase, self.since = phase, now

    def spares(self) -> bool:
        """Whether what is computed goes on, although a newer version has come."""
        now = self.clock()
        if self.spared:
            if now - self.spared < SPARED_SECONDS:
                return True
            self.cuts, self.spared = 0, 0.0
            return False
        if self.cuts == 0:
            self.first_cut = now
        self.cuts += 1
        if self.cuts <= CUTS or now - self.first_cut < CUT_SECONDS:
            return False
        self.spared = now
        return True

    def end(self) -> None:
        """Nothing is computed any more."""
        self.free = self.clock()

    def stop(self) -> None:
        """The update is computed."""
        now = self.clock()
        self.phase, self.compute, self.since = Phase.PUSH, self.compute + now - self.since, now

    def leave(self) -> None:
        """What is computed goes on in a task: what it took until here, the node was held."""
        late = self.clock() - self.since
        self.before = self.held() - (late if late > HELD else 0.0)

    def post(self, at_once: bool = False) -> bytes:
        """The update is posted: when its version was there, the seconds it waited for a batch and was computed, when
        that was done, and for how many of the seconds the node did nothing: five floats.

        What is computed ``at_once``, in the call that begins it, takes next to nothing unless the node is held.
        """
        if self.phase is Phase.COMPUTE:
            self.stop()
        self.phase, self.cuts, self.spared = Phase.POSTED, 0, 0.0
        held = self.held() - self.before if not at_once else self.compute if self.compute > HELD else 0.0
        return _TIMES.pack(self.pulled, self.input, self.compute, self.since, held)

    def so_far(self) -> tuple[float, ...]:
        """The version, the phase, what `post` says as if computing ended now, and the seconds that the phase took."""
        now = self.clock()
        spent, held = now - self.since, self.held() - self.before
        head = (self.version, int(self.phase), self.pulled)
        match self.phase:
            case Phase.INPUT:
                return *head, self.input + spent, self.compute, now, held, spent
            case Phase.ROWS:
                return *head, self.input, 0.0, now, held, spent
            case Phase.COMPUTE:
                return *head, self.input, self.compute + spent, now, held, spent
            case _:
                return *head, self.input, self.compute, self.since, held, spent
