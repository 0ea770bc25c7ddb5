"""Simulated runs: what policies come to in virtual time, against naive NumPy; batched events against single ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.valueclass import valueclass
from flowrt.sched.policies import Close, Policy, Record, WaitUntil
from flowrt.sched.versions.batched import held_by, hold_all
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.quorum import Verdict


@valueclass
class Whimsical(Policy):
    """Answers anything that is legal, by a seed and by what it is asked: for schedules that nobody thought of."""

    seed: int
    least_of: int = 1
    measures: bool = False
    learned: tuple[float, ...] = ()

    def decide(self, offers: Any, able: Any, now: float) -> Close | WaitUntil:
        rng = random.Random(repr((self.seed, offers, tuple(able), now, self.learned)))
        if not able or rng.random() < 0.1:
            chosen = rng.sample([offer.replica for offer in offers], rng.randint(self.least_of, len(offers)))
            return Close(tuple(chosen), f"by whim of {self.seed}")
        return WaitUntil(
            rng.choice([float("inf"), now, now + rng.expovariate(3), rng.random()]), rng.randint(0, len(offers) + 3)
        )

    def least(self, replicas: int) -> int:
        return self.least_of

    def after(self, record: Record) -> Policy:
        learned = (*self.learned, record.closed, record.seconds, record.square, *(o.square for o in record.offers))
        return Whimsical(self.seed, self.least_of, self.measures, learned[-20:])


def one_by_one(value: Coordinator, replicas: list[int], times: list[float], square: float) -> Coordinator:
    """What `hold_all` stands for."""
    for replica, now in zip(replicas, times, strict=True):
        while (due := value.due) is not None and due <= now:
            value = value.tick(due)
        for server in range(value.servers):
            value, verdict = value.held(server, value.version, replica, True, now, square)
        if verdict is Verdict.LATE:
            break
    return value


def policies(rng: random.Random, replicas: int) -> Policy:
    least = rng.randint(1, replicas)
    return rng.choice(
        [
            fr.train.AllOf(),
            fr.train.FirstOf(least),
            fr.train.Deadline(rng.choice([0.3, 0.5, 0.8]), least),  # when something may come, too
            Whimsical(rng.getrandbits(30), least),
            Whimsical(rng.getrandbits(30), 1, True),
        ]
    )


@pytest.mark.parametrize("seed", range(150))
def test_updates_held_all_at_once_come_to_what_they_come_to_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    replicas, servers = rng.randint(1, 9), rng.randint(1, 3)
    value = Coordinator.start(policies(rng, replicas), replicas, servers, allowed=100, remember=rng.randint(0, 3))
    there = rng.sample(range(replicas), rng.randint(1, replicas)) if rng.random() < 0.3 else range(replicas)
    for replica in there:
        value = value.ready(replica, 100, 0.0)
    now = 0.0
    for version in range(8):
        order = [replica for replica in rng.sample(range(replicas), replicas) if value.begun(replica)]
        times = sorted(now + round(rng.expovariate(1), rng.choice([1, 9])) for _ in order)  # some at the same time
        square = rng.random()
        single = one_by_one(value, order, times, square)
        value = hold_all(value, order, times, square)
        assert value == single
        while (due := value.due) is not None:
            value = value.tick(due)
        if value.quorum.closed_at is None:
            break  # too few take part
        now = value.quorum.closed_at + rng.random()
        value, _ = value.order(now)
        for server in range(servers):
            value = value.publish(server, version, now, square)


@pytest.mark.parametrize("seed", range(60))
def test_updates_that_one_server_tells_together_come_to_what_they_come_to_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    replicas, servers = rng.randint(1, 6), rng.randint(1, 4)
    value = Coordinator.start(policies(rng, replicas), replicas, servers, allowed=1000)
    for now in range(1, 150):
        for replica in rng.sample(range(replicas), rng.choice([0, replicas])):
            value = value.ready(replica, value.spent[replica] + 1, now)
        some, server = rng.sample(range(replicas), rng.randint(1, replicas)), rng.randrange(servers)
        version, finite = max(0, value.version - (rng.random() < 0.1)), rng.random() < 0.95
        square, samples = rng.random(), [rng.choice([0, 5])] * len(some) if rng.random() < 0.2 else [0] * len(some)
        single = value
        for replica, count in zip(some, samples, strict=True):
            single = single.held(server, version, replica, finite, now, square, count)[0]
        value = held_by(value, server, version, some, finite, now, square, samples)
        assert value == single
        if value.quorum.closed_at is None and value.stuck() is not None:
            value = value.abandon(now)
        if value.quorum.closed_at is not None and rng.random() < 0.5:
            value, _ = value.order(now)
            for each in range(servers):
                value = value.publish(each, value.version, now, square)
    assert value.version > 0


# ── against NumPy ────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(seed: int, steps: int = 60, replicas: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=(steps, replicas))


def test_steps_under_each_policy_take_what_sorting_says() -> None:
    seconds = drawn(1)
    first = np.sort(seconds, axis=1)
    run = {"replicas": 7, "steps": 60, "overhead": 0.25}
    everybody = fr.simulate(fr.train.AllOf(), seconds, **run)
    np.testing.assert_allclose(everybody.seconds, first[:, -1] + 0.25)
    np.testing.assert_array_equal(everybody.kept, 7)
    for m in (1, 4, 6):
        some = fr.simulate(fr.train.FirstOf(m), seconds, **run)
        np.testing.assert_allclose(some.seconds, first[:, m - 1] + 0.25)
        np.testing.assert_array_equal(some.kept, m)
        np.testing.assert_allclose(some.worth, m / (m + 8))
    timed = fr.simulate(fr.train.Deadline(0.8, at_least=2), seconds, **run)
    ends = np.minimum(np.maximum(0.8, first[:, 1]), first[:, -1])
    np.testing.assert_allclose(timed.seconds, ends + 0.25)
    np.testing.assert_array_equal(timed.kept, (seconds <= ends[:, None]).sum(1))


def test_an_array_goes_on_from_its_beginning() -> None:
    found = fr.simulate(fr.train.AllOf(), [[1, 2], [3, 1]], replicas=3, steps=5)
    np.testing.assert_array_equal(found.seconds, [2, 3, 2, 3, 2])
    np.testing.assert_array_equal(fr.simulate(fr.train.FirstOf(1), [[1, 2], [3, 1]], replicas=2, steps=2).seconds, 1)


def test_the_worth_adds_up_to_what_is_asked_for() -> None:
    found = fr.simulate(fr.train.FirstOf(2), 0.5, replicas=4, steps=10, noise_scale=2.0)
    np.testing.assert_array_equal(found.worth, 0.5)
    assert found.seconds_to(0.5) == pytest.approx(0.5)
    assert found.seconds_to(1.25) == pytest.approx(1.5)
    assert found.seconds_to(5.0) == pytest.approx(5.0)
    assert found.seconds_to(10.0) == pytest.approx(10.0)  # at the rate of the whole run


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int, replicas: int = 5) -> np.ndarray:
        return fr.simulate(fr.train.FirstOf(3), "lognormal:1,0.5", replicas=replicas, steps=50, seed=seed).seconds

    np.testing.assert_array_equal(run(4), run(4))
    assert not np.array_equal(run(4), run(5))


def test_delays_are_a_value_a_text_a_number_an_array_or_a_function() -> None:
    asked: list[int] = []

    def uniform(rng: np.random.Generator, step: int) -> Any:
        asked.append(step)
        return rng.uniform(1, 2, 3).tolist()

    run = {"replicas": 3, "steps": 40}
    called = fr.simulate(fr.train.AllOf(), uniform, **run).seconds
    assert asked == list(range(40))
    np.testing.assert_array_equal(called, fr.simulate(fr.train.AllOf(), uniform, **run).seconds)
    np.testing.assert_array_equal(called, fr.simulate(fr.train.AllOf(), "uniform:1,2", **run).seconds)
    np.testing.assert_array_equal(fr.simulate(fr.train.AllOf(), 2, **run).seconds, 2)


def test_delays_strike_where_when_and_whom_they_say() -> None:
    delays = "1 + 3 on 0 during 2:4 + 0.5 at server during 5:6 + 2 at input during 8.5s:20s"
    found = fr.simulate(fr.train.AllOf(), delays, replicas=3, steps=10)
    np.testing.assert_allclose(found.seconds, [1, 1, 4, 4, 3, 3.5, 3, 3, 1, 1])


# ── policies that learn ──────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Witness(Policy):
    """Keeps the first two, and a copy of what it was shown."""

    seen: tuple[Any, ...] = ()
    log: Any = None

    @property
    def measures(self) -> bool:
        return True

    def decide(self, offers: Any, able: Any, now: float) -> Close | WaitUntil:
        return Close(tuple(o.replica for o in offers[:2])) if len(offers) > 1 else WaitUntil()

    def after(self, record: Record) -> Policy:
        self.log.append(record)
        return self


def test_a_policy_is_shown_squares_of_the_noise_scale_that_is_given() -> None:
    log: list[Record] = []
    fr.simulate(Witness((), log), drawn(3), replicas=7, steps=20, overhead=0.5, noise_scale=3.0)
    seconds = np.sort(drawn(3), axis=1)
    for step, record in enumerate(log):
        assert [offer.square for offer in record.offers] == [4.0] * len(record.offers)
        assert record.square == 1 + 3.0 / 2
        assert record.closed == pytest.approx(seconds[step, 1])
        assert record.seconds == pytest.approx(seconds[step, 1] + 0.5)
        assert len(record.offers) + len(record.missing) == 7
        assert all(late == pytest.approx(record.closed) for _, late in record.missing)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Never(Policy):
    """Waits for ever, or for more than there are."""

    offers: int = 0

    def decide(self, offers: Any, able: Any, now: float) -> Close | WaitUntil:
        return WaitUntil(offers=self.offers)


@valueclass
class Strange(Policy):
    """Keeps who is not there."""

    def decide(self, offers: Any, able: Any, now: float) -> Close | WaitUntil:
        return Close((*(offer.replica for offer in offers), 99))


@pytest.mark.parametrize(
    ("policy", "delays", "how", "said"),
    [
        (fr.train.AllOf(), -1, {}, r"test_simulation.py:\d+: a delay, Constant: seconds .* got -1"),
        (fr.train.AllOf(), [[1, -2]], {}, r"test_simulation.py:\d+: simulate: delays: .*-2 in step 0 of replica 1"),
        (fr.train.AllOf(), [[1, float("nan")]], {}, "got nan in step 0 of replica 1"),
        (fr.train.AllOf(), [], {}, "expected seconds"),
        (fr.train.AllOf(), "slow", {}, "'slow' is not a delay"),
        (fr.train.AllOf(), "link:1e6", {}, "a simulation sends no bytes"),
        (fr.train.AllOf(), lambda rng, step: "fast", {}, r"delays answered 'fast' in step 0, expected \[4\] numbers"),
        (fr.train.AllOf(), lambda rng, step: [1.0], {}, r"delays answered shape \[1\] in step 0, expected \[4\]"),
        (fr.train.AllOf(), {"/job:worker/task:1": 0.1}, {}, r"delays by name are a cluster's; .* as '0.1 \+ 0.4 on 3'"),
        (fr.train.AllOf(), lambda rng, step: [1, 2, float("inf"), 3], {}, "answered inf in step 0 of replica 2"),
        (fr.train.AllOf(), lambda rng, step: [1, 2, 3, step and -1], {}, "answered -1 in step 1 of replica 3"),
        (fr.train.FirstOf(5), 1, {}, "FirstOf.* of 4 replicas can never be met"),
        (fr.train.AllOf, 1, {}, "expected a policy"),
        (Never(), 1, {}, "when all 4 had offered; nobody else can come: close"),
        (Never(5), 1, {}, r"simulate: Never\(offers=5\) waits for 5 offers in step 0, and there are 4 replicas"),
        (Strange(), 1, {}, "replica 99, which has not offered"),
        (fr.train.AllOf(), 1, {"replicas": 0}, "replicas is an integer from 1 up, got 0"),
        (fr.train.AllOf(), 1, {"steps": 1.5}, "steps is an integer from 1 up, got 1.5"),
        (fr.train.AllOf(), 1, {"overhead": float("nan")}, "overhead is a finite number from 0 up, got nan"),
        (fr.train.AllOf(), 1, {"noise_scale": -1}, "noise_scale is a finite number from 0 up"),
    ],
)
def test_what_cannot_be_simulated_is_an_error(policy: Any, delays: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(fr.GraphError, match=said):
        fr.simulate(policy, delays, **{"replicas": 4, "steps": 3, **how})


# ── policies that do not begin all anew ──────────────────────────────────────────────────────────────────────────────


def test_asynchronous_replicas_each_go_on_at_their_own_pace() -> None:
    found = fr.simulate(fr.train.Async(), [[1.0, 2.5]], replicas=2, steps=7)
    np.testing.assert_allclose(np.cumsum(found.seconds), [1, 2, 2.5, 3, 4, 5, 5])
    np.testing.assert_array_equal(found.kept, 1)


def test_nobody_gets_ahead_of_the_slowest_by_more_than_the_bound() -> None:
    seconds = drawn(5, 40, 4)
    lockstep = fr.simulate(fr.train.BoundedStaleness(0), seconds, replicas=4, steps=40, overhead=0.1)
    np.testing.assert_allclose(lockstep.seconds, seconds.max(axis=1) + 0.1)
    ahead = fr.simulate(fr.train.BoundedStaleness(2), 1 + 9 * np.eye(1, 4), replicas=4, steps=30)
    assert ahead.seconds.sum() == pytest.approx(100, rel=0.1)  # three versions for each of replica 0's tens


def test_local_steps_take_their_number_of_times_as_long_and_are_worth_as_much_more() -> None:
    seconds = drawn(6)
    one = fr.simulate(fr.train.FirstOf(5), seconds, replicas=7, steps=60, overhead=0.5)
    many = fr.simulate(fr.train.LocalSteps(4, fr.train.FirstOf(5)), seconds, replicas=7, steps=60, overhead=0.5)
    np.testing.assert_allclose(many.seconds - 0.5, 4 * (one.seconds - 0.5))
    np.testing.assert_allclose(many.worth, 4 * one.worth)
    pushed = fr.simulate(fr.train.LocalSteps(4), "1 + 2 at push", replicas=2, steps=3)
    np.testing.assert_allclose(pushed.seconds, 6)


def test_a_thousand_replicas_take_milliseconds_a_step() -> None:
    found = fr.simulate(fr.train.FirstOf(950), "lognormal:1,0.1 + pauses:50,5", replicas=1000, steps=30)
    assert found.seconds.max() < 5
    adaptive = fr.simulate(fr.train.Adaptive(), "lognormal:1,0.1 + pauses:50,5", replicas=1000, steps=30)
    assert adaptive.seconds[10:].max() < 5
