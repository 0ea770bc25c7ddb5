"""A convolution, and its gradient for the images, on register tiles: patches are read where they lie.

A product's rows are places of the result, its terms the taps of the window times the channels. What a block of places
sees is copied into a slab (unless nothing of it is padding), and the table of rows points into that. The filters are
packed into column panels first, in a step of its own. The gradient for the images is a convolution too, of the result's
gradient with turned filters, phase by phase. Where groups make few channels, `lines` has rows and columns change roles.
`correlated` divides it all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.convolution.correlated import Blocks, CorrelationKind
from flowrt.kernels.tiles.convolution.lines import fill_planes, meet_lines, planes_of
from flowrt.kernels.tiles.convolution.slabs import LINE, WindowSteps, ceiling, fill_slab, reached, seen, spread_places
from flowrt.kernels.tiles.micro import START_BIAS, START_ZERO, Tiles, call
from flowrt.kernels.tiles.panels import address, band, pack, repeat_last


class CorrelationMemory(NamedTuple):
    """A thread's own memory, as `Correlated.local` says it."""

    slab: Any
    edge: Any
    table: Any
    down: Any
    across: Any
    taps: Any
    stage: Any
    places: Any


class SlabBlock(NamedTuple):
    """Places that see one slab: of some images, some rows and columns of every phase."""

    image: int
    images: int
    top: int
    rows: int
    left: int
    columns: int


class TapPhase(NamedTuple):
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
def terms_of(source: Any, steps: WindowSteps) -> int:
    """The channels that a column sums over."""
    return 1 if steps.groups == 0 else source.shape[3] // steps.groups


@jitable
def taps_of(window: Any, steps: WindowSteps, phase: int, inverse: int, memory: CorrelationMemory) -> tuple[int, int]:
    """How many taps down and across the window places of a phase see; both are listed as `reached` does."""
    down, right = phase // steps.across, phase % steps.across
    tall = reached(window[0], steps.down, steps.spread_down, steps.top, down, inverse, memory.down)
    return tall, reached(window[1], steps.across, steps.spread_across, steps.left, right, inverse, memory.across)


@jitable
def phase_of(
    number: int, block: SlabBlock, y: Any, taps: Any, before: int, steps: WindowSteps, inverse: int
) -> TapPhase:
    """A phase of a block that sees so many ``taps``."""
    apart, _ = spread_places(steps, inverse)
    down, right = number // apart[1], number % apart[1]
    rows = min(block.rows, ceiling(y.shape[1] - down, apart[0]) - block.top)
    columns = min(block.columns, ceiling(y.shape[2] - right, apart[1]) - block.left)
    return TapPhase(down, right, max(rows, 0), max(columns, 0), taps[0], taps[1], before)


@jitable
def look(
    tiles: Tiles,
    source: Any,
    block: SlabBlock,
    window: Any,
    steps: WindowSteps,
    inverse: int,
    plane: int,
    memory: CorrelationMemory,
) -> Sight:
    """What a block sees, in the slab if some is padding.

    It is copied there, too, where a window has several taps and channels fall into planes of so many: these lie one
    after another then, as they are read.
    """
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
        return Sight(address(source) + place * tiles.size, plane, channels, row, whole, first, left)
    row = width * plane
    whole = height * row
    planes, slab = (plane, block.images * whole), address(memory.slab)
    fill_slab(tiles, source, block.image, block.images, (top, start), (height, width), planes, slab)
    return Sight(slab, planes[1], plane, row, whole, first, left)


@jitable
def list_places(
    table: Any, images: int, phase: TapPhase, sight: Sight, steps: WindowSteps, inverse: int, y: Any
) -> int:
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
def list_taps(
    phase: TapPhase, sight: Sight, steps: WindowSteps, terms: int, columns: int, memory: CorrelationMemory
) -> Any:
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


@jitable
def pack_filters(
    tiles: Tiles, filters: Any, packed: Any, memory: CorrelationMemory, steps: WindowSteps, inverse: int, units: Any
) -> None:
    """The filters' panels [begin, end), of every phase."""
    _, across, depth, outputs = filters.shape
    alone, groups = steps.groups == 0, max(steps.groups, 1)
    size, share, columns = tiles.size, outputs // groups, tiles.wide
    turned = inverse != 0 and not alone
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
                pack(tiles, near + here * size, step, beside, terms, min(columns, count - first), place)
            before += tall * wide


@jitable
def meet_panels(
    tiles: Tiles,
    operands: Any,
    block: SlabBlock,
    phase: TapPhase,
    sight: Sight,
    rows: int,
    reach: Any,
    panels: Any,
    steps: WindowSteps,
    memory: CorrelationMemory,
    kind: CorrelationKind,
) -> None:
    """A block's places of a phase meet the panels from the first of ``panels`` to the last one.

    ``operands`` are the source, the packed filters, the bias and the result; ``reach`` is what `list_taps` answers.
    Where there are no groups channels are alone with a filter of their own.
    """
    source, packed, bias, y = operands
    size, groups, columns = tiles.size, max(steps.groups, 1), reach[3]
    outputs, share, taps = y.shape[3], y.shape[3] // groups, phase.tall * phase.wide * terms_of(source, steps)
    (apart, _), each = spread_places(steps, kind.inverse), ceiling(share, columns)
    corner = (block.image * y.shape[1] + block.top * apart[0] + phase.down) * y.shape[2]
    corner = (corner + block.left * apart[1] + phase.right) * outputs
    filters = address(packed) + phase.before * terms_of(source, steps) * groups * each * columns * size
    edge, start = address(memory.edge), START_BIAS if kind.biased else START_ZERO
    for number in range(panels[0], panels[1]):
        group, j = number // each, number % each * columns
        over, column = min(columns, share - j), group * share + j
        if kind.biased:
            call(tiles.move, (address(bias) + column * size, 0, 1, edge, 0, 1, over))
        a = sight.place + (number if steps.groups == 0 else group) * sight.plane * size
        where = a, filters + number * taps * columns * size, address(y) + (corner + column) * size
        how = start, edge, kind.floor
        band(tiles, where, memory.table, rows, memory.taps, reach, over, memory.stage, memory.places, how)


@jitable
def compute_panels(
    tiles: Tiles,
    operands: Any,
    block: SlabBlock,
    panels: Any,
    window: Any,
    memory: CorrelationMemory,
    steps: WindowSteps,
    kind: CorrelationKind,
) -> None:
    """What sees one slab, phase by phase."""
    source, _, _, y = operands
    columns, terms, inverse = tiles.wide, terms_of(source, steps), kind.inverse
    plane = columns if steps.groups == 0 else max(terms, 1)
    sight = look(tiles, source, block, window, steps, inverse, plane, memory)
    before = 0
    for number in range(steps.down * steps.across if inverse else 1):
        taps = taps_of(window, steps, number, inverse, memory)
        phase = phase_of(number, block, y, taps, before, steps, inverse)
        if phase.rows * phase.columns > 0:
            rows = list_places(memory.table, block.images, phase, sight, steps, inverse, y)
            reach = list_taps(phase, sight, steps, terms, columns, memory)
            meet_panels(tiles, operands, block, phase, sight, rows, reach, panels, steps, memory, kind)
        before += taps[0] * taps[1]


@jitable
def compute_lines(
    tiles: Tiles,
    operands: Any,
    block: SlabBlock,
    window: Any,
    memory: CorrelationMemory,
    steps: WindowSteps,
    kind: CorrelationKind,
) -> None:
    """The same, of all panels, with places as columns: ``operands`` have the filters as they are."""
    source, _, _, y = operands
    planes = planes_of(block.rows, block.columns, window, steps, kind.inverse, LINE // tiles.size)
    _, stride = spread_places(steps, kind.inverse)
    place = planes.first + block.top * stride[0], planes.left + block.left * stride[1]
    for image in range(block.image, block.image + block.images):
        fill_planes(tiles, source, image, place, planes, address(memory.slab))
        for number in range(steps.down * steps.across if kind.inverse else 1):
            taps = taps_of(window, steps, number, kind.inverse, memory)
            phase = phase_of(number, block, y, taps, 0, steps, kind.inverse)
            if phase.rows * phase.columns > 0:
                meet_lines(tiles, operands, image, block, phase, planes, steps, memory, kind)


@jitable
def block_of(unit: int, down: int, left: int, blocks: Blocks, y: Any, sizes: Any) -> SlabBlock:
    """A block of the unit among so many ``down`` an image, from the column ``left`` on."""
    image, top = unit // down * blocks.images, unit % down * blocks.rows
    rows, columns = min(blocks.rows, sizes[0] - top), min(blocks.columns, sizes[1] - left)
    return SlabBlock(image, min(blocks.images, y.shape[0] - image), top, rows, left, columns)


def pack_panels(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The step that packs filters, as `Correlated.packing` lays it out."""
    memory, kind = CorrelationMemory(*arrays[5:]), CorrelationKind(*words[11:])
    pack_filters(Tiles(*tiles), arrays[1], arrays[4], memory, WindowSteps(*words[:7]), kind.inverse, (begin, end))


@jitable
def opened(arrays: Any, words: Any, tiles: Any) -> Any:
    """What arrays and words stand for, and how many places there are down and across an image, or a phase of it."""
    steps, kind, y = WindowSteps(*words[:7]), CorrelationKind(*words[11:]), arrays[3]
    apart, _ = spread_places(steps, kind.inverse)
    sizes = ceiling(y.shape[1], apart[0]), ceiling(y.shape[2], apart[1])
    return Tiles(*tiles), steps, Blocks(*words[7:11]), kind, CorrelationMemory(*arrays[5:]), sizes


def correlate_panels(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The units [begin, end) of a convolution or its gradient for the images, with channels as columns."""
    tools, steps, blocks, kind, memory, sizes = opened(arrays, words, tiles)
    operands, y, groups = (arrays[0], arrays[4], arrays[2], arrays[3]), arrays[3], max(steps.groups, 1)
    panels = groups * ceiling(y.shape[3] // groups, tools.wide)
    over, down = ceiling(panels, blocks.panels), ceiling(sizes[0], blocks.rows)
    for unit in range(begin, end):
        first = unit % over * blocks.panels
        some = first, min(first + blocks.panels, panels)
        for left in range(0, sizes[1], blocks.columns):
            block = block_of(unit // over, down, left, blocks, y, sizes)
            compute_panels(tools, operands, block, some, arrays[1].shape, memory, steps, kind)


def correlate_lines(arrays: Any, words: Any, tiles: Any, begin: int, end: int) -> None:
    """The same with places as columns: units are blocks of places."""
    tools, steps, blocks, kind, memory, sizes = opened(arrays, words, tiles)
    down = ceiling(sizes[0], blocks.rows)
    for unit in range(begin, end):
        for left in range(0, sizes[1], blocks.columns):
            block = block_of(unit, down, left, blocks, arrays[3], sizes)
            compute_lines(tools, arrays[:4], block, arrays[1].shape, memory, steps, kind)
