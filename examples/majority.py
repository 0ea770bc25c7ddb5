"""A policy of one's own, in one file: the updates of more than half of the replicas make a step.

    trainer = fr.train.Replicated(..., policy=Majority())

A policy is a frozen dataclass with one method, `decide`: see `fr.train.Policy`. In a session without a cluster that is
all. Nodes are other processes, which import this file first, by its name, from where Python finds it:

    async with fr.LocalCluster(ps=1, worker=4, imports=["majority"]) as cluster: ...
    python -m flowrt.worker --import majority ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrt.train import Close, Offer, Policy, WaitUntil


@dataclass(frozen=True)
class Majority(Policy):
    """Keep what is there as soon as that is more than half of the replicas that are not lost.

    It is `FirstOf` that needs no number, and goes on with those that are left. The wrong choice where less than half of
    the replicas are slow: it waits for none of the faster ones that are only a moment behind.
    """

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """The first of more than half; of those who have offered and may yet."""
        needed = (len(offers) + len(able)) // 2 + 1
        if len(offers) < needed:
            return WaitUntil(offers=needed)
        return Close(tuple(offer.replica for offer in offers), f"{len(offers)} of {len(offers) + len(able)} are there")
