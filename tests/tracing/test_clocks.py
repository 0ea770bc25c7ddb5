"""How another clock is read: of simulated clocks that are ahead, drift, and answer late."""

from __future__ import annotations

import random

import pytest

from flowrt.tracing.clocks import WINDOW, Alignment, ClockSample, clock_sample

MILLISECOND = 1_000_000


def asked(rng: random.Random, at: int, ahead: int, least: int) -> ClockSample:
    """A question at ``at`` to a clock that is ``ahead``, over a way whose halves take ``least`` each, or longer."""
    there, back = (least + int(rng.expovariate(1 / least)) for _ in range(2))
    return clock_sample(at, at + there + ahead, at + there + back)


def test_the_middle_of_a_round_trip_is_when_the_other_clock_was_read() -> None:
    assert clock_sample(1000, 5600, 1200) == ClockSample(at=1100, ahead=4500, uncertainty=100)


@pytest.mark.parametrize("seed", range(20))
def test_an_offset_is_found_within_its_uncertainty(seed: int) -> None:
    rng = random.Random(seed)
    ahead = rng.randrange(-(10**15), 10**15)
    alignment = Alignment(asked(rng, number * MILLISECOND, ahead, 50_000) for number in range(8))
    assert not alignment.is_shared
    assert abs(alignment.here(ahead + 3 * MILLISECOND) - 3 * MILLISECOND) <= alignment.uncertainty
    assert alignment.uncertainty < 500_000


def test_of_the_answers_of_one_while_the_least_uncertain_counts() -> None:
    some = [ClockSample(0, 5000, 100), ClockSample(1, 5050, 10), ClockSample(2, 5020, 90)]
    alignment = Alignment(some)
    assert (alignment.uncertainty, alignment.ahead, alignment.here(5000)) == (10, 5050, -50)


@pytest.mark.parametrize("seed", range(20))
def test_a_drift_is_followed(seed: int) -> None:
    rng = random.Random(seed)
    ahead, drift = rng.randrange(-(10**12), 10**12), rng.uniform(-1e-4, 1e-4)

    def there(here: int) -> int:
        return here + ahead + int(drift * here)

    samples = []
    for at in range(0, 12 * WINDOW, WINDOW // 8):
        out, back = (20_000 + int(rng.expovariate(1 / 20_000)) for _ in range(2))
        samples.append(clock_sample(at, there(at + out), at + out + back))
    alignment = Alignment(samples)
    slack = int(1e-4 * WINDOW)  # between two answers it is taken to drift evenly, and before and after not at all
    for here in range(WINDOW, 11 * WINDOW, WINDOW // 3):
        assert abs(alignment.here(there(here)) - here) <= alignment.uncertainty + slack


def test_clocks_that_no_answer_tells_apart_are_one() -> None:
    rng = random.Random(7)
    alignment = Alignment(asked(rng, number * MILLISECOND, 0, 50_000) for number in range(50))
    assert alignment.is_shared
    assert (alignment.uncertainty, alignment.here(123)) == (0, 123)


def test_one_answer_that_tells_clocks_apart_is_enough() -> None:
    late = [ClockSample(number, 900, 1000) for number in range(10)]
    assert Alignment(late).is_shared
    assert not Alignment([*late, ClockSample(11, 900, 100)]).is_shared


def test_without_an_answer_times_are_taken_as_they_are() -> None:
    assert Alignment().here(42) == 42
