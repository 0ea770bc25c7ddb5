"""Reverse-mode differentiation: the graph that computes derivatives, built beside the graph that computes values.

One walk over the nodes between xs and ys, latest first. Each op's own rule turns the gradients of its outputs into
those of its inputs; what every rule would repeat is done here once: partials are summed, unused outputs get zeros,
gradients are summed down to the shape that was broadcast. The result is made of ordinary ops, so it can be
differentiated again. A gradient is computed where its forward node is. Slices of a table stay slices until an op's rule
or a dense partial wants the tensor they stand for.

Inside a body the walk begins there and goes on in the graphs around it, from what the body uses of them; all that it
builds is the body's. A read of a variable has the variable's gradient, whenever in a step it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.collection import held_back
from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import as_dtype_of
from flowrt.base.plan import Plan, resources_in
from flowrt.base.spec import is_float
from flowrt.base.tracebacks import brief
from flowrt.graph import Graph, Node, Tensor, beside, name_scope
from flowrt.op import active_builder, as_value, building, set_gradients
from flowrt.ops.elementwise import add_n
from flowrt.ops.reduce import sum_to
from flowrt.ops.routing import SplitGradient
from flowrt.ops.shape import joined
from flowrt.ops.slices import IndexedSlices, sum_slices
from flowrt.ops.source import constant, ones_like, shape_of, zeros_like
from flowrt.subgraph import Subgraph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Shape

READ = "read_variable"
Name: TypeAlias = "tuple[str, str]"  # a variable's container and name


@brief
@held_back()
@fitting
def gradients(ys: Any, xs: Any, grad_ys: Any = None) -> list[Any]:
    """The derivatives of the sum of ``ys`` with respect to each of ``xs``.

    That of a variable of which only rows are taken is an `IndexedSlices`; used as a tensor it is the dense one, as it
    is in a body. That of a variable that is split is a `SplitGradient`, used likewise. What `Variable.read` reads
    counts as the variable.

    ``ys`` and ``xs`` are tensors or variables, alone or in a sequence. Each answer has the shape and dtype of its x;
    it is None where no y depends on x in a differentiable way, as for every x of an integer dtype. ``grad_ys`` weighs
    each y by a tensor of its shape (None: ones). Raises `GraphError` for an op on the way without a gradient rule.
    """
    given = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    apart = [x.parts if hasattr(type(x), "parts") else (x,) for x in given]  # a tensor itself would look for a hint
    outputs, sources = _tensors("ys", ys), _tensors("xs", [part for parts in apart for part in parts])
    graph = _innermost(outputs + sources)
    with building(graph), name_scope("gradients"):
        partials = _Partials()
        for y, weight in zip(outputs, _weights(outputs, grad_ys), strict=True):
            partials.add(y, weight)
        reads = _plain_reads(sources)
        for nodes, captured in _dependents(graph, outputs, sources, reads):
            for node in reversed(nodes):
                results = node.outputs if node.op.results is None else node.op.results(node)
                if any(t is not None and partials.has(t) for t in results):
                    _differentiate(node, results, partials, reads)
            for mine, outside in captured.items():
                if partials.has(mine):
                    partials.add(outside, partials.total(mine))
        found = [partials.total(x) if partials.has(x) and _is_real(x) else None for x in sources]
        each = iter([g if g is None or x.graph is graph else as_value(g) for x, g in zip(sources, found, strict=True)])
        return [_whole(x, [next(each) for _ in x.parts]) if hasattr(type(x), "composed") else next(each) for x in given]


def _whole(split: Any, parts: Sequence[Any]) -> SplitGradient | None:
    """The gradient of a variable that is split, of those of its parts."""
    return None if all(part is None for part in parts) else SplitGradient(split.partition, parts)


class _Partials:
    """What has been found of each tensor's gradient so far."""

    def __init__(self) -> None:
        self._found: dict[Tensor, list[Any]] = {}

    def has(self, tensor: Tensor) -> bool:
        return tensor in self._found

    def add(self, tensor: Tensor, partial: Any) -> None:
        self._found.setdefault(tensor, []).append(partial)

    def total(self, tensor: Tensor) -> Any:
        """The sum of the partials, which from now on is the only one."""
        found = self._found[tensor]
        if len(found) > 1:
            found[:] = [_sum(found)]
        return found[0]


def _sum(partials: Sequence[Any]) -> Any:
    """The sum of several partials, beside the first of them."""
    slices = [partial for partial in partials if isinstance(partial, IndexedSlices)]
    with beside(slices[0].values.op if slices else partials[0].op):
        if len(slices) == len(partials):
            return sum_slices(slices)
        together = joined(partials)
        return add_n([as_value(partial) for partial in partials]) if together is None else together


def _differentiate(
    node: Node, results: Sequence[Tensor | None], partials: _Partials, reads: Mapping[Name, Tensor]
) -> None:
    """Carry the gradients of the ``results`` of ``node`` to its inputs; those of a read to its variable."""
    if node.op.name == READ:
        partials.add(reads[node.resources[0]], partials.total(node.outputs[0]))
        return
    rule = node.op.gradient_rule
    if rule is None:
        raise GraphError(
            f"{_where(node)}: {node.op.name} has no gradient; define one with @{node.op.name}.gradient, "
            "or cut it off with stop_gradient"
        )
    with beside(node):
        carried = [
            as_value(partials.total(t))
            if t is not None and partials.has(t)
            else None
            if t is None or node.op.absent_gradients
            else zeros_like(t)
            for t in results
        ]
        answers = _in_tuple(node, rule(node, *carried))
        if len(answers) != len(node.inputs):
            raise GraphError(
                f"{_where(node)}: its gradient rule answered {len(answers)} gradients for {len(node.inputs)} inputs; "
                "it answers a tuple, with None for an input that no gradient flows to"
            )
        for position, (source, answer) in enumerate(zip(node.inputs, answers, strict=True)):
            if answer is not None and _is_real(source):
                partials.add(source, _fitted(node, position, answer, carried))


def _in_tuple(node: Node, answer: Any) -> tuple[Any, ...]:
    """What a rule answered: one for each input, in a tuple or list, or the one alone."""
    if isinstance(answer, (tuple, list)):
        return tuple(answer)
    return (answer,) if len(node.inputs) == 1 else (answer,) * (answer is not None)


def _fitted(node: Node, position: int, gradient: Any, carried: Sequence[Tensor | None]) -> Any:
    """``gradient``, summed down to the shape of the input at ``position`` if that was, or may have been, broadcast."""
    source = node.inputs[position]
    if isinstance(gradient, IndexedSlices) and source.spec.accepts(gradient.dtype, gradient.shape):
        return gradient
    gradient = as_value(gradient)
    if not isinstance(gradient, Tensor):
        gradient = constant(as_dtype_of(gradient, source.dtype))
    if gradient.dtype != source.dtype:
        raise GraphError(
            f"{_where(node)}: its gradient rule answered {gradient.spec} for input {position}, {source.spec}; "
            "a gradient has its tensor's dtype"
        )
    if not _needs_sum(node, position, gradient, carried):
        return gradient
    return sum_to(gradient, np.array(source.shape, np.int64) if source.spec.known else shape_of(source))


def _needs_sum(node: Node, position: int, gradient: Tensor, carried: Sequence[Tensor | None]) -> bool:
    want, got = node.inputs[position].spec, gradient.spec
    if want.known and got.known:
        return want.dims != got.dims
    summed = gradient.op.op.name == "sum_to" and all(gradient is not given for given in carried)
    if summed or not node.op.promote:
        return False  # the rule saw to it, or the op does not broadcast
    mine, *others = (
        dims if dims is None else dims[: max(len(dims) - node.op.core, 0)]
        for dims in (want.dims, *(t.spec.dims for i, t in enumerate(node.inputs) if i != position))
    )
    return _may_broadcast(mine, others)


def _may_broadcast(mine: Shape | None, others: Sequence[Shape | None]) -> bool:
    """Whether a tensor of shape ``mine`` may grow when it is combined with ``others``."""
    if not others:
        return False
    if mine is None or None in others:
        return True
    for other in others:
        if other is not None and len(other) > len(mine):
            return True
    for axis, size in enumerate(reversed(mine), 1):
        beside_it = [other[-axis] for other in others if other is not None and len(other) >= axis]
        if size in (None, 1) and any(n != 1 for n in beside_it):
            return True
    return False


def _dependents(
    graph: Graph, ys: Sequence[Tensor], xs: Sequence[Tensor], reads: Mapping[Name, Tensor]
) -> list[tuple[list[Node], dict[Tensor, Tensor]]]:
    """The nodes not later than ``ys`` through which a change of ``xs`` flows on, in creation order.

    They come by graph, from the innermost to the outermost that has an x, with what the change comes by into each: its
    inputs, and what they stand for in the graph around it.
    """
    reached = {x for x in xs if _is_real(x)}
    levels = _levels(graph)
    while len(levels) > 1 and all(x.graph is not levels[-1] for x in reached):
        levels.pop()
    found: list[tuple[list[Node], dict[Tensor, Tensor]]] = []
    for depth, level in reversed(list(enumerate(levels))):
        captured = level.captured if isinstance(level, Subgraph) else {}
        entered = {mine: outside for outside, mine in captured.items() if outside in reached}
        reached.update(entered)
        inner = levels[depth - 1] if depth else None
        ends = [*ys, *(inner.captured if isinstance(inner, Subgraph) else ())]
        nodes = _between(level, reached, [t.op.index for t in ends if t.graph is level], reads)
        found.insert(0, (nodes, entered))
    return found


def _between(level: Graph, reached: set[Tensor], ends: Sequence[int], reads: Mapping[Name, Tensor]) -> list[Node]:
    """The nodes of ``level`` up to its ``ends`` that what is ``reached`` changes; what they change is reached, too."""
    last = max(ends, default=-1)
    begun = 0 if reads and isinstance(level, Subgraph) else last + 1
    first = min((x.op.index for x in reached if x.graph is level), default=begun)
    found = []
    for node in level.nodes[min(first, begun) : last + 1]:
        changes = node.op.differentiable and any(t in reached for t in node.inputs)
        if changes or (node.op.stateful and _reads_anew(node, reads)):
            reached.update(t for t in node.outputs if _is_real(t))
            found.append(node)
    return found


def _levels(graph: Graph) -> list[Graph]:
    """``graph`` and those around it, innermost first."""
    return [graph, *(_levels(graph.outer) if isinstance(graph, Subgraph) else ())]


def _plain_reads(xs: Sequence[Tensor]) -> dict[Name, Tensor]:
    """Those of ``xs`` that stand for variables, by the variables' names."""
    plain = [x for x in xs if x.op.op.name == READ and not x.op.attrs["fresh"] and _is_real(x)]
    return {name: x for x in plain for name in x.op.resources}


def _reads_anew(node: Node | PlanNode, reads: Mapping[Name, Tensor]) -> bool:
    """Whether a node reads one of these variables by `Variable.read`, or a body that it holds does."""
    if READ in (node.op, getattr(node.op, "name", None)):
        return bool(node.attrs["fresh"]) and any(name in reads for name in resources_in(node.attrs))
    bodies = (value for value in node.attrs.values() if isinstance(value, Plan))
    return any(_reads_anew(inner, reads) for body in bodies for inner in body.nodes)


def _is_real(tensor: Tensor) -> bool:
    """Whether a tensor varies continuously: integers and bools have no derivative."""
    return is_float(tensor.dtype)


def _weights(ys: Sequence[Tensor], grad_ys: Any) -> list[Any]:
    """The gradient that each y starts with."""
    given = [None] * len(ys) if grad_ys is None else list(grad_ys) if isinstance(grad_ys, (list, tuple)) else [grad_ys]
    if len(given) != len(ys):
        raise GraphError(f"{user_site()}: {len(ys)} ys have {len(given)} grad_ys; give each one, or None")
    return [_weight(y, value) for y, value in zip(ys, given, strict=True)]


def _weight(y: Tensor, value: Any) -> Any:
    if not _is_real(y):
        raise GraphError(f"{user_site()}: {y!r} has no gradient: it is not floating; differentiate before astype")
    if value is None:
        with beside(y.op):
            return ones_like(y)
    found = as_value(value)
    tensor = found if isinstance(found, Tensor) else constant(as_dtype_of(found, y.dtype))
    if tensor.spec.dims is None or y.spec.accepts(tensor.dtype, tensor.spec.dims):
        return tensor
    raise GraphError(f"{user_site()}: the gradient given for {y!r} is {tensor.spec}; it must be {y.spec}")


def _tensors(what: str, values: Any) -> list[Tensor]:
    found = [as_value(v) for v in values] if isinstance(values, (list, tuple)) else [as_value(values)]
    for value in found:
        if not isinstance(value, Tensor):
            raise GraphError(f"{user_site()}: {what} of gradients are tensors or variables, got {value!r}")
    if not found:
        raise GraphError(f"{user_site()}: gradients needs at least one of {what}")
    return found


def _innermost(tensors: Sequence[Tensor]) -> Graph:
    """The graph to build in: the body that is being built, if it lies in the graphs of ``tensors``, else theirs."""
    here = active_builder()
    graph = here if isinstance(here, Graph) and here.lies_in(tensors[0].graph) else tensors[0].graph
    for tensor in tensors:
        if tensor.graph is not graph and not graph.lies_in(tensor.graph):
            raise GraphError(f"{user_site()}: {tensor!r} and {tensors[0]!r} belong to different graphs")
    return graph


def _where(node: Node) -> str:
    return f"{node.op.name} {node.name!r} ({node.site})"


set_gradients(gradients)
