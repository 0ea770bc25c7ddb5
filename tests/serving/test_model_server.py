"""Models over HTTP, by real sockets: what clients get, what is refused, and what a newer file changes."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from serving_world import Held, X, asking, client_of, doubling, frozen, serving, until
from yarl import URL

import flowrt as fr
from flowrt.base.errors import AuthenticationError, BrokenStream, GraphError, ResourceError
from flowrt.serving import Batching, http, metrics, protocol

if TYPE_CHECKING:
    from pathlib import Path

LONG = 1000.0
LARGE = np.zeros(32 << 20, "uint8")


async def test_many_clients_get_the_bits_of_a_lone_run() -> None:
    model = frozen(lambda x: fr.nn.softmax(x * 3) + fr.exp(x))
    with model:
        expected = [model(x=X[i : i + 1])["y"] for i in range(64)]
    async with serving(model) as (server, client):

        async def ask(i: int) -> None:
            for infer in (client.infer, client.infer_as_bytes):
                answer = await infer(X[i : i + 1])
                assert answer.tobytes() == expected[i].tobytes()

        async with asyncio.TaskGroup() as tasks:
            for i in range(64):
                tasks.create_task(ask(i))
        counted = server.endpoints["m"].metrics
        assert counted.ended == {"ok": 128}
        assert counted.runs < 128


async def test_nan_infinities_and_zero_rows_go_through() -> None:
    rows = np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45, 3, 4, 5]], "float32")
    async with serving(frozen(lambda x: x * 1)) as (_, client):
        for infer in (client.infer, client.infer_as_bytes):
            assert (await infer(rows)).tobytes() == rows.tobytes()
            assert (await infer(rows[:0])).shape == (0, 8)


async def test_two_models_have_names_of_their_own() -> None:
    async with serving({"two": doubling(), "three": doubling(by=3)}) as (server, client):
        for name, by in (("two", 2), ("three", 3)):
            np.testing.assert_array_equal(await client.infer(X, name), X * by + 1)
            answer = await server.infer({"x": X}, model=name)
            np.testing.assert_array_equal(answer["y"], X * by + 1)
        assert (await client.post(asking(X), "four")) == (
            404,
            {"error": "there is no model 'four'; there are two, three"},
        )
        with pytest.raises(GraphError, match="no model is called None; there are two, three"):
            await server.infer({"x": X})


async def test_what_the_protocol_asks_of_a_server_is_there() -> None:
    async with serving(doubling()) as (_, client):
        assert await client.get("/v2/health/live") == (200, {"live": True})
        assert await client.get("/v2/health/ready") == (200, {"ready": True})
        assert await client.get("/v2/models/m/ready") == (200, {"ready": True})
        status, about = await client.get("/v2")
        assert (status, about["name"], about["extensions"]) == (200, "flowrt", ["binary_tensor_data"])
        status, about = await client.get("/v2/models/m")
        assert (status, about["inputs"]) == (200, [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}])
        assert (await client.get("/v2/models/z"))[0] == 404
        assert (await client.get("/v2/models/m/infer"))[0] == 405
        assert (await client.get("/anything"))[0] == 404


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (asking(X[0]), "input 'x': expected FP32 of shape [-1, 8], got shape [8]; give it a first axis of 1"),
        (asking(X.astype("float64")), "got datatype 'FP64'; convert it to FP32"),
        ({"inputs": [{"name": "x", "shape": [1, 8], "datatype": "BYTES", "data": ["a"] * 8}]}, "text is not taken"),
        (b"\x00", "not JSON"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(body: Any, text: str) -> None:
    async with serving(doubling()) as (server, client):
        status, answer = await client.post(body)
        assert status == 400
        assert text in answer["error"]
        assert server.endpoints["m"].metrics.ended == {"invalid": 1}


async def test_an_index_out_of_range_is_the_clients_fault() -> None:
    model = frozen(lambda x: fr.take(fr.constant(np.ones((3, 2), "float32")), x), shape=(None,), dtype="int64")
    async with serving(model) as (_, client):
        status, answer = await client.post(asking(np.array([7])))
        assert status == 400
        assert "an index is out of range" in answer["error"]


async def test_a_body_is_bounded_whatever_its_headers_say() -> None:
    async with serving(doubling(), max_body=2000) as (_, client):
        assert (await client.post(b"x" * 2001))[0] == 413
        packed = gzip.compress(b" " * 100_000)
        assert (await client.post(packed, headers={"Content-Encoding": "gzip"}))[0] == 413

        async def pieces() -> Any:
            yield b"{}"

        async with client.session.post("/v2/models/m/infer", data=pieces()) as answer:
            assert answer.status == 411
        reading = await asyncio.open_connection("127.0.0.1", client.session._base_url.port)
        reading[1].write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2001\r\n\r\n")
        assert b" 413 " in await reading[0].readline()
        reading[1].close()


async def test_a_packed_request_is_unpacked() -> None:
    async with serving(doubling()) as (_, client):
        packed = gzip.compress(json.dumps(asking(X)).encode())
        assert (await client.post(packed, headers={"Content-Encoding": "gzip"}))[0] == 200
        assert (await client.post(packed[:20], headers={"Content-Encoding": "gzip"}))[0] == 400


async def test_overload_is_answered_with_when_to_ask_again() -> None:
    async with serving(doubling(), batching=Batching(max_delay=LONG, max_waiting=2)) as (server, client):
        endpoint = server.endpoints["m"]
        waiting = [asyncio.ensure_future(client.infer(X[:1])) for _ in range(2)]
        await until(lambda: endpoint.current.waiting == 2)
        async with client.session.post("/v2/models/m/infer", json=asking(X[:1])) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "2 requests of 64 bytes wait for the model 'm'" in (await answer.json())["error"]
        endpoint.close()
        np.testing.assert_array_equal(np.concatenate(await asyncio.gather(*waiting)), X[[0, 0]] * 2 + 1)


async def test_a_client_that_goes_away_takes_its_request_along() -> None:
    async with serving(doubling(), batching=Batching(max_delay=LONG)) as (server, _):
        endpoint = server.endpoints["m"]
        body = json.dumps(asking(X[:1])).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: endpoint.current.waiting == 1)
        writer.close()
        await until(lambda: endpoint.current.waiting == 0)
        assert endpoint.metrics.ended == {"cancelled": 1}


async def unread(server: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Any, Any]:
    """Who asked, was answered by more than lies between two sockets, and does not read it."""
    endpoint = server.endpoints["m"]

    async def infer(_: object) -> Any:
        monkeypatch.setattr(server._face, "_batching", Batching(**settings))  # from here on
        return endpoint.current.model, {"y": LARGE}

    monkeypatch.setattr(endpoint, "infer", infer)
    body = json.dumps({**asking(X[:1]), "parameters": {"binary_data_output": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


async def test_who_does_not_read_an_answer_in_time_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(doubling()) as (server, _):
        reader, writer = await unread(server, monkeypatch, timeout=0)
        await until(lambda: "the answer was not read" in caplog.text)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(LARGE.size)
        writer.close()
        assert server._face._here == 0
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("sent", [b"", b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n"])
async def test_who_sends_no_whole_request_is_cut_off(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.05)
    async with serving(doubling()) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET /\xff /v2 HTTP/1.1\r\n\r\n", b"GET /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n"],
)
async def test_what_is_no_http_is_answered_so_and_fills_no_log(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(doubling()) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.0 400 Bad Request")
        writer.close()
    assert not caplog.text


async def test_an_answer_counts_among_what_is_here_until_it_is_read_or_nobody_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(doubling()) as (server, _):
        _, writer = await unread(server, monkeypatch, timeout=LONG)
        await until(lambda: server._face._here > LARGE.size)
        writer.close()
        await until(lambda: server._face._here == 0)
        assert "Traceback" not in caplog.text


async def test_leaving_answers_what_was_asked() -> None:
    server = fr.serving.ModelServer(doubling(), port=0, batching=Batching(max_delay=0.2))
    async with server:
        session = aiohttp.ClientSession(f"http://127.0.0.1:{server.port}")
        asked = asyncio.ensure_future(session.post("/v2/models/m/infer", json=asking(X[:1])))
        await until(lambda: server.endpoints["m"].current.waiting == 1)
    async with session, await asked as answer:
        assert answer.status == 200


async def test_no_answer_in_time_is_said() -> None:
    async with serving(doubling(), batching=Batching(max_delay=LONG, timeout=0.05)) as (_, client):
        status, answer = await client.post(asking(X[:1]))
        assert (status, answer) == (504, {"error": "there was no answer"})


async def test_who_asks_shows_the_token() -> None:
    async with serving(doubling(), token="secret") as (_, client):
        assert (await client.get("/v2/health/ready"))[0] == 200
        for path in ("/v2/models/m", "/metrics", "/v2"):
            assert (await client.get(path))[0] == 401
        for wrong in ("Bearer wrong", "secret ", "Bearer \xe4"):
            assert (await client.get("/v2", headers={"Authorization": wrong}))[0] == 401
        for right in ("Bearer secret", "bearer secret"):  # RFC 9110: schemes are of any case
            assert (await client.get("/v2", headers={"Authorization": right}))[0] == 200


async def test_a_fault_of_the_server_is_answered_in_json_and_told_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(doubling()) as (server, client):

        def fail(_: object) -> None:
            raise RuntimeError("of its own")

        monkeypatch.setattr(server.endpoints["m"], "infer", fail)
        assert await client.post(asking(X)) == (500, {"error": "there was no answer"})
        assert "POST /v2/models/m/infer" in caplog.text
        assert "of its own" in caplog.text


def test_metrics_are_a_line_each_whatever_a_model_is_called() -> None:
    name = 'two "lines"\nof \\ text'
    told = metrics.text({name: metrics.Metrics()}, {name: (1, 2)}).splitlines()
    assert all(line.startswith(("# ", "flowrt_serving_")) for line in told)
    assert r'flowrt_serving_waiting_bytes{model="two \"lines\"\nof \\ text"} 2' in told


async def test_metrics_are_prometheuss() -> None:
    async with serving(doubling()) as (_, client):
        await asyncio.gather(*[client.infer(X[:2]) for _ in range(3)])
        async with client.session.get("/metrics") as answer:
            assert answer.content_type == "text/plain"
            lines = (await answer.text()).splitlines()
        values = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines if line[0] != "#"}
        assert values['flowrt_serving_requests_total{model="m",outcome="ok"}'] == "3"
        assert values['flowrt_serving_rows_total{model="m"}'] == "6"
        assert values['flowrt_serving_batch_requests_sum{model="m"}'] == "3"
        assert float(values['flowrt_serving_latency_seconds{model="m",quantile="0.99"}']) > 0
        assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {
            line.split()[2] for line in lines if line.startswith("# HELP")
        }


async def test_an_application_of_ones_own_serves_models_beside_other_things() -> None:
    async with fr.serving.ModelServer(doubling(), port=None) as server:
        application = web.Application()
        application.add_subapp("/ml/", server.application)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(runner.addresses[0][1]) as client:
            assert (await client.get("/ml/v2/health/ready"))[0] == 200
            async with client.session.post("/ml/v2/models/m/infer", json=asking(X)) as answer:
                assert answer.status == 200
        await runner.cleanup()
    assert server.port is None


async def test_a_newer_file_is_served_without_a_lost_request(tmp_path: Path) -> None:
    path = tmp_path / "m.flowrt"
    doubling(by=2).save(path)
    async with serving(path, look_seconds=0.01) as (server, client):
        first = server.endpoints["m"].current.model.version
        newer = doubling(by=3)
        seen: list[float] = []

        async def ask() -> None:
            while seen[-8:] != [3.0] * 8:
                answer = await client.infer(X[:4])
                (by,) = {2.0, 3.0} & {float(by) for by in (2, 3) if np.array_equal(answer, X[:4] * by + 1)}
                seen.append(by)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(ask())
            await until(lambda: len(seen) > 8)
            newer.save(path)
        assert set(seen) == {2.0, 3.0}
        assert server.endpoints["m"].current.model.version == newer.version != first
        assert (await client.get(f"/v2/models/m/versions/{newer.version}"))[0] == 200
        assert (await client.get(f"/v2/models/m/versions/{first}"))[0] == 404
        assert set(server.endpoints["m"].metrics.ended) == {"ok"}


@pytest.mark.parametrize("part", ["read", "written"])
async def test_a_long_request_holds_nobody_up(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(getattr(protocol, part))
    monkeypatch.setattr(protocol, part, held)
    rows = np.tile(X, (10, 1))
    async with serving(doubling()) as (_, client), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.infer(rows))
        await until(held.called.is_set)
        assert (await client.get("/v2/health/live"))[0] == 200
        held.may.set()
    np.testing.assert_array_equal(asked.result(), rows * 2 + 1)


def answered_at_once(server: Any, monkeypatch: pytest.MonkeyPatch, *settings: Batching) -> None:
    """Have each request be answered by numbers that take long to write out, and that setting hold from then on."""
    endpoint, following = server.endpoints["m"], iter(settings)

    async def infer(_: object) -> Any:
        monkeypatch.setattr(server._face, "_batching", next(following))
        return endpoint.current.model, {"y": np.zeros(protocol.PIECE + 1, "float32")}

    monkeypatch.setattr(endpoint, "infer", infer)


async def test_outputs_count_among_what_is_here_until_they_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(protocol.written)
    monkeypatch.setattr(protocol, "written", held)
    async with serving(doubling()) as (server, client), asyncio.TaskGroup() as tasks:
        answered_at_once(server, monkeypatch, Batching(max_bytes=4 * protocol.PIECE))
        asked = tasks.create_task(client.post(asking(X[:1])))
        await until(held.called.is_set)
        assert server._face._here > 4 * protocol.PIECE
        status, answer = await client.post(asking(X[:1]))
        assert (status, "there is no room for more" in answer["error"]) == (503, True)
        held.may.set()
    assert asked.result()[0] == 200
    assert server._face._here == 0


async def test_an_answer_whose_turn_to_be_written_out_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(protocol.written)
    monkeypatch.setattr(protocol, "written", held)
    async with serving(doubling()) as (server, client), asyncio.TaskGroup() as tasks:
        answered_at_once(server, monkeypatch, Batching(timeout=LONG), Batching(timeout=0))
        asked = tasks.create_task(client.post(asking(X[:1])))
        await until(held.called.is_set)
        assert await client.post(asking(X[:1])) == (504, {"error": "there was no answer"})
        monkeypatch.setattr(server._face, "_batching", Batching(timeout=LONG))  # for the first to be sent
        held.may.set()
    assert asked.result()[0] == 200
    assert server._face._here == 0


async def test_a_long_request_is_read_again_for_a_model_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = tmp_path / "m.flowrt", np.tile(X, (10, 1))
    doubling().save(path)
    newer = frozen(lambda x: x * 3, output="z")
    held = Held(protocol.read)
    monkeypatch.setattr(protocol, "read", held)
    async with serving(path, look_seconds=0.01) as (server, client), asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.post(asking(rows)))
        await until(held.called.is_set)
        newer.save(path)
        await until(lambda: server.endpoints["m"].current.model.version == newer.version)
        held.may.set()
    status, answer = asked.result()
    assert (status, answer["model_version"], answer["outputs"][0]["name"]) == (200, newer.version, "z")


async def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.flowrt"
    doubling().save(path)
    with caplog.at_level(logging.WARNING, "flowrt.serving.endpoint"):
        async with serving(path, look_seconds=0.01) as (_, client):
            for wrong in (b"", path.read_bytes()[:-1]):
                caplog.clear()
                path.write_bytes(wrong)
                await until(lambda: "is served on" in caplog.text)
                np.testing.assert_array_equal(await client.infer(X), X * 2 + 1)
            caplog.clear()
            frozen(lambda x: x - fr.mean(x, axis=0)).save(path)
            await until(lambda: "hangs on the others" in caplog.text)
            path.unlink()
            np.testing.assert_array_equal(await client.infer(X), X * 2 + 1)


async def test_what_cannot_be_served_is_said_when_the_server_is_opened(tmp_path: Path) -> None:
    (tmp_path / "none").write_bytes(b"nothing")
    for models, error, text in (
        (tmp_path / "none", BrokenStream, "is no safetensors file"),
        ({"a/b": doubling()}, GraphError, "called 'a/b'"),
        ([doubling(), doubling()], GraphError, "of different names, got m, m"),
        ([], GraphError, "got none"),
    ):
        with pytest.raises(error, match=text):
            async with fr.serving.ModelServer(models, port=0):
                raise AssertionError
    with pytest.raises(FileNotFoundError):
        async with fr.serving.ModelServer(tmp_path / "missing", port=0):
            raise AssertionError
    async with fr.serving.ModelServer(doubling(), port=0) as server:
        with pytest.raises(ResourceError, match="cannot listen on"):
            async with fr.serving.ModelServer(doubling(), port=server.port):
                raise AssertionError
    with pytest.raises(GraphError, match=r"open fr\.serving\.ModelServer with `async with`"), server:
        raise AssertionError


@pytest.mark.parametrize(
    ("models", "settings", "error", "text"),
    [
        (3, {}, GraphError, "a server has an fr.serving.Model, or the path of one, got 3"),
        (None, {}, GraphError, "got None"),
        ({"m": 3}, {}, GraphError, "got 3"),
        ("m", {"batching": {"max_batch": 3}}, GraphError, "batching is an fr.serving.Batching, got {'max_batch': 3}"),
        ("m", {"max_body": 0}, GraphError, "max_body is a number of bytes from 1 up, got 0"),
        ("m", {"look_seconds": 0}, GraphError, "look_seconds is seconds above 0, got 0"),
        ("m", {"token": 3}, GraphError, "token is a text, got 3"),
        ("m", {"token": ""}, AuthenticationError, "a token is 1 to 1024 letters"),
        ("m", {"tls": 3}, GraphError, "tls is a folder, got 3"),
        ("m", {"tls": "no such folder"}, AuthenticationError, "no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused(models: Any, settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fr.serving.ModelServer(models, **settings)


async def test_a_server_is_opened_once() -> None:
    server = fr.serving.ModelServer(doubling(), port=None)
    async with server:
        with pytest.raises(fr.ClosedError, match="opened once; make another one"):
            await server.__aenter__()
        np.testing.assert_array_equal((await server.infer({"x": X}))["y"], X * 2 + 1)
    with pytest.raises(fr.ClosedError, match="opened once"):
        async with server:
            pass


async def test_text_costs_no_more_memory_than_it_has_bytes() -> None:
    async with serving(doubling()) as (_, client):
        body = asking(X)
        text = ["a" * 100_000, *[""] * 99_999]  # as an array: 40 GB
        body["inputs"][0] |= {"shape": [12_500, 8], "data": text}
        status, answer = await client.post(body)
        assert (status, "got data of str" in answer["error"]) == (400, True)


@pytest.mark.parametrize(
    "shape",
    [[10**30, 0], [2**61, 0], [2**24, 0], [10**4000, 10**4000], [2**40, 2**40]],
    ids=["empty", "too many bytes", "more rows than fit a body", "long", "large"],
)
async def test_a_shape_that_no_memory_holds_is_the_clients_mistake(shape: list[int]) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, None), name="x")
        y = x * 2
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, {"x": x}, {"y": y}, name="m")
    async with serving(model) as (_, client):
        body = asking(X)
        body["inputs"][0] |= {"shape": shape, "data": []}
        status, answer = await client.post(body)
        assert (status, "no memory holds" in answer["error"]) == (400, True)


async def test_a_token_is_asked_for_whatever_a_path_ends_in() -> None:
    async with serving(doubling(), token="secret") as (_, client):
        for path in ("/v2/models/z%2Fv2%2Fhealth%2Flive", "/v2/models/m/versions/q%2Fv2%2Fhealth%2Fready"):
            async with client.session.get(URL(path, encoded=True), headers={"Authorization": ""}) as answer:
                assert answer.status == 401
