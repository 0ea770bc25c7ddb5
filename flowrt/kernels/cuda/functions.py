"""Functions as a CUDA device has them: with its own helpers, and without what only Python would raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numba import config, cuda

from flowrt.kernels.cuda.simulator import mend_simulator
from flowrt.kernels.language.table import JITABLES
from flowrt.kernels.language.twin import SIMULATED
from flowrt.kernels.language.twin import cuda as unbound

if SIMULATED:
    mend_simulator()
else:
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small tensors have few threads, and that is no one's fault
    config.CUDA_ARRAY_INTERFACE_SYNC = 0  # all is on one stream; or every launch would wait for those before it

# What Python would raise for, a device answers with inf and NaN; the simulator must, too.
_AS_A_DEVICE = {
    "math": SimpleNamespace(**{name: getattr(np, name, python) for name, python in vars(math).items()}),
    "float": np.float64,
    "fmod": np.fmod,
}


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with Numba's ``cuda`` for the twins' placeholder and its helpers compiled for the device."""
    here = {"fmod": math.fmod, **(_AS_A_DEVICE if SIMULATED else {})}
    used = {n: _device_has(function.__globals__[n]) for n in function.__code__.co_names if n in function.__globals__}
    names = {**function.__globals__, **used, **here}
    cells = tuple(CellType(_device_has(cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)


def _device_has(value: Any) -> Any:
    if value is unbound:
        return cuda
    return on_device(value) if isinstance(value, FunctionType) and value in JITABLES else value


@cache
def on_device(function: Callable[..., Any]) -> Any:
    """``function`` for kernels to call."""
    return cuda.jit(device=True)(bound(function))
