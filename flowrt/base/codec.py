"""Messages to bytes and back, under hard limits; tensors stand out of band, uncopied.

A message is plain data: None, bool, int, float, str, bytes, sequences, and dicts with str keys, in which NumPy arrays
may stand anywhere. Every sequence decodes to a tuple, so what is read can be hashed. The header is msgpack; an array in
it is an extension of three bytes of dtype and eight per dimension, and the n-th extension describes the n-th buffer.

Law: bytes are not trusted. `survey` walks a header once, before anything is allocated, and refuses what is truncated,
too long, too deep, too many or not ours; whatever is illegal is `BrokenStream`, and nothing else leaves a function that
reads. `decode_whole` is faster and accepts only what cannot break a limit: all else is `survey`'s to judge. What a
reader would refuse, `encode` refuses first, as `SpecError`. Pure; the only file that knows msgpack.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgpack
import numpy as np

from flowrt.base.errors import BrokenStream, FlowrtError, SpecError
from flowrt.base.spec import DTYPES, MAX_RANK, as_dtype, bfloat16
from flowrt.base.valueclass import valueclass

Message: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Layout: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
Bytes: TypeAlias = bytes | bytearray | memoryview
Allocate: TypeAlias = Callable[[np.dtype[Any], tuple[int, ...]], Array]


@valueclass
class Limits:
    """What one message may hold; each is checked before the memory it bounds is allocated."""

    header: int = 1 << 18  # bytes of msgpack
    depth: int = 32  # containers inside containers
    items: int = 1 << 12  # values in all containers together
    arrays: int = 1 << 10
    array_bytes: int = 1 << 32  # of all arrays together
    rank: int = MAX_RANK


# What a peer may send at once. The worst there is, 4,096 empty maps, takes 3 ms to decode on a core of 2024, and an
# event loop has other things to do: what may be larger travels packed in an array, and is unpacked in a lane.
FRAME = Limits()
PLAN = Limits(header=64 << 20, depth=64, items=1 << 22, arrays=1 << 16)  # graphs, plans and files
# One part of a plan that came from a peer. While msgpack decodes, no other thread runs, nor the event loop: a part
# of as many values as may be, or of one long text, takes 1 to 2 ms with the collector held back.
PART = Limits(header=2 << 20, depth=64, items=1 << 15, arrays=1 << 12)

_ARRAY = 1  # the extension code of an array
_LARGEST = 2**63 - 1  # what NumPy can address
_WIRE = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}
# where that is this machine's order, the one object that stands for each dtype: direct calls know arrays by it
_DTYPES = {wire.str.encode(): np.dtype(name) if wire == np.dtype(name) else wire for name, wire in _WIRE.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_V2, _PREFIX = b"<V2", struct.Struct("<I")  # the code of bfloat16; a length
_DIMENSIONS = [struct.Struct(f"<{rank}Q") for rank in range(MAX_RANK + 1)]
_CONTAINERS, _EMPTY = (dict, list, tuple), ()
_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})  # what most values are
SHORT = 1 << 10  # bytes of a header that may be decoded before it is surveyed
MOST_CONTAINERS = 128  # bytes of it that may begin one, as bytes of floats may: each may claim as many values as bytes
# What `decode_whole` stays within: a value takes a byte at least, the description of an array six.
WHOLE = Limits(header=SHORT, items=SHORT, arrays=SHORT // 6, array_bytes=1 << 17)

_BUFFER = 1 << 10  # bytes that a header is written to at first
_LAYOUTS = 1024  # dtypes and shapes whose descriptions are kept


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message, limits: Limits = FRAME) -> tuple[bytes, list[memoryview]]:
    """The header of ``message`` and the bytes of its arrays, in order.

    The memoryviews alias the arrays: who sends them keeps the arrays unchanged until they are sent. Arrays that are not
    C-contiguous are copied. Raises `SpecError` for what is not plain data or is beyond ``limits``.
    """
    return _encode(message, limits)[:2]


def _encode(message: Message, limits: Limits) -> tuple[bytes, list[memoryview], int]:
    """What `encode` gives, and the number of values in containers."""
    arrays: list[Array] = []

    def set_aside(value: Any) -> msgpack.ExtType:
        array = sendable(value)
        arrays.append(array)
        return _describe(array.dtype, array.shape)

    items = _check_plain(message, limits)
    try:
        header: bytes = msgpack.Packer(default=set_aside, buf_size=_BUFFER).pack(message)
    except (ValueError, OverflowError, TypeError) as error:
        raise SpecError(f"a message cannot hold this value: {error}") from error
    if len(header) > limits.header:
        raise SpecError(f"the message is {len(header)} bytes beside its arrays, over the limit of {limits.header}")
    if not arrays:
        return header, [], items
    buffers = [bytes_of(array) for array in arrays]
    total = sum(map(len, buffers))
    if len(buffers) > limits.arrays or total > limits.array_bytes:
        raise SpecError(
            f"the message holds {len(buffers)} arrays of {total} bytes; "
            f"the limits are {limits.arrays} arrays and {limits.array_bytes} bytes"
        )
    return header, buffers, items


def pack(message: Message, limits: Limits = PLAN) -> bytes:
    """``message`` and its arrays as one string of bytes, for files and graphs; `unpack` reads it."""
    header, buffers = encode(message, limits)
    return b"".join((_PREFIX.pack(len(header)), header, *buffers))


def pack_parts(
    parts: Iterable[Message],
    each: Limits = PART,
    limits: Limits = PLAN,
    *,
    where: Callable[[Message], str] = lambda part: "a part",
) -> bytes:
    """The messages ``parts``, packed one after another, for `unpack_parts`; together they are within ``limits``.

    ``where`` names a part that cannot be packed.
    """
    pieces: list[bytes | memoryview] = []
    spent = _Spent(limits, SpecError)
    for part in parts:
        try:
            header, buffers, items = _encode(part, each)
        except SpecError as error:
            raise SpecError(f"{where(part)}: {error}") from None
        spent.add(len(header), items, len(buffers))
        pieces += (_PREFIX.pack(len(header)), header, *buffers)
    return b"".join(pieces)


class _Spent:
    """What messages packed one after another hold together."""

    def __init__(self, limits: Limits, error: type[FlowrtError]) -> None:
        self._limits = limits
        self._error = error
        self._header = self._items = self._arrays = 0

    def add(self, header: int, items: int, arrays: int) -> None:
        limits = self._limits
        self._header += header
        self._items += items
        self._arrays += arrays
        if self._header > limits.header or self._items > limits.items or self._arrays > limits.arrays:
            raise self._error(
                f"the parts of a message are over its limits of {limits.header} bytes beside its arrays, "
                f"{limits.items} values and {limits.arrays} arrays"
            )


def bytes_of(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, uncopied. NumPy lends no memory of bfloat16, but of its bits."""
    plain = array.view("u2") if array.dtype.kind == "V" else array
    return plain.data.cast("B") if array.size else memoryview(b"")


def _check_plain(message: Message, limits: Limits) -> int:
    """Refuse what msgpack would write and `survey` refuse: other keys than str, too many values, too deep.

    How many values there are.
    """
    return _count(message, limits, limits.depth) if isinstance(message, _CONTAINERS) else 0


def _count(container: Any, limits: Limits, depth: int) -> int:
    """How many values there are in a container, which is to be no deeper than that."""
    items, values = len(container), container
    if isinstance(container, dict):
        _check_keys(container)
        items, values = 2 * items, container.values()
    if not _LEAVES.issuperset(map(type, values)):  # one call for all of them, which is all of it for most
        for value in values:
            if type(value) in _LEAVES or (value is _EMPTY and depth > 1):
                continue
            if isinstance(value, _CONTAINERS) and depth > 0 and items <= limits.items:
                items += _count(value, limits, depth - 1)
    if depth < 1 or items > limits.items:
        raise SpecError(f"the message is beyond {limits.depth} levels or {limits.items} values")
    return items


def _check_keys(mapping: dict[Any, Any]) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise SpecError(f"the keys of a message are str, got {key!r}; send pairs instead")


def sendable(value: Any) -> Array:
    """``value`` as it may be sent: copied where it does not lie in order. Raises `SpecError` for what is no array."""
    if type(value) is np.ndarray and value.flags.c_contiguous and value.dtype in _CODES:
        return value
    if isinstance(value, np.generic):
        raise SpecError(
            f"a message cannot hold the NumPy scalar {value!r}; write .item(), or np.asarray() for an array"
        )
    if not isinstance(value, np.ndarray):
        raise SpecError(f"a message cannot hold a {type(value).__name__}: {value!r:.80}; only plain data and arrays")
    return np.asarray(value, dtype=as_dtype(value.dtype).newbyteorder("<"), order="C")


@lru_cache(_LAYOUTS)
def _describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> msgpack.ExtType:
    return msgpack.ExtType(_ARRAY, describe(dtype, shape))


def describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What stands for an array in a header: three bytes of dtype, eight per dimension."""
    if len(shape) > MAX_RANK:
        raise SpecError(f"an array in a message has at most {MAX_RANK} dimensions, got {len(shape)}")
    return (_V2 if dtype.kind == "V" and dtype == bfloat16() else _CODES[dtype]) + _DIMENSIONS[len(shape)].pack(*shape)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(header: Bytes, buffers: Sequence[Bytes], limits: Limits = FRAME) -> Message:
    """The message of ``header`` and the bytes of its arrays; the arrays alias ``buffers``."""
    layouts = survey(header, limits)
    if len(layouts) != len(buffers):
        raise BrokenStream(f"the header describes {len(layouts)} arrays, {len(buffers)} came")
    return assemble(header, [_view(layout, buffer) for layout, buffer in zip(layouts, buffers, strict=True)])


def unpack(data: Bytes, limits: Limits = PLAN) -> Message:
    """The message that `pack` wrote. Its arrays are copies and may be written to."""
    view = memoryview(data).cast("B")
    header, layouts, _ = _packed_at(view, 0, limits)
    start = _PREFIX.size + len(header)
    if start + sum(map(nbytes, layouts)) != len(view):
        raise BrokenStream(f"the packed message has {len(view) - start} bytes of arrays, its header describes others")
    return assemble(header, _copies(view[start:], layouts))


def unpack_parts(data: Bytes, each: Limits = PART, limits: Limits = PLAN) -> Iterator[Message]:
    """The messages that `pack_parts` wrote, each decoded when it is asked for."""
    view = memoryview(data).cast("B")
    spent = _Spent(limits, BrokenStream)
    at = 0
    while at < len(view):
        header, layouts, items = _packed_at(view, at, each)
        spent.add(len(header), items, len(layouts))
        start = at + _PREFIX.size + len(header)
        at = start + sum(map(nbytes, layouts))
        if at > len(view):
            raise BrokenStream(f"the packed message ends after {len(view)} bytes, inside its arrays up to {at}")
        yield assemble(header, _copies(view[start:at], layouts) if layouts else ())


def _packed_at(view: memoryview, at: int, limits: Limits) -> tuple[memoryview, list[Layout], int]:
    """The header of the packed message at ``at``, the arrays and the number of values in it."""
    begin = at + _PREFIX.size
    if len(view) < begin:
        raise BrokenStream(f"a packed message has at least {_PREFIX.size} bytes, got {len(view) - at}")
    end = begin + _PREFIX.unpack_from(view, at)[0]
    if end > len(view):
        raise BrokenStream(f"the packed message ends after {len(view)} bytes, inside its header up to {end}")
    header = view[begin:end]
    return header, *_surveyed(header, limits)


def _copies(view: memoryview, layouts: Iterable[Layout]) -> list[Array]:
    arrays, start = [], 0
    for layout in layouts:
        end = start + nbytes(layout)
        arrays.append(_view(layout, view[start:end]).copy())
        start = end
    return arrays


def survey(header: Bytes, limits: Limits = FRAME) -> list[Layout]:
    """The dtype and shape of each array that ``header`` describes, in order; `BrokenStream` if it is not legal.

    One walk over the tokens, without building a value: a thousand nested arrays that each claim a million entries would
    make msgpack allocate gigabytes before it sees that they are lies.
    """
    return _surveyed(header, limits)[0]


def _surveyed(header: Bytes, limits: Limits) -> tuple[list[Layout], int]:
    """What `survey` finds, and how many values there are in containers."""
    if len(header) > limits.header:
        raise BrokenStream(f"a header of {len(header)} bytes is over the limit of {limits.header}")
    try:
        layouts, items, end = _walk(bytes(header), limits)
    except IndexError:
        raise BrokenStream(f"the header is truncated at {len(header)} bytes") from None
    if end != len(header):
        raise BrokenStream(f"the header has {len(header)} bytes, its value {end}")
    check_sizes(layouts, limits)
    return layouts, items


def assemble(header: Bytes, arrays: Sequence[Any]) -> Message:
    """The message of a header that `survey` accepted, with ``arrays`` (or what stands for them) in their places."""
    places = iter(arrays)
    try:
        return msgpack.unpackb(
            header,
            use_list=False,
            object_pairs_hook=_mapping,
            ext_hook=lambda code, data: next(places),
            max_ext_len=len(header),
        )
    except (BrokenStream, MemoryError):
        raise
    except Exception as error:  # msgpack lets five types of exception out; none of them may pass for a bug
        raise BrokenStream(f"the header is not legal msgpack: {type(error).__name__}: {error}") from error


def decode_whole(data: memoryview, length: int, allocate: Allocate) -> tuple[Message, int] | None:
    """The message at the start of ``data``, a header of ``length`` bytes and its arrays, and how many bytes it is.

    The arrays are copied to memory from ``allocate``. One pass, for a header of at most `SHORT` bytes that is within
    `WHOLE`: it holds no more values or arrays than it has bytes, and is no deeper than it has bytes that may begin a
    container, which are few. None for all else, to be surveyed: illegal, or merely deep, or not yet all there.
    """
    if length > SHORT:
        return None
    header, at = bytes(data[:length]), length
    containers = len(header.translate(None, _BEGIN_NO_CONTAINER))
    if containers > MOST_CONTAINERS or (b"\xff" in header and _MAYBE_TIMESTAMP.search(header)):
        return None

    def place(code: int, description: bytes) -> Array:
        nonlocal at
        (dtype, shape), size = _sized(code, description)
        begin, at = at, at + size
        if not begin < at <= len(data):
            raise ValueError(size)
        array = allocate(dtype, shape)
        bytes_of(array)[:] = data[begin:at]
        return array

    try:
        message = msgpack.unpackb(header, use_list=False, object_pairs_hook=_mapping, ext_hook=place)
        if containers > WHOLE.depth:
            _check_plain(message, WHOLE)
        return message, at
    except Exception:  # whatever it is, the survey says it by name
        return None


def fits(array: Array, layout: Layout) -> bool:
    """Whether an array of that layout can be received into ``array``."""
    return (array.dtype, array.shape) == layout and array.flags.carray


def nbytes(layout: Layout) -> int:
    """The bytes of an array of that dtype and shape."""
    return math.prod(layout[1]) * layout[0].itemsize


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise BrokenStream("a map in the header holds a key twice")
    for key in mapping:
        if type(key) is not str:
            raise BrokenStream(f"a map in the header holds the key {key!r:.80}, which is not a str")
    return mapping


def _view(layout: Layout, buffer: Bytes) -> Array:
    dtype, shape = layout
    view = memoryview(buffer)
    if view.nbytes != nbytes(layout):
        raise BrokenStream(f"{dtype}{list(shape)} needs {nbytes(layout)} bytes, {view.nbytes} came")
    if view.nbytes == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(view, dtype).reshape(shape)


# An extension of code -1 and of 4, 8 or 12 bytes: msgpack's own timestamps, which are not ours.
_MAYBE_TIMESTAMP = re.compile(rb"(?:[\xd6\xd7]|(?:\xc7|\xc8\x00|\xc9\x00\x00\x00)[\x04\x08\x0c])\xff")
_BEGIN_NO_CONTAINER = bytes(code for code in range(256) if not (0x80 <= code < 0xA0 or 0xDC <= code < 0xE0))

# How many bytes a token takes, by its first byte; 0: a container, a length, an extension, or nothing legal.
_SIZE = [1] * 0x80 + [0] * 0x20 + [1 + n for n in range(32)] + [0] * 0x20 + [1] * 0x20
for _code, _bytes in {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),
    **{0xCA: 5, 0xCB: 9},
    **{0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9},
}.items():
    _SIZE[_code] = _bytes
_STRINGS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes of their length: bin and str
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # bytes of the count, values per count
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _walk(header: bytes, limits: Limits) -> tuple[list[Layout], int, int]:
    """The arrays described by the one value at the start of ``header``, the values in it, and where it ends."""
    layouts: list[Layout] = []
    outer: list[int] = []  # values still to come in each open container but the innermost
    left, items, at = 1, 0, 0
    while True:
        while not left:
            if not outer:
                return layouts, items, at
            left = outer.pop()
        left -= 1
        code = header[at]
        size = _SIZE[code]
        if size:
            at += size
        elif code in _STRINGS:
            at += 1 + _STRINGS[code] + _number(header, at + 1, _STRINGS[code])
        elif code in _EXTENSIONS or code in _FIXED_EXTENSIONS:
            layout, at = _array(header, at, limits)
            layouts.append(layout)
            if len(layouts) > limits.arrays:
                raise BrokenStream(f"the header describes more than {limits.arrays} arrays")
        else:
            count, at = _container(header, at)
            items += count
            outer.append(left)
            left = count
            if items > limits.items or len(outer) > limits.depth:
                raise BrokenStream(f"the header is beyond {limits.depth} levels or {limits.items} values")


def _number(header: bytes, at: int, width: int) -> int:
    """A big-endian number. One cut short by the end reads low, and the walk then stops beyond the end all the same."""
    return int.from_bytes(header[at : at + width], "big")


def _container(header: bytes, at: int) -> tuple[int, int]:
    """How many values the container at ``at`` holds, and where the first begins."""
    code = header[at]
    if 0x80 <= code < 0x90:
        return 2 * (code & 0x0F), at + 1
    if 0x90 <= code < 0xA0:
        return code & 0x0F, at + 1
    if code not in _COUNTS:
        raise BrokenStream(f"byte {at} of the header, 0x{code:02x}, begins nothing legal")
    width, each = _COUNTS[code]
    return each * _number(header, at + 1, width), at + 1 + width


def _array(header: bytes, at: int, limits: Limits) -> tuple[Layout, int]:
    """The array that the extension at ``at`` describes, and where the extension ends."""
    width = _EXTENSIONS.get(header[at], 0)
    length = _number(header, at + 1, width) if width else _FIXED_EXTENSIONS[header[at]]
    start = at + 1 + width
    return layout_of(header[start + 1 : start + 1 + length], limits.rank, header[start]), start + 1 + length


@lru_cache(_LAYOUTS)
def _sized(kind: int, data: bytes) -> tuple[Layout, int]:
    """The array that an extension describes, and its bytes."""
    layout = _layout(kind, data)
    return layout, nbytes(layout)


def layout_of(description: bytes, most: int, kind: int = _ARRAY) -> Layout:
    """The array that `describe` described; `BrokenStream` for what describes none, or one of too many dimensions."""
    layout = _layout(kind, description)
    if len(layout[1]) > most:
        raise _too_many_dimensions(len(layout[1]), most)
    return layout


def _layout(kind: int, data: bytes) -> Layout:
    """The array that an extension describes."""
    dtype, rank = bfloat16() if data[:3] == _V2 else _DTYPES.get(data[:3]), (len(data) - 3) // 8
    if kind != _ARRAY or dtype is None or len(data) != 3 + 8 * rank:
        raise BrokenStream(f"the header holds an extension that describes no array: {data[:16]!r}")
    if rank > MAX_RANK:
        raise _too_many_dimensions(rank, MAX_RANK)
    return dtype, _DIMENSIONS[rank].unpack_from(data, 3)


def _too_many_dimensions(rank: int, limit: int) -> BrokenStream:
    return BrokenStream(f"the header describes an array of {rank} dimensions, over the limit of {limit}")


def check_sizes(layouts: Sequence[Layout], limits: Limits) -> None:
    """Raise `BrokenStream` where arrays of such layouts are more than memory can address, or beyond ``limits``."""
    total = 0
    for dtype, shape in layouts:
        size = math.prod(shape) * dtype.itemsize
        span = size or math.prod(n or 1 for n in shape) * dtype.itemsize  # NumPy refuses (0, 2**62, 4) as well
        if span > _LARGEST:
            raise BrokenStream(f"the header describes {dtype}{list(shape)}, more than memory can address")
        total += size
    if total > limits.array_bytes:
        raise BrokenStream(f"the header describes arrays of {total} bytes, over the limit of {limits.array_bytes}")
