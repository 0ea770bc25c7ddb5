"""Numba's CUDA simulator, mended where its threads get in each other's way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def mend_simulator() -> None:
    """Have the threads of a simulated block share one array where they ask for a shared one."""
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    FakeCUDAShared.array = _shared_array


def _shared_array(self: Any, shape: Any, dtype: Any) -> Any:
    """Numba's own may give two threads that come at once an array each; a dictionary takes one of them."""
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    return self._allocations.setdefault(place, np.empty(shape, dtype))


class SimulatedGpu:
    """A GPU of the simulator's: arrays of NumPy's, and all is done when it was asked for.

    See `flowrt.kernels.cuda_copies.Gpu`. There are no streams, and what is captured is issued again, one by one.
    """

    computing: Any = "computing"
    copying: Any = "copying"
    launching: tuple[Any, ...] = ()

    def allocate(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

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
