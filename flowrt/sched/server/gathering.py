"""A server's side of rows: takes what replicas want of its tables, of each version as they are told of it.

Law: a replica names the rows that a batch wants when it gets the batch, ahead of the version that it will use it with.
With each version it is told the rows of the first batch after the one whose rows it was given last; where that is not
the one it begins with, it asks for those of the version that it has, or of the one that there is now, which it is told
then. Rows of a version are taken before the next is made, or they are for an update that comes too late to count: where
stale updates count, the server waits until it `rests`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrt.sched.drivers.messages import AskedRows, Update, Wants

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginServer
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array

KEPT = 4096  # batches of a replica whose rows were named: more than a client hands out ahead


@dataclass(slots=True)
class _Named:
    """What the batches of one replica want, by their numbers, and the one whose rows it was given last."""

    wanted: dict[int, Sequence[Any]] = field(default_factory=dict)
    given: int = 0

    def want_all(self, wants: Iterable[tuple[int, Sequence[Any]]]) -> None:
        """Keep what batches want."""
        self.wanted.update(wants)
        while len(self.wanted) > KEPT:
            del self.wanted[min(self.wanted)]

    def next(self) -> int:
        """The first batch after that one, 0 if there is none."""
        return min(filter(self.given.__lt__, self.wanted), default=0)

    def give(self, number: int) -> Sequence[Any]:
        """What batch ``number`` wants, which is given now; what those before it want is forgotten."""
        self.given = number
        for older in [*filter(number.__gt__, self.wanted)]:
            del self.wanted[older]
        return self.wanted[number]


class Gathering:
    """What one server gathers for the replicas of a run, by ``plan``; ``failed`` is told (version, replica, error).

    ``rested`` is called when the last rows are taken of those that are being taken.
    """

    def __init__(
        self,
        role: BeginServer,
        plan: Closed,
        way: Way,
        failed: Callable[[int, int, BaseException], None],
        rested: Callable[[], None],
    ) -> None:
        self._role, self._plan, self._way, self._failed = role, plan, way, failed
        self._rested, self._taking = rested, 0
        self._named = [_Named() for _ in role.replicas]

    @property
    def rests(self) -> bool:
        """Whether no rows are being taken."""
        return not self._taking

    def hear(self, wants: Wants, version: int) -> None:
        """Keep what a replica names; give it at once if it has that ``version``, the server's, and asks for it."""
        replica, number = wants.replica, wants.number
        self._named[replica].want_all([(number, wants.values)])
        if wants.version == version:
            rows = self._take(replica, version, number)
            if rows is not None:
                self._post(replica, version, number, rows)
        elif wants.version >= 0 and self._role.staleness:  # elsewhere it does not begin the next one with that batch
            self._named[replica].given = number - 1

    def note(self, update: Update) -> None:
        """Keep what a replica names with an update."""
        if update.wants:
            self._named[update.replica].want_all(update.wants)

    def give(self, replica: int, version: int) -> tuple[int, tuple[Array, ...]]:
        """The batch whose rows of ``version`` a replica gets (0: of none), and these if they are there at once."""
        number = self._named[replica].next()
        rows = self._take(replica, version, number) if number else None
        return number, () if rows is None else tuple(rows)

    def _take(self, replica: int, version: int, number: int) -> list[Array] | None:
        """The rows that a batch wants; None where that takes long, and they are posted then, or has failed."""
        try:
            wanted = self._named[replica].give(number)
            rows = self._plan.run_now(wanted, version)
        except Exception as error:
            self._failed(version, replica, error)
            return None
        if rows is None:
            self._taking += 1
            self._way.start(self._take_and_post(replica, version, number, wanted))
        return rows

    async def _take_and_post(self, replica: int, version: int, number: int, wanted: Sequence[Array]) -> None:
        try:
            rows = await self._way.run_plan(self._plan, wanted, (version, replica, len(self._role.replicas)))
        except Exception as error:
            self._failed(version, replica, error)
        else:
            self._post(replica, version, number, rows)
        self._taking -= 1
        if self.rests:
            self._rested()

    def _post(self, replica: int, version: int, number: int, rows: Sequence[Array]) -> None:
        role = self._role
        self._way.post(role.replicas[replica], AskedRows(role.run, version, role.server, replica, number, tuple(rows)))
