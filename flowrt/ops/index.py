"""Entries chosen by integers that a step computes: gathering, its adding inverse, and one-hot codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import is_whole
from flowrt.base.spec import Spec, is_float, one_axis, value_known
from flowrt.ops.elementwise import astype
from flowrt.ops.inference import carry, described, filled
from flowrt.ops.reduce import max as max_
from flowrt.ops.shape import concat
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.op import DType
    from flowrt.typed import Operand, Result

__all__ = ["one_hot", "scatter_add", "segment_sum", "take"]


def _indices(indices: Spec) -> None:
    if indices.dtype.kind not in "iu":
        raise SpecError(f"indices must be integers, got {indices}; use astype")


@op
def take(x: Operand, indices: Operand, axis: int = 0, absent: bool = False, *, name: str | None = None) -> Result:
    """The slices of ``x`` at ``indices`` along ``axis``; the axes of ``indices`` stand where that axis was.

    Negative indices count from the end. One that is out of range fails the step, unless some may be ``absent``: then
    the least int64 is no row's, and zeros are taken there. The gradient of a variable's rows is an `IndexedSlices`.
    """
    _indices(indices)
    if x.dims is None or indices.dims is None:
        return Spec(x.dtype, None)
    at = _axis(x, axis)
    if x.shape[at] == 0 and indices.known and indices.size > 0:
        raise SpecError(f"nothing can be taken from axis {axis} of {x}, which is empty")
    out = Spec(x.dtype, (*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))
    return carry(out, lambda held, places: held[places.astype(int)], x, indices) if _can_tell(x, indices) else out


def _can_tell(x: Spec, indices: Spec) -> bool:
    """Whether it is known which entries of a vector are taken."""
    if x.rank != 1 or x.value is None or indices.value is None or not value_known(indices.value):
        return False
    size = x.size if x.known else 0
    return all(-size <= place < size for place in np.ravel(np.array(indices.value, dtype=object)))


def _axis(x: Spec, axis: int) -> int:
    if x.rank == 0:
        raise SpecError("a scalar has no axis to index")
    return one_axis(axis, x.rank)


@take.gradient
def take_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, indices = node.inputs
    axis, absent = node.attrs["axis"], node.attrs["absent"]
    if x.op.op.name == "read_variable" and indices.spec.dims is not None and axis in (0, -x.spec.rank):
        return IndexedSlices(dy, indices, x.spec.concrete, absent), None
    if indices.op.op.name == "route_rows" and indices.index == 3 and axis in (0, -x.spec.rank):
        return take(dy, indices.op.outputs[2], absent=True), None  # each slice was taken once, so it is put back
    return scatter_add(dy, indices, shape_of(x), axis, absent), None


@op(gradient=None)
def bag(x: Operand, indices: Operand, axes: int, mean: bool, absent: bool = False) -> Result:
    """`take` of rows, summed or averaged over the last ``axes`` axes of ``indices``: what a pass makes of the two.

    A table [size, ...] and indices [..., *bag] of that many last axes give [..., *x.shape[1:]]. It is made after
    gradients are taken, and has none of its own.
    """
    _indices(indices)
    if not is_float(x.dtype) or (x.dims is not None and x.rank < 2):
        raise SpecError(f"a bag is of floating rows, got {x}")
    if indices.dims is not None and not 1 <= axes <= indices.rank:
        raise SpecError(f"there are from 1 to {indices.rank} axes to sum over, got {axes}")
    if x.dims is None or indices.dims is None:
        return Spec(x.dtype, None)
    return Spec(x.dtype, (*indices.shape[: indices.rank - axes], *x.shape[1:]))


@op(gradient=lambda node, dy: (take(dy, node.inputs[1], node.attrs["axis"], node.attrs["absent"]), None, None))
def scatter_add(
    updates: Operand, indices: Operand, shape: Operand, axis: int = 0, absent: bool = False, *, name: str | None = None
) -> Result:
    """Zeros of ``shape``, to whose slices at ``indices`` along ``axis`` the ``updates`` are added.

    ``updates`` is shaped like ``take(result, indices, axis)``; slices named more than once get every addition. Indices
    are as those of `take`: what is added where one is ``absent`` is left out.
    """
    _indices(indices)
    out = filled(updates.dtype, shape)
    if out.dims is None or indices.dims is None or updates.dims is None:
        return out
    at = _axis(out, axis)
    expected = Spec(updates.dtype, (*out.shape[:at], *indices.shape, *out.shape[at + 1 :]))
    if not expected.accepts(updates.dtype, updates.shape):
        raise SpecError(f"updates of {out} at {indices} along axis {axis} must be {expected}, got {updates}")
    return out


@located("segment_sum")
def segment_sum(x: Operand, segment_ids: Operand, num_segments: Operand | None = None) -> TensorOrArray:
    """The sums of the slices of ``x`` that have equal ids: [num_segments, ...].

    ``segment_ids`` are integers in any order, one for each slice along the first axes of ``x``. Without
    ``num_segments`` there are as many as the largest id asks for, which only a step will know; an id beyond them fails.
    """
    ids = described(segment_ids)
    _indices(ids)
    if ids.dims is None:
        raise SpecError(f"segment_ids must be of known rank, got {ids}")
    rows = max_(segment_ids) + 1 if num_segments is None else num_segments
    inner = shape_of(x)[ids.rank :]
    return scatter_add(x, segment_ids, concat([astype([rows], inner.dtype), inner]))


@op(gradient=None)
def one_hot(indices: Operand, depth: int, dtype: DType = "float32", *, name: str | None = None) -> Result:
    """A last axis of ``depth`` entries: 1 at the index, else 0. An index out of range makes zeros only."""
    _indices(indices)
    if not is_whole(depth, 0):
        raise SpecError(f"depth must be an integer from 0 up, got {depth!r}")
    return Spec(dtype, None if indices.dims is None else (*indices.dims, depth))
