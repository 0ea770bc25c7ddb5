"""Partitioning: a plan for each device, and what they send each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from pass_world import compiled
from step_world import CLIENT, CLUSTER, CPU, LOCAL, everywhere

from flowrt.base.device import Device
from flowrt.base.valueclass import replace
from flowrt.graph import Graph, control_dependencies, device
from flowrt.ops.elementwise import add, exp, multiply, negative, square
from flowrt.ops.flow import group
from flowrt.ops.index import take
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.routing import part_of, route_rows
from flowrt.ops.shape import reshape
from flowrt.ops.source import constant, placeholder, shape_of
from flowrt.ops.state import Variable
from flowrt.optim import Adam
from flowrt.passes import Compiled, Ends, Transfer
from flowrt.passes.partition import partition
from flowrt.passes.place import place
from flowrt.passes.prune import prune

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
    assert all("test_partition.py:" in node.site for node in plan.nodes)


def test_what_lies_where_it_is_wanted_is_not_brought_though_the_device_is_given_twice() -> None:
    with Graph():
        x = placeholder("float32", (2,), name="x")
        y = negative(x)
    plan = compiled([y], feeds=[x], default=Device("local", 0, "cpu", 0)).plans["/job:local/task:0"]
    assert [node.op for node in plan.nodes] == ["negative"]


def test_every_task_of_a_step_without_ends_is_fed_what_it_uses() -> None:
    with Graph():
        x, y, unused = (placeholder("float32", (2,), name=name) for name in ("x", "y", "unused"))
        with device("/job:worker/task:0"):
            a = negative(y, name="a")
        with device("/job:worker/task:1"):
            b = add(y, x, name="b")
    result = compiled(
        [], [a.op, b.op], [x, unused, y], devices=CLUSTER, default=CLUSTER[0], client=None, ends=Ends.USED
    )
    fed = {task: [feed.name for feed in plan.feeds] for task, plan in result.plans.items()}
    assert fed == {"/job:worker/task:0": ["y"], "/job:worker/task:1": ["x", "y"]}
    assert [plan.nodes[0].inputs for plan in result.plans.values()] == [(0,), (1, 0)]


def test_what_decides_sizes_lies_in_the_hosts_memory_unless_inference_finds_it() -> None:
    gpu = Device("local", 0, "cuda", 0)
    with Graph():
        x, ids = placeholder("float32", (None, 4), name="x"), placeholder("int64", (2,), name="ids")
        with device("cpu:0"):
            factors, there = constant([1, 1]), multiply(shape_of(x), 1, name="there")
        with device("cuda:0"):
            found = reshape(x, multiply(shape_of(x), factors, name="found"))
            fed = reshape(x, ids)
            computed = reshape(x, negative(ids, name="computed"))
            waits = negative(found)
            with control_dependencies([waits.op]):
                late = multiply(shape_of(x), 1, name="late")
            last, host = reshape(waits, late), reshape(x, there)
    plan = compiled(
        [found, fed, computed, last, host], feeds=[x, ids], devices=[CPU, gpu], default=CPU, optimize=False
    ).plans["/job:local/task:0"]
    starts = plan.value_starts()
    made = {starts[n]: node for n, node in enumerate(plan.nodes) if node.outputs}
    sizes = [node.inputs[1] for node in plan.nodes if node.op == "reshape"]
    came = [(made[value].op, made[value].device) if value in made else plan.feeds[value].name for value in sizes]
    assert came == [("multiply", "cuda:0"), "ids", ("bring", "cpu:0"), ("bring", "cpu:0"), ("multiply", "cpu:0")]


def test_what_is_fetched_without_a_client_is_brought_to_where_it_is_fetched() -> None:
    gpu = Device("ps", 0, "cuda", 0)
    with Graph():
        x = placeholder("float32", (2,), name="x")
        with device("/job:worker/task:0"):
            a = negative(x, name="a")
        with device(str(gpu)):
            b = negative(x, name="b")
        c = negative(x, name="c")
    result = compiled([a, b, c], feeds=[x], devices=[*CLUSTER, gpu], default=CLUSTER[0], client=None)
    plan = result.plans["/job:ps/task:0"]
    starts = plan.value_starts()
    made = {starts[n]: node.op for n, node in enumerate(plan.nodes) if node.outputs}
    assert [made[value] for value in plan.fetches] == ["recv", "bring", "negative"]


def test_a_value_that_leads_does_so_from_another_device_too() -> None:
    gpu = Device("ps", 0, "cuda", 0)
    with Graph() as graph:
        x = placeholder("float32", (2,), name="x")
        with device(str(gpu)):
            a, b = negative(x, name="a"), exp(x, name="b")
        with device("/job:worker/task:0"):
            c = add(a, b)
    step = prune(graph, [c], [], [x])
    devices = [*CLUSTER, gpu]
    placement = place(step, devices=devices, default=CLUSTER[0], supports=everywhere, rules={})
    leads = {i: 1 for i, node in step.nodes.items() if node.name == "b"}
    plans = partition(replace(step, lead=leads), placement, home=None, client=CLIENT).plans
    sends = [node for node in plans["/job:ps/task:0"].nodes if node.op == "send"]
    assert {node.name[0]: node.attrs.get("lead") for node in sends} == {"a": None, "b": 1}


def test_a_small_constant_that_is_fetched_stays_where_it_is() -> None:
    with Graph():
        one = constant(1.0)
    plan = compiled([one]).plans["/job:local/task:0"]
    assert ([node.op for node in plan.nodes], plan.fetches) == (["constant"], (0,))
    assert len(compiled([], [one.op]).plans["/job:local/task:0"].nodes) == 1


def test_another_device_of_the_same_task_gets_a_value_once() -> None:
    with Graph():
        x = placeholder("float32", (2,), name="x")
        with device("cpu:1"):
            y = add(negative(x), x, name="y")
    result = compiled([y], feeds=[x], devices=LOCAL)
    plan = result.plans["/job:local/task:0"]
    assert Counter(node.op for node in plan.nodes) == {"bring": 1, "negative": 1, "add": 1}
    assert [(node.op, node.inputs, node.device) for node in plan.nodes] == [
        ("bring", (0,), "cpu:1"),
        ("negative", (1,), "cpu:1"),
        ("add", (2, 1), "cpu:1"),
    ]


def test_a_tensor_crosses_once_per_destination_however_many_want_it() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable(np.zeros(30_000, np.float32), name="v")
        with device("/job:worker/task:0"):
            a, b = negative(v, name="a"), add(v, 1.0, name="b")
        with device("/job:worker/task:1"):
            c = negative(v, name="c")
    result = compiled([a, b, c], devices=CLUSTER, default=CLUSTER[0], client=CLIENT)
    assert ops(result, "/job:ps/task:0") == {"read_variable": 1, "send": 2}
    assert ops(result, "/job:worker/task:0") == {"recv": 1, "negative": 1, "add": 1, "constant": 1, "send": 2}
    assert ops(result, "/job:worker/task:1") == {"recv": 1, "negative": 1, "send": 1}
    sent = [node.attrs["edge"] for plan in result.plans.values() for node in plan.nodes if node.op == "send"]
    assert len(sent) == len(set(sent)) == 5
    assert [dict(report.counts) for report in result.report if report.name == "partition"] == [
        {"tasks": 3, "transfers": 5}
    ]


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
            small, large = constant(np.zeros(512), name="small"), constant(np.zeros(513), name="large")
        with device("/job:worker/task:0"):
            a, b = negative(small), negative(large)
    result = compiled([a, b], devices=CLUSTER, default=CLUSTER[0], client=CLIENT, optimize=False)
    assert ops(result, "/job:ps/task:0") == {"constant": 1, "send": 1}
    assert ops(result, "/job:worker/task:0") == {"constant": 1, "recv": 1, "negative": 2, "send": 2}


def test_what_every_task_computes_again_leaves_nothing_where_nobody_wants_it() -> None:
    with Graph():
        ids = placeholder("int64", (3,), name="ids")
        with device("/job:worker/task:0"):
            starts, *_ = route_rows(ids, constant([0, 4, 8]), again=True)
        with device("/job:worker/task:1"):
            y = negative(starts)
    result = compiled([y], feeds=[ids], devices=CLUSTER, default=CLUSTER[0], client=CLIENT, optimize=False)
    assert ops(result, "/job:worker/task:0").keys().isdisjoint({"constant", "route_rows"})
    assert ops(result, "/job:worker/task:1") == {"constant": 1, "recv": 1, "route_rows": 1, "negative": 1, "send": 1}


def test_a_part_of_what_is_computed_once_is_sent_though_others_know_which() -> None:
    with Graph():
        x, ids = placeholder("float32", (3, 8), name="x"), placeholder("int64", (3,), name="ids")
        with device("/job:worker/task:0"):
            starts, *_ = route_rows(ids, constant([0, 4, 8]), again=True)
            part = part_of(exp(x), starts, 1)
        with device("/job:worker/task:1"):
            y = negative(part)
    result = compiled([y], feeds=[x, ids], devices=CLUSTER, default=CLUSTER[0], client=CLIENT, optimize=False)
    assert ops(result, "/job:worker/task:1") == {"recv": 1, "negative": 1, "send": 1}


@pytest.mark.parametrize("columns", [1, 2])
def test_who_has_a_part_of_a_table_is_sent_all_ids_where_rows_are_no_less(columns: int) -> None:
    servers = [Device("ps", task, "cpu", 0) for task in range(2)]
    with Graph():
        ids = placeholder("int64", (None,))
        with device("/job:ps"):
            table = Variable(np.zeros((1 << 14, columns), "float32"), name="table", partition=2)
        rows = take(table, ids)
    result = compiled([rows], feeds=[ids], devices=servers, default=servers[0], client=CLIENT)
    does = [ops(result, server.host) for server in servers]
    assert sorted(each["route_rows"] for each in does) == [int(columns == 2), 1]
    assert sorted(each["move_parts"] for each in does) == [int(columns == 2)] * 2
    assert sum(each["send"] for each in does) == (2 if columns == 2 else 6)


@pytest.mark.parametrize("partition", [2, 8])
def test_rows_of_all_parts_of_a_server_travel_as_one_and_so_do_their_values(partition: int) -> None:
    servers = [Device("ps", task, "cpu", 0) for task in range(2)]
    with Graph():
        ids = placeholder("int64", (None,))
        with device("/job:ps"):
            table = Variable(np.zeros((1 << 14, 64), "float32"), name="table", partition=partition)
        rows = take(table, ids)
        step = Adam(0.1).minimize(sum_(square(rows)))
    result = compiled([rows], [step], feeds=[ids], devices=servers, default=servers[0], client=CLIENT)
    does = [ops(result, server.host) for server in servers]
    assert sum(each["send"] for each in does) == 3  # rows one way, their gradients the other, and what is fetched
    assert [each["move_parts"] for each in does] == [2, 1]  # put together and packed, packed
    assert [each["adam_rows"] for each in does] == [partition // 2] * 2
    assert all(each["take"] == each["join_parts"] == 0 for each in does)


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
    assert [(node.op, node.control) for node in result.plans["/job:worker/task:1"].nodes] == [
        ("recv", ()),
        ("no_op", (0,)),
    ]


def test_order_for_memory_does_not_cross_devices() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable(np.zeros(3000, np.float32), name="v")
            write = v.assign(np.ones(3000, np.float32))
        with device("/job:worker/task:0"):
            y = negative(v, name="y")
    result = compiled([y], [write], devices=CLUSTER, default=CLUSTER[0], client=CLIENT)
    assert ops(result, "/job:ps/task:0") == {"read_variable": 1, "send": 1, "constant": 1, "assign": 1}
