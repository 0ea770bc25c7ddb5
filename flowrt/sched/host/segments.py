"""Memory that other processes of this host may map: files in memory, divided into slots, used again and again.

Law: a file's whole length is there from the beginning and sealed, so that no access to it can fail, here or elsewhere.
A slot is taken until nobody refers to the array in it any more; who lends one to another process keeps the array
meanwhile. Every file counts whole in its `Memory`, as spare where nothing is taken, and one of which nothing is may be
let go. Any thread may ask.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np

from flowrt.base.errors import ResourceError

Array: TypeAlias = "np.ndarray[Any, Any]"

LARGE = 256 << 10  # bytes from which an array is worth a slot: below, a socket is as fast (`perf/sharing.py`)
PAGE = mmap.PAGESIZE
LINE = 64  # bytes: where an array may begin that another process reads
FIRST = 4 << 20  # bytes of the first file
GROWTH = 4  # each new file is this part of all before it: one more value that waits takes no second credit
LARGEST_LASTING = 256 << 20  # bytes of a variable: of larger tables rows are read, which large pages make faster
MOST = 64 << 20  # bytes of a file that holds several arrays
PATIENCE = 4  # sweeps at most for which what was used again and again is kept
IDLE = 1 << 30  # bytes that are kept for arrays to come
AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if AVAILABLE else 0
POPULATED = 4 << 20  # bytes at once, as Python lets nobody else run meanwhile
AHEAD = 256 << 20  # bytes that are made at most before they come: who announces more has to send it
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14: all pages at once, which costs a fifth of one by one


class Segment:
    """One file, mapped here, or if it is not ``shared``, memory that is nobody else's; ``number`` tells it from others.

    What lies in one that is ``steady`` is written once, by who makes it, and never again.
    """

    def __init__(self, number: int, nbytes: int, steady: bool, shared: bool = True) -> None:
        self.number = number
        self.nbytes = nbytes
        self.steady = steady
        self.kept = True  # for arrays to come
        self.file = -1
        self.pages = self._shared_pages() if shared else _own_pages(nbytes)
        ahead = nbytes if shared else min(nbytes, AHEAD)  # the large pages of the others take little time as they come
        with suppress(OSError):
            for first in range(0, ahead, POPULATED):
                self.pages.madvise(_POPULATE_WRITE, first, min(POPULATED, ahead - first))
        self.used = 0  # in which sweep something was taken last
        self.sweeps = 0  # in how many of them something was
        self.start = int(np.frombuffer(self.pages, np.uint8).ctypes.data)
        self.free = [(0, nbytes)]  # (offset, bytes), by offset, none next to another

    def _shared_pages(self) -> mmap.mmap:
        self.file = os.memfd_create("flowrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.file, 0, self.nbytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
            return mmap.mmap(self.file, self.nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the file go; what is mapped stays."""
        self.kept = False
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()

    @property
    def spare(self) -> int:
        """The bytes that are not taken."""
        return sum(room for _, room in self.free)

    @property
    def idle(self) -> bool:
        """Whether nothing in it is taken."""
        return self.spare == self.nbytes

    def smallest(self, nbytes: int) -> int:
        """The bytes of the smallest gap that holds so many; 0 if none does."""
        return min((room for _, room in self.free if room >= nbytes), default=0)

    def take(self, nbytes: int) -> int:
        """Take the beginning of the smallest gap that holds so many bytes; answers where it is."""
        room = self.smallest(nbytes)
        at = next(at for at, gap in enumerate(self.free) if gap[1] == room)
        offset, _ = self.free[at]
        self.free[at : at + 1] = [(offset + nbytes, room - nbytes)] if room > nbytes else []
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Have what was taken be free again."""
        at = bisect_right(self.free, (offset, 0))
        begin, end = offset, offset + nbytes
        if at < len(self.free) and self.free[at][0] == end:
            end += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == begin:
            at -= 1
            begin = self.free.pop(at)[0]
        self.free.insert(at, (begin, end - begin))


class SegmentBytes(np.ndarray[Any, Any]):
    """The bytes of an array in a segment: what the array, and whatever sees a part of it, keeps."""


def has_own_slot(array: Array) -> bool:
    """Whether an array is all of what lies in a slot: nobody else's memory."""
    return type(array.base) is SegmentBytes and array.nbytes == array.base.nbytes


class _Taken(weakref.ref[Any]):
    """Tells of a slot that is gone. May be called wherever Python collects garbage: takes no lock."""

    __slots__ = ("nbytes", "offset", "segment")
    segment: Segment
    offset: int
    nbytes: int


class Counting(Protocol):
    """Who counts spare memory: `memory.Memory`."""

    limit: int | None

    def enlist(self, keeper: Any) -> None: ...

    def add_spare(self, nbytes: int) -> None: ...

    def drop_spare(self, nbytes: int) -> None: ...

    def use_spare(self, nbytes: int) -> None: ...

    def spare(self, nbytes: int, *, kept: bool) -> None: ...


class Segments:
    """A process's segments. ``gone`` is told the number of each that was let go, from whichever thread let it.

    ``grown`` is called when there is one more, from whichever thread needed it.

    Those that are not ``shared`` nobody else sees: they save that memory is made anew each time, which the system fills
    with zeros first.
    """

    def __init__(self, memory: Counting, *, shared: bool = True) -> None:
        self.gone: Callable[[int], None] = lambda number: None
        self.grown: Callable[[], None] = lambda: None
        self._memory = memory
        self._lock = threading.RLock()  # `gone` is called with it; memory is not asked for: others let theirs go then
        self._numbers = itertools.count(1)
        self._sweep = 0
        self._segments: list[Segment] = []  # by address
        self._starts: list[int] = []
        self._alive: dict[int, _Taken] = {}
        self._given: deque[_Taken] = deque()
        self._shared = shared
        self._closed = shared and not AVAILABLE
        memory.enlist(self)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], steady: bool = True) -> Array | None:
        """A new array in a slot, beginning at a page; None where there is no room for it."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = _pages(nbytes)
        with self._lock:
            self._settle()
            segment = None if self._closed else self._tightest(size, steady)
            offset = 0 if segment is None else self._use(segment, size)
        segment = segment or self._more(size, steady)
        if segment is None:
            return None
        slot = SegmentBytes((nbytes,), np.uint8, segment.pages, offset)
        taken = _Taken(slot, self._forget)
        taken.segment, taken.offset, taken.nbytes = segment, offset, nbytes
        self._alive[id(taken)] = taken
        self._memory.use_spare(nbytes)
        return np.ndarray(shape, dtype, slot)

    def grow(self, nbytes: int, steady: bool) -> None:
        """Have room for `empty`, which nobody waits for meanwhile. Raises `ResourceError` where there is none."""
        with self._lock:
            self._settle()
            if self._tightest(_pages(nbytes), steady):
                return
        segment = self._made(_pages(nbytes), steady)
        if segment is not None:
            self._add(segment)

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment, and where in it so many bytes lie; None if they do not."""
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            segment = self._segments[at]
        offset = address - segment.start
        return (segment, offset) if offset + nbytes <= segment.nbytes else None

    @property
    def idle_bytes(self) -> int:
        """What `let_go` would give back."""
        with self._lock:
            self._settle()
            return sum(segment.nbytes for segment in self._segments if segment.idle)

    @property
    def nbytes(self) -> int:
        """Of all segments together."""
        with self._lock:
            return sum(segment.nbytes for segment in self._segments)

    def let_go(self) -> None:
        """Give back the segments of which nothing is taken."""
        with self._lock:
            self._let_go(lambda segment: True)

    def sweep(self) -> bool:
        """Give back those of which nothing was taken since the sweep before; answers whether others are idle.

        Those that were taken from again and again stay for a few sweeps more: else a step that takes long for once
        would be followed by one that has to make all of its memory anew.
        """
        with self._lock:
            self._let_go(lambda segment: segment.used + _patience(segment) < self._sweep)
            self._sweep += 1
            return any(segment.idle for segment in self._segments)

    def _let_go(self, may_go: Callable[[Segment], bool]) -> None:
        """Give back the segments of which nothing is taken, if they may go."""
        self._settle()
        going = [segment for segment in self._segments if segment.idle and may_go(segment)]
        self._keep([segment for segment in self._segments if segment not in going])
        self._drop(going)

    def close(self) -> None:
        """Make no more arrays. Those that are there stay, and so does what other processes have mapped."""
        with self._lock:
            self._closed = True
            self._settle()
            going = self._segments
            self._keep([])
        self._drop(going)

    def _drop(self, going: list[Segment]) -> None:
        for segment in going:
            segment.close()
            self._memory.drop_spare(segment.spare)
            self.gone(segment.number)

    def _keep(self, segments: list[Segment]) -> None:
        self._segments = sorted(segments, key=lambda segment: segment.start)
        self._starts = [segment.start for segment in self._segments]

    def _tightest(self, nbytes: int, steady: bool) -> Segment | None:
        """The segment with the smallest gap that holds so many bytes."""
        fitting = [each for each in self._segments if each.steady == steady and each.smallest(nbytes)]
        return min(fitting, key=lambda each: each.smallest(nbytes), default=None)

    def _more(self, nbytes: int, steady: bool) -> Segment | None:
        """A new segment of which so many bytes are taken; for some to come as well, if nobody counts them."""
        if self._closed:
            return None
        if self.idle_bytes + nbytes > IDLE:
            self.let_go()
        part = self.nbytes // GROWTH
        ample = min(MOST, max(FIRST, part - part % nbytes)) if self._memory.limit is None else 0
        for size in dict.fromkeys((max(nbytes, ample), nbytes)):
            with suppress(ResourceError):
                segment = self._made(size, steady)
                if segment is not None:
                    self._use(segment, nbytes)
                    return segment if self._add(segment) else None
        return None

    def _use(self, segment: Segment, nbytes: int) -> int:
        """Take so many bytes of it; answers where they are."""
        segment.sweeps += segment.used < self._sweep or not segment.sweeps
        segment.used = self._sweep
        return segment.take(nbytes)

    def _add(self, segment: Segment) -> bool:
        """Have one more segment, but where no more arrays are made: then it goes."""
        with self._lock:
            added = not self._closed
            if added:
                self._keep([*self._segments, segment])
        if added:
            self.grown()
        else:
            self._memory.drop_spare(segment.nbytes)
            segment.close()
        return added

    def _made(self, nbytes: int, steady: bool) -> Segment | None:
        """A new segment, counted; None where the system refuses. Raises `ResourceError` where it does not fit."""
        self._memory.add_spare(nbytes)
        try:
            made = Segment(next(self._numbers), nbytes, steady, self._shared)
        except (OSError, MemoryError):
            self._memory.drop_spare(nbytes)
            return None
        made.used = self._sweep
        return made

    def _forget(self, taken: Any) -> None:
        self._alive.pop(id(taken), None)
        self._given.append(taken)
        self._memory.spare(taken.nbytes, kept=taken.segment.kept)

    def _settle(self) -> None:
        while self._given:
            taken = self._given.popleft()
            taken.segment.give(taken.offset, _pages(taken.nbytes))


def _patience(segment: Segment) -> int:
    """For how many sweeps more than others it is kept while nothing of it is taken."""
    return min(max(segment.sweeps - 1, 0), PATIENCE)


def _own_pages(nbytes: int) -> mmap.mmap:
    """Memory that is this process's alone, in large pages where there are such."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _pages(nbytes: int) -> int:
    """Bytes of whole pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE
