"""What a trainer has seen: counts, latencies and the parts of steps per replica, and who is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.versions.ledger import Outcome
from flowrt.train.attribution import Attribution
from flowrt.train.picture import draw
from flowrt.train.times import PARTS, Times, medians

if TYPE_CHECKING:
    import os

    from flowrt.train.diagnosis import Array, Slow

REMEMBERED = 1024  # latencies kept per replica: the quantiles are of the newest ones


@valueclass
class ReplicaStatistics:
    """How many updates of one replica ended how, and how long its finished ones took, in seconds (None: none did).

    The latency is from the moment that all servers are at a version to that at which an update of it has come. Those
    that were cut off because they came too late have none. The staleness is of those that were kept, in versions: see
    `StepReport`. ``times`` are medians of the parts of its newest steps, cut off or not; those of waiting and of the
    server are of steps in which it counted.
    """

    kept: int
    late: int
    refused: int
    lost: int
    median_seconds: float | None
    p95_seconds: float | None
    mean_staleness: float | None = None
    max_staleness: int | None = None
    times: Times | None = None


@valueclass
class Statistics:
    """Totals over all steps of a trainer. ``lost`` names the nodes of the replicas that are gone, ``slow`` says who is
    slow now, and why.

    ``records`` are columns of the newest steps, a row for each replica that was heard of in one: ``version``,
    ``replica``, seconds of ``input``, ``pull``, ``compute``, ``push``, ``wait`` and ``server``, and ``cut``: see
    `Times`.
    """

    steps: int
    dropped_batches: int
    replicas: tuple[ReplicaStatistics, ...]
    lost: tuple[str, ...]
    slow: tuple[Slow, ...] = ()
    records: Mapping[str, Array] = field(default_factory=dict, repr=False, compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``records`` to a Parquet file, which `fr.delays.Trace` reads: for simulations of what was seen.

        A step's seconds are those until its update was there, without waiting for others and the server; what was cut
        off is marked. The columns: see `flowrt.delays.parquet`. Raises `GraphError` before the first step, and where
        pyarrow is not installed.
        """
        records = self.records
        if not len(records.get("version", ())):
            raise GraphError(f"{user_site()}: there is nothing to save: no step was seen yet")
        from flowrt.delays.parquet import write  # which few programs need

        parts = {name: records[name] for name in PARTS}
        seconds = np.nansum([parts[name] for name in ("input", "pull", "compute", "push")], axis=0)
        write(path, records["version"], records["replica"], seconds, records["cut"], **parts)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw where the time of each replica's steps goes, in the middle and over the newest steps, into a file.

        The file's ending says the format. Raises `GraphError` where matplotlib is not installed.
        """
        draw(self, path)


@dataclass(slots=True)
class _Counts:
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    staleness: int = 0  # of all that were kept, together
    stalest: int = 0

    def statistics(self, times: Times | None) -> ReplicaStatistics:
        median, p95 = np.quantile(self.seconds, [0.5, 0.95]) if self.seconds else (None, None)
        kept = self.outcomes[Outcome.KEPT]
        return ReplicaStatistics(
            kept,
            self.outcomes[Outcome.LATE],
            self.outcomes[Outcome.REFUSED],
            self.outcomes[Outcome.LOST],
            None if median is None else float(median),
            None if p95 is None else float(p95),
            self.staleness / kept if kept else None,
            self.stalest if kept else None,
            times,
        )


class Tally:
    """Counts as the steps go by."""

    def __init__(self, replicas: int) -> None:
        self._replicas = [_Counts() for _ in range(replicas)]
        self.attribution = Attribution(replicas)
        self._lost: dict[int, str] = {}
        self._steps = 0
        self._dropped = 0

    def took(self, replica: int, seconds: float) -> None:
        """A tower of ``replica`` finished in ``seconds``."""
        self._replicas[replica].seconds.append(seconds)

    def lose(self, replica: int, node: str) -> None:
        """``replica``, on ``node`` if that is known, is gone."""
        self._lost[replica] = node or f"replica {replica}"

    def join(self, replica: int) -> None:
        """``replica`` is there again."""
        self._lost.pop(replica, None)

    def count(self, outcomes: Mapping[int, Outcome], stale: Mapping[int, int]) -> None:
        """A step ended with these outcomes, by replica; ``stale`` says how many versions old those kept were."""
        self._steps += 1
        for replica, outcome in outcomes.items():
            self._replicas[replica].outcomes[outcome] += 1
        for replica, staleness in stale.items() if any(stale.values()) else ():
            if staleness:
                counts = self._replicas[replica]
                counts.staleness += staleness
                counts.stalest = max(counts.stalest, staleness)

    def drop(self, batches: int) -> None:
        """So many batches were handed out and not kept in any step."""
        self._dropped += batches

    def counts(self) -> Statistics:
        """`statistics` without the parts of steps, which take milliseconds to sum up."""
        each = tuple(counts.statistics(None) for counts in self._replicas)
        lost = tuple(self._lost[replica] for replica in sorted(self._lost))
        return Statistics(self._steps, self._dropped, each, lost, self.attribution.slow)

    def statistics(self) -> Statistics:
        """All of it."""
        found, records = self.counts(), self.attribution.records()
        each = tuple(counts.statistics(medians(records, replica)) for replica, counts in enumerate(self._replicas))
        return replace(found, replicas=each, records=records)
