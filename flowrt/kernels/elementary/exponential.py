"""Exponentials as plain arithmetic without branches, which vectorises; the C library's are called entry by entry.

Each scales a polynomial by powers of two. The bounds, in units in the last place of the result and over all
finite floats, are the law of `tests/kernels/test_elementary.py`: 2 for each float32 function here, 3 for each
float64 one. NaN stays NaN, both infinities go to the limit, and results below the normal floats lose digits but
are not cut to zero, except by `fading32`.

An integer is rounded off by adding a number so large that its last bit counts ones: below that sum's bits it stands
ready to become an exponent, and NaN passes where a conversion to an integer would not be defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.language.table import jitable

ZERO, HALF, ONE, TWO, INFINITY = (np.float32(v) for v in (0, 0.5, 1, 2, np.inf))
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER, ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
BIAS, MANTISSA, SINGLE_BIT = np.int32(127), np.int32(23), np.int32(1)
FADED = np.float32(-87.3)  # e to that power is just above 2**-126
LOWEST, HIGHEST = np.float32(-104), np.float32(89)  # beyond, the result is 0 or infinite
SLIGHT = np.float32(1e-30)  # below, expm1 is the number itself, whose half may have fewer digits
FLAT = np.float32(25)  # beyond, expm1 rounds to -1, and expm1 + 2 to expm1
# (exp(r) - 1 - r) / r**2 for abs(r) <= log(2) / 2, with the least relative error of exp(r) - 1
E0, E1, E2 = np.float32(0.49999997), np.float32(0.16666539), np.float32(0.041667223)
E3, E4 = np.float32(0.0083671808), np.float32(0.0013882396)


@jitable
def bits32(x: Any) -> Any:
    """What an int32 makes of a float32's bits."""
    return np.float32(x).view(np.int32)


@jitable
def rest_less_one(x: Any, twos: Any) -> Any:
    """``exp(x - twos * log(2)) - 1`` for the integer ``twos`` that leaves the least."""
    rest = x - twos * LN2_HIGH
    rest = rest - twos * LN2_LOW
    series = (((E4 * rest + E3) * rest + E2) * rest + E1) * rest + E0
    return series * (rest * rest) + rest


@jitable
def two_to(exponent: Any) -> Any:
    """The float32 power of two for an int32 from -126 to 127."""
    return np.int32(np.int32(exponent + BIAS) << MANTISSA).view(np.float32)


@jitable
def exp32(x: Any) -> Any:
    """e to the power of a float32."""
    inside = LOWEST if x < LOWEST else x
    inside = HIGHEST if inside > HIGHEST else inside
    rounded = inside * LOG2_E + ROUNDER
    found = rest_less_one(inside, rounded - ROUNDER) + ONE
    exponent = np.int32(bits32(rounded) - ROUNDER_BITS)
    half = np.int32(exponent >> SINGLE_BIT)  # in two factors: 2**128 and 2**-149 are no normal float32
    return found * two_to(half) * two_to(np.int32(exponent - half))


@jitable
def fading32(x: Any) -> Any:
    """e to the power of a float32 that is 0 at most; exactly 0 where that is no normal float."""
    rounded = x * LOG2_E + ROUNDER
    found = (rest_less_one(x, rounded - ROUNDER) + ONE) * two_to(np.int32(bits32(rounded) - ROUNDER_BITS))
    return ZERO if x < FADED else found


@jitable
def expm132(x: Any) -> Any:
    """``exp(x) - 1`` of a float32, small ones too."""
    inside = -FLAT if x < -FLAT else x
    inside = HIGHEST if inside > HIGHEST else inside
    rounded = inside * LOG2_E + ROUNDER
    found = rest_less_one(inside, rounded - ROUNDER)
    scale = two_to(np.int32(bits32(rounded) - ROUNDER_BITS - SINGLE_BIT))  # half of it: 2**128 is no float32
    return x if abs(x) < SLIGHT else (found * scale + (scale - HALF)) * TWO


@jitable
def tanh32(x: Any) -> Any:
    """The hyperbolic tangent of a float32."""
    twice = x + x
    twice = -FLAT if twice < -FLAT else twice
    twice = FLAT if twice > FLAT else twice
    rounded = twice * LOG2_E + ROUNDER
    found = rest_less_one(twice, rounded - ROUNDER)
    scale = two_to(np.int32(bits32(rounded) - ROUNDER_BITS))
    found = found * scale + (scale - ONE)
    return x if x == ZERO else found / (found + TWO)  # the sign of zero, too


@jitable
def sigmoid32(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float32, by an exponential that is at most 1."""
    small = exp32(-abs(x))
    return (small if x < ZERO else ONE) / (ONE + small)


WIDE_LOG2_E, WIDE_ROUNDER, WIDE_BIAS, WIDE_MANTISSA = 1.4426950408889634, 1.5 * 2.0**52, np.int64(1023), np.int64(52)
WIDE_WHOLE = np.uint64(0x4330000000000000)  # a float64 whose last bits are an integer
WIDE_LN2_HIGH, WIDE_LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # the first ends in 21 zeros
WIDE_LOWEST, WIDE_HIGHEST, WIDE_FLAT, WIDE_SLIGHT = -746.0, 710.0, 40.0, 1e-300
# as E0 to E4, within 1.1e-16
W0, W1, W2, W3 = 0.5000000000000001, 0.16666666666666669, 0.041666666666623824, 0.008333333333330039
W4, W5, W6 = 0.0013888888917367081, 0.00019841269863171557, 2.4801521057868204e-05
W7, W8, W9 = 2.7557268276905696e-06, 2.7620201591031547e-07, 2.5100472505694996e-08


@jitable
def rest_less_one64(x: Any, twos: Any) -> Any:
    """As `rest_less_one`, of a float64."""
    rest = (x - twos * WIDE_LN2_HIGH) - twos * WIDE_LN2_LOW
    series = ((((W9 * rest + W8) * rest + W7) * rest + W6) * rest + W5) * rest + W4
    series = (((series * rest + W3) * rest + W2) * rest + W1) * rest + W0
    return series * (rest * rest) + rest


@jitable
def whole64(x: Any) -> Any:
    """The integer nearest to a float64 that is not large."""
    return (x + WIDE_ROUNDER) - WIDE_ROUNDER


@jitable
def whole_twos(x: Any) -> Any:
    """The integer nearest to a float64 over log(2)."""
    return (x * WIDE_LOG2_E + WIDE_ROUNDER) - WIDE_ROUNDER


@jitable
def whole_number(x: Any) -> Any:
    """A uint64 below 2**52 as a float64."""
    return np.uint64(x | WIDE_WHOLE).view(np.float64) - 2.0**52


@jitable
def two_to64(exponent: Any) -> Any:
    """The power of two for an integer from -1022 to 1023, itself a float64."""
    bits = np.float64(exponent + WIDE_ROUNDER).view(np.int64)
    return np.int64((bits + WIDE_BIAS) << WIDE_MANTISSA).view(np.float64)  # the rounder's own bits go out


@jitable
def exp64(x: Any) -> Any:
    """e to the power of a float64."""
    inside = WIDE_LOWEST if x < WIDE_LOWEST else x
    inside = WIDE_HIGHEST if inside > WIDE_HIGHEST else inside
    twos = whole_twos(inside)
    half = whole64(twos * 0.5)
    return (rest_less_one64(inside, twos) + 1.0) * two_to64(half) * two_to64(twos - half)


@jitable
def expm164(x: Any) -> Any:
    """``exp(x) - 1`` of a float64, small ones too."""
    inside = -WIDE_FLAT if x < -WIDE_FLAT else x
    inside = WIDE_HIGHEST if inside > WIDE_HIGHEST else inside
    twos = whole_twos(inside)
    scale = two_to64(twos - 1.0)
    return x if abs(x) < WIDE_SLIGHT else (rest_less_one64(inside, twos) * scale + (scale - 0.5)) * 2.0


@jitable
def tanh64(x: Any) -> Any:
    """The hyperbolic tangent of a float64."""
    twice = x + x
    twice = -WIDE_FLAT if twice < -WIDE_FLAT else twice
    twice = WIDE_FLAT if twice > WIDE_FLAT else twice
    twos = whole_twos(twice)
    scale = two_to64(twos)
    found = rest_less_one64(twice, twos) * scale + (scale - 1.0)
    return x if x == 0.0 else found / (found + 2.0)


@jitable
def sigmoid64(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float64, by an exponential that is at most 1."""
    small = exp64(-abs(x))
    return (small if x < 0.0 else 1.0) / (1.0 + small)


WIDE_SIGN = np.int64(-(2**63))
WIDE_HIGHEST_HYPERBOLIC = 710.6  # beyond, sinh and cosh are infinite; a quarter of their exponential is not


@jitable
def signed_as(x: Any, other: Any) -> Any:
    """A float64 that is not negative, with the sign of another, which zeros have too."""
    return np.int64(np.float64(x).view(np.int64) | (np.float64(other).view(np.int64) & WIDE_SIGN)).view(np.float64)


@jitable
def quarter_expm1(x: Any) -> Any:
    """A quarter of ``exp(x) - 1`` and of ``exp(x)``, for ``x`` that is not negative, where the whole may overflow."""
    inside = WIDE_HIGHEST_HYPERBOLIC if x > WIDE_HIGHEST_HYPERBOLIC else x
    twos = whole_twos(inside)
    scale = two_to64(twos - 2.0)
    rest = rest_less_one64(inside, twos) * scale
    return rest + (scale - 0.25), rest + scale


@jitable
def sinh64(x: Any) -> Any:
    """The hyperbolic sine of a float64, small ones too."""
    wide = np.float64(x)
    less, whole = quarter_expm1(abs(wide))
    return wide if abs(wide) < WIDE_SLIGHT else signed_as(2.0 * (less + 0.25 * (less / whole)), wide)


@jitable
def cosh64(x: Any) -> Any:
    """The hyperbolic cosine of a float64."""
    _, whole = quarter_expm1(abs(np.float64(x)))
    return 2.0 * (whole + 0.0625 / whole)
