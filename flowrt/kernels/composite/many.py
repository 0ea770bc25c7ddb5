"""Small launches that do not depend on one another as one launch, whose units they are.

Law: pure. Each is what it is by itself, so nothing is compiled for any number of them, and results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from flowrt.kernels.launch import Composite
from flowrt.kernels.store.parts import MANY_PART

if TYPE_CHECKING:
    from typing import Any

    from flowrt.kernels.language.variants import Variant
    from flowrt.kernels.launch import LaunchStep, Operand

ENTRY, AT, UNITS, ROW = range(4)  # of each: its entry, where in the block its own begins, its units; words of a row


@dataclass(frozen=True)
class ManyStep(Composite):
    """What a `LaunchStep` is to an op, for several steps; ``widths`` says of how many operands each one's own is made.

    The operands are all of the first step's, then all of the second's, and so on.
    """

    members: tuple[LaunchStep, ...]
    widths: tuple[int, ...]

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.widths, initial=0))

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """Those that are only read, then those that are written."""
        pairs = list(zip(self.members, self._firsts, strict=False))
        read = [first + n for step, first in pairs for n in step.operands[: step.reads]]
        return (*read, *(first + n for step, first in pairs for n in step.operands[step.reads :]))

    @cached_property
    def reads(self) -> int:
        """How many of the operands are only read."""
        return sum(step.reads for step in self.members)

    @property
    def units(self) -> int:
        """One for each step."""
        return len(self.members)

    def variants(self) -> Iterator[Variant]:
        for member in self.members:
            yield from member.variants()

    def is_compiled(self) -> bool:
        return MANY_PART.is_compiled() and all(member.is_compiled() for member in self.members)

    def address(self) -> int:
        """The compiled entry; the steps' own are compiled when the block is made."""
        return MANY_PART.address()

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        """The block, and in it those of the steps, for operands at ``places``."""
        pairs = zip(self.members, self._firsts, strict=False)
        blocks = [step.block(places[first:]) for step, first in pairs]
        starts = accumulate((block.size for block in blocks), initial=ROW * len(blocks))
        rows = [(step.address(), at, step.units) for step, at in zip(self.members, starts, strict=False)]
        return np.concatenate([np.array(rows, np.int64).reshape(-1), *blocks])
