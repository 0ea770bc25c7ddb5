"""Connections over real sockets on loopback, on asyncio's loop and uvloop: what arrives, how it ends, who waits."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
import uvloop
from wire_messages import same
from wire_world import MIB, QUICK, TOKEN, echo, on_both_loops, on_both_loops_and_ways, outcome, pair, stranger, wire

from flowrt.base import codec
from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    InternalError,
    NodeLost,
    SpecError,
)
from flowrt.net.door.transport import Bounds, Connection, connect, serve
from flowrt.net.node.enlisting import host_towards
from flowrt.net.stream import connection as connection_module
from flowrt.net.wire.frames import WINDOW, WORK, NoRoom, frame

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


@on_both_loops_and_ways
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


@on_both_loops_and_ways
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


@on_both_loops_and_ways
async def test_an_illegal_message_is_refused_and_the_stream_lives() -> None:
    async with pair() as (client, server):
        with pytest.raises(SpecError):
            await client.send({1: 2})
        await client.send("next")
        assert await server.receive() == "next"


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops_and_ways
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


@on_both_loops_and_ways
async def test_closing_wakes_who_receives() -> None:
    async with pair() as (client, _), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(outcome(client.receive()))
        await asyncio.sleep(0)
        await client.aclose()
        assert isinstance(await waiting, ClosedError)


@on_both_loops_and_ways
async def test_a_second_receiver_is_refused_and_the_first_goes_on() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.receive())
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="one consumer"):
            await client.receive()
        await server.send("for the first")
        assert await first == "for the first"


@on_both_loops_and_ways
async def test_a_cancelled_receiver_loses_nothing() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.receive())
        await asyncio.sleep(0)
        first.cancel()
        await server.send("kept")
        assert await client.receive() == "kept"


@on_both_loops_and_ways
async def test_both_sides_may_close_at_once() -> None:
    async with pair(Bounds(grace=20.0)) as (client, server), asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(client.aclose())
        tasks.create_task(server.aclose())


@on_both_loops_and_ways
async def test_a_connection_closes_although_its_inbox_is_full() -> None:
    async with pair(Bounds(grace=20.0, inbox_messages=1)) as (client, server), asyncio.timeout(10):
        for number in range(5):
            await client.send(number)
        assert await server.receive() == 0
        await server.aclose()


@on_both_loops_and_ways
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
async def test_where_no_host_can_be_no_node_is() -> None:
    for host, port in (("a..b", 1), ("x" * 300, 1), ("\0", 1), ("127.0.0.1", 99_999), ("127.0.0.1", -1)):
        with pytest.raises(NodeLost, match="cannot connect to"):
            await connect(host, port, TOKEN)
        with pytest.raises(NodeLost, match="no node answers at"):
            await host_towards((host, port))


@on_both_loops_and_ways
async def test_a_peer_that_a_write_finds_gone_is_lost_also_where_the_stream_is_closed_at_once() -> None:
    async with pair() as (client, server):
        reset = client._stream.socket
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.cut()
        await client.wait_closed()
        with suppress(NodeLost):
            for _ in range(2):  # before the loop has looked at the socket
                await server.send({"pong": 1})
        await server.aclose()
        assert isinstance(server.failure, NodeLost)


@on_both_loops_and_ways
async def test_a_stream_that_ended_while_it_was_written_to_can_be_cut_and_closed() -> None:
    async with pair(Bounds(inbox_messages=1, inbox_bytes=1)) as (client, server):
        await server.send("first")
        sending = asyncio.ensure_future(server.send(np.zeros(8 * MIB, np.uint8)))
        while not server._stream.outbox.blocked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await client.aclose()
        await server.wait_closed()
        await outcome(sending)
        server.cut()
        await server.aclose()


@on_both_loops_and_ways
async def test_a_peer_that_breaks_in_the_middle_of_a_frame_is_lost_once() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with pair(Bounds(inbox_messages=1, inbox_bytes=1)) as (client, server):
        stream, go_on = server._stream, server._stream.resume_writing

        def break_first() -> None:
            with socket.socket(fileno=os.dup(client._stream.socket.fileno())) as theirs:
                theirs.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                os.write(stream.socket.fileno(), b"answered with a reset")
            go_on()

        await server.send("first")
        sending = asyncio.ensure_future(outcome(server.send(np.zeros(64 * MIB, np.uint8))))
        while not stream.outbox.blocked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stream.resume_writing = break_first  # type: ignore[method-assign]
        assert await client.receive() == "first"
        assert isinstance(await sending, NodeLost)
        await server.wait_closed()
        await asyncio.sleep(0)
    assert complaints == []


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


@on_both_loops_and_ways
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


@on_both_loops_and_ways
async def test_a_small_message_flood_waits_outside_a_full_inbox() -> None:
    bounds = Bounds(inbox_messages=4, socket_bytes=1 << 14)
    async with blocked_sender(bounds) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        server._stream.transport.resume_reading()
        flood = tasks.create_task(send_many(client, 20_000))
        await blocked.wait()
        for _ in range(100):  # turns in which the flood would go on, if nobody held it up
            await asyncio.sleep(0)
        assert not flood.done()
        assert server._stream.paused
        assert len(server._stream.inbox) <= 4 + WINDOW // len(wire(0))
        assert [await server.receive() for _ in range(20_000)] == list(range(20_000))
        await flood


async def send_many(connection: Connection, count: int) -> None:
    for number in range(count):
        await connection.send(number)


@on_both_loops_and_ways
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


@on_both_loops_and_ways
async def test_a_cancelled_send_ends_at_once_and_its_frame_when_the_peer_reads() -> None:
    array = np.random.default_rng(0).integers(0, 256, 32 * MIB, dtype=np.uint8)
    async with blocked_sender(Bounds(grace=0.0)) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(client.send(array))
        await blocked.wait()
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        assert not client.closed
        behind = [tasks.create_task(client.send(number)) for number in range(3)]
        await asyncio.sleep(0)
        behind[1].cancel()
        server._stream.transport.resume_reading()
        assert np.array_equal(await server.receive(), array)
        assert [await server.receive(), await server.receive()] == [0, 2]


@on_both_loops_and_ways
async def test_the_array_of_a_cancelled_send_is_let_go_once_it_is_sent() -> None:
    async with blocked_sender(Bounds()) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        array = np.zeros(32 * MIB, "uint8")
        alive = weakref.ref(array)
        sending = tasks.create_task(client.send(array))
        del array
        await blocked.wait()
        sending.cancel()
        await asyncio.wait([sending])
        del sending
        server._stream.transport.resume_reading()
        await server.receive()
        await client.send("next")
        assert await server.receive() == "next"
        assert alive() is None


@on_both_loops_and_ways
async def test_a_sender_says_whether_its_message_had_begun() -> None:
    begun: list[str] = []
    async with blocked_sender(Bounds()) as (client, server, blocked), asyncio.TaskGroup() as tasks:
        await client.send_frame(frame("small"), lambda: begun.append("small"))
        large = tasks.create_task(client.send_frame(frame(np.zeros(32 * MIB, "uint8")), lambda: begun.append("large")))
        await blocked.wait()
        never = tasks.create_task(client.send_frame(frame("never"), lambda: begun.append("never")))
        await asyncio.sleep(0)
        for task in (large, never):
            task.cancel()
        await asyncio.wait([large, never])
        assert begun == ["small", "large"]
        server._stream.transport.resume_reading()
        assert await server.receive() == "small"


@on_both_loops_and_ways
async def test_a_received_array_is_kept_by_its_readers_alone() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        for size in (2000, 5 * MIB):
            tasks.create_task(client.send(np.ones(size, "uint8")))
            received = await server.receive()
            alive = weakref.ref(received)
            del received
            assert alive() is None, size


@on_both_loops_and_ways
async def test_a_flood_of_headers_is_decoded_in_turns_with_everything_else() -> None:
    """Else 64 KiB of maps would hold the loop for 30 ms, and again with every read."""
    decoded: list[int] = []
    frame_of_maps = wire(((),) * 1000)
    data = frame_of_maps * 200

    def count(stream: Any, nbytes: int) -> None:
        before = len(stream.inbox)
        decode(stream, nbytes)
        decoded.append(len(stream.inbox) - before)

    decode = connection_module._Stream._decode
    turns = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_module._Stream, "_decode", count)
        async with pair(Bounds(inbox_messages=1000)) as (client, server):
            client._stream.transport.write(data)
            while len(server._stream.inbox) < 200:
                await asyncio.sleep(0)
                turns += 1
            assert [await server.receive() for _ in range(200)] == [((),) * 1000] * 200
    most = -(-WORK // len(frame_of_maps))
    assert max(decoded) <= most
    assert turns >= 200 / most / 2


@on_both_loops_and_ways
async def test_a_message_that_there_is_no_memory_to_decode_waits_for_some() -> None:
    missing, assemble = 3, codec.assemble

    def short_of_memory(*args: Any) -> Any:
        nonlocal missing
        missing -= 1
        if missing >= 0:
            raise MemoryError
        return assemble(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "assemble", short_of_memory)
        async with pair() as (client, server):
            await client.send({"x": np.arange(20_000)})
            await client.send("next")
            assert np.array_equal((await server.receive())["x"], np.arange(20_000))
            assert await server.receive() == "next"
    assert missing < 0


@on_both_loops
async def test_an_array_beyond_memory_is_its_own_messages_trouble() -> None:
    def allocate(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        if shape == (3 * MIB,):
            raise MemoryError("as a test has it")
        return np.empty(shape, dtype)

    ends: asyncio.Queue[Any] = asyncio.Queue()

    async def take(connection: Connection) -> None:
        async for message in connection:
            await ends.put(message)

    async with (
        serve("127.0.0.1", 0, TOKEN, take, allocate=allocate) as server,
        await connect("127.0.0.1", server.port, TOKEN) as client,
    ):
        await client.send((np.ones(5), np.ones(3 * MIB, "uint8"), np.ones(MIB)))
        await client.send("next")
        small, lacking, large = await ends.get()
        assert lacking == NoRoom(np.dtype("uint8"), (3 * MIB,), "as a test has it")
        assert "feed: no memory to receive uint8[3145728]" in str(lacking.error("feed"))
        assert np.array_equal(small, np.ones(5))
        assert np.array_equal(large, np.ones(MIB))
        assert await ends.get() == "next"


@on_both_loops_and_ways
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


@on_both_loops_and_ways
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
