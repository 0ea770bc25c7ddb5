"""A rough guess of the seconds a launch takes, from the bytes it moves and the arithmetic it does.

Law: pure; it knows specs and the names of a few ops. Whoever runs a tape corrects the guess by what runs took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrt.traits import writes_rows

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

BYTES_PER_SECOND = 4e9  # one core reading and writing memory
FLOPS_PER_SECOND = 60e9  # one core in register tiles
SECONDS_PER_STEP = 50e-9


@dataclass(slots=True)
class Cost:
    """What some launches come to."""

    nbytes: float = 0
    flops: float = 0
    launches: int = 0

    def add(self, op: str, specs: Sequence[Spec], launches: int) -> None:
        """One op on operands (inputs, then outputs) of these concrete specs, in so many launches."""
        self.nbytes += _bytes(op, specs)
        self.flops += _flops(op, specs)
        self.launches += launches

    @property
    def seconds(self) -> float:
        """A rough guess of the seconds that all that was added takes."""
        moving, computing = self.nbytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND
        return moving + computing + self.launches * SECONDS_PER_STEP


def predict(op: str, specs: Sequence[Spec]) -> float:
    """A rough guess of the seconds one op takes on operands (inputs, then outputs) of these concrete specs."""
    cost = Cost()
    cost.add(op, specs, 1)
    return cost.seconds


def _bytes(op: str, specs: Sequence[Spec]) -> int:
    """How many bytes an op moves: of a table, no more than the rows that it is asked for."""
    if op == "take":
        return specs[1].nbytes + 2 * specs[2].nbytes
    if op == "bag":
        return specs[1].nbytes + specs[2].nbytes + specs[1].size * specs[0].nbytes // max(specs[0].concrete[0], 1)
    if writes_rows(op):
        return sum(spec.nbytes for spec in specs[:3]) + 2 * len(specs[3:]) * specs[0].nbytes
    return sum(spec.nbytes for spec in specs)


def _flops(op: str, specs: Sequence[Spec]) -> float:
    """Roughly how many multiplications and additions an op does beyond touching its operands once."""
    if op == "lstm_steps":  # every entry that is kept of a gate is a dot product with x and one with h
        x, h, kept = specs[0], specs[1], specs[-1]
        return 2 * kept.size * 4 / 6 * (x.concrete[2] + h.concrete[1]) if kept.size else 0
    if op == "lstm_steps_grad":
        return 2 * specs[0].size * specs[3].concrete[1]
    if not op.startswith(("matmul", "conv", "with_epilogue")):
        return 0
    sizes = [spec.size for spec in (*specs[:2], specs[-1]) if spec.dtype.kind == "f"]
    product = 2 * math.sqrt(math.prod(sizes))  # exact for matrices: sqrt(mk · kn · mn) = mkn
    return (
        3 * product if op.startswith("conv") else product
    )  # a window of 3 by 3 has its square root in no operand's size
