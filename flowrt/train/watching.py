"""Watches a run for who is slow: has its reports judged, asks those of whom nothing is heard, and tells the log.

Law: it is on nobody's way. A report costs it an appending; some times a second it looks. Whom no report told of for
`SILENT` seconds is asked what it does, and so is server 0, so that a step that does not end is explained while it goes
on. The log is told once when something becomes slow, and once when it is over. What goes wrong here ends no training.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from flowrt.sched.drivers.messages import Doing, Pending, Probe, Report
from flowrt.sched.replica.stopwatch import Phase

if TYPE_CHECKING:
    from flowrt.session.runners import Runner
    from flowrt.train.attribution import Attribution
    from flowrt.train.batches import Supply
    from flowrt.train.diagnosis import Slow
    from flowrt.train.program import Program

TICK = 0.25  # seconds between two looks
SILENT = 0.5
DEAF = 1.0  # seconds for which nothing was heard of a replica whose node answers nothing, and which is frozen
_log = logging.getLogger(__name__)


class Watcher:
    """Watches one run of ``trainer``. ``gone`` answers the replicas that are lost, ``supply`` hands out batches."""

    def __init__(
        self,
        trainer: str,
        attribution: Attribution,
        program: Program,
        runner: Runner,
        run: int,
        gone: Callable[[], Collection[int]],
        supply: Supply,
    ) -> None:
        self._trainer, self._attribution = trainer, attribution
        self._program, self._runner, self._run = program, runner, run
        self._gone, self._supply = gone, supply
        self._doing: dict[int, Doing] = {}
        self._pending: Pending | None = None
        attribution.again()
        attribution.nbytes = program.nbytes

    def hear(self, message: Any) -> None:
        """Take in a report, or the answer to a probe."""
        match message:
            case Report():
                self._attribution.add(message)
            case Doing(_, replica, times) if len(times) == 8:
                if not (self._supply.over and times[1] == Phase.INPUT):  # which waits for nobody
                    self._doing[replica] = message
            case Pending():
                self._pending = message

    async def watch(self) -> None:
        """Look until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(TICK)
                self._look(clock())
                self._ask(clock())
        except Exception:
            _log.exception("%s is not watched any more", self._trainer)

    def _look(self, now: float) -> None:
        suspects, gone, heard = self._runner.suspects, self._gone(), self._attribution.heard
        frozen = [
            replica
            for replica, task in enumerate(self._program.replicas)
            if task in suspects and replica not in gone and now - heard[replica] > DEAF
        ]
        doing = {r: told for r, told in self._doing.items() if r not in gone and now - heard[r] > TICK}
        self._attribution.drawn += self._supply.drawn
        self._supply.drawn = 0.0
        before = self._attribution.slow
        stopped = not suspects.isdisjoint(self._program.servers)
        self._tell(before, self._attribution.look(now, frozen, doing, self._pending, stopped=stopped))

    def _ask(self, now: float) -> None:
        """Ask those of whom no report told lately."""
        self._doing, self._pending = {}, None
        gone, program = self._gone(), self._program
        heard = self._attribution.heard
        silent = [r for r in range(len(heard)) if r not in gone and now - heard[r] > SILENT]
        if silent:
            self._runner.post(program.servers[0], Probe(self._run, -1))
        for replica in silent:
            self._runner.post(program.replicas[replica], Probe(self._run, replica))

    def _tell(self, before: Collection[Slow], after: Collection[Slow]) -> None:
        known = {(slow.replica, slow.cause) for slow in before}
        still = {(slow.replica, slow.cause) for slow in after}
        for slow in after:
            if (slow.replica, slow.cause) not in known:
                where = "" if slow.replica is None else f" ({self._program.replicas[slow.replica]})"
                _log.warning("%s: %s%s", self._trainer, slow, where)
        for replica, cause in sorted(known - still, key=str):
            who = "all replicas are" if replica is None else f"replica {replica} is"
            _log.warning("%s: %s as fast as usual again, by %s", self._trainer, who, cause)
