"""The symbols of fused kernels by what they are asked for, on disk: what the bundle knows of the standard ones.

Law: only the helper process adds to it, whose kernels stand as in the package's files, and the file is named by those,
as a bundle is; so what it says is what a fingerprint would, without the milliseconds. It only grows, by whole lines, up
to a bound; a line that is not whole is none.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from flowrt.kernels.store.bundle import digest_of, open_trusted, stamp

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 4 << 20
FILES_KEPT = 4  # of other versions that share the folder


def symbol_by_name(folder: Path, name: str) -> str | None:
    """The symbol that goes by that name, if that was known when this process first asked."""
    return _known(_path(folder)).get(_key(name))


def remember(folder: Path, name: str, symbol: str) -> None:
    """Let later processes know. Where the folder cannot be written, they have to find out for themselves."""
    path, line = _path(folder), json.dumps([_key(name), symbol])
    with suppress(OSError):
        if not path.exists():
            _tidy(folder)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size < MOST_BYTES:
                os.write(file, f"{digest_of(line.encode())} {line}\n".encode())
        finally:
            os.close(file)


@lru_cache(8)
def _known(path: Path) -> dict[str, str]:
    file = open_trusted(path)
    if file is None:
        return {}
    with open(file, encoding="utf-8", errors="replace") as lines:
        pairs = [line.rstrip("\n").partition(" ") for line in lines]
    return dict(json.loads(text) for digest, _, text in pairs if digest_of(text.encode()) == digest)


def _key(name: str) -> str:
    return digest_of(name.encode())


def _path(folder: Path) -> Path:
    return folder / f"names-{stamp()}"


def _tidy(folder: Path) -> None:
    files = sorted(folder.glob("names-*"), key=lambda path: path.stat().st_mtime_ns)
    for old in files[: 1 - FILES_KEPT]:
        old.unlink(missing_ok=True)
