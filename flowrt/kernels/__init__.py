"""Kernels: what computes, on CPUs and CUDA devices, behind one ABI."""

# Each family enters its kernels in the table when it is imported.
from flowrt.kernels import (
    activation,
    conv,
    elementwise,
    flow,
    fused,
    index,
    linalg,
    nn,
    pooling,
    random,
    recurrent,
    reduce,
    rows,
    shape,
    slices,
    softmax,
    source,
    trigonometry,
)

__all__ = [
    "activation",
    "conv",
    "elementwise",
    "flow",
    "fused",
    "index",
    "linalg",
    "nn",
    "pooling",
    "random",
    "recurrent",
    "reduce",
    "rows",
    "shape",
    "slices",
    "softmax",
    "source",
    "trigonometry",
]
