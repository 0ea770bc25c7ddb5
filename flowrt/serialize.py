"""Graphs as plain data and as bytes.

Law: the data holds no code; ops are named, attributes are plain. Bytes are not trusted: every op is looked up in the
registry, every attribute matched with the op's signature, every shape inferred again and compared, every reference
checked to point backwards. Whatever does not hold is `BrokenStream` or `GraphError`, and nothing else leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.codec import pack, unpack
from flowrt.base.device import Device
from flowrt.base.errors import BrokenStream, FlowrtError, GraphError, Site, user_site
from flowrt.base.partitioning import Partition, row_bounds
from flowrt.base.plan import attrs_to_data, plan_from_data, spec_from_data, spec_to_data
from flowrt.base.spec import Spec, as_dtype
from flowrt.graph import Graph, Node, Resource, Tensor, set_bytes
from flowrt.op import Op, lookup
from flowrt.ops.starting import check_start
from flowrt.ops.state import Variable

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr

FORMAT = "flowrt.graph"
VERSION = 1

T = TypeVar("T")


def graph_to_bytes(graph: Graph) -> bytes:
    """``graph`` as bytes; `graph_from_bytes` reads them."""
    return pack(graph_to_data(graph))


def graph_from_bytes(data: bytes) -> Graph:
    """The graph that `graph_to_bytes` wrote, checked.

    Raises `BrokenStream` for what is no graph, and `GraphError` where an op is not known here or does not accept its
    inputs and attributes.
    """
    try:
        view = memoryview(data).cast("B")  # of arrays and mapped files, too
    except (TypeError, ValueError):
        told = f"a graph is read of the bytes that to_bytes wrote, not of {data!r:.80}"
        raise GraphError(f"{user_site()}: {told}") from None
    return graph_from_data(unpack(view))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """``graph`` as plain data for the codec."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": graph.seed,
        "names": dict(graph._names),
        "claimed": dict(graph._claimed),
        "counted": sorted(graph._counted),
        "nodes": [_node_to_data(node) for node in graph.nodes],
        "resources": [_resource_to_data(resource) for resource in graph.resources.values()],
        "variables": [(v.resource.container, v.resource.name) for v in graph.variables],
        "partitions": [_partition_to_data(partition) for partition in graph.partitions.values()],
    }


def _node_to_data(node: Node) -> dict[str, Any]:
    return {
        "op": node.op.name,
        "name": node.name,
        "inputs": [(t.op.index, t.index) for t in node.inputs],
        "attrs": attrs_to_data(node.attrs),
        "control": [n.index for n in node.control_inputs],
        "device": str(node.device),
        "colocate": [n.index for n in node.colocate],
        "site": (node.site.file, node.site.line),
        "outputs": [spec_to_data(t.spec) for t in node.outputs],
    }


def _resource_to_data(resource: Resource) -> dict[str, Any]:
    initial, initialize = resource.initial, resource.initialize
    return {
        "kind": resource.kind,
        "container": resource.container,
        "name": resource.name,
        "specs": [spec_to_data(spec) for spec in resource.specs],
        "device": str(resource.device),
        "site": (resource.site.file, resource.site.line),
        "trainable": resource.trainable,
        "initial": None if initial is None else (initial.op.index, initial.index),
        "initialize": None if initialize is None else initialize.index,
        "detail": dict(resource.detail),
    }


def _partition_to_data(partition: Partition) -> dict[str, Any]:
    return {
        "name": partition.name,
        "spec": spec_to_data(partition.spec),
        "rows": partition.rows,
        "shards": partition.shards,
        "container": partition.container,
    }


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def graph_from_data(data: Any) -> Graph:
    """The graph that `graph_to_data` described; see `graph_from_bytes`."""
    try:
        return _read_graph(data)
    except FlowrtError:
        raise
    except Exception as error:  # hostile data reaches the inference of any op; what that trips over is the data's fault
        raise BrokenStream(f"not a graph: {type(error).__name__}: {error}") from error


def _read_graph(data: Any) -> Graph:
    if _item(data, "format", str) != FORMAT:
        raise BrokenStream(f"not a graph: its format is {data['format']!r:.80}, not {FORMAT!r}")
    if _item(data, "version", int) != VERSION:
        raise BrokenStream(f"a graph of version {data['version']} cannot be read; this is version {VERSION}")
    graph = Graph(None if data.get("seed") is None else _item(data, "seed", int))
    for node in _item(data, "nodes", tuple):
        _read_node(graph, node)
    for resource in _item(data, "resources", tuple):
        found = _read_resource(graph, resource)
        graph.add_resource(found)
    _read_variables(graph, _item(data, "variables", tuple))
    for partition in _item(data, "partitions", tuple) if "partitions" in data else ():
        _read_partition(graph, partition)
    _read_names(graph, data)
    return graph


def _read_node(graph: Graph, data: Any) -> None:
    op = lookup(_item(data, "op", str))
    where = f"{op.name} {_item(data, 'name', str)!r:.200}"
    inputs = tuple(_tensor(graph, ref, where) for ref in _item(data, "inputs", tuple))
    attrs = _attrs(op, _item(data, "attrs", dict), len(inputs), where)
    node = Node(
        graph,
        len(graph.nodes),
        op,
        _item(data, "name", str),
        inputs,
        attrs,
        tuple(_node(graph, i, where) for i in _item(data, "control", tuple)),
        Device.parse(_item(data, "device", str)),
        tuple(_node(graph, i, where) for i in _item(data, "colocate", tuple)),
        _site(data),
    )
    written = tuple(spec_from_data(spec) for spec in _item(data, "outputs", tuple))
    inferred = _infer(node)
    if written != inferred:
        raise BrokenStream(f"{where}: the graph says {_specs(written)}, inference {_specs(inferred)}")
    node.outputs = tuple(Tensor(node, i, spec) for i, spec in enumerate(inferred))
    graph.nodes.append(node)


def _infer(node: Node) -> tuple[Spec, ...]:
    try:
        return node.op.infer([t.spec for t in node.inputs], node.attrs)
    except FlowrtError as error:
        raise GraphError(f"{node.op.name} {node.name!r:.200} ({node.site}): {error}") from error


def _specs(specs: Sequence[Spec]) -> str:
    return f"({', '.join(f'{s}' if s.value is None else f'{s} = {s.value}' for s in specs)})"


def _attrs(op: Op, given: Mapping[str, Any], inputs: int, where: str) -> dict[str, Attr]:
    """The attributes of a node, which must be those that the signature of ``op`` names."""
    tensors = [p for p in op.parameters if p.tensor]
    absent = given.get("_none", ())
    if not isinstance(absent, tuple) or not set(absent) <= {p.name for p in tensors if p.optional}:
        raise BrokenStream(f"{where}: {absent!r:.80} are not tensors that may be left out")
    expected = {p.name for p in op.parameters if not p.tensor}
    expected |= ({"_many"} if any(p.many for p in tensors) else set()) | ({"_none"} if absent else set())
    if set(given) != expected:
        raise BrokenStream(f"{where}: its attributes are {sorted(given)!r:.200}, expected {sorted(expected)}")
    many = _item(given, "_many", int) if "_many" in given else 0
    if many < 0 or inputs != many + sum(not p.many and p.name not in absent for p in tensors):
        raise BrokenStream(f"{where}: {inputs} inputs do not fit the signature of {op.name}")
    for p in op.parameters:
        if p.dtype and given[p.name] is not None and as_dtype(_item(given, p.name, str)).name != given[p.name]:
            raise BrokenStream(f"{where}: {given[p.name]!r:.80} is not the name of a dtype")
    for name in ("resource", "container"):
        if name in given:
            _item(given, name, str)
    return {name: _attr(value, where) for name, value in given.items()}


def _attr(value: Any, where: str) -> Attr:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return tuple(_attr(item, where) for item in value)
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
        return value
    if isinstance(value, dict):
        return plan_from_data(value)
    raise BrokenStream(f"{where}: {value!r:.80} is not an attribute")


def _read_resource(graph: Graph, data: Any) -> Resource:
    kind, name = _item(data, "kind", str), _item(data, "name", str)
    where = f"{kind:.40} {name!r:.200}"
    initial, initialize = data.get("initial"), data.get("initialize")
    found = Resource(
        kind,
        _item(data, "container", str),
        name,
        tuple(spec_from_data(spec) for spec in _item(data, "specs", tuple)),
        Device.parse(_item(data, "device", str)),
        _site(data),
        _item(data, "trainable", bool),
        None if initial is None else _tensor(graph, initial, where),
        None if initialize is None else _node(graph, initialize, where),
        {key: _attr(value, where) for key, value in _item(data, "detail", dict).items()},
    )
    if kind not in ("variable", "local variable", "queue"):
        raise BrokenStream(f"{where}: a resource is a variable or a queue")
    if kind != "queue":
        _check_variable(found, where)
    return found


def _check_variable(variable: Resource, where: str) -> None:
    """A variable has one known spec, and an assignment of its initial value to itself."""
    initial, initialize = variable.initial, variable.initialize
    if len(variable.specs) != 1 or not variable.specs[0].known:
        raise BrokenStream(f"{where}: a variable holds one tensor of known shape")
    if initial is None or initialize is None or not variable.specs[0].accepts(initial.dtype, initial.spec.shape):
        raise BrokenStream(f"{where}: a variable has an initial value of its spec, {variable.specs[0]}")
    given = initialize.inputs
    if initialize.resource != (variable.container, variable.name) or len(given) != 1 or given[0] is not initial:
        raise BrokenStream(f"{where}: {initialize!r} does not initialize it")
    check_start(initial, initial.graph, f"{variable.name:.200}", variable.site)


def _read_variables(graph: Graph, keys: Sequence[Any]) -> None:
    reads: dict[tuple[str, str], Tensor] = {}
    for node in graph.nodes:
        if node.op.name == "read_variable" and not node.attrs["fresh"] and node.resource is not None:
            reads.setdefault(node.resource, node.outputs[0])
    expected = {key for key, resource in graph.resources.items() if resource.kind == "variable"}
    if len(keys) != len(expected) or set(keys) != expected:
        raise BrokenStream(f"the graph lists {len(keys)} variables and holds {len(expected)}, or others")
    for key in keys:
        resource, read = graph.resources[key], reads.get(key)
        if read is None or read.spec != resource.specs[0]:
            raise BrokenStream(f"variable {resource.name!r:.200}: the graph has no read of it")
        graph.variables.append(Variable.of(resource, read))


def _read_partition(graph: Graph, data: Any) -> None:
    """What several variables hold together, of which each holds what that says."""
    spec, rows, shards = spec_from_data(data["spec"]), _item(data, "rows", tuple), _item(data, "shards", tuple)
    found = Partition(_item(data, "name", str), spec, rows, shards, _item(data, "container", str))
    where = f"variable {found.name!r:.200}"
    if rows and (not spec.dims or row_bounds(rows, spec.concrete[0]) != rows or len(rows) != len(shards) + 1):
        raise BrokenStream(f"{where}: {rows!r:.200} are not the bounds of the rows of its parts")
    if found.name in graph.partitions or not shards or (not rows and spec.dims != ()):
        raise BrokenStream(f"{where}: what holds it is not told, or twice")
    for shard, first, end in found.pieces():
        held = graph.resources.get((found.container, shard))
        if held is None or held.kind != "variable" or held.specs[0] != found.spec_of(first, end):
            raise BrokenStream(f"{where}: no variable {shard!r:.200} holds its rows from {first} to {end}")
    graph.partitions[found.name] = found


def _read_names(graph: Graph, data: Mapping[str, Any]) -> None:
    """Restore the numbering of names, so that what is built later gets the names it would have got."""
    used = [node.name for node in graph.nodes]
    if len(set(used)) < len(used) or "" in used:
        raise BrokenStream("the names of a graph's nodes are not unique")
    graph._names = _taken(_item(data, "names", dict), used)
    graph._claimed = _taken(_item(data, "claimed", dict), [name for _, name in graph.resources])
    graph._counted = {name for name in _item(data, "counted", tuple) if isinstance(name, str)}


def _taken(names: Mapping[str, Any], used: Sequence[str]) -> dict[str, int]:
    taken = {name: _item(names, name, int) for name in names}
    for name in used:
        if taken.get(name, 0) < 1:
            raise BrokenStream(f"the name {name!r:.200} is used but not taken")
    return taken


def _tensor(graph: Graph, ref: Any, where: str) -> Tensor:
    if not (isinstance(ref, tuple) and len(ref) == 2):
        raise BrokenStream(f"{where}: {ref!r:.80} is not (node, output)")
    node = _node(graph, ref[0], where)
    if type(ref[1]) is not int or not 0 <= ref[1] < len(node.outputs):
        raise BrokenStream(f"{where}: {node!r} has no output {ref[1]!r:.80}")
    return node.outputs[ref[1]]


def _node(graph: Graph, index: Any, where: str) -> Node:
    if type(index) is not int or not 0 <= index < len(graph.nodes):
        raise BrokenStream(f"{where}: refers to node {index!r:.80}, which does not come before it")
    return graph.nodes[index]


def _site(data: Any) -> Site:
    site = _item(data, "site", tuple)
    if len(site) != 2 or type(site[0]) is not str or type(site[1]) is not int:
        raise BrokenStream(f"{site!r:.80} is not a (file, line)")
    return Site(*site)


def _item(data: Any, key: str, kind: type[T]) -> T:
    """The entry of ``data`` under ``key``, which must be exactly of ``kind``."""
    if not isinstance(data, dict) or key not in data:
        raise BrokenStream(f"not a graph: {key!r} is missing from {data!r:.80}")
    value = data[key]
    if type(value) is not kind:
        raise BrokenStream(f"not a graph: {key!r} is {value!r:.80}, not of type {kind.__name__}")
    return value


set_bytes(graph_to_bytes, graph_from_bytes)
