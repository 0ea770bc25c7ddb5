"""Which loops are of scalars alone, and the one launch that each comes to.

Law: pure. A loop is one where all it carries, scans by the row, stacks and captures are scalars, and its condition and
body are made of elementwise ops, constants, what passes scalars on, and branches of such: both are computed, since
nothing in them can fail, and one is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels.expression import Expression, express, is_scalar_function
from flowrt.kernels.launch import Application
from flowrt.kernels.scalar_loop import ScalarLoopStep, ScalarProgram
from flowrt.kernels.table import ALIASES, View, broadcast, find_kernel
from flowrt.sched.structured import COND, most_turns

if TYPE_CHECKING:
    from flowrt.plan import Plan, PlanNode
    from flowrt.spec import Spec

SECONDS_PER_MEMBER = 2e-9
MOST_MEMBERS = 256
"""A longer body is worth its launches, and would take long to compile."""


def apply_scalar_loop(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Application | None:
    """The launch that computes a loop of scalars, or None where it is of anything else."""
    carried, scanned, counted = (int(attrs[name]) for name in ("carried", "scanned", "counted"))
    rows = inputs[counted + carried : counted + carried + scanned]
    captured = inputs[counted + carried + scanned :]
    ranks = [len(s.shape) for s in (*inputs[counted : counted + carried], *captured)]
    ranks += [len(s.shape) - 1 for s in (*rows, *outputs[carried + 1 :])]
    members = len(attrs["body"].nodes) + (0 if attrs["cond"] is None else len(attrs["cond"].nodes))
    if any(ranks) or members > MOST_MEMBERS:
        return None
    begin = [s.dtype for s in inputs[counted : counted + carried]]
    made = _program(attrs, begin, [s.dtype for s in rows], [s.dtype for s in captured])
    if made is None:
        return None
    program, constants = made
    first, count = len(inputs), len(inputs) + len(outputs)
    turns = rows[0].concrete[0] if rows else None
    longest = longest_seconds(attrs, turns, members * SECONDS_PER_MEMBER, 0.0)
    step = ScalarLoopStep(
        program,
        tuple(range(count)),
        len(inputs),
        tuple(View.dense((spec.size,)) for spec in (*inputs, *outputs)),
        first=tuple(range(counted, counted + carried)),
        out=tuple(range(first, first + carried)),
        scanned=tuple(range(counted + carried, counted + carried + scanned)),
        stacked=tuple(range(first + carried + 1, count)),
        captured=tuple(range(counted + carried + scanned, len(inputs))),
        constants=constants,
        done=first + carried,
        limit=attrs["limit"],
        count=0 if counted else None,
        rows=turns,
        reverse=attrs["reverse"],
    )
    return Application((step,), (), longest_seconds=longest)


def longest_seconds(attrs: Mapping[str, Any], rows: int | None, turn: float, longest: float) -> float:
    """What a loop may come to, beside what it is predicted to, whose turns take ``turn`` and at most ``longest``.

    Zero where the turns of it and of all loops inside are as many in every run; infinite where there is no telling.
    """
    varies = attrs["counted"] or attrs["cond"] is not None
    if not varies and not longest:
        return 0.0
    most = most_turns(attrs, [] if rows is None else [rows], None)
    return math.inf if most is None else most * max(turn, longest)


@dataclass(slots=True)
class _Walk:
    """A body as an expression in the making: the numbers of its values among (inputs, constants, members)."""

    body: Plan
    numbers: dict[int, Any] = field(default_factory=dict)
    constants: list[np.ndarray[Any, Any]] = field(default_factory=list)
    members: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)
    specs: Sequence[Spec] = ()

    def __post_init__(self) -> None:
        self.specs = self.body.value_specs()

    def walk(self) -> bool:
        """Follow the body; False where something in it is not of scalars."""
        self.numbers = {i: ("input", i) for i in range(len(self.body.feeds))}
        return self._follow() and len(self.members) <= MOST_MEMBERS

    def _follow(self) -> bool:
        return all(map(self._node, self.body.nodes, self.body.value_starts()))

    def _branch(self, node: PlanNode, value: int) -> bool:
        """Both branches, and a choice for each of their answers."""
        pred, *captured = (self.numbers.get(v) for v in node.inputs)
        if pred is None or None in captured:
            return False
        answers = []
        for name in ("if_true", "if_false"):
            taken: Any = node.attrs[name]
            inside = _Walk(taken, dict(enumerate(captured)), self.constants, self.members)
            if not inside._follow():
                return False
            answers.append([inside.numbers[v] for v in taken.fetches])
        for number, (output, one, other) in enumerate(zip(node.outputs, *answers, strict=True), value):
            self.numbers[number] = ("member", len(self.members))
            self.members.append(("where", (pred, one, other), output.dtype))
        return True

    def _node(self, node: PlanNode, value: int) -> bool:
        if any(output.dims != () for output in node.outputs):
            return False
        if node.op == COND:
            return self._branch(node, value)
        if len(node.outputs) != 1:
            return False
        if node.op == "constant":
            self.numbers[value] = ("constant", len(self.constants))
            self.constants.append(np.asarray(node.attrs["value"]))
            return True
        if node.op in ALIASES:
            self.numbers[value] = self.numbers.get(node.inputs[0])
            return value in self.numbers and self.numbers[value] is not None
        if any(self.numbers.get(v) is None for v in node.inputs):
            return False
        specs = [*(self.specs[v].dtype for v in node.inputs), node.outputs[0].dtype]
        found = find_kernel(node.op, "cpu", specs)
        if found is None or found.layout is not broadcast or not is_scalar_function(node.op, specs):
            return False
        self.numbers[value] = ("member", len(self.members))
        self.members.append((node.op, tuple(self.numbers[v] for v in node.inputs), node.outputs[0].dtype))
        return True

    def expression(self, inputs: Sequence[Any], before: int, constants: Sequence[Any]) -> Expression:
        """The expression, whose inputs are ``inputs`` and then all ``constants``; its own are after ``before``."""
        first = {"input": 0, "constant": len(inputs) + before, "member": len(inputs) + len(constants)}
        members = tuple((op, tuple(first[k] + n for k, n in taken), str(dtype)) for op, taken, dtype in self.members)
        results = [self.numbers[v] for v in self.body.fetches]
        return express(
            (*map(str, inputs), *map(str, constants)), members, tuple(first[kind] + number for kind, number in results)
        )


def _program(
    attrs: Mapping[str, Any], begin: Sequence[Any], rows: Sequence[Any], captured: Sequence[Any]
) -> tuple[ScalarProgram, tuple[np.ndarray[Any, Any], ...]] | None:
    """The program of a loop on scalars of these dtypes, and its constants."""
    body = _Walk(attrs["body"])
    cond = None if attrs["cond"] is None else _Walk(attrs["cond"])
    if not body.walk() or not attrs["body"].fetches or (cond is not None and not cond.walk()):
        return None
    constants = (*body.constants, *(() if cond is None else cond.constants))
    dtypes = [c.dtype for c in constants]
    try:
        made = ScalarProgram(
            None if cond is None else cond.expression([*begin, *captured], len(body.constants), dtypes),
            body.expression([*begin, *rows, *captured], 0, dtypes),
            len(begin),
            len(rows),
            len(constants),
        )
    except GraphError:
        return None
    return made, constants
