"""What the sides of perf/building.py share: the clock around a program's building, first step and further steps."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS, STEP_SECONDS = 50, 2.0  # further steps: so many, or as many as begin in so many seconds
RATE = 0.1

Built = Callable[[], Callable[[], Any]]
"""Makes a built program ready; what it answers runs one step."""


def measure(programs: dict[str, Callable[[int], Built]], warm: int = 30) -> None:
    """Run the program and size that the command line names, and print seconds as JSON."""
    name, size = sys.argv[1], int(sys.argv[2])
    programs[name](warm)()()
    began = time.perf_counter()
    ready = programs[name](size)
    built = time.perf_counter() - began
    step = ready()
    step()
    first = time.perf_counter() - began
    print(json.dumps({"built": built, "first": first, "step": _median_step(step)}))


def _median_step(step: Callable[[], Any]) -> float:
    times: list[float] = []
    until = time.perf_counter() + STEP_SECONDS
    while len(times) < STEPS and (not times or time.perf_counter() < until):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
