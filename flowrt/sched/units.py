"""What the step machine sees as one node of a plan: a region that runs as a tape, or a node by itself.

Law: pure; it knows ops by name and by what the registries hold, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from flowrt.base.device import is_apart
from flowrt.base.errors import GraphError, how_to_bring
from flowrt.base.traits import is_alias, writes, writes_rows
from flowrt.kernels.language.table import KERNELS
from flowrt.op import is_effect
from flowrt.sched.loops.structured import PARTING, STACKING, STRUCTURED, grows
from flowrt.sched.regions.leading import brought_out, leading_sends, parts_of
from flowrt.sched.regions.regions import READ, Name, Region, find_regions, resources_of
from flowrt.sched.topology import Enter, NodeKind, Topology

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

NOTHING: frozenset[Name] = frozenset()


class Action(Enum):
    """How a unit is carried out."""

    TAPE = "tape"
    COMPUTE = "compute"
    READ = "read"
    WRITE = "write"
    SWITCH = "switch"
    MERGE = "merge"
    EFFECT = "effect"
    MOVE = "move"
    ISSUE = "issue"  # by a device whose memory is not the host's
    BRING = "bring"  # out of such memory
    NOTHING = "nothing"


APART = frozenset({Action.ISSUE, Action.BRING})  # done in another device's lane, and so waited for


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What the machine sees as one node: a node of the plan, or a region that runs as a tape or is issued as one."""

    action: Action
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]  # plan values
    outputs: tuple[int, ...]
    control: tuple[int, ...]  # plan nodes
    reads: frozenset[Name] = NOTHING
    writes: frozenset[Name] = NOTHING
    by_rows: frozenset[Name] = NOTHING  # variables of which it writes but some rows
    begins: frozenset[Name] = NOTHING  # variables that it assigns before it looks at them: they need no value yet
    region: Region | None = None  # that is a tape
    issued: Region | None = None  # that another device is issued


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """The units' edges as the step machine wants them; ``values`` maps plan values to the machine's numbers."""

    topology: Topology
    values: Mapping[int, int]
    fetches: tuple[int, ...]


PAST_CACHES = 32 << 20  # bytes
BRING = "bring"
COMPUTED = STRUCTURED | STACKING | {"constant"}  # without a kernel of its own
_KINDS = {Action.SWITCH: NodeKind.SWITCH, Action.MERGE: NodeKind.MERGE}
_MOVES = {"enter": NodeKind.ENTER, "exit": NodeKind.EXIT, "next_iteration": NodeKind.NEXT_ITERATION}
_ACTIONS = {
    "switch": Action.SWITCH,
    "merge": Action.MERGE,
    "no_op": Action.NOTHING,
    READ: Action.READ,
    BRING: Action.BRING,
}
_ACTIONS |= dict.fromkeys(("enter", "exit", "next_iteration"), Action.MOVE)


def action_of(node: PlanNode) -> Action:
    """How a single node is carried out; raises `GraphError` for an op that nothing here carries out."""
    if node.op in _ACTIONS:
        return _ACTIONS[node.op]
    if writes(node.op):
        return Action.WRITE
    if is_effect(node.op):
        return Action.EFFECT
    if node.op in COMPUTED or is_alias(node.op) or (node.op, "cpu") in KERNELS:
        return Action.COMPUTE
    raise GraphError(f"{node.where()}: no kernel of {node.op} is known here; {how_to_bring('its op and kernel')}")


def is_structural(op: str) -> bool:
    """Whether the executor carries ``op`` out by itself, without a kernel."""
    return op in _ACTIONS or writes(op) or is_effect(op) or op in COMPUTED


def breaks_tape(node: PlanNode) -> bool:
    """Whether a node must be run by the machine itself."""
    if grows(node) or node.op in STACKING or node.op in PARTING:
        return True
    return action_of(node) in (Action.SWITCH, Action.MERGE, Action.MOVE, Action.EFFECT, Action.BRING)


def find_units(plan: Plan, *, tapes: bool = True) -> tuple[Unit, ...]:
    """The units of ``plan``: its regions, unless there are to be no ``tapes``, then the nodes that are in none."""
    starts, out = plan.value_starts(), _brought_out(plan)
    units: list[Unit] = []
    inside, leading = bytearray(len(plan.nodes)), leading_sends(plan)
    for r in find_regions(plan, lambda node: id(node) in out or _is_single(node)) if tapes else ():
        apart = is_apart(r.device)
        if apart or not _reads_large(plan, r):
            for n in r.nodes:
                inside[n] = True
            how = Action.ISSUE if apart else Action.TAPE
            brought: tuple[int, ...] = ()
            for p in parts_of(plan, r, leading):
                units.append(_unit(plan, how, p.nodes, p.inputs, p.outputs, (*p.control, *brought), p))
                brought += brought_out(p, leading)
    for n, node in enumerate(plan.nodes):
        if not inside[n]:
            action = Action.BRING if id(node) in out else _single_action(node)
            outputs = tuple(range(starts[n], starts[n + 1]))
            units.append(_unit(plan, action, (n,), node.inputs, outputs, node.control))
    return tuple(units)


def _brought_out(plan: Plan) -> set[int]:
    """Those nodes, by `id`, that bring a value out of memory that is not the host's."""
    bringing = [node for node in plan.nodes if node.op == BRING]
    if not bringing:
        return set()
    made = [""] * len(plan.feeds) + [n.device if is_apart(n.device) else "" for n in plan.nodes for _ in n.outputs]
    sources = [made[node.inputs[0]] for node in bringing]
    there = zip(bringing, sources, strict=True)
    return {id(node) for node, source in there if not is_apart(node.device) or source not in ("", node.device)}


def _is_single(node: PlanNode) -> bool:
    return not is_apart(node.device) and breaks_tape(node)


def _single_action(node: PlanNode) -> Action:
    return Action.ISSUE if is_apart(node.device) else action_of(node)


def _reads_large(plan: Plan, region: Region) -> bool:
    """Whether a region does nothing but copy variables, to be sent, that no cache holds: `memcpy` writes past them."""
    nodes = [plan.nodes[n] for n in region.nodes]
    return not plan.fetches and all(
        node.op == READ and node.outputs[0].known and node.outputs[0].nbytes >= PAST_CACHES for node in nodes
    )


def _unit(
    plan: Plan,
    action: Action,
    nodes: tuple[int, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    control: tuple[int, ...],
    region: Region | None = None,
) -> Unit:
    first: dict[Name, str] = {}
    touching = [plan.nodes[n] for n in nodes if plan.nodes[n].op == READ or writes(plan.nodes[n].op)]
    for node in touching:
        for name in resources_of(node):
            first.setdefault(name, node.op)
    written = _names(node for node in touching if writes(node.op))
    return Unit(
        action,
        nodes,
        inputs,
        outputs,
        control,
        _names(node for node in touching if node.op == READ),
        written,
        written - _names(node for node in touching if writes(node.op) and not writes_rows(node.op)),
        frozenset(name for name, op in first.items() if op == "assign"),
        region if action is Action.TAPE else None,
        region if action is Action.ISSUE else None,
    )


def _names(nodes: Iterable[PlanNode]) -> frozenset[Name]:
    return frozenset(name for node in nodes for name in resources_of(node))


def connect(plan: Plan, units: Sequence[Unit]) -> Wiring:
    """Number the values that units exchange: feeds, then outputs in unit order."""
    values = {i: i for i in range(len(plan.feeds))}
    for unit in units:
        for value in unit.outputs:
            values[value] = len(values)
    unit_of = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    fetches = tuple(values[v] for v in plan.fetches)
    topology = Topology(
        kinds=[_kind(plan, unit) for unit in units],
        inputs=[tuple(values[v] for v in unit.inputs) for unit in units],
        outputs=[len(unit.outputs) for unit in units],
        controls=[tuple(dict.fromkeys(unit_of[n] for n in unit.control)) for unit in units],
        feeds=len(plan.feeds),
        keep=frozenset(fetches),
        enters={n: enter for n, unit in enumerate(units) if (enter := _enter(plan, unit)) is not None},
    )
    return Wiring(topology, values, fetches)


def _kind(plan: Plan, unit: Unit) -> NodeKind:
    if unit.action is Action.EFFECT and plan.nodes[unit.nodes[0]].op == "send":
        return NodeKind.SEND
    if unit.action is Action.MOVE:
        return _MOVES[plan.nodes[unit.nodes[0]].op]
    return _KINDS.get(unit.action, NodeKind.PLAIN)


def _enter(plan: Plan, unit: Unit) -> Enter | None:
    """Where a unit leads, if that is into a frame."""
    node = plan.nodes[unit.nodes[0]]
    if unit.action is not Action.MOVE or node.op != "enter":
        return None
    return Enter(*(node.attrs[name] for name in ("frame", "is_constant", "parallel_iterations")))
