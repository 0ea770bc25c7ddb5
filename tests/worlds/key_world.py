"""Keys of an authority, good and bad ones, for tests of who gets in; and an ear for what is decoded meanwhile."""

from __future__ import annotations

import asyncio
import datetime
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from flowrt.base import codec
from flowrt.cluster.keys import make_keys
from flowrt.net.door import heads
from flowrt.net.door.tls import CERT, KEY, Keys
from flowrt.net.wire import frames

if TYPE_CHECKING:
    from pathlib import Path

HERE = ["127.0.0.1"]


def good(folder: Path) -> Keys:
    make_keys(folder, HERE)
    return Keys(folder)


def of_another_authority(folder: Path, _: Path) -> Keys:
    return good(folder)


def expired(folder: Path, first: Path) -> Keys:
    """Ones of the authority of ``first`` that were good until yesterday."""
    shutil.copytree(first, folder)
    make_keys(folder, HERE, days=-1)
    return Keys(folder)


def of_tomorrow(folder: Path, first: Path) -> Keys:
    """Ones of the authority of ``first`` that are not good yet, as clocks differ."""
    shutil.copytree(first, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrt.net.door.certificates._SLACK", -datetime.timedelta(days=1))
        make_keys(folder, HERE)
    return Keys(folder)


def believing_only(folder: Path, first: Path) -> Keys:
    """Ones that believe in the authority of ``first``, and are of another."""
    make_keys(folder, HERE)
    shutil.copy(first / "ca.pem", folder)
    return Keys(folder)


def for_another_host(folder: Path, first: Path) -> Keys:
    """The authority's, for a host that is not this one."""
    shutil.copytree(first, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrt.cluster.keys._HERE", ())
        make_keys(folder, ["elsewhere.example"])
    return Keys(folder)


def replaced(folder: Path, by: Path) -> None:
    """Put the certificate and key of another folder into one, as `make_keys` does."""
    for name in (KEY, CERT):
        shutil.copy(by / name, folder / f".{name}")
        (folder / f".{name}").replace(folder / name)


@contextmanager
def nothing_decoded() -> Iterator[list[Any]]:
    """What this process decodes in the block, or begins to: it must be nothing at the end."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(msgpack, "unpackb", lambda *given, **_: seen.append(given))
        patch.setattr(codec, "survey", lambda *given, **_: seen.append(given), raising=False)
        patch.setattr(frames.FrameReader, "buffer_updated", lambda self, count: seen.append(count))
        yield seen
    assert seen == []


async def refused(port: int, *pieces: bytes, head: bytes = b"") -> bytes:
    """What a stranger who says these things over TCP is answered, until it is hung up on.

    With the ``head`` of a request they are what follows the node's to it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if head:
            writer.write(head)
            assert b" 101 " in await reader.readuntil(heads.END)
        for piece in pieces:
            writer.write(piece)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()
