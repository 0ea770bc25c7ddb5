"""Models of opsets before the oldest one that is read: made newer by ONNX's own converter.

Law: what that converter leaves as it was, though its meaning changed, is said in other words before, or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
from onnx import helper

from flowrt.base.errors import FlowrtError, GraphError, user_site
from flowrt.onnx.types import array_of

OLDEST = 13
"""The oldest opset whose operators are read."""
FLATTENING = ("Softmax", "LogSoftmax", "Hardmax")
"""Before opset 13 they are over all axes from one on, as if these were one."""
RESIZING = ("Resize", "Upsample")
"""Before opset 11 they know no places between entries: new ones lie at the old ones' multiples."""


def domain_of(told: Any) -> str:
    """The domain that a node or an opset is of: that of ONNX's own operators has two names."""
    return "" if told.domain == "ai.onnx" else str(told.domain)


def modern(model: Any) -> Any:
    """``model`` if it is of an opset whose operators are read, else one that is converted."""
    version = max([one.version for one in model.opset_import if domain_of(one) == ""], default=OLDEST)
    if version >= OLDEST:
        return model
    given = onnx.ModelProto()
    given.CopyFrom(model)
    try:
        _check_convertible(model, version)
        _flatten_first(given.graph)
        found = onnx.version_converter.convert_version(given, OLDEST)
    except FlowrtError:
        raise
    except (onnx.version_converter.ConvertError, RuntimeError, ValueError, LookupError, TypeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise _refusal(version, f"ONNX's converter cannot convert it: {why}") from None
    if version < 11:
        _resize_as_before(found.graph)
    return found


def _refusal(version: int, why: str) -> GraphError:
    return GraphError(
        f"{user_site()}: the model is of opset {version}, and {OLDEST} is the oldest that is read as it is; {why}"
    )


def _check_convertible(model: Any, version: int) -> None:
    inside = {node.op_type for node in nodes_inside(model.graph)}
    if version < 9 and "Scan" in {node.op_type for node in model.graph.node}:
        raise _refusal(version, "a Scan of before opset 9 has axes of its own for examples")
    changed = sorted(inside & {*FLATTENING, *(RESIZING if version < 11 else ())})
    if changed:
        raise _refusal(version, f"{changed} inside of loops or branches meant something else then")
    if version < 11 and any(_shrinks(node, model.graph) for node in model.graph.node):
        raise _refusal(version, "which entries are the nearest where images are made smaller was not said then")


def nodes_inside(graph: Any) -> Iterator[Any]:
    """The nodes of all graphs inside of the nodes of one."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from attribute.g.node
                yield from nodes_inside(attribute.g)


def _shrinks(node: Any, graph: Any) -> bool:
    """Whether a node may make images smaller by their nearest entries."""
    if node.op_type not in RESIZING:
        return False
    told = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if told.get("mode", b"nearest") != b"nearest":
        return False
    weights = [t for t in graph.initializer if len(node.input) > 1 and t.name == node.input[1]]
    weights += [n.attribute[0].t for n in graph.node if n.op_type == "Constant" and n.output[0] in node.input[1:]]
    scales = array_of(weights[0]) if weights else np.asarray(told.get("scales", [0.0]))
    return bool((scales < 1).any())


def _flatten_first(graph: Any) -> None:
    """Have what is over several axes be over the last of two."""
    nodes: list[Any] = []
    for node in graph.node:
        if node.op_type not in FLATTENING:
            nodes.append(node)
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        x, y, name = node.input[0], node.output[0], f"{node.output[0]}/flat"
        nodes += [
            helper.make_node("Shape", [x], [f"{name}/shape"]),
            helper.make_node("Flatten", [x], [f"{name}/before"], axis=axis),
            helper.make_node(node.op_type, [f"{name}/before"], [f"{name}/after"], name=node.name, axis=1),
            helper.make_node("Reshape", [f"{name}/after", f"{name}/shape"], [y]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _resize_as_before(graph: Any) -> None:
    for node in graph.node:
        if node.op_type == "Resize":
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "floor"))
