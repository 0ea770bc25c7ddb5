"""Entries chosen one by one: in each line along an axis by its own indices, or by an index for each of several axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.spec import Shape, Spec, normal_axes, one_axis
from flowrt.indexing import entries_at, flattened, sizes_of
from flowrt.op import as_value
from flowrt.ops.index import scatter_add
from flowrt.ops.inference import broadcast, described, filled
from flowrt.ops.reduce import sum_to
from flowrt.ops.shape import concat, reshape
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["gather_nd", "scatter_nd", "take_along_axis"]


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
    if axis is None:
        raise SpecError("axis is one integer, got None; reshape both to (-1,) to take from all entries")
    at = one_axis(axis, x.rank)
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


@op(gradient=None)
def flat_indices(indices: Operand, sizes: Operand, axis: int = 0, *, name: str | None = None) -> Result:
    """Where the entries that ``indices`` [..., k] name, by an index for each axis, lie in the flattened ``sizes``.

    Negative ones count from the end. One that is out of range fails the step; ``axis`` is what errors are to call the
    first.
    """
    if indices.dtype.kind not in "iu":
        raise SpecError(f"indices must be integers, got {indices}; use astype")
    if indices.dims is None:
        return Spec("int64", None)
    if indices.rank == 0 or indices.shape[-1] is None:
        raise SpecError(f"the last size of indices says how many axes they name, so it must be known, got {indices}")
    shape = filled("bool", sizes)
    if shape.dims is not None and shape.rank != indices.shape[-1]:
        raise SpecError(f"indices {indices} name {indices.shape[-1]} axes, got the sizes of {shape.rank}")
    if shape.dims is not None and 0 in shape.dims and indices.known and indices.size > 0:
        raise SpecError(f"nothing can be taken from axes of sizes {shape.dims}, one of which is empty")
    return Spec("int64", indices.shape[:-1])


@located("gather_nd")
def gather_nd(params: Operand, indices: Operand, *, name: str | None = None) -> TensorOrArray:
    """The entries of ``params`` that ``indices`` [..., k] name by an index for each of its first k axes.

    They are slices of the axes that are left: the result is [..., *params.shape[k:]]. Negative indices count from the
    end; one that is out of range fails the step. ``x[i, j]`` takes indices of each axis by themselves.
    """
    held, given = described(params), described(indices)
    _check_naming(held, given, "params")
    made: TensorOrArray = entries_at(params, held.shape, indices, given.shape[-1] or 0, name=name)
    return made


@located("scatter_nd")
def scatter_nd(indices: Operand, updates: Operand, shape: Operand, *, name: str | None = None) -> TensorOrArray:
    """Zeros of ``shape``, to whose entries at ``indices`` [..., k], as of `gather_nd`, the ``updates`` are added.

    ``updates`` is shaped like ``gather_nd(result, indices)``; entries named more than once get every addition.
    """
    given, out = described(indices), filled(described(updates).dtype, described(shape))
    _check_naming(out, given, "shape")
    count = given.shape[-1] or 0
    wanted = Spec(out.dtype, (*given.shape[:-1], *out.shape[count:]))
    found = described(updates)
    if found.dims is not None and not wanted.accepts(found.dtype, found.dims):
        raise SpecError(f"updates of {out} at {given} must be {wanted}, got {found}")
    flat, merged = flattened(indices, sizes_of(out.shape, lambda: as_value(shape)), count)
    return reshape(scatter_add(updates, flat, merged), shape, name=name)


def _check_naming(held: Spec, indices: Spec, what: str) -> None:
    if held.dims is None or indices.dims is None or not indices.dims or indices.dims[-1] is None:
        raise SpecError(f"{what} must be of known rank, and indices of known last size, got {held} and {indices}")
    if indices.dims[-1] > held.rank:
        raise SpecError(f"indices {indices} name {indices.dims[-1]} axes, of {held}, which has {held.rank}")
