"""Rows of few entries: turned around in registers, folded side by side, added to others. NumPy is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables
from test_units import in_ranges

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, host_only, kernel
from flowrt.kernels.launch import Prepared, run_kernel
from flowrt.kernels.tiles.squares import turn

Array = np.ndarray[Any, Any]
AROUND = 40  # entries on both sides of what is written


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    def whole(x: Any, y: Any, rows: int, across: int, columns: int) -> None:
        start = y.ctypes.data + AROUND * y.itemsize
        turn(x, x.ctypes.data, across, start, columns, rows, columns)

    def layout(inputs: Any, outputs: Any, attrs: Any) -> Call:
        views = tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs))
        return Call(views, (attrs["rows"], attrs["across"], attrs["columns"]))

    with own_tables():
        kernel("turned_whole", layout=layout)(whole)
        host_only("turned_whole", why="of a test")
        yield


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_matrices_of_any_sides_are_turned_and_nothing_around_them_is_written(dtype: str) -> None:
    sides = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31)
    for rows in sides:
        for columns in (*sides, 100):
            for across in (rows, rows + 3):
                x = np.arange(across * columns).astype(dtype)
                attrs = {"rows": rows, "across": across, "columns": columns}
                source = x[: (columns - 1) * across + rows]
                (y,) = run_kernel("turned_whole", [source], [Spec(dtype, (rows * columns + 2 * AROUND,))], attrs)
                want = x.reshape(columns, across)[:, :rows].T
                np.testing.assert_array_equal(y[AROUND:-AROUND].reshape(rows, columns), want, str(attrs))


SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((0, 3), 1),
    ((9, 1), 1),
    ((9, 3), 1),
    ((777, 2), 1),
    ((5, 7, 31), 2),
    ((70, 32), 1),
    ((70, 33), 1),
    ((3, 4, 0), 2),
    ((4, 6, 9, 5), (1, 3)),
    ((3, 1100, 5, 7), (1, 3)),
    ((2, 3, 2, 3), (1, 3)),
]


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("max", "float32"), ("any", "bool"), ("max", "uint8")])
def test_short_rows_are_reduced_as_long_ones_are(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed 11")
    rng = np.random.default_rng(11)
    for shape, axis in SHAPES:
        x = (rng.normal(size=shape) * 3).astype(dtype)
        if op != "max" or x.size:
            want = np.asarray(getattr(np, op)(x, axis))
            how: Any = ([x], [Spec(x.dtype, want.shape)], {"axis": axis, "keepdims": False})
            (got,) = run_kernel(op, *how)
            np.testing.assert_allclose(got, want, 1e-5, 1e-5)
            with monkeypatch.context() as patched:
                patched.setattr(Prepared, "run", in_ranges(rng))
                np.testing.assert_array_equal(run_kernel(op, *how)[0], got)


def test_nan_spoils_the_largest_of_its_own_row() -> None:
    x = np.zeros((500, 6), np.float32)
    x[[7, 8, 499], [0, 5, 3]] = np.nan
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(fr.max(x, 1))), [7, 8, 499])


@pytest.mark.parametrize(("dtype", "index"), [("float32", "int32"), ("float64", "int64"), ("float32", "uint8")])
def test_segments_add_up_rows_in_order(dtype: str, index: str) -> None:
    print("seed 12")
    rng = np.random.default_rng(12)
    for rows, columns, segments in ((0, 3, 5), (7, 1, 3), (999, 10, 7), (50, 33, 3), (10, 0, 4), (5, 2, 200)):
        x, ids = rng.normal(size=(rows, columns)).astype(dtype), rng.integers(0, segments, rows).astype(index)
        want = np.zeros((segments, columns), dtype)
        np.add.at(want, ids, x)
        np.testing.assert_array_equal(fr.segment_sum(x, ids, segments), want)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_short_rows_are_made_of_columns_and_of_one_entry_each(dtype: str) -> None:
    for rows, columns in ((1, 4), (7, 5), (8, 2), (9, 8), (301, 3), (300, 31), (33, 32)):
        x = (np.arange(rows * columns) * 7).reshape(columns, rows).astype(dtype)
        (y,) = run_kernel("transpose", [x], [Spec(dtype, (rows, columns))], {"axes": (1, 0)})
        np.testing.assert_array_equal(y, x.T)
        column, shape = x[:1].T.copy(), (rows, columns)
        (y,) = run_kernel("broadcast_to", [column, np.array(shape)], [Spec(dtype, shape)], {})
        np.testing.assert_array_equal(y, np.broadcast_to(column, shape))


def test_entries_are_taken_and_added_up_along_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed 13")
    rng = np.random.default_rng(13)
    for rows, columns in ((0, 3), (1, 4), (7, 5), (8, 2), (9, 8), (700, 3), (300, 31), (33, 32), (20, 33)):
        x, places = rng.normal(size=(rows, columns)).astype(np.float32), rng.integers(0, columns, 9).astype(np.int32)
        np.testing.assert_array_equal(fr.take(x, places, axis=1), x[:, places])
        np.testing.assert_array_equal(fr.take(x, places - columns, axis=1), x[:, places])
        for reverse in (False, True):
            order = -1 if reverse else 1
            want = np.cumsum(x[:, ::order].astype(np.float64), 1)[:, ::order]
            got = fr.cumsum(x, 1, reverse=reverse)
            np.testing.assert_allclose(got, want, 1e-5, 1e-5)
            with monkeypatch.context() as patched:
                patched.setattr(Prepared, "run", in_ranges(rng))
                np.testing.assert_array_equal(fr.cumsum(x, 1, reverse=reverse), got)


def test_wide_segments_are_added_up_by_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed 14")
    rng = np.random.default_rng(14)
    x, ids = rng.normal(size=(90, 300)).astype(np.float32), rng.integers(0, 20, 90).astype(np.int32)
    want = np.zeros((20, 300), np.float32)
    np.add.at(want, ids, x)
    monkeypatch.setattr(Prepared, "run", in_ranges(rng))
    np.testing.assert_array_equal(fr.segment_sum(x, ids, 20), want)
