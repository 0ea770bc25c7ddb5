"""Products of floats of 16 bits, taken as the bits they are stored as, where a device multiplies those.

Law: a pass on a placed step. Both operands are what bits of one dtype stand for, made beside the product; then the
product takes the bits, and what stood between them goes where nobody else reads it. Hosts compute in float32 anyway,
and read what is widened once in each product of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.device import HOST_KIND
from flowrt.base.spec import is_half
from flowrt.op import lookup
from flowrt.ops.precision import WIDENING
from flowrt.passes.step import FED, StepGraph, StepNode, keep_needed

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.passes.place import Supports


def multiply_stored(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> StepGraph:
    """``step`` with products of bits, where the device has a kernel for those."""
    if not any(_kind(step, node) for node in step.nodes.values()):
        return step
    made = {node.id: found for node in step.nodes.values() if (found := _of_bits(step, node, placement, supports))}
    return keep_needed(step, {**step.nodes, **made}) if made else step


def _of_bits(step: StepGraph, node: StepNode, placement: Mapping[int, Device], supports: Supports) -> StepNode | None:
    """``node`` as a product of bits, if it is one of what bits stand for."""
    contraction, device = node.op.traits.contraction, placement[node.id]
    if contraction is None or not contraction.stored or device.kind == HOST_KIND:
        return None
    wide = [step.nodes[source] for source, _ in node.inputs if source != FED]
    kinds = {_kind(step, w) for w in wide}
    if len(wide) != len(node.inputs) or "" in kinds or any(placement[w.id] != device for w in wide):
        return None
    (dtype, *others) = kinds
    bits = tuple(w.inputs[0] for w in wide)
    op = dict(contraction.stored)[dtype]
    if others or not supports(op, [*(step.spec(ref).dtype for ref in bits), node.outputs[0].dtype], device.kind or ""):
        return None
    waits = tuple(dict.fromkeys((*node.control, *(c for w in wide for c in w.control))))
    after = tuple(dict.fromkeys((*node.after, *(a for w in wide for a in w.after))))
    return replace(node, op=lookup(op), inputs=bits, control=waits, after=after)


def _kind(step: StepGraph, node: StepNode) -> str:
    """The dtype of 16 bits whose floats a node answers in float32, if it does that."""
    if node.op.name in WIDENING:
        return WIDENING[node.op.name][0]
    if node.op.name != "astype" or node.outputs[0].dtype != np.float32:
        return ""
    taken = step.spec(node.inputs[0]).dtype
    return taken.name if is_half(taken) else ""
