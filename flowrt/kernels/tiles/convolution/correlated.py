"""How a convolution, and its gradient for the images, is divided for register tiles; `correlation` computes it.

Law: pure; specs in, views, words and memory out. The filters are packed in a step of its own; then one of two steps
does the work: `places` where channels are a tile's columns, `lines` where groups make few channels, so that places are
the columns. The other has no units, and is not even compiled. Both are the same code for all these ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call
from flowrt.kernels.tiles.convolution.lines import LinePlanes, counted, flattened, memory_needed, pays, planes_of
from flowrt.kernels.tiles.convolution.slabs import (
    LINE,
    Roles,
    WindowSteps,
    alike,
    ceiling,
    channels_apart,
    dense,
    forward,
    seen,
    spread_places,
    steps_of,
    tiled_steps,
    to_input,
)
from flowrt.kernels.tiles.micro import tiles_of
from flowrt.kernels.tiles.panels import stage, table_size

if TYPE_CHECKING:
    from flowrt.kernels.tiles.micro import Geometry

PLACES, SEEN = 256, 1 << 16  # places met at a time at most, and the entries that they should see, for a core's cache
WIDE = 64  # places of a row that are met at a time at most: those of several rows see less together
UNITS = 8  # there should be so many units, at least


class ColumnKind(Enum):
    """What a tile's columns are."""

    CHANNELS = "channels"
    APART = "channels with filters of their own"
    LINES = "places"


class Blocks(NamedTuple):
    """A unit: ``panels`` of ``rows`` of some images, in every phase, so many ``columns`` at a time."""

    images: int
    rows: int
    columns: int
    panels: int


class CorrelationKind(NamedTuple):
    """Whether it is the gradient for the images, whether a bias is added, and whether what is negative becomes 0."""

    inverse: int
    biased: int
    floor: int


class CorrelationPlan:
    """How a convolution, or its gradient for the images, is laid out for tiles of one geometry."""

    def __init__(self, geometry: Geometry, *, inverse: bool = False, biased: bool = False) -> None:
        self.geometry, self.inverse, self.biased = geometry, inverse, biased
        self._roles: Roles = to_input if inverse else forward

    def packing(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: a panel of filters is a unit."""
        packed = self._way(inputs, outputs, attrs) is not ColumnKind.LINES
        return self._call(inputs, outputs, attrs, self._panels(inputs, outputs, attrs)[1] if packed else 0)

    def places(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: some panels of some rows of some images are a unit."""
        return self._met(inputs, outputs, attrs, (ColumnKind.CHANNELS, ColumnKind.APART))

    def lines(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The same where places are a tile's columns."""
        return self._met(inputs, outputs, attrs, (ColumnKind.LINES,))

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The packed filters."""
        filters = inputs[1].concrete
        terms, panels = self._panels(inputs, outputs, attrs)
        columns = panels * self.geometry.columns(outputs[0].dtype)
        if self._way(inputs, outputs, attrs) is ColumnKind.LINES:
            columns = 0
        return (Spec(outputs[0].dtype, (filters[0] * filters[1] * terms * columns,)),)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """A slab, one panel's biases, the table, the taps that rows and columns see, pairs of taps, the stage."""
        tall, wide = inputs[1].concrete[:2]
        dtype, geometry = outputs[0].dtype, self.geometry
        slab, rows = self._slab(inputs, outputs, attrs)
        table = Spec("int64", (table_size(geometry, max(rows, 1)),))
        reached = Spec("int64", (2 * tall,)), Spec("int64", (2 * wide,)), Spec("int64", (2 * tall * wide,))
        return (Spec(dtype, (slab,)), Spec(dtype, (geometry.columns(dtype),)), table, *reached, *stage(geometry, dtype))

    def _slab(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int]:
        """Entries of a slab, and rows of a table."""
        x, filters, _ = self._roles(inputs, outputs)
        steps, blocks, way = steps_of(x, filters, attrs), *self._divided(inputs, outputs, attrs)
        columns, channels = self.geometry.columns(outputs[0].dtype), inputs[0].concrete[3]
        lanes = columns // self.geometry.vectors
        if way is ColumnKind.LINES:
            planes = self._planes(inputs, outputs, attrs, blocks.rows, blocks.columns)
            share, places = outputs[0].concrete[3] // attrs["groups"], (blocks.rows, blocks.columns)
            return memory_needed(channels, share, places, planes, self._places_wide(outputs[0]), lanes), share
        tall, wide = filters.concrete[:2]
        _, height = seen(blocks.rows, tall, steps.down, steps.spread_down, steps.top, self.inverse)
        _, width = seen(blocks.columns, wide, steps.across, steps.spread_across, steps.left, self.inverse)
        if way is ColumnKind.APART:
            channels = ceiling(channels, columns) * columns
        return blocks.images * height * width * channels, blocks.images * blocks.rows * blocks.columns

    def _call(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], units: int) -> Call:
        (x, filters, _), (blocks, way) = self._roles(inputs, outputs), self._divided(inputs, outputs, attrs)
        extra = *self.scratch(inputs, outputs, attrs), *self.local(inputs, outputs, attrs)
        kind = CorrelationKind(int(self.inverse), int(self.biased), int(attrs.get("activation") == "relu"))
        words = *tiled_steps(x, filters, attrs), *blocks, *kind
        geometry = flattened(self.geometry) if way is ColumnKind.LINES else self.geometry
        tiles = tiles_of(geometry, outputs[0].dtype, "beside" if way is ColumnKind.APART else "tile")
        first = len(inputs)  # the result; behind it lie the packed filters, the slab, and one panel's biases
        order = 0, 1, 2 if self.biased else first + 3, *range(first, first + 1 + len(extra))
        return Call(dense((*inputs, *outputs, *extra)), words, units, tiles=tiles, order=order)

    def _met(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], ways: tuple[ColumnKind, ...]
    ) -> Call:
        blocks, chosen = self._divided(inputs, outputs, attrs)
        if chosen not in ways:
            return self._call(inputs, outputs, attrs, 0)
        batch, height, _ = self._grid(inputs, outputs, attrs)
        panels = self._panels(inputs, outputs, attrs)[1]
        units = ceiling(batch, blocks.images) * ceiling(height, blocks.rows) * ceiling(panels, blocks.panels)
        call = self._call(inputs, outputs, attrs, units)
        return call if blocks.panels < panels else replace(call, rows=self._rows(inputs, outputs, attrs, blocks))

    def _panels(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int]:
        """Terms of a tap in a group, and column panels of all groups."""
        wide, groups = self.geometry.columns(outputs[0].dtype), attrs["groups"]
        if channels_apart(inputs[1], groups):
            return 1, ceiling(groups, wide)
        depth, share = inputs[1].concrete[2], inputs[1].concrete[3] // groups
        terms, columns = (share, depth) if self.inverse else (depth, share)
        return terms, groups * ceiling(columns, wide)

    def _rows(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], blocks: Blocks
    ) -> tuple[int, int, int]:
        """Which rows of the result a unit makes, as `Call.rows` says it."""
        (apart, _), _ = spread_places(self._steps(inputs, outputs, attrs), self.inverse)
        batch, height, width, channels = outputs[0].concrete
        row = width * channels
        if blocks.images > 1:
            return batch * height, row, blocks.images * height
        return height, row, blocks.rows * apart

    def _steps(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> WindowSteps:
        x, filters, _ = self._roles(inputs, outputs)
        return steps_of(x, filters, attrs)

    def _grid(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int, int]:
        """Images, rows and columns of the places of the first phase."""
        apart, _ = spread_places(self._steps(inputs, outputs, attrs), self.inverse)
        batch, height, width, _ = outputs[0].concrete
        return batch, ceiling(height, apart[0]), ceiling(width, apart[1])

    def _divided(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]
    ) -> tuple[Blocks, ColumnKind]:
        way = self._way(inputs, outputs, attrs)
        divide = self._line_blocks if way is ColumnKind.LINES else self._blocks
        return divide(inputs, outputs, attrs), way

    def _blocks(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Blocks:
        batch, height, width = self._grid(inputs, outputs, attrs)
        places = min(max(SEEN // max(inputs[0].concrete[3], 1), PLACES // 4), PLACES)
        columns = alike(width, WIDE)
        rows = alike(height, max(places // columns, 1))
        whole = rows == height and columns == width
        images = max(min(ceiling(batch, UNITS), places // max(rows * columns, 1)), 1) if whole else 1
        units, (_, panels) = ceiling(batch, images) * ceiling(height, rows), self._panels(inputs, outputs, attrs)
        shares = max(min(ceiling(UNITS, max(units, 1)), panels), 1)
        return Blocks(images, rows, columns, max(ceiling(panels, shares), 1))

    def _line_blocks(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Blocks:
        """As many rows as a slab should hold, but so that there are some units; columns where one row is too much."""
        batch, height, width = self._grid(inputs, outputs, attrs)
        most = SEEN // max(inputs[0].concrete[3], 1)  # places seen
        columns = alike(width, max(most // max(self._planes(inputs, outputs, attrs, 1, 1).height, 1), WIDE))
        one, two = (self._planes(inputs, outputs, attrs, n, columns) for n in (1, 2))
        fitting = (most // max(one.width, 1) - one.height) // max(two.height - one.height, 1) + 1
        rows = alike(height, max(min(fitting, ceiling(height, ceiling(UNITS, max(batch, 1)))), 1))
        whole = rows == height and columns == width
        images = max(min(ceiling(batch, UNITS), PLACES // max(rows * columns, 1)), 1) if whole else 1
        return Blocks(images, rows, columns, max(self._panels(inputs, outputs, attrs)[1], 1))

    def _places_wide(self, result: Spec) -> int:
        return flattened(self.geometry).columns(result.dtype)

    def _planes(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], rows: int, columns: int
    ) -> LinePlanes:
        window, line = inputs[1].concrete[:2], LINE // outputs[0].dtype.itemsize
        return LinePlanes(*planes_of(rows, columns, window, self._steps(inputs, outputs, attrs), self.inverse, line))

    def _way(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> ColumnKind:
        groups, (tall, wide, _, _) = attrs["groups"], inputs[1].concrete
        if channels_apart(inputs[1], groups):
            return ColumnKind.APART
        blocks = self._line_blocks(inputs, outputs, attrs)
        places = blocks.rows * blocks.columns
        if places == 0 or inputs[0].size == 0:
            return ColumnKind.CHANNELS
        planes, steps = self._planes(inputs, outputs, attrs, *blocks[1:3]), self._steps(inputs, outputs, attrs)
        phases = steps.down * steps.across if self.inverse else 1
        computed = counted(blocks.rows, blocks.columns, planes, self._places_wide(outputs[0]))
        few = pays(
            self.geometry,
            outputs[0].dtype.itemsize,
            self._panels(inputs, outputs, attrs)[0],
            tall * wide / phases,
            outputs[0].concrete[3] // groups,
            planes.height * planes.width / (places * phases),
            computed / places,
        )
        return ColumnKind.LINES if few else ColumnKind.CHANNELS
