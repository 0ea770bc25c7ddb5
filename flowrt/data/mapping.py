"""NumPy's files as arrays that lie in them: npy files, and members of npz files, which are zip archives of such.

The forms are those of NumPy's NEP 1 (npy) and of PKWARE's APPNOTE 6.3 (zip). A member that is stored as it is lies
behind its local header, whose length the header itself says; a compressed one is read whole.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy_format

from flowrt.base.errors import FeedError

if TYPE_CHECKING:
    from zipfile import ZipFile

Array: TypeAlias = "np.ndarray[Any, Any]"
_LOCAL = struct.Struct("<4s22xHH")  # a local header: its signature, and the lengths of what follows it
_SIGNATURE = b"PK\x03\x04"
_STORED, _ENCRYPTED = 0, 1


def map_npy(path: str) -> Array:
    """The array in an npy file, mapped. Raises `OSError`, and `ValueError` for what is none."""
    with _reading(path), open(path, "rb") as file:
        return _mapped(path, file)


def members_of(path: str) -> list[str]:
    """The names of the arrays in an npz file."""
    with _reading(path), _archive(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def map_member(path: str, member: str) -> Array:
    """An array of an npz file: mapped if it is stored as it is, else read. Raises as `map_npy`."""
    with _reading(path), _archive(path) as archive:
        try:
            info = archive.getinfo(f"{member}.npy")
        except KeyError:
            raise ValueError(f"{path} has no member {member!r}") from None
        if info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{path} is encrypted, which is not read")
        if info.compress_type != _STORED:
            with archive.open(info) as file:
                found: Array = npy_format.read_array(file, allow_pickle=False)
                return found
    with _reading(path), open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, *lengths = _LOCAL.unpack(file.read(_LOCAL.size))
        if signature != _SIGNATURE:
            raise ValueError(f"{path} is damaged: no member begins at byte {info.header_offset}")
        file.seek(sum(lengths), 1)
        return _mapped(path, file)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Have what zip files, what unpacks them and NumPy raise at damaged bytes, of a dozen kinds, be one."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, MemoryError):
        raise  # which say what is amiss themselves
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _archive(path: str) -> ZipFile:
    from zipfile import BadZipFile, ZipFile  # which no other source needs

    try:
        return ZipFile(path)
    except BadZipFile as error:
        raise ValueError(f"{path} is no npz file, or not whole: {error}") from error


def _mapped(path: str, file: IO[bytes]) -> Array:
    """The array whose header begins where ``file`` stands."""
    version = npy_format.read_magic(file)
    read = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"{path} is of version {version} of the npy format, which only holds records")
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{path} holds Python objects; save arrays of numbers")
    order: Any = "F" if fortran else "C"
    if 0 in shape:
        return np.empty(shape, dtype, order)  # nothing can be mapped of it
    needs, has = file.tell() + math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size
    if has < needs:
        raise ValueError(f"{path} was cut short: it has {has} bytes, and its array ends at byte {needs}")
    return np.memmap(path, dtype, "r", file.tell(), shape, order).view(np.ndarray)


def check_whole(array: Array) -> None:
    """Raise `FeedError` where ``array`` is mapped from a file that was cut short since: who reads on is killed."""
    mapped = array.base
    if not isinstance(mapped, np.memmap):
        return
    needs, has = mapped.offset + mapped.nbytes, mapped._mmap.size()  # type: ignore[attr-defined]
    if has < needs:
        raise FeedError(
            f"{mapped.filename} has {has} bytes, and had {needs} at least when it was opened: write another file, and "
            "rename it, rather than write it anew while it is read"
        )
