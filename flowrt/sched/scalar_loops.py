"""Which loops are of scalars alone, and the one launch that each comes to.

Law: pure. A loop is one where all it carries, scans by the row, stacks and captures are scalars, and its condition and
body are made of elementwise ops, constants and what passes scalars on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels.expression import Expression, express, is_scalar_function
from flowrt.kernels.launch import Application
from flowrt.kernels.scalar_loop import ScalarLoopStep, ScalarProgram
from flowrt.kernels.table import ALIASES, View, broadcast, find_kernel

if TYPE_CHECKING:
    from flowrt.plan import Plan, PlanNode
    from flowrt.spec import Spec

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
        rows=rows[0].concrete[0] if rows else None,
        reverse=attrs["reverse"],
    )
    return Application((step,), ())


@dataclass(slots=True)
class _Walk:
    """A body as an expression in the making: the numbers of its values among (inputs, constants, members)."""

    body: Plan
    numbers: dict[int, Any] = field(default_factory=dict)
    constants: list[np.ndarray[Any, Any]] = field(default_factory=list)
    members: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    def walk(self) -> bool:
        """Follow the body; False where something in it is not of scalars."""
        value = len(self.body.feeds)
        self.numbers = {i: ("input", i) for i in range(value)}
        return all(self._node(node, value + i) for i, node in self._numbered())

    def _numbered(self) -> list[tuple[int, PlanNode]]:
        if any(len(node.outputs) != 1 for node in self.body.nodes):
            return [(0, node) for node in self.body.nodes]
        return list(enumerate(self.body.nodes))

    def _node(self, node: PlanNode, value: int) -> bool:
        if len(node.outputs) != 1 or node.outputs[0].dims != ():
            return False
        if node.op == "constant":
            self.numbers[value] = ("constant", len(self.constants))
            self.constants.append(np.asarray(node.attrs["value"]))
            return True
        if node.op in ALIASES:
            self.numbers[value] = self.numbers.get(node.inputs[0])
            return value in self.numbers and self.numbers[value] is not None
        specs = [*(self._dtype(v) for v in node.inputs), node.outputs[0].dtype]
        found = find_kernel(node.op, "cpu", specs) if None not in specs else None
        if found is None or found.layout is not broadcast or not is_scalar_function(node.op, specs):
            return False
        self.numbers[value] = ("member", len(self.members))
        self.members.append((node.op, tuple(self.numbers[v] for v in node.inputs), node.outputs[0].dtype))
        return True

    def _dtype(self, value: int) -> Any:
        if value not in self.numbers:
            return None
        if value < len(self.body.feeds):
            return self.body.feeds[value].spec.dtype
        return self.body.nodes[value - len(self.body.feeds)].outputs[0].dtype

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
