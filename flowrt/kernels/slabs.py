"""What a convolution's places see: taps of the window, and slabs of the images with the padding around them.

Images are NHWC, filters HWIO. The places of a gradient for the images that are equal modulo the strides are of one
*phase*: they see the same taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrt.kernels.panels import address, duplicating
from flowrt.kernels.table import View, jitable
from flowrt.spec import Spec, sliding

if TYPE_CHECKING:
    from flowrt.kernels.micro import Geometry


class Steps(NamedTuple):
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


def steps_of(x: Spec, filters: Spec, attrs: Mapping[str, Any]) -> Steps:
    """Strides, dilations and padding, each vertical and horizontal, and the number of groups."""
    sizes, window = x.concrete[1:3], filters.concrete[:2]
    down, across = sliding(sizes, window, attrs["strides"], attrs["dilations"], attrs["padding"])
    before = down.before or 0, across.before or 0
    return Steps(down.stride, across.stride, down.dilation, across.dilation, *before, attrs["groups"])


def tiled_steps(x: Spec, filters: Spec, attrs: Mapping[str, Any]) -> Steps:
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
def seen_taps(window: Any, steps: Steps, phase: int, inverse: bool, down_taps: Any, across_taps: Any) -> Any:
    """How many taps of a column and of a row of the window places of a phase see; both are listed as `reached` does."""
    down, right = phase // steps.across, phase % steps.across
    tall = reached(window[0], steps.down, steps.spread_down, steps.top, down, inverse, down_taps)
    wide = reached(window[1], steps.across, steps.spread_across, steps.left, right, inverse, across_taps)
    return tall, wide


@jitable
def ceiling(whole: int, part: int) -> int:
    """How many parts of a size make up the whole."""
    return (whole + part - 1) // part


@cache
def slabs(geometry: Geometry) -> Callable[..., None]:
    """``fill_slab(x, image, images, place, sizes, slab)``: a part of some images with zeros around what they have.

    ``place`` is its top row and left column, ``sizes`` its height and width.
    """
    duplicate = duplicating(geometry)

    @jitable
    def fill_slab(x: Any, image: int, images: int, place: Any, sizes: Any, slab: Any) -> None:
        top, left = place
        height, width = sizes
        channels, size = x.shape[3], x.itemsize
        first, last = max(-left, 0), min(width, x.shape[2] - left)
        row = width * channels
        for n in range(images):
            for i in range(height):
                at, h = (n * height + i) * row, top + i
                inside = h >= 0 and h < x.shape[1] and first < last
                start, end = (first * channels, last * channels) if inside else (row, row)
                for d in range(start):
                    slab[at + d] = 0
                for d in range(end, row):
                    slab[at + d] = 0
                if inside:
                    source = ((image + n) * x.shape[1] + h) * x.shape[2] + left + first
                    target = address(slab) + (at + start) * size
                    duplicate(x, address(x) + source * channels * size, target, end - start)

    return fill_slab
