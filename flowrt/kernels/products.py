"""How a product of matrices is computed on register tiles: which blocks of the result are units, and what is packed.

Operands are seen as [batch, batch, rows, columns], where a batch of one stands for every one. A unit of work is a block
of the result. Its terms are summed a slab of ``depth`` at a time. Of a slab, ``near`` rows of the left operand stay in
a core's second cache while one column panel of the right operand after another meets them, and each panel stays in the
first one (Goto and van de Geijn, 2008; Van Zee and van de Geijn, 2015). Rows are read where they lie if they are few
enough to stay near; those of a transposed left operand, and many long ones, are gathered first. A single column is
computed as a single row of the transposed product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels import micro
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry
from flowrt.kernels.panels import (
    PIECE,
    address,
    banding,
    duplicating,
    packing,
    panelling,
    repeat_last,
    stage,
    table_size,
)
from flowrt.kernels.table import Call, View, jitable
from flowrt.spec import Spec
from flowrt.valueclass import valueclass

NEAR = 3 << 16  # bytes of left rows that one panel after another meets: they leave room for panels in a second cache
SLAB = 1 << 22  # bytes of panels that are met by rows after rows: they stay in the last cache
DEEP = 1536  # terms of a slab at most: a tile loads and stores sums once for so many
ROWS, UNITS = 48, 8  # a unit has no fewer rows than pay for packing, but there should be some units to share
SHARED = 1 << 20  # multiply-adds of a product whose right operand is packed by all for all, in a step of its own
PANELS = 4  # column panels that are packed together: so many lines of a row are side by side, rows on other pages
DIRECT = 256  # rows of the right operand, far apart, that a few tiles read as well as packed ones
LONG = 4  # column panels that a lone row is multiplied with at a time, unpacked: pages are far apart, lines are not


def matrices(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """The operands and the result as [batch, batch, rows, columns], and the flags of transposition."""
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


@valueclass
class Blocks:
    """How a product is divided: a unit's ``rows`` and ``columns``, the terms of a slab, the rows that stay near.

    Those are copied if they are ``gathered``. If panels are ``shared`` a step of its own packs the right operand.
    """

    rows: int
    columns: int
    depth: int
    near: int
    gathered: bool = False
    shared: bool = False


def blocked(m: int, n: int, k: int, transposed: bool, size: int, geometry: Geometry) -> Blocks:
    """How an [m, n] product of ``k`` terms of ``size`` bytes is divided."""
    wide, most, depth = geometry.columns(np.float32), geometry.rows, _share(k, DEEP)
    if m == 1 and not transposed:
        return Blocks(1, max(wide * LONG, -(-n // UNITS)), _share(k, DEEP), 1)
    fits = max(NEAR // (depth * size) // most, 1) * most
    least = -(-max(-(-m // UNITS), ROWS) // most) * most
    near, panels = min(fits, least), -(-n // wide)
    if (transposed or (m > 6 * fits and panels > PANELS)) and m * n * k >= SHARED:
        over = max(-(-n * depth * size // SLAB), UNITS // -(-m // near), 1)
        rows = near * max(over * -(-m // near) // UNITS, 1)
        columns = wide * -(-panels // over)
        return Blocks(rows, columns, depth, near, gathered=True, shared=True)
    together = min(max(panels // UNITS, 1), PANELS)
    if transposed:
        return Blocks(near, wide * PANELS, depth, near, gathered=True)
    rows = _share(m, max(min(6 * fits, m * panels // UNITS), ROWS))
    return Blocks(rows, wide * together, depth, rows)


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
    """How matmul is laid out for tiles of one geometry: two steps' views, words and units, scratch and local memory."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def packing(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: some panels of a shared right operand are a unit; none if it is not shared."""
        call, swapped = self._product(inputs, outputs, attrs)
        panels = -(-call.views[2].shape[3] // (PANELS * self.geometry.columns(outputs[0].dtype)))
        units = math.prod(call.views[1].shape[:2]) * panels if self._blocks(call, swapped, outputs).shared else 0
        return replace(self.layout(inputs, outputs, attrs), units=units)

    def layout(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: a block of the result is a unit."""
        call, swapped = self._product(inputs, outputs, attrs)
        m, n = call.views[2].shape[2:]
        blocks = self._blocks(call, swapped, outputs)
        units = math.prod(call.views[2].shape[:2]) * -(-m // blocks.rows) * -(-n // blocks.columns)
        views = (*call.views[:2], *(View.dense(s.concrete) for s in inputs[2:]), call.views[2])
        extra = *self.scratch(inputs, outputs, attrs), *self.local(inputs, outputs, attrs)
        floor = (int(attrs["activation"] == "relu"),) if "activation" in attrs else ()
        words = *floor, int(swapped), *call.words, *(int(n) for n in astuple(blocks))
        views = (*views, *(View.dense(s.concrete) for s in extra))
        return Call(views, words, units, (m, n, blocks.rows) if blocks.columns >= n else None)

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The panels of a shared right operand, slab by slab."""
        call, swapped = self._product(inputs, outputs, attrs)
        wide, (*batch, rows, columns) = self.geometry.columns(outputs[0].dtype), call.views[1].shape
        k, n = (columns, rows) if call.words[1] else (rows, columns)
        shared = self._blocks(call, swapped, outputs).shared
        return (Spec(outputs[0].dtype, (math.prod(batch) * k * -(-n // wide) * wide if shared else 0,)),)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The table and the one tap, column panels, the gathered rows, one panel's biases, the stage."""
        call, swapped = self._product(inputs, outputs, attrs)
        blocks, dtype = self._blocks(call, swapped, outputs), outputs[0].dtype
        wide, most = self.geometry.columns(dtype), self.geometry.rows
        panels = 0 if blocks.shared else 1 if blocks.rows == 1 else -(-blocks.columns // wide)
        left = (blocks.depth + 1) * (-(-blocks.near // most) + 1) * most if blocks.gathered else 0
        table = Spec("int64", (table_size(self.geometry, blocks.near),))
        packed = Spec(dtype, (blocks.depth * panels * wide,)), Spec(dtype, (left,)), Spec(dtype, (wide,))
        return (table, Spec("int64", (2,)), *packed, *stage(self.geometry, dtype))

    def _product(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Call, bool]:
        """The matrices, and whether a column is computed as a row: a bias goes along rows."""
        call = matrices(inputs[:2], outputs, attrs)
        swapped = call.views[2].shape[3] == 1 and len(inputs) == 2
        return (_column_as_row(call) if swapped else call), swapped

    def _blocks(self, call: Call, swapped: bool, outputs: Sequence[Spec]) -> Blocks:
        a, _, y = (view.shape for view in call.views)
        a = call.views[1].shape if swapped else a
        k = a[2] if call.words[0] else a[3]
        return blocked(y[2], y[3], k, bool(call.words[0]), outputs[0].dtype.itemsize, self.geometry)


@cache
def gathering(geometry: Geometry) -> Callable[..., None]:
    """``gather(like, source, step, sizes, deep, target)``: near rows of the left operand, each ``deep`` entries.

    ``sizes`` are how many rows and how many terms.
    """
    duplicate = duplicating(geometry)

    @jitable
    def gather(like: Any, source: int, step: int, sizes: Any, deep: int, target: int) -> None:
        size = like.itemsize
        for r in range(sizes[0]):
            duplicate(like, source + r * step * size, target + r * deep * size, sizes[1])

    return gather


@cache
def turning(geometry: Geometry) -> Callable[..., None]:
    """``turn(like, source, step, sizes, beyond, deep, target)``: near rows of a transposed left operand.

    They become panels of as many rows as a tile has, term by term, with room for ``deep`` terms and one more: vectors
    are written whole, and what is beyond a panel's rows is written over by the next term. ``sizes`` are how many rows
    and how many terms, ``beyond`` how many rows of the operand may be read.
    """
    most, vectors = geometry.rows, geometry.width
    copy = {size: micro.copy(-(-most * size // vectors), vectors) for size in (4, 8)}
    single, double, move = copy[4], copy[8], micro.move()

    @jitable
    def turn(like: Any, source: int, step: int, sizes: Any, beyond: int, deep: int, target: int) -> None:
        rows, depth = sizes
        size = like.itemsize
        lanes = vectors // size
        reach = (most + lanes - 1) // lanes * lanes
        whole = min((rows + most - 1) // most * most, max(beyond - reach + most, 0) // most * most)
        for p in range(0, depth, PIECE):
            count = min(PIECE, depth - p)
            for r in range(0, whole, most):
                here, there = source + (p * step + r) * size, target + (r * (deep + 1) + p * most) * size
                if size == 4:
                    single(like, (here, step, there, most, count))
                else:
                    double(like, (here, step, there, most, count))
        for r in range(whole, rows, most):
            here, there = source + r * size, target + r * (deep + 1) * size
            move(like, (here, step, 1, there, most, depth, min(most, rows - r)))

    return turn


@cache
def lone_rows(geometry: Geometry) -> Callable[..., int]:
    """``lone_row(like, (a, b, c), step, across, table, taps, depth, n, how)``: a row times a matrix, unpacked.

    Computes as many of ``n`` columns as need no packing and answers how many; ``how`` is that of `banding`.
    """
    row = micro.tile(1, LONG * geometry.vectors, geometry.width)
    one_dot, four_dots = micro.dots(1, 2, geometry.width), micro.dots(4, 2, geometry.width)
    full = geometry.vectors * geometry.width

    @jitable
    def lone_row(
        like: Any, at: Any, step: int, across: int, table: Any, taps: Any, depth: int, n: int, how: Any
    ) -> int:
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

    return lone_row


@jitable
def fill(table: Any, rows: int, panel: int, step: int, across: int) -> None:
    """The table of near rows: the left ones ``step`` apart, within panels of ``panel`` rows; their results' rows."""
    half = table.size // 2
    for r in range(rows):
        table[r] = r // panel * panel * step + r % panel
        table[half + r] = r * across
    repeat_last(table, rows)


@jitable
def batch_number(x: Any, outer: int, inner: int) -> Any:
    """Which of its matrices an operand has in a batch; a batch of one stands for every one."""
    return min(outer, x.shape[0] - 1) * x.shape[1] + min(inner, x.shape[1] - 1)


@jitable
def matrix_at(x: Any, outer: int, inner: int) -> Any:
    """Where that begins."""
    return address(x) + batch_number(x, outer, inner) * x.shape[2] * x.shape[3] * x.itemsize


@cache
def meeting(geometry: Geometry) -> Callable[..., None]:
    """``meet(like, (a, b, c), steps, sizes, packed, memory, how)``: rows of a slab times column panels.

    ``steps`` are the left operand's between terms, then the right one's between terms and columns; ``sizes`` how many
    rows, terms and columns. ``kept`` is where all panels are packed already, or 0; ``how`` is that of `banding` for
    the first column.
    """
    pack, band, lone_row = packing(geometry), banding(geometry), lone_rows(geometry)
    most, full, move = geometry.rows, geometry.vectors * geometry.width, micro.move()

    @jitable
    def meet(like: Any, at: Any, steps: Any, sizes: Any, kept: int, memory: Any, how: Any) -> None:
        table, taps, panels, _, edge, stage, places = memory
        a, b, c = at
        a_step, step, across = steps
        rows, depth, columns = sizes
        start, bias, floor = how
        size = like.itemsize
        wide = full // size
        alone = rows == 1 and a_step == 1
        done = lone_row(like, at, step, across, table, taps, depth, columns, how) if alone else 0
        for j in range(done, columns, wide):
            over, b_step, b_here = min(wide, columns - j), step, b + j * across * size
            if kept != 0:
                b_step, b_here = wide, kept + j * depth * size
            elif across != 1 or over < wide or rows > 6 * most or depth > DIRECT:
                b_step, b_here = wide, address(panels)
                pack(like, b + j * across * size, step, across, depth, over, b_here)
            biases = bias + j * size
            if start == START_BIAS and over < wide:  # a tile reads a whole panel's
                move(like, (biases, 0, 1, address(edge), 0, 1, over))
                biases = address(edge)
            where, reach = (a, b_here, c + j * size), (1, depth, a_step, b_step)
            band(like, where, table, rows, taps, reach, over, stage, places, (start, biases, floor))

    return meet


@cache
def multiplying(geometry: Geometry) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of a product, plus ``bias`` (unless that is empty)."""
    gather, turn, meet = gathering(geometry), turning(geometry), meeting(geometry)
    pack_all, most, full = panelling(geometry), geometry.rows, geometry.vectors * geometry.width

    @jitable
    def near_rows(like: Any, source: int, step: int, sizes: Any, beyond: int, memory: Any, how: Any) -> int:
        """Where the left operand's rows of a slab lie, gathered if they are to be."""
        transpose_a, _, deep, _, gathered, _ = how
        left = address(memory[3])
        if transpose_a:
            turn(like, source, step, sizes, beyond, deep, left)
        elif gathered:
            gather(like, source, step, sizes, deep, left)
        return left if gathered else source

    @jitable
    def slab_panels(like: Any, source: int, steps: Any, sizes: Any, memory: Any) -> Any:
        """Where a unit's own column panels of a slab lie, if they are worth packing before they are met."""
        rows, depth, columns = sizes
        if rows == 1 or columns * like.itemsize <= full:
            return 0
        pack_all(like, source, *steps, depth, columns, address(memory[2]))
        return address(memory[2])

    @jitable
    def multiply_block(like: Any, at: Any, steps: Any, sizes: Any, memory: Any, how: Any, ends: Any) -> None:
        """A block of the result, slab by slab.

        ``at`` ends with where shared panels are and how many columns they have, ``steps`` are between rows, ``sizes``
        the rows, how many there are beyond, terms and columns.
        """
        a, b, c, panels, padded = at
        a_across, b_across, n = steps
        rows, beyond, k, columns = sizes
        transpose_a, transpose_b, deep, near, gathered, shared = how
        size, filled = like.itemsize, 0
        step, across = (1, b_across) if transpose_b else (b_across, 1)
        a_step, apart = (most, deep + 1) if transpose_a else (1, deep if gathered else a_across)
        for p in range(0, max(k, 1), deep):
            depth, there = min(deep, k - p), b + p * step * size
            start = START_STORED if p > 0 else (START_BIAS if ends[0] != 0 else START_ZERO)
            last = start, ends[0], ends[1] if p + deep >= k else 0
            if shared:
                kept = panels[0] + (p * padded + panels[1] * depth) * size
            else:
                kept = slab_panels(like, there, (step, across), (rows, depth, columns), memory)
            for i in range(0, rows, near):
                count = min(near, rows - i)
                if count != filled:
                    fill(memory[0], count, a_step, apart, n)
                    filled = count
                source = a + ((p * a_across + i) if transpose_a else (i * a_across + p)) * size
                here = near_rows(like, source, a_across, (count, depth), beyond - i, memory, how)
                where = here, there, c + i * n * size
                meet(like, where, (a_step, step, across), (count, depth, columns), kept, memory, last)

    @jitable
    def multiply(
        a: Any, b: Any, y: Any, bias: Any, floor: int, packed: Any, memory: Any, flags: Any, blocks: Any, units: Any
    ) -> None:
        transpose_a, transpose_b = flags
        rows, columns, deep, near, gathered, shared = blocks
        size, m, n = a.itemsize, y.shape[2], y.shape[3]
        k = a.shape[2] if transpose_a else a.shape[3]
        down, over = (m + rows - 1) // rows, (n + columns - 1) // columns
        wide, taps = full // size, memory[1]
        padded = (n + wide - 1) // wide * wide
        taps[0] = taps[1] = 0
        for unit in range(units[0], units[1]):
            batch, place = unit // (down * over), unit % (down * over)
            outer, inner = batch // y.shape[1], batch % y.shape[1]
            i, j = place // over * rows, place % over * columns
            at = matrix_at(a, outer, inner) + i * (1 if transpose_a else a.shape[3]) * size
            bt = matrix_at(b, outer, inner) + j * (b.shape[3] if transpose_b else 1) * size
            panels = address(packed) + batch_number(b, outer, inner) * k * padded * size, j
            where = at, bt, address(y) + ((batch * m + i) * n + j) * size, panels, padded
            sizes, steps = (min(rows, m - i), m - i, k, min(columns, n - j)), (a.shape[3], b.shape[3], n)
            ends = (address(bias) + j * size if bias.size > 0 else 0), floor
            multiply_block(a, where, steps, sizes, memory, (*flags, deep, near, gathered, shared), ends)

    return multiply


@cache
def sharing(geometry: Geometry) -> Callable[..., None]:
    """``share(b, packed, transposed, deep, units)``: the units [begin, end) of packing a shared right operand."""
    pack_all, full = panelling(geometry), geometry.vectors * geometry.width

    @jitable
    def share(b: Any, packed: Any, transposed: int, deep: int, units: Any) -> None:
        size = b.itemsize
        k, n = (b.shape[3], b.shape[2]) if transposed else (b.shape[2], b.shape[3])
        step, across = (1, b.shape[3]) if transposed else (b.shape[3], 1)
        wide = full // size
        group = PANELS * wide
        groups, padded = (n + group - 1) // group, (n + wide - 1) // wide * wide
        for unit in range(units[0], units[1]):
            batch, j = unit // groups, unit % groups * group
            source, target = (
                address(b) + (batch * k * n + j * across) * size,
                address(packed) + batch * k * padded * size,
            )
            for p in range(0, k, deep):
                depth = min(deep, k - p)
                place = target + (p * padded + j * depth) * size
                pack_all(b, source + p * step * size, step, across, depth, min(group, n - j), place)

    return share
