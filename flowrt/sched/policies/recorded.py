"""The sets that an earlier run kept, version by version: how a history is trained again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil


@dataclass(frozen=True)
class Recorded(Policy):
    """Keep, in each version, the updates of the replicas that were kept in it, and wait for them however long.

    How they are combined is as by ``policy``; how many they are is not, as other replicas may have been there then than
    are now. ``sets`` holds a bit for each replica, ``width`` bytes for each version, least first; the set of the open
    version is the ``at``-th. See `recorded`.
    """

    policy: Policy
    sets: bytes = field(repr=False)
    width: int
    at: int = 0

    @property
    def wanted(self) -> tuple[int, ...]:
        """The set of the open version, in replica order; empty beyond those that are known."""
        bits = int.from_bytes(self.sets[self.at * self.width : (self.at + 1) * self.width], "little")
        return tuple(replica for replica in range(8 * self.width) if bits >> replica & 1)

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """The set, once all of it is there."""
        wanted = self.wanted
        if not wanted or not {offer.replica for offer in offers}.issuperset(wanted):
            return WaitUntil(offers=len(offers) + 1)
        return Close(wanted, "as recorded")

    def after(self, record: Record) -> Policy:
        """With the next set."""
        return replace(self, at=self.at + 1)

    def least(self, replicas: int) -> int:
        """As many as are in the set."""
        return len(self.wanted) or 1

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...] | None:
        """As ``policy``."""
        return self.policy.weights(kept)

    @property
    def measures(self) -> bool:
        """As ``policy``."""
        return self.policy.measures


def recorded(policy: Policy, sets: Iterable[Collection[int]], replicas: int) -> Recorded:
    """Keep these ``sets`` of ``replicas`` replicas, one after another."""
    width = -(-replicas // 8)
    packed = b"".join(sum(1 << replica for replica in kept).to_bytes(width, "little") for kept in sets)
    return Recorded(policy, packed, width)
