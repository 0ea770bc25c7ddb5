"""A server that was lost comes to hold all it should while the others go on: it follows those who hold that now.

Law: what comes of this is a hint. A run that is to begin with it asks whether it has arrived at the version where all
others rest, and copies the variables if not: see `copies`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FlowrtError
from flowrt.finishing import to_the_end, together
from flowrt.sched.drivers.following import Arrive, Caught, Follow, Lead, Unfollow
from flowrt.sched.drivers.keeping import Prepare

if TYPE_CHECKING:
    from flowrt.session.runners import Runner
    from flowrt.train.holding import Guide, Leading

AHEAD = (2, 8, 32, 128, 512)  # versions from now on at which to begin, which others may reach before they know
ARRIVE_SECONDS = 5.0  # for which a run waits for one that has all but the newest versions


class Following:
    """``task`` follows those who go on in ``run``: ``guide`` says how, ``version`` where some of them are."""

    def __init__(
        self,
        runner: Runner,
        task: str,
        run: int,
        guide: Callable[[str], Awaitable[Guide]],
        version: Callable[[Sequence[str]], Awaitable[int]],
    ) -> None:
        self.task, self.losses = task, runner.losses.get(task, 0)
        self._runner, self._run = runner, run
        self._guide, self._version = guide, version
        self._number = 0
        self._tasks: tuple[str, ...] = ()  # who knows of it
        self._work = asyncio.ensure_future(self._begin())

    @property
    def done(self) -> bool:
        """Whether it has caught up, or cannot."""
        return self._work.done()

    async def _begin(self) -> bool:
        try:
            guide = await self._guide(self.task)
            return guide.pays and await self._follow(guide)
        except FlowrtError:
            return False

    async def _follow(self, guide: Guide) -> bool:
        leaders = [leading.task for leading in guide.leaders]
        await self._prepare(guide)
        for ahead in AHEAD:
            version = await self._version(leaders) + ahead
            self._number, self._tasks = secrets.randbits(62), (self.task, *leaders)
            told = tuple([_as_data(leading) for leading in guide.leaders])
            about = (guide.container, guide.group, tuple(leaders), told)
            follow = Follow(self._number, *about, version, guide.apply, guide.applied, guide.seed)
            await self._runner.command(self.task, follow)
            if await self._are_led(guide, version):
                return bool(await self._runner.command(self.task, Caught(self._number)))
            await self._unfollow()
        await self._prepare(guide, on=False)
        return False

    async def _prepare(self, guide: Guide, *, on: bool = True) -> None:
        """Have those who lead have memory ready: what they tell is copied before it is written next."""
        names = {leading.task: tuple([name for name, _ in leading.variables]) for leading in guide.leaders}
        await together(self._runner.command(task, Prepare(known if on else ())) for task, known in names.items())

    async def _are_led(self, guide: Guide, version: int) -> bool:
        """Whether all lead from that version on, which none of them had left behind before it knew."""
        began: list[bool] = []

        async def lead(leading: Leading) -> None:
            names = tuple([name for name, _ in leading.variables])
            asked = Lead(self._number, self._run, self.task, names, version, leading.parts)
            began.append(bool(await self._runner.command(leading.task, asked)))

        await together(lead(leading) for leading in guide.leaders)
        return all(began)

    async def arrive(self, version: int) -> bool:
        """Whether the task holds all that it should at ``version``, where all others rest; ends this."""
        arrived = False
        try:
            if self.done and not self._work.cancelled() and self._work.result():
                with suppress(FlowrtError, TimeoutError):
                    async with asyncio.timeout(ARRIVE_SECONDS):
                        arrived = bool(await self._runner.command(self.task, Arrive(self._number, version)))
        finally:
            await self.end()
        return arrived

    async def end(self) -> None:
        """End it; the task holds nothing then, unless it has arrived."""
        self._work.cancel()
        await asyncio.wait([self._work])
        await to_the_end(self._unfollow())

    async def _unfollow(self) -> None:
        async def end(task: str) -> None:
            with suppress(FlowrtError):
                await self._runner.command(task, Unfollow(self._number))

        away = self._runner.lost | self._runner.suspects
        await together(end(task) for task in self._tasks if task not in away)
        self._tasks = ()  # not before: what is cancelled may not have been told


def _as_data(leading: Leading) -> tuple[tuple[Any, ...], ...]:
    return tuple([(*name, spec.dtype.name, spec.dims) for name, spec in leading.variables])
