"""Sums, means and their like over axes; running sums; orders."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from flowrt.base.spec import Spec, is_float, is_half, normal_axes
from flowrt.onnx.types import element_of
from flowrt.onnx.writing.elementwise import holds
from flowrt.onnx.writing.writer import AppliedOp, Unwritable, writes

CHANNELS_FIRST = (0, 2, 3, 1)  # where each axis of images is if their channels are first


def reduced(one: AppliedOp, op: str, x: str, axis: Any, keep: bool) -> str:
    """A reduction of a value that has the node's axes, or is a vector of all entries."""
    if axis is None:
        return one.add(op, x, keepdims=int(keep))
    axes = normal_axes(axis, one.rank())
    return one.add(op, x, one.ints(*axes), keepdims=int(keep)) if axes else x


def _how(one: AppliedOp) -> tuple[Any, bool]:
    return one.attrs["axis"], bool(one.attrs["keepdims"])


def _as_it_lies(one: AppliedOp, wide: Any) -> tuple[str, Any]:
    """What is reduced and its axes: of images their places, and perhaps their examples, wherever the channels are."""
    x, (axis, keep) = one.inputs[0], _how(one)
    images = one.writer.shared.channels_first.get(x)
    if images is None or axis is None or keep or one.specs[0].dtype != wide:
        return one.input_as(wide), axis
    axes = normal_axes(axis, one.rank())
    if not {1, 2} <= set(axes):
        return x, axis
    return images, tuple(CHANNELS_FIRST[n] for n in axes)


@writes("sum", "prod", "mean")
def total(one: AppliedOp) -> str:
    op = {"sum": "ReduceSum", "prod": "ReduceProd", "mean": "ReduceMean"}[one.op]
    x, axis = _as_it_lies(one, one.out.dtype)
    return reduced(one, op, x, axis, bool(one.attrs["keepdims"]))


@writes("max", "min")
def largest(one: AppliedOp) -> str:
    op = "ReduceMax" if one.op == "max" else "ReduceMin"
    if one.out.dtype == np.bool_:
        return one.cast(reduced(one, op, one.input_as(np.uint8), *_how(one)), np.uint8, np.bool_)
    dtype = one.out.dtype
    wide = np.dtype(np.int32) if dtype in (np.int16, np.uint16) else np.dtype(np.int64) if dtype == np.uint32 else dtype
    return one.cast(reduced(one, op, one.input_as(wide), *_how(one)), wide, dtype)


@writes("all", "any")
def whether(one: AppliedOp) -> str:
    """As the product, or the sum, of what is 0 or 1, which is also right of nothing."""
    x = one.cast(holds(one, 0), np.bool_, np.int32)
    made = reduced(one, "ReduceProd" if one.op == "all" else "ReduceSum", x, *_how(one))
    return one.add("Greater", made, one.constant(0, np.int32))


@writes("moments")
def moments(one: AppliedOp) -> list[str]:
    keep = bool(one.attrs["keepdims"])
    x, axis = _as_it_lies(one, one.out.dtype)
    middle = reduced(one, "ReduceMean", x, axis, True)
    centred = one.add("Sub", x, middle)
    spread = reduced(one, "ReduceMean", one.add("Mul", centred, centred), axis, keep)
    return [middle if keep else reduced(one, "ReduceMean", x, axis, False), spread]


@writes("sum_to")
def sum_to(one: AppliedOp) -> str:
    given, wanted = one.specs[0].dims, one.out.dims
    if given is None or wanted is None or None in wanted or None in given:
        raise Unwritable("it is summed where all sizes are known")
    before = len(given) - len(wanted)
    axes = [*range(before), *(before + i for i, n in enumerate(wanted) if n == 1 and given[before + i] != 1)]
    if not axes:
        return one.inputs[0]
    made = one.add("ReduceSum", one.inputs[0], one.ints(*axes), keepdims=1)
    return one.reshaped(made, [n or 0 for n in wanted])


@writes("argmax", "argmin")
def arg(one: AppliedOp) -> str:
    op, axis, keep = one.op.replace("arg", "Arg").replace("m", "M"), one.attrs["axis"], bool(one.attrs["keepdims"])
    given = one.specs[0].dtype
    x = one.input_as(np.float32 if is_half(given) else np.int32) if given.itemsize < 4 else one.inputs[0]
    if given in (np.uint32, np.uint64):
        raise Unwritable(f"runtimes have no order for {given}")
    if axis is not None:
        return one.add(op, x, axis=axis % one.rank(), keepdims=int(keep))
    made = one.add(op, one.reshaped(x, (-1,)), axis=0, keepdims=0)
    return one.reshaped(made, [1] * one.rank()) if keep else made


@writes("cumsum")
def cumsum(one: AppliedOp) -> str:
    axis = 0 if one.attrs["axis"] is None else int(one.attrs["axis"]) % one.rank()
    dtype = one.out.dtype if one.out.dtype != np.uint64 else np.dtype(np.int64)
    x = one.cast(one.inputs[0], one.specs[0].dtype, dtype)
    made = one.add("CumSum", x, one.constant(axis, np.int64), reverse=int(one.attrs["reverse"]))
    return one.cast(made, dtype, one.out.dtype)


@writes("cumprod")
def cumprod(one: AppliedOp) -> str:
    """A scan along the axis."""
    dims, axis = one.out.dims, 0 if one.attrs["axis"] is None else int(one.attrs["axis"]) % one.rank()
    if dims is None or None in dims:
        raise Unwritable("the sizes of what is multiplied up must be known")
    if 0 in dims:
        return one.input_as(one.out.dtype)
    beside = [n for i, n in enumerate(dims) if i != axis]
    body = _running(one.out, beside)
    start = one.constant(np.ones([n or 0 for n in beside], one.out.dtype))
    x, backward = one.input_as(one.out.dtype), int(one.attrs["reverse"])
    _, found = one.add_many(
        "Scan",
        start,
        x,
        outputs=2,
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_output_axes=[axis],
        scan_input_directions=[backward],
        scan_output_directions=[backward],
    )
    return found


def _running(out: Spec, beside: Any) -> Any:
    kind = element_of(out.dtype)
    values = [helper.make_tensor_value_info(name, kind, beside) for name in ("held", "now", "next", "row")]
    nodes = [helper.make_node("Mul", ["held", "now"], ["next"]), helper.make_node("Identity", ["next"], ["row"])]
    return helper.make_graph(nodes, "product", values[:2], values[2:])


def _ordered(one: AppliedOp, axis: int | None, descending: bool, count: str | None) -> list[str]:
    """The entries along an axis in order, and their places; bools and small integers as larger ones."""
    dtype = one.specs[0].dtype
    usual = np.dtype(np.float32 if is_half(dtype) else np.int64)
    wide = dtype if dtype in (np.int64, np.float32, np.float64, np.int32) else usual
    if dtype == np.uint64:
        raise Unwritable("runtimes have no order for uint64")
    x = one.input_as(wide)
    if axis is None:
        x, axis = one.reshaped(x, (-1,)), 0
        size = one.add("Shape", x)
    else:
        axis = axis % one.rank()
        size = count or one.add("Shape", x, start=axis, end=axis + 1)
    values, places = one.add_many("TopK", x, size, outputs=2, axis=axis, largest=int(descending), sorted=1)
    return [one.cast(values, wide, dtype), places]


@writes("sort", "argsort")
def sort(one: AppliedOp) -> str:
    found = _ordered(one, one.attrs["axis"], bool(one.attrs["descending"]), None)
    return found[0] if one.op == "sort" else found[1]


@writes("top_k")
def top_k(one: AppliedOp) -> list[str]:
    return _ordered(one, -1, True, one.ints(one.attrs["k"]))


@writes("searchsorted")
def searchsorted(one: AppliedOp) -> str:
    """How many entries stand before each value; NaN stands behind all numbers."""
    lines, values = one.inputs
    op = "Less" if one.attrs["side"] == "left" else "LessOrEqual"
    if one.specs[0].dtype == np.bool_:
        lines, values = (one.input_as(np.uint8, n) for n in (0, 1))
    column = one.add("Unsqueeze", values, one.ints(-1))
    row = one.add("Unsqueeze", lines, one.ints(-2)) if one.rank() > 1 else lines
    before = one.add(op, row, column)
    if is_float(one.specs[0].dtype):
        behind = one.add("IsNaN", column)
        number = one.add("Not", one.add("IsNaN", row))
        before = one.add("Or", before, one.add("And", behind, number) if op == "Less" else behind)
    return one.add("ReduceSum", one.cast(before, np.bool_, np.int64), one.ints(-1), keepdims=0)
