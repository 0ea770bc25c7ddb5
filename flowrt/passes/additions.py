"""Additions to variables as assignments of sums, so that the sum can be fused with what computes the addend.

Law: ``v += a`` may become ``v = v0 + a``, v0 what the step read, only where nobody can tell: it is the step's only
write of the variable, and it stands in one region with the read and all its readers, whose variables are held from
beginning to end. Otherwise another step's addition in between would be lost. A sum that nothing was fused with is put
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.passes.joining import users_of
from flowrt.passes.step import FED, Ref, StepGraph, StepNode, in_order

if TYPE_CHECKING:
    from flowrt.base.device import Device

READ = "read_variable"


@valueclass
class Addition:
    """A write that adds, and the read of its variable whose value the sum begins with; the pass adds one if need be."""

    write: StepNode
    read: StepNode
    added: bool
    number: int  # the sum's id
    by: str  # the op that makes it

    def whole(self) -> StepNode:
        """The node of the sum."""
        write, op = self.write, lookup(self.by)
        inputs: tuple[Ref, ...] = ((self.read.id, 0), write.inputs[0])
        outputs = op.infer([self.read.outputs[0]] * 2, {})
        return StepNode(self.number, op, write.name, inputs, outputs, {}, (), write.site, write.after)

    def assignment(self) -> StepNode:
        """The write as an assignment of the sum."""
        return replace(self.write, op=lookup("assign"), inputs=((self.number, 0),))


def find_additions(
    step: StepGraph, placement: Mapping[int, Device], behind: Mapping[int, int], first: int
) -> list[Addition]:
    """The additions that may be spelled out; ``behind`` says of each node what its region waits for.

    What is added to the step bears ids from ``first`` on.
    """
    touching: dict[tuple[str, str], list[StepNode]] = {}
    for node in step.nodes.values():
        resource = None if node.op.effect else node.resource
        if resource is not None:
            touching.setdefault(resource, []).append(node)
    readers = users_of(step, [node.id for nodes in touching.values() for node in nodes])
    found: list[Addition] = []
    for nodes in touching.values():
        addition = _addition_of(nodes, first + 2 * len(found))
        if addition is None:
            continue
        write, read = addition.write, addition.read
        users = {write.id, *readers.get(read.id, ())}
        together = FED not in users and len({(placement[n], behind[n]) for n in users}) == 1
        beside = addition.added or placement[read.id] == placement[write.id]
        if together and beside and write.inputs[0][0] != FED and read.outputs[0] == step.spec(write.inputs[0]):
            found.append(addition)
    return found


def _addition_of(nodes: Sequence[StepNode], number: int) -> Addition | None:
    """What adds to a variable that these nodes touch, if one does, and it is read once at most: a sum of that number.

    A read that is made for it has the number after that.
    """
    writes = [node for node in nodes if node.op.name != READ]
    reads = [node for node in nodes if node.op.name == READ and not node.attrs.get("fresh")]
    if len(writes) != 1 or len(reads) > 1:
        return None
    write, update = writes[0], writes[0].op.traits.update
    if update is None or update.whole is None:
        return None
    return Addition(write, reads[0] if reads else _read_for(write, number + 1), not reads, number, update.whole)


def _read_for(write: StepNode, number: int) -> StepNode:
    """A plain read of the variable that is written."""
    op = lookup(READ)
    attrs = {**write.attrs, "fresh": False}
    return StepNode(number, op, f"{write.name}/value", (), op.infer([], attrs), attrs, (), write.site)


def spell_out(step: StepGraph, additions: Sequence[Addition]) -> StepGraph:
    """``step`` with the additions as sums and assignments."""
    nodes: dict[int, StepNode] = {}
    by_write = {addition.write.id: addition for addition in additions}
    for node in step.nodes.values():
        addition = by_write.get(node.id)
        if addition is None:
            nodes[node.id] = node
            continue
        if addition.added:
            nodes[addition.read.id] = addition.read
        nodes[addition.number] = addition.whole()
        nodes[node.id] = addition.assignment()
    return replace(step, nodes=nodes)


def put_back(step: StepGraph, additions: Sequence[Addition]) -> StepGraph:
    """``step`` with those additions as they were whose sums still are nodes of their own."""
    nodes = dict(step.nodes)
    for addition in additions:
        if addition.number in nodes:
            whole, write = nodes.pop(addition.number), nodes[addition.write.id]
            put = replace(addition.write, inputs=whole.inputs[1:], control=write.control, after=whole.after)
            nodes[put.id] = put
            if addition.added:
                del nodes[addition.read.id]
    return replace(step, nodes=in_order(nodes))
