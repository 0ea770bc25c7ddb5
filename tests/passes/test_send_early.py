"""What goes ahead of what waits for the same: only what pays, the most urgent first, and it travels apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pass_world import compiled
from step_world import CLIENT, CLUSTER, everywhere

import flowrt as fr
from flowrt.base.valueclass import replace
from flowrt.passes import Prediction
from flowrt.sched.regions.cost import predict
from flowrt.sched.units import Action, find_units
from flowrt.session.runners import fusible, supports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowrt.base.plan import Plan, PlanNode
    from flowrt.passes import Compiled

HERE, THERE = CLUSTER[0], CLUSTER[2]
SIZE, SMALL = 128, 16  # of matrices; small ones may travel together


def early(fetches: list[Any], targets: Any = (), measured: Mapping[str, float] | None = None, **how: Any) -> Compiled:
    """The step over both nodes; ops take what was ``measured`` of their names, and others no time."""
    prediction = Prediction(lambda op, specs, kind: 0.0, measured or {}, 1e9, 1e-4)
    settings = {
        "devices": (HERE, THERE),
        "default": HERE,
        "client": CLIENT,
        "prediction": prediction,
        "supports": supports,
    } | how
    return compiled(fetches, targets, **settings)


def sends(made: Compiled, device: Any = HERE) -> dict[str, int]:
    """The leads of what a task sends, by the beginnings of the names."""
    nodes = made.plans[device.host].nodes
    return {node.name.partition("/")[0]: node.attrs.get("lead", 0) for node in nodes if node.op == "send"}


def tapes(plan: Plan) -> list[list[str]]:
    units = [unit for unit in find_units(plan) if unit.action is Action.TAPE]
    return [[plan.nodes[n].name for n in unit.nodes if plan.nodes[n].op != "constant"] for unit in units]


def two_ends() -> tuple[Any, Any]:
    """What waits on the other node for a value that is made first, and what is made here besides."""
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((SIZE, SIZE), np.float32), name="x")
            sent = fr.matmul(x, x, name="sent")
            other = fr.matmul(sent, x, name="other")
        with fr.device(str(THERE)):
            far = fr.matmul(sent, sent, name="far")
    return far, other


@pytest.mark.parametrize(
    ("other", "far", "lead"), [(5e-3, 5e-3, 1), (5e-3, 0.0, 0), (0.0, 5e-3, 0), (9e-4, 5e-3, 0), (5e-3, 5e-4, 0)]
)
def test_a_value_goes_ahead_where_it_is_held_up_and_awaited(other: float, far: float, lead: int) -> None:
    made = early([*two_ends()], measured={"other": other, "far": far})
    assert sends(made)["sent"] == lead
    assert len(tapes(made.plans[HERE.host])) == 1 + lead
    assert ("send_early: µs behind sent 5000" in map(str, made.report)) == bool(lead)


def test_nothing_goes_ahead_without_a_prediction_or_where_nodes_run_one_by_one() -> None:
    for how in ({"prediction": None}, {"regions": False}, {"optimize": False}):
        assert sends(early([*two_ends()], measured={"*": 1.0}, **how))["sent"] == 0


def test_what_is_computed_along_with_others_holds_nothing_up() -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones(1 << 20, np.float32), name="x")
            sent = fr.sum(x, name="sent")
            other = fr.tanh(x * 2.0, name="other")
        with fr.device(str(THERE)):
            far = fr.sqrt(sent, name="far")
    slow = Prediction(lambda op, specs, kind: 1.0, {"far": 1.0}, 1e9, 1e-4)
    leads = [max(sends(early([far], [other.op], prediction=slow, fusible=each)).values()) for each in (None, fusible)]
    assert leads == [1, 0]


def test_the_most_urgent_goes_first_and_what_is_about_alike_as_it_stands() -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((SIZE, SIZE), np.float32), name="x")
            made = [fr.matmul(x, x, transpose_a=n % 2 == 1, name=f"made{n}") for n in range(2)]
            last = fr.matmul(made[0], made[1], name="made2")
            rest = fr.matmul(last, x, name="rest")
        with fr.device(str(THERE)):
            ends = [fr.matmul(value, value, name=f"far{n}") for n, value in enumerate([*made, last])]
    measured = {"made*": 5e-3, "rest": 5e-3, "far0": 5e-3, "far1": 5.1e-3, "far2": 6e-3}
    assert sends(early([*ends, rest], measured=measured)) == _numbered(3, 2, 1)
    assert sends(early([*ends, rest], measured=measured | {"far1": 5e-2})) == _numbered(2, 3, 1)
    assert sends(early([*ends, rest], measured=measured | {"far2": 5e-2})) == _numbered(1, 1, 1)


def _numbered(*leads: int) -> dict[str, int]:
    return {f"made{n}": lead for n, lead in enumerate(leads)} | {"rest": 0}


def test_a_region_comes_in_a_bounded_number_of_parts() -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((SIZE, SIZE), np.float32), name="x")
            made = [fr.matmul(x, x, name="made0")]
            for n in range(1, 60):
                made.append(fr.matmul(made[-1], x, name=f"made{n}"))
        with fr.device(str(THERE)):
            ends = [fr.matmul(value, value, name=f"far{n}") for n, value in enumerate(made)]
    found = early(ends, measured={"*": 1.0})
    assert 8 <= len(tapes(found.plans[HERE.host])) <= 16
    leads = [sends(found)[f"made{n}"] for n in range(60)]
    assert leads == sorted(leads, reverse=True)


@pytest.mark.parametrize(("size", "lead"), [(64, 1), (4096, 0)])
def test_a_variable_that_both_sides_read_would_be_copied(size: int, lead: int) -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((size, size), np.float32), name="x")
            sent = fr.matmul(x, x, name="sent")
            other = fr.matmul(sent, x, name="other")
        with fr.device(str(THERE)):
            far = fr.matmul(sent, sent, name="far")
    made = early([far], [other.op], measured={"other": 3e-3, "far": 3e-3})
    assert sends(made)["sent"] == lead


@pytest.mark.parametrize(("count", "lead"), [(1, 0), (2, 1)])
def test_several_values_go_ahead_where_it_takes_long_to_send_them_all(count: int, lead: int) -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((400, 400), np.float32), name="x")  # 0.64 ms of the way
            made = [fr.matmul(x, x, transpose_a=n == 1, name=f"sent{n}") for n in range(count)]
            other = fr.matmul(made[-1], made[-1], name="other")
        with fr.device(str(THERE)):
            ends = [fr.sum(value, name=f"far{n}") for n, value in enumerate(made)]
    found = sends(early(ends, [other.op], measured={"other": 5e-3}))
    assert found == {f"sent{n}": lead for n in range(count)}


def test_what_is_added_to_a_variable_comes_later_than_what_is_sent() -> None:
    far, updates = _training(lambda w, gradient: w.assign_sub(gradient))
    made = early([far], updates, measured={"*": 1e-2}, fusible=fusible)
    first, second = tapes(made.plans[HERE.host])
    assert "back" in first
    assert second[-1].startswith("update")
    assert [node.op for node in made.plans[HERE.host].nodes if node.name == second[-1]] == ["assign_sub"]


def test_what_replaces_a_variable_stays_with_what_reads_it() -> None:
    far, updates = _training(lambda w, gradient: w.assign(w - gradient))
    made = early([far], updates, measured={"*": 1e-2}, fusible=fusible)
    assert sends(made)["back"] == 0
    assert len(tapes(made.plans[HERE.host])) == 1


def _training(write: Any) -> tuple[Any, list[Any]]:
    """The last layer of a model: its gradient by what it was given goes back, and it updates its weights."""
    with fr.Graph():
        with fr.device(str(HERE)):
            w = fr.Variable(np.ones((SIZE, SIZE), np.float32), name="w")
            x = fr.Variable(np.ones((SIZE, SIZE), np.float32), name="x")
            made = fr.matmul(x, w, name="forward")
            back = fr.matmul(made, w, transpose_b=True, name="back")
            gradient = fr.matmul(x, made, transpose_a=True, name="gradient")
            with fr.name_scope("update"):
                update = write(w, gradient)
        with fr.device(str(THERE)):
            far = fr.matmul(back, back, name="far")
    return far, [update]


def test_what_goes_ahead_travels_apart_from_what_comes_later() -> None:
    with fr.Graph():
        with fr.device(str(HERE)):
            x = fr.Variable(np.ones((SMALL, SMALL), np.float32), name="x")
            made = [fr.matmul(x, x, transpose_a=n % 2 == 1, name=f"made{n}") for n in range(2)]
            late = [fr.matmul(made[0], made[1], transpose_a=n % 2 == 1, name=f"late{n}") for n in range(2)]
        with fr.device(str(THERE)):
            ends = [fr.matmul(value, value, name=f"far_{value.op.name}") for value in (*made, *late)]
    bundles = {True: _sent(early(ends, measured={"far_made*": 5e-3, "late*": 5e-3}))}
    bundles[False] = _sent(early(ends))
    assert [len(found) for found in (bundles[True], bundles[False])] == [2, 1]
    assert [node.attrs.get("lead", 0) for node in bundles[True]] == [1, 0]


def _sent(made: Compiled) -> list[PlanNode]:
    return [n for n in made.plans[HERE.host].nodes if n.op == "send" and n.attrs["peer"] == THERE.host]


def test_what_is_fetched_goes_ahead_only_where_its_way_is_long() -> None:
    leads = []
    for size in (64, 2048):
        with fr.Graph(), fr.device(str(HERE)):
            x = fr.Variable(np.ones((size, size), np.float32), name="x")
            sent = fr.matmul(x, x, name="sent")
            other = fr.matmul(sent, sent, name="other")
        leads.append(sends(early([sent], [other.op], measured={"other": 1.0}))["sent"])
    assert leads == [0, 1]


def test_towers_that_meet_send_back_what_the_other_waits_for() -> None:
    """The gradient at their meeting is made at once; what one tower does with it must not hold up the other."""
    with fr.Graph():
        ends = []
        for number, device in enumerate((HERE, THERE)):
            with fr.device(str(device)):
                h: Any = fr.Variable(np.ones((128, 512), np.float32), name=f"x{number}", trainable=False)
                for layer in range(3):
                    w = fr.Variable(np.ones((512, 512), np.float32), name=f"tower{number}/w{layer}")
                    h = fr.tanh(h @ w)
                ends.append(fr.mean(h))
        with fr.device(str(HERE)):
            loss = fr.square(fr.add_n(ends) - 1)
            train = fr.optim.SGD(0.1).minimize(loss)
    guessed = Prediction(lambda op, specs, kind: predict(op, specs), {}, 1e9, 1e-4)
    made = early([loss], [train], prediction=guessed, fusible=fusible)
    leading = [node for plan in made.plans.values() for node in plan.nodes if node.attrs.get("lead")]
    assert THERE.host in [node.attrs["peer"] for node in leading]
    assert [len(tapes(made.plans[device.host])) for device in (HERE, THERE)] == [3, 2]


@pytest.mark.parametrize(("written", "lead"), [(False, 1), (True, 0)])
def test_what_is_made_on_a_device_goes_ahead_and_variables_are_copied_there_where_they_are_written(
    written: bool, lead: int
) -> None:
    devices = [replace(device, kind="arena", index=0) for device in (HERE, THERE)]
    with fr.Graph():
        with fr.device(str(devices[0])):
            x = fr.Variable(np.ones((4096, 4096), np.float32), name="x")
            sent = fr.matmul(x, x, name="sent")
            other = fr.matmul(sent, x, name="other")
            added = [x.assign_add(other)] if written else [other.op]
        with fr.device(str(devices[1])):
            far = fr.matmul(sent, sent, name="far")
    made = early(
        [far], added, measured={"other": 3e-3, "far": 3e-3}, devices=(HERE, THERE, *devices), supports=everywhere
    )
    assert max(node.attrs.get("lead", 0) for node in made.plans[HERE.host].nodes if node.op == "send") == lead
