"""Sizes that only a step knows, followed back to where they are taken from: what comes from one place is equal.

Law: pure; it knows ops whose results are as long as what they take. Axes are counted from the last, as they meet where
tensors are repeated to each other's shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.passes.step import FED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowrt.passes.step import Ref, StepGraph, StepNode

MATMULS, CONVOLUTIONS = frozenset({"matmul", "matmul_bias"}), frozenset({"conv2d", "conv2d_bias"})


class Sizes:
    """Of a step, where ``entrywise`` says which nodes compute each entry of entries in its place, or a reduction's
    1."""

    def __init__(self, step: StepGraph, entrywise: Callable[[StepNode], bool]) -> None:
        self._step, self._entrywise = step, entrywise
        self._origins: dict[tuple[Ref, int], Ref] = {}  # many paths lead to one place, and each is followed once

    def no_larger(self, ref: Ref, axis: int, than: Ref) -> bool:
        """Whether a value is, whatever a step finds, no larger along an axis than another of unknown size there."""
        dims = self._step.spec(ref).dims
        if dims is None:
            return False
        if len(dims) < -axis or dims[axis] == 1:
            return True
        return dims[axis] is None and self.origin(ref, axis) == self.origin(than, axis)

    def origin(self, ref: Ref, axis: int) -> Ref:
        """The first value known to be as long along an axis."""
        found, left = self._origins, [ref]
        while left:
            value = left[-1]
            if (value, axis) in found:
                left.pop()
                continue
            sources = self._sources(value, axis)
            unseen = [source for source in sources if (source, axis) not in found]
            left += unseen
            if not unseen:
                origins = {found[source, axis] for source in sources}
                found[value, axis] = origins.pop() if len(origins) == 1 else value
        return found[ref, axis]

    def _sources(self, ref: Ref, axis: int) -> Sequence[Ref]:
        """The inputs that the unknown size of a value along an axis is taken from, if they are of one size."""
        if ref[0] == FED:
            return ()
        node = self._step.nodes[ref[0]]
        dims = [self._step.spec(taken).dims for taken in node.inputs]
        if node.op.name in MATMULS | CONVOLUTIONS:
            rank, ranks = node.outputs[0].rank, [len(size or ()) for size in dims]
            images = node.op.name in CONVOLUTIONS and axis == -rank
            rows = node.op.name in MATMULS and not node.attrs["transpose_a"] and ranks[1] == 2 and axis < -1
            return node.inputs[:1] if ranks[0] == rank and (images or rows) else ()
        if None in dims or not self._entrywise(node):
            return ()
        return [
            taken
            for taken, size in zip(node.inputs, dims, strict=True)
            if size is not None and len(size) >= -axis and size[axis] is None
        ]
