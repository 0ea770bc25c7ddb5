"""The gradient of a convolution for its filters, on register tiles: a row per tap and channel, a term per place.

It is summed in parts, which a last step adds up. How many depends on the shapes alone, so that results do not depend on
the number of threads. A unit is some column panels of a part: it walks through the part's images slab by slab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flowrt.kernels.micro import START_STORED, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.slabs import channels_apart, dense, slabs, steps_of, tiled_steps, to_filters
from flowrt.kernels.table import Call, View, jitable
from flowrt.spec import Spec

TERMS = 160  # places that a panel sums at a time: what they see should stay in a core's nearest cache
UNITS = 8  # parts and panels there should be, at least, to share


class Summed:
    """How the gradient for the filters is laid out: parts of the sum times column panels are the units."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def terms(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: each part's sums."""
        panels, parts = self._panels(outputs, attrs), self._parts(inputs, outputs, attrs)
        return self._call(inputs, outputs, attrs, parts * -(-panels // together(panels, parts)))

    def total(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: the sums of all parts."""
        call = self._call(inputs, outputs, attrs, outputs[0].size)
        flat = View.dense((outputs[0].size,))
        return Call((*call.views[:3], flat, *call.views[4:]), call.words, call.units)

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        return (Spec(outputs[0].dtype, (self._parts(inputs, outputs, attrs), outputs[0].size)),)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """A slab, a panel of the result's gradient, the table, the taps, the stage."""
        x, filters, dy = to_filters(inputs, outputs)
        down, across, spread_down, spread_across, *_ = steps_of(x, filters, attrs)
        tall, wide, depth, _ = filters.concrete
        (images, rows), width, geometry = self._blocks(dy), max(dy.concrete[2], 1), self.geometry
        height = (rows - 1) * down + (tall - 1) * spread_down + 1
        seen = images * height * ((width - 1) * across + (wide - 1) * spread_across + 1)
        beyond = geometry.columns(dy.dtype)  # what a panel may read beside the last place's channels
        slab = Spec(dy.dtype, (seen * x.concrete[3] + beyond,))
        panel = Spec(dy.dtype, (images * rows * width * geometry.columns(dy.dtype),))
        table = Spec("int64", (table_size(geometry, tall * wide * depth),))
        return (slab, panel, table, Spec("int64", (2 * images * rows,)), *stage(geometry, dy.dtype))

    def _call(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], units: int) -> Call:
        x, filters, dy = to_filters(inputs, outputs)
        extra = *self.scratch(inputs, outputs, attrs), *self.local(inputs, outputs, attrs)
        words = (*tiled_steps(x, filters, attrs), *self._blocks(dy))
        return Call(dense((*inputs, *outputs, *extra)), words, units)

    def _panels(self, outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> int:
        """Column panels of all groups."""
        groups: int = 1 if channels_apart(outputs[0], attrs["groups"]) else attrs["groups"]
        share: int = outputs[0].concrete[3] // groups
        return groups * -(-share // self.geometry.columns(outputs[0].dtype))

    def _parts(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> int:
        panels = 1 if channels_apart(outputs[0], attrs["groups"]) else max(self._panels(outputs, attrs), 1)
        return max(min(-(-UNITS // panels), inputs[1].concrete[0]), 1)

    def _blocks(self, dy: Spec) -> tuple[int, int]:
        """Images and rows of places whose terms are summed at a time."""
        batch, height, width, _ = dy.concrete
        if 2 * height * width <= TERMS:
            return max(min(TERMS // max(height * width, 1), batch), 1), max(height, 1)
        rows = max(min(TERMS // width, height), 1)
        return 1, -(-height // -(-height // rows))


@jitable
def together(panels: int, parts: int) -> int:
    """How many column panels a unit sums: they share the slabs, but there should be some units."""
    return max(panels * parts // UNITS, 1)


@jitable
def panel_of(number: int, panels: int, share: int, columns: int) -> tuple[int, int]:
    """A panel's first column and how many it has, where every group has so many panels and a share of columns."""
    group, j = number // panels, number % panels * columns
    return group * share + j, min(columns, share - j)


@cache
def summing(geometry: Geometry) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of the filters' gradient: some panels of some parts."""
    band, band_apart = banding(geometry), banding(geometry, apart=True)
    fill_slab, pack = slabs(geometry), packing(geometry)
    full = geometry.vectors * geometry.width

    @jitable
    def fill(table: Any, window: Any, steps: Any, row: int, channels: int, outputs: int) -> None:
        """A row of the table for every tap and channel."""
        half, at = table.size // 2, 0
        for i in range(window[0]):
            for j in range(window[1]):
                for d in range(window[2]):
                    table[at] = i * steps[2] * row + j * steps[3] * channels + d
                    table[half + at] = at * outputs
                    at += 1
        repeat_last(table, at)

    @jitable
    def sum_terms(x: Any, dy: Any, window: Any, parts: Any, memory: Any, steps: Any, blocks: Any, units: Any) -> None:
        slab, panel, table, taps, stage, places = memory
        alone, groups = steps[6] == 0, max(steps[6], 1)
        size, outputs, channels = x.itemsize, dy.shape[3], x.shape[3]
        columns, share, count = full // size, outputs // groups, window[0] * window[1] * window[2]
        panels = groups * ((share + columns - 1) // columns)
        height, width = (window[0] - 1) * steps[2] + 1, (dy.shape[2] - 1) * steps[1] + (window[1] - 1) * steps[3] + 1
        padded = steps[4] > 0 or steps[5] > 0 or width - steps[5] > x.shape[2]
        padded = padded or (dy.shape[1] - 1) * steps[0] + height - steps[4] > x.shape[1]
        padded = padded or (alone and channels % columns != 0)  # else a panel reads beside the last place
        row = (width if padded else x.shape[2]) * channels
        down, over = (dy.shape[1] + blocks[1] - 1) // blocks[1], (dy.shape[0] + blocks[0] - 1) // blocks[0]
        total = over * down if dy.shape[2] > 0 and count > 0 else 0
        if total > 0:
            fill(table, window, steps, row, channels, outputs)
        shared = together(panels, parts.shape[0])
        shares = (panels + shared - 1) // shared
        for unit in range(units[0], units[1]):
            part, begin = unit // shares, unit % shares * shared
            end = min(begin + shared, panels)
            for number in range(begin, end):
                beside, wide = panel_of(number, panels // groups, share, columns)
                for t in range(count):
                    for d in range(wide):
                        parts[part, t * outputs + beside + d] = 0
            for piece in range(part * total // parts.shape[0], (part + 1) * total // parts.shape[0]):
                image, top = piece // down * blocks[0], piece % down * blocks[1]
                images, rows = min(blocks[0], dy.shape[0] - image), min(blocks[1], dy.shape[1] - top)
                first, seen = top * steps[0] - steps[4], (rows - 1) * steps[0] + height
                a, whole = address(slab), seen * row
                if padded:
                    fill_slab(x, image, images, (first, -steps[5]), (seen, width), slab)
                else:
                    whole = x.shape[1] * row
                    a = address(x) + (image * whole + first * row - steps[5] * channels) * size
                for n in range(images):
                    for i in range(rows):
                        tap = n * rows + i
                        taps[2 * tap], taps[2 * tap + 1] = n * whole + i * steps[0] * row, tap * dy.shape[2] * columns
                source = address(dy) + (image * dy.shape[1] + top) * dy.shape[2] * outputs * size
                reach, how = (images * rows, dy.shape[2], steps[1] * channels, columns), (START_STORED, 0, 0)
                for number in range(begin, end):
                    beside, wide = panel_of(number, panels // groups, share, columns)
                    here = source + beside * size
                    pack(x, here, outputs, 1, images * rows * dy.shape[2], wide, address(panel))
                    c = address(parts) + (part * count * outputs + beside) * size
                    mine = beside if alone else beside // share * window[2]
                    where = (a + mine * size, address(panel), c)
                    if alone:
                        band_apart(x, where, table, count, taps, reach, wide, stage, places, how)
                    else:
                        band(x, where, table, count, taps, reach, wide, stage, places, how)

    return sum_terms


@cache
def summation(geometry: Geometry) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two steps of the gradient for the filters."""
    sum_terms = summing(geometry)

    def compute(
        x: Any,
        dy: Any,
        shape: Any,
        y: Any,
        parts: Any,
        slab: Any,
        panel: Any,
        table: Any,
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
        memory, window = (slab, panel, table, taps, stage, places), (y.shape[0], y.shape[1], y.shape[2])
        sum_terms(x, dy, window, parts, memory, steps, (images, rows), (begin, end))

    def total(
        x: Any,
        dy: Any,
        shape: Any,
        y: Any,
        parts: Any,
        slab: Any,
        panel: Any,
        table: Any,
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
        for i in range(begin, end):
            y[i] = parts[0, i]
        for part in range(1, parts.shape[0]):
            for i in range(begin, end):
                y[i] += parts[part, i]

    return compute, total
