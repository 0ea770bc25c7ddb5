"""Large arrays whose pages are copied when they are written: what a table starts from and the table share the rest.

Law: an array made by `held` never changes; each that was `begun` of it may, and nobody else sees what is written there.
Only what is written takes memory, page by page.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

LARGE = 4 << 20  # bytes: less is not worth a file
MOST = 64  # arrays held at once: each takes two file descriptors, and one more for each table that begins as it


class _Pages(mmap.mmap):
    """A file in memory, seen by pages that cannot be written."""

    file: int


_alive: weakref.WeakSet[_Pages] = weakref.WeakSet()


def held(array: Array) -> Array | None:
    """A copy of a large array that never changes; None where there can be none."""
    if array.nbytes < LARGE or array.dtype.hasobject or not hasattr(os, "memfd_create") or len(_alive) >= MOST:
        return None
    try:
        file = os.memfd_create("flowrt")
    except OSError:
        return None
    try:
        _write(file, np.ascontiguousarray(array))
        pages = _Pages(file, array.nbytes, access=mmap.ACCESS_READ)
    except OSError:  # there is no room in memory, or not for files
        os.close(file)
        return None
    pages.file = file
    weakref.finalize(pages, os.close, file)
    _alive.add(pages)
    return np.frombuffer(pages, array.dtype).reshape(array.shape)


def is_held(array: Array) -> bool:
    """Whether `held` made it, all of it."""
    pages = _pages_of(array)
    return pages is not None and len(pages) == array.nbytes and array.flags.c_contiguous


def begun(array: Array) -> Array:
    """The entries of an array that `is_held`, as one row that may be written. Raises `OSError` for want of room."""
    pages = _pages_of(array)
    assert pages is not None
    return np.frombuffer(mmap.mmap(pages.file, array.nbytes, access=mmap.ACCESS_COPY), array.dtype)


def _pages_of(array: Array) -> _Pages | None:
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    seen = owner.obj if isinstance(owner, memoryview) else owner
    return seen if isinstance(seen, _Pages) else None


def _write(file: int, array: Array) -> None:
    left = memoryview(array.reshape(-1).view(np.uint8).data)
    while left:
        left = left[os.write(file, left) :]
