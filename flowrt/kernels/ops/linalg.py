"""Products of matrices: register tiles for floats, loops for integers.

Operands are seen as [batch, batch, rows, columns], where a batch of one stands for every one. A unit of work is a block
of the result. Its rows of the right operand are packed into one column panel after another, those of a transposed left
operand into panels of rows; so both are read as the tiles walk, whatever their flags. A single column is computed as a
single row of the transposed product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, Form, host_only, jitable, kernel, product_flops
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.launch import Application, Launchable, LaunchStep, apply_kernel
from flowrt.kernels.ops.precision import of_bfloat16, of_float16
from flowrt.kernels.tiles.micro import Geometry, native
from flowrt.kernels.tiles.multiplying import multiply_blocks, multiply_tiny, share_panels
from flowrt.kernels.tiles.products import Tiled, matrices

TILE = math.isqrt(THREADS)  # rows and columns of what one CUDA block computes at a time, an entry each thread


def is_float(dtypes: Sequence[Any]) -> bool:
    """Whether tiles can compute on these operands."""
    return dtypes[-1] in (np.float32, np.float64)


def by_rows(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """`matrices` where a row of the result is a unit."""
    call = matrices(inputs, outputs, attrs)
    return replace(call, units=math.prod(call.views[2].shape[:3]))


@kernel("matmul", layout=by_rows, flops=product_flops)
def matmul_by_loops(a: Any, b: Any, y: Any, transpose_a: int, transpose_b: int, begin: int, end: int) -> None:
    length = a.shape[2] if transpose_a else a.shape[3]
    for unit in range(begin, end):
        batch, i = unit // y.shape[2], unit % y.shape[2]
        outer, inner = batch // y.shape[1], batch % y.shape[1]
        ao, bo = min(outer, a.shape[0] - 1), min(outer, b.shape[0] - 1)
        ai, bi = min(inner, a.shape[1] - 1), min(inner, b.shape[1] - 1)
        if transpose_b:
            for j in range(y.shape[3]):
                total = y.dtype.type(0)
                for p in range(length):
                    x = a[ao, ai, p, i] if transpose_a else a[ao, ai, i, p]
                    total = y.dtype.type(total + x * b[bo, bi, j, p])
                y[outer, inner, i, j] = total
            continue
        for j in range(y.shape[3]):
            y[outer, inner, i, j] = 0
        for p in range(length):
            x = a[ao, ai, p, i] if transpose_a else a[ao, ai, i, p]
            for j in range(y.shape[3]):
                y[outer, inner, i, j] += x * b[bo, bi, p, j]


def register(name: str, geometry: Geometry) -> None:
    """Enter the kernel of float matrices for tiles of one geometry, by name. A third operand is a bias."""
    tiled = Tiled(geometry)
    following = (multiply_blocks, tiled.layout), (multiply_tiny, tiled.tiny)
    enter = kernel(
        name,
        layout=tiled.packing,
        scratch=tiled.scratch,
        local=tiled.local,
        dtypes=is_float,
        then=following,
        flops=product_flops,
    )
    enter(share_panels)


for _name in ("matmul", "matmul_bias"):
    register(_name, native())
host_only("matmul_bias", why="a product whose register tiles add the bias; others are a product and an addition")


def tiled_on_cuda(read: Callable[[Any], Any]) -> Callable[..., None]:
    """The twin of a product of what ``read`` makes of the operands' entries."""

    def multiply(a: Any, b: Any, y: Any, transpose_a: int, transpose_b: int) -> None:
        """Every block computes a tile of the result at a time, from tiles of the operands in shared memory."""
        left = cuda.shared.array((TILE, TILE), y.dtype)
        right = cuda.shared.array((TILE, TILE), y.dtype)
        m, n = y.shape[2], y.shape[3]
        k = a.shape[2] if transpose_a else a.shape[3]
        row, column = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
        down, across = (m + TILE - 1) // TILE, (n + TILE - 1) // TILE
        for tile in range(cuda.blockIdx.x, y.shape[0] * y.shape[1] * down * across, cuda.gridDim.x):
            batch, place = tile // (down * across), tile % (down * across)
            outer, inner = batch // y.shape[1], batch % y.shape[1]
            ao, bo = min(outer, a.shape[0] - 1), min(outer, b.shape[0] - 1)
            ai, bi = min(inner, a.shape[1] - 1), min(inner, b.shape[1] - 1)
            i, j = (place // across) * TILE + row, (place % across) * TILE + column
            total = y.dtype.type(0)
            for start in range(0, k, TILE):
                p, q = start + column, start + row
                left[row, column] = right[row, column] = 0
                if i < m and p < k:
                    left[row, column] = read(a[ao, ai, p, i] if transpose_a else a[ao, ai, i, p])
                if j < n and q < k:
                    right[row, column] = read(b[bo, bi, j, q] if transpose_b else b[bo, bi, q, j])
                cuda.syncthreads()
                for t in range(TILE):
                    total += left[row, t] * right[t, column]
                cuda.syncthreads()
            if i < m and j < n:
                y[outer, inner, i, j] = total

    return multiply


@jitable
def as_it_is(x: Any) -> Any:
    return x


matmul_on_cuda = kernel("matmul", "cuda", layout=matrices)(tiled_on_cuda(as_it_is))


# ── of what is stored as floats of 16 bits ───────────────────────────────────────────────────────────────────────────


def _widened(dtype: str) -> Callable[..., Application]:
    """Has a host multiply the float32s that bits stand for: its tiles read those."""

    def apply(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str) -> Application:
        wide = [Spec("float32", spec.concrete) for spec in inputs]
        product = apply_kernel("matmul", wide, outputs, attrs, device)
        beside = len(product.scratch) + len(product.local)
        places = (3, 4, 2, *range(5, 5 + beside))  # of the product's operands among these, whose scratch is wide first
        widened = [
            _renumbered(apply_kernel(f"widen_{dtype}", [bits, made], [made], {}, device).steps[0], (number, at, at))
            for number, (bits, made, at) in enumerate(zip(inputs, wide, places, strict=False))
        ]
        steps = (*widened, *(_renumbered(step, places) for step in product.steps))
        return replace(product, steps=steps, scratch=(*wide, *product.scratch))

    return apply


def _renumbered(step: Launchable, places: Sequence[int]) -> Launchable:
    assert isinstance(step, LaunchStep)
    return replace(step, operands=tuple(places[number] for number in step.operands))


def stored_flops(specs: Sequence[Spec]) -> float:
    """`product_flops` of what is multiplied as float32, however it is stored."""
    return product_flops([Spec("float32", spec.concrete) for spec in specs])


STORED_ON_CUDA = {dtype: tiled_on_cuda(read) for dtype, read in (("bfloat16", of_bfloat16), ("float16", of_float16))}
for _dtype, _twin in STORED_ON_CUDA.items():
    kernel(f"matmul_{_dtype}", form=Form.PROGRAM, flops=stored_flops)(_widened(_dtype))
    kernel(f"matmul_{_dtype}", "cuda", layout=matrices, takes_bits=True)(_twin)
