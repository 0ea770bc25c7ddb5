"""Every update by itself, as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.base.valueclass import valueclass
from flowrt.sched.policies.policy import Close, Offer, Policy, WaitUntil

UNBOUNDED = 1 << 62  # versions: more than any run has


@valueclass
class Async(Policy):
    """Make a version of every update as it comes, however old what it was computed from: nobody waits for anybody.

    An update whose values are τ versions old is multiplied by 1 / (1 + τ). A fresh one so moves the variables as far as
    the mean of all would; with n replicas of one pace τ is n - 1, and the n updates that they make in the time of one
    step of `AllOf` move as far together as that step, at the same learning rate. What comes from a slow replica weighs
    less the slower that is. Every report is of one update, and ``report.staleness`` is its τ.

    The wrong choice where replicas are equally fast, as then waiting for all costs nothing, and stale updates are worth
    less than fresh ones; where results must be the same from run to run; and with optimisers that undo the weights,
    since they divide by the size of what they are given (Adam, RMSProp): there, divide the learning rate by n. Momentum
    adds to what staleness does already, so take less of it. Zhang et al., "Staleness-aware Async-SGD for Distributed
    Deep Learning", arXiv 1511.05950 (there, a fresh update and one that is 1 old weigh the same); Mitliagkas et
    al., "Asynchrony begets Momentum", arXiv 1605.09774.
    """

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """The first that is there."""
        first = offers[0]
        return Close((first.replica,), f"that of replica {first.replica}, {first.staleness} versions old")

    def size(self, replicas: int) -> int:
        """One."""
        return 1

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...]:
        """By its staleness."""
        return tuple(1 / (1 + offer.staleness) for offer in kept)

    @property
    def staleness(self) -> int:
        """As many as there are."""
        return UNBOUNDED
