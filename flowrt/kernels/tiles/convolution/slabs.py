"""What a convolution's places see: taps of the window, and slabs of the images with the padding around them.

Images are NHWC, filters HWIO. The places of a gradient for the images that are equal modulo the strides are of one
*phase*: they see the same taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flowrt.base.spec import Spec, sliding
from flowrt.kernels.language.table import View, jitable
from flowrt.kernels.tiles.micro import Tiles, call
from flowrt.kernels.tiles.panels import address, duplicate

LINE = 64  # bytes of a line of caches


class WindowSteps(NamedTuple):
    """How a window goes over images. No ``groups``: every channel has a filter of its own, side by side."""

    down: int
    across: int
    spread_down: int
    spread_across: int
    top: int
    left: int
    groups: int


Roles = Callable[[Sequence[Spec], Sequence[Spec]], tuple[Spec, Spec, Spec]]


def forward(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    """Which operands of a convolution op are the images, the filters and the result."""
    return inputs[0], inputs[1], outputs[0]


def to_input(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    return outputs[0], inputs[1], inputs[0]


def to_filters(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    return inputs[0], outputs[0], inputs[1]


def steps_of(x: Spec, filters: Spec, attrs: Mapping[str, Any]) -> WindowSteps:
    """Strides, dilations and padding, each vertical and horizontal, and the number of groups."""
    sizes, window = x.concrete[1:3], filters.concrete[:2]
    down, across = sliding(sizes, window, attrs["strides"], attrs["dilations"], attrs["padding"])
    before = down.before or 0, across.before or 0
    return WindowSteps(down.stride, across.stride, down.dilation, across.dilation, *before, attrs["groups"])


def tiled_steps(x: Spec, filters: Spec, attrs: Mapping[str, Any]) -> WindowSteps:
    """`steps_of` for register tiles: no groups where every channel has a filter of its own."""
    steps = steps_of(x, filters, attrs)
    return steps._replace(groups=0) if channels_apart(filters, steps.groups) else steps


def channels_apart(filters: Spec, groups: int) -> bool:
    """Whether every channel of the images makes one of the result."""
    return groups > 1 and filters.concrete[2:] == (1, groups)


def dense(specs: Sequence[Spec]) -> tuple[View, ...]:
    return tuple(View.dense(spec.concrete) for spec in specs)


@jitable
def reached(window: int, stride: int, spread: int, before: int, phase: int, inverse: bool, taps: Any) -> int:
    """How many of a window's taps places of a phase see; ``taps``: pairs of a tap and how far from a place it is."""
    count = 0
    for t in range(window):
        tap = window - 1 - t if inverse else t
        distance = phase + before - tap * spread if inverse else tap * spread - before
        if inverse:
            if distance % stride != 0:
                continue
            distance = distance // stride
        taps[2 * count], taps[2 * count + 1] = tap, distance
        count += 1
    return count


@jitable
def spread_places(steps: WindowSteps, inverse: bool) -> Any:
    """How far the places of a phase are apart, and how far apart in the source is what neighbours see."""
    return ((steps.down, steps.across), (1, 1)) if inverse else ((1, 1), (steps.down, steps.across))


@jitable
def ceiling(whole: int, part: int) -> int:
    """How many parts of a size make up the whole."""
    return (whole + part - 1) // part


def alike(whole: int, most: int) -> int:
    """The size of equal parts of ``whole`` (but for the last), none larger than ``most``."""
    return -(-whole // max(-(-whole // most), 1)) or 1


@jitable
def seen(places: int, window: int, stride: int, spread: int, before: int, inverse: bool) -> tuple[int, int]:
    """What a line of places sees, whatever its phase: how far from the first one it begins, and how much it is."""
    reach = (window - 1) * spread
    if inverse:
        first = ceiling(before - reach, stride)
        return first, places + ceiling(before, stride) - first
    return -before, (places - 1) * stride + reach + 1


@jitable
def spread_row(tiles: Tiles, channels: int, source: int, target: int, plane: int, apart: int, columns: int) -> None:
    """``columns`` places of a row, into planes that begin ``apart``: read in order, since they come from afar."""
    size, lanes, full = tiles.size, tiles.lanes, channels // plane
    whole = plane // lanes
    call(tiles.spread, (source, channels, target, plane, columns, plane, apart, full, whole))
    done, left = whole * lanes, channels - full * plane
    if done < plane or left > 0:
        for j in range(columns):
            here, there = source + j * channels * size, target + j * plane * size
            call(tiles.move, (here + done * size, plane, 1, there + done * size, apart, full, plane - done))
            call(tiles.move, (here + full * plane * size, 0, 1, there + full * apart * size, 0, 1, left))


@jitable
def fill_slab(tiles: Tiles, x: Any, image: int, images: int, place: Any, sizes: Any, planes: Any, slab: int) -> None:
    """A part of some images, zeros around what they have, into the slab at an address.

    ``place`` is its top row and left column, ``sizes`` its height and width. ``planes`` says how many channels lie side
    by side, and how far apart planes of so many begin.
    """
    (top, left), (height, width), (plane, apart) = place, sizes, planes
    channels, size, row = x.shape[3], tiles.size, width * plane
    first, last = max(-left, 0), min(width, x.shape[2] - left)
    for n in range(images):
        for i in range(height):
            h, at = top + i, (n * height + i) * row
            inside = h >= 0 and h < x.shape[1] and first < last
            start, end = (first * plane, last * plane) if inside else (row, row)
            for each in range(at, at + ceiling(channels, plane) * apart, max(apart, 1)):
                if start > 0:
                    call(tiles.clear, (slab + each * size, start))
                if end < row:
                    call(tiles.clear, (slab + (each + end) * size, row - end))
            source = address(x) + (((image + n) * x.shape[1] + h) * x.shape[2] + left + first) * channels * size
            target = slab + (at + start) * size
            if inside and plane == channels:
                duplicate(tiles, source, target, end - start)
            elif inside:
                spread_row(tiles, channels, source, target, plane, apart, last - first)
