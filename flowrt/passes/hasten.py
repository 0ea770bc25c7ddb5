"""Updates of variables as early as may be, for the memory they let go of.

Law: the same nodes, in another topological order. A group is a write of a variable with what is computed for it alone;
writes of which one is given what is computed for another are one group. It comes as soon as all it waits for has come,
and whole, so that what is computed straight into a variable stays behind all that its write waits for. A gradient is
then gone before the next is computed. Were all updates left to the end, all gradients would be alive there: as much
memory as the parameters take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.passes.step import FED

if TYPE_CHECKING:
    from flowrt.passes.step import StepGraph, StepNode


def hasten(step: StepGraph) -> StepGraph:
    """``step`` with updates moved ahead of what they need not wait for."""
    groups = _groups(step.nodes, {source for source, _ in step.fetches})
    members: dict[int, list[int]] = {}
    for i, group in groups.items():
        members.setdefault(group, []).append(i)
    waits, followers = _waits(step.nodes, groups)
    order: dict[int, StepNode] = {}
    for i in step.nodes:
        ready = [i]
        while ready:  # a group may be what another waits for
            done = ready.pop()
            if done in order:
                continue
            for source in step.nodes[done].before:
                order.setdefault(source, step.nodes[source])  # that waits for nothing, if it is not there yet
            order[done] = step.nodes[done]
            for group in reversed(followers.get(done, [])):
                waits[group] -= 1
                if not waits[group]:
                    ready.extend(reversed(members[group]))
    return replace(step, nodes=order)


def _groups(nodes: Mapping[int, StepNode], fetched: set[int]) -> dict[int, int]:
    """The group, by one of its members, of each node that is in one; in the order of the nodes."""
    readers: dict[int, list[int]] = {}
    leader: dict[int, int] = {}
    for i in reversed(tuple(nodes)):
        node, found = nodes[i], readers.pop(i, [])
        if _writes(node):
            leader[i] = i
        elif _waits_for_something(node) and not node.op.effect and found and i not in fetched:
            groups = {_leader(leader, reader) if reader in leader else FED for reader in found}
            if FED not in groups and (len(groups) == 1 or any(_writes(nodes[reader]) for reader in found)):
                leader[i] = first = groups.pop()
                leader.update((other, first) for other in groups)
        for source, _ in node.inputs:
            readers.setdefault(source, []).append(i)
    return {i: _leader(leader, i) for i in nodes if i in leader}


def _writes(node: StepNode) -> bool:
    return not node.outputs and not node.op.effect and node.resource is not None


def _waits_for_something(node: StepNode) -> bool:
    return bool(node.inputs or node.control or node.after)


def _leader(group: dict[int, int], i: int) -> int:
    while group[i] != i:
        group[i] = i = group[group[i]]
    return i


def _waits(nodes: Mapping[int, StepNode], groups: Mapping[int, int]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """For how many nodes outside each group waits, and for each node the groups that wait for it."""
    waits: dict[int, int] = {}
    followers: dict[int, list[int]] = {}
    outside: dict[int, set[int]] = {}
    for i, group in groups.items():
        before = {s for s in nodes[i].before if groups.get(s) != group and _waits_for_something(nodes[s])}
        outside.setdefault(group, set()).update(before)
    for group, before in outside.items():
        waits[group] = len(before)
        for source in before:
            followers.setdefault(source, []).append(group)
    return waits, followers
