"""Where a replica stands in the open version, and what becomes of its tower when that version is at its end.

Tables alone: the coordinator moves replicas from one place to another.
"""

from __future__ import annotations

from enum import Enum

from flowrt.sched.versions.ledger import Outcome


class Standing(Enum):
    """Where a replica stands in the open version."""

    __hash__ = object.__hash__  # an Enum hashes its name anew each time
    IDLE = "idle"  # no tower begun
    RUNNING = "running"  # begun, not yet held by every server
    WHOLE = "whole"  # held and finite on every server, offered to the quorum
    REFUSED = "refused"
    LOST = "lost"  # lost while RUNNING
    ABSENT = "absent"  # lost while IDLE


ENDED = {
    Standing.WHOLE: Outcome.KEPT,
    Standing.RUNNING: Outcome.LATE,
    Standing.REFUSED: Outcome.REFUSED,
    Standing.LOST: Outcome.LOST,
}
"""How the tower of a replica that stands there has ended; if its update is whole, it is in the set."""


def outcome(standing: Standing, replica: int, kept: tuple[int, ...]) -> Outcome:
    """How the tower of ``replica`` has ended that does not go on; ``kept`` is the version's set, empty if abandoned."""
    if standing not in (Standing.WHOLE, Standing.RUNNING) or replica in kept:
        return ENDED[standing]
    return Outcome.LATE if kept else Outcome.ABANDONED
