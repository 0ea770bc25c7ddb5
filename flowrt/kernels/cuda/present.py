"""Which NVIDIA GPUs there are, told without any package: nothing of CUDA is imported where there is none."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from flowrt.base.errors import ResourceError
from flowrt.kernels.language.twin import SIMULATED

SIMULATED_GPUS = 2  # enough to have one send to the other


def count() -> int:
    """How many GPUs there are, or are simulated. Raises `ResourceError` where they cannot be used, and says why."""
    if SIMULATED:
        return SIMULATED_GPUS
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ResourceError("no NVIDIA driver is installed here (libcuda.so.1 is not found)") from None
    found = ctypes.c_int(0)
    for call, arguments in ((driver.cuInit, (0,)), (driver.cuDeviceGetCount, (ctypes.byref(found),))):
        status = call(*arguments)
        if status:
            raise ResourceError(
                f"the NVIDIA driver answers {call.__name__} with error {status}{_MEANS.get(status, '')}"
            )
    if found.value and find_spec("numba_cuda") is None:
        raise ResourceError("numba-cuda is missing: pip install flowrt[cuda13], or [cuda12]")
    return found.value


_MEANS = {
    3: ", not initialized: was this process forked from one that had used a GPU?",
    100: ", no device",
    803: ", its library is of another version than its kernel module",
    999: ", unknown: has the GPU fallen off the bus?",
}
