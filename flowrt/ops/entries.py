"""Entries chosen one by one: along an axis, each line by indices of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.spec import Shape, Spec, normal_axes
from flowrt.ops.inference import broadcast, filled
from flowrt.ops.reduce import sum_to
from flowrt.ops.shape import concat
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.typed import Operand, Result

__all__ = [
    "take_along_axis",
]


@op
def take_along_axis(x: Operand, indices: Operand, axis: int = -1, *, name: str | None = None) -> Result:
    """The entries of ``x`` at ``indices`` along ``axis``, in each line of ``x`` at a line of indices of its own.

    Both have equally many axes, whose sizes beside ``axis`` broadcast. Negative indices count from the end; one that is
    out of range fails the step. At what `argsort` answers, or `argmax` with ``keepdims=True``, are the sorted and the
    largest entries.
    """
    if x.dims is None or indices.dims is None:
        return Spec(x.dtype, None)
    at, beside = _lines(x, indices, axis)
    if x.shape[at] == 0 and indices.known and indices.size > 0:
        raise SpecError(f"nothing can be taken from axis {axis} of {x}, which is empty")
    return Spec(x.dtype, None if beside is None else (*beside[:at], indices.shape[at], *beside[at:]))


def _lines(x: Spec, indices: Spec, axis: Any) -> tuple[int, Shape | None]:
    """Which axis of both that is, and the sizes beside it."""
    if indices.dtype.kind not in "iu":
        raise SpecError(f"indices must be integers, got {indices}; use astype")
    if x.rank == 0:
        raise SpecError("a scalar has no axis to index")
    if x.rank != indices.rank:
        raise SpecError(f"indices of {x} must have {x.rank} axes, too, got {indices}; take makes slices of all of them")
    at, *others = normal_axes(axis, x.rank)
    if others:
        raise SpecError(f"axis must be one axis, got {axis}; reshape both to (-1,) to take from all entries")
    try:
        return at, broadcast(*(Spec("bool", (*spec.shape[:at], *spec.shape[at + 1 :])) for spec in (x, indices)))
    except SpecError:
        raise SpecError(f"{x} and indices {indices} must have equal sizes, or 1, beside axis {axis}") from None


@take_along_axis.gradient
def take_along_axis_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, indices = node.inputs
    axis, shape = node.attrs["axis"], shape_of(x)
    if x.spec.dims is None or (x.spec.known and node.outputs[0].spec.known and _is_whole(x.spec, node)):
        return add_along_axis(dy, indices, shape, axis), None
    at, sizes = normal_axes(axis, x.spec.rank)[0], shape_of(dy)
    lines = concat([sizes[:at], shape[at : at + 1], sizes[at + 1 :]])
    return sum_to(add_along_axis(dy, indices, lines, axis), shape), None


def _is_whole(x: Spec, node: Node) -> bool:
    """Whether no size of ``x`` was broadcast."""
    at = normal_axes(node.attrs["axis"], x.rank)[0]
    return all(m == n or i == at for i, (m, n) in enumerate(zip(x.shape, node.outputs[0].shape, strict=True)))


@op(gradient=lambda node, dy: (take_along_axis(dy, node.inputs[1], node.attrs["axis"]), None, None))
def add_along_axis(updates: Operand, indices: Operand, shape: Operand, axis: int, *, name: str | None = None) -> Result:
    """Zeros of ``shape``, each of whose lines along ``axis`` gets its ``updates`` added at its ``indices``.

    ``updates`` is shaped like ``take_along_axis(result, indices, axis)``; entries named more than once get every
    addition.
    """
    out = filled(updates.dtype, shape)
    if out.dims is None or indices.dims is None or updates.dims is None:
        return out
    at, beside = _lines(out, indices, axis)
    if beside is not None:
        expected = Spec(updates.dtype, (*beside[:at], indices.shape[at], *beside[at:]))
        if not expected.accepts(updates.dtype, updates.dims):
            raise SpecError(f"updates of {out} at {indices} along axis {axis} must be {expected}, got {updates}")
    return out
