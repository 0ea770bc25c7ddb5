"""A rough guess of the seconds a launch takes, from the bytes it moves and the arithmetic it does.

Law: pure; it knows specs, and what is stated of kernels. Whoever runs a tape corrects the guess by what runs took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrt.kernels.language.table import facts_of

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

BYTES_PER_SECOND = 4e9  # one core reading and writing memory
FLOPS_PER_SECOND = 60e9  # one core in register tiles
SECONDS_PER_STEP = 50e-9
APART_BYTES, APART_FLOPS, APART_STEP = 1e12, 1e13, 1e-5  # of a device with memory of its own, as a GPU


@dataclass(slots=True)
class Cost:
    """What some launches come to."""

    nbytes: float = 0
    flops: float = 0
    launches: int = 0

    def add(self, op: str, specs: Sequence[Spec], launches: int) -> float:
        """One op on operands (inputs, then outputs) of these concrete specs, in so many launches; answers the seconds
        that one would take."""
        facts = facts_of(op)
        nbytes = facts.moves(specs) if facts.moves is not None else sum([spec.nbytes for spec in specs])
        flops = facts.flops(specs) if facts.flops is not None else 0
        self.nbytes += nbytes
        self.flops += flops
        self.launches += launches
        return _seconds(nbytes, flops, 1)

    @property
    def seconds(self) -> float:
        """A rough guess of the seconds that all that was added takes."""
        return _seconds(self.nbytes, self.flops, self.launches)


def _seconds(nbytes: float, flops: float, launches: int) -> float:
    return nbytes / BYTES_PER_SECOND + flops / FLOPS_PER_SECOND + launches * SECONDS_PER_STEP


def predict_apart(op: str, specs: Sequence[Spec]) -> float:
    """As `predict`, on a device with memory of its own."""
    cost = Cost()
    cost.add(op, specs, 1)
    return cost.nbytes / APART_BYTES + cost.flops / APART_FLOPS + APART_STEP


def predict(op: str, specs: Sequence[Spec]) -> float:
    """A rough guess of the seconds one op takes on operands (inputs, then outputs) of these concrete specs."""
    return Cost().add(op, specs, 1)
