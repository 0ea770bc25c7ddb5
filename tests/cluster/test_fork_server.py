"""Nodes that are forked from a process which has imported what they need: each is as one that was started by itself."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from process_world import alive, ended, running

import flowrt as fr
from flowrt.cluster import fork_server
from flowrt.cluster.cluster import LocalCluster
from flowrt.launch.ray_node import RayNode

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfds"),
    pytest.mark.timeout(60),
]
A, B = "/job:worker/task:0", "/job:worker/task:1"


@contextmanager
def shared_by_none() -> Iterator[None]:
    """Clusters have servers of their own meanwhile, as outside of tests."""
    kept, fork_server._kept = fork_server._kept, []
    try:
        yield
    finally:
        fork_server._kept = kept


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_nodes_come_from_one_process_and_are_listed_by_commands_of_their_own() -> None:
    with shared_by_none():
        async with LocalCluster(worker=2) as cluster:
            pids = [process.pid for process in cluster.processes.values()]
            (server,) = {parent_of(pid) for pid in pids}
            assert parent_of(server) == os.getpid()
            for number, pid in enumerate(pids):
                assert command_of(pid)[1:4] == ["-m", "flowrt.worker", "--die-with-parent"]
                assert f"--task={number}" in command_of(pid)
                assert os.getsid(pid) == pid
        assert not alive(server)
        assert not any(alive(pid) for pid in pids)


async def test_the_end_of_a_node_is_told_with_its_exit_code_or_signal() -> None:
    async with LocalCluster(worker=2) as cluster:
        first, second = cluster.processes.values()
        first.terminate()
        second.kill()
        assert await first.wait() == await first.wait() == first.returncode == 0
        assert await second.wait() == second.returncode == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            first.send_signal(signal.SIGTERM)
        await cluster.respawn(B)
        assert cluster.processes[B].returncode is None


async def test_nodes_end_with_the_process_that_they_come_from_and_are_started_again_from_another() -> None:
    with shared_by_none():
        async with LocalCluster(worker=2) as cluster:
            server = parent_of(cluster.processes[A].pid)
            end = os.pidfd_open(server)
            os.kill(server, signal.SIGKILL)
            await ended(end)
            assert [await process.wait() for process in cluster.processes.values()] == [-signal.SIGKILL] * 2
            for task in (A, B):
                await cluster.respawn(task)
            (another,) = {parent_of(process.pid) for process in cluster.processes.values()}
            assert another not in (server, os.getpid())


async def test_a_server_that_may_open_no_more_files_keeps_its_nodes_and_others_are_started_by_themselves() -> None:
    with shared_by_none():
        async with LocalCluster(worker=2) as cluster:
            server = parent_of(cluster.processes[A].pid)
            used = {int(name) for name in os.listdir(f"/proc/{server}/fd")}
            free = next(number for number in range(1 + len(used)) if number not in used)
            resource.prlimit(server, resource.RLIMIT_NOFILE, (free, free))
            cluster.processes[B].kill()
            await cluster.respawn(B)
            assert parent_of(cluster.processes[B].pid) == os.getpid()
            assert alive(server)
            assert alive(cluster.processes[A].pid)


async def test_nodes_have_the_variables_of_now_and_random_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawing.py").write_text(
        "import os, pathlib, random, numpy\n"
        "drawn = f\"{os.environ.get('FLOWRT_SAID')} {random.random()} {numpy.random.random()}\"\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.txt').write_text(drawn)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with fork_server.kept():
        for said in ("once", "again"):
            monkeypatch.setenv("FLOWRT_SAID", said)
            async with LocalCluster(worker=2, imports=["drawing"]):
                pass
    words = [(tmp_path / name).read_text().split() for name in os.listdir(tmp_path) if name.endswith(".txt")]
    assert sorted(said for said, _, _ in words) == ["again", "again", "once", "once"]
    assert len({drawn for _, *both in words for drawn in both}) == 8


async def test_clusters_of_other_variables_that_imports_read_do_not_share_a_process() -> None:
    with fork_server.kept():
        servers = []
        for threads in (1, 2, 1):
            async with LocalCluster(worker=1, threads=threads) as cluster:
                servers.append(parent_of(cluster.processes[A].pid))
        assert servers[0] == servers[2] != servers[1]
        assert os.getpid() not in servers
    assert not any(alive(server) for server in servers)


async def test_a_server_that_has_no_nodes_now_or_has_ended_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def parent(threads: int) -> int:
        async with LocalCluster(worker=1, threads=threads) as cluster:
            return parent_of(cluster.processes[A].pid)

    servers = fork_server.ForkServers(most=2)
    monkeypatch.setattr(fork_server, "_kept", [servers])
    try:
        async with LocalCluster(worker=1, threads=1) as cluster:
            first = parent_of(cluster.processes[A].pid)
            second, third = await parent(2), await parent(3)
            assert len({os.getpid(), first, second, third}) == 4
            assert not alive(second)
            assert alive(cluster.processes[A].pid)
            async with LocalCluster(worker=1, threads=2):
                assert await parent(3) == os.getpid()  # for both have nodes
        end = os.pidfd_open(first)
        os.kill(first, signal.SIGKILL)
        await ended(end)
        fourth = await parent(2)
        assert fourth not in (os.getpid(), second)
        assert await parent(3) not in (os.getpid(), third)
        assert await parent(2) == fourth  # that it was idle, too, cost it nothing
    finally:
        servers.close()


async def test_without_pidfds_and_for_what_is_too_long_nodes_are_started_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as lacking, shared_by_none():
        lacking.setattr(fork_server, "_has_pidfds", lambda: False)
        async with LocalCluster(worker=2) as cluster:
            assert {parent_of(process.pid) for process in cluster.processes.values()} == {os.getpid()}
    monkeypatch.setenv("FLOWRT_LONG", "x" * (1 << 16))
    async with LocalCluster(worker=2) as cluster:
        assert {parent_of(process.pid) for process in cluster.processes.values()} == {os.getpid()}


async def test_a_node_that_cannot_start_says_why() -> None:
    with shared_by_none(), pytest.raises(fr.ResourceError, match="cannot import 'no_such_module'"):
        async with LocalCluster(worker=2, imports=["no_such_module"]):
            pass


async def test_a_node_that_a_signal_ends_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aborting.py").write_text("import os; os.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with shared_by_none(), pytest.raises(fr.ResourceError, match=r"its process ended by SIGABRT.* raise `ulimit -u`"):
        async with LocalCluster(worker=2, imports=["aborting"]):
            pass


def test_a_node_on_ray_that_a_signal_without_a_name_ends_says_which() -> None:
    how = ["sh", "-c", "kill -35 $$"]
    with (
        subprocess.Popen(how, stdout=subprocess.PIPE, text=True) as process,
        pytest.raises(fr.ResourceError, match="its process ended by signal 35, or said ''"),
    ):
        RayNode._listen(SimpleNamespace(_task=A), process)  # type: ignore[arg-type]


CLIENT = """
import asyncio, flowrt as fr
async def main():
    async with fr.LocalCluster(worker=2) as cluster:
        print(*(process.pid for process in cluster.processes.values()), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_nodes_and_the_process_that_they_come_from_end_with_a_client_that_is_killed() -> None:
    async with running(sys.executable, "-c", CLIENT) as client:
        assert client.stdout is not None
        pids = [int(pid) for pid in (await client.stdout.readline()).split()]
        pids.append(parent_of(pids[0]))
        handles = [os.pidfd_open(pid) for pid in pids]
        client.kill()
        async with asyncio.timeout(20):
            for handle in handles:
                await ended(handle)


async def test_what_a_users_module_has_open_is_written_when_its_node_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    (tmp_path / "keeps_open.py").write_text(f"file = open({str(told)!r}, 'w')\nfile.write('all of it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with LocalCluster(worker=1, imports=["keeps_open"]):
        assert told.read_text() == ""
    assert told.read_text() == "all of it"


async def test_a_node_that_ends_does_what_was_left_for_its_end() -> None:
    program = "import atexit; from flowrt import worker; atexit.register(print, 'last'); print('first'); worker.end(3)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (3, b"first\nlast\n")
