"""A process that may open nothing more says so, and what to do; nodes take as many descriptors as they may have."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from programs import python

import flowrt as fr
from flowrt.base.errors import NoDescriptors
from flowrt.cluster import cluster as cluster_module
from flowrt.cluster.node_process import being_started
from flowrt.net.door import connecting
from flowrt.net.door.transport import connect
from flowrt.net.links import Links
from flowrt.net.master.master import Master
from flowrt.net.node.node import NetworkNode
from flowrt.sched.host.host import Host

FIX = r"Too many open files: this process may have \d+; raise `ulimit -n`"


@pytest.fixture
def exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*told: Any, **more: Any) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(connecting, "ask_at", ask)


@pytest.mark.usefixtures("exhausted")
async def test_a_session_without_descriptors_does_not_open_and_blames_no_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fr.Graph() as graph:
        fr.Variable(1.0, name="v")
    spec = fr.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    monkeypatch.setitem(Master.__init__.__kwdefaults__, "patience", 1000.0)  # at once: no node is awaited
    with pytest.raises(fr.ResourceError, match=rf"/job:worker/task:\d: cannot connect to 127.0.0.1:\d: {FIX}"):
        async with fr.Session(graph, cluster=spec):
            pass
    with pytest.raises(NoDescriptors, match=FIX):
        await connect("127.0.0.1", 1, "token")


@pytest.mark.usefixtures("exhausted")
async def test_a_node_without_descriptors_logs_it_once_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    told, store = asyncio.Event(), SimpleNamespace(allocate=None, local=None, tls=None)
    caplog.set_level(logging.INFO, "flowrt.net.links")
    async with Links("/job:a/task:0", "token", store, lambda peer, link: told.set()) as links:  # type: ignore[arg-type]
        for _ in range(2):
            told.clear()
            links.post("/job:b/task:0", ("127.0.0.1", 1), "a message")
            async with asyncio.timeout(10):
                await told.wait()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.INFO]
    assert "raise `ulimit -n`" in caplog.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), FIX),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), r"no more threads or processes .*; raise `ulimit -u`"),
        (RuntimeError("can't start new thread"), r"no more threads or processes .*; raise `ulimit -u`"),
    ],
)
async def test_a_cluster_without_descriptors_processes_or_threads_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    async def start(*told: Any) -> NoReturn:
        raise error

    cluster = fr.LocalCluster(worker=1)
    monkeypatch.setattr(cluster, "_start_process", start)
    with pytest.raises(fr.ResourceError, match=f"/job:worker/task:0 cannot be started: .*{told}"):
        async with cluster:
            pass


async def test_a_cluster_without_descriptors_for_its_keys_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*told: Any) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cluster_module, "keys_folder", make)
    with pytest.raises(fr.ResourceError, match=f"the nodes cannot be started: {FIX}"):
        async with fr.LocalCluster(worker=1, tls=True):
            pass


def test_what_is_no_want_of_threads_is_not_called_that() -> None:
    for error in (RuntimeError("Event loop is closed"), NotImplementedError("of signals")):
        with pytest.raises(type(error), match=str(error)), being_started("/job:worker/task:0"):
            raise error


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("flowrt.worker", ["--job=worker", "--bind=127.0.0.1:0", "--task=0", "--import=nobody"]),
        ("flowrt.serving.__main__", ["no file"]),
    ],
)
def test_who_is_connected_to_many_takes_as_many_descriptors_as_it_may_have(module: str, arguments: list[str]) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        f"import resource, {module} as program\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))\n"
        f"assert program.main({arguments}) == 2\n"
        f"assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == {most}\n"
    )
    subprocess.run([*python(), "-c", program], check=True, timeout=60, stderr=subprocess.DEVNULL)


async def test_a_node_lives_where_there_is_no_thread_in_which_to_let_plans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    host = Host("/job:a/task:0", threads=1)
    node = NetworkNode(host, "token")
    try:
        async with node.serving("127.0.0.1", 0):
            monkeypatch.setattr(threading.Thread, "start", begin)
            node._forget([])
            await asyncio.sleep(0)
            monkeypatch.undo()
    finally:
        await host.aclose()
