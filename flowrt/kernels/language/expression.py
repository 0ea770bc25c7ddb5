"""Several elementwise ops as one scalar function with several results.

Law: pure; it numbers values, and compiles nothing. Values are numbered: first the inputs, then each
member's result in order. An `Expression` is plain Python and runs as it stands; `compose` calls its members one after
another in one compiled function, where LLVM makes them one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.traits import held_dtype, reduces_rows
from flowrt.kernels.language.costs import CHEAP, COSTLY

Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Member:
    """One op of an expression: its scalar function, the numbers of the values it takes, and its result's dtype."""

    function: Function
    operands: tuple[int, ...]
    dtype: np.dtype[Any]
    op: str = ""
    cost: int = CHEAP

    @property
    def reduces_row(self) -> bool:
        """Whether it makes one value of all that its operand comes to along a row; see `row_plan`."""
        return reduces_rows(self.op)


@dataclass(frozen=True, slots=True)
class Expression:
    """A scalar function of inputs of dtypes ``inputs``; ``results`` are the numbers of the values it answers.

    ``reductions`` are those of values that loops over it reduce, each with the op that says how
    (`reductions.held_dtype`: in what).
    """

    inputs: tuple[np.dtype[Any], ...]
    members: tuple[Member, ...]
    results: tuple[int, ...]
    reductions: tuple[tuple[int, str], ...] = ()

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The dtype of every value, by number."""
        return (*self.inputs, *(member.dtype for member in self.members))

    @property
    def costly(self) -> bool:
        """Whether some of its members take many instructions."""
        return any(member.cost >= COSTLY for member in self.members)

    @property
    def held(self) -> tuple[np.dtype[Any], ...]:
        """The dtype of what each reduction comes to."""
        dtypes = self.dtypes
        return tuple(held_dtype(op, dtypes[n]) for n, op in self.reductions)

    def function(self) -> Function:
        """The expression as a Python function of scalars, which answers a tuple: its results, then what it
        reductions."""
        members = tuple((member.function, member.operands, member.dtype) for member in self.members)
        asked = (*self.results, *(n for n, _ in self.reductions))

        def apply(*values: Any) -> tuple[Any, ...]:
            known = list(values)
            for function, operands, dtype in members:
                known.append(dtype.type(function(*[known[i] for i in operands])))
            return tuple(known[i] for i in asked)

        return apply
