"""The order of reads beside writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowrt.base.errors import GraphError
from flowrt.graph import Graph, control_dependencies
from flowrt.ops.elementwise import add, multiply, negative
from flowrt.ops.flow import identity, switch
from flowrt.ops.queues import FIFOQueue
from flowrt.ops.source import constant
from flowrt.ops.state import Variable
from flowrt.passes.order_state import order_state
from flowrt.passes.prune import prune

if TYPE_CHECKING:
    from flowrt.passes.step import StepGraph

# ── order_state ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ordered(fetches: list[Any], targets: Any) -> StepGraph:
    graph = (fetches + list(targets))[0].graph
    return order_state(prune(graph, fetches, targets, []))


def test_a_write_waits_for_the_read_and_for_its_users() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        write = v.assign([2.0])
        y = negative(v, name="y")
    step = ordered([y], [write])
    node, read = step.nodes[write.index], v.__tensor__().op.index
    assert (node.control, node.after) == ((read,), (y.op.index,))
    assert list(step.nodes).index(y.op.index) < list(step.nodes).index(write.index)


def test_a_user_behind_the_write_does_not_hold_it_up() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        write = v.assign([2.0])
        with control_dependencies([write]):
            y = negative(v, name="y")
    step = ordered([y], [write])
    assert step.nodes[write.index].after == ()


def test_a_user_that_may_be_dead_does_not_kill_the_write() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        pred = v.read()[0] > 0
        with control_dependencies([pred]):
            write = v.assign([2.0])
        y = negative(switch(v, pred)[1], name="y")
        also = add(v, y, name="also")
    step = ordered([also], [write])
    assert set(step.nodes[write.index].after) == {also.op.inputs[1].op.inputs[0].op.index}


def test_writes_that_nothing_orders_are_refused_with_both_lines() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        first = v.assign([2.0], name="first")
        second = v.assign_add([2.0], name="second")
    with pytest.raises(GraphError, match=r"'first' \(.*py:\d+\) and .* 'second' \(.*py:\d+\) .*control_dependencies"):
        ordered([], [first, second])


def test_additions_need_no_order() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        writes = [v.assign_add([2.0]), v.assign_sub([1.0]), v.assign_add([3.0])]
    assert len(ordered([], writes).nodes) > 3


def test_writes_may_be_ordered_through_other_nodes() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        first = v.assign([2.0])
        with control_dependencies([first]):
            middle = identity(constant([5.0]))
        second = v.assign(middle)
    assert list(ordered([], [second]).nodes)[-1] == second.index


def test_a_fresh_read_beside_a_write_must_be_ordered() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        write = v.assign([2.0])
        read = v.read(name="loose")
        with control_dependencies([write]):
            good = v.read()
        before = v.assign(multiply(v.read(), 2.0))
    with pytest.raises(GraphError, match=r"read_variable 'loose' .* may see the variable before or after assign"):
        ordered([read], [write])
    assert ordered([good], [write]).nodes
    assert ordered([], [before]).nodes


@pytest.mark.parametrize("first", [0, 1])
def test_writes_on_two_sides_of_a_switch_exclude_each_other(first: int) -> None:
    with Graph():
        v = Variable([1.0], name="v")
        pred = v.read()[0] > 0
        sides = switch(constant([1.0]), pred)
        with control_dependencies([pred]):
            writes = [v.assign(sides[side]) for side in (first, 1 - first)]
            same_side = v.assign(negative(sides[1 - first]))
    assert ordered([], writes).nodes
    with pytest.raises(GraphError, match="in an order that nothing decides"):
        ordered([], [writes[1], same_side])


def test_queues_are_not_variables() -> None:
    with Graph():
        queue = FIFOQueue(3, "float32", ())
        both = [queue.enqueue(1.0), queue.enqueue(2.0)]
    assert ordered([], both).nodes
