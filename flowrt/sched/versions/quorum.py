"""Which updates a version of the variables keeps: asks the policy, and obeys it.

A quorum is a value. It owns one fact, the set of replicas whose updates make the next version, and when the policy is
asked for it: with an offer that it waits for, at the time that it named, and when a replica is no longer able to offer.
The set is fixed once; after that nobody is asked. It must not know what an update is, where it is held, who is alive or
what time it is.

Where replicas come and go, policies follow how many are there: that many is what they are asked about. Fewer than the
``floor`` make no version, whatever the policy says.

What a policy knows of time are seconds since the version was opened; here and beyond, times are the caller's clock's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from operator import attrgetter

from flowrt.base.errors import GraphError, InternalError
from flowrt.base.valueclass import replace, stateclass
from flowrt.sched.policies import asking
from flowrt.sched.policies.policy import Close, Offer, Policy, Record

_replica_of = attrgetter("replica")


class Verdict(Enum):
    """What became of one message about one replica's update."""

    HELD = "held"  # this server has it; others may not yet
    OFFERED = "offered"  # all have it, and the set is open
    CLOSE = "close"  # all have it, and with it the set was fixed
    LATE = "late"  # the set was fixed before, or it is of an older version
    REPEAT = "repeat"  # said before, nothing changed
    REFUSED = "refused"  # it is not finite


@stateclass
class Quorum:
    """The set of replicas that one version keeps: open, until the policy closes it.

    Args:
        policy: Decides.
        replicas: How many replicas there are; they are named 0 to ``replicas`` - 1.
        version: The version of the variables that the updates were computed from.
        opened: When it was opened.
        offers: What was offered, by arrival.
        wakes: The seconds at which the policy is to be asked again; infinite for at no time.
        enough: How many offers there are when it is to be asked again.
        kept: The set, in replica order, once it is fixed.
        why: What the policy said to it.
        weights: What the updates of the set are multiplied by; None for their mean.
        closed_at: When the set was fixed; None while it is open.
        floor: With how few replicas a version is made; 0 where all are counted on, be they there or not.
        there: How many of the replicas are there; all of them without a ``floor``.
    """

    policy: Policy
    replicas: int
    version: int = 0
    opened: float = 0.0
    offers: tuple[Offer, ...] = ()
    wakes: float = inf
    enough: int = 0
    kept: tuple[int, ...] = ()
    why: str = ""
    weights: tuple[float, ...] | None = None
    closed_at: float | None = None
    floor: int = 0
    there: int = 0

    @classmethod
    def start(
        cls,
        policy: Policy,
        replicas: int,
        version: int = 0,
        opened: float = 0.0,
        floor: int = 0,
        there: int = -1,
    ) -> Quorum:
        """The open quorum of ``version``, all being there by default. Raises `GraphError` for a policy never met."""
        if replicas < 1:
            raise GraphError(f"expected at least one replica, got replicas={replicas}")
        there = replicas if there < 0 else there
        return cls(policy, replicas, version, opened, enough=_least(policy, there, floor), floor=floor, there=there)

    @property
    def least(self) -> int:
        """The fewest updates that make a set: of too few replicas, more than they have."""
        return _least(self.policy, self.there, self.floor)

    @property
    def decided(self) -> tuple[int, ...] | None:
        """The fixed set in replica order; None while it is open."""
        return None if self.closed_at is None else self.kept

    @property
    def due(self) -> float | None:
        """When the policy is to be asked again, if it named a time."""
        return None if self.wakes == inf or self.closed_at is not None else self.opened + self.wakes

    def offer(self, offer: Offer, able: Callable[[], Sequence[int]]) -> Quorum:
        """Offer a whole update, once of a replica; with it the set may be fixed. ``able`` says who may offer after it.

        Raises as `ask`.
        """
        offered = replace(self, offers=(*self.offers, offer))
        return offered if len(offered.offers) < self.enough else offered.ask(able(), self.opened + offer.seconds)

    def stir(self) -> Quorum:
        """Somebody is no longer able to offer: if there is anything to ask, the policy is to be asked at once."""
        asks = self.closed_at is None and len(self.offers) >= self.least
        return replace(self, wakes=-inf) if asks else self

    def follow(self, there: int) -> Quorum:
        """So many replicas are there now: it is asked for a set of theirs."""
        if there == self.there:
            return self
        fewest = _least(self.policy, there, self.floor)
        return replace(self, there=there, enough=min(self.enough, max(fewest, len(self.offers) + 1))).stir()

    def ask(self, able: Sequence[int], now: float) -> Quorum:
        """Ask the policy what to do, while ``able`` may yet offer.

        Raises `InternalError` once a set is fixed, `GraphError` for a policy that makes no sense.
        """
        if self.closed_at is not None:
            raise InternalError(f"version {self.version} is decided: its set {self.kept} is fixed")
        if self.floor and len(self.offers) < (least := self.least):  # somebody came since it said what it waits for
            return replace(self, wakes=inf, enough=least)
        seconds = now - self.opened
        if self.due is not None and now >= self.due:
            seconds = max(seconds, self.wakes)  # which differences of times may miss by a rounding
        answer = asking.decide(self.policy, self.replicas, self.offers, able, seconds, self.there)
        if isinstance(answer, Close):
            return self._close(answer, now)
        wakes = answer.seconds if answer.seconds > seconds else inf
        return replace(self, wakes=wakes, enough=max(answer.offers, len(self.offers) + 1))

    def _close(self, answer: Close, now: float) -> Quorum:
        chosen = frozenset(answer.replicas)
        kept = sorted([offer for offer in self.offers if offer.replica in chosen], key=_replica_of)
        return replace(
            self,
            kept=tuple(map(_replica_of, kept)),
            why=answer.why,
            weights=asking.weights(self.policy, kept),
            closed_at=now,
        )

    def abandon(self, now: float) -> Quorum:
        """Fix the empty set: this version keeps nothing. Raises `InternalError` once a set is fixed."""
        if self.closed_at is not None:
            raise InternalError(f"version {self.version} cannot be abandoned: its set {self.kept} is fixed")
        return replace(self, kept=(), closed_at=now)

    def next(self, now: float, record: Callable[[], Record] | None = None) -> Quorum:
        """The open quorum of the version after this one, of which ``record`` tells a policy that learns.

        Raises `InternalError` while this one is open, `GraphError` for a policy that makes no sense.
        """
        if self.closed_at is None:
            raise InternalError(f"version {self.version + 1} cannot open: version {self.version} is not decided")
        policy = self.policy
        if record is not None and self.kept and asking.learns(policy):
            policy = asking.after(policy, record(), self.replicas)
        return Quorum.start(policy, self.replicas, self.version + 1, now, self.floor, self.there)


def _least(policy: Policy, there: int, floor: int) -> int:
    """The fewest updates that make a set, while so many replicas are there."""
    return floor if there < floor else policy.least(there)
