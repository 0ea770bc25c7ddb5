"""Combining two numbers where the order of many does not matter, so that a loop over a row becomes one of vectors.

A kernel calls these as plain functions; where it is compiled they become instructions that the compiler may reorder
(`emit.reductions`). How a row is reduced then depends on the machine's vectors, never on who reduces the rows beside
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.table import jitable


def add_loosely(x: Any, y: Any) -> Any:
    """The sum, in a chain of sums that may be added up in any order."""
    return x + y


def multiply_loosely(x: Any, y: Any) -> Any:
    """The product, in a chain of products that may be multiplied in any order."""
    return x * y


def larger_loosely(x: Any, y: Any) -> Any:
    """The larger, or NaN if either is."""
    return x if x >= y or x != x else y


def smaller_loosely(x: Any, y: Any) -> Any:
    """The smaller, or NaN if either is."""
    return x if x <= y or x != x else y


@jitable
def as_held(entry: Any, found: Any) -> Any:
    """An entry, of the type that it is reduced in."""
    return found.dtype.type(entry)


@valueclass
class Reducer:
    """How two entries are combined: one after another, and along a row, where their order is free.

    ``singles(row, (address, count, address of the total))`` adds up a row of float32, if there is such a function.
    """

    combine: Callable[..., Any]
    in_row: Callable[..., Any]
    take: Callable[..., Any] = as_held
    chooses: bool = False  # one of the two
    singles: Callable[..., Any] | None = None


def along_row(reducer: Reducer) -> Callable[..., Any]:
    """``fold_along(row, begin, end, held, found)``: what is held, and a row's entries from ``begin`` to ``end``."""
    combine, take = reducer.in_row, reducer.take

    @jitable
    def one_by_one(row: Any, begin: int, end: int, held: Any, found: Any) -> Any:
        for t in range(begin, end):
            held = combine(held, take(row[np.uint64(t)], found))
        return held

    return one_by_one if reducer.singles is None else _as_singles(reducer.singles, one_by_one)


def _as_singles(singles: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    @jitable
    def reduce_along(row: Any, begin: int, end: int, held: Any, found: Any) -> Any:
        if row.itemsize != 4 or row.dtype.type(0.5) == 0:  # no float32, as is known when it is compiled
            return others(row, begin, end, held, found)
        singles(row, (row.ctypes.data + begin * row.itemsize, end - begin, found.ctypes.data))
        return held + found[0, 0]

    return reduce_along


def reduction_of_row(entry: Any) -> Any:
    """What stands for such a member's function: each of them makes of a single entry that entry."""
    return entry
