"""A convolution, and its gradient for the images, on register tiles: patches are read where they lie.

A product's rows are places of the result, its terms the taps of the window times the channels. A unit copies what its
places see into a slab (unless nothing of it is padding), and the table of rows points into that. The filters are packed
into column panels first, in a step of its own. The gradient for the images is a convolution too, of the result's
gradient with turned filters, phase by phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flowrt.kernels.micro import START_BIAS, START_ZERO, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.slabs import (
    Roles,
    channels_apart,
    dense,
    forward,
    reached,
    seen_by_earlier,
    slabs,
    steps_of,
    tiled_steps,
    to_input,
)
from flowrt.kernels.table import Call, jitable
from flowrt.spec import Spec

PLACES, SEEN = 256, 1 << 16  # places of a unit at most, and the entries that they should see, for a core's cache
UNITS = 8  # so many units, at least, share small images


class Correlated:
    """How a convolution, or its gradient for the images, is laid out for tiles of one geometry."""

    def __init__(self, geometry: Geometry, *, inverse: bool) -> None:
        self.geometry, self.inverse = geometry, inverse
        self._roles: Roles = to_input if inverse else forward

    def packing(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: a panel of filters is a unit."""
        return self._call(inputs, outputs, attrs, self._panels(inputs, outputs, attrs)[1])

    def places(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: some rows of places of some images, in one phase, are a unit."""
        x, filters, _ = self._roles(inputs, outputs)
        down, across, *_ = steps_of(x, filters, attrs)
        images, rows = self._blocks(inputs, outputs, attrs)
        batch, height, _, _ = outputs[0].concrete
        phases = down * across if self.inverse else 1
        height = -(-height // down) if self.inverse else height
        return self._call(inputs, outputs, attrs, phases * -(-batch // images) * -(-height // rows))

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """The packed filters."""
        filters = inputs[1].concrete
        terms, panels = self._panels(inputs, outputs, attrs)
        columns = panels * self.geometry.columns(outputs[0].dtype)
        return (Spec(outputs[0].dtype, (filters[0] * filters[1] * terms * columns,)),)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """A slab, one panel's biases, the table, the taps that rows and columns see, pairs of taps, the stage."""
        x, filters, _ = self._roles(inputs, outputs)
        down, across, spread_down, spread_across, *_ = steps_of(x, filters, attrs)
        images, rows = self._blocks(inputs, outputs, attrs)
        tall, wide = filters.concrete[:2]
        width, channels = outputs[0].concrete[2], inputs[0].concrete[3]
        high, broad = (tall - 1) * spread_down, (wide - 1) * spread_across
        if self.inverse:
            width = -(-width // across)
            seen = (rows + high // down) * (width + broad // across)
        else:
            seen = ((rows - 1) * down + high + 1) * (max(width - 1, 0) * across + broad + 1)
        dtype, geometry = outputs[0].dtype, self.geometry
        beyond = geometry.columns(dtype)  # what a panel may read beside the last place's channels
        slab = Spec(dtype, (images * seen * channels + beyond,))
        edge = Spec(dtype, (geometry.columns(dtype),))
        table = Spec("int64", (table_size(geometry, max(images * rows * width, 1)),))
        reached = Spec("int64", (2 * tall,)), Spec("int64", (2 * wide,)), Spec("int64", (2 * tall * wide,))
        return (slab, edge, table, *reached, *stage(geometry, dtype))

    def _call(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], units: int) -> Call:
        x, filters, _ = self._roles(inputs, outputs)
        extra = *self.scratch(inputs, outputs, attrs), *self.local(inputs, outputs, attrs)
        floor = (int(attrs["activation"] == "relu"),) if "activation" in attrs else ()
        words = *tiled_steps(x, filters, attrs), *self._blocks(inputs, outputs, attrs), *floor
        return Call(dense((*inputs, *outputs, *extra)), words, units)

    def _panels(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int]:
        """Terms of a tap in a group, and column panels of all groups."""
        wide, groups = self.geometry.columns(outputs[0].dtype), attrs["groups"]
        if channels_apart(inputs[1], groups):
            return 1, -(-groups // wide)
        depth, share = inputs[1].concrete[2], inputs[1].concrete[3] // groups
        terms, columns = (share, depth) if self.inverse else (depth, share)
        return terms, groups * -(-columns // wide)

    def _blocks(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int]:
        """Images and rows of places of a unit."""
        x, filters, _ = self._roles(inputs, outputs)
        down, across, *_ = steps_of(x, filters, attrs) if self.inverse else (1, 1)
        batch, height, width, _ = outputs[0].concrete
        height, width = max(-(-height // down), 1), max(-(-width // across), 1)
        places = min(max(SEEN // max(inputs[0].concrete[3], 1), PLACES // 4), PLACES)
        if height * width < places // 2:
            return max(min(-(-batch // UNITS), places // (height * width)), 1), height
        return 1, min(max(places // width, 1), height)


@cache
def filter_packing(geometry: Geometry, inverse: bool) -> Callable[..., None]:
    """The helper that packs the filters' panels [begin, end), of every phase."""
    pack, full = packing(geometry), geometry.vectors * geometry.width

    @jitable
    def pack_filters(filters: Any, packed: Any, down_taps: Any, across_taps: Any, steps: Any, units: Any) -> None:
        tall, wide, depth, outputs = filters.shape
        alone, groups = steps[6] == 0, max(steps[6], 1)
        size, share = filters.itemsize, outputs // groups
        columns = full // size
        turned = inverse and not alone
        terms, count = (share, depth) if turned else (depth, share)
        step, across = (1, outputs) if turned else (outputs, 1)
        panels = (count + columns - 1) // columns
        for unit in range(units[0], units[1]):
            group, first = unit // panels, unit % panels * columns
            before = 0
            for phase in range(steps[0] * steps[1] if inverse else 1):
                rows = reached(tall, steps[0], steps[2], steps[4], phase // steps[1], inverse, down_taps)
                over = reached(wide, steps[1], steps[3], steps[5], phase % steps[1], inverse, across_taps)
                target = (before * groups * panels + unit * rows * over) * terms * columns
                for i in range(rows):
                    for j in range(over):
                        source = (down_taps[2 * i] * wide + across_taps[2 * j]) * depth * outputs
                        source += group * share + first * across
                        place = address(packed) + (target + (i * over + j) * terms * columns) * size
                        near = address(filters) + source * size
                        pack(filters, near, step, across, terms, min(columns, count - first), place)
                before += rows * over

    return pack_filters


@cache
def correlating(geometry: Geometry, inverse: bool) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of a convolution from packed filters."""
    band, band_apart, fill_slab = banding(geometry), banding(geometry, apart=True), slabs(geometry)
    full = geometry.vectors * geometry.width

    @jitable
    def correlate(
        source: Any,
        filters: Any,
        bias: Any,
        floor: int,
        y: Any,
        packed: Any,
        memory: Any,
        steps: Any,
        blocks: Any,
        units: Any,
    ) -> None:
        slab, edge, table, down_taps, across_taps, taps, stage, places = memory
        size, alone, groups = y.itemsize, steps[6] == 0, max(steps[6], 1)
        window, columns = (filters.shape[0], filters.shape[1]), full // size
        channels, outputs = source.shape[3], y.shape[3]
        terms, count = 1 if alone else channels // groups, outputs // groups
        panels = (count + columns - 1) // columns
        stride = (1, 1) if inverse else (steps[0], steps[1])
        apart = (steps[0], steps[1]) if inverse else (1, 1)
        height, half = (y.shape[1] + apart[0] - 1) // apart[0], table.size // 2
        image_blocks, row_blocks = (y.shape[0] + blocks[0] - 1) // blocks[0], (height + blocks[1] - 1) // blocks[1]
        for unit in range(units[0], units[1]):
            phase, block = unit // (image_blocks * row_blocks), unit % (image_blocks * row_blocks)
            down, right = phase // apart[1], phase % apart[1]
            before = seen_by_earlier(window, steps, phase, down_taps, across_taps) if inverse else 0
            tall = reached(window[0], steps[0], steps[2], steps[4], down, inverse, down_taps)
            wide = reached(window[1], steps[1], steps[3], steps[5], right, inverse, across_taps)
            image, top = block // row_blocks * blocks[0], block % row_blocks * blocks[1]
            images = min(blocks[0], y.shape[0] - image)
            rows = min(blocks[1], (y.shape[1] - down + apart[0] - 1) // apart[0] - top)
            across = (y.shape[2] - right + apart[1] - 1) // apart[1]
            if rows <= 0 or across <= 0:
                continue
            high = broad = first = left = 0
            if tall > 0 and wide > 0:
                first, high = down_taps[1], down_taps[2 * tall - 1] - down_taps[1]
                left, broad = across_taps[1], across_taps[2 * wide - 1] - across_taps[1]
            at, sees = (first + top * stride[0], left), ((rows - 1) * stride[0] + high + 1, 0)
            sees = (sees[0], (across - 1) * stride[1] + broad + 1)
            inside = at[0] >= 0 and at[0] + sees[0] <= source.shape[1] and left >= 0
            inside = inside and left + sees[1] <= source.shape[2]
            inside = inside and (not alone or channels % columns == 0)  # else a panel reads beside the last place
            if inside:
                row, whole = source.shape[2] * channels, source.shape[1] * source.shape[2] * channels
                a = address(source) + (image * whole + at[0] * row + left * channels) * size
            else:
                row, whole, a = sees[1] * channels, sees[0] * sees[1] * channels, address(slab)
                if tall * wide > 0:
                    fill_slab(source, image, images, at, sees, slab)
            r = 0
            for n in range(images):
                for i in range(rows):
                    here = (n * y.shape[1] + i * apart[0]) * y.shape[2] * outputs
                    for j in range(across):
                        table[r] = n * whole + i * stride[0] * row + j * stride[1] * channels
                        table[half + r] = here + j * apart[1] * outputs
                        r += 1
            repeat_last(table, r)
            # side by side in the slab, the taps of a row are one
            joined = groups == 1 and not alone and broad == wide - 1
            runs, depth = (1, wide * terms) if joined else (wide, terms)
            for i in range(tall):
                for j in range(runs):
                    tap, lower = i * runs + j, down_taps[2 * i + 1] - first
                    taps[2 * tap] = lower * row + (across_taps[2 * j + 1] - left) * channels
                    taps[2 * tap + 1] = tap * depth * columns
            c = address(y) + (((image * y.shape[1] + down + top * apart[0]) * y.shape[2] + right) * outputs) * size
            for number in range(groups * panels):
                group, j = number // panels, number % panels * columns
                b = (before * groups * panels + number * tall * wide) * terms * columns
                start, over = START_ZERO, min(columns, count - j)
                if bias.size > 0:
                    start = START_BIAS
                    for d in range(over):
                        edge[d] = bias[group * count + j + d]
                mine = j if alone else group * terms
                where = (a + mine * size, address(packed) + b * size, c + (group * count + j) * size)
                reach, how = (tall * runs, depth, 1, columns), (start, address(edge), floor)
                if alone:
                    band_apart(source, where, table, r, taps, reach, over, stage, places, how)
                else:
                    band(source, where, table, r, taps, reach, over, stage, places, how)

    return correlate


@cache
def correlation(geometry: Geometry, inverse: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two steps of a convolution (or of its gradient for the images, which is told the shape of those)."""
    pack_filters, correlate = filter_packing(geometry, inverse), correlating(geometry, inverse)

    def pack(
        x: Any,
        filters: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        pack_filters(filters, packed, down_taps, across_taps, steps, (begin, end))

    def compute(
        x: Any,
        filters: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        memory = (slab, edge, table, down_taps, across_taps, taps, stage, places)
        correlate(x, filters, edge[:0], 0, y, packed, memory, steps, (images, rows), (begin, end))

    def pack_for_shape(
        x: Any,
        filters: Any,
        shape: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        pack_filters(filters, packed, down_taps, across_taps, steps, (begin, end))

    def compute_for_shape(
        x: Any,
        filters: Any,
        shape: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        memory = (slab, edge, table, down_taps, across_taps, taps, stage, places)
        correlate(x, filters, edge[:0], 0, y, packed, memory, steps, (images, rows), (begin, end))

    return (pack_for_shape, compute_for_shape) if inverse else (pack, compute)


@cache
def correlation_with_bias(geometry: Geometry) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two steps of a convolution added to a bias, without what is negative if ``floor`` is not 0."""
    pack_filters, correlate = filter_packing(geometry, False), correlating(geometry, False)

    def pack(
        x: Any,
        filters: Any,
        bias: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        floor: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        pack_filters(filters, packed, down_taps, across_taps, steps, (begin, end))

    def compute(
        x: Any,
        filters: Any,
        bias: Any,
        y: Any,
        packed: Any,
        slab: Any,
        edge: Any,
        table: Any,
        down_taps: Any,
        across_taps: Any,
        taps: Any,
        stage: Any,
        places: Any,
        down: int,
        across: int,
        spread_down: int,
        spread_across: int,
        top: int,
        left: int,
        groups: int,
        images: int,
        rows: int,
        floor: int,
        begin: int,
        end: int,
    ) -> None:
        steps = (down, across, spread_down, spread_across, top, left, groups)
        memory = (slab, edge, table, down_taps, across_taps, taps, stage, places)
        correlate(x, filters, bias, floor, y, packed, memory, steps, (images, rows), (begin, end))

    return pack, compute
