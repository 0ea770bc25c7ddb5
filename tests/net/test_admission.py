"""Who gets in to a server: tokens, strangers, other protocols, full servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from typing import TYPE_CHECKING

import msgpack
import pytest
from wire_world import HEAD, QUICK, TOKEN, ask, echo, on_both_loops, proof_for, wire

from flowrt.base.errors import (
    AuthenticationError,
    BrokenStream,
    NodeLost,
    ResourceError,
    VersionMismatch,
)
from flowrt.net.door.tokens import MAX_TOKEN, check_private, load_token, new_token, own_token, read_token, save_token
from flowrt.net.door.transport import Connection, connect, serve

if TYPE_CHECKING:
    from pathlib import Path


STRANGERS = {
    "no nonce": (HEAD.split("\r\nFlowrt-Nonce")[0], 401),
    "the token itself": (HEAD.split("\r\nFlowrt-Nonce")[0] + f"\r\nAuthorization: Bearer {TOKEN}", 401),
    "a nonce that is none": (HEAD.replace("00", "0x"), 401),
    "a nonce that is not ASCII": (HEAD.replace("00", "\xe9\xff"), 401),
    "a nonce that comes twice": (HEAD + f"\r\nflowrt-nonce: {'00' * 32}", 400),
    "Origin": (HEAD + "\r\nOrigin: http://127.0.0.1", 403),
    "foreign Host": (HEAD.replace("Host: 127.0.0.1", "Host: evil.example"), 403),
    "another path": (HEAD.replace("/flowrt ", "/other "), 404),
    "another version": (HEAD.replace("flowrt/4", "flowrt/1"), 426),
    "no upgrade": (HEAD.replace("Upgrade: flowrt/4", "X: y"), 426),
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
                server.port, (HEAD.replace("flowrt/4", "x").replace("127.0.0.1", host) + "\r\n\r\n").encode()
            )
            assert answer.startswith(b"HTTP/1.1 426")


@on_both_loops
async def test_slow_strangers_end_at_the_deadline() -> None:
    async with serve("127.0.0.1", 0, TOKEN, echo, handshake=0.1) as server:
        assert (await ask(server.port, b"GET /flo")).startswith(b"HTTP/1.1 408")
        assert (await ask(server.port, b"")).startswith(b"HTTP/1.1 408")
    async with serve("127.0.0.1", 0, TOKEN, echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{HEAD}\r\n\r\n".encode())
        proof = proof_for(await reader.readuntil(b"\r\n\r\n"))
        server.handshake = 0.1  # from here on, however long that took
        writer.write(proof)
        assert await reader.read() in (b"", bytes(4))  # it said no hello
        writer.close()


@on_both_loops
async def test_who_was_answered_hears_no_other_answer_where_the_server_closes() -> None:
    """Two heads that come at once would be none: a node that ends would be taken for no node."""
    async with serve("127.0.0.1", 0, TOKEN, echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{HEAD}\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    assert await reader.read() == b""
    writer.close()


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
async def test_strangers_however_many_keep_nobody_out_who_has_the_token() -> None:
    """Silent ones, and ones that never come to the end of what they say, from the same address as everybody else."""
    records: list[logging.LogRecord] = []
    heard = logging.Handler()
    heard.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(heard)
    try:
        async with serve("127.0.0.1", 0, TOKEN, echo, max_strangers=8, max_connections=8) as server:
            async with await connect("127.0.0.1", server.port, TOKEN) as before, contextlib.AsyncExitStack() as crowd:
                for number in range(100):
                    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                    crowd.callback(writer.close)
                    writer.write((b"", b"GET ", f"{HEAD}\r\n".encode())[number % 3])
                    if number % 10 == 0:
                        async with await connect("127.0.0.1", server.port, TOKEN, timeout=30) as client:
                            for peer in (before, client):
                                await peer.send(number)
                                assert await peer.receive() == number
                    assert server.connections <= 8 + 2
            assert len(server._strangers) <= 8
    finally:
        logging.getLogger().removeHandler(heard)
    assert len(records) <= 2


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
            b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: flowrt/1\r\nContent-Length: 0\r\n\r\n",
            VersionMismatch,
            "flowrt/1",
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
        (
            b"HTTP/1.1 101 Go\r\nUpgrade: flowrt/4\r\nConnection: Upgrade\r\n\r\n",
            AuthenticationError,
            "it is no node of ours",
        ),
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
            patience = 0.3 if script[0] is None else 30.0  # else who answers late on a busy machine did not answer
            with pytest.raises(script[1], match=script[2]):
                await connect("127.0.0.1", port, TOKEN, timeout=patience, bounds=QUICK)


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


@pytest.mark.parametrize(
    ("said", "token", "left"),
    [
        (b"good\nrest", "good", b"rest"),
        (b"good", "good", b""),
        (b"x" * MAX_TOKEN + b"\nrest", "x" * MAX_TOKEN, b"rest"),
        (b"x" * (MAX_TOKEN + 1) + b"\n", None, b"\n"),
        (b"\nrest", None, b"rest"),
        (b"", None, b""),
        (b"\xe9\n", None, b""),
    ],
)
def test_a_token_is_the_first_line_of_a_pipe_and_no_more_of_it_is_read(
    said: bytes, token: str | None, left: bytes
) -> None:
    reading, writing = os.pipe()
    os.write(writing, said)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if token is None:
            with pytest.raises(AuthenticationError, match="is no token"):
                read_token(reading)
        else:
            assert read_token(reading) == token
        assert pipe.read() == left


@pytest.mark.parametrize(
    ("owner", "mine", "mode", "private"),
    [
        (7, 7, 0o600, True),
        (7, 7, 0o640, False),
        (7, 7, 0o601, False),
        (0, 7, 0o641, False),
        (0, 0, 0o640, False),
        (0, 7, 0o640, True),  # as Kubernetes gives a secret
        (0, 7, 0o660, False),
        (0, 7, 0o644, False),
    ],
)
def test_only_what_is_roots_may_be_read_by_a_group_and_by_none_of_roots(
    owner: int, mine: int, mode: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: mine)
    about = os.stat_result((0o100000 | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    with contextlib.nullcontext() if private else pytest.raises(AuthenticationError, match="others can read the key"):
        check_private(about, "the key")


def test_a_users_own_token_is_made_once_where_only_the_user_can_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "some" / "where"))
    token = own_token()
    assert own_token() == token == load_token(tmp_path / "some" / "where" / "flowrt" / "token")
    assert stat.S_IMODE((tmp_path / "some" / "where" / "flowrt").stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "some" / "where" / "flowrt").iterdir()] == ["token"]
