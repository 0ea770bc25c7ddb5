"""What is true of corresponding entries: comparisons, logic of bools, and which floats are numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.spec import Spec
from flowrt.ops.inference import broadcast
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.typed import Operand, Result

__all__ = [
    "equal",
    "greater",
    "greater_equal",
    "isfinite",
    "isnan",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "not_equal",
]


def _compared(a: Spec, b: Spec) -> Spec:
    return Spec("bool", broadcast(a, b))


@op(promote=True, widens=True, gradient=None)
def equal(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a`` equals ``b``; NaN equals nothing."""
    return _compared(a, b)


@op(promote=True, widens=True, gradient=None)
def not_equal(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a`` differs from ``b``; NaN differs from everything."""
    return _compared(a, b)


@op(promote=True, widens=True, gradient=None)
def less(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a < b``."""
    return _compared(a, b)


@op(promote=True, widens=True, gradient=None)
def less_equal(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a <= b``."""
    return _compared(a, b)


@op(promote=True, widens=True, gradient=None)
def greater(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a > b``."""
    return _compared(a, b)


@op(promote=True, widens=True, gradient=None)
def greater_equal(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether ``a >= b``."""
    return _compared(a, b)


@op(promote=True, gradient=None)
def logical_and(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether both are true (not zero)."""
    return _compared(a, b)


@op(promote=True, gradient=None)
def logical_or(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether either is true (not zero)."""
    return _compared(a, b)


@op(promote=True, gradient=None)
def logical_xor(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """Whether exactly one is true (not zero)."""
    return _compared(a, b)


@op(gradient=None)
def logical_not(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is false (zero)."""
    return Spec("bool", x.dims)


@op(gradient=None)
def isnan(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is not a number."""
    return Spec("bool", x.dims)


@op(gradient=None)
def isfinite(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is neither NaN nor infinite."""
    return Spec("bool", x.dims)
