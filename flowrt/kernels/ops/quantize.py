"""Products of rows of int8, added up as int32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.language.table import Call, jitable, kernel
from flowrt.kernels.ops.linalg import stored_flops, tiled_on_cuda
from flowrt.kernels.tiles.bytes import COLUMNS, ROWS, dot, dots_of_row, dots_of_tile
from flowrt.kernels.tiles.panels import address
from flowrt.kernels.tiles.products import matrices

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

SHARE = 16 * COLUMNS  # columns of a unit


def _of_rows(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """`matrices`, whose right operand is transposed, where some columns of one result are a unit."""
    call = matrices(inputs, outputs, {"transpose_a": False, "transpose_b": True})
    *batch, _, columns = call.views[2].shape
    return replace(call, units=math.prod(batch) * -(-columns // SHARE))


@kernel("matmul_int8", layout=_of_rows, flops=stored_flops)
def multiply(a: Any, b: Any, y: Any, transpose_a: int, transpose_b: int, begin: int, end: int) -> None:
    """Some columns at a time go through all rows of the left operand: they stay near."""
    rows, columns, depth = y.shape[2], y.shape[3], a.shape[3]
    shares = (columns + SHARE - 1) // SHARE
    for unit in range(begin, end):
        batch, first = unit // shares, unit % shares * SHARE
        outer, inner, last = batch // y.shape[1], batch % y.shape[1], min(first + SHARE, columns)
        left = min(outer, a.shape[0] - 1) * a.shape[1] + min(inner, a.shape[1] - 1)
        right = min(outer, b.shape[0] - 1) * b.shape[1] + min(inner, b.shape[1] - 1)
        from_a, from_b = address(a) + left * rows * depth, address(b) + right * columns * depth
        to, across = address(y) + 4 * batch * rows * columns, 4 * columns
        whole, pairs = last - (last - first) % COLUMNS, rows - rows % ROWS
        for j in range(first, whole, COLUMNS):
            for i in range(0, pairs, ROWS):
                dots_of_tile(y, (from_a + i * depth, from_b + j * depth, depth, to + i * across + 4 * j, across))
            for i in range(pairs, rows):
                dots_of_row(y, (from_a + i * depth, from_b + j * depth, depth, to + i * across + 4 * j, across))
        for j in range(whole, last):
            for i in range(rows):
                dot(y, (from_a + i * depth, from_b + j * depth, depth, to + i * across + 4 * j, across))


@jitable
def as_sum(x: Any) -> Any:
    return np.int32(x)


kernel("matmul_int8", "cuda", layout=_of_rows)(tiled_on_cuda(as_sum))
