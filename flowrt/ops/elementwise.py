"""Functions of corresponding entries, with NumPy's broadcasting and promotion.

The rules of gradients here ignore broadcasting: the walker sums a gradient down to its input's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import common_dtype, default_dtype, is_weak
from flowrt.base.spec import Spec, computed, is_float, is_half
from flowrt.base.tracebacks import brief
from flowrt.op import as_value
from flowrt.ops.comparison import equal, greater, less
from flowrt.ops.inference import as_float, broadcast, carry, carry_each, described, merged
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.op import DType
    from flowrt.typed import Operand, Result

__all__ = [
    "abs",
    "add",
    "add_n",
    "astype",
    "ceil",
    "clip",
    "divide",
    "erf",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "pow",
    "reciprocal",
    "relu",
    "remainder",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sqrt",
    "square",
    "subtract",
    "tanh",
    "where",
]


F = TypeVar("F", bound=Callable[..., Any])
_OPERANDS = frozenset({"x", "scale", "offset", "epsilon"})  # of functions made of several ops
FAR = 40.0  # exp(-FAR²) is 0 as a float


def _both(a: Spec, b: Spec) -> Spec:
    dims = broadcast(a, b)
    return a.without_value() if dims == a.dims else Spec(a.dtype, dims)


def _numbers(what: str, x: Spec) -> Spec:
    if x.dtype == bool:
        raise SpecError(f"{what} of bools is not defined, got {x}; use logical_xor or logical_not, or astype first")
    return x


@op(promote=True, gradient=lambda node, dy: (dy, dy))
def add(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a + b``; of bools, whether either is true."""
    return carry_each(_both(a, b), lambda m, n: m + n, a, b)


@op(promote=True, gradient=lambda node, dy: (dy, -dy))
def subtract(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a - b``."""
    return carry_each(_both(_numbers("the difference", a), b), lambda m, n: m - n, a, b)


@op(promote=True, gradient=lambda node, dy: (dy * node.inputs[1], dy * node.inputs[0]))
def multiply(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a * b``; of bools, whether both are true."""
    return carry_each(_both(a, b), lambda m, n: m * n, a, b)


@op(promote=True)
def divide(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a / b``; of integers and bools, in float64."""
    return as_float(_both(a, b))


@divide.gradient
def divide_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    b = node.inputs[1]
    return dy / b, negative(dy * node.outputs[0] / b)


@op(promote=True, gradient=None)
def floor_divide(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The largest integer not above ``a / b``. An integer divided by zero is 0."""
    out = _both(_numbers("the quotient", a), b)
    return carry_each(out, lambda m, n: m // n if n else 0, a, b)


@op(promote=True, gradient=lambda node, dy: (dy, -(dy * floor_divide(*node.inputs))))
def remainder(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """What ``floor_divide`` leaves, with the sign of ``b``. An integer modulo zero is 0."""
    out = _both(_numbers("the remainder", a), b)
    return carry_each(out, lambda m, n: m % n if n else 0, a, b)


@op(promote=True)
def pow(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a`` to the power ``b``. Integers stay integers: negative powers are truncated (to 0, but of 1 and -1)."""
    return _both(_numbers("a power", a), b)


@pow.gradient
def pow_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    a, b = node.inputs
    slope = b * pow(a, where(equal(b, 0), 1, b - 1))
    positive = greater(a, 0)
    return dy * slope, dy * where(positive, node.outputs[0] * log(where(positive, a, 1)), 0)


@op(promote=True)
def maximum(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The larger of ``a`` and ``b``; NaN where either is. The gradient goes to ``b`` where larger, else to ``a``."""
    return carry_each(_both(a, b), lambda m, n: m if m > n else n, a, b)


@maximum.gradient
def maximum_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    second = less(*node.inputs)
    return where(second, 0, dy), where(second, dy, 0)


@op(promote=True)
def minimum(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The smaller of ``a`` and ``b``; NaN where either is. The gradient goes to ``b`` where less, else to ``a``."""
    return carry_each(_both(a, b), lambda m, n: m if m < n else n, a, b)


@minimum.gradient
def minimum_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    second = greater(*node.inputs)
    return where(second, 0, dy), where(second, dy, 0)


@located("clip")
def clip(x: Operand, min: Operand | None = None, max: Operand | None = None) -> TensorOrArray:
    """``x`` held between ``min`` and ``max`` (either may be None); ``max`` where ``min`` is above it.

    The gradient is that of ``x`` inside and at the bounds, else it goes to the bound.
    """
    if min is None and max is None:
        raise SpecError("min and max are both None; give at least one bound")
    above: Any = x if min is None else maximum(x, min)
    held: TensorOrArray = above if max is None else minimum(above, max)
    return held


@op(promote=True, gradient=lambda node, dy: (dy,) * len(node.inputs))
def add_n(values: Sequence[Operand], *, name: str | None = None) -> Result:
    """The sum of tensors of one shape."""
    if not values:
        raise SpecError("add_n needs at least one tensor")
    return Spec(values[0].dtype, merged([v.dims for v in values], values))


@op(gradient=lambda node, dy: (-dy,))
def negative(x: Operand, *, name: str | None = None) -> Result:
    """``-x``."""
    return carry_each(_numbers("the negative", x).without_value(), lambda n: -n, x)


@op(gradient=None)
def sign(x: Operand, *, name: str | None = None) -> Result:
    """-1, 0 or 1, as ``x`` is negative, zero or positive; NaN stays NaN."""
    return _numbers("the sign", x).without_value()


@op(gradient=lambda node, dy: (dy * sign(node.inputs[0]),))
def abs(x: Operand, *, name: str | None = None) -> Result:
    """The absolute value."""
    return x.without_value()


@op(gradient=lambda node, dy: (dy * node.outputs[0],))
def exp(x: Operand, *, name: str | None = None) -> Result:
    """e to the power ``x``."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy / node.inputs[0],))
def log(x: Operand, *, name: str | None = None) -> Result:
    """The natural logarithm: -inf at 0, NaN below."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * (node.outputs[0] + 1.0),))
def expm1(x: Operand, *, name: str | None = None) -> Result:
    """``exp(x) - 1``, exact where ``x`` is small."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy / (node.inputs[0] + 1.0),))
def log1p(x: Operand, *, name: str | None = None) -> Result:
    """``log(1 + x)``, exact where ``x`` is small: -inf at -1, NaN below."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * 2.0 * node.inputs[0],))
def square(x: Operand, *, name: str | None = None) -> Result:
    """``x * x``."""
    return x.without_value()


@op
def erf(x: Operand, *, name: str | None = None) -> Result:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t²) from 0 to ``x``."""
    return as_float(x)


@erf.gradient
def erf_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    near: Any = clip(node.inputs[0], -FAR, FAR)  # beyond, the slope's own slope would be infinite times 0
    return (dy * (exp(negative(square(near))) * (2 / math.sqrt(math.pi))),)


@op(gradient=lambda node, dy: (dy * 0.5 / node.outputs[0],))
def sqrt(x: Operand, *, name: str | None = None) -> Result:
    """The square root; NaN below 0."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * -0.5 * node.outputs[0] / node.inputs[0],))
def rsqrt(x: Operand, *, name: str | None = None) -> Result:
    """One over the square root."""
    return as_float(x)


@op(gradient=lambda node, dy: (-(dy * square(node.outputs[0])),))
def reciprocal(x: Operand, *, name: str | None = None) -> Result:
    """``1 / x``; of integers in float64, like `divide`."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * (1.0 - square(node.outputs[0])),))
def tanh(x: Operand, *, name: str | None = None) -> Result:
    """The hyperbolic tangent."""
    return as_float(x)


@op(gradient=lambda node, dy: (dy * node.outputs[0] * (1.0 - node.outputs[0]),))
def sigmoid(x: Operand, *, name: str | None = None) -> Result:
    """``1 / (1 + exp(-x))``, without overflow."""
    return as_float(x)


@op(promote=("a", "b"))
def where(condition: Operand, a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """``a`` where ``condition`` holds (is not zero), else ``b``."""
    return Spec(a.dtype, broadcast(condition, a, b))


@where.gradient
def where_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    condition = node.inputs[0]
    return None, where(condition, dy, 0), where(condition, 0, dy)


@op(gradient=lambda node, dy: (where(greater(node.outputs[0], 0), dy, 0),))
def relu(x: Operand, *, name: str | None = None) -> Result:
    """``x`` where it is positive, else 0; NaN stays NaN."""
    return _numbers("relu", x).without_value()


@op(gradient=None)
def floor(x: Operand, *, name: str | None = None) -> Result:
    """The largest integer not above ``x``, of the same dtype."""
    return x.without_value()


@op(gradient=None)
def ceil(x: Operand, *, name: str | None = None) -> Result:
    """The smallest integer not below ``x``, of the same dtype."""
    return x.without_value()


@op(gradient=None)
def round(x: Operand, *, name: str | None = None) -> Result:
    """The integer nearest to ``x``, of the same dtype; halves go to the even neighbour."""
    return x.without_value()


@op(gradient=lambda node, dy: (dy.astype(node.inputs[0].dtype),))
def astype(x: Operand, dtype: DType, *, name: str | None = None) -> Result:
    """``x`` as another dtype; floats lose their fraction where it is an integer dtype.

    What such a dtype does not hold comes to the nearest integer of 32 bits (of 64 where that is how many it has, or
    where it is uint32) and is taken modulo its size, as NumPy does on most machines. NaN comes to 0.
    """
    return carry(Spec(dtype, x.dims), lambda value: value, x)


def as_of(x: Any, dtype: Any) -> Any:
    """``x`` as ``dtype``; itself where it is of that."""
    return x if described(x).dtype == dtype else astype(x, dtype)


def widened(x: Any) -> Any:
    """``x`` as it is computed with: floats of 16 bits as float32, which holds what several ops come to in between."""
    return as_of(x, computed(described(x).dtype))


def rounded_once(function: F) -> F:
    """Decorator of a function made of several ops: of floats of 16 bits these compute in float32, and its answers alone
    are rounded. So no square or sum in between is beyond what such floats hold.

    The first answer is of the dtype that its ops come to, the statistics after it of the dtype of ``x``.
    """
    takes = signature(function)

    @brief
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            given = takes.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what it takes
        with located(function.__name__):
            operands = {name: _settled(x) for name, x in given.items() if name in _OPERANDS and x is not None}
            strong = {name: _dtype_of(x) for name, x in operands.items() if not is_weak(x)}
            dtypes = strong or {"x": common_dtype([given["x"]])}
            halves = [name for name, dtype in dtypes.items() if is_half(dtype)]
            if "x" in dtypes and not is_float(dtypes["x"]):
                dtypes["x"] = np.dtype(np.float64)
            dtype = common_dtype(list(dtypes.values())) if halves else None
            operands.update({name: widened(operands[name]) for name in halves})
        found = function(**{**given, **operands})
        if dtype is None:
            return found
        if not isinstance(found, tuple):
            return as_of(found, dtype)
        return as_of(found[0], dtype), *(as_of(y, dtypes.get("x", dtype)) for y in found[1:])

    return cast("F", called)


def _settled(x: Any) -> Any:
    """``x``, lists that hold tensors as one."""
    return as_value(x) if isinstance(x, (list, tuple)) else x


def _dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "__tensor__") or hasattr(x, "builder") else default_dtype(x)
