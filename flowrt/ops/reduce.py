"""Reductions over axes, and what undoes them: ``spread`` and ``broadcast_to``.

``axis`` is None (all axes), an int or a tuple; ``keepdims`` leaves reduced axes with size 1.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import fitting, located
from flowrt.base.spec import Shape, Spec, agree, check_axis, normal_axes
from flowrt.base.traits import Arranged, Reduction
from flowrt.op import whole
from flowrt.ops.comparison import equal, isfinite
from flowrt.ops.elementwise import (
    add,
    as_of,
    astype,
    divide,
    exp,
    log,
    rounded_once,
    sqrt,
    square,
    subtract,
    where,
    widened,
)
from flowrt.ops.flow import stop_gradient
from flowrt.ops.inference import as_float, carry, described, filled
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Axes
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = [
    "all",
    "any",
    "argmax",
    "argmin",
    "broadcast_to",
    "cumsum",
    "logsumexp",
    "max",
    "mean",
    "min",
    "prod",
    "rank",
    "size",
    "std",
    "sum",
    "sum_to",
    "var",
]


def reduced(x: Spec, axis: Any, keepdims: bool) -> Shape | None:
    """The shape of ``x`` without the axes it is reduced over."""
    if x.dims is None:
        return () if axis is None and not keepdims else None
    axes = normal_axes(axis, x.rank)
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return kept if keepdims else tuple(n for i, n in enumerate(x.shape) if i not in axes)


def _wide(dtype: np.dtype[Any]) -> str:
    """What a sum of ``dtype`` is held in: 64 bits for integers and bools."""
    return {"b": "int64", "i": "int64", "u": "uint64"}.get(dtype.kind, dtype.name)


def _needs_entries(what: str, x: Spec, axis: Any) -> None:
    if x.dims is not None and builtins.any(x.shape[a] == 0 for a in normal_axes(axis, x.rank)):
        raise SpecError(f"the {what} of no entries is not defined: {x} over axis {axis}")


@op(reduction=Reduction("add", in_rows=True), gradient=lambda node, dy: (_spread_like(dy, node),))
def sum(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """The sum over ``axis``; small integers and bools are summed in 64 bits. Of no entries: 0."""
    return Spec(_wide(x.dtype), reduced(x, axis, keepdims))


@op(reduction=Reduction("add", mean=True, in_rows=True))
def mean(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """The mean over ``axis``; of integers in float64. Of no entries: NaN."""
    return Spec(as_float(x).dtype, reduced(x, axis, keepdims))


@mean.gradient
def mean_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (_spread_like(over_count(dy, node), node),)


def over_count(dy: Tensor, node: Node) -> Any:
    """``dy`` over how many entries come to one result, which floats of 16 bits may not hold."""
    wide = widened(dy)
    return as_of(wide / _count_each(node, wide.dtype), dy.dtype)


def _count_each(node: Node, dtype: Any) -> Any:
    """How many entries come to one result of a reduction, 1 at least: a number, or a tensor where sizes are open."""
    x, y = node.inputs[0], node.outputs[0]
    axes = () if x.spec.dims is None else normal_axes(node.attrs["axis"], x.spec.rank)
    sizes = [n for a in axes if (n := x.spec.shape[a]) is not None]
    if x.spec.dims is not None and len(sizes) == len(axes):
        return float(builtins.max(math.prod(sizes), 1))
    return astype(divide(size(x), size(y)), dtype)


@op(reduction=Reduction("maximum", in_rows=True), gradient=lambda node, dy: (_shared_by_the_equal(node, dy),))
def max(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """The largest entry over ``axis``; NaN if any is. Equal entries share the gradient."""
    _needs_entries("maximum", x, axis)
    return Spec(x.dtype, reduced(x, axis, keepdims))


@op(reduction=Reduction("minimum", in_rows=True), gradient=lambda node, dy: (_shared_by_the_equal(node, dy),))
def min(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """The smallest entry over ``axis``; NaN if any is. Equal entries share the gradient."""
    _needs_entries("minimum", x, axis)
    return Spec(x.dtype, reduced(x, axis, keepdims))


def _shared_by_the_equal(node: Node, dy: Tensor) -> Any:
    hit = equal(node.inputs[0], _spread_like(node.outputs[0], node))
    wide = widened(dy)
    ways = sum(astype(hit, wide.dtype), node.attrs["axis"], node.attrs["keepdims"])
    return where(hit, _spread_like(as_of(wide / ways, dy.dtype), node), 0)


@op(reduction=Reduction("multiply"))
def prod(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """The product over ``axis``; small integers and bools are multiplied in 64 bits. Of no entries: 1."""
    out = Spec(_wide(x.dtype), reduced(x, axis, keepdims))
    return carry(out, _known_product, x) if out.dims == () else out


def _known_product(entries: Any) -> Any:
    known = entries.ravel().tolist()
    return None if None in known else functools.reduce(operator.mul, known, 1)


@prod.gradient
def prod_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    """Without dividing by zero: beside one zero only that entry has a slope, beside two none has."""
    x, axis, keepdims = node.inputs[0], node.attrs["axis"], node.attrs["keepdims"]
    zero = equal(x, 0)
    others = where(zero, 1, x)
    zeros = _spread_like(sum(astype(zero, x.dtype), axis, keepdims), node)
    rest = _spread_like(prod(others, axis, keepdims), node) / others
    counted = where(zero, equal(zeros, 1), equal(zeros, 0))
    return (where(counted, rest * _spread_like(dy, node), 0),)


@op(reduction=Reduction("logical_or"), gradient=None)
def any(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """Whether any entry over ``axis`` is true (not zero)."""
    return Spec("bool", reduced(x, axis, keepdims))


@op(reduction=Reduction("logical_and"), gradient=None)
def all(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """Whether every entry over ``axis`` is true (not zero)."""
    return Spec("bool", reduced(x, axis, keepdims))


@op(gradient=None)
def argmax(x: Operand, axis: int | None = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """Where the first largest entry (or NaN) is along ``axis``; in the flattened tensor if that is None."""
    return _position(x, axis, keepdims)


@op(gradient=None)
def argmin(x: Operand, axis: int | None = None, keepdims: bool = False, *, name: str | None = None) -> Result:
    """Where the first smallest entry (or NaN) is along ``axis``; in the flattened tensor if that is None."""
    return _position(x, axis, keepdims)


def _position(x: Spec, axis: Any, keepdims: bool) -> Spec:
    if axis is not None:
        check_axis(axis, x)
    _needs_entries("position of an extreme", x, axis)
    return Spec("int64", reduced(x, axis, keepdims))


@whole
@rounded_once
@located("logsumexp")
def logsumexp(x: Operand, axis: Axes = None, keepdims: bool = False) -> TensorOrArray:
    """The logarithm of the sum of ``exp(x)`` over ``axis``, without overflow; of integers in float64."""
    x = astype(x, as_float(described(x)).dtype)
    top = max(x, axis, True)
    top = stop_gradient(where(isfinite(top), top, 0))
    total = sum(exp(subtract(x, top)), axis, keepdims)
    return add(log(total), top if keepdims else sum(top, axis))  # of one entry each


@rounded_once
@fitting
def var(x: Operand, axis: Axes = None, keepdims: bool = False) -> TensorOrArray:
    """The mean square distance from the mean over ``axis``, as NumPy's: over the count, not one less."""
    return mean(square(subtract(x, mean(x, axis, True))), axis, keepdims)


@rounded_once
@fitting
def std(x: Operand, axis: Axes = None, keepdims: bool = False) -> TensorOrArray:
    """The root of `var`. Its gradient is NaN where all entries are equal."""
    return sqrt(var(x, axis, keepdims))


@op
def cumsum(x: Operand, axis: int | None = None, reverse: bool = False, *, name: str | None = None) -> Result:
    """The running sum along ``axis``, from the last entry down if ``reverse``; small integers in 64 bits.

    ``axis`` may be None for a vector.
    """
    return running(x, axis)


def running(x: Spec, axis: Any) -> Spec:
    """What sums or products of all entries before one make, along an axis of ``x``."""
    if axis is not None:
        check_axis(axis, x)
    elif x.dims is not None and x.rank != 1:
        raise SpecError(f"{x} is no vector, so axis must say along which axis to go; or reshape it to (-1,)")
    return Spec(_wide(x.dtype), x.dims)


@cumsum.gradient
def cumsum_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (cumsum(dy, node.attrs["axis"], not node.attrs["reverse"]),)


@op(view=Arranged.REPEATED, gradient=lambda node, dy: (sum(dy, node.attrs["axis"], node.attrs["keepdims"]), None))
def spread(y: Operand, shape: Operand, axis: Axes = None, keepdims: bool = False) -> Result:
    """What a reduction over ``axis`` made of a tensor of ``shape``, repeated along the axes it reduced."""
    out = filled(y.dtype, shape)
    if y.dims is not None and out.dims is not None:
        _check_spread(y, out, axis, keepdims)
    return out


def _check_spread(y: Spec, out: Spec, axis: Any, keepdims: bool) -> None:
    left = reduced(out, axis, keepdims)
    if left is None or not agree(left, y.shape):
        raise SpecError(f"{y} is not what a reduction of {out} over axis {axis} leaves")


def _spread_like(value: Any, node: Node) -> Any:
    """``value``, of the reduction's output shape, repeated to its input's."""
    return spread(value, shape_of(node.inputs[0]), node.attrs["axis"], node.attrs["keepdims"])


@op(view=Arranged.REPEATED, idle_if_alike=True)
def broadcast_to(x: Operand, shape: Operand, *, name: str | None = None) -> Result:
    """``x`` repeated to ``shape`` (a tuple or an integer vector tensor) by NumPy's rules of broadcasting."""
    out = filled(x.dtype, shape)
    if x.dims is None or out.dims is None:
        return out
    dims = onto(x.shape, out.shape)
    if dims is None:
        raise SpecError(f"{x} does not broadcast to {out}; its sizes must be 1 or equal, from the right")
    return out.with_shape(dims)


@broadcast_to.gradient
def broadcast_to_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return sum_to(dy, shape_of(node.inputs[0])), None


def onto(small: Shape, large: Shape) -> Shape | None:
    """``large``, to which ``small`` broadcasts, as far as both tell it; None where it does not."""
    if len(small) > len(large):
        return None
    pairs = list(zip((1,) * (len(large) - len(small)) + small, large, strict=True))
    if builtins.any(m not in (None, 1) and n not in (None, m) for m, n in pairs):
        return None
    return tuple(m if n is None and m != 1 else n for m, n in pairs)


@op(idle_if_alike=True, gradient=lambda node, dy: (broadcast_to(dy, shape_of(node.inputs[0])), None))
def sum_to(x: Operand, shape: Operand, *, name: str | None = None) -> Result:
    """``x`` summed down to ``shape``, which broadcasts to its own."""
    out = filled(x.dtype, shape)
    if x.dims is None or out.dims is None:
        return out
    if onto(out.shape, x.shape) is None:
        raise SpecError(f"{x} cannot be summed to {out}; its sizes must be 1 or equal, from the right")
    return out


@fitting
def size(x: Operand, *, name: str | None = None) -> TensorOrArray:
    """The number of entries of ``x``, an int64 scalar."""
    return prod(shape_of(x), name=name)


@located("rank")
def rank(x: Operand) -> int:
    """The number of dimensions of ``x``, which is always known while a graph is built."""
    return described(x).rank
