"""Softmax and the losses made of it against float64 and long doubles: small powers, long rows, what is not finite.

Kernels of float32 take exponentials of what is 0 at most by an arithmetic of their own, and add up short stretches in
float32: rows here are longer than any stretch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt.ops as fr
from flowrt.ops import entropy

Array = np.ndarray[Any, Any]
TINY = float(np.finfo(np.float32).tiny)
ROUNDED = 4e-6  # an entry 40 below the largest is rounded to half a unit of 40, and e to that power likewise
LENGTHS = [1, 7, 32, 33, 255, 256, 257, 2049, 50_000]


def log_softmax(x: Array) -> Array:
    """The judge, in float64 or wider."""
    wide = x.astype(np.promote_types(x.dtype, np.float64))
    apart = wide - wide.max(-1, keepdims=True)
    return apart - np.log(np.exp(apart).sum(-1, keepdims=True))


def rows(length: int) -> Array:
    print(f"seed {length}")
    return np.random.default_rng(length).normal(0, 5, (3, length)).astype(np.float32)


def test_the_less_likely_of_two_is_within_three_units_or_below_the_normal_floats() -> None:
    rng = np.random.default_rng(14)
    print("seed 14")
    exponents = (np.arange(0, 255, dtype=np.uint32) << np.uint32(23))[:, None] | rng.integers(0, 2**23, (255, 64), "I")
    apart = -np.concatenate([exponents.ravel().view(np.float32), np.linspace(0, 104, 200_001, dtype=np.float32)])
    got = fr.nn.softmax(np.stack([np.zeros_like(apart), apart], 1))[:, 1]
    want = np.exp(apart.astype(np.float64))
    want /= 1 + want
    near = want >= TINY * np.exp(0.05)
    units = np.abs(got - want)[near] / np.spacing(want[near].astype(np.float32))
    assert units.max() <= 3
    assert np.all((got[~near] == 0) | (np.abs(got[~near] - want[~near]) <= 1e-6 * want[~near]))


@pytest.mark.parametrize("length", LENGTHS)
def test_long_rows_lose_no_more_digits_than_short_ones(length: int) -> None:
    x = rows(length)
    want, likely = log_softmax(x), np.exp(log_softmax(x))
    np.testing.assert_allclose(fr.nn.softmax(x), likely, rtol=ROUNDED)
    np.testing.assert_allclose(fr.nn.log_softmax(x), want, rtol=1e-6, atol=2e-6)
    labels = np.int32([0, length // 2, length - 1])
    np.testing.assert_allclose(
        fr.nn.softmax_cross_entropy(x, labels), -want[np.arange(3), labels], rtol=1e-6, atol=2e-6
    )
    weights = likely.astype(np.float32)
    np.testing.assert_allclose(
        fr.nn.softmax_cross_entropy(x, weights), -(weights.astype(np.float64) * want).sum(-1), rtol=1e-6, atol=2e-6
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_slopes_of_losses_are_as_exact_as_their_softmax(length: int) -> None:
    x, each = rows(length), np.float32([1, -2, 0.5])
    labels, hot = np.int32([0, length // 2, length - 1]), np.zeros((3, length), np.float32)
    hot[np.arange(3), labels] = 1
    want = each[:, None] * (np.exp(log_softmax(x)) - hot)
    np.testing.assert_allclose(entropy.class_cross_entropy_slope(x, labels, each), want, rtol=ROUNDED, atol=5e-7)
    np.testing.assert_allclose(entropy.cross_entropy_slope(x, hot, each), want, rtol=ROUNDED, atol=5e-7)


@pytest.mark.parametrize("length", [1, 10, 32, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_are_computed_together_answer_as_each_by_itself(length: int, dtype: Any) -> None:
    rng = np.random.default_rng(length)
    x, weights = rng.normal(0, 5, (700, length)).astype(dtype), rng.random((700, length)).astype(dtype)
    labels, each = rng.integers(0, length, 700), rng.normal(size=700).astype(dtype)
    x[5, 0], x[600] = np.nan, np.inf
    functions: list[tuple[Any, tuple[Array, ...]]] = [
        (fr.nn.softmax, (x,)),
        (fr.nn.log_softmax, (x,)),
        (fr.nn.softmax_cross_entropy, (x, labels)),
        (fr.nn.softmax_cross_entropy, (x, weights)),
        (entropy.class_cross_entropy_slope, (x, labels, each)),
        (entropy.cross_entropy_slope, (x, weights, each)),
    ]
    for function, given in functions:
        alone = [function(*(a[i : i + 1] for a in given)) for i in (0, 4, 5, 6, 203, 204, 600, 699)]
        together = function(*given)
        np.testing.assert_array_equal(together[[0, 4, 5, 6, 203, 204, 600, 699]], np.concatenate(alone))
        assert np.isfinite(np.delete(together, (5, 600), 0)).all()


def test_rows_of_doubles_are_exact_to_doubles() -> None:
    x = rows(1000).astype(np.float64) / 3
    want = log_softmax(x.astype(np.longdouble))
    np.testing.assert_allclose(fr.nn.softmax(x), np.exp(want).astype(np.float64), rtol=1e-13)
    np.testing.assert_allclose(fr.nn.log_softmax(x), want.astype(np.float64), rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_impossible_has_no_share_and_what_is_no_number_spoils_its_row_alone(dtype: Any) -> None:
    x = np.array([[0, -np.inf, 0], [0, np.nan, 0], [-np.inf] * 3, [0, np.inf, 0], [-1e30, 0, -1e30]], dtype)
    half, nan = [0.5, 0, 0.5], [np.nan] * 3
    got = fr.nn.softmax(x)
    np.testing.assert_array_equal(got, np.array([half, nan, nan, nan, [0, 1, 0]], dtype))
    np.testing.assert_array_equal(np.isnan(fr.nn.log_softmax(x)).any(-1), [False, True, True, True, False])
    np.testing.assert_array_equal(fr.nn.softmax(x.T.copy(), axis=0).T, got)


def test_weights_of_0_ask_nothing_of_the_impossible() -> None:
    x = np.float32([[0, -np.inf, 0]])
    np.testing.assert_allclose(fr.nn.softmax_cross_entropy(x, np.float32([[0.5, 0, 0.5]])), [np.log(2)], rtol=1e-6)
    assert fr.nn.softmax_cross_entropy(x, np.float32([[0.5, 0.5, 0]]))[0] == np.inf
