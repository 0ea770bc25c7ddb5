"""Files that are replaced whole: who reads one meanwhile, or once its writer was killed, has the old one or the new."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to be written that takes the place of ``path`` as the block ends. Where it raises, nothing is changed."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def remove_drafts(path: Path) -> None:
    """Remove what killed writers of ``path`` left. Whoever asks for that is its only writer now."""
    for draft in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with suppress(OSError):  # it may be another user's
            draft.unlink()
