"""Ops of a program's own, as one of types has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import flowrt as fr

Array = npt.NDArray[np.float64]


@fr.op
def soft_step(x: fr.Spec, width: float = 1.0) -> fr.Spec:
    """x / (width + |x|), entry by entry."""
    if x.dtype.kind != "f":
        raise fr.SpecError(f"floats only, got {x}")
    return x


@fr.kernel("soft_step", on="cpu")
def soft_step_kernel(x: Array, out: Array, width: float) -> None:
    xs, outs = x.reshape(-1), out.reshape(-1)
    for i in range(xs.size):
        outs[i] = xs[i] / (width + abs(xs[i]))


@soft_step.gradient
def soft_step_gradient(node: fr.Operation, dy: fr.Tensor) -> tuple[fr.Tensor | None, ...]:
    (x,) = node.inputs
    width = node.attrs["width"]
    return (dy * width / fr.square(width + fr.abs(x)),)


@fr.op(promote=True)
def blend(a: fr.Operand, b: fr.Operand, share: float = 0.5, *, name: str | None = None) -> fr.Result:
    return fr.Spec(a.dtype, a.shape)


@fr.op
def halves(x: fr.Spec, axis: int = -1) -> tuple[fr.Spec, fr.Spec]:
    size = x.shape[axis]
    half = None if size is None else size // 2
    shape = (*x.shape[:-1], half)
    return fr.Spec(x.dtype, shape), x.with_shape(shape)


@fr.op
def joined(xs: Sequence[fr.Spec], axis: int = 0) -> fr.Spec:
    return xs[0]


@fr.no_gradient
@fr.op(stateful=True)
def watched(x: fr.Spec) -> fr.Spec:
    return x


def use(x: fr.Tensor) -> fr.Tensor:
    left, right = halves(x, axis=-1)
    whole = joined([left, right], axis=1)
    return blend(a=soft_step(whole, width=0.5), b=watched(x), share=0.25, name="both")


def at_once(x: Array) -> Array:
    return soft_step(x, 0.5)
