"""Checkpoints wherever fsspec reaches: buckets, memory, other machines. The only file that knows fsspec.

Law: a checkpoint is there once its manifest is, which one request puts there whole. Credentials are the environment's
on each node, as fsspec finds them; none is sent from node to node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from flowrt.checkpoints.manifest import MANIFEST, checked_file, saves_among

MISSING = "{url} is no folder of this machine, and other places need fsspec: pip install 'flowrt[remote]'"
BLOCK = 16 << 20  # bytes that are sent, and asked for, at once


class _Telling:
    """A file system of fsspec's: what its libraries raise of their own is `OSError`, as stores promise."""

    def __init__(self, system: Any, url: str) -> None:
        self._system = system
        self._url = url

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._system, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                return asked(*args, **kwargs)
            except OSError:
                raise
            except Exception as error:
                raise OSError(f"{self._url}: {type(error).__name__}: {error}") from error

        return answer


class RemoteStore:
    """A place that fsspec knows by ``url``."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(MISSING.format(url=url)) from error
        self.url = url
        try:
            system, root = url_to_fs(url)
        except ValueError as error:
            raise ValueError(f"{url} is no place that fsspec knows: {error}") from None  # whose depths tell no more
        self._system: Any = _Telling(system, url)
        self._root = str(root).rstrip("/")

    def _path(self, folder: str, file: str) -> str:
        return f"{self._root}/{folder}/{file}"

    def _listed(self, folder: str) -> list[str]:
        """The names in a folder of the root, or in the root, as they are now."""
        where = f"{self._root}/{folder}" if folder else self._root
        self._system.invalidate_cache()
        try:
            found = self._system.ls(where, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def saves(self) -> list[tuple[int, int]]:
        return saves_among(name for name in self._listed("") if MANIFEST in self._listed(name))

    def has(self, folder: str) -> bool:
        return True

    def size(self, folder: str, file: str) -> int:
        return int(self._system.size(self._path(folder, file)))

    def open(self, folder: str, file: str) -> BinaryIO:
        return cast("BinaryIO", self._system.open(self._path(folder, file), "rb", block_size=BLOCK))

    @contextmanager
    def create(self, folder: str, file: str) -> Iterator[BinaryIO]:
        opened: Any = self._system.open(self._path(folder, checked_file(file)), "wb", block_size=BLOCK)
        try:
            yield opened
        except BaseException:
            with suppress(Exception):
                opened.discard()  # so that closing does not put the half there
            raise
        opened.close()

    def begin(self, folder: str, token: str) -> str:
        whole = {name for name in self._listed("") if MANIFEST in self._listed(name)}
        for name in self._listed(""):
            if saves_among([name]) and name not in whole:  # of a process that was killed
                self.discard(name)
        with suppress(Exception):  # buckets have no folders, and what has, may have this one
            self._system.makedirs(f"{self._root}/{folder}", exist_ok=True)
        return folder

    def commit(self, draft: str, folder: str, manifest: bytes) -> None:
        self._system.pipe_file(self._path(draft, MANIFEST), manifest)

    def discard(self, draft: str) -> None:
        with suppress(OSError):
            self._system.rm(f"{self._root}/{draft}", recursive=True)

    def forget(self, folder: str) -> None:
        with suppress(OSError):
            self._system.rm_file(self._path(folder, MANIFEST))
        self.discard(folder)

    def written(self, draft: str) -> int:
        return 0
