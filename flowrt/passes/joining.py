"""Some nodes of a step as one: who stands for whom, and what the others then take and wait for.

Law: every pass that makes one node of several says which ones it made, each under the id of a node that it stands for,
and who stands for those that are gone; the step is rewritten here. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowrt.passes.step import FED, in_order

if TYPE_CHECKING:
    from flowrt.passes.step import Ref, StepGraph, StepNode

SAME: Mapping[Ref, Ref] = MappingProxyType({})


def joined(
    step: StepGraph, made: Mapping[int, StepNode], home: Mapping[int, int], refs: Mapping[Ref, Ref] = SAME
) -> StepGraph:
    """``step`` with the nodes ``made`` in the places of those that ``home`` says they stand for.

    ``refs`` are values under other names than before. Raises `GraphError` where nodes would wait for each other.
    """
    left = (node for node in step.nodes.values() if home.get(node.id, node.id) == node.id)
    return replace(
        step,
        nodes=in_order({node.id: moved(made.get(node.id, node), refs, home) for node in left}),
        fetches=tuple(refs.get(ref, ref) for ref in step.fetches),
        targets=tuple(dict.fromkeys(home.get(i, i) for i in step.targets)),
    )


def moved(node: StepNode, refs: Mapping[Ref, Ref], home: Mapping[int, int]) -> StepNode:
    """``node`` with what it takes and waits for named anew."""
    if home.keys().isdisjoint(node.before):
        return node

    def renamed(sources: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys([home.get(source, source) for source in sources]))

    inputs = tuple([refs.get(ref, ref) for ref in node.inputs])
    return node.rewired(inputs, renamed(node.control), renamed(node.after))


def outside(waits: Iterable[Iterable[int]], inside: Collection[int]) -> tuple[int, ...]:
    """What several nodes wait for that is not ``inside``, each once."""
    return tuple(dict.fromkeys([source for sources in waits for source in sources if source not in inside]))


def standing_for(last: StepNode, nodes: Collection[StepNode], **changes: Any) -> StepNode:
    """``last`` in the place of ``nodes``, of which it is one, with ``changes``; it waits for what they waited for."""
    inside = {node.id for node in nodes}
    control, after = outside((node.control for node in nodes), inside), outside((node.after for node in nodes), inside)
    return replace(last, control=control, after=after, **changes)


def users_of(step: StepGraph, made_by: Collection[int] | None = None) -> dict[int, set[int]]:
    """Who takes each node's values, or those that are ``made_by`` some: nodes, and `FED` for the step's own caller."""
    users: dict[int, set[int]] = {i: set() for i in (step.nodes if made_by is None else made_by)}
    for node in step.nodes.values():
        for source, _ in node.inputs:
            if source in users:
                users[source].add(node.id)
    for source, _ in step.fetches:
        if source in users:
            users[source].add(FED)
    return users


def readers_of(step: StepGraph) -> dict[int, list[StepNode]]:
    """The nodes that take each node's values, in order."""
    found: dict[int, list[StepNode]] = {i: [] for i in step.nodes}
    for node in step.nodes.values():
        for source in {source for source, _ in node.inputs if source != FED}:
            found[source].append(node)
    return found
