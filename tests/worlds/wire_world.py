"""Peers on real sockets for the tests of connections: on both event loops, and with nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from key_world import good

from flowrt.base.errors import (
    FlowrtError,
)
from flowrt.net.door import heads
from flowrt.net.door.transport import Bounds, Connection, OpenPort, connect, serve
from flowrt.net.wire.frames import frame
from flowrt.net.wire.handshake import NONCE, HandshakeTerms, Opening

if TYPE_CHECKING:
    from flowrt.net.door.tls import Keys

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TOKEN = "secret-of-the-tests"
OPENING = Opening.of(TOKEN, bytes(NONCE), {})  # of who says nothing of itself
HEAD = "\r\n".join(
    (
        "GET /flowrt HTTP/1.1",
        "Host: 127.0.0.1",
        "Upgrade: flowrt/4",
        "Connection: Upgrade",
        *(f"{name}: {value}" for name, value in OPENING.headers().items()),
    )
)
keys: ContextVar[Keys | None] = ContextVar("keys", default=None)  # that both ends of a `pair` have
QUICK = Bounds(grace=0.2, stall=0.2)
MIB = 1 << 20


def sockets() -> int:
    """Open sockets of this process. (uvloop keeps a /dev/null for itself.)"""
    found = 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):
            found += stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    return found


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]], ways: tuple[str, ...] = ("plain",)) -> Any:
    """Run an async test on each loop, and fail it if a task or a descriptor outlives it."""

    async def bounded() -> None:
        gc.collect()
        before = sockets()
        async with asyncio.timeout(50):
            await test()
        gc.collect()
        for _ in range(5):  # what was closed gets the turns it needs to end
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert sockets() <= before  # fewer where what an earlier test lent was given back meanwhile

    @pytest.mark.parametrize("way", ways)
    @pytest.mark.parametrize("loop", LOOPS)
    def run(loop: str, way: str) -> None:
        with TemporaryDirectory() as folder:
            keys.set(good(Path(folder)) if way == "tls" else None)
            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                runner.run(bounded())

    run.__doc__ = test.__doc__
    return run


def on_both_loops_and_ways(test: Callable[[], Coroutine[Any, Any, None]]) -> Any:
    """`on_both_loops`, with each `pair` in plain text and over TLS."""
    return on_both_loops(test, ("plain", "tls"))


def only_over_tls(test: Callable[[], Coroutine[Any, Any, None]]) -> Any:
    """`on_both_loops`, with ``keys`` to use."""
    return on_both_loops(test, ("tls",))


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


@asynccontextmanager
async def pair(bounds: Bounds | None = None) -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of one connection: the client's, the server's."""
    ends: asyncio.Queue[Connection] = asyncio.Queue()

    async def hand_out(connection: Connection) -> None:
        await ends.put(connection)
        await asyncio.Event().wait()  # until the server is left

    async with (
        serve("127.0.0.1", 0, TOKEN, hand_out, bounds=bounds, tls=keys.get()) as server,
        await connect("127.0.0.1", server.port, TOKEN, bounds=bounds, tls=keys.get()) as client,
    ):
        yield client, await ends.get()


async def ask(port: int, head: bytes) -> bytes:
    """What the port answers to ``head``, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


@asynccontextmanager
async def stranger(server: OpenPort, *, hello: bool = True) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """An authenticated peer that says what a test makes it say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{HEAD}\r\n\r\n".encode())
    writer.write(proof_for(await reader.readuntil(b"\r\n\r\n")))
    if hello:
        writer.write(wire({}))
        assert await reader.readexactly(len(wire({}))) == wire({})
    try:
        yield reader, writer
    finally:
        writer.close()


def proof_for(answer: bytes, token: str = TOKEN) -> bytes:
    """What a client with ``token`` says to a node that answers so to `HEAD`."""
    head = heads.read(answer)
    node = Opening.read(head.headers)
    assert head.status == 101, answer
    assert node is not None
    return HandshakeTerms(OPENING, node).client_proof(token)


def wire(message: Any) -> bytes:
    return b"".join(bytes(piece) for piece in frame(message))


async def outcome(work: Awaitable[Any]) -> Any:
    """What ``work`` returns, or the error it raises."""
    try:
        return await work
    except FlowrtError as error:
        return error
