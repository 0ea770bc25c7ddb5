"""Names that mean something else on CUDA devices, so that families need not import Numba.

Families write ``cuda.grid(1)`` as in any Numba kernel; where a twin is compiled, `flowrt.kernels.cuda.twins` puts
``numba.cuda`` in its place, and ``math.fmod`` for ``fmod``. A twin is launched with blocks of `THREADS` threads, as
many blocks as seem useful, and must loop over what is left to do.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"  # as Numba reads it
THREADS = 16 if SIMULATED else 256  # a square; a simulated thread is a thread of the host


class _Unbound:
    """What stands for ``numba.cuda`` until a twin is compiled."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"cuda.{name} exists only inside a CUDA kernel; import cuda by itself, from flowrt.devices")


cuda: Any = _Unbound()
fmod: Any = np.fmod  # Numba knows it on hosts only, and ``math.fmod`` on devices only
