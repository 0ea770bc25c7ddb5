"""What is called by the order in which it was built, and whether that order is still the same.

Law: pure. A variable without a name of its own (none was given, or it was given before) is "variable_2", say. That
means the same in a graph that begins with the same nodes, and nothing in any other: one more layer in front, or two
that changed places, and it is another variable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.attributes import LARGE
from flowrt.base.plan import Plan
from flowrt.base.valueclass import valueclass
from flowrt.checkpoints import manifest
from flowrt.graph import scopes_of

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node, Resource


@valueclass
class Order:
    """The ``names`` that hang on the order of building, and in which graph: of how many nodes, and their digest."""

    names: frozenset[str]
    nodes: int
    digest: str

    def holds_in(self, graph: Graph) -> bool:
        """Whether ``graph`` begins with the same nodes, so that the names mean the same there."""
        return len(graph.nodes) >= self.nodes and _digest(graph.nodes[: self.nodes]) == self.digest


def nameless(graph: Graph) -> list[Resource]:
    """The variables without a name of their own; what optimisers keep for them is not listed."""
    found = {v.name: v.resource for v in graph.variables if graph.is_counted(v.name)}
    return [resource for name, resource in found.items() if not any(scope in found for scope in scopes_of(name))]


def order_of(graph: Graph) -> Order | None:
    """What hangs on the order of building ``graph``; None if all its variables have names of their own."""
    names = frozenset(v.name for v in graph.variables if graph.is_counted(v.name))
    return Order(names, len(graph.nodes), _digest(graph.nodes)) if names else None


def to_manifest(order: Order) -> manifest.SavedOrder:
    """``order`` as a checkpoint says it."""
    return manifest.SavedOrder(tuple(sorted(order.names)), order.nodes, order.digest)


def from_manifest(order: manifest.SavedOrder) -> Order:
    """What `to_manifest` wrote."""
    return Order(frozenset(order.names), order.nodes, order.digest)


def _digest(nodes: Sequence[Node]) -> str:
    """A digest of what ``nodes`` compute, and what they are called; not of where they run, nor of who wrote them."""
    digest = hashlib.blake2b(digest_size=16)
    for node in nodes:
        inputs = [(tensor.op.index, tensor.index) for tensor in node.inputs]
        control = [before.index for before in node.control_inputs]
        digest.update(repr((node.op.name, node.name, inputs, control, _attributes(node.attrs))).encode())
    return digest.hexdigest()


def _attributes(attrs: Mapping[str, Any]) -> list[Any]:
    return [(name, _plain(attrs[name])) for name in sorted(attrs)]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes() if value.nbytes <= LARGE else b""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Plan):
        return [(n.op, n.name, n.inputs, n.control, _attributes(n.attrs)) for n in value.nodes], value.fetches
    return value
