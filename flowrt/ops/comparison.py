"""What is true of corresponding entries: comparisons, logic of bools and of bits, and which floats are numbers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, is_float
from flowrt.ops.inference import broadcast, carry_each
from flowrt.typed import op

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.typed import Operand, Result

__all__ = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "equal",
    "greater",
    "greater_equal",
    "isfinite",
    "isinf",
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


def _bits(a: Spec, b: Spec, combine: Callable[[int, int], int]) -> Spec:
    if is_float(a.dtype):
        raise SpecError(f"only integers and bools have bits to combine, got {a} and {b}; compare first, as in (x > 0)")
    return carry_each(Spec(a.dtype, broadcast(a, b)), combine, a, b)


@op(promote=True, gradient=None)
def bitwise_and(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The bits that both integers have; of bools, whether both are true. It is what ``a & b`` means."""
    return _bits(a, b, operator.and_)


@op(promote=True, gradient=None)
def bitwise_or(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The bits that either integer has; of bools, whether either is true. It is what ``a | b`` means."""
    return _bits(a, b, operator.or_)


@op(promote=True, gradient=None)
def bitwise_xor(a: Operand, b: Operand, *, name: str | None = None) -> Result:
    """The bits that one of the integers has; of bools, whether exactly one is true. It is what ``a ^ b`` means."""
    return _bits(a, b, operator.xor)


@op(gradient=None)
def isnan(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is not a number."""
    return Spec("bool", x.dims)


@op(gradient=None)
def isfinite(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is neither NaN nor infinite."""
    return Spec("bool", x.dims)


@op(gradient=None)
def isinf(x: Operand, *, name: str | None = None) -> Result:
    """Whether ``x`` is infinite, of either sign."""
    return Spec("bool", x.dims)
