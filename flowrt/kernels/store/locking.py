"""Who makes what: one at a time, and nobody is waited for who stands still.

Law: whoever holds the lock file of an object makes it. The system frees the lock of a holder that died; for one that
was stopped, frozen or starved others wait `PATIENCE` seconds and then make the object themselves: objects are put in
their places whole, so that two make the same costs time and nothing else. Who waits looks up often, so it can be
interrupted, and gives up once nobody wants what it waits for or the task it waits in is cancelled.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import StepCancelled

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 10.0  # seconds; a kernel takes one or two, a large one on a busy machine five
IMPATIENCE = 1.0  # after a wait in vain, since who holds one lock may hold many
LONGEST_NAP = 0.05  # between two looks at a lock, and the first one
FIRST_NAP = 0.0005


class _LockingThread(threading.local):
    """What this thread works for."""

    wanted: Callable[[], bool] | None = None


_log = logging.getLogger(__name__)
_present = _LockingThread()
_patience = PATIENCE
_stands_back = False


def stand_back() -> None:
    """Have this process hold no locks from now on: whoever runs only when nobody else does must not be waited for."""
    global _stands_back
    _stands_back = True


@contextmanager
def while_wanted(wanted: Callable[[], bool]) -> Iterator[None]:
    """Give up what this thread makes in the block, between two objects, once ``wanted()`` is false."""
    before = _present.wanted
    _present.wanted = wanted if before is None else lambda: before() and wanted()
    try:
        yield
    finally:
        _present.wanted = before


def check_wanted() -> None:
    """Raise `StepCancelled` where nobody wants any more what this thread makes."""
    if _present.wanted is not None and not _present.wanted():
        raise StepCancelled("stopped before its kernels were compiled")


class _Wait:
    """A wait in this thread, and in the task that runs in it: its loop cannot tell the task that it is cancelled."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        with suppress(RuntimeError):  # no loop runs here
            self._task = asyncio.current_task()
        self._cancels = 0 if self._task is None else self._task.cancelling()

    def go_on(self) -> None:
        """Raise `StepCancelled` where nobody wants what is waited for, `CancelledError` where the task is cancelled."""
        check_wanted()
        if self._task is not None and self._task.cancelling() > self._cancels:
            raise asyncio.CancelledError


@contextmanager
def held(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock of this process's threads; who waits for it can be interrupted."""
    if not lock.acquire(blocking=False):
        wait = _Wait()
        while not lock.acquire(timeout=LONGEST_NAP):
            wait.go_on()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked(path: Path, found: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock file ``path``, if the folder allows, and remove it afterwards; answers whether it is held.

    It is not where there can be none, where its holder stands still, once what is waited for is ``found``, and by who
    stands back.
    """
    handle = None if _stands_back else _lock(path, found)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(handle)


def _lock(path: Path, found: Callable[[], bool]) -> int | None:
    until = time.monotonic() + _patience
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if _is_ours(handle, until, found) and _is_at(handle, path):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            if found() or time.monotonic() > until:
                return None
    except OSError:  # a folder that cannot be written, or a file system without locks
        return None


def _is_ours(handle: int, until: float, found: Callable[[], bool]) -> bool:
    """Wait for the lock on an open file; answers whether we have it."""
    global _patience
    wait, nap = _Wait(), 0.0
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait.go_on()
        else:
            _patience = PATIENCE if nap else _patience
            return True
        if found():
            return False
        if time.monotonic() > until:
            _log.info("what holds a lock in the kernel cache for long stands still: its kernel is compiled here, too")
            _patience = IMPATIENCE
            return False
        nap = min(LONGEST_NAP, 2 * nap or FIRST_NAP)
        time.sleep(nap)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still there; whoever held its lock may have removed it: then it is no one's lock."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False
