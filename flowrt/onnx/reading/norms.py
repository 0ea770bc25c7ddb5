"""Softmax and what normalises."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.graph import Tensor
from flowrt.onnx.reading.elementwise import channels_first, rounded_once
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, reads
from flowrt.ops.inference import described

MOST_ADDED = 65504  # numbers of at most 1 whose sum a float16 holds


@reads("Softmax")
def softmax(call: NodeCall) -> Value:
    x, axis = call[0], call.axis()
    if call.spec(0).dtype != np.float16 or (call.shape(0)[axis] or 0) >= MOST_ADDED:
        return fr.nn.softmax(x, axis)
    powers = fr.exp(fr.subtract(x, fr.max(x, axis, True)))  # rounded at each step, as ONNX's own function is
    return fr.divide(powers, fr.sum(powers, axis, True))


@reads("LogSoftmax")
def log_softmax(call: NodeCall) -> Value:
    return fr.nn.log_softmax(call[0], call.axis())


def _of_channels(values: Value, rank: int) -> Value:
    """A vector of channels so that it broadcasts to [batch, channels, ...]."""
    return fr.reshape(values, (-1, *[1] * (rank - 2))) if rank > 2 else values


@reads("BatchNormalization")
@rounded_once
def batch_normalization(call: NodeCall) -> Any:
    x, scale, offset, mean, variance = call.inputs
    epsilon, rank = float(call.attr("epsilon", 1e-5)), call.rank(0)
    if call.attr("training_mode", 0):
        return _in_training(call, epsilon)
    factor = fr.multiply(scale, fr.rsqrt(fr.add(variance, epsilon)))
    shift = fr.subtract(offset, fr.multiply(mean, factor))
    images = call.reader.channels_last.get(x) if isinstance(x, Tensor) else None
    if images is not None:
        return channels_first(call, fr.add(fr.multiply(images, factor), shift))
    return fr.add(fr.multiply(x, _of_channels(factor, rank)), _of_channels(shift, rank))


def _in_training(call: NodeCall, epsilon: float) -> Any:
    x, scale, offset, mean, variance = call.inputs
    rank, kept = call.rank(0), float(call.attr("momentum", 0.9))
    axes = (0, *range(2, rank))
    y, middle, spread = fr.nn.batch_norm(x, scale, offset, axes, epsilon)
    running = [
        fr.add(fr.multiply(old, kept), fr.multiply(new, 1 - kept)) for old, new in ((mean, middle), (variance, spread))
    ]
    return y, *running


@reads("InstanceNormalization")
@rounded_once
def instance_normalization(call: NodeCall) -> Value:
    rank = call.rank(0)
    y = fr.nn.layer_norm(call[0], None, None, tuple(range(2, rank)), float(call.attr("epsilon", 1e-5)))
    return fr.add(fr.multiply(y, _of_channels(call[1], rank)), _of_channels(call[2], rank))


@reads("LayerNormalization")
@rounded_once
def layer_normalization(call: NodeCall) -> Any:
    rank, axis, epsilon = call.rank(0), call.axis(), float(call.attr("epsilon", 1e-5))
    axes = tuple(range(axis, rank))
    x = call[0]
    middle = fr.mean(x, axes, True)
    centred = fr.subtract(x, middle)
    inverse = fr.rsqrt(fr.add(fr.mean(fr.square(centred), axes, True), epsilon))
    y = fr.multiply(fr.multiply(centred, inverse), call[1])
    if call[2] is not None:
        y = fr.add(y, call[2])
    return y, middle, inverse


@reads("MeanVarianceNormalization")
@rounded_once
def mean_variance_normalization(call: NodeCall) -> Value:
    axes = tuple(call.attr("axes", [0, 2, 3]))
    centred = fr.subtract(call[0], fr.mean(call[0], axes, True))
    deviation = fr.sqrt(fr.mean(fr.square(centred), axes, True))
    return fr.divide(centred, fr.add(deviation, 1e-9))


@reads("LpNormalization")
@rounded_once
def lp_normalization(call: NodeCall) -> Value:
    axis, power = call.axis(), int(call.attr("p", 2))
    squared = power != 1
    size = fr.sum(fr.square(call[0]) if squared else fr.abs(call[0]), axis, True)
    size = fr.sqrt(size) if squared else size
    return fr.where(fr.equal(size, 0.0), np.asarray(0, described(size).dtype), fr.divide(call[0], size))


@reads("LRN")
@rounded_once
def local_response(call: NodeCall) -> Value:
    """Over windows of channels: sums of squares of what lies beside."""
    count, dims = int(call.attr("size")), call.shape(0)
    if dims[1] is None:
        raise Unreadable("the number of channels must be known")
    alpha, beta, bias = float(call.attr("alpha", 1e-4)), float(call.attr("beta", 0.75)), float(call.attr("bias", 1.0))
    before = (count - 1) // 2
    edges = [(0, 0)] * len(dims)
    edges[1] = (before, count - 1 - before)
    squares = fr.pad(fr.square(call[0]), edges)
    parts = [squares[:, n : n + dims[1]] for n in range(count)]
    return fr.divide(call[0], fr.pow(fr.add(bias, fr.multiply(alpha / count, fr.add_n(parts))), beta))
