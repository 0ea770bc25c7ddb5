"""Reductions of many entries to few results: right, and the same bits however the parts are shared out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_units import in_ranges

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.kernels.launch import Prepared, apply_kernel, run_kernel
from flowrt.kernels.ops.partials import PARTS, count_parts

SHAPES = [((100_001,), None), ((40_000, 3), 0), ((40, 1001), 1), ((3, 300, 120), 1), ((70_000, 1), 0), ((9, 2), None)]


def reduced(op: str, x: np.ndarray[Any, Any], axis: int | None) -> np.ndarray[Any, Any]:
    shape = () if axis is None else (*x.shape[:axis], *x.shape[axis + 1 :])
    (y,) = run_kernel(op, [x], [Spec(x.dtype, shape)], {"axis": axis, "keepdims": False})
    return y


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_parts_come_to_the_whole(op: str, shape: Any, axis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed 5")
    x = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    got = reduced(op, x, axis)
    np.testing.assert_allclose(got, getattr(x.astype(np.float64), op)(axis), 1e-6, 1e-6)
    monkeypatch.setattr(Prepared, "run", in_ranges(np.random.default_rng(6)))
    np.testing.assert_array_equal(reduced(op, x, axis), got)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_rows_of_any_length_are_added_up_to_their_last_entry(op: str) -> None:
    print("seed 7")
    rng = np.random.default_rng(7)
    for length in (0, 1, 7, 8, 9, 31, 32, 33, 63, 100, 257) if op == "sum" else (1, 9, 33, 100):
        x = rng.normal(size=(5, length)).astype(np.float32)
        np.testing.assert_allclose(reduced(op, x, 1), getattr(x.astype(np.float64), op)(1), 1e-6, 2e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "float64"])
def test_means_of_entries_that_are_no_float32_are_added_up_one_by_one(dtype: str) -> None:
    print("seed 8")
    x = np.random.default_rng(8).integers(0, 100, (2, 50_000)).astype(dtype)
    for rows, axis in ((x[:, :9], 1), (x, None)):  # at once, and in parts
        np.testing.assert_allclose(np.asarray(fr.mean(rows, axis)), rows.mean(axis), 1e-6)


def test_nan_is_found_in_any_part() -> None:
    x = np.zeros(100_000, np.float32)
    x[77_777] = np.nan
    assert np.isnan(reduced("max", x, None))
    assert np.isnan(reduced("sum", x, None))


def test_parts_are_bounded_and_many_results_need_none() -> None:
    assert count_parts((1, 1, 1, 1, 1 << 30), True) == PARTS
    assert count_parts((1, 1, 1, 1 << 20, 3), False) == PARTS
    assert count_parts((1, 1, 1, 1, 1000), True) == 1
    assert count_parts((1, 1, 1, 1 << 20, 4096), False) == 1
    assert count_parts((64, 1, 1, 1, 1 << 20), True) == 1
    assert count_parts((0, 1, 1, 1, 1 << 20), True) == PARTS  # of which there are none
    assert count_parts((1, 1, 1, 0, 5), False) == 1


def test_only_large_reductions_take_a_second_launch() -> None:
    how = {"axis": None, "keepdims": False}
    assert [
        len(apply_kernel("sum", [Spec("float32", (n,))], [Spec("float32", ())], how).steps) for n in (99, 99_999)
    ] == [1, 2]
