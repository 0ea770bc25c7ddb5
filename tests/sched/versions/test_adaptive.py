"""Adaptive: what it decides by what it has seen, and that it needs no number."""

from __future__ import annotations

from math import ceil, inf, nan
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.sched.policies import asking, policy_from_data, policy_to_data
from flowrt.sched.policies.adaptive import APART
from flowrt.sched.policies.arrivals import WINDOW, Arrivals, factor_of
from flowrt.sched.policies.noise import LARGEST, NoiseScale
from flowrt.sched.policies.reading import SAMPLE, ReadingKind
from flowrt.sched.policies.spread import BINS, LINDY, MIDDLE, WIDTH, Spread, _smoothed
from flowrt.train import Adaptive, Close, Offer, Policy, Record, WaitUntil


def offers(seconds: dict[int, float], square: float = 9.0) -> tuple[Offer, ...]:
    """Who offered when, by arrival."""
    return tuple(Offer(replica, when, square=square) for replica, when in sorted(seconds.items(), key=lambda o: o[1]))


def play(policy: Policy, seconds: dict[int, float], scale: float = 8.0) -> tuple[tuple[int, ...], float, Policy, str]:
    """A version in which these replicas take so long: whom it kept, when it closed, what it learned, and why."""
    waits, now = WaitUntil(offers=policy.least(len(seconds))), -inf
    by_time = sorted(seconds, key=lambda replica: seconds[replica])
    while True:
        enough = by_time[max(waits.offers, sum(seconds[r] <= now for r in by_time) + 1) - 1 : len(by_time)]
        comes = seconds[enough[0]] if enough else inf
        now = min(comes, waits.seconds if waits.seconds > now else inf)
        assert now < inf, "it waits for nothing"
        there = offers({r: seconds[r] for r in by_time if seconds[r] <= now}, 1 + scale)
        able = tuple(r for r in seconds if seconds[r] > now)
        answer = asking.decide(policy, len(seconds), there, able, now)
        if isinstance(answer, Close):
            kept = tuple(sorted(answer.replicas))
            missing = tuple((replica, now) for replica in able)
            record = Record(there, kept, missing, now + 0.01, now, 1 + scale / len(kept))
            return kept, now, asking.after(policy, record, len(seconds)), answer.why
        waits = answer


def trained(steps: int, seconds: Any, scale: float = 8.0, policy: Policy | None = None) -> Policy:
    """The policy after some versions; ``seconds`` answers the times of one."""
    policy = policy or Adaptive()
    for step in range(steps):
        _, _, policy, _ = play(policy, seconds(step), scale)
    return policy


def jittered(base: list[float], seed: int, spread: float = 0.03) -> Any:
    """Times around these, another each step."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return lambda step: {i: float(t * (1 + spread * rng.uniform(-1, 1))) for i, t in enumerate(base)}


# ── what it decides ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_waits_for_all_that_take_the_usual_time() -> None:
    usual = jittered([1.0] * 4, seed=1)
    policy = trained(30, usual)
    kept = [len(play(policy, usual(step))[0]) for step in range(20)]
    assert np.mean(kept) > 3.7


def test_it_does_not_wait_for_who_is_always_slow_and_says_why() -> None:
    slow = jittered([1.0, 1.0, 1.0, 4.0], seed=2)
    kept, closed, _, why = play(trained(30, slow), slow(0))
    assert (kept, closed < 1.1) == ((0, 1, 2), True)
    assert why.startswith("kept 3 of 4: ")
    assert "was" in why
    assert "worth" in why


def test_who_recovers_counts_again_and_who_becomes_slow_no_longer() -> None:
    slow, well = jittered([1.0, 1.0, 1.0, 4.0], seed=3), jittered([1.0, 1.0, 4.0, 1.0], seed=4)
    policy = trained(10, well, policy=trained(30, slow))
    closed = []
    for step in range(20):
        kept, when, policy, _ = play(policy, well(step))
        assert kept == (0, 1, 3)
        closed.append(when)
    assert np.mean(closed) < 1.15


def test_a_replica_that_never_comes_is_waited_for_half_the_usual_time_at_first_and_then_hardly_at_all() -> None:
    frozen = {0: 1.0, 1: 1.01, 2: 1.02, 3: 1e9}
    policy: Policy = Adaptive()
    closed, reasons = [], []
    for _ in range(50):
        _, when, policy, why = play(policy, frozen)
        closed.append(when)
        reasons.append(why)
    assert closed[:2] == pytest.approx([1.515, 1.02])
    assert reasons[1] == "kept 3 of 4: the others were late in the first version, too"
    assert max(closed[2:]) < 1.3
    assert np.mean(closed[2:]) < 1.06


def test_who_was_late_in_the_first_version_alone_counts_again_at_once() -> None:
    policy = play(Adaptive(), {0: 1.0, 1: 1.01, 2: 1.02, 3: 9.0})[2]
    kept = []
    for _ in range(12):
        some, _, policy, _ = play(policy, {0: 1.0, 1: 1.01, 2: 1.02, 3: 1.015})
        kept.append(len(some))
    assert kept[0] == 4
    assert np.mean(kept) > 3.5


def test_when_all_are_slow_together_nobody_is_a_straggler() -> None:
    rng = np.random.default_rng(5)
    usual = jittered([1.0] * 8, seed=5)

    def sometimes(step: int) -> dict[int, float]:
        common = 1.5 if rng.random() < 0.2 else 1.0
        return {replica: seconds * common for replica, seconds in usual(step).items()}

    policy = trained(80, sometimes)
    slow = {replica: 1.5 * seconds for replica, seconds in usual(0).items()}
    assert len(play(policy, slow)[0]) >= 7


def test_little_noise_makes_it_wait_for_few_and_much_noise_for_many() -> None:
    rng = np.random.default_rng(6)

    def heavy(step: int) -> dict[int, float]:
        return dict(enumerate((0.5 + rng.exponential(1.0, 12)).tolist()))

    kept = {}
    for scale in (0.5, 64.0):
        policy = trained(60, heavy, scale)
        kept[scale] = np.mean([len(play(policy, heavy(0), scale)[0]) for _ in range(30)])
    assert kept[0.5] + 2 < kept[64.0]


@pytest.mark.parametrize("seed", range(4))
def test_it_never_closes_below_at_least_nor_waits_for_nobody(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    replicas = int(rng.integers(1, 7))
    policy: Policy = Adaptive(at_least=int(rng.integers(1, replicas + 1)))
    least = policy.least(replicas)
    for _ in range(60):
        some = rng.choice(replicas, int(rng.integers(least, replicas + 1)), replace=False)
        seconds = dict(zip(some.tolist(), rng.pareto(1.1, len(some)).tolist(), strict=True))
        kept, _, policy, _ = play(policy, seconds)
        assert least <= len(kept) <= len(some)
        assert set(kept) <= set(seconds)


def test_the_same_history_has_the_same_decisions() -> None:
    def run() -> list[Any]:
        rng = np.random.default_rng(7)
        policy, seen = Adaptive(), []
        for _ in range(60):
            kept, closed, policy, why = play(policy, dict(enumerate(rng.lognormal(0, 0.6, 5).tolist())))  # type: ignore[assignment]
            seen.append((kept, closed, why))
        return seen

    assert run() == run()


def test_what_it_prepares_changes_no_answer() -> None:
    times = jittered([1.0, 1.0, 1.2, 3.0], seed=23)
    asked: Policy = Adaptive()
    prepared: Policy = Adaptive()
    for step in range(20):
        seconds = times(step)
        prepared.prepare()
        kept, when, prepared, why = play(prepared, seconds)
        assert play(asked, seconds)[::3] == (kept, why)
        _, closed, asked, _ = play(asked, seconds)
        assert closed == when


def test_what_it_has_seen_changes_no_value_that_was_there() -> None:
    policy = trained(5, jittered([1.0] * 3, seed=8))
    before = play(policy, {0: 1.0, 1: 1.1, 2: 1.6})[:2]
    trained(20, jittered([5.0] * 3, seed=9), policy=policy)
    assert play(policy, {0: 1.0, 1: 1.1, 2: 1.6})[:2] == before


def test_a_replica_that_was_never_seen_is_hoped_for_as_the_others_are() -> None:
    policy = trained(30, jittered([1.0] * 3, seed=10))
    answer = policy.decide(offers({0: 0.98, 1: 1.0}), (2, 5), 1.0)
    assert isinstance(answer, WaitUntil)
    kept, _, after, _ = play(policy, {0: 1.0, 1: 1.01, 2: 1.0, 5: 1.0})
    assert set(kept) >= {0, 2, 5}
    assert len(play(after, dict.fromkeys(range(9), 1.0))[0]) == 9


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e5])
def test_times_of_any_size_will_do(seconds: float) -> None:
    policy = trained(20, lambda _: {0: seconds, 1: seconds, 2: 3 * seconds})
    assert play(policy, {0: seconds, 1: seconds, 2: seconds})[0] == (0, 1, 2)


def test_updates_that_nobody_measured_are_weighed_too() -> None:
    policy: Policy = Adaptive()
    for _ in range(20):
        policy = policy.after(Record(offers({0: 1.0, 1: 1.0}, nan), (0, 1), ((2, 1.0),), 1.1, 1.0))
    assert isinstance(policy.decide(offers({0: 1.0, 1: 1.0}, nan), (2,), 1.0), Close)


@pytest.mark.parametrize("least", [0, -1, True, 1.5, "1"])
def test_at_least_one_update_is_kept(least: Any) -> None:
    with pytest.raises(GraphError, match=r"test_adaptive.py:\d+: Adaptive\(at_least=.*use at_least=1 or more"):
        Adaptive(at_least=least)


def test_more_than_there_are_replicas_can_never_be_met() -> None:
    with pytest.raises(GraphError, match=r"Adaptive\(at_least=3\) of 2 replicas can never be met; use at_least=2"):
        Adaptive(3).least(2)


def test_what_it_has_seen_does_not_travel() -> None:
    policy = trained(3, jittered([1.0] * 3, seed=11), policy=Adaptive(2))
    data = policy_to_data(policy)
    assert data == policy_to_data(Adaptive(2))
    assert "_lesson" not in data
    assert policy_from_data(data) == Adaptive(2)


def test_the_first_version_in_which_nodes_get_ready_is_not_learnt_from() -> None:
    usual = jittered([1.0] * 4, seed=17)
    ready: Policy = play(Adaptive(), dict.fromkeys(range(4), 100.0))[2]
    at_once: Policy = play(Adaptive(), usual(0))[2]
    for step in range(20):
        times = usual(step)
        kept, when, ready, why = play(ready, times)
        same_kept, same_when, at_once, same_why = play(at_once, times)
        assert (kept, when, why) == (same_kept, same_when, same_why)


@pytest.mark.parametrize("replicas", [4, 16])
def test_that_all_become_slow_together_is_seen_in_the_first_version_and_nobody_is_left_behind(replicas: int) -> None:
    policy = trained(40, jittered([1.0] * replicas, seed=18))
    slow, kept = jittered([3.0] * replicas, seed=19), []
    for step in range(12):
        some, _, policy, _ = play(policy, slow(step))
        kept.append(len(some))
    assert np.mean(kept) > 0.9 * replicas


def test_times_that_drift_for_all_are_followed_from_the_start() -> None:
    usual = jittered([1.0] * 8, seed=20, spread=0.1)
    policy, kept = Adaptive(), []
    for step in range(40):
        times = {replica: seconds * (1 + 0.02 * step) for replica, seconds in usual(step).items()}
        some, _, policy, _ = play(policy, times)  # type: ignore[assignment]
        kept.append(len(some))
    assert np.mean(kept[2:]) > 7.2


# ── against every fixed number ───────────────────────────────────────────────────────────────────────────────────────


def ratio(seconds: Any, replicas: int, scale: float, steps: int = 300) -> float:
    """Its time to half the worth of all updates, over that of the best fixed number, which sorting tells."""
    worth = steps * 0.5 * replicas / (replicas + scale)
    took = np.cumsum(np.sort(seconds, axis=1) + 0.05, axis=0)
    needed = [ceil(worth * (m + scale) / m * (1 - 1e-12)) for m in range(1, replicas + 1)]
    fixed = [took[last - 1, m] for m, last in enumerate(needed) if last <= steps]
    run = fr.simulate(Adaptive(), seconds, replicas=replicas, steps=steps, overhead=0.05, noise_scale=scale)
    return float(run.seconds_to(worth) / min(fixed))


@pytest.mark.parametrize("scale", [1.0, 8.0, 64.0])
def test_it_is_as_good_as_the_best_number_or_better(scale: float) -> None:
    rng, steps, n = np.random.default_rng(12), 300, 8
    base = 1 + 0.05 * rng.uniform(-1, 1, (steps, n))
    changes = base.copy()
    changes[: steps // 2, 0] *= 3
    changes[steps // 2 :, 3:5] *= 2.5
    found = {
        "alike": ratio(base, n, scale),
        "tail": ratio(0.7 + rng.exponential(0.3, (steps, n)), n, scale),
        "pauses": ratio(base + 4 * (rng.random((steps, n)) < 0.03), n, scale),
        "changes": ratio(changes, n, scale),
    }
    print(found)
    assert max(found.values()) < 1.06
    assert found["changes"] < 1.02


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_what_slows_all_at_once_is_no_reason_to_leave_anybody_behind(scale: float) -> None:
    rng, steps, n = np.random.default_rng(13), 600, 6
    base = 1 + 0.05 * rng.uniform(-1, 1, (steps, n))
    found = {
        "at times": ratio(base * np.where(rng.random((steps, 1)) < 0.3, 3.0, 1.0), n, scale, steps),
        "heavy tail": ratio(base * (rng.pareto(2.0, (steps, 1)) + 1), n, scale, steps),
    }
    print(found)
    assert max(found.values()) < 1.05


def test_of_many_with_heavy_tails_it_waits_for_no_more_than_pays() -> None:
    """The next of so many comes sooner than the times that are looked at lie apart, and that is no reason to wait."""
    rng = np.random.default_rng(21)
    assert ratio(rng.lognormal(0, 0.8, (200, 64)), 64, 32.0, 200) < 1.045


def test_where_the_first_update_is_all_that_pays_the_noise_that_was_seen_is_remembered() -> None:
    """One update measures no noise; the less of it is believed in, the more seem to be worth waiting for."""
    rng = np.random.default_rng([1, 24])
    assert ratio(rng.uniform(0.001, 1, (600, 24)), 24, 1.0, 600) < 1.09


def test_where_half_of_the_replicas_take_far_longer_than_the_first_a_run_does_not_begin_by_waiting_for_them() -> None:
    spread: Policy = Adaptive()
    for _ in range(2):
        kept, closed, spread, why = play(spread, {0: 1.0, 1: 2.0, 2: 30.0, 3: 31.0, 4: 32.0})
        assert (kept, closed) == ((0, 1), pytest.approx(8.0))
        assert why == "kept 2 of 5: 8 times as long as the first of them took"
    rng = np.random.default_rng(23)
    assert ratio(rng.lognormal(0, 2, (600, 8)), 8, 1.0, 600) < 1.09


def test_that_one_is_slow_in_turn_it_finds_out_by_what_waiting_for_the_last_one_came_to() -> None:
    """Each is slow one time in six, so the last one seems likely to come; it never does."""
    rng, steps, n = np.random.default_rng(22), 300, 6
    seconds = 0.3 + 0.05 * rng.random((steps, n))
    seconds[np.arange(steps), np.arange(steps) % n] += 1
    assert ratio(seconds, n, 8.0, steps) < 1.04


# ── what it is made of ───────────────────────────────────────────────────────────────────────────────────────────────


def test_times_that_were_cut_off_count_as_longer() -> None:
    """Half take 1 s and half 2 s; whoever is cut off at 1.5 s every other time does not seem to take 1.5 s."""
    known = Arrivals.start(2, 1.0)
    for step in range(40):
        known = known.learn([0, 1], [1.0, 2.0], [], 2.0) if step % 2 else known.learn([0], [1.0], [1], 1.5)
    times, chances, more, _ = known.expected([0], [1.0], [1], 1.5)
    more = chances @ more
    assert more[np.searchsorted(times, 1.9)] < 0.2
    assert more[np.searchsorted(times, 2.1)] > 0.7


@pytest.mark.parametrize("factor", [30.0, 1 / 30])
def test_times_that_become_others_altogether_are_followed(factor: float) -> None:
    policy = trained(30, jittered([1.0] * 3, seed=13))
    policy = trained(30, jittered([factor] * 3, seed=14), policy=policy)
    later, kept = jittered([factor] * 3, seed=15), []
    for step in range(20):
        some, _, policy, _ = play(policy, later(step))
        kept.append(len(some))
    assert np.mean(kept) > 2.7


@pytest.mark.parametrize("seed", [1])
def test_the_noise_scale_is_that_of_the_gradients(seed: int) -> None:
    """Gradients g + noise of known variance in 50 dimensions: B is the variance over the square of g."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    true = rng.normal(0, 0.3, 50)
    known = NoiseScale()
    for _ in range(400):
        updates = true + rng.normal(0, 1.0, (int(rng.integers(2, 9)), 50))
        known = known.learn((updates**2).sum(axis=1).tolist(), float((updates.mean(axis=0) ** 2).sum()))
    assert known.value == pytest.approx(50 / (true**2).sum(), rel=0.3)


def test_a_noise_scale_is_never_negative_nor_infinite() -> None:
    assert np.isnan(NoiseScale().value)
    assert NoiseScale().learn([1.0], 1.0) == NoiseScale() == NoiseScale().learn([1.0, inf], 1.0)
    assert NoiseScale().learn([1.0, nan], 1.0) == NoiseScale() == NoiseScale().learn([1.0, 1.0], nan)
    assert NoiseScale().learn([1.0, 1.0], 1.0).value == 0.0
    assert NoiseScale().learn([1.0, 1.0], 2.0).value == 0.0  # more alike than the same
    assert NoiseScale().learn([1.0, 1.0], 0.4).value == LARGEST  # the mean of opposites
    assert NoiseScale().learn([1.0, 1.0], 0.5).value == LARGEST  # whose square is none
    measured = NoiseScale().learn([3.0, 3.0], 2.0)
    assert (measured.weight, measured.gradient, measured.variance) == (1.0, 1.0, 2.0)


def test_a_noise_scale_that_is_measured_no_more_is_believed_less_and_less() -> None:
    known = NoiseScale()
    assert known.believed(8.0) == 8.0
    for _ in range(200):
        known = known.learn([1.5, 1.5], 1.25)  # |G|² = 1, V = 0.5
    assert known.value == pytest.approx(0.5)
    assert known.believed(8.0) == pytest.approx(0.5, rel=0.1)
    for _ in range(50):
        known = known.learn([1.5], 1.5)
    assert known.believed(8.0) == pytest.approx(0.5, rel=0.2)  # as a step of one update measures nothing
    for _ in range(250):
        known = known.learn([1.5], 1.5)
    assert known.value == pytest.approx(0.5)
    assert known.believed(8.0) > 4.0


def test_noise_that_grows_makes_it_wait_for_more_whatever_steps_were_worth_before() -> None:
    rng = np.random.default_rng(16)

    def heavy(step: int) -> dict[int, float]:
        return dict(enumerate((0.5 + rng.exponential(0.5, 6)).tolist()))

    policy = trained(80, heavy, 0.3)
    policy = trained(80, heavy, 200.0, policy)
    kept = []
    for step in range(40):
        some, _, policy, _ = play(policy, heavy(step), 200.0)
        kept.append(len(some))
    assert np.mean(kept) > 2.5


@pytest.mark.parametrize("deviation", [1.0, 4.0])
def test_how_times_spread_is_smoothed_by_a_normal_distribution(deviation: float) -> None:
    density, bins = np.zeros(BINS), np.arange(BINS) - MIDDLE
    density[MIDDLE] = 1.0
    wanted = np.where(np.abs(bins) <= 3 * deviation, np.exp(-0.5 * (bins / deviation) ** 2), 0.0)
    np.testing.assert_allclose(_smoothed(density, deviation), wanted / wanted.sum(), atol=1e-15)


def test_who_was_not_waited_for_counts_half_in_the_bin_where_that_ended() -> None:
    came, cut = np.zeros(BINS), np.zeros(BINS)
    came[MIDDLE], cut[MIDDLE] = 20, 10
    (spread,) = Spread.of(came[None], cut[None])
    hazards = spread.hazards
    assert hazards[MIDDLE] == pytest.approx(20 / 25, rel=0.01)
    assert hazards[:MIDDLE].max() < 1e-3
    assert hazards[MIDDLE + 1 :] == pytest.approx(LINDY)


@pytest.mark.parametrize("replicas", [SAMPLE, SAMPLE + 1, 3 * SAMPLE])
def test_a_slow_version_of_many_replicas_is_known_by_a_sample_of_them(replicas: int) -> None:
    rng, everybody = np.random.default_rng(3), list(range(replicas))
    known = Arrivals.start(replicas, 1.0)
    for version in range(24):
        factor = 2.0 if version % 2 else 1.0
        seconds = np.sort(factor * rng.lognormal(0.0, 0.05, replicas)).tolist()
        known = known.learn(rng.permutation(everybody).tolist(), seconds, [], seconds[-1])
    half = replicas // 2
    for factor in (1.0, 2.0):  # those who came say how slow it is, so all others are expected soon
        seconds = np.sort(factor * rng.lognormal(0.0, 0.05, replicas))[:half].tolist()
        times, chances, more, _ = known.expected(everybody[:half], seconds, everybody[half:], seconds[-1])
        assert np.interp(factor * 1.25, times, chances @ more) > 0.8 * (replicas - half)


def test_what_slows_all_of_a_version_is_told_from_what_slows_one() -> None:
    rng = np.random.default_rng(4)
    known, factors = Arrivals.start(6, 1.0), rng.pareto(2.0, 80) + 1
    for factor in factors:
        seconds = np.sort(factor * (1 + 0.05 * rng.uniform(-1, 1, 6))).tolist()
        known = known.learn(rng.permutation(6)[:4].tolist(), seconds[:4], [4, 5], seconds[3])
    found = known.reading.factors
    assert known.reading.kind is ReadingKind.COMMON
    assert len(found) == WINDOW
    seen = factors[: known.versions][-WINDOW:]
    assert np.std(found - np.log(seen)) < 0.03
    tried, likely = factor_of(known.reading, [0, 1], [6.9, 7.0], [2, 3, 4, 5], 7.0)
    closest = likely @ tried * WIDTH
    assert closest - (found - np.log(seen)).mean() == pytest.approx(np.log(7.0), abs=0.1)


@pytest.mark.parametrize("kept", [1, 3, 4])
@pytest.mark.parametrize("deviation", [0.05, 0.5, 1.5])
def test_independent_delays_are_read_as_alike_however_heavy_their_tails_and_few_are_seen(
    kept: int, deviation: float
) -> None:
    rng = np.random.default_rng(5)
    known, kinds = Arrivals.start(4, 1.0), list[ReadingKind]()
    for _ in range(160):
        seconds = rng.lognormal(0.0, deviation, 4)
        order = seconds.argsort().tolist()
        seconds.sort()
        known = known.learn(order[:kept], seconds[:kept].tolist(), order[kept:], float(seconds[kept - 1]))
        kinds.append(known.reading.kind)
    assert kinds[40:].count(ReadingKind.COMMON) <= 12


def test_replicas_that_differ_are_not_read_as_alike() -> None:
    rng = np.random.default_rng(6)
    known = Arrivals.start(4, 1.0)
    for _ in range(20):
        seconds = np.array([1.0, 1.3, 1.6, 2.0]) * rng.lognormal(0.0, 0.05, 4)
        known = known.learn([0, 1, 2, 3], seconds.tolist(), [], float(seconds.max()))
    assert known.reading.kind is not ReadingKind.ALIKE


def test_the_next_update_is_waited_for_as_long_as_it_takes_to_come_not_as_it_might() -> None:
    """It comes after 1.45 s or so: until then it costs less than it is worth, until it has surely come, more."""
    rng = np.random.default_rng(7)

    def ladder(step: int) -> dict[int, float]:
        return dict(enumerate((np.array([1.0, 1.45, 3.5]) + 0.25 * rng.uniform(-1, 1, 3)).tolist()))

    policy = trained(120, ladder)
    kept = [len(play(policy, ladder(0))[0]) for _ in range(60)]
    assert np.mean(kept) == pytest.approx(2.0, abs=0.2)


def test_it_tries_again_and_again_whether_who_was_slow_comes_but_not_all_the_time() -> None:
    policy: Policy = Adaptive()
    times, tried = jittered([1.0, 1.0, 1.0, 9.0], seed=5), list[int]()
    for step in range(160):
        _, _, policy, why = play(policy, times(step))
        tried += [step] if "tried out" in why else []
    assert len(tried) >= 3
    assert min(np.diff(tried)) >= APART


def test_who_came_when_that_was_tried_out_is_waited_for_from_then_on() -> None:
    policy = trained(40, jittered([1.0, 1.0, 1.0, 6.0], seed=3))
    times, kept = jittered([1.0, 1.0, 1.0, 1.0], seed=4), list[int]()
    for step in range(50):
        who, _, policy, _ = play(policy, times(step))
        kept.append(len(who))
    found = kept.index(4)
    assert found <= APART
    assert set(kept[found:]) == {4}


def test_what_was_not_worth_it_is_not_weighed_again_until_it_has_learnt_from_that() -> None:
    times, reasons, learnt = jittered([1.0, 1.0, 1.0, 4.0], seed=24), list[str](), list[bool]()
    policy = trained(40, times)
    for step in range(24):
        assert isinstance(policy, Adaptive)
        assert policy._lesson is not None
        learnt.append(not policy._lesson.unlearnt)
        kept, _, policy, why = play(policy, times(step))
        assert kept == (0, 1, 2) or "tried out" in why or "just now" not in why
        reasons.append(why)
    assert sum("just now" in why for why in reasons) >= 8
    assert not any("just now" in why for why, weighed in zip(reasons, learnt, strict=True) if weighed)
    assert 6 <= sum(learnt) <= 12


def test_before_any_version_of_late_was_closed_it_is_not_weighed_whether_to() -> None:
    times = jittered([1.0, 1.0, 1.0, 4.0], seed=25)
    policy = trained(40, times)
    while not (isinstance(policy, Adaptive) and policy._lesson and policy._lesson.unlearnt):
        policy = play(policy, times(0))[2]
    record = policy._lesson.unlearnt[-1]
    early = policy.decide(offers({0: 0.5}), (1, 2, 3), 0.5)
    assert early == WaitUntil(record.closed, len(record.offers))
    assert isinstance(policy.decide(offers({0: 0.5, 1: 1.0, 2: 1.1}), (3,), 2.0), Close)
