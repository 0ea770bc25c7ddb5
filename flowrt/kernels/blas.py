"""Matrix products of the BLAS that SciPy carries, callable from compiled kernels.

A kernel calls the stub ``gemm_float32`` or ``gemm_float64`` with addresses; where it is compiled the stub becomes a
call of the external symbol, which `resolve` binds to SciPy's function when the object is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowrt.kernels.table import jitable
from flowrt.spec import Spec


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
    name = _SCIPY[symbol]
    library = _carried()
    function = getattr(library, f"scipy_{name}_", None)  # as the OpenBLAS in SciPy's wheels calls it
    if function is None:
        return _exported(name)
    library.scipy_openblas_set_num_threads(1)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _carried() -> Any:
    """The OpenBLAS that SciPy's wheel carries, if it does, without importing SciPy: that takes 200 ms.

    It starts no threads of its own: kernels run in lanes, and two pools fight for the cores. Two lanes with a product
    each on two busy cores took 500 ms for a step of 7 ms. Another BLAS is left as it is.
    """
    found = find_spec("scipy")
    folder = Path(found.origin).parent if found is not None and found.origin else Path()
    for path in (*folder.parent.glob("scipy.libs/libscipy_openblas*"), *folder.glob(".dylibs/libscipy_openblas*")):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "scipy_openblas_set_num_threads"):
            return library
    return None


def _exported(name: str) -> int:
    """The address of the function that SciPy offers to other extension modules, whatever BLAS is behind it."""
    from scipy.linalg import cython_blas

    capsule: Any = cython_blas.__pyx_capi__[name]
    signature = ctypes.pythonapi.PyCapsule_GetName
    signature.restype, signature.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address: int = pointer(capsule, signature(capsule))
    return address


def gemm_scratch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """What `gemm` needs beside its operands: two flags, m, n, k and three row lengths; two factors."""
    return Spec("int32", (8,)), Spec(outputs[0].dtype, (2,))


@jitable
def gemm(
    a: Any, b: Any, c: Any, starts: Any, rows: Any, flags: Any, shape: Any, beta: Any, ints: Any, floats: Any
) -> None:
    """``c = op(a) @ op(b) + beta * c`` for row-major matrices of one float dtype inside ``a``, ``b`` and ``c``.

    ``starts`` are their first entries, ``rows`` the lengths of their stored rows, ``flags`` whether a and b are
    transposed, ``shape`` is (m, n, k). BLAS is column-major and sees every matrix transposed: hence b before a.
    """
    m, n, k = shape
    if m == 0 or n == 0:
        return
    ints[0], ints[1] = 84 if flags[1] else 78, 84 if flags[0] else 78  # "T" and "N"
    ints[2], ints[3], ints[4] = n, m, k
    ints[5], ints[6], ints[7] = max(rows[1], 1), max(rows[0], 1), max(rows[2], 1)
    floats[0], floats[1] = 1, beta
    i, f, size = ints.ctypes.data, floats.ctypes.data, a.itemsize
    at, bt, ct = a.ctypes.data + starts[0] * size, b.ctypes.data + starts[1] * size, c.ctypes.data + starts[2] * size
    if size == 4:
        gemm_float32(i, i + 4, i + 8, i + 12, i + 16, f, bt, i + 20, at, i + 24, f + size, ct, i + 28)
    else:
        gemm_float64(i, i + 4, i + 8, i + 12, i + 16, f, bt, i + 20, at, i + 24, f + size, ct, i + 28)
