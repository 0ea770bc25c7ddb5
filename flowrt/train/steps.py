"""An iteration over a trainer's steps: draws batches, and yields what the nodes report of each version.

Law: what goes on on the nodes is a `run.Run`; here is what outlives it. An iteration that is left ends its run on all
nodes and waits for that; what the servers had begun to apply, all apply. Where a run ends because a server is lost,
another one begins, once there is a whole state to begin with: that is `going_back`'s to find.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import ClosedError, FlowrtError, LedgerError, NodeLost
from flowrt.base.tracebacks import shorten
from flowrt.data import Source
from flowrt.finishing import to_the_end
from flowrt.ledger.account import AGAIN
from flowrt.ledger.writer import OLDER
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome
from flowrt.train.accounts import open_ledger
from flowrt.train.batches import Batches, Identities, Supply, Values
from flowrt.train.deviceless import tell_errors
from flowrt.train.going_back import RolledBack, wait_for_servers
from flowrt.train.reads import what_replicas_read
from flowrt.train.reports import StepReport, make_step_report
from flowrt.train.run import Run

if TYPE_CHECKING:
    import os

    from flowrt.ledger.writer import LedgerWriter
    from flowrt.sched.drivers.messages import Report
    from flowrt.sched.policies import Policy
    from flowrt.session.checkpoints import Checkpoints
    from flowrt.session.runners import Runner
    from flowrt.session.session import Session
    from flowrt.train.batches import Given
    from flowrt.train.trainer import Trainer

BEYOND = 2  # batches of a replica, beside those in use and for steps ahead: one that waits, one on its way
_log = logging.getLogger(__name__)


class Steps:
    """One iteration over `Replicated.steps`."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        ahead: int,
        ledger: str | os.PathLike[str] | None = None,
        detached: str = "",
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._each = trainer.local_steps  # batches of a replica that make one update
        self._ahead = 0 if session.checkpoints is not None and session.checkpoints.saves_by_itself else ahead
        self._detached = detached  # by what name later sessions attach to it; empty if it needs this one
        self._stopping: asyncio.Task[None] | None = None
        self._kept = 0
        self._ledger_path = ledger
        self._ledger: LedgerWriter | None = None
        self._next_identity = 0  # of a batch of a detached run that no report has told of
        self._failed: set[int] = set()  # replicas whose errors were told
        self._over: ClosedError | None = None  # why there is to be no other run
        self._changing: asyncio.Task[None] | None = None  # that a run begins
        self._missed: deque[StepReport] = deque()  # that are to be told
        self._begun = False  # some run is this iteration's own
        self._told = 0  # the step that was reported last
        self._rolled_back: RolledBack | None = None  # of which no report has told

    async def run(self, batches: Given) -> AsyncGenerator[StepReport, None]:
        """The reports, one per step."""
        session, trainer = self._session, self._trainer
        try:
            runner = session._open_here()
            reads = what_replicas_read(trainer, batches) if isinstance(batches, Source) else {}
            while trainer in session._iterating:
                await session._iterating[trainer]()
            self._reads = reads
            self._make_ready(batches, runner)
            session._iterating[trainer] = self.end
            try:
                await self._begin()
                while (report := await self._next()) is not None:
                    yield report
            finally:
                await to_the_end(self._stop())
        except BaseException as error:
            shorten(error)
            raise

    def _make_ready(self, batches: Given, runner: Runner) -> None:
        """Make what there is to end, all of it or nothing."""
        self._trainer.packing_in(self._session).begin(self._trainer.compression if self._detached else None)
        self._ledger = self._open_ledger()
        try:
            self._supply = self._supply_of(batches, runner)
            self._supply.ledger = self._ledger
            self._run = self._make_run()
        except BaseException:
            if self._ledger is not None:
                self._ledger.close()
            raise

    @property
    def _compression(self) -> str:
        """How updates are packed in runs that have begun; empty where they are not."""
        return self._trainer.packing_in(self._session).how or ""

    def _open_ledger(self) -> LedgerWriter | None:
        return open_ledger(self._trainer, self._session, self._ledger_path)

    def _policy_at(self, version: int) -> Policy:
        """What decides about the versions from ``version`` on."""
        return self._trainer.policy

    def _make_run(self, servers: Sequence[str] = (), missed: Callable[[Sequence[Report]], None] | None = None) -> Run:
        missed = missed or self._miss
        if not self._detached:
            run = Run(self._trainer, self._session, self._supply, missed, self._reads, servers)
            run.policy_at = self._policy_at
            return run
        from flowrt.train.detached import DetachedRun  # which others need not import

        terms = self._terms._replace(first=self._next_identity)
        if self._ledger is not None:
            unused = tuple(self._ledger.account.unused)
            terms = terms._replace(first=max(terms.first, self._ledger.first), returned=unused)
        return DetachedRun(self._trainer, self._session, self._supply, missed, self._reads, servers, terms)

    @property
    def _depth(self) -> int:
        """How many batches of a replica are held for it at most."""
        return (1 + self._ahead) * self._each + self._trainer.overlap + BEYOND

    def _supply_of(self, batches: Given, runner: Runner) -> Supply:
        trainer, depth = self._trainer, self._depth
        if self._detached:
            from flowrt.train.detached import ServersSupply, terms_of

            assert isinstance(batches, Source)
            requeues = trainer.late == "requeue"
            self._terms = terms_of(self._detached, batches, depth, self._each, requeues, trainer.compression)
            return ServersSupply(trainer.replicas)
        first = 0 if self._ledger is None else self._ledger.first
        if isinstance(batches, Source):
            return Identities(batches.total, trainer.replicas, depth, self._give, first)
        inputs = [tower.inputs for tower in trainer.towers]
        return Supply(Batches(batches, trainer.inputs), inputs, depth, self._give, runner.copy, first)

    async def end(self) -> None:
        """End the iteration: its session closes, or another one begins on the same trainer."""
        self._over = ClosedError(
            "training was ended: its session was closed, or began to train the same variables anew"
        )
        self._run.fail(self._over)
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait([self._changing])
        await to_the_end(self._stop())

    def _give(self, replica: int, number: int, identities: Sequence[int], batches: Sequence[Values]) -> None:
        self._run.give(replica, number, identities, batches)

    # ── where a server is lost, or too few replicas are left ─────────────────────────────────────────────────────────

    async def _begin(self) -> None:
        try:
            await self._change_runs(self._run.begin())
            self._account_from_here()
        except FlowrtError as error:
            await self._go_on_after(error)
        self._begun, self._told = True, self._told or self._run.version

    async def _go_on_after(self, error: FlowrtError) -> None:
        """Begin another run, if what the one before ended of can be made good: lost servers, or too few replicas.

        Else raises ``error``.
        """
        while True:
            copies, checkpoints = self._run.copies, self._session.checkpoints
            lost = self._run.lost_servers or (() if copies is None else copies.missing)
            if self._over is not None or not (lost or self._run.too_few(error)):
                raise error
            if not lost:
                way = self._begin_another()
            elif copies is not None and (copies.survive or not (copies.known or copies.missing)):
                way = self._go_on_without(lost)
            elif checkpoints is not None:
                way = self._go_back(lost, checkpoints)
            elif isinstance(error, NodeLost):
                raise NodeLost(f"{error}; with fr.Checkpoints of the session, or copies=2, training goes on") from error
            else:
                raise error
            try:
                await self._change_runs(way)
                return
            except FlowrtError as another:
                error = another

    async def _change_runs(self, way: Coroutine[Any, Any, None]) -> None:
        """Begin a run, after the end of another if there is one, unless the iteration is ended meanwhile."""
        self._changing = asyncio.ensure_future(way)
        try:
            await self._changing
        except asyncio.CancelledError:
            if self._over is None:
                raise
            raise self._over from None
        finally:
            self._changing = None

    async def _go_on_without(self, lost: tuple[str, ...]) -> None:
        """Begin another run with the servers that are left, which have all that those had that are lost."""
        began = time.monotonic()
        await self._begin_another()
        _log.warning(
            "%s: training goes on at step %d without %s, whose variables others hold too, after %.2f s",
            self._trainer.name,
            self._told + 1,
            ", ".join(lost),
            time.monotonic() - began,
        )

    async def _grow(self) -> None:
        """Begin another run in which servers take part again that were lost."""
        began = time.monotonic()
        await self._begin_another()
        servers, seconds = ", ".join(self._run.servers), time.monotonic() - began
        _log.warning("%s: the servers are %s again, after %.2f s", self._trainer.name, servers, seconds)

    async def _begin_another(self) -> None:
        """Begin another run at the version that the one before has come to."""
        before = self._run
        await before.stop()
        self._run = self._make_run(missed=partial(self._take_over, before) if self._begun else self._miss)
        await self._run.begin()
        self._account_from_here()
        if self._begun and self._run.version > self._told:
            _log.warning("%s: what became of step %d is not known", self._trainer.name, self._run.version)
        self._told = self._run.version

    def _take_over(self, before: Run, reports: Sequence[Report]) -> None:
        """Take in what a run came to, beyond what was told of it; what nobody has a receipt of is handed out again."""
        for report in (*before.left, *reports):
            if report.version == self._told:
                self._missed.append(self._report(report))
        self._supply.begin_again()

    async def _go_back(self, lost: tuple[str, ...], checkpoints: Checkpoints) -> None:
        """Begin another run at the newest checkpoint, once all servers are there."""
        trainer, session, copies, began = self._trainer, self._session, self._run.copies, time.monotonic()
        servers = self._run.servers if copies is None else copies.tasks
        await self._run.stop()
        waited = await wait_for_servers(session, trainer.name, servers, f"training stopped after step {self._told}")
        if copies is not None:
            await copies.forget()
        self._run = self._make_run(servers)
        await to_the_end(checkpoints.go_back(session))
        if copies is not None:
            await copies.spread()
        self._supply.begin_again()
        await self._run.begin()
        lost = tuple(dict.fromkeys((*lost, *waited)))
        self._account_from_here(f"{', '.join(lost)} was lost")
        self._went_back(RolledBack(lost, self._run.version, self._told, time.monotonic() - began))

    def _went_back(self, to: RolledBack) -> None:
        """Tell of steps that are undone."""
        before = self._rolled_back
        if before is not None:  # and another server was lost before a step was made
            lost = tuple(dict.fromkeys((*before.lost, *to.lost)))
            to = RolledBack(lost, to.step, max(before.until, to.until), before.seconds + to.seconds)
        self._rolled_back, self._told = to, to.step
        _log.warning("%s: %s", self._trainer.name, to)

    def _account_from_here(self, because: str = OLDER) -> None:
        """Have the ledger say that a run has begun, and all be handed out that can be made again and was not used."""
        ledger, supply = self._ledger, self._supply
        if ledger is None:
            return
        if self._detached:  # server 0 has all handed out
            run = self._run
            ledger.attach(run.number, run.version, because, compression=self._compression, begun=run.begun)
            return
        remakes = isinstance(supply, Identities)
        ledger.begin(self._run.number, self._run.version, because, again=remakes, compression=self._compression)
        if remakes:
            supply.handing.requeue(*set(ledger.account.unused).difference(supply.handing.open))

    # ── its reports ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _next(self) -> StepReport | None:
        """The next report; None when too few batches are left for another step."""
        while not self._missed:
            try:
                if self._run.may_grow():
                    await self._change_runs(self._grow())
                elif (report := await self._run.next(self._ahead)) is not None:
                    self._missed.append(self._report(report))
                else:
                    return None
            except FlowrtError as error:
                await self._go_on_after(error)
        if self._session.checkpoints is not None:
            await self._session.checkpoints.after_step(self._session, self._missed[0].step)
        return self._missed.popleft()

    def _miss(self, reports: Sequence[Report]) -> None:
        """Take down what was applied for a client that may not have heard of it, as it was lost."""
        for report in reports:
            _log.info("%s: step %d was made for another client", self._trainer.name, report.version + 1)
        if self._ledger is not None:
            self._ledger.catch_up(reports)

    def _report(self, report: Report) -> StepReport:
        if self._ledger is not None:
            self._ledger.made(report)
        tally = self._trainer.tally
        outcomes, batches, stale = self._spend(report)
        kept = tuple(stale)
        tally.count(outcomes, stale)
        loss, *metrics = report.told
        skipped = self._trainer.scale is not None and metrics.pop() > 0
        rolled_back, self._rolled_back = self._rolled_back, None
        self._kept += len(kept)
        self._told = report.version + 1
        if str in map(type, metrics):
            raise self._trainer.without_mean(metrics)
        nobody: tuple[int, ...] = ()
        late, lost, refused = nobody, nobody, nobody
        if len(kept) < len(outcomes):
            late, lost, refused = (_those(outcomes, end) for end in (Outcome.LATE, Outcome.LOST, Outcome.REFUSED))
        step: StepReport = make_step_report(
            report.version + 1,
            loss,
            dict(zip(self._trainer.towers[0].metrics, metrics, strict=True)),
            kept,
            late,
            lost,
            refused,
            report.seconds,
            report.why,
            tuple(stale.values()),
            report.noise_scale,
            tally.attribution.slow,
            batches,
            rolled_back,
            skipped,
            tell_errors(self._trainer, report, self._failed) if report.errors else {},
            (report, tally.attribution.clocks),
        )
        return step

    def _spend(self, report: Report) -> tuple[dict[int, Outcome], dict[int, Sequence[int]], dict[int, int]]:
        """By replica, what became of its update, the batches that this spent, and of those kept how stale each was."""
        tally, supply, each = self._trainer.tally, self._supply, self._each
        requeue, identities = self._trainer.late == "requeue", report.identities
        outcomes: dict[int, Outcome] = {}
        batches: dict[int, Sequence[int]] = {}
        stale: dict[int, int] = {}
        for place, (replica, batch, code, seconds, staleness) in enumerate(report.receipts):
            became = outcomes[replica] = OUTCOMES[code]
            spent: Sequence[int] = supply.spend(replica, batch * each, again=requeue and became in AGAIN)
            batches[replica] = spent = identities[place] if identities else spent
            if self._detached:
                self._next_identity = max(self._next_identity, *(1 + identity for identity in spent), 0)
            if seconds >= 0:
                tally.took(replica, seconds)
            if became is Outcome.KEPT:
                stale[replica] = staleness
        return outcomes, batches, stale

    async def _stop(self) -> None:
        """End the run, and draw nothing any more, once."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._end_run())
        await self._stopping

    async def _end_run(self) -> None:
        await self._run.rest()
        await self._supply.aclose()
        await self._run.stop()
        if self._run.copies is not None:
            await self._run.copies.follow_no_more()
        self._close_ledger()
        if not self._detached:
            self._trainer.tally.drop(self._supply.total - self._kept * self._each)
        if self._session._iterating.get(self._trainer) == self.end:
            del self._session._iterating[self._trainer]

    def _close_ledger(self) -> None:
        """Say what is known of the end of the run; what is not, the servers tell whoever goes on."""
        ledger = self._ledger
        if ledger is None:
            return
        try:
            ledger.catch_up(self._run.left)
            if self._run.ended_at == ledger.account.version:
                ledger.over()
        except LedgerError as error:
            _log.warning("%s", error)
        finally:
            ledger.close()


def _those(outcomes: Mapping[int, Outcome], wanted: Outcome) -> tuple[int, ...]:
    return tuple([replica for replica, outcome in outcomes.items() if outcome is wanted])
