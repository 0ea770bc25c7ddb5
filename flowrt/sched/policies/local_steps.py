"""Several steps on each replica between two versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import inf
from typing import Any

from flowrt.base.errors import GraphError, user_site
from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.all_of import AllOf
from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil, makes_number, makes_whole


@valueclass
class LocalSteps(Policy):
    """Train ``k`` steps on each replica by itself, then move the shared variables by how far the replicas have come.

    Each replica copies the variables of a version and takes ``k`` steps on its copies, each with a batch of its own and
    by the optimiser that `Replicated` was given, the *inner* one. Its update is what it began with minus what it has
    come to. The servers move the variables by the kept updates' weighted mean as by a gradient, with the ``outer``
    optimiser. So variables and updates travel once for ``k`` steps: for networks too slow to do so with every batch.
    A report's ``step`` is one version, ``k`` batches of each replica that counts; its loss and metrics are means over
    these. To `flowrt.simulate` it is one step, too: replicas compute there as long as ``k`` local steps take.

    An update weighs by its samples: the lengths of the first axis of the batches' first input. What the inner optimiser
    keeps (a momentum) stays with the replica from version to version, is not saved, and begins anew with every call of
    `Replicated.steps`, with a replica that comes back, and where it is no longer finite. What the model itself writes
    while it trains (a running mean) becomes the mean of what the replicas have made of it. Tables of which batches use
    a few rows travel whole.

    The wrong choice where the network is fast enough to synchronise with every batch: that takes fewer samples to the
    same loss, and the outer optimiser is two more numbers to choose; with many replicas or a large ``k``, which drift
    apart; and for tables too large to be sent. With a policy that drops updates, ``k`` batches are lost with each.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105 (there
    AdamW inside, Nesterov momentum 0.9 and rate 0.7 outside, k = 500). Quorum, grace window and weights are those of
    Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428, which also sends the
    variables in fragments while the steps go on; here they travel whole. That steps overlap with that is of Wang et
    al., "Overlap Local-SGD", arXiv 2002.09539, and of Douillard et al., "Streaming DiLoCo", arXiv 2501.18512.

    Args:
        k: Steps, and batches, of each replica and version. A replica has ``k`` + ``overlap`` + 2 batches in memory.
        policy: Whose updates make a version; one that counts no stale updates.
        outer: The outer optimiser; by default ``fr.optim.Momentum(0.7, 0.9, nesterov=True)``, which in the end moves
            seven times as far as the replicas did: with a handful of local steps ``fr.optim.SGD(1.0)``, which moves to
            where they are on average, is safer.
        grace: For how many seconds others' updates are still waited for, and kept, once ``policy`` has enough.
        overlap: How many of the ``k`` steps a replica takes before it has the version that they belong to: while its
            update and that version travel. They go on from where it has come to; then its copies become what the
            version is, and by as much more as these steps moved them. They are always so many, however soon it comes,
            so results are the same bits. As many as take the time of an exchange hide it; as they are taken at values
            one version old, they should be few of ``k``. It costs another copy of the variables. With 0 replicas wait.

    Raises `GraphError` for other values. With ``k`` = 1, ``fr.optim.SGD(1.0)`` as ``outer``, SGD inside and batches of
    one size, it is ``policy`` by itself.
    """

    k: int
    policy: Policy = AllOf()
    outer: Any = field(default=None, metadata={"travels": False})
    grace: float = 0.0
    overlap: int = 0

    def __post_init__(self) -> None:
        made = f"{user_site()}: LocalSteps({self.k!r})"
        if not makes_whole(self, "k", 1):
            raise GraphError(f"{made}: expected a number of steps, 1 or more, such as LocalSteps(16)")
        if not isinstance(self.policy, Policy) or isinstance(self.policy, LocalSteps):
            raise GraphError(f"{made}: policy says whose updates make a version, as AllOf() does, not {self.policy!r}")
        if self.policy.staleness:
            raise GraphError(
                f"{made}: {self.policy} counts updates of older versions, but replicas begin local steps anew with "
                "every version; use AllOf(), FirstOf(m), Deadline(seconds) or another policy without staleness"
            )
        if not makes_number(self, "grace", 0.0) or self.grace == inf:
            raise GraphError(f"{made}: grace is a finite number of seconds, 0 or more, not {self.grace!r}")
        if not makes_whole(self, "overlap", 0) or self.overlap >= self.k:
            raise GraphError(f"{made}: overlap is a number of steps, 0 or more and fewer than k, not {self.overlap!r}")

    @property
    def measures(self) -> bool:
        """Whether ``policy`` does."""
        return self.policy.measures

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """As ``policy``; where it closes, others' updates have their grace."""
        answer = self.policy.decide(offers, able, now)
        if not self.grace or not isinstance(answer, Close):
            return answer
        until = self._met(offers, able, now) + self.grace
        if able and now < until:
            return WaitUntil(until, len(offers) + len(able))
        more = len(offers) - len(answer.replicas)
        return Close(tuple(offer.replica for offer in offers), f"{answer.why}, and {more} within the grace")

    def _met(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> float:
        """When ``policy`` had enough: it is asked as it was with each offer, and at the times that it named."""
        for count in range(self.policy.least(len(offers) + len(able)), len(offers) + 1):
            seconds, later = offers[count - 1].seconds, offers[count:]
            until = later[0].seconds if later else now
            while True:
                answer = self.policy.decide(offers[:count], (*(offer.replica for offer in later), *able), seconds)
                if isinstance(answer, Close):
                    return seconds
                if not seconds < answer.seconds <= until:
                    break
                seconds = answer.seconds
        return offers[-1].seconds

    def after(self, record: Record) -> Policy:
        """With ``policy`` as it goes on."""
        return replace(self, policy=self.policy.after(record))

    def prepare(self) -> None:
        """As ``policy``."""
        self.policy.prepare()

    def least(self, replicas: int) -> int:
        """As ``policy``."""
        return self.policy.least(replicas)

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...] | None:
        """Each update's share of the samples; the mean where all have as many, or somebody's are not known."""
        samples = [offer.samples for offer in kept]
        if len(set(samples)) == 1 or 0 in samples:
            return None
        return tuple(count / sum(samples) for count in samples)
