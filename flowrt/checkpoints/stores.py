"""Where checkpoints are kept: folders of this machine or of what it has mounted, and whatever fsspec reaches.

Law: in a folder a checkpoint is written under another name, forced to the disk, and renamed. Where nothing can be
renamed, in a bucket, shards are written where they stay, and the manifest behind them: what has none is no checkpoint,
and goes with the next save. Shards have names of their own in every save, so that a node that was given up and still
writes harms nobody.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote

from flowrt.checkpoints.folders import make_folder, sync_folder
from flowrt.checkpoints.manifest import MANIFEST, checked_file, saves_among

PARTIAL = ".partial"  # how the folder of a checkpoint in progress begins


class Store(Protocol):
    """Holds checkpoints. Files of one are named by its folder and their own name. All but `url` may raise `OSError`."""

    url: str

    def saves(self) -> list[tuple[int, int]]:
        """The (number, step) of every save, oldest first, whole or not."""

    def has(self, folder: str) -> bool:
        """Whether that folder is seen from here, where that may differ from machine to machine."""

    def size(self, folder: str, file: str) -> int:
        """The bytes of a file."""

    def open(self, folder: str, file: str) -> BinaryIO:
        """A file to be read."""

    def create(self, folder: str, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file to be written in a draft; it is there for good once the block is over."""

    def begin(self, folder: str, token: str) -> str:
        """Make room for a checkpoint, and remove what is left of others in progress; answers the folder to write in."""

    def commit(self, draft: str, folder: str, manifest: bytes) -> None:
        """Have the draft be a checkpoint from now on, or nothing."""

    def discard(self, draft: str) -> None:
        """Remove a draft."""

    def forget(self, folder: str) -> None:
        """Remove a checkpoint, its manifest first."""

    def written(self, draft: str) -> int:
        """How many bytes of a draft are written, as far as that is known."""


def store_at(url: str) -> Store:
    """The store at a path or URL. Raises `ImportError` where fsspec is needed and missing, and `ValueError`."""
    scheme, found, rest = url.partition("://")
    if not found:
        return LocalStore(Path(url))
    if scheme == "file":
        return LocalStore(Path(unquote(rest)))
    from flowrt.checkpoints.remote import RemoteStore  # which needs a package that is not everybody's

    return RemoteStore(url)


class LocalStore:
    """A folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def saves(self) -> list[tuple[int, int]]:
        return saves_among(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []

    def has(self, folder: str) -> bool:
        return (self.path / folder).is_dir()

    def size(self, folder: str, file: str) -> int:
        return (self.path / folder / file).stat().st_size

    def open(self, folder: str, file: str) -> BinaryIO:
        return open(self.path / folder / file, "rb", opener=_open_at_once)

    @contextmanager
    def create(self, folder: str, file: str) -> Iterator[BinaryIO]:
        path = self.path / folder / checked_file(file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o666), "wb") as opened:
            yield opened
            _sync(opened)

    def begin(self, folder: str, token: str) -> str:
        make_folder(self.path)
        for entry in self.path.iterdir():
            if entry.name.startswith(PARTIAL):  # of a process that was killed
                shutil.rmtree(entry, ignore_errors=True)
        draft = f"{PARTIAL}-{token}"
        (self.path / draft).mkdir()
        return draft

    def commit(self, draft: str, folder: str, manifest: bytes) -> None:
        partial, final = self.path / draft, self.path / folder
        written = partial
        try:
            with (partial / MANIFEST).open("wb") as file:
                file.write(manifest)
                _sync(file)
            sync_folder(partial)
            os.rename(partial, final)
            written = final
            sync_folder(self.path)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise

    def discard(self, draft: str) -> None:
        shutil.rmtree(self.path / draft, ignore_errors=True)

    def forget(self, folder: str) -> None:
        with suppress(OSError):  # what is removed in part must not look like a damaged checkpoint
            os.rename(self.path / folder, self.path / f"{PARTIAL}-{folder}")
            folder = f"{PARTIAL}-{folder}"
        shutil.rmtree(self.path / folder, ignore_errors=True)

    def written(self, draft: str) -> int:
        with suppress(OSError):
            return sum(entry.stat().st_size for entry in (self.path / draft).iterdir())
        return 0


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, and whatever else has its name without waiting for somebody who writes it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
