"""Numba's CUDA simulator, mended where its threads get in each other's way.

A simulated block's threads run in turns, each to its end or to the barrier that it comes to. Numba starts them all at
once and looks at each again and again until all have ended, for which it takes the interpreter from those who work, and
results that depend on who came first where a kernel forgets a barrier.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numba.core.types import Type
from numba.np.numpy_support import as_dtype


def mend_simulator() -> None:
    """Have the threads of a simulated block take turns, and share one array where they ask for a shared one."""
    from numba.cuda.simulator import kernel
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    FakeCUDAShared.array = _shared_array
    kernel.BlockThread = _in_turns(kernel.BlockThread)
    kernel.BlockManager.run = _run_block


def _shared_array(self: Any, shape: Any, dtype: Any) -> Any:
    """Numba's own looks through the whole stack for who asks."""
    caller = sys._getframe(1)
    place = caller.f_code, caller.f_lasti  # two may stand in a line
    if place not in self._allocations:
        self._allocations[place] = unwritten(shape, as_dtype(dtype) if isinstance(dtype, Type) else dtype)
    return self._allocations[place]


def unwritten(shape: Any, dtype: Any) -> Any:
    """An array in memory that nobody has written: as on a GPU that need not be zeros, so what reads it shows."""
    found = np.empty(shape, dtype)
    found.reshape(-1).view(np.uint8).fill(0xFF)  # a NaN, or -1
    return found


def _in_turns(block_thread: Any) -> Any:
    """A simulated thread that gives its turn back where it waits or ends."""

    class TurnThread(block_thread):  # type: ignore[misc]
        ended = False

        def run(self) -> None:
            super().run()
            self.ended = True
            self._manager.turn.release()

        def syncthreads(self) -> None:
            self._manager.turn.release()
            super().syncthreads()

        def go_on(self) -> None:
            self.syncthreads_event.set()
            self._manager.turn.acquire()

    return TurnThread


def _run_block(self: Any, place: tuple[int, ...], *args: Any) -> None:
    """Run each thread to its first barrier, then each to its next, until all have ended or one has failed."""
    from numba.cuda.simulator import kernel

    self.turn = threading.Lock()  # held by the thread whose turn it is
    self.turn.acquire()
    run = partial(self._f, *args)
    threads = [kernel.BlockThread(run, self, place, at, self._debug) for at in np.ndindex(*self._block_dim)]
    for thread in threads:
        thread.start()
        self.turn.acquire()
    while (failed := next((t for t in threads if t.exception), None)) is None:
        if not (waiting := [thread for thread in threads if not thread.ended]):
            break
        for thread in waiting:
            thread.go_on()
    for thread in threads:
        if not thread.ended:
            thread.abort = True
            thread.go_on()
        thread.join()
    if failed is not None:
        error, trace = failed.exception
        raise error.with_traceback(trace)


class SimulatedGpu:
    """A GPU of the simulator's: arrays of NumPy's, and all is done when it was asked for.

    See `flowrt.kernels.cuda.copies.Gpu`. There are no streams, and what is captured is issued again, one by one.
    """

    computing: Any = "computing"
    copying: Any = "copying"
    launching: tuple[Any, ...] = ()
    libraries: Any = None

    def allocate(self, nbytes: int) -> Any:
        return unwritten(nbytes, np.uint8)

    pinned = allocate

    def send(self, data: Any, memory: Any, stream: Any) -> None:
        memory[: data.size] = data

    def fetch(self, memory: Any, data: Any, stream: Any) -> None:
        data[:] = memory[: data.size]

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        target[:nbytes] = source[:nbytes]

    def event(self) -> None:
        """None is needed."""

    def record(self, event: Any, stream: Any) -> None:
        """What was issued is done."""

    def wait(self, event: Any) -> None:
        """It has come to pass."""

    def follow(self, stream: Any, event: Any) -> None:
        """It does."""

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        return issue

    def synchronize(self) -> None:
        """Nothing is left to do."""

    def close(self, events: Iterable[Any]) -> None:
        """NumPy's arrays go by themselves."""
