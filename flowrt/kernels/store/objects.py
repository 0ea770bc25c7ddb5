"""Compiled objects on disk: each is compiled once per machine, by one process, and loaded without a compiler.

Files are named by a hash of everything that decides their content (see `parts` and `language.variants`),
written whole under a lock (`locking`) and checked by digest when read, so any number of processes may share the
folder. Only files of this user or of root are taken, from a folder of theirs, that no one else may write: who
may is told of, once. Where the folder cannot be used, kernels are compiled anew by each process. The folder is
bounded: the files written longest ago go first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

from flowrt.base.collection import held_back
from flowrt.files import remove_drafts, replacing
from flowrt.kernels.store.bundle import Bundle, bundle_path, is_trusted, open_bundle, open_trusted
from flowrt.kernels.store.compiling import compiled, note_made, note_missing, only_looks
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.loading import load_object
from flowrt.kernels.store.locking import check_wanted, held, locked

_DIGEST = 32
_KEPT = 8192  # objects of about 5 KiB
_log = logging.getLogger(__name__)
_load_lock = threading.RLock()
_entries: dict[str, int] = {}


def bundle() -> Bundle:
    """The bundle in the present folder, an empty one if there is none. Looked for once per folder."""
    return _bundle_in(cache_folder())


@lru_cache(8)
def _bundle_in(folder: Path) -> Bundle:
    return open_bundle(bundle_path(folder))


def is_there(symbol: str) -> bool:
    """Whether that object is loaded or in the folder."""
    return symbol in _entries or is_stored(symbol)


def is_stored(symbol: str) -> bool:
    """Whether the folder holds the object of that name."""
    return symbol in bundle() or _read(cache_folder() / f"{symbol}.o") is not None


def address_of(symbol: str, compile_object: Callable[[], bytes], request: Callable[[], str] = str) -> int:
    """The address of the entry ``symbol``, compiled first if no process on this machine has done so yet.

    ``request()`` says how another process would compile it (`kernels.compiler`), nothing where none could.
    """
    found = _entries.get(symbol)
    if found is None and only_looks():
        if not is_stored(symbol):
            note_missing(symbol, request())
        return 0
    if found is None:
        with held(_load_lock):
            found = _entries.get(symbol)
            if found is None:
                found = bundle().address(symbol) or load_object(symbol, object_code(symbol, compile_object))
                _entries[symbol] = found
    return found


def object_code(symbol: str, compile_object: Callable[[], bytes]) -> bytes:
    """The object named ``symbol``: from the folder, or made and put there, by one process at a time."""
    path = cache_folder() / f"{symbol}.o"
    code = bundle().code(symbol) or _read(path)
    if code is not None:
        note_made(symbol)
        return code
    if not is_trusted(path.parent):
        return _made(symbol, compile_object)
    with locked(path.with_suffix(".lock"), path.exists) as alone:
        code = _read(path)  # another process may have written it while we waited
        if code is None:
            code = _made(symbol, compile_object)
            _write(path, code, alone)
        else:
            note_made(symbol)
    return code


def _made(symbol: str, compile_object: Callable[[], bytes]) -> bytes:
    check_wanted()
    _log.debug("compiling %s", symbol)
    with compiled(symbol), held_back():  # compilers make objects by the million, and most live as long as they work
        return compile_object()


def _digest(path: Path, code: bytes) -> bytes:
    return hashlib.blake2b(code, key=path.stem.encode()[-64:], digest_size=_DIGEST).digest()


def _read(path: Path) -> bytes | None:
    """The object at ``path``, if there is one that is whole, of that name, and written by someone we trust."""
    handle = open_trusted(path)
    if handle is None:
        return None
    with open(handle, "rb") as file:
        data = file.read()
    code, digest = data[:-_DIGEST], data[-_DIGEST:]
    return code if code and digest == _digest(path, code) else None


def _write(path: Path, code: bytes, alone: bool) -> None:
    """Put an object in its place, whole; ``alone``: its lock is held, so nobody else writes it now."""
    try:
        if alone:
            _tidy(path)
        with replacing(path, 0o600) as file:
            file.write(code + _digest(path, code))
    except OSError as error:  # a full or read-only disk costs a compilation next time, nothing else
        _warn_not_kept(path.parent, error.strerror)


@cache
def _warn_not_kept(folder: Path, why: str) -> None:
    """Once: who is told that kernels are compiled once would wait for them in each process without knowing why."""
    _log.warning(
        "kernels cannot be kept in %s (%s); name another folder in FLOWRT_CACHE, or each process compiles them anew",
        folder,
        why,
    )


def _tidy(path: Path) -> None:
    """Remove what a killed writer of this object left, whose lock we hold, and the oldest of too many objects."""
    remove_drafts(path)
    objects = [entry for entry in os.scandir(path.parent) if entry.name.endswith(".o")]
    if len(objects) >= _KEPT:
        for old in sorted(objects, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)[: _KEPT // 8]:
            Path(old.path).unlink(missing_ok=True)
