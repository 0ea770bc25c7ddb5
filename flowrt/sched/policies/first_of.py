"""The first few updates of each step."""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import valueclass
from flowrt.sched.policies.policy import Close, Offer, Policy, WaitUntil, makes_whole


@valueclass
class FirstOf(Policy):
    """Keep the first ``updates`` updates of every step and drop the rest: synchronous training with spare replicas.

    With ``FirstOf(m)`` of n replicas, the slowest n - m delay nobody, and training goes on while m are left. The kept
    updates are averaged over m. Raises `GraphError` unless 1 <= m <= n. The wrong choice where no replica is slower
    than the others: then it throws away n - m updates of each step for little time; and where the same replicas are
    always slow, whose batches then never count. Chen et al., "Revisiting Distributed Synchronous SGD", arXiv
    1604.00981, §3 (there: N workers and b backup workers).
    """

    updates: int

    def __post_init__(self) -> None:
        if not makes_whole(self, "updates", 1):
            raise GraphError(
                f"{user_site()}: FirstOf({self.updates!r}): expected a number of updates, 1 or more, such as FirstOf(3)"
            )

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """The first so many."""
        if len(offers) < self.updates:
            return WaitUntil(offers=self.updates)
        return Close(tuple(offer.replica for offer in offers[: self.updates]), f"the first {self.updates} are there")

    def least(self, replicas: int) -> int:
        """The first ``updates`` of ``replicas``; raises `GraphError` when there are fewer replicas than that."""
        if self.updates > replicas:
            raise GraphError(
                f"FirstOf({self.updates}) of {replicas} replicas can never be met; "
                f"use FirstOf({replicas}) or fewer, or replicas={self.updates} or more"
            )
        return self.updates

    size = least
