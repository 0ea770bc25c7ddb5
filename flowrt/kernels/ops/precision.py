"""Floats of 16 bits to and from float32, by their bits: rounded to nearest, of two to the even one.

All that is computed with tensors of such is computed in float32, between the casts here (`passes/widen`); but for what
is added to a variable where it lies.

float16 by Fabian Giesen's ways, "half to float done quick" (2012): below its normal numbers the float32 unit adds a
number whose last bit counts the least float16, and rounds. Processors that have instructions for it are given those
instead (`emit/halves`), which come to the same bits: so NaN keeps its first ones, and is quiet. Integers are of 32
bits, as many as a vector has floats; each is said to be, since Numba would have them of 64, and none of them wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import is_half
from flowrt.kernels.language.table import elementwise, jitable

word = np.uint32
SIGN, REST, INFINITE = word(0x80000000), word(0x7FFFFFFF), word(0x7F800000)
HALF_SIGN, HALF_REST, HALF_INFINITE, HALF_NAN = (word(v) for v in (0x8000, 0x7FFF, 0x7C00, 0x7E00))
NAN = word(0x7FC00000)
TOO_LARGE = word(0x47800000)  # 2**16, from which on float16 is infinite
NORMAL = word(0x38800000)  # 2**-14, the least normal float16
LEAST, LEAST_BITS = np.float32(0.5), word(0x3F000000)  # whose last bit is 2**-24, the least float16
HALF_NORMAL = word(0x400)  # the bits of 2**-14
HALF_BIAS = word((127 - 15) << 23)
TINY = np.float32(2.0**-24)
ZERO, ONE, QUIET, BELOW, HALF_BELOW = (word(v) for v in (0, 1, 0x40, 0x7FFF, 0xFFF))
HIGH, CUT = word(16), word(13)  # how much longer float32s are


@jitable
def bits_of(x: Any) -> Any:
    """A float32's bits, as a number that is not negative."""
    return np.float32(x).view(np.uint32)


@jitable
def float_of(bits: Any) -> Any:
    """The float32 of such bits."""
    return np.uint32(bits).view(np.float32)


@jitable
def to_bfloat16(x: Any) -> Any:
    bits = bits_of(x)
    rest, high = np.uint32(bits & REST), np.uint32(bits >> HIGH)
    rounded = np.uint32(np.uint32(rest + np.uint32(BELOW + np.uint32(high & ONE))) >> HIGH)
    finite = np.uint32(rounded | np.uint32(high & HALF_SIGN))
    return np.uint16(np.uint32(high | QUIET) if rest > INFINITE else finite)


@jitable
def of_bfloat16(bits: Any) -> Any:
    return float_of(np.uint32(np.uint32(bits) << HIGH))


@jitable
def to_float16(x: Any) -> Any:
    bits = bits_of(x)
    rest = np.uint32(bits & REST)
    small = np.uint32(bits_of(float_of(rest if rest < NORMAL else ZERO) + LEAST) - LEAST_BITS)
    large = np.uint32((NORMAL if rest < NORMAL else rest) - HALF_BIAS)
    odd = np.uint32(np.uint32(large >> CUT) & ONE)
    normal = np.uint32(np.uint32(large + np.uint32(HALF_BELOW + odd)) >> CUT)
    finite = small if rest < NORMAL else normal
    beyond = np.uint32(HALF_NAN | np.uint32(np.uint32(rest >> CUT) & HALF_REST)) if rest > INFINITE else HALF_INFINITE
    sign = np.uint32(np.uint32(bits >> HIGH) & HALF_SIGN)
    return np.uint16(np.uint32((finite if rest < TOO_LARGE else beyond) | sign))


@jitable
def of_float16(bits: Any) -> Any:
    held = np.uint32(bits)
    rest = np.uint32(held & HALF_REST)
    small = bits_of(np.float32(np.int32(rest if rest < HALF_NORMAL else ZERO)) * TINY)
    moved = np.uint32(rest << CUT)
    finite = small if rest < HALF_NORMAL else np.uint32(moved + HALF_BIAS)
    sign = np.uint32(np.uint32(held & HALF_SIGN) << HIGH)
    beyond = np.uint32(NAN | moved) if rest > HALF_INFINITE else INFINITE
    return float_of(np.uint32((finite if rest < HALF_INFINITE else beyond) | sign))


elementwise("narrow_bfloat16", lambda x: to_bfloat16(x))
elementwise("narrow_float16", lambda x: to_float16(x))
elementwise("widen_bfloat16", lambda bits, x: of_bfloat16(bits))
elementwise("widen_float16", lambda bits, x: of_float16(bits))


# ── tensors of floats of 16 bits ─────────────────────────────────────────────────────────────────────────────────────


@jitable
def odd_single(x: Any) -> Any:
    """A float64 as a float32 of which it is not seen less: what is cut off makes the last bit 1.

    So it is rounded once, when it is rounded further. Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", 2008.
    """
    near = np.float32(x)
    wide, bits = np.float64(near), bits_of(near)
    inexact = wide != x and x == x and np.uint32(bits & ONE) == ZERO
    beside = np.uint32(bits - ONE) if abs(wide) > abs(x) else np.uint32(bits + ONE)  # never of 0, which is not above
    return float_of(beside if inexact else bits)


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
