"""The client of a run: has the nodes begin it, streams batches to them, allows versions, and yields their reports.

Law: what counts, and when variables move, is the nodes' business; they are only told how far they may go. Nothing here
is between a version and the next one but that permission. An iteration that is left ends its run on all nodes and waits
for that; what the servers had begun to apply, all apply.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from math import nan
from typing import TYPE_CHECKING, Any, NoReturn

from flowrt.errors import ClosedError, FlowrtError, GraphError, NodeLost, RemoteError, as_error, user_site
from flowrt.finishing import to_the_end
from flowrt.sched.iteration.coordination import OUTCOMES
from flowrt.sched.iteration.messages import Allow, Batch, Doing, Ended, Join, Lost, Pending, Report, Stop
from flowrt.sched.ledger import Outcome
from flowrt.tracebacks import shorten
from flowrt.train.batches import Batches, Supply, Values
from flowrt.train.opening import agree
from flowrt.train.program import Program, where_lost
from flowrt.train.times import Clocks, Times, times_of
from flowrt.train.watching import Watcher
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.session import Session
    from flowrt.train.diagnosis import Slow
    from flowrt.train.replicated import Replicated

BEYOND = 2  # batches of a replica, beside those in use and for steps ahead: one that waits, one on its way
_log = logging.getLogger(__name__)
AGAIN = 0.2  # seconds between two tries to begin a replica again
SETTLE_SECONDS = 10.0  # how long an iteration that is left waits for the nodes


@valueclass
class StepReport:
    """One step of training: ``step`` updates have been applied so far, counted from 1.

    ``kept``, ``late``, ``refused`` (not finite) and ``lost`` are replicas, by what became of their updates. ``loss``
    and ``metrics`` are means over the kept ones; ``seconds`` is how long the step took, without the time in which it
    was ready and not asked for. ``why`` is the policy's reason to keep these. ``staleness`` says of each of ``kept``
    how many versions older than the one that it moved were the values that it was computed from. ``noise_scale`` is the
    gradient noise scale so far, in updates of a replica: beyond so many, more of them make a step little better
    (McCandlish et al., arXiv 1812.06162); NaN where the policy does not measure it, or nothing was measured yet.
    ``slow`` is who is slow at the time, and why; ``times`` is how the replicas' steps divided, of those that server 0
    has heard of since the report before.
    """

    step: int
    loss: float
    metrics: Mapping[str, Any]
    kept: tuple[int, ...]
    late: tuple[int, ...]
    lost: tuple[int, ...]
    refused: tuple[int, ...]
    seconds: float
    why: str = ""
    staleness: tuple[int, ...] = ()
    noise_scale: float = nan
    slow: tuple[Slow, ...] = ()
    measured: tuple[Report, Clocks] | None = field(default=None, repr=False, compare=False)

    @property
    def times(self) -> Mapping[int, Times]:
        """By replica, how its step divided; where it was late or cut off, of the version that it was at."""
        return {} if self.measured is None else times_of(*self.measured)


class Reports(AsyncGenerator[StepReport, None]):
    """What `Replicated.steps` answers: an asynchronous iterator of reports, and nothing else."""

    def __init__(self, reports: AsyncGenerator[StepReport, None]) -> None:
        self._reports = reports

    def __anext__(self) -> Coroutine[Any, Any, StepReport]:
        return self._reports.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, StepReport]:
        """Of asynchronous generators; see `__anext__`."""
        return self._reports.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, StepReport]:
        """Of asynchronous generators: raise an error where the iteration stands."""
        return self._reports.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Cancel what runs, and wait for it."""
        return self._reports.aclose()

    def __iter__(self) -> NoReturn:
        raise GraphError(f"{user_site()}: write `async for report in trainer.steps(session, batches)`")


class Steps:
    """One iteration over `Replicated.steps`: a listener of its run's nodes."""

    def __init__(self, trainer: Replicated, session: Session, ahead: int) -> None:
        self._trainer = trainer
        self._session = session
        self._each = trainer.local_steps  # batches of a replica that make one update
        self._ahead = 0 if session.checkpoints is not None and session.checkpoints.saves_by_itself else ahead
        self._run = secrets.randbits(62)
        self._began: list[str] = []  # the tasks that were told to take part
        self._reports: deque[Report] = deque()
        self._news = asyncio.Event()  # a report came, or the end
        self._ended: Ended | None = None
        self._error: BaseException | None = None  # why there will be no more reports than have come
        self._stopping: asyncio.Task[None] | None = None
        self._watcher: Watcher | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._lost: set[int] = set()
        self._turns = [0] * trainer.replicas  # how often each was begun again
        self._losses: list[int] = []  # how often the task of each had been lost when it was begun
        self._joining: dict[int, asyncio.Task[None]] = {}
        self._counted = False  # the servers were told how many batches there are
        self._kept = 0

    async def run(
        self, batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncGenerator[StepReport, None]:
        """The reports, one per step."""
        session, trainer = self._session, self._trainer
        try:
            runner = self._runner = session._open_here()
            inputs, depth = [tower.inputs for tower in trainer.towers], (1 + self._ahead) * self._each + BEYOND
            self._supply = Supply(Batches(batches, trainer.inputs), inputs, depth, self._give, runner.copy)
            while trainer in session._iterating:
                await session._iterating[trainer]()
            session._iterating[trainer] = self.end
            try:
                with runner.listening(self):
                    await self._begin()
                    while (report := await self._next()) is not None:
                        yield report
            finally:
                await to_the_end(self._stop())
        except BaseException as error:
            shorten(error)
            raise

    async def end(self) -> None:
        """End the iteration: its session closes, or another one begins on the same trainer."""
        self._fail(ClosedError("training was ended: its session was closed, or began to train the same variables anew"))
        await to_the_end(self._stop())

    # ── its begin ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _begin(self) -> None:
        """Have the nodes begin the run, at the version that all servers are at."""
        trainer, runner = self._trainer, self._runner
        program = self._program = await self._make_program()
        self._check_servers(program.servers, "training cannot begin")
        version = self._first = self._seen = await agree(runner, program, trainer.name)
        who = f"{self._client()}, process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%X')}"
        for task, begin in zip(program.servers, program.begin_servers, strict=True):
            await self._command(task, begin(run=self._run, version=version, client=who))
        await together(self._begin_replica(replica) for replica in range(trainer.replicas))
        self._watcher = Watcher(
            trainer.name,
            trainer.tally.attribution,
            program,
            runner,
            self._run,
            lambda: self._lost,
            self._supply,
        )
        self._watching = [asyncio.ensure_future(work) for work in (self._watch(), self._watcher.watch())]

    async def _make_program(self) -> Program:
        """The trainer on the nodes that are there; begun anew where one is lost meanwhile."""
        while True:
            self._check_nodes()
            lost, losses = self._runner.lost, dict(self._runner.losses)
            try:
                program = await self._trainer.program(self._session)
            except NodeLost:
                if self._runner.lost == lost:
                    raise
            else:
                self._losses = [losses.get(task, 0) for task in program.replicas]
                return program

    def _client(self) -> str:
        name = self._session._name
        return f"session {name!r}" if name else "a session without a name"

    async def _begin_replica(self, replica: int) -> None:
        task, begin = self._program.replicas[replica], self._program.begin_replicas[replica]
        if begin is None:
            self._lose(replica)
            return
        try:
            await self._command(task, begin(run=self._run, version=self._first))
        except RemoteError:
            if task not in self._runner.lost:
                raise
            self._lose(replica)

    async def _command(self, task: str, message: Any) -> None:
        self._began.append(task)
        await self._runner.command(task, message)

    # ── on the way ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _next(self) -> StepReport | None:
        """The next report; None when too few batches are left for another step."""
        self._allow()
        self._supply.fill(self._news.set)
        while not self._reports:
            if self._supply.over and not self._counted:
                self._allow()
            if self._error is not None:
                raise self._error
            if self._ended is not None and self._ended.version <= self._seen:  # else a report is still to come again
                self._finish(self._ended)
                return None
            self._news.clear()
            await self._news.wait()
        report = self._report(self._reports.popleft())
        if self._session.checkpoints is not None:
            await self._session.checkpoints.after_step(self._session)
        return report

    def _allow(self) -> None:
        """Let the variables move to what was asked for, and beyond."""
        self._counted = self._supply.over
        totals = tuple([given // self._each for given in self._supply.given]) if self._counted else None
        came = self._seen + len(self._reports)
        self._post(0, Allow(self._run, self._seen + 1 + self._ahead, came, totals))

    def _post(self, server: int, message: Any) -> None:
        self._runner.post(self._program.servers[server], message)

    def _give(self, replica: int, number: int, batches: Sequence[Values]) -> None:
        first, *more = batches
        self._runner.post(self._program.replicas[replica], Batch(self._run, replica, number, first, tuple(more)))

    def hear(self, peer: str, message: Any) -> None:
        """Take in what server 0 says of this run."""
        if message.run != self._run:
            return
        match message:
            case Report(_, version) if version == self._seen + len(self._reports):
                self._reports.append(message)
                self._news.set()
                if self._watcher is not None:
                    self._watcher.hear(message)
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
                self._post(0, Lost(self._run, replica, self._turns[replica]))
        for replica, task in enumerate(self._program.replicas):
            if task == peer and replica not in self._lost:
                self._supply.give_again(replica)

    def ended(self, epoch: str) -> None:
        """The session's master has ended."""
        self._fail(ClosedError("the session was closed"))

    def _report(self, report: Report) -> StepReport:
        self._seen = report.version + 1
        outcomes = {replica: OUTCOMES[code] for replica, _, code, _, _ in report.receipts}
        stale = {replica: staleness for replica, *_, staleness in report.receipts}
        for replica, batch, _, seconds, _ in report.receipts:
            self._supply.spend(replica, batch * self._each)
            if seconds >= 0:
                self._trainer.tally.took(replica, seconds)
        kept = _those(outcomes, Outcome.KEPT)
        self._trainer.tally.count(outcomes, {replica: stale[replica] for replica in kept})
        loss, *metrics = report.told
        self._kept += len(kept)
        return StepReport(
            report.version + 1,
            loss,
            dict(zip(self._trainer.towers[0].metrics, metrics, strict=True)),
            kept,
            _those(outcomes, Outcome.LATE),
            _those(outcomes, Outcome.LOST),
            _those(outcomes, Outcome.REFUSED),
            report.seconds,
            report.why,
            tuple(stale[replica] for replica in kept),
            report.noise_scale,
            self._trainer.tally.attribution.slow,
            (report, self._trainer.tally.attribution.clocks),
        )

    # ── who is gone ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Tell server 0 of replicas whose nodes are lost, begin those again whose nodes are back; end with a server."""
        while self._error is None:
            lost = self._runner.lost
            gone, losses = where_lost(self._program.replicas, lost), self._runner.losses
            for replica, task in enumerate(self._program.replicas):
                if replica in gone or losses.get(task, 0) > self._losses[replica]:
                    self._lose(replica)
            for replica in self._lost.difference(gone, self._joining):
                self._joining[replica] = asyncio.ensure_future(self._join(replica))
            try:
                stopped = f"training stopped at step {self._seen + len(self._reports) + 1}"
                self._check_servers(self._program.servers, stopped)
                await self._runner.wait_lost(lost)
            except FlowrtError as error:
                self._fail(error)

    def _lose(self, replica: int) -> None:
        if replica in self._lost:
            return
        self._lost.add(replica)
        self._supply.lose(replica)
        self._trainer.tally.lose(replica, self._trainer.nodes[replica])
        self._post(0, Lost(self._run, replica, self._turns[replica]))
        self._news.set()

    async def _join(self, replica: int) -> None:
        """Have a replica take part again whose node is back, or, should that be lost again, leave it for later."""
        task = self._program.replicas[replica]
        try:
            while replica in self._lost and task not in self._runner.lost and not self._supply.over:
                try:
                    await self._begin_again(replica)
                except RemoteError as error:
                    _log.warning("replica %d of %s could not be begun again: %s", replica, self._trainer.name, error)
                    self._post(0, Lost(self._run, replica, self._turns[replica]))
                    await asyncio.sleep(AGAIN)
        except FlowrtError as error:
            self._fail(error)
        finally:
            del self._joining[replica]

    async def _begin_again(self, replica: int) -> None:
        begin = self._program.begin_replicas[replica]
        if begin is None:  # its node was not there when the run began
            begin = (await self._trainer.program(self._session)).begin_replicas[replica]
            if begin is None:
                raise NodeLost(f"replica {replica} was lost again")
        task, turn = self._program.replicas[replica], self._turns[replica] + 1
        given, losses = -(-self._supply.given[replica] // self._each), self._runner.losses.get(task, 0)
        try:
            version = await self._runner.command(self._program.servers[0], Join(self._run, replica, turn, given))
            await self._command(task, begin(run=self._run, version=version, turn=turn, given=given))
        finally:
            self._turns[replica] = turn  # not before: what is said of its loss meanwhile is of the one before it
        if self._runner.losses.get(task, 0) > losses:
            raise NodeLost(f"{task} was lost again")
        self._losses[replica] = losses
        self._lost.discard(replica)
        self._supply.join(replica, given * self._each)
        self._trainer.tally.join(replica)
        self._supply.fill(self._news.set)

    def _check_nodes(self) -> None:
        """Raise `NodeLost` where a server is lost already, or too few replicas are left: nothing could be compiled."""
        trainer, lost = self._trainer, self._runner.lost
        self._check_servers(trainer.servers, "training cannot begin")
        gone = where_lost(trainer.nodes, lost)
        if trainer.replicas - len(gone) < trainer.policy.least(trainer.replicas):
            raise NodeLost(f"training cannot begin: {self._too_few(gone)}")

    def _check_servers(self, servers: Sequence[str], what: str) -> None:
        gone = [servers[server] for server in where_lost(servers, self._runner.lost)]
        if gone:
            raise NodeLost(f"{what}: lost the parameter servers {', '.join(gone)}")

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._news.set()

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, ended: Ended) -> None:
        """Raise why the run has ended, if it is not that there are no more batches."""
        if ended.error:
            raise self._explained(as_error(ended.error, ended.text), max(ended.version, self._seen))
        if self._supply.error is not None:
            raise self._supply.error

    def _explained(self, error: FlowrtError, version: int) -> FlowrtError:
        """``error``, with the names of the nodes that are gone."""
        if not isinstance(error, NodeLost) or not self._lost:
            return error
        return NodeLost(f"training stopped at step {version + 1}: {self._too_few(sorted(self._lost))}")

    def _too_few(self, gone: Sequence[int]) -> str:
        trainer = self._trainer
        names = ", ".join(trainer.nodes[replica] or f"replica {replica}" for replica in gone)
        needed = trainer.policy.least(trainer.replicas)
        return f"{trainer.policy} needs {needed} of {trainer.replicas} replicas, and {len(gone)} were lost: {names}"

    async def _stop(self) -> None:
        """End the run on all nodes, once."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._end_run())
        await self._stopping

    async def _end_run(self) -> None:
        working = [*self._watching, *self._joining.values()]
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working)
        await self._supply.aclose()
        lost = self._runner.lost
        tasks = [task for task in dict.fromkeys(self._began) if task not in lost]
        with suppress(FlowrtError, TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                if tasks:
                    await self._runner.command(tasks[0], Stop(self._run))  # it has the others apply what it ordered
                await together(self._runner.command(task, Stop(self._run)) for task in tasks[1:])
        self._trainer.tally.drop(self._supply.total - self._kept * self._each)
        if self._session._iterating.get(self._trainer) == self.end:
            del self._session._iterating[self._trainer]


async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all; raises the first error, once all have ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _those(outcomes: Mapping[int, Outcome], wanted: Outcome) -> tuple[int, ...]:
    return tuple(replica for replica, outcome in outcomes.items() if outcome is wanted)
