"""Mean and variance in one pass, and entries in units of them: what normalising by the statistics of a batch is.

Gradients read the input again rather than keep what lies between: two passes, of which the first only adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, normal_axes
from flowrt.ops.elementwise import negative, subtract
from flowrt.ops.inference import as_float, broadcast, merged
from flowrt.ops.reduce import onto, over_count, reduced, spread
from flowrt.ops.shape import expand_dims
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Axes
    from flowrt.graph import Node, Tensor
    from flowrt.typed import Operand, Result


@op
def moments(x: Operand, axis: Axes = None, keepdims: bool = False, *, name: str | None = None) -> tuple[Result, Result]:
    """The mean and the variance over ``axis``: (mean, variance); of integers in float64. Of no entries: NaN.

    The variance is over the count, not one less, and loses nothing where it is small beside the mean; that of what is
    constant is exactly 0. Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    made = Spec(as_float(x).dtype, reduced(x, axis, keepdims))
    return made, made


@moments.gradient
def moments_grad(node: Node, dmean: Tensor, dvariance: Tensor) -> tuple[Any, ...]:
    x, middle = node.inputs[0], node.outputs[0]
    slopes = over_count(2.0 * dvariance, node), over_count(dmean, node)
    return (standardize(x, *(_beside(value, node) for value in (middle, *slopes))),)


def _beside(value: Tensor, node: Node) -> Any:
    """A result's companion, so that it broadcasts to the input."""
    x, axis, keepdims = node.inputs[0], node.attrs["axis"], node.attrs["keepdims"]
    if keepdims:
        return value
    return (
        spread(value, shape_of(x), axis) if x.spec.dims is None else expand_dims(value, normal_axes(axis, x.spec.rank))
    )


@op(promote=True)
def standardize(x: Operand, mean: Operand, factor: Operand, offset: Operand) -> Result:
    """``(x - mean) * factor + offset``; its gradients read ``x`` again, not the difference."""
    return Spec(x.dtype, broadcast(x, mean, factor, offset))


@standardize.gradient
def standardize_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, mean, factor, _ = node.inputs
    dx = dy * factor
    if not (x.spec.known and node.outputs[0].spec == x.spec and len({t.spec for t in node.inputs[1:]}) == 1):
        return dx, negative(dx), dy * subtract(x, mean), dy
    total, product = sums_about(x, dy, mean)
    return dx, negative(total * factor), product, total


@op(promote=True)
def sums_about(x: Operand, weights: Operand, mean: Operand) -> tuple[Result, Result]:
    """The sums of ``weights`` and of ``weights * (x - mean)``, down to the shape of ``mean``, in one pass."""
    if x.dims is not None and mean.dims is not None and onto(mean.shape, x.shape) is None:
        raise SpecError(f"{x} cannot be summed to {mean}; its sizes must be 1 or equal, from the right")
    if x.dims is not None and weights.dims is not None:
        merged([x.dims, weights.dims], [x, weights])
    return mean, mean


@sums_about.gradient
def sums_about_grad(node: Node, dtotal: Tensor, dproduct: Tensor) -> tuple[Any, ...]:
    x, weights, mean = node.inputs
    dweights = standardize(x, mean, dproduct, dtotal)
    return weights * dproduct, dweights, negative(dproduct * node.outputs[0])
