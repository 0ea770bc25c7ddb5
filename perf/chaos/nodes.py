"""A local cluster whose nodes may be in namespaces of a network that can be cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flowrt as fr

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from network import Network


class Cluster(fr.LocalCluster):
    """Nodes in the namespaces of a network, or beside this process where there is none."""

    def __init__(self, net: Network | None, **options: Any) -> None:
        super().__init__(tls=net is not None, **options)
        self._net = net
        self._awaited: dict[str, asyncio.Future[float]] = {}

    def started_again(self, task: str) -> asyncio.Future[float]:
        """When the next process of a task is started."""
        found = self._awaited[task] = asyncio.get_running_loop().create_future()
        return found

    async def _spawn(self, task: str, *place: Any, **door: Any) -> Process:
        process = await super()._spawn(task, *place, **door)
        awaited = self._awaited.pop(task, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(time.monotonic())
        return process

    def _where(self, task: str) -> tuple[Sequence[str], str]:
        return super()._where(task) if self._net is None else (self._net.before(task), self._net.host(task))
