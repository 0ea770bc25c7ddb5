"""Running products along an axis, and the recurrence that their slopes are: nothing is divided, so zeros do no harm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, is_float, normal_axes, one_axis
from flowrt.ops.inference import merged
from flowrt.ops.reduce import running
from flowrt.ops.shape import WHOLE, getitem, pad_op
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.typed import Operand, Result

__all__ = ["cumprod"]


@op
def cumprod(x: Operand, axis: int | None = None, reverse: bool = False, *, name: str | None = None) -> Result:
    """The running product along ``axis``, from the last entry down if ``reverse``; small integers in 64 bits.

    ``axis`` may be None for a vector.
    """
    return running(x, axis)


@cumprod.gradient
def cumprod_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    """Of each entry, the product of those before it, times what follows from it: dy + next * what follows from that."""
    (x,), axis, reverse = node.inputs, node.attrs["axis"], bool(node.attrs["reverse"])
    at = 0 if axis is None else axis
    before = _moved(node.outputs[0], at, reverse, 1)
    return (before * linear_recurrence(x, dy, at, not reverse),)


def _moved(x: Tensor, axis: int, reverse: bool, first: float) -> Any:
    """Each entry where the next one was; in the place of the one that has none before it is ``first``."""
    if x.spec.dims is None:
        raise SpecError("the slope of a running product is known along an axis of a tensor of known rank")
    at, rank = one_axis(axis, x.spec.rank), x.spec.rank
    kept = (1, None, None) if reverse else (None, -1, None)
    ends = [(0, 0)] * at + [(0, 1) if reverse else (1, 0)] + [(0, 0)] * (rank - at - 1)
    return pad_op(getitem(x, (*[WHOLE] * at, kept)), ends, first)


@op
def linear_recurrence(
    factors: Operand, terms: Operand, axis: int, reverse: bool = False, own: bool = False, *, name: str | None = None
) -> Result:
    """The running y along ``axis`` where each is its own term, plus the y before it times the factor that stands there.

    The factor is each one's ``own``, if that is said; ``reverse`` goes from the last one down. The y before the first
    is 0.
    """
    if factors.dtype != terms.dtype or not is_float(terms.dtype):
        raise SpecError(f"factors and terms must be floating, of one dtype, got {factors} and {terms}")
    dims = merged([factors.dims, terms.dims], [factors, terms])
    if dims is not None:
        normal_axes(axis, len(dims))
    return Spec(terms.dtype, dims)


@linear_recurrence.gradient
def linear_recurrence_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    (factors, _), y = node.inputs, node.outputs[0]
    axis, reverse, own = node.attrs["axis"], bool(node.attrs["reverse"]), bool(node.attrs["own"])
    slope = linear_recurrence(factors, dy, axis, not reverse, not own)  # of each term
    if own:
        return slope * _moved(y, axis, reverse, 0), slope
    return _moved(slope, axis, not reverse, 0) * y, slope
