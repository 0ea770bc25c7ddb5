"""What a run of a plan does that is not computed, for who traces it: when it began and ended, and its waits.

What is computed is noted by whoever computes it: `regional`, `executor`, and `devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.launch import STEP
from flowrt.sched.host.tracer import now
from flowrt.sched.tape.timing import describe_node, shapes_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.devices.device import Issuing
    from flowrt.sched.host.host import Host, RunContext
    from flowrt.sched.host.tracer import Tracer
    from flowrt.sched.units import Unit

    Array = np.ndarray[Any, Any]

TRANSFERS = frozenset({"send", "recv"})
NOTEWORTHY = 100_000  # nanoseconds
MOST_NAMED = 32  # nodes of a device's region


class RunTrace:
    """What ``tracer`` notes of a run of ``plan``; `end` it once."""

    def __init__(self, tracer: Tracer, plan: Plan, context: RunContext) -> None:
        self._tracer, self._plan, self._context = tracer, plan, context
        self._began = now()
        self._waits: dict[int, tuple[PlanNode, int]] = {}  # by activation: what waits, and since when
        self._over = False

    def wait(self, activation: int, node: PlanNode) -> None:
        """An effect is tried; again, where it was before."""
        self._waits.setdefault(activation, (node, now()))

    def complete(self, activation: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A unit is done: if it is an effect, that is noted."""
        waited = self._waits.pop(activation, None)
        if waited is not None:
            node, began = waited
            moved = inputs if node.op == "send" else outputs
            self._note(node, began, {"shapes": shapes_of(inputs, outputs), "bytes": _bytes(moved)})

    def end(self) -> None:
        """The run is over, and whatever still waits will for ever."""
        if self._over:
            return
        self._over = True
        for node, began in self._waits.values():
            self._note(node, began, {"unfinished": True})
        self._waits.clear()
        note_step(self._tracer, self._plan, self._began, self._context.number)

    def _note(self, node: PlanNode, began: int, about: dict[str, Any]) -> None:
        if node.op in TRANSFERS:
            epoch, step = self._context.key
            about |= {"peer": node.attrs["peer"], "flow": f"{epoch}/{step}/{node.attrs['edge']}"}
        note_wait(self._tracer, node, began, self._context.number, about)


def note_wait(tracer: Tracer, node: PlanNode, began: int, number: int, about: dict[str, Any]) -> None:
    """Note a node that has just had what it waited for."""
    kind = node.op if node.op in TRANSFERS else "wait"
    tracer.note(kind, tracer.describe(node, lambda: describe_node(node)), began, now(), number, about, track="")


def note_prepared(tracer: Tracer, node: PlanNode, asked: int, number: int) -> None:
    """Note that what computes the unit that begins with ``node`` has just been made ready, if that took long."""
    ready = now()
    if ready - asked > NOTEWORTHY:
        about = {"name": f"prepare what begins with {node.name}"}
        tracer.note("prepare", tracer.describe(node, lambda: describe_node(node)), asked, ready, number, about)


def note_step(tracer: Tracer, plan: Plan, began: int, number: int) -> None:
    """Note a run of a plan that has just ended."""
    tracer.note("step", tracer.describe(plan, lambda: _describe_plan(plan)), began, now(), number, track="")


def _describe_plan(plan: Plan) -> str:
    """What a run of a plan is for: what it fetches, or what it does last."""
    starts, names = plan.value_starts(), []
    for value in plan.fetches[:3]:
        position = int(np.searchsorted(starts, value, side="right")) - 1
        names.append(plan.feeds[value].name if position < 0 else plan.nodes[position].name)
    return ", ".join(names) or (plan.nodes[-1].name if plan.nodes else "")


def _bytes(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


class TracedIssuer:
    """What carries out units of a plan on a device, and notes when, in the device's lane, while ``host`` is traced.

    What is issued is waited for as a whole: of the nodes of a region nobody knows when which was computed.
    """

    def __init__(self, issuer: Issuing, plan: Plan, host: Host) -> None:
        self._issuer, self._plan, self._host = issuer, plan, host

    def carry_out(self, unit: Unit, inputs: Sequence[Any], words: Array) -> list[Any]:
        """As `Issuing.carry_out`."""
        tracer = self._host.tracer
        if tracer is None:
            return self._issuer.carry_out(unit, inputs, words)
        began = now()
        outputs = self._issuer.carry_out(unit, inputs, words)
        tracer.note("device", tracer.describe(unit, lambda: self._describe(unit)), began, now(), int(words[STEP]))
        return outputs

    def _describe(self, unit: Unit) -> dict[str, Any]:
        nodes = [self._plan.nodes[position] for position in unit.nodes]
        name = nodes[0].name if len(nodes) == 1 else f"region of {len(nodes)} nodes from {nodes[0].name}"
        named = ", ".join(node.name for node in nodes[:MOST_NAMED])
        return {"name": name, "line": nodes[0].site, "device": nodes[0].device, "nodes": named}
