"""Products of matrices: register tiles for floats, loops for integers.

Operands are seen as [batch, batch, rows, columns], where a batch of one stands for every one. A unit of work is a block
of the result. Its rows of the right operand are packed into one column panel after another, those of a transposed left
operand into panels of rows; so both are read as the tiles walk, whatever their flags. A single column is computed as a
single row of the transposed product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels import micro
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry, native
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.table import Call, View, host_only, jitable, kernel
from flowrt.kernels.twin import THREADS, cuda
from flowrt.spec import Spec

TILE = math.isqrt(THREADS)  # rows and columns of what one CUDA block computes at a time, an entry each thread
NEAR = 1 << 18  # entries of the left operand that a unit reads again and again: a megabyte of float32, L2 and some L3
ROWS, UNITS = 48, 8  # a unit has no fewer rows than pay for packing, but there should be some units to share
DIRECT = 256  # rows of the right operand, far apart, that a few tiles read as well as packed ones
LONG = 4  # column panels that a lone row is multiplied with at a time, unpacked: pages are far apart, lines are not
DEEP = 2048  # entries of one dot product computed before the next panel's


def is_float(dtypes: Sequence[Any]) -> bool:
    """Whether tiles can compute on these operands."""
    return dtypes[-1] in (np.float32, np.float64)


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


def _blocked(m: int, n: int, k: int, transposed: bool, wide: int) -> tuple[int, int, int]:
    """Rows, columns and depth of the blocks that an [m, n] product of ``k`` terms is computed in."""
    if transposed:  # the left operand is packed once for eight panels
        return wide * _share(-(-m // wide), 10), 8 * wide, _share(k, DEEP // 4)
    if m == 1:
        return 1, max(wide * LONG, -(-n // UNITS)), _share(k, DEEP)
    panels = -(-n // wide)
    depth = _share(k, DEEP // 2)
    rows = min(max(NEAR // depth, ROWS), max(m * panels // UNITS, ROWS))
    return _share(m, rows), wide, depth


def _share(whole: int, most: int) -> int:
    """The size of equal parts of ``whole``, none larger than ``most``."""
    return -(-whole // max(-(-whole // most), 1)) or 1


def _column_as_row(call: Call) -> Call:
    """The same product with the result's only column as a row: the transposed operands, the right one first."""
    left, right, out = call.views
    flags = call.words
    row = right.reshape((*right.shape[:2], 1, right.shape[2] * right.shape[3]))
    return Call((left, row, out.reshape((*out.shape[:2], 1, out.shape[2]))), (0, 1 - int(flags[0])))


class Tiled:
    """How matmul is laid out for tiles of one geometry: views, words, units and local memory."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def layout(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        call, swapped = self._product(inputs, outputs, attrs)
        m, n = call.views[2].shape[2:]
        blocks = self._blocks(call, swapped)
        units = math.prod(call.views[2].shape[:2]) * -(-m // blocks[0]) * -(-n // blocks[1])
        views = (*call.views[:2], *(View.dense(s.concrete) for s in inputs[2:]), call.views[2])
        dense = (View.dense(s.concrete) for s in self.local(inputs, outputs, attrs))
        floor = (int(attrs["activation"] == "relu"),) if "activation" in attrs else ()
        return Call((*views, *dense), (*floor, int(swapped), *call.words, *blocks), units)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The table and the one tap, a column panel, the row panels, one panel's biases, the stage."""
        call, swapped = self._product(inputs, outputs, attrs)
        rows, _, depth = self._blocks(call, swapped)
        dtype = outputs[0].dtype
        wide = self.geometry.columns(dtype)
        packed = depth * (rows + wide) if call.words[0] else 0
        table = Spec("int64", (table_size(self.geometry, rows),))
        panels = Spec(dtype, (depth * wide,)), Spec(dtype, (packed,)), Spec(dtype, (wide,))
        return (table, Spec("int64", (2,)), *panels, *stage(self.geometry, dtype))

    def _product(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Call, bool]:
        """The matrices, and whether a column is computed as a row: a bias goes along rows."""
        call = _matrices(inputs[:2], outputs, attrs)
        swapped = call.views[2].shape[3] == 1 and len(inputs) == 2
        return (_column_as_row(call) if swapped else call), swapped

    def _blocks(self, call: Call, swapped: bool) -> tuple[int, int, int]:
        a, _, y = (view.shape for view in call.views)
        a = call.views[1].shape if swapped else a
        k = a[2] if call.words[0] else a[3]
        return _blocked(y[2], y[3], k, bool(call.words[0]), self.geometry.columns(np.float32))


@cache
def product(geometry: Geometry) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of a product, plus ``bias`` (unless that is empty)."""
    pack, band = packing(geometry), banding(geometry)
    row = micro.tile(1, LONG * geometry.vectors, geometry.width)
    one_dot, four_dots = micro.dots(1, 2, geometry.width), micro.dots(4, 2, geometry.width)
    most, full = geometry.rows, geometry.vectors * geometry.width

    @jitable
    def fill(table: Any, rows: int, wide: int, depth: int, step: int, across: int) -> None:
        """The table of a block: its left rows ``step`` apart, or packed (``depth`` is not 0); its results' rows."""
        half = table.size // 2
        for r in range(rows):
            table[r] = r // wide * wide * depth + r % wide if depth != 0 else r * step
            table[half + r] = r * across
        repeat_last(table, rows)

    @jitable
    def lone_row(
        like: Any, at: Any, step: int, across: int, table: Any, taps: Any, depth: int, n: int, how: Any
    ) -> int:
        """As much of one row of the result as needs no packing; how many columns that is."""
        a, b, c = at
        size, j = like.itemsize, 0
        if across == 1:
            long = LONG * full // size
            while j + long <= n:
                reach, places = (1, depth, 1, step), address(table) + 4 * table.size
                there = b + j * size, address(taps), *reach, c + j * size, places, how[0], how[1] + j * size, how[2]
                row(like, (a, address(table), *there))
                j += long
            return j
        if how[0] == START_BIAS or how[2] != 0:
            return 0
        while j + 4 <= n:
            four_dots(like, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
            j += 4
        while j < n:
            one_dot(like, (a, b + j * across * size, across, c + j * size, 1, how[0], depth))
            j += 1
        return j

    @jitable
    def multiply(
        a: Any, b: Any, y: Any, bias: Any, floor: int, memory: Any, flags: Any, blocks: Any, units: Any
    ) -> None:
        table, taps, panel, left, edge, stage, places = memory
        transpose_a, transpose_b = flags
        size, m, n = a.itemsize, y.shape[2], y.shape[3]
        wide, deep = full // size, blocks[2]
        k = a.shape[2] if transpose_a else a.shape[3]
        step, across = (1, b.shape[3]) if transpose_b else (b.shape[3], 1)
        down, over = (m + blocks[0] - 1) // blocks[0], (n + blocks[1] - 1) // blocks[1]
        taps[0] = taps[1] = filled = 0
        for unit in range(units[0], units[1]):
            batch, place = unit // (down * over), unit % (down * over)
            outer, inner = batch // y.shape[1], batch % y.shape[1]
            ao, bo = min(outer, a.shape[0] - 1), min(outer, b.shape[0] - 1)
            ai, bi = min(inner, a.shape[1] - 1), min(inner, b.shape[1] - 1)
            at = address(a) + (ao * a.shape[1] + ai) * a.shape[2] * a.shape[3] * size
            bt = address(b) + (bo * b.shape[1] + bi) * b.shape[2] * b.shape[3] * size
            first, j0 = place // over * blocks[0], place % over * blocks[1]
            rows, beyond = min(blocks[0], m - first), min(j0 + blocks[1], n)
            if rows != filled:
                fill(table, rows, wide, deep if transpose_a else 0, a.shape[3], n)
                filled = rows
            yt = address(y) + (batch * m + first) * n * size
            for p in range(0, max(k, 1), deep):
                depth, a_step = min(deep, k - p), 1
                a_here = at + (first * a.shape[3] + p) * size
                if transpose_a:
                    a_here, a_step = address(left), wide
                    for r in range(0, rows, wide):
                        source = at + (p * a.shape[3] + first + r) * size
                        pack(a, source, a.shape[3], 1, depth, min(wide, rows - r), a_here + r * deep * size)
                done = j0
                if rows == 1 and not transpose_a:
                    start = START_STORED if p > 0 else (START_BIAS if bias.size > 0 else START_ZERO)
                    how = (start, address(bias) + j0 * size, floor if p + deep >= k else 0)
                    where = (a_here, bt + (p * step + j0 * across) * size, yt + j0 * size)
                    done += lone_row(a, where, step, across, table, taps, depth, beyond - j0, how)
                for j in range(done, beyond, wide):
                    columns, b_step = min(wide, n - j), step
                    b_here = bt + (p * step + j * across) * size
                    if across != 1 or columns < wide or rows > 6 * most or depth > DIRECT:
                        pack(a, b_here, step, across, depth, columns, address(panel))
                        b_here, b_step = address(panel), wide
                    start, biases = START_STORED if p > 0 else START_ZERO, address(edge)
                    if p == 0 and bias.size > 0:
                        start = START_BIAS
                        for i in range(columns):
                            edge[i] = bias[j + i]
                    how = (start, biases, floor if p + deep >= k else 0)
                    where, reach = (a_here, b_here, yt + j * size), (1, depth, a_step, b_step)
                    band(a, where, table, rows, taps, reach, columns, stage, places, how)

    return multiply


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


@cache
def matmul_by_tiles(geometry: Geometry) -> Callable[..., None]:
    """The kernel of float matrices for tiles of one geometry, laid out by `Tiled`."""
    multiply = product(geometry)

    def matmul(
        a: Any,
        b: Any,
        y: Any,
        table: Any,
        taps: Any,
        panel: Any,
        left: Any,
        edge: Any,
        stage: Any,
        places: Any,
        swapped: int,
        transpose_a: int,
        transpose_b: int,
        rows: int,
        columns: int,
        depth: int,
        begin: int,
        end: int,
    ) -> None:
        memory = (table, taps, panel, left, edge, stage, places)
        one, other = (b, a) if swapped else (a, b)
        flags, blocks = (transpose_a, transpose_b), (rows, columns, depth)
        multiply(one, other, y, left[:0], 0, memory, flags, blocks, (begin, end))

    return matmul


@cache
def matmul_bias_by_tiles(geometry: Geometry) -> Callable[..., None]:
    """`matmul_by_tiles` that adds to a bias, and leaves out what is negative if ``floor`` is not 0."""
    multiply = product(geometry)

    def matmul_bias(
        a: Any,
        b: Any,
        bias: Any,
        y: Any,
        table: Any,
        taps: Any,
        panel: Any,
        left: Any,
        edge: Any,
        stage: Any,
        places: Any,
        floor: int,
        swapped: int,
        transpose_a: int,
        transpose_b: int,
        rows: int,
        columns: int,
        depth: int,
        begin: int,
        end: int,
    ) -> None:
        memory = (table, taps, panel, left, edge, stage, places)
        flags, blocks = (transpose_a, transpose_b), (rows, columns, depth)
        multiply(a, b, y, bias, floor, memory, flags, blocks, (begin, end))

    return matmul_bias


_tiled = Tiled(native())
kernel("matmul", layout=_tiled.layout, local=_tiled.local, dtypes=is_float)(matmul_by_tiles(native()))
kernel("matmul_bias", layout=_tiled.layout, local=_tiled.local, dtypes=is_float)(matmul_bias_by_tiles(native()))
host_only("matmul_bias")


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
