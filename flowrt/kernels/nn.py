"""Convolution as products of patches and filters; entropy entry by entry.

A convolution gathers the patches of as many images as fit into a small scratch and hands them to BLAS at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrt.kernels.blas import gemm, gemm_scratch
from flowrt.kernels.exponential import ZERO
from flowrt.kernels.logarithm import log_of_one_and_less32
from flowrt.kernels.table import Call, View, elementwise, host_only, jitable, kernel, single
from flowrt.kernels.twin import cuda
from flowrt.spec import Spec, sliding

PATCHES = 1 << 18  # entries of patches gathered at a time: 1 MiB of float32, to stay in a core's cache


def _forward(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    """Which operands of a convolution op are the images, the filters and the result."""
    return inputs[0], inputs[1], outputs[0]


def _to_input(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    return outputs[0], inputs[1], inputs[0]


def _to_filters(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> tuple[Spec, Spec, Spec]:
    return inputs[0], outputs[0], inputs[1]


def _steps(x: Spec, filters: Spec, attrs: Mapping[str, Any]) -> tuple[int, ...]:
    """Strides, dilations and padding, each vertical and horizontal, and the number of groups."""
    sizes, window = x.concrete[1:3], filters.concrete[:2]
    down, across = sliding(sizes, window, attrs["strides"], attrs["dilations"], attrs["padding"])
    before = down.before or 0, across.before or 0
    return (down.stride, across.stride, down.dilation, across.dilation, *before, attrs["groups"])


def _scratch(roles: Callable[..., tuple[Spec, Spec, Spec]]) -> Callable[..., tuple[Spec, ...]]:
    """What a convolution needs beside its operands: BLAS's constants and the patches of some images, one a row."""

    def scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
        _, filters, y = roles(inputs, outputs)
        batch, height, width, _ = y.concrete
        length, places = math.prod(filters.concrete[:3]), height * width
        images = min(batch, max(1, PATCHES // max(length * places, 1)))
        return (*gemm_scratch(inputs, outputs, attrs), Spec(y.dtype, (images * places, length)))

    return scratch


def _layout(roles: Callable[..., tuple[Spec, Spec, Spec]], scratch: Callable[..., Any]) -> Callable[..., Call]:
    def layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        x, filters, _ = roles(inputs, outputs)
        operands = (*inputs, *outputs, *scratch(inputs, outputs, attrs))
        return Call(tuple(View.dense(s.concrete) for s in operands), _steps(x, filters, attrs))

    return layout


def _no_scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    return ()


@jitable
def gather(x: Any, image: int, channel: int, patches: Any, row: int, places: Any, window: Any, steps: Any) -> None:
    """Copy what the windows of one image see, from ``channel`` on, to as many rows of ``patches`` from ``row`` on."""
    height, width = places
    for place in range(height * width):
        top, left = place // width * steps[0] - steps[4], place % width * steps[1] - steps[5]
        at = 0
        for r in range(window[0]):
            h = top + r * steps[2]
            for c in range(window[1]):
                w = left + c * steps[3]
                if h >= 0 and h < x.shape[1] and w >= 0 and w < x.shape[2]:
                    for d in range(window[2]):
                        patches[row + place, at + d] = x[image, h, w, channel + d]
                else:
                    for d in range(window[2]):
                        patches[row + place, at + d] = 0
                at += window[2]


@jitable
def scatter(x: Any, image: int, channel: int, patches: Any, row: int, places: Any, window: Any, steps: Any) -> None:
    """Add rows of ``patches`` to the entries of ``x`` that `gather` would copy to them."""
    height, width = places
    for place in range(height * width):
        top, left = place // width * steps[0] - steps[4], place % width * steps[1] - steps[5]
        at = 0
        for r in range(window[0]):
            h = top + r * steps[2]
            for c in range(window[1]):
                w = left + c * steps[3]
                if h >= 0 and h < x.shape[1] and w >= 0 and w < x.shape[2]:
                    for d in range(window[2]):
                        x[image, h, w, channel + d] += patches[row + place, at + d]
                at += window[2]


_forward_scratch = _scratch(_forward)


@kernel("conv2d", layout=_layout(_forward, _forward_scratch), scratch=_forward_scratch)
def conv2d(
    x: Any,
    filters: Any,
    y: Any,
    ints: Any,
    floats: Any,
    patches: Any,
    down: int,
    across: int,
    spread_down: int,
    spread_across: int,
    top: int,
    left: int,
    groups: int,
) -> None:
    steps = (down, across, spread_down, spread_across, top, left)
    window, places = (filters.shape[0], filters.shape[1], filters.shape[2]), (y.shape[1], y.shape[2])
    count, length, wide = places[0] * places[1], patches.shape[1], y.shape[3]
    many, outputs = max(patches.shape[0] // max(count, 1), 1), wide // groups
    for first in range(0, x.shape[0], many):
        images = min(many, x.shape[0] - first)
        for group in range(groups):
            for i in range(images):
                gather(x, first + i, group * window[2], patches, i * count, places, window, steps)
            starts = (0, group * outputs, first * count * wide + group * outputs)
            shape = (images * count, outputs, length)
            gemm(patches, filters, y, starts, (length, wide, wide), (0, 0), shape, 0.0, ints, floats)


@kernel("conv2d", "cuda", layout=_layout(_forward, _no_scratch))
def conv2d_on_cuda(
    x: Any,
    filters: Any,
    y: Any,
    down: int,
    across: int,
    spread_down: int,
    spread_across: int,
    top: int,
    left: int,
    groups: int,
) -> None:
    """Every thread computes one entry of the result at a time; neighbours differ in the output channel."""
    rows, columns, depth, wide = filters.shape
    per_group = wide // groups
    count = y.shape[0] * y.shape[1] * y.shape[2] * wide
    for entry in range(cuda.grid(1), count, cuda.gridsize(1)):
        output, place = entry % wide, entry // wide
        j, i, image = place % y.shape[2], place // y.shape[2] % y.shape[1], place // y.shape[2] // y.shape[1]
        channel = output // per_group * depth
        total = y.dtype.type(0)
        for r in range(rows):
            h = i * down + r * spread_down - top
            for c in range(columns):
                w = j * across + c * spread_across - left
                if h >= 0 and h < x.shape[1] and w >= 0 and w < x.shape[2]:
                    for d in range(depth):
                        total += x[image, h, w, channel + d] * filters[r, c, d, output]
        y[image, i, j, output] = total


_input_scratch = _scratch(_to_input)


@kernel("conv2d_input_grad", layout=_layout(_to_input, _input_scratch), scratch=_input_scratch)
def conv2d_input_grad(
    dy: Any,
    filters: Any,
    shape: Any,
    dx: Any,
    ints: Any,
    floats: Any,
    patches: Any,
    down: int,
    across: int,
    spread_down: int,
    spread_across: int,
    top: int,
    left: int,
    groups: int,
) -> None:
    steps = (down, across, spread_down, spread_across, top, left)
    window, places = (filters.shape[0], filters.shape[1], filters.shape[2]), (dy.shape[1], dy.shape[2])
    count, length, wide = places[0] * places[1], patches.shape[1], dy.shape[3]
    many, outputs = max(patches.shape[0] // max(count, 1), 1), wide // groups
    dx[:] = 0
    for first in range(0, dx.shape[0], many):
        images = min(many, dx.shape[0] - first)
        for group in range(groups):
            starts = (first * count * wide + group * outputs, group * outputs, 0)
            size = (images * count, length, outputs)
            gemm(dy, filters, patches, starts, (wide, wide, length), (0, 1), size, 0.0, ints, floats)
            for i in range(images):
                scatter(dx, first + i, group * window[2], patches, i * count, places, window, steps)


_filter_scratch = _scratch(_to_filters)


@kernel("conv2d_filter_grad", layout=_layout(_to_filters, _filter_scratch), scratch=_filter_scratch)
def conv2d_filter_grad(
    x: Any,
    dy: Any,
    shape: Any,
    dfilters: Any,
    ints: Any,
    floats: Any,
    patches: Any,
    down: int,
    across: int,
    spread_down: int,
    spread_across: int,
    top: int,
    left: int,
    groups: int,
) -> None:
    steps = (down, across, spread_down, spread_across, top, left)
    window, places = (dfilters.shape[0], dfilters.shape[1], dfilters.shape[2]), (dy.shape[1], dy.shape[2])
    count, length, wide = places[0] * places[1], patches.shape[1], dy.shape[3]
    many, outputs = max(patches.shape[0] // max(count, 1), 1), wide // groups
    dfilters[:] = 0
    for first in range(0, x.shape[0], many):
        images = min(many, x.shape[0] - first)
        for group in range(groups):
            for i in range(images):
                gather(x, first + i, group * window[2], patches, i * count, places, window, steps)
            starts = (0, first * count * wide + group * outputs, group * outputs)
            size = (length, outputs, images * count)
            gemm(patches, dy, dfilters, starts, (length, wide, wide), (1, 0), size, 1.0, ints, floats)


@jitable
def binary_entropy(x: Any, label: Any) -> Any:
    return ((x if x > 0 else ZERO) - x * label) + math.log1p(math.exp(-abs(x)))


@jitable
def binary_entropy32(x: Any, label: Any) -> Any:
    return ((ZERO if x < ZERO else x) - x * label) + log_of_one_and_less32(x)


elementwise("binary_cross_entropy", lambda x, label: binary_entropy(x, label))
elementwise("binary_cross_entropy", lambda x, label: binary_entropy32(x, label), on=("cpu",), dtypes=single)
host_only(
    "conv2d_input_grad",
    "conv2d_filter_grad",
)
