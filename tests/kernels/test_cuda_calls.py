"""Calls of NVIDIA's driver and arrays in a GPU's memory, as far as they can be told without a driver."""

from __future__ import annotations

import gc
import inspect
import sys
from ctypes import CDLL
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from imitated_driver import ImitatedDriver

from flowrt.base.errors import DeviceLost, ResourceError
from flowrt.kernels.cuda.copies import CudaCopies
from flowrt.kernels.cuda.driver import FATAL, CudaDriver, is_fatal, open_driver
from flowrt.kernels.cuda.gpu import CudaGpu, GpuArray, GpuMemory, check_compiler
from flowrt.kernels.nvidia import calls
from flowrt.kernels.nvidia.calls import CudaCallError

STREAM, EVENT, ADDRESS = driver.CUstream(64), driver.CUevent(64), 1 << 20
GRAPH, READY = driver.CUgraph(64), driver.CUgraphExec(64)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "start": (),
    "retain_context": (0,),
    "total_memory": (0,),
    "create_stream": (),
    "destroy_stream": (STREAM,),
    "synchronize": (STREAM,),
    "create_event": (),
    "destroy_event": (EVENT,),
    "record_event": (EVENT, STREAM),
    "wait_for_event": (EVENT,),
    "let_stream_wait": (STREAM, EVENT),
    "find_pool": (0,),
    "keep_freed": (driver.CUmemoryPool(64),),
    "trim": (driver.CUmemoryPool(64),),
    "allocate": (4096, STREAM),
    "free": (ADDRESS, STREAM),
    "allocate_pinned": (4096,),
    "free_pinned": (ADDRESS,),
    "copy_to_gpu": (ADDRESS, ADDRESS, 4096, STREAM),
    "copy_to_host": (ADDRESS, ADDRESS, 4096, STREAM),
    "copy_on_gpu": (ADDRESS, ADDRESS, 4096, STREAM),
    "begin_capture": (STREAM,),
    "end_capture": (STREAM,),
    "instantiate": (GRAPH,),
    "destroy_graph": (GRAPH,),
    "launch_graph": (READY, STREAM),
    "destroy_replayable": (READY,),
}
"""By function, what it is called with: handles are of the types that the driver answers."""


def has_driver() -> bool:
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_every_call_has_an_example() -> None:
    functions = {name for name, what in vars(calls).items() if inspect.isfunction(what) and not name.startswith("_")}
    assert functions - {"cache"} == ARGUMENTS.keys()


@pytest.mark.skipif(has_driver(), reason="a driver would follow these addresses")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_bindings_take_a_calls_arguments_and_look_for_the_driver(name: str) -> None:
    """They convert every argument first, so one too few, or one of another type, would be a TypeError."""
    with pytest.raises(Exception, match="NVIDIA driver library"):
        getattr(calls, name)(*ARGUMENTS[name])


def test_an_address_of_the_wrong_type_would_be_found() -> None:
    with pytest.raises(TypeError):
        calls.copy_to_gpu("there", ADDRESS, 4096, STREAM)  # type: ignore[arg-type]


def answering(code: int) -> Any:
    def cuStreamSynchronize() -> tuple[Any]:
        return (driver.CUresult(code),)

    return cuStreamSynchronize


def test_memory_that_is_out_is_a_memory_error() -> None:
    assert calls.OUT_OF_MEMORY == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(MemoryError):
        calls._call(answering(calls.OUT_OF_MEMORY))


def test_what_a_gpu_does_not_survive_is_told_from_what_it_does() -> None:
    assert is_fatal(calls.CudaCallError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal access"))
    assert is_fatal(calls.CudaCallError("cuStreamSynchronize", 999, "CUDA_ERROR_UNKNOWN", "off the bus"))
    assert is_fatal(RuntimeError("CUDA_ERROR_LAUNCH_FAILED: an exception occurred on the device"))
    assert not is_fatal(calls.CudaCallError("cuGraphInstantiate", 801, "CUDA_ERROR_NOT_SUPPORTED", "not supported"))
    assert not is_fatal(ValueError("cannot compile: assert x > 0"))


def test_all_is_known_that_a_gpu_does_not_survive() -> None:
    """As the driver's own reference tells it."""
    means = {each: " ".join(str(each.__doc__).split()) for each in driver.CUresult}
    fatal = {int(each) for each, text in means.items() if "must be terminated and relaunched" in text}
    assert 700 in fatal <= FATAL.keys()
    assert all(driver.CUresult(number).name == f"CUDA_ERROR_{name}" for number, name in FATAL.items())


@pytest.mark.parametrize("lost", [False, True])
def test_a_library_that_fails_has_the_gpu_asked_whether_it_is_lost(imitated: ImitatedDriver, lost: bool) -> None:
    """cuBLASLt says of an address that an earlier kernel should not have written to: an execution failed (13)."""
    gpu = CudaDriver(0)

    def fail(*given: Any) -> None:
        if lost:
            imitated.fails["synchronize"] = CudaCallError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "")
        raise CudaCallError("cublasLtMatmul", 13, "the function failed to launch", "see its documentation")

    steps: Any = SimpleNamespace(takes_run=False, may_fail=False, launch=fail)
    with pytest.raises(DeviceLost if lost else CudaCallError, match="ILLEGAL_ADDRESS" if lost else "failed to launch"):
        gpu.launch(steps, [], np.zeros(4, np.int64))


def test_parts_of_an_array_lie_where_numpys_would() -> None:
    here, there = np.zeros(64, np.uint8), GpuArray(GpuMemory(ADDRESS), ADDRESS, np.uint8, (64,))
    for part in (
        lambda memory: memory[8:40],
        lambda memory: memory[8:40].view(np.float32)[2:6],
        lambda memory: memory[16:].view(np.int64).reshape((2, 3)),
        lambda memory: memory[:4].view(np.bool_).reshape(-1),
        lambda memory: memory[64:64].view(np.float64).reshape((0, 3)),
    ):
        mine, numpys = part(there), part(here)
        assert mine.address - ADDRESS == numpys.ctypes.data - here.ctypes.data or not numpys.size
        assert (mine.shape, mine.dtype, mine.size, mine.nbytes) == (
            numpys.shape,
            numpys.dtype,
            numpys.size,
            numpys.nbytes,
        )
        interface = mine.__cuda_array_interface__
        assert (interface["typestr"], interface["data"]) == (numpys.dtype.str, (mine.address, False))


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> ImitatedDriver:
    made = ImitatedDriver()
    made.stand_in(monkeypatch)
    return made


def test_a_gpu_holds_no_more_than_it_has_so_a_step_that_never_fits_is_refused_at_once(imitated: ImitatedDriver) -> None:
    assert open_driver(0).limit == imitated.total_memory(0)


def test_memory_is_given_back_in_its_thread_once_no_array_lies_in_it(imitated: ImitatedDriver) -> None:
    gpu = CudaGpu(0)
    whole = gpu.allocate(64)
    first, part = whole.address, whole[8:16]
    del whole
    gc.collect()
    gpu.allocate(8)
    assert first in imitated.alive
    del part
    gc.collect()
    assert first in imitated.alive
    gpu.allocate(8)
    assert first not in imitated.alive


def test_a_gpu_that_is_closed_keeps_nothing_whoever_still_refers_to_it(imitated: ImitatedDriver) -> None:
    """Its memory is others' then, and a process may open many sessions, one after another."""
    gpu = CudaGpu(0)
    copies, memory, again = CudaCopies(gpu), gpu.allocate(64), gpu.capture(lambda: None)
    assert {"pinned", "memory", "ready graph"} <= set(imitated.alive.values())
    gpu.close(copies.events)
    assert imitated.alive == {}
    assert imitated.called["trim"] == 1
    del copies, memory, again


def test_the_compiler_of_kernels_is_looked_for_before_a_step_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler()  # the suite has NVVM

    class Missing:
        def __init__(self) -> None:
            raise RuntimeError("libNVVM cannot be found")

    monkeypatch.setattr("numba.cuda.cudadrv.nvvm.NVVM", Missing)
    with pytest.raises(ResourceError, match=r"libNVVM cannot be found: pip install flowrt\[cuda13\], or \[cuda12\]"):
        check_compiler()


def test_a_numpy_that_numba_cuda_does_not_know_is_told_before_a_step_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.5, which has no ``row_stack`` any more: the module that names it cannot be imported."""
    monkeypatch.setitem(sys.modules, "numba.cuda.np.arrayobj", None)
    with pytest.raises(ResourceError, match=r"does not know NumPy .*: pip install 'numpy<2.5', or a newer"):
        check_compiler()
