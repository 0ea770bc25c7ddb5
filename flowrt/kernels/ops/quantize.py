"""Products of rows of int8, added up as int32.

Few rows meet the others as these lie: they are read once, and are a quarter of what their float32 would be. Where
there are more rows, both operands are widened, and multiplied as floats are: tiles of those do more products in a
second than loops of integers, and lose nothing of a sum of few terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, Form, host_only, jitable, kernel
from flowrt.kernels.launch import Application, apply_kernel
from flowrt.kernels.ops.linalg import renumbered, stored_flops, tiled_on_cuda, widened
from flowrt.kernels.tiles.products import matrices

FEW = 32  # rows up to which widening takes longer than it gains
TERMS = 1024  # products of int8 whose sum is a float32 to the last unit: 1024 * 128 * 128 is 2**24
SHARE = 64  # columns of a unit
FLAGS = {"transpose_a": False, "transpose_b": True}


def _by_columns(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """`matrices` where some columns of one of them are a unit."""
    call = matrices(inputs, outputs, FLAGS)
    *batch, _, columns = call.views[2].shape
    return replace(call, words=(), units=math.prod(batch) * -(-columns // SHARE))


@jitable
def term(x: Any, z: Any) -> Any:
    return np.int32(np.int32(x) * np.int32(z))


@kernel("matmul_int8_rows", layout=_by_columns, flops=stored_flops)
def by_rows(a: Any, b: Any, y: Any, begin: int, end: int) -> None:
    """Two rows of each operand at a time."""
    rows, depth, columns = y.shape[2], a.shape[3], y.shape[3]
    shares = (columns + SHARE - 1) // SHARE
    for unit in range(begin, end):
        batch, first = unit // shares, unit % shares * SHARE
        outer, inner, last = batch // y.shape[1], batch % y.shape[1], min(first + SHARE, columns)
        left = a[min(outer, a.shape[0] - 1), min(inner, a.shape[1] - 1)]
        right = b[min(outer, b.shape[0] - 1), min(inner, b.shape[1] - 1)]
        for j in range(first, last, 2):
            k = min(j + 1, last - 1)
            u, v = right[j], right[k]
            for i in range(0, rows - 1, 2):
                r, s = left[i], left[i + 1]
                ru = rv = su = sv = np.int32(0)
                for p in range(depth):
                    ru = np.int32(ru + term(r[p], u[p]))
                    rv = np.int32(rv + term(r[p], v[p]))
                    su = np.int32(su + term(s[p], u[p]))
                    sv = np.int32(sv + term(s[p], v[p]))
                y[outer, inner, i, j], y[outer, inner, i, k] = ru, rv
                y[outer, inner, i + 1, j], y[outer, inner, i + 1, k] = su, sv
            if rows % 2:
                r = left[rows - 1]
                ru = rv = np.int32(0)
                for p in range(depth):
                    ru = np.int32(ru + term(r[p], u[p]))
                    rv = np.int32(rv + term(r[p], v[p]))
                y[outer, inner, rows - 1, j], y[outer, inner, rows - 1, k] = ru, rv


host_only("matmul_int8_rows", why="a processor's way of matmul_int8, which has a twin")
_as_floats = widened("astype", {"dtype": "float32"})


@kernel("matmul_int8", form=Form.PROGRAM, flops=stored_flops)
def apply(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
    (a, b), (y,) = inputs, outputs
    rows = y.concrete[-2] if b.rank > 2 else math.prod(y.concrete[:-1])
    if rows <= FEW or a.concrete[-1] > TERMS:
        return apply_kernel("matmul_int8_rows", inputs, outputs, attrs, device)
    sums = Spec("float32", y.dims)
    product = _as_floats(inputs, [sums], FLAGS, device)
    beside = len(product.scratch) + len(product.local)
    places = (0, 1, 3, *range(4, 4 + beside))
    last = apply_kernel("astype", [sums], [y], {"dtype": "int32"}, device).steps[0]
    steps = (*(renumbered(step, places) for step in product.steps), renumbered(last, (3, 2)))
    return replace(product, steps=steps, scratch=(sums, *product.scratch))


@jitable
def as_whole(x: Any) -> Any:
    return np.int32(x)


kernel("matmul_int8", "cuda", layout=lambda inputs, outputs, attrs: matrices(inputs, outputs, FLAGS))(
    tiled_on_cuda(as_whole)
)
