"""Caps: what closing at each number of updates would have come to, as it is."""

from __future__ import annotations

import numpy as np
import pytest

from flowrt.sched.policies.caps import TRUST, Caps, worth_of

SCALE = 8.0


def test_the_rate_is_that_of_the_best_number_however_long_was_waited() -> None:
    """Of two by 1 s, and a third that nobody waited for until the versions were closed, after 4 s."""
    caps = Caps.start()
    for _ in range(10):
        caps = caps.learn([0.9, 1.0], 1, 4.0, 4.5)
    assert caps.rate(SCALE) == pytest.approx(worth_of(2, SCALE) / 1.5)


def test_without_waiting_the_rate_is_what_all_was_worth_per_second() -> None:
    caps = Caps.start().learn([1.0, 2.0], 0, 2.0, 2.0).learn([1.0, 1.5, 1.6], 0, 1.6, 1.6)
    fade = 1 / 2
    gained = fade * worth_of(2, SCALE) + worth_of(3, SCALE)
    assert caps.rate(SCALE) == pytest.approx(gained / (fade * 2.0 + 1.6))
    assert Caps.start().rate(SCALE) == 0.0


def judged(came: list[float], closed: float, versions: int) -> Caps:
    """Who knows of so many such versions of four, each of which was decided by what is believed of times."""
    caps = Caps.start()
    for _ in range(versions):
        caps = caps.learn(came, 4 - len(came), closed, closed)
        caps = caps.judge(came, closed, SCALE, caps.rate(SCALE))
    return caps


def test_a_number_is_followed_once_it_was_surely_better_and_never_below_the_least() -> None:
    assert judged([1.0, 1.1, 1.2], 3.0, 3).best(1) is None
    late = judged([1.0, 1.1, 1.2], 3.0, 30)
    assert late.best(1) == late.best(3) == 3
    assert late.best(4) is late.best(5) is None


def test_what_was_won_is_forgotten_as_slowly_as_its_spread() -> None:
    caps = Caps.start().learn([1.0, 1.1], 1, 3.0, 3.0)
    first = caps.judge([1.0, 1.1], 3.0, SCALE, 1.0)
    second = first.judge([1.0, 1.2], 3.0, SCALE, 0.5)
    won = second.ahead - TRUST * first.ahead
    assert np.abs(first.ahead).max() > 1.5
    np.testing.assert_allclose(first.spread, first.ahead**2)
    np.testing.assert_allclose(second.spread, TRUST**2 * first.spread + won**2)


def test_where_it_was_worth_waiting_no_number_is_followed() -> None:
    assert judged([1.0, 1.0, 1.0, 1.2], 1.2, 30).best(1) is None
    assert judged([1.0], 1.0, 30).best(1) is None


def test_more_replicas_than_before_would_have_changed_nothing() -> None:
    few = judged([1.0, 1.1, 1.2], 3.0, 30)
    more = few.learn([1.0, 1.1, 1.2], 6, 3.0, 3.0)
    assert len(more.kept) == 10
    assert more.best(1) == 3
    assert np.array_equal(more.ahead[5:], np.full(5, few.ahead[4]))
