"""Messages to bytes and back, under hard limits; tensors stand out of band, uncopied.

A message is plain data: None, bool, int, float, str, bytes, sequences, and dicts with str keys, in which NumPy arrays
may stand anywhere. Every sequence decodes to a tuple, so what is read can be hashed. The header is msgpack; an array in
it is an extension of three bytes of dtype and eight per dimension, and the n-th extension describes the n-th buffer.

Law: bytes are not trusted. `survey` walks a header once, before anything is allocated, and refuses what is truncated,
too long, too deep, too many or not ours; whatever is illegal is `BrokenStream`, and nothing else leaves a function that
reads. What a reader would refuse, `encode` refuses first, as `SpecError`. Pure; the only file that knows msgpack.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np

from flowrt.errors import BrokenStream, SpecError
from flowrt.spec import MAX_RANK, as_dtype

Message: TypeAlias = Any
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Layout: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
Bytes: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may hold; each is checked before the memory it bounds is allocated."""

    header: int = 1 << 20  # bytes of msgpack
    depth: int = 32  # containers inside containers
    items: int = 1 << 14  # values in all containers together; 16,384 empty maps decode within 10 ms
    arrays: int = 1 << 10
    array_bytes: int = 1 << 32  # of all arrays together
    rank: int = MAX_RANK


FRAME = Limits()  # what a peer may send at once
PLAN = Limits(header=64 << 20, depth=64, items=1 << 22, arrays=1 << 16)  # graphs, plans and files

_ARRAY = 1  # the extension code of an array
_LARGEST = 2**63 - 1  # what NumPy can address
_NAMES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64"
_DTYPES = {wire.str.encode(): wire for wire in (as_dtype(name).newbyteorder("<") for name in _NAMES.split())}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PREFIX = struct.Struct("<I")
_DIMENSIONS = [struct.Struct(f"<{rank}Q") for rank in range(MAX_RANK + 1)]
_CONTAINERS = (dict, list, tuple)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message, limits: Limits = FRAME) -> tuple[bytes, list[memoryview]]:
    """The header of ``message`` and the bytes of its arrays, in order.

    The memoryviews alias the arrays: who sends them keeps the arrays unchanged until they are sent. Arrays that are not
    C-contiguous are copied. Raises `SpecError` for what is not plain data or is beyond ``limits``.
    """
    arrays: list[Array] = []

    def set_aside(value: Any) -> msgpack.ExtType:
        arrays.append(_sendable(value))
        return msgpack.ExtType(_ARRAY, _describe(arrays[-1]))

    _check_plain(message, limits)
    try:
        header: bytes = msgpack.packb(message, default=set_aside)
    except (ValueError, OverflowError, TypeError) as error:
        raise SpecError(f"a message cannot hold this value: {error}") from error
    if len(header) > limits.header:
        raise SpecError(f"the message is {len(header)} bytes beside its arrays, over the limit of {limits.header}")
    buffers = [bytes_of(array) for array in arrays]
    total = sum(map(len, buffers))
    if len(buffers) > limits.arrays or total > limits.array_bytes:
        raise SpecError(
            f"the message holds {len(buffers)} arrays of {total} bytes; "
            f"the limits are {limits.arrays} arrays and {limits.array_bytes} bytes"
        )
    return header, buffers


def pack(message: Message, limits: Limits = PLAN) -> bytes:
    """``message`` and its arrays as one string of bytes, for files and graphs; `unpack` reads it."""
    header, buffers = encode(message, limits)
    return b"".join((_PREFIX.pack(len(header)), header, *buffers))


def bytes_of(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, uncopied."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _check_plain(message: Message, limits: Limits) -> None:
    """Refuse what msgpack would write and `survey` refuse: other keys than str, too many values, too deep."""
    containers = [message] if isinstance(message, _CONTAINERS) else []
    depth = items = 0
    while containers:
        depth += 1
        values: list[Any] = []
        for container in containers:
            if isinstance(container, dict):
                _check_keys(container)
                items += len(container)
                values.extend(container.values())
            else:
                values.extend(container)
        items += len(values)
        if depth > limits.depth or items > limits.items:
            raise SpecError(f"the message is beyond {limits.depth} levels or {limits.items} values")
        containers = [value for value in values if isinstance(value, _CONTAINERS)]


def _check_keys(mapping: dict[Any, Any]) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise SpecError(f"the keys of a message are str, got {key!r}; send pairs instead")


def _sendable(value: Any) -> Array:
    if isinstance(value, np.generic):
        raise SpecError(
            f"a message cannot hold the NumPy scalar {value!r}; write .item(), or np.asarray() for an array"
        )
    if not isinstance(value, np.ndarray):
        raise SpecError(f"a message cannot hold a {type(value).__name__}: {value!r:.80}; only plain data and arrays")
    if value.ndim > MAX_RANK:
        raise SpecError(f"an array in a message has at most {MAX_RANK} dimensions, got {value.ndim}")
    if value.flags.c_contiguous and value.dtype in _CODES:
        return value
    return np.asarray(value, dtype=as_dtype(value.dtype).newbyteorder("<"), order="C")


def _describe(array: Array) -> bytes:
    return _CODES[array.dtype] + _DIMENSIONS[array.ndim].pack(*array.shape)


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
    if len(view) < _PREFIX.size:
        raise BrokenStream(f"a packed message has at least {_PREFIX.size} bytes, got {len(view)}")
    start = _PREFIX.size + _PREFIX.unpack_from(view)[0]
    if start > len(view):
        raise BrokenStream(f"the packed message ends after {len(view)} bytes, inside its header of {start}")
    header = view[_PREFIX.size : start]
    layouts = survey(header, limits)
    if start + sum(map(nbytes, layouts)) != len(view):
        raise BrokenStream(f"the packed message has {len(view) - start} bytes of arrays, its header describes others")
    arrays = []
    for layout in layouts:
        end = start + nbytes(layout)
        arrays.append(_view(layout, view[start:end]).copy())
        start = end
    return assemble(header, arrays)


def survey(header: Bytes, limits: Limits = FRAME) -> list[Layout]:
    """The dtype and shape of each array that ``header`` describes, in order; `BrokenStream` if it is not legal.

    One walk over the tokens, without building a value: a thousand nested arrays that each claim a million entries would
    make msgpack allocate gigabytes before it sees that they are lies.
    """
    if len(header) > limits.header:
        raise BrokenStream(f"a header of {len(header)} bytes is over the limit of {limits.header}")
    try:
        layouts, end = _walk(bytes(header), limits)
    except IndexError:
        raise BrokenStream(f"the header is truncated at {len(header)} bytes") from None
    if end != len(header):
        raise BrokenStream(f"the header has {len(header)} bytes, its value {end}")
    _check_sizes(layouts, limits)
    return layouts


def assemble(header: Bytes, arrays: Sequence[Array]) -> Message:
    """The message of a header that `survey` accepted, with ``arrays`` in their places."""
    places = iter(arrays)
    try:
        return msgpack.unpackb(
            header,
            use_list=False,
            object_pairs_hook=_mapping,
            ext_hook=lambda code, data: next(places),
            max_ext_len=len(header),
        )
    except BrokenStream:
        raise
    except Exception as error:  # msgpack lets five types of exception out; none of them may pass for a bug
        raise BrokenStream(f"the header is not legal msgpack: {type(error).__name__}: {error}") from error


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


def _walk(header: bytes, limits: Limits) -> tuple[list[Layout], int]:
    """The arrays described by the one value at the start of ``header``, and where that value ends."""
    layouts: list[Layout] = []
    outer: list[int] = []  # values still to come in each open container but the innermost
    left, items, at = 1, 0, 0
    while True:
        while not left:
            if not outer:
                return layouts, at
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
    kind, data = header[start], header[start + 1 : start + 1 + length]
    dtype, rank = _DTYPES.get(data[:3]), (length - 3) // 8
    if kind != _ARRAY or dtype is None or length != 3 + 8 * rank or len(data) != length:
        raise BrokenStream(f"byte {at} of the header begins an extension that describes no array: {data[:16]!r}")
    if rank > min(limits.rank, MAX_RANK):
        raise BrokenStream(f"the header describes an array of {rank} dimensions, over the limit of {limits.rank}")
    return (dtype, _DIMENSIONS[rank].unpack_from(data, 3)), start + 1 + length


def _check_sizes(layouts: Sequence[Layout], limits: Limits) -> None:
    total = 0
    for dtype, shape in layouts:
        size = math.prod(shape) * dtype.itemsize
        span = size or math.prod(n or 1 for n in shape) * dtype.itemsize  # NumPy refuses (0, 2**62, 4) as well
        if span > _LARGEST:
            raise BrokenStream(f"the header describes {dtype}{list(shape)}, more than memory can address")
        total += size
    if total > limits.array_bytes:
        raise BrokenStream(f"the header describes arrays of {total} bytes, over the limit of {limits.array_bytes}")
