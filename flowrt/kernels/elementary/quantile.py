"""The normal distribution's quantiles within two standard deviations.

Over the distance from the median they grow slowly with the logarithm of 1 less four times its square: a quotient of
polynomials of it, whose coefficients are all positive. `tests/kernels/test_elementary.py` states its bound.
"""

from __future__ import annotations

from typing import Any

from flowrt.kernels.language.table import jitable

WITHIN = 0.9544997361036416  # the probability of being there
P0, P1, P2 = 2.5066282746309496, 0.7713811869356608, 0.1403690403333267
P3, P4, P5 = 0.017619075152628395, 0.001411718902321398, 5.6461324550033066e-05
Q1, Q2, Q3 = 0.04593718197350344, 0.030940782020681876, 0.0009649409447896277
Q4, Q5 = 0.00017287332398684713, 2.5646118137215237e-07


@jitable
def distance_of(share: Any) -> Any:
    """How far from the median, in probability, what is so large a share of those within two deviations lies."""
    return (share - 0.5) * WITHIN


@jitable
def quantile_at(distance: Any, logarithm: Any) -> Any:
    """The quantile at such a distance, given the logarithm of 1 less four times its square; all in float64."""
    u = 0.0 - logarithm
    top = P0 + u * (P1 + u * (P2 + u * (P3 + u * (P4 + u * P5))))
    bottom = 1.0 + u * (Q1 + u * (Q2 + u * (Q3 + u * (Q4 + u * Q5))))
    return min(max(distance * top / bottom, -2.0), 2.0)
