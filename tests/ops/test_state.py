"""Variables and queues as a program holds them: names, specs, operators, and what they record into the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt.ops as fr
from flowrt.base.errors import GraphError, SpecError
from flowrt.base.spec import Spec
from flowrt.graph import Graph, container, control_dependencies, device, name_scope
from flowrt.ops.state import Variable, variables_from


def test_a_variable_takes_its_spec_from_what_it_starts_from() -> None:
    with Graph() as graph:
        assert fr.Variable(0.5).spec == Spec("float32", ())
        assert fr.Variable(np.zeros((2, 3))).spec == Spec("float64", (2, 3))
        assert fr.Variable(np.zeros((2, 3)), dtype="float32").spec == Spec("float32", (2, 3))
        assert fr.Variable([1, 2]).spec == Spec("int64", (2,))
        assert fr.Variable(fr.zeros((4, 1)) + 1, dtype="float64").spec == Spec("float64", (4, 1))
    assert len(graph.variables) == 5
    assert all(graph.resources[("", v.name)].initial.spec.accepts(v.dtype, v.shape) for v in graph.variables)


def kept(variable: Variable) -> np.ndarray[Any, Any]:
    """The array that the graph keeps for a variable to start from."""
    initial = variable.graph.resources[("", variable.name)].initial
    assert initial is not None
    value = initial.op.attrs["value"]
    assert isinstance(value, np.ndarray)
    return value


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_copied_begins_at_a_cache_line_and_never_changes(order: Any) -> None:
    for shape in ((64, 16), (63, 33), (5000,)):
        array = np.array(np.random.default_rng(0).standard_normal(shape), order=order)
        with Graph():
            held = fr.constant(array).op.attrs["value"]
        assert held.ctypes.data % 64 == 0
        array[...] = 0
        assert held.any()
        assert not held.flags.writeable
        with Graph():
            assert np.shares_memory(fr.constant(held).op.attrs["value"], held)


def test_an_array_that_can_be_written_is_copied_and_one_that_never_changes_is_held_as_it_is(tmp_path: Any) -> None:
    owned, viewed, turned = np.arange(6.0), np.arange(6.0), np.arange(6.0).reshape(2, 3)
    mapped = np.lib.format.open_memmap(tmp_path / "table.npy", "w+", np.float32, (2, 3))
    mapped[...] = 7
    mapped.flush()
    held = [owned, owned[2:], np.frombuffer(bytes(24), np.int32), np.load(tmp_path / "table.npy", mmap_mode="r")]
    copied = [viewed, viewed[1:], np.frombuffer(bytearray(24), np.int32), turned.T, mapped]
    for array in (owned, *held, viewed[1:], copied[1], copied[2], turned, turned.T):
        array.setflags(write=False)
    with Graph():
        assert all(np.shares_memory(kept(fr.Variable(array)), array) for array in held)
        starts = [kept(fr.Variable(array)) for array in copied]
        of_another_dtype = kept(fr.Variable(owned, dtype="float32"))
    assert not any(np.shares_memory(start, array) for start, array in zip(starts, copied, strict=True))
    assert of_another_dtype.dtype == np.float32
    viewed[...], mapped[...] = -1, -1
    np.testing.assert_array_equal(starts[1], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(starts[4], np.full((2, 3), 7))
    assert not any(start.flags.writeable for start in starts)


def test_an_array_of_the_other_byte_order_is_kept_as_numbers_of_this_machine() -> None:
    given = np.arange(12, dtype=np.dtype(np.float32).newbyteorder("S")).reshape(4, 3)
    never_changing = given.copy()
    never_changing.setflags(write=False)
    with Graph():
        for array in (given, never_changing, given.T):
            start = kept(fr.Variable(array))
            assert start.dtype == np.float32
            assert not start.flags.writeable
            np.testing.assert_array_equal(start, array)


def test_a_variables_nodes_are_named_after_it_and_its_scope() -> None:
    with Graph() as graph:
        with name_scope("layer"):
            first, second = fr.Variable(1.0, name="w"), fr.Variable(2.0, name="w")
        first.assign_add(1.0)
        with name_scope("train"):
            second.assign(3.0)
    assert [v.name for v in graph.variables] == ["layer/w", "layer/w_1"]
    names = {n.name for n in graph.nodes}
    assert {"layer/w/value", "layer/w_1/initialize", "layer/w/assign_add", "train/layer/w_1/assign"} <= names


def test_a_variable_stands_for_its_one_plain_read() -> None:
    with Graph() as graph:
        v = fr.Variable(np.ones((2, 3), np.float32), name="v")
        results = [v + 1, 2 * v, -v, v[0], v @ np.ones((3, 1), np.float32), fr.sum(v), v > 0]
    reads = [n for n in graph.nodes if n.op.name == "read_variable"]
    assert len(reads) == 1
    assert not reads[0].attrs["fresh"]
    assert [r.shape for r in results] == [(2, 3), (2, 3), (2, 3), (3,), (2, 1), (), (2, 3)]
    assert len(v) == 2
    assert [row.shape for row in v] == [(3,), (3,)]
    with pytest.raises(GraphError, match=r"fr\.cond"):
        bool(v)


def test_a_fresh_read_follows_the_control_dependencies_around_it_and_the_plain_one_does_not() -> None:
    with Graph():
        v = fr.Variable(1.0, name="v")
        write = v.assign(2.0)
        with control_dependencies([write]):
            read = v.read()
            later = fr.Variable(3.0, name="later")
    assert read.op.control_inputs == (write,)
    assert read.op.attrs["fresh"]
    assert later.initializer.control_inputs == ()
    assert (later + 0).op.inputs[0].op.control_inputs == ()


def test_writes_land_in_the_variables_graph_wherever_they_are_built() -> None:
    with Graph() as graph:
        v = fr.Variable([1.0, 2.0], name="v")
    node = v.assign_sub([0.5, 0.5])
    assert node.graph is graph
    assert node.resource == ("", "v")
    assert node.inputs[0].dtype == np.float32
    assert v.read().graph is graph


def test_a_write_of_another_shape_or_dtype_is_refused_with_both_specs() -> None:
    with Graph():
        v = fr.Variable(np.zeros((2, 3), np.float32), name="v")
        with pytest.raises(SpecError, match=r"test_state.py:\d+.*'v' holds float32\[2,3\], not float32\[2\]"):
            v.assign(np.zeros(2))
        with pytest.raises(SpecError, match=r"not int64\[2,3\]"):
            v.assign_add(fr.constant(np.zeros((2, 3), np.int64)))
        x = fr.placeholder("float32", (None, 3))
        assert v.assign(x).inputs == (x,)


def test_bools_are_not_subtracted() -> None:
    with Graph():
        flags = fr.Variable(np.array([True, False]))
        flags.assign_add(np.array([True, True]))
        with pytest.raises(SpecError, match="difference of bools"):
            flags.assign_sub(np.array([True, True]))


def test_a_variable_needs_a_graph_and_a_known_shape() -> None:
    with pytest.raises(GraphError, match=r"a variable needs a graph"):
        fr.Variable(1.0)
    with Graph(), pytest.raises(SpecError, match=r"fully known shape, got float32\[\?\]"):
        fr.Variable(fr.placeholder("float32", (None,)))


def test_a_variable_keeps_its_device_container_and_trainability() -> None:
    with Graph() as graph:
        with device("/job:ps/task:1"), container("shared"):
            v = fr.Variable(1.0, name="v", trainable=False)
        assert v.device == "/job:ps/task:1"
        assert not v.trainable
        assert v.assign(2.0).resource == ("shared", "v")
        assert graph.resources[("shared", "v")].initialize is v.initializer


class Shared:
    """Hands out what it was given before, by name."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.known: dict[str | None, Variable] = {}

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool) -> Variable | None:
        self.asked.append(name)
        return self.known.get(name)


def test_a_source_may_hand_out_variables_that_exist() -> None:
    source = Shared()
    with Graph() as graph, variables_from(source):
        source.known["w"] = fr.Variable(1.0, name="w")
        assert fr.Variable(5.0, name="w") is source.known["w"]
        assert fr.Variable(5.0, name="b") is not source.known["w"]
    assert source.asked == ["w", "w", "b"]
    assert len(graph.variables) == 2


def test_a_queue_of_one_dtype_deals_in_tensors_and_of_several_in_tuples() -> None:
    with Graph() as graph:
        plain = fr.FIFOQueue(2, "float32", (3,), name="plain")
        pairs = fr.FIFOQueue(4, ["float32", "int32"], [(3,), ()], name="pairs")
        assert plain.dequeue().shape == (3,)
        assert plain.dequeue_many(5).shape == (5, 3)
        assert plain.dequeue_up_to(5).shape == (None, 3)
        assert [t.spec for t in pairs.dequeue()] == [Spec("float32", (3,)), Spec("int32", ())]
        assert [t.dtype for t in pairs.enqueue(([1, 2, 3], 4)).inputs] == [np.float32, np.int32]
        assert pairs.size().spec == Spec("int64", ())
        assert fr.FIFOQueue(1, ["int8"], [()]).dequeue()[0].dtype == np.int8
    assert graph.resources[("", "pairs")].detail == {"capacity": 4, "kind": "fifo"}
    assert pairs.close().graph is graph  # also outside the graph's block


def test_what_a_queue_cannot_hold_or_stack_is_refused() -> None:
    with Graph():
        queue = fr.FIFOQueue(2, ["float32", "int32"], [(3,), ()], name="q")
        with pytest.raises(SpecError, match=r"'q' takes \(float32\[3\], int32\[\]\), not \(float32\[2\], int32\[\]\)"):
            queue.enqueue(([1, 2], 3))
        with pytest.raises(SpecError, match="2 components, not 1"):
            queue.enqueue([[1, 2, 3]])
        with pytest.raises(SpecError, match="create it with shapes="):
            fr.FIFOQueue(2, "float32").dequeue_many(2)
        with pytest.raises(SpecError, match="at least one element"):
            fr.FIFOQueue(0, "float32")
        with pytest.raises(SpecError, match="as many shapes"):
            fr.FIFOQueue(1, ["int8", "int8"], [()])


def test_a_group_waits_for_all_it_is_given() -> None:
    with Graph() as graph:
        v = fr.Variable(1.0)
        a, b = v.assign(2.0), fr.constant(1.0)
    done = fr.group(a, b, v, name="both")
    assert done.graph is graph
    assert done.name == "both"
    assert set(done.control_inputs) == {a, b.op, (v + 0).op.inputs[0].op}
