"""The error function as plain arithmetic without branches; see `exponential`."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.exponential import ONE
from flowrt.kernels.table import jitable

END = np.float32(3.93)  # beyond, the result rounds to 1
# erf(x) / x is P / Q in x**2 up to there, within 2e-8: the least maximum of the relative error
P0, P1, P2 = np.float32(1.1283791065216064), np.float32(0.19078364968299866), np.float32(0.052790261805057526)
P3, P4 = np.float32(0.0037796020042151213), np.float32(0.00028480851324275136)
P5 = np.float32(2.041973175437306e-06)
Q1, Q2 = np.float32(0.502410352230072), np.float32(0.11425744742155075)
Q3, Q4 = np.float32(0.014997422695159912), np.float32(0.0011652110842987895)
Q5 = np.float32(3.800409467658028e-05)


@jitable
def erf32(x: Any) -> Any:
    """The error function of a float32, within 6 units in the last place."""
    inside = -END if x < -END else x
    inside = END if inside > END else inside
    z = inside * inside
    above = ((((P5 * z + P4) * z + P3) * z + P2) * z + P1) * z + P0
    below = ((((Q5 * z + Q4) * z + Q3) * z + Q2) * z + Q1) * z + ONE
    found = inside * above / below
    found = -ONE if found < -ONE else found
    return ONE if found > ONE else found
