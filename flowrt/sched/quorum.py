"""Which updates a version of the variables keeps.

A quorum is a value: an offer answers a new quorum and a verdict. It owns one decision, the set of replicas whose
updates make the next version, and takes it once: the offer that completes the set answers CLOSE, every other offer
after it LATE or REPEAT. It must not know what an update is, where it is held, who is alive or what time it is.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from flowrt.errors import GraphError, InternalError
from flowrt.valueclass import replace, valueclass


class Verdict(Enum):
    """What became of one message about one replica's update."""

    HELD = "held"  # this server has it; others may not yet
    KEEP = "keep"  # it is in the set, which is not complete
    CLOSE = "close"  # it is in the set and completed it
    LATE = "late"  # the set was fixed without it, or it is of an older version
    REPEAT = "repeat"  # said before, nothing changed
    REFUSED = "refused"  # it is not finite


class Policy(Protocol):
    """How many of the replicas' updates a version waits for; a small frozen value."""

    def take(self, replicas: int) -> int:
        """How many updates of ``replicas`` make a version; raises `GraphError` when the policy cannot be met."""
        ...


@valueclass
class AllOf:
    """Wait for the update of every replica: synchronous training without spares.

    A slow replica slows every step, and a lost one stops training until it is back. Chen et al., "Revisiting
    Distributed Synchronous SGD", arXiv 1604.00981, §2.2.
    """

    def take(self, replicas: int) -> int:
        """All ``replicas`` updates."""
        return replicas


@valueclass
class FirstOf:
    """Keep the first ``updates`` updates of every step and drop the rest: synchronous training with spare replicas.

    With ``FirstOf(m)`` of n replicas, the slowest n - m delay nobody, and training goes on while m are left. The kept
    updates are averaged over m. Raises `GraphError` unless 1 <= m <= n. Chen et al., "Revisiting Distributed
    Synchronous SGD", arXiv 1604.00981, §3 (there: N workers and b backup workers).
    """

    updates: int

    def __post_init__(self) -> None:
        if isinstance(self.updates, bool) or not isinstance(self.updates, int):
            raise GraphError(f"FirstOf({self.updates!r}): expected a number of updates, an int such as FirstOf(3)")
        if self.updates < 1:
            raise GraphError(f"FirstOf({self.updates}): a step needs at least one update; use FirstOf(1) or more")

    def take(self, replicas: int) -> int:
        """The first ``updates`` of ``replicas``; raises `GraphError` when there are fewer replicas than that."""
        if self.updates > replicas:
            raise GraphError(
                f"FirstOf({self.updates}) of {replicas} replicas can never be met; "
                f"use FirstOf({replicas}) or fewer, or replicas={self.updates} or more"
            )
        return self.updates


@valueclass
class Quorum:
    """The set of replicas that one version keeps: open, until an offer closes it.

    Args:
        policy: How many updates make the set.
        replicas: How many replicas there are; they are named 0 to ``replicas`` - 1.
        version: The version of the variables that the updates were computed from.
        kept: The replicas in the set so far, in replica order.
        closed_at: When the set was fixed, in the caller's seconds; None while it is open.
    """

    policy: Policy
    replicas: int
    version: int = 0
    kept: tuple[int, ...] = ()
    closed_at: float | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise GraphError(f"expected at least one replica, got replicas={self.replicas}")
        self.policy.take(self.replicas)

    @property
    def needed(self) -> int:
        """How many updates make the set."""
        return self.policy.take(self.replicas)

    @property
    def decided(self) -> tuple[int, ...] | None:
        """The fixed set in replica order; None while it is open."""
        return None if self.closed_at is None else self.kept

    def offer(self, replica: int, version: int, now: float) -> tuple[Quorum, Verdict]:
        """Offer the whole update of ``replica``, computed from ``version``: KEEP, CLOSE, LATE or REPEAT.

        Raises `InternalError` for a replica that does not exist, and for a version that is not open yet: no replica
        can have received it.
        """
        if not 0 <= replica < self.replicas:
            raise InternalError(f"version {version}: offered by replica {replica}, expected 0 to {self.replicas - 1}")
        if version > self.version:
            raise InternalError(f"replica {replica} offered version {version}, the newest there is is {self.version}")
        if version == self.version and replica in self.kept:
            return self, Verdict.REPEAT
        if version < self.version or self.closed_at is not None:
            return self, Verdict.LATE
        kept = tuple(sorted((*self.kept, replica)))
        if len(kept) < self.needed:
            return replace(self, kept=kept), Verdict.KEEP
        return replace(self, kept=kept, closed_at=now), Verdict.CLOSE

    def abandon(self, now: float) -> Quorum:
        """Fix the empty set: this version keeps nothing. Raises `InternalError` once a set is fixed."""
        if self.closed_at is not None:
            raise InternalError(f"version {self.version} cannot be abandoned: its set {self.kept} is fixed")
        return replace(self, kept=(), closed_at=now)

    def next(self) -> Quorum:
        """The open quorum of the version after this one. Raises `InternalError` while this one is open."""
        if self.closed_at is None:
            raise InternalError(f"version {self.version + 1} cannot open: version {self.version} is not decided")
        return Quorum(self.policy, self.replicas, self.version + 1)
