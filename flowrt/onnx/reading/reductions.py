"""Sums, means and their like over axes; the largest and first along one; running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float
from flowrt.onnx.reading.elementwise import rounded_once
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, axis_of, known, reads
from flowrt.ops.inference import described

Reduction = Callable[[Any, Any, bool], Any]


def _in_floats(x: Any) -> Any:
    return x if is_float(described(x).dtype) else fr.astype(x, "float64")


COMPOSED: dict[str, Reduction] = {
    "ReduceL1": lambda x, axis, keep: fr.sum(fr.abs(x), axis, keep),
    "ReduceL2": lambda x, axis, keep: fr.sqrt(_in_floats(fr.sum(fr.square(x), axis, keep))),
    "ReduceLogSum": lambda x, axis, keep: fr.log(_in_floats(fr.sum(x, axis, keep))),
    "ReduceLogSumExp": lambda x, axis, keep: fr.logsumexp(_in_floats(x), axis, keep),
    "ReduceSumSquare": lambda x, axis, keep: fr.sum(fr.square(x), axis, keep),
}
REDUCTIONS: dict[str, Reduction] = {
    **COMPOSED,
    "ReduceMax": fr.max,
    "ReduceMean": fr.mean,
    "ReduceMin": fr.min,
    "ReduceProd": fr.prod,
    "ReduceSum": fr.sum,
}


def _reduce(call: NodeCall) -> Value:
    given = call.attr("axes")
    axes = call.integers(1, "the axes") if given is None else list(given)
    if not axes:
        if call.attr("noop_with_empty_axes", 0):
            return fr.identity(call[0]) if call.op in ("ReduceMax", "ReduceMin", "ReduceSum") else _over(call, ())
        return _over(call, None)
    return _over(call, tuple(axes))


def _over(call: NodeCall, axes: tuple[int, ...] | None) -> Value:
    dtype = call.spec(0).dtype
    keep = bool(call.attr("keepdims", 1))
    if axes == ():  # each entry is its own sum
        found = fr.squeeze(REDUCTIONS[call.op](fr.expand_dims(call[0], 0), 0, True), 0)
    elif call.op in ("ReduceMax", "ReduceMin", "ReduceLogSumExp") and 0 in (call.spec(0).dims or ()):
        return _of_nothing(call, axes, keep)
    elif dtype == np.bool_:  # the largest bool says whether there is one
        found = (fr.any if call.op == "ReduceMax" else fr.all)(call[0], axes, keep)
    else:
        found = REDUCTIONS[call.op](call[0], axes, keep)
    return found if described(found).dtype == dtype else fr.astype(found, dtype.name)


def _of_nothing(call: NodeCall, axes: tuple[int, ...] | None, keep: bool) -> Value:
    """The largest or least of no entries: that than which none is less."""
    dtype, largest = call.spec(0).dtype, call.op != "ReduceMin"
    if is_float(dtype):
        bound: Any = -np.inf if largest else np.inf
    elif dtype == np.bool_:
        bound = not largest
    else:
        bound = np.iinfo(dtype).min if largest else np.iinfo(dtype).max
    shape = described(fr.sum(call[0], axes, keep)).dims
    if shape is None or None in shape:
        raise Unreadable("the largest of no entries, of sizes that only a step knows")
    return fr.full(shape, np.asarray(bound, dtype), dtype.name)


reads(*REDUCTIONS)(_reduce)
reads(*COMPOSED)(rounded_once(_reduce))


@reads("ArgMax", "ArgMin")
def arg(call: NodeCall) -> Value:
    axis, keep = call.axis(default=0), bool(call.attr("keepdims", 1))
    function = fr.argmax if call.op == "ArgMax" else fr.argmin
    if not call.attr("select_last_index", 0):
        return function(call[0], axis, keep)
    found = function(fr.flip(call[0], axis), axis, keep)
    return fr.subtract(fr.subtract(fr.shape_of(call[0])[axis], 1), found)


@reads("CumSum", "CumProd")
def running(call: NodeCall) -> Value:
    x, dtype, reverse = call[0], call.spec(0).dtype, bool(call.attr("reverse", 0))
    named = call.integers(1, "the axis")
    if not named:
        raise Unreadable("it names no axis")
    rank = call.rank(0)
    axis = axis_of(named[0], rank)
    run = fr.cumsum if call.op == "CumSum" else fr.cumprod
    if call.attr("exclusive", 0):  # each without itself: all are one place further
        first = 0 if call.op == "CumSum" else 1
        whole = [(0, 0)] * rank
        kept: list[Any] = [slice(None)] * rank
        whole[axis], kept[axis] = ((0, 1), slice(1, None)) if reverse else ((1, 0), slice(None, -1))
        x = fr.pad(_part(x, tuple(kept)), whole, first)
    found = run(x, axis, reverse)
    return found if described(found).dtype == dtype else fr.astype(found, dtype.name)


def _part(x: Any, key: tuple[Any, ...]) -> Any:
    return np.ascontiguousarray(x[key]) if isinstance(x, np.ndarray) else x[key]


@reads("TopK")
def top_k(call: NodeCall) -> Any:
    given = known(call[1])
    count = None if given is None else [int(n) for n in given.reshape(-1)]
    if count is not None and (len(count) != 1 or count[0] < 0):
        raise Unreadable(f"k is one integer from 0 up, not {', '.join(map(str, count)) or 'none'}")
    axis, rank = call.axis(), call.rank(0)
    order = [*(i for i in range(rank) if i != axis), axis]
    back = tuple(int(n) for n in np.argsort(order))
    x = call[0] if axis == rank - 1 else fr.transpose(call[0], tuple(order))
    largest = bool(call.attr("largest", 1))
    if largest and count is not None:
        both = fr.top_k(x, count[0])
    else:
        most = fr.reshape(call[1], ()) if count is None else count[0]
        indices = fr.argsort(x, -1, largest)[..., :most]
        both = fr.take_along_axis(x, indices, -1), fr.identity(indices)
    return both if axis == rank - 1 else tuple(fr.transpose(one, back) for one in both)


@reads("Hardmax")
def hardmax(call: NodeCall) -> Value:
    axis, rank = call.axis(), call.rank(0)
    depth = call.shape(0)[axis]
    if depth is None:
        raise Unreadable("the size of its axis must be known")
    marks = fr.one_hot(fr.argmax(call[0], axis), depth, call.spec(0).dtype.name)
    order = [*range(axis), rank - 1, *range(axis, rank - 1)]
    return marks if axis == rank - 1 else fr.transpose(marks, tuple(order))
