"""What of a plan is made only for others to take, and when it has to be made.

Law: pure. A *goal* is a unit that does something beside computing (a send, an enqueue, a write); a unit that
computes or receives, and whose values only goals use, is made *for* them: put off, it keeps nobody waiting but
them. A goal is *sure* once all is done that it waits for beside what is made for it, and what is to be received
for that lies at its senders, or is as sure there: then nothing but computing lies between it and its values. It
is *called for* when its value would be consumed at once: a send when its peer has asked, an enqueue when its
turn has come at the queue, any other as soon as it is sure. Sure and called for, it is wanted: see
`flowrt.sched.host.credit`, which says how much is made before that. Units in loops and beside switches are never put
off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flowrt.base.device import CLIENT
from flowrt.base.valueclass import valueclass
from flowrt.sched.topology import NodeKind
from flowrt.sched.units import Action

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.base.spec import Spec
    from flowrt.sched.topology import Topology
    from flowrt.sched.units import Unit

LARGE = 1 << 12
"""Bytes of a unit's values up to which nobody asks whether there is credit for them."""

ENQUEUES = ("enqueue", "enqueue_many")
_MADE = (Action.TAPE, Action.COMPUTE, Action.READ)


@valueclass
class Goal:
    """What some units are made for. ``node`` is its plan node where it sends, or enqueues ``rows`` elements."""

    unit: int
    node: PlanNode | None
    rows: int
    waits: tuple[int, ...]
    """Units that it waits for, beside those that are made for it."""
    makes: tuple[int, ...]
    """Units whose values it uses, at any remove, and that are made for goals."""
    receives: tuple[int, ...]
    """Those of them that receive from other tasks: what a client feeds is there from the start."""


@valueclass
class Demands:
    """The goals of a plan by unit, and by unit what is made for which of them."""

    goals: Mapping[int, Goal]
    made_for: Mapping[int, tuple[int, ...]]
    """Large units → their goals; None but these are put off."""
    concerns: Mapping[int, tuple[int, ...]]
    """Unit → the goals that wait for it, or that it is made for."""
    sizes: Mapping[int, int | None]
    """Large unit → the bytes of its values, where these are known before."""


def find_demands(plan: Plan, units: Sequence[Unit], topology: Topology) -> Demands | None:
    """What of a plan may be put off; None where nothing large may."""
    made = {n for n in range(len(units)) if _is_made(plan, units[n], topology, n)}
    specs = plan.value_specs()
    sizes = {n: size_of([specs[value] for value in units[n].outputs]) for n in made}
    large = {n for n, size in sizes.items() if size is None or size > LARGE}
    ends = {after for n in made for after in _successors(topology, n)} - made if large else set()
    goals = {n: _goal(plan, units, topology, made, n) for n in ends}
    named = {n for goal in goals.values() if goal.node is not None for n in goal.makes}
    large = {n for n in large if n in named or units[n].action is Action.EFFECT}
    goals = {n: goal for n, goal in goals.items() if not large.isdisjoint(goal.makes)}
    if not large:
        return None
    concerns: dict[int, list[int]] = {}
    for goal in goals.values():
        for n in (*goal.waits, *goal.makes, goal.unit):
            concerns.setdefault(n, []).append(goal.unit)
    return Demands(
        goals,
        {n: tuple(concerns[n]) for n in large},
        {n: tuple(those) for n, those in concerns.items()},
        {n: sizes[n] for n in large},
    )


def _is_made(plan: Plan, unit: Unit, topology: Topology, n: int) -> bool:
    """Whether a unit is nothing but what it is made for."""
    receives = unit.action is Action.EFFECT and plan.nodes[unit.nodes[0]].op == "recv"
    if not (receives or (unit.action in _MADE and not unit.writes)) or n not in topology.frames[0].nodes:
        return False
    after = _successors(topology, n)
    plain = all(topology.kinds[other] in (NodeKind.PLAIN, NodeKind.SEND) for other in after)
    return plain and bool(after) and topology.keep.isdisjoint(topology.produced[n])


def _successors(topology: Topology, n: int) -> list[int]:
    after = list(topology.followers[n])
    for value in topology.produced[n]:
        after += topology.readers[value]
        after += [merge for merge, _ in topology.merges[value]]
    return after


def size_of(specs: Sequence[Spec]) -> int | None:
    """The bytes of all values together; None where they are not known."""
    return sum(spec.nbytes for spec in specs) if all(spec.known for spec in specs) else None


def _goal(plan: Plan, units: Sequence[Unit], topology: Topology, made: set[int], end: int) -> Goal:
    makes, waits, look = set[int](), set[int](), [end]
    while look:
        for before in topology.predecessors(look.pop()):
            if before in made and before not in makes:
                makes.add(before)
                look.append(before)
            elif before >= 0 and before not in made:
                waits.add(before)
    node = plan.nodes[units[end].nodes[0]]
    named = units[end].action is Action.EFFECT and node.op in ("send", *ENQUEUES)
    receives = [n for n in makes if units[n].action is Action.EFFECT and _sender(plan, units[n]) != CLIENT]
    rows = _rows(plan, node) if node.op == "enqueue_many" else 1
    return Goal(end, node if named else None, rows, tuple(sorted(waits)), tuple(sorted(makes)), tuple(sorted(receives)))


def _rows(plan: Plan, node: PlanNode) -> int:
    """How many elements a node enqueues; 1 where that is not known before."""
    dims = plan.value_specs()[node.inputs[0]].dims
    return dims[0] or 1 if dims else 1


def _sender(plan: Plan, unit: Unit) -> str:
    return str(plan.nodes[unit.nodes[0]].attrs["peer"])
