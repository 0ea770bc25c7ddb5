"""Several elementwise ops as one scalar function with several results, made of the functions they are registered with.

Law: pure; it picks kernels and numbers values, and compiles nothing. Values are numbered: first the inputs, then each
member's result in order. An `Expression` is plain Python and runs as it stands; `compose` calls its members one after
another in one compiled function, where LLVM makes them one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.kernels.language.folds import fold_of_row, held_dtype, reduces_rows
from flowrt.kernels.language.table import CHEAP, COSTLY, NARROW, Form, facts_of, find_kernel, require_kernel

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
    def folds_row(self) -> bool:
        """Whether it makes one value of all that its operand comes to along a row; see `row_plan`."""
        return reduces_rows(self.op)


@dataclass(frozen=True, slots=True)
class Expression:
    """A scalar function of inputs of dtypes ``inputs``; ``results`` are the numbers of the values it answers.

    ``folds`` are those of values that loops over it fold, each with the op that says how (`folds.held_dtype`: in what).
    """

    inputs: tuple[np.dtype[Any], ...]
    members: tuple[Member, ...]
    results: tuple[int, ...]
    folds: tuple[tuple[int, str], ...] = ()

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
        """The dtype of what each fold comes to."""
        dtypes = self.dtypes
        return tuple(held_dtype(op, dtypes[n]) for n, op in self.folds)

    def function(self) -> Function:
        """The expression as a Python function of scalars, which answers a tuple: its results, then what it folds."""
        members = tuple((member.function, member.operands, member.dtype) for member in self.members)
        asked = (*self.results, *(n for n, _ in self.folds))

        def apply(*values: Any) -> tuple[Any, ...]:
            known = list(values)
            for function, operands, dtype in members:
                known.append(dtype.type(function(*[known[i] for i in operands])))
            return tuple(known[i] for i in asked)

        return apply


@lru_cache(1024)
def express(
    inputs: tuple[Any, ...],
    members: tuple[tuple[str, tuple[int, ...], Any], ...],
    results: tuple[int, ...],
    device: str = "cpu",
    folds: tuple[tuple[int, str], ...] = (),
) -> Expression:
    """The expression of ``members``: (op, numbers of the values it takes, dtype of its result), in order.

    Raises `GraphError` where an op has no scalar function for such dtypes, or takes a value that does not come before.
    """
    dtypes = [np.dtype(d) for d in inputs]
    made: list[Member] = []
    for op, operands, dtype in members:
        if any(not 0 <= i < len(dtypes) for i in operands):
            raise GraphError(f"{op} of an expression takes values {operands}, of which only {len(dtypes)} come before")
        taken = [dtypes[i] for i in operands]
        function = _scalar_function(op, [*taken, np.dtype(dtype)], device)
        made.append(Member(function, operands, np.dtype(dtype), op, facts_of(op).entry))
        dtypes.append(np.dtype(dtype))
    asked = (*results, *(n for n, _ in folds))
    if not asked or any(not 0 <= i < len(dtypes) for i in asked):
        raise GraphError(f"an expression of {len(dtypes)} values cannot answer {asked}")
    return Expression(tuple(dtypes[: len(inputs)]), tuple(made), results, folds)


def _scalar_function(op: str, dtypes: Sequence[Any], device: str) -> Function:
    if reduces_rows(op):
        return fold_of_row
    found = require_kernel(op, device, dtypes)
    if found.form is not Form.SCALARS:
        raise GraphError(f"{op} is not computed entry by entry, so it can be no member of an expression")
    return found.function


def one_function(function: Function, dtypes: Sequence[Any], op: str = "") -> Expression:
    """The expression that is one scalar function, that of ``op``, of inputs and a result of these dtypes."""
    *inputs, output = (np.dtype(d) for d in dtypes)
    member = Member(function, tuple(range(len(inputs))), output, op, facts_of(op).entry)
    return Expression(tuple(inputs), (member,), (len(inputs),))


@dataclass(frozen=True, slots=True)
class Narrowed:
    """An expression of narrow functions, and the one whose results say, entry by entry, whether all of them fit."""

    expression: Expression
    fits: Expression


def narrowed(expression: Expression) -> Narrowed | None:
    """The same values by functions that are narrow, where there are any; see `table.Narrow`."""
    members, tests = [], []
    for member in expression.members:
        narrow = NARROW.get(member.function)
        members.append(member if narrow is None else replace(member, function=narrow.function))
        if narrow is not None:
            tests.append(Member(narrow.fits, member.operands, np.dtype(np.bool_)))
    if not tests:
        return None
    first = len(expression.inputs) + len(members)
    asked = tuple(range(first, first + len(tests)))
    return Narrowed(
        replace(expression, members=tuple(members)), Expression(expression.inputs, (*members, *tests), asked)
    )


def is_scalar_function(op: str, dtypes: Sequence[Any], device: str = "cpu") -> bool:
    """Whether ``op`` on these dtypes (inputs, then outputs) is computed entry by entry, by a function of flowrt's own.

    Others' functions are not known to the process that compiles expressions.
    """
    found = find_kernel(op, device, dtypes)
    if found is None or found.form is not Form.SCALARS or found.may_fail:
        return False
    return found.function.__module__.startswith("flowrt.kernels.")
