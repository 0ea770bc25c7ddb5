"""A product or convolution and what goes over its entries, as one launch: rows by rows while these are near.

Law: pure. Where the product's units make whole rows, and all the rest is one launch over the entries in the order of
memory, one launch does both: for every unit the product's entry, and then the other one on what the unit has made. Both
are what they are by themselves, so nothing is compiled for a pair of them, and results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.launch import Composite
from flowrt.kernels.store.parts import EPILOGUE_PART

if TYPE_CHECKING:
    from flowrt.kernels.language.variants import Variant
    from flowrt.kernels.launch import LaunchStep, Operand

PRODUCT, EPILOGUE, ROWS, HEAD = 0, 2, 4, 7  # words of a block; the two steps' own blocks lie behind them
ENTRY, AT = 0, 1  # of either step: its entry, and where in the block its own begins


@dataclass(frozen=True)
class EpilogueStep(Composite):
    """What a `LaunchStep` is to an op, for a step whose units make rows and another one on the entries of these."""

    product: LaunchStep
    epilogue: LaunchStep

    @cached_property
    def _written(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(n for step in (self.product, self.epilogue) for n in step.operands[step.reads :]))

    @cached_property
    def _read(self) -> tuple[int, ...]:
        taken = (n for step in (self.product, self.epilogue) for n in step.operands[: step.reads])
        return tuple(n for n in dict.fromkeys(taken) if n not in self._written)

    @cached_property
    def operands(self) -> tuple[int, ...]:
        return (*self._read, *self._written)

    @property
    def reads(self) -> int:
        return len(self._read)

    @property
    def units(self) -> int:
        return self.product.units

    def variants(self) -> Iterator[Variant]:
        for step in (self.product, self.epilogue):
            yield from step.variants()

    def is_compiled(self) -> bool:
        return self.product.is_compiled() and self.epilogue.is_compiled()

    def address(self) -> int:
        """The compiled entry; the two steps' own are compiled when the block is made."""
        return EPILOGUE_PART.address()

    def block(self, places: Sequence[Operand]) -> np.ndarray[Any, Any]:
        """The block, and in it those of the two steps, for operands at ``places``."""
        product, epilogue = self.product.block(places), self.epilogue.block(places)
        assert self.product.call.rows is not None
        head = [self.product.address(), HEAD, self.epilogue.address(), HEAD + product.size, *self.product.call.rows]
        return np.concatenate([np.array(head, np.int64), product, epilogue])
