"""Activations made of elementwise functions; those that are primitives themselves stand in that family."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flowrt.base.locating import located
from flowrt.op import whole
from flowrt.ops.comparison import greater
from flowrt.ops.elementwise import add, clip, exp, expm1, maximum, minimum, multiply, sigmoid, square, where
from flowrt.ops.inference import as_float, far_below
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["elu", "gelu", "leaky_relu", "silu", "softplus"]


FAR = 40.0  # so far from 0 no float is left of a normal number's density


@op(gradient=lambda node, dy: (dy * sigmoid(node.inputs[0]),))
def softplus(x: Operand, *, name: str | None = None) -> Result:
    """``log(1 + exp(x))``, without overflow."""
    return as_float(x)


@whole
@located("silu")
def silu(x: Operand) -> TensorOrArray:
    """``x * sigmoid(x)``, also called swish. Elfwing et al., "Sigmoid-weighted linear units", 2018."""
    near = multiply(maximum(minimum(x, FAR), far_below(x)), sigmoid(x))  # 0 at -inf, too
    return where(greater(x, FAR), x, near)  # whose slope would be infinite times 0


@op(name="gelu")
def gelu_op(x: Operand, *, name: str | None = None) -> Result:
    """``x`` times the probability that a standard normal number is below it."""
    return as_float(x)


@gelu_op.gradient
def gelu_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (dy * gelu_slope(node.inputs[0]),)


@op
def gelu_slope(x: Operand) -> Result:
    """The derivative of `gelu`: that probability, and ``x`` times its density."""
    return as_float(x)


@gelu_slope.gradient
def gelu_slope_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    squares = square(clip(node.inputs[0], -FAR, FAR))
    return (dy * (exp(squares * -0.5) * (2.0 - squares) * math.sqrt(0.5 / math.pi)),)


@whole
@located("gelu")
def gelu(x: Operand, approximate: bool = False) -> TensorOrArray:
    """``x`` times the probability that a standard normal number is below it.

    ``approximate`` takes the paper's tanh formula for it, within 5e-4. Hendrycks and Gimpel, "Gaussian error linear
    units", 2016.
    """
    if not approximate:
        return gelu_op(x)
    near = clip(x, -FAR, FAR)  # beyond, neither the sigmoid nor its slope changes, but the cube would overflow
    twice = multiply(multiply(near, 2 * math.sqrt(2 / math.pi)), add(multiply(square(near), 0.044715), 1.0))
    return multiply(maximum(x, far_below(x)), sigmoid(twice))  # half of tanh and 1, whose sum would cancel below 0


@whole
@located("leaky_relu")
def leaky_relu(x: Operand, alpha: float = 0.2) -> TensorOrArray:
    """``x`` where it is positive, else ``alpha * x``."""
    return where(greater(x, 0), x, multiply(x, alpha))


@whole
@located("elu")
def elu(x: Operand, alpha: float = 1.0) -> TensorOrArray:
    """``x`` where it is positive, else ``alpha * (exp(x) - 1)``. Clevert et al., "Exponential linear units", 2016."""
    return where(greater(x, 0), x, multiply(expm1(minimum(x, 0)), alpha))
