"""What drivers do not wait for: tasks that belong together, and end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from flowrt.sched.host.shielded import shielded

_log = logging.getLogger(__name__)


class Tasks:
    """Tasks that belong together. Whoever starts them here calls `aclose`, which cancels and awaits what is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, Any], fell: Callable[[BaseException], None] | None = None
    ) -> asyncio.Task[Any]:
        """Have ``work`` run as one of these tasks; ``fell`` is called with what it raises, which else is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, fell or _tell))
        return task

    def _forget(self, fell: Callable[[BaseException], None], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            fell(error)

    async def aclose(self) -> None:
        """Cancel and await everything, even if cancelled meanwhile."""
        for task in self._tasks:
            task.cancel()
        cancelled = await shielded(lambda: not self._tasks, lambda: asyncio.wait(self._tasks))
        if cancelled is not None:
            raise cancelled


def _tell(error: BaseException) -> None:
    _log.error("a run of a trainer failed", exc_info=error)


async def sleep_until(due: float, clock: Callable[[], float]) -> None:
    """Sleep until ``clock`` says ``due``: the timers of a loop count from when its turn began, and may be early."""
    while (left := due - clock()) > 0.0:  # noqa: ASYNC110 -- time alone ends it
        await asyncio.sleep(left)
