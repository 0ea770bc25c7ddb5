"""Moving entries without computing on them: other shapes, other orders, parts and wholes.

Shapes may be tuples or integer vector tensors; the latter's known entries (`Spec.value`) drive inference.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import as_dtype_of, is_whole
from flowrt.base.spec import MAX_RANK, MAX_VALUE_SIZE, Shape, Spec, check_axis, index_steps, normal_axes, one_axis
from flowrt.base.traits import Arranged
from flowrt.op import as_value
from flowrt.ops.inference import carry, described, filled, target
from flowrt.ops.reduce import broadcast_to, sum
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Axes, Paddings
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = [
    "concat",
    "expand_dims",
    "flip",
    "getitem",
    "pad",
    "place",
    "reshape",
    "roll",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
    "unstack",
]


WHOLE = (None, None, None)  # of an axis, in the key of `getitem`


@op(view=Arranged.RESHAPED)
def reshape(x: Operand, shape: Operand, *, name: str | None = None) -> Result:
    """``x`` in another shape, its entries in the same order; one size may be -1, which the others then determine."""
    dims = target(shape)
    if dims is None:
        return Spec(x.dtype, None)
    if dims.count(-1) > 1:
        raise SpecError(f"only one size of a shape may be -1, got {dims}")
    out = Spec(x.dtype, _resolved(x, dims))
    return carry(out, lambda value: value.reshape(out.concrete), x) if out.known else out


@reshape.gradient
def reshape_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return reshape(dy, shape_of(node.inputs[0])), None


def _resolved(x: Spec, dims: Shape) -> Shape:
    """``dims`` with what the size of ``x`` tells of one open entry."""
    open_sizes = [n for n in dims if n is None or n < 0]
    known = math.prod(n for n in dims if n is not None and n >= 0)
    if not x.known or len(open_sizes) > 1:
        return tuple(None if n == -1 else n for n in dims)
    fits = x.size == known if not open_sizes else known > 0 and x.size % known == 0
    if not fits and not (known == 0 and open_sizes == [None]):
        raise SpecError(f"cannot reshape {x} of {x.size} entries to {dims}")
    return tuple((x.size // known if known else None) if n is None or n == -1 else n for n in dims)


@op
def transpose(x: Operand, axes: Sequence[int] | None = None, *, name: str | None = None) -> Result:
    """``x`` with its axes in the order ``axes`` (reversed if None)."""
    if x.dims is None:
        return Spec(x.dtype, None if axes is None else (None,) * len(axes))
    order = _order(axes, x.rank)
    return Spec(x.dtype, tuple(x.shape[a] for a in order))


def _order(axes: Any, rank: int) -> tuple[int, ...]:
    order = tuple(reversed(range(rank))) if axes is None else tuple(a + rank if a < 0 else a for a in axes)
    if sorted(order) != list(range(rank)):
        raise SpecError(f"axes {axes} do not order the {rank} axes of the tensor; name each one once")
    return order


@transpose.gradient
def transpose_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    axes = node.attrs["axes"]
    back = None if axes is None else tuple(np.argsort(_order(axes, dy.spec.rank)).tolist())
    return (transpose(dy, back),)


@op(view=Arranged.RESHAPED, gradient=lambda node, dy: (reshape(dy, shape_of(node.inputs[0])),))
def expand_dims(x: Operand, axis: Axes, *, name: str | None = None) -> Result:
    """``x`` with new axes of size 1 at the positions ``axis`` of the result."""
    if x.dims is None:
        return Spec(x.dtype, None)
    count = len(axis) if isinstance(axis, tuple) else 1
    axes = normal_axes(axis, x.rank + count)
    sizes = iter(x.shape)
    out = Spec(x.dtype, tuple(1 if i in axes else next(sizes) for i in range(x.rank + count)))
    return carry(out, lambda value: value.reshape(-1), x) if out.rank == 1 else out


@op(view=Arranged.RESHAPED, gradient=lambda node, dy: (reshape(dy, shape_of(node.inputs[0])),))
def squeeze(x: Operand, axis: Axes = None, *, name: str | None = None) -> Result:
    """``x`` without the axes ``axis``, whose size is 1 (without every such axis if None)."""
    if x.dims is None or (axis is None and None in x.shape):
        return Spec(x.dtype, None)
    axes = tuple(i for i, n in enumerate(x.shape) if n == 1) if axis is None else normal_axes(axis, x.rank)
    if any(x.shape[a] not in (None, 1) for a in axes):
        raise SpecError(f"cannot squeeze axis {axis} of {x}: only axes of size 1 can go")
    out = Spec(x.dtype, tuple(n for i, n in enumerate(x.shape) if i not in axes))
    return carry(out, lambda value: value.reshape(out.concrete), x) if out.known else out


@op(promote=True)
def concat(values: Sequence[Operand], axis: int = 0, *, name: str | None = None) -> Result:
    """The tensors one after another along ``axis``; their other sizes are equal."""
    if not values:
        raise SpecError("concat needs at least one tensor")
    ranked = [v for v in values if v.dims is not None]
    if not ranked:
        return Spec(values[0].dtype, None)
    if ranked[0].rank == 0:
        raise SpecError("scalars cannot be concatenated; use stack")
    at = one_axis(axis, ranked[0].rank)
    sizes = [None if v.dims is None else v.shape[at] for v in values]
    dims = list(_alike(ranked, at))
    dims[at] = None if None in sizes else builtins.sum(n for n in sizes if n is not None)
    out = Spec(values[0].dtype, dims)
    return carry(out, lambda *parts: np.concatenate(parts), *values) if out.rank == 1 else out


def _alike(values: Sequence[Spec], free: int | None) -> Shape:
    """The shape that ``values`` share, but for the axis ``free``."""
    out: list[int | None] = [None] * values[0].rank
    for value in values:
        clash = len(value.shape) != len(out) or any(
            i != free and m is not None and n is not None and m != n
            for i, (m, n) in enumerate(zip(out, value.shape, strict=False))
        )
        if clash:
            where = "" if free is None else f" beside axis {free}"
            raise SpecError(f"{' and '.join(map(str, values))} must have equal sizes{where}")
        out = [m if n is None else n for m, n in zip(out, value.shape, strict=True)]
    return tuple(out)


@concat.gradient
def concat_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    axis = node.attrs["axis"]
    sizes = [shape_of(x)[axis] for x in node.inputs]
    return tuple(slice_along(dy, _total(sizes[:i]), size, axis) for i, size in enumerate(sizes))


def _total(sizes: Sequence[Any]) -> Any:
    return sum(stack(sizes)) if sizes else np.int64(0)


@op
def slice_along(x: Operand, start: Operand, count: Operand, axis: int = 0) -> Result:
    """``count`` entries of ``x`` along ``axis``, from ``start``: integer scalars, which a step may compute."""
    if x.dims is None:
        return Spec(x.dtype, None)
    at = one_axis(axis, x.rank)
    first, number, size = start.value, count.value, x.shape[at]
    if isinstance(first, int) and isinstance(number, int) and size is not None:
        _check_range(x, first, number, size, axis)
    known = number if isinstance(number, int) else None
    return Spec(x.dtype, (*x.shape[:at], known, *x.shape[at + 1 :]))


def _check_range(x: Spec, start: int, count: int, size: int, axis: int) -> None:
    if start < 0 or count < 0 or start + count > size:
        raise SpecError(f"{count} entries from {start} are not all within axis {axis} of {x}")


@slice_along.gradient
def slice_along_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, start, _ = node.inputs
    return place_along(dy, start, shape_of(x), node.attrs["axis"]), None, None


@op
def place_along(x: Operand, start: Operand, shape: Operand, axis: int = 0) -> Result:
    """Zeros of ``shape`` with ``x`` at ``start`` along ``axis``."""
    out = filled(x.dtype, shape)
    if x.dims is None or out.dims is None:
        return out
    at = one_axis(axis, out.rank)
    merged = _alike([x, out], at)
    first, number, size = start.value, x.shape[at], out.shape[at]
    if isinstance(first, int) and number is not None and size is not None:
        _check_range(out, first, number, size, axis)
    return out.with_shape((*merged[:at], size, *merged[at + 1 :]))


@place_along.gradient
def place_along_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, start, _ = node.inputs
    return slice_along(dy, start, shape_of(x)[node.attrs["axis"]], node.attrs["axis"]), None, None


@op(promote=True)
def stack(values: Sequence[Operand], axis: int = 0, *, name: str | None = None) -> Result:
    """The tensors, all of one shape, side by side along a new axis."""
    if not values:
        raise SpecError("stack needs at least one tensor")
    ranked = [v for v in values if v.dims is not None]
    if not ranked:
        return Spec(values[0].dtype, None)
    at = one_axis(axis, ranked[0].rank + 1)
    dims = list(_alike(ranked, None))
    out = Spec(values[0].dtype, (*dims[:at], len(values), *dims[at:]))
    return _stacked_value(out, values) if out.rank == 1 else out


def _stacked_value(out: Spec, values: Sequence[Spec]) -> Spec:
    """Unlike other values, a vector's is of use although some entries are not known."""
    if out.dtype.kind not in "iu":
        return out
    return Spec(out.dtype, out.shape, tuple(v.value for v in values)) if len(values) <= MAX_VALUE_SIZE else out


@stack.gradient
def stack_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    axis = one_axis(node.attrs["axis"], node.outputs[0].spec.rank)
    return tuple(getitem(dy, (*[WHOLE] * axis, i)) for i in range(len(node.inputs)))


@located("unstack")
def unstack(x: Operand, axis: int = 0) -> tuple[TensorOrArray, ...]:
    """The slices of ``x`` along ``axis``, whose size must be known, each without that axis."""
    spec = described(x)
    at = one_axis(axis, spec.rank)
    count = spec.shape[at]
    if count is None:
        raise SpecError(f"cannot unstack {spec}: the size of axis {axis} is not known before a step")
    return tuple(getitem(x, (*[WHOLE] * at, i)) for i in range(count))


@op(view=Arranged.PART)
def getitem(x: Operand, key: Any, *, name: str | None = None) -> Result:
    """The part of ``x`` that ``key`` names: ints, (start, stop, step), None for a new axis, "..."."""
    if x.dims is None:
        return Spec(x.dtype, None)
    steps = index_steps(key, x.shape)
    out = Spec(x.dtype, tuple(s.count for s in steps if s.kept))
    return carry(out, lambda value: value[_numpy_key(key)], x)


@getitem.gradient
def getitem_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (place(dy, shape_of(node.inputs[0]), node.attrs["key"]),)


def _numpy_key(key: Sequence[Any]) -> tuple[Any, ...]:
    """``key`` as NumPy takes it."""
    return tuple(slice(*k) if isinstance(k, tuple) else ... if k == "..." else k for k in key)


@located("flip")
def flip(x: Operand, axis: Axes = None, *, name: str | None = None) -> TensorOrArray:
    """``x`` with its entries in the opposite order along ``axis``, or along all axes if that is None."""
    rank = described(x).rank
    axes = normal_axes(axis, rank)
    return getitem(x, tuple((None, None, -1 if i in axes else None) for i in range(rank)), name=name)


@op(gradient=lambda node, dy: (getitem(dy, node.attrs["key"]), None))
def place(x: Operand, shape: Operand, key: Any, *, name: str | None = None) -> Result:
    """Zeros of ``shape`` with ``x`` at the part that ``key`` names (as in `getitem`)."""
    out = filled(x.dtype, shape)
    if x.dims is not None and out.dims is not None:
        _alike([x, Spec(x.dtype, tuple(s.count for s in index_steps(key, out.shape) if s.kept))], None)
    return out


def joined(parts: Sequence[Any]) -> Any:
    """The sum of ``parts``, where all are placed side by side and fill their shape: put together. Else None."""
    if not all(getattr(getattr(part, "op", None), "op", None) is place and part.spec.known for part in parts):
        return None
    whole = parts[0].spec.dims
    stretches = [_stretch(part.op.attrs["key"], whole) if part.spec.dims == whole else None for part in parts]
    ordered = sorted((found, number) for number, found in enumerate(stretches) if found is not None)
    axes = {axis for (axis, _, _), _ in ordered}
    if len(ordered) < len(parts) or len(axes) > 1:
        return None
    axis, reached = axes.pop(), 0
    for (_, start, count), _ in ordered:
        if start != reached:
            return None
        reached += count
    if reached != whole[axis]:
        return None
    return concat([parts[number].op.inputs[0] for _, number in ordered], axis=axis)


def _stretch(key: Sequence[Any], shape: Sequence[int]) -> tuple[int, int, int] | None:
    """(axis, start, count) where ``key`` names a stretch along one axis and all of the others."""
    steps = index_steps(key, shape)
    if any(step.axis is None or not step.kept or step.step != 1 for step in steps):
        return None
    partial = [step for step in steps if step.count != shape[step.axis or 0]]
    if len(partial) != 1 or partial[0].axis is None or partial[0].start is None or not partial[0].count:
        return None
    return partial[0].axis, partial[0].start, partial[0].count


@op(name="pad")
def pad_op(x: Operand, paddings: Any, value: float = 0, *, name: str | None = None) -> Result:
    """``x`` with ``paddings[i] = (before, after)`` entries of ``value`` around axis i."""
    as_dtype_of(value, x.dtype)  # raises where that cannot hold it
    if x.dims is None:
        return Spec(x.dtype, (None,) * len(paddings))
    if len(paddings) != x.rank or any(len(p) != 2 or min(p) < 0 for p in paddings):
        raise SpecError(f"paddings of {x} are {x.rank} pairs (before, after) of sizes from 0 up, got {paddings}")
    return Spec(x.dtype, tuple(None if n is None else n + a + b for n, (a, b) in zip(x.shape, paddings, strict=True)))


@pad_op.gradient
def pad_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    paddings: Any = node.attrs["paddings"]
    return (getitem(dy, tuple((before, -after if after else None, None) for before, after in paddings)),)


@located("pad")
def pad(x: Operand, paddings: Paddings, value: float = 0, *, name: str | None = None) -> TensorOrArray:
    """``x`` with entries of ``value`` around it.

    ``paddings`` is one (before, after) per axis, or one pair or number for every axis.
    """
    try:
        pairs = np.asarray(paddings)
        if pairs.ndim < 2:
            pairs = np.broadcast_to(pairs, (described(x).rank, 2))
    except ValueError:
        raise SpecError(
            f"paddings are one (before, after) per axis, or one pair or number for all, got {paddings}"
        ) from None
    if pairs.dtype.kind not in "iu" or pairs.shape[1:] != (2,):
        raise SpecError(f"paddings are pairs of integers, (before, after) per axis, got {paddings}")
    return pad_op(x, tuple((int(before), int(after)) for before, after in pairs), value, name=name)


@located("tile")
def tile(x: Operand, repeats: Operand, *, name: str | None = None) -> TensorOrArray:
    """``x`` repeated ``repeats[i]`` times along axis i (counted from the last, as NumPy does).

    ``repeats`` are integers or scalar tensors of such, or a vector; one alone is for the last axis.
    """
    spec, times = described(x), _integers(repeats)
    count = max(spec.rank, len(times))
    times = [1] * (count - len(times)) + times
    sizes = [1] * (count - spec.rank) + _sizes(x)
    left = [axis for axis, n in enumerate(times) if not (isinstance(n, int) and n == 1)]
    while left:  # what is repeated takes two axes each, and there may be so many
        most = MAX_RANK // 2 if left[0] == 0 else (MAX_RANK - 1) // 2
        axes, left = left[:most], left[most:]
        x = _repeated(x, sizes, times, axes)
        sizes = [times[i] * n if i in axes else n for i, n in enumerate(sizes)]
    return reshape(x, sizes, name=name)


def _integers(given: Any) -> list[Any]:
    """An integer, several, or a vector of them, as a list of ints and scalar tensors."""
    value = as_value(given) if not isinstance(given, (tuple, list)) else given
    if isinstance(value, (tuple, list)):
        return [n if hasattr(n, "builder") else operator.index(n) for n in map(as_value, value)]
    if not hasattr(value, "builder"):
        return [operator.index(n) for n in np.atleast_1d(value)]
    return list(unstack(value)) if described(value).rank else [value]


def _sizes(x: Any) -> list[Any]:
    """The sizes of ``x``: ints where they are known, scalar tensors where only a step knows."""
    shape = described(x).shape
    return [n if n is not None else shape_of(x)[axis] for axis, n in enumerate(shape)]


def _repeated(x: Any, sizes: Sequence[Any], times: Sequence[Any], axes: Sequence[int]) -> Any:
    """``x``, of these sizes, repeated along some of its axes; in any shape."""
    head = [math.prod(sizes[: axes[0]])] if axes[0] else []
    blocks = [math.prod(sizes[a:b]) for a, b in itertools.pairwise((*axes, len(sizes)))]
    apart = [*head, *(n for block in blocks for n in (1, block))]
    both = [*head, *(n for axis, block in zip(axes, blocks, strict=True) for n in (times[axis], block))]
    return broadcast_to(reshape(x, apart), both)


@op(name="roll")
def roll_op(x: Operand, shift: Sequence[int], axis: Sequence[int], *, name: str | None = None) -> Result:
    """``x`` with its entries ``shift[i]`` places further along the axis ``axis[i]``."""
    lists = isinstance(shift, (list, tuple)) and isinstance(axis, (list, tuple)) and len(shift) == len(axis)
    if not lists or not all(isinstance(number, int) for number in (*shift, *axis)):
        raise SpecError(f"there must be one shift for each axis, got {shift!r} along {axis!r}")
    for each in axis:
        check_axis(each, x)
    return carry(x.without_value(), lambda value: np.roll(value, shift, axis), x)


@roll_op.gradient
def roll_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    shifts: Any = node.attrs["shift"]
    return (roll_op(dy, [-shift for shift in shifts], node.attrs["axis"]),)


@located("roll")
def roll(x: Operand, shift: Operand, axis: Axes = None, *, name: str | None = None) -> TensorOrArray:
    """``x`` with its entries ``shift`` places further along ``axis``: what leaves at the end comes in at the front.

    Shifts are integers, negative ones too, or scalar tensors of such: one for each axis, or one for all. If ``axis`` is
    None the flattened tensor is shifted, which then has its shape again.
    """
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, 0), shape_of(x), name=name)
    shifts, axes = _integers(shift), [operator.index(each) for each in np.atleast_1d(axis)]
    if len({len(shifts), len(axes), 1}) > 2 or not shifts:
        raise SpecError(f"there must be one shift, or one for each axis, got {shift} along {axis}")
    many = max(len(shifts), len(axes))
    pairs = list(zip(shifts * (many // len(shifts)), axes * (many // len(axes)), strict=True))
    known = [pair for pair in pairs if isinstance(pair[0], int)]
    rolled: TensorOrArray = as_value(x)
    if known:
        rolled = roll_op(x, [by for by, _ in known], [each for _, each in known], name=name)
    for late, each in pairs:
        if not isinstance(late, int):
            rolled = _rolled(rolled, late, each)
    return rolled


def _rolled(x: Any, shift: Any, axis: int) -> TensorOrArray:
    """`roll` along one axis by what only a step knows."""
    size = shape_of(x)[axis]
    first = -shift.astype("int64") % size
    return concat([slice_along(x, first, size - first, axis), slice_along(x, 0, first, axis)], axis)


@located("split")
def split(x: Operand, sections: int | Sequence[int], axis: int = 0) -> tuple[TensorOrArray, ...]:
    """Stretches of ``x`` along ``axis``, one after another: ``sections`` equal ones, or of the sizes that it lists.

    One of the sizes may be -1: what the others leave. They fill the axis; where its size is open, a step fails else.
    NumPy's ``split`` is told where to cut: its ``[2, 5]`` is ``[2, 3, -1]`` here.
    """
    spec = described(x)
    at, sections = one_axis(axis, spec.rank), int(sections) if is_whole(sections, 1) else sections
    total, sizes = spec.shape[at], _sections(sections, spec, at)
    if total is None and isinstance(sections, int):
        return unstack(_with_axis(x, at, [sections, shape_of(x)[at] // sections]), at)
    if total is None and -1 not in sizes:
        total = builtins.sum(sizes)
        x = _with_axis(x, at, [total])
    rest = (shape_of(x)[at] if total is None else total) - builtins.sum(n for n in sizes if n != -1)
    filling: list[Any] = [rest if n == -1 else n for n in sizes]
    starts = [0, *itertools.accumulate(filling)]
    if total is None:
        return tuple(slice_along(x, start, size, at) for start, size in zip(starts, filling, strict=False))
    return tuple(getitem(x, (*[WHOLE] * at, (start, end, None))) for start, end in itertools.pairwise(starts))


def _with_axis(x: Any, at: int, sizes: Sequence[Any]) -> Any:
    """``x`` with axes of ``sizes`` in the place of one; a step fails where its size is not their product."""
    before, after = shape_of(x)[:at], shape_of(x)[at + 1 :]
    return reshape(x, concat([before, stack(sizes), after]), name="split")


def _sections(sections: Any, spec: Spec, at: int) -> list[int]:
    """The sizes of an axis' stretches, one of which may be -1; raises `SpecError` where they cannot fill it."""
    total = spec.shape[at]
    if is_whole(sections, 1):
        if total is not None and total % sections:
            raise SpecError(f"axis {at} of {spec} has no {sections} equal sections; give the size of each")
        return [(total or 0) // sections] * sections
    sizes = np.asarray(sections)
    if sizes.ndim == 1 and sizes.size and sizes.dtype.kind in "iu" and sizes.min() >= -1:
        left, known = np.count_nonzero(sizes == -1), int(sizes[sizes != -1].sum())
        if (left == 0 and total in (None, known)) or (left == 1 and (total is None or known <= total)):
            return [int(size) for size in sizes]
    raise SpecError(
        f"sections of axis {at} of {spec} are how many, or sizes that fill it, one of which may be -1, got {sections!r}"
    )
