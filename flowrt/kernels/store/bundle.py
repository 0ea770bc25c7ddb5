"""The standard kernels of this machine in one file: many objects linked, and the names by which they are asked for.

A variant's symbol is a hash of the code it comes from, which takes a millisecond to find out. The bundle remembers the
symbols of flowrt's own kernels, and is itself named by what they depend on: the files of this package (by size and
time) and their surroundings. The objects are one image, which processes share; those that cannot be linked lie behind
it as they are. A file that is not whole, or that someone else could have written, is as none: the objects are then
looked for one by one, or compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any

from flowrt.base.package import PACKAGE
from flowrt.base.valueclass import valueclass
from flowrt.files import replacing
from flowrt.kernels.store.image import Image, ImagePart, Words
from flowrt.kernels.store.loading import PAGE, map_file
from flowrt.kernels.store.surroundings import identity

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)
_MAGIC = b"flowrt kernels 2\n"
_DIGEST = 16
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQ{_DIGEST}s")
_MOST_INDEX = 64 << 20


@valueclass
class Bundle:
    """``names`` are symbols by what is asked for; ``parts`` say where an entry and its code lie from ``base`` on, and
    the code's digest; ``objects`` where an object lies in the file, and its digest.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, tuple[ImagePart, str]] = field(default_factory=dict)
    base: int = 0
    objects: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    file: int = -1

    def __len__(self) -> int:
        return len(self.parts) + len(self.objects)

    def __contains__(self, symbol: object) -> bool:
        return symbol in self.parts or symbol in self.objects

    def address(self, symbol: str) -> int | None:
        """Where the entry ``symbol`` is, if it is here, linked and whole."""
        found = self.parts.get(symbol)
        if found is None:
            return None
        part, digest = found
        code = ctypes.string_at(self.base + part.begin, part.end - part.begin)
        return self.base + part.entry if digest_of(code) == digest else None

    def code(self, symbol: str) -> bytes | None:
        """The object named ``symbol``, if it is here as such and whole."""
        place = self.objects.get(symbol)
        if place is None:
            return None
        offset, size, digest = place
        try:
            code = os.pread(self.file, size, offset)
        except OSError:
            return None
        return code if digest_of(code) == digest else None


def bundle_path(folder: Path) -> Path:
    """Where the bundle of this machine and this flowrt is, or would be."""
    return folder / f"standard-{stamp()}.bundle"


def open_bundle(path: Path) -> Bundle:
    """The bundle at ``path``; an empty one where there is none, or none to be trusted.

    Its file stays open where there are objects in it; an image is mapped and needs none.
    """
    file = open_trusted(path)
    if file is None:
        return Bundle()
    try:
        magic, size, digest = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
        index = os.pread(file, min(size, _MOST_INDEX), _HEAD.size) if magic == _MAGIC else b""
        if index and _digest(index) == digest:
            return _opened(file, _image_at(size), json.loads(index))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        pass
    os.close(file)
    return Bundle()


def _opened(file: int, first: int, index: Any) -> Bundle:
    """The bundle of that index, whose image begins at ``first``."""
    image, base = index["image"], 0
    tail = os.pread(file, image["size"] - image["tail"], first + image["tail"])
    parts = {symbol: (ImagePart(*place), proof) for symbol, (*place, proof) in image["parts"].items()}
    if parts and os.fstat(file).st_size >= first + image["size"] and digest_of(tail) == image["proof"]:
        words = Words(tuple(map(tuple, image["outside"])), tuple(map(tuple, image["own"])))
        base = map_file(file, first, image["size"], words)
    begin = first + image["size"]
    objects = {symbol: (begin + at, size, proof) for symbol, (at, size, proof) in index["objects"].items()}
    if not objects:
        os.close(file)
    return Bundle(index["names"], parts if base else {}, base, objects, file if objects else -1)


def write_bundle(path: Path, names: Mapping[str, str], objects: Mapping[str, bytes]) -> None:
    """Put a bundle in the place of any other, at once. Raises `OSError` where the folder cannot be written."""
    image, others = _linked(objects)
    places, offset = {}, 0
    for symbol, code in others.items():
        places[symbol] = (offset, len(code), digest_of(code))
        offset += len(code)
    index = json.dumps({"names": dict(names), "image": _about(image), "objects": places}).encode()
    gap = bytes(_image_at(len(index)) - _HEAD.size - len(index))
    with replacing(path, 0o600) as file:
        file.write(_HEAD.pack(_MAGIC, len(index), _digest(index)) + index + gap + image.body)
        file.writelines(others.values())


def _linked(objects: Mapping[str, bytes]) -> tuple[Image, dict[str, bytes]]:
    """The image of all that can be linked, and what cannot."""
    from flowrt.kernels.store.elf import Unlinkable
    from flowrt.kernels.store.linking import link

    others: dict[str, bytes] = {}
    for symbol, code in objects.items():
        try:
            link({symbol: code}, PAGE)
        except Unlinkable:
            others[symbol] = code
    return link({symbol: code for symbol, code in objects.items() if symbol not in others}, PAGE), others


def _about(image: Image) -> dict[str, Any]:
    """What the index says of an image."""
    parts = {
        symbol: (part.entry, part.begin, part.end, digest_of(image.body[part.begin : part.end]))
        for symbol, part in image.parts.items()
    }
    proof = digest_of(image.body[image.tail :])
    about = {"size": len(image.body), "tail": image.tail, "proof": proof, "parts": parts}
    return about | {"outside": image.words.outside, "own": image.words.own}


def _image_at(index_size: int) -> int:
    """Where the image begins in a file with such an index: at a page, so that it can be mapped."""
    return -(-(_HEAD.size + index_size) // PAGE) * PAGE


def open_trusted(path: Path) -> int | None:
    """A descriptor of the file at ``path``, if it and its folder are this user's or root's, and no one else may write.

    What is there otherwise is told of in the log, once.
    """
    if not is_trusted(path.parent):
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    about = os.fstat(file)
    why = _distrust(about)
    if why or not stat.S_ISREG(about.st_mode):
        os.close(file)
        if why:
            _warn(path.parent, f"{path.name}, and perhaps more, is not taken: {why}")
        return None
    return file


def is_trusted(folder: Path) -> bool:
    """Whether nobody else may put anything into ``folder``, so that kernels may be kept there: code to be run."""
    try:
        why = _distrust(os.stat(folder))
    except OSError:  # there is none yet
        return True
    if why:
        _warn(folder, f"it is not used: {why}")
    return not why


def _distrust(about: os.stat_result) -> str:
    if about.st_uid not in (os.geteuid(), 0):
        return f"user {about.st_uid} owns it"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write it (mode {stat.S_IMODE(about.st_mode):03o}); chmod go-w it"
    return ""


@cache
def _warn(folder: Path, what: str) -> None:
    _log.warning("kernel cache %s: %s, or name another folder in FLOWRT_CACHE: kernels are code", folder, what)


def digest_of(data: bytes) -> str:
    """What tells whole data from damaged."""
    return _digest(data).hex()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


@cache
def stamp() -> str:
    """What names depend on that stand for symbols, without reading a source or importing the compiler."""
    parts = [identity()]
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return digest_of("|".join(parts).encode())
