"""What goes on by itself, and how it stands still for a moment: so that what is read meanwhile is of one version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

Rest: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]


class Rests:
    """Of one session, what moves its variables without being asked: each stands still while its block runs."""

    def __init__(self) -> None:
        self._rests: list[Rest] = []

    def add(self, rest: Rest) -> None:
        """From now on this goes on by itself."""
        self._rests.append(rest)

    def remove(self, rest: Rest) -> None:
        """It does so no more, or this session has no part in it; saying it again changes nothing."""
        if rest in self._rests:
            self._rests.remove(rest)

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """All of it stands still while the block runs."""
        async with AsyncExitStack() as stack:
            for rest in self._rests:
                await stack.enter_async_context(rest())
            yield
