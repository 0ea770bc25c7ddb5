"""What clients tell of training, one after another: its steps, when they were, and what was wrong."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

Report = dict[str, Any]


class Observed:
    """The steps that were told of so far. ``violations`` are what clients found, and steps that went missing.

    Of a ``detached`` run no step goes missing with a client, and some are told twice.
    """

    def __init__(self, *, detached: bool = False) -> None:
        self._detached = detached
        self.violations: list[str] = []
        self.steps = 0
        self.newest: Report = {}
        self.resumed = 0.0  # when the first step of the client that goes on was
        self._times: list[float] = []
        self._first = False  # the next step is a client's first one
        self._awaited: list[tuple[Callable[[Report], bool], asyncio.Future[Report]]] = []

    def again(self) -> None:
        """Another client goes on: it begins with a step after all that were reported."""
        self._first = True

    async def read(self, client: asyncio.subprocess.Process) -> None:
        """Take in what a client prints, until it ends; a line that was cut short by its death says nothing."""
        assert client.stdout is not None
        async for line in client.stdout:
            if not line.endswith(b"\n"):
                return
            told = json.loads(line)
            if "violations" in told:
                self.violations += told["violations"]
            else:
                self._add(told)

    def _add(self, report: Report) -> None:
        step = report["step"]
        if report.get("back"):  # to a checkpoint
            self.steps = min(self.steps, step - 1)
        if self._detached and self._first and step <= self.steps:
            return  # who was told of it before was killed
        if step <= self.steps or (step > self.steps + 1 and (self._detached or not self._first)):
            self.violations.append(f"step {step} was made after step {self.steps}")
        if self._first or not self.steps:
            self.resumed = report["at"]
        self._first, self.steps = False, step
        self.newest = report
        self._times.append(report["at"])
        for sign, found in self._awaited:
            if not found.done() and sign(report):
                found.set_result(report)

    async def until(self, sign: Callable[[Report], bool], seconds: float) -> Report:
        """The first report from now on that is the ``sign``. Raises `TimeoutError` if none comes in so many seconds."""
        awaited = sign, asyncio.get_running_loop().create_future()
        self._awaited.append(awaited)
        try:
            async with asyncio.timeout(seconds):
                return await awaited[1]
        finally:
            self._awaited.remove(awaited)

    def rate(self, spans: Iterable[tuple[float, float]]) -> float:
        """Steps a second in these spans of time."""
        steps, seconds = 0, 0.0
        for begin, end in spans:
            steps += bisect(self._times, end) - bisect(self._times, begin)
            seconds += end - begin
        return steps / seconds

    def longest(self, begin: float, end: float) -> float:
        """The longest time without a step between two moments."""
        times = [begin, *self._times[bisect(self._times, begin) : bisect(self._times, end)], end]
        return max(b - a for a, b in pairwise(times))
