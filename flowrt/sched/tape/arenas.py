"""The memory that the tapes of one region compute in, lent to a run.

Law: a run on new shapes has what the run before it, on others, has given back, and finds it warm. So as many arenas are
kept as runs were under way at once, however many shapes there are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.sched.host.arena import ALIGNMENT
from flowrt.sched.host.memory import counted

if TYPE_CHECKING:
    from flowrt.sched.host.memory import Memory

Array: TypeAlias = "np.ndarray[Any, Any]"

MOST = 2  # arenas that are kept
_BYTES = np.dtype(np.uint8)


class LentArena:
    """So many bytes, from the address ``at`` on."""

    __slots__ = ("at", "memory", "nbytes")

    def __init__(self, memory: Array) -> None:
        self.memory, self.nbytes = memory, memory.nbytes
        start = int(memory.ctypes.data)
        self.at = start + -start % ALIGNMENT


class Arenas:
    """The arenas of one region. May be used from any thread."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._idle: deque[LentArena] = deque(maxlen=MOST)

    @property
    def idle_bytes(self) -> int:
        """What lies here between runs."""
        return sum(counted(arena.nbytes) for arena in tuple(self._idle))

    def take(self, nbytes: int) -> LentArena:
        """At least ``nbytes``; what is too small goes. Raises `ResourceError` where there is no memory."""
        try:
            while (arena := self._idle.pop()).nbytes < nbytes:
                pass
        except IndexError:
            return self._made(nbytes)
        return arena

    def part_with(self, nbytes: int) -> LentArena:
        """One of that very size, which does not come back. Raises as `take` does."""
        arena = self.take(nbytes)
        if arena.nbytes > nbytes:
            self.give(arena)
            arena = self._made(nbytes)
        return arena

    def give(self, arena: LentArena) -> None:
        """Keep it for runs to come."""
        self._idle.append(arena)

    def let_go(self) -> None:
        """Drop what lies here."""
        self._idle.clear()

    def _made(self, nbytes: int) -> LentArena:
        return LentArena(self._memory.empty((nbytes,), _BYTES))
