"""The error function as plain arithmetic without branches; see `exponential`.

Near 0 it is x times a polynomial in x**2. Beyond, what it lacks of 1 is the fourth power of a polynomial, in float32,
and in float64 exp(-q(x - 1)) for a polynomial q that is close to -log(erfc), so that no quotient is needed. All have
the least maximum of the error, by Remez' or Lawson's algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.elementary.exponential import ONE, ZERO, rest_less_one64, signed_as, two_to64, whole_twos
from flowrt.kernels.language.table import jitable

EDGE, END = np.float32(1.2), np.float32(3.93)  # beyond the second, the result rounds to 1
# erf(x) / x - 1 in x**2 up to the edge, within 6e-10
P0, P1, P2 = np.float32(0.12837916612625122), np.float32(-0.37612634897232056), np.float32(0.11283717304468155)
P3, P4 = np.float32(-0.026862064376473427), np.float32(0.005212732125073671)
P5, P6 = np.float32(-0.0008378432248719037), np.float32(0.00010594731429591775)
P7 = np.float32(-7.979533620527945e-06)
# the fourth root of erfc(x) in x from there on, within 5e-9 of erf
Q0, Q1, Q2 = np.float32(1.0064260959625244), np.float32(-0.3123829960823059), np.float32(-0.057551510632038116)
Q3, Q4 = np.float32(-0.05571280047297478), np.float32(0.06886719167232513)
Q5, Q6 = np.float32(-0.023060940206050873), np.float32(0.0033767123240977526)
Q7 = np.float32(-0.00018956181884277612)


@jitable
def erf32(x: Any) -> Any:
    """The error function of a float32, within 2.5 units in the last place."""
    z = x * x
    less = ((((((P7 * z + P6) * z + P5) * z + P4) * z + P3) * z + P2) * z + P1) * z + P0
    size = abs(x)
    t = END if size > END else size
    root = ((((((Q7 * t + Q6) * t + Q5) * t + Q4) * t + Q3) * t + Q2) * t + Q1) * t + Q0
    rest = root * root
    far = ONE - rest * rest
    far = -far if x < ZERO else far
    return x * less + x if size < EDGE else far


WIDE_END = 5.0  # from 1; beyond, the result rounds to 1
# erf(x) / x in x**2 up to 1, within 1e-17
A0, A1, A2 = 1.1283791670955126, -0.37612638903183515, 0.1128379167094408
A3, A4, A5 = -0.02686617064309395, 0.00522397760597032, -0.0008548325922027436
A6, A7, A8 = 0.00012055293354064383, -1.492470793643868e-05, 1.644707675104468e-06
A9, A10, A11 = -1.6205887154993952e-07, 1.3709107773757138e-08, -7.775924789133829e-10
# -log(erfc(1 + t)) in t up to there, within 1e-17 of erf
B0, B1, B2 = 1.8496055099332482, 2.6389675142347757, 0.8431072563594129
B3, B4, B5 = 0.04156109802507477, -0.010033825179061451, 0.0019779012154034037
B6, B7, B8 = -0.00023731643307975208, -2.629633182349118e-05, 2.7198982781784995e-05
B9, B10, B11 = -9.671392056704492e-06, 2.1319561647641477e-06, -2.048247442830924e-07
B12, B13, B14 = -5.8004360630338954e-08, 3.3388359130484327e-08, -8.517969661570147e-09
B15, B16, B17 = 1.3189574567255675e-09, -1.193103710221399e-10, 4.864284275743333e-12


@jitable
def erf64(x: Any) -> Any:
    """The error function of a float64, within 2 units in the last place.

    Even and odd terms of the polynomials are added up apart: half as many wait for each other.
    """
    size = abs(x)
    z = x * x
    zz = z * z
    odd = ((((A11 * zz + A9) * zz + A7) * zz + A5) * zz + A3) * zz + A1
    inner = ((((A10 * zz + A8) * zz + A6) * zz + A4) * zz + A2) * zz + A0
    inner = odd * z + inner
    t = size - 1.0
    t = WIDE_END if t > WIDE_END else t
    tt = t * t
    odd = (((B17 * tt + B15) * tt + B13) * tt + B11) * tt + B9
    odd = (((odd * tt + B7) * tt + B5) * tt + B3) * tt + B1
    power = (((B16 * tt + B14) * tt + B12) * tt + B10) * tt + B8
    power = (((power * tt + B6) * tt + B4) * tt + B2) * tt + B0
    power = odd * t + power
    twos = whole_twos(-power)
    less = (rest_less_one64(-power, twos) + 1.0) * two_to64(twos)
    return signed_as(size * inner if size < 1.0 else 1.0 - less, x)
