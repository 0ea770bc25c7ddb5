"""A convolution, and its gradient for the images, on register tiles: patches are read where they lie.

A product's rows are places of the result, its terms the taps of the window times the channels. A unit copies what its
places see into a slab (unless nothing of it is padding), and the table of rows points into that. The filters are packed
into column panels first, in a step of its own. The gradient for the images is a convolution too, of the result's
gradient with turned filters, phase by phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from flowrt.kernels.micro import START_BIAS, START_ZERO, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.slabs import (
    Roles,
    Steps,
    ceiling,
    channels_apart,
    dense,
    forward,
    seen_taps,
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
        batch, height, width, channels = outputs[0].concrete
        phases = down * across if self.inverse else 1
        tall = -(-height // down) if self.inverse else height
        call = self._call(inputs, outputs, attrs, phases * -(-batch // images) * -(-tall // rows))
        if phases > 1:
            return call
        row = width * channels
        return replace(call, rows=(height, row, rows) if images == 1 else (batch * height, row, images * height))

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
        floor = int(attrs.get("activation") == "relu")
        words = *tiled_steps(x, filters, attrs), *self._blocks(inputs, outputs, attrs), floor
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


class Memory(NamedTuple):
    """A thread's own memory, as `Correlated.local` says it."""

    slab: Any
    edge: Any
    table: Any
    down: Any
    across: Any
    taps: Any
    stage: Any
    places: Any


class Block(NamedTuple):
    """The places of a unit, ``down`` and ``right`` being those of its phase; the taps they see, and earlier phases."""

    down: int
    right: int
    image: int
    images: int
    top: int
    rows: int
    columns: int
    tall: int
    wide: int
    before: int


class Sight(NamedTuple):
    """What a block sees: where it begins, steps between rows and images, the first row and column, how far the last."""

    place: int
    row: int
    whole: int
    first: int
    left: int
    broad: int


@jitable
def spread_places(steps: Steps, inverse: bool) -> Any:
    """How far the places of a phase are apart, and how far apart in the source is what neighbours see."""
    return ((steps.down, steps.across), (1, 1)) if inverse else ((1, 1), (steps.down, steps.across))


@jitable
def block_of(unit: int, y: Any, window: Any, steps: Steps, blocks: Any, inverse: bool, memory: Memory) -> Block:
    """The block that is a unit; no rows or no columns if its phase has fewer places than others."""
    apart, _ = spread_places(steps, inverse)
    row_blocks = ceiling(ceiling(y.shape[1], apart[0]), blocks[1])
    count = ceiling(y.shape[0], blocks[0]) * row_blocks
    phase, number = unit // count, unit % count
    before = 0
    for earlier in range(phase):
        tall, wide = seen_taps(window, steps, earlier, inverse, memory.down, memory.across)
        before += tall * wide
    tall, wide = seen_taps(window, steps, phase, inverse, memory.down, memory.across)
    down, right = phase // apart[1], phase % apart[1]
    image, top = number // row_blocks * blocks[0], number % row_blocks * blocks[1]
    rows = min(blocks[1], ceiling(y.shape[1] - down, apart[0]) - top)
    columns = ceiling(y.shape[2] - right, apart[1])
    return Block(down, right, image, min(blocks[0], y.shape[0] - image), top, max(rows, 0), columns, tall, wide, before)


@cache
def looking(geometry: Geometry) -> Callable[..., Sight]:
    """``look(source, block, stride, beside, memory)``: what a block sees, copied into the slab if some is padding.

    It is copied, too, if a panel of ``beside`` channels would read beside the last place.
    """
    fill_slab = slabs(geometry)

    @jitable
    def look(source: Any, block: Block, stride: Any, beside: int, memory: Memory) -> Sight:
        high = broad = first = left = 0
        if block.tall * block.wide > 0:
            first, high = memory.down[1], memory.down[2 * block.tall - 1] - memory.down[1]
            left, broad = memory.across[1], memory.across[2 * block.wide - 1] - memory.across[1]
        top, channels = first + block.top * stride[0], source.shape[3]
        height, width = (block.rows - 1) * stride[0] + high + 1, (block.columns - 1) * stride[1] + broad + 1
        inside = top >= 0 and top + height <= source.shape[1] and left >= 0 and left + width <= source.shape[2]
        if inside and channels % beside == 0:
            row = source.shape[2] * channels
            place = block.image * source.shape[1] * row + top * row + left * channels
            return Sight(address(source) + place * source.itemsize, row, source.shape[1] * row, first, left, broad)
        if block.tall * block.wide > 0:
            fill_slab(source, block.image, block.images, (top, left), (height, width), memory.slab)
        row = width * channels
        return Sight(address(memory.slab), row, height * row, first, left, broad)

    return look


@jitable
def list_places(table: Any, block: Block, sight: Sight, stride: Any, apart: Any, channels: int, y: Any) -> int:
    """A row of the table for every place; how many there are."""
    r, half = 0, table.size // 2
    for n in range(block.images):
        for i in range(block.rows):
            here = (n * y.shape[1] + i * apart[0]) * y.shape[2] * y.shape[3]
            for j in range(block.columns):
                table[r] = n * sight.whole + i * stride[0] * sight.row + j * stride[1] * channels
                table[half + r] = here + j * apart[1] * y.shape[3]
                r += 1
    repeat_last(table, r)
    return r


@jitable
def list_taps(block: Block, sight: Sight, runs: int, step: int, channels: int, memory: Memory) -> None:
    """Where every tap begins, from a place and in a panel, where it has ``step`` entries."""
    for i in range(block.tall):
        for j in range(runs):
            tap = i * runs + j
            beside = (memory.across[2 * j + 1] - sight.left) * channels
            memory.taps[2 * tap] = (memory.down[2 * i + 1] - sight.first) * sight.row + beside
            memory.taps[2 * tap + 1] = tap * step


@cache
def filter_packing(geometry: Geometry, inverse: bool) -> Callable[..., None]:
    """The helper that packs the filters' panels [begin, end), of every phase."""
    pack, full = packing(geometry), geometry.vectors * geometry.width

    @jitable
    def pack_filters(filters: Any, packed: Any, memory: Memory, steps: Steps, units: Any) -> None:
        _, across, depth, outputs = filters.shape
        alone, groups = steps.groups == 0, max(steps.groups, 1)
        size, share = filters.itemsize, outputs // groups
        columns = full // size
        turned = inverse and not alone
        terms, count, step, beside = (share, depth, 1, outputs) if turned else (depth, share, outputs, 1)
        panels = ceiling(count, columns)
        for unit in range(units[0], units[1]):
            first = unit % panels * columns
            near = address(filters) + (unit // panels * share + first * beside) * size
            before = 0
            for phase in range(steps.down * steps.across if inverse else 1):
                tall, wide = seen_taps(filters.shape, steps, phase, inverse, memory.down, memory.across)
                target = address(packed) + (before * groups * panels + unit * tall * wide) * terms * columns * size
                for tap in range(tall * wide):
                    i, j = memory.down[2 * (tap // wide)], memory.across[2 * (tap % wide)]
                    here, there = (i * across + j) * depth * outputs, tap * terms * columns
                    place = target + there * size
                    pack(filters, near + here * size, step, beside, terms, min(columns, count - first), place)
                before += tall * wide

    return pack_filters


@cache
def meeting_panels(geometry: Geometry, inverse: bool, biased: bool) -> Callable[..., None]:
    """``meet(operands, block, place, rows, runs, steps, memory, floor)``: a block's places, all panels of all groups.

    ``operands`` are the source, the packed filters, the bias and the result; ``runs`` how many stretches of taps every
    row of the window has, and their terms.
    """
    band, band_apart = banding(geometry), banding(geometry, apart=True)
    full, start = geometry.vectors * geometry.width, START_BIAS if biased else START_ZERO

    @jitable
    def meet(
        operands: Any, block: Block, place: int, rows: int, runs: Any, steps: Steps, memory: Memory, floor: int
    ) -> None:
        source, packed, bias, y = operands
        size, alone, groups = y.itemsize, steps.groups == 0, max(steps.groups, 1)
        columns, outputs, terms = full // size, y.shape[3], 1 if alone else source.shape[3] // groups
        share, taps, (apart, _) = outputs // groups, block.tall * block.wide, spread_places(steps, inverse)
        panels = ceiling(share, columns)
        corner = (block.image * y.shape[1] + block.top * apart[0] + block.down) * y.shape[2] + block.right
        reach, how = (block.tall * runs[0], runs[1], 1, columns), (start, address(memory.edge), floor)
        for number in range(groups * panels):
            group, j = number // panels, number % panels * columns
            over, column = min(columns, share - j), group * share + j
            if biased:
                for d in range(over):
                    memory.edge[d] = bias[column + d]
            a = place + (column if alone else group * terms) * size
            b = address(packed) + (block.before * groups * panels + number * taps) * terms * columns * size
            where = a, b, address(y) + (corner * outputs + column) * size
            memory_of_band = memory.stage, memory.places
            if alone:
                band_apart(source, where, memory.table, rows, memory.taps, reach, over, *memory_of_band, how)
            else:
                band(source, where, memory.table, rows, memory.taps, reach, over, *memory_of_band, how)

    return meet


@cache
def correlating(geometry: Geometry, inverse: bool, biased: bool) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of a convolution from packed filters."""
    look, meet = looking(geometry), meeting_panels(geometry, inverse, biased)
    full = geometry.vectors * geometry.width

    @jitable
    def correlate(
        operands: Any, window: Any, memory: Memory, steps: Steps, blocks: Any, floor: int, units: Any
    ) -> None:
        source, _, _, y = operands
        alone, channels, columns = steps.groups == 0, source.shape[3], full // y.itemsize
        apart, stride = spread_places(steps, inverse)
        for unit in range(units[0], units[1]):
            block = block_of(unit, y, window, steps, blocks, inverse, memory)
            if block.rows == 0 or block.columns == 0:
                continue
            sight = look(source, block, stride, columns if alone else 1, memory)
            rows = list_places(memory.table, block, sight, stride, apart, channels, y)
            terms = 1 if alone else channels // max(steps.groups, 1)
            # side by side in the slab, the taps of a row are one
            joined = steps.groups == 1 and block.wide > 0 and sight.broad == block.wide - 1
            runs = (1, block.wide * terms) if joined else (block.wide, terms)
            list_taps(block, sight, runs[0], runs[1] * columns, channels, memory)
            meet(operands, block, sight.place, rows, runs, steps, memory, floor)

    return correlate


@cache
def correlation(
    geometry: Geometry, *, inverse: bool = False, biased: bool = False
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two steps of a convolution, with a bias perhaps, or of its gradient for the images, as `Correlated` has them.

    That gradient's third operand is the shape of the images; a bias is the third one of the convolution.
    """
    pack_filters, correlate = filter_packing(geometry, inverse), correlating(geometry, inverse, biased)
    own = -len(Memory._fields)
    packed, result = own - 1, own - 2
    bias = 2 if biased else own + 1  # without one, the memory for a panel's biases stands for it

    def pack(arrays: Any, words: Any, begin: int, end: int) -> None:
        pack_filters(arrays[1], arrays[packed], Memory(*arrays[own:]), Steps(*words[:-3]), (begin, end))

    def compute(arrays: Any, words: Any, begin: int, end: int) -> None:
        operands = arrays[0], arrays[packed], arrays[bias], arrays[result]
        memory, steps = Memory(*arrays[own:]), Steps(*words[:-3])
        correlate(operands, arrays[1].shape, memory, steps, words[-3:-1], words[-1], (begin, end))

    return pack, compute
