"""Who leads, and who follows, on one host: see `drivers.following`.

Law: that a task was lost may be news of the process before it, so it ends nothing here: its client does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import InternalError, RemoteError
from flowrt.sched.drivers.closed import Closed
from flowrt.sched.drivers.following import Arrive, Caught, Follow, FollowNobody, Had, Lead, Passed, Unfollow
from flowrt.sched.server.follower import Follower
from flowrt.sched.server.leading import Leader

if TYPE_CHECKING:
    from flowrt.sched.drivers.tasks import Tasks
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.executor import Executor
    from flowrt.sched.server.server import Server


class Followings:
    """All that are here. ``tasks`` end those whose client is gone."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._followers: dict[int, Follower] = {}
        self._leaders: dict[int, Leader] = {}
        self._epochs: dict[int, str] = {}

    async def answer(
        self,
        asked: Any,
        epoch: str,
        plans: Callable[[int], Executor],
        way: Callable[[int, int, str], Way],
        servers: Callable[[int], Server],
    ) -> Any:
        """Do as the client of ``epoch`` asks; ``way`` makes one's way, ``servers`` finds one by its run."""
        match asked:
            case Follow(follow):
                if follow not in self._followers:  # else it is asked again, as the answer was lost
                    self._epochs[follow] = epoch
                    for other in self._of(asked.container, asked.group):
                        await self._end(other)
                    # meanwhile its client may be gone, or have asked again
                    if follow in self._epochs and follow not in self._followers:
                        apply = Closed(plans(asked.apply), asked.seed)
                        self._followers[follow] = Follower(asked, apply, way(follow, asked.seed, epoch))
                await self._follower(follow).ready()
                return None
            case Lead(follow):
                if follow not in self._leaders:  # as above
                    server = servers(asked.run)
                    self._epochs[follow] = epoch
                    self._leaders[follow] = Leader(asked, server.way)
                    server.lead(self._leaders[follow])
                return await asyncio.shield(self._leaders[follow].begun)
            case Caught(follow):
                return await self._follower(follow).caught()
            case Arrive(follow, version):
                return await self._follower(follow).arrive(version)
            case Unfollow(follow):
                await self._end(follow)
                return None
            case FollowNobody(container, group):
                for other in self._of(container, group):
                    await self._end(other)
                return None
            case _:
                raise InternalError(f"{type(asked).__name__} is not about following")

    def _follower(self, follow: int) -> Follower:
        if follow not in self._followers:
            raise RemoteError("nobody here follows so, or not any more")
        return self._followers[follow]

    def hear(self, peer: str, message: Any) -> None:
        """Do as who leads or follows says."""
        match message:
            case Passed(follow) if follow in self._followers:
                self._followers[follow].hear(peer, message)
            case Had(follow, number) if follow in self._leaders:
                self._leaders[follow].had(number)

    def broken(self, peer: str) -> None:
        """Say again what ``peer`` may not have heard."""
        for leader in self._leaders.values():
            if leader.asked.task == peer:
                leader.broken()
        for follower in self._followers.values():
            follower.broken(peer)

    def ended(self, epoch: str) -> None:
        """The client of ``epoch`` is gone."""
        for follow in [follow for follow, of in self._epochs.items() if of == epoch]:
            self._tasks.start(self._end(follow))

    async def away(self, container: str, group: str, epoch: str) -> bool:
        """Whether what is held here of a trainer is that of one who follows, which counts for nothing.

        One that has given up holds nothing once that is known here, nor does another client's than who asks.
        """
        away = False
        for follow, follower in self._of(container, group).items():
            if follower.over or self._epochs.get(follow) != epoch:
                await follower.end()
            away |= not (follower.over or follower.arrived)
        return away

    def _of(self, container: str, group: str) -> dict[int, Follower]:
        """Who follow of a trainer."""
        about = container, group
        return {n: each for n, each in self._followers.items() if (each.asked.container, each.asked.group) == about}

    def reset(self, container: str | None) -> None:
        """The variables of a container are forgotten, or of all."""
        for follow, follower in self._followers.items():
            if container in (None, follower.asked.container):
                self._tasks.start(self._end(follow))

    async def _end(self, follow: int) -> None:
        self._epochs.pop(follow, None)
        if (leader := self._leaders.pop(follow, None)) is not None:
            leader.close()
        if (follower := self._followers.get(follow)) is not None:
            await follower.end()
            self._followers.pop(follow, None)

    def close(self) -> None:
        """Nothing is to happen any more."""
        for leader in self._leaders.values():
            leader.close()
        for follower in self._followers.values():
            follower.close()
