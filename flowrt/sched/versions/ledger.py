"""What became of a version of the variables and of its towers, or why nothing can become of it.

Values alone: the coordinator makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from flowrt.base.valueclass import valueclass


class Outcome(Enum):
    """How a tower ended. All but KEPT mean that its batch was dropped."""

    __hash__ = object.__hash__  # an Enum hashes its name anew each time
    KEPT = "kept"
    LATE = "late"  # not in the set, or not whole on every server when it was fixed
    REFUSED = "refused"  # not finite
    LOST = "lost"  # the replica was lost before its update was whole
    ABANDONED = "abandoned"  # too few updates were left to make a set, so the version kept none


class Cause(Enum):
    """Why too few updates can come."""

    REFUSED = "refused"  # updates that came were not finite
    EXHAUSTED = "exhausted"  # the batches are at their end
    LOST = "lost"  # replicas are gone


class Receipt(NamedTuple):
    """What became of ``batch`` of ``replica``, and of the tower that it was spent on.

    ``staleness`` is how many versions older than the one that its receipt is of it was computed from.
    """

    replica: int
    batch: int
    outcome: Outcome
    staleness: int = 0


@valueclass
class AppliedVersion:
    """A version that every server has applied: its set, in replica order, and a receipt per tower begun.

    ``now`` is when the set was fixed, in the caller's seconds.
    """

    version: int
    decided: tuple[int, ...]
    receipts: tuple[Receipt, ...]
    now: float


@valueclass
class Stuck:
    """Why the open version cannot close: fewer than ``needed`` replicas have offered or may yet.

    ``able`` may; of the others ``lost`` are gone, the updates of ``refused`` were not finite, and ``exhausted`` have no
    batch left.
    """

    version: int
    needed: int
    able: tuple[int, ...]
    refused: tuple[int, ...]
    lost: tuple[int, ...]
    exhausted: tuple[int, ...]

    @property
    def cause(self) -> Cause:
        """What was refused, if no more were needed than that; else the end of the batches; else who is lost."""
        hopeful = len(self.able) + len(self.refused)
        if hopeful >= self.needed:
            return Cause.REFUSED
        return Cause.EXHAUSTED if hopeful + len(self.exhausted) >= self.needed else Cause.LOST

    def told(self, nodes: Sequence[str]) -> str:
        """Why, with the ``nodes`` of the replicas that are missing."""
        missing = sorted({*self.lost, *self.refused, *self.exhausted})
        named = ", ".join(f"replica {replica} is {nodes[replica]}" for replica in missing if nodes[replica])
        return f"{self}; {named}" if named else str(self)

    def __str__(self) -> str:
        spent = f", out of batches {list(self.exhausted)}" if self.exhausted else ""
        return (
            f"version {self.version} needs {self.needed} updates, only {len(self.able)} can come: "
            f"replicas lost {list(self.lost)}, updates not finite {list(self.refused)}{spent}, left {list(self.able)}"
        )
