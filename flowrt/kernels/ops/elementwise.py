"""Scalar expressions: each is compiled for CPUs and CUDA devices alike.

An expression sees one entry of each input, all of the dtype they were promoted to; its result is cast to the output's
dtype. Nothing here may raise: an integer divided by zero is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.elementary.errorfunction import erf32, erf64
from flowrt.kernels.elementary.exponential import exp32, exp64, expm132, expm164, sigmoid32, sigmoid64, tanh32, tanh64
from flowrt.kernels.elementary.logarithm import log1p32, log1p64, log32, log64, pow32
from flowrt.kernels.elementary.power import pow64
from flowrt.kernels.elementary.quotient import (
    is_small_quotient,
    is_small_quotient64,
    near_quotient32,
    near_quotient64,
    near_remainder32,
    near_remainder64,
)
from flowrt.kernels.language.costs import COSTLY, SLOW
from flowrt.kernels.language.table import (
    Attrs,
    Call,
    Form,
    Narrow,
    View,
    double,
    elementwise,
    flat,
    host_only,
    integral,
    jitable,
    kernel,
    require_kernel,
    single,
)
from flowrt.kernels.language.twin import cuda, fmod
from flowrt.kernels.launch import FILL_OP, Application, LaunchStep, copy_step

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

FLOATS: tuple[str, ...] = ("float32", "float64")
NUMBERS, BOOLS = (*FLOATS, "int32", "int64"), ("bool",)


def _signed(dtypes: Sequence[Any]) -> bool:
    return bool(np.dtype(dtypes[0]).kind == "i")


def _short(dtypes: Sequence[Any]) -> bool:
    return _signed(dtypes) and np.dtype(dtypes[0]).itemsize <= 4


@kernel(FILL_OP, layout=flat)
def fill(y: Any, value: float, begin: int, end: int) -> None:
    for i in range(begin, end):
        y[i] = value


@kernel(FILL_OP, "cuda", layout=flat)
def fill_on_cuda(y: Any, value: float) -> None:
    i = cuda.grid(1)
    while i < y.size:
        y[i] = value
        i += cuda.gridsize(1)


elementwise("add", lambda x, y: x + y, usual=NUMBERS)
elementwise("subtract", lambda x, y: x - y, usual=NUMBERS)
elementwise("multiply", lambda x, y: x * y, usual=NUMBERS)
elementwise("multiply_add", lambda x, y, z: x * y + z, on=("cpu",))
host_only("multiply_add", why="a step of products of matrices in a processor's loops of scalars")
elementwise("divide", lambda x, y: x / y, entry=SLOW, usual=NUMBERS)
elementwise("divide", lambda x, y: (x + 0.0) / (y + 0.0), dtypes=integral)


WHOLE_FROM = 2.0**52  # larger floats have no fraction


@jitable
def lower(x: Any) -> Any:
    """The largest integer not above a float, of its type, which not every device has a function for."""
    if not abs(x) < WHOLE_FROM:
        return x
    cut = x - x + int(x)
    return cut - 1 if cut > x else cut


@jitable
def nearest(x: Any) -> Any:
    """The integer nearest to a float, of its type; halves go to the even neighbour."""
    cut = lower(x)
    rest = x - cut
    if rest == 0.5:
        return 2 * lower((cut + 1) / 2)
    return cut + 1 if rest > 0.5 else cut


@jitable
def floor_quotient(x: Any, y: Any) -> Any:
    """As NumPy: exact for floats, by the remainder rather than a rounded quotient."""
    if y == 0:
        return x / y
    rest = fmod(x, y)
    whole = (x - rest) / y
    if rest != 0 and (rest < 0) != (y < 0):
        whole -= 1
    nearest = lower(whole)
    return nearest + 1 if whole - nearest > 0.5 else nearest


@jitable
def float_remainder(x: Any, y: Any) -> Any:
    """What `floor_quotient` leaves, with the sign of ``y``."""
    rest = fmod(x, y)
    return rest + y if rest != 0 and (rest < 0) != (y < 0) else rest


@jitable
def far_quotient(x: Any, y: Any) -> Any:
    """`floor_quotient` in float64, where subnormal divisors are ordinary ones."""
    return floor_quotient(np.float64(x), np.float64(y))


@jitable
def far_remainder(x: Any, y: Any) -> Any:
    """`float_remainder` likewise."""
    return float_remainder(np.float64(x), np.float64(y))


@jitable
def signed_quotient(x: Any, y: Any) -> Any:
    """The lowest integer over -1 overflows: the hardware would trap."""
    if y == 0:
        return x - x
    return -x if y == -1 else x // y


@jitable
def signed_remainder(x: Any, y: Any) -> Any:
    return x - x if y == 0 or y == -1 else x % y


@jitable
def short_quotient(x: Any, y: Any) -> Any:
    """`signed_quotient` and `signed_remainder` of integers of up to 32 bits, without branches, so loops are vectors:
    a quotient in float64, cut to an integer, is the right one, as it is further from others than it is rounded."""
    plain = (y != 0) & (y != -1)
    quotient = np.int32(np.float64(x) / (np.float64(y) if plain else 1.0))
    rest = np.int32(x - np.int32(quotient * y))
    below = plain & (rest != 0) & ((rest < 0) != (y < 0))
    whole = np.int32(quotient - below) if plain else np.int32(0 if y == 0 else -x)
    return whole, np.int32(rest + (y if below else 0)) if plain else np.int32(0)


@jitable
def short_floor(x: Any, y: Any) -> Any:
    return short_quotient(x, y)[0]


@jitable
def short_rest(x: Any, y: Any) -> Any:
    return short_quotient(x, y)[1]


elementwise("floor_divide", lambda x, y: floor_quotient(x, y), entry=SLOW, usual=NUMBERS)
elementwise("floor_divide", far_quotient, on=("cpu",), dtypes=single, narrow=Narrow(is_small_quotient, near_quotient32))
elementwise(
    "floor_divide", far_quotient, on=("cpu",), dtypes=double, narrow=Narrow(is_small_quotient64, near_quotient64)
)
elementwise("floor_divide", lambda x, y: x // y if y != 0 else y, dtypes=integral)
elementwise("floor_divide", lambda x, y: signed_quotient(x, y), dtypes=_signed)
elementwise("floor_divide", short_floor, on=("cpu",), dtypes=_short)
elementwise("remainder", lambda x, y: float_remainder(x, y), entry=SLOW, usual=NUMBERS)
elementwise("remainder", far_remainder, on=("cpu",), dtypes=single, narrow=Narrow(is_small_quotient, near_remainder32))
elementwise(
    "remainder", far_remainder, on=("cpu",), dtypes=double, narrow=Narrow(is_small_quotient64, near_remainder64)
)
elementwise("remainder", lambda x, y: x % y if y != 0 else y, dtypes=integral)
elementwise("remainder", lambda x, y: signed_remainder(x, y), dtypes=_signed)
elementwise("remainder", short_rest, on=("cpu",), dtypes=_short)


@jitable
def integer_power(x: Any, y: Any) -> Any:
    """By squaring; negative powers truncate to 0, but those of 1 and -1.

    Modulo 2**64 a product has the same bits with and without signs; mixed, they would be multiplied as floats.
    """
    base = np.int64(x)
    if y < 0:
        odd = base if y % 2 != 0 else base * base
        return odd if -1 <= base <= 1 else np.int64(0)
    result, left = np.int64(1), np.uint64(y)
    while left > np.uint64(0):
        if left & np.uint64(1):
            result = result * base
        base, left = base * base, left >> np.uint64(1)
    return result


elementwise("pow", lambda x, y: x**y, entry=COSTLY, usual=NUMBERS)
elementwise("pow", lambda x, y: pow32(x, y), on=("cpu",), dtypes=single)
elementwise("pow", lambda x, y: pow64(x, y), on=("cpu",), dtypes=double)
elementwise("pow", lambda x, y: integer_power(x, y), dtypes=integral)
elementwise("maximum", lambda x, y: x if x >= y or x != x else y, usual=NUMBERS)
elementwise("minimum", lambda x, y: x if x <= y or x != x else y, usual=NUMBERS)


kernel("add_n", layout=flat, form=Form.REDUCE)(lambda total, x: total + x)


@jitable
def inverse_root(x: Any) -> Any:
    """The compiler takes an estimate and refines it, which is NaN at both ends."""
    return 1 / x if x == 0 or x == math.inf else 1 / math.sqrt(x)


elementwise("negative", lambda x: -x, usual=NUMBERS)
elementwise("abs", lambda x: abs(x), usual=NUMBERS)
elementwise("abs", lambda x: x, dtypes=lambda d: np.dtype(d[0]).kind in "bu")
elementwise("sign", lambda x: 1 if x > 0 else (-1 if x < 0 else x), usual=NUMBERS)
elementwise("exp", lambda x: math.exp(x), entry=COSTLY, usual=FLOATS)
elementwise("exp", lambda x: exp32(x), on=("cpu",), dtypes=single)
elementwise("exp", lambda x: exp64(x), on=("cpu",), dtypes=double)
elementwise("log", lambda x: math.log(x), entry=COSTLY, usual=FLOATS)
elementwise("log", lambda x: log32(x), on=("cpu",), dtypes=single)
elementwise("log", lambda x: log64(x), on=("cpu",), dtypes=double)
elementwise("expm1", lambda x: math.expm1(x), entry=COSTLY, usual=FLOATS)
elementwise("expm1", lambda x: expm132(x), on=("cpu",), dtypes=single)
elementwise("expm1", lambda x: expm164(x), on=("cpu",), dtypes=double)
elementwise("log1p", lambda x: math.log1p(x), entry=COSTLY, usual=FLOATS)
elementwise("log1p", lambda x: log1p32(x), on=("cpu",), dtypes=single)
elementwise("log1p", lambda x: log1p64(x), on=("cpu",), dtypes=double)
elementwise("erf", lambda x: math.erf(x), entry=COSTLY, usual=FLOATS)
elementwise("erf", lambda x: erf32(x), on=("cpu",), dtypes=single)
elementwise("erf", lambda x: erf64(x), on=("cpu",), dtypes=double)
elementwise("sqrt", lambda x: math.sqrt(x), entry=SLOW, usual=FLOATS)
elementwise("rsqrt", lambda x: inverse_root(x), entry=SLOW, usual=FLOATS)
elementwise("standardize", lambda x, mean, factor, offset: (x - mean) * factor + offset)
elementwise("square", lambda x: x * x, usual=NUMBERS)
elementwise("reciprocal", lambda x: 1 / x, entry=SLOW, usual=FLOATS)
elementwise("tanh", lambda x: math.tanh(x), entry=COSTLY, usual=FLOATS)
elementwise("tanh", lambda x: tanh32(x), on=("cpu",), dtypes=single)
elementwise("tanh", lambda x: tanh64(x), on=("cpu",), dtypes=double)
elementwise("sigmoid", lambda x: 1 / (1 + math.exp(-x)), entry=COSTLY, usual=FLOATS)
elementwise("sigmoid", lambda x: sigmoid32(x), dtypes=single)
elementwise("sigmoid", lambda x: sigmoid64(x), on=("cpu",), dtypes=double)
elementwise("sigmoid", lambda x: 1 / (1 + math.exp(0.0 - x)), dtypes=integral)  # whose negatives wrap around
elementwise("relu", lambda x: 0 if x <= 0 else x, usual=FLOATS)
elementwise("floor", lambda x: np.floor(x), on=("cpu",), usual=FLOATS)
elementwise("floor", lambda x: lower(x), on=("cuda",))
elementwise("floor", lambda x: x, dtypes=integral)
elementwise("ceil", lambda x: np.ceil(x), on=("cpu",), usual=FLOATS)
elementwise("ceil", lambda x: -lower(-x), on=("cuda",))
elementwise("ceil", lambda x: x, dtypes=integral)
elementwise("round", lambda x: np.rint(x), on=("cpu",), usual=FLOATS)
elementwise("round", lambda x: nearest(x), on=("cuda",))
elementwise("round", lambda x: x, dtypes=integral)
elementwise("where", lambda condition, x, y: x if condition != 0 else y)
elementwise("equal", lambda x, y: x == y, usual=NUMBERS)
elementwise("not_equal", lambda x, y: x != y, usual=NUMBERS)
elementwise("less", lambda x, y: x < y, usual=NUMBERS)
elementwise("less_equal", lambda x, y: x <= y, usual=NUMBERS)
elementwise("greater", lambda x, y: x > y, usual=NUMBERS)
elementwise("greater_equal", lambda x, y: x >= y, usual=NUMBERS)
elementwise("logical_and", lambda x, y: (x != 0) & (y != 0), usual=BOOLS)
elementwise("logical_or", lambda x, y: (x != 0) | (y != 0), usual=BOOLS)
elementwise("logical_xor", lambda x, y: (x != 0) ^ (y != 0), usual=BOOLS)
elementwise("logical_not", lambda x: x == 0, usual=BOOLS)
elementwise("bitwise_and", lambda x, y: x & y)
elementwise("bitwise_or", lambda x, y: x | y)
elementwise("bitwise_xor", lambda x, y: x ^ y)
elementwise("isnan", lambda x: x != x, usual=FLOATS)
elementwise("isfinite", lambda x: x - x == 0, usual=FLOATS)
elementwise("isfinite", lambda x: True, dtypes=integral)
elementwise("isinf", lambda x: abs(x) == math.inf)
elementwise("isinf", lambda x: False, dtypes=integral)
elementwise("astype", lambda x: x)


@kernel("add_n", "cuda", form=Form.PROGRAM)
def add_n_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs, device: str) -> Application:
    """One after another: the first two into the result, then each to it."""
    found, spec = len(inputs), outputs[0]
    terms = [(0, 1), *((found, n) for n in range(2, found))] if found > 1 else []
    add = require_kernel("add", device, [spec.dtype] * 3)
    views = Call((View.dense((spec.size,)),) * 3, units=spec.size)
    steps = [LaunchStep(add, (*pair, found), (spec.dtype,) * 3, views, 2) for pair in terms]
    if not steps:
        steps = [copy_step(0, 1, spec.dtype, views.views[0], views.views[0], device)]
    return Application(tuple(steps), ())
