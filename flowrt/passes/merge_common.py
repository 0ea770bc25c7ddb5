"""Compute once what a step would compute twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.attributes import attr_key
from flowrt.passes.step import Ref, StepGraph, StepNode, keep_needed

if TYPE_CHECKING:
    from collections.abc import Hashable


def merge_common(step: StepGraph) -> StepGraph:
    """Let one node stand for all that apply the same op to the same inputs, for the same devices.

    Nodes that touch state or wait are each their own: two draws of random numbers stay two.
    """
    first: dict[Hashable, int] = {}
    stands_for: dict[int, int] = {}
    nodes: dict[int, StepNode] = {}
    for node in step.nodes.values():
        made = _redirect(node, stands_for)
        if _may_merge(made):
            original = first.setdefault(_key(step, made), made.id)
            if original != made.id:
                stands_for[made.id] = original
                continue
        nodes[made.id] = made
    fetches = tuple(_moved(ref, stands_for) for ref in step.fetches)
    targets = tuple(dict.fromkeys(stands_for.get(t, t) for t in step.targets))
    return keep_needed(replace(step, fetches=fetches, targets=targets), nodes)


def _may_merge(node: StepNode) -> bool:
    return not (node.op.stateful or node.op.effect) and bool(node.outputs)


def _moved(ref: Ref, stands_for: dict[int, int]) -> Ref:
    return (stands_for.get(ref[0], ref[0]), ref[1])


def _redirect(node: StepNode, stands_for: dict[int, int]) -> StepNode:
    if stands_for.keys().isdisjoint(node.before):
        return node
    inputs = tuple([_moved(ref, stands_for) for ref in node.inputs])
    return node.rewired(inputs, tuple(dict.fromkeys([stands_for.get(c, c) for c in node.control])), node.after)


def _key(step: StepGraph, node: StepNode) -> Hashable:
    origin = step.graph.nodes[node.id]
    attrs = tuple([(name, attr_key(value)) for name, value in sorted(node.attrs.items()) if value is not None])
    beside = frozenset([n.index for n in origin.colocate])
    return node.op.name, node.inputs, frozenset(node.control), origin.device, beside, attrs
