"""Records as bytes in a file, each with checksums, and what is left of one that was cut off.

Law: a flipped bit is never taken for an end. The length of a record has a checksum of its own, so a record that reaches
beyond the end of the file was cut off there. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from flowrt.base import codec
from flowrt.base.errors import BrokenStream, LedgerError

MAGIC = b"flowrt ledger 1\n"
_HEAD, _SUM = struct.Struct("<II"), struct.Struct("<I")
HEAD = _HEAD.size + _SUM.size  # bytes before the content of a record


def framed(data: Any) -> bytes:
    """A record that holds ``data``, plain data without arrays."""
    content, _ = codec.encode(data, codec.PLAN)
    head = _HEAD.pack(len(content), crc32(content))
    return b"".join((head, _SUM.pack(crc32(head)), content))


def records_in(data: bytes, name: str, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Where each whole record ends in ``data``, the bytes of the file ``name``, and what it holds.

    Those are passed over that end by ``start``. It ends with the last whole one. Raises `LedgerError` where something
    is damaged.
    """
    if data[: len(MAGIC)] != MAGIC:
        if MAGIC.startswith(data):
            return  # it was cut off as it was made
        raise LedgerError(f"{name} is no ledger: it begins with {data[: len(MAGIC)]!r}, expected {MAGIC!r}")
    at = max(start, len(MAGIC))
    while len(data) - at >= HEAD:
        size, expected = _HEAD.unpack_from(data, at)
        if _SUM.unpack_from(data, at + _HEAD.size)[0] != crc32(data[at : at + _HEAD.size]):
            if not any(data[at:]):
                return  # the system had grown the file, and not written it, when it lost power
            raise _damaged(name, at, "the head of a record does not fit its checksum")
        content = data[at + HEAD : at + HEAD + size]
        if len(content) < size:
            return
        if crc32(content) != expected:
            raise _damaged(name, at, f"a record of {size} bytes does not fit its checksum")
        try:
            read = codec.decode(content, (), codec.PLAN)
        except BrokenStream as error:
            raise _damaged(name, at, f"a record holds no plain data: {error}") from error
        at += HEAD + size
        yield at, read


def _damaged(name: str, at: int, what: str) -> LedgerError:
    return LedgerError(
        f"{name} is damaged at byte {at}: {what}; take it from a copy, or, to go on from what is before, cut it off "
        f"there by truncate -s {at} {name}"
    )
