"""Products of matrices, of floats and of integers that stand for floats."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float, is_half
from flowrt.onnx.reading.elementwise import rounded_once
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, axis_of, known, reads
from flowrt.onnx.types import dtype_of
from flowrt.ops.inference import described


@reads("MatMul")
def matmul(call: NodeCall) -> Value:
    return product(call[0], call[1])


def product(a: Value, b: Value) -> Value:
    """NumPy's ``matmul``: a vector is a row on the left, a column on the right."""
    left, right = described(a).rank, described(b).rank
    found = fr.matmul(fr.expand_dims(a, 0) if left == 1 else a, fr.expand_dims(b, -1) if right == 1 else b)
    gone = tuple(axis for axis, rank in ((-2, left), (-1, right)) if rank == 1)
    return fr.squeeze(found, gone) if gone else found


@reads("Gemm")
@rounded_once
def gemm(call: NodeCall) -> Value:
    alpha, beta, dtype = float(call.attr("alpha", 1.0)), float(call.attr("beta", 1.0)), call.spec(0).dtype
    if not is_float(dtype) and (alpha != 1 or beta != 1):
        raise Unreadable("factors of integers are not supported")
    found = fr.matmul(call[0], call[1], bool(call.attr("transA", 0)), bool(call.attr("transB", 0)))
    if alpha != 1:
        found = fr.multiply(found, alpha)
    if call[2] is None:
        return found
    return fr.add(found, call[2] if beta == 1 else fr.multiply(call[2], beta))


@reads("Einsum")
def einsum(call: NodeCall) -> Value:
    return fr.einsum(str(call.attr("equation")).replace(" ", ""), *call.inputs)


def centred(x: Value, zero: Value | None, axis: int | None = None) -> Value:
    """Integers less what stands for zero, as int32; a vector of zeros is for the places along an axis."""
    wide = fr.astype(x, "int32")
    if zero is None:
        return wide
    return fr.subtract(wide, along(fr.astype(zero, "int32"), described(x).rank, axis))


def along(values: Value, rank: int, axis: int | None) -> Value:
    """A vector for the places along ``axis`` of a tensor of ``rank``, so that it broadcasts; a scalar as it is."""
    spec = described(values)
    if spec.rank != 1 or axis is None:
        return values
    if spec.dims == (1,):
        return fr.reshape(values, ())
    return fr.reshape(values, tuple(-1 if i == axis % rank else 1 for i in range(rank)))


@reads("MatMulInteger")
def matmul_integer(call: NodeCall) -> Value:
    a, b = call[0], call[1]
    plain = all(zero is None or (known(zero) is not None and not np.any(known(zero))) for zero in (call[2], call[3]))
    both = call.spec(0), call.spec(1)
    if plain and all(spec.dtype == np.int8 and spec.rank >= 2 for spec in both):
        return fr.quantize.quantized_matmul(a, b)
    left, right = centred(a, call[2], -2), centred(b, call[3], -1)
    return product(left, right)


def quantized(x: Value, scale: Value, zero: Value | None, dtype: np.dtype[Any]) -> Value:
    """``x`` over its scale, rounded to even, about ``zero``, held within what ``dtype`` holds."""
    bounds = np.iinfo(dtype)
    found = fr.round(fr.divide(x, scale))
    if zero is not None:
        found = fr.add(fr.astype(found, "float64"), fr.astype(zero, "float64"))
    return fr.astype(fr.clip(found, float(bounds.min), float(bounds.max)), dtype.name)


def _blocks(call: NodeCall, values: Value, axis: int) -> Value:
    """Scales, or zeros, of blocks along an axis, one for each entry."""
    size, whole = int(call.attr("block_size", 0)), call.shape(0)[axis] if call.rank(0) else 1
    if not size:
        return along(values, call.rank(0), axis)
    if whole is None:
        raise Unreadable("the size of an axis in blocks must be known")
    return fr.take(values, np.arange(whole) // size, axis)


def _axis(call: NodeCall) -> int:
    rank = call.rank(0)
    return axis_of(int(call.attr("axis", 1)), rank) if rank > 1 else 0  # of one scale the axis says nothing


@reads("QuantizeLinear")
@rounded_once
def quantize_linear(call: NodeCall) -> Value:
    told = call.attr("output_dtype", 0)
    dtype = call.spec(2).dtype if call[2] is not None else dtype_of(told) if told else np.dtype(np.uint8)
    if not is_float(call.spec(0).dtype):
        raise Unreadable(f"{call.spec(0).dtype} to be quantized is not supported, only floats are")
    if dtype.itemsize > 2:
        raise Unreadable(f"{dtype} as quantized dtype is not supported")
    axis = _axis(call)
    zero = None if call[2] is None else _blocks(call, call[2], axis)
    return quantized(call[0], _blocks(call, call[1], axis), zero, dtype)


@reads("DequantizeLinear")
def dequantize_linear(call: NodeCall) -> Value:
    axis, told = _axis(call), call.attr("output_dtype", 0)
    dtype = dtype_of(told) if told else call.spec(1).dtype
    scale = _blocks(call, call[1], axis)
    wide = "float32" if is_half(described(scale).dtype) else described(scale).dtype.name
    x = fr.astype(call[0], "int32")
    if call[2] is not None:
        x = fr.subtract(x, fr.astype(_blocks(call, call[2], axis), "int32"))
    found = fr.multiply(fr.astype(x, wide), fr.astype(scale, wide))
    return found if described(found).dtype == dtype else fr.astype(found, dtype.name)


@reads("QLinearMatMul")
@rounded_once
def qlinear_matmul(call: NodeCall) -> Value:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = call.inputs
    sums = product(centred(a, a_zero, -2), centred(b, b_zero, -1))
    rank = described(sums).rank
    scale = fr.multiply(along(a_scale, rank, -2), along(b_scale, rank, -1))
    real = fr.multiply(fr.astype(sums, described(scale).dtype.name), scale)
    return quantized(real, along(y_scale, rank, -2), along(y_zero, rank, -2), described(y_zero).dtype)


@reads("Det")
@rounded_once
def det(call: NodeCall) -> Value:
    """Of matrices of up to 3 by 3, written out."""
    x, size = call[0], call.shape(0)[-1]
    if size == 1:
        return fr.squeeze(x, (-2, -1))

    def entry(row: int, column: int) -> Any:
        return x[..., row, column]

    def minor(first: int, second: int) -> Any:
        return fr.subtract(
            fr.multiply(entry(size - 2, first), entry(size - 1, second)),
            fr.multiply(entry(size - 2, second), entry(size - 1, first)),
        )

    if size == 2:
        return minor(0, 1)
    if size != 3:
        raise Unreadable("determinants of matrices larger than 3 by 3 are not supported")
    others = ((1, 2), (0, 2), (0, 1))
    first, second, third = (fr.multiply(entry(0, n), minor(*pair)) for n, pair in enumerate(others))
    return fr.add(fr.subtract(first, second), third)
