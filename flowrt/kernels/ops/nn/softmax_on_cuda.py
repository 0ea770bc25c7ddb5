"""CUDA twins of `softmax`: a block has a row at a time, and its threads every so many of the row's entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.index import around
from flowrt.kernels.ops.moments import total_on_cuda
from flowrt.kernels.ops.nn.softmax import NOT_A_CLASS, examples
from flowrt.kernels.ops.slices import row_of

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def _rows_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    view = View.dense(around(inputs[0].concrete, attrs["axis"]))
    return Call((view, view))


@jitable
def largest_on_cuda(x: Any, o: int, i: int, reduced: Any) -> Any:
    """The largest entry of a line, NaN if one is."""
    best = x[o, 0, i]
    for k in range(cuda.threadIdx.x, x.shape[1], THREADS):
        entry = x[o, k, i]
        best = entry if entry > best or entry != entry else best
    reduced[cuda.threadIdx.x] = best
    cuda.syncthreads()
    for n in range(THREADS):
        best = reduced[n] if reduced[n] > best or reduced[n] != reduced[n] else best
    cuda.syncthreads()
    return best


@jitable
def powers_on_cuda(x: Any, o: int, i: int, top: Any, reduced: Any) -> Any:
    """The sum of the exponentials of a line, less its largest entry."""
    found = 0.0
    for k in range(cuda.threadIdx.x, x.shape[1], THREADS):
        found += math.exp(x[o, k, i] - top)
    reduced[cuda.threadIdx.x] = found
    return total_on_cuda(reduced)


@kernel("softmax", "cuda", layout=_rows_on_cuda)
def softmax_on_cuda(x: Any, y: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for line in range(cuda.blockIdx.x, x.shape[0] * x.shape[2] if x.shape[1] > 0 else 0, cuda.gridDim.x):
        o, i = line // x.shape[2], line % x.shape[2]
        top = largest_on_cuda(x, o, i, reduced)
        total = powers_on_cuda(x, o, i, top, reduced)
        for k in range(cuda.threadIdx.x, x.shape[1], THREADS):
            y[o, k, i] = math.exp(x[o, k, i] - top) / total


@kernel("log_softmax", "cuda", layout=_rows_on_cuda)
def log_softmax_on_cuda(x: Any, y: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for line in range(cuda.blockIdx.x, x.shape[0] * x.shape[2] if x.shape[1] > 0 else 0, cuda.gridDim.x):
        o, i = line // x.shape[2], line % x.shape[2]
        top = largest_on_cuda(x, o, i, reduced)
        rest = math.log(powers_on_cuda(x, o, i, top, reduced))
        for k in range(cuda.threadIdx.x, x.shape[1], THREADS):
            y[o, k, i] = (x[o, k, i] - top) - rest


def _examples_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """As `examples`, the logits as (examples, classes, 1)."""
    call = examples(inputs, outputs, attrs)
    return replace(call, views=(View.dense((*call.views[0].shape, 1)), *call.views[1:]))


@kernel("class_cross_entropy", "cuda", layout=_examples_on_cuda)
def class_cross_entropy_on_cuda(logits: Any, labels: Any, y: Any, run: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for row in range(cuda.blockIdx.x, logits.shape[0], cuda.gridDim.x):
        label = row_of(labels[row], logits.shape[1], 0)
        if label < 0 or labels[row] < 0:
            run[0] = NOT_A_CLASS
        else:
            top = largest_on_cuda(logits, row, 0, reduced)
            total = powers_on_cuda(logits, row, 0, top, reduced)
            if cuda.threadIdx.x == 0:
                y[row] = math.log(total) - (logits[row, label, 0] - top)


@kernel("class_cross_entropy_slope", "cuda", layout=_examples_on_cuda)
def class_cross_entropy_slope_on_cuda(logits: Any, labels: Any, dy: Any, y: Any, run: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for row in range(cuda.blockIdx.x, logits.shape[0], cuda.gridDim.x):
        label = row_of(labels[row], logits.shape[1], 0)
        if label < 0 or labels[row] < 0:
            run[0] = NOT_A_CLASS
        else:
            top = largest_on_cuda(logits, row, 0, reduced)
            total = powers_on_cuda(logits, row, 0, top, reduced)
            for k in range(cuda.threadIdx.x, logits.shape[1], THREADS):
                y[row, k] = dy[row] * (math.exp(logits[row, k, 0] - top) / total - (1 if k == label else 0))


@kernel("cross_entropy", "cuda", layout=_examples_on_cuda)
def cross_entropy_on_cuda(logits: Any, labels: Any, y: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for row in range(cuda.blockIdx.x, logits.shape[0], cuda.gridDim.x):
        found = 0.0
        if logits.shape[1] > 0:
            top = largest_on_cuda(logits, row, 0, reduced)
            rest = math.log(powers_on_cuda(logits, row, 0, top, reduced))
            for k in range(cuda.threadIdx.x, logits.shape[1], THREADS):
                if labels[row, k] != 0:  # of the impossible ask nothing
                    found += labels[row, k] * (rest - (logits[row, k, 0] - top))
        reduced[cuda.threadIdx.x] = found
        total = total_on_cuda(reduced)
        if cuda.threadIdx.x == 0:
            y[row] = total


@kernel("cross_entropy_slope", "cuda", layout=_examples_on_cuda)
def cross_entropy_slope_on_cuda(logits: Any, labels: Any, dy: Any, y: Any) -> None:
    reduced = cuda.shared.array(THREADS, np.float64)
    for row in range(cuda.blockIdx.x, logits.shape[0] if logits.shape[1] > 0 else 0, cuda.gridDim.x):
        found = 0.0
        for k in range(cuda.threadIdx.x, logits.shape[1], THREADS):
            found += labels[row, k]
        reduced[cuda.threadIdx.x] = found
        weight = total_on_cuda(reduced)
        top = largest_on_cuda(logits, row, 0, reduced)
        total = powers_on_cuda(logits, row, 0, top, reduced)
        for k in range(cuda.threadIdx.x, logits.shape[1], THREADS):
            y[row, k] = dy[row] * (weight * math.exp(logits[row, k, 0] - top) / total - labels[row, k])
