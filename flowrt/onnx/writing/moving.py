"""Shapes, orders, parts and wholes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowrt.base.spec import index_steps, is_float, normal_axes
from flowrt.onnx.writing.writer import AppliedOp, Unwritable, writes

END = np.iinfo(np.int64).max


@writes("constant")
def constant(one: AppliedOp) -> str:
    return one.writer.constant(np.asarray(one.attrs["value"]), name=one.name)


@writes("shape_of")
def shape_of(one: AppliedOp) -> str:
    return one.add("Shape", one.inputs[0])


def sizes(one: AppliedOp, index: int) -> str:
    """An input that is a shape, as a vector of int64."""
    found = one.input_as(np.int64, index)
    return one.reshaped(found, (-1,)) if one.specs[index].dims == () else found


@writes("reshape")
def reshape(one: AppliedOp) -> str:
    target = one.specs[1].value
    told = target if isinstance(target, tuple) else (target,)
    return one.add("Reshape", one.inputs[0], sizes(one, 1), allowzero=int(-1 not in told))


@writes("broadcast_to")
def broadcast_to(one: AppliedOp) -> str:
    if one.out.known and 0 in one.out.concrete:  # onnxruntime's Expand leaves one where nothing is to be left
        return one.add("Identity", one.constant(np.zeros(one.out.concrete, one.out.dtype)))
    return one.add("Expand", one.inputs[0], sizes(one, 1))


@writes("full")
def full(one: AppliedOp) -> str:
    return one.add("Expand", one.inputs[1], sizes(one, 0))


@writes("full_like")
def full_like(one: AppliedOp) -> str:
    value = one.cast(one.inputs[1], one.specs[1].dtype, one.out.dtype)
    return one.add("Expand", value, one.add("Shape", one.inputs[0]))


@writes("arange")
def arange(one: AppliedOp) -> str:
    dtype = one.out.dtype if is_float(one.out.dtype) else np.dtype(np.int64)
    bounds = [one.cast(name, spec.dtype, dtype) for name, spec in zip(one.inputs, one.specs, strict=True)]
    bounds = [name if spec.dims == () else one.reshaped(name, ()) for name, spec in zip(bounds, one.specs, strict=True)]
    return one.cast(one.add("Range", *bounds), dtype, one.out.dtype)


@writes("transpose")
def transpose(one: AppliedOp) -> str:
    axes = one.attrs["axes"]
    rank = one.rank()
    order = [axis % rank for axis in axes] if axes is not None else list(reversed(range(rank)))
    return one.transposed(one.inputs[0], order)


@writes("expand_dims")
def expand_dims(one: AppliedOp) -> str:
    axis = one.attrs["axis"]
    axes = normal_axes(axis, one.rank() + (len(axis) if isinstance(axis, (tuple, list)) else 1))
    return one.add("Unsqueeze", one.inputs[0], one.ints(*axes))


@writes("squeeze")
def squeeze(one: AppliedOp) -> str:
    axis = one.attrs["axis"]
    if axis is None:
        return one.add("Squeeze", one.inputs[0])
    axes = normal_axes(axis, one.rank())
    return one.add("Squeeze", one.inputs[0], one.ints(*axes)) if axes else one.inputs[0]


@writes("concat")
def concat(one: AppliedOp) -> str:
    axis = int(one.attrs["axis"]) % one.rank()
    first = one.writer.shared.channels_first
    if axis == 3 and all(name in first for name in one.inputs):
        made = one.add("Concat", *[first[name] for name in one.inputs], axis=1)
        last = one.transposed(made, (0, 2, 3, 1))
        first[last] = made
        return last
    return one.add("Concat", *one.inputs, axis=axis)


@writes("stack")
def stack(one: AppliedOp) -> str:
    axis = int(one.attrs["axis"]) % (one.rank() + 1)
    rows = [one.add("Unsqueeze", name, one.ints(axis)) for name in one.inputs]
    return one.add("Concat", *rows, axis=axis)


@writes("getitem")
def getitem(one: AppliedOp) -> str:
    return part(one, one.inputs[0], one.attrs["key"], one.specs[0].dims)


def part(one: AppliedOp, name: str, key: Any, dims: Any) -> str:
    """What a key names of a value: slices, then axes that go, then new ones."""
    if dims is None:
        raise Unwritable("the rank of its input is open; declare its shape")
    steps = index_steps(key, dims)
    used = [item for item in key if item is not None and item != "..."]
    spot = list(key).index("...") if "..." in key else len(key)
    whole: list[Any] = [(None, None, None)] * (len(dims) - len(used))
    full = [*key[:spot], *whole, *key[spot + 1 :]]
    axis, cuts, gone = 0, [], []
    for item in full:
        if item is None:
            continue
        if isinstance(item, int):
            cuts.append((axis, item, item + 1 if item != -1 else END, 1))
            gone.append(axis)
        elif tuple(item) != (None, None, None):
            cuts.append((axis, *_bounds(item)))
        axis += 1
    if cuts:
        axes, starts, ends, by = (one.ints(*column) for column in zip(*cuts, strict=True))
        name = one.add("Slice", name, starts, ends, axes, by)
    if gone:
        name = one.add("Squeeze", name, one.ints(*gone))
    new = [place for place, step in enumerate([s for s in steps if s.kept]) if step.axis is None]
    if new:
        name = one.add("Unsqueeze", name, one.ints(*new))
    return name


def _bounds(item: Any) -> tuple[int, int, int]:
    start, stop, step = item
    step = 1 if step is None else step
    first = (0 if step > 0 else END) if start is None else start
    last = (END if step > 0 else -END) if stop is None else stop
    return first, last, step


@writes("slice_along")
def slice_along(one: AppliedOp) -> str:
    x, start, count = one.inputs[0], one.input_as(np.int64, 1), one.input_as(np.int64, 2)
    first, last = one.reshaped(start, (1,)), one.reshaped(one.add("Add", start, count), (1,))
    return one.add("Slice", x, first, last, one.ints(int(one.attrs["axis"]) % one.rank()))


@writes("pad")
def pad(one: AppliedOp) -> str:
    pads = one.attrs["paddings"]
    if one.out.dtype == np.bool_:
        x = one.cast(one.inputs[0], np.bool_, np.uint8)
        value = one.constant(np.asarray(bool(one.attrs["value"]), np.uint8))
    else:
        x, value = one.inputs[0], one.constant(one.attrs["value"], one.out.dtype)
    edges = one.ints(*[before for before, _ in pads], *[after for _, after in pads])
    made = one.add("Pad", x, edges, value)
    return one.cast(made, np.uint8, np.bool_) if one.out.dtype == np.bool_ else made


@writes("place")
def place(one: AppliedOp) -> str:
    """Where the part is a stretch of every axis, zeros around it."""
    dims = one.out.dims
    if dims is None or None in dims:
        raise Unwritable("a part is put in its place where all sizes are known")
    steps = index_steps(one.attrs["key"], dims)
    if any(step.axis is None or step.step != 1 for step in steps):
        raise Unwritable("only a stretch of every axis is put in its place")
    x = one.inputs[0]
    gone = [n for n, step in enumerate(steps) if not step.kept]
    if gone:
        x = one.add("Unsqueeze", x, one.ints(*gone))
    before = [step.start or 0 for step in steps]
    after = [n - start - (step.count or 0) for n, start, step in zip(dims, before, steps, strict=True)]  # type: ignore[operator]
    return one.add("Pad", x, one.ints(*before, *after))


@writes("roll")
def roll(one: AppliedOp) -> str:
    found, dims = one.inputs[0], one.specs[0].dims
    for by, axis in zip(one.attrs["shift"], one.attrs["axis"], strict=True):
        at = axis % one.rank()
        if dims is None or dims[at] is None:
            raise Unwritable("sizes along which entries are moved on must be known")
        cut = -by % dims[at] if dims[at] else 0
        if cut:
            key: list[Any] = [(None, None, None)] * len(dims)
            parts = []
            for stretch in ((cut, None, None), (None, cut, None)):
                key[at] = stretch
                parts.append(part(one, found, tuple(key), dims))
            found = one.add("Concat", *parts, axis=at)
    return found


@writes("one_hot")
def one_hot(one: AppliedOp) -> str:
    indices = one.input_as(np.int64)
    marks = one.add("Equal", one.add("Unsqueeze", indices, one.ints(-1)), one.ints(*range(one.attrs["depth"])))
    return one.cast(marks, np.bool_, one.out.dtype)


@writes("take")
def take(one: AppliedOp) -> str:
    indices, axis = one.input_as(np.int64, 1), int(one.attrs["axis"]) % one.rank()
    if not one.attrs["absent"]:
        return one.add("Gather", one.inputs[0], indices, axis=axis)
    none = one.add("Equal", indices, one.constant(np.iinfo(np.int64).min, np.int64))
    found = one.add("Gather", one.inputs[0], one.add("Where", none, one.constant(0, np.int64), indices), axis=axis)
    behind = one.rank() - axis - 1
    if behind:
        none = one.add("Unsqueeze", none, one.ints(*range(-behind, 0)))
    return one.add("Where", none, one.like(0), found)


@writes("take_along_axis")
def take_along_axis(one: AppliedOp) -> str:
    axis, x, indices = int(one.attrs["axis"]) % one.rank(), one.inputs[0], one.input_as(np.int64, 1)
    mine, theirs = one.specs[0].dims, one.specs[1].dims
    beside = [(m, n) for i, (m, n) in enumerate(zip(mine or (), theirs or (), strict=True)) if i != axis]
    if any(None in pair for pair in beside):
        raise Unwritable("the sizes beside its axis must be known")
    if any(m != n for m, n in beside):
        whole = one.out.concrete
        ours = [n if i != axis else one.specs[0].concrete[axis] for i, n in enumerate(whole)]
        x, indices = one.add("Expand", x, one.ints(*ours)), one.add("Expand", indices, one.ints(*whole))
    return one.add("GatherElements", x, indices, axis=axis)


@writes("scatter_add")
def scatter_add(one: AppliedOp) -> str:
    if one.attrs["absent"]:
        raise Unwritable("rows that may be absent belong to tables that are split")
    rank = len(one.out.shape)
    axis = int(one.attrs["axis"]) % rank
    count = one.rank(1)
    shape, updates = sizes(one, 2), one.inputs[0]
    order = [axis, *(i for i in range(rank) if i != axis)]
    if axis:
        shape = one.add("Gather", shape, one.ints(*order))
        ours = [*range(axis, axis + count), *range(axis), *range(axis + count, rank - 1 + count)]
        updates = one.transposed(updates, ours)
    zeros = one.add("Expand", one.like(0), shape)
    indices = one.add("Unsqueeze", one.input_as(np.int64, 1), one.ints(-1))
    made = one.add("ScatterND", zeros, indices, updates, reduction="add")
    return one.transposed(made, [int(n) for n in np.argsort(order)]) if axis else made


@writes("add_along_axis")
def add_along_axis(one: AppliedOp) -> str:
    zeros = one.add("Expand", one.like(0), sizes(one, 2))
    axis, indices = int(one.attrs["axis"]) % one.rank(), one.input_as(np.int64, 1)
    if one.specs[0].dims != one.specs[1].dims:
        if not one.specs[0].known:
            raise Unwritable("the sizes of what is added must be known")
        indices = one.add("Expand", indices, one.ints(*one.specs[0].concrete))
    return one.add("ScatterElements", zeros, indices, one.inputs[0], axis=axis, reduction="add")


@writes("flat_indices")
def flat_indices(one: AppliedOp) -> str:
    bounds = one.known(1)
    if bounds is None:
        raise Unwritable("the sizes of what is indexed must be known")
    whole = [int(n) for n in bounds.reshape(-1)]
    strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    indices = one.input_as(np.int64)
    below = one.add("Less", indices, one.constant(0, np.int64))
    inside = one.add("Where", below, one.add("Add", indices, one.ints(*whole)), indices)
    return one.add("ReduceSum", one.add("Mul", inside, one.ints(*strides)), one.ints(-1), keepdims=0)


@writes("true_places")
def true_places(one: AppliedOp) -> list[str]:
    places = one.add("Squeeze", one.add("NonZero", one.inputs[0]), one.ints(0))
    count = one.add("Shape", places)
    rest = one.add("Sub", one.add("Shape", one.inputs[0]), count)
    pads = one.add("Concat", one.ints(0), rest, axis=0)
    return [one.add("Pad", places, pads), one.reshaped(count, ())]
