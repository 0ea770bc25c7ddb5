"""Convolutions of integers that stand for floats: exact, as sums of whole numbers in float64."""

from __future__ import annotations

import flowrt.ops as fr
from flowrt.onnx.reading.elementwise import rounded_once
from flowrt.onnx.reading.images import convolved
from flowrt.onnx.reading.products import along, centred, quantized
from flowrt.onnx.reading.reader import NodeCall, Value, reads
from flowrt.ops.inference import described


def _sums(call: NodeCall, x: Value, x_zero: Value, w: Value, w_zero: Value, bias: Value) -> Value:
    """As int32: below 2**53 no float64 is rounded."""
    images, kernels = centred(x, x_zero), centred(w, w_zero, 0)
    wide = None if bias is None else fr.astype(bias, "float64")
    return fr.astype(convolved(call, fr.astype(images, "float64"), fr.astype(kernels, "float64"), wide), "int32")


@reads("ConvInteger")
def conv_integer(call: NodeCall) -> Value:
    return _sums(call, call[0], call[2], call[1], call[3], None)


@reads("QLinearConv")
@rounded_once
def qlinear_conv(call: NodeCall) -> Value:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = call.inputs[:8]
    sums = _sums(call, x, x_zero, w, w_zero, call[8])
    scale = fr.multiply(x_scale, along(w_scale, described(sums).rank, 1))
    real = fr.multiply(fr.astype(sums, "float32"), scale)
    return quantized(real, y_scale, y_zero, described(y_zero).dtype)
