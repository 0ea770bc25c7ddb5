"""Softmax and its logarithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.spec import Spec, check_axis
from flowrt.ops.elementwise import exp
from flowrt.ops.inference import as_float
from flowrt.ops.reduce import sum as sum_
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.typed import Operand, Result


@op(gradient=lambda node, dy: (softmax_slope(node.outputs[0], dy, node.attrs["axis"]),))
def softmax(x: Operand, axis: int = -1, *, name: str | None = None) -> Result:
    """``exp(x)`` over its sum along ``axis``, computed without overflow; of integers in float64."""
    return _along(x, axis)


def _along(x: Spec, axis: Any) -> Spec:
    check_axis(axis, x)
    return as_float(x)


def softmax_slope(y: Any, dy: Any, axis: Any) -> Any:
    """The gradient for the input of a softmax whose result is ``y``."""
    return y * (dy - sum_(dy * y, axis, True))


@op(gradient=lambda node, dy: (dy - exp(node.outputs[0]) * sum_(dy, node.attrs["axis"], True),))
def log_softmax(x: Operand, axis: int = -1, *, name: str | None = None) -> Result:
    """The logarithm of `softmax`, computed without overflow or loss; of integers in float64."""
    return _along(x, axis)
