"""What the sides of perf/building.py share: the clock around a program's building, first step and further steps."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

WINDOW, CALM, LONGEST = 0.25, 1.5, 20.0  # seconds: steps looked at together; none was faster for so long; at most
ENOUGH = 3  # steps, where they take longer than that
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
    print(json.dumps({"built": built, "first": first} | _later(step)))


def _later(step: Callable[[], Any]) -> dict[str, float]:
    """What a step takes once steps become no faster, their median, and after how many seconds the first was so fast.

    A side may go on preparing while it steps: flowrt makes a better tape beside the first steps.
    """
    began = time.perf_counter()
    found: list[tuple[float, float]] = []  # by window: when it began, and its median step
    while True:
        now = time.perf_counter() - began
        best = min((median for _, median in found), default=math.inf)
        first = next((at for at, median in found if median <= 1.2 * best), 0.0)
        if found and (now > LONGEST or now - first > max(CALM, ENOUGH * best)):
            return {"step": best, "settled": first}
        found.append((now, _median_step(step)))


def _median_step(step: Callable[[], Any]) -> float:
    times: list[float] = []
    until = time.perf_counter() + WINDOW
    while not times or time.perf_counter() < until:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
