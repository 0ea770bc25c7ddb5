"""A replica's side of rows: names those that its batches want of servers' tables, and keeps what comes.

Law: rows are of one version and for one batch, and of use to no other. What a batch wants is named ahead: with the next
update, if that comes soon, else by itself; where a server did not foresee that the replica begins a version with that
batch, it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowrt.sched.drivers.messages import AskedRows, NewVersion, Wants
from flowrt.sched.drivers.way import Unread

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginReplica
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array


class Asking:
    """What one replica asks servers for.

    ``plan`` computes from a batch what tells the rows, where the batch itself does not. ``admit`` is given each batch
    with what was computed, in order, or with why that could not be, which is the error of its turn.
    """

    def __init__(
        self,
        role: BeginReplica,
        plan: Closed | None,
        way: Way,
        admit: Callable[[int, Sequence[Any] | Unread], None],
    ) -> None:
        self._role, self._plan, self._way, self._admit = role, plan, way, admit
        self._unsaid: dict[int, Sequence[Any]] = {}  # batches of which no server was told
        self._coming: deque[tuple[int, Sequence[Any]]] = deque()  # batches of which rows are yet to be named
        self._naming = False  # those of the first of them
        self._expected = [(-1, 0)] * len(role.servers)  # the version and the batch whose rows each server sends
        self._rows: list[tuple[int, int, Sequence[Any]]] = [(-1, 0, ())] * len(role.servers)  # and those that came

    def come(self, number: int, batch: Sequence[Any]) -> None:
        """Name the rows of a batch, and admit it."""
        self._coming.append((number, batch))
        self._name_all()

    def _name_all(self) -> None:
        """Name the rows of what has come, one batch after another, until that of one takes long."""
        while self._coming and not self._naming:
            self._naming = True
            self._name_next(*self._coming[0])

    def _name_next(self, number: int, batch: Sequence[Any]) -> None:
        if self._plan is None:
            self._name(number, batch)
            return
        role, at_once = self._role, True

        def then(found: Sequence[Array]) -> None:
            self._name(number, [*batch, *found])
            go_on()

        def failed(error: BaseException) -> None:
            self._admit_next(number, Unread(error))
            go_on()

        def go_on() -> None:
            if not at_once:
                self._name_all()

        self._way.compute(self._plan, batch, (number, role.replica, role.replicas), then, failed)
        at_once = False

    def _name(self, number: int, batch: Sequence[Any]) -> None:
        self._unsaid[number] = batch
        self._admit_next(number, batch)

    def _admit_next(self, number: int, batch: Sequence[Any] | Unread) -> None:
        self._coming.popleft()
        self._naming = False
        self._admit(number, batch)

    def say(self) -> None:
        """Tell all servers of what they were not told yet."""
        unsaid, self._unsaid = self._unsaid, {}
        for number, batch in unsaid.items():
            for server, wanted in enumerate(self._role.wants):
                if wanted:
                    self._ask(server, number, batch, -1)

    def with_update(self) -> list[tuple[tuple[int, tuple[Any, ...]], ...]]:
        """For each server, what it was not told yet: (batch, values), to ride in an update."""
        unsaid, self._unsaid = self._unsaid, {}
        return [
            tuple([(number, tuple([batch[i] for i in wanted])) for number, batch in unsaid.items()]) if wanted else ()
            for wanted in self._role.wants
        ]

    def _ask(self, server: int, number: int, batch: Sequence[Any], version: int) -> None:
        role = self._role
        values = tuple([batch[i] for i in role.wants[server]])
        self._way.post(role.servers[server], Wants(role.run, role.replica, number, version, values))

    def hear(self, message: AskedRows | NewVersion) -> None:
        """Take in what a server says of rows."""
        server, version, number = message.server, message.version, message.number
        rows = message.rows
        if version >= self._expected[server][0]:
            self._expected[server] = (version, number)
        if rows and version >= self._rows[server][0]:
            self._rows[server] = (version, number, rows)

    def has(self, version: int, number: int, batch: Sequence[Any]) -> bool:
        """Whether all rows of a version for a batch are there; those that nobody sends are asked for."""
        there = True
        for server, wanted in enumerate(self._role.wants):
            if not wanted or self._rows[server][:2] == (version, number):
                continue
            there = False
            if self._expected[server] != (version, number):
                self._expected[server] = (version, number)
                self._ask(server, number, batch, version)
        self._unsaid.pop(number, None)
        return there

    def rows_of(self, server: int) -> Sequence[Array]:
        """The newest rows of a server."""
        return self._rows[server][2]

    def broken(self, server: int, batches: dict[int, Sequence[Any]]) -> None:
        """Name again what ``server`` may not have heard."""
        version, number = self._expected[server]
        for other, batch in sorted(batches.items()):
            self._ask(server, other, batch, version if other == number else -1)
