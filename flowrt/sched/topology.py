"""The shape of one plan as ints: who waits for whom, who reads what, and which frame a node runs in.

Law: a `Topology` is built once, checked once, and shared by every run; it holds no state of a run. It knows kinds,
edges and frames, and neither ops, devices nor values. Whatever a run would otherwise look up twice is a table here.
Value ids: the feeds first, then each node's outputs, in node order.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

NEVER_FREED = 1 << 60  # a use count that no run counts down


class NodeKind(IntEnum):
    """How a node takes part in control flow; anything that computes is PLAIN.

    A SEND is launched even when its input is dead: somebody elsewhere waits to be told.
    """

    PLAIN = 0
    SWITCH = 1
    SEND = 2
    MERGE = 3
    ENTER = 4
    EXIT = 5
    NEXT_ITERATION = 6


@valueclass
class Enter:
    """Where an ENTER leads: a frame, once for its first iteration or (constant) for all of them."""

    frame: str
    is_constant: bool = False
    parallel_iterations: int = 10


@valueclass
class Frame:
    """What each iteration of one frame starts from. Frame 0 is the step itself."""

    name: str
    parallel_iterations: int
    enters: int
    nodes: tuple[int, ...]
    exits: tuple[int, ...]
    pending: dict[int, int]
    uses: dict[int, int]
    first: dict[int, int]
    """Merge → data inputs that arrive in iteration 0."""
    later: dict[int, int]
    """Merge → data inputs that arrive in every later iteration."""


@valueclass
class Topology:
    """A plan's nodes and edges, checked and indexed.

    `inputs` are value ids, `controls` node ids, `outputs` counts, each per node; `enters` says where each ENTER leads;
    `keep` are the values to hold until the step ends. Raises `GraphError` for a cycle that passes no NEXT_ITERATION,
    an edge that crosses frames without ENTER or EXIT, and a node that could never become ready.
    """

    kinds: Sequence[NodeKind]
    inputs: Sequence[tuple[int, ...]]
    outputs: Sequence[int]
    controls: Sequence[tuple[int, ...]]
    feeds: int = 0
    keep: frozenset[int] = frozenset()
    enters: Mapping[int, Enter] = field(default_factory=dict)

    values: int = field(init=False, repr=False)
    produced: list[range] = field(init=False, repr=False)
    """Node → its output values."""
    readers: list[tuple[int, ...]] = field(init=False, repr=False)
    """Value → the nodes that wait for it, each once, merges left out."""
    merges: list[tuple[tuple[int, int], ...]] = field(init=False, repr=False)
    """Value → (merge, position) for each merge input it arrives at."""
    followers: list[tuple[int, ...]] = field(init=False, repr=False)
    """Node → the nodes with a control input from it."""
    reads: list[tuple[int, ...]] = field(init=False, repr=False)
    """Node → the values it is done with when it completes: its inputs, and its outputs that nobody reads."""
    quick: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = field(init=False, repr=False)
    """Node → (nodes it wakes, values it releases) where alive and in the root that is all there is to it."""
    frames: tuple[Frame, ...] = field(init=False, repr=False)
    leads_to: dict[int, int] = field(init=False, repr=False)
    """ENTER → frame number."""
    constants: frozenset[int] = field(init=False, repr=False)
    """Values of constant ENTERs."""
    pending: list[int] = field(init=False, repr=False)
    uses: list[int] = field(init=False, repr=False)
    sources: tuple[int, ...] = field(init=False, repr=False)
    """Nodes of the root that wait for nothing."""

    def __post_init__(self) -> None:
        self._set(kinds=tuple(map(NodeKind, self.kinds)))
        produced, at = [], self.feeds
        for count in self.outputs:
            produced.append(range(at, at + count))
            at += count
        self._set(values=at, produced=produced)
        self._check_ids()
        self._set(constants=frozenset(v for n, e in self.enters.items() if e.is_constant for v in produced[n]))
        places = _FrameFinder(self)
        self._index_edges()
        homes: list[list[int]] = [[] for _ in places.names]
        for value, source in enumerate(self._producers):
            homes[places.home(source)].append(value)
        nodes: list[list[int]] = [[] for _ in places.names]
        for node, frame in enumerate(places.runs_in):
            nodes[frame].append(node)
        frames = tuple(self._frame(number, places, nodes[number], homes[number]) for number in range(len(nodes)))
        root = frames[0]
        self._set(
            leads_to=places.leads_to,
            frames=frames,
            pending=[root.pending.get(node, 1) for node in range(len(self.kinds))],
            uses=[root.uses.get(value, 0) for value in range(at)],
            sources=tuple(node for node in root.nodes if not root.pending[node]),
            quick=[self._quick(node, places.runs_in[node]) for node in range(len(self.kinds))],
        )

    def _set(self, **facts: object) -> None:
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)

    def where(self, node: int) -> str:
        return f"node {node} ({self.kinds[node].name})"

    def predecessors(self, node: int) -> Iterator[int]:
        """The nodes before `node`, by data (-1 for a feed) and by control."""
        for value in self.inputs[node]:
            yield self.producer(value)
        yield from self.controls[node]

    def producer(self, value: int) -> int:
        """The node that makes `value`, or -1 for a feed."""
        return self._producers[value]

    _producers: list[int] = field(init=False, repr=False)

    def _check_ids(self) -> None:
        count = len(self.kinds)
        if not len(self.inputs) == len(self.outputs) == len(self.controls) == count:
            raise GraphError(f"{count} kinds, {len(self.inputs)} inputs, {len(self.outputs)} outputs: lengths differ")
        self._set(_producers=[-1] * self.feeds + [node for node in range(count) for _ in self.produced[node]])
        if not all(0 <= value < self.values for value in self.keep):
            raise GraphError(f"keep: {sorted(self.keep)} are not all values of 0..{self.values - 1}")
        for node in range(count):
            if not all(0 <= value < self.values for value in self.inputs[node]):
                raise GraphError(f"{self.where(node)}: inputs {self.inputs[node]} are not all below {self.values}")
            if not all(0 <= before < count for before in self.controls[node]):
                raise GraphError(f"{self.where(node)}: controls {self.controls[node]} are not all below {count}")
            if (self.kinds[node] is NodeKind.ENTER) != (node in self.enters):
                raise GraphError(f"{self.where(node)}: exactly the ENTER nodes have an entry in enters")

    def _index_edges(self) -> None:
        readers: list[list[int]] = [[] for _ in range(self.values)]
        merges: list[list[tuple[int, int]]] = [[] for _ in range(self.values)]
        followers: list[list[int]] = [[] for _ in self.kinds]
        for node, kind in enumerate(self.kinds):
            for before in dict.fromkeys(self.controls[node]):
                followers[before].append(node)
            if kind is NodeKind.MERGE:
                for position, value in enumerate(self.inputs[node]):
                    merges[value].append((node, position))
            else:
                for value in dict.fromkeys(self.inputs[node]):
                    readers[value].append(node)
        self._set(
            readers=[tuple(nodes) for nodes in readers],
            merges=[tuple(edges) for edges in merges],
            followers=[tuple(nodes) for nodes in followers],
        )
        self._set(reads=[self._reads(node) for node in range(len(self.kinds))])

    def _reads(self, node: int) -> tuple[int, ...]:
        kind = self.kinds[node]
        taken = () if kind is NodeKind.MERGE else dict.fromkeys(self.inputs[node])  # a merge releases the one it took
        if kind > NodeKind.MERGE:
            return tuple(taken)  # its outputs live in another iteration
        return (*taken, *(value for value in self.produced[node] if not self.read(value) and value not in self.keep))

    def read(self, value: int) -> bool:
        """Whether any node reads `value`."""
        return bool(self.readers[value] or self.merges[value])

    def _quick(self, node: int, frame: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        outputs = self.produced[node]
        if frame or self.kinds[node] is not NodeKind.PLAIN or any(self.merges[value] for value in outputs):
            return None
        wakes = [reader for value in outputs for reader in self.readers[value]]
        return (*wakes, *self.followers[node]), self.reads[node]

    def _frame(self, number: int, places: _FrameFinder, nodes: list[int], homes: list[int]) -> Frame:
        merges = [node for node in nodes if self.kinds[node] is NodeKind.MERGE]
        enter = places.enter.get(number, Enter("", parallel_iterations=1))
        return Frame(
            name=places.names[number],
            parallel_iterations=enter.parallel_iterations,
            enters=list(places.leads_to.values()).count(number),
            nodes=tuple(nodes),
            exits=tuple(node for node in nodes if self.kinds[node] is NodeKind.EXIT),
            pending={node: self._waits_for(node) for node in nodes},
            uses={value: self._uses(value) for value in homes},
            first={node: places.arrivals(node, NodeKind.NEXT_ITERATION) for node in merges},
            later={node: places.arrivals(node, NodeKind.ENTER) for node in merges},
        )

    def _waits_for(self, node: int) -> int:
        controls = len(set(self.controls[node]))
        if self.kinds[node] is NodeKind.MERGE:
            return controls + 1
        return controls + sum(self.producer(value) >= 0 for value in set(self.inputs[node]))

    def _uses(self, value: int) -> int:
        if value in self.keep or value in self.constants:
            return NEVER_FREED
        count = len(self.readers[value]) + len(self.merges[value])
        source = self.producer(value)
        if not count and source >= 0 and self.kinds[source] <= NodeKind.MERGE:
            return 1  # nobody reads it: released by its own producer
        return count


class _FrameFinder:
    """Which frame each node runs in, found along the edges; and what frames allow."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.names = [""]
        self.parents = [0]
        self.enter: dict[int, Enter] = {}
        self.leads_to: dict[int, int] = {}
        self.runs_in = [0] * len(topology.kinds)
        for node in self._order():
            self._place(node)
        self.loops = {self.runs_in[n] for n, kind in enumerate(topology.kinds) if kind is NodeKind.NEXT_ITERATION}
        for node in range(len(topology.kinds)):
            self._check(node)
        for value in topology.keep:
            if self.home(topology.producer(value)):
                source = topology.where(topology.producer(value))
                raise GraphError(f"{source}: its output lives inside a frame and cannot be fetched; fetch an EXIT")

    def home(self, node: int) -> int:
        """The frame that the outputs of `node` (-1: a feed) live in."""
        if node < 0:
            return 0
        match self.topology.kinds[node]:
            case NodeKind.ENTER:
                return self.leads_to[node]
            case NodeKind.EXIT:
                return self.parents[self.runs_in[node]]
            case _:
                return self.runs_in[node]

    def arrivals(self, merge: int, absent: NodeKind) -> int:
        """How many data inputs of `merge` arrive in iterations where `absent` sends nothing."""
        topology = self.topology
        sources = (topology.producer(value) for value in topology.inputs[merge])
        return sum(not self._sends_once(source, absent) for source in sources)

    def _sends_once(self, source: int, kind: NodeKind) -> bool:
        constant = source in self.leads_to and self.topology.enters[source].is_constant
        return source >= 0 and self.topology.kinds[source] is kind and not constant

    def _before(self, node: int) -> Iterable[int]:
        kinds = self.topology.kinds
        return (n for n in self.topology.predecessors(node) if n >= 0 and kinds[n] is not NodeKind.NEXT_ITERATION)

    def _order(self) -> list[int]:
        """Every node after those it waits for in its own iteration."""
        count = len(self.topology.kinds)
        after: list[list[int]] = [[] for _ in range(count)]
        waits = [0] * count
        for node in range(count):
            for before in self._before(node):
                after[before].append(node)
                waits[node] += 1
        order = [node for node in range(count) if not waits[node]]
        for node in order:
            for follower in after[node]:
                waits[follower] -= 1
                if not waits[follower]:
                    order.append(follower)
        if len(order) < count:
            stuck = next(node for node in range(count) if waits[node])
            raise GraphError(f"{self.topology.where(stuck)}: lies on or behind a cycle that passes no NEXT_ITERATION")
        return order

    def _place(self, node: int) -> None:
        topology = self.topology
        frames = {self.home(before) for before in self._before(node)}
        frames.update(0 for value in topology.inputs[node] if topology.producer(value) < 0)
        if len(frames) > 1:
            names = sorted(self.names[frame] or "the step" for frame in frames)
            raise GraphError(f"{topology.where(node)}: reads from {' and '.join(names)}; lead it through an ENTER")
        frame = self.runs_in[node] = frames.pop() if frames else 0
        kind = topology.kinds[node]
        if kind is NodeKind.ENTER:
            self._lead(node, frame)
        elif kind in (NodeKind.EXIT, NodeKind.NEXT_ITERATION) and not frame:
            raise GraphError(f"{topology.where(node)}: stands outside every frame; it needs an ENTER before it")

    def _lead(self, node: int, parent: int) -> None:
        enter = self.topology.enters[node]
        if enter.parallel_iterations < 1 or not enter.frame:
            raise GraphError(f"{self.topology.where(node)}: needs a frame name and parallel_iterations >= 1: {enter}")
        if enter.frame not in self.names:
            self.names.append(enter.frame)
            self.parents.append(parent)
            self.enter[len(self.names) - 1] = enter
        frame = self.names.index(enter.frame)
        first = self.enter[frame]
        if self.parents[frame] != parent or first.parallel_iterations != enter.parallel_iterations:
            where = self.topology.where(node)
            raise GraphError(f"{where}: {enter} disagrees with the first ENTER of that frame: {first}")
        self.leads_to[node] = frame

    def _check(self, node: int) -> None:
        topology, kind = self.topology, self.topology.kinds[node]
        shape = len(topology.inputs[node]), topology.outputs[node]
        if kind >= NodeKind.ENTER and shape != (1, 1):
            raise GraphError(f"{topology.where(node)}: takes one value and gives one; got {shape[0]} and {shape[1]}")
        if kind is NodeKind.SWITCH and shape != (2, 2):
            raise GraphError(f"{topology.where(node)}: takes two values and gives two; got {shape[0]} and {shape[1]}")
        absences = [NodeKind.NEXT_ITERATION, *([NodeKind.ENTER] if self.runs_in[node] in self.loops else [])]
        if kind is NodeKind.MERGE and not all(self.arrivals(node, absent) for absent in absences):
            raise GraphError(
                f"{topology.where(node)}: in some iteration no input arrives; a loop merges "
                "what an ENTER and a NEXT_ITERATION bring"
            )
        for source in self._strays(node):
            raise GraphError(
                f"{topology.where(node)}: {topology.where(source)} does not reach it in every iteration, "
                "or from another frame; read a MERGE, or a constant ENTER"
            )

    def _strays(self, node: int) -> Iterator[int]:
        """The predecessors that some iteration of `node` would wait for in vain."""
        topology, frame = self.topology, self.runs_in[node]
        merge = topology.kinds[node] is NodeKind.MERGE
        for source in topology.predecessors(node):
            once = self._sends_once(source, NodeKind.NEXT_ITERATION)
            once = once or (frame in self.loops and self._sends_once(source, NodeKind.ENTER))
            if self.home(source) != frame or (once and not (merge and source not in topology.controls[node])):
                yield source
