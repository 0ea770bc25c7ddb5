"""Floats of 16 bits to and from float32, by their bits: rounded to nearest, of two to the even one.

All that is computed with tensors of such is computed in float32, between the casts here (`passes/widen`); but for what
is added to a variable where it lies.

float16 by Fabian Giesen's ways, "half to float done quick" (2012): below its normal numbers the float32 unit adds a
number whose last bit counts the least float16, and rounds. Integers are of 64 bits, where none of this wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import is_half
from flowrt.kernels.language.table import elementwise, jitable

SIGN, REST = np.int64(0x80000000), np.int64(0x7FFFFFFF)
INFINITE = np.int64(0x7F800000)
HALF_SIGN, HALF_REST, HALF_INFINITE, HALF_NAN = (np.int64(v) for v in (0x8000, 0x7FFF, 0x7C00, 0x7E00))
TOO_LARGE = np.int64(0x47800000)  # 2**16, from which on float16 is infinite
NORMAL = np.int64(0x38800000)  # 2**-14, the least normal float16
LEAST, LEAST_BITS = np.float32(0.5), np.int64(0x3F000000)  # whose last bit is 2**-24, the least float16
HALF_BIAS = np.int64((127 - 15) << 23)
TINY = np.float32(2.0**-24)


@jitable
def bits_of(x: Any) -> Any:
    """A float32's bits, as a number that is not negative."""
    return np.int64(np.float32(x).view(np.int32)) & np.int64(0xFFFFFFFF)


@jitable
def float_of(bits: Any) -> Any:
    """The float32 of such bits."""
    return np.uint32(bits).view(np.float32)


@jitable
def to_bfloat16(x: Any) -> Any:
    bits = bits_of(x)
    rounded = (bits + np.int64(0x7FFF) + ((bits >> np.int64(16)) & np.int64(1))) >> np.int64(16)
    quiet = (bits >> np.int64(16)) | np.int64(0x40)
    return np.uint16(quiet if (bits & REST) > INFINITE else rounded)


@jitable
def of_bfloat16(bits: Any) -> Any:
    return float_of(np.int64(bits) << np.int64(16))


@jitable
def to_float16(x: Any) -> Any:
    bits = bits_of(x)
    rest = bits & REST
    small = bits_of(float_of(rest if rest < NORMAL else np.int64(0)) + LEAST) - LEAST_BITS
    odd = (rest >> np.int64(13)) & np.int64(1)
    normal = (rest - HALF_BIAS + np.int64(0xFFF) + odd) >> np.int64(13)
    finite = small if rest < NORMAL else normal
    beyond = HALF_NAN if rest > INFINITE else HALF_INFINITE
    return np.uint16((finite if rest < TOO_LARGE else beyond) | ((bits & SIGN) >> np.int64(16)))


@jitable
def of_float16(bits: Any) -> Any:
    word = np.int64(bits)
    rest = word & HALF_REST
    small = bits_of(np.float32(rest if rest < np.int64(0x400) else np.int64(0)) * TINY)
    normal = (rest << np.int64(13)) + HALF_BIAS
    beyond = INFINITE | (rest << np.int64(13))
    finite = small if rest < np.int64(0x400) else normal
    return float_of((finite if rest < HALF_INFINITE else beyond) | ((word & HALF_SIGN) << np.int64(16)))


elementwise("narrow_bfloat16", lambda x: to_bfloat16(x))
elementwise("narrow_float16", lambda x: to_float16(x))
elementwise("widen_bfloat16", lambda bits, x: of_bfloat16(bits))
elementwise("widen_float16", lambda bits, x: of_float16(bits))


# ── tensors of floats of 16 bits ─────────────────────────────────────────────────────────────────────────────────────

ODD = np.int64(1)


@jitable
def odd_single(x: Any) -> Any:
    """A float64 as a float32 of which it is not seen less: what is cut off makes the last bit 1.

    So it is rounded once, when it is rounded further. Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", 2008.
    """
    near = np.float32(x)
    wide, bits = np.float64(near), bits_of(near)
    inexact = wide != x and x == x and (bits & ODD) == np.int64(0)
    step = np.int64(-1) if abs(wide) > abs(x) else np.int64(1)
    return float_of(bits + step if inexact else bits)


BITS = {"bfloat16": (of_bfloat16, to_bfloat16), "float16": (of_float16, to_float16)}
"""What reads such a float, and what rounds one."""


def _cast(source: str, target: str) -> Callable[[Sequence[Any]], bool]:
    """Whether operands are an input and an output of these dtypes."""
    return lambda dtypes: [str(dtype) for dtype in dtypes] == [source, target]


def all_of(half: str, but: int = -1) -> Callable[[Sequence[Any]], bool]:
    """Whether all operands are of a dtype of 16 bits, whatever the one numbered ``but`` is of."""

    def are(dtypes: Sequence[Any]) -> bool:
        if not is_half(np.dtype(dtypes[0])):
            return False
        return all(str(dtype) == half for n, dtype in enumerate(dtypes) if n != but)

    return are


def _choice(dtypes: Sequence[Any]) -> bool:
    """Whether one of two floats of 16 bits is chosen, by what is no such."""
    return is_half(np.dtype(dtypes[-1])) and not is_half(np.dtype(dtypes[0]))


elementwise("astype", lambda bits: of_bfloat16(bits), dtypes=_cast("bfloat16", "float32"), takes_bits=True)
elementwise("astype", lambda bits: of_float16(bits), dtypes=_cast("float16", "float32"), takes_bits=True)
elementwise("astype", lambda x: to_bfloat16(x), dtypes=_cast("float32", "bfloat16"), takes_bits=True)
elementwise("astype", lambda x: to_float16(x), dtypes=_cast("float32", "float16"), takes_bits=True)
elementwise("astype", lambda x: to_float16(odd_single(x)), dtypes=_cast("float64", "float16"), takes_bits=True)

# what `assign_add` and `assign_sub` do to a variable, and what but moves bits entry by entry
_OWN: dict[str, Any] = {half: {"dtypes": all_of(half), "takes_bits": True} for half in ("bfloat16", "float16")}
elementwise("add", lambda x, y: to_bfloat16(of_bfloat16(x) + of_bfloat16(y)), **_OWN["bfloat16"])
elementwise("add", lambda x, y: to_float16(of_float16(x) + of_float16(y)), **_OWN["float16"])
elementwise("subtract", lambda x, y: to_bfloat16(of_bfloat16(x) - of_bfloat16(y)), **_OWN["bfloat16"])
elementwise("subtract", lambda x, y: to_float16(of_float16(x) - of_float16(y)), **_OWN["float16"])
elementwise("where", lambda condition, x, y: x if condition != 0 else y, dtypes=_choice, takes_bits=True)
