"""Who is alive, suspect and lost, told by a clock of our own."""

from __future__ import annotations

import random

from flowrt.net.liveness import Change, Liveness, Standing, Timing

ALIVE, SUSPECT, LOST = Standing.ALIVE, Standing.SUSPECT, Standing.LOST
A, B = "/job:worker/task:0", "/job:worker/task:1"


def pair() -> Liveness:
    liveness = Liveness(Timing(), 0.0)
    liveness.joined(A, 0.0)
    liveness.joined(B, 0.0)
    return liveness


def look_until(liveness: Liveness, start: float, end: float, *, speaking: tuple[str, ...] = ()) -> list[Change]:
    """Look every half second; the ``speaking`` tasks answer each time."""
    changes: list[Change] = []
    now = start
    while now < end:
        now += 0.5
        for task in speaking:
            changes += liveness.heard(task, now)
        changes += liveness.look(now)
    return changes


def test_who_answers_stays_alive() -> None:
    assert look_until(pair(), 0.0, 100.0, speaking=(A, B)) == []


def test_two_silent_seconds_make_a_suspect_once() -> None:
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


def test_thirty_silent_seconds_make_a_loss() -> None:
    liveness = pair()
    look_until(liveness, 0.0, 29.5, speaking=(A,))
    assert look_until(liveness, 29.5, 30.0, speaking=(A,)) == [Change(B, LOST, "it has been silent for 30.0 s")]
    assert look_until(liveness, 30.0, 90.0, speaking=(A,)) == []


def test_a_broken_connection_is_a_loss_at_once_and_once() -> None:
    liveness = pair()
    assert liveness.broke(B, "reset by peer") == [Change(B, LOST, "reset by peer")]
    assert liveness.broke(B, "reset by peer") == []
    assert liveness.having(LOST) == {B}


def test_the_lost_stay_lost_until_they_join_again() -> None:
    liveness = pair()
    liveness.broke(B, "reset by peer")
    assert liveness.heard(B, 1.0) == []
    assert liveness.standing(B) is LOST
    liveness.joined(B, 2.0)
    assert liveness.standing(B) is ALIVE


def test_time_that_the_master_slept_is_nobodys_silence() -> None:
    liveness = pair()
    assert liveness.look(0.5) == []
    assert liveness.look(100.0) == []
    assert [change.standing for change in look_until(liveness, 100.0, 103.0)] == [SUSPECT, SUSPECT]


def test_half_a_second_overslept_counts_too() -> None:
    liveness = pair()
    assert liveness.look(0.5) == []
    assert liveness.look(2.0) == []  # a look was due at 1.5 at the latest
    assert [change.standing for change in liveness.look(2.5)] == [SUSPECT, SUSPECT]


def test_any_history_keeps_the_law() -> None:
    for seed in range(300):
        rng, liveness, now = random.Random(seed), pair(), 0.0
        heard, lost = {A: 0.0, B: 0.0}, set[str]()
        for _ in range(200):
            now += 0.5
            for task in (A, B):
                match rng.choice(["speak", "be silent", "be silent", "break"] if seed % 2 else ["speak", "be silent"]):
                    case "speak":
                        liveness.heard(task, now)
                        heard[task] = now
                    case "break":
                        liveness.broke(task, "broken")
                        lost.add(task)
            liveness.look(now)
            for task in (A, B):
                silent = now - heard[task]
                expected = LOST if task in lost else ALIVE if silent < 2.0 else SUSPECT if silent < 30.0 else LOST
                assert liveness.standing(task) is expected, f"seed {seed}, {now} s"
                lost |= {task} if expected is LOST else set()
