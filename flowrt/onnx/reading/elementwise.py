"""Entry by entry: arithmetic, comparisons, activations, casts.

Where images lie with their channels last already (`ModelReader.channels_last`), what is done to each entry is done to
them so, and transposes between layers are never computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float, is_half
from flowrt.graph import Tensor
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, known, reads
from flowrt.onnx.types import dtype_of
from flowrt.ops.activation import softplus
from flowrt.ops.inference import described

Curve = Callable[..., Any]  # of entries, and of what a node says by attributes
Binary = Callable[[Any, Any], Any]


def alike(call: NodeCall, function: Callable[..., Any], *values: Value) -> Value:
    """What a function makes of the entries of ``values`` that broadcast, on images as they lie where all do so."""
    last = call.reader.channels_last
    images = [last.get(v) if isinstance(v, Tensor) else None for v in values]
    if not any(image is not None for image in images):
        return function(*values)
    turned = [v if image is None else image for v, image in zip(values, images, strict=True)]
    if any(image is None and described(v).dims != () for v, image in zip(values, images, strict=True)):
        return function(*values)
    return channels_first(call, function(*turned))


def channels_first(call: NodeCall, images: Value) -> Value:
    """Images whose channels are last, as ONNX has them; who wants them as they lie finds them."""
    rank = described(images).rank
    made = fr.transpose(images, (0, rank - 1, *range(1, rank - 1)))
    if isinstance(made, Tensor):
        call.reader.channels_last[made] = images
    return made


def rounded_once(read: Callable[[NodeCall], Any]) -> Callable[[NodeCall], Any]:
    """Decorator of what reads an operator as several ops: of floats of 16 bits they are float32's, and what they come
    to is rounded, as what one op answers is."""

    @functools.wraps(read)
    def reading(call: NodeCall) -> Any:
        halves = call.halves()
        if not halves:
            return read(call)
        found = read(call.with_inputs([_wide(call, value) for value in call.inputs]))
        answers = found if isinstance(found, (tuple, list)) else (found,)
        kinds = [call.kind_made(n) for n in range(len(answers))]
        return [_cast(call, a, halves[kind]) if kind in halves else a for kind, a in zip(kinds, answers, strict=True)]

    return reading


def _wide(call: NodeCall, value: Value) -> Value:
    if value is None or not is_half(described(value).dtype):
        return value
    return value.astype(np.float32) if isinstance(value, np.ndarray) else _cast(call, value, np.dtype(np.float32))


def _cast(call: NodeCall, value: Value, dtype: np.dtype[Any]) -> Value:
    return alike(call, lambda x: fr.astype(x, dtype.name), value)


def _asinh(x: Any) -> Any:
    """By ``log1p``, so that small ones keep their digits."""
    size = fr.abs(x)
    large = fr.greater(size, 1e9)
    near = fr.where(large, 1.0, size)
    small = fr.log1p(fr.add(near, fr.divide(fr.square(near), fr.add(1.0, fr.sqrt(fr.add(fr.square(near), 1.0))))))
    return fr.multiply(fr.sign(x), fr.where(large, fr.add(fr.log(size), math.log(2)), small))


def _acosh(x: Any) -> Any:
    less = fr.subtract(x, 1.0)
    return fr.log1p(fr.add(less, fr.sqrt(fr.multiply(less, fr.add(x, 1.0)))))


def _celu(x: Any, alpha: float) -> Any:
    below = fr.multiply(alpha, fr.expm1(fr.divide(fr.minimum(x, 0.0), alpha)))
    return fr.add(fr.maximum(x, 0.0), below)


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return fr.clip(fr.add(fr.multiply(x, alpha), beta), 0.0, 1.0)


UNARY: dict[str, Curve] = {
    "Abs": fr.abs,
    "Acos": fr.acos,
    "Asin": fr.asin,
    "Atan": fr.atan,
    "Ceil": fr.ceil,
    "Cos": fr.cos,
    "Cosh": fr.cosh,
    "Elu": fr.elu,
    "Erf": fr.erf,
    "Exp": fr.exp,
    "Floor": fr.floor,
    "Identity": fr.identity,
    "IsNaN": fr.isnan,
    "LeakyRelu": fr.leaky_relu,
    "Log": fr.log,
    "Neg": fr.negative,
    "Not": fr.logical_not,
    "Reciprocal": fr.reciprocal,
    "Relu": fr.relu,
    "Round": fr.round,
    "Sigmoid": fr.sigmoid,
    "Sign": fr.sign,
    "Sin": fr.sin,
    "Sinh": fr.sinh,
    "Softplus": softplus,
    "Sqrt": fr.sqrt,
    "Tan": fr.tan,
    "Tanh": fr.tanh,
    "ThresholdedRelu": lambda x, alpha: fr.where(fr.greater(x, alpha), x, 0.0),
}

COMPOSED: dict[str, Curve] = {
    "Acosh": _acosh,
    "Asinh": _asinh,
    "Atanh": lambda x: fr.multiply(0.5, fr.subtract(fr.log1p(x), fr.log1p(fr.negative(x)))),
    "Celu": _celu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda x: fr.multiply(x, _hard_sigmoid(x, 1 / 6, 0.5)),
    "Mish": lambda x: fr.multiply(x, fr.tanh(softplus(x))),
    "Selu": lambda x, alpha, gamma: fr.multiply(gamma, fr.elu(x, alpha)),
    "Softsign": lambda x: fr.divide(x, fr.add(fr.abs(x), 1.0)),
    "Swish": lambda x, alpha: fr.multiply(x, fr.sigmoid(fr.multiply(x, alpha))),
}

NUMBERS: dict[str, dict[str, float]] = {
    "Celu": {"alpha": 1.0},
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "Selu": {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232},
    "Swish": {"alpha": 1.0},
    "ThresholdedRelu": {"alpha": 1.0},
}
"""What curves take beside entries, and what that is where a node does not say it."""

BINARY: dict[str, Binary] = {
    "Add": fr.add,
    "And": fr.logical_and,
    "BitwiseAnd": fr.bitwise_and,
    "BitwiseOr": fr.bitwise_or,
    "BitwiseXor": fr.bitwise_xor,
    "Equal": fr.equal,
    "Greater": fr.greater,
    "GreaterOrEqual": fr.greater_equal,
    "Less": fr.less,
    "LessOrEqual": fr.less_equal,
    "Mul": fr.multiply,
    "Or": fr.logical_or,
    "Sub": fr.subtract,
    "Xor": fr.logical_xor,
}

VARIADIC: dict[str, Binary] = {"Max": fr.maximum, "Min": fr.minimum, "Sum": fr.add}


@reads(*UNARY)
def unary(call: NodeCall) -> Value:
    numbers = {name: float(call.attr(name, usual)) for name, usual in NUMBERS.get(call.op, {}).items()}
    return alike(call, functools.partial((UNARY | COMPOSED)[call.op], **numbers), call[0])


reads(*COMPOSED)(rounded_once(unary))


@reads(*BINARY)
def binary(call: NodeCall) -> Value:
    return alike(call, BINARY[call.op], call[0], call[1])


@reads(*VARIADIC)
def variadic(call: NodeCall) -> Value:
    return functools.reduce(lambda a, b: alike(call, VARIADIC[call.op], a, b), call.inputs)


@reads("Mean")
@rounded_once
def mean(call: NodeCall) -> Value:
    return fr.divide(functools.reduce(fr.add, call.inputs), len(call.inputs))


def truncated(a: Value, b: Value) -> Value:
    """``a / b`` of integers, rounded toward zero."""
    quotient = fr.floor_divide(a, b)
    if described(a).dtype.kind != "i":
        return quotient
    rest = fr.subtract(a, fr.multiply(quotient, b))
    up = fr.logical_and(fr.not_equal(rest, 0), fr.logical_xor(fr.less(a, 0), fr.less(b, 0)))
    return fr.add(quotient, fr.astype(up, described(a).dtype.name))


@reads("Div")
def div(call: NodeCall) -> Value:
    if is_float(call.spec(0).dtype):
        return alike(call, fr.divide, call[0], call[1])
    return truncated(call[0], call[1])


@reads("Mod")
def mod(call: NodeCall) -> Value:
    a, b = call[0], call[1]
    if not call.attr("fmod", 0):
        return fr.remainder(a, b)
    if call.spec(0).dtype.kind == "u":
        return fr.remainder(a, b)
    rest = fr.remainder(fr.abs(a), fr.abs(b))
    if call.spec(0).dtype.kind == "i":
        return fr.where(fr.less(a, 0), fr.negative(rest), rest)
    rest = fr.where(fr.logical_and(fr.isinf(b), fr.isfinite(a)), fr.abs(a), rest)
    return fr.where(fr.less(a, 0), fr.negative(rest), rest)


@reads("Pow")
def power(call: NodeCall) -> Value:
    base, exponent = call.spec(0).dtype, call.spec(1).dtype
    if not is_float(base) and is_float(exponent):
        return cast_as_onnx(fr.pow(fr.astype(call[0], "float64"), call[1]), base)
    found = known(call[1])
    if is_float(base) and found is not None and found.size == 1 and found.ndim <= call.rank(0) and found.max() == 2:
        return alike(call, fr.square, call[0])
    return fr.pow(call[0], cast_as_onnx(call[1], base))


@reads("BitShift")
def bit_shift(call: NodeCall) -> Value:
    """By a power of 2; beyond the bits that there are, all that is left is the sign of what is shifted right."""
    x, by, dtype = call[0], call[1], call.spec(0).dtype
    nothing = np.asarray(0, dtype)
    inside = fr.less(by, np.asarray(8 * dtype.itemsize, dtype))
    if dtype.kind == "i":
        inside = fr.logical_and(inside, fr.greater_equal(by, nothing))
    factor = fr.pow(np.asarray(2, dtype), fr.where(inside, by, nothing))
    if call.attr("direction") == "LEFT":
        return fr.where(inside, fr.multiply(x, factor), nothing)
    if dtype.kind == "u":
        return fr.where(inside, fr.floor_divide(x, factor), nothing)
    least = fr.equal(factor, np.iinfo(dtype).min)  # 2 to the power of the last bit, which is that of the sign
    beyond = fr.where(fr.less(x, nothing), np.asarray(-1, dtype), nothing)
    return fr.where(fr.logical_and(inside, fr.logical_not(least)), fr.floor_divide(x, factor), beyond)


@reads("BitwiseNot")
def bitwise_not(call: NodeCall) -> Value:
    dtype = call.spec(0).dtype
    ones = np.asarray(-1 if dtype.kind == "i" else np.iinfo(dtype).max, dtype)
    return fr.bitwise_xor(call[0], ones)


def cast_as_onnx(x: Value, dtype: np.dtype[Any]) -> Value:
    """``x`` as another dtype, as runtimes of ONNX agree on it: what is not zero is true."""
    given = described(x).dtype
    if given == dtype:
        return fr.identity(x)
    return fr.not_equal(x, np.asarray(0, given)) if dtype == np.bool_ else fr.astype(x, dtype.name)


@reads("Cast")
def cast(call: NodeCall) -> Value:
    dtype = dtype_of(call.attr("to"))
    return alike(call, lambda x: cast_as_onnx(x, dtype), call[0])


@reads("CastLike")
def cast_like(call: NodeCall) -> Value:
    return cast_as_onnx(call[0], call.spec(1).dtype)


@reads("Clip")
def clip(call: NodeCall) -> Value:
    x = call[0]
    for bound, nearer in ((call[1], fr.maximum), (call[2], fr.minimum)):
        if bound is not None:
            x = alike(call, nearer, x, fr.reshape(bound, ()))
    return fr.identity(x) if x is call[0] else x


@reads("Where")
def where(call: NodeCall) -> Value:
    return fr.where(call[0], call[1], call[2])


@reads("PRelu")
def prelu(call: NodeCall) -> Value:
    x, slope = call[0], call[1]
    return fr.where(fr.less(x, np.asarray(0, call.spec(0).dtype)), fr.multiply(x, slope), x)


@reads("Gelu")
def gelu(call: NodeCall) -> Value:
    return alike(call, lambda x: fr.gelu(x, call.attr("approximate", "none") == "tanh"), call[0])


@reads("Shrink")
def shrink(call: NodeCall) -> Value:
    bias, bound = float(call.attr("bias", 0.0)), float(call.attr("lambd", 0.5))
    dtype = call.spec(0).dtype

    def curve(x: Any) -> Any:
        wide = x if is_float(dtype) else fr.astype(x, "float64")
        outside = fr.where(fr.less(wide, -bound), fr.add(wide, bias), fr.subtract(wide, bias))
        found = fr.where(fr.greater(fr.abs(wide), bound), outside, 0.0)
        return found if is_float(dtype) else fr.astype(found, dtype.name)

    return alike(call, curve, call[0])


@reads("IsInf")
def is_inf(call: NodeCall) -> Value:
    below, above = call.attr("detect_negative", 1), call.attr("detect_positive", 1)
    found = fr.isinf(call[0])
    if not below:
        found = fr.logical_and(found, fr.greater(call[0], 0.0))
    return found if above else fr.logical_and(found, fr.less(call[0], 0.0))


@reads("Dropout")
def dropout(call: NodeCall) -> Any:
    training = known(call[2]) if call[2] is not None else np.asarray(False)
    if training is None or bool(training.reshape(-1)[0]):
        ratio = 0.5 if call[1] is None else call.known(1, "the ratio of what is dropped")
        if training is None or ratio is None or float(np.reshape(ratio, -1)[0]) != 0:
            raise Unreadable("entries dropped by chance belong to training; export the model for inference")
    if not call.wants(1):
        return fr.identity(call[0])
    return fr.identity(call[0]), fr.ones(fr.shape_of(call[0]), "bool")
