"""Order the reads and writes of each variable so that a step means one thing, and updates can happen in place.

Law: ``v`` means the value before the step's writes, so every write waits for the plain read, and (for memory, not for
meaning) for the nodes that use what was read, where these do not themselves wait for a write. A fresh read and a write,
or two writes, of one variable must be ordered by the program; only additions commute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product

from flowrt.base.errors import GraphError
from flowrt.passes.step import NO_GUARDS, Guard, StepGraph, StepNode, guards_of, in_order

READ = "read_variable"


@dataclass(slots=True)
class _Accesses:
    """The nodes of a step that work on one variable."""

    plain: list[StepNode] = field(default_factory=list)
    fresh: list[StepNode] = field(default_factory=list)
    writes: list[StepNode] = field(default_factory=list)


def order_state(step: StepGraph) -> StepGraph:
    """``step`` with control edges from reads to writes; raises `GraphError` where the program leaves the order open."""
    accesses = {key: found for key, found in _accesses(step).items() if found.writes}
    if not accesses:
        return step
    guards = guards_of(step)
    nodes = dict(step.nodes)
    for found in accesses.values():
        _writes_wait_for_reads(nodes, found, guards)
    nodes = in_order(nodes)
    _check_conflicts(nodes, accesses, guards)
    _writes_wait_for_readers(nodes, accesses, guards)
    return replace(step, nodes=in_order(nodes))


def _accesses(step: StepGraph) -> dict[tuple[str, str], _Accesses]:
    out: dict[tuple[str, str], _Accesses] = {}
    for node in step.nodes.values():
        for key in node.resources:
            resource = step.graph.resources.get(key)
            if node.op.effect or (resource is not None and resource.kind == "queue"):
                continue
            found = out.setdefault(key, _Accesses())
            if node.op.name != READ:
                found.writes.append(node)
            else:
                (found.fresh if node.attrs.get("fresh") else found.plain).append(node)
    return out


def _writes_wait_for_reads(
    nodes: dict[int, StepNode], found: _Accesses, guards: Mapping[int, frozenset[Guard]]
) -> None:
    for read in found.plain:
        for write in found.writes:
            if not guards.get(read.id, NO_GUARDS) <= guards.get(write.id, NO_GUARDS):
                raise GraphError(
                    f"{read.where()} lies on one side of a switch, and {write.where()} does not; create the variable "
                    "outside, or use .read() where its value is wanted"
                )
            _add_control(nodes, write.id, read.id)


def _add_control(nodes: dict[int, StepNode], waits: int, source: int) -> None:
    node = nodes[waits]
    if source not in node.before:
        nodes[waits] = node.rewired(node.inputs, (*node.control, source), node.after)


def _writes_wait_for_readers(
    nodes: dict[int, StepNode],
    accesses: Mapping[tuple[str, str], _Accesses],
    guards: Mapping[int, frozenset[Guard]],
) -> None:
    """Let each write wait for the users of the old value that come before it when writes are put off.

    An order in which nothing waits for a write that need not is one order; edges along it never make a cycle. A user
    that may be dead would make the write dead too, so only users alive whenever the write is count.
    """
    place = _writes_put_off(nodes, {write.id for found in accesses.values() for write in found.writes})
    reads = {read.id: key for key, found in accesses.items() for read in found.plain}
    users: dict[tuple[str, str], list[int]] = {}
    for node in nodes.values():
        for source in dict.fromkeys(source for source, _ in node.inputs):
            if source in reads:
                users.setdefault(reads[source], []).append(node.id)
    for key, found in accesses.items():
        for write in found.writes:
            mine = nodes[write.id]
            before = set(mine.before)
            after = [
                user
                for user in users.get(key, ())
                if place[user] < place[write.id]
                and user not in before
                and guards.get(user, NO_GUARDS) <= guards.get(write.id, NO_GUARDS)
            ]
            if after:
                nodes[write.id] = mine.rewired(mine.inputs, mine.control, (*mine.after, *after))


def _writes_put_off(nodes: Mapping[int, StepNode], writes: set[int]) -> dict[int, int]:
    """The place of each node in the order that takes a write only where nothing else is ready."""
    return {i: place for place, i in enumerate(in_order(nodes, key=lambda i: (i in writes, i)))}


def _check_conflicts(
    nodes: Mapping[int, StepNode],
    accesses: Mapping[tuple[str, str], _Accesses],
    guards: Mapping[int, frozenset[Guard]],
) -> None:
    """Raise where two accesses of one variable do not commute and neither waits for the other."""
    place = {i: number for number, i in enumerate(nodes)}
    contested = [(found, turns) for found in accesses.values() if len(turns := _turns(found, place)) > 1]
    if not contested:
        return
    order = _Order(nodes, {node.id for _, turns in contested for turn in turns for node in turn})
    for found, turns in contested:
        guarded = any(guards.get(node.id) for turn in turns for node in turn)
        if not guarded and all(order.in_turn(*beside) for beside in pairwise(turns)):
            continue  # and so for turns that are further apart
        for a, b in _pairs(found):
            if not (_exclusive((a, b), guards) or order.waits(a, b) or order.waits(b, a)):
                raise _conflict(a, b)


def _turns(found: _Accesses, place: Mapping[int, int]) -> list[list[StepNode]]:
    """The writes and fresh reads in a topological order, those beside each other that commute as one turn."""
    turns: list[list[StepNode]] = []
    last = None
    for node in sorted((*found.fresh, *found.writes), key=lambda node: place[node.id]):
        kind = READ if node.op.name == READ else "addition" if _adds(node) else None
        if kind is not None and kind == last:
            turns[-1].append(node)
        else:
            turns.append([node])
        last = kind
    return turns


def _adds(node: StepNode) -> bool:
    """Whether a node updates a variable as others may at the same time, in any order."""
    return node.op.traits.update is not None and node.op.traits.update.commutes


def _pairs(found: _Accesses) -> Iterable[tuple[StepNode, StepNode]]:
    additions = [write for write in found.writes if _adds(write)]
    others = [write for write in found.writes if not _adds(write)]
    yield from combinations(others, 2)
    yield from product(others, additions)
    yield from product(found.fresh, found.writes)


def _exclusive(pair: tuple[StepNode, StepNode], guards: Mapping[int, frozenset[Guard]]) -> bool:
    """Whether the two lie on different sides of one switch, so that only one of them ever runs."""
    a, b = (guards.get(node.id, NO_GUARDS) for node in pair)
    return any((predicate, 1 - side) in b for predicate, side in a)


class _Order:
    """Which of some marked nodes wait for which, found in one sweep in topological order; sets of them are bits."""

    def __init__(self, nodes: Mapping[int, StepNode], marked: set[int]) -> None:
        self._bits = {node: 1 << place for place, node in enumerate(sorted(marked))}
        self._waits: dict[int, int] = {}
        seen: dict[int, int] = {}
        for node in nodes.values():
            mask = 0
            for source in node.before:
                mask |= seen[source] | self._bits.get(source, 0)
            seen[node.id] = mask
            if node.id in marked:
                self._waits[node.id] = mask

    def waits(self, node: StepNode, other: StepNode) -> bool:
        """Whether ``node`` waits for ``other``."""
        return bool(self._waits[node.id] & self._bits[other.id])

    def in_turn(self, turn: Iterable[StepNode], following: Iterable[StepNode]) -> bool:
        """Whether each of those ``following`` waits for all of a ``turn``."""
        before = sum(self._bits[node.id] for node in turn)
        return all(self._waits[node.id] & before == before for node in following)


def _conflict(a: StepNode, b: StepNode) -> GraphError:
    fix = "build one of them under fr.control_dependencies([the other])"
    if a.op.name == READ:
        return GraphError(
            f"{a.where()} may see the variable before or after {b.where()} writes it; {fix}, or use the variable "
            "itself for its value before the step"
        )
    return GraphError(
        f"{a.where()} and {b.where()} write one variable in an order that nothing decides; {fix}, "
        "or use assign_add, assign_sub, scatter_add and scatter_sub, which commute"
    )
