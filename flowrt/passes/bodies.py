"""Rewrite what loops and branches turn over as the step around them is: their bodies are plans held as attributes.

Law: a body becomes a step, is rewritten, and becomes a plan again, innermost first; what it is fed and answers keeps
its place. All of it runs where its loop does. Bodies with effects mostly stay as they were written, since `lower` takes
them apart. No addition to a variable is spelled out in a body: what holds a variable is the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.errors import Site
from flowrt.base.plan import Plan, PlanNode
from flowrt.op import lookup
from flowrt.ops.body import changes_state
from flowrt.passes.step import FED, Ref, StepGraph, StepNode

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.graph import Graph

Rewrite = Callable[[StepGraph, Mapping[int, "Device"]], StepGraph]


def rewrite_bodies(
    step: StepGraph, placement: Mapping[int, Device], rewrite: Rewrite, *, effects: bool = False
) -> StepGraph:
    """``step`` whose bodies, at any depth, are what ``rewrite`` makes of them and of where their nodes run.

    Those with ``effects`` only if that is said.
    """
    nodes = dict(step.nodes)
    for node in step.nodes.values():
        if Plan in map(type, node.attrs.values()):
            attrs = _rewritten(node.attrs, step.graph, placement[node.id], rewrite, effects)
            nodes[node.id] = replace(node, attrs=attrs)
    return replace(step, nodes=nodes)


def _rewritten(
    attrs: Mapping[str, Attr], graph: Graph, device: Device, rewrite: Rewrite, effects: bool
) -> dict[str, Attr]:
    def body(value: Attr) -> Attr:
        meant = isinstance(value, Plan) and (effects or not changes_state(value))
        return _body(value, graph, device, rewrite, effects) if meant and isinstance(value, Plan) else value

    return {name: body(value) for name, value in attrs.items()}


def _body(body: Plan, graph: Graph, device: Device, rewrite: Rewrite, effects: bool) -> Plan:
    step = _as_step(body, graph)
    placement = dict.fromkeys(step.nodes, device)
    return _as_plan(rewrite(rewrite_bodies(step, placement, rewrite, effects=effects), placement), body)


def _as_step(body: Plan, graph: Graph) -> StepGraph:
    """The nodes of ``body`` by their positions."""
    refs: list[Ref] = [(FED, i) for i in range(len(body.feeds))]
    nodes: dict[int, StepNode] = {}
    for position, node in enumerate(body.nodes):
        inputs, site = tuple(refs[v] for v in node.inputs), _site(node.site)
        nodes[position] = StepNode(
            position, lookup(node.op), node.name, inputs, node.outputs, node.attrs, node.control, site
        )
        refs += [(position, i) for i in range(len(node.outputs))]
    return StepGraph(
        graph, nodes, (), tuple(feed.spec for feed in body.feeds), tuple(refs[v] for v in body.fetches), ()
    )


def _as_plan(step: StepGraph, body: Plan) -> Plan:
    """``step`` as the plan of ``body``, with its feeds."""
    values: dict[Ref, int] = {(FED, i): i for i in range(len(body.feeds))}
    position: dict[int, int] = {}
    nodes: list[PlanNode] = []
    for node in step.nodes.values():
        position[node.id] = len(nodes)
        values |= {(node.id, i): len(values) + i for i in range(len(node.outputs))}
        inputs = tuple(values[ref] for ref in node.inputs)
        waits = tuple(dict.fromkeys(position[c] for c in (*node.control, *node.after)))
        nodes.append(PlanNode(node.op.name, node.name, inputs, node.outputs, node.attrs, waits, site=str(node.site)))
    return replace(body, nodes=tuple(nodes), fetches=tuple(values[ref] for ref in step.fetches))


def _site(text: str) -> Site:
    file, _, line = text.rpartition(":")
    return Site(file, int(line)) if line.isdecimal() else Site(text, 0)
