"""The unit of the wire: a length, a header, and the raw bytes of the arrays it describes.

Law: pure; bytes go in and messages come out, whatever way the bytes were cut. `FrameReader` hands out the memory that
the next bytes belong in, so a large array is received where it will stay. A peer's claims are checked against `Limits`
before memory is allocated for them; what is not a legal frame raises `BrokenStream`, and the reader is then done for.
An array that there is no memory for is read past, and `NoRoom` stands in its place: that is its message's trouble, and
not the stream's. Frames do not interpret messages.

    u32 length of the header, little-endian | header (see `codec`, `net.wire.brief`) | array 0 | array 1 | …

A length of zero is the goodbye: the last thing a peer says, which tells an end from a loss. In a length with the
highest bit, the header is followed by a `LentPlace` for each array, and only those that have none come as bytes: the
others lie in memory that both ends see (`flowrt.net.stream.shared`), which who made the reader is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from operator import ge
from typing import Any, TypeAlias

import numpy as np

from flowrt.base import codec
from flowrt.base.codec import FRAME, Allocate, Array, Limits, Message
from flowrt.base.errors import BrokenStream, InternalError, ResourceError
from flowrt.base.valueclass import valueclass
from flowrt.net.wire import brief

Deliver: TypeAlias = Callable[[Message, int], None]
Piece: TypeAlias = bytes | memoryview

GOODBYE = bytes(4)
WINDOW = 1 << 17  # bytes received at once when it is not known what they are; all that is decoded whole has room there
WORK = 1 << 13  # bytes of headers decoded at once: 4 ms, where each byte is an empty map
_PREFIX = struct.Struct("<I")
_PLACED = 1 << 31  # in the length of a header: places follow it
_PLACE = struct.Struct("<IQQ")
_SMALL = 1 << 14  # pieces up to this are cheaper to copy than to hand to the kernel one by one
ONE_WRITE = 1 << 17  # bytes of a frame that are cheaper to copy than to write, and be woken for, piece by piece
_DIRECT = 1 << 14  # an array that lacks fewer bytes than this is completed through the window, with what follows it
_NOTHING = memoryview(b"")
_UNBOUNDED = 1 << 62
_HERE = _PLACE.pack(0, 0, 0)


@valueclass
class LentPlace:
    """Where an array lies in the sender's memory: a segment, from 1 up, and an offset; each lending has a new serial.

    Segment 0 is none: the array comes as bytes.
    """

    segment: int
    offset: int
    serial: int

    def __str__(self) -> str:
        return f"byte {self.offset} of segment {self.segment} (serial {self.serial})"


Lend: TypeAlias = Callable[[memoryview], "LentPlace | None"]
Borrow: TypeAlias = Callable[[LentPlace, codec.Layout, Allocate], Array]


@valueclass
class NoRoom:
    """What a message holds in place of an array that could not be allocated; ``reason`` says why."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    reason: str

    @property
    def nbytes(self) -> int:
        return codec.nbytes((self.dtype, self.shape))

    def error(self, what: str) -> ResourceError:
        """The error of who needed ``what`` came so."""
        layout = f"{self.dtype}{list(self.shape)}, {self.nbytes} bytes"
        return ResourceError(f"{what}: no memory to receive {layout}: {self.reason}")


def allocate_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Fresh memory for an array that is about to be received."""
    return np.empty(shape, dtype)


def frame(message: Message, limits: Limits = FRAME) -> list[Piece]:
    """The bytes of ``message`` on the wire, aliasing its arrays. `SpecError` if it is not a legal message."""
    header, buffers = codec.encode(message, limits)
    return [_PREFIX.pack(len(header)) + header, *buffers]


def placed(pieces: Sequence[Piece], lend: Lend) -> Sequence[Piece]:
    """What `frame` answered, without the arrays that ``lend`` knows places for; it answers None for the others."""
    head, *buffers = pieces
    places = [lend(memoryview(buffer)) for buffer in buffers]
    if not any(places):
        return pieces
    (length,) = _PREFIX.unpack_from(head)
    table = b"".join(_PLACE.pack(place.segment, place.offset, place.serial) if place else _HERE for place in places)
    here = [buffer for buffer, place in zip(buffers, places, strict=True) if place is None]
    return [_PREFIX.pack(_PLACED | length) + bytes(head[_PREFIX.size :]) + table, *here]


def joined(pieces: Sequence[Piece]) -> Piece | None:
    """``pieces`` as one write, if they are few bytes; else None."""
    if len(pieces) == 1 and len(pieces[0]) <= ONE_WRITE:
        return pieces[0]
    return b"".join(pieces) if sum(map(len, pieces)) <= ONE_WRITE else None


def writes(pieces: Sequence[Piece], size: int) -> Iterator[Piece]:
    """``pieces`` as a sender should write them: small ones joined, large ones uncopied in slices of ``size`` bytes."""
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) <= _SMALL:
            small.append(piece)
            continue
        if small:
            yield from _joined(small, size)
            small = []
        for start in range(0, len(piece), size):
            yield piece[start : start + size]
    if small:
        yield from _joined(small, size)


def _allow(limits: Limits, others: Limits) -> bool:
    """Whether what is within ``others`` is within these limits."""
    return all(map(ge, astuple(limits), astuple(others)))


def _places_in(table: bytearray) -> list[LentPlace | None]:
    """What a frame says of where its arrays are."""
    return [LentPlace(*place) if place[0] else None for place in _PLACE.iter_unpack(table)]


def _joined(small: Sequence[Piece], size: int) -> Iterator[Piece]:
    whole = small[0] if len(small) == 1 else b"".join(small)
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


class FrameReader:
    """Bytes in, messages out, by the two calls of `asyncio.BufferedProtocol`.

    Fill the start of `get_buffer`, then tell `buffer_updated` how much came; it calls ``deliver(message, size)`` for
    each message that is whole, with its bytes on the wire. ``allocate`` is asked for the memory of each array once the
    limits are checked; it must answer a writable, C-contiguous array of that dtype and shape, or raise `MemoryError` or
    `ResourceError`. With ``work``, a call stops after so many bytes of headers, `more` says so, and the next goes on,
    also if told that no bytes came. So it does after a `MemoryError`, which leaves everything as it was. ``borrow``
    answers the array at a place in the sender's memory; without it, a frame with places is none.
    """

    __slots__ = (
        "_allocate",
        "_arrays",
        "_borrow",
        "_deliver",
        "_end",
        "_header",
        "_layouts",
        "_limits",
        "_past",
        "_places",
        "_rest",
        "_roomy",
        "_size",
        "_start",
        "_targets",
        "_window",
        "_work",
        "_worked",
        "ended",
    )

    def __init__(
        self,
        deliver: Deliver,
        limits: Limits = FRAME,
        allocate: Allocate = allocate_array,
        window: int = WINDOW,
        work: int | None = None,
        borrow: Borrow | None = None,
    ) -> None:
        self._deliver = deliver
        self._borrow = borrow
        self._limits = limits
        self._roomy = _allow(limits, codec.WHOLE) and _allow(limits, brief.WHOLE)
        self._allocate = allocate
        self._window = memoryview(bytearray(max(window, 2 * _PREFIX.size)))
        self._start = self._end = 0  # what of the window is received and not yet used
        self._rest = _NOTHING  # what of the header or array in progress is not yet received
        self._past = 0  # bytes of an array without room that are still to be read past
        self._header: bytearray | None = None  # of the frame in progress
        self._layouts: Sequence[codec.Layout] | None = None  # of its arrays, once the header is surveyed
        self._places: bytearray | None = None  # of its arrays, where it has any; empty until the header is whole
        self._arrays: list[Array | NoRoom] | None = None  # of the frame in progress, once its header is whole
        self._targets: list[memoryview | int] = []  # arrays not yet begun, or the bytes to read past; the next one last
        self._size = 0  # bytes of the frame in progress
        self._work = work or _UNBOUNDED
        self._worked = 0  # bytes of headers decoded in this call
        self.ended = False  # the peer said goodbye

    @property
    def idle(self) -> bool:
        """Whether no frame is in progress: an end of the stream here cuts nothing."""
        return self._header is None and self._start == self._end

    @property
    def more(self) -> bool:
        """Whether the last call stopped for its work's sake."""
        return self._worked >= self._work

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes of the stream belong, however many come; never empty."""
        if len(self._rest) >= _DIRECT:
            return self._rest
        return self._window[self._end :] if self._end else self._window

    def take_alone(self, count: int) -> Message | None:
        """The message that ``count`` bytes are which were written, where they are one short frame and nothing is left.

        Else nothing is done, and `buffer_updated` is to be told of them.
        """
        window, begin = self._window, _PREFIX.size
        if self._end or self._header is not None or self.ended or not self._roomy:
            return None
        if count > begin and window[begin] == brief.BEGINS:  # as mostly
            whole = brief.decode_whole(window, 0, count, self._allocate)
        else:
            whole = self._whole(0, count)
        return None if whole is None or whole[1] != count else whole[0]

    def _whole(self, at: int, end: int) -> tuple[Message, int] | None:
        """The message of the frame that begins ``at`` a place of the window, and where it ends.

        None for what is not short and legal. What is not there until ``end`` is none, or where it ends is beyond that.
        """
        begin = at + _PREFIX.size
        if begin >= end:
            return None
        if self._window[begin] == brief.BEGINS:
            return brief.decode_whole(self._window, at, end, self._allocate)
        (length,) = _PREFIX.unpack_from(self._window, at)
        if not 0 < length <= end - begin:
            return None
        whole = codec.decode_whole(self._window[begin:end], length, self._allocate)
        return None if whole is None else (whole[0], begin + whole[1])

    def buffer_updated(self, count: int) -> None:
        """``count`` bytes were written to what `get_buffer` answered."""
        if len(self._rest) >= _DIRECT:
            self._rest = self._rest[count:] or _NOTHING  # an empty view would keep the array
            if self._rest:
                return
        else:
            self._end += count
        self._worked = 0
        while self._worked < self._work and (self._start < self._end or self._header is not None):
            may_be_whole = self._header is None and not self.ended and self._roomy
            whole = self._whole(self._start, self._end) if may_be_whole else None
            if whole is None:
                if not self._advance():
                    break
            elif whole[1] <= self._end:
                self._take(*whole)
            else:  # the window has room for all of it
                break
        if self._start == self._end:
            self._start = self._end = 0
        else:
            self._make_room()

    def _take(self, message: Message, end: int) -> None:
        """Deliver the message of the next frame, which ends there."""
        (length,) = _PREFIX.unpack_from(self._window, self._start)
        size, self._start = end - self._start, end
        self._worked += _PREFIX.size + length
        self._deliver(message, size)

    def _advance(self) -> bool:
        """Take one step; answers whether another is possible with the bytes at hand."""
        if self._header is None and not self._begin():
            return False
        if self._rest or self._past:
            self._pour()
            if self._rest or self._past:
                return False
        if self._arrays is None:
            if self._places is not None and not self._places:
                self._expect_places()
            if not self._rest:
                self._open()
        elif self._targets:
            self._aim_at(self._targets.pop())
        if not (self._rest or self._past or self._targets):
            self._finish()
        return True

    def _begin(self) -> bool:
        """Read the length of the next header; answers whether there is a frame."""
        if self.ended and self._start < self._end:
            raise BrokenStream("bytes came after the goodbye")
        if self._end - self._start < _PREFIX.size:
            return False
        (length,) = _PREFIX.unpack_from(self._window, self._start)
        if self._borrow is not None and length > _PLACED:
            length -= _PLACED
            self._places = bytearray()
        if length > self._limits.header:
            raise BrokenStream(f"a frame announces a header of {length} bytes, over the limit of {self._limits.header}")
        header = bytearray(length)
        self._start += _PREFIX.size
        if length == 0:
            self.ended = True
            return self._begin()
        self._header, self._rest = header, memoryview(header)
        self._size = _PREFIX.size + length
        return True

    def _open(self) -> None:
        """Make room for the arrays that a whole header describes."""
        assert self._header is not None
        layouts = self._survey(self._header) if self._layouts is None else self._layouts
        places: list[LentPlace | None] = [None] * len(layouts) if self._places is None else _places_in(self._places)
        arrays = [self._room_for(layout, place) for layout, place in zip(layouts, places, strict=True)]
        here = [array for array, place in zip(arrays, places, strict=True) if place is None]
        targets = [array.nbytes if isinstance(array, NoRoom) else codec.bytes_of(array) for array in here]
        self._targets = [target for target in reversed(targets) if target]
        self._size += sum(array.nbytes for array in here)
        self._arrays, self._layouts, self._places = arrays, None, None

    def _survey(self, header: bytearray) -> Sequence[codec.Layout]:
        survey = brief.survey if header[0] == brief.BEGINS else codec.survey
        return survey(header, self._limits)

    def _expect_places(self) -> None:
        """Have the places come next that the arrays of a whole header have."""
        assert self._header is not None
        self._layouts = self._survey(self._header)
        self._places = bytearray(_PLACE.size * len(self._layouts))
        if not self._places:
            raise BrokenStream("a frame announces places, and its header describes no arrays")
        self._rest = memoryview(self._places)
        self._size += len(self._places)

    def _room_for(self, layout: codec.Layout, place: LentPlace | None) -> Array | NoRoom:
        try:
            array = self._allocate(*layout) if place is None else self._borrowed(place, layout)
        except (MemoryError, ResourceError) as error:
            return NoRoom(*layout, str(error))
        if place is not None:
            return array
        if not codec.fits(array, layout):
            asked, got = ((str(dtype) + str(list(shape))) for dtype, shape in (layout, (array.dtype, array.shape)))
            raise InternalError(f"asked for {asked}, allocated {got}")
        return array

    def _borrowed(self, place: LentPlace, layout: codec.Layout) -> Array:
        assert self._borrow is not None
        return self._borrow(place, layout, self._allocate)

    def _aim_at(self, target: memoryview | int) -> None:
        """Have the bytes that come next go to ``target``, or nowhere, if it is a number of them."""
        if isinstance(target, int):
            self._past = target
        else:
            self._rest = target

    def _finish(self) -> None:
        assert self._header is not None
        assert self._arrays is not None
        assemble = brief.assemble if self._header[0] == brief.BEGINS else codec.assemble
        message = assemble(self._header, self._arrays)
        self._worked += _PREFIX.size + len(self._header)
        self._header = self._arrays = None
        self._deliver(message, self._size)

    def _pour(self) -> None:
        """Move received bytes from the window to where they belong."""
        count = min(len(self._rest) or self._past, self._end - self._start)
        if self._past:
            self._past -= count
        else:
            self._rest[:count] = self._window[self._start : self._start + count]
            self._rest = self._rest[count:] or _NOTHING
        self._start += count

    def _make_room(self) -> None:
        left = self._end - self._start
        if self._start and left:
            self._window[:left] = self._window[self._start : self._end]
        self._start, self._end = 0, left
