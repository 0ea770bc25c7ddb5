"""Writing a graph as a model of ONNX."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

import onnx
from onnx import helper

import flowrt.onnx.writing  # noqa: F401  (how ops are said)
from flowrt.base.errors import GraphError, not_written, path_of, user_site
from flowrt.base.locating import fitting
from flowrt.onnx.types import element_of
from flowrt.onnx.writing.writer import OPSET, GraphWriter, Shared, applied_of, initializer
from flowrt.ops.body import between

if TYPE_CHECKING:
    from flowrt.graph import Graph, Tensor

FORMAT = 10  # the format that came with the opset
MOST_INSIDE = 1 << 30  # bytes of weights in the model itself; protobuf holds 2 GiB at most


class Writable(Protocol):
    """What `save` takes: what `fr.serving.freeze` answers, or `load`."""

    @property
    def graph(self) -> Graph: ...
    @property
    def inputs(self) -> Mapping[str, Tensor]: ...
    @property
    def outputs(self) -> Mapping[str, Tensor]: ...


@fitting
def save(
    path: str | os.PathLike[str],
    model: Writable,
    *,
    metadata: Mapping[str, str] | None = None,
    weights_beside: bool | None = None,
) -> None:
    """Write a frozen model (`fr.serving.freeze`) as one of ONNX, of opset 21, under the same names.

    Open sizes are called ``input_axis``. Weights of more than 1 GiB in all, or if ``weights_beside``, lie in a file
    beside it, of its name and ``.data``. Raises `GraphError` with all that ONNX has nothing for, and where it cannot be
    written: then what was there before is there still.
    """
    target = Path(path_of(path, "a model's file"))
    if not all(isinstance(getattr(model, name, None), Mapping) for name in ("inputs", "outputs")):
        raise GraphError(f"{user_site()}: save takes a path and a model, as of fr.serving.freeze, not {model!r:.80}")
    found = model_of(model, _told(metadata or getattr(model, "metadata", {})))
    total = sum(len(tensor.raw_data) for tensor in found.graph.initializer)
    beside = total > MOST_INSIDE if weights_beside is None else weights_beside
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as drafts:
            draft = Path(drafts, target.name)
            if beside:
                data = f"{target.name}.data"
                onnx.save_model(found, str(draft), save_as_external_data=True, location=data, size_threshold=1024)
            else:
                draft.write_bytes(found.SerializeToString())
            _put(draft, target)
    except OSError as error:
        raise not_written(path, error) from None


def _put(draft: Path, target: Path) -> None:
    """Put a model and its weights, if they are beside it, in their places; where that fails, put back the old ones."""
    new, old, weights = Path(f"{draft}.data"), Path(f"{draft}.old"), target.with_name(f"{target.name}.data")
    if not new.exists():
        draft.replace(target)
        return
    first = not weights.exists()
    with suppress(OSError):  # there are none, or no links
        os.link(weights, old)
    new.replace(weights)
    try:
        draft.replace(target)  # last, as it names its weights
    except BaseException:
        if old.exists():
            old.replace(weights)
        elif first:
            weights.unlink()
        raise


def _told(metadata: Any) -> dict[str, str]:
    """What a model says of itself, if it can."""
    if isinstance(metadata, Mapping) and all(isinstance(text, str) for pair in metadata.items() for text in pair):
        return dict(metadata)
    raise GraphError(f"{user_site()}: metadata are texts by name, as {{'author': 'me'}}, not {metadata!r:.80}")


def model_of(model: Writable, metadata: Mapping[str, str]) -> Any:
    """The ``onnx.ModelProto`` of a model."""
    both = sorted({*model.inputs}.intersection(model.outputs))
    if both:
        raise GraphError(f"{user_site()}: {both} are names of inputs and of outputs; in ONNX each value has its own")
    shared = Shared()
    writer = GraphWriter(shared)
    names: dict[Any, str | None] = {}
    for name, tensor in model.inputs.items():
        shared.names.add(name)
        names[tensor] = name
    shared.names.update(model.outputs)
    nodes = between(model.graph, list(model.inputs.values()), list(model.outputs.values()))
    writer.write(applied_of(writer, nodes, names), names)
    if shared.refusals:
        listed = "\n".join(f"  {refusal}" for refusal in shared.refusals)
        raise GraphError(f"{user_site()}: the model cannot be written as ONNX:\n{listed}")
    for name, tensor in model.outputs.items():
        found = names[tensor]
        writer.nodes.append(helper.make_node("Identity", [found], [name], name=name))
    kept = _needed(writer.nodes, set(model.outputs))
    graph = helper.make_graph(
        kept,
        str(getattr(model, "name", "model")),
        [_value(name, tensor) for name, tensor in model.inputs.items()],
        [_value(name, tensor) for name, tensor in model.outputs.items()],
        _weights(shared, kept),
    )
    made = helper.make_model(graph, producer_name="flowrt", opset_imports=[helper.make_opsetid("", OPSET)])
    made.ir_version = FORMAT
    helper.set_model_props(made, dict(metadata))
    return made


def _value(name: str, tensor: Tensor) -> Any:
    dims = tensor.spec.dims
    shape = None if dims is None else [f"{name}_{i}" if n is None else n for i, n in enumerate(dims)]
    return helper.make_tensor_value_info(name, element_of(tensor.dtype), shape)


def _inputs(node: Any) -> set[str]:
    """What a node needs, also of graphs inside of it."""
    found = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                found |= _inputs(inner)
            found |= {value.name for value in attribute.g.output}
    return found


def _needed(nodes: list[Any], names: set[str]) -> list[Any]:
    """The nodes that these values need, in order."""
    kept = []
    for node in reversed(nodes):
        if not names.isdisjoint(node.output):
            kept.append(node)
            names |= _inputs(node)
    return kept[::-1]


def _weights(shared: Shared, nodes: list[Any]) -> list[Any]:
    used = set[str]().union(*(_inputs(node) for node in nodes))
    return [initializer(name, array) for name, array in shared.weights.items() if name in used]
