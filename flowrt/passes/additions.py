"""Additions to variables as assignments of sums, so that the sum can be fused with what computes the addend.

Law: ``v += a`` may become ``v = v0 + a``, v0 what the step read, only where nobody can tell: it is the step's only
write of the variable, and it stands in one region with the read and all its readers, whose variables are held from
beginning to end. Otherwise another step's addition in between would be lost. A sum that nothing was fused with is put
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowrt.op import lookup
from flowrt.passes.step import FED, Ref, Step, StepNode, in_order

if TYPE_CHECKING:
    from flowrt.device import Device

READ = "read_variable"
SUMS = {"assign_add": "add", "assign_sub": "subtract"}


@dataclass(frozen=True, slots=True)
class Addition:
    """A write that adds, and the read of its variable whose value the sum begins with."""

    write: StepNode
    read: StepNode

    def sum_node(self, number: int) -> StepNode:
        """The node of the sum, under the id ``number``."""
        write, op = self.write, lookup(SUMS[self.write.op.name])
        inputs: tuple[Ref, ...] = ((self.read.id, 0), write.inputs[0])
        outputs = op.infer([self.read.outputs[0]] * 2, {})
        return StepNode(number, op, write.name, inputs, outputs, {}, (), write.site, write.after)

    def assignment(self, number: int) -> StepNode:
        """The write as an assignment of that sum."""
        return replace(self.write, op=lookup("assign"), inputs=((number, 0),))


def find_additions(step: Step, placement: Mapping[int, Device], behind: Mapping[int, int]) -> list[Addition]:
    """The additions that may be spelled out; ``behind`` says of each node what its region waits for."""
    touching: dict[tuple[str, str], list[StepNode]] = {}
    for node in step.nodes.values():
        if node.resource is not None and not node.op.effect:
            touching.setdefault(node.resource, []).append(node)
    found = []
    readers = _readers(step, {node.id for nodes in touching.values() for node in nodes})
    for nodes in touching.values():
        writes = [node for node in nodes if node.op.name != READ]
        reads = [node for node in nodes if node.op.name == READ and not node.attrs.get("fresh")]
        if len(writes) != 1 or len(reads) != 1 or writes[0].op.name not in SUMS:
            continue
        write, read = writes[0], reads[0]
        together = {(placement[n], behind[n]) for n in (write.id, *readers[read.id]) if n != FED}
        fits = read.outputs[0] == step.spec(write.inputs[0]) and write.inputs[0][0] != FED
        if fits and len(together) == 1 and FED not in readers[read.id] and placement[read.id] == placement[write.id]:
            found.append(Addition(write, read))
    return found


def _readers(step: Step, of: set[int]) -> dict[int, set[int]]:
    """Who takes the values of some nodes: nodes, and `FED` for the step's own caller."""
    readers: dict[int, set[int]] = {i: set() for i in of}
    for node in step.nodes.values():
        for source, _ in node.inputs:
            if source in readers:
                readers[source].add(node.id)
    for source, _ in step.fetches:
        if source in readers:
            readers[source].add(FED)
    return readers


def spell_out(step: Step, additions: Mapping[int, Addition]) -> Step:
    """``step`` with the additions as sums, under the ids they are given by, and assignments."""
    nodes: dict[int, StepNode] = {}
    by_write = {addition.write.id: number for number, addition in additions.items()}
    for node in step.nodes.values():
        number = by_write.get(node.id)
        if number is not None:
            nodes[number] = additions[number].sum_node(number)
        nodes[node.id] = node if number is None else additions[number].assignment(number)
    return replace(step, nodes=nodes)


def put_back(step: Step, additions: Mapping[int, Addition]) -> Step:
    """``step`` with those additions as they were whose sums still are nodes of their own."""
    nodes = dict(step.nodes)
    for number, addition in additions.items():
        if number in nodes:
            whole, write = nodes.pop(number), nodes[addition.write.id]
            put = replace(addition.write, inputs=whole.inputs[1:], control=write.control, after=whole.after)
            nodes[put.id] = put
    return replace(step, nodes=in_order(nodes))
