"""What simulated GPUs do not show and real ones would: barriers that CUDA twins lack, and those that nothing needs."""

from __future__ import annotations

from typing import Any

import pytest
from kept import keep, recall
from places import told_by

from flowrt.base.package import PACKAGE

BARRIER = "cuda.syncthreads()"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def races() -> dict[str, Any]:
    """What `racing_world` found, now or before."""
    found: dict[str, Any] = recall("racing_world") or told_by("racing_world", simulated=True, seconds=280)
    if not (any(found["faults"].values()) or found["needless"]):
        keep("racing_world", found)
    return found


def test_no_two_threads_use_an_entry_unless_a_barrier_lies_between(races: dict[str, Any]) -> None:
    assert len(races["faults"]) >= 60
    assert {case: faults for case, faults in races["faults"].items() if faults} == {}


def test_every_barrier_is_come_to_and_would_be_missed(races: dict[str, Any]) -> None:
    files = (file for file in (PACKAGE / "kernels").rglob("*.py") if file.name != "simulator.py")
    lines = ((file.name, n, line) for file in files for n, line in enumerate(file.read_text().splitlines(), 1))
    assert races["barriers"] == sorted(f"{name}:{n}" for name, n, line in lines if BARRIER in line)
    assert races["needless"] == []


def test_threads_that_race_or_wait_apart_are_found(races: dict[str, Any]) -> None:
    apart, reading, writing = races["wrong"]
    assert apart == ["of a block come to different barriers"]
    assert reading == ["reads what no thread has written", "writes what another thread reads"]
    assert writing == ["writes what another thread writes"]
