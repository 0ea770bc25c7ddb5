"""Whatever is there, but nobody is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil, makes_whole


@valueclass
class BoundedStaleness(Policy):
    """Make a version as soon as any update is there, but wait for those that would else be more than ``bound`` old.

    So nobody gets ahead of the slowest by more than ``bound`` versions: what counts was computed from values that are
    at most so old, and everything counts, unless a replica that had to wait for its batch began with an old version.
    With a bound of 0 each version waits for all, to the bits of `AllOf` (but that it goes on without a replica that is
    lost). Of k updates that make a version, each is multiplied by 1 / (k (1 + τ)), where τ versions are between what it
    was computed from and what it moves: fresh ones are averaged, and n replicas of one pace move, at the same learning
    rate, about as far as with `AllOf` in the same time.

    The wrong choice where one replica is always slower than the others: all come to its pace, once they are ``bound``
    versions ahead, and `FirstOf` or `Async` do not wait for it; it is for replicas that are slow now and then, each at
    another time. Raises `GraphError` for a bound that is not 0, 1, 2, …. Ho et al., "More Effective Distributed ML via
    a Stale Synchronous Parallel Parameter Server", NIPS 2013 (there, a replica's own steps are counted, and updates are
    added up unweighted); for the weights see `Async`.

    Args:
        bound: How many versions old an update may become.
        behind: By replica that was computing when the last set was fixed: (replica, versions made since it began). The
            policy keeps it for itself.
    """

    bound: int
    behind: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not makes_whole(self, "bound", 0):
            raise GraphError(
                f"{user_site()}: BoundedStaleness({self.bound!r}): expected a number of versions, 0 or more, such as "
                "BoundedStaleness(3)"
            )

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """All that are there, once none that is not would become too old."""
        behind = dict(self.behind)
        awaited = [replica for replica in able if behind.get(replica, 0) >= self.bound]
        if awaited:
            return WaitUntil(offers=len(offers) + len(awaited))
        return Close(tuple(offer.replica for offer in offers), f"nobody else is {self.bound} versions behind")

    def after(self, record: Record) -> BoundedStaleness:
        """Whoever was computing is a version further behind."""
        behind = dict(self.behind)
        further = sorted((replica, min(behind.get(replica, 0) + 1, self.bound)) for replica, _ in record.missing)
        return replace(self, behind=tuple(further) if self.bound else ())

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...] | None:
        """By their staleness; the mean of fresh ones."""
        if not any(offer.staleness for offer in kept):
            return None
        return tuple(1 / (len(kept) * (1 + offer.staleness)) for offer in kept)

    @property
    def staleness(self) -> int:
        """The bound."""
        return self.bound
