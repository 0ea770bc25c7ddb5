"""Powers of float64 as plain arithmetic without branches; see `exponential`.

Sun's fdlibm (``e_pow.c``) without its branches: the binary logarithm in two parts, of which the first has so few bits
that its product with the first part of the power is exact, and two to what both come to. Within a unit in the last
place, as the product's error is below 2**-63.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import two_to64, whole64, whole_number
from flowrt.kernels.elementary.logarithm import WIDE_LEAST, WIDE_SHIFT
from flowrt.kernels.language.table import jitable

FEW_BITS, NO_WIDE_BITS = np.uint64(0xFFFFFFFF00000000), np.int64(0)
FAR, FAR_POWER = 1100.0, 2.0**70  # two to either is 0 or infinite; so is any float but 1 to the second
LIFT, LIFTED = 2.0**54, 54.0
ABOVE_MIDDLE = np.uint64(0x3FF0000000000000 - 0x3FEBB67AE8584CAA)  # lifts half the root of 3 to an exponent of 0
ROOT = 1.224744871391589  # of 3/2: from there on, m is compared with 3/2, and below with 1
EXPONENT_OF_ONE = np.uint64(1023)
# 3 * (log((1 + s) / (1 - s)) / (2 * s) - 1 - s**2 / 3) / s**4 in s**2
L0, L1, L2 = 5.99999999999994648725e-01, 4.28571428578550184252e-01, 3.33333329818377432918e-01
L3, L4, L5 = 2.72728123808534006489e-01, 2.30660745775561754067e-01, 2.06975017800338417784e-01
# 2 / (3 * log(2)), its first bits and its rest; log2(3/2) likewise
SCALE, SCALE_HIGH, SCALE_LOW = 9.61796693925975554329e-01, 9.61796700954437255859e-01, -7.02846165095275826516e-09
MIDDLE_HIGH, MIDDLE_LOW = 5.84962487220764160156e-01, 1.35003920212974897128e-08
LN2, LN2_HIGH, LN2_LOW = 6.93147180559945286227e-01, 6.93147182464599609375e-01, -1.90465429995776804525e-09
# x * (exp(x) + 1) / (exp(x) - 1) - 2 in x**2
P0, P1, P2 = 1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05
P3, P4 = -1.65339022054652515390e-06, 4.13813679705723846039e-08


@jitable
def first_bits(x: Any) -> Any:
    """A float64 without its last 32 bits: the product of two such is exact."""
    return np.uint64(np.float64(x).view(np.uint64) & FEW_BITS).view(np.float64)


@jitable
def log2_in_parts(x: Any) -> Any:
    """The binary logarithm of a positive finite float64: its first bits, and what is left."""
    small = x < WIDE_LEAST
    bits = np.float64(x * LIFT if small else x).view(np.uint64)
    exponent = np.uint64((bits + ABOVE_MIDDLE) >> WIDE_SHIFT)
    twos = whole_number(exponent) - 1023.0 - (LIFTED if small else 0.0)
    m = np.uint64(bits - np.uint64((exponent - EXPONENT_OF_ONE) << WIDE_SHIFT)).view(np.float64)
    above = m >= ROOT
    middle, middle_high, middle_low = 1.5 if above else 1.0, MIDDLE_HIGH if above else 0.0, MIDDLE_LOW if above else 0.0
    difference, inverse = m - middle, 1.0 / (m + middle)
    s = difference * inverse
    s_high = first_bits(s)
    sum_high = first_bits(m + middle)
    sum_low = m - (sum_high - middle)
    s_low = inverse * ((difference - s_high * sum_high) - s_high * sum_low)
    z = s * s
    series = (((((L5 * z + L4) * z + L3) * z + L2) * z + L1) * z + L0) * (z * z) + s_low * (s_high + s)
    square = s_high * s_high
    t_high = first_bits(3.0 + square + series)
    t_low = series - ((t_high - 3.0) - square)
    product = s_high * t_high
    rest = t_low * s + s_low * t_high
    p_high = first_bits(product + rest)
    p_low = rest - (p_high - product)
    z_high = SCALE_HIGH * p_high
    z_low = (SCALE_LOW * p_high + middle_low) + p_low * SCALE
    high = first_bits(((z_high + z_low) + middle_high) + twos)
    return high, z_low - (((high - twos) - middle_high) - z_high)


@jitable
def exp2_of_parts(high: Any, low: Any) -> Any:
    """Two to the power of a sum of which ``low`` is small, for sums between -FAR and FAR."""
    twos = whole64(high + low)
    high = high - twos
    t = first_bits(high + low)
    product = t * LN2_HIGH
    rest = (low - (t - high)) * LN2 + t * LN2_LOW
    whole = product + rest
    left = rest - (whole - product)
    z = whole * whole
    even = whole - ((((P4 * z + P3) * z + P2) * z + P1) * z + P0) * z
    r = whole * even / (even - 2.0) - (whole * left + left)
    half = whole64(twos * 0.5)
    return (1.0 - (r - whole)) * two_to64(half) * two_to64(twos - half)


@jitable
def pow64(x: Any, y: Any) -> Any:
    """``x`` to the power ``y``, both float64, as C defines it for zeros, infinities and NaN."""
    size = abs(x)
    power = -FAR_POWER if y < -FAR_POWER else y
    power = FAR_POWER if power > FAR_POWER else power
    log_high, log_low = log2_in_parts(size)
    power_high = first_bits(power)
    high = power_high * log_high
    low = power * log_low + (power - power_high) * log_high
    about = high + low
    far = FAR if about > 0.0 else -FAR
    inside = abs(about) < FAR
    found = exp2_of_parts(high if inside else far, low if inside else 0.0)
    grows = (size > 1.0) == (y > 0.0)
    found = (np.inf if grows else 0.0) if (size == 0.0) | (size == np.inf) else found
    found = x + y if (x != x) | (y != y) else found
    whole, halves = np.floor(y), y * 0.5
    odd = (whole == y) & (np.floor(halves) != halves)
    found = -found if odd & (np.float64(x).view(np.int64) < NO_WIDE_BITS) else found
    found = np.nan if (x < 0.0) & (size < np.inf) & (whole != y) else found
    return 1.0 if (y == 0.0) | (x == 1.0) | ((size == 1.0) & (abs(y) == np.inf)) else found
