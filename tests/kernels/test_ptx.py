"""CUDA twins as a GPU's compiler sees them: one process compiles all that the examples launch, which takes no GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from kept import keep, recall
from places import told_by
from test_cuda import ON_CUDA

from flowrt.kernels.launch import COPY_OP, FILL_OP

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's compiler is made for Linux alone"),
]
VARIANTS = 440  # and more: as many as the examples of all ops launch


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What `ptx_world` compiled, now or before from the very same: it is kept where kernels are.

    It is a process of its own, as Numba's simulator compiles nothing.
    """
    found = recall("ptx_world")
    if found is None:
        found = told_by("ptx_world", simulated=False, seconds=580)
        if not found["failures"]:
            keep("ptx_world", found)
    return found


def test_every_variant_of_every_twin_compiles_to_ptx(compiled: dict[str, Any]) -> None:
    assert compiled["failures"] == []
    assert sum(compiled["compiled"].values()) >= VARIANTS


def test_every_op_that_has_a_twin_is_among_them(compiled: dict[str, Any]) -> None:
    assert set(compiled["ops"]) == ON_CUDA - {COPY_OP, FILL_OP}  # which pieces are made of


def test_expressions_of_float32_compute_in_float32_but_for_those_that_round_or_have_large_arguments(
    compiled: dict[str, Any],
) -> None:
    """A GPU may have a sixty-fourth of its units for float64, and Python's constants beside an entry are that."""
    rounding = {"ceil", "floor", "floor_divide", "round", "remainder", "sign"}
    assert set(compiled["widened"]) <= rounding | {"sin", "cos", "tan"}
