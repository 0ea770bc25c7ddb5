"""The pass that makes one node of elementwise nodes: what it takes together, and what it leaves apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.device import Device
from flowrt.ops.fused import in_one, parts_of
from flowrt.passes import StepTerms, compile_step
from flowrt.passes.fuse import MAX_MEMBERS, MAX_REDUCTIONS
from flowrt.session.runners import fusible, supports

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

CPU = Device.parse("/job:local/task:0/device:cpu:0")


def plan_of(build: Callable[..., Any], *shapes: Any, dtype: str = "float32", regions: bool = True) -> Plan:
    """The plan of what ``build`` answers for placeholders of these shapes, all fed."""
    with fr.Graph() as graph:
        feeds = [fr.placeholder(dtype, shape) for shape in shapes]
        made = build(*feeds)
    asked = list(made) if isinstance(made, (list, tuple)) else [made]
    fetches = [t for t in asked if isinstance(t, fr.Tensor)]
    targets = [t for t in asked if not isinstance(t, fr.Tensor)]
    compiled = compile_step(
        graph,
        fetches,
        targets,
        feeds,
        StepTerms(devices=[CPU], default=CPU, supports=supports, fusible=fusible, regions=regions),
    )
    (plan,) = compiled.plans.values()
    return plan


def members(node: PlanNode) -> list[str]:
    """The ops a node consists of."""
    return parts_of(node.op, node.attrs)


def ops(plan: Plan) -> list[list[str]]:
    return [members(node) for node in plan.nodes if node.op != "constant"]


def test_a_chain_becomes_one_node() -> None:
    plan = plan_of(lambda x, y: fr.exp(x * y) + x, (4, 3), (3,))
    assert ops(plan) == [["multiply", "exp", "add"]]
    node = plan.nodes[-1]
    assert node.name == "add"
    assert len(node.inputs) == 2
    assert node.attrs["results"] == (4,)


def test_what_others_want_leaves_too() -> None:
    def build(x: Any) -> Any:
        a = fr.exp(x)
        b = a * 2.0
        return fr.matmul(a, a), b, fr.tanh(b)

    plan = plan_of(build, (3, 3))
    fused = next(node for node in plan.nodes if node.op == "fused")
    assert members(fused) == ["exp", "multiply", "tanh"]
    assert len(fused.outputs) == 3


def test_a_group_may_end_in_sums_and_means() -> None:
    def build(x: Any, b: Any) -> Any:
        y = fr.relu(x + b)
        return y, fr.sum(y, axis=0), fr.mean(fr.square(y))

    assert ops(plan_of(build, (None, 3), (3,))) == [["add", "relu", "sum", "square", "mean"]]

    def gradient(x: Any, b: Any) -> Any:  # of a bias: the slope summed down to a row
        return fr.gradients(fr.matmul(fr.relu(x + b), x), [b])[0]

    found = ops(plan_of(gradient, (3, 3), (3,)))
    assert ["where", "sum"] in [sorted(group, reverse=True) for group in found] or ["where", "sum"] in found


def test_a_group_may_end_in_folds_of_every_kind() -> None:
    kinds = (fr.sum, fr.mean, fr.max, fr.min, fr.prod)
    found = ops(plan_of(lambda x: [reduction(fr.exp(x) * 2.0) for reduction in kinds], (4, 3)))
    assert found == [["exp", "multiply", "sum", "mean", "max", "min", "prod"]]
    found = ops(plan_of(lambda x: [fr.any(x * 2.0 > 1.0), fr.all(x * 2.0 > 1.0)], (4, 3)))
    assert found == [["multiply", "greater", "any", "all"]]


def test_folds_are_bounded() -> None:
    found = ops(plan_of(lambda x: [fr.sum(fr.exp(x) * float(n), axis=0) for n in range(20)], (4, 3)))
    assert max(group.count("sum") for group in found) <= MAX_REDUCTIONS


def test_what_takes_a_sum_is_of_another_group() -> None:
    """As in a softmax: what is divided by the sum is known only when all of it has been added up."""

    def build(x: Any) -> Any:
        e = fr.square(x * 2.0)
        return e / fr.sum(e)

    assert ops(plan_of(build, (4, 3))) == [["multiply", "square", "sum"], ["divide"]]


def test_sizes_only_a_step_knows_do_not_matter() -> None:
    assert ops(plan_of(lambda x, b: fr.relu(x + b) * 2.0, (None, 3), (3,))) == [["add", "relu", "multiply"]]


def test_other_shapes_stay_apart() -> None:
    plan = plan_of(lambda x, y: fr.exp(fr.tanh(y) + 1.0) * fr.relu(fr.exp(x)), (4, 3), (3,))
    assert sorted(ops(plan)) == [["exp", "relu", "multiply"], ["tanh", "add", "exp"]]


def test_a_value_that_comes_back_through_another_node_does_not_close_a_circle() -> None:
    def build(x: Any) -> Any:
        a = fr.exp(x)
        return fr.tanh(a) + fr.matmul(fr.relu(a), a)

    assert ops(plan_of(build, (3, 3))) == [["exp", "tanh", "relu"], ["matmul", "add"]]


def test_a_control_edge_through_another_node_keeps_its_order() -> None:
    def build(x: Any) -> Any:
        a = fr.exp(x)
        with fr.control_dependencies([fr.matmul(a, a)]):
            return fr.tanh(a) * 2.0

    plan = plan_of(build, (3, 3))
    last = plan.nodes[-1]
    assert members(last) == ["tanh", "multiply"]
    assert [plan.nodes[n].op for n in last.control] == ["matmul"]


def test_targets_that_only_order_asks_for_are_kept() -> None:
    def build(x: Any) -> Any:
        return [(fr.exp(x) * 2.0).op]

    assert ops(plan_of(build, (3,))) == [["exp", "multiply"]]


def test_values_behind_a_queue_do_not_hold_up_others() -> None:
    """An enqueue whose value waited for the dequeue would wait for ever."""

    def build(x: Any) -> Any:
        queue = fr.FIFOQueue(1, "float32", (3,))
        a = fr.exp(x)
        put = queue.enqueue(a * 2.0)
        return [put, fr.tanh(a + queue.dequeue())]

    for group in ops(plan_of(build, (3,))):
        assert not {"multiply", "tanh"} <= set(group)


def test_the_sides_of_a_switch_stay_apart() -> None:
    def build(x: Any) -> Any:
        no, yes = fr.switch(x, fr.less(x[0], 0.0))
        return fr.merge([fr.exp(no) * 2.0, fr.tanh(yes) + 1.0])[0] * fr.exp(x)

    found = [set(group) for group in ops(plan_of(build, (3,)))]
    assert {"exp", "multiply"} in found
    assert {"tanh", "add"} in found


def test_nodes_on_two_devices_stay_apart() -> None:
    def build(x: Any) -> Any:
        with fr.device("/job:a/task:0"):
            a = fr.exp(x) * 2.0
        with fr.device("/job:b/task:0"):
            return fr.tanh(a) + 1.0

    devices = [Device.parse(f"/job:{job}/task:0/device:cpu:0") for job in "ab"]
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        y = build(x)
    compiled = compile_step(
        graph,
        [y],
        [],
        [x],
        StepTerms(devices=devices, default=devices[0], supports=supports, fusible=fusible, client="/job:c/task:0"),
    )
    assert [ops(plan)[1] for plan in compiled.plans.values()] == [["exp", "multiply"], ["tanh", "add"]]


def test_an_addition_is_fused_as_an_assignment_of_the_sum() -> None:
    def build(x: Any) -> Any:
        v = fr.Variable(np.ones(3, np.float32))
        return [v.assign_sub(fr.exp(x) * v)]

    found = ops(plan_of(build, (3,)))
    assert found == [["read_variable"], ["exp", "multiply", "subtract"], ["assign"]]
    assert ops(plan_of(build, (3,), regions=False))[-1] == ["assign_sub"]  # another step's might come in between


def test_updates_wait_for_the_readers_of_the_old_value() -> None:
    def build(x: Any) -> Any:
        v = fr.Variable(np.ones((3, 3), np.float32))
        return [v.assign_add(fr.exp(x) * 2.0), fr.matmul(v, x)]

    plan = plan_of(build, (3, 3))
    (update,) = (node for node in plan.nodes if node.op == "fused")
    assert members(update) == ["exp", "multiply", "add"]
    assert [plan.nodes[n].op for n in update.control] == ["matmul"]


def test_additions_that_another_write_may_come_between_stay_additions() -> None:
    def twice(x: Any) -> Any:
        v = fr.Variable(np.ones(3, np.float32))
        return [v.assign_add(fr.exp(x) * v), v.assign_add(fr.tanh(x) * v)]

    assert sum(group == ["assign_add"] for group in ops(plan_of(twice, (3,)))) == 2

    def elsewhere(x: Any) -> Any:
        v = fr.Variable(np.ones(3, np.float32))
        queue = fr.FIFOQueue(1, "float32", (3,))
        return [v.assign_add(fr.exp(queue.dequeue()) * 2.0), v * x]  # the read is of a region before the queue's

    assert ["assign_add"] in ops(plan_of(elsewhere, (3,)))

    def alone(x: Any) -> Any:
        v = fr.Variable(np.ones((3, 3), np.float32))
        return [v.assign_add(fr.matmul(x, v))]

    assert ops(plan_of(alone, (3, 3)))[-1] == ["assign_add"]  # nothing to fuse it with

    def spread(x: Any) -> Any:
        v = fr.Variable(np.ones((3, 3), np.float32))
        return [v.assign_add(fr.broadcast_to(fr.matmul(x, x)[:1], (3, 3)))]

    assert ops(plan_of(spread, (3, 3)))[-1] == ["assign_add"]  # but a view, which is nobody's reason


def test_one_node_computes_all_of_an_optimisers_update() -> None:
    """Where what is computed once for all entries, and is no part of it, is in the way."""

    def build(x: Any) -> Any:
        with fr.name_scope("model"):
            v = fr.Variable(np.ones(3, np.float32))
        return [fr.optim.Adam(0.1).apply_gradients([(x, v)])]

    fused = [node for node in plan_of(build, (3,)).nodes if node.op == "fused"]
    assert [node.outputs[0].dims for node in fused] == [(3,)]
    assert len(fused[0].outputs) == 3


def test_a_program_of_the_graph_is_fused_as_its_ops_are() -> None:
    def program(a: Any, b: Any, factor: Any) -> tuple[Any, ...]:
        total = a + b
        return total, total * factor, total - b

    def build(x: Any, y: Any, f: Any, *, one: bool) -> Any:
        a = fr.exp(x)
        total, product, _ = in_one(program, [a, y], [f]) if one else program(a, y, f)
        return [fr.sqrt(product), fr.matmul(total, x)]

    (together,) = [node for node in plan_of(partial(build, one=True), (3, 3), (3, 3), ()).nodes if node.op == "fused"]
    (apart,) = [node for node in plan_of(partial(build, one=False), (3, 3), (3, 3), ()).nodes if node.op == "fused"]
    assert [m for m in members(together) if m != "subtract"] == members(apart) == ["exp", "add", "multiply", "sqrt"]
    assert len(together.outputs) == len(apart.outputs) == 2  # not the difference, nor the product


@pytest.mark.parametrize("chain", [50, 62, 63, 64])
def test_a_program_counts_for_as_many_members_as_it_has(chain: int) -> None:
    def program(a: Any, b: Any) -> tuple[Any, ...]:
        return a * b, a + b

    def build(x: Any) -> Any:
        for _ in range(chain):
            x = fr.exp(x)
        return in_one(program, [x, x], [])

    groups = ops(plan_of(build, (3, 3)))
    assert max(map(len, groups)) <= MAX_MEMBERS
    assert sum(map(len, groups)) == chain + 2


def test_a_reduce_joins_the_group_that_reads_what_it_folds() -> None:
    def bias(x: Any, dy: Any) -> Any:
        return [fr.sum(dy, 0), dy * fr.exp(x)]

    def norm(x: Any, scale: Any, offset: Any, dy: Any) -> Any:
        return fr.gradients(fr.nn.layer_norm(x, scale, offset), [x, scale, offset], dy)

    (group,) = ops(plan_of(bias, (5, 3), (5, 3)))
    assert sorted(group) == ["exp", "multiply", "sum"]
    reductions = [group.count("sum") for group in ops(plan_of(norm, (5, 3), (3,), (3,), (5, 3))) if len(group) > 1]
    assert reductions == [4]  # of rows two, and of columns two


def test_a_reduce_does_not_join_a_group_that_would_lose_who_waits_for_it() -> None:
    def build(x: Any) -> Any:
        return fr.exp(x) * fr.sum(x, 0)

    assert ops(plan_of(build, (5, 3))) == [["sum"], ["exp", "multiply"]]


def test_groups_are_bounded() -> None:
    def build(x: Any) -> Any:
        for _ in range(100):
            x = fr.tanh(x) * x
        return x

    sizes = [len(group) for group in ops(plan_of(build, (3,)))]
    assert sum(sizes) == 200
    assert max(sizes) == 64

    def wide(*xs: Any) -> Any:
        total = xs[0]
        for x in xs[1:]:
            total = total * x
        return total

    plan = plan_of(wide, *[(3,)] * 50)
    assert max(len(node.inputs) for node in plan.nodes) <= 20


def test_small_integers_are_left_to_inference() -> None:
    plan = plan_of(lambda x: fr.zeros(fr.shape_of(x) * 2 + 1), (None, 3))
    assert all(node.op != "fused" for node in plan.nodes)


def test_long_chains_and_wide_graphs_are_grouped_quickly() -> None:
    def build(x: Any) -> Any:
        parts: Sequence[Any] = [x * float(i) for i in range(500)]
        return [fr.tanh(part) + 1.0 for part in parts]

    assert [len(group) for group in ops(plan_of(build, (3,)))] == [3] * 500


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_stay_graphs(seed: int) -> None:
    """Whatever is put together, the plan has an order, and every group is of one shape."""
    rng = np.random.default_rng(seed)

    def build(x: Any) -> Any:
        values = [x]
        for _ in range(60):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            kind = rng.integers(6)
            made = [a + b, fr.tanh(a), a * b, fr.matmul(a, b), fr.transpose(a), fr.sum(a, axis=0) + b][kind]
            values.append(made)
        return [values[i] for i in rng.integers(len(values), size=4)]

    plan = plan_of(build, (3, 3))
    plan.value_starts()
    done: set[int] = set()
    for position, node in enumerate(plan.nodes):
        assert set(node.control) <= done
        done.add(position)


def test_sums_of_many_are_members() -> None:
    plan = plan_of(lambda x, y: fr.tanh(fr.add_n([x, y, x * y])), (4, 3), (4, 3))
    assert ops(plan) == [["multiply", "add_n", "tanh"]]


def test_parts_that_only_groups_read_are_read_where_they_lie() -> None:
    plan = plan_of(lambda x: fr.sigmoid(x[:, :3]) * fr.tanh(x[:, 3:]), (None, 6))
    assert ops(plan) == [["getitem", "getitem", "sigmoid", "tanh", "multiply"]]
    assert [plan.nodes[-1].inputs, plan.nodes[-1].attrs["members"][1][1]] == [(0,), (0,)]

    def shared(x: Any) -> Any:  # one part for two groups, on either side of a product
        part = x[:3, 1:4]
        return fr.tanh(fr.matmul(fr.exp(part), part) * part)

    assert ops(plan_of(shared, (4, 6))) == [["getitem"], ["exp"], ["matmul", "multiply", "tanh"]]

    def apart(x: Any) -> Any:
        part = x[:3, 1:4]
        low = fr.exp(part)
        return fr.tanh(fr.matmul(low, low) * part)

    assert ops(plan_of(apart, (4, 6))) == [["getitem", "exp"], ["matmul", "getitem", "multiply", "tanh"]]


@pytest.mark.parametrize(
    ("build", "read"),
    [
        (lambda x: [x[:, :3], fr.exp(x[:, :3])], False),
        (lambda x: fr.exp(x[:, ::2]), False),
        (lambda x: fr.exp(x[:, 2:3]), False),
        (lambda x: fr.exp(x[:, 1]), False),
        (lambda x: fr.exp(x[:, None, 2:]), False),
        (lambda x: fr.exp(x[..., 2:]), True),
        (lambda x: fr.exp(x[1]), True),
        (lambda x: fr.exp(x[::2]), True),
    ],
    ids=["fetched", "apart", "one column", "a column", "a new axis", "side by side", "a row", "rows"],
)
def test_parts_are_copied_where_their_rows_are_not_whole(build: Callable[..., Any], read: bool) -> None:
    assert (["getitem", "exp"] in ops(plan_of(build, (4, 6)))) == read


def test_what_is_repeated_for_groups_alone_is_read_where_it_lies() -> None:
    def loss(x: Any, y: Any) -> Any:
        made = fr.mean(fr.square(x - y))
        return [made, *fr.gradients(made, [x])]

    found = plan_of(loss, (None, 3), (None, 3))
    (group,) = (members(node) for node in found.nodes if "spread" in members(node))
    assert group[0] == "spread"
    assert "multiply" in group
    repeated = plan_of(lambda x, b: fr.tanh(fr.broadcast_to(b, (4, 3)) + x), (4, 3), (3,))
    assert ops(repeated) == [["broadcast_to", "add", "tanh"]]
    assert ["broadcast_to"] in ops(plan_of(lambda b: fr.matmul(fr.broadcast_to(b, (3, 3)), b[:, None]), (3,)))


def test_parts_that_tile_a_tensor_are_put_side_by_side() -> None:
    def gradient(*uses: Callable[[Any], Any]) -> list[list[str]]:
        def build(x: Any) -> Any:
            y = fr.matmul(x, x)
            return fr.gradients([use(y) for use in uses], [x])[0]

        return ops(plan_of(build, (6, 6)))

    halves = [lambda y: fr.exp(y[:, :2]), lambda y: fr.tanh(y[:, 2:])]
    assert ["concat"] in gradient(*halves)
    assert ["place"] not in gradient(*halves)
    whole = gradient(*halves, fr.exp)
    assert ["place"] not in whole
    assert any("add_n" in group for group in whole)
    rows = [lambda y: fr.exp(y[4:]), lambda y: fr.tanh(y[2:4]), lambda y: fr.exp(y[:2])]
    assert ["place"] not in gradient(*rows)
    assert ["concat"] not in gradient(lambda y: fr.exp(y[:3, :3]), lambda y: fr.exp(y[3:, 3:]))
    assert ["concat"] not in gradient(lambda y: fr.exp(y[:3]), lambda y: fr.exp(y[2:]))  # they overlap


def body_of(plan: Plan, name: str = "body") -> Plan:
    """The body of the plan's only loop or branch."""
    (node,) = (node for node in plan.nodes if name in node.attrs)
    body: Plan = node.attrs[name]
    return body


def test_bodies_of_loops_are_contracted_and_fused_as_what_is_around_them() -> None:
    def gated(x: Any, w: Any, b: Any) -> Any:
        def cell(h: Any, row: Any) -> Any:
            gate = fr.sigmoid(row * h)
            return gate * h + (1.0 - gate) * fr.relu(fr.matmul(h, w) + b), gate

        return fr.scan(cell, fr.zeros((4, 3)), x)

    body = body_of(plan_of(gated, (5, 4, 3), (3, 3), (3,)))
    assert ops(body) == [["matmul_bias", "multiply", "sigmoid", "multiply", "subtract", "multiply", "add"]]
    assert len(body.nodes[-1].outputs) == 2


def test_bodies_inside_bodies_are_fused_too() -> None:
    def nested(x: Any) -> Any:
        def choose(h: Any) -> Any:
            return fr.cond(fr.less(fr.sum(h), 0.0), lambda: fr.tanh(h * 2.0), lambda: fr.exp(h) + 1.0)

        return fr.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, choose(h)), (0, x))[1]

    body = body_of(plan_of(nested, (4, 3)))
    assert ops(body_of(body, "if_true")) == [["multiply", "tanh"]]
    assert ops(body_of(body, "if_false")) == [["exp", "add"]]


def test_bodies_with_effects_stay_as_they_were_written() -> None:
    def counting(x: Any) -> Any:
        v = fr.Variable(np.ones(3, np.float32))

        def turn(i: Any, h: Any) -> Any:
            with fr.control_dependencies([v.assign_add(fr.exp(h) * 2.0)]):
                return i + 1, fr.tanh(h * 0.5)

        return fr.while_loop(lambda i, h: i < 3, turn, (0, x))[1]

    assert all(node.op != "fused" for node in plan_of(counting, (3,)).nodes)
