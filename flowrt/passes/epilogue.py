"""Make one node of a product or convolution and the elementwise node that reads it, so that its results are still near.

Law: a pass on a placed step whose elementwise nodes are fused. The two run on one device, under the same sides of
switches and behind the same effects, and the one that reads comes before all else that waits for the product: then
every edge of the step still leads onward. The node made bears the id of the reader, so that it keeps its name and
place. Where others want the product, too (its gradient, say), it is the node's first result. What is assigned to a
variable is left alone, since by itself it is computed in the variable's own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrt.base.traits import Arranged, reduction_of, traits_of
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.ops.fused import parts_of
from flowrt.passes.fuse import Fusible, markers
from flowrt.passes.joining import joined, standing_for
from flowrt.passes.sizes import Sizes
from flowrt.passes.step import NO_GUARDS, Ref, StepGraph, StepNode, guards_of

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device


@valueclass
class _Pair:
    """A product, the node that goes over its entries, and whether others want the product."""

    product: StepNode
    reader: StepNode
    kept: bool


def append_epilogues(step: StepGraph, placement: Mapping[int, Device], fusible: Fusible) -> StepGraph:
    """``step`` with nodes ``with_epilogue`` for products and what is computed entry by entry of them."""
    products = [node for node in step.nodes.values() if node.op.traits.contraction is not None]
    if not products:
        return step
    guards, behind = guards_of(step), markers(step, placement)
    pairing = _Pairing(step, placement, fusible)
    pairs: dict[int, _Pair] = {}  # by the reader
    for product in products:
        pair = pairing.pair(product)
        if pair is None:
            continue
        one, other = product.id, pair.reader.id
        together = placement[one] == placement[other] and behind[one] == behind[other]
        if together and guards.get(one, NO_GUARDS) == guards.get(other, NO_GUARDS):
            pairs[other] = pair  # of several products the last: the others are there when it begins
    return _rewritten(step, pairs)


def _followers(step: StepGraph) -> dict[int, set[int]]:
    followers: dict[int, set[int]] = {i: set() for i in step.nodes}
    for node in step.nodes.values():
        for source in node.before:
            followers[source].add(node.id)
    return followers


class _Pairing:
    """What of a step each product may be joined with."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device], fusible: Fusible) -> None:
        self._step, self._placement, self._fusible = step, placement, fusible
        self._place = {i: number for number, i in enumerate(step.nodes)}
        self._followers = _followers(step)
        self._fetched = set(step.fetches)
        self._sizes: dict[str, Sizes] = {}  # as each kind of device computes the step

    def pair(self, product: StepNode) -> _Pair | None:
        """What ``product`` makes with the first node that waits for it, if that goes over its entries."""
        nodes, followers, ref = self._step.nodes, self._followers, (product.id, 0)
        waiting = sorted(followers[product.id], key=self._place.__getitem__)
        if not waiting:
            return None
        reader, made = nodes[waiting[0]], product.outputs[0]
        if ref not in reader.inputs or made.dims is None or len(made.dims) < 2:
            return None
        kind = self._placement[reader.id].kind or ""
        if any(out.dims != made.dims for out in reader.outputs):
            return None
        if not _same_shape(product, reader, self._sizes_on(kind)):
            return None
        if reader.op.name != "fused" and not self._fusible(reader.op.name, self._step.dtypes(reader), kind):
            return None
        if any(nodes[i].op.stateful for i in followers[reader.id]):
            return None
        wanted = any(ref in nodes[i].inputs for i in waiting[1:]) or ref in self._fetched
        return _Pair(product, reader, wanted)

    def _sizes_on(self, kind: str) -> Sizes:
        if kind not in self._sizes:
            step, fusible = self._step, self._fusible
            self._sizes[kind] = Sizes(step, lambda node: _entrywise(step, node, fusible, kind))
        return self._sizes[kind]


def _same_shape(product: StepNode, reader: StepNode, sizes: Sizes) -> bool:
    """Whether results of the product's dims are never larger, whatever a step finds for those that are unknown."""
    made = product.outputs[0].dims or ()
    if None not in made:
        return True
    if any(traits_of(op).view is Arranged.REPEATED for op in parts_of(reader.op.name, reader.attrs)):
        return False  # what is repeated may be so to any size
    unknown = [axis for axis, size in enumerate(made, -len(made)) if size is None]
    others = [ref for ref in reader.inputs if ref != (product.id, 0)]
    return all(sizes.no_larger(ref, axis, (product.id, 0)) for ref in others for axis in unknown)


def _entrywise(step: StepGraph, node: StepNode, fusible: Fusible, kind: str) -> bool:
    """Whether a node's results lie entry for entry as what it takes, but for axes that it reduces to 1."""
    if node.op.name == "fused":
        reductions = [dict(attrs)["keepdims"] for op, _, _, attrs in _members(node) if reduction_of(op) is not None]
        return all(reductions) and all(traits_of(op).view is None for op in parts_of("fused", node.attrs))
    return len(node.outputs) == 1 and fusible(node.op.name, step.dtypes(node), kind)


def _members(node: StepNode) -> Any:
    return node.attrs["members"]


def _rewritten(step: StepGraph, pairs: Mapping[int, _Pair]) -> StepGraph:
    if not pairs:
        return step
    home = {i: reader for reader, pair in pairs.items() for i in (pair.product.id, reader)}
    refs: dict[Ref, Ref] = {(pair.product.id, 0): (reader, 0) for reader, pair in pairs.items()}
    refs |= {(reader, i): (reader, i + 1) for reader, pair in pairs.items() if pair.kept for i in _results(pair.reader)}
    made = {reader: _joined(pair) for reader, pair in pairs.items()}
    return joined(step, made, home, refs)


def _results(node: StepNode) -> range:
    return range(len(node.outputs))


def _joined(pair: _Pair) -> StepNode:
    """The node of the two; it still waits for what they waited for, by the names those had."""
    product, reader = pair.product, pair.reader
    inputs = list(product.inputs)
    taken: list[int] = []
    for ref in reader.inputs:
        if ref == (product.id, 0):
            taken.append(-1)
            continue
        taken.append(len(inputs))
        inputs.append(ref)
    attrs: dict[str, Attr] = {
        "_many": len(inputs),
        "product": (product.op.name, len(product.inputs), _pairs(product.attrs)),
        "epilogue": (reader.op.name, _pairs(reader.attrs)),
        "taken": tuple(taken),
        "kept": pair.kept,
    }
    return standing_for(
        reader,
        (product, reader),
        op=lookup("with_epilogue"),
        inputs=tuple(inputs),
        outputs=(*product.outputs, *reader.outputs) if pair.kept else reader.outputs,
        attrs=attrs,
    )


def _pairs(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    return tuple(sorted(attrs.items()))
