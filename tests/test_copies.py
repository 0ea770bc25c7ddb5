"""Strided copies against NumPy: which entry a copy goes to, and that it moves every entry there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flowrt.errors import FlowrtError
from flowrt.kernels.copies import BOX_OP, COPY_OP, ROWS_OP, TURN_OP, plan_box, plan_copy
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


def test_rows_of_any_length_are_copied_and_gathered() -> None:
    for length in (*range(1, 140), 300):
        left, right = numbered("uint8", 5, length), ~numbered("uint8", 5, 3)
        (y,) = run_kernel("concat", [left, right], [Spec("uint8", (5, length + 3))], {"axis": 1})
        np.testing.assert_array_equal(y, np.concatenate([left, right], 1))
        for numbers in (
            np.array([4, 0, 0, 3] * 5, np.int32),
            np.array([2, 1, 4]),
            np.array([1, -1, 3]),
            np.array([1])[:0],
        ):
            (y,) = run_kernel("take", [left, numbers], [Spec("uint8", (numbers.size, length))], {"axis": 0})
            np.testing.assert_array_equal(y, left.take(numbers, 0))


@pytest.mark.parametrize("number", [5, -6, 2**31, 2**40])
def test_a_row_that_is_not_there_is_not_gathered(number: int) -> None:
    numbers = np.array([0] * 20 + [number], np.int64 if number >= 2**31 else np.int32)
    with pytest.raises(FlowrtError, match="out of range"):
        run_kernel("take", [numbered("uint8", 5, 8), numbers], [Spec("uint8", (21, 8))], {"axis": 0})


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


# ── boxes in the midst of a filling ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "int64"])
def test_boxes_are_copied_and_filled_around(dtype: str) -> None:
    rng = np.random.default_rng(4)
    print("seed 4")
    for _ in range(60):
        shape = tuple(rng.choice([1, 2, 3, 17, 40], rng.integers(1, 6)).tolist())
        paddings = tuple((int(a), int(b)) for a, b in rng.choice([0, 0, 1, 5], (len(shape), 2)))
        x, value = numbered(dtype, *shape), float(rng.choice([0, 1]))
        want = np.pad(x, paddings, constant_values=np.array(value).astype(dtype))
        if want.size < 1 << 18:
            (y,) = run_kernel("pad", [x], [Spec(dtype, want.shape)], {"paddings": paddings, "value": value})
            np.testing.assert_array_equal(y, want)


def test_a_box_is_any_part_of_neighbours() -> None:
    rng = np.random.default_rng(5)
    print("seed 5")
    for _ in range(60):
        shape = tuple(rng.choice([1, 3, 17, 40], rng.integers(1, 5)).tolist())
        spans = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
        step = int(rng.choice([1, 1, 2]))
        key = tuple((a, b, step if i == 0 else None) for i, (a, b) in enumerate(spans))
        want = np.zeros(shape, np.float32)
        part = want[tuple(slice(*k) for k in key)]
        part[...] = x = numbered("float32", *part.shape) + 1
        (y,) = run_kernel("place", [x, np.array(shape)], [Spec("float32", shape)], {"key": key})
        np.testing.assert_array_equal(y, want)


def test_only_wide_boxes_are_copied_so_and_the_rows_are_shared_out() -> None:
    image, f32 = View.dense((2, 8, 8, 5)), np.dtype(np.float32)
    made = plan_box(image, View.dense((2, 10, 10, 5)).window((0, 1, 1, 0), image.shape), 1000, 0.5, f32)
    assert made is not None
    assert (made.op, made.call.units) == (BOX_OP, 20)
    assert plan_box(View.dense((50, 1)), View.dense((50, 3)).window((0, 1), (50, 1)), 150, 0.0, f32) is None
    backwards = View.dense((50, 40)).window((49, 0), (25, 40), (-1, 1))
    assert plan_box(View.dense((25, 40)), backwards, 2000, 0.0, f32) is None
