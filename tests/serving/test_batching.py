"""Which requests run together and when, in virtual time; and how their rows become arrays and are cut apart."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flowrt.base.errors import GraphError
from flowrt.serving.batching import Batching, Forming
from flowrt.serving.joining import cut, joined, size_of


@dataclass(frozen=True)
class Asked:
    arrived: float
    rows: int | None = 1
    group: str = "a"


def test_a_batch_waits_for_others_as_long_as_it_may() -> None:
    forming: Forming[Asked] = Forming(8, 0.5)
    one, two = Asked(1.0), Asked(1.4, 2)
    forming.add(one)
    forming.add(two)
    assert forming.due() == 1.5
    assert forming.take(1.49) == []
    assert forming.take(1.5) == [one, two]
    assert forming.take(9) == []
    assert forming.due() is None


def test_a_full_batch_waits_for_nobody() -> None:
    forming: Forming[Asked] = Forming(4, 100)
    asked = [Asked(float(i), 2) for i in range(3)]
    for request in asked[:2]:
        forming.add(request)
    assert forming.take(2.0) == asked[:2]
    forming.add(asked[2])
    assert forming.take(2.0) == []


def test_requests_without_rows_take_no_place_in_a_batch() -> None:
    forming: Forming[Asked] = Forming(1, 0.0)
    asked = [Asked(0.0, 0), Asked(1.0, 0), Asked(2.0, 1)]
    for request in asked:
        forming.add(request)
    assert forming.take(9) == asked


def test_what_does_not_fit_begins_the_next_batch_and_order_is_kept() -> None:
    forming: Forming[Asked] = Forming(4, 0.0)
    asked = [Asked(0.0, 3), Asked(1.0, 2), Asked(2.0, 1)]
    for request in asked:
        forming.add(request)
    assert [forming.take(9), forming.take(9), forming.take(9)] == [asked[:1], asked[1:], []]


def test_groups_and_those_that_run_alone_are_apart_and_the_oldest_is_next() -> None:
    forming: Forming[Asked] = Forming(4, 0.0)
    asked = [Asked(0.0, group="a"), Asked(1.0, group="b"), Asked(2.0, None), Asked(3.0, 9, "a"), Asked(4.0, group="b")]
    for request in asked:
        forming.add(request)
    found = [forming.take(9) for _ in range(5)]
    assert found == [[asked[0]], [asked[1], asked[4]], [asked[2]], [asked[3]], []]


def test_at_the_end_all_are_ready() -> None:
    forming: Forming[Asked] = Forming(4, 100)
    forming.add(Asked(0.0))
    assert forming.take(0.0) == []
    assert forming.take(0.0, ending=True) == [Asked(0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_each_request_runs_once_in_a_batch_of_its_group_in_order_and_within_its_time(seed: int) -> None:
    rng = random.Random(seed)
    most, delay = rng.choice([1, 4, 7]), rng.choice([0.0, 0.3])
    forming: Forming[Asked] = Forming(most, delay)
    now, asked, ran = 0.0, [], []
    for _ in range(200):
        now += rng.random() / 10
        request = Asked(now, rng.choice([None, 0, 1, 2, most, most + 3]), rng.choice("ab"))
        asked.append(request)
        forming.add(request)
        due = forming.due()
        while batch := forming.take(now):
            ran.append(batch)
        assert forming.due() is None or forming.due() > now
        assert due is None or due <= now + delay
    while batch := forming.take(now, ending=True):
        ran.append(batch)
    assert sorted(request.arrived for batch in ran for request in batch) == [request.arrived for request in asked]
    for batch in ran:
        assert len({request.group for request in batch}) == 1
        assert len(batch) == 1 or sum(request.rows or 0 for request in batch) <= most
        assert len(batch) == 1 or None not in {request.rows for request in batch}
        assert batch == sorted(batch, key=lambda request: request.arrived)


@pytest.mark.parametrize("most", [1, 5, 8])
@pytest.mark.parametrize("sizes", [[1], [3], [0], [0, 2, 0], [1, 1, 1], [4, 4], [13], [0, 0]])
def test_rows_are_joined_filled_up_run_and_cut_apart(sizes: list[int], most: int) -> None:
    rng = np.random.default_rng(len(sizes))
    requests = [[rng.normal(size=(size, 2)), rng.integers(0, 9, (size, 1, 3))] for size in sizes]
    runs: list[Any] = []
    for arrays, count in joined(requests, most):
        assert {len(array) for array in arrays} == {size_of(count, most)}
        runs.append(([arrays[0] * 2, arrays[1] + 1], len(arrays[0]), count))
    assert sum(count for _, _, count in runs) == sum(sizes)
    for request, (one, other) in zip(requests, cut(runs, sizes), strict=True):
        np.testing.assert_array_equal(one, request[0] * 2)
        np.testing.assert_array_equal(other, request[1] + 1)


def test_runs_have_few_sizes() -> None:
    assert [size_of(rows, 6) for rows in range(7)] == [0, 1, 2, 4, 4, 6, 6]


def test_a_request_that_fills_a_run_is_not_copied() -> None:
    array = np.ones((4, 2))
    ((arrays, count),) = joined([[array]], 8)
    assert arrays[0] is array
    assert count == 4


def test_of_one_input_alone_rows_are_filled_up_too() -> None:
    ((arrays, count),) = joined([[np.arange(3)]], 8)
    assert [array.tolist() for array in arrays] == [[0, 1, 2, 2]]
    assert count == 3


def test_outputs_of_runs_whose_rows_have_different_shapes_are_refused() -> None:
    runs = [([np.zeros((4, size))], 4, 4) for size in (2, 3)]
    with pytest.raises(GraphError, match="ask for fewer rows at once"):
        cut(runs, [8])


def test_an_output_without_a_row_for_each_is_refused() -> None:
    with pytest.raises(GraphError, match="serve this model with max_batch=1"):
        cut([([np.float32([1, 2])], 4, 3)], [3])
    with pytest.raises(GraphError, match="serve this model with max_batch=1"):
        cut([([np.asarray(np.float32(1))], 4, 3)], [3])


def test_the_least_of_each_setting_is_one_that_makes_sense() -> None:
    least = Batching(max_batch=1, max_delay=0, max_waiting=1, max_bytes=1, timeout=0)
    assert (least.max_batch, least.timeout) == (1, 0)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_delay": -1.0}, {"max_waiting": 1.5}, {"timeout": "1s"}])
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=next(iter(wrong))):
        Batching(**wrong)
