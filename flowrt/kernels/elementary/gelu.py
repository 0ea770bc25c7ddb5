"""The Gaussian error linear unit and its slope as plain arithmetic without branches; see `exponential`.

Far from 0 a normal number is below -t with the probability exp(-t²/2) r(t), where r, half of the scaled complement of
the error function, is smooth and falls slowly: a quotient of polynomials whose coefficients are all positive, so that
nothing cancels. The square is taken of t's first digits, which is exact, and what that leaves out goes to the rest
that the exponential's polynomial takes. So results keep their digits as far down as floats go.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import (
    HALF,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ONE,
    ROUNDER,
    ROUNDER_BITS,
    SINGLE_BIT,
    WIDE_LN2_HIGH,
    WIDE_LN2_LOW,
    ZERO,
    bits32,
    rest_less_one,
    rest_less_one64,
    two_to,
    two_to64,
    whole64,
    whole_twos,
)
from flowrt.kernels.language.table import jitable

FIRST_DIGITS, FIRST_WIDE_DIGITS = np.int32(-(1 << 12)), np.int64(-(1 << 27))
END, WIDE_END = np.float32(14.7), 38.8  # beyond, the probability rounds to 0
DENSITY, WIDE_DENSITY = np.float32(0.3989422804014327), 0.3989422804014327  # of a normal number at 0
# r is P / Q in t up to there, within 6e-9
P0, P1, P2 = np.float32(0.5), np.float32(0.43869171863812334), np.float32(0.18352949081602193)
P3, P4 = np.float32(0.04073257020119591), np.float32(0.004131086485354247)
Q1, Q2 = np.float32(1.6752684285378323), np.float32(1.2037249006827941)
Q3, Q4 = np.float32(0.4702477954964696), np.float32(0.10210772478612665)
Q5 = np.float32(0.010354981748286368)
# the same within 9e-17
A0, A1, A2, A3 = 0.5, 0.7757126778554049, 0.5952341009776558, 0.2901626294765165
A4, A5, A6 = 0.09806316022026965, 0.02373062189028903, 0.004111572597416839
A7, A8, A9 = 0.00049351170367101, 3.752101936826902e-05, 1.396710045208802e-06
B1, B2, B3 = 2.349309916513669, 2.5649463128828627, 1.7181628832982672
B4, B5, B6 = 0.7843748385241368, 0.25592596085163916, 0.060713896518543496
B7, B8, B9 = 0.010400235363857294, 0.0012405514233500639, 9.405124803962661e-05
B10 = 3.5010328907903212e-06


@jitable
def scaled_tail32(t: Any) -> Any:
    """r of a float32."""
    above = (((P4 * t + P3) * t + P2) * t + P1) * t + P0
    below = ((((Q5 * t + Q4) * t + Q3) * t + Q2) * t + Q1) * t + ONE
    return above / below


@jitable
def bell32(t: Any) -> Any:
    """``exp(-t² / 2)`` as a number near 1 and the power of two that it is to be multiplied by."""
    first = np.int32(bits32(t) & FIRST_DIGITS).view(np.float32)
    power, more = -HALF * first * first, -HALF * (t - first) * (t + first)
    rounded = (power + more) * LOG2_E + ROUNDER
    twos = rounded - ROUNDER
    rest = ((power - twos * LN2_HIGH) + more) - twos * LN2_LOW
    return rest_less_one(rest, ZERO) + ONE, np.int32(bits32(rounded) - ROUNDER_BITS)


@jitable
def gelu32(x: Any) -> Any:
    """A float32 times the probability that a normal number is below it."""
    size = abs(x)
    t = END if size > END else size
    found, exponent = bell32(t)
    half = np.int32(exponent >> SINGLE_BIT)  # in two factors: their product may be no normal float32
    part = t * (found * scaled_tail32(t)) * two_to(half) * two_to(np.int32(exponent - half))
    return -part if x < ZERO else x - part


@jitable
def gelu_slope32(x: Any) -> Any:
    """The slope of `gelu32`; those of a number and of its negative add up to 1."""
    size = abs(x)
    t = END if size > END else size
    found, exponent = bell32(t)
    half = np.int32(exponent >> SINGLE_BIT)
    part = found * (scaled_tail32(t) - DENSITY * t) * two_to(half) * two_to(np.int32(exponent - half))
    return part if x < ZERO else ONE - part


@jitable
def scaled_tail64(t: Any) -> Any:
    """r of a float64. Even and odd terms are added up apart: half as many wait for each other."""
    tt = t * t
    above = (((A9 * tt + A7) * tt + A5) * tt + A3) * tt + A1
    above = above * t + ((((A8 * tt + A6) * tt + A4) * tt + A2) * tt + A0)
    below = (((B9 * tt + B7) * tt + B5) * tt + B3) * tt + B1
    below = below * t + (((((B10 * tt + B8) * tt + B6) * tt + B4) * tt + B2) * tt + 1.0)
    return above / below


@jitable
def bell64(t: Any) -> Any:
    """As `bell32`, of a float64."""
    first = np.int64(np.float64(t).view(np.int64) & FIRST_WIDE_DIGITS).view(np.float64)
    power, more = -0.5 * first * first, -0.5 * (t - first) * (t + first)
    twos = whole_twos(power + more)
    rest = ((power - twos * WIDE_LN2_HIGH) + more) - twos * WIDE_LN2_LOW
    return rest_less_one64(rest, 0.0) + 1.0, twos


@jitable
def gelu64(x: Any) -> Any:
    """A float64 times the probability that a normal number is below it."""
    size = abs(x)
    t = WIDE_END if size > WIDE_END else size
    found, twos = bell64(t)
    half = whole64(twos * 0.5)
    part = t * (found * scaled_tail64(t)) * two_to64(half) * two_to64(twos - half)
    return -part if x < 0.0 else x - part


@jitable
def gelu_slope64(x: Any) -> Any:
    """The slope of `gelu64`."""
    size = abs(x)
    t = WIDE_END if size > WIDE_END else size
    found, twos = bell64(t)
    half = whole64(twos * 0.5)
    part = found * (scaled_tail64(t) - WIDE_DENSITY * t) * two_to64(half) * two_to64(twos - half)
    return part if x < 0.0 else 1.0 - part
