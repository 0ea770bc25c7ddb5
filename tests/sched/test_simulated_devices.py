"""Sessions on GPUs, in Numba's simulator: one process trains on simulated ones and on the host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kept import keep, recall
from places import ON_GPU, told_by

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = ("mlp", "embedding", "cnn", "lstm", "recurrent", "transposing", "unknown_rows", "mixed", "second_order")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What `device_world` found, now or before: of simulated devices it is kept where all these tests pass of it.

    It is a process of its own: the simulator is chosen before Numba is imported.
    """
    before = None if ON_GPU else recall("device_world")
    found: dict[str, Any] = before or told_by("device_world", simulated=True, seconds=280)
    failed = request.session.testsfailed
    yield found
    if not (before or ON_GPU) and request.session.testsfailed == failed:
        keep("device_world", found)


@pytest.mark.parametrize("job", JOBS)
def test_what_is_trained_on_a_gpu_has_the_losses_of_the_host(world: dict[str, Any], job: str) -> None:
    found = world["jobs"][job]
    np.testing.assert_allclose(found["there"], found["here"], rtol=1e-4)
    assert len(set(found["there"])) == 3, "variables are updated"
    assert found["peaks"][0] > 1000
    assert found["peaks"][1] == 0


def test_a_graph_may_be_split_over_the_host_and_two_gpus(world: dict[str, Any]) -> None:
    assert max(world["split"]) < 1e-5


def test_memory_that_is_full_is_told_with_the_largest_tensors_there(world: dict[str, Any]) -> None:
    text = world["out_of_memory"]
    assert text.startswith("concat 'whole' (")
    assert re.search(r"no memory on cuda:\d for 640 bytes more, of float32\[160\]: 640 bytes are held", text)
    assert "and it may hold 1000" in text
    assert "Its largest tensors: exp 'exp' (" in text


def test_a_kernel_that_fails_names_its_op_and_the_users_line(world: dict[str, Any]) -> None:
    assert world["failing"].startswith("take 'take' (")
    assert world["failing"].endswith("an index is out of range")


def test_an_op_of_ones_own_runs_where_it_has_a_kernel(world: dict[str, Any]) -> None:
    assert world["own_op"] < 1e-6


def test_replicas_have_their_towers_on_a_gpu_and_their_variables_on_the_host(world: dict[str, Any]) -> None:
    (*there, peak), (*here, none) = world["towers"]
    np.testing.assert_allclose(there, here, rtol=1e-4)
    assert peak > 0
    assert none == 0
