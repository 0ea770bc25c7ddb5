"""Numbers in eight bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError

quantize, dequantize, product = fr.quantize.quantize, fr.quantize.dequantize, fr.quantize.quantized_matmul


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize(
    ("axis", "shape"),
    [(None, ()), (0, (4, 1, 1)), (-1, (1, 1, 3)), ((0, 2), (4, 1, 3)), ((0, 1, 2), (4, 5, 3))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_entries_are_the_nearest_of_255_multiples_of_a_scale(
    axis: Any, shape: tuple[int, ...], dtype: str
) -> None:
    x = normal(4, 5, 3).astype(dtype)
    others = tuple(n for n in range(3) if shape == () or shape[n] == 1)
    want = np.abs(x).max(others, keepdims=shape != ()) / np.array(127, dtype)
    with fr.Graph() as graph:
        given = fr.placeholder(dtype, (None, None, None))
        both = quantize(given, axis)
        back = dequantize(*both)
    async with fr.Session(graph) as session:
        in_graph, stood_for = await session.run([both, back], {given: x})
    for _ in range(3):  # the third call is one of all ops
        for found, scale in (quantize(x, axis), in_graph):
            assert (found.dtype, scale.dtype, scale.shape) == ("int8", dtype, shape)
            np.testing.assert_allclose(scale, want, rtol=1e-6)
            np.testing.assert_array_equal(found, np.round(x / scale).astype("int8"))
            assert np.abs(found.astype("int32")).max() == 127
    assert stood_for.dtype == dtype
    assert (np.abs(stood_for - x) <= want * 0.5001).all()


def test_zeros_and_what_is_no_number() -> None:
    found, scale = quantize(np.zeros((2, 3), "float32"), 0)
    np.testing.assert_array_equal(scale, [[1], [1]])
    assert not found.any()
    found, scale = quantize(np.float32([[1, np.nan], [2, np.inf], [1e-45, 0], [0.5, -1]]), 0)
    np.testing.assert_array_equal(found, [[0, 0], [0, 0], [0, 0], [64, -127]])
    assert not np.isfinite(scale[:2]).any()
    assert np.isfinite(scale[2:]).all()


def test_a_scale_that_is_given_is_kept_and_what_lies_beyond_it_is_clipped() -> None:
    found, scale = quantize(np.float32([-3, -1.5, 0.5, 1.5, 2.5, 300, -300]), scale=1.0)
    np.testing.assert_array_equal(found, [-3, -2, 0, 2, 2, 127, -127])
    assert (scale.dtype, scale.shape) == (np.float32, ())
    columns = np.float32([[1, 10]])
    np.testing.assert_array_equal(quantize(np.float32([[5, 5]]), scale=columns)[0], [[5, 0]])


SIZES = [(1, 7, 5), (3, 300, 9), (40, 1024, 65), (33, 1100, 4), (2, 5000, 3)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_products_are_exact(sizes: tuple[int, int, int], transposed: bool) -> None:
    m, k, n = sizes
    a = np.random.default_rng(1).integers(-128, 128, (m, k)).astype("int8")
    b = np.random.default_rng(2).integers(-128, 128, (n, k) if transposed else (k, n)).astype("int8")
    a[0], b[0 if transposed else slice(None), slice(None) if transposed else 0] = -128, -128
    want = a.astype("int32") @ (b.T if transposed else b).astype("int32")
    with fr.Graph() as graph:
        left, right = (fr.placeholder("int8", (None, None)) for _ in range(2))
        found = product(left, right, transpose_b=transposed)
    async with fr.Session(graph) as session:
        in_graph = await session.run(found, {left: a, right: b})
    for sums in (in_graph, product(a, b, transpose_b=transposed)):
        assert sums.dtype == np.int32
        np.testing.assert_array_equal(sums, want)


async def test_a_layer_is_nearly_what_it_is_in_floats() -> None:
    x, w = normal(20, 64), normal(64, 30, seed=1)
    with fr.Graph() as graph:
        given = fr.placeholder("float32", (None, 64))
        (rows, row_scale), (columns, column_scale) = quantize(given, 0), quantize(w, 1)
        y = product(rows, columns, row_scale, column_scale)
        turned = product(rows, fr.transpose(columns), row_scale, column_scale, transpose_b=True)
        slope = fr.gradients(fr.sum(y), [row_scale])[0]
    async with fr.Session(graph) as session:
        found, other, d, scale = await session.run([y, turned, slope, row_scale], {given: x})
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, other)
    assert np.abs(found - x @ w).max() < 0.02 * np.abs(x @ w).max()
    np.testing.assert_allclose(d, (found / scale).sum(1, keepdims=True), rtol=1e-4, atol=1e-3)


def test_threads_share_the_columns_to_the_same_numbers() -> None:
    a = np.random.default_rng(1).integers(-128, 128, (7, 2000)).astype("int8")
    b = np.random.default_rng(2).integers(-128, 128, (1001, 2000)).astype("int8")
    with fr.Graph() as graph:
        left, right = fr.placeholder("int8", a.shape), fr.placeholder("int8", b.shape)
        sums = product(left, right, transpose_b=True)
    with fr.BlockingSession(graph, options=fr.Options(threads=2)) as session:
        step = session.compile(sums, [left, right])
        for _ in range(4):
            np.testing.assert_array_equal(step(a, b), a.astype("int32") @ b.T.astype("int32"))


A, B = np.ones((2, 3), "int8"), np.ones((3, 4), "int8")
MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: quantize(A), r"quantize.*x must be floating, got int8\[2,3\]"),
    (lambda: quantize(normal(2, 3), 0, scale=1.0), "quantize.*give axis or scale, not both"),
    (lambda: quantize(normal(2, 3), 2), "quantize.*axis 2"),
    (lambda: dequantize(normal(2), 1.0), r"dequantize.*x must be integers, as quantize answers them, got float32\[2\]"),
    (lambda: product(A.astype("int32"), B), r"quantized_matmul.*a must be int8, as quantize answers it, got int32"),
    (lambda: product(A, B[0]), "quantized_matmul.*b must have at least two axes"),
    (lambda: product(A, A), r"quantized_matmul.*cannot multiply"),
]


@pytest.mark.parametrize(("call", "message"), MISFITS, ids=[m[1][:14] + str(n) for n, m in enumerate(MISFITS)])
def test_what_does_not_fit_says_so(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        call()
    assert "test_quantize.py:" in str(caught.value)
