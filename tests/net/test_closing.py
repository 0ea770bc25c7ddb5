"""What a plan exchanges with its client, and is small, goes with the start and the end of a step; nothing else does."""

from __future__ import annotations

import numpy as np
from cluster_plans import CLIENT, PS, WORKERS, Writer

from flowrt.base.plan import Plan, PlanFeed
from flowrt.base.spec import Spec
from flowrt.net.link import INLINE, SMALL
from flowrt.net.master.closing import ClosedPlan, close

GIVEN = range(2 * INLINE)
FEW, MANY, OPEN = Spec("float64", (3,)), Spec("float64", (SMALL,)), Spec("float64", (None,))


def ops(plan: Plan) -> list[str]:
    return [node.op for node in plan.nodes]


def test_small_values_of_the_client_are_feeds_and_fetches() -> None:
    w = Writer(PS)
    first, second = w.recv(4, CLIENT, FEW), w.recv(2, CLIENT, FEW)
    w.send(w.node("sub", second, first, out=FEW), 7, CLIENT)
    closed = close(w.plan(), GIVEN)
    assert (closed.fed, closed.fetched) == ((4, 2), (7,))
    assert [feed.name for feed in closed.plan.feeds] == ["recv_0", "recv_1"]
    assert [feed.spec for feed in closed.plan.feeds] == [FEW, FEW]
    assert ops(closed.plan) == ["sub"]
    assert closed.plan.nodes[0].inputs == (1, 0)
    assert closed.plan.fetches == (2,)


def test_what_is_large_or_may_be_is_received_and_sent_and_so_is_what_others_exchange() -> None:
    w = Writer(PS)
    large, unknown, other = w.recv(0, CLIENT, MANY), w.recv(1, CLIENT, OPEN), w.recv(2, WORKERS[0], FEW)
    for edge, value in enumerate((large, unknown), 3):
        w.send(value, edge, CLIENT)
    w.send(other, 5, WORKERS[0])
    plan = w.plan()
    assert close(plan, GIVEN) == ClosedPlan(plan, (), ())


def test_values_keep_their_makers_and_nodes_what_they_wait_for() -> None:
    w = Writer(PS)
    held = w.node("constant", out=FEW, value=np.zeros(3))
    fed = w.recv(0, CLIENT, FEW)
    other = w.recv(1, WORKERS[0], FEW)
    made = w.node("add", held, fed, out=FEW, control=(1, 2))
    w.send(made, 2, CLIENT)
    w.send(w.node("mul", other, made, out=FEW, control=(3,)), 3, WORKERS[0])
    closed = close(w.plan(), GIVEN)
    constant, recv, add, mul, send = closed.plan.nodes
    assert [node.op for node in (constant, recv, add, mul, send)] == ["constant", "recv", "add", "mul", "send"]
    assert (add.inputs, add.control) == ((1, 0), (1,))  # the feed is there before anything is
    assert (mul.inputs, mul.control) == ((2, 3), (2,))
    assert send.inputs == (4,)
    assert closed.plan.fetches == (3,)


def test_a_send_that_others_wait_for_and_a_receive_that_waits_are_left() -> None:
    w = Writer(PS)
    first = w.node("constant", out=FEW, value=np.zeros(3))
    sent = w.send(first, 0, CLIENT)
    w.send(w.recv(1, CLIENT, FEW, control=(sent,)), 2, WORKERS[0])
    plan = w.plan()
    assert close(plan, GIVEN) == ClosedPlan(plan, (), ())


def test_no_more_go_along_than_a_start_has_room_for() -> None:
    w = Writer(PS)
    for edge in range(INLINE + 2):
        w.send(w.recv(edge, CLIENT, FEW), INLINE + 2 + edge, CLIENT)
    closed = close(w.plan(), GIVEN)
    assert closed.fed == tuple(range(INLINE))
    assert closed.fetched == tuple(range(INLINE + 2, 2 * INLINE + 2))
    assert ops(closed.plan) == ["recv", "send", "recv", "send"]


def test_what_nobody_feeds_is_received() -> None:
    w = Writer(PS)
    w.send(w.recv(0, CLIENT, FEW), 1, CLIENT)
    closed = close(w.plan(), ())
    assert (closed.fed, closed.fetched, ops(closed.plan)) == ((), (1,), ["recv"])


def test_a_plan_that_has_feeds_and_fetches_of_its_own_stays_as_it_is() -> None:
    plan = Plan(PS, (), (PlanFeed("x", FEW),), (0,))
    assert close(plan, GIVEN) == ClosedPlan(plan, (), ())
