"""A variable that several variables hold together: which rows each of them has.

Law: pure, plain data. A graph knows by its `Graph.partitions` what a program sees as one variable; nodes know the
shards alone, ordinary variables, each wherever it was placed. What an optimiser keeps beside the shards is split by the
same rows. Splitting tables by rows over parameter servers, with lookups composed of Part, Gather and Stitch, is that of
Abadi et al., "TensorFlow: a system for large-scale machine learning", OSDI 2016, section 4.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass


@valueclass
class Partition:
    """One variable ``name`` of ``spec``, held by ``shards``, names of variables in its container, in order.

    Shard i holds the rows from ``rows[i]`` up to ``rows[i + 1]``, which is left out. A scalar has no rows: ``rows`` is
    empty, and each shard holds all of it, the same value between steps (an optimiser's count of its steps, a trainer's
    version).
    """

    name: str
    spec: Spec
    rows: tuple[int, ...]
    shards: tuple[str, ...]
    container: str = ""

    @property
    def is_mirrored(self) -> bool:
        """Whether each shard holds the whole."""
        return not self.rows

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """(shard, first row, end) of each shard in order; of one that is mirrored (shard, 0, 1)."""
        ranges = itertools.pairwise(self.rows) if self.rows else [(0, 1)] * len(self.shards)
        return ((shard, *rows) for shard, rows in zip(self.shards, ranges, strict=True))

    def spec_of(self, first: int, end: int) -> Spec:
        """The spec of the rows from ``first`` up to ``end``."""
        return self.spec if self.is_mirrored else Spec(self.spec.dtype, (end - first, *self.spec.concrete[1:]))

    def beside(self, name: str, dtype: np.dtype[Any]) -> Partition:
        """That of what is kept beside each shard under ``name``, of another dtype perhaps: split by the same rows."""
        shards = tuple(f"{shard}/{name}" for shard in self.shards)
        return Partition(f"{self.name}/{name}", Spec(dtype, self.spec.dims), self.rows, shards, self.container)


def row_bounds(partition: int | Sequence[int], rows: int) -> tuple[int, ...]:
    """The bounds of a table's ``rows``: of as many parts as ``partition`` says, alike but for one row; or as it says.

    Integers may be NumPy's. Raises `SpecError` where they make no sense.
    """
    if isinstance(partition, (np.ndarray, np.generic)):
        partition = partition.tolist()
    if isinstance(partition, bool) or not isinstance(partition, (int, tuple, list)):
        raise SpecError(
            f"partition is a number of parts, or the bounds of their rows such as (0, {rows // 2}, {rows}), not "
            f"{partition!r}"
        )
    if isinstance(partition, int):
        if not 1 <= partition <= rows:
            raise SpecError(f"{rows} rows cannot be split into {partition} parts; ask for 1 to {rows}")
        return tuple(rows * part // partition for part in range(partition + 1))
    bounds = tuple([bound.item() if isinstance(bound, np.integer) else bound for bound in partition])
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
    if not whole or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != rows:
        raise SpecError(f"the bounds of {rows} rows are integers from 0 to {rows}, got partition={partition!r}")
    if any(first >= end for first, end in itertools.pairwise(bounds)):
        raise SpecError(f"the bounds of rows must rise, as each part has a row at least; got partition={partition!r}")
    return bounds


def padded_rows(count: int) -> int:
    """In how many rows ``count`` rows of a part are sent: of few numbers, so that shapes of steps come again.

    Neighbouring ones are 8 apart, or more: an 11th to a 6th of them. Rows are mostly drawn evenly, so that of n a part
    has some n / 2, n / 4, …: such numbers lie well between two.
    """
    step = 8
    while 2 * step <= 11 * count >> 6:
        step *= 2
    return count + (step // 2 - count) % step


def padded_room(count: int, parts: int) -> int:
    """In how many rows ``count`` rows fit however they are dealt out to padded ``parts``; none where there are none.

    Parts that are dealt about as many have as many rows each: of several that differ there are too many cases. For that
    there is some more room than has to be.
    """
    return count + (count >> 2) + 8 * parts if count else 0
