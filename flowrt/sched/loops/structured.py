"""Loops and branches carried out one body at a time: what runs them where they are not part of a tape.

Law: this file knows how often and on what a body is computed; ``run`` knows how that is done. A loop holds what it
carries, reads a row of each scanned input per iteration, and stacks what its body answers beyond what it carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, spec_of
from flowrt.op import lookup

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

Array: TypeAlias = np.ndarray[Any, Any]
Compute: TypeAlias = "Callable[[PlanNode, Sequence[Array]], Sequence[Array]]"
Run: TypeAlias = "Callable[[Plan, Sequence[Array]], Sequence[Array]]"
Empty: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], Array]"

LOOP, COND = "loop", "cond"
STATEFUL_LOOP, STATEFUL_COND = "stateful_loop", "stateful_cond"
STRUCTURED = frozenset({LOOP, COND, STATEFUL_LOOP, STATEFUL_COND})
PURE_STRUCTURED = frozenset({LOOP, COND})
STACKING = frozenset({"no_rows", "append_row", "append_rows", "stack_rows"})
"""Ops whose values are `StackedRows`, or are made of them."""
PARTING = frozenset({"part_of", "join_parts"})
"""Ops that deal rows out to parts and join them again: a step's values decide their sizes."""


@dataclass(frozen=True, slots=True)
class StackedRows:
    """The rows that a loop has stacked so far. Those that come of each other share one list, as long as each is
    followed by one: so a row more costs the same, however many there are. ``shape`` is a row's, where a step has told
    that of rows of which there may be none."""

    shared: list[Array] = field(default_factory=list)
    count: int = 0
    shape: tuple[int, ...] | None = None

    def and_rows(self, rows: Sequence[Array], shape: tuple[int, ...] | None = None) -> StackedRows:
        """These rows, and ``rows`` after them."""
        shared = self.shared if len(self.shared) == self.count else self.shared[: self.count]
        shared.extend(rows)
        return StackedRows(shared, self.count + len(rows), self.shape if shape is None else shape)

    def stacked(self, spec: Spec, length: int, reverse: bool, empty: Empty = np.empty) -> Array:
        """The rows as one array of that ``length``, zeros where there are none."""
        rows = self.shared[: self.count]
        shape = rows[0].shape if rows else self.shape
        if shape is None:
            shape = tuple(n or 0 for n in spec.shape[1:])
        if any(row.shape != shape for row in rows):
            raise SpecError(
                f"its iterations stack rows of different shapes: {sorted({str(list(r.shape)) for r in rows})}; carry "
                "one tensor of the largest shape, and take parts of it, x[:n] (gradients go through that, too)"
            )
        out = empty((length, *shape), spec.dtype)
        for number, row in enumerate(reversed(rows) if reverse else rows):
            out[number] = row
        out[len(rows) :] = 0
        return out


def grows(node: PlanNode) -> bool:
    """Whether a loop stacks rows and only its condition says how many: its outputs' sizes are values of the step."""
    attrs = node.attrs
    if node.op not in (LOOP, STATEFUL_LOOP) or attrs["limit"] is not None or attrs["scanned"]:
        return False
    return bool(len(attrs["body"].fetches) > attrs["carried"])


def interpret(op: str, inputs: Sequence[Array], attrs: Mapping[str, Any], run: Run) -> tuple[Array, ...]:
    """The outputs of a loop or branch of which ``run`` answers what a body does."""
    if op in (COND, STATEFUL_COND):
        taken = attrs["if_true"] if bool(inputs[0]) else attrs["if_false"]
        return tuple(run(taken, inputs[1:]))
    return _run_loop(op, inputs, attrs, run)


def run_body(body: Plan, inputs: Sequence[Array], compute: Compute) -> list[Array]:
    """What ``body`` answers for ``inputs``, one node after another, each of which ``compute`` carries out."""
    values = list(inputs)
    for node in body.nodes:
        values += (node.attrs["value"],) if node.op == "constant" else compute(node, [values[v] for v in node.inputs])
    return [values[v] for v in body.fetches]


def _run_loop(op: str, inputs: Sequence[Array], attrs: Mapping[str, Any], run: Run) -> tuple[Array, ...]:
    carried, scanned, counted = attrs["carried"], attrs["scanned"], int(attrs["counted"])
    state: Sequence[Array] = inputs[counted : counted + carried]
    rows = inputs[counted + carried : counted + carried + scanned]
    captured = inputs[counted + carried + scanned :]
    body, cond, limit = attrs["body"], attrs["cond"], attrs["limit"]
    iterations = most_iterations(attrs, [len(row) for row in rows], int(inputs[0]) if counted else None)
    stacks = [StackedRows() for _ in body.fetches[carried:]]
    done = 0
    while iterations is None or done < iterations:
        if cond is not None and not bool(run(cond, [*state, *captured])[0]):
            break
        at = iterations - 1 - done if attrs["reverse"] and iterations is not None else done
        answers = run(body, [*state, *(row[at] for row in rows), *captured])
        state = answers[:carried]
        stacks = [stack.and_rows([answer]) for stack, answer in zip(stacks, answers[carried:], strict=True)]
        done += 1
    length = len(rows[0]) if rows else done if limit is None else limit
    specs = stack_specs(op, [spec_of(a) for a in inputs], attrs) if stacks else ()
    made = [stack.stacked(spec, length, attrs["reverse"]) for stack, spec in zip(stacks, specs, strict=True)]
    return (*state, np.array(done, np.int64), *made)


def stack_specs(op: str, inputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Sequence[Spec]:
    """The specs of what a loop stacks, as far as they are known: where these inputs fit no iteration, of what makes
    nothing of them what the body says."""
    carried, scanned, counted, body = attrs["carried"], attrs["scanned"], int(attrs["counted"]), attrs["body"]
    try:
        return lookup(op).infer(inputs, attrs)[carried + 1 :]
    except SpecError:
        specs = [spec.without_value() for spec in inputs[counted:]]
        length = attrs["limit"]
        for place in range(carried, carried + scanned):
            dtype, dims = specs[place].dtype, specs[place].dims
            length, specs[place] = (None, Spec(dtype, None)) if not dims else (dims[0], Spec(dtype, dims[1:]))
        rows = _supposed_answers(body, specs)[carried:]
        return [Spec(row.dtype, None if row.dims is None else (length, *row.dims)) for row in rows]


def _supposed_answers(body: Plan, inputs: Sequence[Spec]) -> list[Spec]:
    """The specs of what a body answers, of whose nodes these inputs need not fit all."""
    specs = list(inputs)
    for node in body.nodes:
        specs += _supposed(node, [specs[value] for value in node.inputs])
    return [specs[value] for value in body.fetches]


def _supposed(node: PlanNode, inputs: Sequence[Spec]) -> Sequence[Spec]:
    """The specs of what a node makes of inputs of these, or, where they do not fit it, would make of others."""
    attrs, outputs = node.attrs, node.outputs
    try:
        return lookup(node.op).infer(inputs, attrs)
    except SpecError:
        if node.op in (COND, STATEFUL_COND):
            both = [_supposed_answers(attrs[name], inputs[1:]) for name in ("if_true", "if_false")]
            each = zip(*both, outputs, strict=True)
            return [one.without_value() if one.dims == two.dims else out for one, two, out in each]
        if node.op in (LOOP, STATEFUL_LOOP):
            return [*outputs[: attrs["carried"] + 1], *stack_specs(node.op, inputs, attrs)]
        return outputs


def most_iterations(attrs: Mapping[str, Any], lengths: Sequence[int], count: int | None) -> int | None:
    """How many iterations a loop takes at most, None where only its condition ends it."""
    bounds = [n for n in (*lengths[:1], count, attrs["limit"]) if n is not None]
    return max(min(bounds), 0) if bounds else None


def longest_seconds(attrs: Mapping[str, Any], rows: int | None, iteration: float, longest: float) -> float:
    """What a loop may come to, beside what it is predicted to, whose iterations take ``iteration`` and at most
    ``longest``.

    Zero where rows count the iterations of it and of all loops inside; infinite where there is no telling.
    """
    if attrs["cond"] is None and not attrs["counted"] and rows is not None and not longest:
        return 0.0
    most = most_iterations(attrs, [] if rows is None else [rows], None)
    return math.inf if most is None else most * max(iteration, longest)
