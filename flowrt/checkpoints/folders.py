"""Folders that outlast a power cut, and into which one holder at a time writes.

Law: nobody waits. The lock is the operating system's (``flock`` on a file in the folder), so it ends with its process,
however that ends, and what a killed one left behind blocks nobody; a forked child has no part in its parent's. Between
machines it is worth what the file system's locks are: NFS passes them on, unless it is mounted with ``nolock`` or
``local_lock``; then, and on file systems that lock for one machine alone, two machines do not see each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOCK = ".lock"
_TOLD = 4096  # of what a holder writes about itself


class HeldElsewhere(Exception):
    """Someone else holds the lock; the text says who, as far as it is known."""


def sync_folder(path: Path) -> None:
    """Force what ``path`` contains, by name, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_parents(path: Path) -> None:
    """Force the names of ``path`` and of the folders around it to the disk, whoever made them. Raises `OSError`."""
    for folder in path.resolve().parents:
        with suppress(PermissionError):  # what we may not even read we have not made
            sync_folder(folder)
        if os.path.ismount(folder):
            break


def in_the_way(path: Path) -> str | None:
    """Why there can be no folder of this name, as far as names tell; None where there is one, or it can be made."""
    for place in (path, *path.parents):
        if os.path.isdir(place):
            break
        if os.path.islink(place):
            to = os.readlink(place)
            return f"{place} is a symbolic link to {to}, which is no folder; make that, or mount what belongs there"
        if os.path.lexists(place):
            return f"{place} is not a folder"
    return None


def make_folder(path: Path) -> None:
    """Make a folder, and those around it, where there is none. Raises `OSError` that says what is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(in_the_way(path) or str(error)) from error


class FolderLock:
    """The right to write into a folder."""

    def __init__(self, path: Path) -> None:
        self._folder = path
        self._file = path / LOCK
        self._held: int | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Hold the lock, and make the folder if need be; False where it was held already.

        Raises `HeldElsewhere`, at once, and `OSError` where there can be no folder or no lock in it.
        """
        if self._held is not None and self._is_there(self._held):
            return False
        self.release()  # someone removed the folder with the file that we locked
        make_folder(self._folder)
        while not self._try():
            pass
        return True

    def _try(self) -> bool:
        """Lock the file; False where its holder has just removed it, so that the lock is worth nothing."""
        found = self._held = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_there(found):
                _introduce(found)
                return True
        except BlockingIOError:
            holder = _holder(found)
            self._forget()
            raise HeldElsewhere(holder) from None
        except BaseException:
            self._forget()
            raise
        self._forget()
        return False

    def release(self) -> None:
        """Let go, and remove the file. Twice is once."""
        if self._held is not None:
            with suppress(OSError):
                if self._is_there(self._held):
                    self._file.unlink()
            self._forget()

    def _is_there(self, held: int) -> bool:
        """Whether the file in the folder is the one that was opened."""
        try:
            return os.path.samestat(os.fstat(held), self._file.lstat())
        except OSError:
            return False

    def _forget(self) -> None:
        """Close the file, which ends the lock; in a forked child it does not, as its parent has the file open."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)


def _introduce(file: int) -> None:
    """Write who holds the lock. A full disk keeps others from knowing, and nothing else."""
    text = json.dumps({"pid": os.getpid(), "host": os.uname().nodename})
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _holder(file: int) -> str:
    try:
        told = json.loads(os.pread(file, _TOLD, 0))
        pid, host = int(told["pid"]), str(told["host"])
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
    here = " (this very process)" if (pid, host) == (os.getpid(), os.uname().nodename) else ""
    return f"process {pid}{here} on host {host}"


def _leave_to_parent() -> None:
    """In a forked child: have no part in the locks, so that they end with the process that took them."""
    for lock in _locks:
        lock._forget()


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
