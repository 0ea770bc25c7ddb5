"""Activations whose expressions are worth a kernel of their own."""

from __future__ import annotations

import math
from typing import Any

from flowrt.kernels.elementary.exponential import ZERO
from flowrt.kernels.elementary.gelu import WIDE_DENSITY, gelu32, gelu64, gelu_slope32, gelu_slope64
from flowrt.kernels.elementary.logarithm import log_of_one_more32, log_of_one_more64
from flowrt.kernels.language.costs import COSTLY
from flowrt.kernels.language.table import double, elementwise, integral, jitable, single

FAR, ROOT_HALF = 40.0, math.sqrt(0.5)  # so far from 0 no probability is left


@jitable
def log_of_one_more(x: Any) -> Any:
    """``log(1 + exp(x))``, whose exponential is never above 1."""
    return (x if x > 0 else ZERO) + math.log1p(math.exp(-abs(x)))


elementwise("softplus", lambda x: log_of_one_more(x), entry=COSTLY)
elementwise("softplus", lambda x: log_of_one_more32(x), on=("cpu",), dtypes=single)
elementwise("softplus", lambda x: log_of_one_more64(x), on=("cpu",), dtypes=double)
elementwise("softplus", lambda x: log_of_one_more(x + 0.0), dtypes=integral)  # whose negatives wrap around


@jitable
def gelu_of(x: Any) -> Any:
    """``x`` times the probability that a normal number is below it."""
    return (x if x > -FAR else -FAR) * 0.5 * math.erfc(-x * ROOT_HALF)


@jitable
def slope_of_gelu(x: Any) -> Any:
    """That probability, and ``x`` times its density."""
    t = -FAR if x < -FAR else x
    t = FAR if t > FAR else t
    return 0.5 * math.erfc(-t * ROOT_HALF) + WIDE_DENSITY * t * math.exp(-0.5 * t * t)


elementwise("gelu", lambda x: gelu_of(x), entry=COSTLY)
elementwise("gelu", lambda x: gelu32(x), dtypes=single)
elementwise("gelu", lambda x: gelu64(x), on=("cpu",), dtypes=double)
elementwise("gelu", lambda x: gelu_of(x + 0.0), dtypes=integral)
elementwise("gelu_slope", lambda x: slope_of_gelu(x), entry=COSTLY)
elementwise("gelu_slope", lambda x: gelu_slope32(x), dtypes=single)
elementwise("gelu_slope", lambda x: gelu_slope64(x), on=("cpu",), dtypes=double)
elementwise("gelu_slope", lambda x: slope_of_gelu(x + 0.0), dtypes=integral)
