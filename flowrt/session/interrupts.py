"""Ctrl-C while the main thread runs a tape: Python can raise KeyboardInterrupt only once that has come back.

Law: a run that an interrupt finds under way has `GRACE` to end by itself, its variables whole; then it is stopped like
one that is cancelled, and Python does the rest. This holds while the signal means what it means to Python by default,
for sessions opened in the main thread: what the program handles itself, or whose wake-up descriptor is another's, is
left to them.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from flowrt.sched.host.lanes import this_thread
from flowrt.sched.tape.interrupts import is_default, present_run

if TYPE_CHECKING:
    import asyncio

GRACE = 0.5  # seconds

NOBODY = -1  # who has the wake-up descriptor

Ends: TypeAlias = tuple[int, int]  # of a pipe: what is read, and what Python writes to

_line: list[InterruptWatch] = []  # those that were opened in the main thread, in the order in which they were
_ours: set[int] = set()
_left: list[Ends] = []  # what the last one left that was closed elsewhere: Python writes to it still


class InterruptWatch:
    """Has ``loop``, another thread's, stop what the main thread runs when it is interrupted. Opened there.

    Of several that are open at once the first is told of signals; when it closes, the next takes its place. Closed in
    another thread, which cannot have Python tell somebody else, it leaves its pipe to the next, also to one still to
    be opened.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends: Ends | None = None
        self._main = this_thread()

    def open(self) -> None:
        """Ask Python to tell of signals, or stand in line; nothing where this is not the main thread."""
        try:
            told = signal.set_wakeup_fd(NOBODY)
        except ValueError:  # another thread than the main one
            return
        _line.append(self)
        ends = _left.pop() if _left else None
        if ends is not None and told not in {NOBODY, ends[1]}:  # somebody has taken over what was left
            _close(ends)
        if told == NOBODY or (ends is not None and told == ends[1]):
            self._begin(ends)
        else:
            signal.set_wakeup_fd(told)

    def _begin(self, left: Ends | None = None) -> None:
        """Have Python tell this one, from the main thread, where nobody is told."""
        ends = left or os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(BlockingIOError):  # what came before is no business of this one
            os.read(ends[0], 1 << 16)
        _ours.add(ends[1])
        signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        self._listen(ends)

    def _listen(self, ends: Ends) -> None:
        self._ends = ends
        with suppress(RuntimeError):  # another thread is closing this one
            self._loop.call_soon_threadsafe(self._loop.add_reader, ends[0], self._told)

    def close(self) -> None:
        """Ask no more. The loop has ended."""
        with suppress(ValueError):
            _line.remove(self)
        ends, self._ends = self._ends, None
        if ends is None:
            return
        if this_thread() != self._main:
            if _line:
                _line[0]._listen(ends)
            else:
                _left.append(ends)
            return
        nobody = _leave()
        _close(ends)
        if nobody and _line:
            _line[0]._begin()

    def _told(self) -> None:
        if self._ends is None or signal.SIGINT not in os.read(self._ends[0], 1 << 12):
            return
        stop = present_run(self._main)
        if stop is not None and is_default():
            self._loop.call_later(GRACE, stop)


def _leave() -> bool:
    """Have Python tell us of no more signals; whoever else took that over keeps it. Answers whether nobody did."""
    now = signal.set_wakeup_fd(NOBODY)
    if now not in {NOBODY, *_ours}:
        signal.set_wakeup_fd(now)
    return now in {NOBODY, *_ours}


def _forget() -> None:
    """What a child is sent is no business of its parent's loops."""
    _leave()
    _line.clear()
    _left.clear()


os.register_at_fork(after_in_child=_forget)


def _close(ends: Ends) -> None:
    _ours.discard(ends[1])
    for end in ends:
        os.close(end)
