"""Whether a graph can be run without some nodes of a cluster that it asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from flowrt.base.device import Device

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node


def can_do_without(graph: Graph, rules: Iterable[str], absent: Collection[str], devices: Collection[Device]) -> bool:
    """Whether ``devices`` are all that ``graph`` needs, as the tasks that are ``absent`` have none.

    It needs one for whatever it, or one of the ``rules`` for it, asks a device for; but of what is built for several
    tasks of which some are enough, as are the replicas of a trainer, that many, and none for what works on variables
    that another task has, too.
    """
    asked = {Device.parse(text) for text in rules}
    twice = {task: held.names for held in graph.held_twice for task in held.spared(absent)}

    def ask(nodes: Sequence[Node], spared: Collection[str] = ()) -> None:
        """Take down what nodes ask for that is not ``spared``."""
        for device in {node.device for node in nodes}:
            names = twice.get(device.host)
            done_elsewhere = names is not None and all(
                names.issuperset(node.resources) for node in nodes if node.device == device
            )
            if device.host not in spared and not done_elsewhere:
                asked.add(device)

    first = 0
    for some in graph.some_of:
        if sum(task not in absent for task in some.tasks) < some.least:
            return False
        ask(graph.nodes[first : some.nodes.start])
        ask(graph.nodes[some.nodes.start : some.nodes.stop], set(some.tasks).intersection(absent))
        first = some.nodes.stop
    ask(graph.nodes[first:])
    return all(any(device.matches(each) for each in devices) for device in asked)
