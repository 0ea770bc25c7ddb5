"""Choosing devices by simulation: exhaustive search is the judge of what is found, naive bookkeeping of the times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from flowrt.passes.earliest_finish import Work, WorkItem, choose, simulate

LATENCY, BANDWIDTH = 2e-4, 1e9


def crossing(source: int, target: int, nbytes: float) -> float:
    return LATENCY + nbytes / BANDWIDTH


def drawn(seed: int, units: int = 6, devices: int = 3, items: int = 9) -> Work:
    """Random work: some items take nothing, some units have several, some fit the first device alone."""
    rng = random.Random(seed)
    made = []
    for number in range(items):
        base = rng.choice([0, 1e-4, 1e-3, 5e-3])
        seconds = tuple(base * rng.choice([1, 1, 2]) for _ in range(devices))
        if rng.random() < 0.1:
            seconds = (seconds[0], *[math.inf] * (devices - 1))
        inputs = tuple((source, rng.choice([1e3, 1e5, 1e6])) for source in range(number) if rng.random() < 2.7 / items)
        made.append(WorkItem(number if number < units else rng.randrange(units), seconds, inputs))
    return Work(tuple(made), devices, crossing)


@pytest.mark.parametrize(("devices", "far"), [(2, 0.09), (3, 0.06)])
def test_what_is_chosen_is_near_the_best_of_all_choices(devices: int, far: float) -> None:
    ratios = []
    for seed in range(150):
        work = drawn(seed, devices=devices)
        best = min(simulate(work, devices) for devices in itertools.product(*work.able))
        chosen = choose(work)
        assert chosen.seconds == pytest.approx(simulate(work, chosen.devices))
        assert best <= chosen.seconds * (1 + 1e-9) <= chosen.alone * (1 + 1e-9)
        ratios.append(chosen.seconds / best if best else 1.0)
    assert sum(ratios) / len(ratios) < 1.02
    assert sum(ratio > 1.05 for ratio in ratios) <= len(ratios) * far


def test_units_are_where_all_of_their_pieces_can_be() -> None:
    for seed in range(40):
        work = drawn(seed)
        chosen = choose(work)
        assert all(device in able for device, able in zip(chosen.devices, work.able, strict=True))
        assert all(math.isfinite(item.seconds[chosen.devices[item.unit]]) for item in work.items)


def two_branches(seconds: float, nbytes: float = 1e3, length: int = 4) -> Work:
    """Two chains of a variable and products, joined at the end."""
    items: list[WorkItem] = []
    ends = []
    for _ in range(2):
        last: tuple[tuple[int, float], ...] = ()
        for _ in range(length):
            items.append(WorkItem(len(items), (0.0, 0.0)))  # a variable
            variable = (len(items) - 1, 4e6)
            items.append(WorkItem(len(items), (seconds, seconds), (*last, variable)))
            last = ((len(items) - 1, nbytes),)
        ends.append(last[0])
    items.append(WorkItem(len(items), (1e-6, 1e-6), tuple(ends)))
    return Work(tuple(items), 2, crossing)


def branches_of(devices: Sequence[int]) -> tuple[set[int], set[int]]:
    half = (len(devices) - 1) // 2
    return set(devices[:half]), set(devices[half:-1])


def test_long_branches_part_and_take_their_variables_along() -> None:
    chosen = choose(two_branches(5e-3))
    first, second = branches_of(chosen.devices)
    assert len(first) == len(second) == 1
    assert first != second
    assert chosen.seconds == pytest.approx(4 * 5e-3 + crossing(0, 1, 1e3) + 1e-6)
    assert chosen.alone == pytest.approx(8 * 5e-3 + 1e-6)


def test_what_is_short_or_hands_much_over_stays_on_one_device() -> None:
    for work in (two_branches(1e-5), two_branches(5e-3, nbytes=1e8)):
        chosen = choose(work)
        assert set(chosen.devices) == {0}
        assert chosen.seconds == chosen.alone


def test_a_value_crosses_once_to_each_device_and_one_after_another() -> None:
    source = WorkItem(0, (1e-3,) * 3)
    users = tuple(WorkItem(1 + n, (1e-3,) * 3, ((0, 1e6),)) for n in range(4))
    work = Work((source, *users), 3, crossing)
    once = crossing(0, 1, 1e6)
    assert simulate(work, (0, 1, 1, 0, 0)) == pytest.approx(1e-3 + once + 2e-3)
    assert simulate(work, (0, 1, 2, 0, 0)) == pytest.approx(1e-3 + 2 * once + 1e-3)


def test_the_order_is_by_what_is_left_to_do() -> None:
    """A long chain goes before a short item that could go first, or it would end later."""
    short, begin = WorkItem(0, (1e-3, 1e-3)), WorkItem(1, (1e-3, 1e-3))
    rest = WorkItem(2, (4e-3, 4e-3), ((1, 8.0),))
    assert simulate(Work((short, begin, rest), 2, crossing), (0, 0, 1)) == pytest.approx(5e-3 + crossing(0, 1, 8.0))


def test_nothing_and_a_single_device_are_work_too() -> None:
    assert choose(Work((), 1, crossing)).devices == ()
    only = Work((WorkItem(0, (1e-3,)), WorkItem(1, (1e-3,), ((0, 8.0),))), 1, crossing)
    assert choose(only).devices == (0, 0)
    assert choose(only).seconds == pytest.approx(2e-3)


def test_the_same_work_has_the_same_answer_and_large_work_an_end() -> None:
    work = drawn(7, units=2000, devices=4, items=3000)
    assert choose(work) == choose(work)
