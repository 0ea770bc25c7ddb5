"""Who is alive, suspect and lost, told by a clock of our own."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator

import pytest

from flowrt.net.master.liveness import BEAT, LEAST, LOST, MOST, Belief, Change, Liveness

ALIVE, SUSPECT, GONE = Belief.ALIVE, Belief.SUSPECT, Belief.LOST
A, B = "/job:worker/task:0", "/job:worker/task:1"
CALM = LEAST * BEAT  # seconds of silence that make a task suspect that answers on time
Lateness = Callable[[random.Random], float]


def pair() -> Liveness:
    liveness = Liveness(BEAT, 0.0)
    liveness.joined(A, 0.0)
    liveness.joined(B, 0.0)
    return liveness


def look_until(liveness: Liveness, start: float, end: float, *, speaking: tuple[str, ...] = ()) -> list[Change]:
    """Look every half second; the ``speaking`` tasks answer each time."""
    changes: list[Change] = []
    now = start
    while now < end:
        now += BEAT
        for task in speaking:
            changes += liveness.heard(task, now)
        changes += liveness.look(now)
    return changes


def test_who_answers_stays_alive() -> None:
    assert look_until(pair(), 0.0, 100.0, speaking=(A, B)) == []


def test_two_silent_seconds_make_a_suspect_once_of_a_task_that_answers_on_time() -> None:
    liveness = pair()
    assert look_until(liveness, 0.0, 1.5, speaking=(A,)) == []
    assert look_until(liveness, 1.5, 3.0, speaking=(A,)) == [Change(B, SUSPECT, "it has been silent for 2.0 s")]
    assert liveness.having(SUSPECT) == {B}
    assert liveness.standing(A) is ALIVE


def test_a_suspect_that_answers_is_alive_again() -> None:
    liveness = pair()
    look_until(liveness, 0.0, 5.0, speaking=(A,))
    assert liveness.heard(B, 5.1) == [Change(B, ALIVE, "it answers again")]
    assert liveness.having(SUSPECT) == frozenset()


def test_thirty_silent_seconds_make_a_loss_of_a_task_that_answers_on_time() -> None:
    liveness = pair()
    look_until(liveness, 0.0, 29.5, speaking=(A,))
    assert look_until(liveness, 29.5, 30.0, speaking=(A,)) == [Change(B, GONE, "it has been silent for 30.0 s")]
    assert look_until(liveness, 30.0, 90.0, speaking=(A,)) == []


def test_a_broken_connection_is_a_loss_at_once_and_once() -> None:
    liveness = pair()
    assert liveness.broke(B, "reset by peer") == [Change(B, GONE, "reset by peer")]
    assert liveness.broke(B, "reset by peer") == []
    assert liveness.having(GONE) == {B}


def test_the_lost_stay_lost_until_they_join_again() -> None:
    liveness = pair()
    liveness.broke(B, "reset by peer")
    assert liveness.heard(B, 1.0) == []
    assert liveness.standing(B) is GONE
    liveness.joined(B, 2.0)
    assert liveness.standing(B) is ALIVE


def test_time_that_the_master_slept_is_nobodys_silence() -> None:
    liveness = pair()
    assert liveness.look(0.5) == []
    assert liveness.look(100.0) == []
    assert [change.standing for change in look_until(liveness, 100.0, 103.0)] == [SUSPECT, SUSPECT]


def test_what_comes_first_after_a_sleep_is_not_judged_by_it() -> None:
    liveness = pair()
    look_until(liveness, 0.0, 10.0, speaking=(A, B))
    for now in range(20, 500, 10):
        assert liveness.heard(A, now) == liveness.heard(B, now) == []
        assert liveness.look(now) == []
    assert liveness.patience(A) == pytest.approx(CALM)


def test_half_a_second_overslept_counts_too() -> None:
    liveness = pair()
    assert liveness.look(0.5) == []
    assert liveness.look(1.5) == []  # a look was due at 1.0
    assert liveness.look(2.0) == liveness.look(2.4) == []
    assert [change.standing for change in liveness.look(2.5)] == [SUSPECT, SUSPECT]


# ── what is silent follows from what was measured ────────────────────────────────────────────────────────────────────


def beats(rng: random.Random, lateness: Lateness) -> Iterator[float]:
    """When a task gives signs of life: beat after beat, each as late as ``lateness`` says, or when it is over."""
    now = 0.0
    for beat in itertools.count(1):
        now = max(now, beat * BEAT + lateness(rng))
        yield now


def follow(signs: Iterable[float], until: float, lag: Callable[[], float] = lambda: 0.0) -> tuple[Liveness, list[str]]:
    """The standings that a task went through until then; every look is late by ``lag``."""
    liveness, standings, signs, looked = Liveness(BEAT, 0.0), [], iter(signs), 0.0
    liveness.joined(A, 0.0)
    sign = next(signs)
    while looked < until:
        looked += BEAT + lag()
        while sign <= looked:
            standings += [change.standing.value for change in liveness.heard(A, sign)]
            sign = next(signs)
        standings += [change.standing.value for change in liveness.look(looked)]
    return liveness, standings


def silence(liveness: Liveness, begin: float) -> tuple[float, float]:
    """After how many silent seconds from ``begin`` on the task is suspect, and lost."""
    found: dict[Belief, float] = {}
    now = begin
    while GONE not in found:
        now += BEAT
        for change in liveness.look(now):
            found[change.standing] = now - begin
    return found.get(SUSPECT, 0.0), found[GONE]


def test_a_task_that_answers_on_time_is_suspect_within_three_seconds_and_lost_within_half_a_minute() -> None:
    for jitter in (0.0, 0.01, 0.05, 0.1):
        liveness, standings = follow(beats(random.Random(1), lambda rng, j=jitter: rng.uniform(0, j)), 120)
        suspect, lost = silence(liveness, 120)
        assert standings == []
        assert CALM <= suspect <= 3.0
        assert LOST * CALM <= lost <= 45.0


def test_messages_in_quick_succession_do_not_make_a_pause_between_them_suspicious() -> None:
    liveness = pair()
    for tick in range(20_000):
        liveness.heard(A, tick * 0.001)
    for tick in range(40):
        liveness.look(tick * BEAT)
    assert liveness.patience(A) == pytest.approx(CALM)


def test_who_is_often_silent_for_three_seconds_is_soon_suspected_of_nothing() -> None:
    def lateness(rng: random.Random) -> float:
        return 3.0 if rng.random() < 0.1 else 0.0

    _, standings = follow(beats(random.Random(2), lateness), 1000)
    early = follow(beats(random.Random(2), lateness), 200)[1]
    assert early == standings
    assert 0 < standings.count("suspect") < 20


def test_a_slow_start_loses_nobody_and_is_forgotten() -> None:
    slow = itertools.chain([20.0], itertools.count(20.5, BEAT))
    liveness, standings = follow(slow, 120)
    assert standings == ["suspect", "alive"]
    assert liveness.patience(A) <= 3.0


def test_who_was_stopped_now_and_then_is_found_the_next_time_as_soon() -> None:
    signs = itertools.accumulate(29.0 if beat % 240 == 0 else BEAT for beat in itertools.count(1))
    liveness, standings = follow(signs, 3000)
    assert standings.count("suspect") == standings.count("alive") == 20
    assert liveness.patience(A) <= 3.0


def test_a_looker_that_is_held_again_and_again_suspects_nobody() -> None:
    rng = random.Random(4)
    _, standings = follow(
        beats(rng, lambda rng: rng.uniform(0, 0.2)), 1000, lag=lambda: rng.expovariate(1.0) if rng.random() < 0.5 else 0
    )
    assert standings == []


@pytest.mark.settled
@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_measured_nobody_who_is_well_is_lost_and_who_is_silent_is_found(seed: int) -> None:
    """25,000 tasks of a kind of their own each, with pauses of up to 25 s, heard by a looker that is held as well."""
    rng, tasks, count = random.Random(seed), [], 25_000
    liveness, now = Liveness(BEAT, 0.0), 0.0
    for number in range(count):
        liveness.joined(str(number), 0.0)
        tasks.append([rng.choice([0.0, 0.01, 0.1, 0.5, 2.0]), rng.choice([0.0, 0.02, 0.1]), 0.0])
    for _ in range(24):
        now += BEAT + (rng.uniform(0, 10) if rng.random() < 0.1 else 0.0)
        for number, one in enumerate(tasks):
            mean, pauses, due = one
            if due <= now:
                liveness.heard(str(number), now)
                late = rng.expovariate(1 / mean) if mean else 0.0
                one[2] = now + BEAT + min(late + (rng.uniform(0, 25) if rng.random() < pauses else 0.0), 25.0)
        assert not any(change.standing is GONE for change in liveness.look(now)), f"seed {seed}"
    assert all(LEAST * BEAT <= liveness.patience(str(number)) <= MOST * BEAT for number in range(count))
    for _ in range(MOST + 1):
        now += BEAT
        liveness.look(now)
    assert liveness.having(ALIVE) == frozenset(), f"seed {seed}"


def test_whatever_was_measured_who_is_silent_is_lost_within_minutes() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        liveness, _ = follow(beats(rng, lambda rng: min(rng.expovariate(0.2), 25.0)), 500)
        assert liveness.standing(A) is not GONE
        assert silence(liveness, 530)[1] <= (LOST * MOST + 1) * BEAT


def test_patience_follows_from_the_silences_there_were_as_if_eight_had_been_on_time() -> None:
    liveness, silences, now = Liveness(BEAT, 0.0), [BEAT] * 8, 0.0
    liveness.joined("a", now)
    for beats in [1, 3, 1, 1, 2, 3, 1, 2] * 6:  # between two signs of life
        for beat in range(1, beats + 1):
            now += BEAT
            if beat == beats:
                liveness.heard("a", now)
            assert not liveness.look(now)
        silences.append(beats * BEAT)
        mean, deviation = statistics.fmean(silences), statistics.pstdev(silences)
        suspicious = mean + (5.0 * math.log(10) - 1) * deviation  # of a least silence and an exponential tail
        assert liveness.patience("a") == pytest.approx(min(max(suspicious, 4 * BEAT), 20 * BEAT))
    assert 4 * BEAT < suspicious < 20 * BEAT
