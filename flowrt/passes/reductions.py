"""Reductions that a group of elementwise nodes may end in: which they are, and sums to a shape as sums over axes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.errors import SpecError
from flowrt.base.spec import normal_axes
from flowrt.op import lookup
from flowrt.passes.step import StepGraph, StepNode, keep_needed

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr


def is_reduction(step: StepGraph, node: StepNode) -> bool:
    """Whether ``node`` makes one of many entries of a tensor whose rank is known."""
    if node.op.traits.reduction is None:
        return False
    taken, made = step.spec(node.inputs[0]), node.outputs[0]
    if node.op.name == "prod" and made.dtype.kind in "iu":  # inference may compute with what a shape comes to
        return False
    return taken.dims is not None and made.dims is not None


def sums_over_axes(step: StepGraph) -> StepGraph:
    """``step`` with ``sum_to`` a known shape as the plain sum that it is, where it is one, and sums of one as that."""
    nodes = {i: _plainer(step, node) for i, node in step.nodes.items()}
    if all(nodes[i] is node for i, node in step.nodes.items()):
        return step
    return keep_needed(step, nodes)


def _plainer(step: StepGraph, node: StepNode) -> StepNode:
    if node.op.name == "sum_to":
        return _over_axes(step, node)
    reduction = node.op.traits.reduction
    return _of_one(step, node) if reduction is not None and reduction.in_rows else node


def _of_one(step: StepGraph, node: StepNode) -> StepNode:
    """A reduction over axes of size 1 as the other shape that it is."""
    taken = step.spec(node.inputs[0])
    if taken.dims is None or taken.dtype != node.outputs[0].dtype:
        return node
    axes = normal_axes(node.attrs["axis"], len(taken.dims))
    if not axes or any(taken.dims[axis] != 1 for axis in axes):
        return node
    if node.attrs["keepdims"]:
        return replace(node, op=lookup("identity"), attrs={})
    return replace(node, op=lookup("squeeze"), attrs={"axis": axes})


def _over_axes(step: StepGraph, node: StepNode) -> StepNode:
    taken, out = step.spec(node.inputs[0]), node.outputs[0]
    if taken.dims is None or not out.known:
        return node
    pad = len(taken.dims) - len(out.concrete)
    axes = (*range(pad), *(i + pad for i, n in enumerate(out.concrete) if n == 1 and taken.dims[i + pad] != 1))
    keepdims = pad == 0
    if not axes or (pad and len(axes) > pad):
        return node
    op = lookup("sum")
    attrs: dict[str, Attr] = {"axis": axes, "keepdims": keepdims}
    try:
        made = op.infer([taken], attrs)
    except SpecError:
        return node
    if made != (out,):
        return node
    return replace(node, op=op, inputs=node.inputs[:1], attrs=attrs)
