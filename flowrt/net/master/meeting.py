"""How long the opening of a session waits for whom.

Law: a node that has answered is waited for, be it as busy as it may, and so is one that is needed, until it had the
time to start. Any other is waited for by what those that are there took: `TIMES` as long as the last of them, and
`LEAST` seconds. Whether it is stopped, cut off or has yet to start cannot be told apart, and need not: it is awaited
while the session goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import NodeLost

if TYPE_CHECKING:
    from flowrt.base.device import Device

Spares: TypeAlias = "Callable[[Collection[str], Collection[Device]], bool]"
LEAST = 0.5  # seconds: nodes of a busy machine answer in less
TIMES = 3.0


def spares_nobody(absent: Collection[str], devices: Collection[Device]) -> bool:
    """As who opens does without nobody."""
    return False


def job_of(task: str) -> str:
    """The job that a task is of."""
    return task.partition("/task:")[0]


class Meetings:
    """The tasks at ``addresses`` are being met; ``can_do_without`` says whether nobody needs those that it is given."""

    def __init__(
        self, addresses: Mapping[str, tuple[str, int]], can_do_without: Callable[[Collection[str]], bool]
    ) -> None:
        self._addresses, self._can_do_without = addresses, can_do_without
        self._answered: set[str] = set()
        self._meetings: dict[str, asyncio.Task[NodeLost | None]] = {}

    def answered(self, task: str) -> None:
        """A node has answered as that task."""
        self._answered.add(task)

    async def held(self, meet: Callable[[str], Coroutine[None, None, NodeLost | None]]) -> dict[str, NodeLost]:
        """Meet all at once; answers who is not there, and why. Raises what is wrong with one that is."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            self._meetings = {task: group.create_task(meet(task)) for task in self._addresses}
            await self._wait(began)
        waited = loop.time() - began
        return {task: why for task in self._meetings if (why := self._why_absent(task, waited)) is not None}

    async def _wait(self, began: float) -> None:
        """Wait until all are met that are waited for."""
        loop, last = asyncio.get_running_loop(), began
        while pending := {one for one in self._meetings.values() if not one.done()}:
            left = None
            if self._may_go_on():
                left = began + max(LEAST, TIMES * (last - began)) - loop.time()
                if left <= 0:
                    for one in pending:
                        one.cancel()
                    return
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            last = loop.time() if done else last

    def _may_go_on(self) -> bool:
        """Whether those are there that are needed, one of each job at least, and nobody answers who is not yet met."""
        absent = {task for task, one in self._meetings.items() if not one.done() or one.result() is not None}
        jobs = {job_of(task) for task in self._meetings.keys() - absent}
        answer = any(task in self._answered and not self._meetings[task].done() for task in absent)
        return not answer and jobs.issuperset(map(job_of, absent)) and self._can_do_without(absent)

    def _why_absent(self, task: str, waited: float) -> NodeLost | None:
        meeting, (host, port) = self._meetings[task], self._addresses[task]
        if not meeting.cancelled():
            return meeting.result()
        return NodeLost(f"{task}: {host}:{port} did not answer within {waited:.2g} s, in which the others have")
