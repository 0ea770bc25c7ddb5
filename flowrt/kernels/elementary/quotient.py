"""Rests of divisions as plain arithmetic without branches, where quotients are small; see `exponential`.

A quotient below 2**22 times the divisor, or its first bits, is exact in float64, and so is what that leaves of the
dividend: the rest that C's library finds bit by bit. A rest of 0 takes the divisor's sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import INFINITY, signed_as, whole64
from flowrt.kernels.language.table import jitable

QUOTIENT_END = np.float32(2.0**22)
DIVIDEND_END = 2.0**1023
HALF_BITS = np.uint64(0xFFFFFFFFF8000000)


@jitable
def is_small_quotient(x: Any, y: Any) -> Any:
    """Whether the functions below hold, as they do for no NaN and no division by zero."""
    return (abs(x / y) < QUOTIENT_END) & (abs(y) < INFINITY)


@jitable
def is_small_quotient64(x: Any, y: Any) -> Any:
    """The same of float64: of larger dividends, the nearest quotient times the divisor may be above all numbers."""
    return is_small_quotient(x, y) & (abs(x) < DIVIDEND_END)


@jitable
def nearest_quotient(x: Any, y: Any) -> Any:
    """The integer nearest to ``x / y``, both float64, and what is left of ``x``."""
    quotient = whole64(x / y)
    high = np.uint64(np.float64(y).view(np.uint64) & HALF_BITS).view(np.float64)
    return quotient, (x - quotient * high) - quotient * (y - high)


@jitable
def nearest_quotient32(x: Any, y: Any) -> Any:
    """The same of two float64 that are float32: their products need no parts."""
    quotient = whole64(x / y)
    return quotient, x - quotient * y


@jitable
def is_beyond(rest: Any, y: Any) -> Any:
    """Whether the integer nearest to a quotient is above it, to judge by the rest."""
    return (rest != 0.0) & ((rest < 0.0) != (y < 0.0))


@jitable
def near_remainder32(x: Any, y: Any) -> Any:
    """What is left of ``x``, with the sign of ``y``."""
    by = np.float64(y)
    _, rest = nearest_quotient32(np.float64(x), by)
    rest = rest + by if is_beyond(rest, by) else rest
    return np.float32(rest if rest != 0.0 else signed_as(0.0, by))


@jitable
def near_remainder64(x: Any, y: Any) -> Any:
    """The same of float64."""
    _, rest = nearest_quotient(x, y)
    rest = rest + y if is_beyond(rest, y) else rest
    return rest if rest != 0.0 else signed_as(0.0, y)


@jitable
def near_quotient32(x: Any, y: Any) -> Any:
    """The largest integer not above ``x / y``."""
    by = np.float64(y)
    quotient, rest = nearest_quotient32(np.float64(x), by)
    return np.float32(quotient - 1.0 if is_beyond(rest, by) else quotient)


@jitable
def near_quotient64(x: Any, y: Any) -> Any:
    """The same of float64."""
    quotient, rest = nearest_quotient(x, y)
    return quotient - 1.0 if is_beyond(rest, y) else quotient
