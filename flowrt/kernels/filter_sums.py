"""The gradient of a convolution for its filters, on register tiles: a row per tap and channel, a term per place.

It is summed in parts, which a last step adds up. How many depends on the shapes alone, so that results do not depend on
the number of threads. A unit is some column panels of a part: it walks through the part's images slab by slab. A slab
holds a plane of few channels after another: a row of filters reads lines that follow one another, which a core's
nearest cache can hold, where places of many channels would fall into the same few sets of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from flowrt.kernels.micro import START_STORED, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.slabs import Steps, ceiling, channels_apart, dense, slabs, tiled_steps, to_filters
from flowrt.kernels.table import Call, View, jitable
from flowrt.spec import Spec

TERMS = 160  # places that a panel sums at a time: what they see should stay in a core's nearest cache
UNITS = 8  # parts and panels there should be, at least, to share
SMALL = 4  # times less than what is summed: as many sums cost little to add up


class Summed:
    """How the gradient for the filters is laid out: parts of the sum times column panels are the units."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def terms(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The first step: each part's sums."""
        return self._summed(inputs, outputs, attrs, alone=False)

    def apart(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        """The same where every channel has a filter of its own; one of the two has no units."""
        return self._summed(inputs, outputs, attrs, alone=True)

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
        steps, (tall, wide, depth, _) = tiled_steps(x, filters, attrs), filters.concrete
        (images, rows), width, geometry = self._blocks(dy), max(dy.concrete[2], 1), self.geometry
        height, broad = seen_sizes(rows, width, (tall, wide), steps)
        channels, columns = x.concrete[3], geometry.columns(dy.dtype)
        plane = plane_of(channels, steps.groups, columns)
        slab = Spec(dy.dtype, (images * height * broad * ceiling(channels, plane) * plane,))
        panel = Spec(dy.dtype, (images * rows * width * geometry.columns(dy.dtype),))
        table = Spec("int64", (table_size(geometry, tall * wide * depth),))
        return (slab, panel, table, Spec("int64", (2 * images * rows,)), *stage(geometry, dy.dtype))

    def _summed(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], *, alone: bool
    ) -> Call:
        if channels_apart(outputs[0], attrs["groups"]) != alone:
            return self._call(inputs, outputs, attrs, 0)
        panels, parts = self._panels(outputs, attrs), self._parts(inputs, outputs, attrs)
        return self._call(inputs, outputs, attrs, parts * -(-panels // together(panels, parts)))

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


class Memory(NamedTuple):
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


class Piece(NamedTuple):
    """Places whose terms are summed at a time: the first image and row, how many images and rows."""

    image: int
    top: int
    images: int
    rows: int


@jitable
def seen_sizes(rows: int, columns: int, window: Any, steps: Steps) -> tuple[int, int]:
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
def planes_of(x: Any, dy: Any, window: Any, steps: Steps, blocks: Any, columns: int) -> Planes:
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


@cache
def looking(geometry: Geometry) -> Callable[..., Any]:
    """``look(x, piece, sizes, planes, steps, slab)``: where what a piece sees begins, and the step between images.

    ``sizes`` are its height and width.
    """
    fill_slab = slabs(geometry)

    @jitable
    def look(x: Any, piece: Piece, sizes: Any, planes: Planes, steps: Steps, slab: Any) -> tuple[int, int]:
        first = piece.top * steps.down - steps.top
        if planes.copied:
            where = planes.plane, planes.apart
            fill_slab(x, piece.image, piece.images, (first, -steps.left), sizes, where, slab)
            return address(slab), sizes[0] * planes.row
        place = (piece.image * x.shape[1] + first) * planes.row - steps.left * planes.plane
        return address(x) + place * x.itemsize, x.shape[1] * planes.row

    return look


@jitable
def list_filters(table: Any, window: Any, steps: Steps, planes: Planes, outputs: int) -> None:
    """A row of the table for every tap and channel."""
    half, at = table.size // 2, 0
    for i in range(window[0]):
        for j in range(window[1]):
            here = i * steps.spread_down * planes.row + j * steps.spread_across * planes.plane
            for d in range(window[2]):
                table[at], table[half + at] = here + place_of(d, planes), at * outputs
                at += 1
    repeat_last(table, at)


@jitable
def clear_columns(parts: Any, part: int, outputs: int, first: int, count: int) -> None:
    """Let some columns of a part's sums be zeros."""
    for t in range(0, parts.shape[1], outputs):
        for d in range(first, first + count):
            parts[part, t + d] = 0


@cache
def meeting_panels(geometry: Geometry, alone: bool) -> Callable[..., None]:
    """``meet(x, dy, sums, window, piece, sight, planes, panels, steps, memory)``: a piece's terms of some panels' sums.

    ``sums`` is where a part's are, ``sight`` what `looking` answers, ``panels`` the first panel, the one behind the
    last, and how many a group has. Channels are ``alone`` with a filter of their own.
    """
    band, pack = banding(geometry, apart=alone), packing(geometry)
    full = geometry.vectors * geometry.width

    @jitable
    def list_rows(piece: Piece, whole: int, planes: Planes, steps: Steps, panel: int, taps: Any) -> None:
        """A tap for every row of places: where it begins, and in the panel, where it has so many entries."""
        for n in range(piece.images):
            for i in range(piece.rows):
                tap = n * piece.rows + i
                taps[2 * tap] = n * whole + i * steps.down * planes.row
                taps[2 * tap + 1] = tap * panel

    @jitable
    def meet(
        x: Any,
        dy: Any,
        sums: int,
        window: Any,
        piece: Piece,
        sight: Any,
        planes: Planes,
        panels: Any,
        steps: Steps,
        memory: Memory,
    ) -> None:
        size, outputs, width = x.itemsize, dy.shape[3], dy.shape[2]
        columns, share, rows = full // size, outputs // max(steps.groups, 1), piece.images * piece.rows
        list_rows(piece, sight[1], planes, steps, width * columns, memory.taps)
        source = address(dy) + (piece.image * dy.shape[1] + piece.top) * width * outputs * size
        reach = rows, width, steps.across * planes.plane, columns
        count, panel, how = window[0] * window[1] * window[2], address(memory.panel), (START_STORED, 0, 0)
        for number in range(panels[0], panels[1]):
            beside, wide = panel_of(number, panels[2], share, columns)
            pack(x, source + beside * size, outputs, 1, rows * width, wide, panel)
            mine = place_of(beside if alone else beside // share * window[2], planes)
            where = sight[0] + mine * size, panel, sums + beside * size
            band(x, where, memory.table, count, memory.taps, reach, wide, memory.stage, memory.places, how)

    return meet


@cache
def summing(geometry: Geometry, alone: bool) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of the filters' gradient: some panels of some parts."""
    look, meet, full = looking(geometry), meeting_panels(geometry, alone), geometry.vectors * geometry.width

    @jitable
    def sum_pieces(
        x: Any, dy: Any, sums: int, window: Any, numbers: Any, panels: Any, planes: Planes, memory: Memory, how: Any
    ) -> None:
        """The terms of the pieces of some ``numbers``."""
        steps, blocks = how
        down = ceiling(dy.shape[1], blocks[1])
        for number in range(numbers[0], numbers[1]):
            image, top = number // down * blocks[0], number % down * blocks[1]
            piece = Piece(image, top, min(blocks[0], dy.shape[0] - image), min(blocks[1], dy.shape[1] - top))
            sizes = seen_sizes(piece.rows, dy.shape[2], window, steps)
            sight = look(x, piece, sizes, planes, steps, memory.slab)
            meet(x, dy, sums, window, piece, sight, planes, panels, steps, memory)

    @jitable
    def sum_terms(
        x: Any, dy: Any, window: Any, parts: Any, memory: Memory, steps: Steps, blocks: Any, units: Any
    ) -> None:
        outputs, columns, divided = dy.shape[3], full // x.itemsize, parts.shape[0]
        share = outputs // max(steps.groups, 1)
        each = ceiling(share, columns)
        panels = max(steps.groups, 1) * each
        shared = together(panels, divided)
        shares = ceiling(panels, shared)
        total = ceiling(dy.shape[0], blocks[0]) * ceiling(dy.shape[1], blocks[1])
        if parts.shape[1] * dy.shape[2] == 0:
            total = 0
        planes = planes_of(x, dy, window, steps, blocks, columns)
        if total > 0:
            list_filters(memory.table, window, steps, planes, outputs)
        for unit in range(units[0], units[1]):
            part, begin = unit // shares, unit % shares * shared
            end = min(begin + shared, panels)
            for number in range(begin, end):
                clear_columns(parts, part, outputs, *panel_of(number, each, share, columns))
            sums = address(parts) + part * parts.shape[1] * x.itemsize
            numbers = part * total // divided, (part + 1) * total // divided
            sum_pieces(x, dy, sums, window, numbers, (begin, end, each), planes, memory, (steps, blocks))

    return sum_terms


@cache
def summation(geometry: Geometry) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """The steps of the gradient for the filters: `Summed.terms`, `Summed.apart` and `Summed.total`."""
    own = -len(Memory._fields)

    def step(alone: bool) -> Callable[..., None]:
        sum_terms = summing(geometry, alone)

        def compute(arrays: Any, words: Any, begin: int, end: int) -> None:
            x, dy, _, y, parts = arrays[:own]
            memory, steps, window = Memory(*arrays[own:]), Steps(*words[:-2]), (y.shape[0], y.shape[1], y.shape[2])
            sum_terms(x, dy, window, parts, memory, steps, words[-2:], (begin, end))

        return compute

    def total(arrays: Any, words: Any, begin: int, end: int) -> None:
        y, parts = arrays[3], arrays[4]
        for i in range(begin, end):
            y[i] = parts[0, i]
        for part in range(1, parts.shape[0]):
            for i in range(begin, end):
                y[i] += parts[part, i]

    return step(False), step(True), total
