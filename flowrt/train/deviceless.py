"""Replicas that cannot compute: as the devices of their towers are lost, until their nodes were started again, or just
an update, as memory is short. Training goes on without, and people are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from flowrt.base.errors import ResourceError, as_error
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    from flowrt.base.errors import FlowrtError
    from flowrt.sched.drivers.messages import Report
    from flowrt.train.built import Built

SHORTEST, LONGEST = 0.1, 10.0  # seconds that a replica is given no batches, as it had no memory
_log = logging.getLogger(__name__)


class Nodes(Protocol):
    """Who knows how often each task was lost so far."""

    @property
    def losses(self) -> Mapping[str, int]: ...


class Deviceless:
    """Those of one run of a trainer."""

    def __init__(self, trainer: Built, nodes: Nodes) -> None:
        self._trainer, self._nodes = trainer, nodes
        self._since: dict[int, int] = {}  # how often a replica's task had been lost then

    def lose(self, replica: int, why: str) -> None:
        """Take down that the device of a replica is lost."""
        trainer = self._trainer
        if replica not in self._since:
            _log.warning("%s goes on without %s: %s", trainer.name, _named(trainer, replica), why)
        self._since[replica] = self._nodes.losses.get(trainer.nodes[replica], 0)

    def able(self, replicas: Iterable[int]) -> list[int]:
        """Those of ``replicas`` that have what they compute on."""
        losses, tasks = self._nodes.losses, self._trainer.nodes
        return [replica for replica in replicas if self._since.get(replica) != losses.get(tasks[replica], 0)]


class Recovering:
    """Replicas that are given no batches for a while, as memory was short for an update: each time for twice as long.

    They would lose their share of the batches otherwise, one with each step. ``changed`` is called as pauses begin and
    end. There are none where a policy may wait for all that are there, who waits for their batches, too; nor does one
    go on that keeps it from being met, as others are lost: those that are given nothing now are ``rest``.
    """

    def __init__(self, trainer: Built, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.rest: list[int] = []
        size = trainer.policy.size(trainer.replicas)
        self._spared = 0 if trainer.floor or size is None else trainer.replicas - size  # by the policy
        self._seconds: dict[int, float] = {}  # by replica whose updates were not kept since: how long the last one took
        self._going: dict[int, asyncio.TimerHandle] = {}  # by replica that pauses: what ends that

    def hear(self, report: Report) -> None:
        """Take in what a report says."""
        if not self._spared or not (report.errors or self._seconds):
            return
        for replica, _, code, *_ in report.receipts:
            if OUTCOMES[code] is Outcome.KEPT:
                self._seconds.pop(replica, None)
        begin = [replica for replica, error, _ in report.errors if error == ResourceError.__name__]
        begin = [replica for replica in begin if replica not in self._going]
        for replica in begin:
            seconds = self._seconds[replica] = min(2 * self._seconds.get(replica, SHORTEST / 2), LONGEST)
            self._going[replica] = asyncio.get_running_loop().call_later(seconds, self._end, replica)
        if begin:
            self._changed()

    def resting(self, away: Collection[int]) -> list[int]:
        """Those that are given nothing now that others are ``away``: no more than can be done without."""
        spared = max(0, self._spared - len(away))
        self.rest = [replica for replica in self._going if replica not in away][:spared]
        return self.rest

    def _end(self, replica: int) -> None:
        del self._going[replica]
        self._changed()

    def close(self) -> None:
        """End all of them, for good."""
        self._spared = 0
        for timer in self._going.values():
            timer.cancel()
        self._going.clear()


def tell_errors(trainer: Built, report: Report, told: set[int]) -> dict[int, FlowrtError]:
    """By replica, why it could not compute an update; people are told of each once, which is then ``told``."""
    for replica, _, text in report.errors:
        if replica not in told:
            told.add(replica)
            _log.warning("%s: step %d without %s: %s", trainer.name, report.version + 1, _named(trainer, replica), text)
    return {replica: as_error(error, text) for replica, error, text in report.errors}


def _named(trainer: Built, replica: int) -> str:
    task = trainer.nodes[replica]
    return f"replica {replica}, on {task}" if task else f"replica {replica}"  # in a program that is all of one process
