"""Whether a graph can be run without some nodes of a cluster that it asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from flowrt.base.device import Device

if TYPE_CHECKING:
    from flowrt.graph import Graph


def can_do_without(graph: Graph, rules: Iterable[str], absent: Collection[str], devices: Collection[Device]) -> bool:
    """Whether ``devices`` are all that ``graph`` needs, as the tasks that are ``absent`` have none.

    It needs one for whatever it, or one of the ``rules`` for it, asks a device for; but of what is built for several
    tasks of which some are enough, as are the replicas of a trainer, that many.
    """
    asked = {Device.parse(text) for text in rules}
    first = 0
    for some in graph.some_of:
        if sum(task not in absent for task in some.tasks) < some.least:
            return False
        spared = set(some.tasks).intersection(absent)
        asked |= {node.device for node in graph.nodes[first : some.nodes.start]}
        built = {node.device for node in graph.nodes[some.nodes.start : some.nodes.stop]}
        asked |= {device for device in built if device.host not in spared}
        first = some.nodes.stop
    asked |= {node.device for node in graph.nodes[first:]}
    return all(any(device.matches(each) for each in devices) for device in asked)
