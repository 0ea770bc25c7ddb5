"""Make one node of a padding, what is computed inside it and what is computed around it, as stencils have them.

Law: a pass on a placed step whose elementwise nodes are fused. All run on one device, under the same sides of switches
and behind the same effects. Only the padding reads the node ahead of it, and only the node behind it reads the padding;
the node made stands in that one's place, under its id and name, where all that the others waited for is done. Sizes are
known, and large enough for it to matter that neither the inside nor what is padded is written down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from flowrt.base.traits import Arranged, traits_of
from flowrt.ops.fused import parts_of
from flowrt.passes.fuse import MAX_INPUTS, Fusible, fused_node, markers
from flowrt.passes.joining import joined, users_of
from flowrt.passes.step import FED, NO_GUARDS, StepGraph, StepNode, guards_of

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.base.spec import Shape

PAD = "pad"
LARGE = 1 << 14  # entries


def join_paddings(step: StepGraph, placement: Mapping[int, Device], fusible: Fusible) -> StepGraph:
    """``step`` with nodes ``fused`` around paddings."""
    pads = [node for node in step.nodes.values() if node.op.name == PAD and _is_large(node)]
    if not pads:
        return step
    users, guards, behind = users_of(step), guards_of(step), markers(step, placement)

    def alike(one: int, other: int) -> bool:
        under = guards.get(one, NO_GUARDS) == guards.get(other, NO_GUARDS)
        return placement[one] == placement[other] and behind[one] == behind[other] and under

    chosen: dict[int, list[StepNode]] = {}  # by the last of each: what is ahead, if anything, the padding, the reader
    for pad in pads:
        reader, ahead = _reader(step, pad, users), step.nodes.get(pad.inputs[0][0])
        if reader is None or reader.id in chosen or not alike(pad.id, reader.id):
            continue
        if not _goes_over_entries(step, reader, pad.outputs[0].dims, fusible, placement):
            continue
        chosen[reader.id] = [pad, reader]
        if ahead is None or users[ahead.id] != {pad.id} or not alike(ahead.id, pad.id):
            continue
        dims = step.spec(pad.inputs[0]).dims
        if len(ahead.outputs) == 1 and _goes_over_entries(step, ahead, dims, fusible, placement, views=True):
            chosen[reader.id] = [ahead, pad, reader]
    return _rewritten(step, chosen)


def _is_large(node: StepNode) -> bool:
    dims = node.outputs[0].dims
    return dims is not None and None not in dims and math.prod(n for n in dims if n is not None) >= LARGE


def _reader(step: StepGraph, pad: StepNode, users: Mapping[int, Collection[int]]) -> StepNode | None:
    """The only node that reads a padding and waits for it."""
    if len(users[pad.id]) != 1 or FED in users[pad.id] or pad.id in step.targets:
        return None
    (reader,) = (step.nodes[i] for i in users[pad.id])
    return reader if (pad.id, 0) in reader.inputs else None


def _goes_over_entries(
    step: StepGraph,
    node: StepNode,
    dims: Shape | None,
    fusible: Fusible,
    placement: Mapping[int, Device],
    *,
    views: bool = False,
) -> bool:
    """Whether a node computes entry by entry what it answers, all of it of these dims; it may read ``views``."""
    taken = [step.spec(ref) for ref in node.inputs]
    known = all(spec.dims is not None and None not in spec.dims for spec in taken)
    if not known or any(out.dims != dims for out in node.outputs) or node.op.stateful or node.op.effect:
        return False
    if node.op.name == "fused":
        return all(_is_an_entry(op, views) for op in parts_of("fused", node.attrs))
    return len(node.outputs) == 1 and fusible(node.op.name, step.dtypes(node), placement[node.id].kind or "")


def _is_an_entry(op: str, views: bool) -> bool:
    """Whether a member computes an entry of entries, or, if ``views`` may be read, is one."""
    traits = traits_of(op)
    if traits.reduction is not None or op == PAD:
        return False
    return traits.view is None or (views and traits.view is not Arranged.RESHAPED)


def _rewritten(step: StepGraph, chosen: Mapping[int, Sequence[StepNode]]) -> StepGraph:
    """``step`` with each of those as the node of the last of them, but for what would take too much."""
    made = {last: _node(step, nodes) for last, nodes in chosen.items()}
    made = {last: node for last, node in made.items() if len(node.inputs) <= MAX_INPUTS}
    return joined(step, made, {node.id: last for last in made for node in chosen[last]})


def _node(step: StepGraph, nodes: Sequence[StepNode]) -> StepNode:
    last = nodes[-1]
    return fused_node(step, [node.id for node in nodes], [(last.id, n) for n in range(len(last.outputs))], last.id)
