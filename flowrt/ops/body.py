"""Bodies: functions of tensors as frozen plans, which loops and branches hold as attributes.

A body is traced in a graph of its own, whose inputs are the body's parameters and whatever it uses of the graphs
around it. It keeps what its answers need, and everything inside that changes state or waits: that runs in the order it
was written in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.device import ANYWHERE
from flowrt.base.errors import GraphError, Site, SpecError, from_site, user_site
from flowrt.base.plain import as_dtype_of, default_array, takes
from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.spec import Spec, spec_of
from flowrt.base.valueclass import valueclass
from flowrt.graph import Node, Tensor, current_scope, scoped
from flowrt.op import as_value, building, lookup
from flowrt.ops.structure import Structure, flatten
from flowrt.subgraph import Subgraph

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.graph import Graph
    from flowrt.op import Op


ITERATION = Spec("int64", ())


@valueclass
class Traced:
    """What a function built: in which graph, from which parameters, what it answered and in which form.

    ``answers`` are tensors of ``graph``; where the function answered an operation or None, ``form`` has a leaf for it
    that ``answers`` has not: ``kept`` says which leaves are tensors.
    """

    graph: Subgraph
    parameters: tuple[Tensor, ...]
    form: Structure
    answers: tuple[Any, ...]
    kept: tuple[bool, ...]


def trace(
    outer: Graph,
    name: str,
    function: Callable[..., Any],
    form: Structure,
    specs: Sequence[Spec],
    *,
    iterations: bool = False,
) -> Traced:
    """Build ``function`` in a graph inside ``outer``, on parameters of ``specs`` in the nesting ``form``.

    ``form`` is the form of the list of arguments. Answers that are numbers or arrays are left as they are. Where it
    ``iterations``, the graph has an input for the number of the iteration.
    """
    graph = Subgraph(outer)
    inside = replace(current_scope(), prefix=f"{outer.unique_name(name)}/", control=(), colocate=())
    with building(graph), scoped(inside):
        parameters = tuple(graph.input(spec.without_value(), "variable") for spec in specs)
        graph.iteration = graph.input(ITERATION, "iteration") if iterations else None
        answer = function(*form.rebuild(parameters))
        found, leaves = flatten(answer)
        kept = tuple(leaf is not None and not isinstance(leaf, Node) for leaf in leaves)
        answers = tuple(graph.adopt(as_value(leaf)) for leaf, keep in zip(leaves, kept, strict=True) if keep)
    return Traced(graph, parameters, found, answers, kept)


def asks_for_iteration(traced: Traced) -> bool:
    """Whether anything in the body, or in bodies inside it, wants to know which iteration it is."""
    iteration = traced.graph.iteration
    return iteration is not None and any(iteration is given for node in traced.graph.nodes for given in node.inputs)


def capture(traced: Iterable[Traced]) -> list[Tensor]:
    """What any of the bodies uses of the graph around them: every body gets all of it."""
    return list(dict.fromkeys(outside for one in traced for outside in one.graph.captured))


def awaited(traced: Iterable[Traced]) -> list[Node]:
    """What anything inside the bodies waits for in the graph around them."""
    return list(dict.fromkeys(node for one in traced for node in one.graph.awaited))


def close(traced: Traced, answers: Sequence[Tensor], captured: Sequence[Tensor]) -> Plan:
    """The body: its feeds are its parameters and ``captured``, its fetches ``answers``."""
    inside = [traced.graph.adopt(outside) for outside in captured]
    return as_body(traced.graph, [*traced.parameters, *inside], answers, keep_effects=True)


def as_tensor(graph: Graph, value: Any, dtype: Any = None) -> Tensor:
    """An answer as a tensor of ``graph``; plain data gets ``dtype`` where it fits."""
    if isinstance(value, Tensor):
        if value.graph is not graph:
            raise GraphError(f"{user_site()}: {value!r} belongs to another graph")
        return value
    fits = dtype is not None and takes(value, dtype)
    return graph.constant(as_dtype_of(value, dtype) if fits else default_array(value))


def as_body(graph: Graph, feeds: Sequence[Tensor], fetches: Sequence[Tensor], keep_effects: bool = False) -> Plan:
    """The nodes of ``graph`` between ``feeds`` and ``fetches`` as a plan; what a feed stands for is left out."""
    nodes = between(graph, feeds, fetches, keep_effects)
    values = {tensor: number for number, tensor in enumerate(feeds)}
    position: dict[Node, int] = {}
    made: list[PlanNode] = []
    number = len(feeds)
    last: tuple[int, ...] = ()
    for node in nodes:
        if isinstance(graph, Subgraph) and node.device not in (graph.device, ANYWHERE):
            raise GraphError(
                f"{node!r} asks for {node.device} inside a loop or branch, all of which runs on one device; ask for a "
                "device around the whole, or compute this outside"
            )
        if any(t not in values for t in node.inputs):
            raise GraphError(f"{node!r}: a placeholder inside a loop or branch cannot be fed; create it outside")
        before = tuple(position[n] for n in node.control_inputs if n in position)
        if has_effect(node):
            before, last = tuple(dict.fromkeys((*before, *last))), (len(made),)
        position[node] = len(made)
        inputs = tuple(values[t] for t in node.inputs)
        values |= {t: i for i, t in enumerate(node.outputs, number) if t not in values}
        number += len(node.outputs)
        outputs = tuple(t.spec for t in node.outputs)
        made.append(PlanNode(node.op.name, node.name, inputs, outputs, dict(node.attrs), before, site=str(node.site)))
    known = [PlanFeed(t.op.name, t.spec, str(t.op.site)) for t in feeds]
    return Plan("", tuple(made), tuple(known), tuple(values[t] for t in fetches))


def with_flat_feeds(body: Plan, flat: Collection[int]) -> Plan:
    """``body`` where the feeds at some places, of known shapes, are given as vectors: it reshapes them first."""
    count, added = len(body.feeds), 2 * len(flat)
    shaped = {feed: count + 2 * place + 1 for place, feed in enumerate(flat)}

    def moved(values: Sequence[int]) -> tuple[int, ...]:
        return tuple([shaped.get(value, value if value < count else value + added) for value in values])

    first: list[PlanNode] = []
    for place, feed in enumerate(flat):
        told, shape = body.feeds[feed], np.array(body.feeds[feed].spec.concrete, np.int64)
        sizes = count + 2 * place
        first += [
            PlanNode("constant", f"{told.name}/shape", (), (spec_of(shape),), {"value": shape}, site=told.site),
            PlanNode("reshape", f"{told.name}/shaped", (feed, sizes), (told.spec,), {}, site=told.site),
        ]
    feeds = [
        replace(f, spec=Spec(f.spec.dtype, (f.spec.size,))) if i in shaped else f for i, f in enumerate(body.feeds)
    ]
    nodes = [replace(n, inputs=moved(n.inputs), control=tuple([c + added for c in n.control])) for n in body.nodes]
    return replace(body, feeds=tuple(feeds), nodes=(*first, *nodes), fetches=moved(body.fetches))


def has_effect(node: Node | PlanNode) -> bool:
    """Whether a node reads or changes more than its inputs, and not only draws random numbers."""
    op = node.op if isinstance(node, Node) else lookup(node.op)
    if op.name == "read_variable" and not node.attrs["fresh"]:
        return False
    return op.effect or (op.stateful and ("resource" in node.attrs or op.name.startswith("stateful_")))


def between(graph: Graph, feeds: Sequence[Tensor], fetches: Sequence[Tensor], keep_effects: bool = False) -> list[Node]:
    """The nodes that ``fetches`` need from ``feeds``, and perhaps those with effects, in order of creation."""
    fed = set(feeds)
    stack = [t.op for t in fetches if t not in fed]
    stack += [node for node in graph.nodes if keep_effects and has_effect(node)]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [t.op for t in node.inputs if t not in fed]
            stack += node.control_inputs
    inputs = {t.op for t in feeds if t.op.op.name == "placeholder"}
    return [node for node in graph.nodes if node in needed and node not in inputs]


def replay(body: Plan, inputs: Sequence[Tensor], graph: Graph) -> list[Tensor]:
    """The values of ``body`` for ``inputs``, built in ``graph``, by number."""
    values = list(inputs)
    for node in body.nodes:
        file, _, line = node.site.rpartition(":")
        site = Site(file, int(line)) if line.isdecimal() else None
        values += built_again(graph, lookup(node.op), [values[v] for v in node.inputs], node.attrs, node.name, site)
    return values


def built_again(
    graph: Graph, op: Op, inputs: Sequence[Tensor], attrs: Mapping[str, Attr], name: str, site: Site | None
) -> list[Tensor]:
    """The outputs of a node like one that was built at ``site``, in ``graph``."""
    with from_site(site):
        return [t for t in graph.apply(op, inputs, attrs, name) if isinstance(t, Tensor)]


def infer_body(body: Plan, inputs: Sequence[Spec]) -> list[Spec]:
    """The specs of all values of ``body`` for inputs of these specs; raises `SpecError` naming the node inside."""
    if len(inputs) != len(body.feeds):
        raise SpecError(f"its body takes {len(body.feeds)} inputs, not {len(inputs)}")
    specs = list(inputs)
    for node in body.nodes:
        try:
            outputs = lookup(node.op).infer([specs[v] for v in node.inputs], node.attrs)
        except SpecError as error:
            raise SpecError(f"{node.where()}: {error}") from None
        if len(outputs) != len(node.outputs):
            raise SpecError(f"{node.where()}: its body expects {len(node.outputs)} outputs, the op has {len(outputs)}")
        specs += outputs
    return specs


def answers_of(body: Plan, inputs: Sequence[Spec]) -> list[Spec]:
    """The specs of what ``body`` answers for inputs of these specs."""
    specs = infer_body(body, inputs)
    return [specs[v] for v in body.fetches]


def changes_state(*bodies: Plan | None) -> bool:
    """Whether anything in the bodies has an effect, so that only the step machine may run them."""
    return any(has_effect(node) for body in bodies if body is not None for node in body.nodes)


def built_of(target: Tensor, instead: Mapping[Tensor, Tensor], graph: Graph) -> Tensor:
    """``target`` once more, in ``graph``, of other tensors ``instead`` of some: what hangs on these is built again.

    What draws random numbers draws the same. Raises `GraphError` for what has an effect, as that happens once, and for
    variables that are read anew where another tensor stands for them.
    """
    values = dict(instead)
    variables = {name for t in instead for name in t.op.resources}
    for node in between(target.graph, list(instead), [target]):
        for _, name in variables.intersection(node.resources):
            raise GraphError(f"{node!r} reads {name!r} anew, and not what stands for it; use the variable itself")
        if any(t in values for t in node.inputs):
            if has_effect(node):
                raise GraphError(f"{node!r} has an effect, and so is not computed again for other values")
            inputs = [graph.adopt(values.get(t, t)) for t in node.inputs]
            again = built_again(graph, node.op, inputs, node.attrs, node.name, node.site)
            values.update(zip(node.outputs, again, strict=True))
    found: Tensor = graph.adopt(values.get(target, target))
    return found
