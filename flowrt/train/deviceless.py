"""Replicas that cannot compute: as the devices of their towers are lost, until their nodes were started again, or just
an update, as memory is short. Training goes on without, and people are told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from flowrt.base.errors import as_error

if TYPE_CHECKING:
    from flowrt.base.errors import FlowrtError
    from flowrt.sched.drivers.messages import Report
    from flowrt.train.built import Built

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
