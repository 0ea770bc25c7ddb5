"""Products with weights in eight bits: a matrix of a model that never changes is kept as int8, and a scale for each
column; rows that come are quantised when they are there, each by a scale of its own, so that none hangs on another.

Law: pure. What is too small to pay, not float32 or not finite stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.op import building
from flowrt.ops.quantize import quantize, quantized_matmul
from flowrt.ops.source import constant

if TYPE_CHECKING:
    from flowrt.graph import Graph, Tensor
    from flowrt.passes.step import StepNode

LEAST = 1 << 12  # entries of a weight


def is_product(node: StepNode, x: Tensor, weight: Any) -> bool:
    """Whether a node multiplies ``x`` by a matrix that is worth it."""
    return (
        node.op.name == "matmul"
        and not node.attrs["transpose_a"]
        and x.spec.dims is not None
        and x.spec.rank >= 2
        and isinstance(weight, np.ndarray)
        and weight.ndim == 2
        and weight.dtype == np.float32
        and weight.size >= LEAST
        and bool(np.isfinite(weight).all())
    )


def product(graph: Graph, node: StepNode, x: Tensor, weight: np.ndarray[Any, Any], name: str) -> tuple[Tensor, ...]:
    """What the node computes, of eight bits; ``name`` is the weight's."""
    columns = weight if node.attrs["transpose_b"] else weight.T  # each is a row here, as it is read
    whole, scale = quantize(np.ascontiguousarray(columns), axis=0)
    with building(graph):
        rows, row_scale = quantize(x, axis=tuple(range(x.spec.rank - 1)))
        kept = constant(whole, name=f"{name}/int8"), constant(np.transpose(scale), name=f"{name}/scale")
        made: Any = quantized_matmul(rows, kept[0], row_scale, kept[1], transpose_b=True)
    return (made,)
