"""CUDA twins, in Numba's simulator: one process runs every example on the simulated device and on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from places import ON_GPU

from flowrt import kernels
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import HOST_ONLY, KERNELS, View
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.launch import COPY_OP, FILL_OP

assert kernels


def computed_on(kind: str) -> set[str]:
    """The ops that flowrt itself has kernels for; other tests enter their own."""
    found = ((op, made) for (op, device), kernels in KERNELS.items() if device == kind for made in kernels)
    return {op for op, made in found if made.function.__module__.startswith("flowrt.")}


ON_CPU, ON_CUDA = computed_on("cpu"), computed_on("cuda")


def test_every_op_with_a_cpu_kernel_has_a_twin_or_says_it_is_for_hosts_only() -> None:
    assert set(HOST_ONLY) == ON_CPU - ON_CUDA
    assert not ON_CUDA - ON_CPU


def test_most_of_the_language_has_twins() -> None:
    assert len(ON_CUDA) >= 110


def test_what_proves_the_pairing_has_twins() -> None:
    assert {"add", "exp", "where", "sum", "mean", "max", "matmul", "conv2d", "transpose", "concat"} <= ON_CUDA


@pytest.mark.timeout(600)
def test_twins_compute_what_cpu_kernels_do(simulated: dict[str, Any]) -> None:
    assert simulated["differences"] == []


@pytest.mark.timeout(600)
def test_every_twin_was_compared(simulated: dict[str, Any]) -> None:
    moved = {f"{op}_rows" for op in simulated["moved"]["float32"]}
    assert set(simulated["compared"]) | moved == ON_CUDA - {COPY_OP, FILL_OP}  # which pieces are made of


@pytest.mark.timeout(600)
def test_rows_are_moved_where_they_lie(simulated: dict[str, Any]) -> None:
    same = dict.fromkeys(("add", "assign", "momentum", "adagrad", "rmsprop", "adam"), 0.0)
    assert simulated["moved"] == dict.fromkeys(("float32", "bfloat16", "float16"), same)


@pytest.mark.timeout(600)
def test_equal_rows_are_grouped_in_the_order_that_they_have_on_hosts(simulated: dict[str, Any]) -> None:
    alone, repeated, *on_hosts = simulated["grouped"]
    assert [alone, repeated] == on_hosts
    assert alone[:2] == [[3, 0, 15, 25, 35], [2, 0, 5]]
    assert alone[2] != repeated[2]


def test_what_is_for_hosts_only_says_why() -> None:
    assert all(why.endswith(tuple("abcdefghijklmnopqrstuvwxyz")) and len(why) > 20 for why in HOST_ONLY.values())


@pytest.mark.timeout(600)
def test_more_work_than_threads_is_looped_over(simulated: dict[str, Any]) -> None:
    drawn = {"random_normal": 0.0, "random_uniform": 0.0}
    assert simulated["long"] == {"add": 0.0, "fill": 0.0, "sum": 0.0, "matmul": 0.0, **drawn}


@pytest.mark.timeout(600)
def test_simulated_threads_take_turns_from_barrier_to_barrier_and_end_with_one_that_fails(
    simulated: dict[str, Any],
) -> None:
    first, second = ["0.0", "1.0", "2.0", "0.1", "2.1", "2.2"], ["0.0", "2.0", "tid=[1, 0, 0] ctaid=[0, 0, 0]: wrong"]
    assert simulated["turns"] == [*first, *second, "0 left"]


@pytest.mark.timeout(600)
def test_shared_arrays_of_one_line_are_two_and_hold_no_zeros_before_they_are_written(simulated: dict[str, Any]) -> None:
    assert simulated["beside"][:2] == [1.0, 0.0]
    assert ON_GPU or simulated["beside"][2:] == [-1.0, -1.0]


@pytest.mark.timeout(600)
def test_no_store_lies_between_the_loads_of_entries_that_are_computed_together(simulated: dict[str, Any]) -> None:
    assert simulated["asked"] == "llllss" + "lls"  # two at a time, then one by one what is left


@pytest.mark.timeout(600)
def test_what_does_not_run_there_says_so(simulated: dict[str, Any]) -> None:
    assert "no cuda kernel for matmul_bias" in simulated["refused"]


def test_outside_a_kernel_the_name_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"cuda\.grid exists only inside a CUDA kernel"):
        cuda.grid(1)


def test_a_twin_sees_its_operands_as_its_layout_says() -> None:
    (add,) = KERNELS["add", "cuda"][:1]
    a, b = Spec("float32", (3, 1)), Spec("float32", (4,))
    call = add.layout([a, b], [Spec("float32", (3, 4))], {})
    assert call.views == (View((3, 4), (1, 0)), View((3, 4), (0, 1)), View((3, 4), (4, 1)))
    assert np.dtype("float32") == a.dtype
