"""One run of a trainer on the nodes, as its client drives it: begun, told how far to go and who is lost, and ended.

Law: a run is known by its number, and ends for good. What outlives it, where its batches come from and what becomes of
its reports, is `steps`' business. What counts, and when variables move, is the nodes'; nothing here is between a
version and the next one but the permission to go on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from flowrt.base.errors import ClosedError, FlowrtError, NodeLost, RemoteError, as_error
from flowrt.finishing import together
from flowrt.sched.drivers.messages import Allow, Batch, Doing, Draw, Ended, Gone, Join, Lost, Pending, Report, Stop
from flowrt.sched.policies import policy_to_data
from flowrt.sched.versions.opening import Go
from flowrt.train.changes import Changes
from flowrt.train.copies import copies_known
from flowrt.train.deviceless import Deviceless, Recovering
from flowrt.train.enough import Late, explained, tell_silent, wait_for_replicas
from flowrt.train.opening import agree, who
from flowrt.train.program import Program, away, births_of, where_lost
from flowrt.train.watching import Watcher

if TYPE_CHECKING:
    from flowrt.sched.policies import Policy
    from flowrt.sched.versions.opening import Going
    from flowrt.session.session import Session
    from flowrt.train.batches import Supply, Values
    from flowrt.train.trainer import Trainer

AGAIN = 0.2  # seconds between two tries to begin a replica again
AT_ONCE_SECONDS = 1.0  # how long another run waits for the end of one that has lost a server
SETTLE_SECONDS = 10.0  # how long an iteration that is left waits for the nodes
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Run:
    """A run of ``trainer``, which is given batches of ``supply``: a listener of its nodes.

    ``servers`` are the tasks that its servers are on, as far as that is known before it begins. Then ``missed`` is told
    the reports that the client of the run before may not have had. ``reads`` are fields of `BeginReplica`: what
    replicas read their batches of, where they do so themselves.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        supply: Supply,
        missed: Callable[[Sequence[Report]], None] = lambda reports: None,
        reads: Mapping[str, Any] = MappingProxyType({}),
        servers: Sequence[str] = (),
    ) -> None:
        self._reads, self._missed = reads, missed
        self._terms: tuple[Any, ...] = ()  # `Terms`, if it is detached: the first is by what name one attaches to it
        self._trainer, self._session, self._supply = trainer, session, supply
        self.version = self.begun = 0  # that it began at for this client, and whoever was that then
        self._runner = session._open_here()
        self._each = trainer.local_steps  # batches of a replica that make one update
        self._number = secrets.randbits(62)
        self._began: list[str] = []  # the tasks that were told to take part
        self._reports: deque[Report] = deque()
        self._news = asyncio.Event()  # a report came, or the end
        self._changes = Changes(self._runner, self._news)
        self._ended: Ended | None = None
        self._error: BaseException | None = None  # why there will be no more reports than have come
        self._watcher: Watcher | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._lost: set[int] = set()
        self._unbegun = set(range(trainer.replicas))
        self._incarnations = [0] * trainer.replicas  # how often each was begun again
        self._early: dict[int, Gone] = {}  # by replica: what was said of a loss before it was known to have begun again
        self._losses: list[int] = []  # how often the task of each had been lost when it was begun
        self._losses_before = dict(self._runner.losses)
        self.copies = copies_known(session, trainer) if trainer.copies > 1 else None
        self._left_out: frozenset[str] = frozenset()  # servers that were suspect, and whose copies go on
        self._gone: frozenset[str] = frozenset()  # tasks that have not what they should, beside which others do
        whole = () if self.copies is None else self.copies.whole
        self.servers = tuple(servers) or (trainer.servers if trainer.copies == 1 else whole)
        self._hearing = ExitStack()
        self.policy_at: Callable[[int], Policy] = lambda version: trainer.policy
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._deviceless, self._late = Deviceless(trainer, self._runner), Late(trainer, self._runner, self.fail)
        self._recovering = Recovering(trainer, self._excuse)
        self._counted = False  # the servers were told how many batches there are
        self.ended_at = -1  # the version that all servers are at, once it is over and that is known
        self._seen = 0  # versions before this one are reported
        self._allowed = 0  # versions before this one may be applied

    # ── its begin ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self) -> None:
        """Have the nodes begin, at the version that all servers are at."""
        trainer, runner = self._trainer, self._runner
        self._hearing.enter_context(runner.listening(self))
        self._watching.append(asyncio.ensure_future(tell_silent(trainer, runner)))
        self._program = await self._make_program()
        self.servers = self._program.servers
        found = await self._agree()
        if self.copies is not None and isinstance(found, Go):
            self.copies.agreed(found.version, self._gone)
        self._missed(found.unseen)
        if self.copies is not None:
            self._gone = await self.copies.make_whole(self._gone)
            self._check_servers("training cannot begin")
            self._program = await trainer.program(self._session, self._gone)
            self.servers = self._program.servers
            self._check_servers("training cannot begin")
            self.copies.begins(self._number)
        await self._enter(found)
        if self.copies is not None:
            self.copies.began()
        self._watcher = Watcher(
            trainer.name, trainer.tally.attribution, self._program, runner, self._number, self._going, self._supply
        )
        self._watching += [asyncio.ensure_future(work) for work in (self._watch(), self._watcher.watch())]

    async def _agree(self) -> Go | Going:
        """What all servers agree on; they may wait for one that is lost meanwhile, so that ends it."""
        agreeing = agree(self._runner, self._program, self._trainer.name, *self._terms[:1], alone=bool(self._gone))
        return await self._changes.unless(agreeing, lambda: self._check_servers("training cannot begin"))

    async def _enter(self, found: Go | Going) -> None:
        """Begin where an opening says."""
        assert isinstance(found, Go)
        version = self.version = self.begun = self._seen = found.version
        births = {"births": births_of(self._runner, self._program.servers)}
        about = {"client": who(self._session), "policy": policy_to_data(self.policy_at(version)), **births}
        for task, begin in zip(self._program.servers, self._program.begin_servers, strict=True):
            await self._command(task, begin(run=self._number, version=version, detached=self._terms, **about))
        await together(self._begin_replica(replica) for replica in range(self._trainer.replicas))

    async def _make_program(self) -> Program:
        """The trainer on the nodes that are there; begun anew where one is lost meanwhile, or answers nothing."""
        if self._trainer.floor:
            self._runner.expect(self._trainer.nodes)
        while True:
            self._check_servers("training cannot begin")
            await wait_for_replicas(self._trainer, self._runner, self._other_nodes)
            lost, losses = self._runner.lost, dict(self._runner.losses)
            there = frozenset(self._trainer.nodes) - away(self._runner, self._trainer)
            try:
                program = await self._while_there(self._find_program(), there)
            except TimeoutError:
                continue
            except NodeLost:
                if self._runner.lost == lost:
                    raise
            else:
                self._losses = [losses.get(task, 0) for task in program.replicas]
                return program

    async def _find_program(self) -> Program:
        if self._trainer.copies > 1:
            self.copies = await self._trainer.copies_on(self._session)
            self._gone = await self.copies.find_gone()
        return await self._trainer.program(self._session, self._gone)

    async def _begin_replica(self, replica: int) -> None:
        task, begin = self._program.replicas[replica], self._program.begin_replicas[replica]
        if begin is None:
            self.lose(replica)
            return
        try:
            message = begin(run=self._number, version=self.version, **self._reads)
            await self._changes.unless(self._command(task, message), lambda: self._is_done_without(replica))
        except TimeoutError:
            self.lose(replica)
        except RemoteError:
            if task not in self._runner.lost:
                raise
            self.lose(replica)
        else:
            self._unbegun.discard(replica)
            self._news.set()
            self._trainer.tally.join(replica)

    def _is_done_without(self, replica: int) -> bool:
        """Whether a run begins without a replica: its node is lost, or answers nothing, and enough others have begun.

        Who seems to be there may cease to answer before it begins; then whoever answers first is to be had.
        """
        task, trainer = self._program.replicas[replica], self._trainer
        enough = trainer.replicas - len(self._unbegun) >= trainer.least
        return task in self._runner.lost or (enough and task in self._runner.suspects)

    async def _while_there(self, work: Coroutine[Any, Any, T], tasks: Collection[str]) -> T:
        """What ``work`` answers, which is cancelled once one of ``tasks`` is `away`; then raises `TimeoutError`."""
        return await self._changes.unless(work, lambda: not away(self._runner, self._trainer).isdisjoint(tasks))

    async def _command(self, task: str, message: Any) -> None:
        self._began.append(task)
        await self._runner.command(task, message)

    # ── on the way ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def next(self, ahead: int) -> Report | None:
        """The report of the next version, of which ``ahead`` beyond it are allowed; None once too few batches are left.

        Raises why the run has ended, or has to.
        """
        self._allowed = self._seen + 1 + ahead
        if self.copies is not None:
            self.copies.moving = ahead > 0
        self._allow()
        self._supply.begin(self._news.set)
        more = self._fill()
        while not self._reports:
            if not self._counted and self._supply.over:
                self._allow()
            if self._error is not None:
                raise self._error
            if self._ended is not None and self._ended.version <= self._seen:  # else a report is still to come again
                self._finish(self._ended)
                return None
            self._news.clear()
            await (asyncio.sleep(0) if more else self._news.wait())
            more = more and self._fill()
        self._seen += 1
        return self._reports.popleft()

    def _fill(self, before: Callable[..., object] = lambda: None, *given: int) -> bool:
        try:
            before(*given)
            return self._supply.fill()
        except Exception as error:
            self.fail(error)
            return False

    def _allow(self) -> None:
        """Let the variables move to what was asked for, and beyond."""
        leaving = not self._runner.leaving.isdisjoint(self._program.replicas)  # then others hold batches of who comes
        self._counted = self._supply.over and not leaving and not self._reports  # which may say: use some again
        totals = tuple([given // self._each for given in self._supply.given]) if self._counted else None
        self._post(0, Allow(self._number, self._allowed, self._seen, totals))

    @property
    def number(self) -> int:
        """By which all messages know it."""
        return self._number

    def may_grow(self) -> bool:
        """Whether a server that was lost may take part again, in another run: see `Copies.bring_back`."""
        return self.copies is not None and self.copies.bring_back()

    @property
    def left(self) -> tuple[Report, ...]:
        """The reports that have come, and were not taken."""
        return tuple(self._reports)

    @property
    def _came(self) -> int:
        """The version whose report comes next."""
        return self._seen + len(self._reports)

    def _post(self, server: int, message: Any) -> None:
        self._runner.post(self._program.servers[server], message)

    def give(self, replica: int, number: int, identities: Sequence[int], batches: Sequence[Values]) -> None:
        """Send a replica batches, of which the first has that number."""
        if self._reads:
            message: Any = Draw(self._number, replica, number, tuple(identities))
        else:
            message = Batch(self._number, replica, number, batches[0], tuple(batches[1:]))
        self._runner.post(self._program.replicas[replica], message)

    def hear(self, peer: str, message: Any) -> None:
        """Take in what nodes say of this run; what fails of that ends it."""
        try:
            if message.run == self._number:
                self._take_in(message)
        except Exception as error:
            self.fail(error)

    def _take_in(self, message: Any) -> None:
        match message:
            case Report(_, version) if version == self._came:
                self._reports.append(message)
                self._news.set()
                self._late.look(self._came)
                self._recovering.hear(message)
                if self._watcher is not None:
                    self._watcher.hear(message)
            case Gone(_, replica, incarnation) if incarnation > self._incarnations[replica]:
                self._early[replica] = message
            case Gone(_, replica, incarnation, spent, why) if incarnation == self._incarnations[replica]:
                if why:
                    self._deviceless.lose(replica, why)
                    self.lose(replica)
                self._hand_on(replica, spent)
            case Doing() | Pending() if self._watcher is not None:
                self._watcher.hear(message)
            case Ended():
                self._ended = self._ended or message
                self._news.set()

    def broken(self, peer: str, epoch: str) -> None:
        """Post again what ``peer`` may not have heard."""
        if not self._began:
            return
        if peer == self._program.servers[0]:
            self._allow()
            for replica in self._lost:
                self._post(0, Lost(self._number, replica, self._incarnations[replica]))
        for replica in {*where_lost(self._program.replicas, frozenset({peer}))} - self._lost:
            self._fill(self._supply.give_again, replica)

    def ended(self, epoch: str) -> None:
        """The session's master has ended."""
        self.fail(ClosedError("the session was closed"))

    # ── who is gone ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Tell server 0 who is lost, begin those again who are back, give suspects no batches; end with a server."""
        try:
            while self._error is None:
                lost, suspects = self._runner.lost, self._runner.suspects
                self._excuse()
                gone, losses = where_lost(self._program.replicas, lost), self._runner.losses
                for replica, task in enumerate(self._program.replicas):
                    if replica in gone or losses.get(task, 0) > self._losses[replica]:
                        self.lose(replica)
                absent = where_lost(self._program.replicas, away(self._runner, self._trainer))
                for replica in self._deviceless.able(self._lost.difference(absent, self._joining)):
                    self._joining[replica] = asyncio.ensure_future(self._join(replica))
                self._check_servers(f"training stopped at step {self._came + 1}")
                self._late.look(self._came)
                await self._runner.wait_changed(lost, suspects)
        except Exception as error:
            self.fail(error)

    def _excuse(self) -> None:
        silent = where_lost(self._program.replicas, self._runner.suspects)
        rests = {*silent, *self._recovering.resting(self._lost.union(silent))}
        for replica in range(len(self._program.replicas)):
            (self._supply.excuse if replica in rests else self._supply.include)(replica)
        self._fill()

    def _going(self) -> set[int]:
        """The replicas that are lost, or will be as their nodes were told to end, or are given nothing for a while."""
        return self._lost.union(where_lost(self._program.replicas, self._runner.leaving), self._recovering.rest)

    def lose(self, replica: int) -> None:
        """Go on without a replica."""
        if replica in self._lost:
            return
        self._lost.add(replica)
        self._supply.lose(replica)
        self._excuse()
        self._counted = False
        self._trainer.tally.lose(replica, self._trainer.nodes[replica])
        self._post(0, Lost(self._number, replica, self._incarnations[replica]))
        self._news.set()

    def _hand_on(self, replica: int, spent: int) -> None:
        """Others are to have what a lost replica had not spent."""
        self._fill(self._supply.confirm_lost, replica, spent * self._each)
        self._news.set()

    async def _join(self, replica: int) -> None:
        """Have a replica take part again whose node is back, or, should that be lost again, leave it for later."""
        task, able = self._program.replicas[replica], self._deviceless.able
        try:
            while able(self._lost & {replica}) and task not in self._runner.lost and not self._supply.over:
                try:
                    await self._begin_again(replica)
                except RemoteError as error:
                    _log.warning("replica %d of %s could not be begun again: %s", replica, self._trainer.name, error)
                    self._post(0, Lost(self._number, replica, self._incarnations[replica]))
                    await asyncio.sleep(AGAIN)
        except Exception as error:
            self.fail(error)
        finally:
            del self._joining[replica]

    async def _begin_again(self, replica: int) -> None:
        begin = self._program.begin_replicas[replica]
        if begin is None:  # its node was not there when the run began
            begin = (await self._trainer.program(self._session, self._gone)).begin_replicas[replica]
            if begin is None:
                raise NodeLost(f"replica {replica} was lost again")
        task, incarnation = self._program.replicas[replica], self._incarnations[replica] + 1
        given, losses = -(-self._supply.given[replica] // self._each), self._runner.losses.get(task, 0)
        try:
            join = Join(self._number, replica, incarnation, given, self._runner.births.get(task, ""))
            version, spent, given = await self._runner.command(self._program.servers[0], join)
            self._hand_on(replica, spent)
            again = begin(run=self._number, version=version, incarnation=incarnation, given=given, **self._reads)
            await self._command(task, again)
        finally:
            self._incarnations[replica] = incarnation  # not before: what is said of a loss is of the one before
            early = self._early.pop(replica, None)
            self._counted = False  # server 0, which has it begin anew, is to be told again how many batches it has
        if self._runner.losses.get(task, 0) > losses:
            raise NodeLost(f"{task} was lost again")
        self._losses[replica] = losses
        self._lost.discard(replica)
        self._late.note(replica, version)
        self._supply.join(replica, given * self._each)
        self._trainer.tally.join(replica)
        self._excuse()
        if early is not None:
            self.hear(self._program.servers[0], early)

    async def _other_nodes(self) -> None:
        """Wait until other nodes are lost; raises `NodeLost` where servers are, and why this is to end, if it is."""
        await self._changes.wait()
        if self._error is not None:
            raise self._error
        self._check_servers("training cannot begin")

    @property
    def lost_servers(self) -> tuple[str, ...]:
        """The servers that are lost, or were since this was made: what they held is gone; or are left out."""
        lost, losses, before = self._runner.lost | self._left_out, self._runner.losses, self._losses_before
        return tuple(task for task in self.servers if task in lost or losses.get(task, 0) > before.get(task, 0))

    def _check_servers(self, what: str) -> None:
        if self.copies is not None:
            self._left_out |= self.copies.frozen
        if gone := self.lost_servers:
            why = [str(self._runner.why_lost(task)) for task in gone if task in self._runner.lost]
            raise NodeLost(": ".join([f"{what}: lost the parameter servers {', '.join(gone)}", *why]))

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, error: BaseException) -> None:
        """Have `next` raise ``error``, after the reports that have come."""
        if self._error is None:
            self._error = error
        self._news.set()

    def too_few(self, error: FlowrtError) -> bool:
        """Whether ``error`` is that replicas are wanting, and others may come, or are there for the next version."""
        ended = self._ended is not None and self._ended.error == NodeLost.__name__ and isinstance(error, RemoteError)
        return error is self._late.why or (ended and (bool(self._trainer.floor) or self._late.matter(self._came)))

    def _finish(self, ended: Ended) -> None:
        """Raise why the run has ended, if it is not that there are no more batches."""
        if ended.error:
            error = as_error(ended.error, ended.text)
            raise explained(self._trainer, error, sorted(self._lost), max(ended.version, self._seen))
        if self._supply.error is not None:
            raise self._supply.error

    async def rest(self) -> None:
        """Watch no more who is there, and hand nothing out."""
        self._supply.rest()
        self._recovering.close()
        working, self._watching = [*self._watching, *self._joining.values()], []
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working)

    async def stop(self) -> None:
        """End the run on all nodes that are there; what was ordered, all servers apply, if not at once then later."""
        await self.rest()
        lost = self._runner.lost | self._left_out | self._runner.suspects.difference(self.servers)  # told by server 0
        await self._end([task for task in dict.fromkeys(self._began) if task not in lost])
        await asyncio.sleep(0)  # for what was said at the end to be heard
        self._hearing.close()
        if self.copies is not None:
            self.copies.moving = False
            for task in sorted(self._left_out.intersection(self._began)):
                self.copies.tell_to_end(task, self._number)

    async def _end(self, tasks: list[str]) -> None:
        """Have server 0 see to it that all apply what it ordered; where it does not, all end by themselves, at once."""
        stop = Stop(self._number, at_once=True)
        with suppress(FlowrtError, TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                if not self.lost_servers and tasks and tasks[0] == self._program.servers[0]:
                    ending = self._runner.command(tasks[0], Stop(self._number, patient=True))
                    self.ended_at = await self._changes.unless(ending, lambda: self._check_servers("training ends"))
                    if self.ended_at >= 0 or not self.lost_servers:
                        stop, tasks = Stop(self._number, patient=self.ended_at < 0), tasks[1:]
        with suppress(FlowrtError, TimeoutError):
            async with asyncio.timeout(AT_ONCE_SECONDS if stop.at_once else SETTLE_SECONDS):
                await together(self._stop_there(task, stop) for task in tasks)

    async def _stop_there(self, task: str, stop: Stop) -> None:
        """End the run on a node; not on a replica's that answers nothing, which server 0 tells too."""
        work = self._runner.command(task, stop)
        if task in self._program.servers:
            await work
            return
        with suppress(TimeoutError):
            await self._changes.unless(work, lambda: task in self._runner.suspects)
