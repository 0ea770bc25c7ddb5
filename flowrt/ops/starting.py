"""What a variable may start from: what a session can compute when it opens, before anything is fed or has run.

Law: pure. Constants, random numbers and other variables are all right; placeholders are not, nor what waits on queues
or writes, since a variable that is restored is not computed anew. Some rows of what a variable starts from are computed
without the others where it is filled with a number, random, or computed entry by entry from such.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, SpecError
from flowrt.base.plan import Plan, resources_in
from flowrt.graph import Node, Tensor
from flowrt.op import lookup
from flowrt.ops.shape import getitem
from flowrt.ops.source import constant, full
from flowrt.subgraph import Subgraph

if TYPE_CHECKING:
    from flowrt.base.errors import Site
    from flowrt.base.plan import PlanNode
    from flowrt.graph import Graph

FILLED = frozenset({"full", "full_like"})
DRAWN = frozenset({"random_normal", "random_truncated_normal", "random_uniform"})
ENTRYWISE = frozenset(f"flowrt.ops.{family}" for family in ("elementwise", "comparison", "activation", "trigonometry"))


def check_start(initial: Any, graph: Graph, name: str, site: Site) -> None:
    """Raise `GraphError` where no session of ``graph`` can compute what the variable ``name`` starts from."""
    if not isinstance(initial, Tensor):
        return  # an array
    if not initial.spec.known:
        raise SpecError(f"a variable starts from a tensor of fully known shape, got {initial.spec}")
    if isinstance(graph, Subgraph):
        return  # a body, in which there are no variables
    if initial.graph is not graph:
        raise GraphError(
            f"variable {name!r} ({site}): {initial!r} ({initial.op.site}) "
            "belongs to another graph, or to the body of a loop"
        )
    stack, seen = [initial.op], graph.startable
    while stack:
        node = stack.pop()
        if node.index in seen:
            continue
        seen.add(node.index)
        why = _why_not(node)
        if why:
            seen.clear()  # what depends on this node is no better
            raise GraphError(f"variable {name!r} ({site}) cannot start from {initial.name!r}: {why}")
        stack.extend(tensor.op for tensor in node.inputs)
        stack.extend(node.control_inputs)


def _why_not(node: Node) -> str | None:
    if node.op.name == "placeholder":
        return (
            f"it needs the placeholder {node.name!r} ({node.site}), and nothing is fed when a session opens; start "
            "from a constant, as fr.zeros makes, and assign what is fed in a step of its own"
        )
    if _acts(node):
        on = "".join(f" {name!r}" for _, name in node.resources[:1])
        return (
            f"it needs {node.op.name} {node.name!r} ({node.site}), which waits or writes{on}, and a session that opens "
            "only computes values; start from a constant, and assign in a step of its own"
        )
    return None


def _acts(node: Node | PlanNode) -> bool:
    """Whether a node waits for something, or changes more than its outputs."""
    op = node.op if isinstance(node, Node) else lookup(node.op)
    bodies = [value for value in node.attrs.values() if isinstance(value, Plan)]
    if bodies:
        return any(_acts(inner) for body in bodies for inner in body.nodes)
    return op.effect or (op.stateful and op.name != "read_variable" and bool(resources_in(node.attrs)))


def rows_of(initial: Any, first: int, end: int) -> Any:
    """The rows from ``first`` up to ``end`` of what a variable starts from, to the bit: an array, or a tensor.

    The tensor is built here and now, where the code around it says. Other rows are not computed for it, unless the
    initial value is of no kind that is known to be made row by row.
    """
    if not isinstance(initial, Tensor):
        return initial[first:end]
    node, dims = initial.op, initial.spec.concrete
    sizes = (end - first, *dims[1:])
    value = node.attrs.get("value")
    if node.op.name == "constant" and isinstance(value, np.ndarray):
        return constant(value[first:end])
    if node.op.name in FILLED and not node.control_inputs:
        return full(sizes, node.inputs[1])
    if node.op.name in DRAWN and not node.control_inputs:
        attrs: dict[str, Any] = {**node.attrs}
        attrs["first"] += first * math.prod(dims[1:])
        return node.graph.apply(node.op, (constant(np.array(sizes)), node.inputs[1]), attrs)[0]
    if node.op.__module__ in ENTRYWISE and not node.control_inputs:
        inputs = [rows_of(x, first, end) if _is_split(x, dims) else x for x in node.inputs]
        return node.graph.apply(node.op, inputs, node.attrs)[0]
    return getitem(initial, ((first, end, None),))


def _is_split(x: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether ``x``, which is broadcast to ``dims``, has a row for each of theirs."""
    return x.spec.rank == len(dims) and x.spec.concrete[0] == dims[0]
