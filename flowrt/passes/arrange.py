"""Choose devices for a whole graph by what its nodes are predicted to take: see `earliest_finish`.

Law: pure. It is done once for a graph, all of whose steps then agree, before any variable lies anywhere; what starts
variables has no say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrt.base.valueclass import valueclass
from flowrt.passes.earliest_finish import Work, WorkItem, choose
from flowrt.passes.estimates import Costs, assumed

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.graph import Graph
    from flowrt.passes.estimates import Prediction


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
    costs = Costs(prediction, {device.kind or "" for device in devices})
    items = []
    for node in nodes:
        unit, specs = units[node.index], [t.spec for t in (*node.inputs, *node.outputs)]
        taken = costs.of(node.op.name, node.name, specs, node.attrs)
        seconds = tuple(taken[device.kind or ""] if device in places[unit] else math.inf for device in devices)
        inputs = [(position[t.op.index], assumed(t.spec)) for t in node.inputs if t.op.index in position]
        items.append(WorkItem(numbers[unit], seconds, tuple((source, float(spec.nbytes)) for source, spec in inputs)))
    work = Work(tuple(items), len(devices), _crossing(devices, prediction))
    found = choose(work)
    chosen = {unit: devices[number] for unit, number in zip(places, found.devices, strict=True)}
    return Arrangement(chosen, found.seconds, found.alone)


def _crossing(devices: Sequence[Device], prediction: Prediction) -> Callable[[int, int, float], float]:
    return lambda source, target, nbytes: prediction.crossing(devices[source], devices[target], nbytes)


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
