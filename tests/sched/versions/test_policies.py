"""What policies decide, how they are asked, and how they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from flowrt.base import codec
from flowrt.base.errors import GraphError
from flowrt.sched.policies import asking, fixed_size, policy, policy_from_data, policy_to_data
from flowrt.sched.policies.policy import Record
from flowrt.train import (
    Adaptive,
    AllOf,
    BoundedStaleness,
    Close,
    Deadline,
    FirstOf,
    LocalSteps,
    Offer,
    Policy,
    WaitUntil,
)


def offers(*replicas: int) -> tuple[Offer, ...]:
    """These have offered, in this order, at 0.1 s, 0.2 s, …"""
    return tuple(Offer(replica, 0.1 * (place + 1)) for place, replica in enumerate(replicas))


# ── the family ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_of_closes_when_nobody_else_can_come() -> None:
    policy = AllOf()
    assert policy.decide((), (), 0.0) == WaitUntil()
    assert policy.decide(offers(2, 0), (1,), 9.0) == WaitUntil()
    assert policy.decide(offers(2, 0, 1), (), 9.0) == Close((2, 0, 1), "all are there")
    assert (policy.least(3), policy.size(3)) == (3, 3)


def test_first_of_closes_with_the_first() -> None:
    policy = FirstOf(2)
    assert policy.decide(offers(2), (0, 1), 9.0) == WaitUntil(offers=2)
    assert policy.decide(offers(2, 0), (1,), 0.0) == Close((2, 0), "the first 2 are there")
    assert policy.decide(offers(2, 1, 0), (), 0.0) == Close((2, 1), "the first 2 are there")
    assert (policy.least(2), policy.size(3)) == (2, 2)


@pytest.mark.parametrize("updates", [True, 2.0, None, 0, -1])
def test_first_of_is_of_a_number_of_updates(updates: Any) -> None:
    with pytest.raises(GraphError, match=r"test_policies.py:\d+: FirstOf\(.*1 or more, such as FirstOf\(3\)"):
        FirstOf(updates)


def test_a_deadline_closes_with_what_is_there_when_it_is_time_or_nobody_else_can_come() -> None:
    policy = Deadline(0.5, at_least=2)
    assert policy.decide(offers(3), (0, 1, 2), 0.7) == WaitUntil(offers=2)
    assert policy.decide(offers(3), (), 0.7) == WaitUntil(offers=2)
    assert policy.decide(offers(3, 1), (0, 2), 0.4) == WaitUntil(0.5, 4)
    assert policy.decide(offers(3, 1), (0, 2), 0.5) == Close((3, 1), "2 are there after 0.5 s")
    assert policy.decide(offers(3, 1, 0), (2,), 0.6) == Close((3, 1, 0), "3 are there after 0.5 s")
    assert policy.decide(offers(3, 1), (), 0.1) == Close((3, 1), "nobody else can come")
    assert (policy.least(2), policy.size(4), Deadline(1).least(3)) == (2, None, 1)


@pytest.mark.parametrize("seconds", [nan, inf, -inf, -1.0, 0.0, 0, True, "1", None])
def test_a_deadline_that_is_no_time_is_an_error_at_the_line_that_made_it(seconds: Any) -> None:
    with pytest.raises(GraphError, match=r"test_policies.py:\d+: Deadline\(.*at_least=1\): (expected|a step ends)"):
        Deadline(seconds)


@pytest.mark.parametrize("at_least", [0, -1, 1.0, True, None])
def test_a_deadline_needs_at_least_one_update(at_least: Any) -> None:
    with pytest.raises(GraphError, match=r"test_policies.py:\d+: Deadline\(1.0, .*use at_least=1 or more"):
        Deadline(1.0, at_least)


def test_a_deadline_that_waits_for_more_replicas_than_there_are_can_never_be_met() -> None:
    with pytest.raises(GraphError, match="of 2 replicas can never be met; use at_least=2 or fewer, or replicas=3"):
        Deadline(1.0, 3).least(2)


def test_sets_are_combined_where_their_size_or_weights_differ() -> None:
    assert (fixed_size(AllOf(), 3), fixed_size(Deadline(1.0), 3), fixed_size(Weighing((1.0,)), 3)) == (3, None, None)


# ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Answering(Policy):
    """Answers what it was made with, or raises it."""

    answer: Any

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def least(self, replicas: int) -> int:
        return 2


@dataclass(frozen=True)
class Weighing(Policy):
    answer: Any

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return Close(tuple(offer.replica for offer in offers))

    def weights(self, kept: Sequence[Offer]) -> Any:
        return self.answer

    def size(self, replicas: int) -> int:
        return 2


@dataclass(frozen=True)
class Following(Policy):
    following: Any

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return Close(tuple(offer.replica for offer in offers))

    def after(self, record: Record) -> Any:
        return self.following


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Close((0, 3)), r"closed with replica 3, which has not offered; choose among \[2, 0, 1\]"),
        (Close((0, "1")), "closed with replica '1', which has not offered"),
        (Close(()), r"a set has at least one update: answer Close\(\(replica, ...\), 'why'\)"),
        (Close(None), "a set has at least one update"),  # type: ignore[arg-type]
        (Close(2), "a set has at least one update"),  # type: ignore[arg-type]
        (Close((0, 1), 5), "a set has at least one update"),  # type: ignore[arg-type]
        (Close((0, 1, 0)), r"closed with \[0, 1, 0\]; name each replica once"),
        (Close((0,)), "closed with 1 updates of 4 replicas, where least says 2 or more"),
        (WaitUntil(nan), r"WaitUntil\(seconds=nan, offers=0\); seconds is a time since the version was opened"),
        (WaitUntil(True), "seconds is a time"),
        (WaitUntil("soon"), "seconds is a time"),  # type: ignore[arg-type]
        (WaitUntil(offers=1.5), "offers is a number of updates, an int"),  # type: ignore[arg-type]
        (WaitUntil(offers=True), "offers is a number of updates, an int"),
        (None, r"decide answered None; answer Close\(replicas\) or WaitUntil\(seconds\)"),
        ((0, 1), "answer Close"),
        (ZeroDivisionError("0 / 0"), "failed in decide: ZeroDivisionError: 0 / 0"),
    ],
)
def test_a_policy_that_answers_nonsense_is_told_where_and_what_is_wanted(answer: Any, message: str) -> None:
    with pytest.raises(GraphError, match=rf"test_policies.py:\d+: Answering\(.*{message}"):
        asking.decide(Answering(answer), 4, offers(2, 0, 1), (3,), 0.5)


@pytest.mark.parametrize("answer", [Close((1, 2)), Close([0, 1]), WaitUntil(-1.0), WaitUntil(-inf), WaitUntil(3, -7)])  # type: ignore[arg-type]
def test_what_makes_sense_is_answered_as_it_is(answer: Any) -> None:
    assert asking.decide(Answering(answer), 4, offers(2, 0, 1), (3,), 0.5) is answer


@pytest.mark.parametrize("answer", [WaitUntil(), WaitUntil(0.5), WaitUntil(-1.0, 4), WaitUntil(offers=9)])
def test_a_policy_that_waits_for_more_than_there_can_be_is_told_to_close(answer: WaitUntil) -> None:
    with pytest.raises(GraphError, match="when all 3 had offered; nobody else can come: close"):
        asking.decide(Answering(answer), 3, offers(2, 0, 1), (), 0.5)
    assert asking.decide(Answering(answer), 4, offers(2, 0, 1), (), 0.5) is answer, "who is lost may be spared or not"
    later = WaitUntil(0.6)
    assert asking.decide(Answering(later), 3, offers(2, 0, 1), (), 0.5) is later


def test_a_policy_says_how_many_updates_its_sets_have_and_holds_to_it() -> None:
    with pytest.raises(GraphError, match="closed with 3 updates of 3 replicas, where size says 2"):
        asking.decide(Weighing(None), 3, offers(2, 0, 1), (), 0.5)


@pytest.mark.parametrize("answer", [(1.0,), [1.0, 2.0], (1.0, nan), (1.0, inf), (1.0, "2"), 3.0])
def test_weights_are_a_finite_number_for_each_update(answer: Any) -> None:
    with pytest.raises(GraphError, match=r"test_policies.py:\d+: Weighing.*answer a finite number for each, or None"):
        asking.weights(Weighing(answer), offers(0, 1))


def test_weights_are_floats_or_none_for_the_mean() -> None:
    assert asking.weights(Weighing((1, 0.5)), offers(0, 1)) == (1.0, 0.5)
    assert asking.weights(Weighing(None), offers(0, 1)) is None
    assert asking.weights(FirstOf(1), offers(0)) is None


RECORD = Record(offers(1, 0), (0, 1), (), 1.0, 0.5)


def test_a_policy_that_learns_answers_the_policy_of_the_next_version() -> None:
    assert (asking.learns(AllOf()), asking.learns(Following(AllOf()))) == (False, True)
    assert asking.after(Following(Deadline(1.0)), RECORD, 2) == Deadline(1.0)
    with pytest.raises(GraphError, match="after answered 5; answer the policy of the next version"):
        asking.after(Following(5), RECORD, 2)
    with pytest.raises(GraphError, match="whose sets are of another size"):
        asking.after(Following(AllOf()), RECORD, 2)


def test_updates_are_told_together_that_are_too_few_for_a_policy_to_look_at() -> None:
    assert [asking.together(policy, 4) for policy in (AllOf(), FirstOf(3), Deadline(1.0, at_least=2))] == [4, 3, 1]
    assert asking.together(Following(FirstOf(3)), 4) == 1, "what a program made of one may look at any"
    assert [asking.together(policy, 4, floor=2) for policy in (AllOf(), FirstOf(2))] == [2, 2]


def test_the_fewest_replicas_that_can_meet_a_policy_are_looked_for_upwards() -> None:
    assert asking.fewest(FirstOf(2), 1, 4) == 2
    assert asking.fewest(FirstOf(2), 3, 4) == 3
    assert asking.fewest(Deadline(1.0, at_least=4), 1, 4) == 4
    with pytest.raises(GraphError, match="FirstOf"):
        asking.fewest(FirstOf(5), 1, 4)


@dataclass(frozen=True)
class Preparing(Deadline):
    done: list[str] = field(default_factory=list)

    def prepare(self) -> None:
        self.done.append("prepared")
        if len(self.done) == 2:
            raise ValueError("twice")


def test_a_policy_that_prepares_is_had_to_and_a_mistake_in_it_is_told_with_its_line() -> None:
    made = Preparing(1.0)
    assert (asking.prepares(made), asking.prepares(AllOf())) == (True, False)
    asking.prepare(made)
    assert made.done == ["prepared"]
    line = Preparing.prepare.__code__.co_firstlineno + 3
    with pytest.raises(
        GraphError, match=rf"test_policies.py:{line}: Preparing\(.*failed in prepare: ValueError: twice"
    ):
        asking.prepare(made)


# ── travelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Nested(Policy):
    inner: Policy
    numbers: tuple[float, ...] = (1.0, 2.0)
    name: str = "a"

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return self.inner.decide(offers, able, now)


@pytest.mark.parametrize(
    "made", [AllOf(), FirstOf(3), Deadline(0.5, 2), Nested(Nested(FirstOf(1)), (), "b"), Answering(None)]
)
def test_a_policy_arrives_as_it_left(made: Policy) -> None:
    packed = codec.pack(policy_to_data(made))
    assert policy_from_data(codec.unpack(packed)) == made


def test_numbers_of_numpy_are_taken_and_travel() -> None:
    two: Any = np.int64(2)
    for made, same in (
        (FirstOf(two), FirstOf(2)),
        (Deadline(0.5, two), Deadline(0.5, 2)),
        (Adaptive(at_least=two), Adaptive(at_least=2)),
        (BoundedStaleness(two), BoundedStaleness(2)),
        (LocalSteps(two, overlap=two - 1), LocalSteps(2, overlap=1)),
    ):
        assert policy_from_data(codec.unpack(codec.pack(policy_to_data(made)))) == same


@pytest.mark.parametrize("made", [5, "AllOf", None, lambda offers, able, now: None])
def test_what_is_no_policy_is_refused_where_it_was_given(made: Any) -> None:
    with pytest.raises(
        GraphError, match=r"test_policies.py:\d+: .* is not a policy; use one such as fr.train.AllOf\(\)"
    ):
        policy_to_data(made)


def test_a_class_of_policies_is_told_to_be_made() -> None:
    with pytest.raises(GraphError, match=r"is not a policy; use one such as fr.train.AllOf\(\)"):
        policy_to_data(AllOf)


@dataclass(frozen=True)
class Remembering(Policy):
    number: int = 1
    derived: int = field(init=False, default=5)
    here: Any = field(default=None, metadata={"travels": False})


def test_what_is_derived_or_stays_at_home_does_not_travel() -> None:
    assert policy_to_data(Remembering(2, object())) == {"class": "Remembering", "number": 2}


def test_what_a_policy_does_not_say_means_what_it_says_in_the_base() -> None:
    plain = Remembering()
    assert (plain.least(3), plain.size(3), plain.weights(offers(1))) == (1, None, None)
    assert (plain.staleness, plain.measures, plain.after(RECORD)) == (0, False, plain)
    assert (Offer(1, 0.5).staleness, Offer(1, 0.5).samples, WaitUntil().offers) == (0, 0, 0)
    with pytest.raises(NotImplementedError, match=r"Remembering has no decide\(offers, able, now\)"):
        plain.decide((), (), 0.0)


def unfrozen() -> Policy:
    @dataclass
    class Unfrozen(Policy):
        pass

    return Unfrozen()


def plain() -> Policy:
    class Plain(Policy):
        pass

    return Plain()


@pytest.mark.parametrize("make", [unfrozen, plain])
def test_a_policy_that_cannot_travel_is_told_to_be_a_frozen_dataclass(make: Callable[[], Policy]) -> None:
    with pytest.raises(
        GraphError, match=r"cannot travel to a node; make it a frozen dataclass, by @dataclass\(frozen="
    ):
        policy_to_data(make())


@pytest.mark.parametrize("value", [[1.0], {1}, object(), (1, [2])])
def test_a_field_that_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(
        GraphError, match=r"test_policies.py:\d+: Answering.answer cannot travel to a node: expected num"
    ):
        policy_to_data(Answering(value))


def test_a_policy_that_is_not_known_says_how_to_bring_it() -> None:
    with pytest.raises(GraphError, match=r"named Elsewhere is not known here; .*--import MODULE.*imports=\[MODULE\]"):
        policy_from_data({"class": "Elsewhere"})


def test_a_policy_that_has_other_fields_here_is_named() -> None:
    with pytest.raises(GraphError, match=r"first_of.py:\d+: FirstOf is another policy here than where it was made"):
        policy_from_data({"class": "FirstOf", "most": 3})


def test_two_policies_of_one_name_are_told_apart_where_the_second_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "known", dict(policy.known))

    def define(name: str, module: str) -> type[Policy]:
        return type(name, (Policy,), {"decide": Answering.decide, "__module__": module, "__qualname__": name})

    with pytest.raises(GraphError, match=r"test_policies.py:\d+: there is a policy named AllOf already, at .*all_of"):
        define("AllOf", "elsewhere")
    for module in ("again", __name__):  # the same file, read again, is the same policy
        assert policy.known["Answering"] is not define("Answering", module)
