"""Entries in order, the first of them, where others belong among them, and those that a mask chooses.

What decides how many there are (`unique`, `nonzero`, `boolean_mask`) has a size that only a step knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import is_whole
from flowrt.base.spec import Spec, agree, check_axis, is_float, one_axis
from flowrt.indexing import masked
from flowrt.ops.comparison import isnan, logical_and, logical_not, not_equal
from flowrt.ops.elementwise import astype, floor_divide, minimum, remainder, subtract
from flowrt.ops.entries import add_along_axis
from flowrt.ops.index import take
from flowrt.ops.inference import described
from flowrt.ops.reduce import cumsum, size
from flowrt.ops.shape import concat, getitem, reshape, slice_along
from flowrt.ops.source import arange, shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Shape
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["argsort", "boolean_mask", "nonzero", "searchsorted", "sort", "top_k", "unique"]


def _in_order(x: Spec, axis: Any) -> Shape | None:
    """The shape of what is put in order along ``axis``, all of it as one line if that is None."""
    if axis is None:
        return (x.size,) if x.known else (None,)
    check_axis(axis, x)
    return x.dims


@op(gradient=None)
def argsort(
    x: Operand, axis: int | None = -1, descending: bool = False, stable: bool = True, *, name: str | None = None
) -> Result:
    """The places, int64, of the entries along ``axis`` in their order: what `sort` would put there stood at these.

    NaN comes last in either direction. Equal entries, as 0.0 and -0.0 are, keep their order: ``stable`` is as good as
    True. None as ``axis`` is for the flattened tensor.
    """
    return Spec("int64", _in_order(x, axis))


@op
def sort(
    x: Operand, axis: int | None = -1, descending: bool = False, stable: bool = True, *, name: str | None = None
) -> Result:
    """The entries along ``axis`` in order, the least first, or last if ``descending``; NaN last in either direction.

    Equal entries, as 0.0 and -0.0 are, keep their order: ``stable`` is as good as True. None as ``axis`` sorts the
    flattened tensor.
    """
    return Spec(x.dtype, _in_order(x, axis))


@sort.gradient
def sort_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, axis = node.inputs[0], node.attrs["axis"]
    order = argsort(x, axis, node.attrs["descending"])
    if axis is None:
        return (reshape(add_along_axis(dy, order, shape_of(dy), 0), shape_of(x)),)
    return (add_along_axis(dy, order, shape_of(x), axis),)


@op
def top_k(x: Operand, k: int, sorted: bool = True, *, name: str | None = None) -> tuple[Result, Result]:
    """The ``k`` largest entries of each row, along the last axis, and their places there, int64: (values, indices).

    They come largest first, of equal ones the first one first, and NaN only where there are not enough numbers:
    the first of ``sort(x, descending=True)``, found sooner. ``sorted=False`` says that their order does not matter.
    """
    if not is_whole(k, 0):
        raise SpecError(f"k is how many entries of each row, an integer from 0 up, got {k!r}")
    if x.dims is None:
        return Spec(x.dtype, None), Spec("int64", None)
    if x.rank == 0:
        raise SpecError("a scalar has no rows to take entries of")
    if x.shape[-1] is not None and k > x.shape[-1]:
        raise SpecError(f"k is {k}, and rows of {x} have only {x.shape[-1]} entries")
    return Spec(x.dtype, (*x.shape[:-1], k)), Spec("int64", (*x.shape[:-1], k))


@top_k.gradient
def top_k_grad(node: Node, dvalues: Tensor, _: Any) -> tuple[Any, ...]:
    return (add_along_axis(dvalues, node.outputs[1], shape_of(node.inputs[0]), -1),)


@op(promote=True, gradient=None)
def searchsorted(sorted: Operand, values: Operand, side: str = "left", *, name: str | None = None) -> Result:
    """Where ``values`` belong in ``sorted``, whose last axis is in ascending order: int64, shaped as ``values``.

    Before what is equal, or after it if ``side`` is "right". A vector takes any values; more axes have a row for each
    row of values. NaN belongs behind all numbers. What is not in order gets some place.
    """
    if side not in ("left", "right"):
        raise SpecError(f'side is "left" or "right", got {side!r}')
    if sorted.dims is None or values.dims is None:
        return Spec("int64", values.dims)
    if sorted.rank == 0:
        raise SpecError("a scalar has no order to search in; give a vector")
    if sorted.rank > 1 and (sorted.rank != values.rank or not agree(sorted.shape[:-1], values.shape[:-1])):
        raise SpecError(f"there must be a row of values for each row of {sorted}, got {values}")
    return Spec("int64", values.dims)


@op(gradient=None)
def true_places(mask: Operand) -> tuple[Result, Result]:
    """Where a vector of bools is true, then zeros, [n]; and how many such places there are: int64."""
    if mask.dtype != np.bool_ or (mask.dims is not None and mask.rank != 1):
        raise SpecError(f"a mask is a vector of bools here, got {mask}")
    return Spec("int64", (None if mask.dims is None else mask.shape[0],)), Spec("int64", ())


def places_in(mask: Any) -> Any:
    """Where a mask, flattened, is true: so many places as only a step knows."""
    places, count = true_places(mask if described(mask).rank == 1 else reshape(mask, (-1,)))
    return slice_along(places, np.int64(0), count)


@located("nonzero")
def nonzero(x: Operand) -> tuple[TensorOrArray, ...]:
    """Where the entries of ``x`` are not zero (or true), as NumPy's: a vector of int64 for each axis.

    Together they are the coordinates of each such entry, row by row; `stack` of them along axis 1 is TensorFlow's
    ``where`` of one argument.
    """
    spec = described(x)
    if spec.dims is None or spec.rank == 0:
        raise SpecError(f"a tensor with axes, as many as are known, has coordinates, got {spec}")
    places = places_in(x if spec.dtype == np.bool_ else not_equal(x, 0))
    found = []
    for axis in reversed(range(1, spec.rank)):
        along = spec.shape[axis] if spec.shape[axis] is not None else getitem(shape_of(x), (axis,))
        found.append(remainder(places, along))
        places = floor_divide(places, along)
    return (places, *reversed(found))


@located("boolean_mask")
def boolean_mask(x: Operand, mask: Operand, axis: int = 0, *, name: str | None = None) -> TensorOrArray:
    """The slices of ``x`` where ``mask`` is true; its axes, from ``axis`` on those of ``x``, become one.

    How many there are only a step knows. ``x[mask]`` is the same for the first axes.
    """
    given, told = described(x), described(mask)
    if told.dtype != np.bool_:
        raise SpecError(f"a mask is of bools, got {told}; compare it, as in mask != 0")
    if given.dims is None or told.dims is None or told.rank == 0:
        raise SpecError(f"a mask has axes that are known, as those of what it chooses from are, got {told} for {given}")
    at = one_axis(axis, given.rank)
    if not agree(given.shape[at : at + told.rank], told.shape):
        raise SpecError(f"a mask from axis {axis} on of {given} is shaped as its axes from there, got {told}")
    made: TensorOrArray = masked(x, mask, at, name)
    return made


@located("unique")
def unique(
    x: Operand, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False
) -> TensorOrArray | tuple[TensorOrArray, ...]:
    """The different entries of ``x`` in ascending order, as NumPy's: a vector of as many as only a step knows.

    With it, as asked for and in this order: where each is first in the flattened tensor; for each entry of ``x``, in
    its shape, which of them it is; and how often each occurs. All NaN are one, and 0.0 and -0.0, too.
    """
    flat = reshape(x, (-1,))
    order = argsort(flat) if return_index or return_inverse else None
    entries = sort(flat) if order is None else take(flat, order)
    later, sooner = getitem(entries, ((1, None, None),)), getitem(entries, ((None, -1, None),))
    differs = not_equal(later, sooner)
    if is_float(described(x).dtype):
        differs = logical_and(differs, logical_not(logical_and(isnan(later), isnan(sooner))))
    count = size(flat)
    first = arange(minimum(count, 1))  # of no entries none is the first
    starts = concat([first, places_in(differs) + 1])
    found = [take(entries, starts)]
    if return_index:
        found.append(take(order, starts))
    if return_inverse:
        numbers = cumsum(concat([first, astype(differs, "int64")]))
        found.append(reshape(add_along_axis(numbers, order, shape_of(flat), 0), shape_of(x)))
    if return_counts:
        found.append(subtract(concat([getitem(starts, ((1, None, None),)), reshape(count, (1,))]), starts))
    return found[0] if len(found) == 1 else tuple(found)
