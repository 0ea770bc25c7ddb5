"""The standard kernels of this machine in one file: many objects, and the names by which they are asked for.

A variant's symbol is a hash of the code it comes from, which takes a millisecond to find out. The bundle remembers the
symbols of flowrt's own kernels, and is itself named by what they depend on: the files of this package (by size and
time), the compilers' and the interpreter's versions, and the CPU. A file that is not whole, or that someone else could
have written, is as none: the objects are then looked for one by one, or compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numpy as np

_MAGIC = b"flowrt kernels 1\n"
_DIGEST = 16
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQ{_DIGEST}s")
_MOST_INDEX = 64 << 20


@dataclass(frozen=True, slots=True)
class Bundle:
    """``names`` are symbols by what is asked for; ``places`` say where an object lies in the file, and its digest."""

    names: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    file: int = -1

    def code(self, symbol: str) -> bytes | None:
        """The object named ``symbol``, if it is here and whole."""
        place = self.places.get(symbol)
        if place is None:
            return None
        offset, size, digest = place
        try:
            code = os.pread(self.file, size, offset)
        except OSError:
            return None
        return code if _digest(code).hex() == digest else None


def bundle_path(folder: Path) -> Path:
    """Where the bundle of this machine and this flowrt is, or would be."""
    return folder / f"standard-{_stamp()}.bundle"


def open_bundle(path: Path) -> Bundle:
    """The bundle at ``path``; an empty one where there is none, or none to be trusted. Its file stays open."""
    file = open_trusted(path)
    if file is None:
        return Bundle()
    try:
        magic, size, digest = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
        index = os.pread(file, min(size, _MOST_INDEX), _HEAD.size) if magic == _MAGIC else b""
        if index and _digest(index) == digest:
            known = json.loads(index)
            first = _HEAD.size + size
            places = {symbol: (first + at, length, proof) for symbol, (at, length, proof) in known["places"].items()}
            return Bundle(known["names"], places, file)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        pass
    os.close(file)
    return Bundle()


def write_bundle(path: Path, names: Mapping[str, str], objects: Mapping[str, bytes]) -> None:
    """Put a bundle in the place of any other, at once. Raises `OSError` where the folder cannot be written."""
    places, offset = {}, 0
    for symbol, code in objects.items():
        places[symbol] = (offset, len(code), _digest(code).hex())
        offset += len(code)
    index = json.dumps({"names": dict(names), "places": places}).encode()
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(_HEAD.pack(_MAGIC, len(index), _digest(index)) + index)
            file.writelines(objects.values())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def open_trusted(path: Path) -> int | None:
    """A descriptor of the file at ``path``, if it is one of this user's or of root's that no one else may write."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    about = os.fstat(file)
    foreign = about.st_uid not in (os.geteuid(), 0) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if foreign or not stat.S_ISREG(about.st_mode):
        os.close(file)
        return None
    return file


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


@cache
def _stamp() -> str:
    """What the names in a bundle depend on, without reading a source or importing the compiler."""
    parts = [sys.version, np.__version__, llvmlite.__version__, llvm.get_process_triple()]
    parts += [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    compiler = find_spec("numba")
    about = Path(compiler.origin).with_name("_version.py") if compiler is not None and compiler.origin else None
    files = [*sorted(Path(__file__).parent.glob("*.py")), *([about] if about is not None and about.exists() else [])]
    for path in files:
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return _digest("|".join(parts).encode()).hex()
