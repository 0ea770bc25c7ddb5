"""Kernels: what computes, on CPUs and CUDA devices, behind one ABI.

Law: nothing here knows a graph, a plan or a thread. Rooms stand in the order of `tests/test_layers.py`; README.md says
what makes them fast.
"""

# Each family enters its kernels in the table when it is imported.
from flowrt.kernels.fusion import fused
from flowrt.kernels.ops import (
    activation,
    along,
    elementwise,
    entries,
    index,
    linalg,
    moments,
    precision,
    quantize,
    random,
    reduce,
    rows,
    shape,
    slices,
    source,
    trigonometry,
)
from flowrt.kernels.ops.nn import conv, pooling, recurrent, recurrent_on_cuda, softmax, softmax_on_cuda
from flowrt.kernels.ops.nn import entropy as nn
from flowrt.kernels.ops.shards import parts, routing
from flowrt.kernels.ops.sorting import lines, places
from flowrt.kernels.ops.updates import combining, compressing

__all__ = [
    "activation",
    "along",
    "combining",
    "compressing",
    "conv",
    "elementwise",
    "entries",
    "fused",
    "index",
    "linalg",
    "lines",
    "moments",
    "nn",
    "parts",
    "places",
    "pooling",
    "precision",
    "quantize",
    "random",
    "recurrent",
    "recurrent_on_cuda",
    "reduce",
    "routing",
    "rows",
    "shape",
    "slices",
    "softmax",
    "softmax_on_cuda",
    "source",
    "trigonometry",
]
