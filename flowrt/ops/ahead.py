"""What the iterations of a scan need not compute one by one, since one product does it for all of them.

Law: meaning stays. A product of a row of what is scanned with a matrix that no iteration changes is a row of a product
of all rows, which is computed ahead of the loop. A sum over all iterations of products of two values, as gradients
of weights are, is one product of all these values, computed behind it. Only what is known while the loop is built
decides; nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowrt.op import building
from flowrt.ops.body import between, built_again
from flowrt.ops.linalg import matmul
from flowrt.ops.reduce import sum_to
from flowrt.ops.shape import reshape

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node, Tensor
    from flowrt.ops.body import Traced

VIEWS = frozenset({"transpose", "reshape", "getitem", "concat", "astype", "expand_dims", "squeeze", "identity"})
"""Ops that a matrix may go through on its way into the loop: cheap, and sure to succeed."""


def products_ahead(traced: Traced, answers: Sequence[Tensor], whole: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The products of a body that are rows of products of the graph around it, which are built here, by the former.

    ``whole`` says of what each row is one.
    """
    inside = traced.graph
    outer = _Outside(inside.outer, {mine: outside for outside, mine in inside.captured.items()})
    feeds = [*traced.parameters, *inside.captured.values()]
    found: dict[Tensor, Tensor] = {}
    for node in between(inside, feeds, answers, keep_effects=True):
        if not _is_row_product(node, whole):
            continue
        matrix = outer.find(node.inputs[1])
        if matrix is not None:
            found[node.outputs[0]] = outer.build(node, [whole[node.inputs[0]], matrix])
    return found


def _is_row_product(node: Node, whole: Mapping[Tensor, Tensor]) -> bool:
    if node.op is not matmul or node.control_inputs or node.attrs["transpose_a"]:
        return False
    row, matrix = node.inputs
    return row in whole and bool(row.spec.dims) and matrix.spec.dims is not None and matrix.spec.rank == 2


class _Outside:
    """Tensors of a body as tensors of the graph around it, as far as they are made of nothing else."""

    def __init__(self, graph: Graph, known: dict[Tensor, Tensor]) -> None:
        self._graph, self._known = graph, known

    def find(self, tensor: Tensor) -> Tensor | None:
        """The same value outside; built there where need be."""
        if tensor in self._known:
            return self._known[tensor]
        node = tensor.op
        if node.op.name == "constant" and not node.control_inputs:
            self._known[tensor] = self.build(node, [])
        elif node.op.name in VIEWS and not node.control_inputs:
            inputs = [found for each in node.inputs if (found := self.find(each)) is not None]
            if len(inputs) == len(node.inputs):
                self._known[tensor] = self.build(node, inputs)
        return self._known.get(tensor)

    def build(self, node: Node, inputs: Sequence[Tensor]) -> Tensor:
        """The first output of ``node`` on other inputs, outside."""
        with building(self._graph):
            return built_again(self._graph, node.op, inputs, node.attrs, node.op.name, node.site)[0]


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Behind:
    """The gradients of captured tensors that are products behind the loop, not sums in it; asked with ``in``.

    ``found`` has the gradients of one iteration, in its graph ``inside``. What is ``needed`` of each are the factors.
    """

    def __init__(self, inside: Graph, found: Mapping[Tensor, Tensor | None]) -> None:
        self._inside, self._found = inside, found
        self._made: dict[Tensor, Node] = {}
        self.needed: list[Tensor] = []

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._made

    def take(self, captured: Sequence[Tensor]) -> None:
        """Look which of ``captured`` have such gradients: matrices, then vectors that come of the same factors."""
        for wanted in (_is_outer_product, self._is_column_sum):
            for tensor in captured:
                slope = self._found.get(tensor)
                if slope is not None and slope.graph is self._inside and wanted(slope.op):
                    self._made[tensor] = slope.op
                    factors = slope.op.inputs if slope.op.op is matmul else slope.op.inputs[:1]
                    self.needed = list(dict.fromkeys((*self.needed, *factors)))

    def _is_column_sum(self, node: Node) -> bool:
        summed = node.op is sum_to and any(node.inputs[0] is factor for factor in self.needed)
        return summed and node.outputs[0].spec.known

    def build(self, whole: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The gradients by the tensor captured; ``whole`` has what is needed, of all iterations."""
        made: dict[Tensor, Tensor] = {}
        for tensor, node in self._made.items():
            if node.op is sum_to:
                made[tensor] = sum_to(whole[node.inputs[0]], np.array(node.outputs[0].shape, np.int64))
                continue
            left, right = (reshape(whole[t], (-1, t.spec.shape[-1])) for t in node.inputs)
            made[tensor] = matmul(left, right, True, False)
        return made


def _is_outer_product(node: Node) -> bool:
    if node.op is not matmul or not node.attrs["transpose_a"] or node.attrs["transpose_b"]:
        return False
    return all(t.spec.dims is not None and t.spec.rank == 2 and bool(t.spec.shape[-1]) for t in node.inputs)
