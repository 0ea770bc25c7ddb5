"""The threads that kernels run in: as many as the process may use cores, and never abandoned.

Law: only this file and the blocking session own threads. A kernel cannot be interrupted, so whoever waits for one waits
until it has returned, also when cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def usable_cores() -> int:
    """The cores this process may use: its affinity, cut down to the cgroup's quota; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(cores)))


def _cgroup_cores(otherwise: int, root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """The least quota of this process's cgroup (version 2) and those around it, in cores, rounded up."""
    try:
        paths = [line.split(":", 2)[2] for line in mine.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        paths = []
    folders = {root}
    for path in paths:
        inner = Path(path.lstrip("/"))
        folders |= {root / part for part in (inner, *inner.parents)}
    return min((_quota(folder / "cpu.max", otherwise) for folder in folders), default=otherwise)


def _quota(file: Path, otherwise: int) -> int:
    try:
        quota, period = file.read_text().split()
        return otherwise if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return otherwise


class Lanes:
    """The threads of one device. Close it with `close`, which waits for what still runs."""

    def __init__(self, threads: int | None = None, name: str = "lane") -> None:
        self.threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=f"flowrt-{name}")

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        """Run ``function`` in a lane and wait for it, even if cancelled meanwhile; ``stop`` then asks it to be quick.

        A kernel writes into buffers that we would otherwise free under it: cancellation is delivered once it returned.
        """
        work = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                cancelled = error
                if stop is not None:
                    stop()
        if cancelled is not None:
            raise cancelled from work.exception()
        return work.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
