"""What the host makes of each op that an example applies, node by node: what its twins on devices are held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.traits import is_alias
from flowrt.graph import Graph, Node
from flowrt.kernels.language.table import KERNELS
from flowrt.session.eager import evaluate

if TYPE_CHECKING:
    from op_examples import Example

RUN = np.array([0, 3, 11, 0], np.int64)  # what random ops read: the step and the seed


def computed(example: Example) -> Iterator[tuple[Node, list[Any], Any]]:
    """Each node that makes values: with what it takes, and what it makes of that."""
    with Graph() as graph:
        inputs = [fr.placeholder(a.dtype, a.shape) for a in example.arrays]
        example.run(*inputs)
    values: dict[Any, Any] = dict(zip(inputs, example.arrays, strict=True))
    for node in graph.nodes:
        known = node.op.name == "constant" or is_alias(node.op.name) or (node.op.name, "cpu") in KERNELS
        if known and node.outputs[:1] and node.outputs[0] not in values:
            arrays = [values[t] for t in node.inputs]
            found = evaluate(node.op, arrays, node.attrs, RUN.copy())
            values.update(zip(node.outputs, found, strict=True))
            yield node, arrays, found
