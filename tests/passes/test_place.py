"""Placement: constraints, colocation, kernels and rules, each by equality, and the errors' words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from step_world import CLUSTER, RandomGraph, everywhere

from flowrt.base.device import Device
from flowrt.base.errors import PlacementError
from flowrt.gradients import gradients
from flowrt.graph import Graph, colocate_with, control_dependencies, device
from flowrt.op import as_value
from flowrt.ops.elementwise import add, exp, multiply, negative
from flowrt.ops.loops import while_loop
from flowrt.ops.queues import FIFOQueue
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.rows import adam_rows
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import constant, placeholder
from flowrt.ops.state import Variable
from flowrt.optim import Momentum
from flowrt.passes.place import place, with_halves
from flowrt.passes.prune import prune
from flowrt.typed import Operand, Result, op

PS, WORKER_0, WORKER_1 = (Device(job, task, "cpu", 0) for job, task in (("ps", 0), ("worker", 0), ("worker", 1)))
GPU_0 = Device("worker", 0, "cuda", 0)
ALL = (PS, WORKER_0, GPU_0, WORKER_1)


@op
def of_a_program(x: Operand) -> Result:
    """An op that no kernel computes."""
    return x


def placed(
    fetches: Sequence[Any],
    targets: Sequence[Any] = (),
    feeds: Sequence[Any] = (),
    *,
    default: Device = WORKER_0,
    supports: Callable[..., bool] = everywhere,
    rules: dict[str, str] | None = None,
    devices: Sequence[Device] = ALL,
    wishes: dict[Any, Device] | None = None,
    moved: list[str] | None = None,
) -> dict[str, Device]:
    """The device of every node of the step, by name."""
    graph = [*fetches, *targets][0].graph
    step = prune(graph, fetches, targets, feeds)
    found = place(
        step, devices=devices, default=default, supports=supports, rules=rules or {}, wishes=wishes, moved=moved
    )
    assert list(found) == list(step.nodes)
    return {step.nodes[i].name: where for i, where in found.items()}


def except_on_cuda(*names: str) -> Callable[..., bool]:
    return lambda op, dtypes, kind: kind != "cuda" or op not in names


def test_constraints_are_kept_and_partial_ones_completed() -> None:
    with Graph():
        with device("/job:worker/task:1"):
            a = constant(1.0, name="a")
        with device("/job:ps"):
            b = negative(a, name="b")
        with device("/device:cuda"):
            c = negative(b, name="c")
    assert placed([c]) == {"a": WORKER_1, "b": PS, "c": GPU_0}


def test_what_nothing_ties_down_follows_its_input_else_its_consumer_else_the_default() -> None:
    with Graph():
        x = placeholder("float32", name="x")
        with device("/job:worker/task:1"):
            a = negative(x, name="a")
        b = add(a, exp(constant(1.0, name="one"), name="its"), name="b")
        lone = constant(2.0, name="lone")
    expected = {"a": WORKER_1, "one": WORKER_1, "its": WORKER_1, "b": WORKER_1, "lone": WORKER_0}
    for devices in (ALL, (WORKER_0, WORKER_1)):
        assert placed([b, lone], feeds=[x], devices=devices) == expected


def test_what_is_not_wished_anywhere_follows_what_is() -> None:
    with Graph() as graph:
        v, w = Variable([1.0], name="v"), Variable([1.0], name="w")
        a = exp(constant([1.0], name="one"), name="a")
        b = add(negative(a, name="b"), w, name="end")
    wishes: dict[Any, Device] = {("", "v"): PS, graph.nodes.index(a.op): WORKER_1}
    found = placed([b, v.__tensor__()], wishes=wishes)
    assert {found[name] for name in ("a", "b", "one", "end")} == {WORKER_1}
    assert (found["v/value"], found["w/value"]) == (PS, WORKER_0)


def test_computation_does_not_follow_parameters() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable([1.0], name="v")
        y = negative(v, name="y")
        update = v.assign_sub(multiply(y, constant([0.1], name="rate"), name="delta"), name="update")
    assert placed([], [update]) == {"v/value": PS, "y": WORKER_0, "rate": WORKER_0, "delta": WORKER_0, "update": PS}


def test_the_nodes_of_a_variable_are_together_whatever_surrounds_them() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable([1.0], name="v")
        with device("/job:worker/task:1"):
            update, read = v.assign_add([1.0], name="update"), v.read(name="read")
    found = placed([read, v.__tensor__()], [update])
    assert {found[name] for name in ("update", "read", "v/value")} == {PS}


def test_a_variable_is_in_the_same_place_in_every_step() -> None:
    with Graph():
        with device("/job:worker/task:1"):
            first = Variable([1.0], name="first")
        with colocate_with(first):
            second = Variable([1.0], name="second")
        third = Variable([1.0], name="third")
        with device("/job:ps"):
            y = third + second
    assert placed([y])["third/value"] == placed([third.read(name="r")])["r"] == WORKER_0
    assert placed([], [second.initializer])["second/initialize"] == WORKER_1


def test_colocation_is_a_union() -> None:
    with Graph():
        a = constant(1.0, name="a")
        with colocate_with(a):
            b = constant(2.0, name="b")
        with colocate_with(b), device("/job:ps"):
            c = constant(3.0, name="c")
    assert set(placed([a, b, c]).values()) == {PS}
    with Graph():
        with device("/job:worker/task:0"):
            a = constant(1.0, name="a")
        with colocate_with(a), device("/device:cuda"):
            b = constant(2.0, name="b")
    assert set(placed([a, b]).values()) == {GPU_0}


def test_what_one_kernel_moves_with_a_variables_rows_is_where_that_is() -> None:
    with Graph():
        with device("/job:ps"):
            v = Variable(np.zeros((4, 2), "float32"), name="v")
        m, s = (Variable(np.zeros((4, 2), "float32"), name=name) for name in ("m", "s"))
        rows = IndexedSlices(constant(np.ones((1, 2), "float32")), constant([1]), (4, 2))
        update = v.move_rows(adam_rows, rows, [0.0] * 8, slots=(m, s), name="update")
    found = placed([m.__tensor__(), s.__tensor__()], [update])
    assert {found[name] for name in ("m/value", "s/value", "update")} == {PS}


def test_a_loop_that_changes_state_is_on_a_cpu_and_another_where_any_device_computes_its_bodies() -> None:
    with Graph():
        x, v = placeholder("float32", (3,), name="x"), Variable(np.zeros(3, "float32"), name="v")

        def more(y: Any) -> Any:
            with control_dependencies([v.assign_add(y)]):
                return y + 1.0

        plain = while_loop(lambda y: sum_(y) < 9.0, lambda y: y + 1.0, x, name="plain")
        moving = while_loop(lambda y: sum_(y) < 9.0, more, x, name="moving")
    found = placed([plain, moving], feeds=[x], default=GPU_0)
    assert (found["plain"], found["moving"]) == (GPU_0, WORKER_0)


def test_conflicting_colocation_names_both_nodes() -> None:
    with Graph():
        with device("/job:ps"):
            a = constant(1.0, name="a")
        with colocate_with(a), device("/job:worker"):
            b = negative(a, name="b")
    pattern = r"negative 'b' \(.*test_place.py:\d+\) asks for /job:worker, and constant 'a' \(.*test_place.py:\d+\)"
    with pytest.raises(PlacementError, match=pattern):
        placed([b])


def test_a_device_that_does_not_exist_lists_those_that_do() -> None:
    with Graph(), device("/job:ps/task:7"):
        a = constant(1.0, name="a")
    with pytest.raises(
        PlacementError, match=r"constant 'a' \(.*py:\d+\): there is no device /job:ps/task:7; there "
    ) as no:
        placed([a])
    assert "Options" not in str(no.value)
    with Graph(), device("cuda:7"):
        b = constant(1.0, name="b")
    with pytest.raises(PlacementError, match=r"there is no device /device:cuda:7; there .*; fr.Options\(devices="):
        placed([b])


def test_an_op_without_a_kernel_there_says_where_it_has_one() -> None:
    with Graph(), device("cuda:0"):
        a = exp(constant(1.0, name="x"), name="a")
    pattern = r"exp 'a' \(.*py:\d+\): no kernel for \(float32, float32\) on .*cuda:0; it has one on cpu"
    with pytest.raises(PlacementError, match=pattern):
        placed([a], supports=except_on_cuda("exp"))


def test_an_op_without_any_kernel_says_so() -> None:
    with Graph():
        a = exp(constant(1.0, name="x"), name="a")
    with pytest.raises(PlacementError, match=r"it has none on any device here \(cpu, cuda\)"):
        placed([a], supports=lambda op, dtypes, kind: op != "exp")
    with Graph():
        own = of_a_program(constant(1.0, name="x"), name="own")
    with pytest.raises(
        PlacementError, match=r'has none on any device here .*; write one, @fr.kernel\("of_a_program", on='
    ):
        placed([own], supports=lambda op, dtypes, kind: op != "of_a_program")
    with pytest.raises(PlacementError, match=r"cuda:0; it has one on cpu; ask for that"):
        placed([own], rules={"own": "cuda:0"}, supports=except_on_cuda("of_a_program"))


def test_the_only_device_is_that_of_all_that_asks_for_none() -> None:
    with Graph():
        a = exp(Variable(1.0, name="v") * 2.0, name="a")
    assert set(placed([a], devices=[WORKER_0]).values()) == {WORKER_0}
    with pytest.raises(PlacementError, match=r"exp 'a' \(.*py:\d+\): no kernel for \(float32, float32\) on .*cpu:0"):
        placed([a], devices=[WORKER_0], supports=lambda op, dtypes, kind: op != "exp")
    with Graph():
        with device("/job:ps"):
            Variable(1.0)
        b = constant(1.0)
    with pytest.raises(PlacementError, match="no device /job:ps"):  # the graph's, though not the step's
        placed([b, *b.graph.nodes[0].outputs], devices=[WORKER_0])
    with Graph() as graph:
        c = constant(1.0, name="c")
    with pytest.raises(PlacementError, match="no device /job:ps"):
        placed([c], devices=[WORKER_0], rules={"c": "/job:ps"})
    placed([c], devices=[WORKER_0])
    with graph, device("/job:ps"):
        d = constant(1.0, name="d")
    with pytest.raises(PlacementError, match="no device /job:ps"):  # what was found of it before counts no more
        placed([d], devices=[WORKER_0])


def test_supports_is_asked_with_the_dtypes_of_inputs_then_outputs() -> None:
    asked: list[Any] = []

    def supports(op: str, dtypes: Sequence[Any], kind: str) -> bool:
        asked.append((op, tuple(str(d) for d in dtypes), kind))
        return True

    with Graph():
        a = constant([1, 2]) < constant([3, 4])
    for devices in (ALL, ALL[:1]):
        asked.clear()
        placed([a], supports=supports, devices=devices, default=devices[0])
        assert sorted(asked) == [("constant", ("int64",), "cpu"), ("less", ("int64", "int64", "bool"), "cpu")]


def test_kernels_decide_among_the_devices_of_an_open_constraint() -> None:
    with Graph(), device("/job:worker/task:0"):
        a = exp(constant(1.0, name="x"), name="a")
    assert placed([a], default=GPU_0, supports=except_on_cuda("exp")) == {"x": GPU_0, "a": WORKER_0}


def test_what_has_inputs_chooses_before_what_has_none_and_follows_it() -> None:
    with Graph():
        a = exp(constant(1.0, name="x"), name="a")
    assert placed([a], default=GPU_0, supports=except_on_cuda("exp")) == {"x": WORKER_0, "a": WORKER_0}


def test_a_variable_lies_where_all_that_any_step_does_with_it_runs() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        v.assign_add([1.0])
    for without, where in (("assign_add", WORKER_0), ("assign_sub", GPU_0)):
        assert placed([v.read(name=without)], default=GPU_0, supports=except_on_cuda(without))[without] == where


def test_a_variable_that_is_asked_for_where_some_step_cannot_move_it_is_refused_in_all_steps() -> None:
    with Graph():
        with device("/job:worker/task:0/device:cuda:0"):
            v = Variable([1.0], name="v")
        v.assign_add([1.0])
    with pytest.raises(PlacementError, match=r"assign_add .*: no kernel for .*cuda:0; it has one on cpu"):
        placed([v.read()], supports=except_on_cuda("assign_add"))


def test_where_kinds_of_devices_are_wishes_what_is_elsewhere_is_told() -> None:
    with Graph(), device("cuda:0"):
        a = exp(constant(1.0, name="x"), name="a")
    moved: list[str] = []
    assert placed([a], supports=except_on_cuda("exp"), moved=moved) == {"x": GPU_0, "a": WORKER_0}
    (told,) = moved
    assert re.fullmatch(r"exp 'a' \(.*\) is on .*:cpu:0, as cuda has no kernel for \(float32, float32\)", told)
    moved.clear()
    assert set(placed([a], devices=(PS, WORKER_0), moved=moved).values()) == {WORKER_0}
    assert [one.partition(" (")[0] for one in moved] == ["constant 'x'"]
    assert moved[0].endswith("is elsewhere, as there is no device /device:cuda:0")
    with Graph(), device("/job:other"):
        b = constant(1.0, name="b")
    with pytest.raises(PlacementError, match="no device /job:other"):
        placed([b], moved=moved)


def test_floats_of_16_bits_are_supported_where_float32_is_unless_they_are_written() -> None:
    able = with_halves(lambda op, dtypes, kind: kind == "cpu" and set(dtypes) == {np.dtype("float32")})
    half, single, double = ([np.dtype(name)] * 2 for name in ("float16", "float32", "float64"))
    found = [able(op, dtypes, "cpu") for op in ("exp", "assign") for dtypes in (half, single, double)]
    assert found == [True, True, False, False, True, False]
    assert not able("exp", half, "cuda")


def test_gradients_run_where_their_forward_nodes_do() -> None:
    with Graph():
        x = placeholder("float32", (3,), name="x")
        with device("/job:worker/task:1"):
            y = exp(x, name="y")
        with device("/job:ps"):
            (dx,) = gradients([y], [x])
    found = placed([dx], feeds=[x])
    assert {where for name, where in found.items() if name.startswith("gradients/")} == {WORKER_1}


def test_a_gradient_without_a_kernel_falls_back_to_the_task_of_its_forward_node() -> None:
    with Graph():
        x = placeholder("float32", (3,), name="x")
        with device("/job:worker/task:0/device:cuda:0"):
            y = exp(x, name="y")
        (dx,) = gradients([y], [x])
    found = placed([dx], feeds=[x], supports=except_on_cuda("full_like"), default=PS)
    assert found["y"] == GPU_0
    assert found[dx.op.name] == GPU_0
    assert found["gradients/full_like"] == WORKER_0


def test_effects_run_on_the_cpu_of_their_task() -> None:
    with Graph(), device("/job:worker/task:0/device:cuda:0"):
        queue = FIFOQueue(2, "float32", (), name="queue")
        put = queue.enqueue(constant(1.0, name="x"), name="put")
    assert placed([], [put]) == {"x": GPU_0, "put": WORKER_0}


def test_rules_go_before_the_program() -> None:
    with Graph(), device("/job:worker/task:1"):
        v = Variable([1.0], name="embedding/table")
        y = negative(v, name="y")
    rules = {"embedding/*": "/job:ps", "*": "/job:worker/task:0/device:cpu:0"}
    assert placed([y], rules=rules) == {"embedding/table/value": PS, "y": WORKER_0}


def test_a_rule_for_the_names_of_a_variables_own_nodes_moves_it() -> None:
    with Graph():
        v = Variable([1.0], name="v")
    assert placed([v.__tensor__()], rules={"v/*": "/job:ps"}) == {"v/value": PS}
    assert placed([v.__tensor__()], rules={"v?/*": "/job:ps"}) == {"v/value": WORKER_0}


def test_a_rule_for_a_users_name_does_not_move_the_variable() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        with device("/job:worker/task:1"):
            update = v.assign([2.0], name="train/update")
    assert placed([], [update], rules={"train/*": "/job:ps"})["train/update"] == WORKER_0


def test_random_placements_keep_every_constraint_and_every_variable_together() -> None:
    print("seeds 0 to 299")
    kept = 0
    for seed in range(300):
        world = RandomGraph(seed, CLUSTER)
        step = prune(world.graph, world.fetches, world.targets, list(world.feeds))
        default = random.Random(seed).choice(CLUSTER)
        try:
            found = place(step, devices=CLUSTER, default=default, supports=everywhere, rules={})
        except PlacementError:
            continue
        kept += 1
        homes: dict[Any, set[Device]] = {}
        for i, where in found.items():
            node = world.graph.nodes[i]
            if node.resource is None:
                assert node.device.matches(where), f"seed {seed}"
            else:
                assert world.graph.resources[node.resource].device.matches(where), f"seed {seed}"
                homes.setdefault(node.resource, set()).add(where)
            for other in node.colocate:
                if other.index in found:
                    assert found[other.index] == where, f"seed {seed}"
        assert all(len(devices) == 1 for devices in homes.values()), f"seed {seed}"
    assert kept > 150


def test_parts_of_variables_are_spread_over_the_tasks_that_they_may_be_on() -> None:
    tasks = [Device("ps", task, "cpu", 0) for task in range(3)]
    with Graph():
        with device("/job:ps"):
            first = Variable(np.zeros((7, 2), "float32"), name="first", partition=(0, 3, 5, 7))
        moved = Momentum(0.1, 0.9).minimize(sum_(first), [first])  # what is kept beside it is not counted
        with device("/job:ps"):
            second = Variable(np.zeros((5, 2), "float32"), name="second", partition=(0, 3, 4, 5))
        loose = Variable(np.zeros((4, 2), "float32"), name="loose", partition=2)
    found = placed(
        [as_value(p) for p in (*first.parts, *second.parts, *loose.parts)],
        [moved],
        devices=(*tasks, WORKER_0, WORKER_1),
    )
    assert [found[f"first/part_{i}/value"] for i in range(3)] == tasks
    assert [found[f"first/part_{i}/momentum/value"] for i in range(3)] == tasks
    assert [found[f"second/part_{i}/value"] for i in range(3)] == [*tasks[1:], tasks[0]]
    assert [found[f"loose/part_{i}/value"] for i in range(2)] == [WORKER_0, WORKER_1]
    alone = placed([as_value(p) for p in second.parts], devices=(*tasks, WORKER_0))
    assert list(alone.values()) == [*tasks[1:], tasks[0]]
