"""Making a graph of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

import flowrt.onnx.reading  # noqa: F401  (what nodes mean)
from flowrt.base.errors import FlowrtError, GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import default_array
from flowrt.graph import Graph, Tensor, name_scope
from flowrt.onnx.converting import domain_of, modern, nodes_inside
from flowrt.onnx.files import model_from, opsets_of
from flowrt.onnx.reading.reader import UNREAD, ModelReader
from flowrt.onnx.types import array_of, spec_from
from flowrt.op import active_builder, as_value, building
from flowrt.ops.source import placeholder
from flowrt.ops.state import Variable

if TYPE_CHECKING:
    import os

NOT_TRAINED = {"BatchNormalization": (3, 4), "Resize": (1, 2, 3), "Upsample": (1,), "Pad": (2,)}
"""Inputs of ops that are floats and no weights: statistics of what was trained on, sizes, regions."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in a graph: its inputs and outputs by their names, and the variables that its weights became.

    ``metadata`` is what the model says of itself.
    """

    graph: Graph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    variables: dict[str, Variable]
    metadata: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<model of ONNX: {', '.join(self.inputs)} -> {', '.join(self.outputs)}>"


class NotReadable(GraphError):
    """A model that cannot be read; ``wanted`` are the names of inputs whose values would have to be given."""

    wanted: frozenset[str] = frozenset()


@fitting
def load(
    model: str | os.PathLike[str] | bytes | Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    trainable: bool | Collection[str] = False,
) -> LoadedModel:
    """The graph of a model of ONNX: a path, bytes, or an ``onnx.ModelProto``, of opset 13 or newer.

    It is built in the graph that is built now, if one is, else in a new one. ``inputs`` says what stands for some of
    the model's inputs: tensors of that graph, or arrays, which are then part of the model; the others become
    placeholders. Weights are constants; if ``trainable``, those of floats are variables, or those alone whose names
    are given. Raises `GraphError` with all that cannot be read; also where a size or an axis would have to be known
    and hangs on an input.
    """
    found = modern(model_from(model))
    reader = ModelReader(_graph(inputs), opsets_of(found), {(domain_of(f), f.name): f for f in found.functions})
    values: dict[str, Any] = {}
    with name_scope(_scope(found)):
        variables = _weights(reader, found, values, trainable)
        _given(reader, found, values, inputs or {})
        reader.read(found.graph.node, values)
        for output in found.graph.output:
            if output.name not in values:
                reader.refusals[f"the output {output.name!r}: nothing makes it"] = None
        _raise_refusals(reader, found, values)
        with building(reader.graph):
            outputs = {o.name: reader.tensor(values[o.name]) for o in found.graph.output}
    names = {i.name for i in found.graph.input} - {t.name for t in found.graph.initializer}
    tensors = {name: as_value(values[name]) for name in _in_order(found) if name in names}
    return LoadedModel(
        reader.graph,
        {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)},
        outputs,
        variables,
        {prop.key: prop.value for prop in found.metadata_props},
    )


def _in_order(model: Any) -> list[str]:
    return [value.name for value in model.graph.input]


def _scope(model: Any) -> str:
    name = "".join(c if c.isalnum() or c in "_.-" else "_" for c in model.graph.name)
    return name or "model"


def _graph(inputs: Mapping[str, Any] | None) -> Graph:
    here = active_builder()
    if isinstance(here, Graph):
        return here
    tensors = [value for value in map(as_value, (inputs or {}).values()) if isinstance(value, Tensor)]
    return tensors[0].graph if tensors else Graph()


def _weights(
    reader: ModelReader, model: Any, values: dict[str, Any], trainable: bool | Collection[str]
) -> dict[str, Variable]:
    """Enter what the model holds among ``values``: arrays, and variables."""
    asked = _trained(model, trainable)
    variables: dict[str, Variable] = {}
    for tensor in model.graph.initializer:
        if tensor.name in values:
            reader.refusals[f"the weight {tensor.name!r}: it is there twice"] = None
        try:
            array = array_of(tensor)
        except FlowrtError as error:
            reader.refusals[f"the weight {tensor.name!r}: {error}"] = None
            values[tensor.name] = UNREAD
            continue
        values[tensor.name] = array
        if tensor.name in asked:
            with building(reader.graph):
                variables[tensor.name] = Variable(array, name=tensor.name)
            values[tensor.name] = variables[tensor.name]
    for sparse in model.graph.sparse_initializer:
        reader.refusals[f"the weight {sparse.values.name!r}: sparse tensors are not supported"] = None
        values[sparse.values.name] = UNREAD
    return variables


def _trained(model: Any, trainable: bool | Collection[str]) -> set[str]:
    names = {tensor.name for tensor in model.graph.initializer}
    if not isinstance(trainable, bool):
        unknown = set(trainable) - names
        if unknown:
            raise GraphError(f"{user_site()}: the model has no weights {sorted(unknown)}; it has {sorted(names)}")
        return set(trainable)
    if not trainable:
        return set()
    nodes = [*model.graph.node, *nodes_inside(model.graph)]
    fixed = {node.input[i] for node in nodes for i in NOT_TRAINED.get(node.op_type, ()) if i < len(node.input)}
    kinds = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
    floats = {t.name for t in model.graph.initializer if t.dims and t.data_type in kinds}
    return floats - fixed


def _given(reader: ModelReader, model: Any, values: dict[str, Any], inputs: Mapping[str, Any]) -> None:
    """Enter the model's inputs among ``values``: what is given for them, or placeholders."""
    unknown = sorted(set(inputs) - set(_in_order(model)))
    if unknown:
        raise GraphError(f"{user_site()}: the model has no inputs {unknown}; it has {_in_order(model)}")
    for name, count in Counter(_in_order(model)).items():
        if count > 1:
            reader.refusals[f"the input {name!r}: it is there {count} times"] = None
    for value in model.graph.input:
        if value.name in values and value.name not in inputs:
            continue
        try:
            spec = spec_from(value)
        except FlowrtError as error:
            reader.refusals[f"the input {value.name!r}: {error}"] = None
            values[value.name] = UNREAD
            continue
        if value.name not in inputs:
            with building(reader.graph):
                values[value.name] = placeholder(spec.dtype, spec.dims, name=_scope_free(value.name))
            continue
        found = as_value(inputs[value.name])
        if not isinstance(found, Tensor):
            found = np.asarray(default_array(found) if not isinstance(found, np.ndarray) else found)
        if found.dtype != spec.dtype:
            raise GraphError(f"{user_site()}: the input {value.name!r} is {spec}, not of {found.dtype}")
        values[value.name] = found


def _scope_free(name: str) -> str:
    return name.replace(":", "_").strip("/") or "input"


def _raise_refusals(reader: ModelReader, model: Any, values: Mapping[str, Any]) -> None:
    if not reader.refusals:
        return
    listed = "\n".join(f"  {refusal}" for refusal in reader.refusals)
    error = NotReadable(f"{user_site()}: the model {model.graph.name!r} cannot be read:\n{listed}")
    wanted = {id(tensor) for tensor in reader.wanted}
    error.wanted = frozenset(name for name in _in_order(model) if id(values.get(name)) in wanted)
    raise error
