"""In which order variables get their first values, and which of them are tables.

Law: pure. A variable may start from others (a slot of zeros like another, a copy), so those go first; all that can
start side by side do. What starts as an array, or as a number everywhere, needs no step for that. A table, of which
steps see and move rows alone, need be no copy of what it starts from: only pages that are written are (`pages`). For
what is read as a whole, ordinary memory is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.pages import is_held
from flowrt.base.traits import writes_rows
from flowrt.sched.regions.regions import READ

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node, Resource, Tensor

Name: TypeAlias = tuple[str, str]
Array: TypeAlias = np.ndarray[Any, Any]

LARGEST = 1 << 18  # bytes: more is copied by a step, which does it beside the event loop


def initial_waves(missing: Mapping[Name, Resource]) -> list[list[Node]]:
    """The operations that initialise the ``missing`` variables, in groups to run one after another."""
    wave = _waves(missing)
    out: dict[int, list[Node]] = {}
    for resource in missing.values():
        if resource.initialize is not None:
            out.setdefault(wave.get(resource.initialize.index, 0), []).append(resource.initialize)
    return [out[number] for number in sorted(out)]


def arrays(missing: Mapping[Name, Resource]) -> dict[Name, Array]:
    """Those of the ``missing`` variables that start as an array known by now, or as one number, and these."""
    found: dict[Name, Array] = {}
    for name, resource in missing.items():
        value = None if resource.initial is None else _known(resource.initial)
        if value is not None and value.nbytes <= LARGEST:
            found[name] = value
    return found


def _known(tensor: Tensor) -> Array | None:
    """What a constant, or a tensor filled with one, is in every step."""
    node = tensor.op
    if node.control_inputs:
        return None
    if node.op.name == "full" and tensor.spec.known:
        number = _known(node.inputs[1])
        return None if number is None else np.broadcast_to(number, tensor.spec.concrete)
    value = node.attrs["value"] if node.op.name == "constant" else None
    return value if isinstance(value, np.ndarray) else None


def tables(graph: Graph, missing: Mapping[Name, Resource]) -> dict[Name, Array]:
    """Those of the ``missing`` variables that are tables which start from large arrays, and these."""
    found: dict[Name, Array] = {}
    for name, resource in missing.items():
        first = None if resource.initial is None else resource.initial.op
        value = first.attrs["value"] if first is not None and first.op.name == "constant" else None
        if isinstance(value, np.ndarray) and is_held(value):
            found[name] = value
    first_values = {resource.initialize for resource in missing.values()}
    for node in graph.nodes if found else ():
        by_rows = node.op.name == "take" and node.attrs["axis"] == 0
        whole = [source.op for source in node.inputs[by_rows:] if source.op.op.name == READ]
        if node.op.name != READ and not writes_rows(node.op.name) and node not in first_values:
            whole.append(node)
        for other in whole:
            for name in other.resources:
                found.pop(name, None)
    return found


def _initializing(missing: Mapping[Name, Resource]) -> list[Node]:
    """The operations that initialise the ``missing`` variables and all before them, in order."""
    found: dict[int, Node] = {}
    stack = [resource.initialize for resource in missing.values() if resource.initialize is not None]
    while stack:
        node = stack.pop()
        if node.index not in found:
            found[node.index] = node
            stack += [tensor.op for tensor in node.inputs]
            stack += node.control_inputs
    return [found[index] for index in sorted(found)]


def _waves(missing: Mapping[Name, Resource]) -> dict[int, int]:
    """For each node before which others must be initialised, after how many groups it may run."""
    wave: dict[int, int] = {}
    for node in _initializing(missing):  # what a variable starts from stands before every read of it
        before = [tensor.op.index for tensor in node.inputs] + [other.index for other in node.control_inputs]
        number = max([wave[index] for index in before if index in wave], default=0)
        read = missing.get(node.resource) if node.op.name == "read_variable" and node.resource is not None else None
        if read is not None and read.initial is not None:
            number = max(number, wave.get(read.initial.op.index, 0) + 1)
        if number:
            wave[node.index] = number
    return wave
