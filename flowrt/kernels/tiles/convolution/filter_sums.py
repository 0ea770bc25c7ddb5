"""The gradient of a convolution for its filters, on register tiles: a row per tap and channel, a term per place.

It is summed in parts, which a last step adds up. How many depends on the shapes alone, so that results do not depend on
the number of threads. A unit is some column panels of a part: it walks through the part's images slab by slab. A slab
holds a plane of few channels after another: a row of filters reads lines that follow one another, which a core's
nearest cache can hold, where places of many channels would fall into the same few sets of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, jitable
from flowrt.kernels.tiles.convolution.slabs import (
    WindowSteps,
    ceiling,
    channels_apart,
    dense,
    fill_slab,
    tiled_steps,
    to_filters,
)
from flowrt.kernels.tiles.micro import START_STORED, Geometry, Tiles, call, tiles_of
from flowrt.kernels.tiles.panels import address, band, pack, repeat_last, stage, table_size

TERMS = 160  # places that a panel sums at a time: what they see should stay in a core's nearest cache
UNITS = 8  # parts and panels there should be, at least, to share
SMALL = 4  # times less than what is summed: as many sums cost little to add up


class Summed:
    """How the gradient for the filters is laid out: parts of the sum times column panels are the units."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def terms(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: each part's sums, of some column panels."""
        panels, parts = self._panels(outputs, attrs), self._parts(inputs, outputs, attrs)
        return self._call(inputs, outputs, attrs, parts * -(-panels // together(panels, parts)))

    def total(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The second step: the sums of all parts."""
        views = self._call(inputs, outputs, attrs, 0).views
        rows, groups, share, line = self._lines(outputs, attrs)
        sums = View.dense((self._parts(inputs, outputs, attrs), rows, groups, line))
        return Call((*views[:3], View.dense((rows, groups, share)), sums, *views[5:]), units=rows, order=(3, 4))

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        rows, groups, _, line = self._lines(outputs, attrs)
        return (Spec(outputs[0].dtype, (self._parts(inputs, outputs, attrs), rows * groups * line)),)

    def local(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        """A slab, a panel of the result's gradient, the table, the taps, the stage."""
        x, filters, dy = to_filters(inputs, outputs)
        steps, (tall, wide, depth, _) = tiled_steps(x, filters, attrs), filters.concrete
        (images, rows), width, geometry = self._blocks(dy), max(dy.concrete[2], 1), self.geometry
        height, broad = seen_sizes(rows, width, (tall, wide), steps)
        channels, columns = x.concrete[3], geometry.columns(dy.dtype)
        plane = plane_of(channels, steps.groups, columns)
        slab = Spec(dy.dtype, (images * height * broad * ceiling(channels, plane) * plane,))
        panel = Spec(dy.dtype, (images * rows * width * geometry.columns(dy.dtype),))
        table = Spec("int64", (table_size(geometry, tall * wide * depth),))
        return (slab, panel, table, Spec("int64", (2 * images * rows,)), *stage(geometry, dy.dtype))

    def _call(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], units: int) -> Call:
        x, filters, dy = to_filters(inputs, outputs)
        extra = *self.scratch(inputs, outputs, attrs), *self.local(inputs, outputs, attrs)
        words = (*tiled_steps(x, filters, attrs), *self._blocks(dy))
        tiles = tiles_of(self.geometry, dy.dtype, "beside" if channels_apart(filters, attrs["groups"]) else "tile")
        return Call(dense((*inputs, *outputs, *extra)), words, units, tiles=tiles)

    def _lines(self, outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[int, int, int, int]:
        """Rows of a filter's sums, groups, columns of a group, and as many as half tiles make of these."""
        tall, wide, depth, columns = outputs[0].concrete
        groups: int = 1 if channels_apart(outputs[0], attrs["groups"]) else attrs["groups"]
        full = self.geometry.columns(outputs[0].dtype)
        return tall * wide * depth, groups, columns // groups, line_of(columns // groups, full)

    def _panels(self, outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> int:
        """Column panels of all groups."""
        _, groups, share, _ = self._lines(outputs, attrs)
        each: int = ceiling(share, self.geometry.columns(outputs[0].dtype))
        return groups * each

    def _parts(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> int:
        (images, rows), (batch, height, _, _) = self._blocks(inputs[1]), inputs[1].concrete
        panels = 1 if channels_apart(outputs[0], attrs["groups"]) else max(self._panels(outputs, attrs), 1)
        needed: int = ceiling(UNITS, panels)
        if panels <= UNITS * attrs["groups"]:  # then a unit may have all panels, which share slabs, if sums are small
            needed = max(needed, min((inputs[0].size + inputs[1].size) // max(SMALL * outputs[0].size, 1), UNITS))
        pieces: int = ceiling(batch, images) * ceiling(height, rows)
        return max(min(needed, pieces), 1)

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


@jitable
def line_of(share: int, columns: int) -> int:
    """A group's columns in a line of sums: whole halves of tiles, which then need no stage."""
    half = columns // 2
    line: int = ceiling(share, half) * half
    return line


class FilterMemory(NamedTuple):
    """A thread's own memory, as `Summed.local` says it."""

    slab: Any
    panel: Any
    table: Any
    taps: Any
    stage: Any
    places: Any


class Planes(NamedTuple):
    """How what is seen lies: whether it is ``copied``, channels of a ``plane``, how far planes are apart, and rows."""

    copied: bool
    plane: int
    apart: int
    row: int


class SummedPlaces(NamedTuple):
    """Places whose terms are summed at a time: the first image and row, how many images and rows."""

    image: int
    top: int
    images: int
    rows: int


@jitable
def seen_sizes(rows: int, columns: int, window: Any, steps: WindowSteps) -> tuple[int, int]:
    """Height and width of what so many rows and columns of places see."""
    height = (rows - 1) * steps.down + (window[0] - 1) * steps.spread_down + 1
    return height, (columns - 1) * steps.across + (window[1] - 1) * steps.spread_across + 1


@jitable
def plane_of(channels: int, groups: int, columns: int) -> int:
    """How many channels of a slab lie side by side: a panel's, or a group's where that is not some panels'."""
    share = channels // max(groups, 1)
    if groups > 1 and share % columns != 0:
        return max(share, 1)
    return columns if groups == 0 else max(min(columns, share), 1)


@jitable
def planes_of(x: Any, dy: Any, window: Any, steps: WindowSteps, blocks: Any, columns: int) -> Planes:
    """What windows see is copied if some is padding, or lies in several planes and most of it is read."""
    height, width = seen_sizes(dy.shape[1], dy.shape[2], window, steps)
    padded = steps.top > 0 or steps.left > 0 or width - steps.left > x.shape[2] or height - steps.top > x.shape[1]
    plane, channels = plane_of(x.shape[3], steps.groups, columns), x.shape[3]
    read = window[0] * window[1] >= steps.down * steps.across
    if padded or (read and channels > plane) or (steps.groups == 0 and channels % columns != 0):
        tall, _ = seen_sizes(blocks[1], dy.shape[2], window, steps)
        return Planes(True, plane, blocks[0] * tall * width * plane, width * plane)
    return Planes(False, channels, 0, x.shape[2] * channels)


@jitable
def place_of(channel: int, planes: Planes) -> int:
    """Where a channel begins."""
    return channel // planes.plane * planes.apart + channel % planes.plane


@jitable
def look(
    tiles: Tiles, x: Any, piece: SummedPlaces, sizes: Any, planes: Planes, steps: WindowSteps, slab: Any
) -> tuple[int, int]:
    """Where what a piece sees begins, and the step between images. ``sizes`` are its height and width."""
    first = piece.top * steps.down - steps.top
    if planes.copied:
        where = planes.plane, planes.apart
        fill_slab(tiles, x, piece.image, piece.images, (first, -steps.left), sizes, where, address(slab))
        return address(slab), sizes[0] * planes.row
    place = (piece.image * x.shape[1] + first) * planes.row - steps.left * planes.plane
    return address(x) + place * tiles.size, x.shape[1] * planes.row


@jitable
def list_filters(table: Any, window: Any, steps: WindowSteps, planes: Planes, line: int) -> None:
    """A row of the table for every tap and channel, whose sums are so long a line."""
    half, at = table.size // 2, 0
    for i in range(window[0]):
        for j in range(window[1]):
            here = i * steps.spread_down * planes.row + j * steps.spread_across * planes.plane
            for d in range(window[2]):
                table[at], table[half + at] = here + place_of(d, planes), at * line
                at += 1
    repeat_last(table, at)


@jitable
def list_rows(piece: SummedPlaces, whole: int, planes: Planes, steps: WindowSteps, panel: int, taps: Any) -> None:
    """A tap for every row of places: where it begins, and in the panel, where it has so many entries."""
    for n in range(piece.images):
        for i in range(piece.rows):
            tap = n * piece.rows + i
            taps[2 * tap] = n * whole + i * steps.down * planes.row
            taps[2 * tap + 1] = tap * panel


@jitable
def meet_sums(
    tiles: Tiles,
    x: Any,
    dy: Any,
    sums: int,
    window: Any,
    piece: SummedPlaces,
    sight: Any,
    planes: Planes,
    panels: Any,
    steps: WindowSteps,
    memory: FilterMemory,
) -> None:
    """A piece's terms of some panels' sums.

    ``sums`` is where a part's are, ``sight`` what `look` answers, ``panels`` the first panel, the one behind the last,
    and how many a group has. Where there are no groups channels are alone with a filter of their own.
    """
    size, columns, outputs, width = tiles.size, tiles.wide, dy.shape[3], dy.shape[2]
    share, rows = outputs // max(steps.groups, 1), piece.images * piece.rows
    list_rows(piece, sight[1], planes, steps, width * columns, memory.taps)
    source = address(dy) + (piece.image * dy.shape[1] + piece.top) * width * outputs * size
    reach = rows, width, steps.across * planes.plane, columns
    count, panel, how = window[0] * window[1] * window[2], address(memory.panel), (START_STORED, 0, 0)
    for number in range(panels[0], panels[1]):
        beside, wide = panel_of(number, panels[2], share, columns)
        pack(tiles, source + beside * size, outputs, 1, rows * width, wide, panel)
        mine = place_of(beside if steps.groups == 0 else number // panels[2] * window[2], planes)
        at, wide = panel_of(number, panels[2], line_of(share, columns), columns)
        where = sight[0] + mine * size, panel, sums + at * size
        band(tiles, where, memory.table, count, memory.taps, reach, wide, memory.stage, memory.places, how)


@jitable
def sum_pieces(
    tiles: Tiles,
    x: Any,
    dy: Any,
    sums: int,
    window: Any,
    numbers: Any,
    panels: Any,
    planes: Planes,
    memory: FilterMemory,
    how: Any,
) -> None:
    """The terms of the pieces of some ``numbers``."""
    steps, blocks = how
    down = ceiling(dy.shape[1], blocks[1])
    for number in range(numbers[0], numbers[1]):
        image, top = number // down * blocks[0], number % down * blocks[1]
        piece = SummedPlaces(image, top, min(blocks[0], dy.shape[0] - image), min(blocks[1], dy.shape[1] - top))
        sizes = seen_sizes(piece.rows, dy.shape[2], window, steps)
        sight = look(tiles, x, piece, sizes, planes, steps, memory.slab)
        meet_sums(tiles, x, dy, sums, window, piece, sight, planes, panels, steps, memory)


@jitable
def sum_terms(
    tiles: Tiles,
    x: Any,
    dy: Any,
    window: Any,
    parts: Any,
    memory: FilterMemory,
    steps: WindowSteps,
    blocks: Any,
    units: Any,
) -> None:
    """The units [begin, end) of the filters' gradient: some panels of some parts."""
    outputs, columns, divided, length = dy.shape[3], tiles.wide, parts.shape[0], parts.shape[1]
    share = outputs // max(steps.groups, 1)
    each = ceiling(share, columns)
    panels = max(steps.groups, 1) * each
    shared = together(panels, divided)
    shares = ceiling(panels, shared)
    total = ceiling(dy.shape[0], blocks[0]) * ceiling(dy.shape[1], blocks[1]) if length * dy.shape[2] > 0 else 0
    planes = planes_of(x, dy, window, steps, blocks, columns)
    line = max(steps.groups, 1) * line_of(share, columns)
    if total > 0:
        list_filters(memory.table, window, steps, planes, line)
    for unit in range(units[0], units[1]):
        part, begin = unit // shares, unit % shares * shared
        end = min(begin + shared, panels)
        sums = address(parts) + part * length * tiles.size
        for number in range(begin, end):
            first, wide = panel_of(number, each, line_of(share, columns), columns)
            for at in range(first, length, line):
                call(tiles.clear, (sums + at * tiles.size, wide))
        numbers = part * total // divided, (part + 1) * total // divided
        sum_pieces(tiles, x, dy, sums, window, numbers, (begin, end, each), planes, memory, (steps, blocks))


def sum_parts(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The first step of the gradient for the filters, as `Summed.terms` lays it out."""
    x, dy, _, y, parts = arrays[:5]
    window, steps = (y.shape[0], y.shape[1], y.shape[2]), WindowSteps(*words[:7])
    sum_terms(Tiles(*tiles), x, dy, window, parts, FilterMemory(*arrays[5:]), steps, words[7:], (begin, end))


def add_parts(y: Any, parts: Any, begin: int, end: int) -> None:
    """The second step: the sums of all parts, row by row."""
    for r in range(begin, end):
        for group in range(y.shape[1]):
            for j in range(y.shape[2]):
                y[r, group, j] = parts[0, r, group, j]
            for part in range(1, parts.shape[0]):
                for j in range(y.shape[2]):
                    y[r, group, j] += parts[part, r, group, j]
