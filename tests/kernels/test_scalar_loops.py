"""Entries of scalar functions: over any strides, ranges and in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.base.spec import Spec
from flowrt.kernels.launch import RUN_WORDS, Prepared, apply_kernel

Array = np.ndarray[Any, Any]


def run_in_place(op: str, inputs: list[Array], over: int) -> Array:
    """``op`` on ``inputs``, whose output is the memory of one of them."""
    output = inputs[over]
    specs = [Spec(a.dtype, a.shape) for a in inputs]
    prepared = Prepared(apply_kernel(op, specs, [Spec(output.dtype, output.shape)], {}), len(inputs) + 1)
    words = np.zeros(RUN_WORDS, np.int64)
    prepared.run(words.ctypes.data, [a.ctypes.data for a in (*inputs, output)])
    return output


@pytest.mark.parametrize("size", [1, 7, 8, 64, 1001])
def test_an_output_may_be_an_inputs_memory(size: int) -> None:
    rng = np.random.default_rng(size)
    a, b, c = (rng.normal(size=size).astype(np.float32) for _ in range(3))
    scalar = np.asarray(np.float32(1.5))
    np.testing.assert_array_equal(run_in_place("add", [a.copy(), b], 0), a + b)
    np.testing.assert_array_equal(run_in_place("add", [a, b.copy()], 1), a + b)
    np.testing.assert_array_equal(run_in_place("multiply", [a.copy(), scalar], 0), a * scalar)
    np.testing.assert_array_equal(run_in_place("where", [a > 0, b, c.copy()], 2), np.where(a > 0, b, c))
    square = np.tile(a, (3, 1))
    np.testing.assert_array_equal(run_in_place("subtract", [square.copy(), b], 0), square - b)


def test_an_input_that_is_both_operands_may_be_the_output() -> None:
    x = np.arange(100, dtype=np.float32)
    specs = [Spec(x.dtype, x.shape)] * 2
    prepared = Prepared(apply_kernel("multiply", specs, specs[:1], {}), 3)
    words = np.zeros(RUN_WORDS, np.int64)
    prepared.run(words.ctypes.data, [x.ctypes.data] * 3)
    np.testing.assert_array_equal(x, np.arange(100, dtype=np.float32) ** 2)
