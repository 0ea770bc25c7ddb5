"""Gradients clipped together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.spec import is_half
from flowrt.op import as_value
from flowrt.ops.elementwise import add_n, as_of, divide, maximum, multiply, sqrt, square, widened
from flowrt.ops.inference import described
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.routing import SplitGradient
from flowrt.ops.slices import IndexedSlices, group_rows, sum_rows
from flowrt.ops.source import shape_of

if TYPE_CHECKING:
    from flowrt.graph import Tensor


@fitting
def clip_by_global_norm(grads: Iterable[Any], norm: float) -> tuple[list[Any], Tensor]:
    """``grads`` scaled down together so that their global norm is at most ``norm``, and the norm they had.

    The global norm is the root of the sum of all squares, in float32 where these are floats of 16 bits. Gradients of
    None stay None. Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013.
    """
    if isinstance(norm, Real) and not norm > 0:
        raise GraphError(f"{user_site()}: norm, to which gradients are clipped, is more than 0, not {norm!r}")
    if not isinstance(grads, Iterable) or hasattr(grads, "__tensor__"):
        raise GraphError(f"{user_site()}: several gradients are clipped together, not {grads!r:.80}")
    grads = list(grads)
    given = [part for g in grads for part in (g.parts if isinstance(g, SplitGradient) else (g,))]
    present = [_summed(g) for g in given if g is not None]
    if not present:
        raise GraphError(f"{user_site()}: there are no gradients to clip")
    total: Tensor = sqrt(add_n([sum_(square(widened(g))) for g in present]))
    scale = divide(norm, maximum(total, norm))
    return [None if g is None else _scaled(g, scale) for g in grads], total


def _summed(gradient: Any) -> Any:
    """What has the gradient's entries: of slices the sums of their rows, as the dense gradient would."""
    if not isinstance(gradient, IndexedSlices):
        return as_value(gradient)
    groups = group_rows(gradient.indices, shape_of(gradient.values)[0], gradient.shape[0], gradient.absent)
    return sum_rows(gradient.values, groups)


def _scaled(gradient: Any, scale: Any) -> Any:
    if isinstance(gradient, SplitGradient):
        return gradient.map(lambda part: _scaled(part, scale))
    if not isinstance(gradient, IndexedSlices):
        dtype, scaled = described(gradient).dtype, multiply(gradient, scale)
        return as_of(scaled, dtype) if is_half(dtype) else scaled
    return replace(gradient, values=_scaled(gradient.values, scale))
