"""Copies between the host and a GPU, through pinned memory, on a stream of their own.

Law: what is copied to the GPU waits for what was issued there before, whose memory it may reuse, and what is issued
later waits for it; the host waits for neither, but for a buffer that is still being read. Buffers are few and of one
size, so that a tensor of any size takes no more pinned memory, and one is filled while the other travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.kernels.language.twin import SIMULATED

if TYPE_CHECKING:
    from flowrt.kernels.launch import LaunchStep

Array: TypeAlias = "np.ndarray[Any, Any]"

BUFFERS, BUFFER_BYTES = 2, 64 if SIMULATED else 4 << 20
SMALL = BUFFER_BYTES // 64  # bytes that are copied on the stream of the kernels: two events cost more


class LibraryLaunch(Protocol):
    """A step as calls of a library's, which compute in so many bytes of ``workspace``."""

    @property
    def workspace(self) -> int: ...

    def launch(self, operands: Sequence[Any], workspace: Any) -> None:
        """Issue it on the step's operands, each as a flat array, on the stream ``computing``.

        ``workspace`` has that many bytes at least, if it is asked for any.
        """


class Libraries(Protocol):
    """What knows better ways about some steps than their twins."""

    def prepare(self, step: LaunchStep) -> LibraryLaunch | None:
        """The step, ready to be issued; None where the twin is to be launched."""


class Gpu(Protocol):
    """What is asked of a GPU, and of Numba's simulator of one, in one thread.

    Its memory is arrays of bytes, of which slices, views as other dtypes and other shapes are taken as of NumPy's.
    Kernels are issued on the stream ``computing``, by the further arguments ``launching`` of Numba's launches.
    """

    @property
    def computing(self) -> Any: ...
    @property
    def copying(self) -> Any: ...
    @property
    def launching(self) -> tuple[Any, ...]: ...
    @property
    def libraries(self) -> Libraries | None: ...

    def allocate(self, nbytes: int) -> Any:
        """Memory, given back once nobody refers to it. Raises `MemoryError`."""

    def pinned(self, nbytes: int) -> Array:
        """Bytes of the host's memory that the GPU reads and writes by itself."""

    def send(self, data: Array, memory: Any, stream: Any) -> None:
        """Issue the copy of pinned bytes to the GPU."""

    def fetch(self, memory: Any, data: Array, stream: Any) -> None:
        """Issue the copy of what lies on the GPU to pinned bytes."""

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        """Issue a copy on the GPU."""

    def event(self) -> Any:
        """An event that has not come to pass, and that nobody waits for."""

    def record(self, event: Any, stream: Any) -> None:
        """Have the event come to pass once what was issued on the stream is done."""

    def wait(self, event: Any) -> None:
        """Have the host wait for the event."""

    def follow(self, stream: Any, event: Any) -> None:
        """Have what is issued on the stream from now on wait for the event."""

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """What issues all of it at once that ``issue`` issues, with the addresses of now."""

    def synchronize(self) -> None:
        """Wait until all that was issued is done; raises what went wrong with it."""

    def close(self, events: Iterable[Any]) -> None:
        """Let everything go, the events too. A GPU that is lost says nothing more of it."""


class _Buffer:
    """Pinned memory, and the event after which the copy that uses it is done."""

    def __init__(self, gpu: Gpu) -> None:
        self.bytes, self.event = gpu.pinned(BUFFER_BYTES), gpu.event()


class CudaCopies:
    """The copies of one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._event = gpu.event()
        self._buffers = [_Buffer(gpu) for _ in range(BUFFERS)]
        self._turn = 0

    @property
    def events(self) -> list[Any]:
        """What it made, for who closes the GPU."""
        return [self._event, *(buffer.event for buffer in self._buffers)]

    def put(self, array: Array) -> Any:
        """A copy of an array in the GPU's memory."""
        made = self._gpu.allocate(max(array.nbytes, 1))[: array.nbytes]
        self.write(made, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return made.view(array.dtype).reshape(array.shape)

    def write(self, memory: Any, data: Array) -> None:
        """Copy bytes to the GPU; they may change once this has returned."""
        stream = self._begin(data.size)
        for start in range(0, data.size, BUFFER_BYTES):
            part, buffer = data[start : start + BUFFER_BYTES], self._next()
            held = self._wait(buffer)[: part.size]
            held[:] = part
            self._gpu.send(held, memory[start : start + part.size], stream)
            self._gpu.record(buffer.event, stream)
        self._follow(self._gpu.computing, stream)

    def read(self, memory: Any, data: Array) -> None:
        """Fill bytes of the host's, once all that was issued before is done; then they are there."""
        stream = self._begin(data.size)
        coming: deque[tuple[_Buffer, Array]] = deque()
        for start in range(0, data.size, BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            if len(coming) == BUFFERS:
                self._arrive(*coming.popleft())
            buffer = self._next()
            self._gpu.fetch(memory[start : start + part.size], self._wait(buffer)[: part.size], stream)
            self._gpu.record(buffer.event, stream)
            coming.append((buffer, part))
        while coming:
            self._arrive(*coming.popleft())

    def _begin(self, nbytes: int) -> Any:
        """The stream to copy on, behind what was issued before."""
        if nbytes <= SMALL:
            return self._gpu.computing
        self._follow(self._gpu.copying, self._gpu.computing)
        return self._gpu.copying

    def _follow(self, later: Any, earlier: Any) -> None:
        """Have what is issued on one stream from now on wait for what was issued on another."""
        if later is not earlier:
            self._gpu.record(self._event, earlier)
            self._gpu.follow(later, self._event)

    def _next(self) -> _Buffer:
        self._turn = (self._turn + 1) % BUFFERS
        return self._buffers[self._turn]

    def _wait(self, buffer: _Buffer) -> Array:
        """The memory of a buffer, once its last copy is done."""
        self._gpu.wait(buffer.event)
        return buffer.bytes

    def _arrive(self, buffer: _Buffer, data: Array) -> None:
        data[:] = self._wait(buffer)[: data.size]
