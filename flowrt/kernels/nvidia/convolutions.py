"""What a convolution is to cuDNN: dimensions, strides and edges, or a product of matrices where it is one.

Law: pure; a step's views and words in, what is asked for out. Images stay NHWC as they lie. Filters lie HWIO here and
OHWI there, which is the transpose of the one matrix [rows * columns * channels, outputs].
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, cast

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.nvidia.products import StridedMatrices, StridedProduct
from flowrt.kernels.ops.nn.conv import conv2d_filter_grad_on_cuda, conv2d_input_grad_on_cuda, conv2d_on_cuda
from flowrt.kernels.tiles.convolution.slabs import WindowSteps

if TYPE_CHECKING:
    from flowrt.kernels.launch import LaunchStep

DTYPES = (np.dtype("float32"), np.dtype("float64"))

Pair = tuple[int, int]
Sizes = tuple[int, int, int, int]


class Direction(Enum):
    """What is computed, and which of a step's operands are the images, the filters and the result, or gradients."""

    FORWARD = (0, 1, -1)
    TO_IMAGES = (-1, 1, 0)
    TO_FILTERS = (0, -1, 1)


@valueclass
class Convolution:
    """A convolution of NHWC ``images`` with HWIO ``filters``, or one of its gradients; all sizes as they lie.

    Zeros stand around images, so many ``before`` and ``after`` them.
    """

    direction: Direction
    images: Sizes
    filters: Sizes
    result: Sizes
    strides: Pair
    dilations: Pair
    before: Pair
    after: Pair
    dtype: np.dtype[np.generic]


DIRECTIONS = {
    conv2d_on_cuda: Direction.FORWARD,
    conv2d_input_grad_on_cuda: Direction.TO_IMAGES,
    conv2d_filter_grad_on_cuda: Direction.TO_FILTERS,
}


def convolution(step: LaunchStep) -> Convolution | None:
    """What a step of `conv2d` or its gradients computes; None where there is nothing, or no library does it."""
    direction, views = DIRECTIONS[step.kernel.function], step.call.views
    images, filters, result = (cast("Sizes", views[number].shape) for number in direction.value)
    dtype = step.dtypes[-1]
    if dtype not in DTYPES or not all(map(math.prod, (images, filters, result))):
        return None
    steps = WindowSteps(*step.call.words)
    strides, dilations, before = (
        (steps.down, steps.across),
        (steps.spread_down, steps.spread_across),
        (steps.top, steps.left),
    )
    down, across = (
        _after(images[1 + i], filters[i], result[1 + i], strides[i], dilations[i], before[i]) for i in (0, 1)
    )
    return Convolution(direction, images, filters, result, strides, dilations, before, (down, across), dtype)


def _after(size: int, window: int, places: int, stride: int, dilation: int, before: int) -> int:
    """How many zeros are behind: as many as before where that makes no other number of places, as that is usual."""
    needed = (places - 1) * stride + (window - 1) * dilation + 1 - size - before
    return before if needed <= before < needed + stride else max(needed, 0)


def as_product(asked: Convolution) -> StridedProduct | None:
    """The product of matrices that a convolution with single entries is, of the operands that its step has."""
    rows, columns, depth, wide = asked.filters
    plain = (rows, columns, *asked.strides) == (1, 1, 1, 1) and asked.images[1:3] == asked.result[1:3]
    if not plain or depth != asked.images[3]:
        return None
    places = math.prod(asked.images[:3])
    images, filters = StridedMatrices(depth, places), StridedMatrices(wide, depth)
    result = StridedMatrices(wide, places)
    if asked.direction is Direction.FORWARD:
        return StridedProduct(b=filters, a=images, y=result, batch=1, dtype=asked.dtype)
    if asked.direction is Direction.TO_IMAGES:
        flipped = StridedMatrices(wide, depth, transposed=True)
        return StridedProduct(b=flipped, a=result, y=images, batch=1, dtype=asked.dtype)
    flipped = StridedMatrices(depth, places, transposed=True)
    return StridedProduct(b=result, a=flipped, y=filters, batch=1, dtype=asked.dtype)
