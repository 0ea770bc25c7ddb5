"""What server 0 does for a run that needs no client: hands out its batches by identity, and keeps what it reports.

Law: who is there changes nothing about which batch goes to whom. A batch is named to its replica, which reads it; what
may be lost on the way is said again whole. Of what nobody asked beyond, the newest reports are kept, packed, as many as
`KEPT` bytes hold; how many older ones are not is counted, and told to the next client. To a client no more than
`WINDOW` are on their way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrt.base import codec
from flowrt.base.device import CLIENT
from flowrt.sched.drivers.messages import Draw, Report
from flowrt.sched.versions.handing import Handing

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginServer
    from flowrt.sched.drivers.way import Way

KEPT = 16 << 20  # bytes of reports: some 50,000 of a few replicas
WINDOW = 256  # reports on their way to a client
_FIELDS = tuple(field.name for field in fields(Report))


class DetachedTerms(NamedTuple):
    """What `BeginServer.detached` says.

    Args:
        session: The name of the sessions that may attach to the run.
        depth: Batches that a replica has at most, of those that are not spent.
        steps: Batches that make one of those that are counted and booked.
        first: The identity of the first batch.
        total: The identity after that of the last one; -1 where there is no last one.
        requeues: Whether batches that came late, or were lost with their replica, are to be used again.
        returned: Batches that are used before the first.
        births: Which process each task is that takes part.
        compression: How updates are packed; empty where they are not.
    """

    session: str
    depth: int
    steps: int
    first: int
    total: int
    requeues: bool = False
    returned: tuple[int, ...] = ()
    births: tuple[tuple[str, str], ...] = ()
    compression: str = ""


class Detached:
    """Of one run: its batches, by whom they are held, and its reports."""

    def __init__(self, role: BeginServer, way: Way) -> None:
        self.terms = terms = DetachedTerms(*role.detached)
        self._role, self._way = role, way
        total = None if terms.total < 0 else terms.total
        self._handing = Handing(len(role.replicas), terms.depth, terms.first, terms.returned, total)
        self.there: set[int] = set()  # replicas that have begun
        self.reports = Kept(role.version)
        self._told = role.version  # reports before this one were told to the client
        self._attached = True
        self.held = False  # nothing is to be ordered for a while, as the client wants it

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def hand_out(self) -> tuple[int, ...] | None:
        """Hand out what may be. Once there is no more: how many of what is counted each replica was given in all."""
        drawn: dict[int, dict[int, int]] = {}
        while (handed := self._handing.next()) is not None:
            replica, number, identity = handed
            drawn.setdefault(replica, {})[number] = identity
        for replica, batches in drawn.items():
            self._name(replica, batches)
        return tuple([given // self.terms.steps for given in self._handing.given]) if self._handing.over else None

    def arrived(self, replica: int) -> None:
        """A replica has begun, or the way to it was broken: it is told of all that it was handed."""
        self.there.add(replica)
        self._name(replica, self._handing.held(replica))

    def _name(self, replica: int, batches: dict[int, int]) -> None:
        if replica not in self.there:
            return
        runs: list[tuple[int, list[int]]] = []  # of numbers that follow one another: one that began again skips some
        for number, identity in batches.items():
            if not runs or number != runs[-1][0] + len(runs[-1][1]):
                runs.append((number, []))
            runs[-1][1].append(identity)
        for first, identities in runs:
            self._way.post(self._role.replicas[replica], Draw(self._role.run, replica, first, tuple(identities)))

    def spend(self, replica: int, number: int, *, again: bool) -> tuple[int, ...]:
        """A replica has used what is counted up to ``number``; answers the batches of it that were not spent before."""
        spent = self._handing.spend(replica, number * self.terms.steps)
        if again and self.terms.requeues:
            self._handing.requeue(*spent)
        return tuple(spent)

    def lose(self, replica: int, spent: int) -> None:
        """A replica is lost that had ``spent`` so many of what is counted: others are to have what it had beyond."""
        self.there.discard(replica)
        self._handing.lose(replica)
        self._handing.confirm_lost(replica, spent * self.terms.steps)

    def join(self, replica: int) -> int:
        """A replica that was lost begins again; answers after how many of what is counted."""
        given = -(-self._handing.given[replica] // self.terms.steps)
        self._handing.join(replica, given * self.terms.steps)
        return given

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def report(self, report: Report) -> None:
        """Keep a report, and tell it if somebody is there who has had those before it."""
        if self._attached and self._told == report.version < self.reports.first + WINDOW:
            self._way.post(CLIENT, report)
            self._told += 1
        self.reports.add(report)

    def attach(self) -> tuple[int, int]:
        """Somebody has come: answers which report comes first, and how many before that are not kept any more.

        Nothing is told before that is known there, which `seen` says.
        """
        self._attached, self._told = False, self.reports.first
        return self.reports.first, self.reports.dropped

    def detach(self) -> None:
        """Nobody is there."""
        self._attached = self.held = False

    def seen(self, version: int) -> None:
        """Somebody is there who has had the reports before ``version``: they need not be kept, and more are told."""
        self._attached = True
        self.reports.forget(version)
        self.tell(max(self._told, version))

    def tell_again(self) -> None:
        """The way to the client broke: say again what it may not have had, if one is there that knows what it had."""
        if self._attached:
            self.tell()

    def tell(self, first: int = 0) -> None:
        """Tell the reports from ``first`` on, or from the oldest that is kept, as many as may be on their way."""
        self._told = max(first, self.reports.first)
        for report in self.reports.between(self._told, self.reports.first + WINDOW):
            self._way.post(CLIENT, report)
            self._told += 1


class Kept:
    """Reports of versions that follow one another, from ``version`` on, packed, without the times of their parts."""

    def __init__(self, version: int) -> None:
        self.first = version  # the oldest that is kept, or the next one
        self.dropped = 0  # how many before that were dropped unseen
        self._packed: deque[bytes] = deque()
        self._bytes = 0

    def add(self, report: Report) -> None:
        """Keep a report, and as many before it as there is room for."""
        brief = replace(report, times=b"")
        self._packed.append(bytes(codec.pack(tuple([getattr(brief, name) for name in _FIELDS]))))
        self._bytes += len(self._packed[-1])
        while self._bytes > KEPT and len(self._packed) > 1:
            self._drop()
            self.dropped += 1

    def forget(self, version: int) -> None:
        """Reports before ``version`` are not wanted any more."""
        while self._packed and self.first < version:
            self._drop()
            self.dropped = 0

    def between(self, first: int, end: int) -> Iterable[Report]:
        """Those of the versions from ``first`` to ``end`` that are kept, in order."""
        for place in range(max(0, first - self.first), min(len(self._packed), end - self.first)):
            unpacked: Any = codec.unpack(self._packed[place])
            yield Report(*unpacked)

    def __len__(self) -> int:
        return len(self._packed)

    def _drop(self) -> None:
        self._bytes -= len(self._packed.popleft())
        self.first += 1
