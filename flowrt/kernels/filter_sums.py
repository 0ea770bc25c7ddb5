"""The gradient of a convolution for its filters, on register tiles: a row per tap and channel, a term per place.

It is summed in parts, which a last step adds up. How many depends on the shapes alone, so that results do not depend on
the number of threads. A unit is some column panels of a part: it walks through the part's images slab by slab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from flowrt.kernels.micro import START_STORED, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.slabs import Steps, ceiling, channels_apart, dense, slabs, steps_of, tiled_steps, to_filters
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


class Memory(NamedTuple):
    """A thread's own memory, as `Summed.local` says it."""

    slab: Any
    panel: Any
    table: Any
    taps: Any
    stage: Any
    places: Any


class Sight(NamedTuple):
    """What a piece of the images sees: steps between its rows and images, and where it begins."""

    row: int
    whole: int
    place: int


@jitable
def seen_sizes(dy: Any, window: Any, steps: Steps, rows: int) -> Any:
    """Height and width of what so many rows of places see."""
    height = (rows - 1) * steps.down + (window[0] - 1) * steps.spread_down + 1
    return height, (dy.shape[2] - 1) * steps.across + (window[1] - 1) * steps.spread_across + 1


@cache
def looking(geometry: Geometry) -> Callable[..., Any]:
    """``look(x, dy, window, piece, steps, padded, slab)``: what some rows of places of some images see.

    ``piece`` is the first image and row, how many images and rows; if it is ``padded`` all of it is copied.
    """
    fill_slab = slabs(geometry)

    @jitable
    def look(x: Any, dy: Any, window: Any, piece: Any, steps: Steps, padded: bool, slab: Any) -> Sight:
        image, top, images, rows = piece
        first, channels = top * steps.down - steps.top, x.shape[3]
        if padded:
            height, width = seen_sizes(dy, window, steps, rows)
            fill_slab(x, image, images, (first, -steps.left), (height, width), max(channels, 1), slab)
            return Sight(width * channels, height * width * channels, address(slab))
        row = x.shape[2] * channels
        place = (image * x.shape[1] + first) * row - steps.left * channels
        return Sight(row, x.shape[1] * row, address(x) + place * x.itemsize)

    return look


@jitable
def reaches_beyond(x: Any, dy: Any, window: Any, steps: Steps, columns: int) -> bool:
    """Whether windows see padding, or panels of channels apart would read beside the last place."""
    height, width = seen_sizes(dy, window, steps, dy.shape[1])
    padded = steps.top > 0 or steps.left > 0 or width - steps.left > x.shape[2] or height - steps.top > x.shape[1]
    return padded or (steps.groups == 0 and x.shape[3] % columns != 0)


@jitable
def list_filters(table: Any, window: Any, steps: Steps, row: int, channels: int, outputs: int) -> None:
    """A row of the table for every tap and channel."""
    half, at = table.size // 2, 0
    for i in range(window[0]):
        for j in range(window[1]):
            for d in range(window[2]):
                table[at] = i * steps.spread_down * row + j * steps.spread_across * channels + d
                table[half + at] = at * outputs
                at += 1
    repeat_last(table, at)


@jitable
def clear_columns(parts: Any, part: int, outputs: int, first: int, count: int) -> None:
    """Let some columns of a part's sums be zeros."""
    for t in range(0, parts.shape[1], outputs):
        for d in range(first, first + count):
            parts[part, t + d] = 0


@cache
def meeting_panels(geometry: Geometry) -> Callable[..., None]:
    """``meet(x, dy, sums, window, piece, sight, panels, steps, memory)``: a piece's terms of some column panels' sums.

    ``sums`` is where a part's are, ``panels`` the first panel, the one behind the last, and how many a group has.
    """
    band, band_apart, pack = banding(geometry), banding(geometry, apart=True), packing(geometry)
    full = geometry.vectors * geometry.width

    @jitable
    def meet(
        x: Any, dy: Any, sums: int, window: Any, piece: Any, sight: Any, panels: Any, steps: Steps, memory: Memory
    ) -> None:
        image, top, images, rows = piece
        size, alone, outputs, width = x.itemsize, steps.groups == 0, dy.shape[3], dy.shape[2]
        columns, share, taps = full // size, outputs // max(steps.groups, 1), memory.taps
        for n in range(images):
            for i in range(rows):
                tap = n * rows + i
                taps[2 * tap] = n * sight.whole + i * steps.down * sight.row
                taps[2 * tap + 1] = tap * width * columns
        source = address(dy) + (image * dy.shape[1] + top) * width * outputs * size
        reach = images * rows, width, steps.across * x.shape[3], columns
        count, panel, how = window[0] * window[1] * window[2], address(memory.panel), (START_STORED, 0, 0)
        for number in range(panels[0], panels[1]):
            beside, wide = panel_of(number, panels[2], share, columns)
            pack(x, source + beside * size, outputs, 1, images * rows * width, wide, panel)
            mine = beside if alone else beside // share * window[2]
            where = sight.place + mine * size, panel, sums + beside * size
            if alone:
                band_apart(x, where, memory.table, count, taps, reach, wide, memory.stage, memory.places, how)
            else:
                band(x, where, memory.table, count, taps, reach, wide, memory.stage, memory.places, how)

    return meet


@cache
def summing(geometry: Geometry) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of the filters' gradient: some panels of some parts."""
    look, meet, full = looking(geometry), meeting_panels(geometry), geometry.vectors * geometry.width

    @jitable
    def sum_terms(
        x: Any, dy: Any, window: Any, parts: Any, memory: Memory, steps: Steps, blocks: Any, units: Any
    ) -> None:
        outputs, columns = dy.shape[3], full // x.itemsize
        groups, divided = max(steps.groups, 1), parts.shape[0]
        share = outputs // groups
        each = ceiling(share, columns)
        panels = groups * each
        down = ceiling(dy.shape[1], blocks[1])
        total = ceiling(dy.shape[0], blocks[0]) * down if parts.shape[1] * dy.shape[2] > 0 else 0
        padded = reaches_beyond(x, dy, window, steps, columns)
        shared = together(panels, divided)
        shares = ceiling(panels, shared)
        row = (seen_sizes(dy, window, steps, 1)[1] if padded else x.shape[2]) * x.shape[3]
        if total > 0:
            list_filters(memory.table, window, steps, row, x.shape[3], outputs)
        for unit in range(units[0], units[1]):
            part, begin = unit // shares, unit % shares * shared
            end = min(begin + shared, panels)
            for number in range(begin, end):
                clear_columns(parts, part, outputs, *panel_of(number, each, share, columns))
            sums = address(parts) + part * parts.shape[1] * x.itemsize
            for number in range(part * total // divided, (part + 1) * total // divided):
                image, top = number // down * blocks[0], number % down * blocks[1]
                piece = image, top, min(blocks[0], dy.shape[0] - image), min(blocks[1], dy.shape[1] - top)
                sight = look(x, dy, window, piece, steps, padded, memory.slab)
                meet(x, dy, sums, window, piece, sight, (begin, end, each), steps, memory)

    return sum_terms


@cache
def summation(geometry: Geometry) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two steps of the gradient for the filters."""
    sum_terms = summing(geometry)
    own = -len(Memory._fields)

    def compute(arrays: Any, words: Any, begin: int, end: int) -> None:
        x, dy, _, y, parts = arrays[:own]
        memory, steps, window = Memory(*arrays[own:]), Steps(*words[:-2]), (y.shape[0], y.shape[1], y.shape[2])
        sum_terms(x, dy, window, parts, memory, steps, words[-2:], (begin, end))

    def total(arrays: Any, words: Any, begin: int, end: int) -> None:
        y, parts = arrays[3], arrays[4]
        for i in range(begin, end):
            y[i] = parts[0, i]
        for part in range(1, parts.shape[0]):
            for i in range(begin, end):
                y[i] += parts[part, i]

    return compute, total
