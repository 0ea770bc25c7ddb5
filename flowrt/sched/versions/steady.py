"""What spares server 0 a new coordinator for each event: updates that have nothing done, and versions that go as usual.

Law: the coordinator that this tells is the very value that the single events answer, with the clock's between them;
only that nothing is made for an event while nobody looks. In a version that goes as usual all replicas compute it, one
server applies it, and the policy is asked once, about the updates of all: what becomes of it are a few numbers. All
else is the coordinator's. `tests/sched/versions/test_steady.py` holds one against the other.
"""

from __future__ import annotations

from collections import deque
from math import inf, nan
from operator import attrgetter, gt
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import maker, replace, valueclass
from flowrt.sched.policies import asking
from flowrt.sched.policies.policy import Close, Offer, Policy
from flowrt.sched.versions.batched import hold_all
from flowrt.sched.versions.ledger import AppliedVersion, Outcome, Receipt
from flowrt.sched.versions.quorum import Quorum
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from flowrt.sched.versions.coordinator import Coordinator


@valueclass
class SteadyVersion:
    """A version that all servers have applied, as it is to be reported.

    It was ``opened``, its set fixed (``decided``) and ``ordered`` at these times; replicas ``began`` then. ``squares``
    are of the kept updates, where the policy measures their mean, and ``square`` is of what the variables moved by.
    """

    version: int
    opened: float
    decided: float
    ordered: float
    receipts: tuple[Receipt, ...]
    began: tuple[float, ...]
    why: str
    squares: tuple[float, ...] | None = None
    square: float = nan


_REPLICA = attrgetter("replica")
_make_offer, _make_made = maker(Offer), maker(SteadyVersion)
_make_tuple = tuple.__new__  # in half the time of a call of the class


class Steady:
    """A coordinator, and what it was not told yet: updates of its open version, and whole versions.

    Whoever looks at it has it `told` first. What is assigned to ``of`` is the coordinator from then on.
    """

    __slots__ = (
        "_answer",
        "_began",
        "_given",
        "_of",
        "_opened",
        "_past",
        "_spent",
        "_usual",
        "_whole",
        "allowed",
        "fixed",
        "ordered_at",
        "replicas",
        "version",
    )

    def __init__(self, of: Coordinator) -> None:
        self.replicas = len(of.standing)
        self._past: deque[tuple[tuple[Receipt, ...], float]] = deque(maxlen=of.remember)  # and when sets were fixed
        self.of = of

    @property
    def policy(self) -> Policy:
        """What is asked about the open version."""
        return self._of.quorum.policy

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def of(self) -> Coordinator:
        """The coordinator, with all that was heard."""
        return self.told()

    @of.setter
    def of(self, of: Coordinator) -> None:
        self._of = of
        self.version, self.allowed = of.quorum.version, of.allowed
        self._usual: bool | None = None  # not known yet
        self._given: list[int] | None = None  # by replica: its batches, where that was told anew
        self._whole: dict[int, float] = {}  # by replica, by arrival: when its update became whole
        # The set of the open version, once it is fixed as usual: what the policy answered, weights, and when.
        self.fixed: tuple[Close, tuple[float, ...] | None, float] | None = None
        self._answer: tuple[Close, tuple[float, ...] | None] | None = None  # of a policy that repeats it
        self.ordered_at: float | None = None
        self._past.clear()

    @property
    def usual(self) -> bool:
        """Whether nothing is to be done but to wait for updates of all, or to order the set of all that is fixed."""
        if self._usual is None:
            self._usual = self._goes_as_usual()
        return self._usual

    def _goes_as_usual(self) -> bool:
        of, quorum = self._of, self._of.quorum
        if of.servers > 1 or of.closing or quorum.closed_at is not None or quorum.offers or quorum.floor:
            return False
        if quorum.wakes != inf or quorum.enough != self.replicas or quorum.least != self.replicas:
            return False
        policy = quorum.policy
        if policy.staleness or policy.measures or asking.learns(policy) or of.was:
            return False
        if of.standing != (Standing.RUNNING,) * self.replicas or not all(of.alive) or any(of.holders):
            return False
        self._opened, self._began, self._spent = quorum.opened, of.began, of.book.spent
        return True

    def told(self) -> Coordinator:
        """The coordinator, with all that it was not told, in one go."""
        of = self._of
        if self._past or self.version > of.version:
            of = self._opened_again()
        if self._given is not None:
            of = replace(of, book=replace(of.book, given=tuple(self._given)))
        if self.allowed > of.allowed:
            of = replace(of, allowed=self.allowed)
        if self.fixed is not None:
            of = replace(self._with_all(of), ordered_at=self.ordered_at)
        elif self._whole:
            of = hold_all(of, tuple(self._whole), tuple(self._whole.values()))
        if of is not self._of:
            self.of = of
        return of

    def _opened_again(self) -> Coordinator:
        """The coordinator as the open version was opened, after some that went as usual."""
        of, count, version = self._of, self.replicas, self.version
        past = [self._ledger(at, *made) for at, made in enumerate(self._past, version - len(self._past))]
        quorum = of.quorum
        return replace(
            of,
            quorum=Quorum.start(quorum.policy, count, version, self._opened, quorum.floor, quorum.there),
            book=replace(of.book, spent=self._spent),
            since=(version,) * count,
            computed=(version,) * count,
            began=self._began,
            history=(*of.history, *past)[-of.remember :] if of.remember else (),
        )

    def _ledger(self, version: int, receipts: tuple[Receipt, ...], closed_at: float) -> AppliedVersion:
        return AppliedVersion(version, tuple(range(self.replicas)), receipts, closed_at)

    def _with_all(self, of: Coordinator) -> Coordinator:
        """The coordinator with all updates, and their set fixed."""
        assert self.fixed is not None
        close, weights, closed_at = self.fixed
        kept = tuple(range(self.replicas))
        offers = tuple(self._offers())
        fixed = {"kept": kept, "why": close.why, "weights": weights, "closed_at": closed_at}
        standing, everywhere = (Standing.WHOLE,) * self.replicas, frozenset((0,))
        quorum = replace(of.quorum, offers=offers, **fixed)
        return replace(of, quorum=quorum, standing=standing, holders=(everywhere,) * self.replicas)

    def _offers(self) -> list[Offer]:
        opened = self._opened
        return [_make_offer(replica, now - opened, 0, nan, 0) for replica, now in self._whole.items()]

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def give(self, replica: int, version: int, total: int) -> bool:
        """Note that ``replica``, whose update of ``version`` has come, has been given ``total`` batches.

        Answers whether that is all: the coordinator is to be told otherwise.
        """
        if not 0 <= replica < self.replicas or version != self.version:
            return False
        of = self._of
        if not (self._usual or self.usual) and (of.standing[replica] is not Standing.RUNNING or not of.alive[replica]):
            return False
        if self._given is None:
            self._given = list(of.book.given)
        if total > self._given[replica]:
            self._given[replica] = total
        return True

    def hold(self, replica: int, version: int, now: float, samples: int) -> bool:
        """Note that the update of ``replica``, of which `give` was told, became whole; answers as that does.

        See afterwards whether the set is ``fixed``.
        """
        whole = self._whole
        if version != self.version or replica in whole or samples or not 0 <= replica < self.replicas:
            return False
        if self._usual or self.usual:
            whole[replica] = now
            if len(whole) < self.replicas or self._fix(now):
                return True
            del whole[replica]
            return False
        if self._of.standing[replica] is not Standing.RUNNING or not self._asks_nobody(len(whole) + 1):
            return False
        whole[replica] = now
        return True

    def _asks_nobody(self, count: int) -> bool:
        """Whether nothing follows from ``count`` updates that are whole, neither a set nor that there never is one."""
        of, quorum = self._of, self._of.quorum
        if of.servers > 1 or of.closing or quorum.closed_at is not None or quorum.wakes != inf:
            return False
        if quorum.policy.staleness or quorum.policy.measures:
            return False
        return len(quorum.offers) + count < quorum.enough and count < of.standing.count(Standing.RUNNING)

    def _fix(self, now: float) -> bool:
        """Ask the policy, now that all have offered, and fix the set that it wants; answers whether that was all."""
        policy, opened = self._of.quorum.policy, self._opened
        at = opened + (now - opened)
        if self._answer is not None:
            self.fixed = (*self._answer, at)
            return True
        offers = self._offers()
        try:
            answer = asking.decide(policy, self.replicas, tuple(offers), (), at - opened)
            if not isinstance(answer, Close):
                return False
            weights = asking.weights(policy, sorted(offers, key=_REPLICA))
        except GraphError:  # the coordinator comes upon it, too
            return False
        self.fixed = answer, weights, at
        if asking.repeats(policy):
            self._answer = answer, weights
        return True

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waits(self) -> bool:
        """Whether no order is due for sure, as all goes as usual; one that is due need not be allowed yet."""
        if not (self._usual or self.usual):
            return False
        return self.fixed is None or self.ordered_at is not None

    def allow(self, version: int) -> None:
        """As `Coordinator.allow`."""
        self.allowed = max(self.allowed, version)

    def order(self, now: float) -> tuple[int, ...] | None:
        """The set that every server is to apply now: see `Coordinator.order`."""
        if not self.usual:
            self.of, replicas = self.told().order(now)
            return replicas
        if self.waits or self.version >= self.allowed:
            return None
        self.ordered_at = now
        return tuple(range(self.replicas))

    @property
    def weights(self) -> tuple[float, ...] | None:
        """What the updates of the set that was ordered last are multiplied by."""
        return self.told().weights if self.fixed is None else self.fixed[1]

    @property
    def versions(self) -> tuple[int, ...]:
        """What those were computed from: see `Coordinator.versions`."""
        return () if self.usual else self.told().versions

    def publish(self, server: int, version: int, now: float, square: float) -> SteadyVersion | None:
        """Note that ``server`` has applied the set of ``version``; what is to be reported once all have."""
        fixed, ordered = self.fixed, self.ordered_at
        if fixed is not None and ordered is not None and version == self.version and not server:
            given = self._given or self._of.book.given
            if all(map(gt, given, self._spent)):
                return self._open_next(fixed, ordered, now)
        before = self.told()
        self.of = value = before.publish(server, version, now, square)
        return None if value.version == before.version else _made(before, value, square)

    def _open_next(
        self, fixed: tuple[Close, tuple[float, ...] | None, float], ordered: float, now: float
    ) -> SteadyVersion:
        """The version that all have applied is over, and all begin the next one."""
        close, _, decided = fixed
        receipts = tuple([_make_tuple(Receipt, (r, batch, Outcome.KEPT, 0)) for r, batch in enumerate(self._spent)])
        made: SteadyVersion = _make_made(
            self.version, self._opened, decided, ordered, receipts, self._began, close.why, None, nan
        )
        self._past.append((receipts, decided))
        self._whole, self.fixed, self.ordered_at = {}, None, None
        self.version += 1
        self._opened, self._began = now, (now,) * self.replicas
        self._spent = tuple([batch + 1 for batch in self._spent])
        return made

    def booked(self, replica: int) -> tuple[int, bool, int]:
        """How many batches of a replica are spent, whether it has begun with the last of them, and since when: see
        `Version`."""
        if self._usual or self.usual:
            return self._spent[replica], True, self.version
        value = self.told()
        return value.spent[replica], value.begun(replica) > 0, value.oldest(replica)

    def oldest(self, replica: int) -> int:
        """The oldest version that an update of ``replica`` may be computed from: see `Coordinator.oldest`."""
        return self.version if self._usual or self.usual else self.told().oldest(replica)


def _made(before: Coordinator, value: Coordinator, square: float) -> SteadyVersion:
    """What is to be reported of the version that was open ``before``, and is not in ``value``."""
    quorum, ordered = before.quorum, before.ordered_at
    assert ordered is not None
    decided = ordered if quorum.closed_at is None else quorum.closed_at
    squares = [offer.square for offer in quorum.offers if offer.replica in quorum.kept]
    return SteadyVersion(
        before.version,
        quorum.opened,
        decided,
        ordered,
        value.receipts(before.version) or (),
        before.began,
        quorum.why,
        tuple(squares) if quorum.policy.measures and quorum.weights is None else None,
        before.square + square,
    )
