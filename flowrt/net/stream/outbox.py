"""What a connection has still to write.

Law: frames are written in the order they were put, each whole, its pieces one by one, and the next only when the kernel
has taken the last: nothing is copied and nothing buffered here but what waits for its turn. Who waits for a frame to be
taken may give it up: begun, it is finished all the same; not begun, it is passed over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrt.base.errors import FlowrtError
    from flowrt.net.wire.frames import Piece


@dataclass(slots=True, eq=False)
class Outgoing:
    """One frame: ``begun`` is called when its turn comes; ``taken`` is for who waits until the kernel has it all."""

    pieces: Iterable[Piece]
    begun: Callable[[], None] | None = None
    taken: asyncio.Future[None] | None = None

    def settle(self, error: FlowrtError | None = None) -> None:
        """Wake who waits."""
        if self.taken is None or self.taken.done():
            return
        if error is None:
            self.taken.set_result(None)
        else:
            self.taken.set_exception(error)
            self.taken.exception()  # seen: who is cancelled at the same moment never looks at it


class Outbox:
    """The frames that wait for one transport, which says by `blocked` whether the kernel has taken what was written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._current: Outgoing | None = None
        self._left: Iterator[Piece] = iter(())  # what is still to be written of the current one
        self._waiting: deque[Outgoing] = deque()
        self.blocked = False
        self.idle = True  # nothing was begun or waits, so that a frame that is put now is written now
        self.drained = asyncio.Event()  # nothing waits, and the kernel took everything
        self.drained.set()

    def __len__(self) -> int:
        """How many frames were begun or wait."""
        return len(self._waiting) + (self._current is not None)

    def pause(self) -> None:
        """The kernel has not taken all that was written."""
        self.blocked, self.idle = True, False
        self.drained.clear()

    def put(self, frame: Outgoing) -> None:
        """Write a frame when its turn comes, which may be now."""
        self._waiting.append(frame)
        self.idle = False
        if self._current is None and not self.blocked:
            self.go_on()
        else:
            self.drained.clear()

    def go_on(self) -> None:
        """Write until the kernel takes no more. A transport that is closing takes all and sends nothing."""
        while not self.blocked:
            if self._current is None and not self._begin_next():
                self.idle = True
                self.drained.set()
                return
            for piece in self._left:
                if self._transport.is_closing():
                    break
                self._transport.write(piece)
                if self.blocked:
                    return
            self._end_current()

    def withdraw(self, frame: Outgoing) -> None:
        """Let a frame go whose turn has not come; one that was begun is finished."""
        with suppress(ValueError):
            self._waiting.remove(frame)

    def refuse(self, error: Callable[[], FlowrtError]) -> None:
        """Tell who waits for the turn of a frame that it will not come; what nobody waits for is still written."""
        for frame in self._waiting:
            frame.settle(error())
        self._waiting = deque(frame for frame in self._waiting if frame.taken is None)

    def clear(self) -> None:
        """Let everything go: the stream is gone."""
        self._end_current()
        for frame in self._waiting:
            frame.settle()
        self._waiting.clear()
        self.idle = not self.blocked
        self.drained.set()

    def _begin_next(self) -> bool:
        while self._waiting:
            frame = self._waiting.popleft()
            if frame.taken is not None and frame.taken.cancelled():
                continue
            self._current, self._left = frame, iter(frame.pieces)
            if frame.begun is not None and not self._transport.is_closing():
                frame.begun()
            return True
        return False

    def _end_current(self) -> None:
        self._left = iter(())
        if self._current is not None:
            self._current.settle()
            self._current = None
