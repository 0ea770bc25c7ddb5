"""Sines, arcs and their like as plain arithmetic without branches; see `exponential`.

Below 2**20 a number of quarters of a turn times a part of pi/2 of 33 bits is exact in float64, so what is left of an
argument is found by subtracting such parts one by one (Cody and Waite, "Software manual for the elementary functions",
1980), for float64 with what each difference lost. Loops take that path where a block has no larger argument
(`table.Narrow`); larger float64 go to C's library.

Any float32 is an integer of 24 bits times a power of two, of which whole turns may be left out: below 2**50 none are,
and above the power is one of three times 2**0 to 2**27. So four sets of constants, each 2/pi times such a power less
whole turns, stand for the product of many words of Payne and Hanek ("Radian reduction for trigonometric functions",
1983). The first two parts of a set have so few bits that 24 times them are exact, and what is left of the nearest
quarter of a turn is right to 2**-56. The largest arguments take the same path as the smallest, in float64.

Arcs of float64 are Sun's fdlibm without its branches: ratios near 0, 1/2, 1, 3/2 and infinity share one series. Those
of float32 are computed in float64 from ratios below the tangent of pi / 8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import WIDE_LOG2_E, WIDE_ROUNDER, ZERO, cosh64, signed_as, sinh64
from flowrt.kernels.elementary.logarithm import exp2_wide
from flowrt.kernels.language.costs import COSTLY, SLOW
from flowrt.kernels.language.table import Narrow, double, elementwise, floating, jitable, single

# 320 bits behind the point of 2/pi: enough for the largest exponent, 127 of them being whole turns
TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E0
POINT, STEP, PART = 320, 27, 27  # where it is; between two sets; bits of a part


def _quarters(shift: int) -> tuple[float, float, float]:
    """``2/pi`` less multiples of ``4 / 2**shift``, in three parts."""
    left = (TWO_OVER_PI << shift) % (4 << POINT)
    left -= (4 << POINT) if left >= 2 << POINT else 0
    parts, last = [], POINT + (2 if shift else 0) - PART
    for _ in range(2):
        digits = (left + (1 << (last - 1))) >> last
        parts.append(math.ldexp(digits, last - POINT - shift))
        left, last = left - (digits << last), last - PART
    return parts[0], parts[1], math.ldexp(left, -POINT - shift)


A0, B0, R0 = _quarters(0)
A1, B1, R1 = _quarters(STEP)
A2, B2, R2 = _quarters(2 * STEP)
A3, B3, R3 = _quarters(3 * STEP)
END0, END1, END2 = 2.0**50, 2.0**77, 2.0**104  # where the sets end
START, ONE_BIT, TWO_BITS, TOP = np.int64(0), np.int64(1), np.int64(2), np.int64(62)
QUARTER = 1.5707963267948966
# (sin(r) - r) / r**3 and (cos(r) - 1 + r**2 / 2) / r**4 in r**2 up to an eighth of a turn, within 2e-11 and 1e-12
S0, S1, S2, S3 = -0.16666666663853044, 0.008333331873837089, -0.00019840086263755443, 2.7249864655139585e-06
C0, C1, C2, C3 = 0.04166666666431933, -0.0013888887671288108, 2.480059998353171e-05, -2.7300908167996537e-07


@jitable
def of_set(size: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """The one of a set's constants for arguments of that size."""
    below = first if size < END0 else second
    above = third if size < END2 else fourth
    return below if size < END1 else above


@jitable
def turned(x: Any) -> Any:
    """What a float32 is beyond the nearest quarter of a turn, its sine and cosine, and that quarter's number."""
    wide = np.float64(x)
    size = abs(wide)
    quarters = wide * of_set(size, A0, A1, A2, A3)
    rounded = quarters + WIDE_ROUNDER
    left = (quarters - (rounded - WIDE_ROUNDER)) + wide * of_set(size, B0, B1, B2, B3)
    more = left + WIDE_ROUNDER
    r = ((left - (more - WIDE_ROUNDER)) + wide * of_set(size, R0, R1, R2, R3)) * QUARTER
    z = r * r
    sine = (((S3 * z + S2) * z + S1) * z + S0) * (z * r) + r
    cosine = (((C3 * z + C2) * z + C1) * z + C0) * (z * z) + (1.0 - 0.5 * z)
    return sine, cosine, np.int64(np.float64(rounded).view(np.int64) + np.float64(more).view(np.int64))


@jitable
def far_sin32(x: Any) -> Any:
    """The sine of a float32; NaN of infinities."""
    sine, cosine, quarter = turned(x)
    found = np.float32(with_sign(cosine if (quarter & ONE_BIT) != START else sine, quarter))
    return found if x != ZERO else x  # with its sign


@jitable
def far_cos32(x: Any) -> Any:
    """The cosine of a float32; NaN of infinities."""
    sine, cosine, quarter = turned(x)
    return np.float32(with_sign(sine if (quarter & ONE_BIT) != START else cosine, quarter + ONE_BIT))


@jitable
def far_tan32(x: Any) -> Any:
    """The tangent of a float32; NaN of infinities."""
    sine, cosine, quarter = turned(x)
    odd = (quarter & ONE_BIT) != START
    found = np.float32((-cosine if odd else sine) / (sine if odd else cosine))
    return found if x != ZERO else x


@jitable
def far_sin64(x: Any) -> Any:
    """The sine of a float64 as C's library has it."""
    return math.sin(x)


@jitable
def far_cos64(x: Any) -> Any:
    """The cosine of a float64 as C's library has it."""
    return math.cos(x)


@jitable
def far_tan64(x: Any) -> Any:
    """The tangent of a float64 as C's library has it."""
    return math.tan(x)


# ── arguments below 2**20 ────────────────────────────────────────────────────────────────────────────────────────────


def _parts(count: int) -> list[float]:
    """``pi/2`` as parts of 33 bits each, but for the last of ``count``, which has all the bits of a float64."""
    left, last, parts = (1 << 2 * POINT) // TWO_OVER_PI, POINT + 1, []
    for _ in range(count - 1):
        last -= 33
        digits = left >> last << last
        parts.append(math.ldexp(digits, -POINT))
        left -= digits
    return [*parts, math.ldexp(left, -POINT)]


PI_2_A, PI_2_B, PI_2_C, PI_2_D = _parts(4)
PI_2_REST = _parts(2)[1]
TWO_PI_INVERSE, PI_INVERSE, NARROW_END = math.ldexp(TWO_OVER_PI, -POINT), math.ldexp(TWO_OVER_PI, -POINT - 1), 2.0**20
# (sin(r) - r) / r**3 in r**2 up to a quarter of a turn, within 3e-11 of the sine
H0, H1, H2 = -0.16666666626046311, 0.008333331104042347, -0.00019840867594775793
H3, H4 = 2.752535203890045e-06, -2.3888325621476583e-08


@jitable
def is_near(x: Any) -> Any:
    """Whether the functions for arguments below 2**20 hold, as they do for NaN."""
    return not abs(x) >= NARROW_END


@jitable
def half_turned(wide: Any, quarters: Any) -> Any:
    """The sine, in float64, of what a float32 is beyond so many quarters of a turn, at most one."""
    r = (wide - quarters * PI_2_A) - quarters * PI_2_REST
    z = r * r
    return ((((H4 * z + H3) * z + H2) * z + H1) * z + H0) * (z * r) + r


@jitable
def near_sin32(x: Any) -> Any:
    """The sine of a float32 below 2**20."""
    wide = np.float64(x)
    rounded = wide * PI_INVERSE + WIDE_ROUNDER
    sine = half_turned(wide, 2.0 * (rounded - WIDE_ROUNDER))
    found = np.float32(with_sign(sine, np.float64(rounded).view(np.int64) << ONE_BIT))
    return found if x != ZERO else x


@jitable
def near_cos32(x: Any) -> Any:
    """The cosine of a float32 below 2**20."""
    wide = np.float64(x)
    rounded = (wide * PI_INVERSE - 0.5) + WIDE_ROUNDER
    sine = half_turned(wide, 2.0 * (rounded - WIDE_ROUNDER) + 1.0)
    return np.float32(with_sign(sine, (np.float64(rounded).view(np.int64) << ONE_BIT) + TWO_BITS))


@jitable
def near_tan32(x: Any) -> Any:
    """The tangent of a float32 below 2**20."""
    wide = np.float64(x)
    rounded = wide * TWO_PI_INVERSE + WIDE_ROUNDER
    quarters = rounded - WIDE_ROUNDER
    r = (wide - quarters * PI_2_A) - quarters * PI_2_REST
    z = r * r
    sine = (((S3 * z + S2) * z + S1) * z + S0) * (z * r) + r
    cosine = (((C3 * z + C2) * z + C1) * z + C0) * (z * z) + (1.0 - 0.5 * z)
    odd = (np.float64(rounded).view(np.int64) & ONE_BIT) != START
    found = np.float32((-cosine if odd else sine) / (sine if odd else cosine))
    return found if x != ZERO else x


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
def near64(x: Any) -> Any:
    """What a float64 below 2**20 is beyond the nearest quarter of a turn, its sine and cosine, and that quarter's
    number.

    Each product is exact, and so is each difference where it is so small that what it loses would matter.
    """
    rounded = x * TWO_PI_INVERSE + WIDE_ROUNDER
    quarters = rounded - WIDE_ROUNDER
    first = x - quarters * PI_2_A
    part = quarters * PI_2_B
    second = first - part
    lost = (first - second) - part
    part = quarters * PI_2_C
    r = second - part
    low = ((second - r) - part) + (lost - quarters * PI_2_D)
    z = r * r
    series = ((((T5 * z + T4) * z + T3) * z + T2) * z + T1) * z + T0
    sine = series * (z * r) + (low - 0.5 * z * low) + r
    half = 0.5 * z
    whole = 1.0 - half
    series = ((((D5 * z + D4) * z + D3) * z + D2) * z + D1) * z + D0
    cosine = whole + ((series * (z * z) + ((1.0 - whole) - half)) - r * low)
    return sine, cosine, np.float64(rounded).view(np.int64)


@jitable
def near_sin64(x: Any) -> Any:
    """The sine of a float64 below 2**20."""
    sine, cosine, quarter = near64(x)
    found = with_sign(cosine if (quarter & ONE_BIT) != START else sine, quarter)
    return found if x != 0.0 else x


@jitable
def near_cos64(x: Any) -> Any:
    """The cosine of a float64 below 2**20."""
    sine, cosine, quarter = near64(x)
    return with_sign(sine if (quarter & ONE_BIT) != START else cosine, quarter + ONE_BIT)


@jitable
def near_tan64(x: Any) -> Any:
    """The tangent of a float64 below 2**20."""
    sine, cosine, quarter = near64(x)
    odd = (quarter & ONE_BIT) != START
    found = (-cosine if odd else sine) / (sine if odd else cosine)
    return found if x != 0.0 else x


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


# ── arcs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

HALF_PI_LOW, PI_LOW = 6.123233995736766036e-17, 1.2246467991473531772e-16  # what pi / 2 and pi are beyond their floats
# of 1/2, 1 and 3/2 the arc tangents and what they are beyond their floats
HALF_HIGH, ONE_HIGH, MORE_HIGH = 4.63647609000806093515e-01, 7.85398163397448278999e-01, 9.82793723247329054082e-01
HALF_LOW, ONE_LOW, MORE_LOW = 2.26987774529616870924e-17, 3.06161699786838301793e-17, 1.39033110312309984516e-17
# (t - atan(t)) / t**3 in t**2 up to 7/16
U0, U1, U2 = 3.33333333333329318027e-01, -1.99999999998764832476e-01, 1.42857142725034663711e-01
U3, U4, U5 = -1.11111104054623557880e-01, 9.09088713343650656196e-02, -7.69187620504482999495e-02
U6, U7, U8 = 6.66107313738753120669e-02, -5.83357013379057348645e-02, 4.97687799461593236017e-02
U9, U10 = -3.65315727442169155270e-02, 1.62858201153657823623e-02
# (asin(s) - s) / s is P / Q in s**2 up to 1/2
P0, P1, P2 = 1.66666666666666657415e-01, -3.25565818622400915405e-01, 2.01212532134862925881e-01
P3, P4, P5 = -4.00555345006794114027e-02, 7.91534994289814532176e-04, 3.47933107596021167570e-05
Q1, Q2 = -2.40339491173441421878e00, 2.02094576023350569471e00
Q3, Q4 = -6.88283971605453293030e-01, 7.70381505559019352791e-02


@jitable
def arc(a: Any, b: Any) -> Any:
    """The arc tangent of ``a / b``, neither of which is negative, nor both 0 or infinite."""
    tiny, low, middle, high = a < 0.4375 * b, a < 0.6875 * b, a < 1.1875 * b, a < 2.4375 * b
    above = a if tiny else (2.0 * a - b if low else (a - b if middle else (a - 1.5 * b if high else -b)))
    below = b if tiny else (2.0 * b + a if low else (a + b if middle else (b + 1.5 * a if high else a)))
    start = 0.0 if tiny else (HALF_HIGH if low else (ONE_HIGH if middle else (MORE_HIGH if high else QUARTER)))
    beyond = 0.0 if tiny else (HALF_LOW if low else (ONE_LOW if middle else (MORE_LOW if high else HALF_PI_LOW)))
    t = above / below
    z = t * t
    series = (((((U10 * z + U9) * z + U8) * z + U7) * z + U6) * z + U5) * z + U4
    series = ((((series * z + U3) * z + U2) * z + U1) * z + U0) * z
    return start - ((t * series - beyond) - t)


@jitable
def atan64(x: Any) -> Any:
    """The arc tangent of a float64."""
    wide = np.float64(x)
    return signed_as(arc(abs(wide), 1.0), wide)


@jitable
def atan264(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), both float64, as C defines it for zeros and infinities."""
    above: Any = abs(np.float64(y))
    below: Any = abs(np.float64(x))
    alike = (above == below) & ((above == 0.0) | (above == np.inf))
    larger = above if above > below else below
    scale = 2.0**-4 if larger > 1e300 else (2.0**64 if larger < 1e-280 else 1.0)  # multiples of both are added
    above, below = (0.0 if above == 0.0 else 1.0) if alike else above * scale, 1.0 if alike else below * scale
    found = arc(above, below)
    left = np.float64(x).view(np.int64) < START
    return signed_as(math.pi - (found - PI_LOW) if left else found, y)


HIGHEST_COSH = 128.0  # beyond 90 it is no finite float32
EIGHTH, FAR_RATIO = 0.7853981633974483, 0.41421356237309503  # pi / 4; the tangent of its half
# (atan(t) - t) / t**3 in t**2 up to there, within 3e-11 of the arc
V0, V1, V2 = -0.3333333251001497, 0.1999990475268822, -0.14282028941364655
V3, V4, V5 = 0.11044922307916208, -0.08477403144427065, 0.047461081482503845


@jitable
def short_arc(a: Any, b: Any) -> Any:
    """As `arc`, with float32's digits and range, in float64."""
    low, high = b if a > b else a, a if a > b else b
    far = low > FAR_RATIO * high
    t = (low - high if far else low) / (low + high if far else high)
    z = t * t
    series = ((((V5 * z + V4) * z + V3) * z + V2) * z + V1) * z + V0
    found = series * (z * t) + t
    found = found + EIGHTH if far else found
    return QUARTER - found if a > b else found


@jitable
def atan32(x: Any) -> Any:
    """The arc tangent of a float32."""
    wide = np.float64(x)
    return np.float32(signed_as(short_arc(abs(wide), 1.0), wide))


@jitable
def atan232(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), both float32, as C defines it for zeros and infinities."""
    above: Any = abs(np.float64(y))
    below: Any = abs(np.float64(x))
    alike = (above == below) & ((above == 0.0) | (above == np.inf))
    found = short_arc((0.0 if above == 0.0 else 1.0) if alike else above, 1.0 if alike else below)
    left = np.float64(x).view(np.int64) < START
    return np.float32(signed_as(math.pi - found if left else found, np.float64(y)))


@jitable
def cosh32(x: Any) -> Any:
    """The hyperbolic cosine of a float32."""
    size: Any = abs(np.float64(x))
    size = HIGHEST_COSH if size > HIGHEST_COSH else size
    whole = exp2_wide(size * WIDE_LOG2_E)
    return np.float32(0.5 * whole + 0.5 / whole)


@jitable
def beyond_sine(z: Any) -> Any:
    """What the arc sine of the root of ``z`` is beyond that root, as a share of it."""
    above = (((((P5 * z + P4) * z + P3) * z + P2) * z + P1) * z + P0) * z
    return above / ((((Q4 * z + Q3) * z + Q2) * z + Q1) * z + 1.0)


@jitable
def asin64(x: Any) -> Any:
    """The arc sine of a float64; NaN beyond 1."""
    wide = np.float64(x)
    size = abs(wide)
    far = size >= 0.5
    z = 0.5 - 0.5 * size if far else size * size
    s = math.sqrt(z) if far else size
    found = s * beyond_sine(z) + s
    return signed_as(QUARTER - (2.0 * found - HALF_PI_LOW) if far else found, wide)


@jitable
def acos64(x: Any) -> Any:
    """The arc cosine of a float64; NaN beyond 1."""
    wide = np.float64(x)
    size = abs(wide)
    far = size >= 0.5
    z = 0.5 - 0.5 * size if far else size * size
    s = math.sqrt(z) if far else wide
    found = s * beyond_sine(z) + s
    far_found = math.pi - (2.0 * found - PI_LOW) if wide < 0.0 else 2.0 * found
    return far_found if far else QUARTER - (found - HALF_PI_LOW)


# ── distances ────────────────────────────────────────────────────────────────────────────────────────────────────────

LARGE, SMALL = 2.0**500, 2.0**-500  # beyond which squares, or their sum, leave float64
SHRINKS, GROWS = 2.0**-600, 2.0**600


@jitable
def hypot32(x: Any, y: Any) -> Any:
    """In float64, which holds the square of every float32."""
    a, b = np.float64(x), np.float64(y)
    length = math.sqrt(a * a + b * b)
    return math.inf if abs(a) == math.inf or abs(b) == math.inf else length


@jitable
def hypot64(x: Any, y: Any) -> Any:
    """Of both times a power of two that keeps the squares in range."""
    a, b = abs(np.float64(x)), abs(np.float64(y))
    largest = a if a > b else b
    factor = SHRINKS if largest > LARGE else GROWS if largest < SMALL else 1.0
    a, b = a * factor, b * factor
    length = math.sqrt(a * a + b * b) / factor
    return math.inf if largest == math.inf or b == math.inf else length


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────

elementwise("sin", lambda x: math.sin(x), entry=COSTLY, usual=("float32", "float64"))
elementwise("sin", far_sin32, on=("cpu",), dtypes=single, narrow=Narrow(is_near, near_sin32))
elementwise("sin", far_sin64, on=("cpu",), dtypes=double, narrow=Narrow(is_near, near_sin64))
elementwise("cos", lambda x: math.cos(x), entry=COSTLY, usual=("float32", "float64"))
elementwise("cos", far_cos32, on=("cpu",), dtypes=single, narrow=Narrow(is_near, near_cos32))
elementwise("cos", far_cos64, on=("cpu",), dtypes=double, narrow=Narrow(is_near, near_cos64))
elementwise("tan", lambda x: math.tan(x), entry=COSTLY)
elementwise("tan", far_tan32, on=("cpu",), dtypes=single, narrow=Narrow(is_near, near_tan32))
elementwise("tan", far_tan64, on=("cpu",), dtypes=double, narrow=Narrow(is_near, near_tan64))
elementwise("asin", lambda x: math.asin(x), entry=COSTLY)
elementwise("asin", lambda x: asin64(x), on=("cpu",), dtypes=floating)
elementwise("acos", lambda x: math.acos(x), entry=COSTLY)
elementwise("acos", lambda x: acos64(x), on=("cpu",), dtypes=floating)
elementwise("atan", lambda x: math.atan(x), entry=COSTLY)
elementwise("atan", lambda x: atan32(x), on=("cpu",), dtypes=single)
elementwise("atan", lambda x: atan64(x), on=("cpu",), dtypes=double)
elementwise("atan2", lambda y, x: math.atan2(y, x), entry=COSTLY)
elementwise("atan2", lambda y, x: atan232(y, x), on=("cpu",), dtypes=single)
elementwise("atan2", lambda y, x: atan264(y, x), on=("cpu",), dtypes=double)
elementwise("hypot", lambda x, y: math.hypot(x, y), on=("cuda",), entry=SLOW)
elementwise("hypot", lambda x, y: hypot64(x, y), on=("cpu",))
elementwise("hypot", lambda x, y: hypot32(x, y), on=("cpu",), dtypes=single)
elementwise("sinh", lambda x: math.sinh(x), entry=COSTLY)
elementwise("sinh", lambda x: sinh64(x), on=("cpu",), dtypes=floating)
elementwise("cosh", lambda x: math.cosh(x), entry=COSTLY)
elementwise("cosh", lambda x: cosh32(x), on=("cpu",), dtypes=single)
elementwise("cosh", lambda x: cosh64(x), on=("cpu",), dtypes=double)
