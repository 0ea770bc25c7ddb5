"""Sines, tangents, their arcs and hyperbolic kin, of corresponding entries.

The rules of gradients here ignore broadcasting: the walker sums a gradient down to its input's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.spec import Spec, largest
from flowrt.ops.comparison import equal
from flowrt.ops.elementwise import clip, negative, rsqrt, square, where
from flowrt.ops.inference import as_float, broadcast
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.typed import Operand, Result

__all__ = ["acos", "asin", "atan", "atan2", "cos", "cosh", "hypot", "sin", "sinh", "tan"]


def _near(x: Tensor, power: float = 1.0) -> Any:
    """``x`` held to what can be multiplied: at most the largest float, or that to a ``power``."""
    far = largest(x.dtype) ** power
    return clip(x, -far, far)


@op
def sin(x: Operand, *, name: str | None = None) -> Result:
    """The sine of ``x`` radians; NaN of infinities."""
    return as_float(x)


@sin.gradient
def sin_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (dy * cos(node.inputs[0]),)


@op(gradient=lambda node, dy: (negative(dy * sin(node.inputs[0])),))
def cos(x: Operand, *, name: str | None = None) -> Result:
    """The cosine of ``x`` radians; NaN of infinities."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * (1.0 + square(node.outputs[0])),))
def tan(x: Operand, *, name: str | None = None) -> Result:
    """The tangent of ``x`` radians; NaN of infinities."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * rsqrt(1.0 - square(node.inputs[0])),))
def asin(x: Operand, *, name: str | None = None) -> Result:
    """The angle in radians, from -pi/2 to pi/2, whose sine is ``x``; NaN beyond -1 and 1."""
    return as_float(x)


@op(gradient=lambda node, dy: (negative(dy * rsqrt(1.0 - square(node.inputs[0]))),))
def acos(x: Operand, *, name: str | None = None) -> Result:
    """The angle in radians, from 0 to pi, whose cosine is ``x``; NaN beyond -1 and 1."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy / (1.0 + square(_near(node.inputs[0], 0.5))),))
def atan(x: Operand, *, name: str | None = None) -> Result:
    """The angle in radians, from -pi/2 to pi/2, whose tangent is ``x``."""
    return as_float(x)


@op(promote=True)
def atan2(y: Operand, x: Operand, *, name: str | None = None) -> Result:
    """The angle in radians, from -pi to pi, of the point (``x``, ``y``); the signs of zeros count."""
    return as_float(Spec(y.dtype, broadcast(y, x)))


@atan2.gradient
def atan2_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    (y, x), length = map(_near, node.inputs), _near(hypot(*node.inputs))
    share = dy / length  # whose square may be too large or too small for a float
    return share * (x / length), negative(share * (y / length))


@op(promote=True)
def hypot(x: Operand, y: Operand, *, name: str | None = None) -> Result:
    """The distance of the point (``x``, ``y``) from the origin, where the gradient is 0; infinite if either is."""
    return as_float(Spec(x.dtype, broadcast(x, y)))


@hypot.gradient
def hypot_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    (x, y), length = map(_near, node.inputs), _near(node.outputs[0])
    whole = where(equal(length, 0.0), 1.0, length)
    return dy * (x / whole), dy * (y / whole)


@op
def sinh(x: Operand, *, name: str | None = None) -> Result:
    """The hyperbolic sine."""
    return as_float(x)


@sinh.gradient
def sinh_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (dy * cosh(node.inputs[0]),)


@op(gradient=lambda node, dy: (dy * sinh(node.inputs[0]),))
def cosh(x: Operand, *, name: str | None = None) -> Result:
    """The hyperbolic cosine."""
    return as_float(x)
