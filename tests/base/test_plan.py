from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrt.base.codec import PART, pack_parts, unpack_parts
from flowrt.base.errors import BrokenStream, GraphError, SpecError
from flowrt.base.plan import (
    DEEPEST,
    Plan,
    PlanFeed,
    PlanNode,
    let_go,
    plan_from_data,
    plan_from_parts,
    plan_to_data,
    plan_to_parts,
    too_large,
)
from flowrt.base.spec import Spec
from flowrt.net.node.plans import dismantle, make_ready
from flowrt.sched.host.host import Host

VECTOR = Spec("float32", (2,))


def plan() -> Plan:
    constant = PlanNode("constant", "c", (), (VECTOR,), {"value": np.float32([1, 2])})
    add = PlanNode("add", "y", (0, 1), (VECTOR,), control=(0,), site="train.py:3")
    return Plan("/job:local/task:0", (constant, add), (PlanFeed("x", Spec("float32", (None,))),), (2, 0))


def test_a_plan_comes_back_equal() -> None:
    read = plan_from_data(plan_to_data(plan()))
    (constant, add), (first, second) = read.nodes, plan().nodes
    assert (read.task, read.feeds, read.fetches, add) == (plan().task, plan().feeds, plan().fetches, second)
    assert replace(constant, attrs={}) == replace(first, attrs={})
    np.testing.assert_array_equal(constant.attrs["value"], first.attrs["value"])
    assert not constant.attrs["value"].flags.writeable
    assert read.value_starts() == [1, 2, 3]


HOSTILE = {
    "no plan at all": lambda data: None,
    "a dtype that no tensor has": lambda data: data["nodes"][0]["outputs"][0].update(dtype="object"),
    "a negative size": lambda data: data["nodes"][0]["outputs"][0].update(shape=(-1,)),
    "an infinite size": lambda data: data["nodes"][0]["outputs"][0].update(shape=(float("inf"),)),
    "too many axes": lambda data: data["feeds"][0]["spec"].update(shape=(1,) * 9),
    "an input from nowhere": lambda data: data["nodes"][1].update(inputs=(0, 9)),
    "an input from behind": lambda data: data["nodes"][0].update(inputs=(2,)),
    "a node that waits for itself": lambda data: data["nodes"][1].update(control=(1,)),
    "an infinite fetch": lambda data: data.update(fetches=(float("inf"),)),
    "a fetch of nothing": lambda data: data.update(fetches=(3,)),
    "attributes without names": lambda data: data["nodes"][1].update(attrs=(1, 2)),
    "a node without an op": lambda data: data["nodes"][1].pop("op"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_plan_is_refused(case: str) -> None:
    data: Any = plan_to_data(plan())
    HOSTILE[case](data)
    with pytest.raises(BrokenStream, match="not a plan"):
        plan_from_data("plan" if case == "no plan at all" else data)


# ── in parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_bodies(*bodies: Plan) -> Plan:
    """Two nodes; the first holds ``bodies``."""
    loop = PlanNode("loop", "l", (0,), (VECTOR,), {f"body_{i}": body for i, body in enumerate(bodies)} | {"turns": 3})
    return Plan("/job:a/task:0", (loop, PlanNode("add", "y", (0, 1), (VECTOR,))), (PlanFeed("x", VECTOR),), (2,))


def long(nodes: int) -> Plan:
    chain = tuple(PlanNode("negative", f"n{i}", (i,), (VECTOR,), site="train.py:3") for i in range(nodes))
    return Plan("", chain, (PlanFeed("x", VECTOR),), (nodes,))


def test_a_plan_and_its_bodies_come_back_from_parts() -> None:
    sent = with_bodies(long(3), with_bodies(long(1), long(0)), long(2))
    assert plan_from_parts(unpack_parts(pack_parts(plan_to_parts(sent)))) == sent
    constant = plan_from_parts(unpack_parts(pack_parts(plan_to_parts(plan())))).nodes[0].attrs["value"]
    np.testing.assert_array_equal(constant, np.float32([1, 2]))
    assert not constant.flags.writeable


def test_the_parts_of_a_plan_are_small_however_large_its_bodies_are() -> None:
    sent = with_bodies(long(PART.items // 8), long(3))  # the body alone is of more values than a part may hold
    data = pack_parts(plan_to_parts(sent), each=replace(PART, items=100))
    assert plan_from_parts(unpack_parts(data)) == sent


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_plan_is_refused_in_parts(case: str) -> None:
    head, feed, *nodes = plan_to_parts(plan())
    data: Any = {**head, "feeds": [feed], "nodes": nodes}
    HOSTILE[case](data)
    parts = ["plan"] if case == "no plan at all" else [{**head, "fetches": data["fetches"]}, feed, *nodes]
    with pytest.raises(BrokenStream, match="not a plan"):
        plan_from_parts(iter(parts))


def test_a_plan_of_fewer_or_more_parts_than_told_is_refused() -> None:
    parts = list(plan_to_parts(with_bodies(long(2), long(1))))
    for count in range(len(parts)):
        with pytest.raises(BrokenStream, match="fewer parts"):
            plan_from_parts(iter(parts[:count]))
    for more in ({}, None):
        with pytest.raises(BrokenStream, match="more parts"):
            plan_from_parts(iter([*parts, more]))
    for count in (2**62, -1, "2", 1.5, None, True):
        with pytest.raises(BrokenStream, match="not a plan"):
            plan_from_parts(iter([{**parts[0], "nodes": count}, *parts[1:]]))


def test_bodies_too_deep_are_refused_on_either_side() -> None:
    deep = long(1)
    for _ in range(DEEPEST):
        deep = with_bodies(deep)
    parts = list(plan_to_parts(deep))
    assert plan_from_parts(iter(parts)) == deep
    with pytest.raises(SpecError, match="deep"):
        list(plan_to_parts(with_bodies(deep)))
    head, feed, loop, last = plan_to_parts(with_bodies(Plan("", ())))
    with pytest.raises(BrokenStream, match="deep"):
        plan_from_parts(iter([head, feed, *[{**loop, "attrs": {"body": {**head, "feeds": 0}}}] * 100, last]))


def test_a_node_of_more_inputs_than_a_part_may_hold_values_comes_back() -> None:
    count = PART.items + 1
    reads = tuple(PlanNode("read", f"r{i}", (), (VECTOR,)) for i in range(count))
    for last in (
        PlanNode("add_n", "s", tuple(range(count)), (VECTOR,)),
        PlanNode("no_op", "g", (), (), control=tuple(range(count))),
    ):
        sent = Plan("/job:a/task:0", (*reads, last))
        assert plan_from_parts(unpack_parts(pack_parts(plan_to_parts(sent)))) == sent


def test_a_node_that_fits_no_part_is_refused_by_name() -> None:
    split = PlanNode("split", "pieces", (0,), (VECTOR,) * PART.items, site="train.py:7")
    parts = plan_to_parts(Plan("", (split,), (PlanFeed("x", VECTOR),)))
    with pytest.raises(SpecError, match=rf"split 'pieces' \(train.py:7\), of {PART.items} outputs.*make several of it"):
        pack_parts(parts, where=too_large)


# ── let go ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted(dict[str, Any]):
    """Attributes that tell, when they are freed, how many nodes were held then."""

    def __init__(self, told: Callable[[], None], **attrs: Any) -> None:
        super().__init__(**attrs)
        self._told = told

    def __del__(self) -> None:
        self._told()


def test_nodes_are_freed_one_by_one_and_those_of_bodies_too() -> None:
    held: list[PlanNode] = []
    seen: list[int] = []

    def nodes(count: int, **attrs: Any) -> tuple[PlanNode, ...]:
        return tuple(PlanNode("a", "n", (), (), Counted(lambda: seen.append(len(held)), **attrs)) for _ in range(count))

    held += [*nodes(1, body=Plan("", nodes(5))), *nodes(3)]
    let_go(held)
    assert seen == [3, 2, 1, 0, *range(4, -1, -1)]


def sent(op: str, count: int) -> np.ndarray[Any, Any]:
    constant = PlanNode("constant", "c", (), (VECTOR,), {"value": np.float32([1, 2])})
    chain = tuple(PlanNode(op, f"n{i}", (i,), (VECTOR,)) for i in range(count))
    return np.frombuffer(pack_parts(plan_to_parts(Plan("/job:a/task:0", (constant, *chain)))), np.uint8)


async def test_of_a_plan_that_is_refused_or_dismantled_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[weakref.ref[Any]] = []

    def noting(*args: Any) -> Plan:
        plan = plan_from_parts(*args)
        values.append(weakref.ref(plan.nodes[0].attrs["value"]))
        return plan

    monkeypatch.setattr("flowrt.net.node.plans.plan_from_parts", noting)
    host = Host("/job:a/task:0")
    try:
        with pytest.raises(GraphError, match="no kernel of nonesuch") as caught:
            make_ready(sent("nonesuch", 9), host)
        assert values.pop()() is None, caught
        plans = [make_ready(sent("negative", 9), host)]
        assert values[0]() is not None
        dismantle(plans)
        assert values.pop()() is None
    finally:
        await host.aclose()


def test_nodes_with_outputs_alike_share_them_once_a_plan_is_read() -> None:
    """Each tuple and spec of its own is one more that every full collection looks at."""
    specs = [Spec("float32", (4, None)), Spec("int64", (), 3), Spec("float32", None)]
    nodes = [PlanNode("tanh", f"n{k}", (), (specs[k % 3],) * (k % 7)) for k in range(60)]
    read = plan_from_parts(iter(list(plan_to_parts(Plan("/job:local/task:0", tuple(nodes))))))
    assert [node.outputs for node in read.nodes] == [node.outputs for node in nodes]
    few = [node.outputs for node in read.nodes if len(node.outputs) in (1, 2, 3, 4)]
    assert len(set(map(id, few))) == len(set(few)) == 12
