"""Sums of squares of updates, for policies that weigh them: read once, where they lie anyway.

A replica measures its update before it posts it, a server what it combines of several. Float32 is summed as it is, in
blocks, which is as fast as memory is read; where that leaves its range, and for any other dtype, numbers are made
float64 first, so that no finite update measures infinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flowrt.sched.host.rendezvous import Array

BLOCK = 1 << 15  # numbers: 128 KiB of float32, which stay near while they are made float64
SURE = 1e-30, 1e30  # a block's square in between has neither left float32 nor lost more of itself than a millionth


def square_of(parts: Sequence[Any], rows: Sequence[bool]) -> float:
    """The sum of the squares of all numbers of an update.

    ``rows`` says of each part whether it is of rows, whose indices are one part and whose values the next; parts beyond
    these do not count. Of rows, equal ones are added up first, and values that are fewer than the indices are each for
    as many in a row.
    """
    total, place = 0.0, 0
    while place < min(len(parts), len(rows)):
        if rows[place]:
            total += _square_of_rows(parts[place], parts[place + 1])
            place += 2
        else:
            total += _square(parts[place])
            place += 1
    return total


def _square(numbers: Any) -> float:
    return sum(map(_square_of_block, _blocks(np.asarray(numbers).reshape(-1))))


def _blocks(numbers: Array) -> Iterator[Array]:
    return (numbers[begin : begin + BLOCK] for begin in range(0, len(numbers), BLOCK))


def _square_of_block(numbers: Array) -> float:
    if numbers.dtype == np.float32:
        with np.errstate(over="ignore", under="ignore"):
            square = float(np.dot(numbers, numbers))
        if SURE[0] < square < SURE[1]:
            return square
    wide = numbers.astype(np.float64)
    return float(np.dot(wide, wide))


def _square_of_rows(indices: Any, values: Any) -> float:
    """Of the rows that are made of ``values`` by adding up those of equal ``indices``."""
    if not len(indices):
        return 0.0
    order = np.argsort(indices, kind="stable")
    ordered = np.asarray(indices)[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    many = len(indices) // len(values)
    if len(begins) == len(indices) and many == 1:
        return _square(values)
    wide = np.asarray(values).reshape(len(values), -1)
    # In stretches of whole rows, so that what is made float64 stays small.
    stretches = np.flatnonzero(np.diff(begins // max(1, BLOCK // max(1, wide.shape[1])), prepend=-1))
    ends = [*begins[stretches[1:]].tolist(), len(indices)]
    total = 0.0
    for first, end in zip(begins[stretches].tolist(), ends, strict=True):
        inside = begins[(begins >= first) & (begins < end)] - first
        sums = np.add.reduceat(wide[order[first:end] // many].astype(np.float64), inside, axis=0)
        total += _square(sums)
    return total
