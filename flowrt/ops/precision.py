"""Floats of 16 bits: what is multiplied, and what is stored for gradients, where `mixed_precision` is in force.

Here a tensor stays of float32 to a program, which need not ask for such dtypes (of tensors that are: `passes/widen`).
Its bits are a tensor of uint16, and what they stand for a float32: a product in force takes operands that are rounded
so, multiplies exactly, and adds up in float32. Gradients take what is stored, anew, so the float32 is kept no longer
than the product needs it; and they are rounded, too. A derivative of any order flows past the bits, which have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.spec import Spec
from flowrt.op import rounding
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.op import DType, Op
    from flowrt.typed import Operand, Result

__all__ = ["mixed_precision"]

BITS = "uint16"


def _as_bits(x: Spec) -> Spec:
    if x.dtype != np.float32:
        raise SpecError(f"floats of 16 bits are made of float32, got {x}")
    return Spec(BITS, x.dims)


def _of_bits(bits: Spec) -> Spec:
    if bits.dtype != BITS:
        raise SpecError(f"the bits of floats are of {BITS}, got {bits}")
    return Spec("float32", bits.dims)


@op(gradient=None)
def narrow_bfloat16(x: Operand) -> Result:
    """The bits of the nearest bfloat16, of two the even one."""
    return _as_bits(x)


@op(gradient=None)
def narrow_float16(x: Operand) -> Result:
    """The bits of the nearest float16, of two the even one; what is too large is infinite."""
    return _as_bits(x)


@op(unread=(1,), gradient=lambda node, dy: (None, dy))
def widen_bfloat16(bits: Operand, x: Operand, again: bool = False) -> Result:
    """What the bits of a bfloat16 stand for; derivatives go to ``x``, which they were made of.

    One that is to be computed ``again`` is not taken for one that was computed before.
    """
    return _of_bits(bits)


@op(unread=(1,), gradient=lambda node, dy: (None, dy))
def widen_float16(bits: Operand, x: Operand, again: bool = False) -> Result:
    """What the bits of a float16 stand for; see `widen_bfloat16`."""
    return _of_bits(bits)


WAYS: dict[str, tuple[Op, Op]] = {
    "bfloat16": (narrow_bfloat16, widen_bfloat16),
    "float16": (narrow_float16, widen_float16),
}
WIDENING = {widen.name: (dtype, widen) for dtype, (_, widen) in WAYS.items()}


@contextmanager
def mixed_precision(dtype: DType = "bfloat16") -> Iterator[None]:
    """Inside, matrices and images are multiplied as ``dtype``, "bfloat16" or "float16", and added up in float32.

    What PyTorch calls autocast, and JAX a policy: float32 operands of `matmul`, what is built of it (`einsum`,
    `attention`, …) and `conv2d` are rounded, and kept for gradients in 16 bits; results, all other ops, variables and
    optimisers are of float32, and so is what goes into a checkpoint. Gradients of products are products of such, too,
    also where they are built outside. "float32" switches it off again inside.

    With float16, whose least positive number is 6e-8, scale the loss: `flowrt.LossScaled`. Micikevicius et al.,
    "Mixed precision training", ICLR 2018.
    """
    name = dtype.name if isinstance(dtype, np.dtype) else getattr(dtype, "__name__", dtype)
    if not isinstance(name, str) or (name != "float32" and name not in WAYS):
        raise GraphError(f"{user_site()}: mixed precision is of 'bfloat16' or 'float16', not {dtype!r}")
    with _products_of(name):
        yield


@contextmanager
def _products_of(dtype: str | None) -> Iterator[None]:
    token = rounding.set(None if dtype not in WAYS else _ROUNDED[dtype])
    try:
        yield
    finally:
        rounding.reset(token)


def precision_in_force() -> str:
    """What `mixed_precision` was told, here."""
    return next((dtype for dtype, rounded in _ROUNDED.items() if rounded is rounding.get()), "float32")


def _rounded_to(dtype: str) -> Callable[[Any, Sequence[Any]], list[Any]]:
    narrow, widen = WAYS[dtype]

    def rounded(builder: Any, operands: Sequence[Any]) -> list[Any]:
        """The operands of a product, those of float32 rounded."""
        wide = [builder.spec(x).dtype == np.float32 and _kind(x) is None for x in operands]
        return [widen(narrow(x), x) if is_wide else x for x, is_wide in zip(operands, wide, strict=True)]

    return rounded


_ROUNDED = {dtype: _rounded_to(dtype) for dtype in WAYS}


def _kind(x: Any) -> str | None:
    """The dtype that a tensor was rounded to, if it was."""
    made = getattr(getattr(getattr(x, "op", None), "op", None), "name", "")
    return WIDENING[made][0] if made in WIDENING else None


def stored(x: Tensor) -> Tensor:
    """An operand of a product as its gradient takes it: made anew of the bits that are kept."""
    kind = _kind(x)
    if kind is None:
        return x
    made: Tensor = WAYS[kind][1](*x.op.inputs, again=True)
    return made


@contextmanager
def as_product(node: Node) -> Iterator[list[Tensor]]:
    """The operands of a product for its gradient, which is computed as it was, inside."""
    kinds = [kind for kind in map(_kind, node.inputs) if kind is not None]
    with _products_of(kinds[0] if kinds else None):
        yield [stored(x) for x in node.inputs]
