"""Write nodes as cheaper ones that mean the same: powers by a number, axes put in by an index.

Law: a pass on a placed step. A node keeps its id, name and place, also where it becomes the last of several. Powers
follow NumPy's ``**``: the power 0.5 is a square root, though that of -inf is NaN and that of -0.0 keeps its sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import is_float
from flowrt.op import lookup
from flowrt.passes.step import FED, Ref, StepGraph, StepNode
from flowrt.passes.views import WHOLE

if TYPE_CHECKING:
    from flowrt.base.device import Device

Chain: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"
"""Ops one after another: each takes values by number, 0 being what is raised to a power and 1 what the first makes."""

POWERS: dict[float, Chain] = {
    0.5: (("sqrt", (0,)),),
    1.0: (("identity", (0,)),),
    1.5: (("sqrt", (0,)), ("multiply", (0, 1))),
    2.0: (("square", (0,)),),
    3.0: (("square", (0,)), ("multiply", (0, 1))),
    4.0: (("square", (0,)), ("square", (1,))),
    -0.5: (("rsqrt", (0,)),),
    -1.0: (("reciprocal", (0,)),),
    -1.5: (("rsqrt", (0,)), ("divide", (1, 0))),
    -2.0: (("reciprocal", (0,)), ("square", (1,))),
}
"""Powers of floats. Nothing in between overflows, or loses digits, where the power itself does not."""


def simplify(step: StepGraph, placement: Mapping[int, Device]) -> tuple[StepGraph, Mapping[int, Device]]:
    """``step`` with its simpler nodes, and where all its nodes run."""
    if all(node.op.name not in ("pow", "getitem") for node in step.nodes.values()):
        return step, placement
    where = dict(placement)
    nodes: dict[int, StepNode] = {}
    free = step.free
    for node in step.nodes.values():
        for made in _simpler(step, node, free):
            where[made.id] = where[node.id]
            nodes[made.id] = made
            free = max(free, made.id + 1)
    return replace(step, nodes=nodes), where


def _simpler(step: StepGraph, node: StepNode, free: int) -> Sequence[StepNode]:
    """The nodes that mean what ``node`` does, of which it is the last; new ones are numbered from ``free`` on."""
    if node.op.name == "pow":
        chain = POWERS.get(_exponent(step, node))
        return [node] if chain is None else _chain(node, chain, free)
    if node.op.name == "getitem":
        axes = _axes_put_in(node.attrs["key"], step.spec(node.inputs[0]).dims)
        return [node] if axes is None else [replace(node, op=lookup("expand_dims"), attrs={"axis": axes})]
    return [node]


def _exponent(step: StepGraph, node: StepNode) -> float:
    """The one number to which power a node raises floats; NaN where there is none."""
    (source, _), out = node.inputs[1], node.outputs[0]
    if source == FED or not is_float(out.dtype) or step.nodes[source].op.name != "constant":
        return np.nan
    value = step.nodes[source].attrs["value"]
    alone = isinstance(value, np.ndarray) and value.ndim == 0
    return float(np.asarray(value)) if alone else np.nan


def _chain(node: StepNode, chain: Chain, free: int) -> list[StepNode]:
    refs: list[Ref] = [node.inputs[0]]
    made: list[StepNode] = []
    for number, (op, taken) in enumerate(chain):
        last = number == len(chain) - 1
        inputs = tuple(refs[i] for i in taken)
        made.append(replace(node, id=node.id if last else free + number, op=lookup(op), inputs=inputs, attrs={}))
        refs.append((made[-1].id, 0))
    return made


def _axes_put_in(key: Any, dims: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """The axes of size 1 that an index puts in, where that is all it does."""
    if dims is None or None not in key or any(item not in (None, "...", WHOLE) for item in key):
        return None
    spot = list(key).index("...") if "..." in key else len(key)
    given = [item for item in key if item not in (None, "...")]
    items = [*key[:spot], *[WHOLE] * (len(dims) - len(given)), *(item for item in key[spot:] if item != "...")]
    return tuple(axis for axis, item in enumerate(items) if item is None)
