"""Other processes: some that do not outlive a test, and how a test learns of the end of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrt.cluster.fork_server import kept_servers
from flowrt.cluster.node_process import environment

if TYPE_CHECKING:
    from asyncio.subprocess import Process


@asynccontextmanager
async def running(*command: str, stdout: int = subprocess.PIPE, **options: Any) -> AsyncIterator[Process]:
    """A process that does not outlive the block."""
    process = await asyncio.create_subprocess_exec(*command, stdout=stdout, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def begun_node(*told: str) -> Any:
    """A process that is a node of one thread and ends with this one, or with its stdin.

    It is forked as those of clusters are, where there can be fork servers: started by itself, it imports for a second.
    """
    given, variables = ["--die-with-parent", "--threads=1", *told], environment(1, ())
    servers = kept_servers()
    server = servers.serving(variables) if servers is not None else None
    if server is not None:
        return await server.fork(given, variables)
    command, pipe = [sys.executable, "-m", "flowrt.worker", *given], asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=variables)


async def ended(process: int) -> None:
    """Wait for the end of the process behind a pidfd, of any parent, and close the pidfd."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, end.set)
    try:
        async with asyncio.timeout(10):
            await end.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


async def until_lost(master: Any, *tasks: str) -> None:
    """Wait until a master, or the runner of a session, has lost these tasks and no others."""
    there = getattr(master, "peers", master)
    while there.lost != {*tasks}:
        await master.wait_changed(there.lost, there.suspects)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody asked after does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def ignores(pid: int, number: int) -> bool:
    """Whether the process ignores that signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(ignored >> (number - 1) & 1)
