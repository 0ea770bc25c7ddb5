"""Products of matrices: BLAS for floats, loops for integers.

Operands are seen as [batch, batch, rows, columns], where a batch of one stands for every one. Transposed operands are
read as they lie. The constants that BLAS wants addresses of are written to scratch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels.blas import gemm_float32, gemm_float64
from flowrt.kernels.table import Call, View, jitable, kernel
from flowrt.kernels.twin import THREADS, cuda
from flowrt.spec import Spec

TILE = math.isqrt(THREADS)  # rows and columns of what one CUDA block computes at a time, an entry each thread


def gemm_scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """What `gemm` needs beside its operands: two flags, m, n, k and three row lengths; two factors."""
    return Spec("int32", (8,)), Spec(outputs[0].dtype, (2,))


def is_float(dtypes: Sequence[Any]) -> bool:
    """Whether there is a BLAS for these operands."""
    return dtypes[-1] in (np.float32, np.float64)


@jitable
def gemm(
    a: Any, b: Any, c: Any, starts: Any, rows: Any, flags: Any, shape: Any, beta: Any, ints: Any, floats: Any
) -> None:
    """``c = op(a) @ op(b) + beta * c`` for row-major matrices of one float dtype inside ``a``, ``b`` and ``c``.

    ``starts`` are their first entries, ``rows`` the lengths of their stored rows, ``flags`` whether a and b are
    transposed, ``shape`` is (m, n, k). BLAS is column-major and sees every matrix transposed: hence b before a.
    """
    m, n, k = shape
    if m == 0 or n == 0:
        return
    ints[0], ints[1] = 84 if flags[1] else 78, 84 if flags[0] else 78  # "T" and "N"
    ints[2], ints[3], ints[4] = n, m, k
    ints[5], ints[6], ints[7] = max(rows[1], 1), max(rows[0], 1), max(rows[2], 1)
    floats[0], floats[1] = 1, beta
    i, f, size = ints.ctypes.data, floats.ctypes.data, a.itemsize
    at, bt, ct = a.ctypes.data + starts[0] * size, b.ctypes.data + starts[1] * size, c.ctypes.data + starts[2] * size
    if size == 4:
        gemm_float32(i, i + 4, i + 8, i + 12, i + 16, f, bt, i + 20, at, i + 24, f + size, ct, i + 28)
    else:
        gemm_float64(i, i + 4, i + 8, i + 12, i + 16, f, bt, i + 20, at, i + 24, f + size, ct, i + 28)


def _matrices(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    a, b = (spec.concrete for spec in inputs)
    flags = int(attrs["transpose_a"]), int(attrs["transpose_b"])
    left, right = ((1, *a) if len(a) == 1 else a), ((*b, 1) if len(b) == 1 else b)
    m, n = left[-1] if flags[0] else left[-2], right[-2] if flags[1] else right[-1]
    if math.prod(right[:-2]) == 1 and not flags[0]:  # one matrix on the right: the batch is more rows
        m = math.prod(left[:-1])
        left, right = (m, left[-1]), right[-2:]
    batches = _batches(left[:-2], right[:-2])
    shapes = ((m, n) if i == 2 else (left, right)[i][-2:] for i in range(3))
    return Call(tuple(View.dense((*batch, *shape)) for batch, shape in zip(batches, shapes, strict=True)), flags)


def _batches(left: tuple[int, ...], right: tuple[int, ...]) -> list[list[int]]:
    """The batch sizes of both operands and the result, neighbours that broadcast alike made one: two of each."""
    rank = max(len(left), len(right))
    merged: list[list[int]] = []
    alike: list[tuple[bool, bool]] = []
    for m, n in zip((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right, strict=True):
        size = n if m == 1 else m
        if size == 1:
            continue
        kind = (m == size, n == size)
        if alike and alike[-1] == kind:
            merged[-1] = [x * y for x, y in zip(merged[-1], (m, n, size), strict=True)]
        else:
            merged.append([m, n, size])
            alike.append(kind)
    if len(merged) > 2:
        raise GraphError(f"matmul cannot broadcast batches {left} and {right}: broadcast_to one of them first")
    merged = [[1, 1, 1]] * (2 - len(merged)) + merged
    return [[group[i] for group in merged] for i in range(3)]


def _floats(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = _matrices(inputs, outputs, attrs)
    return Call((*call.views, *(View.dense(s.concrete) for s in gemm_scratch(inputs, outputs, attrs))), call.words)


@kernel("matmul", layout=_matrices)
def matmul_by_loops(a: Any, b: Any, y: Any, transpose_a: int, transpose_b: int) -> None:
    length = a.shape[2] if transpose_a else a.shape[3]
    for outer in range(y.shape[0]):
        ao, bo = min(outer, a.shape[0] - 1), min(outer, b.shape[0] - 1)
        for inner in range(y.shape[1]):
            ai, bi = min(inner, a.shape[1] - 1), min(inner, b.shape[1] - 1)
            for i in range(y.shape[2]):
                for j in range(y.shape[3]):
                    y[outer, inner, i, j] = 0
                for p in range(length):
                    x = a[ao, ai, p, i] if transpose_a else a[ao, ai, i, p]
                    for j in range(y.shape[3]):
                        y[outer, inner, i, j] += x * (b[bo, bi, j, p] if transpose_b else b[bo, bi, p, j])


@kernel("matmul", layout=_floats, scratch=gemm_scratch, dtypes=is_float)
def matmul(a: Any, b: Any, y: Any, ints: Any, floats: Any, transpose_a: int, transpose_b: int) -> None:
    m, n, columns, wide = y.shape[2], y.shape[3], a.shape[3], b.shape[3]
    k = a.shape[2] if transpose_a else columns
    for outer in range(y.shape[0]):
        ao, bo = min(outer, a.shape[0] - 1), min(outer, b.shape[0] - 1)
        for inner in range(y.shape[1]):
            at = (ao * a.shape[1] + min(inner, a.shape[1] - 1)) * a.shape[2] * columns
            bt = (bo * b.shape[1] + min(inner, b.shape[1] - 1)) * b.shape[2] * wide
            yt = (outer * y.shape[1] + inner) * m * n
            flags = (transpose_a, transpose_b)
            gemm(a, b, y, (at, bt, yt), (columns, wide, n), flags, (m, n, k), 0.0, ints, floats)


@kernel("matmul", "cuda", layout=_matrices)
def matmul_on_cuda(a: Any, b: Any, y: Any, transpose_a: int, transpose_b: int) -> None:
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
                left[row, column] = a[ao, ai, p, i] if transpose_a else a[ao, ai, i, p]
            if j < n and q < k:
                right[row, column] = b[bo, bi, j, q] if transpose_b else b[bo, bi, q, j]
            cuda.syncthreads()
            for t in range(TILE):
                total += left[row, t] * right[t, column]
            cuda.syncthreads()
        if i < m and j < n:
            y[outer, inner, i, j] = total
