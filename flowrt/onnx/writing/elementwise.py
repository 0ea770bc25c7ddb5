"""Entry by entry. Images that a layer left with their channels first stay so, and transposes are never needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import is_float
from flowrt.onnx.writing.writer import CHANNELS_LAST, AppliedOp, writes

FIRST = (0, 3, 1, 2)  # the axes of images whose channels are last, so that they are first

UNARY = {
    "acos": "Acos",
    "asin": "Asin",
    "atan": "Atan",
    "cos": "Cos",
    "cosh": "Cosh",
    "erf": "Erf",
    "exp": "Exp",
    "gelu": "Gelu",
    "log": "Log",
    "reciprocal": "Reciprocal",
    "sigmoid": "Sigmoid",
    "sin": "Sin",
    "sinh": "Sinh",
    "softplus": "Softplus",
    "sqrt": "Sqrt",
    "tan": "Tan",
    "tanh": "Tanh",
}
BINARY = {"add": "Add", "subtract": "Sub", "multiply": "Mul", "maximum": "Max", "minimum": "Min"}
OF_BOOLS = {"add": "Or", "multiply": "And", "maximum": "Or", "minimum": "And"}
COMPARED = {
    "equal": "Equal",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "less": "Less",
    "less_equal": "LessOrEqual",
}
LOGICAL = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
BITWISE = {"bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor"}


def as_they_lie(one: AppliedOp, op: str, inputs: Sequence[str], **attrs: Any) -> str:
    """A node of entries that broadcast: on images with their channels first where some lie so and others are vectors of
    channels, scalars or weights."""
    first = one.writer.shared.channels_first
    if not any(name in first for name in inputs) or len(one.out.dims or ()) != 4:
        return one.add(op, *inputs, **attrs)
    turned = [_turned(one, name, spec) for name, spec in zip(inputs, _specs(one, inputs), strict=True)]
    if any(name is None for name in turned):
        return one.add(op, *inputs, **attrs)
    return channels_last(one, one.add(op, *turned, **attrs))


def _specs(one: AppliedOp, inputs: Sequence[str]) -> list[Any]:
    """The shapes of inputs: of the node's own, and of weights that were made beside them."""
    own = dict(zip(one.inputs, one.specs, strict=True))
    return [own[name].dims if name in own else np.shape(one.writer.known(name)) for name in inputs]  # type: ignore[arg-type]


def _turned(one: AppliedOp, name: str, dims: Any) -> str | None:
    first = one.writer.shared.channels_first
    if name in first:
        return first[name]
    if dims == () or (dims is not None and set(dims) == {1} and len(dims) == 1):
        return name
    if dims is not None and len(dims) == 1:
        return one.reshaped(name, (-1, 1, 1))
    if dims is not None and len(dims) == 4 and dims[:3] == (1, 1, 1):
        return one.reshaped(name, (1, -1, 1, 1))
    return None


def channels_last(one: AppliedOp, name: str) -> str:
    """Images whose channels are first, as the graph has them; layers find them as they lie."""
    made = one.transposed(name, CHANNELS_LAST)
    one.writer.shared.channels_first[made] = name
    return made


@writes(*UNARY)
def unary(one: AppliedOp) -> str:
    return as_they_lie(one, UNARY[one.op], [one.input_as(one.out.dtype)])


@writes(*BINARY)
def binary(one: AppliedOp) -> str:
    return as_they_lie(one, (OF_BOOLS if one.out.dtype == np.bool_ else BINARY)[one.op], one.inputs)


@writes("add_n")
def add_n(one: AppliedOp) -> str:
    found = one.inputs[0]
    for other in one.inputs[1:]:
        found = one.add("Or" if one.out.dtype == np.bool_ else "Add", found, other)
    return found if len(one.inputs) > 1 else one.add("Identity", found)


@writes(*COMPARED)
def compared(one: AppliedOp) -> str:
    inputs = list(one.inputs)
    if one.specs[0].dtype == np.bool_ and one.op != "equal":
        inputs = [one.input_as(np.uint8, n) for n in (0, 1)]
    return one.add(COMPARED[one.op], *inputs)


@writes("not_equal")
def not_equal(one: AppliedOp) -> str:
    return one.add("Not", one.add("Equal", *one.inputs))


def holds(one: AppliedOp, index: int) -> str:
    """Whether the entries of an input are not zero."""
    if one.specs[index].dtype == np.bool_:
        return one.inputs[index]
    return one.add("Not", one.add("Equal", one.inputs[index], one.like(0, index)))


@writes(*LOGICAL)
def logical(one: AppliedOp) -> str:
    return one.add(LOGICAL[one.op], holds(one, 0), holds(one, 1))


@writes("logical_not")
def logical_not(one: AppliedOp) -> str:
    if one.specs[0].dtype == np.bool_:
        return one.add("Not", one.inputs[0])
    return one.add("Equal", one.inputs[0], one.like(0))


@writes(*BITWISE)
def bitwise(one: AppliedOp) -> str:
    if one.out.dtype == np.bool_:
        return one.add(BITWISE[one.op].removeprefix("Bitwise"), *one.inputs)
    return one.add(BITWISE[one.op], *one.inputs)


@writes("identity", "stop_gradient", "weighted", "with_gradient")
def identity(one: AppliedOp) -> str:
    return one.inputs[0]


@writes("astype")
def astype(one: AppliedOp) -> str:
    given, wanted = one.specs[0].dtype, one.out.dtype
    if wanted == np.bool_ and given != np.bool_:
        return holds(one, 0)
    return one.input_as(wanted)


@writes("relu")
def relu(one: AppliedOp) -> str:
    if one.out.dtype.kind == "u":
        return one.inputs[0]
    if is_float(one.out.dtype):
        return as_they_lie(one, "Relu", one.inputs)
    return one.add("Max", one.inputs[0], one.like(0))


@writes("negative")
def negative(one: AppliedOp) -> str:
    if one.out.dtype.kind == "u":
        return one.add("Sub", one.like(0), one.inputs[0])
    return as_they_lie(one, "Neg", one.inputs)


@writes("abs", "sign", "floor", "ceil", "round")
def rounded(one: AppliedOp) -> str:
    if one.op in ("floor", "ceil", "round") and not is_float(one.out.dtype):
        return one.inputs[0]
    if one.out.dtype == np.bool_:
        return one.inputs[0]
    return as_they_lie(one, one.op.capitalize(), one.inputs)


@writes("square")
def square(one: AppliedOp) -> str:
    return as_they_lie(one, "And" if one.out.dtype == np.bool_ else "Mul", [one.inputs[0], one.inputs[0]])


@writes("rsqrt")
def rsqrt(one: AppliedOp) -> str:
    return one.add("Reciprocal", one.add("Sqrt", one.input_as(one.out.dtype)))


@writes("expm1")
def expm1(one: AppliedOp) -> str:
    """As ``tanh(x / 2) * (exp(x) + 1)``, which keeps the digits of small ones; what is far has only ``exp(x) - 1``."""
    x, dtype = one.input_as(one.out.dtype), one.out.dtype
    half, unit = one.constant(0.5, dtype), one.constant(1, dtype)
    power = one.add("Exp", x)
    near = one.add("Mul", one.add("Tanh", one.add("Mul", x, half)), one.add("Add", power, unit))
    small = one.add("Less", one.add("Abs", x), unit)
    return one.add("Where", small, near, one.add("Sub", power, unit))


@writes("log1p")
def log1p(one: AppliedOp) -> str:
    """As ``log(u) * x / (u - 1)`` with ``u = 1 + x``, so that what is rounded off in u is made good. Kahan's."""
    x, unit = one.input_as(one.out.dtype), one.constant(1, one.out.dtype)
    u = one.add("Add", x, unit)
    rest = one.add("Sub", u, unit)
    log, nothing = one.add("Log", u), one.constant(0, one.out.dtype)
    none = one.add("Equal", rest, nothing)
    far = one.add("Or", one.add("IsInf", u), one.add("Equal", u, nothing))
    kept = one.add("Mul", log, one.add("Div", x, one.add("Where", none, unit, rest)))
    return one.add("Where", none, x, one.add("Where", far, log, kept))


@writes("divide")
def divide(one: AppliedOp) -> str:
    inputs = [one.input_as(one.out.dtype, n) for n in (0, 1)]
    return as_they_lie(one, "Div", inputs) if inputs == list(one.inputs) else one.add("Div", *inputs)


def _bounded(one: AppliedOp) -> tuple[str, str, str, str]:
    """Integers to divide, the divisor without 0 and -1, and whether it was those."""
    a, b = (one.input_as(_wide(one), n) for n in (0, 1))
    dtype = _wide(one)
    nothing = one.add("Equal", b, one.constant(0, dtype))
    other = one.add("Equal", b, one.constant(-1, dtype)) if dtype.kind == "i" else nothing
    unit = one.constant(1, dtype)
    return a, one.add("Where", one.add("Or", nothing, other), unit, b), nothing, other


def _wide(one: AppliedOp) -> np.dtype[Any]:
    """The dtype in which small integers are divided: runtimes know it, and no difference is beyond it."""
    dtype = one.out.dtype
    return np.dtype(np.int64) if dtype.itemsize < 4 or dtype == np.int32 else dtype


def _rest(one: AppliedOp, a: str, b: str) -> str:
    """Of floats, with the sign of the divisor."""
    rest = one.add("Mod", a, b, fmod=1)
    return one.add("Where", _apart(one, rest, b), one.add("Add", rest, b), rest)


def _apart(one: AppliedOp, rest: str, b: str) -> str:
    """Where a rest is not zero, and of another sign than the divisor."""
    nothing = one.like(0)
    signs = one.add("Xor", one.add("Less", rest, nothing), one.add("Less", b, nothing))
    return one.add("And", one.add("Not", one.add("Equal", rest, nothing)), signs)


@writes("remainder")
def remainder(one: AppliedOp) -> str:
    if is_float(one.out.dtype):
        return _rest(one, *one.inputs)
    a, b, nothing, _ = _bounded(one)
    zero = one.constant(np.asarray(0, _wide(one)))
    return one.cast(one.add("Where", nothing, zero, one.add("Mod", a, b)), _wide(one), one.out.dtype)


@writes("floor_divide")
def floor_divide(one: AppliedOp) -> str:
    if is_float(one.out.dtype):
        a, b = one.inputs
        rest = one.add("Mod", a, b, fmod=1)
        whole = one.add("Round", one.add("Div", one.add("Sub", a, rest), b))
        less = one.add("Where", _apart(one, rest, b), one.add("Sub", whole, one.like(1)), whole)
        return one.add("Where", one.add("Equal", b, one.like(0)), one.add("Div", a, b), less)
    a, b, nothing, other = _bounded(one)
    dtype = _wide(one)
    found = one.add("Div", one.add("Sub", a, one.add("Mod", a, b)), b)
    zero = one.constant(0, dtype)
    if dtype.kind == "i":
        found = one.add("Where", other, one.add("Sub", zero, a), found)
    return one.cast(one.add("Where", nothing, zero, found), dtype, one.out.dtype)


@writes("pow")
def power(one: AppliedOp) -> str:
    if is_float(one.out.dtype):
        return one.add("Pow", *one.inputs)
    dtype = np.dtype(np.int64) if one.out.dtype.itemsize == 8 else np.dtype(np.int32)
    a, b = (one.input_as(dtype, n) for n in (0, 1))
    zero, unit = one.constant(0, dtype), one.constant(1, dtype)
    if one.out.dtype.kind == "u":
        return one.cast(one.add("Pow", a, b), dtype, one.out.dtype)
    below = one.add("Less", b, zero)
    size = one.add("Abs", b)
    lone = one.add("Equal", one.add("Abs", a), unit)
    found = one.add("Pow", a, size)
    kept = one.add("Where", one.add("And", below, one.add("Not", lone)), zero, found)
    return one.cast(kept, dtype, one.out.dtype)


@writes("isnan", "isinf", "isfinite")
def tested(one: AppliedOp) -> str:
    if not is_float(one.specs[0].dtype):
        whole = one.add("Equal", one.inputs[0], one.inputs[0])
        return whole if one.op == "isfinite" else one.add("Not", whole)
    if one.op == "isnan":
        return one.add("IsNaN", one.inputs[0])
    if one.op == "isinf":
        return one.add("IsInf", one.inputs[0])
    return one.add("Not", one.add("Or", one.add("IsNaN", one.inputs[0]), one.add("IsInf", one.inputs[0])))


@writes("where")
def where(one: AppliedOp) -> str:
    chosen, *both = holds(one, 0), *one.inputs[1:]
    if one.out.dtype != np.bool_:
        return one.add("Where", chosen, *both)
    if_true, if_false = one.add("And", chosen, both[0]), one.add("And", one.add("Not", chosen), both[1])
    return one.add("Or", if_true, if_false)  # runtimes choose between numbers


@writes("atan2")
def atan2(one: AppliedOp) -> str:
    """Of floats: the angle of the quotient, turned by the quadrant; the signs of zeros tell quadrants, too."""
    dtype = one.out.dtype
    y, x = (one.input_as(dtype, n) for n in (0, 1))
    zero, pi = one.constant(0, dtype), one.constant(math.pi, dtype)

    def below(value: str) -> str:
        sign = one.add("Less", one.add("Div", one.constant(1, dtype), value), zero)
        return one.add("Or", one.add("Less", value, zero), sign)

    size_y, size_x = one.add("Abs", y), one.add("Abs", x)
    far = one.add("And", one.add("IsInf", x), one.add("IsInf", y))
    nothing = one.add("And", one.add("Equal", x, zero), one.add("Equal", y, zero))
    quotient = one.add("Div", size_y, size_x)
    quarter = one.constant(math.pi / 4, dtype)
    angle = one.add("Where", far, quarter, one.add("Where", nothing, zero, one.add("Atan", quotient)))
    angle = one.add("Where", below(x), one.add("Sub", pi, angle), angle)
    return one.add("Where", below(y), one.add("Neg", angle), angle)


@writes("hypot")
def hypot(one: AppliedOp) -> str:
    """By the larger of the two, so that no square is too large."""
    dtype = one.out.dtype
    sizes = [one.add("Abs", one.input_as(dtype, n)) for n in (0, 1)]
    more, less = one.add("Max", *sizes), one.add("Min", *sizes)
    zero, unit = one.constant(0, dtype), one.constant(1, dtype)
    plain = one.add("Or", one.add("Equal", more, zero), one.add("IsInf", more))
    share = one.add("Div", less, one.add("Where", plain, unit, more))
    far = one.add("Where", plain, zero, share)
    found = one.add("Mul", more, one.add("Sqrt", one.add("Add", one.add("Mul", far, far), unit)))
    infinite = one.add("Or", *[one.add("IsInf", size) for size in sizes])
    return one.add("Where", infinite, one.constant(math.inf, dtype), found)


@writes("standardize")
def standardize(one: AppliedOp) -> str:
    x, mean, factor, offset = one.inputs
    specs = dict(zip(one.inputs, one.specs, strict=True))
    first = one.writer.shared.channels_first
    others = [_turned(one, name, specs[name].dims) for name in (mean, factor, offset)] if x in first else [None]
    turned = None not in others and len(one.out.dims or ()) == 4
    m, f, o = others if turned else (mean, factor, offset)
    found = one.add("Add", one.add("Mul", one.add("Sub", first[x] if turned else x, m), f), o)
    return channels_last(one, found) if turned else found


@writes("binary_cross_entropy")
def binary_cross_entropy(one: AppliedOp) -> str:
    x, label = one.inputs
    positive = one.add("Sub", one.add("Relu", x), one.add("Mul", x, label))
    return one.add("Add", positive, one.add("Softplus", one.add("Neg", one.add("Abs", x))))
