"""Strided copies against NumPy: which entry a copy goes to, and that it moves every entry there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flowrt.kernels.copies import COPY_OP, ROWS_OP, TURN_OP, plan_copy
from flowrt.kernels.launch import run_kernel
from flowrt.kernels.table import View
from flowrt.spec import Spec

Array = np.ndarray[Any, Any]


def transposed(x: Array, axes: tuple[int, ...]) -> Array:
    (y,) = run_kernel("transpose", [x], [Spec(x.dtype, tuple(x.shape[a] for a in axes))], {"axes": axes})
    return y


def numbered(dtype: str, *shape: int) -> Array:
    """Entries that differ from their neighbours, as far as the dtype can tell."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "int64"])
def test_squares_are_turned_around_with_what_is_left_of_them(dtype: str) -> None:
    for shape in ((67, 300), (300, 67), (16, 16), (129, 33)):
        x = numbered(dtype, *shape)
        np.testing.assert_array_equal(transposed(x, (1, 0)), x.T)


def test_any_order_of_axes_is_copied() -> None:
    rng = np.random.default_rng(3)
    print("seed 3")
    for _ in range(150):
        shape = tuple(rng.choice([1, 2, 3, 5, 9, 17, 40], rng.integers(1, 7)).tolist())
        x, axes = numbered("float32", *shape), tuple(rng.permutation(len(shape)).tolist())
        if x.size < 1 << 18:
            np.testing.assert_array_equal(transposed(x, axes), x.transpose(axes))


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_rows_that_are_short_repeated_or_backwards_are_copied(dtype: str) -> None:
    x = numbered(dtype, 50, 3)
    for size in (1, 3, 33, 300):
        wide = numbered(dtype, 7, size)
        for rows in (None, -2):
            want, key = wide[::rows, ::-1], ((None, None, rows), (None, None, -1))
            (y,) = run_kernel("getitem", [wide], [Spec(dtype, want.shape)], {"key": key})
            np.testing.assert_array_equal(y, want)
        (y,) = run_kernel("broadcast_to", [wide[:, :1], np.array([2, 7, size])], [Spec(dtype, (2, 7, size))], {})
        np.testing.assert_array_equal(y, np.broadcast_to(wide[:, :1], (2, 7, size)))
    (y,) = run_kernel("concat", [x, x[:, :2], x], [Spec(dtype, (50, 8))], {"axis": 1})
    np.testing.assert_array_equal(y, np.concatenate([x, x[:, :2], x], 1))


def test_each_copy_goes_to_the_entry_that_is_good_at_it() -> None:
    f32 = np.dtype(np.float32)

    def op(source: View, target: View) -> str:
        return plan_copy(source, target, f32).op

    square, row = View.dense((100, 100)), View.dense((100, 1))
    assert op(square, square) == COPY_OP
    assert op(square.permute((1, 0)), square) == TURN_OP
    assert op(row.broadcast_to((100, 100)), square) == ROWS_OP
    assert op(square.window((0, 99), (100, 100), (1, -1)), square) == ROWS_OP
    assert op(square.window((0, 0), (100, 3)), View.dense((100, 3))) == ROWS_OP
    assert op(View.dense((0, 5)).permute((1, 0)), View.dense((5, 0))) == COPY_OP


def test_a_copy_is_planned_the_same_whatever_order_axes_of_one_come_in() -> None:
    dense = View.dense((4, 20, 1, 30))
    for axes in itertools.permutations(range(4)):
        if [a for a in axes if a != 2] == [0, 3, 1]:
            moved = plan_copy(dense.permute(axes), View.dense(dense.permute(axes).shape), np.dtype(np.int16))
            assert moved.op == TURN_OP
            assert moved.dtype == np.uint16
            assert moved.call.words[:5] == (30, 1, 20, 20, 30)
