"""One GPU: its memory as arrays that Numba's kernels take, its streams, copies and graphs.

Law: one thread calls, in which the GPU's primary context is current from the beginning. Python may collect what nobody
refers to in any thread, in the midst of anything: it is put into a queue, which this thread empties when it allocates.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import ResourceError
from flowrt.kernels.nvidia import calls

Array: TypeAlias = "np.ndarray[Any, Any]"


class GpuMemory:
    """Memory of a GPU's, given back once no array lies in it."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address


class GpuArray:
    """A dense array in a GPU's memory: an address with a dtype and a shape, as Numba takes any library's."""

    __slots__ = ("_owner", "address", "dtype", "shape")

    def __init__(self, owner: GpuMemory, address: int, dtype: Any, shape: tuple[int, ...]) -> None:
        self._owner, self.address, self.dtype, self.shape = owner, address, np.dtype(dtype), shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; without a stream, as whoever launches has taken care of the order."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __getitem__(self, part: slice) -> GpuArray:
        """Some entries of a flat array, one after another."""
        start, stop, step = part.indices(self.size)
        assert step == 1, "entries that lie side by side"
        return GpuArray(self._owner, self.address + start * self.dtype.itemsize, self.dtype, (max(stop - start, 0),))

    def view(self, dtype: Any) -> GpuArray:
        """The same bytes of a flat array as another dtype."""
        return GpuArray(self._owner, self.address, dtype, (self.nbytes // np.dtype(dtype).itemsize,))

    def reshape(self, *shape: Any) -> GpuArray:
        """As another shape: a tuple, or -1."""
        wanted = shape[0] if isinstance(shape[0], tuple) else shape
        return GpuArray(self._owner, self.address, self.dtype, (self.size,) if wanted == (-1,) else wanted)


def check_usable(index: int) -> int:
    """The bytes of memory that a GPU has; in any thread. Its primary context stays from now on.

    Raises where it can compute nothing for this process.
    """
    check_compiler()
    calls.start()
    try:
        calls.retain_context(index)
    except MemoryError:
        raise ResourceError("its memory is full already, of others") from None
    return calls.total_memory(index)


def check_compiler() -> None:
    """Raise `ResourceError` where kernels cannot be compiled.

    Only the driver may be installed, and not NVIDIA's NVVM; or a NumPy that numba-cuda does not know yet, which it
    finds out where it first compiles something of arrays.
    """
    from numba.cuda.cudadrv import nvvm

    try:
        import_module("numba.cuda.np.arrayobj")
    except (ImportError, AttributeError) as error:
        raise ResourceError(
            f"numba-cuda does not know NumPy {np.__version__} ({error}): pip install 'numpy<2.5', or a newer numba-cuda"
        ) from error
    try:
        nvvm.NVVM()
    except Exception as error:
        raise ResourceError(f"{error}: pip install flowrt[cuda13], or [cuda12]") from error


class CudaGpu:
    """The GPU of that number, for the thread that makes this; see `flowrt.kernels.cuda.copies.Gpu`."""

    def __init__(self, index: int) -> None:
        from numba import cuda

        from flowrt.kernels.nvidia.libraries import CudaLibraries  # which know the twins that they stand for

        cuda.select_device(index)  # pushes its primary context, which kernels are loaded into, for this thread
        self._numbers = count()
        self._given: dict[int, tuple[Callable[[Any], None], Any]] = {}  # what is to be given back, and how
        self._gone: deque[int] = deque()  # those of it that nobody refers to any more
        self._pool = calls.find_pool(index)
        calls.keep_freed(self._pool)
        self.computing, self.copying = calls.create_stream(), calls.create_stream()
        self.launching = (cuda.external_stream(int(self.computing)),)
        self.libraries = CudaLibraries(self.computing)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int) -> GpuArray:
        self._settle()
        try:
            address = calls.allocate(nbytes, self.computing)
        except MemoryError:
            calls.synchronize(self.computing)  # what was freed is free once what was issued before is done
            calls.trim(self._pool)
            address = calls.allocate(nbytes, self.computing)
        owner = GpuMemory(address)
        self._give_back(owner, self._free, address)
        return GpuArray(owner, address, np.uint8, (nbytes,))

    def pinned(self, nbytes: int) -> Array:
        address = calls.allocate_pinned(nbytes)
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        self._give_back(held, calls.free_pinned, address)
        array: Array = np.ctypeslib.as_array(held)
        return array

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, data: Array, memory: GpuArray, stream: calls.Stream) -> None:
        calls.copy_to_gpu(memory.address, int(data.ctypes.data), data.nbytes, stream)

    def fetch(self, memory: GpuArray, data: Array, stream: calls.Stream) -> None:
        calls.copy_to_host(int(data.ctypes.data), memory.address, data.nbytes, stream)

    def copy(self, source: GpuArray, target: GpuArray, nbytes: int) -> None:
        calls.copy_on_gpu(target.address, source.address, nbytes, self.computing)

    def event(self) -> calls.Event:
        return calls.create_event()

    def record(self, event: calls.Event, stream: calls.Stream) -> None:
        calls.record_event(event, stream)

    def wait(self, event: calls.Event) -> None:
        calls.wait_for_event(event)

    def follow(self, stream: calls.Stream, event: calls.Event) -> None:
        calls.let_stream_wait(stream, event)

    # ── what is issued ───────────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        calls.begin_capture(self.computing)
        try:
            issue()
        except BaseException:
            with suppress(calls.CudaCallError):  # a capture that failed may have ended by itself
                calls.destroy_graph(calls.end_capture(self.computing))
            raise
        graph = calls.end_capture(self.computing)
        try:
            ready = calls.instantiate(graph)
        finally:
            calls.destroy_graph(graph)
        captured = _Captured(ready, self.computing)
        self._give_back(captured, calls.destroy_replayable, ready)
        return captured

    def synchronize(self) -> None:
        calls.synchronize(self.computing)

    def close(self, events: Iterable[calls.Event]) -> None:
        with suppress(calls.CudaCallError):
            for stream in (self.computing, self.copying):
                calls.synchronize(stream)
            self.libraries.close()
            for function, what in self._given.values():  # what somebody still refers to, too: nobody uses it any more
                function(what)
            calls.synchronize(self.computing)
            calls.trim(self._pool)
            for event in events:
                calls.destroy_event(event)
            for stream in (self.computing, self.copying):
                calls.destroy_stream(stream)

    def _free(self, address: int) -> None:
        calls.free(address, self.computing)

    def _give_back(self, owner: object, function: Callable[[Any], None], what: Any) -> None:
        """Have this thread call the function once nobody refers to the owner, or when the GPU is closed."""
        number = next(self._numbers)
        self._given[number] = function, what
        weakref.finalize(owner, self._gone.append, number).atexit = False

    def _settle(self) -> None:
        while self._gone:
            function, what = self._given.pop(self._gone.popleft())
            function(what)


class _Captured:
    """A graph that is ready, to be called."""

    def __init__(self, ready: calls.Replayable, stream: calls.Stream) -> None:
        self._ready, self._stream = ready, stream

    def __call__(self) -> None:
        calls.launch_graph(self._ready, self._stream)
