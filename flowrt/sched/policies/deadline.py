"""What is there by a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import valueclass
from flowrt.sched.policies.policy import Close, Offer, Policy, WaitUntil, check_at_least, least_of, makes_number


@valueclass
class Deadline(Policy):
    """Keep the updates that are there ``seconds`` after a version was opened, and at least ``at_least`` of them.

    A step ends at its deadline, or at once when nobody else can come; if fewer than ``at_least`` are there by then,
    with the one that makes them so many. The kept updates, be they few or many, are averaged: the noise of a step
    changes with how many there are, and so may the best learning rate. Raises `GraphError` for seconds that are not a
    positive finite number.

    The wrong choice where the time of a step is not known beforehand, or changes: too short a deadline keeps
    ``at_least`` of every step, too long a one waits for everybody. Of `FirstOf` one chooses how many updates a step
    has, here how long it takes: Ferdinand et al., "Anytime Minibatch: Exploiting Stragglers in Online Distributed
    Optimization", ICLR 2019, arXiv 2006.05752 (there within a replica, which sends what it has by then).
    """

    seconds: float
    at_least: int = 1

    def __post_init__(self) -> None:
        made = f"{user_site()}: Deadline({self.seconds!r}, at_least={self.at_least!r})"
        if not makes_number(self, "seconds", -inf):
            raise GraphError(f"{made}: expected a number of seconds, such as Deadline(0.5)")
        if not 0 < self.seconds < inf:
            raise GraphError(
                f"{made}: a step ends after a finite time that is more than 0; AllOf() waits for everybody"
            )
        check_at_least(self, made)

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """All that is there, when it is time."""
        if len(offers) < self.at_least:
            return WaitUntil(offers=self.at_least)
        if not able:
            return Close(tuple(offer.replica for offer in offers), "nobody else can come")
        if now < self.seconds:
            return WaitUntil(self.seconds, len(offers) + len(able))
        return Close(tuple(offer.replica for offer in offers), f"{len(offers)} are there after {self.seconds:g} s")

    def least(self, replicas: int) -> int:
        """As many as it says; raises `GraphError` when there are fewer replicas than that."""
        return least_of(self, self.at_least, replicas)
