"""Runs replicated training: feeds batches to towers, watches them, and reports each step.

Law: what counts is decided on the servers; this file hands out batches, cancels what came too late, and notes who is
gone. It owns every task it starts: an iteration that is left cancels and awaits them. A replica whose cancelled tower
has not ended yet is busy and gets no batch.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from flowrt.errors import FlowrtError, GraphError, LinkBroken, NodeLost, RemoteError, user_site
from flowrt.sched.coordinator import Outcome
from flowrt.sched.replica import OUTCOMES
from flowrt.tracebacks import shorten
from flowrt.train.batches import Batches
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.session import Session
    from flowrt.train.replicated import Replicated, Tower

Array = np.ndarray[Any, Any]

BREAKS = 5  # in one version, of the ways to one replica; then it is lost
SETTLE_SECONDS = 3.0  # how long an iteration that is left waits for servers before it cancels what they do


@valueclass
class StepReport:
    """One step of training: ``step`` updates have been applied so far, counted from 1.

    ``kept``, ``late``, ``refused`` (not finite) and ``lost`` are replicas, by what became of their updates. ``loss``
    and ``metrics`` are means over the kept ones; ``seconds`` is how long the step took.
    """

    step: int
    loss: float
    metrics: Mapping[str, Any]
    kept: tuple[int, ...]
    late: tuple[int, ...]
    lost: tuple[int, ...]
    refused: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class _Version:
    """One version in progress: who has begun, and what the towers answered."""

    number: int
    apply: asyncio.Task[Any]
    begun: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    broken: Counter[int] = field(default_factory=Counter)  # by replica: towers that ended as a connection broke
    answers: dict[int, Any] = field(default_factory=dict)

    @property
    def hopeful(self) -> int:
        """How many updates have come or may still."""
        return len(self.begun - self.failed)


class Tasks:
    """The tasks of one iteration. Whoever starts them here calls `aclose`, which cancels and awaits what is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have ``work`` run as one of these tasks."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it sees it; who cancelled it does not care

    async def aclose(self) -> None:
        """Cancel and await everything, even if cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


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
    """One iteration over `Replicated.steps`. ``run`` in a turn tells its messages from those of any other."""

    def __init__(self, trainer: Replicated, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._run = secrets.randbits(62)
        self._tasks = Tasks()
        self._busy: dict[int, asyncio.Task[Any]] = {}  # by replica: its tower, cancelled or not
        self._lost: set[int] = set()
        self._open: _Version | None = None

    async def run(
        self, batches: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]
    ) -> AsyncGenerator[StepReport, None]:
        """The reports, one per step."""
        try:
            source = Batches(batches, self._trainer.inputs)
            version = await self._begin()
            try:
                while (report := await self._step(version, source)) is not None:
                    yield report
                    version += 1
            finally:
                try:
                    await self._settle()
                finally:
                    await self._tasks.aclose()
        except BaseException as error:
            shorten(error)
            raise

    async def _begin(self) -> int:
        """Make everything ready, and tell the servers of this turn; answers the version that the variables are at."""
        trainer, session = self._trainer, self._session
        version = int(await session.run(trainer.step))
        await session.run(trainer.start, {trainer.turn: self._turn(version)})
        self._towers = [
            session.compile([t.loss, t.metrics, t.verdict], [trainer.turn, *t.inputs.values()]) for t in trainer.towers
        ]
        self._apply = session.compile(trainer.receipts, [trainer.turn])
        return version

    def _turn(self, version: int) -> Array:
        return np.array([self._run, version], np.int64)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _step(self, number: int, source: Batches) -> StepReport | None:
        """Run one version to its end; None when too few batches are left for it."""
        began = time.perf_counter()
        version = self._open = _Version(number, self._tasks.start(self._apply(self._turn(number))))
        while not version.apply.done():
            await self._start_idle(version, source)
            if source.empty and version.hopeful < self._trainer.policy.take(self._trainer.replicas):
                self._give_up(version)
                return None
            await self._wait(version, {version.apply, *self._busy.values()})
        outcomes = self._outcomes(version)
        kept = {replica for replica, outcome in outcomes.items() if outcome is Outcome.KEPT}
        while pending := {self._busy[r] for r in kept if r in self._busy}:
            await self._wait(version, pending)
        return self._report(version, kept, outcomes, time.perf_counter() - began)

    async def _start_idle(self, version: _Version, source: Batches) -> None:
        """Give every replica that is idle and has not had its try at this version the next batch."""
        for tower in self._trainer.towers:
            replica = tower.replica
            if replica in self._busy or replica in self._lost or replica in version.begun:
                continue
            if tower.node in self._session.lost:
                await self._lose(replica, version.number)
                continue
            batch = await source.next()
            if batch is None:
                return
            version.begun.add(replica)
            self._busy[replica] = self._tasks.start(self._compute(tower, version, batch))

    async def _compute(self, tower: Tower, version: _Version, batch: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        step = self._towers[tower.replica]
        version.answers[tower.replica] = await step(self._turn(version.number), *(batch[name] for name in tower.inputs))
        self._trainer.tally.took(tower.replica, time.perf_counter() - began)

    async def _wait(self, version: _Version, tasks: set[asyncio.Task[Any]]) -> None:
        """Wait until one of ``tasks`` has ended, and see to the towers that have."""
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for replica, task in list(self._busy.items()):
            if task.done():
                del self._busy[replica]
                await self._ended(replica, task, version)

    async def _ended(self, replica: int, task: asyncio.Task[Any], version: _Version) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or replica not in version.begun:
            return  # it went well, or it was cancelled with an earlier version and nobody cares how it ended
        if isinstance(error, LinkBroken) and version.broken[replica] < BREAKS:
            version.broken[replica] += 1
            version.begun.discard(replica)  # it may try again, once it can be reached
            return
        version.failed.add(replica)
        if not self._is_loss(replica, error):
            raise error
        await self._lose(replica, version.number)

    def _is_loss(self, replica: int, error: BaseException) -> bool:
        """Whether a tower failed because its replica is gone, and not a server."""
        lost = self._session.lost
        if any(server in lost for server in self._trainer.servers):
            return False
        return isinstance(error, NodeLost | LinkBroken) or (
            isinstance(error, RemoteError) and self._trainer.nodes[replica] in lost
        )

    async def _lose(self, replica: int, version: int) -> None:
        """Tell the servers that a replica is gone."""
        trainer = self._trainer
        self._lost.add(replica)
        trainer.tally.lose(replica, trainer.nodes[replica])
        await self._session.run(trainer.lose, {trainer.turn: self._turn(version), trainer.gone: [replica]})

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _outcomes(self, version: _Version) -> dict[int, Outcome]:
        """What became of each replica's update; raises where the version could not be applied."""
        try:
            replicas, codes = version.apply.result()
        except FlowrtError as error:
            raise self._explained(error, version.number) from error
        receipts = {int(r): OUTCOMES[int(c)] for r, c in zip(replicas, codes, strict=True)}
        return {replica: receipts.get(replica, Outcome.LATE) for replica in sorted(version.begun)}

    def _explained(self, error: FlowrtError, version: int) -> FlowrtError:
        """``error``, with the names of the nodes that are gone."""
        trainer, gone = self._trainer, self._session.lost
        servers = [server for server in trainer.servers if server in gone]
        if servers:
            return NodeLost(f"training stopped at step {version + 1}: lost the parameter servers {', '.join(servers)}")
        if not isinstance(error, NodeLost) or not self._lost:
            return error
        names = ", ".join(trainer.nodes[replica] or f"replica {replica}" for replica in sorted(self._lost))
        needed = trainer.policy.take(trainer.replicas)
        return NodeLost(
            f"training stopped at step {version + 1}: {trainer.policy} needs {needed} of {trainer.replicas} replicas, "
            f"and {len(self._lost)} were lost: {names}"
        )

    async def _settle(self) -> None:
        """Let a version that is left in progress be applied whole or not at all, as its quorum is closed or not.

        Without towers nothing closes it any more, and to say that all replicas are gone ends the wait for it.
        """
        version, trainer = self._open, self._trainer
        if version is None or version.apply.done():
            return
        self._cancel_towers()
        gone = {trainer.turn: self._turn(version.number), trainer.gone: range(trainer.replicas)}
        with suppress(FlowrtError, TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                if self._busy:
                    await asyncio.wait(self._busy.values())
                await self._session.run(trainer.lose, gone)
                await asyncio.wait([version.apply])

    def _give_up(self, version: _Version) -> None:
        """End a version that will never have enough updates."""
        version.apply.cancel()
        self._cancel_towers()
        self._trainer.tally.drop(len(version.begun))

    def _cancel_towers(self) -> None:
        for task in self._busy.values():
            task.cancel()

    def _report(self, version: _Version, kept: set[int], outcomes: Mapping[int, Outcome], seconds: float) -> StepReport:
        self._cancel_towers()
        self._trainer.tally.count(outcomes)
        answers = [version.answers[replica] for replica in sorted(kept) if replica in version.answers]
        return StepReport(
            version.number + 1,
            _mean([loss for loss, _, _ in answers]),
            {name: _mean([metrics[name] for _, metrics, _ in answers]) for name in self._trainer.towers[0].metrics},
            _those(outcomes, Outcome.KEPT),
            _those(outcomes, Outcome.LATE),
            _those(outcomes, Outcome.LOST),
            _those(outcomes, Outcome.REFUSED),
            seconds,
        )


def _those(outcomes: Mapping[int, Outcome], wanted: Outcome) -> tuple[int, ...]:
    return tuple(replica for replica, outcome in outcomes.items() if outcome is wanted)


def _mean(values: list[Any]) -> Any:
    """The mean of equal shapes: a float where they are scalars; NaN where there are none."""
    if not values:
        return float("nan")
    mean = np.mean(np.asarray(values, np.float64), axis=0)
    return mean if mean.ndim else float(mean)
