"""Make one node of a product or convolution, the bias added to it and the relu of that.

Law: a pass on a placed step. The three are contracted where no one else reads what lies between them; only its shape
may be asked for, which is that of the result. The node made bears the id of the last of them, so that it keeps its name
and its place, and waits for all that they waited for. A step whose nodes would wait for each other stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError
from flowrt.base.traits import TRAITS
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.passes.joining import joined, readers_of, standing_for
from flowrt.passes.step import Ref, StepGraph, StepNode, guards_of

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.op import Op
    from flowrt.passes.place import Supports

ACTIVATIONS = frozenset({"relu"})


@valueclass
class _Chain:
    """A product, the addition of ``bias`` to it, and perhaps an activation."""

    product: StepNode
    bias: Ref
    op: Op
    members: tuple[StepNode, ...]


def contract(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> StepGraph:
    """``step`` with products, biases and activations as single nodes, where the device has a kernel for those."""
    if not any(_biased(node) for node in step.nodes.values()):
        return step
    readers = _Readers(step, placement)
    chains = [c for node in step.nodes.values() if (c := _chain(step, node, readers, supports)) is not None]
    last = {member.id: chain.members[-1].id for chain in chains for member in chain.members}
    refs = {(member, 0): (end, 0) for member, end in last.items()}
    try:
        return joined(step, {chain.members[-1].id: _contracted(chain) for chain in chains}, last, refs)
    except GraphError:  # a bias that is made of what is behind the product
        return step


def contracted(step: StepGraph) -> int:
    """How many nodes `contract` has made."""
    made = {traits.contraction.biased for traits in TRAITS.values() if traits.contraction is not None}
    return sum(node.op.name in made for node in step.nodes.values())


def _biased(node: StepNode) -> str | None:
    """The op that makes a node's product and adds a bias to it."""
    contraction = node.op.traits.contraction
    return None if contraction is None else contraction.biased


class _Readers:
    """Who takes the values of each node of a placed step."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device]) -> None:
        self.placement = placement
        self._asked = {*step.targets, *(source for source, _ in step.fetches)}
        self._switches = bool(guards_of(step))
        self._readers = readers_of(step)

    def only(self, node: StepNode) -> StepNode | None:
        """The one node that needs the entries of ``node`` and runs beside it, if there is just one."""
        if node.id in self._asked:
            return None
        asking = self._readers[node.id]
        found = [reader for reader in asking if reader.op.name != "shape_of"]
        if len(found) != 1 or self.placement[found[0].id] != self.placement[node.id]:
            return None
        if len(asking) > 1 and self._switches:  # the shape may be asked for where the result is dead
            return None
        return found[0]


def _chain(step: StepGraph, product: StepNode, readers: _Readers, supports: Supports) -> _Chain | None:
    """What ``product`` begins, if anything."""
    fused = _biased(product)
    if fused is None:
        return None
    addition = readers.only(product)
    if addition is None or addition.op.name != "add" or len(set(addition.inputs)) != 2:
        return None
    bias = addition.inputs[1 - addition.inputs.index((product.id, 0))]
    out, vector = product.outputs[0], step.spec(bias)
    ranks = [step.spec(ref).dims for ref in product.inputs]
    if out.dims is None or vector.dims is None or any(dims is None or len(dims) < 2 for dims in ranks):
        return None
    if vector.rank != 1 or vector.dims[0] is None or vector.dims != out.dims[-1:] or vector.dtype != out.dtype:
        return None
    dtypes = [*(step.spec(ref).dtype for ref in (*product.inputs, bias)), out.dtype]
    if not supports(fused, dtypes, readers.placement[product.id].kind or ""):
        return None
    follower = readers.only(addition)
    active = follower is not None and follower.op.name in ACTIVATIONS
    members = (product, addition, follower) if follower and active else (product, addition)
    return _Chain(product, bias, lookup(fused), members)


def _contracted(chain: _Chain) -> StepNode:
    product, final = chain.product, chain.members[-1]
    activation = final.op.name if final.op.name in ACTIVATIONS else ""
    return standing_for(
        final,
        chain.members,
        op=chain.op,
        inputs=(*product.inputs, chain.bias),
        attrs={**product.attrs, "activation": activation},
    )
