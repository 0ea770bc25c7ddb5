"""Going through a model node by node.

Law: what cannot be read leaves its outputs unread, and what needs them, too; everything else is read all the same, so
that one error tells all that stands in the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec, is_half, value_known
from flowrt.graph import Graph, Tensor, name_scope
from flowrt.onnx.converting import domain_of
from flowrt.onnx.types import Array, array_of, type_of
from flowrt.op import active_builder, as_value, building
from flowrt.ops.inference import described

if TYPE_CHECKING:
    from collections.abc import Iterator

Value: TypeAlias = Any  # a tensor, a variable, or an array
Function: TypeAlias = "Callable[[NodeCall], Any]"
F = Callable[["NodeCall"], Any]

READERS: dict[str, Function] = {}
"""What reads a node, by its op."""
MOST_NESTED = 64  # functions in functions, and bodies in bodies
MOST_REFUSED = 1000  # nodes that are told
MOST_NODES = 1 << 17  # read in all: of functions that use others twice there are soon more than anybody waits for
NOTHING = "flowrt has nothing that computes it"
DAMAGED = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError)
"""What reading a node that is not what its operator takes may come to."""


class Unreadable(Exception):
    """A node that cannot be read, and why; empty where that was noted already."""


class _Unread:
    """In the place of what could not be read."""


UNREAD = _Unread()


def reads(*ops: str) -> Callable[[F], F]:
    """Decorator: the function reads nodes of these ops."""

    def enter(function: F) -> F:
        READERS.update(dict.fromkeys(ops, function))
        return function

    return enter


def known(value: Value) -> Array | None:
    """The entries of ``value`` where they are known while a model is loaded."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Tensor):
        return None
    if value.op.op.name == "constant":
        return np.asarray(value.op.attrs["value"])
    return np.array(value.spec.value, value.dtype) if value_known(value.spec.value) else None


def placeholders_under(value: Value) -> set[Tensor]:
    """The placeholders whose entries ``value`` hangs on; where there are none, those whose sizes it does."""
    found: dict[bool, set[Tensor]] = {True: set(), False: set()}
    stack = [(value, True)] if isinstance(value, Tensor) else []
    seen: set[tuple[Tensor, bool]] = set()
    while stack:
        tensor, entries = stack.pop()
        if (tensor, entries) in seen:
            continue
        seen.add((tensor, entries))
        if tensor.op.op.name == "placeholder":
            found[entries].add(tensor)
        stack += [(t, entries and tensor.op.op.name != "shape_of") for t in tensor.op.inputs]
    return found[True] or found[False]


def names_of(node: Any) -> str:
    """A node as errors name it."""
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} that makes {list(node.output)[:1]}"


class NodeCall:
    """A node that is read: its inputs, attributes and opset. ``call[i]`` is an input, None where it is left out."""

    def __init__(self, reader: ModelReader, node: Any, inputs: Sequence[Value], attrs: Mapping[str, Any]) -> None:
        self.reader, self.node, self.inputs = reader, node, tuple(inputs)
        self.protos = attrs
        self.attrs = {name: _plain(attribute) for name, attribute in attrs.items()}

    def __getitem__(self, index: int) -> Value:
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def op(self) -> str:
        """The name of its op."""
        return str(self.node.op_type)

    @property
    def opset(self) -> int:
        """The version of ONNX's operators that it is of."""
        return self.reader.opsets[domain_of(self.node)]

    def halves(self) -> dict[str, np.dtype[Any]]:
        """The dtypes of 16 bits among its inputs, by what its operator calls the type of each."""
        formal = _schema(self.op, self.opset).inputs
        given = [(formal[min(n, len(formal) - 1)].type_str, v) for n, v in enumerate(self.inputs) if v is not None]
        return {kind: described(v).dtype for kind, v in given if is_half(described(v).dtype)}

    def kind_made(self, index: int) -> str:
        """What its operator calls the type of an output."""
        formal = _schema(self.op, self.opset).outputs
        return str(formal[min(index, len(formal) - 1)].type_str)

    def with_inputs(self, inputs: Sequence[Value]) -> NodeCall:
        """The same of other inputs."""
        return NodeCall(self.reader, self.node, inputs, self.protos)

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or ``default`` where the node does not say it."""
        return self.attrs.get(name, default)

    def wants(self, index: int) -> bool:
        """Whether the model asks for that output."""
        return len(self.node.output) > index and bool(self.node.output[index])

    def spec(self, index: int) -> Spec:
        """The spec of an input."""
        return described(self.inputs[index])

    def rank(self, index: int) -> int:
        """The number of axes of an input, which must be known."""
        return self.spec(index).rank

    def shape(self, index: int) -> tuple[Any, ...]:
        """The sizes of an input, None where one is open."""
        return self.spec(index).shape

    def known(self, index: int, what: str) -> Array | None:
        """The entries of an input that a graph is built by; None where it is left out."""
        value = self[index]
        if value is None:
            return None
        found = known(value)
        if found is None:
            self.reader.wanted |= placeholders_under(value)
            raise Unreadable(f"{what} must be known while the model is loaded; if an input, give its value by inputs=")
        return found

    def integers(self, index: int, what: str) -> list[int] | None:
        """`known`, as a list."""
        found = self.known(index, what)
        return None if found is None else [int(n) for n in found.reshape(-1)]

    def axis(self, index: int = 0, default: int = -1, name: str = "axis") -> int:
        """The attribute that names an axis of an input, counted from the front."""
        return axis_of(int(self.attr(name, default)), self.rank(index), name)

    def resolved(self) -> Any:
        """Its node, with the attributes that it has here."""
        node = onnx.NodeProto()
        node.CopyFrom(self.node)
        del node.attribute[:]
        node.attribute.extend(self.protos.values())
        return node


def axis_of(axis: int, rank: int, name: str = "axis") -> int:
    """An axis, of so many, counted from the front; of a scalar, 0 and -1 are as if it had one."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise Unreadable(f"{name} {axis} is none of {rank} axes")
    return axis % max(rank, 1)


def sizes_of(value: Value, what: str) -> tuple[int, ...]:
    """The sizes of ``value``, which must all be known; ``what`` they are, for people."""
    spec = described(value)
    if not spec.known:
        raise Unreadable(f"{what} must be known")
    return spec.concrete


class ModelReader:
    """Who builds what nodes say in ``graph``. ``refusals`` are what stood in the way, ``wanted`` the inputs whose
    values would have to be known, ``channels_last`` for a tensor of images the same with its channels last."""

    def __init__(self, graph: Graph, opsets: Mapping[str, int], functions: Mapping[tuple[str, str], Any]) -> None:
        self.graph, self.opsets, self.functions = graph, dict(opsets), functions
        self.refusals: dict[str, None] = {}
        self.wanted: set[Tensor] = set()
        self.channels_last: dict[Tensor, Tensor] = {}
        self._depth = self._nodes = 0

    def read(
        self,
        nodes: Iterable[Any],
        values: dict[str, Value],
        given: Mapping[str, Any] | None = None,
        own: Collection[str] | None = None,
    ) -> None:
        """Add to ``values`` what ``nodes`` answer; ``given`` are the attributes of the function that they lie in.

        ``own`` are those of their graph, where others around it are among them, too: a graph has one value of a name.
        """
        taken = set(values if own is None else own)
        for node in nodes:
            answers = self._answers(node, values, given or {})
            names = [name for name in node.output if name]
            for name in names:
                if name in taken:
                    self._refuse(node, f"it makes {name!r}, which is there already")
                taken.add(name)
            found = dict(zip(node.output, answers, strict=False))
            values.update({name: UNREAD if found.get(name) is None else found[name] for name in names})

    def body(self, graph: Any, values: Mapping[str, Value], arguments: Sequence[Value]) -> list[Value]:
        """What a graph inside of a node answers for ``arguments``, given the ``values`` around it."""
        if len(graph.input) != len(arguments):
            raise Unreadable(f"its body takes {len(graph.input)} values, and it has {len(arguments)} for it")
        inside = dict(values)
        own = {tensor.name: array_of(tensor) for tensor in graph.initializer}
        own.update(zip([value.name for value in graph.input], arguments, strict=True))
        inside.update(own)
        with self._deeper():
            self.read(graph.node, inside, own=own)
        answers = [inside.get(value.name, UNREAD) for value in graph.output]
        if any(answer is UNREAD for answer in answers):
            raise Unreadable
        return answers

    def tensor(self, value: Value) -> Tensor:
        """``value`` as a tensor of the graph that is built now, which may be a body."""
        here = active_builder()
        graph = here if isinstance(here, Graph) else self.graph
        found = graph.adopt(as_value(value))
        made: Tensor = found if isinstance(found, Tensor) else graph.constant(np.asarray(found))
        return made

    def graph_in_force(self) -> Any:
        """Around what builds bodies: the graph that they lie in."""
        return building(self.graph)

    def _answers(self, node: Any, values: Mapping[str, Value], given: Mapping[str, Any]) -> list[Value]:
        inputs = [values.get(name, UNREAD) if name else None for name in node.input]
        missing = [name for name in node.input if name and name not in values]
        self._nodes += 1
        try:
            if self._nodes > MOST_NODES:
                raise Unreadable(f"its functions and bodies come to more than {MOST_NODES} nodes")
            if missing:
                raise Unreadable(f"nothing makes its input {missing[0]!r}")
            if any(value is UNREAD for value in inputs):
                self._check_there_is(node)
                return []
            with _scope(node):
                found = self._apply(node, inputs, self._attributes(node, given), values)
        except (Unreadable, FlowrtError) as error:
            if str(error):
                self._refuse(node, str(error))
            return []
        except DAMAGED as error:
            self._refuse(node, f"it is not what its operator takes: {type(error).__name__}: {error}")
            return []
        return [
            np.asarray(one) if isinstance(one, np.generic) else one
            for one in (found if isinstance(found, (tuple, list)) else (found,))
        ]

    def _refuse(self, node: Any, why: str) -> None:
        if len(self.refusals) < MOST_REFUSED:
            self.refusals[f"{names_of(node)}: {why}"] = None

    def _attributes(self, node: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """A node's attributes by name, those of the function around it in the place of references to them."""
        found: dict[str, Any] = {}
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                found[attribute.name] = attribute
            elif attribute.ref_attr_name in given:
                resolved = found[attribute.name] = onnx.AttributeProto()
                resolved.CopyFrom(given[attribute.ref_attr_name])
                resolved.name = attribute.name
        return found

    def _apply(self, node: Any, inputs: list[Value], attrs: dict[str, Any], values: Mapping[str, Value]) -> Any:
        local = self.functions.get((domain_of(node), node.op_type))
        if local is not None:
            return self._function(local, inputs, {**{a.name: a for a in local.attribute_proto}, **attrs})
        schema, opset = self._check_there_is(node), self.opsets[""]
        _check_form(schema, opset, inputs, attrs)
        call = NodeCall(self, node, inputs, attrs)
        if node.op_type in BODIED:
            return BODIED[node.op_type](call, values)
        if node.op_type in READERS:
            return READERS[node.op_type](call)
        return self._composed(call, schema)

    def _check_there_is(self, node: Any) -> Any:
        """What ONNX says of an operator; raises `Unreadable` where nothing here computes it, whatever it takes."""
        if (domain_of(node), node.op_type) in self.functions:
            return None
        if domain_of(node):
            raise Unreadable(f"operators of {node.domain} are not supported")
        schema = _schema(node.op_type, self.opsets[""])
        composed = schema.has_function or schema.has_context_dependent_function
        if not composed and node.op_type not in BODIED and node.op_type not in READERS:
            raise Unreadable(NOTHING)
        return schema

    def _composed(self, call: NodeCall, schema: Any) -> Any:
        """What an op answers that ONNX composes of others."""
        found = None
        if schema.has_function:
            version = max([v for v in schema.function_opset_versions if v <= call.opset], default=0)
            found = schema.get_function_with_opset_version(version) if version else None
        elif schema.has_context_dependent_function:
            versions = schema.context_dependent_function_opset_versions
            version = max([v for v in versions if v <= call.opset], default=0)
            specs = [None if value is None else described(value) for value in call.inputs]
            types = [(onnx.TypeProto() if s is None else type_of(s)).SerializeToString() for s in specs]
            compose = schema.get_context_dependent_function_with_opset_version
            found = compose(version, call.resolved().SerializeToString(), types) if version else None
        if not found:
            raise Unreadable(NOTHING)
        function = onnx.FunctionProto()
        function.ParseFromString(found)
        usual = {name: kind.default_value for name, kind in schema.attributes.items() if kind.default_value.name}
        return self._function(function, call.inputs, {**usual, **call.protos})

    def _function(self, function: Any, inputs: Sequence[Value], attrs: Mapping[str, Any]) -> list[Value]:
        inside = dict.fromkeys(function.input)
        inside.update(zip(function.input, inputs, strict=False))
        kept = self.opsets
        self.opsets = {**kept, **{domain_of(o): o.version for o in function.opset_import}}
        try:
            with self._deeper():
                self.read(function.node, inside, attrs)
        finally:
            self.opsets = kept
        return [inside.get(name) for name in function.output]

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        if self._depth >= MOST_NESTED:
            raise Unreadable(f"functions and bodies are nested more than {MOST_NESTED} deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


BODIED: dict[str, Callable[[NodeCall, Mapping[str, Value]], Any]] = {}
"""What reads a node that holds graphs, by its op: these see the values around it."""


@lru_cache(maxsize=1024)
def _schema(op: str, opset: int) -> Any:
    """What ONNX says of an operator; raises `Unreadable` where the opset has none of that name."""
    try:
        found = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        raise Unreadable(f"opset {opset} has no such operator") from None
    if found.deprecated:
        raise Unreadable(f"opset {opset} has no such operator any more")
    return found


def _check_form(schema: Any, opset: int, inputs: Sequence[Value], attrs: Mapping[str, Any]) -> None:
    """Raise `Unreadable` where a node has other inputs or attributes than its operator."""
    given = len(inputs)
    while given and inputs[given - 1] is None:
        given -= 1
    if not schema.min_input <= given <= schema.max_input:
        raise Unreadable(f"it takes {schema.min_input} to {schema.max_input} inputs, and has {given}")
    if unknown := set(attrs) - set(schema.attributes):
        raise Unreadable(f"opset {opset} has no attributes {sorted(unknown)} of it")
    for name, kind in schema.attributes.items():
        if name not in attrs and kind.required:
            raise Unreadable(f"it lacks the attribute {name!r}")
        if name in attrs and attrs[name].type != int(kind.type.value):
            raise Unreadable(f"its attribute {name!r} is of another kind than opset {opset} says")


def _scope(node: Any) -> Any:
    return name_scope(re.sub(r"[^\w./-]+", "_", node.name).strip("/") or node.op_type)


def _plain(attribute: Any) -> Any:
    """An attribute as plain data: a tensor is an array, a text is `str`, several are a list."""
    value = onnx.helper.get_attribute_value(attribute)
    kind = attribute.type
    if kind == onnx.AttributeProto.TENSOR:
        return array_of(value)
    if kind == onnx.AttributeProto.STRING:
        return value.decode("utf-8", "replace")
    if kind == onnx.AttributeProto.STRINGS:
        return [text.decode("utf-8", "replace") for text in value]
    if kind in (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS):
        return list(value)
    if kind in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.GRAPH):
        return value
    raise Unreadable(f"its attribute {attribute.name!r} is of a kind that is not supported")
