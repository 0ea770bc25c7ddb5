"""Choose devices for a whole graph by what its nodes are predicted to take: see `earliest_finish`.

Law: pure. It is done once for a graph, all of whose steps then agree, before any variable lies anywhere; what starts
variables has no say. Sizes that only a step knows count as `ASSUMED`, loops of an open length as `ITERATIONS`. Tasks
are taken to be machines of their own, all alike.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.plan import Plan
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.passes.earliest_finish import Work, WorkItem, choose

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.base.plan import PlanNode
    from flowrt.graph import Graph, Node

ASSUMED = 32
ITERATIONS = 10
FREE = frozenset({"placeholder", "constant", "read_variable", "no_op"})  # what computes nothing
NEAR_BANDWIDTH, NEAR_LATENCY = 8e9, 2e-5  # between devices of one task

Cost: TypeAlias = Callable[[str, Sequence[Spec], str], float]
"""(op, concrete specs of inputs then outputs, kind of device) → seconds."""


@valueclass
class Prediction:
    """What devices are chosen by: the ``cost`` of ops, or the seconds ``measured`` of nodes, by patterns of their
    names; and of what crosses between tasks bytes a second, and seconds of latency."""

    cost: Cost
    measured: Mapping[str, float]
    bandwidth: float
    latency: float


@valueclass
class Arrangement:
    """The device of each unit, and the predicted ``seconds`` of all of the graph, where ``alone`` are those of the best
    device by itself."""

    devices: Mapping[Any, Device]
    seconds: float
    alone: float


def arrange(
    graph: Graph, units: Sequence[Any], able: Callable[[Any], Sequence[Device]], prediction: Prediction
) -> Arrangement:
    """Devices for ``units``, which say of each node what it shares a device with; ``able`` where a unit can be."""
    starting = _starting(graph)
    nodes = [node for node in graph.nodes if node.index not in starting]
    if not nodes:
        return Arrangement({}, 0.0, 0.0)
    places = {unit: able(unit) for unit in dict.fromkeys(units[node.index] for node in nodes)}
    devices = list(dict.fromkeys(device for each in places.values() for device in each))
    numbers = {unit: number for number, unit in enumerate(places)}
    position = {node.index: place for place, node in enumerate(nodes)}
    costs = _Costs(prediction, {device.kind or "" for device in devices})
    items = []
    for node in nodes:
        unit, taken = units[node.index], costs.of(node)
        seconds = tuple(taken[device.kind or ""] if device in places[unit] else math.inf for device in devices)
        inputs = [(position[t.op.index], _assumed(t.spec)) for t in node.inputs if t.op.index in position]
        items.append(WorkItem(numbers[unit], seconds, tuple((source, float(spec.nbytes)) for source, spec in inputs)))
    work = Work(tuple(items), len(devices), _crossing(devices, prediction))
    found = choose(work)
    chosen = {unit: devices[number] for unit, number in zip(places, found.devices, strict=True)}
    return Arrangement(chosen, found.seconds, found.alone)


def _crossing(devices: Sequence[Device], prediction: Prediction) -> Callable[[int, int, float], float]:
    hosts = [device.host for device in devices]

    def seconds(source: int, target: int, nbytes: float) -> float:
        if hosts[source] == hosts[target]:
            return NEAR_LATENCY + nbytes / NEAR_BANDWIDTH
        return prediction.latency + nbytes / prediction.bandwidth

    return seconds


def _starting(graph: Graph) -> set[int]:
    """The nodes that only serve to start variables."""
    uses: dict[int, list[int]] = {}
    for node in graph.nodes:
        for source in (*[t.op for t in node.inputs], *node.control_inputs):
            uses.setdefault(source.index, []).append(node.index)
    found = {r.initialize.index for r in graph.resources.values() if r.initialize is not None}
    for node in reversed(graph.nodes):
        if node.index in uses and found.issuperset(uses[node.index]):
            found.add(node.index)
    return found


class _Costs:
    """What nodes take on each kind of device; what is alike is asked once."""

    def __init__(self, prediction: Prediction, kinds: set[str]) -> None:
        self._cost, self._kinds = prediction.cost, kinds
        self._measured = [(re.compile(fnmatch.translate(glob)), taken) for glob, taken in prediction.measured.items()]
        self._known: dict[Any, Mapping[str, float]] = {}

    def of(self, node: Node) -> Mapping[str, float]:
        """The seconds of a node by kind of device."""
        for pattern, taken in self._measured:
            if pattern.match(node.name):
                return dict.fromkeys(self._kinds, taken)
        specs = [_assumed(t.spec) for t in (*node.inputs, *node.outputs)]
        if any(isinstance(value, Plan) for value in node.attrs.values()):
            return {kind: self._bodies(node, specs, kind) for kind in self._kinds}
        return self._alike(node.op.name, specs)

    def _alike(self, op: str, specs: Sequence[Spec]) -> Mapping[str, float]:
        key = op, *[(spec.dtype, spec.dims) for spec in specs]
        if key not in self._known:
            free = not specs or op in FREE
            self._known[key] = {kind: 0.0 if free else self._cost(op, specs, kind) for kind in self._kinds}
        return self._known[key]

    def _bodies(self, node: Node | PlanNode, specs: Sequence[Spec], kind: str) -> float:
        """What a loop or branch takes: its bodies' nodes, as often as they come; of two branches both."""
        bodies = [value for value in node.attrs.values() if isinstance(value, Plan)]
        return _iterations(node.attrs, specs) * sum(self._body(body, kind) for body in bodies)

    def _body(self, body: Plan, kind: str) -> float:
        values = body.value_specs()
        total, value = 0.0, len(body.feeds)
        for node in body.nodes:
            specs = [_assumed(values[v]) for v in (*node.inputs, *range(value, value + len(node.outputs)))]
            inside = any(isinstance(each, Plan) for each in node.attrs.values())
            total += self._bodies(node, specs, kind) if inside else self._alike(node.op, specs)[kind]
            value += len(node.outputs)
        return total


def _iterations(attrs: Mapping[str, Any], specs: Sequence[Spec]) -> int:
    """How often a loop has an iteration; a branch comes once."""
    if "carried" not in attrs:
        return 1
    if attrs["scanned"]:
        rows = specs[int(attrs["counted"]) + attrs["carried"]].dims
        return rows[0] or 0 if rows else ITERATIONS
    limit: int | None = attrs["limit"]
    if attrs["cond"] is None and limit is not None:
        return limit
    return ITERATIONS if limit is None else min(limit, ITERATIONS)


def _assumed(spec: Spec) -> Spec:
    """A concrete spec in its place."""
    return Spec(spec.dtype, tuple(ASSUMED if n is None else n for n in spec.dims or ()))
