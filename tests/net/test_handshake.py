"""What both ends show each other before anything else: nothing that was seen of it opens anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest
from key_world import nothing_decoded, refused
from wire_world import HEAD, OPENING, TOKEN, echo, on_both_loops, proof_for, wire

from flowrt.base.errors import AuthenticationError, RemoteError
from flowrt.net.door import heads
from flowrt.net.door.failures import Failures
from flowrt.net.door.transport import Connection, connect, serve
from flowrt.net.wire.handshake import NONCE, HandshakeTerms, Opening
from flowrt.net.wire.messages import Carry, Drive, Enlist, Resume, Serve, to_hello

START = f"{HEAD}\r\n\r\n".encode()
REFUSED = heads.written("HTTP/1.1 401 Unauthorized", {"Connection": "close", "Content-Length": "0"})
DRIVE = Drive("job", "e" * 32, {"/job:ps/task:0": ("10.0.0.1", 7001)})


async def _unreached(connection: Connection) -> None:
    raise AssertionError("a stranger was let in")


@on_both_loops
async def test_who_cannot_prove_the_token_is_refused_before_anything_is_decoded() -> None:
    async with serve("127.0.0.1", 0, TOKEN, _unreached) as server:
        with nothing_decoded():
            for wrong in (bytes(32), os.urandom(32), TOKEN.encode().ljust(32)[:32], wire({"kind": "Drive"}).ljust(32)):
                assert await refused(server.port, wrong[:32], head=START) == REFUSED
                assert await refused(server.port, wrong[:32] + wire({}), head=START) in (b"reset", REFUSED)
        assert server.connections == 0


@on_both_loops
async def test_nothing_that_was_recorded_opens_a_connection() -> None:
    recorded: list[bytes] = []

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: list[bytes]) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    kept.append(data)
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back, recorded), pump(there, writer, []))

    async with serve("127.0.0.1", 0, TOKEN, echo) as server:
        wiretap = await asyncio.start_server(between, "127.0.0.1", 0)
        async with wiretap:
            port = wiretap.sockets[0].getsockname()[1]
            async with await connect("127.0.0.1", port, TOKEN, to_hello(DRIVE)) as client:
                await client.send("again")
                assert await client.receive() == "again"
        assert TOKEN.encode() not in b"".join(recorded)
        head, _, rest = b"".join(recorded).partition(heads.END)
        with nothing_decoded():
            for changed in (rest, rest.replace(b"e" * 32, b"f" * 32), rest[:32]):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(head + heads.END)
                assert b" 101 " in await reader.readuntil(heads.END)
                writer.write(changed)
                with contextlib.suppress(ConnectionError):
                    assert (await reader.read()).startswith(b"HTTP/1.1 401")
                writer.close()


@on_both_loops
async def test_what_is_said_after_a_proof_is_what_was_sealed_before_it() -> None:
    """A master's epoch, above all: what was opened for one opens no other."""
    async with serve("127.0.0.1", 0, TOKEN, _unreached) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(START)
        writer.write(proof_for(await reader.readuntil(heads.END)))
        writer.write(wire({"epoch": "another"}))
        await reader.read()  # the node's hello, and the end
        writer.close()


@pytest.mark.parametrize(
    "hello", [DRIVE, Resume("job", "e", {"a": ("b", 1)}), Carry("a", "e"), Enlist("w", -1, "h", 9)]
)
async def test_every_hello_is_known_again_where_it_arrives(hello: Any) -> None:
    met: list[Any] = []

    async def meet(connection: Connection) -> None:
        met.append(connection.peer_hello)

    serving = to_hello(Serve("/job:ps/task:0", ("cpu:0",), "", "tcp", (("mine", "abc"),)))
    async with (
        serve("127.0.0.1", 0, TOKEN, meet, hello=serving) as server,
        await connect("127.0.0.1", server.port, TOKEN, to_hello(hello)) as client,
    ):
        assert client.peer_hello == serving
        await client.wait_closed()
    assert met[0]["kind"] == type(hello).__name__


@on_both_loops
async def test_an_impostor_hears_a_nonce_and_a_seal() -> None:
    heard: list[bytes] = []
    ends: asyncio.Queue[bytes] = asyncio.Queue()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(heads.END))
        mine = Opening(os.urandom(NONCE), os.urandom(NONCE))
        theirs = Opening.read(heads.read(heard[-1]).headers)
        assert theirs is not None
        proofs = [
            os.urandom(32),
            HandshakeTerms(theirs, mine).node_proof("a guess"),
            HandshakeTerms(theirs, theirs).client_proof("x"),
        ]
        answer = {"Upgrade": "flowrt/4", **mine.headers(), "Flowrt-Proof": proofs[len(heard) % 3].hex()}
        writer.write(heads.written("HTTP/1.1 101 Switching Protocols", answer))
        rest = await reader.read()
        writer.close()
        await ends.put(rest)

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as impostor:
        port = impostor.sockets[0].getsockname()[1]
        for _ in range(3):
            with pytest.raises(AuthenticationError, match="both ends need the same one"):
                await connect("127.0.0.1", port, TOKEN, to_hello(DRIVE))
            assert await ends.get() == b""
    assert not any(secret in b"".join(heard) for secret in (TOKEN.encode(), b"e" * 32, b"10.0.0.1"))


@on_both_loops
async def test_what_the_other_end_proves_is_nothing_that_this_one_can_prove_with() -> None:
    """Reflection: a node's own proof, said back to it."""
    async with serve("127.0.0.1", 0, TOKEN, _unreached) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(START)
        head = heads.read(await reader.readuntil(heads.END))
        writer.write(bytes.fromhex(head.headers["flowrt-proof"]))
        assert (await reader.read()).startswith(b"HTTP/1.1 401")
        writer.close()


@on_both_loops
async def test_one_address_does_not_take_all_places() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo, max_connections=8, max_from_one=2) as server:
        async with (
            await connect("127.0.0.1", server.port, TOKEN) as one,
            await connect("127.0.0.1", server.port, TOKEN) as two,
        ):
            with pytest.raises(RemoteError, match="no room for another"):
                await connect("127.0.0.1", server.port, TOKEN)
            for client in (one, two):
                await client.send(1)
                assert await client.receive() == 1
        async with await connect("127.0.0.1", server.port, TOKEN):
            pass


def test_who_fails_too_often_is_not_heard_for_a_while() -> None:
    failures = Failures(most=3, seconds=10.0, kept=2)
    for now in (0.0, 1.0):
        failures.note("a", now)
    assert not failures.refuses("a", 2.0)
    failures.note("a", 2.0)
    assert failures.refuses("a", 9.9)
    assert not failures.refuses("b", 9.9)
    assert not failures.refuses("a", 10.0)
    for address in "bcdef":
        failures.note(address, 20.0)
    assert len(failures) == 2
    for address in "bcdef":
        for now in (31.0, 32.0, 33.0):
            failures.note(address, now)
    assert [address for address in "abcdefg" if failures.refuses(address, 34.0)] == ["e", "f"]


def test_failures_of_long_ago_do_not_count_with_those_of_now() -> None:
    failures = Failures(most=2, seconds=10.0)
    for now in (0.0, 10.0):
        failures.note("a", now)
    assert not failures.refuses("a", 10.0)
    failures.note("a", 11.0)
    assert failures.refuses("a", 19.0)
    assert not Failures(most=1).refuses("a", 0.0)


@pytest.mark.parametrize(("nonce", "seal"), [("ab" * NONCE, ""), ("", "ab" * NONCE), ("AB" * NONCE, "ab" * NONCE)])
def test_who_begins_without_a_nonce_or_without_a_seal_does_not_begin(nonce: str, seal: str) -> None:
    assert Opening.read({"flowrt-nonce": nonce, "flowrt-seal": seal}) is None


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: h\r\nA: 1\r\na: 2",
        "GET / HTTP/1.1\r\nHost: h\r\nA: 1\r\n b: 2",
        "GET / HTTP/1.1\r\nHost: h\r\nA : 1",
        "GET / HTTP/1.1\r\nHost: h\r\nA",
        "GET / HTTP/1.1\r\nHost: h\r\nA: \x00",
        "GET / HTTP/1.1\r\nHost: h\r\nA: 1\n B: 2",
        "GET / HTTP/1.1\r\nHost: h\r\nA: 1\rB: 2",
        "GET / HTTP/1.1\r\nHost: h\r\nHost: i",
        "GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 5",
        "GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 101 Go\r\nA: 1\r\na: 2",
    ],
)
async def test_a_head_that_could_be_read_in_two_ways_is_none(head: str) -> None:
    with pytest.raises(ValueError, match=r"header|no head alone"):
        heads.read(head.encode() + heads.END)


async def test_a_head_is_read_as_it_was_written() -> None:
    given = {"Host": "[::1]:80", "X-Long": "a b  c", "Empty": ""}
    read = heads.read(heads.written("GET /flowrt HTTP/1.1", given))
    assert read.path == "/flowrt"
    assert read.headers == {name.lower(): value for name, value in given.items()}
    assert heads.read(heads.written("HTTP/1.1 101 Go", {})).status == 101
    assert Opening.read({name.lower(): value for name, value in OPENING.headers().items()}) == OPENING
