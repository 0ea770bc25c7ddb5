"""A node under somebody's care: its place by the environment, its health by HTTP, its logs as JSON, its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from process_world import ended, running
from programs import python

import flowrt as fr
from flowrt.net.door.tokens import new_token, save_token
from flowrt.net.node.health import CONNECTIONS, answering
from flowrt.worker import main

HERE = {"PYTHONPATH": str(Path(fr.__file__).parent.parent)}
OTHERS = re.compile(r"FLOWRT_(CLUSTER|JOB|TASK|HOSTS|RANK|PORT)|TF_CONFIG|RANK|WORLD_SIZE|MASTER_|SLURM_")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment that names no cluster, with a token."""
    save_token(tmp_path / "token", new_token())
    mine = {name: text for name, text in os.environ.items() if not OTHERS.match(name)}
    return mine | HERE | {"FLOWRT_TOKEN_FILE": str(tmp_path / "token")}


@asynccontextmanager
async def node(environ: dict[str, str], *arguments: str) -> AsyncIterator[Any]:
    command = *python(), "-m", "flowrt.worker", "--threads=1", *arguments
    async with running(*command, env=environ, stderr=subprocess.PIPE) as process:
        yield process


async def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """The status and the object that is answered."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    return int(head.split()[1]), json.loads(body or b"null")


async def test_nodes_take_their_places_from_the_environment_and_train(environ: dict[str, str]) -> None:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}  # no node listens there: --bind says where
    ours = environ | {"FLOWRT_CLUSTER": json.dumps(cluster), "FLOWRT_JOB": "ps", "FLOWRT_TASK": "0"}
    theirs = environ | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    anywhere = "--bind=127.0.0.1:0"
    async with node(ours, anywhere) as ps, node(theirs, anywhere) as worker:
        jobs: dict[str, list[str]] = {}
        for process, job, said in ((ps, "ps", "FLOWRT_CLUSTER"), (worker, "worker", "TF_CONFIG")):
            took, ready = (await process.stdout.readline()).decode(), (await process.stdout.readline()).decode()
            assert took == f"flowrt worker is /job:{job}/task:0 of ps=1, worker=1, as {said} said\n"
            assert ready.startswith(f"flowrt worker /job:{job}/task:0 ready on 127.0.0.1:")
            jobs[job] = [ready.split()[-1]]
        spec = fr.ClusterSpec(jobs, environ["FLOWRT_TOKEN_FILE"])
        with fr.Graph() as graph:
            with fr.device("/job:ps/task:0"):
                v = fr.Variable(2.0, name="v")
            with fr.device("/job:worker/task:0"):
                y = v + 1.0
        async with fr.Session(graph, cluster=spec) as session:
            assert await session.run(y) == 3.0
        for process in (ps, worker):
            process.terminate()
            async with asyncio.timeout(20):
                assert await process.wait() == 0


@pytest.mark.parametrize(
    ("more", "arguments", "code", "says"),
    [
        ({}, [], 3, "no cluster is named in the environment; set FLOWRT_CLUSTER"),
        ({"SLURM_PROCID": "1"}, [], 3, "SLURM_JOB_NODELIST is not; start this by srun"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, [], 3, "not which of its tasks this is; start it by srun"),
        (
            {"FLOWRT_CLUSTER": '{"ps": ["a:1"]}'},
            [],
            3,
            "not which of its tasks this is; set FLOWRT_JOB and FLOWRT_TASK",
        ),
        ({}, ["--task=1"], 2, "--task needs --job"),
        ({}, ["--job=ps", "--task=0", "--health=x"], 2, "'x' is neither a port nor HOST:PORT"),
        ({}, ["--job=ps"], 2, "--task says which"),
    ],
)
def test_the_exit_code_says_why_a_node_does_not_start(
    environ: dict[str, str],
    more: dict[str, str],
    arguments: list[str],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "environ", environ | more)
    try:
        answer: Any = main(arguments)
    except SystemExit as error:  # as argparse says what it cannot read
        answer = error.code
    assert (answer, says in capsys.readouterr().err) == (code, True)


async def test_a_node_that_is_of_no_cluster_ends_with_that_exit_code(environ: dict[str, str]) -> None:
    async with node(environ) as process, asyncio.timeout(30):
        _, err = await process.communicate()
        assert (process.returncode, b"no cluster is named in the environment" in err) == (3, True), err


def test_a_node_that_cannot_start_says_why_in_one_line_also_where_its_parent_is_gone(environ: dict[str, str]) -> None:
    gone, out = os.pipe()
    os.close(gone)
    done = subprocess.run(
        [sys.executable, "-m", "flowrt.worker", "--die-with-parent", "--job=ps", "--task=0", "--bind=127.0.0.1:0"],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=subprocess.PIPE,
        env=environ | {"FLOWRT_TOKEN_FILE": "/none"},
        text=True,
        timeout=60,
    )
    os.close(out)
    (said,) = done.stderr.splitlines()
    assert said.startswith("flowrt worker: cannot read the token file /none: ")
    assert done.returncode == 2


IMPORTING = (
    *(sys.executable, "-m", "flowrt.worker", "--die-with-parent"),
    *("--job=ps", "--task=0", "--bind=127.0.0.1:0", "--import=endless"),
)
SPAWNER = """
import subprocess, sys
node = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(node.pid, flush=True)
node.wait()
"""


def endless(folder: Path) -> dict[str, str]:
    """Variables that have a node find ``endless``, a module whose import says that it began and takes for ever."""
    (folder / "endless.py").write_text("import threading\nprint('it began', flush=True)\nthreading.Event().wait()\n")
    return {"PYTHONPATH": os.pathsep.join([HERE["PYTHONPATH"], str(folder)])}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system ends no process with its parent")
async def test_a_node_ends_with_its_parent_though_it_still_imports(environ: dict[str, str], tmp_path: Path) -> None:
    given = environ | endless(tmp_path)
    async with asyncio.timeout(60), running(sys.executable, "-c", SPAWNER, *IMPORTING, env=given) as parent:
        end = os.pidfd_open(int(await parent.stdout.readline()))
        assert await parent.stdout.readline() == b"it began\n"
        parent.kill()
        await ended(end)


def test_a_node_whose_parent_is_gone_imports_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    given = environ | endless(tmp_path)
    done = subprocess.run(IMPORTING, stdin=subprocess.PIPE, capture_output=True, env=given, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_a_node_says_by_http_whether_it_can_be_used_and_logs_objects(environ: dict[str, str]) -> None:
    given = "--job=ps", "--task=0", "--bind=127.0.0.1:0", "--health=0", "--log-format=json", "--log-level=info"
    async with node(environ, *given) as process:
        port = json.loads(await process.stdout.readline())["fields"]["health"]
        said = json.loads(await process.stdout.readline())
        assert (said["level"], said["node"], said["fields"]["task"]) == ("info", "/job:ps/task:0", "/job:ps/task:0")
        place = said["message"].rpartition(" ready on ")[2]
        assert await ask(port, "/healthz") == (200, {"live": True, **idle("/job:ps/task:0", "serving", True)})
        with fr.Graph() as graph, fr.device("/job:ps/task:0"):
            y = fr.constant(2.0) * 3.0
        async with fr.Session(graph, cluster=fr.ClusterSpec({"ps": [place]}, environ["FLOWRT_TOKEN_FILE"])) as session:
            assert await session.run(y) == 6.0
            assert (await ask(port, "/readyz"))[1]["sessions"] == 1
            told = await metrics(port)
            assert "\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in told
            for line in (
                'flowrt_node_up{task="/job:ps/task:0"} 1',
                'flowrt_node_sessions{task="/job:ps/task:0"} 1',
                'flowrt_memory_peak_bytes{task="/job:ps/task:0",device="cpu:0"} ',
                "# TYPE flowrt_node_messages_sent_total counter",
            ):
                assert f"\n{line}" in told
        process.terminate()
        async with asyncio.timeout(20):
            _, err = await process.communicate()
    assert process.returncode == 0
    logged = [json.loads(line) for line in err.splitlines()]
    assert logged
    for line in logged:
        assert list(line) == ["time", "level", "node", "message", "fields"]
        assert line["node"] == "/job:ps/task:0"
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None


async def metrics(port: int) -> str:
    """What is answered to whom collects metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer.decode()


def idle(task: str, state: str, ready: bool) -> dict[str, Any]:
    return {"ready": ready, "state": state, "task": task, "sessions": 0, "peers": 0}


async def test_a_node_that_waits_to_join_lives_and_is_not_ready(environ: dict[str, str]) -> None:
    async with node(environ, "--job=ps", "--task=0", "--bind=127.0.0.1:0") as door:
        place = (await door.stdout.readline()).decode().split()[-1]
        async with node(environ, "--job=worker", f"--join={place}", "--health=127.0.0.1:0") as waiting:
            port = int((await waiting.stdout.readline()).split()[-1])
            assert b"waits for a session" in await waiting.stdout.readline()
            assert await ask(port, "/readyz") == (503, idle("", "joining", False))
            assert (await ask(port, "/healthz"))[0] == 200
            waiting.terminate()
            async with asyncio.timeout(20):
                assert await waiting.wait() == 0


async def test_what_is_no_question_after_health_is_refused_or_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.net.node.health.SECONDS", 0.2)
    async with answering("127.0.0.1", 0, lambda: {"ready": False}, str) as port:
        assert (await ask(port, "/"))[0] == 404
        assert (await ask(port, "/healthz", "POST"))[0] == 405
        assert await ask(port, "/healthz?now", "HEAD") == (200, None)
        for sent in (b"GET /healthz", b"x" * 100_000):  # it never ends; it is too long
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(20):
                assert await silence(reader) == b""
            writer.close()


async def test_however_many_say_nothing_who_asks_after_health_is_answered() -> None:
    """A probe that waits is a node that is ended by who looks after it."""
    async with answering("127.0.0.1", 0, lambda: {"ready": True}, str) as port:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * CONNECTIONS)]
        assert (await ask(port, "/readyz"))[0] == 200
        async with asyncio.timeout(20):
            for reader, _ in crowd[: 2 * CONNECTIONS]:
                assert await silence(reader) == b""
    async with asyncio.timeout(20):
        for reader, writer in crowd:
            assert await silence(reader) == b""
            writer.close()


async def silence(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_threads_of_a_node_give_way_to_its_event_loop_within_a_millisecond(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """A turn of the loop waits for the interpreter several times: beside a long computation, each time so long."""
    (tmp_path / "asks.py").write_text("import sys; print(sys.getswitchinterval(), flush=True)\n", encoding="ascii")
    ours = environ | {"PYTHONPATH": f"{HERE['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    async with node(ours, "--job=ps", "--task=0", "--bind=127.0.0.1:0", "--import=asks") as process:
        assert float(await process.stdout.readline()) == pytest.approx(0.001)
