"""How many iterations a loop takes whose condition does nothing but compare a counter with a number.

Law: what is told holds in every run of the step. A counter is an integer scalar that begins as a constant, that each
iteration adds a constant to, and that leaves its dtype's range in no iteration. Such a loop has a limit in place of its
condition, so that what it stacks, as its gradient needs it to, has a length that is known before it runs. Inside a
body, which may not be run at all, a loop that would stack much is left as it is: memory for what is known is taken in
any case.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.passes.step import FED, StepGraph, StepNode

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.base.spec import Spec

MIRRORED = {"less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal"}


MOST_STACKED = 16 << 20
"""Bytes that a loop inside a body may stack."""


def count_iterations(step: StepGraph, *, inside: bool = False) -> StepGraph:
    """``step``, or one ``inside`` a body, whose loops have a limit for a condition where that says as much."""
    found: dict[int, StepNode] = {}
    for node in step.nodes.values():
        iterations = _known_iterations(step, node)
        if iterations is not None and not (inside and _stacked_bytes(node, iterations) > MOST_STACKED):
            found[node.id] = replace(node, attrs={**node.attrs, "cond": None, "limit": iterations})
    return replace(step, nodes={**step.nodes, **found}) if found else step


def _stacked_bytes(node: StepNode, iterations: int) -> float:
    carried: Any = node.attrs["carried"]
    return iterations * sum(_row_bytes(spec) for spec in node.outputs[carried + 1 :])


def _row_bytes(stack: Spec) -> float:
    row = (None,) if stack.dims is None else stack.dims[1:]
    return math.inf if None in row else math.prod(n or 0 for n in row) * stack.dtype.itemsize


def _known_iterations(step: StepGraph, node: StepNode) -> int | None:
    attrs: Any = node.attrs
    if node.op.name != "loop" or attrs["cond"] is None or attrs["limit"] is not None or attrs["counted"]:
        return None
    test, body, carried = attrs["cond"], attrs["body"], attrs["carried"]
    compared = _maker(test, test.fetches[0])
    if compared is None or compared.op not in MIRRORED:
        return None
    name, (counter, bound) = compared.op, compared.inputs
    if bound < carried:
        name, counter, bound = MIRRORED[name], bound, counter
    if counter >= carried or test.feeds[counter].spec.dtype.kind not in "iu":
        return None
    first, step_by = _constant(step, node, counter), _step_of(step, node, body, counter)
    limit = _number(step, node, test, bound, attrs["scanned"])
    if first is None or step_by is None or limit is None:
        return None
    iterations, held = _iterations(name, first, step_by, limit), np.iinfo(test.feeds[counter].spec.dtype)
    if iterations is None or iterations > np.iinfo(np.int64).max:
        return None
    return iterations if held.min <= first + iterations * step_by <= held.max else None


def _iterations(name: str, first: int, step: int, limit: int) -> int | None:
    """How often ``first``, growing by ``step``, compares so with ``limit`` until it fails; None where it never does."""
    if name.startswith("greater"):
        first, step, limit = -first, -step, -limit
    if name.endswith("equal"):
        limit += 1
    if first >= limit:
        return 0
    return -((first - limit) // step) if step > 0 else None


def _step_of(step: StepGraph, node: StepNode, body: Plan, counter: int) -> int | None:
    """What an iteration adds to the counter."""
    maker = _maker(body, body.fetches[counter])
    if maker is None or maker.op not in ("add", "subtract") or counter not in maker.inputs:
        return None
    one, other = maker.inputs
    if maker.op == "add" and other == counter:
        one, other = other, one
    found = _number(step, node, body, other, 0) if one == counter else None
    return -found if found is not None and maker.op == "subtract" else found


def _number(step: StepGraph, node: StepNode, body: Plan, value: int, skipped: int) -> int | None:
    """The integer scalar that a value of a body is in every iteration; its feeds lack so many of the loop's inputs,
    between what is carried and what is captured."""
    if value < len(body.feeds):
        carried: Any = node.attrs["carried"]
        return None if value < carried else _constant(step, node, value + skipped)
    maker = _maker(body, value)
    return None if maker is None or maker.op != "constant" else _integer(maker.attrs["value"])


def _maker(body: Plan, value: int) -> PlanNode | None:
    """The node of a body that makes a value, if it makes nothing else."""
    starts = body.value_starts()
    number = next((n for n, start in enumerate(starts[:-1]) if start == value), None)
    return body.nodes[number] if number is not None and len(body.nodes[number].outputs) == 1 else None


def _constant(step: StepGraph, node: StepNode, position: int) -> int | None:
    """The integer scalar that an input of the loop is in every run."""
    source, _ = node.inputs[position]
    maker = None if source == FED else step.nodes[source]
    return None if maker is None or maker.op.name != "constant" else _integer(maker.attrs["value"])


def _integer(value: Any) -> int | None:
    array = np.asarray(value)
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else None
