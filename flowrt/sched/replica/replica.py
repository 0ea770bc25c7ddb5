"""A replica of a run, on its worker: goes from version to version as servers tell it of them.

Law: it computes the newest version that every server has told it of, from the batch that server 0 has booked for it, at
most once, and posts its update. One is under way at a time: what it computes, or has posted, is gone on with as long as
it may count, and is cut off where a version is told that leaves it too old. A batch that comes to a replica that waits
for one is used at once and announced, and is booked by that. Rows that it takes of tables are waited for. Which
updates count is nothing to it.

Where it takes local steps, what is booked is a group of as many batches. It begins with the first of them, uses each as
it comes, and announces the group once it is whole. Steps that it takes ahead of a version, once it has posted an
update, are not cut off: what is said of it is that it waits for the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from flowrt.base.device import CLIENT
from flowrt.base.errors import name_error
from flowrt.sched.drivers.measuring import square_of
from flowrt.sched.drivers.messages import (
    AskedRows,
    Batch,
    Doing,
    Draw,
    Failed,
    Lost,
    NewVersion,
    Probe,
    Ready,
    Seen,
    Update,
    make_update,
)
from flowrt.sched.drivers.packing import unpacked_now
from flowrt.sched.drivers.pulse import Pulse
from flowrt.sched.drivers.way import Unread, Way, bundled, may_be, unbundled
from flowrt.sched.replica.asking import Asking
from flowrt.sched.replica.stopwatch import Phase, Stopwatch

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginReplica
    from flowrt.sched.drivers.closed import Closed, Runnable
    from flowrt.sched.drivers.packing import Feedback
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.replica.local import Rounds
    from flowrt.sched.replica.reading import Reader


class Replica:
    """One replica of a run. It computes ``tower``, and by ``ask``, if there is that, what tells which rows it takes.

    With ``rounds`` it takes local steps, and these compute its updates. ``feedback`` is told which of them counted.
    """

    def __init__(
        self,
        role: BeginReplica,
        tower: Runnable,
        ask: Closed | None,
        way: Way,
        feedback: Feedback,
        rounds: Rounds | None = None,
    ) -> None:
        self.role = role
        self._tower = tower
        self.way = way
        self._at = [role.version - 1] * len(role.servers)  # the version of each server's values
        self._values: list[Sequence[Any]] = [()] * len(role.servers)
        self._batches: dict[int, Sequence[Any] | Unread] = {}
        self._came = asyncio.Event()  # one more has come
        self._given = self._dropped = role.given * role.steps  # batches that have come, and that are used for good
        self._used = role.given  # the last group of them that was computed with
        self._announced = role.given  # of the groups that have come whole, those that server 0 was told of
        self._spent = role.given  # groups
        self._booked = False  # server 0 has booked the last of the spent ones
        self._since = role.version  # an update from this one on counts, with that group, or else with the next
        self._done = role.version - 1  # the newest version that was computed, or failed
        self._on = -1  # the newest version that was begun to be computed
        self._idle = role.version - 1  # the newest version for which there was no batch
        self._claimed = role.version - 1  # the newest version that it told server 0 to begin without being told to
        self.task: asyncio.Task[None] | None = None
        self._pulse = Pulse(lambda: self.task is not None)
        self.watch = Stopwatch(held=self._pulse.held)
        self._posted: Sequence[Update] = ()
        self._nothing: tuple[tuple[()], ...] = ((),) * len(role.servers)
        self._rounds = rounds
        self._feedback = feedback
        self._asking = Asking(role, ask, way, self._admit) if any(role.wants) else None
        self._reader: Reader | None = None
        if role.source is not None:
            from flowrt.sched.replica.reading import Reader  # which others need not import

            self._reader = Reader(role, way.host.task, self._come)
        self._reads: asyncio.Task[None] | None = None
        self._leaves = False
        self.rested = asyncio.Event()  # nothing is begun, or to be begun, here any more

    def start(self) -> None:
        """Ask every server for its values."""
        if self._reader is not None:
            self._reads = self.way.start(self._reader.run())
        for server, version in enumerate(self._at):
            self._see(server, version)

    def close(self) -> None:
        """End what is being computed; the tasks are the way's to wait for."""
        self._pulse.stop()
        self._done = max(self._done, *self._at)
        for task in (self.task, self._reads):
            if task is not None:
                task.cancel()
        self.rested.set()

    def loses(self, task: str, birth: str) -> bool:
        """Whether this cannot go on without the process of ``birth`` that a task was, and no client sees to it."""
        births = dict(zip(self.role.servers, self.role.births, strict=False))  # without them, any is meant
        return self.role.detached and task in self.role.servers and may_be(birth, births.get(task, ""))

    def leave(self) -> None:
        """Begin nothing any more; when server 0 has told a version after that of the last update, this `rested`."""
        self._leaves = True
        self.way.post(self.role.servers[0], Lost(self.role.run, self.role.replica, self.role.incarnation, leaves=True))
        self._go_on()

    def hear(self, message: Batch | Draw | NewVersion | AskedRows | Probe) -> None:
        """Take in a batch, or which one to read, a version, or rows; or say what is done here."""
        match message:
            case NewVersion():
                if message.version > self._at[message.server]:
                    self._take(message)
                elif message.version == self._at[message.server]:
                    self._take_rows(message)  # those that came with it before may be lost
                    if self.role.staleness and self.task is None:  # else an update acknowledges it
                        self._see(message.server, message.version, waits=not self._under_way)
            case Batch():
                for number, values in enumerate((message.values, *message.more), message.number):
                    self._come(number, values)
            case Draw():
                if self._reader is not None:
                    self._reader.draw(message.number, message.identities)
            case AskedRows():
                self._take_rows(message)
            case Probe():
                self.way.post(CLIENT, Doing(self.role.run, self.role.replica, self.watch.so_far()))

    def _take_rows(self, message: NewVersion | AskedRows) -> None:
        if self._asking is not None:
            self._asking.hear(message)
            self._go_on()

    def _come(self, number: int, values: Sequence[Any] | Unread) -> None:
        """Take in the next batch; one beyond that is posted again, with those before it."""
        if number == self._given + 1:
            self._given = number
            named = self._asking is not None and not isinstance(values, Unread)
            admit: Any = self._asking.come if named and self._asking is not None else self._admit
            if self.way.striking is None:
                admit(number, values)
                return
            following = max(self.role.version, *self._at, self._on + 1)  # what is computed next
            later = max(0, (number - 1) // self.role.steps - self._used)  # so many versions after that it is used
            self.way.striking.read(following + later, partial(admit, number, values))

    def _admit(self, number: int, values: Sequence[Any] | Unread) -> None:
        self._batches[number] = values
        if self._rounds is not None:
            self._came.set()
            if self.task is not None and self._on == self._at[0]:
                self._claim(self._on, self._used)
        self._go_on()
        if self._asking is not None and (self.task is not None or number <= self._used + 1):
            self._asking.say()  # no update is to be posted soon

    def broken(self, peer: str) -> None:
        """Say again what a server at ``peer`` may not have heard."""
        for server, task in enumerate(self.role.servers):
            if task != peer:
                continue
            counts = bool(self._posted) and self._posted[server].version >= self._since
            if counts and self.role.incarnation:  # until a server knows of it, it hears no update of it
                self._see(server, self._at[server], waits=False)
            if counts:
                self.way.post(task, self._posted[server])
            if not counts or self._posted[server].version < self._at[server]:
                self._see(server, self._at[server], waits=not counts)
            if server == 0 and self._announced:
                self.way.post(task, Ready(self.role.run, self.role.replica, self._announced))
            if self._asking is not None:
                there = {n: batch for n, batch in self._batches.items() if not isinstance(batch, Unread)}
                self._asking.broken(server, there)

    def _take(self, message: NewVersion) -> None:
        server, version = message.server, message.version
        self._at[server], self._values[server] = version, unbundled(message.values)
        if self._asking is not None:
            self._asking.hear(message)
        if server == 0:
            self._spent, self._booked, self._since = message.spent, message.begun, message.since
            self._feedback.counted = message.counted
            self._drop((self._spent - self._booked) * self.role.steps)
        whole = self._has_all(version)
        if whole:
            self.watch.arrive()
        if self.role.staleness or not whole:
            self._pass_over(server)
        if self.task is None:
            self._go_on()
        elif self._done < self._on and (self._on < self._since or version - self._on > self.role.staleness):
            if self.role.staleness or not self.watch.spares():
                self.task.cancel()
            for other in range(len(self._at)) if self.role.staleness else (server,):
                self._see(other, self._at[other], () if other else self.watch.so_far())

    def _drop(self, used: int) -> None:
        """Forget the batches that are ``used`` for good."""
        for number in range(self._dropped + 1, used + 1):
            self._batches.pop(number, None)
            self._dropped = number
        if self._reader is not None:
            self._reader.use(used)

    def _has_all(self, version: int) -> bool:
        """Whether what it has of every server is of that version."""
        return self._at.count(version) == len(self._at)

    @property
    def _under_way(self) -> bool:
        """Whether what was begun last, and may be posted already, may yet count."""
        return self._on >= self._since

    def _pass_over(self, server: int) -> None:
        """Acknowledge what no update will: what is overtaken before it could be computed, or is not to be.

        Where updates may be stale, a server tells nobody of versions who has something under way, unless asked by this.
        That something no longer is, server 0 says; the others are asked then.
        """
        stale, newest = self.role.staleness > 0, max(self._at)
        if stale and self._under_way:
            if self.task is None and server == 0:
                self._see(server, self._at[server], waits=False)
            return
        for other, version in enumerate(self._at):
            if version < newest and (stale or self._done < version):
                self._see(other, version)

    def _see_all(self, version: int, cut: tuple[float, ...] = ()) -> None:
        for server in range(len(self._at)):
            self._see(server, version, () if server else cut)

    def _see(self, server: int, version: int, cut: tuple[float, ...] = (), *, waits: bool = True) -> None:
        role = self.role
        self.way.post(role.servers[server], Seen(role.run, role.replica, version, cut, role.incarnation, waits))

    # ── computing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        """Compute the newest version, if it is there whole, was not computed, and there is a batch for it."""
        version = self._at[0]
        if self.task is not None or version <= self._done:
            return
        if self._leaves:
            self.rested.set()
            return
        if self._on >= self._since or not self._has_all(version):  # what was begun last may yet count
            return
        number = self._spent if self._booked else self._spent + 1
        first = (number - 1) * self.role.steps + 1
        if first not in self._batches:
            if self._idle < version:  # say it once
                self._idle = version
                self._see_all(version, self.watch.so_far() if self.watch.phase is Phase.INPUT else ())
            self.watch.wait(version, Phase.INPUT)
            return
        if not self._booked:
            self._claim(version, number)
        if self._rounds is not None:
            self._on, self._used = version, number
            self._pulse.start()
            self.task = self.way.start(self._take_steps(self._rounds, version, first))
            self.task.add_done_callback(self._ended)
            return
        batch = self._batches[number]
        if self._asking is None or isinstance(batch, Unread) or self._asking.has(version, number, batch):
            self._on, self._used = version, number
            if self._reader is not None:  # there is room to read others
                self._reader.use(number)
            self._compute(version, batch)
        else:
            self.watch.wait(version, Phase.ROWS)

    def _claim(self, version: int, number: int) -> None:
        """Say that this begins with a group that is whole, if server 0 has not booked it."""
        if not self._booked and self._claimed < version and self._given >= number * self.role.steps:
            self._claimed = version  # which server 0 may have booked meanwhile
            self.way.post(self.role.servers[0], Ready(self.role.run, self.role.replica, self._announce(number)))

    async def _take_steps(self, rounds: Rounds, version: int, first: int) -> None:
        """Compute an update by local steps, with the batches from ``first`` on."""
        self.watch.start(version)
        self.watch.leave()
        try:
            fetches, samples = await rounds.run(version, tuple(self._values), first, self._coming, self._there)
        except Exception as error:
            self._fail(version, error)
        else:
            self._finish(version, fetches, samples)
            await rounds.run_ahead(version + 1, first + self.role.steps, self._there)

    async def _coming(self, number: int) -> Sequence[Any]:
        """A batch, once it is there."""
        if number not in self._batches:
            self.watch.wait(self._on, Phase.INPUT)
            while number not in self._batches:
                self._came.clear()
                await self._came.wait()
            self.watch.start(self._on)
        if self._reader is not None:
            self._reader.use(number)
        return _read(self._batches[number])

    def _there(self, number: int) -> Sequence[Any] | None:
        """A batch, if it is there and could be read."""
        batch = self._batches.get(number)
        if batch is None or isinstance(batch, Unread):
            return None
        if self._reader is not None:
            self._reader.use(number)
        return batch

    def _compute(self, version: int, batch: Sequence[Any] | Unread) -> None:
        role, told, asking = self.role, self._values, self._asking
        if asking is not None:
            told = [[*values, *asking.rows_of(server)] for server, values in enumerate(told)]
        try:
            values = _read(batch)
            feeds = [values[i] if server < 0 else told[server][i] for server, i in role.feeds]
        except Exception as error:
            self._fail(version, error)
            return
        self.watch.start(version)
        self.task = self.way.compute(
            self._tower,
            feeds,
            (version, role.replica, role.replicas),
            partial(self._finish, version),
            partial(self._fail, version),
            at="compute",
        )
        if self.task is not None:
            self._pulse.start()
            self.watch.leave()
            self.task.add_done_callback(self._ended)
            if asking is not None:
                asking.say()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.task = None
        self.watch.end()
        self.way.do(self._go_on)

    def _finish(self, version: int, fetches: Sequence[Array], samples: int = 0) -> None:
        """Post the update, each server's parts to it."""
        role = self.role
        told, made = tuple(map(_plain, fetches[: role.told])), fetches[role.told :]
        try:
            parcels = [self._parcel(made, server) for server in range(len(role.servers))]
        except Exception as error:
            self._fail(version, error)
            return
        self._done, ready = version, self._announce(self._used)
        self._feedback.post(version)
        times = self.watch.post(at_once=self.task is None)
        wants = self._nothing if self._asking is None else self._asking.with_update()
        posted: list[Update] = []
        for (finite, square, parcel), wanted in zip(parcels, wants, strict=True):
            run, replica = role.run, role.replica
            posted.append(
                make_update(run, version, replica, ready, parcel, told, wanted, times, finite, samples, square)
            )
            told, times = (), b""  # which are for server 0
        self._posted = posted
        for server, update in enumerate(posted):
            self.way.post(role.servers[server], update)
            if self._at[server] > version:  # told meanwhile
                self._see(server, self._at[server], waits=False)

    def _parcel(self, made: Sequence[Array], server: int) -> tuple[bool, float, tuple[Any, ...]]:
        """Whether a server's parts are finite, the sum of their squares, if measured, and what it is sent of them."""
        role = self.role
        finite = all(map(made.__getitem__, role.finite[server]))
        parts = [made[place] for place in role.parts[server]] if finite else []
        return finite, self._square(parts, server) if role.measured else nan, bundled(parts)

    def _square(self, parts: Sequence[Array], server: int) -> float:
        """The sum of the squares of what a server makes of parts."""
        role = self.role
        if role.packed:
            parts = unpacked_now(parts, role.packed[server], self.way.host.memory)
        return square_of(parts, role.measured[server])

    def _announce(self, used: int) -> int:
        """How many groups server 0 is told that it has been given: up to the next one, of those that wait.

        More would be booked for one version after another, should nothing be heard of this replica any more.
        """
        self._announced = min(self._given // self.role.steps, used + 1)
        return self._announced

    def _fail(self, version: int, error: BaseException) -> None:
        role = self.role
        self._done, self.watch.phase = version, Phase.POSTED
        self._see_all(version)  # no update will
        self.way.post(role.servers[0], Failed(role.run, version, role.replica, -1, *name_error(error)))


def _read(batch: Sequence[Any] | Unread) -> Sequence[Any]:
    """``batch``, if it could be read; raises why not."""
    if isinstance(batch, Unread):
        raise batch.error
    return batch


def _plain(told: Array) -> Any:
    """What the client is told, one number as such: a message has it in itself."""
    return float(told) if told.ndim == 0 else told
