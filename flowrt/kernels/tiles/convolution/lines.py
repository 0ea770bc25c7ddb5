"""A convolution to few channels on register tiles: places side by side are a tile's columns, channels its rows.

Where a group makes fewer channels than vectors have lanes, most of a panel of channels would be dropped. So what a
block of places sees is turned around: each channel lies in a plane of its own, in which a tap sees, of places side by
side, what lies side by side. The planes are a tile's packed operand, the filters, where they lie, its rows. Strides
part a plane by what a place's coordinates leave over, which keeps neighbours together. Places are counted through a
plane's rows, ends included: what is computed there is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.convolution.slabs import WindowSteps, ceiling, seen
from flowrt.kernels.tiles.micro import START_ZERO, Geometry, Tiles, call
from flowrt.kernels.tiles.panels import address, repeat_last, tile_rows

TURN = 0.7  # cycles that transposing an entry around takes, as measured with AVX2
WRITE = 1.0  # ... and putting one into its place
STEP, NARROW_STEP = 0.5, 0.6  # ... and a vector's multiply-add, in tiles of all vectors and of half of them


def flattened(geometry: Geometry) -> Geometry:
    """The tile for few rows: as many sums, and any number of rows but a single one is made up of such tiles."""
    return replace(geometry, rows=3, fewer=2, vectors=4)


class LinePlanes(NamedTuple):
    """What a block sees, channel by channel: its size, the parts of a plane, their size, and the step between planes.

    ``first`` and ``left`` are how far above and left of the block's first place it begins.
    """

    first: int
    left: int
    height: int
    width: int
    down: int
    across: int
    rows: int
    columns: int
    step: int


@jitable
def planes_of(rows: int, columns: int, window: Any, steps: WindowSteps, inverse: bool, line: int) -> LinePlanes:
    """The planes that so many places see; a step of an odd number of ``line`` entries spreads over a cache's sets."""
    first, height = seen(rows, window[0], steps.down, steps.spread_down, steps.top, inverse)
    left, width = seen(columns, window[1], steps.across, steps.spread_across, steps.left, inverse)
    down, across = (1, 1) if inverse else (steps.down, steps.across)
    tall, wide = ceiling(height, down), ceiling(width, across)
    step = (ceiling(down * across * tall * wide, line) | 1) * line
    return LinePlanes(first, left, height, width, down, across, tall, wide, step)


@jitable
def counted(rows: int, columns: int, planes: LinePlanes, wide: int) -> int:
    """How many places are computed for a block of so many, in panels of ``wide``."""
    panels: int = ceiling((rows - 1) * planes.columns + columns, wide)
    return panels * wide


def memory_needed(
    channels: int, results: int, places: tuple[int, int], planes: LinePlanes, wide: int, lanes: int
) -> int:
    """Entries of a slab: planes, one panel beyond the last, and results that lie likewise."""
    vectors: int = ceiling(channels, lanes)
    counts: int = counted(*places, planes, wide)
    return vectors * lanes * planes.step + wide + results * counts


def pays(geometry: Geometry, itemsize: int, terms: int, taps: float, results: int, fresh: float, waste: float) -> bool:
    """Whether places as columns cost less than channels as columns do, by the cycles of a place.

    A group's place has ``results`` and sums ``terms`` channels of so many ``taps``. ``fresh`` is how many places of the
    images are turned around for a place, ``waste`` how many are computed for each that counts.
    """
    lanes, wide = geometry.width // itemsize, geometry.vectors * geometry.width // itemsize
    over = results % wide
    vectors = results // wide * geometry.vectors * STEP
    if over:
        vectors += geometry.vectors * (STEP if 2 * over > wide else NARROW_STEP / 2)
    rows = max(results, flattened(geometry).fewer)
    turned = terms * taps * rows * waste * STEP / lanes + terms * fresh * TURN + results * WRITE
    return turned < terms * taps * vectors


@jitable
def turn_line(tiles: Tiles, x: Any, source: int, beside: int, target: int, step: int, count: int) -> None:
    """``count`` places that are ``beside`` each other: all their channels, into planes ``step`` apart.

    Whole vectors of channels are read, beyond a place's last as well, unless nothing of the images lies there.
    """
    size, lanes, channels = tiles.size, tiles.lanes, x.shape[3]
    end, whole = address(x) + x.size * size, ceiling(channels, lanes) * lanes
    done = 0
    while done < count:
        begin = min(done, count - lanes)
        here, there = source + begin * beside * size, target + begin * size
        if count < lanes or here + ((lanes - 1) * beside + whole) * size > end:
            left = min(lanes, count - done)
            here, there = source + done * beside * size, target + done * size
            call(tiles.move, (here, 1, beside, there, step, channels, left))
        else:
            for d in range(0, whole, lanes):
                call(tiles.turn, (here + d * size, beside, there + d * step * size, step))
        done += lanes


@jitable
def fill_planes(tiles: Tiles, x: Any, image: int, place: Any, planes: LinePlanes, slab: int) -> None:
    """What begins at ``place`` of an image, zeros around what it has, into the slab at an address."""
    (top, left), size, channels = place, tiles.size, x.shape[3]
    inside = left >= 0 and left + planes.width <= x.shape[2]
    if not (inside and top >= 0 and top + planes.height <= x.shape[1]):
        call(tiles.clear, (slab, channels * planes.step))
    for i in range(max(-top, 0), min(planes.height, x.shape[1] - top)):
        for phase in range(planes.across):
            first = max(ceiling(-left - phase, planes.across), 0)
            last = ceiling(min(planes.width, x.shape[2] - left) - phase, planes.across)
            at = left + phase + first * planes.across
            source = address(x) + ((image * x.shape[1] + top + i) * x.shape[2] + at) * channels * size
            row = (i % planes.down * planes.across + phase) * planes.rows + i // planes.down
            target = slab + (row * planes.columns + first) * size
            turn_line(tiles, x, source, planes.across * channels, target, planes.step, last - first)


@jitable
def list_line_taps(filters: Any, reached: Any, planes: LinePlanes, terms: int, inverse: bool, memory: Any) -> Any:
    """Where every tap begins, in the filters and in a plane; how many there are, their terms and the steps of those.

    ``reached`` is how many taps down and across are seen. Where there are more of them across than channels, which in
    a plane are all as far apart, a tap stands for a row of them in one channel.
    """
    (tall, wide), taps = reached, memory.taps
    over, each = filters.shape[2] * filters.shape[3], 1 if inverse else filters.shape[3]
    further = memory.across[3] - memory.across[1] if wide > 1 else 0
    along = wide > terms and planes.across == 1
    for i in range(tall):
        down = memory.down[2 * i + 1] - planes.first
        part, row = down % planes.down * planes.across, down // planes.down
        for j in range(terms if along else wide):
            column = 0 if along else j
            right = memory.across[2 * column + 1] - planes.left
            a = (memory.down[2 * i] * filters.shape[1] + memory.across[2 * column]) * over
            b = (part + right % planes.across) * planes.rows * planes.columns
            b += row * planes.columns + right // planes.across
            at = i * (terms if along else wide) + j
            taps[2 * at] = a + j * each if along else a
            taps[2 * at + 1] = b + j * planes.step if along else b
    if along:
        return tall * terms, wide, (memory.across[2] - memory.across[0]) * over if wide > 1 else 0, further
    return tall * wide, terms, each, planes.step


@jitable
def write(
    tiles: Tiles,
    results: int,
    wide: int,
    step: int,
    y: Any,
    corner: Any,
    apart: Any,
    sizes: Any,
    channels: Any,
    ends: Any,
) -> None:
    """Results into their places.

    ``results`` have rows of ``wide`` places, channels ``step`` apart; ``sizes`` count, ``channels`` are the first and
    how many. ``ends`` are where the biases are, or 0, and whether what is negative becomes 0.
    """
    (image, top, left), size, outputs = corner, tiles.size, y.shape[3]
    for i in range(sizes[0]):
        row = (image * y.shape[1] + top + i * apart[0]) * y.shape[2] + left
        for r in range(channels[1]):
            channel = channels[0] + r
            place, bias = address(y) + (row * outputs + channel) * size, ends[0] + channel * size if ends[0] else 0
            source = results + (r * step + i * wide) * size
            call(tiles.put, (source, place, apart[1] * outputs, sizes[1], bias, ends[1]))


@jitable
def meet_lines(
    tiles: Tiles,
    operands: Any,
    image: int,
    block: Any,
    phase: Any,
    planes: LinePlanes,
    steps: WindowSteps,
    memory: Any,
    kind: Any,
) -> None:
    """An image's places of a phase, all groups. ``operands`` are the source, the filters, the bias and the result."""
    source, filters, bias, y = operands
    size, lanes, wide, channels, groups = tiles.size, tiles.lanes, tiles.wide, source.shape[3], steps.groups
    terms, share, inverse = channels // groups, y.shape[3] // groups, kind.inverse != 0
    count = counted(phase.rows, phase.columns, planes, wide)
    reach = list_line_taps(filters, (phase.tall, phase.wide), planes, terms, inverse, memory)
    half, table, taps = memory.table.size // 2, address(memory.table), address(memory.taps)
    for r in range(share):
        memory.table[r], memory.table[half + r] = r * (filters.shape[3] if inverse else 1), r * count
    repeat_last(memory.table, share)
    slab = address(memory.slab)
    results = slab + (ceiling(channels, lanes) * lanes * planes.step + wide) * size
    apart = (steps.down, steps.across) if inverse else (1, 1)
    corner = image, block.top * apart[0] + phase.down, block.left * apart[1] + phase.right
    ends = address(bias) if kind.biased else 0, kind.floor
    for group in range(groups):
        a = address(filters) + group * (filters.shape[3] // groups) * size
        b = slab + group * terms * planes.step * size
        for place in range(0, count * size, wide * size):
            done = 0
            while done < share:
                listed = table + 8 * done, table + 8 * (half + done)
                words = (a, listed[0], b + place, taps, *reach, results + place, listed[1], START_ZERO, 0, 0)
                done += tile_rows(tiles, False, words, share - done)
        sizes, made = (phase.rows, phase.columns), (group * share, share)
        write(tiles, results, planes.columns, count, y, corner, apart, sizes, made, ends)
