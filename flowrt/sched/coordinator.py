"""Which replicas' updates are whole, which set a version keeps, and what became of every tower.

One coordinator serves all parameter servers, because servers that chose for themselves could apply different sets in
the same step. It is a value: an event answers a new coordinator and a verdict. It owns

- the open version: begun towers, the servers that hold each one's update, the quorum they are offered to when all do;
- the fixed sets: written once when the quorum closes, never again;
- the receipts: at the close, every tower begun in that version gets exactly one.

It must not know updates, clocks, sockets or who waits for it. A replica has one try per version: were a replacement
to push again, a server might keep the old part and another the new one. So a replica lost before its update is whole
takes no part in that version any more, even if it joins again, and an update that is not finite is not replaced.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import Enum
from typing import TypeVar

from flowrt.errors import GraphError, InternalError
from flowrt.sched.quorum import Policy, Quorum, Verdict
from flowrt.valueclass import valueclass


class Outcome(Enum):
    """How a tower ended. All but KEPT mean that its batch was dropped."""

    KEPT = "kept"
    LATE = "late"  # not whole on every server when the set was fixed
    REFUSED = "refused"  # not finite
    LOST = "lost"  # the replica was lost before its update was whole
    ABANDONED = "abandoned"  # too few updates were left to make a set, so the version kept none


class Standing(Enum):
    """Where a replica stands in the open version."""

    IDLE = "idle"  # no tower begun
    RUNNING = "running"  # begun, not yet held by every server
    WHOLE = "whole"  # held and finite on every server, offered to the quorum
    REFUSED = "refused"
    LOST = "lost"  # lost while RUNNING
    ABSENT = "absent"  # lost while IDLE


_AT_LOSS = {Standing.IDLE: Standing.ABSENT, Standing.RUNNING: Standing.LOST}
_AT_CLOSE = {
    Standing.WHOLE: Outcome.KEPT,
    Standing.RUNNING: Outcome.LATE,
    Standing.REFUSED: Outcome.REFUSED,
    Standing.LOST: Outcome.LOST,
}
_AT_ABANDON = {**_AT_CLOSE, Standing.WHOLE: Outcome.ABANDONED, Standing.RUNNING: Outcome.ABANDONED}


@valueclass
class Receipt:
    """What became of the tower of ``replica`` at ``version``, decided at ``now`` in the caller's seconds."""

    version: int
    replica: int
    outcome: Outcome
    now: float


@valueclass
class Ledger:
    """A closed version: the replicas its set was fixed to, in replica order, and a receipt per tower begun."""

    version: int
    decided: tuple[int, ...]
    receipts: tuple[Receipt, ...]


@valueclass
class Tally:
    """How many towers of one replica ended how."""

    kept: int = 0
    late: int = 0
    refused: int = 0
    lost: int = 0
    abandoned: int = 0


@valueclass
class Stuck:
    """Why the open version cannot close: fewer than ``needed`` replicas are kept or may yet be."""

    version: int
    needed: int
    able: tuple[int, ...]
    refused: tuple[int, ...]
    lost: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"version {self.version} needs {self.needed} updates, only {len(self.able)} can come: "
            f"replicas lost {list(self.lost)}, updates not finite {list(self.refused)}, left {list(self.able)}"
        )


@valueclass
class CoordinatorStatistics:
    """The open version, and how the towers of each replica have ended since the start."""

    version: int
    standing: tuple[Standing, ...]
    alive: tuple[bool, ...]
    tallies: tuple[Tally, ...]


@valueclass
class Coordinator:
    """The one place that decides what every parameter server applies.

    Memory is bounded: the current version, the sets and receipts of the ``remember`` versions before it, a tally per
    replica. All else is forgotten when every server has published.

    Args:
        quorum: The open version's set.
        servers: How many parameter servers there are; they are named 0 to ``servers`` - 1.
        remember: How many versions stay readable after every server has published; the current one always is.
        standing: By replica, where it stands in the open version.
        holders: By replica, the servers that hold its update of the open version.
        alive: By replica, whether it may begin a tower.
        published: The servers that have applied the open version's set.
        history: Closed versions that stay readable, oldest first.
        tallies: By replica, totals for `statistics`; no decision reads them.
    """

    quorum: Quorum
    servers: int
    remember: int
    standing: tuple[Standing, ...]
    holders: tuple[frozenset[int], ...]
    alive: tuple[bool, ...]
    published: frozenset[int] = frozenset()
    history: tuple[Ledger, ...] = ()
    tallies: tuple[Tally, ...] = field(default=(), compare=False)

    @classmethod
    def start(cls, policy: Policy, replicas: int, servers: int, *, version: int = 0, remember: int = 16) -> Coordinator:
        """Open ``version`` for ``replicas`` replicas, all alive; raises `GraphError` if the policy cannot be met."""
        if servers < 1 or remember < 0:
            raise GraphError(f"expected at least 1 server and 0 versions to remember, got {servers} and {remember}")
        quorum = Quorum(policy, replicas, version)
        return cls(
            quorum,
            servers,
            remember,
            standing=(Standing.IDLE,) * replicas,
            holders=(frozenset(),) * replicas,
            alive=(True,) * replicas,
            tallies=(Tally(),) * replicas,
        )

    @property
    def version(self) -> int:
        """The version that towers may begin with; the answer to whoever is late."""
        return self.quorum.version

    def begin(self, version: int, replica: int) -> tuple[Coordinator, bool]:
        """Note that ``replica`` is to run a tower of ``version``; False says that it must not.

        It must not when the version is decided, and when the replica is lost or has had its try. What begins is
        receipted at the close, heard of again or not.
        """
        self._check(version, replica)
        closed = version < self.version or self.quorum.closed_at is not None
        if closed or not self.alive[replica] or self.standing[replica] is not Standing.IDLE:
            return self, False
        return self._stand(replica, Standing.RUNNING), True

    def held(self, server: int, version: int, replica: int, finite: bool, now: float) -> tuple[Coordinator, Verdict]:
        """Note that ``server`` holds its part of an update, or refused it as not finite.

        HELD: other servers have not reported it yet. KEEP, CLOSE: it was offered to the quorum; after CLOSE the set
        can be read from `decided`. REFUSED: some part is not finite, the replica does not count in this version. LATE:
        answer the replica with ``self.version``. Raises `InternalError` for a tower that never began.
        """
        self._check(version, replica, server)
        if version < self.version:
            return self, Verdict.LATE
        match self.standing[replica]:
            case Standing.WHOLE:
                return self, Verdict.REPEAT
            case Standing.REFUSED:
                return self, Verdict.REFUSED
            case Standing.LOST | Standing.ABSENT:
                return self, Verdict.LATE
            case _ if self.quorum.closed_at is not None:
                return self, Verdict.LATE
            case Standing.IDLE:
                raise InternalError(f"version {version}: server {server} holds replica {replica}'s update, not begun")
            case Standing.RUNNING:
                return self._gather(server, replica, finite, now)

    def decided(self, version: int) -> tuple[int, ...] | None:
        """The set that every server applies to ``version``, in replica order; None while it is open.

        Empty when the version was abandoned. Raises `InternalError` for a version to come or one forgotten.
        """
        ledger = self._ledger(version)
        return None if ledger is None else ledger.decided

    def receipts(self, version: int) -> tuple[Receipt, ...] | None:
        """One receipt per tower begun in ``version``, in replica order; None while it is open. Errors as `decided`."""
        ledger = self._ledger(version)
        return None if ledger is None else ledger.receipts

    def publish(self, server: int, version: int) -> Coordinator:
        """Note that ``server`` has applied the set of ``version``; the next one opens when all have.

        Saying it again changes nothing. Raises `InternalError` when the set is not fixed.
        """
        self._check(version, 0, server)
        if version < self.version:
            return self
        if self.quorum.closed_at is None:
            raise InternalError(f"server {server} published version {version}, which is not decided")
        published = self.published | {server}
        if len(published) < self.servers:
            return replace(self, published=published)
        replicas = self.quorum.replicas
        return replace(
            self,
            quorum=self.quorum.next(),
            standing=(Standing.IDLE,) * replicas,
            holders=(frozenset(),) * replicas,
            published=frozenset(),
            history=self.history[max(0, len(self.history) - self.remember) :],
        )

    def lost(self, replica: int) -> Coordinator:
        """Note that ``replica`` is gone. An update that is whole still counts; one that is not never will.

        Ask `stuck` afterwards. Say this before a replacement `joined`, and also when a tower failed with its replica
        alive: its parts that arrived must not be mixed with those of another try.
        """
        self._check(self.version, replica)
        gone = replace(self, alive=_put(self.alive, replica, False))
        if self.quorum.closed_at is not None:
            return gone
        standing = self.standing[replica]
        return gone._stand(replica, _AT_LOSS.get(standing, standing))

    def joined(self, replica: int) -> Coordinator:
        """Note that ``replica`` is back; if it was lost in the open version, it may begin from the next one on."""
        self._check(self.version, replica)
        return replace(self, alive=_put(self.alive, replica, True))

    def stuck(self) -> Stuck | None:
        """Why the open version can never close, or None. Then the caller fails, or gives it up by `abandon`."""
        if self.quorum.closed_at is not None:
            return None
        able = tuple(replica for replica in range(self.quorum.replicas) if self._able(replica))
        if len(able) >= self.quorum.needed:
            return None
        refused = tuple(r for r, standing in enumerate(self.standing) if standing is Standing.REFUSED)
        lost = tuple(r for r in range(self.quorum.replicas) if r not in able and r not in refused)
        return Stuck(self.version, self.quorum.needed, able, refused, lost)

    def abandon(self, now: float) -> Coordinator:
        """Close a stuck version with the empty set, so that the next one opens with the variables unchanged.

        Raises `InternalError` when the version may still close by itself.
        """
        if self.stuck() is None:
            raise InternalError(f"version {self.version} cannot be abandoned: it is decided or may still be")
        return self._close(self.quorum.abandon(now), _AT_ABANDON, now)

    def statistics(self) -> CoordinatorStatistics:
        """The open version, and how the towers of each replica have ended since the start."""
        return CoordinatorStatistics(self.version, self.standing, self.alive, self.tallies)

    def _gather(self, server: int, replica: int, finite: bool, now: float) -> tuple[Coordinator, Verdict]:
        if not finite:
            return self._stand(replica, Standing.REFUSED), Verdict.REFUSED
        if server in self.holders[replica]:
            return self, Verdict.REPEAT
        holders = self.holders[replica] | {server}
        gathered = replace(self, holders=_put(self.holders, replica, holders))
        if len(holders) < self.servers:
            return gathered, Verdict.HELD
        quorum, verdict = self.quorum.offer(replica, self.version, now)
        whole = gathered._stand(replica, Standing.WHOLE)
        if verdict is Verdict.CLOSE:
            return whole._close(quorum, _AT_CLOSE, now), verdict
        return replace(whole, quorum=quorum), verdict

    def _close(self, quorum: Quorum, outcomes: dict[Standing, Outcome], now: float) -> Coordinator:
        receipts = tuple(
            Receipt(self.version, replica, outcomes[standing], now)
            for replica, standing in enumerate(self.standing)
            if standing in outcomes
        )
        ledger = Ledger(self.version, quorum.kept, receipts)
        tallies = self.tallies
        for receipt in receipts:
            tallies = _put(tallies, receipt.replica, _count(tallies[receipt.replica], receipt.outcome))
        return replace(self, quorum=quorum, history=(*self.history, ledger), tallies=tallies)

    def _stand(self, replica: int, standing: Standing) -> Coordinator:
        return replace(self, standing=_put(self.standing, replica, standing))

    def _able(self, replica: int) -> bool:
        standing = self.standing[replica]
        return standing is Standing.WHOLE or (self.alive[replica] and standing in (Standing.IDLE, Standing.RUNNING))

    def _ledger(self, version: int) -> Ledger | None:
        self._check(version, 0)
        for ledger in reversed(self.history):
            if ledger.version == version:
                return ledger
        if version == self.version:
            return None
        raise InternalError(f"version {version} is forgotten: {self.remember} before {self.version} are remembered")

    def _check(self, version: int, replica: int, server: int = 0) -> None:
        if version > self.version:
            raise InternalError(f"version {version} is not open yet, the newest is {self.version}")
        if not 0 <= replica < self.quorum.replicas:
            raise InternalError(f"replica {replica} does not exist, expected 0 to {self.quorum.replicas - 1}")
        if not 0 <= server < self.servers:
            raise InternalError(f"server {server} does not exist, expected 0 to {self.servers - 1}")


Item = TypeVar("Item")


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _count(tally: Tally, outcome: Outcome) -> Tally:
    match outcome:
        case Outcome.KEPT:
            return replace(tally, kept=tally.kept + 1)
        case Outcome.LATE:
            return replace(tally, late=tally.late + 1)
        case Outcome.REFUSED:
            return replace(tally, refused=tally.refused + 1)
        case Outcome.LOST:
            return replace(tally, lost=tally.lost + 1)
        case Outcome.ABANDONED:
            return replace(tally, abandoned=tally.abandoned + 1)
