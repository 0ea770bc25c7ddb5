"""A convolution, and its gradient for the images, on register tiles: patches are read where they lie.

A product's rows are places of the result, its terms the taps of the window times the channels. What a block of places
sees is copied into a slab (unless nothing of it is padding), and the table of rows points into that. The filters are
packed into column panels first, in a step of its own. The gradient for the images is a convolution too, of the result's
gradient with turned filters, phase by phase. Where groups make few channels, `lines` has rows and columns change roles.
`correlated` divides it all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from flowrt.kernels.correlated import Blocks
from flowrt.kernels.lines import meeting_lines, planes_of, turning
from flowrt.kernels.micro import START_BIAS, START_ZERO, Geometry
from flowrt.kernels.panels import address, banding, packing, repeat_last
from flowrt.kernels.slabs import LINE, Steps, ceiling, reached, seen, slabs, spread_places
from flowrt.kernels.table import jitable


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
    """Places that see one slab: of some images, some rows and columns of every phase."""

    image: int
    images: int
    top: int
    rows: int
    left: int
    columns: int


class Phase(NamedTuple):
    """The first place of a phase, the rows and columns a block has of it, the taps they see, and earlier phases see."""

    down: int
    right: int
    rows: int
    columns: int
    tall: int
    wide: int
    before: int


class Sight(NamedTuple):
    """What a block sees: where it begins, and steps between channels' planes, neighbours, rows and images.

    ``first`` and ``left`` are how far above and left of the block's first place it begins.
    """

    place: int
    plane: int
    beside: int
    row: int
    whole: int
    first: int
    left: int


@jitable
def terms_of(source: Any, steps: Steps) -> int:
    """The channels that a column sums over."""
    return 1 if steps.groups == 0 else source.shape[3] // steps.groups


@jitable
def taps_of(window: Any, steps: Steps, phase: int, inverse: bool, memory: Memory) -> tuple[int, int]:
    """How many taps down and across the window places of a phase see; both are listed as `reached` does."""
    down, right = phase // steps.across, phase % steps.across
    tall = reached(window[0], steps.down, steps.spread_down, steps.top, down, inverse, memory.down)
    return tall, reached(window[1], steps.across, steps.spread_across, steps.left, right, inverse, memory.across)


@jitable
def phase_of(number: int, block: Block, y: Any, taps: Any, before: int, steps: Steps, inverse: bool) -> Phase:
    """A phase of a block that sees so many ``taps``."""
    apart, _ = spread_places(steps, inverse)
    down, right = number // apart[1], number % apart[1]
    rows = min(block.rows, ceiling(y.shape[1] - down, apart[0]) - block.top)
    columns = min(block.columns, ceiling(y.shape[2] - right, apart[1]) - block.left)
    return Phase(down, right, max(rows, 0), max(columns, 0), taps[0], taps[1], before)


@cache
def looking(geometry: Geometry, inverse: bool) -> Callable[..., Sight]:
    """``look(source, block, window, steps, plane, memory)``: what a block sees, in the slab if some is padding.

    It is copied there, too, where a window has several taps and channels fall into planes of so many: these lie one
    after another then, as they are read.
    """
    fill_slab = slabs(geometry)

    @jitable
    def look(source: Any, block: Block, window: Any, steps: Steps, plane: int, memory: Memory) -> Sight:
        _, stride = spread_places(steps, inverse)
        first, height = seen(block.rows, window[0], steps.down, steps.spread_down, steps.top, inverse)
        left, width = seen(block.columns, window[1], steps.across, steps.spread_across, steps.left, inverse)
        top, start, channels = first + block.top * stride[0], left + block.left * stride[1], source.shape[3]
        inside = top >= 0 and top + height <= source.shape[1] and start >= 0 and start + width <= source.shape[2]
        together = plane == channels or (window[0] * window[1] == 1 and channels % plane == 0)
        if inside and together:
            row = source.shape[2] * channels
            place = (block.image * source.shape[1] + top) * row + start * channels
            whole = source.shape[1] * row
            return Sight(address(source) + place * source.itemsize, plane, channels, row, whole, first, left)
        row = width * plane
        whole = height * row
        planes = plane, block.images * whole
        fill_slab(source, block.image, block.images, (top, start), (height, width), planes, memory.slab)
        return Sight(address(memory.slab), planes[1], plane, row, whole, first, left)

    return look


@jitable
def list_places(table: Any, images: int, phase: Phase, sight: Sight, steps: Steps, inverse: bool, y: Any) -> int:
    """A row of the table for every place; how many there are."""
    (apart, stride), half, r = spread_places(steps, inverse), table.size // 2, 0
    for n in range(images):
        for i in range(phase.rows):
            here = (n * y.shape[1] + i * apart[0]) * y.shape[2] * y.shape[3]
            there = n * sight.whole + i * stride[0] * sight.row
            for j in range(phase.columns):
                table[r] = there + j * stride[1] * sight.beside
                table[half + r] = here + j * apart[1] * y.shape[3]
                r += 1
    repeat_last(table, r)
    return r


@jitable
def list_taps(phase: Phase, sight: Sight, steps: Steps, terms: int, columns: int, memory: Memory) -> Any:
    """Where every tap begins, from a place and in a panel; how many there are, their terms and the step between those.

    The taps of a row are one where they follow one another.
    """
    alone, last = steps.groups == 0, 2 * phase.wide - 1
    joined = phase.wide > 0 and memory.across[last] - memory.across[1] == phase.wide - 1
    joined = joined and (alone or sight.beside == terms)
    runs, depth = (1, phase.wide * terms) if joined else (phase.wide, terms)
    for i in range(phase.tall):
        for j in range(runs):
            tap = i * runs + j
            right = (memory.across[2 * j + 1] - sight.left) * sight.beside
            memory.taps[2 * tap] = (memory.down[2 * i + 1] - sight.first) * sight.row + right
            memory.taps[2 * tap + 1] = tap * depth * columns
    return phase.tall * runs, depth, sight.beside if alone else 1, columns


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
                tall, wide = taps_of(filters.shape, steps, phase, inverse, memory)
                target = address(packed) + (before * groups * panels + unit * tall * wide) * terms * columns * size
                for tap in range(tall * wide):
                    i, j = memory.down[2 * (tap // wide)], memory.across[2 * (tap % wide)]
                    here, there = (i * across + j) * depth * outputs, tap * terms * columns
                    place = target + there * size
                    pack(filters, near + here * size, step, beside, terms, min(columns, count - first), place)
                before += tall * wide

    return pack_filters


@cache
def meeting_panels(geometry: Geometry, inverse: bool, biased: bool, alone: bool) -> Callable[..., None]:
    """``meet(operands, block, phase, sight, rows, reach, panels, steps, memory, floor)``: a block's places of a phase.

    They meet the panels from the first of ``panels`` to the last one. ``operands`` are the source, the packed filters,
    the bias and the result; ``reach`` is what `list_taps` answers. Channels are ``alone`` with a filter of their own.
    """
    band = banding(geometry, apart=alone)
    start = START_BIAS if biased else START_ZERO

    @jitable
    def meet(
        operands: Any,
        block: Block,
        phase: Phase,
        sight: Sight,
        rows: int,
        reach: Any,
        panels: Any,
        steps: Steps,
        memory: Memory,
        floor: int,
    ) -> None:
        source, packed, bias, y = operands
        size, groups, columns = y.itemsize, max(steps.groups, 1), reach[3]
        outputs, share, taps = y.shape[3], y.shape[3] // groups, phase.tall * phase.wide * terms_of(source, steps)
        (apart, _), each = spread_places(steps, inverse), ceiling(share, columns)
        corner = (block.image * y.shape[1] + block.top * apart[0] + phase.down) * y.shape[2]
        corner = (corner + block.left * apart[1] + phase.right) * outputs
        filters = address(packed) + phase.before * terms_of(source, steps) * groups * each * columns * size
        how = start, address(memory.edge), floor
        for number in range(panels[0], panels[1]):
            group, j = number // each, number % each * columns
            over, column = min(columns, share - j), group * share + j
            if biased:
                for d in range(over):
                    memory.edge[d] = bias[column + d]
            a = sight.place + (number if alone else group) * sight.plane * size
            where = a, filters + number * taps * columns * size, address(y) + (corner + column) * size
            band(source, where, memory.table, rows, memory.taps, reach, over, memory.stage, memory.places, how)

    return meet


@cache
def computing(geometry: Geometry, inverse: bool, biased: bool, alone: bool) -> Callable[..., None]:
    """``compute(operands, block, panels, window, memory, steps, floor)``: what sees one slab, phase by phase."""
    look, meet = looking(geometry, inverse), meeting_panels(geometry, inverse, biased, alone)
    full = geometry.vectors * geometry.width

    @jitable
    def compute(
        operands: Any, block: Block, panels: Any, window: Any, memory: Memory, steps: Steps, floor: int
    ) -> None:
        source, _, _, y = operands
        columns, terms = full // y.itemsize, terms_of(source, steps)
        sight = look(source, block, window, steps, columns if alone else max(terms, 1), memory)
        before = 0
        for number in range(steps.down * steps.across if inverse else 1):
            taps = taps_of(window, steps, number, inverse, memory)
            phase = phase_of(number, block, y, taps, before, steps, inverse)
            if phase.rows * phase.columns > 0:
                rows = list_places(memory.table, block.images, phase, sight, steps, inverse, y)
                reach = list_taps(phase, sight, steps, terms, columns, memory)
                meet(operands, block, phase, sight, rows, reach, panels, steps, memory, floor)
            before += taps[0] * taps[1]

    return compute


@cache
def computing_lines(geometry: Geometry, inverse: bool, biased: bool) -> Callable[..., None]:
    """The same, of all panels, with places as columns: ``operands`` have the filters as they are."""
    fill, meet = turning(geometry), meeting_lines(geometry, inverse, biased)

    @jitable
    def compute(
        operands: Any, block: Block, panels: Any, window: Any, memory: Memory, steps: Steps, floor: int
    ) -> None:
        source, _, _, y = operands
        planes = planes_of(block.rows, block.columns, window, steps, inverse, LINE // y.itemsize)
        _, stride = spread_places(steps, inverse)
        place = planes.first + block.top * stride[0], planes.left + block.left * stride[1]
        for image in range(block.image, block.image + block.images):
            fill(source, image, place, planes, memory.slab)
            for number in range(steps.down * steps.across if inverse else 1):
                taps = taps_of(window, steps, number, inverse, memory)
                phase = phase_of(number, block, y, taps, 0, steps, inverse)
                if phase.rows * phase.columns > 0:
                    meet(operands, image, block, phase, planes, steps, memory, floor)

    return compute


@cache
def correlating(geometry: Geometry, inverse: bool, compute: Callable[..., None]) -> Callable[..., None]:
    """The helper that computes the units [begin, end) of a convolution, block by block."""
    full = geometry.vectors * geometry.width

    @jitable
    def correlate(
        operands: Any, window: Any, memory: Memory, steps: Steps, blocks: Blocks, floor: int, units: Any
    ) -> None:
        y, groups = operands[3], max(steps.groups, 1)
        apart, _ = spread_places(steps, inverse)
        height, width = ceiling(y.shape[1], apart[0]), ceiling(y.shape[2], apart[1])
        panels = groups * ceiling(y.shape[3] // groups, full // y.itemsize)
        over, down = ceiling(panels, blocks.panels), ceiling(height, blocks.rows)
        for unit in range(units[0], units[1]):
            place, first = unit // over, unit % over * blocks.panels
            image, top = place // down * blocks.images, place % down * blocks.rows
            some = first, min(first + blocks.panels, panels)
            for left in range(0, width, blocks.columns):
                sizes = min(blocks.images, y.shape[0] - image), min(blocks.rows, height - top)
                block = Block(image, sizes[0], top, sizes[1], left, min(blocks.columns, width - left))
                compute(operands, block, some, window, memory, steps, floor)

    return correlate


class Steppers(NamedTuple):
    """The steps of a convolution, as `Correlated` lays them out."""

    pack: Callable[..., None]
    lines: Callable[..., None]
    apart: Callable[..., None]
    places: Callable[..., None]


@cache
def correlation(geometry: Geometry, *, inverse: bool = False, biased: bool = False) -> Steppers:
    """The steps of a convolution, with a bias perhaps, or of its gradient for the images.

    That gradient's third operand is the shape of the images; a bias is the third one of the convolution.
    """
    pack_filters, own = filter_packing(geometry, inverse), -len(Memory._fields)
    packed, result = own - 1, own - 2
    bias = 2 if biased else own + 1  # without one, the memory for a panel's biases stands for it

    def pack(arrays: Any, words: Any, begin: int, end: int) -> None:
        pack_filters(arrays[1], arrays[packed], Memory(*arrays[own:]), Steps(*words[:-5]), (begin, end))

    def step(compute: Callable[..., None], filters: int) -> Callable[..., None]:
        correlate = correlating(geometry, inverse, compute)

        def compute_units(arrays: Any, words: Any, begin: int, end: int) -> None:
            operands = arrays[0], arrays[filters], arrays[bias], arrays[result]
            memory, steps, blocks = Memory(*arrays[own:]), Steps(*words[:-5]), Blocks(*words[-5:-1])
            correlate(operands, arrays[1].shape, memory, steps, blocks, words[-1], (begin, end))

        return compute_units

    lines = step(computing_lines(geometry, inverse, biased), 1)
    apart, places = (step(computing(geometry, inverse, biased, alone), packed) for alone in (True, False))
    return Steppers(pack, lines, apart, places)
