"""Entropy entry by entry; rows of classes are in `rows`, convolutions in `conv`, pooling in `pooling`."""

from __future__ import annotations

import math
from typing import Any

from flowrt.kernels.elementary.exponential import ZERO, exp64
from flowrt.kernels.elementary.logarithm import log1p64, log_of_one_and_less32
from flowrt.kernels.language.costs import COSTLY
from flowrt.kernels.language.table import double, elementwise, jitable, single


@jitable
def binary_entropy(x: Any, label: Any) -> Any:
    return ((x if x > 0 else ZERO) - x * label) + math.log1p(math.exp(-abs(x)))


@jitable
def binary_entropy32(x: Any, label: Any) -> Any:
    return ((ZERO if x < ZERO else x) - x * label) + log_of_one_and_less32(x)


@jitable
def binary_entropy64(x: Any, label: Any) -> Any:
    return ((0.0 if x < 0.0 else x) - x * label) + log1p64(exp64(-abs(x)))


elementwise("binary_cross_entropy", lambda x, label: binary_entropy(x, label), entry=COSTLY)
elementwise("binary_cross_entropy", lambda x, label: binary_entropy32(x, label), on=("cpu",), dtypes=single)
elementwise("binary_cross_entropy", lambda x, label: binary_entropy64(x, label), on=("cpu",), dtypes=double)
