"""What a trainer has seen: counts and latencies per replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flowrt.sched.ledger import Outcome
from flowrt.valueclass import valueclass

REMEMBERED = 1024  # latencies kept per replica: the quantiles are of the newest ones


@valueclass
class ReplicaStatistics:
    """How many updates of one replica ended how, and how long its finished ones took, in seconds (None: none did).

    The latency is from the moment that all servers are at a version to that at which an update of it has come. Those
    that were cut off because they came too late have none. The staleness is of those that were kept, in versions: see
    `StepReport`.
    """

    kept: int
    late: int
    refused: int
    lost: int
    median_seconds: float | None
    p95_seconds: float | None
    mean_staleness: float | None = None
    max_staleness: int | None = None


@valueclass
class Statistics:
    """Totals over all steps of a trainer. ``lost`` names the nodes of the replicas that are gone."""

    steps: int
    dropped_batches: int
    replicas: tuple[ReplicaStatistics, ...]
    lost: tuple[str, ...]


@dataclass(slots=True)
class _Counts:
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    staleness: int = 0  # of all that were kept, together
    stalest: int = 0

    def statistics(self) -> ReplicaStatistics:
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
        )


class Tally:
    """Counts as the steps go by."""

    def __init__(self, replicas: int) -> None:
        self._replicas = [_Counts() for _ in range(replicas)]
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
        for replica, staleness in stale.items():
            counts = self._replicas[replica]
            counts.staleness += staleness
            counts.stalest = max(counts.stalest, staleness)

    def drop(self, batches: int) -> None:
        """So many batches were handed out and not kept in any step."""
        self._dropped += batches

    def statistics(self) -> Statistics:
        lost = tuple(self._lost[replica] for replica in sorted(self._lost))
        return Statistics(self._steps, self._dropped, tuple(c.statistics() for c in self._replicas), lost)
