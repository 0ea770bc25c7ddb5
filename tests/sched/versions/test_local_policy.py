"""What `LocalSteps` decides, by itself: as the policy inside it, with a grace, and weights by samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest

import flowrt as fr
from flowrt.sched.policies import policy_from_data, policy_to_data
from flowrt.train import AllOf, Close, Deadline, FirstOf, LocalSteps, Offer, Policy, Record, WaitUntil


def offers(*seconds: float, samples: Sequence[int] = ()) -> list[Offer]:
    counts = samples or [0] * len(seconds)
    return [Offer(replica, at, samples=count) for replica, (at, count) in enumerate(zip(seconds, counts, strict=True))]


@pytest.mark.parametrize("inner", [AllOf(), FirstOf(2), Deadline(2.0), Deadline(2.0, at_least=2)], ids=str)
@pytest.mark.parametrize("now", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("able", [(), (2,), (2, 3)])
def test_without_a_grace_it_decides_as_the_policy_inside(inner: Policy, now: float, able: tuple[int, ...]) -> None:
    there = offers(0.5, 1.0)
    assert LocalSteps(4, inner).decide(there, able, now) == inner.decide(there, able, now)
    assert LocalSteps(4, inner).least(4) == inner.least(4)


def test_others_have_their_grace_from_when_there_are_enough_and_then_all_that_came_count() -> None:
    policy = LocalSteps(4, FirstOf(2), grace=0.5)
    assert policy.decide(offers(0.5), (1, 2, 3), 0.5) == WaitUntil(offers=2)
    assert policy.decide(offers(0.5, 1.0), (2, 3), 1.0) == WaitUntil(1.5, 4)
    assert policy.decide(offers(0.5, 1.0, 1.3), (3,), 1.3) == WaitUntil(1.5, 4)
    assert policy.decide(offers(0.5, 1.0), (2, 3), 1.499) == WaitUntil(1.5, 4)
    closed = policy.decide(offers(0.5, 1.0, 1.3), (3,), 1.5)
    assert closed == Close((0, 1, 2), "the first 2 are there, and 1 within the grace")


def test_nobody_is_waited_for_when_nobody_can_come() -> None:
    policy = LocalSteps(4, FirstOf(2), grace=60.0)
    assert policy.decide(offers(0.5, 1.0, 1.1), (), 1.1) == Close(
        (0, 1, 2), "the first 2 are there, and 1 within the grace"
    )


def test_a_grace_begins_when_a_deadline_inside_passes_though_nobody_came_then() -> None:
    policy = LocalSteps(4, Deadline(2.0), grace=0.5)
    assert policy.decide(offers(0.5, 1.0), (2,), 1.0) == WaitUntil(2.0, 3)
    assert policy.decide(offers(0.5, 1.0), (2,), 2.1) == WaitUntil(2.5, 3)
    assert isinstance(policy.decide(offers(0.5, 1.0), (2,), 2.5), Close)
    assert policy.decide(offers(3.0), (2,), 3.0) == WaitUntil(3.5, 2)  # it came after the deadline


def test_a_policy_inside_that_closes_at_no_time_that_it_named_is_not_waited_for_without_end() -> None:
    @dataclass(frozen=True)
    class Whimsical(Policy):
        def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
            return Close((0,)) if now > 2.0 else WaitUntil()

    policy = LocalSteps(4, Whimsical(), grace=0.5)
    assert policy.decide(offers(1.0), (1,), 2.0) == WaitUntil()
    assert isinstance(policy.decide(offers(1.0), (1,), 2.1), Close)


def test_a_policy_inside_that_names_the_time_that_it_is_again_and_again_is_not_asked_without_end() -> None:
    @dataclass(frozen=True)
    class Stubborn(Policy):
        def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
            return Close((0,)) if now > 2.0 else WaitUntil(1.0)

    assert isinstance(LocalSteps(4, Stubborn(), grace=0.5).decide(offers(1.0), (1,), 2.5), Close)


@pytest.mark.parametrize(
    ("samples", "weights"),
    [((8, 8), None), ((10, 30), (0.25, 0.75)), ((0, 8), None), ((0, 0), None), ((5,), None)],
)
def test_weights_are_shares_of_the_samples(samples: tuple[int, ...], weights: Any) -> None:
    assert LocalSteps(4).weights(offers(*[1.0] * len(samples), samples=samples)) == weights


def test_a_policy_inside_that_learns_goes_on_learning() -> None:
    @dataclass(frozen=True)
    class Counting(Policy):
        versions: int = 0

        def after(self, record: Record) -> Policy:
            return Counting(self.versions + 1)

        def prepare(self) -> None:
            raise ValueError("prepared")

    policy = LocalSteps(4, Counting(), grace=0.5)
    with pytest.raises(ValueError, match="prepared"):
        policy.prepare()
    assert policy.after(Record((), (), (), 1.0, 1.0)) == LocalSteps(4, Counting(1), grace=0.5)
    assert not policy.measures


def test_it_travels_without_the_outer_optimiser_which_only_the_client_needs() -> None:
    policy = LocalSteps(4, FirstOf(2), outer=fr.optim.SGD(1.0), grace=0.5, overlap=1)
    assert policy_from_data(policy_to_data(policy)) == LocalSteps(4, FirstOf(2), grace=0.5, overlap=1)


def test_a_step_at_a_time_is_allowed_and_replicas_wait_unless_told_to_overlap() -> None:
    assert (LocalSteps(1).overlap, LocalSteps(1).grace) == (0, 0.0)


@dataclass(frozen=True)
class Stale(Policy):
    @property
    def staleness(self) -> int:
        return 2


WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"k": k}, "a number of steps, 1 or more") for k in (0, -1, 2.0, True)),
    *(({"k": 2, "policy": p}, "whose updates make a version") for p in (AllOf, 3, LocalSteps(2))),
    ({"k": 2, "policy": Stale()}, "counts updates of older versions.*AllOf"),
    *(({"k": 2, "grace": grace}, "grace is a finite number of seconds") for grace in (-1.0, nan, inf, "1", True)),
    *(
        ({"k": 2, "overlap": steps}, "overlap is a number of steps, 0 or more and fewer")
        for steps in (-1, 2, 0.5, True)
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_what_makes_no_sense_is_refused_where_it_is_written(given: dict[str, Any], message: str) -> None:
    with pytest.raises(fr.GraphError, match=rf"test_local_policy.py:\d+: LocalSteps\(.*{message}"):
        LocalSteps(**given)


def test_an_outer_optimiser_that_is_none_is_refused() -> None:
    inputs = {"x": fr.Spec("float32", (None,))}
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"test_local_policy.*outer is an optimiser.*not 0.7"):
        fr.train.Replicated(lambda given: fr.mean(given["x"]), inputs, fr.optim.SGD(0.1), 2, LocalSteps(2, outer=0.7))
