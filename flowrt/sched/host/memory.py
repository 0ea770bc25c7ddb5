"""What a task holds in memory, to the byte, and what it may hold.

Law: arenas, the outputs of tapes and of nodes, variables and what is copied for a fetch are made here and counted until
nobody refers to them any more. What is smaller than `COUNTED` is not worth its count and left out everywhere, also from
predictions. Who asks for more than fits is refused before anything is taken, once idle memory has been let go. What is
spare in segments (`flowrt.sched.host.segments`) is not held, and yet taken.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.base import pages
from flowrt.base.errors import ResourceError
from flowrt.base.valueclass import valueclass
from flowrt.sched.host.segments import LARGE, LARGEST_LASTING
from flowrt.usable import available_bytes

if TYPE_CHECKING:
    from flowrt.sched.host.segments import Segments

Array: TypeAlias = "np.ndarray[Any, Any]"

COUNTED = 16 << 10  # bytes, which are copied in as little time as it takes to count them
UNSETTLED = 64  # arrays that were made, or are gone, and are yet to be counted so, at most, where there is no limit
LINE = 64  # bytes that memory answers at once
LOOKED_AT = 64 << 20  # bytes below which nobody looks at what the machine has left, which takes some 50 µs
IDLE_BYTES = 1 << 30  # that are kept for steps to come


class Keeper(Protocol):
    """Who keeps memory for later that it could let go."""

    @property
    def idle_bytes(self) -> int: ...

    def let_go(self) -> None:
        """Drop what is idle now."""


@valueclass
class MemoryStatistics:
    """Bytes: ``held`` now, at most held at one moment so far (``peak``), and the ``limit``, where one was given."""

    held: int
    peak: int
    limit: int | None


def counted(nbytes: int) -> int:
    """The bytes that an allocation of ``nbytes`` counts for."""
    return nbytes if nbytes >= COUNTED else 0


class _Held(weakref.ref[Any]):
    """Tells the bytes of an array that is there, and then of one that is gone: it is put among what has happened
    wherever Python collects garbage, so that takes no lock, and no Python."""

    __slots__ = ("nbytes",)
    nbytes: int


class Memory:
    """Counts what is held, and refuses what does not fit: in ``limit`` bytes, or else in what the machine has left."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._held = self._peak = 0
        self._lock = threading.Lock()
        self._alive: dict[int, _Held] = {}  # what is counted
        # What has happened and is not counted yet, in order: an array was made, or, said again, is gone; or so many
        # bytes are not used any more, and kept or not.
        self._happened: deque[_Held | tuple[int, bool]] = deque()
        self._spare = 0  # bytes in segments that nobody uses
        self.segments: Segments | None = None  # where others are to see what is sent to them
        self.buffers: Segments | None = None  # that large arrays are received in, again and again
        self._keepers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def held(self) -> int:
        return self.statistics().held

    def statistics(self) -> MemoryStatistics:
        """What is held now, once what is gone has been taken off."""
        with self._lock:
            self._settle()
            return MemoryStatistics(self._held, self._peak, self.limit)

    def forget_peak(self) -> None:
        """Let the peak count from now."""
        with self._lock:
            self._settle()
            self._peak = self._held

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new array, counted. Raises `ResourceError` where it does not fit."""
        nbytes = math.prod(shape) * dtype.itemsize
        return np.empty(shape, dtype) if nbytes < COUNTED else self._made(nbytes, np.empty, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """`empty`, but zeros: pages that the system fills as they are used."""
        nbytes = math.prod(shape) * dtype.itemsize
        return np.zeros(shape, dtype) if nbytes < COUNTED else self._made(nbytes, np.zeros, shape, dtype)

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """`empty` for what is computed once and then never changes, and so may be seen by others as it is.

        Where there are no others, it is in memory that was there for what was computed before, if there is some.
        """
        return self._empty_in(self.segments or self.buffers, shape, dtype)

    def received(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """`empty` for what comes from elsewhere, in memory that was there for what came before, if there is some.

        It is a `codec.Allocate`.
        """
        return self._empty_in(self.buffers, shape, dtype)

    def _empty_in(self, slots: Segments | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """`empty`, in a slot if it is large and there is one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < COUNTED:
            return np.empty(shape, dtype)
        if nbytes >= LARGE and slots is not None:
            made = slots.empty(shape, dtype)
            if made is not None:
                return made
        return self._made(nbytes, np.empty, shape, dtype)

    def lasting(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """`empty` for a variable, beginning at a cache line: a row of 64 bytes is then one line, not parts of two."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < COUNTED:
            return np.empty(shape, dtype)
        if self.segments is not None and LARGE <= nbytes <= LARGEST_LASTING:
            made = self.segments.empty(shape, dtype, steady=False)
            if made is not None:
                return made
        whole = self._made(nbytes, np.empty, nbytes + LINE, np.uint8)
        start = -int(whole.ctypes.data) % LINE
        return whole[start : start + nbytes].view(dtype).reshape(shape)

    def apart(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """`lasting`, made while others go on to ask for memory."""
        if self.segments is not None and LARGE <= math.prod(shape) * dtype.itemsize <= LARGEST_LASTING:
            self.segments.grow(math.prod(shape) * dtype.itemsize, steady=False)
        return self.lasting(shape, dtype)

    def lasting_copy(self, array: Array) -> Array:
        """`lasting` that holds what ``array`` does."""
        made = self.lasting(array.shape, array.dtype)
        np.copyto(made, array)
        return made

    def begun(self, first: Array) -> Array:
        """`lasting` for a table that starts as ``first``: counted whole, though only what is written takes memory."""
        return self._made(first.nbytes, pages.begun, first).reshape(first.shape)

    def _made(self, nbytes: int, make: Callable[..., Array], *given: Any) -> Array:
        """A new array that owns its memory, made of what is ``given``, counted as ``nbytes``."""
        taken = self.limit is not None or nbytes >= LOOKED_AT  # else it is counted later, as nothing depends on it
        if taken:
            self._take(nbytes)
        try:
            array = make(*given)
        except (MemoryError, OSError):
            array = self._made_again(nbytes, taken, make, *given)
        held = _Held(array, self._happened.append)
        held.nbytes = nbytes
        if taken:
            self._alive[id(held)] = held
            return array
        self._happened.append(held)
        if len(self._happened) >= UNSETTLED:
            with self._lock:
                self._settle()
        return array

    def _made_again(self, nbytes: int, taken: bool, make: Callable[..., Array], *given: Any) -> Array:
        """What the system refused to make, whose limits only it knows, once more without idle memory.

        Where that is in vain, ``nbytes`` are given back, if they were ``taken``.
        """
        self.reclaim()
        try:
            return make(*given)
        except (MemoryError, OSError) as error:
            if taken:
                self.spare(nbytes, kept=False)
            raise ResourceError(f"no memory for {amount(nbytes)}: {error}") from error

    def add_spare(self, nbytes: int) -> None:
        """Take ``nbytes`` for a segment of which nothing is used yet. Raises `ResourceError` where they do not fit."""
        self.admit(nbytes)
        with self._lock:
            self._spare += nbytes

    def drop_spare(self, nbytes: int) -> None:
        """Give back a segment of which nothing is used."""
        with self._lock:
            self._settle()
            self._spare -= nbytes

    def use_spare(self, nbytes: int) -> None:
        """So many spare bytes are used from now on, until `spare`."""
        with self._lock:
            self._settle()
            self._spare -= nbytes
            self._hold(nbytes)

    def spare(self, nbytes: int, *, kept: bool) -> None:
        """So many are not used any more: ``kept`` for others, or gone. May be called wherever garbage is collected."""
        self._happened.append((nbytes, kept))

    def copy(self, array: Array) -> Array:
        """A C-contiguous copy, counted."""
        made = self.empty(array.shape, array.dtype)
        np.copyto(made, array)
        return made

    def admit(self, nbytes: int) -> None:
        """Raise `ResourceError` where ``nbytes`` more do not fit; lets idle memory go first, if need be."""
        if self.room_for(nbytes):
            return
        self.reclaim()
        if not self.room_for(nbytes):
            raise ResourceError(f"no memory for {amount(nbytes)} more: {self.shortage()}")

    def room_for(self, nbytes: int) -> bool:
        """Whether so many bytes more fit."""
        if self.limit is not None:
            return self.held + self._spare + nbytes <= self.limit
        if nbytes < LOOKED_AT:
            return True
        left = available_bytes()
        return left is None or nbytes <= left

    def shortage(self) -> str:
        """What there is, for an error."""
        if self.limit is not None:
            return f"{amount(self.held)} are held, and the memory_limit is {amount(self.limit)}"
        left = available_bytes()
        return f"the machine has {amount(left) if left is not None else 'an unknown amount'} left"

    def reclaim(self) -> None:
        """Have all idle memory let go."""
        for keeper in self._enlisted():
            keeper.let_go()

    def _enlisted(self) -> list[Keeper]:
        """Those that are enlisted now; others may be while this looks, and some may end."""
        return [keeper for known in self._keepers.valuerefs() if (keeper := known()) is not None]

    def enlist(self, keeper: Keeper) -> None:
        """Let ``keeper``, for as long as it lives, be asked to let go."""
        self._keepers[id(keeper)] = keeper

    @property
    def most_idle(self) -> int:
        """Bytes that may be kept for steps to come."""
        return IDLE_BYTES if self.limit is None else min(IDLE_BYTES, self.limit // 2)

    def trim(self, apart_from: Keeper) -> None:
        """Have idle memory let go, the longest enlisted first, until no more is kept than there should be."""
        bound = self.most_idle
        kept = self._enlisted()
        idle = sum(keeper.idle_bytes for keeper in kept)
        for keeper in kept:
            if idle <= bound:
                return
            if keeper is not apart_from:
                idle -= keeper.idle_bytes
                keeper.let_go()

    def _take(self, nbytes: int) -> None:
        """Count ``nbytes`` for what is about to be made. Raises `ResourceError` where they do not fit."""
        if not self._takes(nbytes):
            self.admit(nbytes)
            if not self._takes(nbytes):  # somebody else took it meanwhile
                raise ResourceError(f"no memory for {amount(nbytes)} more: {self.shortage()}")

    def _takes(self, nbytes: int) -> bool:
        if self.limit is None and not self.room_for(nbytes):
            return False
        with self._lock:
            self._settle()
            if self.limit is not None and self._held + self._spare + nbytes > self.limit:
                return False
            self._hold(nbytes)
        return True

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def _settle(self) -> None:
        """Count what has happened."""
        happened, alive, held, peak = self._happened, self._alive, self._held, self._peak
        while happened:
            what = happened.popleft()
            if isinstance(what, tuple):
                nbytes, kept = what
                held -= nbytes
                self._spare += nbytes if kept else 0
            elif alive.pop(id(what), None) is not None:
                held -= what.nbytes
            else:
                alive[id(what)] = what
                held += what.nbytes
                if held > peak:
                    peak = held
        self._held, self._peak = held, peak


def amount(nbytes: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
