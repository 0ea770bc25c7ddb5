"""A graph as TensorBoard draws it: nodes by scope, with devices, shapes, control edges, bodies and the user's lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef

from flowrt.base.plain import shortened
from flowrt.base.plan import Plan

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

    from flowrt.base.spec import Spec
    from flowrt.graph import Node

PAUSE_EVERY = 64  # nodes, after which others have the interpreter
CALLED = {"constant": "Const", "placeholder": "Placeholder", "identity": "Identity"}  # as TensorBoard knows how to draw
FLOATS = {"float16": "HALF", "float32": "FLOAT", "float64": "DOUBLE"}  # others are called alike here and there


def graph(event: Event, nodes: Sequence[Node]) -> None:
    """All of ``nodes``, and what the bodies of loops and branches compute, in the scope of their op."""
    drawn = GraphDef()
    drawn.versions.producer = 22  # which TensorBoard asks for
    for number, node in enumerate(nodes):
        _add(
            drawn.node.add(),
            node.op.name,
            node.name,
            [_edge(tensor.op.name, tensor.index) for tensor in node.inputs]
            + [f"^{n.name}" for n in node.control_inputs],
            [tensor.spec for tensor in node.outputs],
            node.attrs,
            str(node.site),
        )
        drawn.node[-1].device = str(node.device)
        if node.colocate:
            drawn.node[-1].attr["_class"].list.s.extend(f"loc:@{other.name}".encode() for other in node.colocate)
        drawn.node.extend(_bodies(node.name, node.attrs))
        if number % PAUSE_EVERY == 0:
            time.sleep(0)
    event.graph_def = drawn.SerializeToString()


def _bodies(owner: str, attrs: Mapping[str, Any]) -> Iterator[NodeDef]:
    for key, plan in attrs.items():
        if isinstance(plan, Plan):
            yield from _body(owner, f"{owner}/{key.removeprefix('if_')}", plan)


def _body(owner: str, scope: str, plan: Plan) -> Iterator[NodeDef]:
    """What a body computes; its inputs hang on the node that it is of."""
    feeds = [f"{scope}/input_{place}" for place in range(len(plan.feeds))]
    values = [_edge(name, 0) for name in feeds]
    names = [_scoped(scope, node.name) for node in plan.nodes]
    for name, node in zip(names, plan.nodes, strict=True):
        values += [_edge(name, index) for index in range(len(node.outputs))]
    for name, feed in zip(feeds, plan.feeds, strict=True):
        yield _add(NodeDef(), "input", name, [f"^{owner}"], [feed.spec], {"of": feed.name}, feed.site)
    for name, node in zip(names, plan.nodes, strict=True):
        inputs = [values[place] for place in node.inputs] + [f"^{names[place]}" for place in node.control]
        yield _add(NodeDef(), node.op, name, inputs, node.outputs, node.attrs, node.site)
        yield from _bodies(name, node.attrs)


def _scoped(scope: str, name: str) -> str:
    return name if name.startswith(f"{scope}/") else f"{scope}/{name}"


def _edge(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


def _add(
    drawn: NodeDef,
    op: str,
    name: str,
    inputs: Iterable[str],
    specs: Sequence[Spec],
    attrs: Mapping[str, Any],
    site: str,
) -> NodeDef:
    """Say in ``drawn`` what a node is; answers it."""
    drawn.op, drawn.name = CALLED.get(op, op), name
    drawn.input.extend(inputs)
    if specs:
        dtype = specs[0].dtype.name
        drawn.attr["dtype"].type = getattr(types_pb2, f"DT_{FLOATS.get(dtype, dtype.upper())}")
        shapes = drawn.attr["_output_shapes"].list.shape
        for spec in specs:
            shape = shapes.add(unknown_rank=spec.dims is None)
            for size in spec.dims or ():
                shape.dim.add(size=-1 if size is None else size)
    for key, value in attrs.items():
        if key[0] != "_" and key not in ("dtype", "shape") and not isinstance(value, Plan):
            drawn.attr[key].s = _shown(value).encode()
    drawn.attr["built at"].s = site.encode()
    return drawn


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}" if value.size > 16 else str(value.tolist())
    return shortened(value)
