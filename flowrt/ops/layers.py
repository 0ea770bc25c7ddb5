"""Layers that are compositions of other ops: normalising, dropping out, biases and embeddings."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import fitting, located
from flowrt.base.spec import Spec, is_float, normal_axes
from flowrt.graph import as_node, beside
from flowrt.op import as_value, whole
from flowrt.ops import random
from flowrt.ops.comparison import equal, greater_equal
from flowrt.ops.elementwise import (
    add,
    add_n,
    astype,
    divide,
    floor_divide,
    multiply,
    remainder,
    rounded_once,
    rsqrt,
    square,
    subtract,
    where,
)
from flowrt.ops.index import take
from flowrt.ops.inference import described, settled
from flowrt.ops.moments import moments, standardize
from flowrt.ops.reduce import mean
from flowrt.ops.shape import expand_dims
from flowrt.ops.slices import ABSENT
from flowrt.ops.source import shape_of, zeros_like

if TYPE_CHECKING:
    from flowrt.base.spec import Axes
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand


@located("bias_add")
def bias_add(x: Operand, bias: Operand) -> TensorOrArray:
    """``x`` plus the vector ``bias`` along its last axis, the channels."""
    given, told = described(x), described(bias)
    channels = (None,) if given.dims is None else given.dims[-1:]
    if told.dims is not None and not (channels and Spec(told.dtype, channels).accepts(told.dtype, told.dims)):
        raise SpecError(f"the bias of {given} must be a vector of its last axis, got {told}")
    return add(x, bias)


@whole
@rounded_once
@located("batch_norm")
def batch_norm(
    x: Operand,
    scale: Operand | None = None,
    offset: Operand | None = None,
    axis: Axes = (0, 1, 2),
    epsilon: float = 1e-5,
) -> tuple[TensorOrArray, TensorOrArray, TensorOrArray]:
    """``x`` normalised over ``axis`` by the statistics of this batch: (y, mean, variance).

    ``y`` is ``(x - mean) / sqrt(variance + epsilon) * scale + offset``. ``scale`` and ``offset`` (None for none) and
    both statistics have the shape of the axes that are left: the channels of NHWC images. The variance is over the
    count, not one less. Ioffe and Szegedy, "Batch normalization", ICML 2015.
    """
    x, scale, offset = settled(x, scale, offset)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    middle, variance = moments(x, axes)
    factor = rsqrt(add(variance, epsilon))
    if scale is not None:
        factor = multiply(factor, scale)
    start = zeros_like(middle) if offset is None else offset
    y = standardize(x, *(expand_dims(each, axes) for each in (middle, factor, start)))
    return y, middle, variance


@whole
@rounded_once
@located("layer_norm")
def layer_norm(
    x: Operand, scale: Operand | None = None, offset: Operand | None = None, axis: Axes = -1, epsilon: float = 1e-5
) -> TensorOrArray:
    """``x`` normalised over ``axis``, one example at a time: (x - mean) / sqrt(variance + epsilon) * scale + offset.

    ``scale`` and ``offset`` (None for none) have the shape of ``axis`` itself. Ba et al., "Layer normalization", 2016.
    """
    x, scale, offset = settled(x, scale, offset)
    others = _beside(x, axis)
    centred = subtract(x, mean(x, axis, True))
    y = multiply(centred, rsqrt(add(mean(square(centred), axis, True), epsilon)))
    if scale is not None:
        y = multiply(y, expand_dims(scale, others))
    return y if offset is None else add(y, expand_dims(offset, others))


def _beside(x: Any, axis: Any) -> tuple[int, ...]:
    """The other axes, as far as something that has ``axis`` alone needs them to broadcast to ``x``."""
    dims = described(x).dims
    if dims is not None:
        axes = normal_axes(axis, len(dims))
        return tuple(i for i in range(len(dims)) if i not in axes)
    given = sorted(axis if isinstance(axis, (tuple, list)) else (axis,))
    if given != list(range(-len(given), 0)):
        raise SpecError("the rank of x is open; name its last axes, as (-2, -1)")
    return ()


@located("dropout")
def dropout(x: Operand, rate: Operand, seed: int | None = None, *, name: str | None = None) -> TensorOrArray:
    """``x`` with each entry zero with probability ``rate`` and the others divided by ``1 - rate``, anew at every step.

    ``rate`` is a number or a scalar tensor from 0 up to 1, which is left out; ``seed`` is as in `random.uniform`.
    Srivastava et al., "Dropout", JMLR 2014.
    """
    spec, share = described(x), as_value(rate)
    if not is_float(spec.dtype):
        raise SpecError(f"x must be floating, got {spec}; use astype")
    if not hasattr(share, "builder") and not 0 <= share < 1:
        raise SpecError(f"rate must be from 0 up to 1, which is left out, got {share}")
    kept = greater_equal(random.shares("dropout", shape_of(x), seed, name), astype(share, "float32"))
    return where(kept, divide(x, astype(subtract(1.0, share), spec.dtype)), 0)


@located("embedding_lookup")
def embedding_lookup(shards: Operand, ids: Operand) -> TensorOrArray:
    """The rows ``ids`` (integers from 0 up, of any shape) of a table: [*ids.shape, width].

    ``shards`` is the table, or a list of n tables where row i is row i // n of table i % n; each is read where it is.
    An id beyond the table fails the step. The gradient of a table that is a variable is an `IndexedSlices`.
    """
    tables = list(shards) if isinstance(shards, (tuple, list)) else [shards]
    if not tables:
        raise SpecError("shards must hold at least one table")
    if described(ids).dtype.kind not in "iu":
        raise SpecError(f"ids must be integers, got {described(ids)}")
    if len(tables) == 1:
        return _rows(tables[0], ids)
    places = ids if described(ids).dtype == np.uint64 else astype(ids, "int64")
    owner, row = remainder(places, len(tables)), astype(floor_divide(places, len(tables)), "int64")
    absent = np.int64(ABSENT)
    return add_n([_rows(table, where(equal(owner, n), row, absent), absent=True) for n, table in enumerate(tables)])


@fitting
def embedding(ids: Operand, table: Operand) -> TensorOrArray:
    """`embedding_lookup` as PyTorch calls it: the rows ``ids`` of ``table``, or of its shards."""
    return embedding_lookup(table, ids)


def _rows(table: Any, ids: Any, absent: bool = False) -> TensorOrArray:
    if hasattr(type(table), "composed"):
        return take(table, ids, absent=absent)
    found = as_value(table)
    with beside(as_node(found)) if hasattr(found, "builder") else nullcontext():
        return take(found, ids, absent=absent)
