"""A GPU as a device of a session: its memory, copies, and the CUDA twins, on one stream.

Simulated GPUs share the interpreter's global state, so one computes at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from flowrt.base.errors import DeviceLost, FlowrtError
from flowrt.kernels.cuda.copies import CudaCopies, Gpu
from flowrt.kernels.cuda.twins import PreparedSteps, open_gpu
from flowrt.kernels.language.twin import SIMULATED
from flowrt.kernels.launch import RUN_WORDS, STATUS

if TYPE_CHECKING:
    from typing import Protocol

    from flowrt.base.spec import Spec

    class LaunchedKernel(Protocol):
        """What can be launched: of this driver's, or of the scheduler's."""

        @property
        def may_fail(self) -> bool: ...

        def launch(self, operands: Sequence[Any], words: Array) -> None: ...


Array: TypeAlias = "np.ndarray[Any, Any]"
Method = TypeVar("Method", bound=Callable[..., Any])

FATAL = {
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    226: "CONTAINED",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    721: "TENSOR_MEMORY_LEAK",
    810: "MPS_CLIENT_TERMINATED",
    911: "EXTERNAL_DEVICE",
    999: "UNKNOWN",  # as of a GPU that has fallen off the bus
}
"""Errors of CUDA's after which a process can do nothing any more on that GPU, by number and by name."""


def is_fatal(error: BaseException) -> bool:
    """Whether an error of the driver's, as cuda-bindings, cuda-core or Numba raise it, is one of `FATAL`."""
    code = getattr(error, "code", None)
    return (isinstance(code, int) and code in FATAL) or any(
        f"CUDA_ERROR_{name}" in str(error) for name in FATAL.values()
    )


def tells_loss(method: Method) -> Method:
    """Decorator of what a driver is asked for: where the GPU is lost to this process, `DeviceLost` says so.

    A library answers no more than that it failed, so whatever has failed, the GPU is asked.
    """

    @wraps(method)
    def asked(driver: CudaDriver, *args: Any) -> Any:
        try:
            return method(driver, *args)
        except (FlowrtError, MemoryError):
            raise
        except Exception as error:
            why = error if is_fatal(error) else driver.fatal_error()
            if why is not None:
                raise DeviceLost(f"{why}; CUDA_LAUNCH_BLOCKING=1 has each op waited for, and named") from error
            raise

    return cast("Method", asked)


_simulator = threading.Lock()


def open_driver(index: int) -> CudaDriver:
    """The GPU of that number. Raises where it can compute nothing for this process."""
    if SIMULATED:
        return CudaDriver(index)
    from flowrt.kernels.cuda.gpu import check_usable

    return CudaDriver(index, check_usable(index))


class CudaDriver:
    """One GPU; see `flowrt.sched.devices.driver.Driver`, whose methods these are."""

    def __init__(self, index: int, limit: int | None = None) -> None:
        self._index, self.limit = index, limit
        self._opened: tuple[Gpu, CudaCopies] | None = None
        self._failing: list[tuple[Any, Array]] = []  # the words of kernels that may fail, there and here
        self._row: Any = None  # the words in the GPU's memory of what is recorded now
        blocking = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        self.record = None if blocking else self._recorded  # a graph is waited for as a whole

    @tells_loss
    def allocate(self, nbytes: int) -> Any:
        return self.gpu.allocate(nbytes)

    def part(self, memory: Any, start: int, nbytes: int) -> Any:
        return memory[start : start + nbytes]

    def free(self, memory: Any) -> None:
        """Nothing to do: its last reference goes, and the pool gives it to what is issued later on the same stream."""

    @tells_loss
    def write(self, memory: Any, array: Array) -> None:
        self._copies.write(memory, array.reshape(-1).view(np.uint8))

    @tells_loss
    def read(self, memory: Any, array: Array) -> None:
        self._copies.read(memory, array.reshape(-1).view(np.uint8))

    @tells_loss
    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        self.gpu.copy(source, target, nbytes)

    @tells_loss
    def pinned(self, nbytes: int) -> Array:
        return self.gpu.pinned(nbytes)

    @tells_loss
    def send(self, memory: Any, array: Array) -> None:
        self.gpu.send(array, memory, self.gpu.computing)

    @tells_loss
    def fetch(self, memory: Any, array: Array) -> None:
        self.gpu.fetch(memory, array, self.gpu.computing)

    @tells_loss
    def prepare(self, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> CudaKernel:
        return CudaKernel(self, PreparedSteps(op, inputs, outputs, attrs, self.gpu.libraries))

    @tells_loss
    def launch(self, prepared: PreparedSteps, operands: Sequence[Any], words: Array) -> None:
        """Issue an application's steps."""
        recorded = self._row is not None
        run = self._row if recorded else self._copies.put(words) if prepared.takes_run else None
        with _simulator if SIMULATED else nullcontext():
            prepared.launch(operands, run, self.gpu.launching)
        if prepared.may_fail and not recorded:
            self._failing.append((run, words))

    @tells_loss
    def _recorded(self, launches: Sequence[tuple[LaunchedKernel, Sequence[Any]]]) -> CudaRecording:
        return CudaRecording(self, launches)

    @contextmanager
    def telling(self, row: Any) -> Iterator[None]:
        """Kernels that are launched inside find their run's words in that memory of the GPU's."""
        self._row = row
        try:
            yield
        finally:
            self._row = None

    @tells_loss
    def finish(self) -> None:
        self.gpu.synchronize()
        for there, words in self._failing:
            told = np.empty_like(words)
            self._copies.read(there.view(np.uint8), told.view(np.uint8))
            words[STATUS] = told[STATUS]
        self._failing.clear()

    @tells_loss
    def replay(self, again: Callable[[], None]) -> None:
        """Issue what is recorded."""
        again()

    def fatal_error(self) -> Exception | None:
        """What the GPU has met that it does not survive."""
        try:
            self.gpu.synchronize()
        except Exception as error:
            return error if is_fatal(error) else None
        return None

    def close(self) -> None:
        if self._opened is not None:
            gpu, copies = self._opened
            self._opened = None
            self._failing.clear()
            gpu.close(copies.events)

    @property
    def gpu(self) -> Gpu:
        """The GPU, in the thread that asks for it, which is always the same one."""
        return self._open()[0]

    @property
    def _copies(self) -> CudaCopies:
        return self._open()[1]

    def _open(self) -> tuple[Gpu, CudaCopies]:
        if self._opened is None:
            gpu = open_gpu(self._index)
            self._opened = gpu, CudaCopies(gpu)
        return self._opened


class CudaRecording:
    """Launches as a CUDA graph: one call issues them all, and the copies of their words there and back, where any
    kernel looks at them, or may leave something there.

    The graph holds addresses, so the memory that it is for stays while this does.
    """

    def __init__(self, driver: CudaDriver, launches: Sequence[tuple[LaunchedKernel, Sequence[Any]]]) -> None:
        self._driver, self._launches = driver, launches
        self._bytes = driver.gpu.pinned(8 * RUN_WORDS * len(launches))
        self.words = self._bytes.view(np.int64).reshape(len(launches), RUN_WORDS)
        self._table = driver.allocate(self._bytes.size)
        self._again = driver.gpu.capture(self._issue)

    def replay(self) -> None:
        """Issue all of it."""
        self._driver.replay(self._again)

    def _issue(self) -> None:
        size, gpu = 8 * RUN_WORDS, self._driver.gpu
        kernels = [kernel for kernel, _ in self._launches]
        if any(getattr(kernel, "takes_run", False) for kernel in kernels):
            gpu.send(self._bytes, self._table, gpu.computing)
        for number, ((kernel, operands), words) in enumerate(zip(self._launches, self.words, strict=True)):
            with self._driver.telling(self._table[number * size : (number + 1) * size].view(np.int64)):
                kernel.launch(operands, words)
        if any(kernel.may_fail for kernel in kernels):
            gpu.fetch(self._table, self._bytes, gpu.computing)


class CudaKernel:
    """An op's twins, ready to be launched."""

    def __init__(self, driver: CudaDriver, prepared: PreparedSteps) -> None:
        self._driver, self._prepared = driver, prepared
        self.scratch, self.may_fail, self.takes_run = prepared.scratch, prepared.may_fail, prepared.takes_run
        self.may_overwrite = prepared.may_overwrite

    def launch(self, operands: Sequence[Any], words: Array) -> None:
        self._driver.launch(self._prepared, operands, words)
