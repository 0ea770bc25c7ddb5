"""Exponentials as plain arithmetic without branches, which vectorises; the C library's are called entry by entry.

Each scales a polynomial by powers of two. The bounds, in units in the last place of the result and over all finite
floats, are the law of `tests/test_elementary.py`: 2 for each float32 function here, 3 for each float64 one. NaN stays
NaN, both infinities go to the limit, and results below the normal floats lose digits but are not cut to zero.

An integer is rounded off by adding a number so large that its last bit counts ones: below that sum's bits it stands
ready to become an exponent, and NaN passes where a conversion to an integer would not be defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.table import jitable

ZERO, HALF, ONE, TWO, INFINITY = (np.float32(v) for v in (0, 0.5, 1, 2, np.inf))
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER, ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
BIAS, MANTISSA, SINGLE_BIT = np.int32(127), np.int32(23), np.int32(1)
LOWEST, HIGHEST = np.float32(-104), np.float32(89)  # beyond, the result is 0 or infinite
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
def expm132(x: Any) -> Any:
    """``exp(x) - 1`` of a float32, small ones too."""
    inside = -FLAT if x < -FLAT else x
    inside = HIGHEST if inside > HIGHEST else inside
    rounded = inside * LOG2_E + ROUNDER
    found = rest_less_one(inside, rounded - ROUNDER)
    scale = two_to(np.int32(bits32(rounded) - ROUNDER_BITS - SINGLE_BIT))  # half of it: 2**128 is no float32
    return (found * scale + (scale - HALF)) * TWO


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
    return found / (found + TWO)


@jitable
def sigmoid32(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float32, by an exponential that is at most 1."""
    small = exp32(-abs(x))
    return (small if x < ZERO else ONE) / (ONE + small)
