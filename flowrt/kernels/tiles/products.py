"""How a product of matrices is divided for register tiles: which blocks of the result are units, and what is packed.

Law: pure; sizes in, views, words and memory out. `flowrt.kernels.tiles.multiplying` computes what is laid out here.

Operands are seen as [batch, batch, rows, columns], where a batch of one stands for every one. A unit of work is a block
of the result. Its terms are summed a slab of ``depth`` at a time. Of a slab, ``near`` rows of the left operand stay in
a core's second cache while one column panel of the right operand after another meets them, and each panel stays in the
first one (Goto and van de Geijn, 2008; Van Zee and van de Geijn, 2015). Rows are read where they lie; those of a
transposed left operand are turned around first. Every unit packs its panels for itself, unless they all fit the last
cache and turned rows meet all of them: then a step of its own packs them. A single column is computed as a single row
of the transposed product, and a product of few numbers without tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace, valueclass
from flowrt.kernels.language.table import Call, View
from flowrt.kernels.tiles.micro import Tile, tiles_of
from flowrt.kernels.tiles.panels import stage, table_size

if TYPE_CHECKING:
    from flowrt.kernels.tiles.micro import Geometry

NEAR = 3 << 16  # bytes of left rows that one panel after another meets: they leave room for panels in a second cache
SLAB = 1 << 22  # bytes of panels that are met by rows after rows: they stay in the last cache
DEEP = 1536  # terms of a slab at most: a tile loads and stores sums once for so many
LARGE_DEEP, TRANSPOSED_DEEP = (
    1024,
    384,
)  # those of large products: few terms let many rows of a transposed operand be near
PACKING, TRANSPOSING, READING = (
    16,
    24,
    6,
)  # multiply-adds in whose time an entry is packed, turned, read from further away
ROWS, UNITS = 48, 8  # a unit has no fewer rows than pay for packing, but there should be some units to share
MANY, EVEN = 3 * UNITS, 4  # units of a large product, which are best a multiple of some: so threads end together
SHARED = 1 << 20  # multiply-adds of a product whose right operand is packed by all for all, in a step of its own
TINY = 128  # multiply-adds of a product that takes less time one by one than to be laid out for tiles
PANELS = 4  # column panels that are packed together: so many lines of a row are side by side, rows on other pages
EDGE = 4  # which of a thread's own operands are one panel's biases
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
    views = [View.dense((*batch, *shape)) for batch, shape in zip(batches, shapes, strict=True)]
    return Call(tuple(views), flags) if len(batches[0]) == 2 else _repeated(views, flags)


def _repeated(views: Sequence[View], flags: tuple[int, int]) -> Call:
    """Where operands broadcast in turns, more than twice: what lacks some of all batches but the last is copied."""
    *outer, last, m, n = views[2].shape
    seen = [view.broadcast_to((*outer, *view.shape[-3:])) for view in views[:2]]
    copied = tuple((math.prod(outer), *view.shape[-3:]) for view in seen)
    seen = [View.dense(shape) if view.contiguous else view for view, shape in zip(seen, copied, strict=True)]
    return Call((*seen, View.dense((math.prod(outer), last, m, n))), flags, copied=copied)


def _as_copied(call: Call) -> Call:
    """The same product of operands that were copied."""
    dense = [View.dense(shape) for shape in call.copied]
    return Call((*dense, call.views[2]), call.words) if dense else call


def _batches(left: tuple[int, ...], right: tuple[int, ...]) -> list[list[int]]:
    """The batch sizes of both operands and the result, neighbours that broadcast alike made one: at least two of each.

    More are rare: operands that broadcast in turns.
    """
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
    merged = [[1, 1, 1]] * (2 - len(merged)) + merged
    return [[group[i] for group in merged] for i in range(3)]


@valueclass
class ProductBlocks:
    """How a product is divided: a unit's ``rows`` and ``columns``, the terms of a slab, the rows that stay near.

    If panels are ``shared`` a step of its own packs the right operand; what is ``tiny`` is computed without tiles.
    """

    rows: int
    columns: int
    depth: int
    near: int
    shared: bool = False
    tiny: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        return self.rows, self.columns, self.depth, self.near, int(self.shared)


def blocked(m: int, n: int, k: int, transposed: bool, size: int, geometry: Geometry) -> ProductBlocks:
    """How an [m, n] product of ``k`` terms of ``size`` bytes is divided."""
    wide, most, depth = geometry.columns(np.float32), geometry.rows, _share(k, DEEP)
    if m * n * k <= TINY:
        return ProductBlocks(max(m, 1), max(n, 1), max(k, 1), 1, tiny=True)
    if m == 1 and not transposed:
        return ProductBlocks(1, max(wide * LONG, -(-n // UNITS)), _share(k, DEEP), 1)
    fits = max(NEAR // (depth * size) // most, 1) * most
    least = -(-max(-(-m // UNITS), ROWS) // most) * most
    near, panels = min(fits, least), -(-n // wide)
    if transposed and m * n * k >= SHARED and k <= DEEP and k * n * size <= SLAB:
        near = -(-_share(m, near) // most) * most
        down = -(-m // near)
        over = max(UNITS // down, 1)
        rows = near * _share(down, max(over * down // MANY, 1))
        return ProductBlocks(rows, wide * -(-panels // over), depth, near, shared=True)
    if (transposed or (m > 6 * fits and panels > PANELS)) and m * n * k >= SHARED:
        return _large(m, n, k, transposed, size, geometry)
    together = min(max(panels // UNITS, 1), PANELS)
    if transposed:
        return ProductBlocks(near, wide * PANELS, depth, near)
    rows = _share(m, max(min(6 * fits, m * panels // UNITS), ROWS))
    near = min(-(-_share(rows, max(fits, ROWS)) // most) * most, rows)
    return ProductBlocks(rows, wide * together, depth, near)


@lru_cache(256)
def _large(m: int, n: int, k: int, transposed: bool, size: int, geometry: Geometry) -> ProductBlocks:
    """Blocks that pack for themselves, so that nobody waits: tall ones pack seldom, wide ones turn or read rows seldom.

    Of the forms with some units to share, the one that costs the fewest multiply-adds for each of the ``k`` terms.
    """
    wide, most = geometry.columns(np.float32), geometry.rows
    depth, left = (_share(k, TRANSPOSED_DEEP), TRANSPOSING) if transposed else (_share(k, LARGE_DEEP), READING)

    def cost(form: tuple[int, int]) -> int:
        rows, columns = form
        down, over = -(-m // rows), -(-n // columns)
        computed = -(-down * over // EVEN) * EVEN * rows * columns
        return computed + n * down * PACKING + m * over * left

    forms = [
        (most * -(-m // (down * most)), wide * -(-n // (over * wide)))
        for down in range(1, MANY + 1)
        for over in range(-(-UNITS // down), MANY // down + 1)
    ]
    rows, columns = min((form for form in forms if form[1] * depth * size <= SLAB // 2), key=cost, default=forms[0])
    near = most * -(-_share(rows, max(NEAR // (depth * size), ROWS)) // most)
    return ProductBlocks(rows, columns, depth, near)


def _share(whole: int, most: int) -> int:
    """The size of equal parts of ``whole``, none larger than ``most``."""
    return -(-whole // max(-(-whole // most), 1)) or 1


def _column_as_row(call: Call) -> Call:
    """The same product with the result's only column as a row: the transposed operands, the right one first."""
    left, right, out = call.views
    flags = call.words
    row = right.reshape((*right.shape[:2], 1, right.shape[2] * right.shape[3]))
    return Call((left, row, out.reshape((*out.shape[:2], 1, out.shape[2]))), (0, 1 - int(flags[0])))


@valueclass
class _Laid:
    """A product as it is divided: its matrices as they are computed, and what its steps have in common."""

    product: Call
    blocks: ProductBlocks
    scratch: tuple[Spec, ...]
    local: tuple[Spec, ...]
    step: Call  # for its factors, the bias (or what stands for it), the packed panels, the result, `local`


class Tiled:
    """How matmul is laid out for tiles of one geometry: two steps' views, words and units, scratch and local memory."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def packing(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: some panels of a shared right operand are a unit; none if it is not shared."""
        laid = self._laid(inputs, outputs, attrs)
        _, right, out = laid.product.views
        panels = -(-out.shape[3] // (PANELS * self.geometry.columns(outputs[0].dtype)))
        units = math.prod(right.shape[:2]) * panels if laid.blocks.shared else 0
        return replace(laid.step, units=units, order=(laid.step.order[1], laid.step.order[3]))

    def layout(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: a block of the result is a unit."""
        laid = self._laid(inputs, outputs, attrs)
        blocks, (*batch, m, n) = laid.blocks, laid.product.views[2].shape
        units = 0 if blocks.tiny else math.prod(batch) * -(-m // blocks.rows) * -(-n // blocks.columns)
        return replace(laid.step, units=units, rows=(m, n, blocks.rows) if blocks.columns >= n else None)

    def tiny(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The step that takes the place of both where a product is tiny: a product is a unit."""
        laid = self._laid(inputs, outputs, attrs)
        step, (*batch, m, n) = laid.step, laid.product.views[2].shape
        units, order = math.prod(batch) if laid.blocks.tiny else 0, (*step.order[:3], step.order[4])
        return replace(step, words=step.words[:4], units=units, rows=(m, n, max(m, 1)), tiles=(), order=order)

    def tiles(self, dtype: Any) -> tuple[int | Tile, ...]:
        """What products call: `micro.Tiles` and `multiplying.Tools`."""
        return _tiles(self.geometry, np.dtype(dtype))

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The panels of a shared right operand, slab by slab."""
        return self._laid(inputs, outputs, attrs).scratch

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The table and the one tap, column panels, the turned rows, one panel's biases, the stage."""
        return self._laid(inputs, outputs, attrs).local

    def _laid(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> _Laid:
        flags, floor = (attrs["transpose_a"], attrs["transpose_b"]), attrs.get("activation") == "relu"
        return _lay_out(self.geometry, tuple([spec.concrete for spec in inputs]), outputs[0].dtype, flags, floor)


@cache
def _tiles(geometry: Geometry, dtype: np.dtype[Any]) -> tuple[int | Tile, ...]:
    width, name, rows = geometry.width, str(dtype), geometry.rows * dtype.itemsize
    row = Tile("tile", 1, LONG * geometry.vectors, width, name)
    dots = (Tile("dots", count, 2, width, name) for count in (1, 4))
    return (*tiles_of(geometry, dtype), row, *dots, Tile("copy", 1, -(-rows // width), width, name))


@lru_cache(256)  # the steps, scratch and local memory of one application are asked for one by one
def _lay_out(
    geometry: Geometry,
    operands: tuple[tuple[int, ...], ...],
    dtype: np.dtype[Any],
    flags: tuple[bool, bool],
    floor: bool,
) -> _Laid:
    biased, tiled = len(operands) > 2, Tiled(geometry)
    asked = {"transpose_a": flags[0], "transpose_b": flags[1]}
    given = matrices([Spec(dtype, dims) for dims in operands[:2]], (), asked)
    product = _as_copied(given)
    swapped = product.views[2].shape[3] == 1 and not biased  # a column is computed as a row; a bias goes along rows
    product = _column_as_row(product) if swapped else product
    blocks = _blocks_of(product, swapped, dtype, geometry)
    scratch, local = _scratch(product, blocks, dtype, geometry), _local(product, blocks, dtype, geometry)
    first, extra = len(operands), (*scratch, *local)
    pairs = zip(given.views, product.views[:2], strict=False)
    seen = [view if old.contiguous else old for old, view in pairs]  # the others are copied into that shape
    views = (*seen, *map(View.dense, operands[2:]), product.views[2], *(View.dense(s.concrete) for s in extra))
    places = range(first + 2, first + 1 + len(extra))
    factors = (1, 0) if swapped else (0, 1)
    step = Call(
        views,
        (int(floor), int(biased), *product.words, *blocks.words),
        tiles=tiled.tiles(dtype),
        order=(*factors, 2 if biased else places[EDGE], first + 1, first, *places),
        copied=tuple(view.shape for view in product.views[:2]),
    )
    return _Laid(product, blocks, scratch, local, step)


def _blocks_of(product: Call, swapped: bool, dtype: np.dtype[Any], geometry: Geometry) -> ProductBlocks:
    left, right, (*_, m, n) = (view.shape for view in product.views)
    a, transposed = right if swapped else left, bool(product.words[0])
    return blocked(m, n, a[2] if transposed else a[3], transposed, dtype.itemsize, geometry)


def _scratch(product: Call, blocks: ProductBlocks, dtype: np.dtype[Any], geometry: Geometry) -> tuple[Spec, ...]:
    wide, (*batch, rows, columns) = geometry.columns(dtype), product.views[1].shape
    k, n = (columns, rows) if product.words[1] else (rows, columns)
    return (Spec(dtype, (math.prod(batch) * k * -(-n // wide) * wide if blocks.shared else 0,)),)


def _local(product: Call, blocks: ProductBlocks, dtype: np.dtype[Any], geometry: Geometry) -> tuple[Spec, ...]:
    wide, most = geometry.columns(dtype), geometry.rows
    panels = 0 if blocks.shared else 1 if blocks.rows == 1 else -(-blocks.columns // wide)
    left = (blocks.depth + 1) * (-(-blocks.near // most) + 1) * most if product.words[0] else 0
    table = Spec("int64", (table_size(geometry, blocks.near),))
    packed = Spec(dtype, (blocks.depth * panels * wide,)), Spec(dtype, (left,)), Spec(dtype, (wide,))
    return (table, Spec("int64", (2,)), *packed, *stage(geometry, dtype))
