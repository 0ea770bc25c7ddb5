"""Branches and loops: `If` and `Loop`, whose bodies see what lies around them by its names."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from flowrt.base.spec import Spec
from flowrt.onnx.types import element_of
from flowrt.onnx.writing.writer import AppliedOp, Unwritable, writes, written_body


def _value(name: str, spec: Spec) -> Any:
    return helper.make_tensor_value_info(name, element_of(spec.dtype), spec.dims)


@writes("cond")
def cond(one: AppliedOp) -> list[str]:
    branches = []
    for which in ("if_true", "if_false"):
        plan = one.attrs[which]
        nodes, answers = written_body(one.writer.shared, plan, one.inputs[1:], one.specs[1:])
        outputs = [_value(name, Spec(spec.dtype, None)) for name, spec in zip(answers, one.answers, strict=True)]
        branches.append(helper.make_graph(nodes, f"{one.name}/{which}", [], outputs))
    then, otherwise = branches
    return one.add_many("If", one.inputs[0], outputs=len(one.answers), then_branch=then, else_branch=otherwise)


@writes("loop")
def loop(one: AppliedOp) -> list[str]:
    """What is carried, the number of iterations, and what is stacked; rows of what is scanned are taken by number."""
    attrs, counted = one.attrs, int(one.attrs["counted"])
    carried, scanned = attrs["carried"], attrs["scanned"]
    state = one.inputs[counted : counted + carried]
    rows = one.inputs[counted + carried : counted + carried + scanned]
    captured, captured_specs = one.inputs[counted + carried + scanned :], one.specs[counted + carried + scanned :]
    most = _most(one, rows, counted)
    held_specs = [spec.without_value() for spec in one.answers[:carried]]
    first = None
    if attrs["cond"] is not None:
        nodes, (first,) = written_body(
            one.writer.shared, attrs["cond"], [*state, *captured], [*held_specs, *captured_specs]
        )
        one.writer.nodes += nodes
    body = _body(one, rows, captured, captured_specs, held_specs, most)
    start = [*state, one.constant(0, np.int64)]
    found = one.add_many("Loop", most, first, *start, outputs=len(body.output) - 1, body=body)
    stacks = found[carried + 1 :]
    if attrs["reverse"]:
        last, end, axis, by = one.ints(-1), one.ints(-np.iinfo(np.int64).max), one.ints(0), one.ints(-1)
        stacks = [one.add("Slice", stack, last, end, axis, by) for stack in stacks]
    return [*found[: carried + 1], *stacks]


def _most(one: AppliedOp, rows: Any, counted: int) -> str | None:
    """How many iterations there are at most, as an int64 scalar."""
    bounds = [one.inputs[0]] if counted else []
    if one.attrs["limit"] is not None:
        bounds.append(one.constant(one.attrs["limit"], np.int64))
    if rows:
        bounds.append(one.reshaped(one.add("Shape", rows[0], start=0, end=1), ()))
    return None if not bounds else bounds[0] if len(bounds) == 1 else one.add("Min", *bounds)


def _body(one: AppliedOp, rows: Any, captured: Any, captured_specs: Any, held: list[Spec], most: str | None) -> Any:
    shared, plan = one.writer.shared, one.attrs["body"]
    number, going, count = (shared.fresh(f"{one.name}/{what}") for what in ("number", "going", "count"))
    names = [shared.fresh(f"{one.name}/held") for _ in held]
    inside = type(one.writer)(shared)
    at = number
    if one.attrs["reverse"]:
        if most is None:
            raise Unwritable("what goes backwards must know where it ends")
        last = inside.add("Sub", [most, inside.constant(1, np.int64)], f"{one.name}/last")
        at = inside.add("Sub", [last, number], f"{one.name}/place")
    taken = [inside.add("Gather", [row, at], f"{one.name}/row", axis=0) for row in rows]
    row_specs = [feed.spec for feed in plan.feeds[len(held) : len(held) + len(rows)]]
    nodes, answers = written_body(shared, plan, [*names, *taken, *captured], [*held, *row_specs, *captured_specs])
    inside.nodes += nodes
    following = inside.add("Add", [count, inside.constant(1, np.int64)], f"{one.name}/next")
    more = inside.add("Identity", [inside.constant(True)], f"{one.name}/more")
    if one.attrs["cond"] is not None:
        tests, (more,) = written_body(
            shared, one.attrs["cond"], [*answers[: len(held)], *captured], [*held, *captured_specs]
        )
        inside.nodes += tests
    inputs = [_value(number, Spec("int64", ())), _value(going, Spec("bool", ()))]
    inputs += [_value(name, spec) for name, spec in zip(names, held, strict=True)]
    inputs.append(_value(count, Spec("int64", ())))
    stacked = [Spec(spec.dtype, None if spec.dims is None else spec.dims[1:]) for spec in one.answers[len(held) + 1 :]]
    outputs = [_value(more, Spec("bool", ()))]
    outputs += [_value(name, spec) for name, spec in zip(answers[: len(held)], held, strict=True)]
    outputs.append(_value(following, Spec("int64", ())))
    outputs += [_value(name, spec) for name, spec in zip(answers[len(held) :], stacked, strict=True)]
    return helper.make_graph(inside.nodes, f"{one.name}/body", inputs, outputs)
