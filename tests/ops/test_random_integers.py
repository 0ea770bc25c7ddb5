"""Random integers and orders: what the generator's words come to, at any width, and how likely each is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_random import sample
from test_units import in_ranges

import flowrt as fr
from flowrt.kernels.launch import Prepared
from flowrt.kernels.ops.random import block_words, counted_from, scaled, tensor_key, widely_scaled

RANGES = [
    (0, 6, "int32"),
    (-3, 3, "int8"),
    (0, 256, "uint8"),
    (5, 6, "int64"),
    (-(2**31), 2**31, "int32"),
    (0, 2**32, "uint64"),
    (-7, 2**32 - 6, "int64"),  # one more than 64 bits are enough for
    (-(2**63), 2**63, "int64"),
    (0, 2**64, "uint64"),
    (3, 2**64 - 2, "uint64"),
    (2**63 - 5, 2**63, "int64"),
]


def words_of(count: int, attrs: Any) -> list[list[int]]:
    """The words of the first blocks."""
    with np.errstate(over="ignore"):
        key = tensor_key(np.zeros(0, np.int64), 1, attrs["seed"], attrs["stream"], np.zeros(4, np.int64))
        return [[int(word) for word in block_words(block, key)] for block in range(count)]


@pytest.mark.parametrize(("low", "high", "dtype"), RANGES)
def test_integers_are_their_number_times_random_bits(
    low: int, high: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fr.Graph():
        tensor = fr.random.randint((301,), low, high, dtype, seed=9)
    many, wanted = high - low, []
    for a, b, c, d in words_of(301 if many > 2**32 else 151, tensor.op.attrs):
        halves = [(a << 32 | b) << 64 | c << 32 | d] if many > 2**32 else [(a << 32 | b) << 64, (c << 32 | d) << 64]
        wanted += [low + (half * many >> 128) for half in halves]
    assert sample(tensor).tolist() == wanted[:301]
    monkeypatch.setattr(Prepared, "run", in_ranges(np.random.default_rng(6)))
    assert sample(tensor).tolist() == wanted[:301]


def test_devices_scale_words_as_whole_numbers_are() -> None:
    edges = [0, 1, 2**31, 2**32 - 1]
    for a, b, c, d in itertools.product(edges, repeat=4):
        word = [np.uint64(n) for n in (a, b, c, d)]
        for many in (1, 3, 2**32):
            assert scaled(word[0], word[1], np.uint64(many)) == (a << 32 | b) * many >> 64
        for many in (2**32 + 1, 2**63 + 1, 2**64 - 1, 2**64):
            whole = (a << 96 | b << 64 | c << 32 | d) * many >> 128
            assert widely_scaled(*word, np.uint64(many % 2**64)) == whole
        assert (
            counted_from(word[0] << np.uint64(32) | word[1], word[2] << np.uint64(32) | word[3])
            == ((a << 32 | b) + (c << 32 | d)) % 2**64
        )


def test_bounds_may_be_what_a_step_computes() -> None:
    with fr.Graph(seed=3) as graph:
        x = fr.placeholder("float32", (None,))
        resampled = fr.random.randint((40, fr.size(x)), 0, fr.size(x))
        between = fr.random.randint((4000,), -fr.size(x), fr.size(x), "int8")
    with fr.BlockingSession(graph) as session:
        for n in (1, 7, 3):
            rows, near = session.run([resampled, between], {x: np.zeros(n, np.float32)})
            assert rows.shape == (40, n)
            assert set(rows.ravel().tolist()) == set(range(n))
            assert set(near.tolist()) == set(range(-n, n))
            assert near.dtype == np.int8


def test_each_integer_is_as_likely() -> None:
    counts = np.bincount(fr.random.randint((600_000,), 0, 6, "uint8", seed=1), minlength=6)
    assert abs(counts - 100_000).max() < 4 * np.sqrt(600_000 * 5 / 36)


def test_orders_hold_everything_once_and_are_as_likely() -> None:
    with fr.Graph(seed=3) as graph:
        count, rows = fr.placeholder("int64", ()), fr.placeholder("float32", (None, 2))
        order, mixed, fixed = fr.random.permutation(count), fr.random.permutation(rows), fr.random.permutation(3)
    assert (order.shape, mixed.shape, fixed.shape) == ((None,), (None, 2), (3,))
    given, seen = np.arange(10, dtype=np.float32).reshape(5, 2), {}
    with fr.BlockingSession(graph) as session:
        step = session.compile([order, mixed, fixed], feeds=[count, rows])
        for n in range(1200):
            found = step(n % 7, given)
            assert sorted(found[0]) == list(range(n % 7))
            assert sorted(map(tuple, found[1])) == list(map(tuple, given))
            seen[tuple(found[2])] = seen.get(tuple(found[2]), 0) + 1
    assert len(seen) == 6
    assert all(abs(times - 200) < 60 for times in seen.values())


def test_orders_of_one_seed_are_the_same_in_any_run_and_new_in_each_iteration() -> None:
    assert fr.random.permutation(50, seed=1).tolist() == fr.random.permutation(np.arange(50), seed=1).tolist()
    assert fr.random.permutation(50).tolist() != fr.random.permutation(50).tolist()
    assert fr.random.permutation(0).tolist() == []
    with fr.Graph() as graph:
        orders = fr.map_fn(lambda _: fr.random.permutation(20, seed=2), np.arange(6))
    with fr.BlockingSession(graph) as session:
        found = session.run(orders)
    assert len({tuple(order) for order in found.tolist()}) == 6


MISFITS = [
    (lambda: fr.random.randint((2,), 5, 5), "no integer from low=5 up to high=5"),
    (lambda: fr.random.randint((2,), 0, 257, "uint8"), "uint8 holds integers from 0 to 255, got low=0, high=257"),
    (lambda: fr.random.randint((2,), -1, 2, "uint64"), "got low=-1"),
    (lambda: fr.random.randint((2,), 0, 3, "float32"), "of an integer dtype, not float32"),
    (lambda: fr.random.randint((2,), 0.5, 3), "low is an integer, not 0.5"),
    (lambda: fr.random.randint(0, 10, (2,)), r"high is an integer, not \(2,\); the shape comes first"),
    (lambda: fr.random.permutation(2.5), "so many integers, or of a tensor's slices"),
    (lambda: fr.random.permutation(-1), "negative sizes"),
    (lambda: fr.random.truncated_normal((2,), stddev=-1), "stddev is a finite number from 0 up"),
]


@pytest.mark.parametrize(("call", "says"), MISFITS)
def test_what_cannot_be_drawn_says_why(call: Any, says: str) -> None:
    with pytest.raises(fr.SpecError, match=says):
        call()
