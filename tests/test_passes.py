"""Passes: small graphs by equality, and random graphs against what they mean."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from step_world import CLIENT, CLUSTER, CPU, DEAD, LOCAL, RandomGraph, evaluate, everywhere, meaning, run_plans

from flowrt.errors import FeedError, GraphError, PlacementError, SpecError
from flowrt.graph import Graph, Tensor, control_dependencies, device
from flowrt.op import Op
from flowrt.ops.elementwise import add, multiply, negative
from flowrt.ops.flow import group, identity, switch
from flowrt.ops.source import constant, full, full_like, placeholder, shape_of
from flowrt.ops.state import FIFOQueue, Variable
from flowrt.passes import Compiled, Transfer, compile_step
from flowrt.passes.fold_constants import fold_constants
from flowrt.passes.merge_common import merge_common
from flowrt.passes.order_state import order_state
from flowrt.passes.prune import prune
from flowrt.passes.step import FED, Step
from flowrt.plan import plan_from_data, plan_to_data
from flowrt.spec import Spec

if TYPE_CHECKING:
    from flowrt.device import Device


def names(step: Step) -> list[str]:
    return [node.name for node in step.nodes.values()]


def named(step: Step, name: str) -> Any:
    return next(node for node in step.nodes.values() if node.name == name)


def compiled(fetches: list[Any], targets: Any = (), feeds: Any = (), **options: Any) -> Compiled:
    graph = (fetches + list(targets))[0].graph
    settings: dict[str, Any] = {"devices": [CPU], "default": CPU, "supports": everywhere} | options
    return compile_step(graph, fetches, targets, feeds, **settings)


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_holds_what_its_fetches_need_and_nothing_else() -> None:
    with Graph() as graph:
        a = constant(1.0, name="a")
        add(a, 1.0, name="unused")
        b = add(a, a, name="b")
    assert names(prune(graph, [b], [], [])) == ["a", "b"]


def test_a_feed_cuts_off_what_computes_it_but_not_its_siblings() -> None:
    with Graph() as graph:
        pred, x = placeholder("bool", (), name="pred"), constant(1.0, name="x")
        low, high = switch(x, pred, name="s")
        y = add(low, high, name="y")
    step = prune(graph, [y], [], [pred, low])
    assert names(step) == ["x", "s", "y"]
    assert named(step, "y").inputs == ((FED, 1), (high.op.index, 1))


def test_controls_are_kept_unless_a_feed_stands_for_them() -> None:
    with Graph() as graph:
        x, a = placeholder("float32", name="x"), constant(1.0, name="a")
        with control_dependencies([x, a]):
            y = constant(2.0, name="y")
    assert names(prune(graph, [y], [], [x])) == ["a", "y"]
    assert named(prune(graph, [y], [], [x]), "y").control == (a.op.index,)


def test_a_missing_feed_names_the_placeholder() -> None:
    with Graph() as graph:
        y = negative(placeholder("float32", (None, 3), name="images"))
    with pytest.raises(FeedError, match=r"placeholder 'images' \(.*test_passes.py:\d+\) .* feed float32\[\?,3\]"):
        prune(graph, [y], [], [])


def test_a_foreign_tensor_is_refused() -> None:
    with Graph() as graph:
        y = constant(1.0)
    with Graph():
        foreign = constant(2.0)
    for arguments in ([foreign], [], []), ([y], [foreign.op], []), ([y], [], [foreign]):
        with pytest.raises(GraphError, match="another graph"):
            prune(graph, *arguments)


def test_feeding_a_shape_forgets_what_was_inferred_from_it() -> None:
    with Graph() as graph:
        shape = constant([2, 3], name="shape")
        y = full(shape, 1.0)
    assert y.shape == (2, 3)
    assert prune(graph, [y], [], [shape]).nodes[y.op.index].outputs[0].dims == (None, None)


def test_feeding_a_variable_replaces_its_reads() -> None:
    with Graph() as graph:
        v = Variable([1.0], name="v")
        y = add(v, v, name="y")
    assert names(prune(graph, [y], [], [v.__tensor__()])) == ["y"]


# ── merge_common ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_nodes_are_one() -> None:
    with Graph() as graph:
        x = placeholder("float32", name="x")
        y = multiply(add(x, 1.0, name="a"), add(x, 1.0, name="b"), name="y")
    step = merge_common(prune(graph, [y], [], [x]))
    assert names(step) == ["constant", "a", "y"]
    assert named(step, "y").inputs == ((named(step, "a").id, 0),) * 2


def test_what_differs_in_dtype_sign_device_or_state_stays_two() -> None:
    with Graph() as graph:
        v = Variable([1.0], name="v")
        pairs = [(constant(0.0), constant(-0.0)), (constant(1), constant(1.0)), (constant(1), constant(True))]
        with device("cpu:1"):
            pairs.append((constant(0.0), constant(0.0)))
        pairs[-1] = (pairs[0][0], pairs[-1][0])
        pairs.append((v.read(), v.read()))
    for pair in pairs:
        assert len(merge_common(prune(graph, pair, [], [])).nodes) == 2


def test_a_fetch_of_a_merged_node_follows_it() -> None:
    with Graph() as graph:
        a, b = constant(7.0), constant(7.0)
    step = merge_common(prune(graph, [a, b], [], []))
    assert step.fetches == ((a.op.index, 0),) * 2


# ── fold_constants ───────────────────────────────────────────────────────────────────────────────────────────────────


def fold(fetches: list[Tensor], feeds: Any = (), **options: Any) -> Step:
    return fold_constants(prune(fetches[0].graph, fetches, [], feeds), evaluate, **options)


def test_constants_are_computed_once_under_the_name_of_what_they_replace() -> None:
    with Graph():
        y = add(multiply(constant([1.0, 2.0]), 3.0), 1.0, name="y")
    step = fold([y])
    assert names(step) == ["y"]
    node = named(step, "y")
    assert (node.op.name, node.attrs["value"].tolist(), node.site) == ("constant", [4.0, 7.0], y.op.site)


def test_a_known_shape_is_a_constant_although_its_tensor_is_not() -> None:
    with Graph():
        x = placeholder("float32", (3, 5), name="x")
        unknown = placeholder("float32", (None, 5), name="unknown")
        a, b = shape_of(x), shape_of(unknown)
    step = fold([a, b], [x, unknown])
    assert [node.op.name for node in step.nodes.values()] == ["constant", "shape_of"]


def test_what_takes_only_the_shape_of_a_tensor_does_not_wait_for_it() -> None:
    """As the slope of a loss, which would hold up the way back until the loss is known."""
    with Graph():
        x, unknown = placeholder("float32", (2, 3)), placeholder("float32", (None,))
        a, b = full_like(negative(x), 2.0, name="a"), full_like(unknown, 2.0, name="b")
    step = fold([a, b], [x, unknown])
    np.testing.assert_array_equal(named(step, "a").attrs["value"], np.full((2, 3), 2.0, np.float32))
    assert [node.op.name for node in step.nodes.values() if node.name in "ab"] == ["constant", "full_like"]
    assert all(node.op.name != "negative" for node in step.nodes.values())


def truncate(x: Spec) -> Spec:
    """Integers of floats, whose values inference does not know."""
    return Spec("int64", x.dims)


def test_folding_refines_the_shapes_behind_it() -> None:
    with Graph():
        floats = constant(np.array([2.0, 3.0]))
        shape = floats.graph.apply(Op(truncate), [floats], {})[0]
        x = placeholder("float32", (), name="x")
        y = negative(full(shape, x))
    assert y.shape == (None, None)
    step = fold_constants(prune(y.graph, [y], [], [x]), lambda op, arrays, attrs: (arrays[0].astype(np.int64),))
    assert step.nodes[y.op.index].outputs[0].dims == (2, 3)


def test_values_beyond_their_dtype_are_not_carried_into_inference() -> None:
    with Graph():
        x = constant(10, name="x")
        for _ in range(200):  # as a Python integer it would have 10^60 digits
            x = multiply(x, x)
    assert x.spec.value is None
    assert fold_constants(prune(x.graph, [x], [], []), None).nodes[x.op.index].op.name == "multiply"


def test_large_results_stateful_nodes_and_switched_ones_are_left() -> None:
    with Graph():
        big = negative(constant(np.zeros(100)), name="big")
        v = Variable([1.0], name="v")
        read = negative(v.read(), name="read")
        side = shape_of(switch(constant([1.0]), True)[1], name="side")
    assert named(fold([big], largest=99), "big").op.name == "negative"
    assert named(fold([read]), "read").op.name == "negative"
    assert named(fold([side]), "side").op.name == "shape_of"


def test_folding_a_shape_leaves_no_change_of_state_out() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        with control_dependencies([v.assign_add([1.0])]):
            size = shape_of(v.read(), name="size")
        plain = shape_of(v, name="plain")
    step = fold([size, plain])
    assert [named(step, name).op.name for name in ("size", "plain")] == ["shape_of", "constant"]
    assert any(node.op.name == "assign_add" for node in step.nodes.values())


def test_what_cannot_be_evaluated_stays_and_fails_in_the_step() -> None:
    def refuse(*arguments: Any) -> Any:
        raise SpecError("no")

    with Graph() as graph:
        y = negative(constant(1.0), name="y")
    assert named(fold_constants(prune(graph, [y], [], []), refuse), "y").op.name == "negative"


# ── order_state ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ordered(fetches: list[Any], targets: Any) -> Step:
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


def test_writes_on_two_sides_of_a_switch_exclude_each_other() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        pred = v.read()[0] > 0
        low, high = switch(constant([1.0]), pred)
        with control_dependencies([pred]):
            writes = [v.assign(low), v.assign(high)]
            same_side = v.assign(negative(high))
    assert ordered([], writes).nodes
    with pytest.raises(GraphError, match="in an order that nothing decides"):
        ordered([], [writes[1], same_side])


def test_queues_are_not_variables() -> None:
    with Graph():
        queue = FIFOQueue(3, "float32", ())
        both = [queue.enqueue(1.0), queue.enqueue(2.0)]
    assert ordered([], both).nodes


# ── partition ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ops(result: Compiled, task: str) -> Counter[str]:
    return Counter(node.op for node in result.plans[task].nodes)


def test_a_local_step_is_one_plan_with_feeds_and_fetches_in_order() -> None:
    with Graph():
        x, y = placeholder("float32", (2,), name="x"), placeholder("float32", (2,), name="y")
        z = add(x, y, name="z")
    result = compiled([z, x, z], feeds=[y, x])
    plan = result.plans["/job:local/task:0"]
    assert [feed.name for feed in plan.feeds] == ["y", "x"]
    assert [(node.op, node.inputs, node.device) for node in plan.nodes] == [("add", (1, 0), "cpu:0")]
    assert (plan.fetches, result.client) == ((2, 1, 2), None)
    assert result.placement == {"z": str(CPU)}


def test_another_device_of_the_same_task_gets_a_value_once() -> None:
    with Graph():
        x = placeholder("float32", (2,), name="x")
        with device("cpu:1"):
            y = add(negative(x), x, name="y")
    result = compiled([y], feeds=[x], devices=LOCAL)
    plan = result.plans["/job:local/task:0"]
    assert Counter(node.op for node in plan.nodes) == {"send": 1, "recv": 1, "negative": 1, "add": 1}
    send, recv = (next(n for n in plan.nodes if n.op == op) for op in ("send", "recv"))
    assert (send.device, recv.device, send.attrs["edge"]) == ("cpu:0", "cpu:1", recv.attrs["edge"])
    assert send.attrs["peer"] == recv.attrs["peer"] == "/job:local/task:0"


def test_a_tensor_crosses_once_per_destination_however_many_want_it() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable(np.zeros(3000, np.float32), name="v")
        with device("/job:worker/task:0"):
            a, b = negative(v, name="a"), add(v, 1.0, name="b")
        with device("/job:worker/task:1"):
            c = negative(v, name="c")
    result = compiled([a, b, c], devices=CLUSTER, default=CLUSTER[0], client=CLIENT)
    assert ops(result, "/job:ps/task:0") == {"read_variable": 1, "send": 2}
    assert ops(result, "/job:worker/task:0") == {"recv": 1, "negative": 1, "add": 1, "constant": 1, "send": 2}
    assert ops(result, "/job:worker/task:1") == {"recv": 1, "negative": 1, "send": 1}


def test_the_client_sends_feeds_where_they_are_wanted_and_answers_fed_fetches_itself() -> None:
    with Graph():
        x, unused = placeholder("float32", (2,), name="x"), placeholder("float32", (2,), name="unused")
        with device("/job:worker/task:0"):
            a = negative(x, name="a")
        with device("/job:worker/task:1"):
            b = negative(x, name="b")
    result = compiled([a, b, x, a], feeds=[x, unused], devices=CLUSTER, default=CLUSTER[0], client=CLIENT)
    assert result.client is not None
    assert [sorted(t.task for t in transfers) for transfers in result.client.feeds] == [
        ["/job:worker/task:0", "/job:worker/task:1"],
        [],
    ]
    first, second, fed, again = result.client.fetches
    assert isinstance(first, Transfer)
    assert isinstance(second, Transfer)
    assert (first.task, second.task, fed, again) == ("/job:worker/task:0", "/job:worker/task:1", 0, first)
    assert sorted(result.plans) == ["/job:worker/task:0", "/job:worker/task:1"]
    assert all(not plan.feeds and not plan.fetches for plan in result.plans.values())
    peers = {n.attrs["peer"] for plan in result.plans.values() for n in plan.nodes if n.op in ("send", "recv")}
    assert peers == {CLIENT}


def test_a_small_constant_is_repeated_rather_than_sent() -> None:
    with Graph():
        with device("/job:ps"):
            small, large = constant(np.zeros(4), name="small"), constant(np.zeros(1000), name="large")
        with device("/job:worker/task:0"):
            a, b = negative(small), negative(large)
    result = compiled([a, b], devices=CLUSTER, default=CLUSTER[0], client=CLIENT, optimize=False)
    assert ops(result, "/job:ps/task:0") == {"constant": 1, "send": 1}
    assert ops(result, "/job:worker/task:0") == {"constant": 1, "recv": 1, "negative": 2, "send": 2}


def test_order_across_tasks_is_one_token_per_task() -> None:
    with Graph():
        with device("/job:ps"):
            writes = [Variable([0.0], name=f"v{i}").assign([1.0]) for i in range(3)]
        with device("/job:worker/task:1"):
            done = group(*writes, name="done")
    result = compiled([], [done], devices=CLUSTER, default=CLUSTER[0], client=CLIENT, optimize=False)
    assert ops(result, "/job:ps/task:0") == {"constant": 4, "assign": 3, "send": 1}
    assert ops(result, "/job:worker/task:1") == {"recv": 1, "no_op": 1}
    token = next(node for node in result.plans["/job:ps/task:0"].nodes if node.name.endswith("/done"))
    assert len(token.control) == 3


def test_order_for_memory_does_not_cross_devices() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable(np.zeros(3000, np.float32), name="v")
            write = v.assign(np.ones(3000, np.float32))
        with device("/job:worker/task:0"):
            y = negative(v, name="y")
    result = compiled([y], [write], devices=CLUSTER, default=CLUSTER[0], client=CLIENT)
    assert ops(result, "/job:ps/task:0") == {"read_variable": 1, "send": 1, "constant": 1, "assign": 1}


def test_plans_survive_the_wire_and_edges_are_unique() -> None:
    world = RandomGraph(5, CLUSTER)
    result = _compile(world, CLUSTER, CLIENT, True)
    assert result.client is not None
    sent: list[int] = []
    for plan in result.plans.values():
        assert plan_from_data(plan_to_data(plan)) is not None
        sent += [node.attrs["edge"] for node in plan.nodes if node.op == "send"]
    sent += [t.edge for transfers in result.client.feeds for t in transfers]
    assert len(set(sent)) == len(sent)


def test_the_report_tells_what_each_pass_did() -> None:
    with Graph():
        y = negative(add(constant(1.0), constant(1.0)), name="y")
    result = compiled([y], evaluate=evaluate)
    assert [report.name for report in result.report] == [
        "prune",
        "merge_common",
        "fold_constants",
        "order_state",
        "place",
        "partition",
    ]
    assert str(result.report[1]) == "merge_common: merged 1"
    assert result.report[2].counts == {"folded": 1, "dropped": 2}


def test_unoptimized_steps_run_every_node_as_written() -> None:
    with Graph():
        y = negative(add(constant(1.0), constant(1.0)), name="y")
    plan = compiled([y], evaluate=evaluate, optimize=False).plans["/job:local/task:0"]
    assert [node.op for node in plan.nodes] == ["constant", "constant", "add", "negative"]


def test_a_long_chain_compiles_without_recursion() -> None:
    with Graph():
        x = y = placeholder("float32", (), name="x")
        v = Variable(0.0, name="v")
        for _ in range(5000):
            y = add(y, v)
        write = v.assign(y)
    plan = compiled([y], [write], feeds=[x]).plans["/job:local/task:0"]
    assert len(plan.nodes) == 5002
    assert len(plan.nodes[-1].control) == 5000 - 1 + 1


# ── everything, on random graphs ─────────────────────────────────────────────────────────────────────────────────────


def _compile(world: RandomGraph, devices: Any, client: str | None, optimize: bool) -> Compiled:
    return compile_step(
        world.graph,
        world.fetches,
        world.targets,
        list(world.feeds),
        devices=devices,
        default=devices[0],
        supports=everywhere,
        evaluate=evaluate,
        optimize=optimize,
        client=client,
    )


def _same(a: Any, b: Any) -> bool:
    return a is b if a is DEAD or b is DEAD else bool(np.array_equal(a, b))


def _agree(seed: int, devices: tuple[Device, ...], client: str | None) -> bool:
    """Whether the plans of one random graph compute what it means; False where its placement has no answer."""
    world = RandomGraph(seed, devices)
    want, state = meaning(world.graph, world.fetches, world.targets, world.feeds, world.initial)
    for optimize in (True, False):
        try:
            result = _compile(world, devices, client, optimize)
        except PlacementError:
            return False  # random colocation may contradict random devices
        got, after = run_plans(result, list(world.feeds.values()), world.initial, random.Random(seed))
        assert all(_same(a, b) for a, b in zip(want, got, strict=True)), f"seed {seed}, optimize={optimize}"
        assert all(_same(state[name], after[name]) for name in state), f"seed {seed}, optimize={optimize}"
    return True


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize(("devices", "client"), [(LOCAL, None), (CLUSTER, CLIENT)], ids=["local", "cluster"])
def test_plans_compute_what_the_graph_means(devices: Any, client: str | None, block: int) -> None:
    seeds = range(100 * block, 100 * (block + 1))
    print("seeds", seeds)
    assert sum(_agree(seed, devices, client) for seed in seeds) >= 50
