"""Many updates that become whole one after another, as one event: what a simulation of a thousand replicas needs.

Law: the coordinator is the very value that the single events answer, offer by offer, with the clock's between
them; only that nothing is made for an event at which nobody is asked. `tests/sched/versions/test_simulation.py`
and `tests/sched/versions/test_steady.py` hold one against the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from math import nan
from typing import TYPE_CHECKING, TypeVar

from flowrt.base.errors import InternalError
from flowrt.base.valueclass import make_all, replace
from flowrt.sched.policies.policy import Offer
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from flowrt.sched.versions.coordinator import Coordinator

Item = TypeVar("Item")


def hold_all(
    coordinator: Coordinator, replicas: Sequence[int], times: Sequence[float], square: float = nan
) -> Coordinator:
    """The updates of ``replicas`` become whole at ``times``, which ascend, until the set of the open version is fixed.

    As `Coordinator.held` of each server for each replica in turn, each part's numbers having the sum of squares
    ``square``, and `Coordinator.tick` whenever it is due, before what comes at the same time. All have begun the open
    version, and the policy takes no stale updates: else `InternalError`.
    """
    quorum = coordinator.quorum
    if quorum.policy.staleness or quorum.closed_at is not None or coordinator.closing:
        raise InternalError(f"version {quorum.version}: updates are offered all at once to a set that may be open yet")
    able = dict.fromkeys(coordinator._may_offer())  # in replica order, and quick to take from
    total = sum([square] * coordinator.servers) if quorum.policy.measures else nan
    at, count = 0, len(replicas)
    while at < count and quorum.closed_at is None:
        due = quorum.due
        before = count if due is None else bisect_left(times, due, at)
        stop = min(before, at + quorum.enough - len(quorum.offers))
        asks = stop > at and len(quorum.offers) + stop - at >= quorum.enough
        for replica in replicas[at:stop]:
            if replica not in able:
                raise InternalError(f"version {quorum.version}: replica {replica} cannot offer")
            del able[replica]
        seconds = [now - quorum.opened for now in times[at:stop]]
        fresh = make_all(Offer, stop - at, replica=replicas[at:stop], seconds=seconds, square=repeat(total))
        quorum = replace(quorum, offers=(*quorum.offers, *fresh))
        if asks:
            quorum = quorum.ask(tuple(able), quorum.opened + seconds[-1])
        elif due is not None and stop == before < count:
            quorum = quorum.ask(tuple(able), due)
        at = stop
    whole, everywhere = replicas[:at], frozenset(range(coordinator.servers))
    return replace(
        coordinator,
        quorum=quorum,
        standing=_put_all(coordinator.standing, whole, Standing.WHOLE),
        holders=_put_all(coordinator.holders, whole, everywhere),
        squares=_put_all(coordinator.squares, whole, total) if quorum.policy.measures else coordinator.squares,
    )


def held_by(
    coordinator: Coordinator,
    server: int,
    version: int,
    replicas: Sequence[int],
    finite: bool,
    now: float,
    square: float,
    samples: Sequence[int],
) -> Coordinator:
    """As `Coordinator.held` of ``server`` for each of ``replicas`` in turn."""
    if finite and len(replicas) > 1 and _are_alike(coordinator, server, version, replicas) and not any(samples):
        others = {len(coordinator.holders[replica]) for replica in replicas}
        if others == {coordinator.servers - 1} and coordinator.quorum.due is None:
            return hold_all(coordinator, replicas, [now] * len(replicas))
        if coordinator.servers - 1 not in others:
            holders = [*coordinator.holders]
            for replica in replicas:
                holders[replica] |= {server}
            return replace(coordinator, holders=tuple(holders))
    for replica, count in zip(replicas, samples, strict=True):
        coordinator = coordinator.held(server, version, replica, finite, now, square, count)[0]
    return coordinator


def _are_alike(of: Coordinator, server: int, version: int, replicas: Sequence[int]) -> bool:
    """Whether each of ``replicas``, named once, computes the open version, which is undecided, and is news."""
    quorum, policy = of.quorum, of.quorum.policy
    if version != quorum.version or quorum.closed_at is not None or of.closing or not 0 <= server < of.servers:
        return False
    if policy.staleness or policy.measures or len({*replicas}.intersection(range(quorum.replicas))) < len(replicas):
        return False
    return all(of.standing[r] is Standing.RUNNING and server not in of.holders[r] for r in replicas)


def _put_all(items: tuple[Item, ...], places: Sequence[int], item: Item) -> tuple[Item, ...]:
    """``items`` with another one at each of ``places``."""
    made = list(items)
    for place in places:
        made[place] = item
    return tuple(made)
