"""What of a plan may be put off until somebody asks for it, and for whom it is made."""

from __future__ import annotations

import pytest
from cluster_plans import CLIENT, PS, QUEUE, WORKERS, Writer

from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace
from flowrt.sched.demand import Demands, find_demands
from flowrt.sched.units import connect, find_units

LARGE, SMALL = Spec("float64", (513,)), Spec("float64", (512,))  # more than 4 KiB, and just as much
ONE, OTHER = WORKERS


def demands(writer: Writer, *fetches: int) -> Demands | None:
    plan = replace(writer.plan(), fetches=fetches)
    units = find_units(plan, tapes=False)
    assert [unit.nodes for unit in units] == [(n,) for n in range(len(plan.nodes))]
    return find_demands(plan, units, connect(plan, units).topology)


def held(spec: Spec) -> dict[str, object]:
    return {"resource": "v", "container": "", "dtype": spec.dtype.name, "shape": spec.dims}


def test_what_is_sent_is_made_for_its_send_and_all_that_is_large_of_it_may_wait() -> None:
    w = Writer(PS)
    x = w.recv(0, ONE, LARGE)
    w.send(w.node("add", x, x, out=LARGE), 1, OTHER)
    found = demands(w)
    assert found is not None
    goal = found.goals[2]
    assert (goal.makes, goal.receives, goal.waits) == ((0, 1), (0,), ())
    assert goal.node is not None
    assert goal.node.op == "send"
    assert found.made_for == {0: (2,), 1: (2,)}
    assert found.sizes == {0: LARGE.nbytes, 1: LARGE.nbytes}


def test_what_is_computed_for_a_write_here_does_not_wait_but_what_is_received_for_it_does() -> None:
    w = Writer(PS)
    x = w.recv(0, ONE, LARGE)
    w.node("assign_add", w.node("add", x, x, out=LARGE), **held(LARGE))
    found = demands(w)
    assert found is not None
    assert found.goals[2].node is None
    assert found.made_for == {0: (2,)}


def test_what_is_computed_for_a_send_and_for_a_write_may_wait_for_both() -> None:
    w = Writer(PS)
    x = w.recv(0, ONE, LARGE)
    y = w.node("add", x, x, out=LARGE)
    w.send(y, 1, OTHER)
    w.node("assign_add", y, **held(LARGE))
    found = demands(w)
    assert found is not None
    assert {n: set(goals) for n, goals in found.made_for.items()} == {0: {2, 3}, 1: {2, 3}}


def test_nothing_waits_for_values_of_a_page_or_less_or_is_computed_for_a_write_alone() -> None:
    w = Writer(PS)
    x = w.recv(0, ONE, SMALL)
    w.send(w.node("add", x, x, out=SMALL), 1, OTHER)
    assert demands(w) is None
    w = Writer(PS)
    v = w.node("read_variable", out=LARGE, fresh=False, **held(LARGE))
    w.node("assign_add", w.node("add", v, v, out=LARGE), **held(LARGE) | {"resource": "other"})
    assert demands(w) is None


def test_what_a_client_feeds_is_there_from_the_start() -> None:
    w = Writer(PS)
    one, other = w.recv(0, CLIENT, LARGE), w.recv(1, ONE, LARGE)
    w.send(w.node("add", one, other, out=LARGE), 2, OTHER)
    found = demands(w)
    assert found is not None
    assert found.goals[3].receives == (1,)


def test_what_comes_out_of_a_queue_is_not_put_off_for_it_is_gone_from_there() -> None:
    w = Writer(PS)
    x = w.node("dequeue", out=LARGE, resource="q", container="", capacity=1, dtypes=("float64",), shapes=((513,),))
    w.send(w.node("add", x, x, out=LARGE), 0, OTHER)
    found = demands(w)
    assert found is not None
    assert (found.goals[2].waits, found.goals[2].makes) == ((0,), (1,))
    assert found.made_for == {1: (2,)}


@pytest.mark.parametrize(
    ("op", "spec", "rows"),
    [
        ("enqueue", LARGE, 1),
        ("enqueue_many", LARGE, 513),
        ("enqueue_many", Spec("float64", (None, 513)), 1),
        ("enqueue_many", Spec("float64", None), 1),
    ],
    ids=str,
)
def test_an_enqueue_is_of_as_many_elements_as_is_known(op: str, spec: Spec, rows: int) -> None:
    w = Writer(PS)
    w.node(op, w.recv(0, ONE, spec), resource="q", container="", **QUEUE)
    found = demands(w)
    assert found is not None
    goal = found.goals[1]
    assert goal.node is not None
    assert (goal.node.op, goal.rows) == (op, rows)


def test_an_effect_that_only_waits_for_a_value_names_no_way_that_it_goes() -> None:
    w = Writer(PS)
    w.recv(0, ONE, LARGE)
    w.node("dequeue", out=SMALL, control=(0,), resource="q", container="", **QUEUE)
    found = demands(w)
    assert found is not None
    assert found.goals[1].node is None


def test_what_is_fetched_is_made_for_its_own_sake() -> None:
    w = Writer(PS)
    y = w.node("square", w.recv(0, ONE, LARGE), out=LARGE)
    w.send(w.node("negative", y, out=LARGE), 1, OTHER)
    for fetches, makes in (((), (0, 1, 2)), ((y,), (2,))):
        found = demands(w, *fetches)
        assert found is not None
        assert found.goals[3].makes == makes
