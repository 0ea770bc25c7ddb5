"""What a run's reports tell of who is slow: kept for a while, summed up in windows, and judged.

Law: no clock: ``now`` is given, in seconds of any one clock. A report costs its appending; some times a second a sample
of them is looked at. Memory is bounded: `ROWS` rows of the newest steps, and `PAST` windows of all of
the past, of which every second one is left out as they become too many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrt.sched.replica.stopwatch import Phase
from flowrt.train import times
from flowrt.train.diagnosis import CAUSES, COMPUTE, INPUT, LINK, Array, Medians, Slow, judge, middle
from flowrt.train.times import Clocks

if TYPE_CHECKING:
    from flowrt.sched.drivers.messages import Doing, Pending, Report

RECENT = 2.5  # seconds that are judged: what lasts for half of them is seen
FEWEST = 3  # usual steps that are judged, where these take longer
WARM = 1.0  # seconds after a run's first report that tell nothing: kernels are loaded, caches are cold
SUPPORT = 1.0  # seconds that must have been seen before anything is judged
SAMPLE = 32  # reports of a window that are looked at, evenly spread
ROWS = 1 << 16
PAST = 256
REVIEWED = 8  # windows that become past before it is summed up again
SELDOM = 10  # while something is slow, only each so many windows become past


@dataclass(slots=True)
class _Window:
    """What was seen from ``start`` to ``end``."""

    start: float
    end: float
    view: Medians


class Attribution:
    """Who of ``replicas`` replicas is slow. ``slow`` is what the last `look` found."""

    def __init__(self, replicas: int) -> None:
        self.slow: tuple[Slow, ...] = ()
        self.clocks = Clocks(replicas)
        self.heard = [-math.inf] * replicas  # when a report last told of each
        self.nbytes = 0  # of what a replica is told of a version
        self.drawn = 0.0  # seconds that the client has waited for the source of batches, of steps not looked at
        self._replicas = replicas
        self._new: list[Report] = []
        self._rows: deque[tuple[Array, Array]] = deque()  # of the newest reports, and what came with each
        self._kept = 0
        self._recent: deque[_Window] = deque()
        self._past: list[Medians] = []
        self._usual, self._noise = (
            Medians.nothing(replicas),
            Medians.nothing(replicas),
        )  # what the past shows, and how it varies
        self._unread = 0  # windows that became past since
        self._stride, self._skipped = 1, 0
        self._began = math.nan  # when the first report was looked at
        self._seen = math.nan  # and the newest

    def add(self, report: Report) -> None:
        """Take in a report."""
        self._new.append(report)

    def again(self) -> None:
        """A new run begins, whose clocks and kernels start anew; the past is the past."""
        self._keep(*times.tables(self._new, self._replicas))
        self._new = []
        self._recent.clear()
        self.heard = [-math.inf] * self._replicas
        self.clocks = Clocks(self._replicas)
        self._began, self._seen, self.slow = math.nan, math.nan, ()

    def look(
        self,
        now: float,
        frozen: Collection[int] = (),
        doing: Mapping[int, Doing] | None = None,
        pending: Pending | None = None,
        *,
        stopped: bool = False,
    ) -> tuple[Slow, ...]:
        """Judge what was seen until ``now``.

        ``frozen`` are replicas whose nodes answer nothing, ``stopped`` is whether a server's does not; ``doing`` and
        ``pending`` are answers to probes, of replicas of which no report told, and of server 0 where no report came.
        """
        self._see(now)
        self._age(now)
        past, noise = self._usual, self._noise
        windows = [*self._recent, *self._unfinished(now, doing or {}, pending)]
        recent = self._join(windows, now, max(RECENT, FEWEST * (0.0 if math.isnan(past.step) else past.step)))
        found = judge(recent, past, noise, frozen=frozen, stopped=stopped, named=self.slow, nbytes=self.nbytes)
        self.slow = found
        return found

    # ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _see(self, now: float) -> None:
        """Make a window of the reports since the last time."""
        drawn, self.drawn = self.drawn, 0.0
        reports, self._new = self._new, []
        rows, stages = times.tables(reports, self._replicas)
        if not len(rows):
            self.drawn = drawn
            return
        self._keep(rows, stages)
        seldom = len(reports) // SAMPLE + 1
        sample = stages[:, 0] % seldom == stages[0, 0] % seldom
        rows, stages = rows[sample], stages[sample]
        self.clocks.note(rows)
        for replica in np.unique(rows[:, times.REPLICA]).astype(int).tolist():
            self.heard[replica] = now
        if math.isnan(self._began):
            self._began = now
        elif now - self._began > WARM:
            view = _view(self._replicas, rows, stages, drawn / len(reports))
            self._recent.append(_Window(self._seen, now, view))
        self._seen = now

    def _keep(self, rows: Array, stages: Array) -> None:
        self._rows.append((rows, stages))
        self._kept += len(rows)
        while self._kept - len(self._rows[0][0]) >= ROWS:
            self._kept -= len(self._rows.popleft()[0])

    def _unfinished(self, now: float, doing: Mapping[int, Doing], pending: Pending | None) -> Iterator[_Window]:
        """What is waited for now, as a window of its own."""
        view = _waited_for(self._replicas, doing, pending)
        if view is not None and not math.isnan(self._began):
            heard = [self.heard[replica] for replica in doing]
            yield _Window(min([self._seen, *heard]), now, view)

    def _join(self, windows: list[_Window], now: float, seconds: float) -> Medians:
        """Medians over the last ``seconds``, by how long windows lasted."""
        weights = np.array([max(0.0, window.end - max(window.start, now - seconds)) for window in windows])
        if weights.sum() < SUPPORT:
            return Medians.nothing(self._replicas)
        cuts = np.array([window.view.cut for window in windows])
        parts, cut = middle(np.array([window.view.parts for window in windows]), weights, cuts)
        common, _ = middle(np.array([(window.view.server, window.view.step) for window in windows]), weights)
        return Medians(parts, float(common[0]), float(common[1]), cut)

    def _age(self, now: float) -> None:
        """Have windows that are not recent any more be past."""
        while self._recent and self._recent[0].end < now - RECENT:
            window = self._recent.popleft()
            self._skipped += 1
            if self._skipped >= self._stride * (SELDOM if self.slow else 1):
                self._skipped = 0
                self._past.append(window.view)
                self._unread += 1
        if self._unread >= min(REVIEWED, len(self._past)) > 0:
            self._review()
        if len(self._past) > PAST:
            self._past, self._stride = self._past[::2], 2 * self._stride

    def _review(self) -> None:
        """Sum up the past."""
        self._unread = 0
        parts = np.array([view.parts for view in self._past])
        shared = np.array([(view.server, view.step) for view in self._past])
        usual, _ = middle(parts, None, np.array([view.cut for view in self._past]))
        common, _ = middle(shared)
        spread, apart = (1.4826 * middle(np.abs(seen - at))[0] for seen, at in ((parts, usual), (shared, common)))
        self._usual = Medians(usual, float(common[0]), float(common[1]))
        self._noise = Medians(spread, float(apart[0]), float(apart[1]))

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def records(self) -> dict[str, Array]:
        """Columns of the newest steps, a row for each replica that server 0 heard of: see `times.divide`."""
        chunks = [*self._rows, times.tables(self._new, self._replicas)]
        rows, stages = (np.concatenate(column) for column in zip(*chunks, strict=True))
        return times.divide(rows, stages, self.clocks)


def _view(replicas: int, rows: Array, stages: Array, drawn: float) -> Medians:
    """What ``rows`` of reports show, which came with ``stages``; batches of a step took ``drawn`` seconds to draw."""
    parts, cut = np.full((replicas, len(CAUSES)), np.nan), np.zeros((replicas, len(CAUSES)), bool)
    looked = np.full(replicas, np.nan)
    phase, whole = rows[:, times.PHASE], rows[:, times.WHOLE]
    waits, computes = (phase == Phase.INPUT) | (phase == Phase.ROWS), phase == Phase.COMPUTE
    held = np.where(waits, 0.0, np.minimum(rows[:, times.HELD], rows[:, times.COMPUTE]))
    computed = np.where(waits, np.nan, rows[:, times.COMPUTE] - held)
    look = np.where(whole > 0, whole - rows[:, times.CAME], np.nan)
    seconds, never = (
        np.stack([rows[:, times.INPUT], times.away(rows), computed, held, look], 1),
        np.zeros(len(rows), bool),
    )
    cuts = np.stack([phase == Phase.INPUT, phase == Phase.PUSH, computes, never, never], 1)
    for replica in np.unique(rows[:, times.REPLICA]).astype(int).tolist():
        mine = rows[:, times.REPLICA] == replica
        (*parts[replica], looked[replica]), (*cut[replica], _) = middle(seconds[mine], None, cuts[mine])
    seen = np.sort(looked[~np.isnan(looked)])
    least = float(seen[(len(seen) - 1) // 3]) if len(seen) else 0.0
    parts[:, LINK] += np.maximum(0.0, np.nan_to_num(looked - least))  # other servers' links, where they took longer
    parts[:, INPUT] = np.fmax(parts[:, INPUT], drawn)
    opened, fixed, ordered, applied = stages[:, 1:].T
    step = float(np.median(applied - opened - (ordered - fixed)))
    return Medians(parts, float(np.median(applied - ordered)) + least, max(step, drawn), cut)


def _waited_for(replicas: int, doing: Mapping[int, Doing], pending: Pending | None) -> Medians | None:
    """What is waited for now, as long as it has taken already; None where that is nothing."""
    parts, server = np.full((replicas, len(CAUSES)), np.nan), math.nan
    if pending is not None and pending.stages[2] >= 0:
        server = pending.stages[2]
    for replica, answer in doing.items():
        version, phase, _, _, _, _, _, spent = answer.times
        match int(phase):
            case Phase.INPUT:
                parts[replica, INPUT] = spent
            case Phase.COMPUTE:
                parts[replica, COMPUTE] = spent
            case Phase.ROWS | Phase.PUSH:
                parts[replica, LINK] = spent
            case _ if pending is not None and replica not in pending.came:
                told = pending.told[replica]
                parts[replica, LINK] = spent if version == pending.version else told if told >= 0 else math.nan
    if np.isnan(parts).all() and math.isnan(server):
        return None
    return Medians(parts, server, math.nan if pending is None else pending.stages[0], ~np.isnan(parts))
