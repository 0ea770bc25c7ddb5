"""Small values that one task tells another at one moment: they travel as one, and nothing waits longer for it."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pass_world import compiled
from step_world import CLIENT, CLUSTER, evaluate, everywhere, run_plans

from flowrt.base.valueclass import replace
from flowrt.graph import Graph, control_dependencies, device
from flowrt.ops.elementwise import add, add_n, multiply, negative
from flowrt.ops.flow import merge, switch
from flowrt.ops.queues import FIFOQueue
from flowrt.ops.shape import reshape
from flowrt.ops.source import placeholder
from flowrt.ops.state import Variable
from flowrt.passes.bundle import SMALL, bundle
from flowrt.passes.place import place
from flowrt.passes.prune import prune

if TYPE_CHECKING:
    import pytest

    from flowrt.passes import Compiled

PS, WORKER = "/job:ps/task:0/device:cpu:0", "/job:worker/task:0/device:cpu:0"
SERVER, OTHER = "/job:ps/task:0", "/job:worker/task:0"
CPUS = CLUSTER[::2]


def made(fetches: list[Any], targets: Any = (), feeds: Any = (), **options: Any) -> Compiled:
    settings: dict[str, Any] = {"devices": CPUS, "default": CPUS[0], "client": CLIENT, "evaluate": evaluate}
    return compiled(fetches, targets, feeds, **(settings | options))


def between(result: Compiled, source: str, target: str) -> int:
    """How many values one task sends another."""
    return sum(node.op == "send" and node.attrs["peer"] == target for node in result.plans[source].nodes)


def bundled(result: Compiled) -> int:
    return sum(dict(report.counts)["values"] for report in result.report if report.name == "bundle")


def variables(*shapes: tuple[int, ...], dtype: str = "int64") -> list[Variable]:
    with device(PS):
        return [Variable(np.full(shape, i + 1, dtype), name=f"v{i}") for i, shape in enumerate(shapes)]


def test_what_a_model_reads_of_a_server_and_what_goes_back_travel_as_one_each() -> None:
    shapes = [(), (3,), (2, 3), (1, 2, 2), (4,)]
    with Graph():
        given = variables(*shapes)
        with device(WORKER):
            changes = [multiply(v, 2) for v in given]
        updates = [v.assign_add(change) for v, change in zip(given, changes, strict=True)]
    result = made([], updates)
    assert (between(result, SERVER, OTHER), between(result, OTHER, SERVER), bundled(result)) == (1, 1, 10)
    initial = {f"v{i}": np.full(shape, i + 1) for i, shape in enumerate(shapes)}
    for seed in range(20):
        _, after = run_plans(result, [], initial, random.Random(seed))
        assert all(np.array_equal(after[name], 3 * value) for name, value in initial.items())
        assert all(after[name].shape == value.shape for name, value in initial.items())


def test_what_the_client_fetches_of_a_task_comes_as_one_and_has_memory_of_its_own() -> None:
    shapes = [(), (3,), (2, 3), (), (0,), (SMALL,)]
    with Graph():
        given = variables(*shapes)
        with device(WORKER):
            other = negative(given[0])
        fed = placeholder("int64", (2,), name="x")
    fetches = [given[2], other, given[0], fed, given[4], given[1], given[5], given[2], fed]
    result = made([v if v is fed or v is other else v.read() for v in fetches], feeds=[fed])
    assert between(result, SERVER, CLIENT) == 3  # the small ones, the one without an entry, the large one
    initial = {f"v{i}": np.full(shape, i + 1) for i, shape in enumerate(shapes)}
    got, _ = run_plans(result, [np.array([7, 8])], initial, random.Random(0))
    expected = [*(initial[name] for name in ("v2",)), -initial["v0"], initial["v0"], np.array([7, 8])]
    expected += [*(initial[name] for name in ("v4", "v1", "v5", "v2")), np.array([7, 8])]
    for value, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(value, want)
        assert np.shape(value) == np.shape(want)
    assert result.client is not None
    alone = [part for part in result.client.parts if isinstance(part, int)]
    assert len(alone) == len(set(alone)) == 5
    arrays = [np.asarray(got[place]) for place in (0, 2, 5, 7)]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert max(array.nbytes for array in arrays if array.base is None) < 100


def test_what_is_wanted_by_two_tasks_is_joined_once() -> None:
    with Graph():
        a, b = variables((2,), (3,))
        sums = []
        for task in range(2):
            with device(f"/job:worker/task:{task}/device:cpu:0"):
                sums.append(add(a[0], b[0]))
    result = made(sums)
    assert Counter(node.op for node in result.plans[SERVER].nodes)["concat"] == 1
    assert (between(result, SERVER, OTHER), between(result, SERVER, "/job:worker/task:1")) == (1, 1)


def test_what_answers_a_value_does_not_travel_with_that() -> None:
    with Graph():
        (v,) = variables((2,))
        with device(WORKER):
            answer = negative(v)
        with device(PS):
            again = negative(answer)
        with device(WORKER):
            end = add(again, answer)
    result = made([end])
    assert (between(result, SERVER, OTHER), bundled(result)) == (2, 0)
    (got,), _ = run_plans(result, [], {"v0": np.array([3, 4])}, random.Random(0))
    assert got.tolist() == [0, 0]


def test_what_came_of_different_feeds_does_not_wait_for_the_other() -> None:
    with Graph():
        x, y = placeholder("int64", (2,), name="x"), placeholder("int64", (2,), name="y")
        with device(PS):
            a, b = negative(x), negative(y)
        with device(WORKER):
            end = add(a, b)
    assert bundled(made([end], feeds=[x, y])) == 0


def test_what_waits_for_another_node_does_not_hold_up_what_does_not() -> None:
    for where in (PS, WORKER):
        with Graph():
            small, more = variables((2,), (2,))
            x = placeholder("int64", (2,), name="x")
            with device(where):
                first = negative(x)
            with device(PS), control_dependencies([first]):
                late = negative(small)
            with device(WORKER):
                ends = [negative(late), negative(more)]
        assert bundled(made(ends, feeds=[x])) == 0
    with Graph():
        small, more = variables((2,), (2,))
        with device(WORKER):
            first = negative(Variable(np.ones(2, "int64"), name="w"))
        with device(PS), control_dependencies([first]):
            late = negative(small)
        with device(WORKER):
            ends = [negative(late), negative(more)]
    assert bundled(made(ends)) == 0


def test_what_came_of_a_large_value_does_not_hold_up_what_did_not() -> None:
    with Graph():
        small, more = variables((2,), (2,))
        with device(WORKER):
            large = Variable(np.ones(SMALL, "int64"), name="large")
        with device(PS):
            late = add(small, large[:2])
        with device(WORKER):
            ends = [negative(late), negative(more)]
    result = made(ends, optimize=True)
    assert (between(result, SERVER, OTHER), bundled(result)) == (2, 0)


def test_what_waits_for_a_queue_travels_with_what_waits_for_the_same_alone() -> None:
    """Or a task that fills the queue with the one value would wait for the other, which comes of the queue."""
    with Graph():
        (v,) = variables((2,))
        with device(PS):
            one, other = (FIFOQueue(2, ["int64"], [(2,)], name=name) for name in ("one", "other"))
            (first,), (last,) = one.dequeue(), other.dequeue()
            values = [negative(first), multiply(first, 2), negative(last), v]
        with device(WORKER):
            end = add_n(values)
    result = made([end])
    assert (between(result, SERVER, OTHER), bundled(result)) == (3, 2)


def test_what_a_switch_may_leave_dead_travels_alone() -> None:
    with Graph():
        x, pred = placeholder("int64", (2,), name="x"), placeholder("bool", (), name="pred")
        with device(PS):
            no, yes = switch(x, pred)
            sides = [negative(no), multiply(no, 2)]
        with device(WORKER):
            here = add(*sides)
        with device(PS):
            end = merge([here, negative(yes)])[0]
    result = made([end], feeds=[x, pred])
    assert bundled(result) == 0
    for taken in (False, True):
        (got,), _ = run_plans(result, [np.array([1, 2]), np.bool_(taken)], {}, random.Random(0))
        assert got.tolist() == ([-1, -2] if taken else [1, 2])


def test_large_values_and_what_decides_sizes_travel_alone() -> None:
    most = SMALL // 8
    with Graph():
        small, large, shape, more, empty = variables((most,), (most + 1,), (2,), (2,), (0,))
        with device(WORKER):
            end = add(reshape(small[:4], shape), more[0])
            others = [negative(large), negative(empty)]
    result = made([end, *others])
    assert (between(result, SERVER, OTHER), bundled(result)) == (4, 2)
    with Graph():
        bytes_ = variables((), (), dtype="int8")
        with device(WORKER):
            end = add(*bytes_)
    assert bundled(made([end])) == 2


def test_what_leads_travels_with_what_leads_alike_and_the_bundle_leads_then() -> None:
    with Graph() as graph:
        given = variables((2,), (2,), (2,), (2,), (2,))
        with device(WORKER):
            end = add_n(given)
    step = prune(graph, [end], [], [])
    placement = place(step, devices=CPUS, default=CPUS[0], supports=everywhere, rules={})
    reads = [i for i, node in step.nodes.items() if node.op.name == "read_variable"]
    result = bundle(replace(step, lead={reads[1]: 1, reads[3]: 1}), placement, everywhere, fetched=False)
    joined = [node for node in result.step.nodes.values() if node.op.name == "concat"]
    assert [(len(node.inputs), node.name[:2], result.step.lead.get(node.id)) for node in joined] == [
        (2, "v1", 1),
        (3, "v0", None),
    ]
    assert not any(node.op.name == "reshape" for node in result.step.nodes.values())


def test_bundles_come_where_the_first_of_their_values_is_wanted() -> None:
    with Graph():
        given = variables((2,), (2,))
        with device(WORKER):
            first = negative(Variable(np.ones(2, "int64"), name="w"))
            end = add(first, add(*given))
    ops = [node.op for node in made([end]).plans[OTHER].nodes]
    assert ops == ["read_variable", "negative", "recv", "getitem", "getitem", "add", "add", "send"]


def test_bundles_are_of_one_dtype_and_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("flowrt.passes.bundle"), "TOGETHER", 4 * 8)
    with Graph():
        numbers = variables((2,), (2,), (2,), (2,), (2,))
        with device(PS):
            floats = [Variable(np.zeros(2, "float32"), name=f"f{i}") for i in range(4)]
        with device(WORKER):
            ends = [add_n(numbers), add_n(floats)]
    result = made(ends)
    assert (between(result, SERVER, OTHER), bundled(result)) == (4, 8)


def test_one_task_and_one_value_are_left_as_they_are() -> None:
    with Graph():
        a, b = variables((2,), (2,))
        alone = add(a, b)
        with device(WORKER):
            end = negative(a)
    assert bundled(made([alone])) == bundled(made([end])) == 0
    assert bundled(made([add(a, end)], optimize=False)) == 0
