"""Sizes that only a step knows, followed back to where they are taken from: what comes from one place is equal.

Law: pure; it knows ops whose results are as long as what they take. Axes are counted from the last, as they meet where
tensors are repeated to each other's shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flowrt.passes.step import FED
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.passes.step import Ref, Step, StepNode

MATMULS, CONVOLUTIONS = frozenset({"matmul", "matmul_bias"}), frozenset({"conv2d", "conv2d_bias"})


@valueclass
class Sizes:
    """Of a step, where ``entrywise`` says which nodes compute each entry of entries in its place, or a fold's 1."""

    step: Step
    entrywise: Callable[[StepNode], bool]

    def no_larger(self, ref: Ref, axis: int, than: Ref) -> bool:
        """Whether a value is, whatever a step finds, no larger along an axis than another of unknown size there."""
        dims = self.step.spec(ref).dims
        if dims is None:
            return False
        if len(dims) < -axis or dims[axis] == 1:
            return True
        return dims[axis] is None and self.origin(ref, axis) == self.origin(than, axis)

    def origin(self, ref: Ref, axis: int) -> tuple[Ref, int]:
        """The first value known to be as long, whose axis it is taken from."""
        while ref[0] != FED:
            before = self._before(self.step.nodes[ref[0]], axis)
            if before is None:
                break
            ref = before
        return ref, axis

    def _before(self, node: StepNode, axis: int) -> Ref | None:
        """What of a node's inputs its unknown size along an axis is taken from, if that is one alone."""
        dims = [self.step.spec(ref).dims for ref in node.inputs]
        if node.op.name in MATMULS | CONVOLUTIONS:
            rank, ranks = node.outputs[0].rank, [len(size or ()) for size in dims]
            images = node.op.name in CONVOLUTIONS and axis == -rank
            rows = node.op.name in MATMULS and not node.attrs["transpose_a"] and ranks[1] == 2 and axis < -1
            return node.inputs[0] if ranks[0] == rank and (images or rows) else None
        if not self.entrywise(node):
            return None
        unknown = [
            ref
            for ref, size in zip(node.inputs, dims, strict=True)
            if size is None or (len(size) >= -axis and size[axis] is None)
        ]
        if None in dims or len({self.origin(ref, axis) for ref in unknown}) != 1:
            return None
        return unknown[0]
