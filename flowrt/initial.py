"""In which order variables get their first values.

Law: pure. A variable may start from others (a slot of zeros like another, a copy), so those go first; all that can
start side by side do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node, Resource


def initial_waves(graph: Graph, missing: Mapping[tuple[str, str], Resource]) -> list[list[Node]]:
    """The operations that initialise the ``missing`` variables, in groups to run one after another."""
    wave = _waves(graph, missing)
    out: dict[int, list[Node]] = {}
    for resource in missing.values():
        if resource.initialize is not None:
            out.setdefault(wave.get(resource.initialize.index, 0), []).append(resource.initialize)
    return [out[number] for number in sorted(out)]


def _waves(graph: Graph, missing: Mapping[tuple[str, str], Resource]) -> dict[int, int]:
    """For each node before which others must be initialised, after how many groups it may run."""
    wave: dict[int, int] = {}
    for node in graph.nodes:  # what a variable starts from stands before every read of it
        before = [*(tensor.op for tensor in node.inputs), *node.control_inputs]
        number = max((wave.get(other.index, 0) for other in before), default=0)
        read = missing.get(node.resource) if node.op.name == "read_variable" and node.resource is not None else None
        if read is not None and read.initial is not None:
            number = max(number, wave.get(read.initial.op.index, 0) + 1)
        if number:
            wave[node.index] = number
    return wave
