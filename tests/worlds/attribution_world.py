"""Trainings that never were: reports of steps whose parts the test decides, and when they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.sched.drivers.messages import Report
from flowrt.sched.replica.stopwatch import Phase
from flowrt.train.attribution import Attribution

if TYPE_CHECKING:
    from flowrt.sched.drivers.messages import Doing, Pending
    from flowrt.train.diagnosis import Slow

TICK = 0.25
SKEW = 1000.0  # seconds between the clocks of the server and of replica 0; others' are further away


@dataclass(frozen=True)
class Step:
    """What one replica does: seconds of each part; ``cut`` after so many seconds of computing."""

    input: float = 0.0
    pull: float = 0.0005
    compute: float = 0.01
    push: float = 0.0005
    held: float = 0.0
    cut: float | None = None

    @property
    def seconds(self) -> float:
        return self.input + self.pull + (self.compute if self.cut is None else self.cut) + self.push


@dataclass
class Training:
    """A run of ``replicas`` replicas that is watched: ``take`` of their updates make a version."""

    replicas: int = 4
    take: int = 4
    seed: int = 0
    server: float = 0.001
    drawn: float = 0.0
    noise: float = 0.1
    now: float = 50.0
    version: int = 0
    said: list[tuple[float, tuple[Slow, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attribution = Attribution(self.replicas)
        self.rng = random.Random(self.seed)
        self._looked = self.now

    def go(self, seconds: float, step: Callable[[int], Step] = lambda replica: Step()) -> tuple[Slow, ...]:
        """Train for so long; answers who is slow then."""
        until = self.now + seconds
        while self.now < until:
            self._step([self._varied(step(replica)) for replica in range(self.replicas)])
            while self._looked + TICK <= self.now:
                self.look(self._looked + TICK)
        return self.attribution.slow

    def look(self, now: float, **more: Any) -> tuple[Slow, ...]:
        """Look then."""
        self._looked = now
        before = self.attribution.slow
        if self.attribution.look(now, **more) != before:
            self.said.append((now, self.attribution.slow))
        return self.attribution.slow

    def stall(self, seconds: float, doing: dict[int, Doing], pending: Pending) -> tuple[Slow, ...]:
        """Nothing is reported for so long; who is asked answers with this, as of its end."""
        self.now += seconds
        return self.look(self.now, doing=doing, pending=pending)

    def _varied(self, step: Step) -> Step:
        def vary(seconds: float) -> float:
            return seconds * self.rng.lognormvariate(0.0, self.noise)

        return Step(vary(step.input), vary(step.pull), vary(step.compute), vary(step.push), step.held, step.cut)

    def _step(self, steps: Sequence[Step]) -> None:
        """One version: opened now, applied once the quickest have come."""
        opened = self.now
        came = sorted(step.seconds for step in steps if step.cut is None)
        fixed = opened + came[min(self.take, len(came)) - 1]
        applied = fixed + self.server + self.drawn
        rows = [self._row(replica, step, opened) for replica, step in enumerate(steps)]
        self.attribution.drawn += self.drawn
        stages = (opened, fixed, fixed, applied - self.drawn)
        self.attribution.add(report(self.version, stages, *rows))
        self.version += 1
        self.now = applied

    def _row(self, replica: int, step: Step, opened: float) -> tuple[float, ...]:
        skew = SKEW * (replica + 1)
        phase, computed = (Phase.POSTED, step.compute) if step.cut is None else (Phase.COMPUTE, step.cut)
        pulled = opened + step.pull
        ended = pulled + step.input + computed
        came = ended + step.push
        whole = came if step.cut is None else 0.0
        mine = (pulled + skew, step.input, computed, ended + skew, step.held)
        return (replica, self.version, opened, phase, *mine, came, whole)


def report(version: int, stages: tuple[float, ...], *rows: tuple[float, ...]) -> Report:
    return Report(
        run=0, version=version, receipts=(), told=(), seconds=0.0, stages=stages, times=np.array(rows).tobytes()
    )


def named(slow: Sequence[Slow]) -> set[tuple[int | None, str]]:
    return {(found.replica, found.cause) for found in slow}
