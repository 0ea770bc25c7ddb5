"""Shards: variables of one task as a file that any reader of safetensors reads, written and read in pieces.

The format is that of https://huggingface.co/docs/safetensors: eight bytes that count the header's, a header in JSON,
and behind it the tensors' bytes, little-endian, without gaps. Nothing is held of a shard but one piece at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

import numpy as np

from flowrt.base.spec import NAMES
from flowrt.checkpoints.manifest import File, NotWhole, Range
from flowrt.checkpoints.older import BLAKE2B

if TYPE_CHECKING:
    from flowrt.checkpoints.stores import Store

Array: TypeAlias = "np.ndarray[Any, Any]"
Written: TypeAlias = tuple[str, int, str]
"""Of what was written: its key, the byte at which it begins, and its SHA-256."""

PIECE = 4 << 20  # bytes read, written and hashed at once
ALIGNMENT = 64  # of the first tensor
_LETTERS = {"bool": "BOOL", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_LETTERS |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array that lies in order."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


class Readable(Protocol):
    """A tensor's bytes, read from the first to the last."""

    @property
    def nbytes(self) -> int: ...

    def read(self, first: int, nbytes: int) -> Array:
        """So many of them from ``first`` on."""


def write_shard(
    file: BinaryIO,
    name: str,
    tensors: Sequence[tuple[str, Callable[[], Readable]]],
    layouts: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
    going: Callable[[], bool] = lambda: True,
) -> tuple[File, list[Written]]:
    """Write a shard; ``tensors`` are (key, who answers the bytes), ``layouts`` their dtypes and shapes.

    Each tensor is let go as soon as it is written. Answers what a manifest says of the file. Raises `OSError`, also
    where it is not ``going`` any more.
    """
    header, at = header_of([key for key, _ in tensors], layouts)
    file.write(header)
    written: list[Written] = []
    for key, take in tensors:
        offset, digest = at, hashlib.sha256()
        at += _write(file, take(), digest, going)
        written.append((key, offset, digest.hexdigest()))
    return File(name, at, len(header), hashlib.sha256(header).hexdigest()), written


def _write(file: BinaryIO, tensor: Readable, digest: Any, going: Callable[[], bool]) -> int:
    for start in range(0, tensor.nbytes, PIECE):
        if not going():
            raise OSError("the save was given up")
        piece = tensor.read(start, min(PIECE, tensor.nbytes - start)).data
        digest.update(piece)
        file.write(piece)
    return tensor.nbytes


def header_of(keys: Sequence[str], layouts: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> tuple[bytes, int]:
    """What stands before the bytes of these tensors, and how long it is."""
    entries: dict[str, Any] = {"__metadata__": {"format": "np", "written_by": "flowrt"}}
    at = 0
    for key, (dtype, shape) in zip(keys, layouts, strict=True):
        end = at + dtype.itemsize * int(np.prod(shape, dtype=object))
        entries[key] = {"dtype": _LETTERS[NAMES[dtype]], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(
    store: Store, folder: str, file: File, ranges: Sequence[Range], going: Callable[[], bool] = lambda: True
) -> None:
    """Raise `NotWhole`, which says the place, unless a file is what a manifest says; and `OSError`."""
    size = store.size(folder, file.name)
    if size != file.nbytes:
        raise NotWhole(f"{file.name} has {size} bytes, and the manifest says {file.nbytes}")
    with store.open(folder, file.name) as opened:
        for part in ranges:
            digest = _digest_of(opened, part, going)
            if digest != part.digest:
                where = f"bytes {part.offset} to {part.offset + part.nbytes}, {part.what}"
                raise NotWhole(f"{file.name}: {where}: they do not match their digest")


def _digest_of(opened: BinaryIO, part: Range, going: Callable[[], bool]) -> str:
    opened.seek(part.offset)
    digest: Any = hashlib.blake2b(digest_size=32) if part.algorithm == BLAKE2B else hashlib.sha256()
    left = part.nbytes
    while left:
        if not going():
            raise OSError("reading was given up")
        piece = opened.read(min(left, PIECE))
        if not piece:
            break
        digest.update(piece)
        left -= len(piece)
    return str(digest.hexdigest())


def read_into(target: memoryview, opened: BinaryIO, offset: int, going: Callable[[], bool] = lambda: True) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on. Raises `OSError` where there are too few."""
    opened.seek(offset)
    at = 0
    while at < len(target):
        if not going():
            raise OSError("reading was given up")
        piece = opened.read(min(PIECE, len(target) - at))
        if not piece:
            raise OSError(f"the file ends {len(target) - at} bytes too early")
        target[at : at + len(piece)] = piece
        at += len(piece)
