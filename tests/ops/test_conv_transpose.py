"""`conv2d_transpose` beyond what `op_examples` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


HOW: list[dict[str, Any]] = [
    {},
    {"strides": 2},
    {"strides": (2, 3), "padding": "VALID", "dilations": (2, 1)},
    {"strides": 2, "padding": ((1, 0), (1, 1)), "groups": 2},
]


@pytest.mark.parametrize("how", HOW, ids=str)
async def test_it_is_the_transpose_of_the_convolution_with_all_its_derivatives(how: dict[str, Any]) -> None:
    """That is: (conv2d(y, w) * x).sum() == (y * conv2d_transpose(x, w)).sum(), whatever y is."""
    x, w = normal(2, 3, 4, 4), normal(3, 2, 3 // how.get("groups", 1) + 1, 4, seed=1)
    y = normal(*fr.nn.conv2d_transpose(x, w, **how).shape, seed=2)
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float64", a.shape) for a in (x, w, y)]
        small, filters, large = inputs
        one = fr.sum(fr.nn.conv2d(large, filters, **how) * small)
        other = fr.sum(large * fr.nn.conv2d_transpose(small, filters, **how))
        found = []
        for total in (one, other):
            first = fr.gradients(fr.square(total), inputs)
            second = fr.gradients(fr.add_n([fr.sum(fr.square(slope)) for slope in first]), inputs)
            found.append([total, *first, *second])
    async with fr.Session(graph) as session:
        mine, judge = await session.run(found, {small: x, filters: w, large: y})
    for got, want in zip(mine, judge, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ({"strides": 2}, (6, 10)),
        ({"strides": 2, "padding": "VALID"}, (7, 11)),
        ({"strides": 2, "padding": "VALID", "output_padding": 1}, (8, 12)),
        ({"strides": (3, 2), "padding": ((1, 1), (0, 1)), "output_padding": (2, 0)}, (9, 10)),
        ({"strides": 2, "output_shape": (5, 10)}, (5, 10)),
        ({"strides": 2, "output_shape": (2, 5, 9, 2)}, (5, 9)),
        ({"strides": 2, "output_shape": np.int64([2, 5, 9, 2])}, (5, 9)),
    ],
    ids=str,
)
async def test_sizes_are_those_asked_for_also_where_only_a_step_knows_them(
    how: dict[str, Any], sizes: tuple[int, int]
) -> None:
    x, w = normal(2, 3, 5, 4), normal(3, 3, 2, 4, seed=1)
    want = fr.nn.conv2d_transpose(x, w, **how)
    assert want.shape == (2, *sizes, 2)
    with fr.Graph() as graph:
        images, filters = fr.placeholder("float64", (None, None, None, 4)), fr.placeholder("float64", (None,) * 4)
        anything = fr.placeholder("float64")
        whole = [fr.nn.conv2d_transpose(one, filters, **how) for one in (images, anything)]
        known = fr.nn.conv2d_transpose(fr.placeholder("float64", (None, 3, 5, 4)), w, **how)
    assert known.shape in ((None, *sizes, 2), (2, *sizes, 2))
    async with fr.Session(graph) as session:
        for found in await session.run(whole, {images: x, anything: x, filters: w}):
            np.testing.assert_allclose(found, want, rtol=1e-12)


async def test_mixed_precision_rounds_it_and_its_gradients() -> None:
    x, w = (a.astype("float32") for a in (normal(2, 3, 4, 4), normal(3, 3, 2, 4, seed=1)))
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float32", a.shape) for a in (x, w)]
        found = []
        for precision in ("bfloat16", "float32"):
            with fr.mixed_precision(precision):
                y = fr.nn.conv2d_transpose(*inputs, 2)
            found.append([y, *fr.gradients(fr.sum(fr.square(y)), inputs)])
    async with fr.Session(graph) as session:
        rounded, exact = await session.run(found, dict(zip(inputs, (x, w), strict=True)))
    for got, want in zip(rounded, exact, strict=True):
        off = np.abs(got - want).max() / np.abs(want).max()
        assert 1e-5 < off < 2e-2


X, W = normal(2, 3, 4, 4), normal(3, 3, 2, 4)
MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.nn.conv2d_transpose(X, W[..., :3]), r"the last axis of filters must be the channels of x, 4"),
    (lambda: fr.nn.conv2d_transpose(X[0], W), r"x must have 4 axes \(batch, height, width, channels\)"),
    (lambda: fr.nn.conv2d_transpose(X.astype("int32"), W), "x must be floating, got int32"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, output_shape=(9, 9)), r"give another output_shape"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, output_shape=(6,)), r"output_shape must be \(height, width\) or"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, output_padding=1), "give output_shape"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, "VALID", output_padding=2), "output_padding must be below the strides 2"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, "VALID", output_padding=-1), "output_padding must be an integer"),
    (lambda: fr.nn.conv2d_transpose(X, W, 2, "VALID", output_padding=1, output_shape=(6, 8)), "not both"),
    (lambda: fr.nn.conv2d_transpose(X, W, padding="FULL"), 'padding must be "SAME", "VALID"'),
    (lambda: fr.nn.conv2d_transpose(X, W, groups=3), "3 groups do not divide the 4"),
    (lambda: fr.nn.conv2d_transpose(X, kernel=W), "write filters="),
]


@pytest.mark.parametrize(("call", "message"), MISFITS, ids=[m[1][:12] + str(n) for n, m in enumerate(MISFITS)])
def test_what_does_not_fit_says_so(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"conv2d_transpose.*test_conv_transpose\.py:\d+.*{message}"):
        call()
