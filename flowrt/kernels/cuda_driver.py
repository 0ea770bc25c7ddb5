"""A GPU as a device of a session: its memory, copies, and the CUDA twins, on one stream.

Memory is bytes: a CuPy array, or in Numba's simulator one of NumPy's. Simulated GPUs share the interpreter's global
state, so one computes at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.kernels.cuda import PreparedSteps, from_device, to_device
from flowrt.kernels.language.twin import SIMULATED
from flowrt.kernels.launch import STATUS

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

Array: TypeAlias = "np.ndarray[Any, Any]"

_simulator = threading.Lock()


class CudaDriver:
    """One GPU; see `flowrt.sched.devices.driver.Driver`, whose methods these are."""

    limit: int | None = None  # CuPy's pool tells when there is no more

    def __init__(self, index: int) -> None:
        self._index = index
        self._stream: Any = None  # CuPy's, and the same as Numba's
        self._failing: list[tuple[Any, Array]] = []  # the words of kernels that may fail, there and here

    def allocate(self, nbytes: int) -> Any:
        self._enter()
        return np.empty(nbytes, np.uint8) if SIMULATED else _allocated(nbytes)

    def free(self, memory: Any) -> None:
        """Nothing to do: its last reference goes, and the pool gives it to what is issued later on the same stream."""

    def write(self, memory: Any, array: Array) -> None:
        self._enter()
        data = array.reshape(-1).view(np.uint8)
        if SIMULATED:
            memory[: data.size] = data
        elif data.size:
            memory[: data.size].set(data)

    def read(self, memory: Any, array: Array) -> None:
        self._enter()
        data = array.reshape(-1).view(np.uint8)
        if SIMULATED:
            data[:] = memory[: data.size]
        elif data.size:
            memory[: data.size].get(out=data)

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        self._enter()
        target[:nbytes] = source[:nbytes]

    def prepare(self, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> CudaKernel:
        self._enter()
        return CudaKernel(self, PreparedSteps(op, inputs, outputs, attrs))

    def launch(self, prepared: PreparedSteps, operands: Sequence[Any], words: Array) -> None:
        """Issue an application's steps."""
        self._enter()
        run = to_device(words) if prepared.takes_run else None
        with _simulator if SIMULATED else nullcontext():
            prepared.launch(operands, run, self._stream)
        if prepared.may_fail:
            self._failing.append((run, words))

    def finish(self) -> None:
        self._enter()
        if self._stream is not None:
            self._stream[0].synchronize()
        for there, words in self._failing:
            words[STATUS] = from_device(there)[STATUS]
        self._failing.clear()

    def close(self) -> None:
        self._failing.clear()
        self._stream = None

    def _enter(self) -> None:
        """Make this GPU and its stream the calling thread's own, which is always the same one."""
        if SIMULATED or self._stream is not None:
            return
        import cupy
        from numba import cuda

        cupy.cuda.Device(self._index).use()
        cuda.select_device(self._index)
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
        self._stream = stream, cuda.external_stream(stream.ptr)


def _allocated(nbytes: int) -> Any:
    import cupy

    try:
        return cupy.empty(nbytes, np.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.empty(nbytes, np.uint8)


class CudaKernel:
    """An op's twins, ready to be launched."""

    def __init__(self, driver: CudaDriver, prepared: PreparedSteps) -> None:
        self._driver, self._prepared = driver, prepared
        self.scratch, self.may_fail = prepared.scratch, prepared.may_fail

    def launch(self, operands: Sequence[Any], words: Array) -> None:
        self._driver.launch(self._prepared, operands, words)
