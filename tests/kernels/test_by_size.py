"""Kernels that only move entries know their size alone: whatever they mean comes as it was, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.kernels.launch import apply_kernel

ROWS, TOTAL = Spec("int64", (2,)), Spec("int64", ())
MOVING: dict[str, Any] = {  # by op, what it takes beside the entries, and what of them it answers
    "take": ([ROWS], (2, 4), {"axis": 0, "absent": False}),
    "slice_along": ([TOTAL, TOTAL], (2, 4), {"axis": 0}),
    "place_along": ([TOTAL, ROWS], (5, 4), {"axis": 0}),
    "part_of": ([Spec("int64", (3,))], (2, 4), {"part": 1}),
}


@pytest.mark.parametrize("op", MOVING)
def test_what_moves_entries_is_compiled_once_for_all_of_one_size(op: str) -> None:
    others, shape, attrs = MOVING[op]

    def variants(dtype: str) -> list[Any]:
        made = apply_kernel(op, [Spec(dtype, (3, 4)), *others], [Spec(dtype, shape)], attrs)
        return [variant for step in made.steps for variant in step.variants()]

    assert variants("float32") == variants("int32") == variants("uint32")
    assert variants("float64") == variants("uint64") != variants("float32")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["uint64", "int64"])
def test_large_integers_taken_from_the_end_keep_every_bit(dtype: str, axis: int) -> None:
    table = np.array([[2**53 + 1, 2**62 + 1, 3], [2**63 + 1 if dtype == "uint64" else -(2**61) - 1, 5, 7]], dtype)
    np.testing.assert_array_equal(fr.take(table, np.array([-1, 0, -2]), axis), np.take(table, [-1, 0, -2], axis))


@pytest.mark.parametrize(("dtype", "bits"), [("float32", "uint32"), ("float64", "uint64")])
def test_what_is_in_a_nan_is_moved_with_it(dtype: str, bits: str) -> None:
    table = np.arange(1, 7, dtype=bits).reshape(2, 3)
    table |= np.array(np.nan, dtype).view(bits)
    for axis in (0, 1):
        found = fr.take(table.view(dtype), np.array([1, 0]), axis)
        np.testing.assert_array_equal(found.view(bits), np.take(table, [1, 0], axis))
