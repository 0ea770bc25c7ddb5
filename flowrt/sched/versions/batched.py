"""Many updates that become whole one after another, as one event: what a simulation of a thousand replicas needs, and
what spares server 0 a new coordinator for each of a few.

Law: the coordinator is the very value that the single events answer, offer by offer, with the clock's between
them; only that nothing is made for an event at which nobody is asked. `tests/sched/versions/test_simulation.py`
and `tests/sched/versions/test_batched.py` hold one against the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from math import inf, nan
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
    version and no server holds anything of theirs, and the policy takes no stale updates: else `InternalError`.
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


class Plain:
    """The updates that a coordinator, which this is ``of``, was not told yet, as they have nothing done.

    Most updates of a version are such: their replicas are computing it, and the policy is not asked before others come.
    Whoever looks at the coordinator has it `told` first, if anything is ``given``.
    """

    __slots__ = ("_whole", "given", "of")

    def __init__(self, of: Coordinator) -> None:
        self.of = of
        self.given: dict[int, int] = {}  # by replica: how many batches it has been given
        self._whole: dict[int, float] = {}  # by replica, by arrival: when its update became whole

    def give(self, replica: int, version: int, total: int) -> bool:
        """Note that ``replica``, whose update of ``version`` has come, has been given ``total`` batches.

        Answers whether that is all: the coordinator is to be told otherwise.
        """
        of = self.of
        if not 0 <= replica < len(of.standing) or version != of.quorum.version:
            return False
        if of.standing[replica] is not Standing.RUNNING or not of.alive[replica]:
            return False
        self.given[replica] = total
        return True

    def hold(self, replica: int, version: int, now: float, samples: int) -> bool:
        """Note that the update of ``replica``, of which `give` was told, became whole; answers as that does."""
        news = replica in self.given and replica not in self._whole and version == self.of.quorum.version
        if not news or samples or not self._asks_nobody(len(self._whole) + 1):
            return False
        self._whole[replica] = now
        return True

    def _asks_nobody(self, count: int) -> bool:
        """Whether nothing follows from ``count`` updates that are whole, neither a set nor that there never is one."""
        of, quorum = self.of, self.of.quorum
        if of.servers > 1 or of.closing or quorum.closed_at is not None or quorum.wakes != inf:
            return False
        if quorum.policy.staleness or quorum.policy.measures:
            return False
        return len(quorum.offers) + count < quorum.enough and count < of.standing.count(Standing.RUNNING)

    def told(self) -> Coordinator:
        """The coordinator, with all that it was not told, in one go; it is of that from now on."""
        given, whole = self.given, self._whole
        self.given, self._whole = {}, {}
        self.of = replace(self.of, book=self.of.book.give_all(given))
        if whole:
            self.of = hold_all(self.of, tuple(whole), tuple(whole.values()))
        return self.of


def _put_all(items: tuple[Item, ...], places: Sequence[int], item: Item) -> tuple[Item, ...]:
    """``items`` with another one at each of ``places``."""
    made = list(items)
    for place in places:
        made[place] = item
    return tuple(made)
