"""Compute once what a step would compute twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.attributes import Attr, attr_key
from flowrt.passes.step import Ref, StepGraph, StepNode, keep_needed

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

LONG = 8  # items of an attribute whose key is worth remembering


def merge_common(step: StepGraph) -> StepGraph:
    """Let one node stand for all that apply the same op to the same inputs, for the same devices.

    Nodes that touch state or wait are each their own: two draws of random numbers stay two.
    """
    first: dict[Hashable, int] = {}
    programs: dict[int, Hashable] = {}
    stands_for: dict[int, int] = {}
    nodes: dict[int, StepNode] = {}
    for node in step.nodes.values():
        made = _redirect(node, stands_for)
        if made.outputs and not (made.op.stateful or made.op.effect):
            original = first.setdefault(_key(step, made, programs), made.id)
            if original != made.id:
                stands_for[made.id] = original
                continue
        nodes[made.id] = made
    fetches = tuple(_moved(ref, stands_for) for ref in step.fetches)
    targets = tuple(dict.fromkeys(stands_for.get(t, t) for t in step.targets))
    return keep_needed(replace(step, fetches=fetches, targets=targets), nodes)


def _moved(ref: Ref, stands_for: dict[int, int]) -> Ref:
    return (stands_for.get(ref[0], ref[0]), ref[1])


def _redirect(node: StepNode, stands_for: dict[int, int]) -> StepNode:
    if stands_for.keys().isdisjoint(node.before):
        return node
    inputs = tuple([_moved(ref, stands_for) for ref in node.inputs])
    return node.rewired(inputs, tuple(dict.fromkeys([stands_for.get(c, c) for c in node.control])), node.after)


def _key(step: StepGraph, node: StepNode, programs: dict[int, Hashable]) -> Hashable:
    """What is the same for nodes that compute the same; the keys of large ``programs``, many of which are one object,
    are remembered by that."""
    origin = step.graph.nodes[node.id]
    beside = frozenset([n.index for n in origin.colocate])
    attrs = tuple([(name, _attr_key(value, programs)) for name, value in _stated(node.attrs)]) if node.attrs else ()
    return node.op.name, node.inputs, frozenset(node.control), origin.device, beside, attrs


def _stated(attrs: Mapping[str, Attr]) -> list[tuple[str, Attr]]:
    return [(name, value) for name, value in sorted(attrs.items()) if value is not None]


def _attr_key(value: Attr, programs: dict[int, Hashable]) -> Hashable:
    if not isinstance(value, tuple) or len(value) < LONG:
        return attr_key(value)
    found = programs.get(id(value))
    if found is None:
        found = programs[id(value)] = attr_key(value)
    return found
