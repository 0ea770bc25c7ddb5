"""Cut out of the graph what a step's fetches and targets need, given its feeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FeedError, GraphError, user_site
from flowrt.graph import Node, Tensor
from flowrt.ops.custom_gradient import with_gradient
from flowrt.ops.flow import identity
from flowrt.passes.step import FED, Ref, StepGraph, StepNode, infer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowrt.base.spec import Spec
    from flowrt.graph import Graph

READ = "read_variable"


def prune(graph: Graph, fetches: Sequence[Tensor], targets: Sequence[Node], feeds: Sequence[Tensor]) -> StepGraph:
    """The step that computes ``fetches`` and runs ``targets``, in which ``feeds`` stand for what computes them.

    Raises `GraphError` for a foreign fetch, target or feed, and `FeedError` for a placeholder that no feed replaces.
    """
    _check_family(graph, fetches, targets, feeds)
    fed = {tensor: (FED, position) for position, tensor in enumerate(feeds)}
    if len(fed) < len(feeds):
        raise GraphError(f"{user_site()}: a tensor is fed twice; give it one value")
    needed = _needed([t.op for t in fetches if t not in fed] + list(targets), fed)
    specs = tuple(tensor.spec.without_value() for tensor in feeds)
    nodes = _cut_out([graph.nodes[index] for index in sorted(needed)], fed, specs)
    refs = tuple([fed.get(t) or (t.op.index, t.index) for t in fetches])
    return StepGraph(graph, nodes, tuple(feeds), specs, refs, tuple([node.index for node in targets]))


def without_meetings(step: StepGraph) -> StepGraph:
    """``step`` without targets that do nothing but wait for others: these are targets instead.

    All tasks are waited for anyway, and one need not be told that the others are done.
    """
    waited_for = Counter(source for node in step.nodes.values() for source in {*node.before})
    nodes, targets, look = dict(step.nodes), dict.fromkeys(step.targets), list(step.targets)
    while look:
        node = nodes.get(look.pop())
        if node is None or node.op.name != "no_op" or waited_for[node.id]:
            continue
        del nodes[node.id], targets[node.id]
        sources = {*node.before}
        waited_for.subtract(sources)
        targets |= dict.fromkeys(sorted(sources))
        look += sources
    return replace(step, nodes=nodes, targets=tuple(targets))


def placeholders_of(wanted: Iterable[Any]) -> tuple[Tensor, ...]:
    """The placeholders that the tensors and operations among ``wanted`` depend on, in the order of creation."""
    nodes = [value.op if isinstance(value, Tensor) else value for value in wanted if isinstance(value, (Tensor, Node))]
    needed = _needed(nodes, {})
    found = [nodes[0].graph.nodes[index] for index in sorted(needed)]
    return tuple(node.outputs[0] for node in found if node.op.name == "placeholder")


def reads_of(step: StepGraph) -> tuple[Tensor, ...]:
    """The plain reads of ``step``, but for those of variables that it writes."""
    plain = [node for node in step.nodes.values() if node.op.name == READ and not node.attrs.get("fresh")]
    others = {name for node in step.nodes.values() if node.op.name != READ for name in node.resources}
    return tuple(step.graph.nodes[node.id].outputs[0] for node in plain if others.isdisjoint(node.resources))


def _check_family(graph: Graph, fetches: Sequence[Tensor], targets: Sequence[Node], feeds: Sequence[Tensor]) -> None:
    for what, values in (("fetch", fetches), ("target", targets), ("feed", feeds)):
        for value in values:
            if value.graph is not graph:
                raise GraphError(f"cannot {what} {value!r}: it belongs to another graph than this session's")


def _needed(roots: Sequence[Node], fed: Mapping[Tensor, Ref]) -> set[int]:
    found: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node.index not in found:
            found.add(node.index)
            stack += [t.op for t in _looked_at(node) if t not in fed]
            stack += [n for n in node.control_inputs if not _replaced(n, fed)]
    return found


def _looked_at(node: Node) -> Sequence[Tensor]:
    """The inputs that a step computes with: those that a gradient's rule alone needs are none."""
    return node.inputs[:1] if node.op is with_gradient else node.inputs


def _replaced(node: Node, fed: Mapping[Tensor, Ref]) -> bool:
    """Whether feeds stand for all of what ``node`` computes, so that nothing has to wait for it."""
    return bool(node.outputs) and all(t in fed for t in node.outputs)


def _cut_out(nodes: Sequence[Node], fed: Mapping[Tensor, Ref], feed_specs: Sequence[Spec]) -> dict[int, StepNode]:
    """``nodes`` as a step's; where a feed takes away a value that inference relied on, specs are inferred again."""
    out: dict[int, StepNode] = {}
    changed = {ref: spec for (tensor, ref), spec in zip(fed.items(), feed_specs, strict=True) if spec != tensor.spec}
    for node in nodes:
        if node.op.name == "placeholder":
            raise FeedError(f"placeholder {node.name!r} ({node.site}) needs a value: feed {node.outputs[0].spec}")
        op, attrs = (identity, {}) if node.op is with_gradient else (node.op, node.attrs)
        refs = tuple([fed.get(t) or (t.op.index, t.index) for t in _looked_at(node)])
        awaited = [n.index for n in node.control_inputs if not _replaced(n, fed)] if node.control_inputs else ()
        control = tuple(dict.fromkeys(awaited)) if awaited else ()
        specs = tuple([t.spec for t in node.outputs])
        made = StepNode(node.index, op, node.name, refs, specs, attrs, control, node.site)
        if changed and not changed.keys().isdisjoint(refs):
            again = infer(made, [changed.get(r, t.spec) for r, t in zip(refs, _looked_at(node), strict=True)])
            changed |= {(node.index, i): s for i, s in enumerate(again) if s != specs[i]}
            made = StepNode(node.index, op, node.name, refs, again, attrs, control, node.site)
        out[node.index] = made
    return out
