"""Training that needs no client: begun by one, gone on with by the nodes alone, and attached to by later ones.

Law: of such a run the client is an onlooker. Server 0 hands out batches by identity, allows every version and sees who
is lost; a client brings back replicas whose nodes are back, reads reports, and saves checkpoints while all stands still
for a moment. To leave is not to end: that is `stop`'s to do, or the end of the batches.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, InternalError, NodeLost
from flowrt.base.plain import shortened
from flowrt.data.sources import Source
from flowrt.finishing import together
from flowrt.sched.drivers.messages import Allow, Attach, Gone, GoOn, Hold, Stop
from flowrt.sched.server.detached import DetachedTerms
from flowrt.sched.versions.opening import Going
from flowrt.train.batches import Identities
from flowrt.train.opening import look
from flowrt.train.program import births_of
from flowrt.train.run import Run

if TYPE_CHECKING:
    from flowrt.base.errors import Site
    from flowrt.sched.drivers.messages import Report
    from flowrt.sched.versions.opening import Go
    from flowrt.session.session import Session
    from flowrt.train.batches import Supply
    from flowrt.train.trainer import Trainer

_log = logging.getLogger(__name__)


class ServersSupply(Identities):
    """The supply of a detached run: server 0 hands its batches out, and nothing is handed out here."""

    def __init__(self, replicas: int) -> None:
        super().__init__(None, replicas, 0, _gives_nothing)

    def spend(self, replica: int, number: int, *, again: bool = False) -> list[int]:
        """Server 0 has seen to it, and reports which they were."""
        return []

    def fill(self) -> bool:
        """Server 0 does."""
        return False

    def confirm_lost(self, replica: int, spent: int) -> list[int]:
        """Server 0 has seen to it."""
        if self.ledger is not None:
            self.ledger.returned(replica, ())
        return []

    def join(self, replica: int, number: int) -> None:
        """Server 0 has seen to it."""


def _gives_nothing(replica: int, number: int, identities: Sequence[int], batches: Sequence[Any]) -> None:
    raise InternalError("batches of a detached run are handed out by its client")


def terms_of(
    session: str, source: Source, depth: int, steps: int, requeues: bool, compression: str = ""
) -> DetachedTerms:
    """What server 0 is told of a run over ``source``, to which sessions of that name may attach."""
    total = -1 if source.total is None else source.total
    return DetachedTerms(session, depth, steps, 0, total, requeues, compression=compression)


class DetachedRun(Run):
    """A run on ``terms`` that goes on without this client: begun by it, or attached to."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        supply: Supply,
        missed: Callable[[Sequence[Report]], None],
        reads: Mapping[str, Any],
        servers: Sequence[str],
        terms: DetachedTerms,
    ) -> None:
        super().__init__(trainer, session, supply, missed, {**reads, "detached": True}, servers)
        self._terms = tuple(terms)
        self._late.driven = False
        self._goes_on = False  # all have begun
        self._attachment = 0  # by what number server 0 knows this client
        self._entered = False  # it is known which report comes first
        self.dropped = 0  # reports that are not kept any more, of those that nobody has had

    async def _enter(self, found: Go | Going) -> None:
        while isinstance(found, Going):
            self._goes_on = True  # whatever becomes of this client
            if await self._attach(found.run):
                break
            self._goes_on = False
            await self._end(list(dict.fromkeys(self._began)))  # a server was started again, and knows nothing of it
            self._number, self._began = secrets.randbits(62), []
            found = await self._agree()
            self._missed(found.unseen)
        else:
            self._name_processes()
            await super()._enter(found)
            go_on = GoOn(self._number, tuple(sorted(self._lost)))
            for replica in await self._runner.command(self._program.servers[0], go_on):
                self.lose(replica)
        self._goes_on = self._entered = True
        self._session.rests.add(self.resting)
        early, self._early = self._early, {}
        for message in early.values():
            self.hear(self._program.servers[0], message)

    def _name_processes(self) -> None:
        """Have nodes know which processes take part, as news of those before may come late."""
        program, runner = self._program, self._runner
        tasks = tuple(dict.fromkeys((*program.servers, *program.replicas)))
        named = tuple(zip(tasks, births_of(runner, tasks), strict=True))
        self._terms = tuple(DetachedTerms(*self._terms)._replace(births=named))
        self._reads = {**self._reads, "births": births_of(runner, program.servers)}

    async def _attach(self, run: int) -> bool:
        """Be the client of a run that goes on, or has ended meanwhile; answers whether all servers know it."""
        program = self._program
        self._number = run
        self._name_processes()
        self._began = [task for task in (*program.servers, *program.replicas) if task not in self._runner.lost]
        there: dict[str, Mapping[int, int]] = {}  # by task that answers: which replicas go on, and their incarnations

        async def ask(task: str) -> None:
            with suppress(NodeLost, TimeoutError):  # which is seen to afterwards
                answer = await self._while_there(self._runner.command(task, Attach(run)), {task})
                there[task] = dict(answer[1])

        await together(ask(task) for task in set(self._began).difference(program.servers))
        answers = {task: await self._runner.command(task, Attach(run)) for task in reversed(program.servers)}
        there.update({task: dict(replicas) for task, (_, replicas) in answers.items()})
        if None in [server for server, _ in answers.values()]:
            return False
        told, _ = answers[program.servers[0]]
        self._attachment, self.version, self.dropped, incarnations, lost, packed, self.begun = told
        if packed != self._trainer.compression:
            raise GraphError(
                f"{self._trainer.name}: updates of the run that goes on travel as compression={packed or None!r}, not "
                f"{self._trainer.compression or None!r}; attach by a trainer with the same"
            )
        self._seen, self._incarnations = self.version, list(incarnations) or self._incarnations
        self._lost.update(lost)
        of_replicas = zip(program.replicas, incarnations, strict=False)  # without incarnations, where it is over
        for replica, (task, incarnation) in enumerate(of_replicas):
            if there.get(task, {replica: incarnation}).get(replica, -1) < incarnation:
                self.lose(replica)  # its node was started again, and server 0 need not know
        if self.dropped:
            _log.warning(
                "%s: the reports of %d steps before step %d are not kept any more: too many were made while nobody "
                "was attached",
                self._trainer.name,
                self.dropped,
                self.version + 1,
            )
        return True

    def _take_in(self, message: Any) -> None:
        """As that of others; a replica that only server 0 took for lost is begun again, too."""
        super()._take_in(message)
        match message:
            case Gone(_, replica) if not self._entered:
                self._early[replica] = message  # which of its incarnations goes on, the answer to `Attach` says
            case Gone(_, replica, incarnation) if incarnation == self._incarnations[replica]:
                self.lose(replica)
                if self._watching:  # else it is over here, and nobody would wait for it
                    for each in self._deviceless.able({replica}.difference(self._joining)):
                        self._joining[each] = asyncio.ensure_future(self._join(each))

    def _allow(self) -> None:
        """Say which reports were had: versions need no permission."""
        self._post(0, Allow(self._number, self._attachment, self._seen))

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """All servers stay at one version while the block runs."""
        first = self._program.servers[0]
        try:
            await self._runner.command(first, Hold(self._number, True))
            yield
        finally:
            await self._runner.command(first, Hold(self._number, False))

    async def stop(self) -> None:
        """Leave the run to itself, unless it has ended, or cannot go on."""
        self._session.rests.remove(self.resting)
        had_its_end = self._ended is not None and self._ended.version <= self._seen  # and so all its reports
        if not self._goes_on or had_its_end or self.lost_servers:
            await super().stop()
            return
        await self.rest()
        if self._entered:
            self._allow()  # who comes next has the reports after this one's
        self._hearing.close()


def name_of_detached(trainer: Trainer, session: Session, batches: Any, site: Site) -> str:
    """The name by which later sessions attach to what ``session`` begins. Raises `GraphError` where none can."""
    if not isinstance(batches, Source):
        raise GraphError(
            f"{site}: detached=True needs a source that nodes read themselves, such as fr.data.arrays(...), not "
            f"{shortened(batches)}"
        )
    if trainer.copies > 1:
        raise GraphError(f"{site}: detached=True is for copies=1: it takes a client to have another copy take over")
    if session._cluster is None:
        raise GraphError(f"{site}: detached=True is for a cluster's nodes; this session is of this process alone")
    if not session._name:
        raise GraphError(
            f"{site}: detached=True needs a session with a name, by which a later one attaches: "
            "fr.Session(graph, cluster=..., name='...')"
        )
    return session._name


async def stop(trainer: Trainer, session: Session) -> bool:
    """End a detached run of ``trainer``, whoever's; answers whether there was one. What was ordered, all apply."""
    runner = session._open_here()
    program = await trainer.program(session)
    left = (await look(runner, program))[0].left
    if left is None or not left.detached or not left.client:
        return False
    lost = runner.lost
    tasks = [task for task in dict.fromkeys((*program.servers, *program.replicas)) if task not in lost]
    for task in tasks[:1]:
        await runner.command(task, Stop(left.run))
    await together(runner.command(task, Stop(left.run)) for task in tasks[1:])
    return True
