"""What a process notes of what it does, while somebody traces it.

Law: noting never waits, never fails and takes a bounded amount of memory: what there is no room for is counted and
left out. Who notes asks first whether there is a tracer at all; nobody pays more than that look while there is none.
All times are nanoseconds of the one clock that compiled code reads, too.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

Note: TypeAlias = "tuple[str, str, int, int, int, int, dict[str, Any]]"
"""What kind of thing was done, on which track, described where, from when until when, in the run of which number, and
more about it."""

MOST_NOTES = 1 << 17  # slices that are kept until somebody takes them


def now() -> int:
    """Nanoseconds of the clock that tapes are timed by."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Tracer:
    """Notes that wait to be taken, up to ``most`` slices. From any thread.

    What many notes are about is described once: a note has the description's number.
    """

    def __init__(self, most: int = MOST_NOTES) -> None:
        self.birth = secrets.token_hex(8)  # descriptions are numbered anew with every tracer
        self.dropped = 0
        self._most, self._held = most, 0
        self._notes: deque[tuple[int, Note]] = deque()
        self._numbers: dict[int, tuple[int, Any]] = {}  # by the identity of what is described, as long as there is that
        self._lock = threading.Lock()
        self._described = 0
        self._descriptions: list[Any] = []  # that nobody has taken

    def describe(self, what: Any, make: Callable[[], Any]) -> int:
        """The number of the description of ``what``, which ``make`` makes, as plain data, the first time."""
        key = id(what)
        known = self._numbers.get(key)
        if known is not None:
            return known[0]
        described = make()
        try:
            kept: Any = ref(what, lambda _: self._numbers.pop(key, None))
        except TypeError:
            kept = what
        with self._lock:
            number = self._described
            self._described += 1
            self._descriptions.append(described)
            self._numbers[key] = number, kept
        return number

    def note(
        self,
        kind: str,
        description: int,
        began: int,
        ended: int,
        number: int = -1,
        about: dict[str, Any] | None = None,
        *,
        track: str | None = None,
        slices: int = 1,
    ) -> None:
        """Note what was done in the run of that ``number``: on this thread, if no ``track`` is named."""
        where = thread_name() if track is None else track
        with self._lock:
            if self._held + slices > self._most:
                self.dropped += slices
                return
            self._held += slices
            self._notes.append((slices, (kind, where, description, began, ended, number, about or {})))

    def drop(self, slices: int) -> None:
        """Count so many slices as left out."""
        with self._lock:
            self.dropped += slices

    def take(self, most: int = MOST_NOTES) -> tuple[list[Any], list[Note]]:
        """The descriptions that are new, and the oldest notes, of about so many slices."""
        taken, slices = [], 0
        with self._lock:
            while self._notes and slices < most:
                weight, note = self._notes.popleft()
                slices += weight
                taken.append(note)
            self._held -= slices
            new, self._descriptions = self._descriptions, []
        return new, taken

    @property
    def waiting(self) -> bool:
        """Whether there are notes that nobody has taken."""
        return bool(self._notes)


def thread_name() -> str:
    """What to call the thread that asks: an event loop runs in it, or by its name."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread().name
    return "event loop"
