"""Connections over real sockets on loopback, on asyncio's loop and uvloop: who gets in, what arrives, how it ends."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import uvloop
from wire_messages import same

from flowrt.errors import (
    AuthenticationError,
    BrokenStream,
    ClosedError,
    FlowrtError,
    InternalError,
    NodeLost,
    ResourceError,
    SpecError,
    VersionMismatch,
)
from flowrt.net import connection as connection_module
from flowrt.net.frames import WINDOW, frame
from flowrt.net.tokens import load_token, new_token, save_token
from flowrt.net.transport import Bounds, Connection, Server, connect, serve

if TYPE_CHECKING:
    from pathlib import Path

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TOKEN = "secret-of-the-tests"
HEAD = "\r\n".join(
    (
        "GET /flowrt HTTP/1.1",
        "Host: 127.0.0.1",
        "Upgrade: flowrt/1",
        "Connection: Upgrade",
        f"Authorization: Bearer {TOKEN}",
    )
)
QUICK = Bounds(grace=0.2, stall=0.2)
MIB = 1 << 20


def sockets() -> int:
    """Open sockets of this process. (uvloop keeps a /dev/null for itself.)"""
    found = 0
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):
            found += stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    return found


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Any:
    """Run an async test on each loop, and fail it if a task or a descriptor outlives it."""

    async def bounded() -> None:
        before = sockets()
        async with asyncio.timeout(30):
            await test()
        gc.collect()
        for _ in range(5):  # what was closed gets the turns it needs to end
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert sockets() == before

    @pytest.mark.parametrize("loop", LOOPS)
    def run(loop: str) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(bounded())

    run.__doc__ = test.__doc__
    return run


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
        serve("127.0.0.1", 0, TOKEN, hand_out, bounds=bounds) as server,
        await connect("127.0.0.1", server.port, TOKEN, bounds=bounds) as client,
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
async def stranger(server: Server, *, hello: bool = True) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """An authenticated peer that says what a test makes it say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{HEAD}\r\n\r\n".encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    if hello:
        writer.write(wire({}))
        assert await reader.readexactly(len(wire({}))) == wire({})
    try:
        yield reader, writer
    finally:
        writer.close()


def wire(message: Any) -> bytes:
    return b"".join(bytes(piece) for piece in frame(message))


async def outcome(work: Awaitable[Any]) -> Any:
    """What ``work`` returns, or the error it raises."""
    try:
        return await work
    except FlowrtError as error:
        return error


# ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_messages_come_back_as_they_were_sent() -> None:
    sent = [
        {"kind": "step", "id": 7, "keys": ("a", ("b",)), "nothing": None},
        (np.arange(5), np.zeros((0, 3), "float32"), np.array(1.5), np.arange(12).reshape(3, 4).T, b"bytes"),
        np.random.default_rng(0).random((1 << 19) + 1),
        [np.full(3000, i) for i in range(50)],
    ]
    async with serve("127.0.0.1", 0, TOKEN, echo) as server, await connect("127.0.0.1", server.port, TOKEN) as client:
        for message in sent:
            answer, _ = await asyncio.gather(client.receive(), client.send(message))
            judge = tuple(message) if isinstance(message, list) else message
            if isinstance(judge, tuple):
                judge = tuple(np.ascontiguousarray(x) if np.ndim(x) == 2 else x for x in judge)
            assert same(answer, judge)


@on_both_loops
async def test_each_end_learns_what_the_other_says_of_itself() -> None:
    met: list[Any] = []

    async def meet(connection: Connection) -> None:
        met.append((connection.hello, connection.peer_hello))

    async with (
        serve("127.0.0.1", 0, TOKEN, meet, hello={"task": "ps/0"}) as server,
        await connect("127.0.0.1", server.port, TOKEN, {"task": "master", "epoch": 3}) as client,
    ):
        assert client.peer == f"127.0.0.1:{server.port}"
        assert (client.hello, client.peer_hello) == ({"task": "master", "epoch": 3}, {"task": "ps/0"})
        await client.wait_closed()
    assert met == [({"task": "ps/0"}, {"task": "master", "epoch": 3})]


@on_both_loops
async def test_frames_of_concurrent_senders_never_interleave() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        for sender in range(12):
            for size in (10, 70_000, MIB):
                tasks.create_task(client.send({"sender": sender, "x": np.full(size, sender, "uint8")}))
        seen: list[tuple[int, int]] = []
        while len(seen) < 36:
            message = await server.receive()
            assert (message["x"] == message["sender"]).all()
            seen.append((message["sender"], message["x"].size))
        assert sorted(seen) == [(sender, size) for sender in range(12) for size in (10, 70_000, MIB)]


@on_both_loops
async def test_arrays_may_change_once_they_are_sent() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        array = np.zeros(4 * MIB, "uint8")
        receiving = tasks.create_task(server.receive())
        await client.send(array)
        array[:] = 1
        assert not (await receiving).any()


@on_both_loops
async def test_arrays_are_received_into_the_memory_that_the_receiver_gives() -> None:
    room = np.zeros(MIB, "uint8")
    got: list[Any] = []

    async def take(connection: Connection) -> None:
        got.append(await connection.receive())

    async with (
        serve("127.0.0.1", 0, TOKEN, take, allocate=lambda dtype, shape: room) as server,
        await connect("127.0.0.1", server.port, TOKEN) as client,
    ):
        await client.send(np.ones(MIB, "uint8"))
        await client.wait_closed()
    assert got[0] is room
    assert room.all()


@on_both_loops
async def test_an_illegal_message_is_refused_and_the_stream_lives() -> None:
    async with pair() as (client, server):
        with pytest.raises(SpecError):
            await client.send({1: 2})
        await client.send("next")
        assert await server.receive() == "next"


# ── who gets in ──────────────────────────────────────────────────────────────────────────────────────────────────────

STRANGERS = {
    "no token": (HEAD.split("\r\nAuth")[0], 401),
    "wrong token": (HEAD + "x", 401),
    "token in another scheme": (HEAD.replace("Bearer ", "Basic "), 401),
    "token that is not ASCII": (HEAD.replace(TOKEN, "\xe9\xff"), 401),
    "Origin": (HEAD + "\r\nOrigin: http://127.0.0.1", 403),
    "foreign Host": (HEAD.replace("Host: 127.0.0.1", "Host: evil.example"), 403),
    "another path": (HEAD.replace("/flowrt ", "/other "), 404),
    "another version": (HEAD.replace("flowrt/1", "flowrt/2"), 426),
    "no upgrade": (HEAD.replace("Upgrade: flowrt/1", "X: y"), 426),
    "another method": (HEAD.replace("GET", "POST"), 400),
    "garbage": ("\x16\x03\x01\x02\x00\x01", 400),
    "broken HTTP": ("GET \x00\x01 ", 400),
    "large head": (HEAD + "\r\nX: " + "y" * 9000, 431),
    "many headers": (HEAD + "\r\nX: y" * 2000, 431),
}


@on_both_loops
async def test_strangers_are_refused_with_the_reason_and_reach_nothing() -> None:
    reached: list[Connection] = []
    decode, msgpack.unpackb = msgpack.unpackb, lambda *args, **options: reached.append(args[0])

    async def reach(connection: Connection) -> None:
        reached.append(connection)

    try:
        async with serve("127.0.0.1", 0, TOKEN, reach) as server:
            for name, (head, status) in STRANGERS.items():
                answer = await ask(server.port, head.encode("latin-1") + b"\r\n\r\n")
                assert answer[9:12] == str(status).encode() or answer == b"reset", f"{name}: {answer!r}"
                if len(head) < 4000:  # a head that is not read to its end may be answered by a reset
                    assert answer != b"reset", name
            after = await ask(server.port, f"{HEAD}\r\n\r\n".encode() + wire({}))
            assert after.startswith(b"HTTP/1.1 400"), "bytes after the head"
    finally:
        msgpack.unpackb = decode
    assert reached == []


@on_both_loops
async def test_an_ipv6_or_named_loopback_host_is_known() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo) as server:
        for host in ("localhost", "localhost:80", "[::1]:80", "127.0.0.1:1"):
            answer = await ask(
                server.port, (HEAD.replace("flowrt/1", "x").replace("127.0.0.1", host) + "\r\n\r\n").encode()
            )
            assert answer.startswith(b"HTTP/1.1 426")


@on_both_loops
async def test_slow_strangers_end_at_the_deadline() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo, handshake=0.1) as server:
        assert (await ask(server.port, b"GET /flo")).startswith(b"HTTP/1.1 408")
        assert (await ask(server.port, b"")).startswith(b"HTTP/1.1 408")
        async with stranger(server, hello=False) as (reader, _):
            assert await reader.read() in (b"", bytes(4))  # it said no hello


@on_both_loops
async def test_a_full_server_refuses_and_has_room_again() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo, max_connections=1) as server:
        async with await connect("127.0.0.1", server.port, TOKEN):
            assert server.connections == 1
            with pytest.raises(NodeLost):
                await connect("127.0.0.1", server.port, TOKEN)
        async with await connect("127.0.0.1", server.port, TOKEN) as client:
            await client.send(1)
            assert await client.receive() == 1


@on_both_loops
async def test_a_client_is_told_why_it_was_refused() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo) as server:
        port = server.port
        with pytest.raises(AuthenticationError, match=rf"127\.0\.0\.1:{port} refused the token"):
            await connect("127.0.0.1", port, "wrong")
    with pytest.raises(NodeLost, match=rf"127\.0\.0\.1:{port}: Connection refused"):
        await connect("127.0.0.1", port, TOKEN)
    with pytest.raises(AuthenticationError, match="new_token"):
        await connect("127.0.0.1", port, "two\r\nlines")


@on_both_loops
async def test_a_client_tells_other_servers_from_nodes() -> None:
    answers = [
        (
            b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: flowrt/2\r\nContent-Length: 0\r\n\r\n",
            VersionMismatch,
            "flowrt/2",
        ),
        (b"HTTP/1.1 101 Go\r\nUpgrade: other/1\r\nConnection: Upgrade\r\n\r\n", VersionMismatch, "other/1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", BrokenStream, "status 200"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            BrokenStream,
            "status 302",
        ),
        (b"220 mail.example ESMTP\r\n\r\n", BrokenStream, "flowrt node"),
        (b"", NodeLost, "127.0.0.1"),
        (None, NodeLost, "did not answer within 0.3 s"),
        (b"HTTP/1.1 101 Go\r\nUpgrade: flowrt/1\r\nConnection: Upgrade\r\n\r\n", NodeLost, "closed the connection"),
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if script[0] is None:
            await reader.read()
        else:
            writer.write(script[0])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for script in answers:
            with pytest.raises(script[1], match=script[2]):
                await connect("127.0.0.1", port, TOKEN, timeout=0.3, bounds=QUICK)


@on_both_loops
async def test_a_port_in_use_is_a_resource_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            async with serve("127.0.0.1", port, TOKEN, echo):
                pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1"])
async def test_no_server_opens_without_a_token(host: str) -> None:
    with pytest.raises(AuthenticationError, match="token"):
        async with serve(host, 0, "", echo):
            pass


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_a_goodbye_ends_iteration_in_peace_on_both_sides() -> None:
    async with pair() as (client, server):
        await client.send(1)
        await client.aclose()
        await client.aclose()
        assert [message async for message in server] == [1]
        assert [message async for message in client] == []
        assert (client.failure, server.failure) == (None, None)
        assert isinstance(await outcome(client.send(2)), ClosedError)
        assert isinstance(await outcome(client.receive()), ClosedError)
        assert isinstance(await outcome(server.send(2)), NodeLost)
        assert isinstance(await outcome(server.receive()), NodeLost)
        assert client.closed
        assert server.closed


@on_both_loops
async def test_closing_wakes_who_receives() -> None:
    async with pair() as (client, _), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(outcome(client.receive()))
        await asyncio.sleep(0)
        await client.aclose()
        assert isinstance(await waiting, ClosedError)


@on_both_loops
async def test_a_second_receiver_is_refused_and_the_first_goes_on() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.receive())
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="one consumer"):
            await client.receive()
        await server.send("for the first")
        assert await first == "for the first"


@on_both_loops
async def test_a_cancelled_receiver_loses_nothing() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.receive())
        await asyncio.sleep(0)
        first.cancel()
        await server.send("kept")
        assert await client.receive() == "kept"


@on_both_loops
async def test_both_sides_may_close_at_once() -> None:
    async with pair(Bounds(grace=20.0)) as (client, server), asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(client.aclose())
        tasks.create_task(server.aclose())


@on_both_loops
async def test_a_connection_closes_although_its_inbox_is_full() -> None:
    async with pair(Bounds(grace=20.0, inbox_messages=1)) as (client, server), asyncio.timeout(10):
        for number in range(5):
            await client.send(number)
        assert await server.receive() == 0
        await server.aclose()


@on_both_loops
async def test_a_peer_that_vanishes_is_a_lost_node_after_what_it_sent() -> None:
    async with pair() as (client, server):
        await client.send("last words")
        client._stream.transport.abort()
        assert await server.receive() == "last words"
        with pytest.raises(NodeLost, match=r"127\.0\.0\.1"):
            await server.receive()
        with pytest.raises(NodeLost):
            await server.send(1)
        with pytest.raises(NodeLost):
            _ = [message async for message in server]
        await server.wait_closed()


@on_both_loops
async def test_a_stream_cut_at_any_byte_ends_for_the_receiver() -> None:
    data = wire({"a": np.arange(3), "b": "text"})
    ends: asyncio.Queue[Any] = asyncio.Queue()

    async def take(connection: Connection) -> None:
        await ends.put((await outcome(connection.receive()), connection))

    async with serve("127.0.0.1", 0, TOKEN, take, bounds=QUICK) as server:
        for end in range(len(data) + 1):
            async with stranger(server) as (_, writer):
                writer.write(data[:end])
                writer.close()
                got, connection = await ends.get()
            await connection.wait_closed()
            assert isinstance(got, dict) if end == len(data) else isinstance(got, NodeLost), end


@on_both_loops
async def test_garbage_breaks_the_stream_and_names_the_peer() -> None:
    ends: asyncio.Queue[Any] = asyncio.Queue()

    async def take(connection: Connection) -> None:
        await ends.put(await outcome(connection.receive()))

    async with serve("127.0.0.1", 0, TOKEN, take, bounds=QUICK) as server:
        for garbage in (b"\xff" * 64, b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00\x91\xd4", b"\x00" * 5, b"GET / HTTP"):
            async with stranger(server) as (reader, writer):
                writer.write(garbage)
                error = await ends.get()
                assert isinstance(error, BrokenStream), garbage
                assert "127.0.0.1" in str(error)
                with suppress(ConnectionResetError):
                    await reader.read()


@on_both_loops
async def test_a_stalled_frame_ends_at_its_deadline() -> None:
    ends: asyncio.Queue[Any] = asyncio.Queue()

    async def take(connection: Connection) -> None:
        await ends.put(await outcome(connection.receive()))

    async with serve("127.0.0.1", 0, TOKEN, take, bounds=Bounds(stall=0.1)) as server:
        for part in (2, 6, 40):
            async with stranger(server) as (_, writer):
                writer.write(wire({"x": np.zeros(100)})[:part])
                assert "stalled" in str(await ends.get())


@on_both_loops
async def test_leaving_the_server_closes_every_connection() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo, bounds=QUICK) as server:
        clients = [await connect("127.0.0.1", server.port, TOKEN) for _ in range(5)]
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET ")
    for client in clients:
        await client.wait_closed()
        await client.aclose()
    writer.close()


@on_both_loops
async def test_errors_leave_the_server_to_who_opened_it() -> None:
    async def fail(connection: Connection) -> None:
        raise ZeroDivisionError

    async def provoke() -> None:
        async with (
            serve("127.0.0.1", 0, TOKEN, fail) as server,
            await connect("127.0.0.1", server.port, TOKEN, bounds=QUICK),
        ):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await provoke()
    assert caught.group_contains(ZeroDivisionError)
    with pytest.raises(KeyError):
        async with serve("127.0.0.1", 0, TOKEN, echo):
            raise KeyError


# ── back-pressure and cancellation ───────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def blocked_sender(bounds: Bounds) -> AsyncIterator[tuple[Connection, Connection, asyncio.Event]]:
    """A pair, and the event that one of its ends had to stop writing."""
    blocked = asyncio.Event()
    pause = connection_module._Stream.pause_writing

    def note(stream: Any) -> None:
        pause(stream)
        blocked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_module._Stream, "pause_writing", note)
        async with pair(bounds) as (client, server):
            server._stream.transport.pause_reading()
            yield client, server, blocked


@on_both_loops
async def test_a_slow_reader_bounds_what_the_sender_gets_ahead() -> None:
    bounds = Bounds(inbox_messages=2, slice_bytes=1 << 16, socket_bytes=1 << 16)
    sent = 0

    async def send_all(client: Connection) -> None:
        nonlocal sent
        for number in range(100):
            await client.send({"number": number, "x": np.zeros(1 << 15)})
            sent += 1

    async with pair(bounds) as (client, server), asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all(client))
        for number in range(100):
            for _ in range(20):  # turns in which an unbounded sender would run ahead
                await asyncio.sleep(0)
            assert sent - number <= 8
            assert len(server._stream.inbox) <= bounds.inbox_messages
            assert client._stream.transport.get_write_buffer_size() <= bounds.slice_bytes
            assert (await server.receive())["number"] == number


@on_both_loops
async def test_a_small_message_flood_waits_outside_a_full_inbox() -> None:
    bounds = Bounds(inbox_messages=4, socket_bytes=1 << 14)
    async with blocked_sender(bounds) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        server._stream.transport.resume_reading()
        flood = tasks.create_task(send_many(client, 50_000))
        await blocked.wait()
        for _ in range(100):  # turns in which the flood would go on, if nobody held it up
            await asyncio.sleep(0)
        assert not flood.done()
        assert server._stream.paused
        assert len(server._stream.inbox) <= 4 + WINDOW // len(wire(0))
        assert [await server.receive() for _ in range(50_000)] == list(range(50_000))
        await flood


async def send_many(connection: Connection, count: int) -> None:
    for number in range(count):
        await connection.send(number)


@on_both_loops
async def test_a_cancelled_send_finishes_the_frame_it_began() -> None:
    array = np.random.default_rng(0).integers(0, 256, 32 * MIB, dtype=np.uint8)
    async with blocked_sender(Bounds(grace=20.0)) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(client.send(array))
        await blocked.wait()
        sending.cancel()
        server._stream.transport.resume_reading()
        assert np.array_equal(await server.receive(), array)
        await asyncio.wait([sending])
        assert sending.cancelled()
        await client.send("next")
        assert await server.receive() == "next"


@on_both_loops
async def test_a_cancelled_send_that_cannot_finish_closes_the_connection() -> None:
    async with blocked_sender(Bounds(grace=0.1)) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(client.send(np.zeros(32 * MIB, "uint8")))
        await blocked.wait()
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        with pytest.raises(NodeLost):
            await client.send("next")
        server._stream.transport.resume_reading()
        with pytest.raises(NodeLost):
            await server.receive()


@on_both_loops
async def test_a_send_cancelled_before_its_turn_sends_nothing() -> None:
    async with blocked_sender(Bounds(grace=20.0)) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        tasks.create_task(client.send(np.zeros(32 * MIB, "uint8")))
        await blocked.wait()
        second = tasks.create_task(client.send("never"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        server._stream.transport.resume_reading()
        assert (await server.receive()).nbytes == 32 * MIB
        await client.send("last")
        assert await server.receive() == "last"


@on_both_loops
async def test_closing_does_not_wait_for_a_peer_that_does_not_read() -> None:
    async with blocked_sender(Bounds(grace=0.1)) as (client, _, blocked), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(outcome(client.send(np.zeros(32 * MIB, "uint8"))))
        await blocked.wait()
        await client.aclose()
        assert isinstance(await sending, ClosedError)


# ── between processes ────────────────────────────────────────────────────────────────────────────────────────────────


def echo_in_process(port: Any) -> None:
    async def main() -> None:
        async with serve("127.0.0.1", 0, TOKEN, echo) as server:
            port.send(server.port)
            await asyncio.Event().wait()

    uvloop.run(main())


def test_a_killed_process_is_a_lost_node() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo_in_process, args=(theirs,), daemon=True)
    process.start()

    async def talk(port: int) -> None:
        array = np.random.default_rng(0).random(MIB)
        async with await connect("127.0.0.1", port, TOKEN) as connection:
            answer, _ = await asyncio.gather(connection.receive(), connection.send({"x": array}))
            assert np.array_equal(answer["x"], array)
            process.kill()
            with pytest.raises(NodeLost):
                await connection.receive()

    try:
        asyncio.run(talk(ours.recv()))
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_is_kept_in_a_file_that_its_owner_alone_reads(tmp_path: Path) -> None:
    token = new_token()
    save_token(tmp_path / "token", token)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert load_token(tmp_path / "token") == token
    assert new_token() != token
    with pytest.raises(FileExistsError):
        save_token(tmp_path / "token", token)


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ("", 0o600, "empty"),
        ("two\nlines", 0o600, "more than a token"),
        ("x" * 2000, 0o600, "more than a token"),
        ("\xe9", 0o600, "cannot read"),
        ("good", 0o644, "chmod 600"),
        (None, 0, "cannot read"),
    ],
)
def test_a_token_file_that_is_no_secret_is_refused_by_name(
    tmp_path: Path, text: str | None, mode: int, told: str
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
    with pytest.raises(AuthenticationError, match=told) as caught:
        load_token(path)
    assert str(path) in str(caught.value)
