"""Means, variances and what is normalised by them, against float64: far from zero, constant, long, empty, infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.gradients import gradients
from flowrt.ops import nn
from flowrt.ops.moments import standardize, sums_about

Array = np.ndarray[Any, Any]
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # a shape and the axes that are reduced
    "long rows": ((3, 50_001), (1,)),
    "short rows": ((2000, 17), (1,)),
    "narrow columns": ((20_001, 5), (0,)),
    "columns taken together": ((4096, 32), (0,)),
    "wide columns": ((130, 700), (0,)),
    "images": ((9, 13, 14, 24), (0, 1, 2)),
    "ends": ((31, 8, 513), (0, 2)),
    "middle": ((5, 300, 6), (1,)),
    "all": ((70_001,), (0,)),
}


def drawn(shape: tuple[int, ...], offset: float, dtype: Any = np.float32) -> Array:
    print("seed 21")
    return (offset + np.random.default_rng(21).normal(size=shape)).astype(dtype)


def normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array]:
    """The judge: entries in units of their deviation, in float64, and that deviation."""
    wide = x.astype(np.float64)
    deviation = np.sqrt(wide.var(axes, keepdims=True) + epsilon)
    return (wide - wide.mean(axes, keepdims=True)) / deviation, deviation


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
@pytest.mark.parametrize("form", FORMS)
def test_a_mean_far_from_zero_costs_the_variance_no_digits(form: str, offset: float) -> None:
    shape, axes = FORMS[form]
    x = drawn(shape, offset)
    wide = x.astype(np.float64)
    mean, variance = nn.moments(x, axes)
    np.testing.assert_allclose(mean, wide.mean(axes), rtol=4e-7, atol=4e-7)
    np.testing.assert_allclose(variance, wide.var(axes), rtol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_constant_varies_by_exactly_nothing(form: str) -> None:
    shape, axes = FORMS[form]
    for value in (0.1, -1e4 / 3, 3e38):
        mean, variance = nn.moments(np.full(shape, value, np.float32), axes)
        np.testing.assert_array_equal(mean, np.full_like(mean, value))
        np.testing.assert_array_equal(variance, np.zeros_like(variance))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mean_whose_square_is_no_float64_spoils_nothing(axis: int) -> None:
    x = np.full((3, 3), 1.5e160) * (1 + np.arange(3) / 2**40)
    mean, variance = nn.moments(x, axis)
    np.testing.assert_allclose(mean, (x / 3).sum(axis))
    np.testing.assert_array_equal(variance, (x - (x / 3).sum(axis, keepdims=True)).var(axis) if axis else np.zeros(3))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_spoils_its_own_result_alone(form: str, value: float) -> None:
    shape, axes = FORMS[form]
    x = drawn(shape, 10)
    x[tuple(n // 2 for n in shape)] = value
    with np.errstate(invalid="ignore"):
        means, variances = x.astype(np.float64).mean(axes), x.astype(np.float64).var(axes)
    mean, variance = nn.moments(x, axes)
    np.testing.assert_allclose(mean, means, rtol=2e-7)
    np.testing.assert_allclose(variance, variances, rtol=5e-6)


@pytest.mark.parametrize(("shape", "axis"), [((0, 4), 0), ((4, 0), 1), ((0,), 0), ((3, 0, 2), 1)])
def test_of_no_entries_both_are_nan(shape: tuple[int, ...], axis: int) -> None:
    for found in nn.moments(np.zeros(shape, np.float32), axis):
        assert found.shape == np.zeros(shape).sum(axis).shape
        assert np.isnan(found).all()
    for found in nn.moments(np.zeros((0, 3), np.float32), 1):
        assert found.shape == (0,)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("form", FORMS)
def test_weighted_sums_about_the_mean_are_as_exact(form: str, offset: float) -> None:
    shape, axes = FORMS[form]
    x, weights = drawn(shape, offset), drawn(shape[::-1], 0).reshape(shape)
    mean = x.mean(axes, keepdims=True, dtype=np.float64).astype(np.float32)
    total, product = sums_about(x, weights, mean)
    wide, apart = weights.astype(np.float64), x.astype(np.float64) - mean
    bound = 2e-6 * np.sqrt(np.prod([shape[a] for a in axes]))  # of sums of as many numbers about 1, and their products
    np.testing.assert_allclose(total, wide.sum(axes, keepdims=True), atol=bound)
    np.testing.assert_allclose(product, (wide * apart).sum(axes, keepdims=True), atol=2 * bound)
    got = standardize(x, mean, np.float32(0.5), np.float32(3))
    np.testing.assert_allclose(got, apart * 0.5 + 3, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("axis", [0, 1], ids=["batch_norm", "layer_norm"])
def test_norms_and_their_gradients_keep_their_digits_far_from_zero(axis: int, offset: float) -> None:
    """Half a unit of the mean, a float, is what all may be off by; weights' gradients by its sum with ``dy``."""
    shape, kept = (257, 131), (131,)
    x, scale, shift, dy = drawn(shape, offset), drawn(kept, 1), drawn(kept, 0), drawn(shape[::-1], 0).reshape(shape)
    with fr.Graph() as graph:
        given = [fr.placeholder("float32", a.shape) for a in (x, scale, shift)]
        y = fr.nn.layer_norm(*given) if axis else fr.nn.batch_norm(*given, axis=0)[0]
        made = [y, *gradients(y, given, [dy])]
    with fr.BlockingSession(graph) as session:
        got = session.run(made, dict(zip(given, (x, scale, shift), strict=True)))
    unit, deviation = normalised(x, (axis,), 1e-5)
    slope = dy.astype(np.float64) * scale
    dx = slope - slope.mean(axis, keepdims=True) - unit * (slope * unit).mean(axis, keepdims=True)
    want = unit * scale + shift, dx / deviation, (dy * unit).sum(0), dy.sum(0, dtype=np.float64)
    off = float(np.spacing(np.float32(offset)))
    for found, judged, many in zip(got, want, (1.0, 1.0, np.abs(dy).sum(0).max(), 0.0), strict=True):
        np.testing.assert_allclose(found, judged, rtol=1e-5, atol=1e-5 + 4 * many * off)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_norms_of_nothing_are_nothing(shape: tuple[int, int]) -> None:
    x, scale = np.zeros(shape, np.float32), np.ones(shape[1], np.float32)
    assert fr.nn.batch_norm(x, scale, scale, axis=0)[0].shape == shape
    assert fr.nn.layer_norm(x, scale, scale).shape == shape


def test_a_constant_row_is_normalised_to_its_offset() -> None:
    x, shift = np.full((4, 50), 1e4 / 3, np.float32), np.arange(50, dtype=np.float32)
    np.testing.assert_array_equal(fr.nn.layer_norm(x, np.full(50, 2, np.float32), shift), np.tile(shift, (4, 1)))
