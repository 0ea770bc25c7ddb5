"""TLS over real sockets: who has no certificate of the authority is nobody, and keys change while connections go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from key_world import (
    believing_only,
    expired,
    for_another_host,
    good,
    nothing_decoded,
    of_another_authority,
    of_tomorrow,
    refused,
    replaced,
)
from wire_world import HEAD, LOOPS, MIB, TOKEN, echo, sockets

import flowrt as fr
from flowrt.base.errors import AuthenticationError, NodeLost, RemoteError
from flowrt.cluster.keys import _named_in, main, make_keys
from flowrt.net.door.tls import Keys, Vouched, check_host
from flowrt.net.door.tokens import check_private
from flowrt.net.door.transport import Connection, connect, serve
from flowrt.worker import main as worker


@pytest.fixture(params=LOOPS)
def on_loop(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """Run something on one of the loops, and see that it leaves no socket and no task."""

    async def bounded(work: Any) -> None:
        before = sockets()
        async with asyncio.timeout(40):
            await work
        async with asyncio.timeout(10):
            while sockets() > before:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def run(work: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(bounded(work))

    return run


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return good(tmp_path / "keys")


@pytest.fixture
def logged() -> Iterator[asyncio.Queue[str]]:
    """What the log is told, as it is."""
    said: asyncio.Queue[str] = asyncio.Queue()
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.put_nowait(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flowrt.net.door").addHandler(heard)
    yield said
    logging.getLogger("flowrt.net.door").removeHandler(heard)


async def _unreached(connection: Connection) -> None:
    raise AssertionError("a stranger was let in")


async def send_back(client: Connection, value: Any) -> Any:
    answer, _ = await asyncio.gather(client.receive(), client.send(value))
    return answer


def test_messages_large_and_small_come_back_as_they_were(keys: Keys, on_loop: Callable[[Any], None]) -> None:
    async def talk() -> None:
        room = np.zeros(3 * MIB, "uint8")
        async with serve("127.0.0.1", 0, TOKEN, echo, tls=keys) as server:
            connecting = connect(
                "127.0.0.1", server.port, TOKEN, tls=keys, allocate=lambda dtype, shape: room[: shape[0]]
            )
            async with await connecting as client:
                for size in (1, 70_000, 3 * MIB):
                    sent = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
                    got = await send_back(client, {"x": sent})
                    assert got["x"].base is room  # received into its place
                    assert np.array_equal(got["x"], sent)
                for number in range(100):
                    await client.send(number)
                assert [await client.receive() for _ in range(100)] == list(range(100))
        assert client.failure is None

    on_loop(talk())


def test_a_slow_reader_is_waited_for_over_tls(keys: Keys, on_loop: Callable[[Any], None]) -> None:
    async def talk() -> None:
        ends: asyncio.Queue[Connection] = asyncio.Queue()

        async def hand_out(connection: Connection) -> None:
            await ends.put(connection)
            await connection.wait_closed()

        async with (
            serve("127.0.0.1", 0, TOKEN, hand_out, tls=keys) as server,
            await connect("127.0.0.1", server.port, TOKEN, tls=keys) as client,
            asyncio.TaskGroup() as tasks,
        ):
            there = await ends.get()
            there._stream.transport.pause_reading()
            array = np.ones(32 * MIB, "uint8")
            sending = tasks.create_task(client.send(array))
            while not client._stream.outbox.blocked:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not sending.done()
            there._stream.transport.resume_reading()
            assert np.array_equal(await there.receive(), array)

    on_loop(talk())


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (of_another_authority, "certificate is refused"),
        (believing_only, "refuses our certificate|closed the connection"),
        (expired, "refuses our certificate|closed the connection"),
    ],
)
def test_a_client_with_the_token_and_no_good_certificate_is_refused(
    client: Callable[[Path, Path], Keys], told: str, keys: Keys, tmp_path: Path, on_loop: Callable[[Any], None]
) -> None:
    theirs = client(tmp_path / "theirs", keys.folder)

    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys) as server:
            with nothing_decoded(), pytest.raises(RemoteError, match=told):
                await connect("127.0.0.1", server.port, TOKEN, tls=theirs)

    on_loop(talk())


def the_very_same(_: Path, first: Path) -> Keys:
    return Keys(first)


def test_the_log_names_the_cause_for_which_each_was_refused(
    keys: Keys, tmp_path: Path, on_loop: Callable[[Any], None], logged: asyncio.Queue[str]
) -> None:
    refusals = (
        (of_another_authority, TOKEN, "it refuses our certificate: tlsv1 alert unknown ca"),
        (believing_only, TOKEN, "its certificate is refused: unable to get local issuer certificate"),
        (expired, TOKEN, "its certificate is refused: certificate has expired"),
        (of_tomorrow, TOKEN, "its certificate is refused: certificate is not yet valid"),
        (None, TOKEN, "426 Upgrade Required, to TLS/1.3"),
        (the_very_same, "another", "it went without a proof that it has our token; it may have another one"),
    )

    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys) as server:
            for number, (made, token, cause) in enumerate(2 * refusals):
                theirs = None if made is None else made(tmp_path / f"theirs{number}", keys.folder)
                with nothing_decoded(), pytest.raises(RemoteError):
                    await connect("127.0.0.1", server.port, token, tls=theirs)
                if number < len(refusals):  # what is told again within a minute is not
                    assert (await logged.get()).endswith(f", perhaps among others: {cause}")
        assert logged.empty()

    on_loop(talk())


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (of_another_authority, "certificate is refused: .*; it is of another authority: both sides need keys of one"),
        (expired, "certificate is refused: certificate has expired; make a new one by python -m flowrt.worker keys"),
        (of_tomorrow, "certificate is refused: certificate is not yet valid; set the clocks of both machines"),
        (for_another_host, "a certificate for elsewhere.example, not for 127.0.0.1; name all hosts in"),
    ],
)
def test_a_node_without_a_good_certificate_hears_nothing(
    node: Callable[[Path, Path], Keys], told: str, keys: Keys, tmp_path: Path, on_loop: Callable[[Any], None]
) -> None:
    theirs = node(tmp_path / "theirs", keys.folder)

    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=theirs) as server:
            with nothing_decoded(), pytest.raises(AuthenticationError, match=told):
                await connect("127.0.0.1", server.port, TOKEN, tls=keys)

    on_loop(talk())


def test_plain_text_and_tls_do_not_meet(keys: Keys, on_loop: Callable[[Any], None]) -> None:
    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys) as server:
            with nothing_decoded():
                with pytest.raises(AuthenticationError, match="speaks TLS alone; give this side keys"):
                    await connect("127.0.0.1", server.port, TOKEN)
                plain = await refused(server.port, f"{HEAD}\r\n\r\n".encode())
                assert plain.startswith(b"HTTP/1.1 426")
                assert b"TLS" in plain
                for garbage in (b"\x16\x03\x01\x00\x05aaaaa", b"\x00" * 300, b"\x00" + os.urandom(64)):
                    answer = await refused(server.port, garbage)
                    assert answer == b"reset" or b"426" in answer or answer[:1] in (b"", b"\x15")
        async with serve("127.0.0.1", 0, TOKEN, _unreached) as server:
            with nothing_decoded(), pytest.raises(AuthenticationError, match="does not speak TLS; start that node"):
                await connect("127.0.0.1", server.port, TOKEN, tls=keys)

    on_loop(talk())


def test_who_is_slow_to_agree_on_tls_ends_at_the_deadline_and_gives_way(
    keys: Keys, on_loop: Callable[[Any], None]
) -> None:
    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys, handshake=0.2) as server:
            with nothing_decoded():
                for said in ([], [b"\x16"], [b"\x16\x03\x01\x02\x00", b"\x01\x00"]):
                    assert await refused(server.port, *said) in (b"", b"reset")
        async with (
            serve("127.0.0.1", 0, TOKEN, echo, tls=keys, max_strangers=8) as server,
            contextlib.AsyncExitStack() as crowd,
        ):
            for number in range(40):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                crowd.callback(writer.close)
                writer.write((b"", b"\x16\x03\x01\x02\x00")[number % 2])
                if number % 20 == 19:
                    async with await connect("127.0.0.1", server.port, TOKEN, tls=keys, timeout=10) as client:
                        assert await send_back(client, number) == number
            assert len(server._strangers) <= 8

    on_loop(talk())


def test_over_tls_the_token_is_asked_for_too(keys: Keys, on_loop: Callable[[Any], None]) -> None:
    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys) as server:
            with nothing_decoded(), pytest.raises(AuthenticationError, match="both ends need the same one"):
                await connect("127.0.0.1", server.port, "another", tls=keys)

    on_loop(talk())


@pytest.fixture
def abroad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 127.0.0.1 taken for an address beyond this machine, of which a machine under test may have none."""
    for module in ("tls", "connecting", "transport"):
        monkeypatch.setattr(f"flowrt.net.door.{module}.is_loopback", lambda host: False)


@pytest.mark.parametrize("made", [True, False], ids=["by keys", "without keys"])
def test_what_is_said_over_one_channel_proves_nothing_over_another(
    made: bool, keys: Keys, tmp_path: Path, on_loop: Callable[[Any], None], abroad: None
) -> None:
    """Somebody in between who has a certificate of the authority, or one as good, passes on what both ends say."""
    theirs: Keys | Vouched = Vouched()
    if made:
        theirs = Keys(shutil.copytree(keys.folder, tmp_path / "theirs"))
        make_keys(theirs.folder, ["127.0.0.1"])
    mine = keys if made else None

    async def talk() -> None:
        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=theirs.contexts().client, server_hostname="127.0.0.1"
            )

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError):
                    while data := await source.read(1 << 16):
                        sink.write(data)
                sink.close()

            try:
                await asyncio.gather(pump(reader, back), pump(there, writer))
            finally:
                back.transport.abort()
                writer.transport.abort()

        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=mine) as server:
            passing: list[asyncio.Task[None]] = []
            middle = await asyncio.start_server(
                lambda r, w: passing.append(asyncio.ensure_future(between(r, w))),
                "127.0.0.1",
                0,
                ssl=theirs.contexts().node,
            )
            async with middle:
                with pytest.raises(AuthenticationError, match="both ends need the same one"):
                    await connect("127.0.0.1", middle.sockets[0].getsockname()[1], TOKEN, tls=mine)
            for task in passing:
                task.cancel()
            await asyncio.wait(passing)

    on_loop(talk())


def test_new_keys_are_taken_up_and_connections_go_on(
    keys: Keys, tmp_path: Path, on_loop: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    newer = shutil.copytree(keys.folder, tmp_path / "newer")
    make_keys(newer, ["127.0.0.1"])
    client_keys = Keys(shutil.copytree(keys.folder, tmp_path / "client"))

    def shown(client: Connection) -> bytes:
        tls = client._stream.transport.get_extra_info("ssl_object")
        return bytes(tls.getpeercert(binary_form=True))

    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, echo, tls=keys) as server:
            before = await connect("127.0.0.1", server.port, TOKEN, tls=client_keys)
            async with before:
                old = shown(before)
                replaced(keys.folder, newer)
                async with await connect("127.0.0.1", server.port, TOKEN, tls=client_keys) as after:
                    assert shown(after) == ssl.PEM_cert_to_DER_cert((newer / "cert.pem").read_text()) != old
                    assert await send_back(after, 1) == 1
                assert await send_back(before, 2) == 2
                (keys.folder / "cert.pem").write_text("nothing that could be used")
                async with await connect("127.0.0.1", server.port, TOKEN, tls=client_keys) as after:
                    assert await send_back(after, 3) == 3
                make_keys(keys.folder, ["127.0.0.1"], new_authority=True)
                with pytest.raises(AuthenticationError, match="certificate is refused"):
                    await connect("127.0.0.1", server.port, TOKEN, tls=client_keys)
                shutil.copy(
                    keys.folder / "ca.pem", client_keys.folder
                )  # the client's certificate is the old one's still
                async with await connect("127.0.0.1", server.port, TOKEN, tls=client_keys) as after:
                    assert await send_back(after, 4) == 4

    on_loop(talk())
    assert [str(keys.folder) in line for line in caplog.messages if "used on" in line] == [True]


# ── nodes and sessions ───────────────────────────────────────────────────────────────────────────────────────────────


def counter() -> tuple[fr.Graph, Any, Any]:
    with fr.Graph() as graph, fr.device("/job:ps/task:0"):
        v = fr.Variable(np.zeros(50_000), name="v")
        return graph, v, v.assign_add(np.ones(50_000))


@pytest.mark.parametrize("way", ["shared", "tcp"])
async def test_a_session_and_its_nodes_talk_over_tls(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_TRANSPORT", way)
    graph, v, more = counter()
    async with fr.LocalCluster(ps=1, worker=1, tls=True) as cluster:
        async with fr.Session(graph, cluster=cluster) as session:
            await session.run(more)
            await session.run(more)
            assert (await session.run(v) == 2).all()
        with pytest.raises(AuthenticationError, match="speaks TLS alone"):
            async with fr.Session(graph, cluster=fr.ClusterSpec(cluster.spec.jobs)):
                pass
        folder = cluster.tls
    assert folder not in (None, *map(str, Path(str(folder)).parent.iterdir()))


@pytest.mark.timeout(180)
async def test_ten_thousand_bad_handshakes_leave_training_undisturbed() -> None:
    """Plain text, nonsense, clients without a certificate, and some who hang up; sessions open meanwhile, too."""
    graph, v, more = counter()
    async with fr.LocalCluster(ps=1, worker=1, tls=True) as cluster:
        places = list(cluster.spec.tasks().values())
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        done = 0

        async def fail(number: int) -> None:
            place = places[number % 2]
            with contextlib.suppress(OSError):
                if number % 100 == 0:
                    reader, writer = await asyncio.open_connection(*place, ssl=stranger)
                else:
                    reader, writer = await asyncio.open_connection(*place)
                writer.write((f"{HEAD}\r\n\r\n".encode(), b"\x16\x03\x01\x00\x05aaaaa", b"")[number % 3])
                if number % 3 < 2:
                    await reader.read()
                writer.transport.abort()

        async def attack(first: int) -> None:
            nonlocal done
            for number in range(first, 10_000, 16):
                await fail(number)
                done += 1

        async with fr.Session(graph, cluster=cluster) as session, asyncio.TaskGroup() as attackers:
            for first in range(16):
                attackers.create_task(attack(first))
            steps = 0
            while done < 10_000:
                await session.run(more)
                steps += 1
                if steps % 300 == 0:
                    async with fr.Session(fr.Graph(), cluster=cluster):
                        pass
            assert (await session.run(v) == steps).all()
            assert session.lost == frozenset()
        assert steps > 0


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a node refuses to start."""
    assert worker(["--job=ps", "--task=0", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_wider_bind_without_keys_is_refused_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWRT_TLS", raising=False)
    assert main([str(tmp_path / "k")]) == 0
    assert "a certificate for localhost, 127.0.0.1, ::1" in capsys.readouterr().out
    token = f"--token-file={tmp_path / 'k' / 'token'}"
    for bind in ("0.0.0.0:0", "[::]:0"):
        said = refusal(capsys, f"--bind={bind}", token)
        assert "beyond this machine, needs TLS: make keys by python -m flowrt.worker keys DIR" in said
        assert "give --tls DIR" in said


def test_without_keys_the_token_vouches_for_tls_beyond_this_machine(
    keys: Keys, on_loop: Callable[[Any], None], abroad: None
) -> None:
    async def talk() -> None:
        async with serve("127.0.0.1", 0, TOKEN, echo) as server:
            async with await connect("127.0.0.1", server.port, TOKEN) as client:
                assert client._stream.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
                array = np.arange(MIB)
                assert np.array_equal(await send_back(client, array), array)
            with nothing_decoded():
                with pytest.raises(AuthenticationError, match="both ends need the same one"):
                    await connect("127.0.0.1", server.port, "another-token")
                assert b"426" in await refused(server.port, HEAD.encode())
                with pytest.raises(
                    AuthenticationError, match="self-signed certificate; start that node with --tls, too"
                ):
                    await connect("127.0.0.1", server.port, TOKEN, tls=keys)
        async with serve("127.0.0.1", 0, TOKEN, _unreached, tls=keys) as server:
            with nothing_decoded(), pytest.raises((AuthenticationError, NodeLost), match="this side needs it, too"):
                await connect("127.0.0.1", server.port, TOKEN)

    on_loop(talk())


def test_keys_that_are_no_secret_or_no_keys_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "k", ["127.0.0.1"])
    tls = ["--bind=127.0.0.1:0", f"--tls={tmp_path / 'k'}"]
    (tmp_path / "k" / "key.pem").chmod(0o640)
    said = refusal(capsys, *tls)
    assert "others can read the private key" in said
    assert "key.pem (mode 640); chmod 600 it" in said
    (tmp_path / "k" / "key.pem").chmod(0o600)
    (tmp_path / "k" / "cert.pem").write_text("no certificate")
    assert "cert.pem" in refusal(capsys, *tls)
    (tmp_path / "k" / "ca.pem").unlink()
    assert "ca.pem" in refusal(capsys, *tls)
    for bind in (tls[0], "--bind=0.0.0.0:0"):
        assert "make keys by python -m flowrt.worker keys" in refusal(capsys, bind, f"--tls={tmp_path / 'none'}")


def test_keys_are_private_and_are_renewed_by_the_same_authority(tmp_path: Path) -> None:
    assert make_keys(tmp_path, ["node1", "10.0.0.1"]) == ["localhost", "127.0.0.1", "::1", "node1", "10.0.0.1"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "cert.pem": 0o600, "key.pem": 0o600, "token": 0o600}
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_keys(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"cert.pem", "key.pem"}
    make_keys(tmp_path, new_authority=True)
    assert (tmp_path / "ca.pem").read_bytes().endswith(before["ca.pem"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(fr.ResourceError, match=r"not its key ca\.key"):
        make_keys(tmp_path)


def test_who_makes_keys_is_told_what_to_copy_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, told in (
        ([], "copy all but ca.key to each machine"),
        ([], "copy cert.pem and key.pem to each machine: nobody needs to be started again"),
        (["--new-authority"], "copy ca.pem to each machine first, then cert.pem and key.pem; once all have these"),
    ):
        assert main([str(tmp_path / "keys"), *more]) == 0
        assert told in capsys.readouterr().out


@pytest.mark.parametrize("days", ["0", "-3", "nan", "inf", "3651", "1e9", "many"])
def test_a_certificate_is_for_some_days_that_its_authority_has(
    days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "keys"), "--days", days])
    assert "is not a number of days above 0, and up to 3650" in capsys.readouterr().err


def test_no_certificate_outlasts_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.cluster.keys.AUTHORITY_DAYS", 30)
    make_keys(tmp_path, days=30)
    with pytest.raises(fr.ResourceError, match="which is 30 days, and the certificate would be for 31; make another"):
        make_keys(tmp_path, days=31)


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(fr.ResourceError, match="it is a file; name a folder"):
        make_keys(tmp_path / "file")
    make_keys(tmp_path / "keys")
    for name in ("ca.pem", "ca.key"):
        folder = shutil.copytree(tmp_path / "keys", tmp_path / name)
        (folder / name).write_text("nothing that could be used")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(fr.ResourceError, match=r"cannot use .*ca\.pem with .*ca\.key: .*by --new-authority"):
            make_keys(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "private"),
    [
        (0o600, 0, 0, True),
        (0o400, 1000, 1000, True),
        (0o440, 0, 1000, True),  # a secret of Kubernetes, in a pod that is not root
        (0o640, 0, 0, False),
        (0o440, 1000, 1000, False),
        (0o444, 0, 1000, False),
        (0o460, 0, 1000, False),
    ],
)
def test_who_may_read_a_secret(
    mode: int, owner: int, reader: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    about: Any = SimpleNamespace(st_mode=mode, st_uid=owner)
    with contextlib.nullcontext() if private else pytest.raises(AuthenticationError, match=f"mode {mode:03o}"):
        check_private(about, "the token file token")


@pytest.mark.parametrize("host", ["node*", "*node", "a.*.example", "*.*.example", "**", "*."])
def test_a_pattern_that_no_host_matches_is_refused_with_those_that_some_do(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "keys"), "--hosts", "node1", host]) == 2
    said = capsys.readouterr().err
    assert f"no host matches {host!r}: write *.DOMAIN for all hosts in a domain" in said
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    "host", ["n\xf6de", "node1:7001", "10.0.0.0/24", "https://node1", "node 1", "-node", "", "a..b"]
)
def test_what_names_no_host_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(fr.GraphError, match="names no host: write a name or an address alone"):
        make_keys(tmp_path / "keys", [host])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("name", "host", "is_for"),
    [
        ("*", "anything.example", True),
        ("*.cluster.local", "node1.cluster.local", True),
        ("*.cluster.local", "NODE1.cluster.local.", True),
        ("*.cluster.local", "cluster.local", False),
        ("*.cluster.local", "a.node1.cluster.local", False),
        ("node_1", "node_1", True),
        ("xn--nde-sna.example", "xn--nde-sna.example", True),
        ("2001:db8::1", "2001:db8:0:0:0:0:0:1", True),
    ],
)
def test_what_keys_may_be_made_for_is_what_hosts_are_known_by(
    name: str, host: str, is_for: bool, tmp_path: Path
) -> None:
    made = make_keys(tmp_path, [name])
    assert made[-1] == name
    with contextlib.nullcontext() if is_for else pytest.raises(AuthenticationError, match="name all hosts"):
        check_host(showing(tmp_path / "cert.pem"), host)


def showing(certificate: Path) -> Any:
    """A transport whose other end shows that certificate."""
    shown = {"subjectAltName": [("DNS", name) for name in _named_in(certificate)]}
    return SimpleNamespace(get_extra_info=lambda name: SimpleNamespace(getpeercert=lambda: shown))
