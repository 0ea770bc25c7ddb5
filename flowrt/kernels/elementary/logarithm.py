"""Logarithms and powers as plain arithmetic without branches; see `exponential`, whose bounds they keep.

A number is taken apart into a power of two and what is left, between the roots of 1/2 and 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import (
    HALF,
    INFINITY,
    LN2_HIGH,
    LN2_LOW,
    MANTISSA,
    ONE,
    TWO,
    WIDE_BIAS,
    WIDE_LN2_HIGH,
    WIDE_LN2_LOW,
    WIDE_MANTISSA,
    WIDE_ROUNDER,
    ZERO,
    bits32,
    exp32,
    exp64,
    whole_number,
)
from flowrt.kernels.language.table import jitable

NAN, NO_BITS = np.float32(np.nan), np.int32(0)
LEAST, LIFT = np.float32(2.0**-126), np.float32(2.0**23)  # the least normal float32; what makes the others normal
ROOT_HALF_BITS, LIFTED = np.int32(0x3F3504F3), np.float32(23)
# (log(1 + f) - f + f**2 / 2) / f**3 between the roots of 1/2 and 2
L0, L1, L2 = np.float32(0.3333333), np.float32(-0.2500082), np.float32(0.20001227)
L3, L4, L5 = np.float32(-0.16623357), np.float32(0.14201757), np.float32(-0.13160183)
L6, L7 = np.float32(0.12761576), np.float32(-0.07634497)
# (2 * atanh(s) / s - 2) / s**2 for s up to 1/3
S0, S1, S2, S3 = np.float32(0.66666418), np.float32(0.40021527), np.float32(0.28001806), np.float32(0.28011987)
# log2((1 + s) / (1 - s)) / s in s**2, and 2**t for abs(t) <= 1/2, each to 2e-9 relatively: held in float64
P0, P1, P2, P3, P4 = 2.885390081790107, 0.9617966733270981, 0.5770835874337648, 0.4116725768565363, 0.34073271079267253
Q0, Q1, Q2, Q3 = 1.0000000005630532, 0.6931472060373276, 0.24022646844872914, 0.05550328123606347
Q4, Q5, Q6 = 0.009618491839228777, 0.00134001955402549, 0.00015345581092651023
FAR = 256.0  # 2**-256 is 0 as a float32, 2**256 infinite


@jitable
def exponent32(x: Any) -> Any:
    """The power of two, an int32, that leaves a normal float32 ``x`` between the roots of 1/2 and 2."""
    return np.int32(np.int32(bits32(x) - ROOT_HALF_BITS) >> MANTISSA)


@jitable
def mantissa32(x: Any, exponent: Any) -> Any:
    return np.int32(bits32(x) - np.int32(exponent << MANTISSA)).view(np.float32)


@jitable
def log_of_normal(x: Any, lifted: Any) -> Any:
    """The logarithm of a positive normal float32, less ``lifted`` times log(2)."""
    exponent = exponent32(x)
    f = mantissa32(x, exponent) - ONE
    twos = np.float32(exponent) - lifted
    series = ((((((L7 * f + L6) * f + L5) * f + L4) * f + L3) * f + L2) * f + L1) * f + L0
    square = f * f
    return ((series * f - HALF) * square + twos * LN2_LOW + f) + twos * LN2_HIGH


@jitable
def log32(x: Any) -> Any:
    """The natural logarithm of a float32: -inf of 0, NaN of negative ones."""
    small = x < LEAST
    found = log_of_normal(x * LIFT if small else x, LIFTED if small else ZERO)
    found = found if x < INFINITY else x
    found = found if x > ZERO else NAN
    return -INFINITY if x == ZERO else found


@jitable
def log1p32(x: Any) -> Any:
    """``log(1 + x)`` of a float32: what rounding ``1 + x`` lost is added to its logarithm."""
    whole = ONE + x
    found = log_of_normal(whole, ZERO) + (x - (whole - ONE)) / whole
    found = found if x < INFINITY else x
    found = found if whole > ZERO else NAN
    found = -INFINITY if whole == ZERO else found
    return x if x == ZERO else found  # the sign of zero, too


@jitable
def log_of_one_and_less32(x: Any) -> Any:
    """``log(1 + exp(-abs(x)))`` of a float32."""
    small = exp32(-abs(x))
    s = small / (TWO + small)
    z = s * s
    series = (((S3 * z + S2) * z + S1) * z + S0) * z + TWO
    return series * s


@jitable
def log_of_one_more32(x: Any) -> Any:
    """``log(1 + exp(x))`` of a float32, by an exponential that is at most 1."""
    return (ZERO if x < ZERO else x) + log_of_one_and_less32(x)


@jitable
def log2_wide(x: Any) -> Any:
    """The binary logarithm, in float64, of a float32 that is not negative."""
    small = x < LEAST
    normal = x * LIFT if small else x
    exponent = exponent32(normal)
    m = np.float64(mantissa32(normal, exponent))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    found = ((((P4 * z + P3) * z + P2) * z + P1) * z + P0) * s
    found = found + np.float64(np.float32(exponent) - (LIFTED if small else ZERO))
    found = found if x < INFINITY else np.float64(x)
    return -np.inf if x == ZERO else found


@jitable
def exp2_wide(t: Any) -> Any:
    """Two to the power of a float64 between -FAR and FAR."""
    rounded = t + WIDE_ROUNDER
    r = t - (rounded - WIDE_ROUNDER)
    series = (((((Q6 * r + Q5) * r + Q4) * r + Q3) * r + Q2) * r + Q1) * r + Q0
    scale = np.int64((np.float64(rounded).view(np.int64) + WIDE_BIAS) << WIDE_MANTISSA)  # the rounder's bits go out
    return series * scale.view(np.float64)


@jitable
def pow32(x: Any, y: Any) -> Any:
    """``x`` to the power ``y``, both float32, as C defines it for zeros, infinities and NaN."""
    size = abs(x)
    power = np.float64(y) * log2_wide(size)
    power = -FAR if power < -FAR else power
    power = FAR if power > FAR else power
    found = np.float32(exp2_wide(power))
    found = ONE if (size == ONE) & (abs(y) == INFINITY) else found  # whose power is NaN
    whole, half = np.floor(y), y * HALF
    odd = (whole == y) & (np.floor(half) != half)
    found = -found if odd & (bits32(x) < NO_BITS) else found
    found = NAN if (x < ZERO) & (size < INFINITY) & (whole != y) else found
    return ONE if (y == ZERO) | (x == ONE) else found


WIDE_LEAST, WIDE_LIFT, WIDE_LIFTED = 2.0**-1022, 2.0**52, 52.0
WIDE_SHIFT = np.uint64(52)
ABOVE_ROOT_HALF = np.uint64(0x3FF0000000000000 - 0x3FE6A09E667F3BCD)  # what lifts the root of 1/2 to an exponent of 0
# (log((1 + s) / (1 - s)) - 2 * s) / s**3 in s**2, as in Sun's fdlibm
G0, G1, G2, G3 = 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01
G4, G5, G6 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01


@jitable
def log_of_normal64(x: Any, lifted: Any) -> Any:
    """As `log_of_normal`, of a float64."""
    bits = np.float64(x).view(np.uint64)
    exponent = np.uint64((bits + ABOVE_ROOT_HALF) >> WIDE_SHIFT)
    twos = whole_number(exponent) - 1023.0 - lifted
    f = np.uint64(bits - np.uint64((exponent - np.uint64(WIDE_BIAS)) << WIDE_SHIFT)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = ((((((G6 * z + G5) * z + G4) * z + G3) * z + G2) * z + G1) * z + G0) * z
    half = 0.5 * f * f
    return twos * WIDE_LN2_HIGH - ((half - (s * (half + series) + twos * WIDE_LN2_LOW)) - f)


@jitable
def log64(x: Any) -> Any:
    """The natural logarithm of a float64: -inf of 0, NaN of negative ones."""
    small = x < WIDE_LEAST
    found = log_of_normal64(x * WIDE_LIFT if small else x, WIDE_LIFTED if small else 0.0)
    found = found if x < np.inf else x
    found = found if x > 0.0 else np.nan
    return -np.inf if x == 0.0 else found


@jitable
def log1p64(x: Any) -> Any:
    """``log(1 + x)`` of a float64: what rounding ``1 + x`` lost is added to its logarithm."""
    whole = 1.0 + x
    found = log_of_normal64(whole, 0.0) + (x - (whole - 1.0)) / whole
    found = found if x < np.inf else x
    found = found if whole > 0.0 else np.nan
    found = -np.inf if whole == 0.0 else found
    return x if x == 0.0 else found


@jitable
def log_of_one_more64(x: Any) -> Any:
    """``log(1 + exp(x))`` of a float64, by an exponential that is at most 1."""
    return (0.0 if x < 0.0 else x) + log1p64(exp64(-abs(x)))
