"""Scalar expressions: each is compiled for CPUs and CUDA devices alike."""

from __future__ import annotations

from typing import Any

from flowrt.kernels.launch import COPY_OP, FILL_OP
from flowrt.kernels.table import elementwise, flat, kernel

elementwise(COPY_OP, lambda x: x)


@kernel(FILL_OP, layout=flat)
def fill(y: Any, value: float) -> None:
    for i in range(y.size):
        y[i] = value


elementwise("add", lambda x, y: x + y)
