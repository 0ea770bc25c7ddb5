"""The side channel of a Unix connection: which memory either end may see, and when it is seen no more.

Law: a file travels once, before the first message that speaks of it, and is mapped read-only by who gets it, if it is
whole and sealed; after that a large array is a place in a message: (segment, offset, serial). A place is trusted for
nothing: what it names must lie within what is mapped, and its serial must be new. Arrays of integers are copied out of
what is mapped, since they say where to look, and must not change once they were checked. What was lent stays as it is
until the other end gives the serial back, which it does when nobody there refers to the array any more, or until its
process is gone; so the channel outlives its connection for as long as arrays do. Whoever sends anything else breaks the
stream. Nobody waits for anything here: what cannot be lent at once is sent.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
import socket
import stat
import struct
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base import codec
from flowrt.base.errors import BrokenStream
from flowrt.base.valueclass import valueclass
from flowrt.net.wire.frames import LentPlace
from flowrt.sched.host.segments import LARGE, LINE, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.base.codec import Allocate, Array, Layout
    from flowrt.base.errors import FlowrtError
    from flowrt.net.stream.local import Local
    from flowrt.net.wire.frames import Piece
    from flowrt.sched.host.segments import Segment

MOST_LENT = 1 << 12  # arrays lent at once
MOST_LENT_BYTES = 4 << 30  # together, variables apart, which are there anyway
AT_ONCE = 256 << 20  # bytes copied in one turn of the loop, where who sends can wait: 22 ms; less is twice as slow
MOST_SEGMENTS = 1 << 10  # that a peer may show
MOST_OWN = 64  # arrays that are the receiver's own and still lie in a peer's memory; each takes a file descriptor
MOST_OWN_BYTES = 512 << 20  # together; a larger one alone
AGAIN = 0.01  # seconds until what a full socket did not take is tried again
BATCH = 512  # serials in one message
_SHOW, _BACK, _GONE = b"S", b"R", b"G"
_SHOWN = struct.Struct("<cIQ")  # what, segment, bytes
_SEGMENT = struct.Struct("<cI")
_LONGEST = 1 + 8 * BATCH
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class SideSocket(socket.socket):
    """A socket that may be closed by being forgotten: arrays that keep it may outlive every event loop."""

    def __del__(self) -> None:
        self.close()


class Channel:
    """One end of a side channel; it closes ``side`` when nothing is lent or borrowed any more and it was closed."""

    def __init__(self, side: socket.socket, local: Local) -> None:
        self._side = SideSocket(fileno=side.detach())
        self._side.setblocking(False)
        assert local.segments is not None, "nothing asks for a side socket without any"
        self._local = local
        self._segments = local.segments
        self._loop = asyncio.get_running_loop()
        self._fail: Callable[[FlowrtError], None] = lambda error: None
        self._serials = itertools.count(1)
        self._lent: dict[int, _Lent] = {}
        self._lent_bytes = 0
        self._shown: set[int] = set()  # segments of ours that the peer has
        self._mapped: dict[int, _Mapped] = {}  # segments of the peer's
        self._borrowed: set[int] = set()
        self._own: dict[int, int] = {}  # bytes of borrowed arrays that are the receiver's own, by serial
        self._to_say: deque[int | bytes] = deque()  # serials to give back, and other messages
        self._due = False  # they will be said
        self._gone = False  # the peer is, or it has closed the channel
        self._closed = False
        local.enter(self)
        self._loop.add_reader(self._side.fileno(), self._hear)

    def attach(self, fail: Callable[[FlowrtError], None]) -> None:
        """Have ``fail`` be told of a peer that breaks the rules."""
        self._fail = fail

    # ── lending ──

    async def move(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces of a frame, very large ones copied to where they can be lent: bit by bit, as others take turns."""
        for at, piece in enumerate(pieces):
            if len(piece) > AT_ONCE:
                pieces[at] = await self._moved(memoryview(piece))
        return pieces

    async def _moved(self, data: memoryview) -> Piece:
        if not self._may_lend(len(data)) or self._place_of(data, changing=False) is not None:
            return data
        copied, source = self._segments.empty((len(data),), _BYTE), _array_of(data)
        if copied is None:
            return data
        for begin in range(0, len(data), AT_ONCE):
            np.copyto(copied[begin : begin + AT_ONCE], source[begin : begin + AT_ONCE])
            await asyncio.sleep(0)
        return copied.data

    def lend(self, data: memoryview, *, changing: bool) -> LentPlace | None:
        """Where the peer finds an array's bytes; None where they have to be sent.

        What lies in a segment is lent as it is, if it is steady or may be ``changing``; else it is copied into one. It
        is kept until the peer gives it back.
        """
        nbytes = len(data)
        if nbytes < LARGE or not self._may_lend(nbytes):
            return None
        found = self._place_of(data, changing)
        if found is None and (copied := self._copy(data)) is not None:
            data, found = copied, self._place_of(copied, changing)
        if found is None or not self._show(found[0]):
            return None
        serial = next(self._serials)
        kept = self._lent[serial] = _Lent(_array_of(data), nbytes if found[0].steady else 0)
        self._lent_bytes += kept.nbytes
        self._local.shared_bytes += nbytes
        return LentPlace(found[0].number, found[1], serial)

    def _place_of(self, data: memoryview, changing: bool) -> tuple[Segment, int] | None:
        """The segment that bytes lie in as they are to be lent, and where in it."""
        found = self._segments.find(_array_of(data).ctypes.data, len(data))
        return found if found is not None and (found[0].steady or changing) and found[1] % LINE == 0 else None

    def _copy(self, data: memoryview) -> memoryview | None:
        """The bytes in a slot; None where there is none."""
        copied = self._segments.empty((len(data),), _BYTE)
        if copied is not None:
            np.copyto(copied, _array_of(data))
        return None if copied is None else copied.data

    def _may_lend(self, nbytes: int) -> bool:
        if self._gone or self._closed:
            return False
        if len(self._lent) >= MOST_LENT or self._lent_bytes + nbytes > MOST_LENT_BYTES:
            self._hear()  # what came back meanwhile
        return not self._lent or (len(self._lent) < MOST_LENT and self._lent_bytes + nbytes <= MOST_LENT_BYTES)

    def _show(self, segment: Segment) -> bool:
        """Have the peer get a segment, if it has not; answers whether it will find it there."""
        if segment.number in self._shown:
            return True
        if segment.file < 0 or len(self._shown) >= MOST_SEGMENTS:
            return False
        try:
            socket.send_fds(self._side, [_SHOWN.pack(_SHOW, segment.number, segment.nbytes)], [segment.file])
        except OSError:
            return False
        self._shown.add(segment.number)
        return True

    def segment_gone(self, number: int) -> None:
        """A segment of ours was let go. Any thread may say so."""
        if number in self._shown:
            self._shown.discard(number)
            self._say(_SEGMENT.pack(_GONE, number))

    # ── borrowing ──

    def borrow(self, place: LentPlace, layout: Layout, allocate: Allocate) -> Array:
        """The array at a place in the peer's memory. `BrokenStream` where there is none.

        Raises what ``allocate`` does where it has to be copied, and there is no memory.
        """
        if place.segment not in self._mapped:
            self._hear()  # it was shown before it was spoken of
        nbytes = codec.nbytes(layout)
        mapped = self._mapped.get(place.segment)
        if mapped is None or place.offset % LINE or not 0 < nbytes <= mapped.nbytes - place.offset:
            raise BrokenStream(f"an array of {nbytes} bytes is said to be at {place}, where no memory is")
        if place.serial in self._borrowed:
            raise BrokenStream(f"{place} came twice")
        self._borrowed.add(place.serial)
        try:
            return self._seen(mapped, place, layout, nbytes, allocate)
        except BaseException:
            self.give_back(place.serial)
            raise

    def _seen(self, mapped: _Mapped, place: LentPlace, layout: Layout, nbytes: int, allocate: Allocate) -> Array:
        dtype, shape = layout
        memory, end = mapped.seen(place.offset, nbytes), self.give_back
        if dtype.kind in "fcV" and not self._local.own:
            array = memory
        elif dtype.kind in "fcV" and self._may_own(nbytes) and (own := mapped.own(place.offset, nbytes)) is not None:
            array, end = own, self._give_back_own
            self._own[place.serial] = nbytes
        else:
            array = allocate(dtype, shape)
            np.copyto(array, memory.view(dtype).reshape(shape))
            self.give_back(place.serial)
            return array
        weakref.finalize(array, end, place.serial).atexit = False
        return array.view(dtype).reshape(shape)

    def give_back(self, serial: int) -> None:
        """Nobody here refers to a borrowed array any more. Any thread may say so."""
        self._borrowed.discard(serial)
        self._say(serial)

    def _may_own(self, nbytes: int) -> bool:
        held = list(self._own.values())
        return not held or (len(held) < MOST_OWN and sum(held) + nbytes <= MOST_OWN_BYTES)

    def _give_back_own(self, serial: int) -> None:
        self._own.pop(serial, None)
        self.give_back(serial)

    # ── talking ──

    def _say(self, what: int | bytes) -> None:
        """Have something said in the loop's next turn, or now, where there is no loop any more."""
        self._to_say.append(what)
        if self._due:
            return
        self._due = True
        try:
            if _is_running(self._loop):
                self._loop.call_soon(self._say_all)
            else:
                self._loop.call_soon_threadsafe(self._say_all)
        except RuntimeError:  # the loop is closed
            self._say_all()

    def _say_all(self) -> None:
        self._due = False
        try:
            self._say_waiting()
        except BlockingIOError:
            if not self._loop.is_closed():
                self._due = True
                self._loop.call_later(AGAIN, self._say_all)
        except OSError:
            self._to_say.clear()
        self._close_if_over()

    def _say_waiting(self) -> None:
        while self._to_say:
            serials = list(
                itertools.takewhile(lambda what: isinstance(what, int), itertools.islice(self._to_say, BATCH))
            )
            if serials:
                self._side.send(_BACK + struct.pack(f"<{len(serials)}Q", *serials))
            else:
                self._side.send(self._to_say[0])  # type: ignore[arg-type]
            for _ in range(len(serials) or 1):
                self._to_say.popleft()

    def _hear(self) -> None:
        """Take in whatever the peer has said."""
        try:
            while not self._gone and self._side.fileno() >= 0:  # a loop may call once more after it was told not to
                data, files, flags, _ = socket.recv_fds(self._side, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    self._end()
                    return
                try:
                    self._obey(data, files, flags)
                finally:
                    for file in files:
                        os.close(file)
        except BlockingIOError:
            pass
        except BrokenStream as error:
            self._end()
            self._fail(error)
        except OSError:
            self._end()

    def _obey(self, data: bytes, files: list[int], flags: int) -> None:
        what = data[:1]
        if what == _SHOW and len(data) == _SHOWN.size and len(files) == 1 and not flags & socket.MSG_CTRUNC:
            _, number, nbytes = _SHOWN.unpack(data)
            if number in self._mapped or len(self._mapped) >= MOST_SEGMENTS:
                raise BrokenStream(f"segment {number} was shown twice, or is one of more than {MOST_SEGMENTS}")
            self._mapped[number] = _Mapped(files[0], nbytes, self._local.own)
        elif what == _BACK and not files and len(data) % 8 == 1:
            for (serial,) in struct.iter_unpack("<Q", data[1:]):
                lent = self._lent.pop(serial, None)
                if lent is None:
                    raise BrokenStream(f"array {serial} was given back, which is not lent")
                self._lent_bytes -= lent.nbytes
            self._local.rest()
        elif what == _GONE and len(data) == _SEGMENT.size and not files:
            self._mapped.pop(_SEGMENT.unpack(data)[1], None)
        else:
            raise BrokenStream(f"a side channel cannot say {data[:16]!r} with {len(files)} files")
        self._close_if_over()

    # ── the end ──

    def close(self) -> None:
        """The connection is over: nothing more will be lent or borrowed."""
        self._closed = True
        self._fail = lambda error: None
        self._close_if_over()

    def part(self) -> None:
        """This end's memory is given up, so that nothing of it will be used again: what is lent may stay so."""
        self._lent.clear()
        self.close()

    def _end(self) -> None:
        """The peer is gone, or has given everything back."""
        if not self._gone:
            self._gone = True
            self._lent.clear()
            self._lent_bytes = 0
            if not self._loop.is_closed():
                self._loop.remove_reader(self._side.fileno())
                self._local.rest()
            self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._closed or self._lent or self._side.fileno() < 0:
            return
        if not (self._gone or self._loop.is_closed()):
            self._loop.remove_reader(self._side.fileno())
        self._mapped.clear()  # arrays keep what they lie in
        if not self._borrowed and not (self._to_say and self._due):
            self._local.leave(self)
            self._side.close()


@valueclass
class _Lent:
    """What keeps an array that is lent, and the bytes it counts for."""

    memory: Array
    nbytes: int


class _Mapped:
    """A peer's segment, mapped read-only. Raises `BrokenStream` for a file that could shrink, or is not all there.

    ``owned`` keeps the file, so that parts of it can be had as one's own.
    """

    def __init__(self, file: int, nbytes: int, owned: bool) -> None:
        self.file = -1
        self.nbytes = nbytes
        try:
            found, seals = os.fstat(file), fcntl.fcntl(file, fcntl.F_GET_SEALS)
            sound = stat.S_ISREG(found.st_mode) and found.st_size == nbytes > 0 and found.st_blksize == PAGE
            if not sound or seals & _NEEDED_SEALS != _NEEDED_SEALS or found.st_blocks * 512 < nbytes:
                raise BrokenStream(f"no whole, sealed file of {nbytes} bytes was shown as a segment")
            self._pages = mmap.mmap(file, nbytes, access=mmap.ACCESS_READ)
            self.file = os.dup(file) if owned else -1
        except (OSError, ValueError, OverflowError) as error:
            raise BrokenStream(f"a segment of {nbytes} bytes cannot be mapped: {error}") from error

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    def seen(self, offset: int, nbytes: int) -> Array:
        """Bytes of it, which cannot be written."""
        return np.frombuffer(self._pages, np.uint8, nbytes, offset)

    def own(self, offset: int, nbytes: int) -> Array | None:
        """Bytes of it that may be written, each page being copied then; None where the system refuses."""
        within = offset % PAGE
        with suppress(OSError, ValueError):
            pages = mmap.mmap(self.file, within + nbytes, access=mmap.ACCESS_COPY, offset=offset - within)
            return np.frombuffer(pages, np.uint8, nbytes, within)
        return None


_BYTE = np.dtype(np.uint8)


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is the thread that runs ``loop``, which may be closed."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _array_of(data: memoryview) -> Array:
    return np.frombuffer(data, np.uint8)
