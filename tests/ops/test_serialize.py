"""Graphs as bytes: they come back equal, and no bytes do harm."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_world import CLUSTER, RandomGraph

from flowrt.base.codec import pack, unpack
from flowrt.base.errors import BrokenStream, GraphError
from flowrt.gradients import gradients
from flowrt.graph import Graph, colocate_with, container, control_dependencies, device, name_scope
from flowrt.ops.elementwise import add, negative
from flowrt.ops.flow import switch
from flowrt.ops.queues import FIFOQueue
from flowrt.ops.source import constant, full, placeholder
from flowrt.ops.state import Variable
from flowrt.serialize import graph_from_bytes, graph_to_bytes


def sample() -> Graph:
    """A graph with something of everything."""
    with Graph(seed=7) as graph:
        x = placeholder("float32", (None, 2), name="x")
        with container("models"), device("/job:ps/task:0"):
            v = Variable([1.0, 2.0], name="v", trainable=False)
        with colocate_with(v), name_scope("layer"):
            y = add(x, v)
        with control_dependencies([v.assign_add([1.0, 1.0])]):
            v.read()
        switch(y, constant(True))
        full((2, 3), 0.5)
        queue = FIFOQueue(3, ["float32", "int64"], [(2,), ()], name="queue")
        queue.enqueue([v, 3])
        gradients(y, [v, x])
    return graph


def test_a_graph_comes_back_equal() -> None:
    graph = sample()
    data = graph.to_bytes()
    back = Graph.from_bytes(data)
    assert back.to_bytes() == data
    assert [n.name for n in back.nodes] == [n.name for n in graph.nodes]
    assert [str(n.site) for n in back.nodes] == [str(n.site) for n in graph.nodes]
    assert (back.seed, back.finalized) == (7, False)


def test_graphs_are_read_of_any_buffer() -> None:
    data = sample().to_bytes()
    with mmap.mmap(-1, len(data)) as mapped:
        mapped[:] = data
        for buffer in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8), mapped):
            assert Graph.from_bytes(buffer).to_bytes() == data
    for other in ("x", 3, np.frombuffer(data * 2, np.uint8)[::2]):
        with pytest.raises(GraphError, match=r"test_serialize.py:\d+: a graph is read of the bytes"):
            Graph.from_bytes(other)  # type: ignore[arg-type]


def test_variables_and_queues_come_back() -> None:
    back = Graph.from_bytes(sample().to_bytes())
    (v,) = back.variables
    assert (v.name, str(v.spec), v.trainable, v.device) == ("v", "float32[2]", False, "/job:ps/task:0")
    assert v.initializer.op.name == "assign"
    assert v.__tensor__().op.name == "v/value"
    assert back.resources["", "queue"].detail == {"capacity": 3, "kind": "fifo"}


def test_a_graph_that_came_back_can_be_built_on() -> None:
    graph = sample()
    back = Graph.from_bytes(graph.to_bytes())
    for each in (graph, back):
        with each:
            add(negative(each.variables[0]), 1.0)
    assert back.to_bytes() == graph.to_bytes()


def test_random_graphs_come_back_equal() -> None:
    print("seeds 0 to 199")
    for seed in range(200):
        data = graph_to_bytes(RandomGraph(seed, CLUSTER).graph)
        assert graph_to_bytes(graph_from_bytes(data)) == data, f"seed {seed}"


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def changed(**entries: Any) -> bytes:
    return pack({**unpack(sample().to_bytes()), **entries})


def with_node(index: int, **entries: Any) -> bytes:
    nodes = list(unpack(sample().to_bytes())["nodes"])
    nodes[index] = {**nodes[index], **entries}
    return changed(nodes=nodes)


def with_variable(**entries: Any) -> bytes:
    resources = list(unpack(sample().to_bytes())["resources"])
    resources[0] = {**resources[0], **entries}
    return changed(resources=resources)


ADD = next(node.index for node in sample().nodes if node.op.name == "add")
READ = next(node.index for node in sample().nodes if node.op.name == "read_variable")
FLOAT = {"dtype": "float32", "shape": (9,), "value": None}

BROKEN: dict[str, tuple[bytes, type[Exception], str]] = {
    "another format": (changed(format="flowrt.base.plan"), BrokenStream, "format"),
    "another version": (changed(version=2), BrokenStream, "version 2 cannot be read"),
    "no dict": (pack([1, 2]), BrokenStream, "missing"),
    "an op nobody knows": (with_node(ADD, op="format_disk"), GraphError, "no op named 'format_disk' is known here"),
    "an input from the future": (with_node(ADD, inputs=((999, 0), (READ, 0))), BrokenStream, "does not come before"),
    "an output that is not": (with_node(ADD, inputs=((READ, 1), (READ, 0))), BrokenStream, "has no output 1"),
    "an input too many": (with_node(ADD, inputs=((READ, 0),) * 3), BrokenStream, "3 inputs do not fit"),
    "a boolean for a node": (with_node(ADD, control=(True,)), BrokenStream, "refers to node True"),
    "an attribute too many": (with_node(ADD, attrs={"axis": 1}), BrokenStream, "expected"),
    "bytes for an attribute": (with_node(READ, attrs={"shape": b"x"}), BrokenStream, "attributes are"),
    "other shapes than inference": (with_node(ADD, outputs=(FLOAT,)), BrokenStream, "inference"),
    "inputs that do not fit": (with_node(ADD, inputs=((0, 0), (0, 0)), outputs=(FLOAT,)), BrokenStream, "inference"),
    "no device": (with_node(ADD, device="the moon"), GraphError, "is not a device"),
    "no site": (with_node(ADD, site=("a.py",)), BrokenStream, "site|file"),
    "a name taken twice": (with_node(ADD, name="x"), BrokenStream, "not unique"),
    "names not taken": (changed(names={}), BrokenStream, "used but not taken"),
    "a variable nobody initializes": (with_variable(initialize=None), BrokenStream, "initial value"),
    "a variable initialized by another": (with_variable(initialize=ADD), BrokenStream, "does not initialize"),
    "a variable of another spec": (with_variable(specs=(FLOAT,)), BrokenStream, "initial value"),
    "a resource of no kind": (with_variable(kind="socket"), BrokenStream, "a variable or a queue"),
    "variables not listed": (changed(variables=()), BrokenStream, "lists 0 variables"),
    "truncated": (sample().to_bytes()[:-1], BrokenStream, "bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_graph_is_refused(case: str) -> None:
    data, error, pattern = BROKEN[case]
    with pytest.raises(error, match=pattern):
        graph_from_bytes(data)


SAMPLE = sample().to_bytes()


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300)
def test_mutated_bytes_are_a_graph_or_a_clear_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for at, value in changes:
        data[at] = value
    try:
        graph = graph_from_bytes(bytes(data))
    except (BrokenStream, GraphError):
        return
    assert graph_from_bytes(graph_to_bytes(graph)) is not None


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=300)
def test_any_value_anywhere_is_a_graph_or_a_clear_error(data: Any) -> None:
    message = unpack(SAMPLE)
    spot, key = _spots(message, data)
    spot[key] = data.draw(plain | st.just(np.zeros(2)))
    try:
        graph_from_bytes(pack(message))
    except (BrokenStream, GraphError):
        return


def _spots(message: dict[str, Any], data: Any) -> tuple[Any, Any]:
    """A random entry of the message, as a container that can be written to and the key in it."""
    message["nodes"] = [dict(node) for node in message["nodes"]]
    message["resources"] = [dict(resource) for resource in message["resources"]]
    holders: list[Any] = [message, *message["nodes"], *message["resources"]]
    for node in message["nodes"]:
        node["attrs"] = dict(node["attrs"])
        holders.append(node["attrs"])
    holder = data.draw(st.sampled_from([h for h in holders if h]))
    return holder, data.draw(st.sampled_from(sorted(holder)))
