"""Expressions of ops, made of the scalar functions that they are registered with.

Law: pure; it picks kernels, and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.traits import reduces_rows
from flowrt.kernels.language.expression import Expression, Function, Member
from flowrt.kernels.language.reductions import reduction_of_row
from flowrt.kernels.language.table import NARROW, Form, facts_of, find_kernel, require_kernel


@lru_cache(1024)
def express(
    inputs: tuple[Any, ...],
    members: tuple[tuple[str, tuple[int, ...], Any], ...],
    results: tuple[int, ...],
    device: str = "cpu",
    reductions: tuple[tuple[int, str], ...] = (),
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
    asked = (*results, *(n for n, _ in reductions))
    if not asked or any(not 0 <= i < len(dtypes) for i in asked):
        raise GraphError(f"an expression of {len(dtypes)} values cannot answer {asked}")
    return Expression(tuple(dtypes[: len(inputs)]), tuple(made), results, reductions)


def _scalar_function(op: str, dtypes: Sequence[Any], device: str) -> Function:
    if reduces_rows(op):
        return reduction_of_row
    found = require_kernel(op, device, dtypes)
    if found.form is not Form.SCALARS:
        raise GraphError(f"{op} is not computed entry by entry, so it can be no member of an expression")
    return found.function


def one_function(function: Function, dtypes: Sequence[Any], op: str = "") -> Expression:
    """The expression that is one scalar function, that of ``op``, of inputs and a result of these dtypes."""
    *inputs, output = (np.dtype(d) for d in dtypes)
    member = Member(function, tuple(range(len(inputs))), output, op, facts_of(op).entry)
    return Expression(tuple(inputs), (member,), (len(inputs),))


def narrowed(expression: Expression) -> tuple[Expression, Expression] | None:
    """The same values by functions that are narrow, where there are any (see `table.Narrow`), and the expression whose
    results say, entry by entry, whether all of these fit."""
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
    fits = Expression(expression.inputs, (*members, *tests), asked)
    return replace(expression, members=tuple(members)), fits


def is_scalar_function(op: str, dtypes: Sequence[Any], device: str = "cpu") -> bool:
    """Whether ``op`` on these dtypes (inputs, then outputs) is computed entry by entry, by a function of flowrt's own.

    Others' functions are not known to the process that compiles expressions.
    """
    found = find_kernel(op, device, dtypes)
    if found is None or found.form is not Form.SCALARS or found.may_fail:
        return False
    return found.function.__module__.startswith("flowrt.kernels.")
