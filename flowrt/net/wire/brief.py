"""Frames of a fixed layout: some bytes, whose meaning is their reader's, and arrays.

What is said in every step is written so, in a fraction of the time that msgpack takes for as many values.
Law: that of `flowrt.base.codec`, whose limits hold here, too, and whose descriptions of arrays these are; the n-th
one describes the n-th buffer. A header begins with a byte that begins no msgpack, so nothing is mistaken for
the other. Pure.

    u8 0xc1 | u16 bytes of the head | u16 number of arrays | head | u8 rank, description of array 0 | …
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flowrt.base import codec
from flowrt.base.codec import FRAME, Allocate, Bytes, Layout, Limits
from flowrt.base.errors import BrokenStream, SpecError

BEGINS = 0xC1
_FRAME = struct.Struct("<IBHH")  # a length, and the begin of a header
_START = struct.Struct("<BHH")
_BEGIN, _HEAD = _START.size, _FRAME.size  # how far the head is from the header's begin, and the frame's
_PREFIX = _HEAD - _BEGIN
_MOST = 1 << 10  # bytes of a head
_CODE = 3  # bytes of a dtype in the description of an array
_JOINED = 1 << 14  # bytes of arrays that are cheaper to copy behind the header than to hand on one by one
_UNCOUNTED = 1 << 14  # bytes from which on memory is counted, so that it is to be asked for
_KEPT = 64  # tables of descriptions, each shorter than such a header
# What `decode_whole` stays within: its arrays lie in the window that is decoded.
_LONGEST = 1 << 15
WHOLE = Limits(header=_LONGEST, arrays=FRAME.arrays, array_bytes=codec.WHOLE.array_bytes)


class Brief(NamedTuple):
    """What comes. What there was no room for is not an array, but what stands for it."""

    head: bytes
    arrays: tuple[Any, ...]


_make_brief = tuple.__new__  # in half the time of a call of the class


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Tail: TypeAlias = "tuple[int, int, bytes, list[memoryview]]"
"""What follows the head of a frame: how many arrays, the bytes of their description, that with the arrays if they are
few bytes, and else these."""
_NOTHING: Tail = (0, 0, b"", [])


def tail(arrays: Sequence[Any], limits: Limits = FRAME, few: int = _JOINED) -> Tail | None:
    """What follows the head of a frame with these arrays; None for what is none: see `frame`.

    They are joined up to so many bytes as are ``few``: more pay where several frames have this tail.
    """
    if not arrays:
        return _NOTHING
    table, nbytes, count = b"", 0, len(arrays)
    for array in arrays:
        entry = _entry(array.dtype, array.shape) if type(array) is np.ndarray and array.flags.c_contiguous else None
        if entry is None:
            return None
        table += entry
        nbytes += array.nbytes
    if count > limits.arrays or nbytes > limits.array_bytes:
        return None
    if nbytes <= few:
        data = arrays[0].tobytes() if count == 1 else b"".join(map(np.ndarray.tobytes, arrays))
        return count, len(table), table + data, []
    return len(arrays), len(table), table, [*map(codec.bytes_of, arrays)]


def frame(head: bytes, arrays: Sequence[Any], limits: Limits = FRAME) -> list[bytes | memoryview] | None:
    """As `frames.frame`; None for what is beyond ``limits`` or no array in order, which is others' to judge."""
    return with_tail(head, tail(arrays, limits))


def with_tail(head: bytes, behind: Tail | None) -> list[bytes | memoryview] | None:
    """As `frame`, with arrays of which several frames may be made."""
    size = len(head)
    if behind is None or size > _MOST:
        return None
    count, described, joined, pieces = behind
    return [_FRAME.pack(_START.size + size + described, BEGINS, size, count) + head + joined, *pieces]


@lru_cache(_KEPT)
def _entry(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes | None:
    try:
        return bytes([len(shape)]) + codec.describe(dtype, shape)
    except (KeyError, SpecError):  # bytes in another order, or nothing that travels
        return None


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def survey(header: Bytes, limits: Limits) -> Sequence[Layout]:
    """As `codec.survey`."""
    header = bytes(header)
    length, count = _lengths(header)
    if count > limits.arrays:
        raise BrokenStream(f"the header describes {count} arrays, over the limit of {limits.arrays}")
    read = _known_layouts if len(header) <= WHOLE.header else _layouts
    layouts = read(header[_START.size + length :], count, limits.rank)
    codec.check_sizes(layouts, limits)
    return layouts


def assemble(header: Bytes, arrays: Sequence[Any]) -> Brief:
    """As `codec.assemble`."""
    length, _ = _lengths(bytes(header))
    return Brief(bytes(header[_START.size : _START.size + length]), tuple(arrays))


def decode_whole(window: memoryview, at: int, end: int, allocate: Allocate) -> tuple[Brief | None, int] | None:
    """The message of the frame that begins ``at`` a place in ``window``, and where it ends: see `codec.decode_whole`.

    No message, but still where it ends, for one that is not all there until ``end``. None for what is no brief frame
    that is short, legal and no longer than ``window``, or whose header is not all there.
    """
    try:
        length, _, size, count = _FRAME.unpack_from(window, at)
        behind = at + _PREFIX + length
        if length > _LONGEST or _BEGIN + size > length or behind > end:
            return None
        header = bytes(window[at + _HEAD : behind])  # but for its start
        layouts, nbytes = _known(header[size:], count)
        if behind + nbytes > end:
            return (None, behind + nbytes) if behind + nbytes - at <= len(window) else None
        arrays = []
        for dtype, shape, offset in layouts:
            sent = np.ndarray(shape, dtype, window, behind + offset)
            if sent.nbytes < _UNCOUNTED:
                arrays.append(sent.copy())
            else:
                arrays.append(allocate(dtype, shape))
                arrays[-1][...] = sent
    except Exception:  # whatever it is, the survey says it by name
        return None
    return _make_brief(Brief, (header[:size], tuple(arrays))), behind + nbytes


def _lengths(header: bytes) -> tuple[int, int]:
    """How many bytes the head of a header has, and how many arrays are described behind it."""
    _, length, count = _START.unpack_from(header) if len(header) >= _START.size else (0, 0, 0)
    if len(header) < _START.size + length:
        raise BrokenStream(f"a brief header ends after {len(header)} bytes, inside its head of {length}")
    return length, count


@lru_cache(_KEPT)
def _known(table: bytes, count: int) -> tuple[tuple[tuple[np.dtype[Any], tuple[int, ...], int], ...], int]:
    """Dtype, shape and place, in bytes, of the arrays of a short table, and how many bytes they are."""
    if count > WHOLE.arrays:
        raise BrokenStream(f"the header describes {count} arrays, over the limit of {WHOLE.arrays}")
    layouts = _known_layouts(table, count, WHOLE.rank)
    codec.check_sizes(layouts, FRAME)
    sizes = [codec.nbytes(layout) for layout in layouts]
    *places, nbytes = itertools.accumulate(sizes, initial=0)
    placed = tuple([(*layout, place) for layout, place in zip(layouts, places, strict=True)])
    return placed, nbytes


def _layouts(table: bytes, count: int, most: int) -> Sequence[Layout]:
    """The arrays that a table describes, of at most so many dimensions.

    Raises `BrokenStream` if these are not so many, or it is longer.
    """
    layouts: list[Layout] = []
    at = 0
    while at < len(table) and len(layouts) < count:
        begin, at = at + 1, at + 1 + _CODE + 8 * table[at]
        layouts.append(codec.layout_of(table[begin:at], most))
    if at != len(table) or len(layouts) != count:
        raise BrokenStream(f"a brief header describes {count} arrays in {len(table)} bytes, which are others'")
    return tuple(layouts)


_known_layouts = lru_cache(_KEPT)(_layouts)  # of short tables
