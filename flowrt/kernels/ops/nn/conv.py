"""Convolutions: the kernels of `correlation` and `filter_sums` in the machine's own vectors, and CUDA twins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrt.kernels.language.table import Call, host_only, kernel, product_flops
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.tiles.convolution.correlated import CorrelationPlan
from flowrt.kernels.tiles.convolution.correlation import correlate_lines, correlate_panels, pack_panels
from flowrt.kernels.tiles.convolution.filter_sums import Summed, add_parts, sum_parts
from flowrt.kernels.tiles.convolution.slabs import dense, steps_of
from flowrt.kernels.tiles.micro import Geometry, native

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def _flops(specs: Sequence[Spec]) -> float:
    return 3 * product_flops(specs)  # a window of 3 by 3 has its square root in no operand's size


def register(geometry: Geometry, names: Sequence[str]) -> None:
    """Enter the kernels of convolution, of its gradients for images and filters, and of it with a bias, by name."""
    convolution, input_grad, filter_grad, with_bias = names
    for name, inverse, biased in ((convolution, False, False), (input_grad, True, False), (with_bias, False, True)):
        laid = CorrelationPlan(geometry, inverse=inverse, biased=biased)
        ways = (correlate_lines, laid.lines), (correlate_panels, laid.places)
        enter = kernel(name, layout=laid.packing, scratch=laid.scratch, local=laid.local, then=ways, flops=_flops)
        enter(pack_panels)
    summed = Summed(geometry)
    total = (add_parts, summed.total)
    enter = kernel(
        filter_grad, layout=summed.terms, scratch=summed.scratch, local=summed.local, then=[total], flops=_flops
    )
    enter(sum_parts)


register(native(), ("conv2d", "conv2d_input_grad", "conv2d_filter_grad", "conv2d_bias"))


def _plain(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(dense((*inputs, *outputs)), steps_of(inputs[0], inputs[1], attrs))


@kernel("conv2d", "cuda", layout=_plain)
def conv2d_on_cuda(
    x: Any, filters: Any, y: Any, down: int, across: int, spread_down: int, spread_across: int,
    top: int, left: int, groups: int,
) -> None:  # fmt: skip
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


def _plain_input_grad(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(dense((*inputs, *outputs)), steps_of(outputs[0], inputs[1], attrs))


@kernel("conv2d_input_grad", "cuda", layout=_plain_input_grad)
def conv2d_input_grad_on_cuda(
    dy: Any, filters: Any, shape: Any, dx: Any, down: int, across: int, spread_down: int, spread_across: int,
    top: int, left: int, groups: int,
) -> None:  # fmt: skip
    """Every thread adds up what one entry of the images is due, from the windows that see it."""
    rows, columns, depth, wide = filters.shape
    per_group, height, width, channels = wide // groups, dx.shape[1], dx.shape[2], dx.shape[3]
    for entry in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        channel, place = entry % channels, entry // channels
        w, h, image = place % width, place // width % height, place // width // height
        group, d = channel // depth, channel % depth
        total = dx.dtype.type(0)
        for r in range(rows):
            i = h + top - r * spread_down
            for c in range(columns):
                j = w + left - c * spread_across
                below, beside = i // down, j // across
                met = i >= 0 and j >= 0 and below * down == i and beside * across == j
                if met and below < dy.shape[1] and beside < dy.shape[2]:
                    for o in range(group * per_group, (group + 1) * per_group):
                        total += dy[image, below, beside, o] * filters[r, c, d, o]
        dx[image, h, w, channel] = total


def _plain_filter_grad(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(dense((*inputs, *outputs)), steps_of(inputs[0], outputs[0], attrs))


@kernel("conv2d_filter_grad", "cuda", layout=_plain_filter_grad)
def conv2d_filter_grad_on_cuda(
    x: Any, dy: Any, shape: Any, y: Any, down: int, across: int, spread_down: int, spread_across: int,
    top: int, left: int, groups: int,
) -> None:  # fmt: skip
    """Every thread adds up one entry of a filter at a time, image by image; neighbours differ in the output channel."""
    columns, depth, wide = y.shape[1], y.shape[2], y.shape[3]
    per_group = wide // groups
    for entry in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        o, tap = entry % wide, entry // wide
        d, c, r = tap % depth, tap // depth % columns, tap // depth // columns
        channel, total = o // per_group * depth + d, y.dtype.type(0)
        for image in range(dy.shape[0]):
            for i in range(dy.shape[1]):
                h = i * down + r * spread_down - top
                if h >= 0 and h < x.shape[1]:
                    for j in range(dy.shape[2]):
                        w = j * across + c * spread_across - left
                        if w >= 0 and w < x.shape[2]:
                            total += x[image, h, w, channel] * dy[image, i, j, o]
        y[r, c, d, o] = total


host_only(
    "conv2d_bias", why="a convolution whose register tiles add the bias; others are a convolution and an addition"
)
