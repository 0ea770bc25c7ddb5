"""Which nodes of a plan run together as one tape.

Law: pure; it knows edges, devices and the names of a few ops, and neither shapes of a step nor memory. A *breaker* is a
node that the step machine must run itself (an effect, a switch, a merge). Nodes of one device with the same set of
breakers behind them form a region. A breaker's own set is part of what it hands on, except that a merge or send, which
may live where its inputs are dead, hands on itself alone; a switch hands on each side as a marker of its own; where an
edge crosses devices, its source is a marker too.

Why this is right. Let F(n) be all markers behind n, those behind merges and sends included; F is a function of n's
set, so it is one for a whole region. Along every edge F stays or grows; through a breaker, or across devices, it grows.
So on a cycle among units F would be the same all along: the cycle passes no breaker and stays on one device. Then the
sets themselves only grow along it, so they are equal: it is one region. Hence the units form no cycle, and each region
is convex: no path leaves it and comes back. A region waits for exactly what is behind each of its nodes, and since its
nodes are alive if and only if all their markers are, they are dead or alive together.

A constant or variable read is computed beside its readers, where one of their sets is part of those of all that wait
for it. It has nothing behind it, so taking that set keeps every edge's sets growing, and all of the above holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.collection import free_each
from flowrt.base.spec import Spec, computed, value_known
from flowrt.base.traits import writes
from flowrt.op import sizing
from flowrt.sched.regions.alike import FoundLast

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

Name: TypeAlias = tuple[str, str]
Markers: TypeAlias = int  # a set of markers, as bits

CONSTANT, READ = "constant", "read_variable"
ANYWHERE = -2  # the home of a node that is in every group that reads it
REVIVING = frozenset({"merge", "send"})  # what follows these may be alive although something before them is dead


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Nodes that run as one.

    ``nodes`` are positions in plan order, ``first`` the value id of each one's first output. ``inputs`` are values read
    from outside, ``outputs`` values that others read or the step fetches, ``control`` the outside nodes waited for.
    ``reads`` and ``writes`` are variables as (container, name). ``shape_inputs`` are the inputs whose values, not only
    shapes, decide shapes inside. ``latest`` is what its latest recording found.
    """

    nodes: tuple[int, ...]
    first: tuple[int, ...]
    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    control: tuple[int, ...] = ()
    reads: tuple[Name, ...] = ()
    writes: tuple[Name, ...] = ()
    shape_inputs: tuple[int, ...] = ()
    latest: FoundLast = field(default_factory=FoundLast, init=False, repr=False)

    @property
    def variables(self) -> tuple[Name, ...]:
        """Every variable read or written, in name order."""
        return tuple(sorted({*self.reads, *self.writes}))


def resource_of(node: PlanNode) -> Name:
    """The (container, name) of the variable that a node reads or writes."""
    return (str(node.attrs["container"]), str(node.attrs["resource"]))


def resources_of(node: PlanNode) -> tuple[Name, ...]:
    """Every variable that a node reads or writes: its own, then those it keeps beside it."""
    name = resource_of(node)
    return (name, *((name[0], str(slot)) for slot in node.attrs.get("slots", ())))


def variable_spec(node: PlanNode) -> Spec:
    """The spec that such a node says its variable has."""
    return _spec(node.attrs["dtype"], node.attrs["shape"])


def variable_specs(node: PlanNode) -> tuple[Spec, ...]:
    """The specs of all of `resources_of`: what is kept beside a variable has its shape."""
    own = variable_spec(node)
    return (own, *[_spec(computed(own.dtype), own.dims)] * len(node.attrs.get("slots", ())))


_spec = lru_cache(1024)(Spec)


def find_regions(plan: Plan, breaks: Callable[[PlanNode], bool]) -> tuple[Region, ...]:
    """The regions of ``plan``, by their first nodes; nodes for which ``breaks`` holds are in none."""
    edges = _Edges(plan)
    broken = [breaks(node) for node in plan.nodes]
    sets = _markers(edges, broken)
    _move_sources(edges, broken, sets)
    groups: dict[tuple[str, Markers], list[int]] = {}
    for position, node in enumerate(plan.nodes):
        if not broken[position]:
            groups.setdefault((node.device, sets[position]), []).append(position)
    home = [-1] * len(plan.nodes)
    for number, nodes in enumerate(groups.values()):
        for position in nodes:
            home[position] = number
    regions = tuple([_region(edges, home, number, nodes) for number, nodes in enumerate(groups.values())])
    free_each(edges.readers)
    return regions


def regions_of(
    plan: Plan, groups: Sequence[Sequence[int]], anywhere: Collection[int], outputs: Iterable[int]
) -> tuple[Region, ...]:
    """Groups of nodes as regions, parts of one that makes these ``outputs``. What stands ``anywhere`` is in every group
    that reads it."""
    edges = _Edges(plan)
    edges.fetched = frozenset(outputs)
    home = [-1] * len(plan.nodes)
    for number, nodes in enumerate(groups):
        for position in nodes:
            home[position] = ANYWHERE if position in anywhere else number
    return tuple([_region(edges, home, number, nodes) for number, nodes in enumerate(groups)])


def size_operands(node: PlanNode) -> Iterator[int]:
    """Positions of the inputs of ``node`` whose values decide its outputs' sizes."""
    yield from sizing(node.op, node.attrs, len(node.inputs))


class _Edges:
    """A plan's edges, both ways."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes = plan.nodes
        self.starts = plan.value_starts()
        self.specs = plan.value_specs()
        self.producers = [-1] * len(plan.feeds) + [i for i, node in enumerate(plan.nodes) for _ in node.outputs]
        self.readers: list[list[int]] = [[] for _ in self.producers]
        self.followers: dict[int, list[int]] = {}  # of those that have some
        self.fetched = frozenset(plan.fetches)
        for position, node in enumerate(plan.nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers[value].append(position)
            for before in dict.fromkeys(node.control):
                self.followers.setdefault(before, []).append(position)

    def outputs(self, position: int) -> range:
        return range(self.starts[position], self.starts[position + 1])


def _markers(edges: _Edges, broken: Sequence[bool]) -> list[Markers]:
    """The markers behind each node; a breaker's own are not among its own."""
    behind: list[Markers] = []
    handed: list[Markers] = [0] * len(edges.producers)
    done: list[Markers] = []  # what a control edge hands on
    crossed: dict[int, Markers] = {}
    used = 0

    def marker() -> Markers:
        nonlocal used
        used += 1
        return 1 << (used - 1)

    for position, node in enumerate(edges.nodes):
        found = 0
        for value in node.inputs:
            found |= handed[value]
        for before in node.control:
            found |= done[before]
        for before in (*map(edges.producers.__getitem__, node.inputs), *node.control):
            if before >= 0 and not broken[before] and edges.nodes[before].device != node.device:
                if before not in crossed:
                    crossed[before] = marker()
                found |= crossed[before]
        behind.append(found)
        if not broken[position]:
            done.append(found)
            sides = [found] * len(node.outputs)
        elif node.op == "switch":
            done.append(found | marker())
            sides = [found | marker() for _ in node.outputs]
        else:
            done.append(marker() if node.op in REVIVING else found | marker())
            sides = [done[-1]] * len(node.outputs)
        for value, side in zip(edges.outputs(position), sides, strict=True):
            handed[value] = side
    return behind


def _move_sources(edges: _Edges, broken: Sequence[bool], sets: list[Markers]) -> None:
    """Put constants and reads beside their readers: a variable read elsewhere would have to be copied out."""
    for position, node in enumerate(edges.nodes):
        if node.op not in (CONSTANT, READ) or node.inputs or node.control or broken[position]:
            continue
        value = edges.starts[position]
        readers = edges.readers[value]
        if not readers or value in edges.fetched:
            continue
        if any(broken[n] or edges.nodes[n].device != node.device for n in readers):
            continue
        smallest = min((sets[n] for n in readers), key=int.bit_count)
        if all(smallest & ~sets[n] == 0 for n in (*readers, *edges.followers.get(position, ()))):
            sets[position] = smallest


def _region(edges: _Edges, home: Sequence[int], here: int, nodes: Sequence[int]) -> Region:
    members = [edges.nodes[n] for n in nodes]
    inputs: dict[int, None] = {}
    control: dict[int, None] = {}
    outputs: list[int] = []
    for position, node in zip(nodes, members, strict=True):
        for value in node.inputs:
            producer = edges.producers[value]
            if producer < 0 or home[producer] not in (here, ANYWHERE):
                inputs[value] = None
        control.update((before, None) for before in node.control if home[before] != here)
        outputs += [
            value
            for value in edges.outputs(position)
            if value in edges.fetched or (home[position] == here and any(home[n] != here for n in edges.readers[value]))
        ]
    return Region(
        nodes=tuple(nodes),
        first=tuple(edges.starts[n] for n in nodes),
        device=members[0].device,
        inputs=tuple(sorted(inputs)),
        outputs=tuple(outputs),
        control=tuple(control),
        reads=_resources(node for node in members if node.op == READ),
        writes=_resources(node for node in members if writes(node.op)),
        shape_inputs=_shape_inputs(edges, nodes, inputs),
    )


def _resources(nodes: Iterable[PlanNode]) -> tuple[Name, ...]:
    return tuple(dict.fromkeys(name for node in nodes for name in resources_of(node)))


def _shape_inputs(edges: _Edges, nodes: Iterable[int], inputs: Iterable[int]) -> tuple[int, ...]:
    """The region's inputs from which a value may reach an operand that decides sizes."""
    outside = frozenset(inputs)
    left = [edges.nodes[n].inputs[i] for n in nodes for i in size_operands(edges.nodes[n])]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if value in seen or not _may_carry(edges.specs[value]):
            continue
        seen.add(value)
        if value not in outside:
            node = edges.nodes[edges.producers[value]]
            left += () if node.op == "shape_of" else node.inputs
    return tuple(value for value in sorted(inputs) if value in seen)


def _may_carry(spec: Spec) -> bool:
    """Whether inference needs a step to learn this tensor's value, and can use it."""
    return spec.dtype.kind in "iu" and (spec.dims is None or len(spec.dims) <= 1) and not value_known(spec.value)
