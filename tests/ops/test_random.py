"""Random ops: the generator's published words, the distributions, and what decides a value."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
from test_units import in_ranges

import flowrt.ops as fr
from flowrt.base.errors import SpecError
from flowrt.graph import Graph, Tensor
from flowrt.kernels.launch import Prepared
from flowrt.kernels.ops.random import fill_normal, fill_truncated, fill_uniform, lanes, philox, tensor_key
from flowrt.session import eager

assert eager

# Random123, kat_vectors: philox4x32 10
PUBLISHED = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


FILLED = {"normal": fill_normal, "truncated_normal": fill_truncated, "uniform": fill_uniform}


def words(text: str) -> list[np.uint64]:
    return [np.uint64(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_generator_makes_the_published_words(counter: str, key: str, expected: str) -> None:
    assert list(philox(*words(counter), *words(key))) == words(expected)


def sample(tensor: Tensor, seed: int = 0, step: int = 0) -> np.ndarray[Any, Any]:
    """What the random tensor is at a step of a run with ``seed``."""
    run = np.array([0, step, seed, 0], np.int64)
    (array,) = eager.evaluate(tensor.op.op, [np.int64(tensor.shape), np.zeros(0, np.int64)], tensor.op.attrs, run)
    return array


def likelihood(x: np.ndarray[Any, Any], law: str, *parameters: float) -> float:
    """How likely numbers of that law are no nearer to it than ``x``."""
    from scipy import (
        stats,  # here, since it takes seconds, and every process that shares in the tests imports this file
    )

    return float(stats.kstest(x, law, args=parameters).pvalue)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uniform_numbers_are_uniform(dtype: str) -> None:
    with Graph():
        x = sample(fr.random.uniform((40_001,), -2.0, 3.0, dtype, seed=11))
    assert x.dtype == dtype
    assert x.min() >= -2
    assert x.max() < 3
    assert likelihood(x, "uniform", -2, 5) > 0.01
    assert len(np.unique(x)) > 39_900


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normal_numbers_are_normal_and_neighbours_do_not_depend_on_each_other(dtype: str) -> None:
    with Graph():
        x = sample(fr.random.normal((40_003,), 1.0, 2.0, dtype, seed=12)).astype(np.float64)
    z = (x - 1) / 2
    assert likelihood(z, "norm") > 0.01
    for order, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((z**order).mean() - expected) < 0.1
    for lag in (1, 2, 3, 4):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_truncated_numbers_are_the_normal_ones_within_two_deviations(dtype: str) -> None:
    with Graph():
        x = sample(fr.random.truncated_normal((40_003,), 1.0, 0.5, dtype, seed=14)).astype(np.float64)
    z = (x - 1) / 0.5
    assert likelihood(z, "truncnorm", -2, 2) > 0.01
    assert 1.999 < abs(z).max() <= 2
    assert z.std() == pytest.approx(0.8796, abs=0.01)


def test_a_value_is_decided_by_seed_name_and_step() -> None:
    with Graph():
        a, b = fr.random.normal((50,)), fr.random.normal((50,))
        c = fr.random.normal((50,), seed=5)
    draws = [sample(t, seed, step) for t in (a, b, c) for seed, step in ((0, 0), (0, 1), (1, 0), (-1, 2**40))]
    own = {8: 10}  # an op with a seed of its own does not ask for the run's
    for i, x in enumerate(draws):
        for j, y in enumerate(draws[:i]):
            assert np.array_equal(x, y) == (own.get(j) == i)
    np.testing.assert_array_equal(sample(a, 3, 4), sample(a, 3, 4))


def test_the_same_program_draws_the_same_again_whatever_stands_beside_it() -> None:
    def build(extra: bool) -> list[np.ndarray[Any, Any]]:
        with Graph(seed=7):
            if extra:
                fr.add(1, 2)
            first, named = fr.random.uniform((3,)), fr.random.normal((3,), name="start")
        return [sample(first), sample(named)]

    for x, y in zip(build(False), build(True), strict=True):
        np.testing.assert_array_equal(x, y)


def test_names_are_hashed_as_ever() -> None:
    """What a checkpointed run would draw next must not change from version to version."""
    with Graph(seed=7):
        x = fr.random.uniform((2, 3))
    digest = hashlib.blake2b(b"random_uniform#stream", digest_size=8).digest()
    assert x.op.attrs["stream"] == int.from_bytes(digest, "little") & (2**63 - 1)
    assert x.op.attrs["seed"] == 7


def test_longer_tensors_begin_like_shorter_ones() -> None:
    for dtype in ("float32", "float64"):
        long = fr.random.normal((13,), dtype=dtype, seed=1)
        for n in range(13):
            np.testing.assert_array_equal(fr.random.normal((n,), dtype=dtype, seed=1), long[:n])
        assert fr.random.normal((), dtype=dtype, seed=1) == long[0]


def test_outside_a_graph_a_seed_repeats_and_no_seed_does_not() -> None:
    np.testing.assert_array_equal(fr.random.uniform((4,), seed=3), fr.random.uniform((4,), seed=3))
    assert not np.array_equal(fr.random.uniform((4,)), fr.random.uniform((4,)))


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_draws_of_one_seed_outside_a_graph_do_not_follow_from_each_other(seed: int) -> None:
    def looked_at(draw: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """A pair of normal numbers may be made of a pair of uniform ones."""
        pairs = [np.repeat(draw[first::2], 2) for first in (0, 1)]
        return [draw, abs(draw - draw.mean()), *pairs, *(abs(pair - pair.mean()) for pair in pairs)]

    ones = np.ones(100_000, np.float32)
    uniform, normal = (draw(ones.shape, seed=seed) for draw in (fr.random.uniform, fr.random.normal))
    draws = [looked_at(draw) for draw in (uniform, normal, fr.nn.dropout(ones, 0.3, seed))]
    for one, other in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(one, other)[: len(one), len(one) :]).max() < 0.02


def test_what_is_left_out_of_the_range_never_comes() -> None:
    x = fr.random.uniform((200_000,), 16_777_215.0, 16_777_216.0, seed=1)  # neighbours in float32
    assert set(x.tolist()) == {16_777_215.0}


def test_integers_and_empty_ranges_are_refused() -> None:
    with pytest.raises(SpecError, match="random numbers are floats"):
        fr.random.normal((2,), dtype="int32")
    with pytest.raises(SpecError, match="low must not be above high"):
        fr.random.uniform((2,), 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["normal", "truncated_normal", "uniform"])
def test_blocks_side_by_side_are_what_each_is_by_itself(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, numbers = 1035, (-1.0, 3.0)  # low and high, or mean and deviation
    with Graph():
        tensor = getattr(fr.random, name)((size,), *numbers, dtype, seed=9)
    got = sample(tensor)
    monkeypatch.setattr(Prepared, "run", in_ranges(np.random.default_rng(6)))
    np.testing.assert_array_equal(sample(tensor), got)
    want, key = (
        np.empty(size, dtype),
        tensor_key(np.zeros(0, np.int64), 1, 9, tensor.op.attrs["stream"], np.zeros(4, np.int64)),
    )
    with np.errstate(over="ignore"):
        for block in range(-(-size // lanes(want))):
            FILLED[name](want, block, *numbers, 0, 0, key)
    np.testing.assert_allclose(got, want, 2e-7 if dtype == "float32" else 3e-15, 2e-14)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 8, 517, 1030, 1034, 1035])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["normal", "truncated_normal", "uniform"])
def test_a_stretch_is_what_the_whole_has_there(name: str, dtype: str, first: int) -> None:
    with Graph():
        whole = getattr(fr.random, name)((1035,), 0.0, 3.0, dtype, seed=9)
        make, attrs = whole.op.op, {**whole.op.attrs, "first": first}
        shares = [whole.graph.apply(make, (fr.constant([n]), whole.op.inputs[1]), attrs)[0] for n in (1035 - first, 3)]
    rest, three = map(sample, shares)
    np.testing.assert_array_equal(rest, sample(whole)[first:])
    np.testing.assert_array_equal(three[: 1035 - first], rest[:3])
