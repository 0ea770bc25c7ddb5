"""Branches, loops and scans: bodies are read as functions of flowrt's `cond`, `while_loop` and `scan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.errors import SpecError
from flowrt.onnx.reading.reader import BODIED, NodeCall, Unreadable, Value, axis_of, known
from flowrt.onnx.types import spec_from
from flowrt.ops.inference import described
from flowrt.ops.loops import stacking_loop


def _scalar(value: Value) -> Any:
    found = known(value)
    return fr.reshape(value, ()) if found is None else found.reshape(())


def choice(call: NodeCall, values: Mapping[str, Value]) -> Any:
    """``If``: where the condition is known already, that branch alone is read."""
    decides = _scalar(call[0])
    branches = {True: call.attr("then_branch"), False: call.attr("else_branch")}
    reader = call.reader
    if isinstance(decides, np.ndarray):
        return reader.body(branches[bool(decides)], values, ())

    def branch(which: bool) -> Any:
        return tuple(reader.tensor(value) for value in reader.body(branches[which], values, ()))

    with reader.graph_in_force():
        return fr.cond(reader.tensor(decides), lambda: branch(True), lambda: branch(False))


def loop(call: NodeCall, values: Mapping[str, Value]) -> Any:
    """``Loop``: what it carries, then what its iterations answer beyond that, stacked."""
    body, reader = call.attr("body"), call.reader
    most, first = call[0], call[1]
    start = [reader.tensor(value) for value in call.inputs[2:]]
    carried = len(start)
    goes_on = reader.tensor(np.asarray(True) if first is None else _scalar(first))
    stacked = len(body.output) - 1 - carried
    if stacked < 0:
        raise Unreadable(f"its body answers {len(body.output)} values, and it carries {carried}")

    def iterate(state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        number, going, *held = state
        answers = reader.body(body, values, [number, going, *held])
        following = fr.add(number, np.int64(1))
        more = fr.reshape(reader.tensor(answers[0]), ())
        rest = [reader.tensor(value) for value in answers[1:]]
        return [following, more, *rest[:carried]], rest[carried:]

    count = None if most is None else _scalar(fr.astype(most, "int64"))
    begin = [reader.tensor(np.asarray(0, np.int64)), goes_on, *start]
    with reader.graph_in_force():
        try:
            found, stacks = stacking_loop(iterate, lambda state: state[1], begin, count)
        except SpecError:  # what it carries may change its shape
            shapes = [(), (), *[_shape(value, held) for value, held in zip(body.input[2:], start, strict=True)]]
            found, stacks = stacking_loop(iterate, lambda state: state[1], begin, count, shapes)
    return [*found[2:], *stacks]


def _shape(value: Any, first: Any) -> Any:
    """What a body says of the shape of what it carries; where it says nothing, its rank may change, too."""
    try:
        dims = spec_from(value).dims
    except SpecError:
        dims = None
    mine = described(first).dims
    if dims is None or mine is None or len(dims) != len(mine):
        return None if mine is None else (None,) * len(mine)
    return tuple(m if m == n else None for m, n in zip(mine, dims, strict=True))


def scan(call: NodeCall, values: Mapping[str, Value]) -> Any:
    """``Scan``: states are carried along an axis of what is scanned."""
    body, reader = call.attr("body"), call.reader
    count = int(call.attr("num_scan_inputs"))
    states = [reader.tensor(value) for value in call.inputs[: len(call.inputs) - count]]
    rows = list(call.inputs[len(states) :])
    axes = call.attr("scan_input_axes", [0] * count)
    directions = call.attr("scan_input_directions", [0] * count)
    for n, (axis, backward) in enumerate(zip(axes, directions, strict=True)):
        rows[n] = reader.tensor(_first(rows[n], axis))
        if backward:
            rows[n] = fr.flip(rows[n], 0)

    def step(held: Any, now: Any) -> tuple[Any, Any]:
        answers = [reader.tensor(value) for value in reader.body(body, values, [*held, *now])]
        return tuple(answers[: len(held)]), tuple(answers[len(held) :])

    with reader.graph_in_force():
        last, stacks = fr.scan(step, tuple(states), tuple(rows))
    out_axes = call.attr("scan_output_axes", [0] * len(stacks))
    out_directions = call.attr("scan_output_directions", [0] * len(stacks))
    found = []
    for stack, axis, backward in zip(stacks, out_axes, out_directions, strict=True):
        rank = described(stack).rank
        turned = fr.flip(stack, 0) if backward else stack
        axis = axis_of(axis, rank)
        found.append(turned if axis == 0 else fr.transpose(turned, (*range(1, axis + 1), 0, *range(axis + 1, rank))))
    return [*last, *found]


def _first(x: Value, axis: int) -> Value:
    """``x`` with that axis before the others."""
    rank = described(x).rank
    axis = axis_of(axis, rank)
    return x if axis == 0 else fr.transpose(x, (axis, *(i for i in range(rank) if i != axis)))


BODIED.update({"If": choice, "Loop": loop, "Scan": scan})
