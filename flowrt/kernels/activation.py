"""Activations whose expressions are worth a kernel of their own."""

from __future__ import annotations

import math
from typing import Any

from flowrt.kernels.exponential import ZERO
from flowrt.kernels.logarithm import log_of_one_more32, log_of_one_more64
from flowrt.kernels.table import double, elementwise, jitable, single


@jitable
def log_of_one_more(x: Any) -> Any:
    """``log(1 + exp(x))``, whose exponential is never above 1."""
    return (x if x > 0 else ZERO) + math.log1p(math.exp(-abs(x)))


elementwise("softplus", lambda x: log_of_one_more(x))
elementwise("softplus", lambda x: log_of_one_more32(x), on=("cpu",), dtypes=single)
elementwise("softplus", lambda x: log_of_one_more64(x), on=("cpu",), dtypes=double)
