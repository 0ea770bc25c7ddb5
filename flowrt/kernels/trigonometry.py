"""Sine and cosine of float32 as plain arithmetic without branches; see `exponential`, whose bound they keep.

A float32 is an integer of 24 bits times ``2**e``. A table holds ``2**e`` in quarters of a turn, less the whole turns in
it, for every exponent there is; it stands for the product of many words of Payne and Hanek ("Radian reduction for
trigonometric functions", 1983). The table's first two parts have so few bits that the integer times them is exact, and
what is left of the nearest quarter is right to 2**-79. So the largest arguments take the same path as the smallest. All
of it is computed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowrt.kernels.exponential import WIDE_ROUNDER, ZERO
from flowrt.kernels.table import jitable

# 320 bits behind the point of 2/pi: enough for the largest exponent, 127 of them being whole turns
TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E0
LEAST, GREATEST = -149, 127  # exponents of float32; the place behind them stands for infinities and NaN
DIGITS, BITS = 23, 27  # of a float32 behind its first; of a part of the table
POINT = 320 + DIGITS - LEAST  # where it is in the integers that the table is made of


def _quarters(exponent: int) -> tuple[float, float, float]:
    """``2**exponent`` in quarters of a turn, less whole turns, in three parts."""
    left = (TWO_OVER_PI << (exponent + POINT - 320)) % (4 << POINT)
    last, parts = POINT - BITS + min(exponent, 3), []
    for _ in range(2):
        digits = (left + (1 << (last - 1))) >> last
        parts.append(math.ldexp(digits, last - POINT))
        left, last = left - (digits << last), last - BITS
    return parts[0], parts[1], math.ldexp(left, -POINT)


_PARTS = [_quarters(e - DIGITS) for e in range(LEAST, GREATEST + 1)]
FIRST, SECOND, THIRD = (np.array([*part, np.nan]) for part in zip(*_PARTS, strict=True))
EXPONENT, BEFORE_LEAST = np.uint64(52), np.int64(1023 + LEAST)
SCALE = np.int64(0x7FF) << np.int64(52)
PLACES, START = np.int64(GREATEST + 1 - LEAST), np.int64(0)
WHOLE, ONE_BIT, TWO_BITS, TOP = np.int64(1023 + DIGITS) << np.int64(52), np.int64(1), np.int64(2), np.int64(62)
QUARTER = 1.5707963267948966
# (sin(r) - r) / r**3 and (cos(r) - 1 + r**2 / 2) / r**4 in r**2 up to an eighth of a turn, within 2e-11 and 1e-12
S0, S1, S2, S3 = -0.16666666663853044, 0.008333331873837089, -0.00019840086263755443, 2.7249864655139585e-06
C0, C1, C2, C3 = 0.04166666666431933, -0.0013888887671288108, 2.480059998353171e-05, -2.7300908167996537e-07


@jitable
def of_turn(x: Any, ahead: Any) -> Any:
    """The sine of a float32 and ``ahead`` quarters of a turn, in float64."""
    bits = np.float64(x).view(np.int64)
    place = np.int64(np.uint64(bits & SCALE) >> EXPONENT) - BEFORE_LEAST
    place = START if place < START else place
    place = PLACES if place > PLACES else place
    here = np.uint64(place)
    m = np.int64((bits & ~SCALE) | WHOLE).view(np.float64)
    quarters = m * FIRST[here]
    rounded = quarters + WIDE_ROUNDER
    left = (quarters - (rounded - WIDE_ROUNDER)) + m * SECOND[here]
    more = left + WIDE_ROUNDER
    r = ((left - (more - WIDE_ROUNDER)) + m * THIRD[here]) * QUARTER
    z = r * r
    sine = (((S3 * z + S2) * z + S1) * z + S0) * (z * r) + r
    cosine = (((C3 * z + C2) * z + C1) * z + C0) * (z * z) + (1.0 - 0.5 * z)
    quarter = np.int64(np.float64(rounded).view(np.int64) + np.float64(more).view(np.int64) + ahead)
    found = cosine if (quarter & ONE_BIT) != START else sine
    return with_sign(found, quarter)


@jitable
def sin32(x: Any) -> Any:
    """The sine of a float32; NaN of infinities."""
    found = np.float32(of_turn(x, START))
    return found if x != ZERO else x  # of a table's least exponent, else


@jitable
def cos32(x: Any) -> Any:
    """The cosine of a float32; NaN of infinities."""
    return np.float32(of_turn(x, ONE_BIT))


# as S0 and C0, within 1e-17, as in Sun's fdlibm
T0, T1, T2 = -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04
T3, T4, T5 = 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10
D0, D1, D2 = 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05
D3, D4, D5 = -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11


@jitable
def with_sign(x: Any, quarter: Any) -> Any:
    """A float64, with its sign changed in the second half of a turn."""
    return np.int64(np.float64(x).view(np.int64) ^ np.int64((quarter & TWO_BITS) << TOP)).view(np.float64)


@jitable
def circle(share: Any) -> Any:
    """Cosine and sine, in float64, of a share of a turn that is not large."""
    rounded = 4.0 * share + WIDE_ROUNDER
    r = (4.0 * share - (rounded - WIDE_ROUNDER)) * QUARTER
    z = r * r
    sine = (((((T5 * z + T4) * z + T3) * z + T2) * z + T1) * z + T0) * (z * r) + r
    cosine = (((((D5 * z + D4) * z + D3) * z + D2) * z + D1) * z + D0) * (z * z) + (1.0 - 0.5 * z)
    quarter = np.float64(rounded).view(np.int64)
    odd = (quarter & ONE_BIT) != START
    return with_sign(sine if odd else cosine, quarter + ONE_BIT), with_sign(cosine if odd else sine, quarter)
