"""NVIDIA's driver, call by call: what devices ask of it, each answer looked at.

Law: every function here is one call of the CUDA driver API (Driver API Reference, CUDA 12.9 and 13), by cuda-bindings,
which numba-cuda depends on, and which lets other threads of Python's go on meanwhile. Streams, events and graphs are
its handles; addresses, of a GPU's memory and of the host's, are integers. The thread that calls has the GPU's context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

Stream: TypeAlias = Any
Event: TypeAlias = Any
Graph: TypeAlias = Any  # captured
Replayable: TypeAlias = Any  # a graph made ready to be launched

OUT_OF_MEMORY = 2
PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context
KEEP_ALL = 2**64 - 1  # bytes that a pool keeps for later


class CudaCallError(Exception):
    """What the driver answers that is no success: its number as ``code``, its name and what it says of that."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.code = code


@cache
def _driver() -> Any:
    from cuda.bindings import driver  # not where there is no GPU

    return driver


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function answers beside its status. Raises `MemoryError` and `CudaCallError`."""
    status, *found = function(*arguments)
    code = int(status)
    if code == OUT_OF_MEMORY:
        raise MemoryError
    if code:
        driver = _driver()
        name, text = (ask(status)[1] for ask in (driver.cuGetErrorName, driver.cuGetErrorString))
        raise CudaCallError(function.__name__, code, *(said.decode() if said else "unknown" for said in (name, text)))
    return found[0] if found else None


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def start() -> None:
    """Make the driver ready; doing so again is nothing."""
    _call(_driver().cuInit, 0)


def retain_context(index: int) -> None:
    """Have a GPU's primary context stay, which takes a while where there is none; it becomes no thread's."""
    _call(_driver().cuDevicePrimaryCtxRetain, _driver().CUdevice(index))


def total_memory(index: int) -> int:
    """The bytes of memory that a GPU has."""
    return int(_call(_driver().cuDeviceTotalMem, _driver().CUdevice(index)))


# ── streams and events ───────────────────────────────────────────────────────────────────────────────────────────────


def create_stream() -> Stream:
    """A stream that does not wait for the default one."""
    return _call(_driver().cuStreamCreate, int(_driver().CUstream_flags.CU_STREAM_NON_BLOCKING))


def destroy_stream(stream: Stream) -> None:
    """Let a stream go, once what was issued on it is done."""
    _call(_driver().cuStreamDestroy, stream)


def synchronize(stream: Stream) -> None:
    """Wait until all that was issued on a stream is done. Raises what went wrong with it."""
    _call(_driver().cuStreamSynchronize, stream)


def create_event() -> Event:
    return _call(_driver().cuEventCreate, int(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING))


def destroy_event(event: Event) -> None:
    _call(_driver().cuEventDestroy, event)


def record_event(event: Event, stream: Stream) -> None:
    """Have the event come to pass once what was issued on the stream is done."""
    _call(_driver().cuEventRecord, event, stream)


def wait_for_event(event: Event) -> None:
    """Wait until the event has come to pass, at once where it was never recorded."""
    _call(_driver().cuEventSynchronize, event)


def let_stream_wait(stream: Stream, event: Event) -> None:
    """Have what is issued on the stream from now on wait for the event."""
    _call(_driver().cuStreamWaitEvent, stream, event, 0)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_pool(index: int) -> Any:
    """The pool that a GPU's memory is allocated from."""
    return _call(_driver().cuDeviceGetDefaultMemPool, _driver().CUdevice(index))


def keep_freed(pool: Any) -> None:
    """Have a pool keep what is freed: by default it gives all back whenever a stream is waited for."""
    driver = _driver()
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    _call(driver.cuMemPoolSetAttribute, pool, threshold, driver.cuuint64_t(KEEP_ALL))


def trim(pool: Any) -> None:
    """Have a pool give back what is free."""
    _call(_driver().cuMemPoolTrimTo, pool, 0)


def allocate(nbytes: int, stream: Stream) -> int:
    """The address of memory for what is issued on the stream later. Raises `MemoryError`."""
    return int(_call(_driver().cuMemAllocAsync, nbytes, stream))


def free(address: int, stream: Stream) -> None:
    """Take memory back once what was issued on the stream is done."""
    _call(_driver().cuMemFreeAsync, address, stream)


def allocate_pinned(nbytes: int) -> int:
    """The address of memory of the host's that GPUs read and write by themselves."""
    return int(_call(_driver().cuMemHostAlloc, nbytes, PORTABLE))


def free_pinned(address: int) -> None:
    _call(_driver().cuMemFreeHost, address)


def copy_to_gpu(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Issue a copy from pinned memory."""
    _call(_driver().cuMemcpyHtoDAsync, target, source, nbytes, stream)


def copy_to_host(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Issue a copy to pinned memory."""
    _call(_driver().cuMemcpyDtoHAsync, target, source, nbytes, stream)


def copy_on_gpu(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Issue a copy within a GPU."""
    _call(_driver().cuMemcpyDtoDAsync, target, source, nbytes, stream)


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_capture(stream: Stream) -> None:
    """Have what is issued on the stream become a graph, and not be done.

    Relaxed: what Python's collector frees meanwhile, or another thread allocates, breaks no capture.
    """
    _call(_driver().cuStreamBeginCapture, stream, _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def end_capture(stream: Stream) -> Graph:
    return _call(_driver().cuStreamEndCapture, stream)


def instantiate(graph: Graph) -> Replayable:
    return _call(_driver().cuGraphInstantiate, graph, 0)


def destroy_graph(graph: Graph) -> None:
    """Let a captured graph go; what was made of it stays."""
    _call(_driver().cuGraphDestroy, graph)


def launch_graph(ready: Replayable, stream: Stream) -> None:
    _call(_driver().cuGraphLaunch, ready, stream)


def destroy_replayable(ready: Replayable) -> None:
    """Let it go, once it is done."""
    _call(_driver().cuGraphExecDestroy, ready)
