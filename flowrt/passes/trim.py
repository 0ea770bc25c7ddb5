"""Leave out what loops stack and nobody reads: a gradient that this step does not compute may have asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.plan import Plan, PlanNode
from flowrt.ops.body import has_effect
from flowrt.ops.control import loop, stateful_loop

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.passes.step import StepGraph

LOOPS = frozenset({loop.name, stateful_loop.name})


def trim(step: StepGraph) -> StepGraph:
    """``step`` whose loops stack nothing behind the last thing that is read; their other outputs keep their places."""
    if LOOPS.isdisjoint([node.op.name for node in step.nodes.values()]):
        return step
    read = {ref for node in step.nodes.values() for ref in node.inputs} | set(step.fetches)
    nodes = dict(step.nodes)
    for node in step.nodes.values():
        kept = _kept(node.op.name, node.attrs, [i for i in range(len(node.outputs)) if (node.id, i) in read])
        if kept is not None and kept < len(node.outputs):
            nodes[node.id] = replace(node, outputs=node.outputs[:kept], attrs=_shortened(node.attrs, kept))
    return replace(step, nodes=nodes)


def _kept(op: str, attrs: Mapping[str, Any], read: Sequence[int]) -> int | None:
    """How many outputs of a loop are to be made: those up to the last that is read, and all that is carried."""
    return max(attrs["carried"] + 1, max(read, default=-1) + 1) if op in LOOPS else None


def _shortened(attrs: Mapping[str, Attr], kept: int) -> dict[str, Attr]:
    """The attributes of a loop that makes only its first ``kept`` outputs, one of which is its count."""
    body = attrs["body"]
    assert isinstance(body, Plan)
    return {**attrs, "body": _needed(replace(body, fetches=body.fetches[: kept - 1]))}


def _needed(body: Plan) -> Plan:
    """What the fetches of ``body`` need, and what has an effect; loops inside trimmed alike."""
    starts = body.value_starts()
    wanted = set(body.fetches)
    kept: list[int] = []
    waited: set[int] = set()
    for n in reversed(range(len(body.nodes))):
        node = body.nodes[n]
        if has_effect(node) or n in waited or any(v in wanted for v in range(starts[n], starts[n + 1])):
            kept.append(n)
            wanted.update(node.inputs)
            waited.update(node.control)
    kept.reverse()
    values = {value: value for value in range(len(body.feeds))}
    place = {n: i for i, n in enumerate(kept)}
    outputs = {n: range(starts[n], starts[n + 1]) for n in kept}
    nodes = [_trimmed(body.nodes[n], [v - starts[n] for v in outputs[n] if v in wanted]) for n in kept]
    at = len(body.feeds)
    for n, node in zip(kept, nodes, strict=True):
        values |= dict(zip(outputs[n], range(at, at + len(node.outputs)), strict=False))
        at += len(node.outputs)
    moved = (
        replace(node, inputs=_moved(node.inputs, values), control=tuple(place[c] for c in node.control))
        for node in nodes
    )
    return replace(body, nodes=tuple(moved), fetches=_moved(body.fetches, values))


def _trimmed(node: PlanNode, read: Sequence[int]) -> PlanNode:
    kept = _kept(node.op, node.attrs, read)
    if kept is None or kept >= len(node.outputs):
        return node
    return replace(node, outputs=node.outputs[:kept], attrs=_shortened(node.attrs, kept))


def _moved(values: Iterable[int], to: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(to[value] for value in values)
