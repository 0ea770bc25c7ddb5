"""What the host makes of each op that an example applies, node by node: what its twins on devices are held against.

Its kernels are called by themselves, so that what worlds find hangs on ops and kernels alone (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import spec_of
from flowrt.base.traits import is_alias
from flowrt.graph import Graph, Node
from flowrt.kernels.language.table import KERNELS
from flowrt.kernels.launch import run_kernel
from flowrt.op import lookup
from flowrt.sched.loops.structured import STRUCTURED, interpret, run_body

if TYPE_CHECKING:
    from op_examples import Example

    from flowrt.base.plan import PlanNode

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
            found = _made(node.op.name, arrays, node.attrs)
            values.update(zip(node.outputs, found, strict=True))
            yield node, arrays, found


def _made(op: str, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Sequence[Any]:
    if op == "constant":
        return [np.array(attrs["value"])]
    if op in STRUCTURED:
        return interpret(op, [np.asarray(a) for a in arrays], attrs, partial(run_body, compute=_made_in_a_body))
    specs = lookup(op).infer([spec_of(a) for a in arrays], attrs)
    if is_alias(op):
        return [np.ascontiguousarray(arrays[0]).reshape(specs[0].concrete)]
    return run_kernel(op, arrays, specs, attrs, RUN.copy())


def _made_in_a_body(node: PlanNode, arrays: Sequence[Any]) -> Sequence[Any]:
    return _made(node.op, arrays, node.attrs)
