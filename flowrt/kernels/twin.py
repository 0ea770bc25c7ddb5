"""The name ``cuda`` for CUDA twins: families write ``cuda.grid(1)`` as in any Numba kernel, without importing Numba.

Where a twin is compiled, `flowrt.kernels.cuda` puts ``numba.cuda`` in its place. A twin is launched with blocks of
`THREADS` threads, as many blocks as seem useful, and must loop over what is left to do.
"""

from __future__ import annotations

from typing import Any

THREADS = 256


class _Unbound:
    """What stands for ``numba.cuda`` until a twin is compiled."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"cuda.{name} exists only inside a CUDA kernel")


cuda: Any = _Unbound()
