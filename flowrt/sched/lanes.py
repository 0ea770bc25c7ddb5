"""The threads that kernels run in: as many as the process may use cores, and never abandoned.

Law: only this file and the blocking session own threads. A kernel cannot be interrupted, so whoever waits for one waits
until it has returned, also when cancelled meanwhile. Lanes run Python that calls kernels; the crew's helpers never
leave compiled code, and share the work of tapes that a lane or a caller runs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from flowrt.kernels import board as at
from flowrt.kernels.launch import ENTRY_TYPE
from flowrt.kernels.store import loop_address

T = TypeVar("T")
Array: TypeAlias = "np.ndarray[Any, Any]"

NOBODY = -(1 << 40)  # sleepers: however many add themselves


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


def aligned_zeros(words: int) -> Array:
    """Zeroed words that begin at a cache line that nobody else uses."""
    memory = np.zeros(words + at.BOARD_ALIGNMENT // 8, np.int64)
    start = -int(memory.ctypes.data) % at.BOARD_ALIGNMENT // 8
    return memory[start : start + words]


class Crew:
    """Helper threads that run compiled code alone: they take part in the tapes that others run, and sleep in between.

    A run holds a slot of the crew's board; with `take` it gets one, or None where all are held or there is no one to
    help. Nobody waits for a helper that has not begun a chunk of work. The threads start with the first `take` and end
    with `close`; in a forked child there are none.
    """

    def __init__(self, threads: int, name: str = "helper", *, patience: float = 100e-6) -> None:
        self.threads = threads
        self._name, self._patience = name, patience
        self._slots: deque[int] = deque()
        self._helpers: list[threading.Thread] = []
        self._pipe: tuple[int, int] | None = None
        self._mutex = threading.Lock()
        self._closed = threads < 2
        self._local = np.zeros(0, np.int64)
        self.board = 0
        if not self._closed:
            _crews.add(self)

    def take(self) -> int | None:
        """The address of a free slot, to be given back; never waits."""
        if self._pipe is None and not self._closed:
            self._start()
        try:
            return None if self._closed else self._slots.pop()
        except IndexError:
            return None

    def give(self, slot: int) -> None:
        """Give a slot back."""
        self._slots.append(slot)
        if self._closed:
            self.close()

    def local(self, nbytes: int) -> Array:
        """Memory of at least ``nbytes`` for each helper, the same for all runs: a helper has one chunk at a time."""
        words = -(-nbytes // at.BOARD_ALIGNMENT) * at.BOARD_ALIGNMENT // 8 * (self.threads - 1)
        if self._local.size < words:
            self._local = aligned_zeros(words)
        return self._local

    def _start(self) -> None:
        with self._mutex:
            if self._pipe is not None or self._closed:
                return
            help_out, count = ENTRY_TYPE(loop_address("help")), 2 * self.threads
            read_end, write_end = os.pipe()
            self._words = aligned_zeros(at.SLOT + at.SLOT_WORDS * count)
            self._words[: at.PATIENCE + 1] = (read_end, write_end, self.threads, count, int(self._patience * 1e9))
            self.board = int(self._words.ctypes.data)
            for lane in range(1, self.threads):
                arguments = (self.board, lane, 0, 0)
                # a daemon, since a process that ends waits for others before it may be told to close this crew
                name = f"flowrt-{self._name}-{lane}"
                helper = threading.Thread(target=help_out, args=arguments, name=name, daemon=True)
                helper.start()
                self._helpers.append(helper)
            self._slots.extend(self.board + 8 * (at.SLOT + at.SLOT_WORDS * number) for number in range(count))
            self._pipe = (read_end, write_end)

    def close(self) -> None:
        """End the threads and wait for them; runs under way go on alone. Closing twice is closing once."""
        with self._mutex:
            self._closed = True
            if self._pipe is None:
                return
            self._words[at.CLOSED] = 1
            self._words[at.ASLEEP] = NOBODY
            os.write(self._pipe[1], bytes(len(self._helpers)))
            while self._helpers:
                self._helpers.pop().join()
            if len(self._slots) == self._words[at.SLOTS]:  # else a run might still write to the pipe
                for end in self._pipe:
                    os.close(end)
                self._pipe = None

    def forget(self) -> None:
        """In a forked child: the threads are not here, and the pipe is the parent's too."""
        self._closed, self._pipe, self._helpers = True, None, []
        self._mutex = threading.Lock()
        self._slots.clear()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _forget_crews() -> None:
    for crew in _crews:
        crew.forget()


os.register_at_fork(after_in_child=_forget_crews)


class Lanes:
    """The threads of one device, and the ``crew`` that helps them. `close` waits for what still runs."""

    def __init__(self, threads: int | None = None, name: str = "lane") -> None:
        self.threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=f"flowrt-{name}")
        self.crew = Crew(self.threads)
        weakref.finalize(self, self.crew.close)  # of a host that nobody closed, or when the process ends

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
        self.crew.close()
