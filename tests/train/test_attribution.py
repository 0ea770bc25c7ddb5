"""Who is slow, and why, as reports tell it: trainings that never were, with times that the test makes up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attribution_world import SKEW, Step, Training, named, report

from flowrt.sched.drivers.messages import Doing, Pending
from flowrt.sched.replica.stopwatch import Phase
from flowrt.train import attribution
from flowrt.train.attribution import Attribution
from flowrt.train.diagnosis import Medians, judge, middle, middles_of_others
from flowrt.train.times import Clocks, away, medians, tables, times_of

FAULTS: dict[str, Step] = {
    "input": Step(input=0.05),
    "link": Step(pull=0.04),
    "compute": Step(compute=0.06),
    "frozen": Step(compute=0.06, held=0.05),
}


def only(slow: Step, *replicas: int) -> Callable[[int], Step]:
    return lambda replica: slow if replica in replicas else Step()


@pytest.mark.parametrize("take", [4, 3])
@pytest.mark.parametrize("cause", FAULTS)
def test_a_replica_that_becomes_slow_is_named_with_its_cause_within_three_seconds(cause: str, take: int) -> None:
    training = Training(take=take)
    assert training.go(10.0) == ()
    began = training.now
    (slow,) = training.go(3.0, only(FAULTS[cause], 2))
    assert (slow.replica, slow.cause, slow.helps) == (2, cause, True)
    assert 4 < slow.factor < 8
    assert training.said[0][0] - began < 2.0
    assert ("as its node stands still at times" if cause == "frozen" else f"by its {cause}") in str(slow)


@pytest.mark.parametrize("cause", FAULTS)
def test_one_that_is_slow_from_the_beginning_is_named_by_comparison_with_the_others(cause: str) -> None:
    assert named(Training().go(3.0, only(FAULTS[cause], 0))) == {(0, cause)}


def test_two_that_are_slow_for_different_causes_are_both_named() -> None:
    training = Training(replicas=6)
    training.go(5.0)
    steps = {1: FAULTS["input"], 4: FAULTS["compute"]}
    assert named(training.go(3.0, lambda replica: steps.get(replica, Step()))) == {(1, "input"), (4, "compute")}


def test_a_replica_that_is_as_fast_as_usual_again_is_forgotten() -> None:
    training = Training()
    training.go(5.0)
    assert training.go(3.0, only(FAULTS["compute"], 1))
    assert training.go(3.0) == ()
    assert [bool(slow) for _, slow in training.said if named(slow) in (set(), {(1, "compute")})][-1] is False


def test_who_becomes_slow_little_by_little_is_named() -> None:
    training = Training()
    training.go(5.0)
    for tenth in range(40):
        training.go(0.5, only(Step(compute=0.01 * (1 + tenth / 10)), 3))
    assert named(training.attribution.slow) == {(3, "compute")}


def test_a_server_that_becomes_slow_is_named_little_by_little_too_and_dropping_will_not_help() -> None:
    training = Training()
    training.go(20.0)
    for tenth in range(30):
        training.server = 0.001 * (1 + tenth)
        training.go(0.5)
    (slow,) = training.attribution.slow
    assert (slow.replica, slow.cause, slow.helps) == (None, "server", False)
    assert "dropping the slow will not help" in str(slow)


@pytest.mark.parametrize("cause", ["input", "link", "compute"])
def test_what_is_slow_for_all_is_named_once_and_nobody_in_particular(cause: str) -> None:
    training = Training()
    training.go(10.0)
    (slow,) = training.go(3.0, lambda replica: FAULTS[cause])
    assert (slow.replica, slow.cause, slow.helps) == (None, cause, False)
    assert "dropping the slow will not help" in str(slow)


@pytest.mark.parametrize("cause", ["input", "link"])
def test_what_is_slow_for_all_from_the_beginning_is_named_where_most_of_a_step_is_nothing_else(cause: str) -> None:
    (slow,) = Training().go(4.0, lambda replica: replace(FAULTS[cause], compute=0.001))
    assert (slow.replica, slow.cause) == (None, cause)


def test_a_server_that_is_slow_from_the_beginning_is_named() -> None:
    (slow,) = Training(server=0.1).go(4.0)
    assert (slow.replica, slow.cause) == (None, "server")


def test_what_holds_one_replica_up_is_nothing_beside_a_server_that_holds_all_up_for_far_longer() -> None:
    training = Training()
    training.server = 0.2
    quick = Step(compute=0.0005)
    found = training.go(5.0, lambda replica: replace(quick, pull=0.006) if replica == 0 else quick)
    assert named(found) == {(None, "server")}


def test_what_holds_one_replica_up_is_nothing_beside_another_that_is_waited_for_far_longer() -> None:
    steps = {1: Step(pull=0.2, compute=0.0005), 2: Step(pull=0.006, compute=0.0005)}
    quick = Step(compute=0.0005)
    assert named(Training().go(5.0, lambda replica: steps.get(replica, quick))) == {(1, "link")}
    assert named(Training(take=3).go(5.0, lambda replica: steps.get(replica, quick))) == {(1, "link"), (2, "link")}


def test_what_holds_all_up_is_nothing_beside_one_that_is_waited_for_far_longer() -> None:
    training = Training()
    training.go(10.0)
    found = training.go(8.0, lambda replica: Step(pull=0.027, compute=1.0 if replica == 1 else Step().compute))
    assert named(found) == {(1, "compute")}


def test_what_is_slow_from_the_beginning_is_compared_with_what_would_not_be_slow() -> None:
    (slow,) = Training().go(4.0, lambda _: Step(pull=0.04, compute=0.001))
    assert slow.usual >= 0.02
    assert slow.factor < 5
    assert Training().go(4.0, lambda _: Step(pull=0.025, compute=0.001)) == ()


def test_a_source_that_holds_the_client_is_input_that_is_slow_for_all() -> None:
    training = Training()
    training.go(5.0)
    training.drawn = 0.1
    (slow,) = training.go(3.0)
    assert (slow.replica, slow.cause, slow.helps) == (None, "input", False)


def test_batches_that_come_one_after_another_are_late_for_all_and_not_for_the_last() -> None:
    training = Training()
    training.go(5.0)
    assert named(training.go(3.0, lambda replica: Step(input=0.02 * (replica + 1)))) == {(None, "input")}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("take", "noise"), [(4, 0.1), (3, 0.1), (4, 0.5), (3, 0.5)])
def test_noise_is_no_cause(seed: int, take: int, noise: float) -> None:
    training = Training(take=take, noise=noise, seed=seed)
    training.go(60.0)
    assert training.said == []


def test_a_replica_whose_towers_are_cut_off_is_named_by_the_one_that_was_spared() -> None:
    training = Training(take=3)
    training.go(5.0)
    count = iter(range(10**6))

    def step(replica: int) -> Step:
        if replica != 1:
            return Step()
        return Step(compute=0.5) if next(count) % 40 == 39 else Step(cut=0.0101)

    (slow,) = training.go(3.0, step)
    assert (slow.replica, slow.cause) == (1, "compute")
    assert slow.factor > 20


def test_a_replica_that_is_always_late_by_a_hair_is_not_slow() -> None:
    training = Training(take=3)
    assert training.go(20.0, only(Step(cut=0.0105), 1)) == ()


def test_one_replica_alone_is_compared_with_its_past() -> None:
    training = Training(replicas=1, take=1)
    training.go(5.0)
    (slow,) = training.go(3.0, only(Step(compute=0.05), 0))
    assert (slow.cause, slow.helps) == ("compute", False)


def test_that_others_became_faster_makes_nobody_slow() -> None:
    past = np.tile([0.0, 0.15, 0.001, 0.0], (3, 1))
    past[0] = (0.0, 0.004, 0.001, 0.0)
    recent = np.tile([0.0, 0.004, 0.001, 0.0], (3, 1))
    nothing = Medians(np.zeros((3, 4)), 0.0, 0.0)
    assert judge(Medians(recent, 0.001, 0.006), Medians(past, 0.001, 0.15), nothing) == ()
    recent[0, 1] = 0.1
    (slow,) = judge(Medians(recent, 0.001, 0.1), Medians(past, 0.001, 0.15), nothing)
    assert (slow.replica, slow.cause, slow.seconds) == (0, "link", 0.1)
    assert slow.usual == pytest.approx(0.004)


def test_slower_hardware_is_named_though_it_was_never_faster_and_usual_differences_are_not() -> None:
    assert named(Training().go(5.0, only(Step(compute=0.03), 0))) == {(0, "compute")}
    assert Training().go(5.0, only(Step(compute=0.013), 0)) == ()


# ── steps that do not end ────────────────────────────────────────────────────────────────────────────────────────────


def doing(replica: int, version: int, phase: Phase, spent: float) -> Doing:
    return Doing(0, replica, (version, phase, 0.0, 0.0, spent, 0.0, 0.0, spent))


def stalled(training: Training, seconds: float, *came: int) -> Pending:
    told = tuple(-1.0 if replica in came else seconds for replica in range(training.replicas))
    return Pending(0, training.version, (seconds, -1.0, -1.0), told, came)


@pytest.mark.parametrize(
    ("phase", "cause"), [(Phase.INPUT, "input"), (Phase.COMPUTE, "compute"), (Phase.PUSH, "link"), (Phase.ROWS, "link")]
)
def test_a_step_that_does_not_end_is_explained_by_what_is_answered_to_probes(phase: Phase, cause: str) -> None:
    training = Training()
    training.go(5.0)
    waits = {r: doing(r, training.version, Phase.POSTED, 2.0) for r in (0, 1, 3)}
    asked = {**waits, 2: doing(2, training.version, phase, 2.0)}
    assert named(training.stall(2.0, asked, stalled(training, 2.0, 0, 1, 3))) == {(2, cause)}


@pytest.mark.parametrize("behind", [0, 1])
def test_an_update_or_a_version_that_does_not_come_is_on_a_slow_link(behind: int) -> None:
    training = Training()
    training.go(5.0)
    asked = {r: doing(r, training.version - behind * (r == 2), Phase.POSTED, 2.0) for r in range(4)}
    assert named(training.stall(2.0, asked, stalled(training, 2.0, 0, 1, 3))) == {(2, "link")}


def test_a_server_that_does_not_apply_what_was_ordered_is_slow() -> None:
    training = Training()
    training.go(5.0)
    pending = Pending(0, training.version, (2.0, 1.99, 1.99), (-1.0,) * 4, (0, 1, 2, 3))
    asked = {r: doing(r, training.version, Phase.POSTED, 2.0) for r in range(4)}
    assert named(training.stall(2.0, asked, pending)) == {(None, "server")}


def test_a_client_that_takes_its_time_makes_nobody_slow() -> None:
    training = Training()
    training.go(5.0)
    pending = Pending(0, training.version, (9.0, 8.9, -1.0), (-1.0,) * 4, (0, 1, 2, 3))
    asked = {r: doing(r, training.version, Phase.POSTED, 9.0) for r in range(4)}
    assert training.stall(9.0, asked, pending) == ()


def test_nodes_that_answer_nothing_are_frozen_and_a_server_that_does_not_is_everybodys() -> None:
    training = Training()
    assert named(training.look(51.0, frozen=[3])) == {(3, "frozen")}, "before anything was reported"
    training.go(5.0)
    (slow,) = training.look(training.now + 0.1, frozen=[1])
    assert (slow.replica, slow.cause, slow.helps, slow.factor) == (1, "frozen", True, math.inf)
    (slow,) = training.look(training.now + 0.2, stopped=True)
    assert (slow.replica, slow.cause, slow.helps) == (None, "server", False)


def test_a_replica_that_is_lost_and_comes_back_is_not_slow() -> None:
    training = Training()
    training.go(5.0)
    training.go(5.0, lambda replica: Step(cut=0.0) if replica == 3 else Step())
    training.go(5.0)
    assert training.said == []


def test_a_new_run_of_a_trainer_is_compared_with_the_one_before() -> None:
    training = Training()
    training.go(10.0)
    training.attribution.again()
    training.go(2.0)
    (slow,) = training.go(3.0, lambda replica: Step(compute=0.05))
    assert (slow.replica, slow.cause) == (None, "compute")


# ── what is kept, and arithmetic ─────────────────────────────────────────────────────────────────────────────────────


def test_parts_add_up_and_clocks_need_not_agree() -> None:
    training = Training(noise=0.0)
    training.go(2.0, lambda replica: Step(input=0.002, pull=0.001, compute=0.01 * (replica + 1), push=0.001))
    records = training.attribution.records()
    for replica in range(4):
        times = medians(records, replica)
        assert times is not None
        found = [times.input, times.pull, times.compute, times.push, times.wait, times.server]
        expected = [0.002, 0.001, 0.01 * (replica + 1), 0.001, 0.01 * (3 - replica), 0.001]
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_way_that_becomes_slower_in_one_direction_is_told_from_the_other() -> None:
    training = Training(noise=0.0)
    training.go(3.0)
    training.go(3.0, only(Step(push=0.02), 1))
    times = medians({name: column[-400:] for name, column in training.attribution.records().items()}, 1)
    assert times is not None
    assert times.push == pytest.approx(0.02, abs=2e-3)
    assert times.pull == pytest.approx(0.0005, abs=2e-3)


def test_a_report_says_how_each_replicas_step_divided() -> None:
    rows = (
        (1, 7, 10.0, Phase.POSTED, SKEW, 1.0, 2.0, SKEW + 3.0, 0.0, 17.0, 17.5),
        (0, 6, 0.0, Phase.COMPUTE, *[2.0] * 7),
        (2, 7, 10.0, Phase.POSTED, 12.0, 1.0, 2.0, 15.0, 0.0, 18.75, 0.0),  # which came in part
    )
    times = times_of(report(7, (10.0, 18.0, 18.5, 19.0), *rows), Clocks(3))
    assert (times[1].version, times[1].input, times[1].compute, times[1].cut) == (7, 1.0, 2.0, False)
    assert (times[1].pull, times[1].push, times[1].wait, times[1].server) == (2.0, 2.0, 1.0, 1.0)
    assert times[1].seconds == 7.0
    assert (times[0].version, times[0].cut, times[0].push, times[0].wait, times[0].server) == (6, True, 0.0, 0.0, 0.0)
    assert (times[2].cut, times[2].wait, times[2].server) == (False, 0.0, 0.0)


@pytest.mark.parametrize("row", [(0.0,) * 3, (9, *[1.0] * 10), (math.nan,) * 11, (-1, *[1.0] * 10)])
def test_what_a_node_made_up_is_left_out(row: tuple[float, ...]) -> None:
    made = Attribution(2)
    for step in range(100):
        made.add(report(step, (1.0, 1.0, 1.0, 1.0), row))
        assert made.look(step / 10) == ()
    assert len(made.records()["replica"]) == 0


def test_numbers_that_are_none_are_no_cause() -> None:
    training = Training()
    training.go(3.0)
    training.go(3.0, only(Step(input=math.nan, compute=math.nan), 1))
    assert training.said == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "ROWS", 500)
    monkeypatch.setattr(attribution, "PAST", 8)
    training = Training()
    training.go(30.0, lambda replica: Step(compute=0.1))
    assert 500 <= len(training.attribution.records()["replica"]) <= 520
    assert 4 <= len(training.attribution._past) <= 8


@pytest.mark.parametrize("seed", range(20))
def test_the_medians_of_all_others_are_those_that_are_looked_for_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for replicas in range(2, 9):
        values = rng.integers(0, 5, (replicas, 7)).astype(float)
        values[rng.random(values.shape) < 0.3] = np.nan
        one_by_one = [middle(values[np.arange(replicas) != replica])[0] for replica in range(replicas)]
        assert np.array_equal(middles_of_others(values), one_by_one, equal_nan=True)


def test_the_median_of_what_was_cut_off_is_kaplan_and_meiers() -> None:
    seconds = np.array([[1.0], [1.0], [1.0], [5.0]])
    assert middle(seconds, None, np.array([[True], [True], [True], [False]])) == (5.0, False)
    assert middle(seconds, None, np.array([[False], [False], [True], [True]])) == (1.0, False)
    assert middle(seconds, None, np.array([[False], [True], [True], [True]])) == (5.0, True)
    assert middle(np.array([[math.nan], [2.0], [3.0]])) == (2.0, False)
    assert np.isnan(middle(np.array([[math.nan]]))[0])
    assert middle(np.array([[1.0], [2.0]]), np.array([1.0, 3.0])) == (2.0, False)


def test_rows_of_no_reports_are_none() -> None:
    no_numbers: tuple[Any, ...] = (None, "a", 1.0, 2.0)
    for reports in ([], [report(3, no_numbers, (0, *[1.0] * 10))]):
        rows, stages = tables(reports, 2)
        assert rows.shape == (0, 11)
        assert stages.shape == (0, 5)


def test_only_what_both_clocks_stamped_tells_of_the_way_and_the_least_is_forgotten_slowly() -> None:
    stages = (0.0, 0.5, 0.6, 0.7)
    early = (0, 3, 0.25, 0.0, 0.5, 0.0, 0.0, 0.625, 0.0, 0.75, 0.0)  # replica, version, told, ..., pulled, ..., ended
    later = (0, 4, 100.25, 0.0, 100.51, 0.0, 0.0, 100.51, 0.0, 100.75, 0.0)
    never = (0, 5, 0.0, 0.0, 0.125, 0.0, 0.0, 9.0, 0.0, 99.0, 0.0)  # told of no version
    strange = [(replica, *early[1:]) for replica in (-1, 2)]
    rows, each = tables([report(3, stages, never, early, later, *strange)], 2)
    assert (len(rows), each[0].tolist()) == (3, [3, *stages])
    clocks = Clocks(2)
    for row in rows:
        clocks.note(row[None])
        found = [float(part[0]) for part in (*clocks.split(row[None]), away(row[None]))]
        wanted = {3: [0.1875, 0.1875, 0.375], 4: [0.2025, 0.2975, 0.5], 5: [math.nan] * 3}[int(row[1])]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_medians_of_waiting_are_of_steps_that_counted_and_all_others_of_all() -> None:
    parts = {part: np.array([9.0, 1.0, 2.0]) for part in ("input", "pull", "compute", "push")}
    about = {"version": np.array([1, 2, 3]), "replica": np.zeros(3, int), "cut": np.array([True, False, False])}
    found = medians({**about, **parts, "wait": np.array([0.0, 4.0, 6.0]), "server": np.array([0.0, 1.0, 1.0])}, 0)
    assert found is not None
    assert (found.version, found.cut) == (3, False)
    assert (found.input, found.pull, found.compute, found.push, found.wait, found.server) == (2, 2, 2, 2, 5, 1)
