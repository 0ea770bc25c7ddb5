"""Replicas that can compute nothing, as the devices of their towers are lost, until their nodes were started again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
        task = self._trainer.nodes[replica]
        if replica not in self._since:
            where = f", on {task}" if task else ""  # not in a program that is all of one process
            _log.warning("%s goes on without replica %d%s: %s", self._trainer.name, replica, where, why)
        self._since[replica] = self._nodes.losses.get(task, 0)

    def able(self, replicas: Iterable[int]) -> list[int]:
        """Those of ``replicas`` that have what they compute on."""
        losses, tasks = self._nodes.losses, self._trainer.nodes
        return [replica for replica in replicas if self._since.get(replica) != losses.get(tasks[replica], 0)]
