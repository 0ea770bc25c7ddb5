from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import PlanMaker

from flowrt.base.plan import PlanNode
from flowrt.base.spec import Spec
from flowrt.sched.regions.regions import Region, find_regions, resources_of, size_operands

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

BREAKERS = ("recv", "send", "switch", "merge", "dequeue")


def breaks(node: PlanNode) -> bool:
    return node.op in BREAKERS


def regions_of(plan: Plan) -> tuple[Region, ...]:
    return find_regions(plan, breaks)


def node_sets(plan: Plan) -> list[tuple[int, ...]]:
    return [region.nodes for region in regions_of(plan)]


def recv(make: PlanMaker) -> int:
    return make.node("recv", edge=len(make.nodes), peer="/job:ps/task:0", dtype="float32", shape=(2,))


def send(make: PlanMaker, value: int) -> None:
    make.node("send", value, edge=len(make.nodes), peer="/job:ps/task:0")


def test_a_plan_without_breakers_is_one_region() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    y = make.node("add", x, x)
    z = make.node("negative", y)
    (region,) = regions_of(make.plan(z))
    assert (region.nodes, region.first, region.inputs, region.outputs) == ((0, 1), (y, z), (x,), (z,))
    assert (region.control, region.variables, region.device, region.shape_inputs) == ((), (), "cpu:0", ())


def test_a_region_does_not_wait_for_an_effect_that_only_others_need() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    early = make.node("add", x, x)
    arrived = recv(make)
    late = make.node("add", early, arrived)
    other = make.node("negative", early)
    regions = regions_of(make.plan(late, other))
    assert [r.nodes for r in regions] == [(0, 3), (2,)]
    assert regions[1].inputs == (early, arrived)
    assert regions[0].outputs == (early, other)


def test_an_effect_between_two_nodes_parts_them() -> None:
    """Were they one region, it would have to wait for itself."""
    make = PlanMaker()
    x = make.feed("float32", (2,))
    y = make.node("negative", x)
    send(make, y)
    make.node("no_op", control=[1])
    z = make.node("negative", x)
    assert node_sets(make.plan(z)) == [(0, 3), (2,)]


def test_the_sides_of_a_switch_are_regions_of_their_own_and_a_merge_joins_them() -> None:
    make = PlanMaker()
    x, pred = make.feed("float32", (2,)), make.feed("bool", ())
    no = make.node("switch", x, pred)
    a = make.node("negative", no)
    b = make.node("negative", no + 1)
    both = make.node("merge", a, b, _many=2)
    c = make.node("negative", both)
    d = make.node("add", x, x)
    e = make.node("add", c, d)
    plan = make.plan(e)
    assert node_sets(plan) == [(1,), (2,), (4, 6), (5,)]


def test_a_node_under_control_of_a_switch_is_alive_on_both_sides() -> None:
    make = PlanMaker()
    x, pred = make.feed("float32", (2,)), make.feed("bool", ())
    no = make.node("switch", x, pred)
    make.node("negative", x, control=[0])
    make.node("negative", no)
    assert node_sets(make.plan()) == [(1,), (2,)]


def test_what_follows_a_send_may_live_where_the_tensor_sent_is_dead() -> None:
    make = PlanMaker()
    x, pred = make.feed("float32", (2,)), make.feed("bool", ())
    no = make.node("switch", x, pred)
    send(make, no)
    make.node("negative", x, control=[1])
    make.node("negative", no, control=[1])
    assert node_sets(make.plan()) == [(2,), (3,)]


def test_devices_never_share_a_region_nor_wait_in_a_circle() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    y = make.node("negative", x)
    z = make.node("negative", y, device="cuda:0")
    w = make.node("negative", z)
    make.node("negative", x, device="cuda:0")
    assert node_sets(make.plan(w)) == [(0,), (1,), (2,), (3,)]


def test_a_variable_is_read_where_it_is_used() -> None:
    make = PlanMaker()
    w = make.read("w", (2,))
    two = make.constant([1.0, 2.0])
    arrived = recv(make)
    y = make.node("multiply", make.node("multiply", w, arrived), two)
    make.write("assign_sub", "w", y, control=[0])
    (region,) = regions_of(make.plan())
    assert region.nodes == (0, 1, 3, 4, 5)
    assert (region.reads, region.writes, region.inputs) == ((("", "w"),), (("", "w"),), (arrived,))


def test_a_variable_that_is_fetched_or_sent_is_read_at_once() -> None:
    make = PlanMaker()
    w, v = make.read("w", (2,)), make.read("v", (2,))
    arrived = recv(make)
    y = make.node("multiply", w, arrived)
    z = make.node("multiply", v, arrived)
    send(make, v)
    assert node_sets(make.plan(w, y, z)) == [(0, 1), (3, 4)]


def test_a_read_does_not_wait_for_what_a_writer_need_not_wait_for() -> None:
    make = PlanMaker()
    w = make.read("w", (2,))
    arrived = recv(make)
    y = make.node("multiply", w, arrived)
    one = make.constant([1.0, 1.0])
    make.write("assign_add", "w", one, control=[0])
    assert node_sets(make.plan(y)) == [(0, 3, 4), (2,)]


def test_values_that_decide_shapes_are_traced_back_to_the_inputs() -> None:
    make = PlanMaker()
    x, y = make.feed("float32", (None, 4)), make.feed("float32", (None,))
    rows, known = make.feed("int64", (2,)), make.feed("int64", (2,))
    ids = make.feed("int64", (None,))
    shape = make.node("multiply", rows, known)
    make.node("reshape", x, shape)
    make.node("reshape", y, make.node("shape_of", x))
    make.node("negative", ids)
    (region,) = regions_of(make.plan())
    assert region.shape_inputs == (rows, known)


def test_a_shape_that_the_plan_knows_is_no_shape_input() -> None:
    make = PlanMaker()
    x = make.feed("float32", (None,))
    make.node("reshape", x, make.constant([2, 2]))
    assert regions_of(make.plan())[0].shape_inputs == ()


def test_what_inference_cannot_use_is_no_shape_input() -> None:
    make = PlanMaker()
    x, size, sizes = make.feed("float32", (None,)), make.feed("float32", (2,)), make.feed("int64", (2, 2))
    make.node("reshape", x, make.node("astype", size, dtype=np.dtype("int64")))
    make.node("reshape", x, make.node("sum", sizes, axis=0, keepdims=False))
    assert regions_of(make.plan())[0].shape_inputs == ()


def test_the_variables_that_one_keeps_beside_it_are_in_its_container() -> None:
    attrs = {"container": "mine", "resource": "w", "slots": ("w/m", "w/v")}
    node = PlanNode("adam_rows", "update", (), (), attrs, (), "cpu:0", "train.py:1")
    assert resources_of(node) == (("mine", "w"), ("mine", "w/m"), ("mine", "w/v"))


def random_plan(rng: random.Random, count: int) -> Plan:
    make = PlanMaker()
    floats, preds = [make.feed("float32", (2,))], [make.feed("bool", ())]
    devices = ["cpu:0"] if rng.random() < 0.5 else ["cpu:0", "cpu:1"]
    for _ in range(count):
        draw, device = rng.random(), rng.choice(devices)
        near = floats[-8:] if rng.random() < 0.7 else floats
        control = rng.sample(range(len(make.nodes)), min(len(make.nodes), rng.choice([0, 0, 0, 1, 2])))
        if draw < 0.07:
            floats.append(recv(make))
        elif draw < 0.12:
            make.node("send", rng.choice(near), edge=0, peer="", control=control)
        elif draw < 0.2:
            side = make.node("switch", rng.choice(near), preds[0], control=control)
            floats += [side, side + 1]
        elif draw < 0.27:
            floats.append(make.node("merge", rng.choice(near), rng.choice(near), _many=2, device=device))
        elif draw < 0.35:
            floats.append(make.read(rng.choice("uvw"), (2,)))
        elif draw < 0.4:
            floats.append(make.constant([1.0, 2.0]))
        else:
            inputs = rng.choice(near), rng.choice(near)
            floats.append(make.node("add", *inputs, control=control, device=device))
    return make.plan(*rng.sample(floats, min(3, len(floats))))


def edges(plan: Plan) -> list[tuple[int, int]]:
    producers = [-1] * len(plan.feeds) + [i for i, node in enumerate(plan.nodes) for _ in node.outputs]
    return [
        (before, position)
        for position, node in enumerate(plan.nodes)
        for before in (*[producers[v] for v in node.inputs], *node.control)
        if before >= 0
    ]


def liveness(plan: Plan, sides: dict[int, bool], arrived: dict[int, bool]) -> list[bool]:
    """Which nodes are alive, given which sides the switches choose and which recvs receive no dead tensor."""
    ports = [(-1, 0)] * len(plan.feeds) + [
        (i, k) for i, node in enumerate(plan.nodes) for k in range(len(node.outputs))
    ]
    runs: list[bool] = []
    for position, node in enumerate(plan.nodes):
        data = [i < 0 or (runs[i] and sides.get(i, k) == k) for i, k in (ports[v] for v in node.inputs)]
        taken = any(data) if node.op == "merge" else all(data)
        control = node.op == "merge" or all(runs[c] for c in node.control)
        lives = (taken and control and arrived.get(position, True)) or node.op == "send"  # a dead tensor is sent too
        runs.append(lives)
    return runs


@pytest.mark.parametrize("seed", range(150))
def test_units_form_no_cycle_and_a_region_dies_as_one(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, rng.randrange(5, 80))
    regions = regions_of(plan)
    unit = list(range(len(plan.nodes)))
    for region in regions:
        for node in region.nodes:
            unit[node] = region.nodes[0]
            assert not breaks(plan.nodes[node])
            assert plan.nodes[node].device == region.device
    assert sum(len(r.nodes) for r in regions) == sum(not breaks(node) for node in plan.nodes)
    check_order({(unit[a], unit[b]) for a, b in edges(plan) if unit[a] != unit[b]}, set(unit))
    for _ in range(5):
        sides = {i: rng.random() < 0.5 for i, node in enumerate(plan.nodes) if node.op == "switch"}
        arrived = {i: rng.random() < 0.8 for i, node in enumerate(plan.nodes) if node.op == "recv"}
        runs = liveness(plan, sides, arrived)
        moved = {n for n, node in enumerate(plan.nodes) if not node.inputs and not node.control}
        for region in regions:
            assert len({runs[n] for n in region.nodes if n not in moved}) <= 1


@pytest.mark.parametrize("seed", range(40))
def test_a_region_waits_only_for_what_is_behind_its_nodes(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, 60)
    behind: list[set[int]] = [set() for _ in plan.nodes]
    for before, after in edges(plan):  # edges come in the order of their ends
        behind[after] |= behind[before] | ({before} if breaks(plan.nodes[before]) else set())
    for region in regions_of(plan):
        computed = [n for n in region.nodes if plan.nodes[n].inputs or plan.nodes[n].control]
        assert all(behind[n] == behind[computed[0]] for n in computed)


@pytest.mark.parametrize("seed", range(20))
def test_inputs_outputs_and_controls_are_what_crosses_the_border(seed: int) -> None:
    plan = random_plan(random.Random(seed), 60)
    starts = plan.value_starts()
    for region in regions_of(plan):
        inside = {v for n in region.nodes for v in range(starts[n], starts[n + 1])}
        outside = [node for n, node in enumerate(plan.nodes) if n not in region.nodes]
        members = [plan.nodes[n] for n in region.nodes]
        assert set(region.inputs) == {v for node in members for v in node.inputs} - inside
        assert set(region.outputs) == inside & ({v for node in outside for v in node.inputs} | set(plan.fetches))
        assert set(region.control) == {c for node in members for c in node.control} - set(region.nodes)


def check_order(links: set[tuple[int, int]], nodes: set[int]) -> None:
    waits = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {n: [] for n in nodes}
    for a, b in links:
        waits[b] += 1
        after[a].append(b)
    order = [n for n in nodes if not waits[n]]
    for node in order:
        for follower in after[node]:
            waits[follower] -= 1
            if not waits[follower]:
                order.append(follower)
    assert len(order) == len(nodes), "units wait for each other in a circle"


def test_the_values_that_decide_sizes_are_known_by_their_parameters() -> None:
    def operands(op: str, count: int, **attrs: Any) -> list[int]:
        spec = Spec("int64", ())
        return list(size_operands(PlanNode(op, op, (0,) * count, (spec,), attrs, (), "cpu:0", "train.py:1")))

    assert operands("arange", 3) == [0, 1, 2]
    assert operands("broadcast_to", 2) == [1]
    assert operands("add", 2) == []
    repeated = (("broadcast_to", (0, 2), "float32", ()), ("add", (3, 1), "float32", ()))
    assert operands("fused", 3, members=repeated, results=(4,), _many=3) == [2]
    inside = (("shape_of", (0,), "int64", ()), ("broadcast_to", (1, 2), "float32", ()))
    assert operands("fused", 2, members=inside, results=(3,), _many=2) == []


@pytest.mark.timeout(30)  # it takes half a second
def test_ten_thousand_nodes_are_no_trouble() -> None:
    plan = random_plan(random.Random(0), 10_000)
    nodes = [node for region in regions_of(plan) for node in region.nodes]
    assert 0 < len(nodes) == len(set(nodes))
