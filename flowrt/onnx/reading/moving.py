"""Shapes, orders, parts and wholes: what moves entries and computes nothing on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float
from flowrt.graph import Tensor
from flowrt.onnx.reading.elementwise import channels_first
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, axis_of, known, reads, sizes_of
from flowrt.onnx.types import dtype_of
from flowrt.ops.inference import described

END = np.iinfo(np.int64).max


@reads("Constant")
def constant(call: NodeCall) -> Value:
    for name, dtype in (("value_float", "float32"), ("value_floats", "float32"), ("value_int", "int64")):
        if name in call.attrs:
            return np.asarray(call.attrs[name], dtype)
    if "value_ints" in call.attrs:
        return np.asarray(call.attrs["value_ints"], np.int64)
    if "value" in call.attrs:
        return call.attrs["value"]
    raise Unreadable("a constant that is no tensor is not supported")


@reads("Shape")
def shape(call: NodeCall) -> Value:
    rank = call.rank(0)
    first, last = int(call.attr("start", 0)), int(call.attr("end", rank))
    sizes = fr.shape_of(call[0])
    if isinstance(sizes, np.ndarray):
        return sizes[first:last]
    return sizes if (first, last) == (0, rank) else sizes[first:last]


@reads("Size")
def size(call: NodeCall) -> Value:
    found = fr.size(call[0])
    dims = call.spec(0).dims
    return found if dims is None or None in dims else np.asarray(math.prod(call.shape(0)), np.int64)


@reads("Reshape")
def reshape(call: NodeCall) -> Value:
    target, sizes = call[1], known(call[1])
    if sizes is None:  # perhaps in part
        told = described(target).value
        sizes = None if told is None else np.array(told, object).reshape(-1)
    if call.attr("allowzero", 0) or (sizes is not None and 0 not in sizes):
        return fr.reshape(call[0], target)
    given = fr.shape_of(call[0])
    if sizes is not None:
        entries = [given[i] if n == 0 else target[i] if n is None else int(n) for i, n in enumerate(sizes)]
        return fr.reshape(call[0], vector(entries))
    count = described(target).dims
    if count is None or count[0] is None:
        raise Unreadable("how many sizes its shape has must be known")
    ours = fr.concat([given, np.zeros(max(count[0] - call.rank(0), 0), np.int64)])[: count[0]]
    return fr.reshape(call[0], fr.where(fr.equal(target, 0), ours, target))


@reads("Flatten")
def flatten(call: NodeCall) -> Value:
    rank, axis = call.rank(0), int(call.attr("axis", 1))
    axis = axis + rank if axis < 0 else axis
    dims = call.shape(0)
    if axis == 0:
        return fr.reshape(call[0], (1, -1))
    if None not in dims:
        return fr.reshape(call[0], (math.prod(dims[:axis]), math.prod(dims[axis:])))
    sizes = fr.shape_of(call[0])
    return fr.reshape(call[0], fr.stack([fr.prod(sizes[:axis]), fr.prod(sizes[axis:])]))


@reads("Transpose")
def transpose(call: NodeCall) -> Value:
    axes = call.attr("perm")
    return fr.transpose(call[0], None if axes is None else tuple(axes))


@reads("Squeeze")
def squeeze(call: NodeCall) -> Value:
    axes = call.integers(1, "the axes")
    return fr.squeeze(call[0], None if axes is None else tuple(axes))


@reads("Unsqueeze")
def unsqueeze(call: NodeCall) -> Value:
    return fr.expand_dims(call[0], tuple(call.integers(1, "the axes") or ()))


@reads("Concat")
def concat(call: NodeCall) -> Value:
    axis = call.axis()
    last = call.reader.channels_last
    images = [last.get(v) if isinstance(v, Tensor) else None for v in call.inputs]
    if axis == 1 and call.rank(0) == 4 and all(image is not None for image in images):
        return channels_first(call, fr.concat(images, 3))
    return fr.concat(list(call.inputs), axis)


@reads("Split")
def split(call: NodeCall) -> Any:
    axis, sizes = call.axis(default=0), call.integers(1, "the sizes")
    if sizes is None:
        many, whole = int(call.attr("num_outputs", len(call.node.output))), call.shape(0)[axis]
        if whole is None:
            return fr.split(call[0], many, axis)
        most = -(-whole // many)
        sizes = [max(0, min(most, whole - most * n)) for n in range(many)]
    return fr.split(call[0], sizes, axis)


@reads("Slice")
def cut(call: NodeCall) -> Value:
    axes, steps = call.integers(3, "the axes"), call.integers(4, "the steps")
    rank = call.rank(0)
    starts, ends = call[1], call[2]
    bounds = [known(starts), known(ends)]
    count = (described(starts).dims or (None,))[0]
    if count is None:
        raise Unreadable("how many axes it cuts must be known")
    key: list[Any] = [slice(None)] * rank
    for place, axis in enumerate(axes if axes is not None else range(count)):
        first, last = (
            int(bound[place]) if bound is not None else given[place]
            for bound, given in zip(bounds, (starts, ends), strict=True)
        )
        key[axis] = _stretch(first, last, 1 if steps is None else steps[place])
    if all(bound is not None for bound in bounds) and isinstance(call[0], np.ndarray):
        return np.ascontiguousarray(call[0][tuple(key)])
    return call.reader.tensor(call[0])[tuple(key)]


def _stretch(first: Any, last: Any, step: int) -> slice:
    """A slice as Python has it; ends far beyond either end are that end."""
    if isinstance(last, int) and step < 0 and last <= -(2**31) + 1:
        last = None
    return slice(first, last, step)


@reads("Expand")
def expand(call: NodeCall) -> Value:
    target = call[1]
    sizes = known(target)
    if sizes is not None and not isinstance(call[0], Tensor):
        return fr.broadcast_to(call[0], np.broadcast_shapes(call.shape(0), tuple(int(n) for n in sizes)))
    dims, told = call.spec(0).dims, described(target)
    count = (told.dims or (None,))[0]
    if dims is None or count is None:
        raise Unreadable("the ranks of what is expanded must be known")
    rank = max(len(dims), count)
    ours = fr.shape_of(call[0])
    out: list[Any] = []
    for place in range(rank):
        mine, theirs = place - rank + len(dims), place - rank + count
        if mine < 0:
            out.append(target[theirs])
        elif theirs < 0:
            out.append(ours[mine])
        elif dims[mine] not in (None, 1):
            out.append(dims[mine])
        elif dims[mine] == 1:
            out.append(target[theirs])
        else:
            out.append(fr.where(fr.equal(ours[mine], 1), target[theirs], ours[mine]))
    return fr.broadcast_to(call[0], vector(out))


def vector(sizes: Sequence[Any]) -> Any:
    """Sizes as what ops take for a shape: a list where all are known, else a tensor."""
    return fr.stack(list(sizes)) if any(isinstance(n, Tensor) for n in sizes) else [int(n) for n in sizes]


@reads("Tile")
def tile(call: NodeCall) -> Value:
    return fr.tile(call[0], call[1])


@reads("ConstantOfShape")
def constant_of_shape(call: NodeCall) -> Value:
    value = call.attr("value", np.zeros(1, np.float32)).reshape(())
    return fr.full(call[0], value, value.dtype.name)


@reads("Range")
def arange(call: NodeCall) -> Value:
    start, stop, step = (fr.reshape(bound, ()) for bound in call.inputs)
    if is_float(call.spec(0).dtype):
        count = fr.maximum(fr.ceil(fr.divide(fr.subtract(stop, start), step)), 0.0)
        places = fr.astype(fr.arange(fr.astype(count, "int64")), call.spec(0).dtype.name)
        return fr.add(fr.multiply(places, step), start)
    return fr.astype(fr.arange(start, stop, step), call.spec(0).dtype.name)


@reads("Gather")
def gather(call: NodeCall) -> Value:
    return fr.take(call[0], call[1], call.axis(default=0))


@reads("GatherElements")
def gather_elements(call: NodeCall) -> Value:
    axis, dims, chosen = call.axis(default=0), call.shape(0), call.shape(1)
    x = call[0]
    if any(i != axis and n != m for i, (n, m) in enumerate(zip(dims, chosen, strict=True))):  # the first lines alone
        if None in chosen:
            raise Unreadable("lines of indices fewer than there may be are not supported")
        x = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(chosen))]
    return fr.take_along_axis(x, call[1], axis)


@reads("GatherND")
def gather_nd(call: NodeCall) -> Value:
    batch = int(call.attr("batch_dims", 0))
    indices = call[1]
    if batch:
        indices = fr.concat([_own_places(indices, batch), fr.astype(indices, "int64")], -1)
    return fr.gather_nd(call[0], indices)


def _own_places(indices: Value, batch: int) -> Value:
    """For each index vector, where it stands along the first axes."""
    dims = described(indices).shape[:-1]
    if None in dims:
        raise Unreadable("the sizes of the batch must be known")
    sizes: Any = dims
    return np.stack(list(np.indices(sizes)), -1).astype(np.int64)[..., :batch]


def scattered(x: Value, flat: Value, updates: Value, how: str) -> Value:
    """``x`` with ``updates`` at places of its flattened entries: in their stead, or combined with what is there.

    Several at one place are combined in turn.
    """
    spec, count = described(x), described(flat).dims
    line, places, new = fr.reshape(x, (-1,)), fr.reshape(flat, (-1,)), fr.reshape(updates, (-1,))
    total = fr.size(x)
    if how == "add":
        return fr.reshape(fr.add(line, _cast(fr.scatter_add(new, places, fr.reshape(total, (1,))), spec)), _dims(x))
    if count is None or None in count:
        raise Unreadable("how many entries are put must be known")
    number = np.arange(described(flat).size)
    if how == "none":  # the last at each place counts
        return fr.reshape(_put(line, places, new, number, total), _dims(x))
    return fr.reshape(_combined(line, places, new, how, total), _dims(x))


def _cast(x: Value, like: Any) -> Value:
    return x if described(x).dtype == like.dtype else fr.astype(x, like.dtype.name)


def _dims(x: Value) -> Any:
    dims = described(x).dims
    return fr.shape_of(x) if dims is None or None in dims else dims


def _put(line: Value, places: Value, new: Value, number: Any, total: Value) -> Value:
    """By the numbers of updates from 1 on, added up where they are alone, and the latest where they are not."""
    places = fr.where(fr.less(places, 0), fr.add(places, fr.astype(total, described(places).dtype.name)), places)
    order = fr.argsort(places)  # stable: among equal places the latest comes last
    ordered = fr.take(places, order)
    ends = fr.concat([fr.not_equal(ordered[1:], ordered[:-1]), np.ones(min(len(number), 1), bool)])
    chosen = fr.scatter_add(fr.where(ends, fr.add(order, 1), 0), ordered, fr.reshape(total, (1,)))
    taken = fr.take(new, fr.maximum(fr.subtract(chosen, 1), 0)) if len(number) else line
    return fr.where(fr.greater(chosen, 0), taken, line)


def _combined(line: Value, places: Value, new: Value, how: str, total: Value) -> Value:
    """One update after another, by a loop."""
    combine = {"mul": fr.multiply, "max": fr.maximum, "min": fr.minimum}.get(how)
    if combine is None:
        raise Unreadable(f"reduction {how!r} is not supported")
    graph_line = fr.add(line, np.asarray(0, described(line).dtype))
    every = np.arange(described(line).concrete[0]) if described(line).known else fr.arange(total)

    def step(held: Any, one: Any) -> Any:
        place, value = one
        here = fr.equal(every, fr.where(fr.less(place, 0), fr.add(place, total), place))
        return fr.where(here, combine(held, value), held), None

    return fr.scan(step, graph_line, (fr.astype(places, "int64"), new))[0]


@reads("ScatterElements", "Scatter")
def scatter_elements(call: NodeCall) -> Value:
    axis = call.axis(default=0)
    dims, chosen = (sizes_of(value, "the sizes of what is scattered") for value in call.inputs[:2])
    own = np.indices(chosen)
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    others = sum(own[i] * strides[i] for i in range(len(dims)) if i != axis)
    along = fr.astype(call[1], "int64")
    along = fr.where(fr.less(along, 0), fr.add(along, dims[axis]), along)
    flat = fr.add(fr.multiply(along, strides[axis]), np.asarray(others, np.int64))
    return scattered(call[0], flat, call[2], str(call.attr("reduction", "none")))


@reads("ScatterND")
def scatter_nd(call: NodeCall) -> Value:
    dims, chosen = (sizes_of(value, "the sizes of what is scattered") for value in call.inputs[:2])
    depth = chosen[-1]
    strides = [math.prod(dims[i + 1 :]) for i in range(depth)]
    indices = fr.astype(call[1], "int64")
    indices = fr.where(fr.less(indices, 0), fr.add(indices, np.asarray(dims[:depth], np.int64)), indices)
    first = fr.sum(fr.multiply(indices, np.asarray(strides, np.int64)), -1)
    inner = math.prod(dims[depth:])
    flat = fr.add(fr.expand_dims(first, -1), np.arange(inner, dtype=np.int64))
    return scattered(call[0], flat, call[2], str(call.attr("reduction", "none")))


@reads("OneHot")
def one_hot(call: NodeCall) -> Value:
    found = call.integers(1, "the depth")
    depth = (found or [0])[0]
    off, on = (call[2][0], call[2][1]) if isinstance(call[2], Tensor) else (np.asarray(v) for v in call[2])
    places = fr.astype(call[0], "int64")
    places = fr.where(fr.less(places, 0), fr.add(places, depth), places)
    marks = fr.one_hot(places, depth, "bool")
    made = fr.where(marks, on, off)
    rank = call.rank(0) + 1
    axis = axis_of(int(call.attr("axis", -1)), rank)
    order = (*range(axis), rank - 1, *range(axis, rank - 1))
    return made if axis == rank - 1 else fr.transpose(made, order)


@reads("EyeLike")
def eye_like(call: NodeCall) -> Value:
    dtype = dtype_of(call.attr("dtype")) if "dtype" in call.attrs else call.spec(0).dtype
    sizes = sizes_of(call[0], "its sizes")
    if len(sizes) != 2:
        raise Unreadable(f"an identity is a matrix, and like {call.spec(0)}, there is none")
    rows, columns = sizes
    return np.eye(rows, columns, int(call.attr("k", 0)), dtype)


@reads("Trilu")
def trilu(call: NodeCall) -> Value:
    rows, columns = (fr.shape_of(call[0])[axis] for axis in (-2, -1))
    by = 0 if call[1] is None else fr.reshape(call[1], ())
    distance = fr.subtract(fr.arange(columns), fr.expand_dims(fr.arange(rows), -1))
    upper = call.attr("upper", 1)
    kept = fr.greater_equal(distance, by) if upper else fr.less_equal(distance, by)
    return fr.where(kept, call[0], np.asarray(0, call.spec(0).dtype))


@reads("Pad")
def pad(call: NodeCall) -> Value:
    rank, pads = call.rank(0), call.integers(1, "how much is padded") or []
    axes = call.integers(3, "the axes")
    chosen = [axis_of(axis, rank) for axis in axes] if axes is not None else list(range(rank))
    pairs = [(0, 0)] * rank
    for place, axis in enumerate(chosen):
        pairs[axis] = (pads[place], pads[place + len(chosen)])
    cuts = tuple(slice(-a if a < 0 else None, b if b < 0 else None) for a, b in pairs)
    x = call[0] if all(cut == slice(None) for cut in cuts) else call[0][cuts]
    pairs = [(max(a, 0), max(b, 0)) for a, b in pairs]
    mode = call.attr("mode", "constant")
    if mode != "constant":
        return _from_inside(x, pairs, str(mode))
    value = np.zeros(1, call.spec(0).dtype) if call[2] is None else call.known(2, "the value of what is padded")
    number = value.reshape(-1)[0].item() if value is not None and value.size else 0
    if call.spec(0).dtype == np.bool_:
        return fr.not_equal(fr.pad(fr.astype(x, "uint8"), pairs, int(number)), np.uint8(0))
    return fr.pad(x, pairs, number)


def _from_inside(x: Value, pairs: list[tuple[int, int]], mode: str) -> Value:
    """Padded by what is inside, axis by axis: where each entry comes from is known."""
    modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    if mode not in modes:
        raise Unreadable(f"mode {mode!r} is not supported")
    for axis, both in enumerate(pairs):
        if both == (0, 0):
            continue
        whole = described(x).shape[axis]
        if whole is None:
            raise Unreadable(f"sizes that are padded by {mode!r} must be known")
        x = fr.take(x, np.pad(np.arange(whole), both, modes[mode]), axis)  # type: ignore[call-overload]
    return x


@reads("NonZero")
def nonzero(call: NodeCall) -> Value:
    return fr.stack(list(fr.nonzero(call[0])), 0)


@reads("Compress")
def compress(call: NodeCall) -> Value:
    x, mask = call[0], call[1]
    axis = call.attr("axis")
    if axis is None:
        x, axis = fr.reshape(x, (-1,)), 0
    (places,) = fr.nonzero(mask)
    return fr.take(x, places, axis)


@reads("Unique")
def unique(call: NodeCall) -> Any:
    if "axis" in call.attrs and call.rank(0) != 1:
        raise Unreadable("unique slices along an axis are not supported, only unique entries")
    entries, first, inverse, counts = fr.unique(call[0], True, True, True)
    inverse = fr.reshape(inverse, (-1,))
    if call.attr("sorted", 1):
        return entries, first, inverse, counts
    order = fr.argsort(first)  # as they come
    places = fr.argsort(order)
    return fr.take(entries, order), fr.take(first, order), fr.take(places, inverse), fr.take(counts, order)


@reads("DepthToSpace")
def depth_to_space(call: NodeCall) -> Value:
    batch, channels, height, width = (fr.shape_of(call[0])[i] for i in range(4))
    by = int(call.attr("blocksize"))
    dims = call.shape(0)
    depth = (dims[1] or 0) // by**2 if dims[1] is not None else channels // by**2
    apart: tuple[Any, ...]
    if call.attr("mode", "DCR") == "DCR":
        apart, order = (batch, by, by, depth, height, width), (0, 3, 4, 1, 5, 2)
    else:
        apart, order = (batch, depth, by, by, height, width), (0, 1, 4, 2, 5, 3)
    moved = fr.transpose(fr.reshape(call[0], vector(apart)), order)
    return fr.reshape(moved, vector((batch, depth, height * by, width * by)))


@reads("SpaceToDepth")
def space_to_depth(call: NodeCall) -> Value:
    batch, channels, height, width = (fr.shape_of(call[0])[i] for i in range(4))
    by = int(call.attr("blocksize"))
    apart = fr.reshape(call[0], vector((batch, channels, height // by, by, width // by, by)))
    moved = fr.transpose(apart, (0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4))
    return fr.reshape(moved, vector((batch, channels * by**2, height // by, width // by)))


@reads("ReverseSequence")
def reverse_sequence(call: NodeCall) -> Value:
    time, batch = int(call.attr("time_axis", 0)), int(call.attr("batch_axis", 1))
    rank = call.rank(0)
    if {time, batch} != {0, 1}:
        raise Unreadable("axes of time and batch other than the first two are not supported")
    places = fr.arange(fr.shape_of(call[0])[time])
    lengths = fr.astype(call[1], "int64")
    if time == 0:
        places = fr.expand_dims(places, 1)
    else:
        lengths = fr.expand_dims(lengths, 1)
    order = fr.where(fr.less(places, lengths), fr.subtract(fr.subtract(lengths, 1), places), places)
    order = fr.reshape(order, fr.concat([fr.shape_of(order), np.ones(rank - 2, np.int64)]))
    return fr.take_along_axis(call[0], order, time)
