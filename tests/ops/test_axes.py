"""Reductions over axes that lie apart from each other, in as many groups as a tensor of 8 axes has."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.kernels.ops.reduce import form_over

CASES = [  # a shape, and the axes that are reduced
    ((2, 3, 2, 3, 2, 3), (0, 2, 4)),
    ((2, 3, 2, 3, 2, 3), (1, 3, 5)),
    ((1, 3, 2, 1, 2, 3, 2), (0, 2, 4, -1)),
    ((2, 1, 3, 2, 2, 3, 2, 2), (0, 2, 4, 6)),
    ((2, 2, 3, 2, 2, 3, 2, 2), (1, 3, 5, 7)),
    ((2, 3, 2, 0, 2, 3), (0, 2, 4)),
    ((32, 2, 32, 3, 40), (0, 2, 4)),  # folded in parts
]


def log_sum_exp(x: Any, axis: Any, keepdims: bool) -> Any:
    return np.log(np.sum(np.exp(x), axis, keepdims=keepdims))


JUDGES: dict[str, Any] = {
    name: getattr(np, name) for name in ("sum", "mean", "max", "min", "prod", "any", "all", "var")
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axes"), CASES, ids=str)
def test_folds_are_numpys(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> None:
    x = np.exp(np.random.default_rng(3).normal(scale=0.1, size=shape))
    for name, judge in {**JUDGES, "logsumexp": log_sum_exp}.items():
        got = getattr(fr, name)(x, axes, keepdims)
        np.testing.assert_allclose(got, judge(x, axis=axes, keepdims=keepdims), rtol=1e-12, err_msg=name)
    whole = (10 * x).astype("int8")
    np.testing.assert_array_equal(fr.sum(whole, axes, keepdims), whole.sum(axes, keepdims=keepdims))


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 2, 3, 2, 3), (None,) * 6], ids=str)
def test_gradients_spread_what_came_back(shape: Any, optimize: bool) -> None:
    axes, rng = (0, 2, 4), np.random.default_rng(4)
    x, weight = rng.normal(size=(2, 3, 2, 3, 2, 3)), rng.normal(size=(3, 3, 3))
    with fr.Graph() as graph:
        p = fr.placeholder("float64", shape)
        sums, tops = fr.sum(p, axes), fr.max(p, axes)
        slopes = fr.gradients([sums, tops], [p], [weight, weight])
        (down,) = fr.gradients(fr.sum(fr.square(fr.broadcast_to(tops[:, None, :, None], (2, 3, 2, 3, 2, 3)))), [tops])
    with fr.BlockingSession(graph, options=fr.Options(optimize=optimize)) as session:
        (got,), back = session.run([slopes, down], {p: x})
    top = x.max(axes, keepdims=True)
    np.testing.assert_allclose(got, weight[:, None, :, None, :] * (1 + (x == top)), rtol=1e-12)
    np.testing.assert_allclose(back, 2 * 8 * top.reshape(3, 3, 3), rtol=1e-12)


def test_a_layer_may_be_normalised_along_them() -> None:
    x = np.random.default_rng(5).normal(3, 2, (2, 3, 4, 3, 2)).astype("float32")
    with fr.Graph() as graph:
        p = fr.placeholder("float32", x.shape)
        mean, variance = fr.nn.moments(p, axis=(0, 2, 4), keepdims=True)
        (slope,) = fr.gradients(fr.sum(mean * 2.0 + variance * variance), [p])
    with fr.BlockingSession(graph) as session:
        got = session.run([mean, variance, slope], {p: x})
    wide, count = x.astype("float64"), 16
    middle, spread = wide.mean((0, 2, 4), keepdims=True), wide.var((0, 2, 4), keepdims=True)
    want = [middle, spread, 2 / count + 2 * spread * 2 * (wide - middle) / count + np.zeros_like(wide)]
    for mine, judge in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-4, atol=1e-5)


NOTHING = [(0, 64, 32), (64, 0, 32), (0, 7, 3), (2, 0, 16, 5), (0, 16, 1, 5), (3, 0, 0, 2), (4, 0, 16, 2, 3), (0, 40)]


@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_what_is_reduced_over_no_entries_is_what_none_come_to(shape: tuple[int, ...]) -> None:
    """Short rows of which there are none beside axes in between were left as memory was, and written beyond its end."""
    x = np.zeros(shape)
    for count in range(1, len(shape) + 1):
        for axes in combinations(range(len(shape)), count):
            found = form_over(shape, axes)
            assert not (found.last and found.sizes[1] == 0)
            used = [np.full((64, 64), np.nan) for _ in range(4)]
            del used  # what is given out next is full of them
            np.testing.assert_array_equal(fr.sum(x, axis=axes), np.sum(x, axes))
            np.testing.assert_array_equal(fr.prod(x, axis=axes), np.prod(x, axes))
            np.testing.assert_array_equal(fr.all(x > 0, axis=axes), np.all(x > 0, axes))
