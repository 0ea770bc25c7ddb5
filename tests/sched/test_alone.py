"""Which plans compute one region between what comes and what goes, and what that is given and wanted for."""

from __future__ import annotations

import numpy as np
from cluster_plans import CLIENT, PS, WORKERS, Writer

from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.spec import Spec
from flowrt.sched.alone import Alone, find_alone
from flowrt.sched.units import find_units

FEW = Spec("float64", (3,))
ONE, OTHER = WORKERS


def alone(plan: Plan) -> Alone | None:
    return find_alone(plan, find_units(plan))


def add(name: str, a: int, b: int) -> PlanNode:
    return PlanNode("add", name, (a, b), (FEW,), {}, ())


def test_a_region_is_given_what_is_received_and_wanted_for_what_is_sent() -> None:
    w = Writer(PS)
    held = w.node("constant", out=FEW, value=np.zeros(3))
    first, second = w.recv(4, ONE, FEW), w.recv(2, OTHER, FEW)
    made = w.node("add", w.node("add", second, first, out=FEW), held, out=FEW)
    for edge, peer in ((7, ONE), (8, OTHER)):
        w.send(made, edge, peer)
    found = alone(w.plan())
    assert found is not None
    assert not found.is_closed
    assert [node.attrs["edge"] for node in found.receives] == [4, 2]
    assert [node.attrs["edge"] for node in found.sends] == [7, 8]
    assert (found.given, found.wanted) == ((first, second), (made,))
    assert [(feed.name, feed.spec) for feed in found.feeds] == [("recv_1", FEW), ("recv_2", FEW)]


def test_feeds_and_fetches_come_first_and_what_is_fetched_is_not_wanted_twice() -> None:
    received = PlanNode("recv", "recv", (), (FEW,), {"edge": 0, "peer": ONE}, ())
    nodes = (received, add("sum", 0, 1), add("twice", 2, 2), *(_send(value, value, ONE) for value in (3, 2)))
    found = alone(Plan(PS, nodes, (PlanFeed("x", FEW),), (0, 2)))
    assert found is not None
    assert [feed.name for feed in found.feeds] == ["x", "recv"]
    assert (found.given, found.wanted) == ((0, 1), (0, 2, 3))


def _send(value: int, edge: int, peer: str, control: tuple[int, ...] = ()) -> PlanNode:
    return PlanNode("send", f"send_{edge}", (value,), (), {"edge": edge, "peer": peer}, control)


def test_a_plan_that_exchanges_nothing_is_closed() -> None:
    found = alone(Plan(PS, (add("sum", 0, 0),), (PlanFeed("x", FEW),), (1,)))
    assert found is not None
    assert found.is_closed
    assert (found.given, found.wanted) == ((0,), (1,))


def test_a_plan_that_receives_or_sends_is_not_closed_and_may_have_all_there_is_fetched() -> None:
    received = PlanNode("recv", "recv", (), (FEW,), {"edge": 0, "peer": ONE}, ())
    found = alone(Plan(PS, (received, add("sum", 0, 1)), (PlanFeed("x", FEW),), (0, 2)))
    assert found is not None
    assert not found.is_closed
    assert found.wanted == (0, 2)
    found = alone(Plan(PS, (add("sum", 0, 0), _send(1, 0, ONE)), (PlanFeed("x", FEW),), ()))
    assert found is not None
    assert not found.is_closed


def test_what_is_received_as_a_sign_only_is_waited_for_too() -> None:
    w = Writer(PS)
    w.recv(0, ONE, FEW)
    made = w.node("constant", out=FEW, value=np.zeros(3), control=(0,))
    w.send(w.node("add", made, made, out=FEW, control=(0,)), 1, ONE)
    found = alone(w.plan())
    assert found is not None
    assert found.given == (0,)


def test_two_regions_are_not_one() -> None:
    w = Writer(PS)
    sent = w.node("constant", out=FEW, value=np.zeros(3))
    w.send(w.node("add", sent, sent, out=FEW), 0, ONE)
    answer = w.recv(1, ONE, FEW)
    w.send(w.node("add", answer, answer, out=FEW), 2, CLIENT)
    assert alone(w.plan()) is None  # its other half would wait for the answer to the first


def test_what_is_handed_on_uncomputed_does_not_wait_for_the_region() -> None:
    for handed_on in ("received", "fed"):
        received = PlanNode("recv", "recv", (), (FEW,), {"edge": 0, "peer": ONE}, ())
        value = 1 if handed_on == "received" else 0
        nodes = (received, add("sum", 0, 1), _send(value, 1, OTHER), _send(2, 2, OTHER))
        assert alone(Plan(PS, nodes, (PlanFeed("x", FEW),), ())) is None, handed_on
    received = PlanNode("recv", "recv", (), (FEW,), {"edge": 0, "peer": ONE}, ())
    assert alone(Plan(PS, (received, add("sum", 0, 1)), (PlanFeed("x", FEW),), (1, 2))) is None


def test_what_the_region_does_not_wait_for_and_what_waits_for_a_send_is_others() -> None:
    w = Writer(PS)
    x, unused = w.recv(0, ONE, FEW), w.recv(1, OTHER, FEW)
    w.send(w.node("add", x, x, out=FEW), 2, ONE)
    assert unused == 1
    assert alone(w.plan()) is None

    w = Writer(PS)
    made = w.node("constant", out=FEW, value=np.zeros(3))
    w.send(w.node("add", made, made, out=FEW), 0, ONE)
    w.node("add", w.recv(1, ONE, FEW, control=(2,)), made, out=FEW)
    assert alone(w.plan()) is None


def test_nothing_else_may_be_there() -> None:
    w = Writer(PS)
    x = w.recv(0, ONE, FEW)
    w.send(w.node("add", x, x, out=FEW), 1, ONE)
    w.node("queue_close", resource="q", container="", capacity=1, dtypes=("float64",), shapes=((),))
    assert alone(w.plan()) is None
    assert alone(Plan(PS, ())) is None
