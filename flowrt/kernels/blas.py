"""Matrix products of the BLAS that SciPy carries, callable from compiled kernels.

A kernel calls the stub ``gemm_float32`` or ``gemm_float64`` with addresses; where it is compiled the stub becomes a
call of the external symbol, which `resolve` binds to SciPy's function when the object is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any


def gemm_float32(*addresses: int) -> None:
    """BLAS ``sgemm``; thirteen addresses, in its Fortran order."""
    raise RuntimeError("gemm_float32 runs only inside a compiled kernel")


def gemm_float64(*addresses: int) -> None:
    """BLAS ``dgemm``; thirteen addresses, in its Fortran order."""
    raise RuntimeError("gemm_float64 runs only inside a compiled kernel")


GEMM: dict[str, Callable[..., None]] = {"flowrt_sgemm": gemm_float32, "flowrt_dgemm": gemm_float64}
_SCIPY = {"flowrt_sgemm": "sgemm", "flowrt_dgemm": "dgemm"}


def resolve(symbol: str) -> int:
    """The address of SciPy's function behind one of `GEMM`'s symbols."""
    from scipy.linalg import cython_blas

    _keep_to_the_calling_thread()
    capsule: Any = cython_blas.__pyx_capi__[_SCIPY[symbol]]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address: int = pointer(capsule, name(capsule))
    return address


def _keep_to_the_calling_thread() -> None:
    """Let SciPy's OpenBLAS start no threads: kernels run in lanes, and two pools fight for the cores.

    Two lanes with a product each on two busy cores took 500 ms for a step of 7 ms. Another BLAS is left as it is.
    """
    import scipy

    folder = Path(scipy.__file__).parent
    for path in (*folder.parent.glob("scipy.libs/libscipy_openblas*"), *folder.glob(".dylibs/libscipy_openblas*")):
        set_threads = getattr(ctypes.CDLL(str(path)), "scipy_openblas_set_num_threads", None)
        if set_threads is not None:
            set_threads(1)
