"""Numbers in eight bits: what they stand for is an integer from -127 to 127 times a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.familiar import answering
from flowrt.base.locating import located
from flowrt.base.spec import Spec, is_float, normal_axes
from flowrt.op import whole
from flowrt.ops.comparison import equal, isnan
from flowrt.ops.elementwise import abs as abs_
from flowrt.ops.elementwise import astype, clip, divide, multiply, where
from flowrt.ops.elementwise import round as round_
from flowrt.ops.inference import described, settled
from flowrt.ops.linalg import matmul
from flowrt.ops.reduce import max as max_
from flowrt.ops.shape import transpose
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Axes
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["dequantize", "quantize", "quantized_matmul"]

LARGEST = 127


@whole
@located("quantize")
def quantize(x: Operand, axis: Axes = None, *, scale: Operand | None = None) -> tuple[TensorOrArray, TensorOrArray]:
    """``x`` as int8 and the scale that these are multiplied with to stand for it: (integers, scale).

    The scale is the largest magnitude over 127: of all entries, or for each place along ``axis`` (one or several: the
    channels), of those beside it; then it has ``x``'s rank, and 1 for each other size. Of zeros it is 1. A ``scale``
    that is given, as one found on other data, is taken instead: what lies beyond it becomes 127 or -127. Entries are
    rounded to the nearest integer, of two to the even one; NaN becomes 0. No gradient flows through the integers.
    """
    x, given = settled(x, scale)
    spec = described(x)
    if not is_float(spec.dtype):
        raise SpecError(f"x must be floating, got {spec}; use astype")
    if given is not None and axis is not None:
        raise SpecError("give axis or scale, not both: a scale says by its shape what it is for")
    found: TensorOrArray = _largest(x, spec, axis) if given is None else given
    ratio = round_(divide(x, found))
    return astype(where(isnan(ratio), 0, clip(ratio, -LARGEST, LARGEST)), "int8"), found


def _largest(x: Any, spec: Spec, axis: Axes) -> TensorOrArray:
    if axis is None:
        found = divide(max_(abs_(x)), LARGEST)
    elif spec.dims is None:
        raise SpecError("the rank of x is open; declare its shape, or quantize all of it by one scale")
    else:
        kept = normal_axes(axis, spec.rank)
        others = tuple(n for n in range(spec.rank) if n not in kept)
        found = divide(max_(abs_(x), others, True) if others else abs_(x), LARGEST)
    return where(equal(found, 0), 1, found)


@located("dequantize")
def dequantize(x: Operand, scale: Operand) -> TensorOrArray:
    """What the integers ``x`` stand for, of the dtype of ``scale``: that times ``x``."""
    spec = described(x)
    if spec.dtype.kind not in "iu":
        raise SpecError(f"x must be integers, as quantize answers them, got {spec}")
    (scale,) = settled(scale)
    return multiply(astype(x, described(scale).dtype), scale)


@whole
@located("quantized_matmul")
def quantized_matmul(
    a: Operand,
    b: Operand,
    a_scale: Operand | None = None,
    b_scale: Operand | None = None,
    transpose_b: bool = False,
) -> TensorOrArray:
    """The product of two int8 matrices, added up exactly as int32, times their scales as float32.

    ``a`` and ``b`` are as for `matmul`, of at least two axes. Scales are those of `quantize`, of all entries, or of
    the rows of ``a`` (``axis=-2``) and the columns of ``b`` (``axis=-1``); without any, the answer is the int32 sums.
    With ``transpose_b`` the rows of ``b`` are its columns here, and lie as they are read: quantize weights so once, and
    give the transpose of their scale. Jacob et al., "Quantization and training of neural networks for efficient
    integer-arithmetic-only inference", 2018.
    """
    for what, spec in (("a", described(a)), ("b", described(b))):
        if spec.dtype != np.int8:
            raise SpecError(f"{what} must be int8, as quantize answers it, got {spec}")
        if spec.dims is None or spec.rank < 2:
            raise SpecError(f"{what} must have at least two axes, and how many must be known, got {spec}")
    depths = described(a).shape[-1], described(b).shape[-1 if transpose_b else -2]
    if None not in depths and depths[0] != depths[1]:
        raise SpecError(f"cannot multiply {described(a)} by {described(b)}, transpose_b={transpose_b}")
    sums = matmul_int8(a, b if transpose_b else _transposed(b))
    if a_scale is None and b_scale is None:
        return sums
    scaled = astype(sums, "float32")
    for scale in (a_scale, b_scale):
        if scale is not None:
            scaled = multiply(scaled, astype(scale, "float32"))
    return scaled


def _transposed(matrices: Any) -> TensorOrArray:
    *batch, rows, columns = range(described(matrices).rank)
    return transpose(matrices, (*batch, columns, rows))


@op(core=2, gradient=None)
def matmul_int8(a: Operand, b: Operand) -> Result:
    """The products of the rows of ``a`` with the rows of ``b``, all int8: the sums as int32."""
    return matmul.infer((Spec("int32", a.dims), Spec("int32", b.dims)), {"transpose_a": False, "transpose_b": True})[0]


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.quantize", globals())
