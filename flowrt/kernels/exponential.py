"""float32 exponentials as plain arithmetic, which vectorises; the C library's functions are called entry by entry.

The polynomials are those of Cephes (Moshier, "Methods and programs for mathematical functions", 1989): within 1e-7
relatively, which is about one unit in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.table import jitable

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
E0, E1, E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
E3, E4, E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
T0, T1, T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T3, T4 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.7228)  # beyond, the result is no normal float32
NEAR = np.float32(0.625**2)  # squares below which the polynomial of tanh holds
ZERO, HALF, ONE, TWO, INFINITY = (np.float32(v) for v in (0, 0.5, 1, 2, np.inf))
BIAS, MANTISSA, SINGLE_BIT = np.int32(127), np.int32(23), np.int32(1)


@jitable
def exp32(x: Any) -> Any:
    """e to the power of a float32; results below the normal ones are 0."""
    inside = x if x > LOWEST else LOWEST
    inside = inside if inside < HIGHEST else HIGHEST
    twos = np.floor(inside * LOG2_E + HALF)
    rest = inside - twos * LN2_HIGH
    rest = rest - twos * LN2_LOW
    series = ((((E0 * rest + E1) * rest + E2) * rest + E3) * rest + E4) * rest + E5
    series = series * (rest * rest) + rest + ONE
    exponent = np.int32(twos)
    half = np.int32(exponent >> SINGLE_BIT)  # in two factors: 2**128 is no float32
    first = np.int32((half + BIAS) << MANTISSA).view(np.float32)
    second = np.int32((exponent - half + BIAS) << MANTISSA).view(np.float32)
    found = series * first * second
    found = INFINITY if x > HIGHEST else found
    found = ZERO if x < LOWEST else found
    return x if x != x else found


@jitable
def tanh32(x: Any) -> Any:
    """The hyperbolic tangent of a float32."""
    z = x * x
    near = ((((T0 * z + T1) * z + T2) * z + T3) * z + T4) * z * x + x
    far = ONE - TWO / (exp32(TWO * x) + ONE)
    return near if z < NEAR else far


@jitable
def sigmoid32(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float32."""
    return ONE / (ONE + exp32(-x))
