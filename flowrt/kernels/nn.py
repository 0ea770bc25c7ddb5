"""Convolution as products of patches and filters; softmax and its losses as plain loops.

A convolution gathers the patches of as many images as fit into a small scratch and hands them to BLAS at once. Ops that
work along one axis see the axes before and after it as one each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrt.kernels.blas import gemm, gemm_scratch
from flowrt.kernels.exponential import ZERO
from flowrt.kernels.index import around
from flowrt.kernels.logarithm import log_of_one_and_less32
from flowrt.kernels.table import Call, View, elementwise, host_only, jitable, kernel, single
from flowrt.kernels.twin import cuda
from flowrt.spec import Spec, sliding

NOT_A_CLASS = 3  # of launch.FAILURES
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


def _rows(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    view = View.dense(around(inputs[0].concrete, attrs["axis"]))
    return Call((view, view))


@jitable
def log_of_sum(x: Any, i: int, k: int) -> Any:
    """The largest entry of ``x[i, :, k]`` and the logarithm of the sum of exp(entry - largest)."""
    top = x[i, 0, k]
    for j in range(1, x.shape[1]):
        top = max(x[i, j, k], top)
    total = 0.0
    for j in range(x.shape[1]):
        total += math.exp(x[i, j, k] - top)
    return top, math.log(total)


@jitable
def normalise(y: Any, i: int, k: int) -> None:
    """Put the softmax of ``y[i, :, k]`` in its place."""
    top = y[i, 0, k]
    for j in range(1, y.shape[1]):
        top = max(y[i, j, k], top)
    total = 0.0
    for j in range(y.shape[1]):
        y[i, j, k] = math.exp(y[i, j, k] - top)
        total += y[i, j, k]
    for j in range(y.shape[1]):
        y[i, j, k] /= total


@kernel("softmax", layout=_rows)
def softmax(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        for k in range(x.shape[2] if x.shape[1] > 0 else 0):
            for j in range(x.shape[1]):
                y[i, j, k] = x[i, j, k]  # unsigned integers would wrap below
            normalise(y, i, k)


@kernel("log_softmax", layout=_rows)
def log_softmax(x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        for k in range(x.shape[2] if x.shape[1] > 0 else 0):
            for j in range(x.shape[1]):
                y[i, j, k] = x[i, j, k]
            top, rest = log_of_sum(y, i, k)
            for j in range(x.shape[1]):
                y[i, j, k] = (y[i, j, k] - top) - rest


def _examples(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """Operands as (examples, classes, 1) where they have the classes, else as (examples,)."""
    shape = inputs[0].concrete
    count, views = math.prod(shape[:-1]), []
    for spec in (*inputs, *outputs):
        has_classes = len(spec.concrete) == len(shape)
        views.append(View.dense((count, shape[-1], 1) if has_classes else (count,)))
    return Call(tuple(views))


@kernel("class_cross_entropy", layout=_examples)
def class_cross_entropy(logits: Any, labels: Any, y: Any, run: Any) -> None:
    for i in range(y.size):
        label = int(labels[i])
        if label < 0 or label >= logits.shape[1]:
            run[0] = NOT_A_CLASS
            return
        top, rest = log_of_sum(logits, i, 0)
        y[i] = rest - (logits[i, label, 0] - top)


@kernel("class_cross_entropy_slope", layout=_examples)
def class_cross_entropy_slope(logits: Any, labels: Any, y: Any, run: Any) -> None:
    for i in range(labels.size):
        label = int(labels[i])
        if label < 0 or label >= logits.shape[1]:
            run[0] = NOT_A_CLASS
            return
        for j in range(logits.shape[1]):
            y[i, j, 0] = logits[i, j, 0]
        normalise(y, i, 0)
        y[i, label, 0] -= 1


@kernel("cross_entropy", layout=_examples)
def cross_entropy(logits: Any, labels: Any, y: Any) -> None:
    for i in range(y.size):
        y[i] = 0
        if logits.shape[1] > 0:
            top, rest = log_of_sum(logits, i, 0)
            total = 0.0
            for j in range(logits.shape[1]):
                if labels[i, j, 0] != 0:  # of an impossible class nothing is asked
                    total += labels[i, j, 0] * (rest - (logits[i, j, 0] - top))
            y[i] = total


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
    "softmax",
    "log_softmax",
    "class_cross_entropy",
    "class_cross_entropy_slope",
    "cross_entropy",
)
