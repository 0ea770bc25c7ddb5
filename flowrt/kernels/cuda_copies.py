"""Copies between the host and a GPU, through pinned memory, on a stream of their own.

Law: what is copied to the GPU waits for what was issued there before, whose memory it may reuse, and what is issued
later waits for it; the host waits for neither, but for a buffer that is still being read. Buffers are few and of one
size, so that a tensor of any size takes no more pinned memory, and one is filled while the other travels.

In Numba's simulator there are no streams: buffers are NumPy's, and a copy is done when it was asked for.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np

from flowrt.kernels.language.twin import SIMULATED

Array: TypeAlias = "np.ndarray[Any, Any]"

BUFFERS, BUFFER_BYTES = 2, 64 if SIMULATED else 4 << 20
SMALL = BUFFER_BYTES // 64  # bytes that are copied on the stream of the kernels: two events cost more


def pinned(nbytes: int) -> Array:
    """Bytes of the host's memory that a GPU reads and writes by itself."""
    if SIMULATED:
        return np.empty(nbytes, np.uint8)
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def send(data: Array, memory: Any, stream: Any) -> None:
    """Issue the copy of pinned bytes to the GPU."""
    if SIMULATED:
        memory[: data.size] = data
    else:
        memory.data.copy_from_host_async(data.ctypes.data, data.size, stream)


def fetch(memory: Any, data: Array, stream: Any) -> None:
    """Issue the copy of what lies on the GPU to pinned bytes."""
    if SIMULATED:
        data[:] = memory[: data.size]
    else:
        memory.data.copy_to_host_async(data.ctypes.data, data.size, stream)


class _Buffer:
    """Pinned memory, and the copy that uses it."""

    def __init__(self) -> None:
        self.bytes = pinned(BUFFER_BYTES)
        self._event: Any = None

    def begun(self, stream: Any) -> None:
        """A copy was issued on the stream."""
        if not SIMULATED:
            self._event = self._event or _event()
            self._event.record(stream)

    def wait(self) -> Array:
        """The memory, once its last copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self.bytes


class CudaCopies:
    """The copies of one GPU, whose kernels are issued on the stream ``computing``; called in one thread."""

    def __init__(self, computing: Any) -> None:
        self._computing: Any = computing
        self._copying: Any = None
        self._event: Any = None
        if not SIMULATED:
            import cupy

            self._copying, self._event = cupy.cuda.Stream(non_blocking=True), _event()
        self._buffers = [_Buffer() for _ in range(BUFFERS)]
        self._turn = 0

    def write(self, memory: Any, data: Array) -> None:
        """Copy bytes to the GPU; they may change once this has returned."""
        stream = self._begin(data.size)
        for start in range(0, data.size, BUFFER_BYTES):
            part, buffer = data[start : start + BUFFER_BYTES], self._next()
            held = buffer.wait()[: part.size]
            held[:] = part
            send(held, memory[start : start + part.size], stream)
            buffer.begun(stream)
        self._follow(self._computing, stream)

    def read(self, memory: Any, data: Array) -> None:
        """Fill bytes of the host's, once all that was issued before is done; then they are there."""
        stream = self._begin(data.size)
        coming: deque[tuple[_Buffer, Array]] = deque()
        for start in range(0, data.size, BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            if len(coming) == BUFFERS:
                _arrive(*coming.popleft())
            buffer = self._next()
            fetch(memory[start : start + part.size], buffer.wait()[: part.size], stream)
            buffer.begun(stream)
            coming.append((buffer, part))
        while coming:
            _arrive(*coming.popleft())

    def _begin(self, nbytes: int) -> Any:
        """The stream to copy on, behind what was issued before."""
        if nbytes <= SMALL:
            return self._computing
        self._follow(self._copying, self._computing)
        return self._copying

    def _follow(self, later: Any, earlier: Any) -> None:
        """Have what is issued on one stream from now on wait for what was issued on another."""
        if later is not earlier:
            self._event.record(earlier)
            later.wait_event(self._event)

    def _next(self) -> _Buffer:
        self._turn = (self._turn + 1) % BUFFERS
        return self._buffers[self._turn]


def _arrive(buffer: _Buffer, data: Array) -> None:
    data[:] = buffer.wait()[: data.size]


def _event() -> Any:
    import cupy

    return cupy.cuda.Event(disable_timing=True)
