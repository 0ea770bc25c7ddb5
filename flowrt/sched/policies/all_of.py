"""Every replica's update."""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.base.valueclass import valueclass
from flowrt.sched.policies.policy import Close, Offer, Policy, WaitUntil


@valueclass
class AllOf(Policy):
    """Wait for the update of every replica: synchronous training without spares.

    The wrong choice where replicas differ in speed: a slow one slows every step, and a lost one stops training until
    it is back. Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981, §2.2.
    """

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """The set of all."""
        if able or not offers:
            return WaitUntil()
        return Close(tuple([offer.replica for offer in offers]), "all are there")

    def least(self, replicas: int) -> int:
        """All ``replicas`` updates."""
        return replicas

    size = least
