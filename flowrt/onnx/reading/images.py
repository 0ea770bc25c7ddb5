"""Convolutions and pools over images, and over what has one axis, which is an image of one row.

ONNX has channels first, flowrt last: see `ModelReader.channels_last`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float
from flowrt.graph import Tensor
from flowrt.onnx.reading.elementwise import channels_first, rounded_once
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, reads
from flowrt.ops.inference import described

Edges = tuple[tuple[int, int], ...]


def channels_last(call: NodeCall, x: Value) -> Value:
    """Images [batch, channels, ...] with their channels last."""
    found = call.reader.channels_last.get(x) if isinstance(x, Tensor) else None
    rank = described(x).rank
    return fr.transpose(x, (0, *range(2, rank), 1)) if found is None else found


def edges_of(call: NodeCall, sizes: Sequence[int | None], window: Sequence[int], strides: Sequence[int]) -> Edges:
    """How much is padded before and after each axis; ``window`` are the spans of what slides."""
    mode = call.attr("auto_pad", "NOTSET")
    if mode == "VALID":
        return ((0, 0),) * len(window)
    if mode == "NOTSET":
        pads = call.attr("pads", [0] * (2 * len(window)))
        if min(pads, default=0) < 0:
            raise Unreadable(f"pads {pads} below 0 are not supported")
        return tuple(zip(pads[: len(window)], pads[len(window) :], strict=True))
    found = []
    for size, span, stride in zip(sizes, window, strides, strict=True):
        if size is None and stride != 1:
            raise Unreadable(f"sizes that auto_pad {mode} pads must be known; declare them, or give pads")
        whole = span - 1 if size is None else max((-(-size // stride) - 1) * stride + span - size, 0)
        less, more = whole // 2, whole - whole // 2
        found.append((less, more) if mode == "SAME_UPPER" else (more, less))
    return tuple(found)


def _pairs(call: NodeCall, name: str, axes: int) -> list[int]:
    return list(call.attr(name, [1] * axes))


def _spans(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    return [(size - 1) * by + 1 for size, by in zip(kernel, dilations, strict=True)]


@reads("Conv")
def conv(call: NodeCall) -> Value:
    return convolved(call, call[0], call[1], call[2])


def convolved(call: NodeCall, x: Value, filters: Value, bias: Value) -> Value:
    """The convolution that a node's attributes say."""
    axes = described(x).rank - 2
    kernel = described(filters).shape[2:]
    if None in kernel:
        raise Unreadable("the sizes of its filters must be known")
    strides, dilations = _pairs(call, "strides", axes), _pairs(call, "dilations", axes)
    edges = edges_of(call, described(x).shape[2:], _spans(kernel, dilations), strides)  # type: ignore[arg-type]
    groups = int(call.attr("group", 1))
    if axes > 2:
        found = _by_slices(x, filters, strides, dilations, edges, groups)
        return found if bias is None else fr.add(found, fr.reshape(bias, (-1, *[1] * axes)))
    images = channels_last(call, x)
    kernels = fr.transpose(filters, (*range(2, axes + 2), 1, 0))
    if axes == 1:
        images, kernels = fr.expand_dims(images, 1), fr.expand_dims(kernels, 0)
        strides, dilations, edges = [1, *strides], [1, *dilations], ((0, 0), *edges)
    found = fr.nn.conv2d(images, kernels, tuple(strides), edges, tuple(dilations), groups)
    found = found if bias is None else fr.nn.bias_add(found, bias)
    return channels_first(call, fr.squeeze(found, 1) if axes == 1 else found)


def _by_slices(
    x: Value, filters: Value, strides: Sequence[int], dilations: Sequence[int], edges: Edges, groups: int
) -> Value:
    """A convolution of any number of axes: a product of channels for each place of the filters, added up."""
    if groups != 1:
        raise Unreadable("groups of channels are supported with up to two axes of images")
    kernel = described(filters).concrete[2:]
    padded = fr.pad(x, [(0, 0), (0, 0), *edges])
    letters = "xyzuvw"[: len(kernel)]
    parts = []
    for place in itertools.product(*map(range, kernel)):
        part = _seen(padded, place, kernel, strides, dilations)
        parts.append(fr.einsum(f"bc{letters},oc->bo{letters}", part, filters[(slice(None), slice(None), *place)]))
    return fr.add_n(parts)


def _seen(
    padded: Value, place: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Value:
    """What one place of a window sees of every step that the window takes, [batch, channels, ...]."""
    sizes = described(padded).shape[2:]
    if None in sizes:
        raise Unreadable("the sizes of images of more than two axes, or in windows of this kind, must be known")
    key: list[Any] = [slice(None), slice(None)]
    for at, size, whole, step, by in zip(place, kernel, sizes, strides, dilations, strict=True):
        count = (whole - ((size - 1) * by + 1)) // step + 1  # type: ignore[operator]
        key.append(slice(at * by, at * by + (count - 1) * step + 1, step))
    return padded[tuple(key)]


@reads("ConvTranspose")
def conv_transpose(call: NodeCall) -> Value:
    x, filters, axes = call[0], call[1], call.rank(0) - 2
    kernel = call.shape(1)[2:]
    if axes > 2 or None in kernel:
        raise Unreadable("more than two axes of images, or filters of open sizes, are not supported")
    strides, dilations = _pairs(call, "strides", axes), _pairs(call, "dilations", axes)
    more = list(call.attr("output_padding", [0] * axes))
    edges = list(_transposed_edges(call, kernel, strides, dilations, more))
    images, kernels = channels_last(call, x), fr.transpose(filters, (*range(2, axes + 2), 1, 0))
    if axes == 1:
        images, kernels = fr.expand_dims(images, 1), fr.expand_dims(kernels, 0)
        strides, dilations, more, edges = [1, *strides], [1, *dilations], [0, *more], [(0, 0), *edges]
    beyond = [max(n - step + 1, 0) for n, step in zip(more, strides, strict=True)]  # what flowrt has no word for
    if any(min(edge) < 0 for edge in edges) or any(beyond):
        raise Unreadable("padding below 0, or of outputs by more than strides, is not supported")
    found = fr.nn.conv2d_transpose(
        images,
        kernels,
        tuple(strides),
        tuple(edges),
        tuple(dilations),
        int(call.attr("group", 1)),
        output_padding=(more[0], more[1]),
    )
    found = found if call[2] is None else fr.nn.bias_add(found, call[2])
    return channels_first(call, fr.squeeze(found, 1) if axes == 1 else found)


def _transposed_edges(
    call: NodeCall, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], more: list[int]
) -> Edges:
    """How much of the images that come of it is left out before and after each axis."""
    mode, sizes = call.attr("auto_pad", "NOTSET"), call.shape(0)[2:]
    wanted = call.attr("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        return edges_of(call, sizes, kernel, strides)
    found = []
    for axis, (size, span, step) in enumerate(zip(sizes, _spans(kernel, dilations), strides, strict=True)):
        if size is None:
            raise Unreadable("the sizes of images must be known where output_shape or auto_pad is given")
        target = size * step if wanted is None else wanted[axis - len(sizes)]
        whole = step * (size - 1) + more[axis] + span - target
        if whole < 0 and wanted is None:
            raise Unreadable(
                f"auto_pad {mode} of windows smaller than strides, where runtimes differ, is not supported"
            )
        if whole < 0:  # the images are larger than what reaches them
            more[axis], whole = more[axis] - whole, 0
        less = whole // 2
        found.append((less, whole - less) if mode == "SAME_UPPER" else (whole - less, less))
    return tuple(found)


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pool_edges(call: NodeCall) -> tuple[Edges, Edges]:
    """What is padded, and how much further the last windows reach where a model rounds up."""
    kernel, axes = call.attr("kernel_shape"), call.rank(0) - 2
    strides, spans = _pairs(call, "strides", axes), _spans(kernel, _pairs(call, "dilations", axes))
    sizes = call.shape(0)[2:]
    edges = edges_of(call, sizes, spans, strides)
    if not call.attr("ceil_mode", 0):
        return edges, ((0, 0),) * axes
    further = []
    for size, span, step, (before, after) in zip(sizes, spans, strides, edges, strict=True):
        if size is None:
            raise Unreadable("sizes must be known where ceil_mode is 1")
        count = -(-(size + before + after - span) // step) + 1
        if (count - 1) * step >= size + before:  # the last window would begin behind the image
            count -= 1
        further.append((0, max((count - 1) * step + span - size - before - after, 0)))
    return edges, tuple(further)


def _plain(call: NodeCall, edges: Edges) -> bool:
    """Whether flowrt's pools do it: one or two axes, windows without holes that are larger than what is padded."""
    axes, kernel = call.rank(0) - 2, call.attr("kernel_shape")
    undilated = all(n == 1 for n in _pairs(call, "dilations", axes))
    return axes <= 2 and undilated and all(max(edge) < size for edge, size in zip(edges, kernel, strict=True))


def _pooled(call: NodeCall, function: Any, x: Value, edges: Edges) -> Value:
    """flowrt's pool over images, channels last."""
    kernel, strides = list(call.attr("kernel_shape")), _pairs(call, "strides", call.rank(0) - 2)
    if len(kernel) == 1:
        found = function(fr.expand_dims(x, 1), (1, kernel[0]), (1, strides[0]), ((0, 0), *edges))
        return fr.squeeze(found, 1)
    return function(x, tuple(kernel), tuple(strides), edges)


def _both(first: Edges, second: Edges) -> Edges:
    return tuple((a + c, b + d) for (a, b), (c, d) in zip(first, second, strict=True))


def _windows(call: NodeCall, x: Value) -> list[Value]:
    """What each place of a window sees, in the window's order; ``x`` is padded already."""
    kernel, axes = call.attr("kernel_shape"), call.rank(0) - 2
    strides, dilations = _pairs(call, "strides", axes), _pairs(call, "dilations", axes)
    return [_seen(x, place, kernel, strides, dilations) for place in itertools.product(*map(range, kernel))]


@reads("MaxPool")
def max_pool(call: NodeCall) -> Any:
    edges, further = _pool_edges(call)
    edges = _both(edges, further)
    if call.wants(1):
        return _largest_and_places(call, edges)
    if _plain(call, edges):
        return channels_first(call, _pooled(call, fr.nn.max_pool2d, channels_last(call, call[0]), edges))
    padded = fr.pad(call[0], [(0, 0), (0, 0), *edges], _least(call.spec(0).dtype))
    return functools.reduce(fr.maximum, _windows(call, padded))


def _least(dtype: np.dtype[Any]) -> Any:
    return -math.inf if is_float(dtype) else int(np.iinfo(dtype).min)


def _largest_and_places(call: NodeCall, edges: Edges) -> Any:
    """The largest of each window, and where it lies in the flattened images."""
    sizes = call.shape(0)
    if None in sizes:
        raise Unreadable("sizes must be known where it is asked for places")
    order = range(len(sizes)) if not call.attr("storage_order", 0) else (0, 1, *reversed(range(2, len(sizes))))
    flat = np.arange(math.prod(sizes)).reshape([sizes[i] for i in order])
    numbers = flat.transpose([list(order).index(i) for i in range(len(sizes))])
    around = [(0, 0), (0, 0), *edges]
    values = _windows(call, fr.pad(call[0], around, _least(call.spec(0).dtype)))
    places = _windows(call, np.pad(numbers, around))
    largest, where = values[0], places[0]
    for value, place in zip(values[1:], places[1:], strict=True):
        where = fr.where(fr.greater(value, largest), place, where)
        largest = fr.maximum(largest, value)
    return largest, where


@reads("AveragePool")
@rounded_once
def average_pool(call: NodeCall) -> Value:
    edges, further = _pool_edges(call)
    counted = bool(call.attr("count_include_pad", 0))
    if _plain(call, _both(edges, further)):
        x = channels_last(call, call[0])
        if counted and any(map(any, edges)):
            x = fr.pad(x, [(0, 0), *edges, (0, 0)])
            edges = ((0, 0),) * len(edges)
        return channels_first(call, _pooled(call, fr.nn.avg_pool2d, x, _both(edges, further)))
    around = [(0, 0), (0, 0), *_both(edges, further)]
    inside = np.ones((1, 1, *(n or 0 for n in call.shape(0)[2:])), call.spec(0).dtype)
    if counted:
        inside = np.pad(inside, [(0, 0), (0, 0), *edges], constant_values=1)
        around_inside = [(0, 0), (0, 0), *further]
    else:
        around_inside = around
    total = fr.add_n(_windows(call, fr.pad(call[0], around)))
    return fr.divide(total, sum(_windows(call, np.pad(inside, around_inside))))


@reads("LpPool")
@rounded_once
def lp_pool(call: NodeCall) -> Value:
    edges, further = _pool_edges(call)
    power = int(call.attr("p", 2))
    padded = fr.pad(call[0], [(0, 0), (0, 0), *_both(edges, further)])
    total = fr.add_n([fr.pow(fr.abs(part), float(power)) for part in _windows(call, padded)])
    return fr.pow(total, 1 / power)


@reads("GlobalAveragePool", "GlobalMaxPool")
def global_pool(call: NodeCall) -> Value:
    function = fr.mean if call.op == "GlobalAveragePool" else fr.max
    images = call.reader.channels_last.get(call[0]) if isinstance(call[0], Tensor) else None
    rank = call.rank(0)
    if images is not None:
        return channels_first(call, function(images, tuple(range(1, rank - 1)), True))
    return function(call[0], tuple(range(2, rank)), True)
