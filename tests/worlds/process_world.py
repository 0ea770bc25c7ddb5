"""Other processes: some that do not outlive a test, and how a test learns of the end of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
