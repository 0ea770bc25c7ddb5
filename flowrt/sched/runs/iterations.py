"""The runs of trainers that a host takes part in: begins and ends its drivers, and hands each what it is to hear.

Law: a server's part of a run is found by its trainer, and stays, ended, until the next run of that trainer begins: what
is left of it may be what makes all servers whole. Whoever wants to begin one is refused while another client's goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.device import CLIENT
from flowrt.base.errors import FlowrtError, GraphError, InternalError, NodeLost, RemoteError, StepCancelled, name_error
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace
from flowrt.sched.drivers.beginning import BeginReplica, BeginServer
from flowrt.sched.drivers.closed import Closed
from flowrt.sched.drivers.following import ABOUT_FOLLOWING
from flowrt.sched.drivers.inquiries import Hash, Lacking, Look, Settle, TellTrace, WhoTrains
from flowrt.sched.drivers.keeping import ABOUT_CHECKPOINTS, Keeping
from flowrt.sched.drivers.messages import (
    Allow,
    Applied,
    ApplyOrder,
    AskedRows,
    Attach,
    Batch,
    Draw,
    Ended,
    Failed,
    GoOn,
    Held,
    Hold,
    Join,
    Lost,
    NewVersion,
    Probe,
    Ready,
    Report,
    Seen,
    Stop,
    Update,
    Wants,
)
from flowrt.sched.drivers.packing import Feedback, packing
from flowrt.sched.drivers.tasks import Tasks
from flowrt.sched.drivers.way import Send, Way
from flowrt.sched.replica.local import Rounds
from flowrt.sched.replica.replica import Replica
from flowrt.sched.runs.followings import Followings
from flowrt.sched.runs.tracing import HostTrace
from flowrt.sched.server.server import Server
from flowrt.sched.server.undriven import Undriven
from flowrt.sched.versions.opening import Left

if TYPE_CHECKING:
    from flowrt.sched.drivers.striking import Slowness
    from flowrt.sched.executor import Executor
    from flowrt.sched.host.host import Host
    from flowrt.sched.server.coordination import Coordination

Plans: TypeAlias = "Callable[[int], Executor]"
_log = logging.getLogger(__name__)
_STEPS = Spec("int64", ())
_TO_SERVERS = frozenset({Update, Seen, Wants, ApplyOrder, Allow, Lost, Ready, Held, Applied, Failed, Probe})
_TO_REPLICAS = frozenset({NewVersion, AskedRows, Batch, Draw, Probe})
SETTLE_SECONDS = 5.0  # how long the end of a run waits for servers to apply what they were ordered to
REST_SECONDS = 2.0  # how long who comes waits for what was ordered for those who are away
_FIELDS_OF_LEFT, _FIELDS_OF_REPORT = (attrgetter(*[each.name for each in fields(kind)]) for kind in (Left, Report))


class Iterations:
    """All runs on ``host``; ``send`` posts messages, ``lives`` says whether the client of an epoch is connected.

    ``clock`` tells the seconds by which policies decide.
    """

    def __init__(
        self,
        host: Host,
        send: Send,
        lives: Callable[[str], bool] = lambda epoch: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._host = host
        self._send = send
        self._lives = lives
        self._tasks = Tasks()
        self._trace = HostTrace(host)
        self._keeping = Keeping(host, self._tasks)
        self._followings = Followings(self._tasks)
        self._slowness: Slowness | None = None
        if host.delay is not None:
            from flowrt.sched.drivers.striking import Slowness  # which other nodes need not import

            self._slowness = Slowness(host.delay, host.task, self._tasks, clock)
        self._servers: dict[int, Server] = {}  # by run
        self._newest: dict[tuple[str, str], Server] = {}  # by trainer
        self._replicas: dict[tuple[int, int], Replica] = {}  # by run and number
        self._lacking: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}  # by trainer: see `Lacking`

    # ── what tasks post ──────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, peer: str, message: Any, late: bool = False) -> None:
        """Do as ``peer`` says, if it is about a run that goes on here: once it is ``late`` by as much as delays say."""
        if self._slowness is not None and not late:
            self._slowness.receive(peer, message, partial(self.hear, peer, message, True))
            return
        if self._host.tracer is not None:
            self._trace.heard(peer, message)
        kind = type(message)
        if kind in _TO_REPLICAS and message.replica >= 0:
            driver: Server | Replica | None = self._replicas.get((message.run, message.replica))
        elif kind in _TO_SERVERS:
            driver = server = self._servers.get(message.run)
            if kind is Seen and (server is None or server.over):
                self._send(peer, "", Ended(message.run, -1, whole=False))  # a client that was gone has it begun late
        elif kind is Ended:
            self._end(message.run, message.whole)
            return
        else:
            self._followings.hear(peer, message)
            return
        if driver is None:
            return
        try:
            driver.hear(message)
        except Exception as error:
            self._fall(driver.role, driver.way, error)

    def _fall(self, role: BeginServer | BeginReplica, way: Way, error: BaseException) -> None:
        """End a run here in which a driver failed."""
        _log.error("%s: a run of %r failed", self._host.task, role.group, exc_info=error)
        way.fell = None  # should this fail, too
        way.post(CLIENT, Ended(role.run, -1, *name_error(error), whole=False))
        self._end(role.run, False)

    def broken(self, peer: str, epoch: str) -> None:
        """Have drivers post again what ``peer``, the client of ``epoch`` if it is one, may not have heard."""
        drivers: list[Server | Replica] = [*self._servers.values(), *self._replicas.values()]
        for driver in drivers:
            if peer != CLIENT or driver.way.epoch == epoch:
                driver.way.do(partial(driver.broken, peer))
        self._followings.broken(peer)

    def ended(self, epoch: str) -> None:
        """The client of ``epoch`` is gone: what was ordered is applied, nothing else is, but in detached runs."""
        self._trace.ended(epoch)
        self._keeping.ended(epoch)
        self._followings.ended(epoch)
        for server in list(self._servers.values()):
            if server.way.epoch == epoch and server.coordination is not None and not server.over:
                server.coordination.client_gone()
        for key, replica in list(self._replicas.items()):
            if replica.way.epoch == epoch and not replica.role.detached:
                self._replicas.pop(key).close()

    def lost(self, peer: str, birth: str = "") -> None:
        """The process of ``birth`` cannot be reached, and will not be, as which a task was met: any, if that is empty.

        It may be news of one whose place another has taken since, with which runs began.
        """
        for server in list(self._servers.values()):
            server.lose_node(peer, birth)
        for key, replica in list(self._replicas.items()):
            if replica.loses(peer, birth):  # else its client sees to it
                self._replicas.pop(key).close()

    def keeps(self, epoch: str) -> bool:
        """Whether a run goes on here that needs no client, with plans of the master of ``epoch``."""
        servers = [server.way for server in self._servers.values() if server.role.detached and not server.over]
        replicas = [replica.way for replica in self._replicas.values() if replica.role.detached]
        return any(way.origin == epoch for way in (*servers, *replicas))

    def _attach(self, run: int, epoch: str) -> Any:
        """Have the client of ``epoch`` be that of a detached run: see `Attach`."""
        server, told = self._servers.get(run), None
        replicas = [replica for (of, _), replica in self._replicas.items() if of == run]
        for replica in replicas:
            replica.way.epoch = epoch
        if server is not None:
            server.way.epoch = epoch
            told = server.version if server.coordination is None else self._undriven(run).attach()
        return told, tuple([(replica.role.replica, replica.role.incarnation) for replica in replicas])

    def _undriven(self, run: int) -> Undriven:
        """Server 0's part of a detached run, be that over or not."""
        found = self._server(run).coordination
        if not isinstance(found, Undriven):
            raise RemoteError(f"that run on {self._host.task} needs its client")
        return found

    def _end(self, run: int, whole: bool) -> None:
        server = self._servers.get(run)
        if server is not None:
            server.close(whole)
        self._end_replicas(run)

    def _end_replicas(self, run: int) -> None:
        for key in [key for key in self._replicas if key[0] == run]:
            self._replicas.pop(key).close()

    # ── what a client asks ───────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, asked: Any, epoch: str, plans: Plans) -> Any:
        """Do as the client of ``epoch`` asks; ``plans`` are those that it has registered."""
        match asked:
            case Look(container, group):
                follows = await self._followings.away(container, group, epoch)
                version, left = self._look(asked)
                return (-1 if follows else version), left, self._lacking.get((container, group), (0, ()))
            case Lacking(container, group, number, tasks):
                self._lacking[container, group] = number, tasks
                return None
            case WhoTrains(names):
                return self._who_trains(frozenset(names), epoch)
            case Settle(run, version, replicas, weights, versions):
                server = self._server(run)
                server.obey(version, replicas, weights, versions)
                await server.wait_applied()
                if server.coordination is not None and server.version > version:
                    server.coordination.made_whole(version)
                return None
            case BeginServer():
                return self._begin_server(asked, epoch, plans)
            case BeginReplica():
                return self._begin_replica(asked, epoch, plans)
            case GoOn(run, lost):
                return self._undriven(run).go_on(lost)
            case Attach(run):
                return self._attach(run, epoch)
            case Hold(run, on):
                return await self._undriven(run).stand_still(on)
            case Join(run, replica, incarnation, given, birth):
                return self._coordination(run).join(replica, incarnation, given, birth)
            case TellTrace():
                return self._trace.tell(asked, epoch)
            case Hash(names):
                return await self._hash(frozenset(names))
            case Stop(run, patient, at_once):
                return await self._stop(run, patient, at_once)
            case _ if isinstance(asked, ABOUT_FOLLOWING):
                return await self._followings.answer(asked, epoch, plans, self._plain_way, self._server)
            case _ if isinstance(asked, ABOUT_CHECKPOINTS):
                return await self._keeping.answer(
                    asked, epoch, lambda: [s for s in self._servers.values() if not s.over]
                )
            case _:
                raise InternalError(f"{type(asked).__name__} is nothing to be asked")

    def _look(self, look: Look) -> tuple[Any, ...]:
        """The version of the variables (-1 if they have none), and the fields of what is left, if there is anything."""
        versions = {self._version(look.container, name) for name in look.versions}
        if len(versions) != 1:
            raise FlowrtError(f"{look.group} is at versions {sorted(versions)} on {self._host.task}")
        server = self._newest.get((look.container, look.group))
        if server is None:
            return (*versions, ())
        left = server.left
        if not left.detached and not self._lives(server.way.epoch):
            left = replace(left, client="")
        return (*versions, left_to_data(left))

    def _who_trains(self, names: frozenset[tuple[str, str]], epoch: str) -> str:
        """Whose run with its server 0 here moves some of these variables, but that of ``epoch``; empty if nobody's."""
        for server in self._servers.values():
            role, client = server.role, server.way.epoch
            is_led = server.coordination is not None and not server.over
            goes_on = is_led and client != epoch and (role.detached or self._lives(client))
            if goes_on and not names.isdisjoint(server.moves):
                return f"{role.group!r}, by {role.client}"
        return ""

    async def _hash(self, names: frozenset[tuple[str, str]]) -> bytes:
        """A hash of the values of variables; nothing where one has none."""
        variables, known = self._host.variables, self._host.inventory()
        if not names <= known.keys():
            return b""
        async with variables.hold(names, frozenset()):
            values = [await self._host.fetch(variables.value(name, known[name])) for name in sorted(names)]
            return await self._host.lanes.run(_hash_of, values)

    def _version(self, container: str, name: str) -> int:
        value: Any = self._host.variables.find((container, name), _STEPS)
        if not (value is None or isinstance(value, np.ndarray)):
            raise GraphError(
                f"variable {name!r} is on {value.device.name}, and servers' variables lie in their hosts' memory: add "
                "/device:cpu:0 to server_device"
            )
        return -1 if value is None else int(value)

    def _begin_server(self, asked: BeginServer, epoch: str, plans: Plans) -> None:
        trainer = (asked.container, asked.group)
        before = self._newest.get(trainer)
        if before is not None and before.role.run == asked.run:
            return  # it is asked again, as the answer was lost
        if before is not None and not before.left.ended:
            raise RemoteError(
                f"{asked.group} is being trained by {before.role.client}, and one client at a time trains it: "
                "wait until that one ends, or end it"
            )
        at = {self._version(asked.container, name) for name in asked.versions}
        if -1 in at:
            lost = f"{asked.group} has no variables on {self._host.task} any more"
            raise NodeLost(f"{lost}: it was started again as training began, or they were reset")
        if at != {asked.version}:
            raise RemoteError(f"{asked.group} was trained on from version {asked.version} to {max(at)} meanwhile")
        way = self._way(asked, epoch, asked.server, len(asked.servers))
        gather = None if asked.gather < 0 else Closed(plans(asked.gather), asked.seed, f"replicas of {asked.group!r}")
        apply = Closed(plans(asked.apply), asked.seed)
        lives = lambda: self._lives(way.epoch)  # noqa: E731
        server = Server(asked, apply, gather, way, lambda whole: self._end(asked.run, whole), lives)
        if before is not None:
            self._servers.pop(before.role.run, None)
        self._newest[trainer] = self._servers[asked.run] = server

    def _begin_replica(self, asked: BeginReplica, epoch: str, plans: Plans) -> None:
        before = self._replicas.get((asked.run, asked.replica))
        if before is not None and before.role.incarnation >= asked.incarnation:
            return  # as above
        if before is not None:
            before.close()
        way = self._way(asked, epoch, asked.replica, asked.replicas)
        whose = f"replica {asked.replica} of {asked.group!r}"

        def closed(plan: int) -> Closed | None:
            return None if plan < 0 else Closed(plans(plan), asked.seed, whose)

        tower, load, differ = Closed(plans(asked.plan), asked.seed, whose), closed(asked.load), closed(asked.differ)
        rounds, feedback = None, Feedback(self._host.memory)
        if load is not None and differ is not None:
            differs = packing(differ, asked, feedback, self._host)
            rounds = Rounds(asked, tower, closed(asked.start), load, differs, closed(asked.merge), way)
        makes = packing(tower, asked, feedback, self._host, asked.told)
        replica = Replica(asked, makes, closed(asked.ask), way, feedback, rounds)
        self._replicas[asked.run, asked.replica] = replica
        replica.start()

    def _way(self, asked: BeginServer | BeginReplica, epoch: str, number: int, count: int) -> Way:
        """The way of driver ``number`` of ``count``."""
        way = self._plain_way(asked.run, asked.seed, epoch)
        way.fell = partial(self._fall, asked, way)
        if self._slowness is not None:
            way.send = partial(self._send_late, way)
            way.striking = self._slowness.of(asked.seed, number, count, way.do)
        return way

    def _plain_way(self, run: int, seed: int, epoch: str) -> Way:
        """One that nothing makes slow."""
        ends = self._tasks, self._send, self._clock
        return Way(self._host, epoch, run, seed, *ends, origin=epoch, noting=self._note_and_send)

    def _send_late(self, way: Way, peer: str, epoch: str, message: Any) -> None:
        assert self._slowness is not None
        send = partial(self._note_and_send, peer, epoch, message)
        self._slowness.send(peer, message, partial(way.do, send))

    def _note_and_send(self, peer: str, epoch: str, message: Any) -> None:
        if self._host.tracer is not None:
            self._trace.posted(peer, message)
        self._send(peer, epoch, message)

    def _server(self, run: int) -> Server:
        if run not in self._servers:
            raise RemoteError(f"{self._host.task} knows nothing of that run any more")
        return self._servers[run]

    def _coordination(self, run: int) -> Coordination:
        found = self._server(run).coordination
        if found is None or found.over.is_set():
            raise RemoteError(f"{self._host.task} does not coordinate that run, or not any more")
        return found

    async def _stop(self, run: int, patient: bool, at_once: bool) -> int:
        server = self._servers.get(run)
        ending = [replica.task for key, replica in self._replicas.items() if key[0] == run]
        coordination = None if server is None else server.coordination
        if server is not None:
            with suppress(TimeoutError):  # what it waits for of another server may be lost with that
                async with asyncio.timeout(SETTLE_SECONDS):
                    if isinstance(coordination, Undriven):
                        coordination.release()
                    if coordination is not None:
                        coordination.end()
                        if not at_once:
                            await coordination.over.wait()
                    await server.wait_applied()
        if patient:
            self._end_replicas(run)
        elif coordination is None:
            self._end(run, False)  # whether all servers are at one version, server 0 says
        else:
            coordination.give_up()
        if tasks := [task for task in ending if task is not None]:
            await asyncio.wait(tasks)
        ended = None if coordination is None else coordination.ended
        return ended.version if ended is not None and ended.whole else -1

    async def come_to_rest(self) -> None:
        """Wait until what was ordered for clients that are away is applied by all servers there, but not for long.

        Who opens a session then reads variables of one version.
        """
        away = [
            server.coordination
            for server in self._newest.values()
            if server.coordination is not None and not self._lives(server.way.epoch)
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                for coordination in away:
                    await coordination.wait_rest()

    async def leave(self) -> None:
        """Have replicas here begin nothing any more, and wait until of all that they have begun is known if it counts.

        Servers go on: what they lose with this host is for their clients to make good.
        """
        leaving = list(self._replicas.values())
        for replica in leaving:
            replica.leave()
        for replica in leaving:
            await replica.rested.wait()

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self, container: str | None) -> None:
        """Forget the runs of trainers of a container, or of all: their clients are told."""
        self._followings.reset(container)
        for trainer in [trainer for trainer in self._lacking if container in (None, trainer[0])]:
            del self._lacking[trainer]
        for server in list(self._servers.values()):
            role = server.role
            if container is None or role.container == container:
                text = f"another client has reset {role.group} on {self._host.task}, or this one"
                server.way.post(CLIENT, Ended(role.run, server.version, StepCancelled.__name__, text, whole=False))
                self._end(role.run, True)
                del self._servers[role.run]
                self._newest.pop((role.container, role.group), None)

    @property
    def going(self) -> int:
        """How many drivers go on here."""
        return len(self._replicas) + sum(not server.over for server in self._servers.values())

    async def aclose(self) -> None:
        """Cancel what is being computed, and wait for it."""
        for run in {*self._servers, *(run for run, _ in self._replicas)}:
            self._end(run, False)
        self._servers.clear()
        self._newest.clear()
        self._keeping.close()
        self._followings.close()
        await self._tasks.aclose()


def _hash_of(values: Sequence[Any]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        found.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return found.digest()


def left_to_data(left: Left) -> tuple[Any, ...]:
    """``left`` as it travels: its fields in order."""
    unseen = tuple(map(_FIELDS_OF_REPORT, left.unseen))
    fields_of_it: tuple[Any, ...] = _FIELDS_OF_LEFT(replace(left, held=tuple(left.held), unseen=unseen))
    return fields_of_it


def left_from_data(data: tuple[Any, ...]) -> Left | None:
    """What `left_to_data` wrote; None of nothing."""
    if not data:
        return None
    left = Left(*data)
    return replace(left, held=frozenset(left.held), unseen=tuple([Report(*report) for report in left.unseen]))
