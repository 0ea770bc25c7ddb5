"""What a trainer's reports come to: of each step some numbers, and of its replicas one for each time that is written.

Law: it is asked in the writer's thread. A step has what is of all; what is of each replica is summed up over the steps
since it was asked last, so that it costs little however many replicas there are, and however short steps are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event

from flowrt.summary import events

if TYPE_CHECKING:
    from flowrt.train.diagnosis import Slow
    from flowrt.train.reports import StepReport

OUTCOMES = ("kept", "late", "lost", "refused")
PARTS = ("input", "pull", "compute", "push", "wait", "server")
OF_REPLICAS = (*OUTCOMES, "latency", "latency p95", *PARTS, "slow")


class Training:
    """The reports of one trainer."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []  # that are not summed up
        self._counts = {outcome: Counter[int]() for outcome in OUTCOMES}
        self._slow: tuple[Slow, ...] = ()
        self._stale = self._charted = False
        self._time = 0.0

    def step(self, event: Event, report: StepReport) -> None:
        """One step."""
        self._reports.append(report)
        self._time = event.wall_time
        events.scalar(event, "loss", report.loss)
        for name, value in report.metrics.items():
            if np.size(value) == 1:  # else it is no curve
                events.scalar(event, f"metrics/{name}", float(np.reshape(value, ())))
        events.scalar(event, "step/seconds", report.seconds)
        for outcome in OUTCOMES:
            replicas, counts = getattr(report, outcome), self._counts[outcome]
            if replicas:
                counts.update(replicas)
            if counts:  # from the first one on
                events.scalar(event, f"step/{outcome}", len(replicas))
        self._stale = self._stale or any(report.staleness)
        if self._stale:
            events.scalar(event, "step/staleness", float(np.mean(report.staleness or (math.nan,))))
        if not math.isnan(report.noise_scale):
            events.scalar(event, "step/noise scale", report.noise_scale)
        if report.skipped:
            events.scalar(event, "step/skipped", 1)
        if report.rolled_back is not None:
            events.text(event, "rolled back", str(report.rolled_back))
        before, self._slow = self._slow, report.slow
        if _causes(before) != _causes(report.slow):
            events.text(event, "slow", "\n\n".join(map(str, report.slow)) or "nobody is slow any more")

    def sum_up(self) -> Iterator[Event]:
        """What is of each replica, at the newest step."""
        reports, self._reports = self._reports, []
        if reports:
            event = Event(wall_time=self._time, step=reports[-1].step)
            if not self._charted:
                self._charted = True
                events.charts(event, {name: f"{name}/replica .*" for name in OF_REPLICAS})
            for name, values in self._of_replicas(reports).items():
                for replica, value in values.items():
                    events.scalar(event, f"{name}/replica {replica}", value)
            yield event

    def _of_replicas(self, reports: list[StepReport]) -> dict[str, dict[int, float]]:
        """By name and replica."""
        known = sorted(set().union(*self._counts.values()))
        found: dict[str, dict[int, float]] = {
            outcome: {replica: counts[replica] for replica in known}
            for outcome, counts in self._counts.items()
            if counts
        }
        slow = {one.replica: one.factor for one in self._slow}
        found["slow"] = {replica: slow.get(replica, 1.0) for replica in known}
        return found | _latencies(reports) | _parts(reports)


def _causes(slow: Sequence[Slow]) -> set[tuple[int | None, str]]:
    return {(one.replica, one.cause) for one in slow}


def _latencies(reports: list[StepReport]) -> dict[str, dict[int, float]]:
    """Median and 95th percentile of the seconds after which an update of each replica came."""
    seconds: dict[int, list[float]] = {}
    for report in reports:
        for replica, _, _, took, _ in report.measured[0].receipts if report.measured else ():
            if took >= 0:  # else it did not come
                seconds.setdefault(replica, []).append(took)
    quantiles = {replica: np.quantile(took, [0.5, 0.95]).tolist() for replica, took in sorted(seconds.items())}
    return {
        name: {replica: ends[place] for replica, ends in quantiles.items()}
        for place, name in enumerate(("latency", "latency p95"))
    }


def _parts(reports: list[StepReport]) -> dict[str, dict[int, float]]:
    """Medians of the parts of each replica's steps: see `StepReport.times`."""
    from flowrt.train.times import divide, medians, tables  # loaded by whoever made a report

    measured = [report.measured for report in reports if report.measured is not None]
    if not measured:
        return {}
    clocks = measured[-1][1]
    records = divide(*tables([report for report, _ in measured], len(clocks)), clocks)
    found = {replica: medians(records, replica) for replica in range(len(clocks))}
    return {
        part: {replica: getattr(times, part) for replica, times in found.items() if times is not None} for part in PARTS
    }
