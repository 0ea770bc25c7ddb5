"""Rows of several requests as one array each, and apart again.

Law: pure. A run has a power of two of rows, or as many as there are at most: so a model meets few sizes, for each of
which it has a plan. What fills it up repeats the last row, which is as good a value as any that came, and is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.spec import spec_of

Array: TypeAlias = "np.ndarray[Any, Any]"


def size_of(rows: int, most: int) -> int:
    """How many rows are run for so many."""
    return min(1 << (rows - 1).bit_length(), most) if rows else 0


def joined(requests: Sequence[Sequence[Array]], most: int) -> Iterator[tuple[list[Array], int]]:
    """The inputs of each run that requests with equally shaped rows come to, and how many of its rows are theirs."""
    if len(requests) == 1 and len(requests[0][0]) == size_of(len(requests[0][0]), most):
        yield list(requests[0]), len(requests[0][0])
        return
    whole = [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*requests, strict=True)]
    rows = len(whole[0])
    for start in range(0, max(rows, 1), most):
        count = min(most, rows - start)
        yield [_filled(array[start : start + count], size_of(count, most)) for array in whole], count


def _filled(array: Array, rows: int) -> Array:
    missing = rows - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array


def cut(runs: Sequence[tuple[Sequence[Array], int, int]], sizes: Sequence[int]) -> list[list[Array]]:
    """The outputs of each request, of so many rows; ``runs`` are outputs, the rows that ran, and those that count.

    Raises `GraphError` for an output that has not a row for each that ran.
    """
    for outputs, ran, _ in runs:
        for output in outputs:
            if output.ndim == 0 or len(output) != ran:
                raise GraphError(f"an output of {ran} rows is {spec_of(output)}: serve this model with max_batch=1")
    for parts in zip(*(outputs for outputs, _, _ in runs), strict=True):
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(spec_of(part)) for part in parts)
            raise GraphError(f"an output's sizes hang on what is fed: {shapes}; ask for fewer rows at once")
    counted = [[output[:count] for output in outputs] for outputs, _, count in runs]
    whole = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*counted, strict=True)]
    ends = list(accumulate(sizes))
    return [[array[end - size : end] for array in whole] for end, size in zip(ends, sizes, strict=True)]
