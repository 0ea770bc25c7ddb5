"""Regions in parts: what a send that leads needs comes first, and no order and no write is lost by that."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tape_world import PlanMaker

from flowrt.base.valueclass import replace
from flowrt.sched.regions.leading import leading_sends
from flowrt.sched.units import Action, connect, find_units

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

PEER = "/job:worker/task:1"


def send(make: PlanMaker, value: int, lead: int = 0) -> None:
    attrs = {"lead": lead} if lead else {}
    make.node("send", value, edge=len(make.nodes), peer=PEER, **attrs)


def tapes(plan: Plan) -> list[tuple[int, ...]]:
    units = find_units(plan)
    connect(plan, units)  # raises where they wait for each other
    return [unit.nodes for unit in units if unit.action is Action.TAPE]


def test_what_is_sent_ahead_is_a_tape_of_its_own_and_the_rest_another() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    first = make.node("negative", x)  # 0
    other = make.node("exp", first)  # 1
    sent = make.node("tanh", first)  # 2
    send(make, sent, lead=1)  # 3
    make.node("add", other, sent)  # 4
    assert tapes(make.plan(make.last)) == [(0, 2), (1, 4)]


def test_what_is_sent_with_the_rest_parts_nothing() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    sent = make.node("negative", x)
    send(make, sent)
    made = make.plan(make.node("exp", sent))
    assert leading_sends(made) == []
    assert tapes(made) == [(0, 2)]


def test_a_send_that_needs_all_of_its_region_parts_nothing() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    sent = make.node("exp", make.node("negative", x))
    send(make, sent, lead=1)
    assert tapes(make.plan()) == [(0, 1)]


def test_the_larger_lead_goes_first_wherever_it_stands() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    one = make.node("negative", x)
    two = make.node("exp", x)
    three = make.node("tanh", x)
    send(make, one, lead=1)
    send(make, three, lead=2)
    assert tapes(make.plan(two)) == [(2,), (0,), (1,)]


def test_sends_of_one_lead_go_together() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    one, two = make.node("negative", x), make.node("exp", x)
    late = make.node("tanh", x)
    send(make, two, lead=3)
    send(make, one, lead=3)
    assert tapes(make.plan(late)) == [(0, 1), (2,)]


def test_one_of_several_values_that_a_node_makes_may_lead() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    other = make.node("exp", x)  # 0
    mean = make.node("moments", x)  # 1, and the variance behind it
    send(make, mean + 1, lead=1)
    assert tapes(make.plan(other, mean)) == [(1,), (0,)]


def test_a_constant_is_in_every_part_that_reads_it() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    two = make.constant([2.0, 2.0])
    sent = make.node("multiply", x, two)
    send(make, sent, lead=1)
    late = make.node("add", x, two)
    assert tapes(make.plan(late)) == [(0, 1), (0, 3)]


def test_a_constant_that_others_wait_for_is_in_one_part() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    two = make.constant([2.0, 2.0])
    sent = make.node("multiply", x, two)
    send(make, sent, lead=1)
    late = make.node("add", x, two, control=[0])
    assert tapes(make.plan(late)) == [(0, 1), (3,)]


def test_what_touches_a_variable_that_is_replaced_stays_together() -> None:
    """Another step could write in between, and that would be lost."""
    make = PlanMaker()
    v = make.read("v", (2,))  # 0
    sent = make.node("negative", v)  # 1
    send(make, sent, lead=1)  # 2
    half = make.node("multiply", v, make.constant([0.5, 0.5]))  # 3, 4
    make.write("assign", "v", half, control=[0, 1])  # 5
    late = make.node("exp", sent)  # 6
    assert tapes(make.plan(late)) == [(0, 1, 3, 4, 5), (6,)]


def test_what_is_added_to_a_variable_may_come_later_than_it_is_read() -> None:
    make = PlanMaker()
    v = make.read("v", (2,))
    sent = make.node("negative", v)
    send(make, sent, lead=1)
    make.write("assign_add", "v", make.node("exp", sent), control=[0, 1])
    assert tapes(make.plan()) == [(0, 1), (3, 4)]


def test_parts_wait_for_what_their_nodes_wait_for() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    sent = make.node("negative", x)  # 0
    send(make, sent, lead=1)  # 1
    late = make.node("exp", x, control=[0])  # 2
    plan = make.plan(late)
    first, second = (unit.region for unit in find_units(plan) if unit.region is not None)
    assert (first.nodes, first.control, second.nodes, second.control) == ((0,), (), (2,), (0,))


def test_what_a_device_sends_ahead_is_brought_out_before_the_rest_is_issued() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    first = make.node("negative", x, device="arena:0")  # 0
    sent = make.node("tanh", first, device="arena:0")  # 1
    send(make, make.node("bring", sent), lead=1)  # 2, 3
    other = make.node("exp", first, device="arena:0")  # 4
    plan = make.plan(make.node("bring", other))
    units = find_units(plan)
    connect(plan, units)
    issued = [(unit.nodes, unit.control) for unit in units if unit.action is Action.ISSUE]
    assert issued == [((0, 1), ()), ((4,), (2,))]
    assert len([unit for unit in find_units(quiet(plan)) if unit.action is Action.ISSUE]) == 1


@pytest.mark.parametrize("seed", range(100))
def test_random_regions_come_in_parts_that_wait_only_for_those_before(seed: int) -> None:
    print("seed", seed)
    rng, make = random.Random(seed), PlanMaker()
    values, names = [make.feed("float32", (2,))], ("v", "w")
    for _ in range(rng.randint(4, 25)):
        control = [rng.randrange(len(make.nodes))] if make.nodes and rng.random() < 0.2 else []
        control = [n for n in control if make.nodes[n].op != "send"]
        match rng.choice(["add", "add", "negative", "constant", "read", "write", "send"]):
            case "add":
                values.append(make.node("add", rng.choice(values), rng.choice(values), control=control))
            case "negative":
                values.append(make.node("negative", rng.choice(values), control=control))
            case "constant":
                values.append(make.constant([1.0, 2.0]))
            case "read":
                values.append(make.read(rng.choice(names), (2,), control=control))
            case "write":
                op = rng.choice(["assign", "assign_add"])
                make.write(op, rng.choice(names), rng.choice(values), control=control)
            case "send":
                send(make, rng.choice(values[1:] or values), lead=rng.randint(0, 3))
    plan = make.plan(rng.choice(values))
    units = find_units(plan)
    connect(plan, units)
    homes: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for n in unit.nodes:
            homes.setdefault(n, []).append(number)
    assert homes.keys() == set(range(len(plan.nodes)))
    assert all(len(where) == 1 or plan.nodes[n].op == "constant" for n, where in homes.items())
    whole = [unit.nodes for unit in find_units(quiet(plan)) if unit.region is not None]
    for nodes in whole:
        for name in {node.attrs["resource"] for node in map(plan.nodes.__getitem__, nodes) if node.op == "assign"}:
            touching = [n for n in nodes if plan.nodes[n].attrs.get("resource") == name]
            assert len({homes[n][0] for n in touching}) == 1


def quiet(plan: Plan) -> Plan:
    """The same plan, where nothing leads."""
    nodes = [replace(node, attrs={"edge": 0, "peer": PEER}) if node.op == "send" else node for node in plan.nodes]
    return replace(plan, nodes=tuple(nodes))
