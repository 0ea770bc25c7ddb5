"""The form a step has between the passes: a cut-out of a graph, as values that a pass rewrites into new values.

Law: a pass takes a `StepGraph` and answers a `StepGraph`; the graph behind it is never touched. Nodes keep the index
they have in the graph, so names, sites, colocation and resources are looked up there. Nothing here knows a kernel, a
thread or a socket, and nothing recurses along edges: graphs are deep.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import GraphError, Site, SpecError
from flowrt.base.plan import resources_in
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    import numpy as np

    from flowrt.base.attributes import Attr
    from flowrt.base.spec import Spec
    from flowrt.graph import Graph, Tensor
    from flowrt.op import Op

FED = -1
Ref: TypeAlias = tuple[int, int]
"""A value: (node, output), or (FED, position among the feeds)."""
Guard: TypeAlias = tuple[Ref, int]
"""One side of a switch: (its predicate, the output taken)."""

NAMED = 4  # nodes that an error lists
NO_GUARDS: frozenset[Guard] = frozenset()


@valueclass
class StepNode:
    """One op of a step. ``control`` must finish before it starts.

    ``after`` also must, but only where it runs on the same device: it is there for memory, not for meaning.
    """

    id: int
    op: Op
    name: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Spec, ...]
    attrs: Mapping[str, Attr]
    control: tuple[int, ...]
    site: Site
    after: tuple[int, ...] = ()
    before: Sequence[int] = field(init=False, compare=False, repr=False)
    """The nodes that this one waits for; one may stand there more than once."""

    def __post_init__(self) -> None:
        found = [source for source, _ in self.inputs if source != FED]  # every pass asks: once for each node
        if self.control or self.after:
            found += (*self.control, *self.after)
        object.__setattr__(self, "before", found)

    def where(self) -> str:
        """How errors name this node."""
        return f"{self.op.name} {self.name!r} ({self.site})"

    def rewired(self, inputs: tuple[Ref, ...], control: tuple[int, ...], after: tuple[int, ...]) -> StepNode:
        """This node with other inputs, and waiting for others; as `replace`, in a third of its time."""
        return StepNode(self.id, self.op, self.name, inputs, self.outputs, self.attrs, control, self.site, after)

    @property
    def resource(self) -> tuple[str, str] | None:
        """The (container, name) of the variable or queue this node works on."""
        found = resources_in(self.attrs)
        return found[0] if found else None

    @property
    def resources(self) -> tuple[tuple[str, str], ...]:
        """All that it works on: that one, and the variables it keeps beside it."""
        return resources_in(self.attrs)


@valueclass
class StepGraph:
    """What one step computes: ``nodes`` by id, in a topological order; every one of them is needed.

    Those that ``lead`` are not to run as one with what else waits for the same: before them run those of a larger lead,
    and after them those of a smaller one, which nodes that are not named have.
    """

    graph: Graph
    nodes: Mapping[int, StepNode]
    feeds: tuple[Tensor, ...]
    feed_specs: tuple[Spec, ...]
    fetches: tuple[Ref, ...]
    targets: tuple[int, ...]
    lead: Mapping[int, int] = field(default_factory=dict)

    def spec(self, ref: Ref) -> Spec:
        """The spec of what ``ref`` names."""
        return self.feed_specs[ref[1]] if ref[0] == FED else self.nodes[ref[0]].outputs[ref[1]]

    def dtypes(self, node: StepNode) -> list[np.dtype[Any]]:
        """Those of a node's inputs, then of its outputs."""
        return [spec.dtype for spec in (*map(self.spec, node.inputs), *node.outputs)]

    @property
    def free(self) -> int:
        """The first number from which on no node has one."""
        return 1 + max((len(self.graph.nodes), *self.nodes))


def infer(node: StepNode, inputs: Sequence[Spec]) -> tuple[Spec, ...]:
    """The specs of the outputs of ``node`` where those of its inputs are ``inputs``."""
    try:
        return node.op.infer(inputs, node.attrs)
    except SpecError as error:
        raise SpecError(f"{node.where()}: {error}") from None


def keep_needed(step: StepGraph, nodes: Mapping[int, StepNode]) -> StepGraph:
    """``step`` with those of ``nodes`` that its fetches and targets need."""
    needed: set[int] = set()
    stack = [source for source, _ in step.fetches if source != FED]
    stack += step.targets
    while stack:
        found = stack.pop()
        if found not in needed:
            needed.add(found)
            stack += nodes[found].before
    return replace(step, nodes={i: node for i, node in nodes.items() if i in needed})


def in_order(nodes: Mapping[int, StepNode], key: Callable[[int], Any] = int) -> dict[int, StepNode]:
    """``nodes`` in the topological order that starts the least ``key`` first; raises `GraphError` for a cycle.

    No two nodes have the same key.
    """
    ranked = sorted(nodes) if key is int else sorted(nodes, key=key)
    if _is_in_order(nodes, ranked):
        return dict(nodes)
    rank = dict(zip(ranked, range(len(ranked)), strict=True))
    waiting = [0] * len(ranked)
    followers: dict[int, list[int]] = {}
    for i, node in nodes.items():
        mine = rank[i]
        waiting[mine] = len(node.before)
        for source in node.before:
            followers.setdefault(source, []).append(mine)
    ready = [mine for mine, count in enumerate(waiting) if not count]  # sorted, and so a heap
    out: dict[int, StepNode] = {}
    while ready:
        found = ranked[heapq.heappop(ready)]
        out[found] = nodes[found]
        for follower in followers.get(found, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    if len(out) < len(nodes):
        raise GraphError(f"these operations wait for each other: {_some(n for i, n in nodes.items() if i not in out)}")
    return out


def _is_in_order(nodes: Mapping[int, StepNode], ranked: Sequence[int]) -> bool:
    """Whether ``nodes`` stand as they are ``ranked``, and topologically, which is common and cheap to see."""
    if list(nodes) != ranked:
        return False
    seen: set[int] = set()
    for i, node in nodes.items():
        if not seen.issuperset(node.before):
            return False
        seen.add(i)
    return True


def _some(nodes: Iterable[StepNode]) -> str:
    names = [node.where() for node in nodes]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def guards_of(step: StepGraph) -> dict[int, frozenset[Guard]]:
    """The sides of switches that must be taken for each node to be alive; nodes missing here always are."""
    found: dict[int, frozenset[Guard]] = {}
    if all(node.op.name != "switch" for node in step.nodes.values()):
        return found

    def of(ref: Ref) -> frozenset[Guard]:
        node = step.nodes.get(ref[0])
        mine = found.get(ref[0], NO_GUARDS)
        return mine | {(node.inputs[1], ref[1])} if node is not None and node.op.name == "switch" else mine

    for node in step.nodes.values():
        data = [of(ref) for ref in node.inputs]
        both = frozenset.intersection if node.op.name == "merge" else frozenset.union
        guards = both(*data) if data else NO_GUARDS
        for source in node.control:
            guards |= found.get(source, NO_GUARDS)
        if guards:
            found[node.id] = guards
    return found
