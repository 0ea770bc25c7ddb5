"""Fed matrices that the iterations of a loop multiply with vectors, copied to where cache lines begin.

Law: pure. A program's arrays begin anywhere, mostly 16 bytes behind a line: then nearly all that a vector register is
filled with lies in two lines, and a product with a vector, which does little else than read, takes 1.4 times as long.
What is computed begins at a line, so a copy, which one iteration pays for, does. Variables do by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.plan import Plan
from flowrt.op import lookup
from flowrt.passes.step import FED, Ref, StepNode, in_order

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.base.plan import PlanNode
    from flowrt.passes.step import StepGraph

LOOP = "loop"
LEAST, MOST = 1 << 12, 4 << 20  # bytes: less is read in no time, and more from memory, which is what takes time then


def line_up(step: StepGraph, placement: Mapping[int, Device]) -> tuple[StepGraph, Mapping[int, Device]]:
    """``step`` with such copies, one for each loop, and where its nodes run."""
    loops = [node for node in step.nodes.values() if node.op.name == LOOP and placement[node.id].kind == "cpu"]
    found = {node.id: refs for node in loops if (refs := _worth_it(step, node))}
    if not found:
        return step, placement
    nodes, where = dict(step.nodes), dict(placement)
    for number, refs in found.items():
        node = nodes[number]
        copies = {ref: _copy(step, node, ref, max(nodes) + place) for place, ref in enumerate(refs, 1)}
        nodes |= {copy.id: copy for copy in copies.values()}
        where |= {copy.id: where[number] for copy in copies.values()}
        inputs = tuple([(copies[ref].id, 0) if ref in copies else ref for ref in node.inputs])
        nodes[number] = node.rewired(inputs, node.control, node.after)
    return replace(step, nodes=in_order(nodes)), where


def _worth_it(step: StepGraph, node: StepNode) -> list[Ref]:
    """What of the inputs of a loop is fed, of such a size, and multiplied with vectors."""
    found = dict.fromkeys(node.inputs[place] for place in _multiplied(node, len(node.inputs)))
    specs = {ref: step.spec(ref) for ref in found if ref[0] == FED}
    return [ref for ref, s in specs.items() if s.known and s.rank > 1 and LEAST <= s.nbytes <= MOST]


def _multiplied(node: StepNode | PlanNode, count: int) -> Iterable[int]:
    """Which of the ``count`` inputs of a loop its body, or one inside that, multiplies with vectors as they are."""
    body = node.attrs["body"]
    assert isinstance(body, Plan)
    own = len(body.feeds)
    iterating = int(str(node.attrs["carried"])) + int(str(node.attrs["scanned"]))  # the body's first feeds
    seen: set[int] = set()
    for inner in body.nodes:
        if inner.op == "matmul":
            seen.update(_matrices(inner))
        elif inner.op == LOOP:
            seen.update(inner.inputs[place] for place in _multiplied(inner, len(inner.inputs)))
    return [count - own + feed for feed in range(iterating, own) if feed in seen]


def _matrices(node: PlanNode) -> Iterable[int]:
    """What a product reads all of for one column, or row, of its result; of a vector's product, either operand."""
    dims = node.outputs[0].dims or ()
    if dims[-1:] == (1,) or len(dims) == 1:
        yield node.inputs[0]
    if dims[-2:-1] == (1,) or len(dims) == 1:
        yield node.inputs[1]


def _copy(step: StepGraph, node: StepNode, ref: Ref, number: int) -> StepNode:
    """The node that copies ``ref`` for a loop: it puts one tensor, and no other, one after another."""
    attrs = {"axis": 0, "_many": 1}
    return StepNode(
        number, lookup("concat"), f"{node.name}/fed_{ref[1]}", (ref,), (step.spec(ref),), attrs, (), node.site
    )
