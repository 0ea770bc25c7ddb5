"""Products as cuBLAS is asked for them, carried out by NumPy as the library would: column by column."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import numpy as np
import pytest

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import View
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.nvidia.products import CALLS, StridedMatrices, StridedProduct, strided_products
from flowrt.kernels.ops.nn import recurrent_on_cuda

Array = Any
FLAGS = list(product((False, True), repeat=2))
BATCHED = [  # shapes of the batches of a and b, and how many calls they come to
    ((), (), 1),
    ((), (3,), 1),
    ((3,), (), 1),
    ((3,), (3,), 1),
    ((1,), (3,), 1),
    ((2, 3), (2, 3), 1),
    ((2, 3), (1, 3), 2),
    ((2, 3), (2, 1), 2),
    ((5, 2), (1, 2), 2),
    ((5, 1), (1, 2), 2),
    ((1, 2), (5, 1), 2),
    ((2, 3), (3,), 2),
    ((2, 4, 3), (2, 4, 3), 1),
    ((2, 4, 3), (1, 1, 1), 1),
]


def steps_of(
    a: tuple[int, ...], b: tuple[int, ...], flags: tuple[bool, bool], dtype: str = "float64"
) -> tuple[LaunchStep, ...]:
    """The steps of `matmul` on such operands, of which the last multiplies."""
    made = Spec(dtype, judged(np.zeros(a), np.zeros(b), flags).shape)
    attrs = dict(zip(("transpose_a", "transpose_b"), flags, strict=True))
    application = apply_kernel("matmul", [Spec(dtype, a), Spec(dtype, b)], [made], attrs, "cuda")
    return cast("tuple[LaunchStep, ...]", application.steps)


def step_of(a: tuple[int, ...], b: tuple[int, ...], flags: tuple[bool, bool], dtype: str = "float64") -> LaunchStep:
    (step,) = steps_of(a, b, flags, dtype)
    return step


def seen(flat: Array, matrices: StridedMatrices, number: int) -> Array:
    """One of the matrices, as a library sees it that has entries of a column side by side."""
    start = matrices.offset + number * matrices.stride
    assert 0 <= start <= flat.size - matrices.rows * matrices.columns
    stored = flat[start : start + matrices.rows * matrices.columns].reshape(matrices.columns, matrices.rows).T
    return stored.T if matrices.transposed else stored


def carry_out(products: Sequence[StridedProduct], a: Array, b: Array, y: Array) -> None:
    """What cuBLAS does, on flat arrays."""
    for each in products:
        for number in range(each.batch):
            seen(y, each.y, number)[:] = seen(b, each.b, number) @ seen(a, each.a, number)


def multiplied(products: Sequence[StridedProduct], a: Array, b: Array, size: int) -> Array:
    y = np.full(size, np.nan)
    carry_out(products, a.reshape(-1), b.reshape(-1), y)
    return y


def shapes(flags: tuple[bool, bool], m: int = 4, n: int = 3, k: int = 5) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if flags[0] else (m, k)), ((n, k) if flags[1] else (k, n))


def judged(a: Array, b: Array, flags: tuple[bool, bool]) -> Array:
    return np.matmul(a.swapaxes(-1, -2) if flags[0] else a, b.swapaxes(-1, -2) if flags[1] else b)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("left", "right", "calls"), BATCHED)
def test_the_calls_multiply_what_the_op_does(
    left: tuple[int, ...], right: tuple[int, ...], calls: int, flags: tuple[bool, bool]
) -> None:
    rng, (rows, columns) = np.random.default_rng(1), shapes(flags)
    a, b = rng.normal(size=(*left, *rows)), rng.normal(size=(*right, *columns))
    expected = judged(a, b, flags)
    products = strided_products(step_of(a.shape, b.shape, flags))
    assert products is not None
    assert len(products) <= calls
    np.testing.assert_allclose(multiplied(products, a, b, expected.size).reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("a", "b"), [((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,)), ((2, 4, 5), (5,)), ((1, 1), (1, 1))]
)
def test_vectors_are_matrices_of_one_row_or_column(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    left, right = rng.normal(size=a), rng.normal(size=b)
    products = strided_products(step_of(a, b, (False, False)))
    assert products is not None
    expected = np.matmul(left, right)
    np.testing.assert_allclose(multiplied(products, left, right, expected.size).reshape(expected.shape), expected)


def test_one_matrix_on_the_right_takes_the_batch_as_rows() -> None:
    (only,) = strided_products(step_of((7, 4, 5), (5, 3), (False, False))) or ()
    assert (only.batch, only.a.columns) == (1, 28)


def test_matrices_that_stand_for_all_of_a_batch_have_no_stride() -> None:
    (only,) = strided_products(step_of((4, 5), (6, 5, 3), (False, False))) or ()
    assert (only.batch, only.a.stride, only.b.stride, only.y.stride) == (6, 0, 15, 12)


def test_the_smaller_of_two_axes_is_a_call_for_each() -> None:
    a, b = (CALLS, 1, 4, 5), (1, 50, 5, 3)
    products = strided_products(step_of(a, b, (False, False))) or ()
    assert [each.batch for each in products] == [50] * CALLS
    assert strided_products(step_of((CALLS + 1, 1, 4, 5), (1, 50, 5, 3), (False, False))) is None


@pytest.mark.parametrize(("a", "b"), [((4, 0), (0, 3)), ((0, 5), (5, 3)), ((4, 5), (5, 0)), ((0, 4, 5), (0, 5, 3))])
def test_products_without_terms_or_results_are_the_tiles_own(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert strided_products(step_of(a, b, (False, False))) is None


def test_integers_are_the_tiles_own() -> None:
    assert strided_products(step_of((4, 5), (5, 3), (False, False), "int64")) is None


def test_operands_begin_where_their_views_do() -> None:
    """As a step of a recurrent layer's does, which looks at one of many matrices."""
    every = [View.dense((3, *shape)) for shape in ((4, 5), (5, 3), (4, 3))]
    views = [recurrent_on_cuda._row(view.shape, number) for view, number in zip(every, (2, 1, 1), strict=True)]
    step = recurrent_on_cuda._product((0, 1, 2), views, (0, 0), np.dtype("float64"))
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 3))
    y = multiplied(strided_products(step) or (), a, b, 36).reshape(3, 4, 3)
    np.testing.assert_allclose(y[1], a[2] @ b[1])
    assert np.isnan(y[::2]).all()


def test_operands_that_broadcast_in_turns_are_one_batch_once_they_are_copied() -> None:
    a, b = (2, 1, 3, 4, 5), (2, 7, 3, 5, 6)
    copied, step = steps_of(a, b, (False, False))
    assert copied.operands[0] == 0
    assert copied.operands[1] == step.operands[0]
    (only,) = strided_products(step) or ()
    assert only.batch == 2 * 7 * 3
