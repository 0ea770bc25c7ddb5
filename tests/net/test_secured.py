"""The transport that TLS has to itself: what it holds back, what it keeps, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from wire_world import keys, on_both_loops, only_over_tls

from flowrt.net.door import secured
from flowrt.net.door.secured import BURST, TLS, Secured, Taking, secured_to


class Hearing(asyncio.BufferedProtocol):
    """Keeps what comes, in sips of a few bytes, and stops reading after each."""

    def __init__(self, transport: Secured, sip: int) -> None:
        self.transport, self.heard, self.room = transport, bytearray(), bytearray(sip)
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.paused = 0
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.room

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += self.room[:nbytes]
        self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self.transport.resume_reading)

    def pause_writing(self) -> None:
        self.paused += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)


@asynccontextmanager
async def ends(sip: int = 3) -> AsyncIterator[tuple[Hearing, Hearing]]:
    """Both ends of a connection, the client's and the node's, which nobody reads yet."""
    made, loop = keys.get(), asyncio.get_running_loop()
    assert made is not None
    contexts, accepted = made.contexts(), loop.create_future()
    server = await loop.create_server(lambda: Taking(accepted.set_result), "127.0.0.1", 0)
    async with server, asyncio.TaskGroup() as tasks:
        port = server.sockets[0].getsockname()[1]
        asking = tasks.create_task(secured_to("127.0.0.1", port, contexts.client, "127.0.0.1"))
        node = Secured(await accepted)
        assert await node.begins_tls()
        await node.agree(contexts.node)
        client = await asking
        both = Hearing(client, sip), Hearing(node, sip)
        try:
            yield both
        finally:
            for end in both:
                end.transport.abort()
                await end.ended


@only_over_tls
async def test_what_is_left_of_a_record_comes_after_a_pause_too() -> None:
    said = os.urandom(50)
    async with ends() as (client, node):
        client.transport.write(said)
        node.transport.resume_reading()
        while len(node.heard) < len(said):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert node.heard == said


@only_over_tls
async def test_a_close_ends_after_all_that_was_written() -> None:
    said = os.urandom(20 * BURST)
    async with ends(sip=BURST) as (client, node):
        client.transport.write(said)
        client.transport.write(b"the end")
        client.transport.close()
        assert client.transport.is_closing()
        assert not client.ended.done()
        node.transport.resume_reading()
        assert await node.ended is None
        assert node.heard == said + b"the end"
        assert await client.ended is None


class Greedy:
    """A socket whose kernel takes everything."""

    def __init__(self) -> None:
        self.taken = 0

    def send(self, data: memoryview) -> int:
        sent = min(len(data), 1 << 14)
        self.taken += sent
        return sent


@only_over_tls
async def test_a_turn_of_the_loop_encrypts_no_more_than_a_burst() -> None:
    async with ends() as (client, _):
        greedy: Any = Greedy()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.transport, "_socket", greedy)
            for _ in range(3):
                client.transport.write(bytes(BURST))
            assert greedy.taken == BURST
            assert client.paused == 1
            assert client.transport.get_write_buffer_size() == 2 * BURST
            while client.transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0)


@asynccontextmanager
async def stranger() -> AsyncIterator[tuple[Secured, asyncio.StreamWriter]]:
    """A node's end of a connection over which nothing was said yet, and the stranger's."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Any] = loop.create_future()
    async with await loop.create_server(lambda: Taking(accepted.set_result), "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield Secured(await accepted), writer
        writer.close()


@on_both_loops
async def test_who_gives_up_while_tls_is_agreed_upon_is_told() -> None:
    async with stranger() as (node, _), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(given_up(node))
        await asyncio.sleep(0)
        node.abort()
        assert await waiting


@only_over_tls
async def test_a_stranger_who_is_given_up_in_the_turn_in_which_more_comes_is_not_waited_for() -> None:
    """Its descriptor is closed next: a process whose uvloop watches it then is aborted."""
    made, wake = keys.get(), secured._wake
    assert made is not None
    async with stranger() as (node, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # a hello, of which the rest never comes
        assert await node.begins_tls()

        def wake_and_give_up(waiter: asyncio.Future[None]) -> None:
            wake(waiter)
            node.abort()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secured, "_wake", wake_and_give_up)
            agreeing = asyncio.create_task(node.agree(made.contexts().node))
            await asyncio.sleep(0)
            writer.write(b"\x00")
            with pytest.raises(ConnectionAbortedError):
                await agreeing


@only_over_tls
async def test_a_number_that_is_another_descriptors_by_now_stays_watched() -> None:
    """Where TLS cannot begin, since who began it has reset the connection, `ssl` closes the descriptor."""
    made, loop = keys.get(), asyncio.get_running_loop()
    assert made is not None
    mine, other = socket.socketpair()
    with mine, other, socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as hasty:
            accepted = listener.accept()[0]
            node, number = Secured(accepted), accepted.fileno()
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hasty.send(TLS)
            assert await node.begins_tls()
        with pytest.raises(OSError, match=r"reset|TLS handshake"):
            await node.agree(made.contexts().node)
        os.dup2(mine.fileno(), number)
        heard = asyncio.Event()
        loop.add_reader(number, heard.set)
        node.abort()
        other.send(b"!")
        async with asyncio.timeout(10):
            await heard.wait()
        loop.remove_reader(number)
        os.close(number)


async def given_up(node: Secured) -> bool:
    try:
        await node.begins_tls()
    except ConnectionAbortedError:
        return True
    return False
