"""Products of matrices by cuBLASLt: an algorithm is chosen once, by what the library knows of the GPU, and not timed.

float32 is multiplied and added up as float32 throughout, without TF32. See the cuBLAS Library User's Guide, chapter 3.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.nvidia.library import CudaLibrary, LibraryRefusal, begin_of, room_for

if TYPE_CHECKING:
    from flowrt.kernels.nvidia.calls import Stream
    from flowrt.kernels.nvidia.products import StridedMatrices, StridedProduct

WORKSPACE = 32 << 20  # bytes that an algorithm may ask for: NVIDIA's own choice for Hopper, where most ask for none
ALIGNED = 16  # bytes that operands begin at a multiple of; no algorithm gains by more
_REFUSALS = {7, 8, 15}  # CUBLAS_STATUS_INVALID_VALUE, _ARCH_MISMATCH, _NOT_SUPPORTED

_STORED = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF
_TYPES = {np.dtype("float32"): (0, 68, ctypes.c_float), np.dtype("float64"): (1, 70, ctypes.c_double)}
"""By dtype: CUDA_R_32F or _64F, CUBLAS_COMPUTE_32F or _64F, and what the factors are to C."""

_BATCH_COUNT, _BATCH_OFFSET = 5, 6  # CUBLASLT_MATRIX_LAYOUT_...
_FLIPPED = 3, 4  # CUBLASLT_MATMUL_DESC_TRANSA, _TRANSB
_TRANSFORM_FLIPPED = 2  # CUBLASLT_MATRIX_TRANSFORM_DESC_TRANSA
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_...; of A, B, C and D


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with the algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_handle, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_attribute = (_handle, _int, _pointer, _size)
SIGNATURES = {
    "cublasLtCreate": (_out,),
    "cublasLtDestroy": (_handle,),
    "cublasLtMatmulDescCreate": (_out, _int, _int),
    "cublasLtMatmulDescSetAttribute": _attribute,
    "cublasLtMatmulDescDestroy": (_handle,),
    "cublasLtMatrixLayoutCreate": (_out, _int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutSetAttribute": _attribute,
    "cublasLtMatrixLayoutDestroy": (_handle,),
    "cublasLtMatmulPreferenceCreate": (_out,),
    "cublasLtMatmulPreferenceSetAttribute": _attribute,
    "cublasLtMatmulPreferenceDestroy": (_handle,),
    "cublasLtMatrixTransformDescCreate": (_out, _int),
    "cublasLtMatrixTransformDescSetAttribute": _attribute,
    "cublasLtMatrixTransformDescDestroy": (_handle,),
    "cublasLtMatrixTransform": (
        *(_handle, _handle, _pointer, _pointer, _handle, _pointer, _pointer, _handle),
        *(_pointer, _handle, _pointer),
    ),
    "cublasLtMatmulAlgoGetHeuristic": (*[_handle] * 7, _int, ctypes.POINTER(_Algorithm), ctypes.POINTER(_int)),
    "cublasLtMatmul": (
        *(_handle, _handle, _pointer, _pointer, _handle, _pointer, _handle, _pointer),
        *(_pointer, _handle, _pointer, _handle, _pointer, _pointer, _size, _pointer),
    ),
}


class Blas:
    """cuBLASLt for the GPU whose context the calling thread has, and a stream of its.

    Raises an error where it is not installed.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = ctypes.c_void_p(int(stream))
        self.library = CudaLibrary("cublasLt", SIGNATURES, "cublasLtGetStatusString", _REFUSALS.__contains__)
        self.handle = self.library.made("cublasLtCreate")

    def prepare(self, products: Sequence[StridedProduct]) -> PreparedProducts | None:
        """Products that differ in where they begin; None where the library has no algorithm for them."""
        prepared = PreparedProducts(self, products)
        return prepared if prepared.choose() else None

    def transposition(self, rows: int, columns: int, dtype: np.dtype[np.generic]) -> Transposition:
        """What copies a dense matrix of ``rows`` to its transpose."""
        return Transposition(self, rows, columns, dtype)

    def close(self) -> None:
        self.library.call("cublasLtDestroy", self.handle)


class _Described:
    """Descriptors of the library's, which go when this does."""

    def __init__(self, blas: Blas) -> None:
        self._blas = blas

    def _made(self, what: str, *arguments: Any) -> ctypes.c_void_p:
        made = self._blas.library.made(f"{what}Create", *arguments)
        weakref.finalize(self, self._blas.library.call, f"{what}Destroy", made).atexit = False
        return made

    def _set(self, what: str, made: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._blas.library.call(f"{what}SetAttribute", made, attribute, ctypes.byref(value), ctypes.sizeof(value))


class PreparedProducts(_Described):
    """A step's products, with the algorithm that all have; it wants so many bytes of ``workspace``."""

    def __init__(self, blas: Blas, products: Sequence[StridedProduct]) -> None:
        super().__init__(blas)
        self._products = products
        like = products[0]
        kind, compute, factor = _TYPES[like.dtype]
        self._one, self._zero = factor(1), factor(0)
        self._found = _Algorithm()
        self._product = self._made("cublasLtMatmulDesc", compute, kind)
        for attribute, matrices in zip(_FLIPPED, (like.b, like.a), strict=True):
            self._set("cublasLtMatmulDesc", self._product, attribute, ctypes.c_int32(matrices.transposed))
        stored = _STORED.get(like.stored, kind)
        self._layouts = [
            self._layout(matrices, like.batch, of)
            for matrices, of in ((like.b, stored), (like.a, stored), (like.y, kind))
        ]

    @property
    def workspace(self) -> int:
        return room_for(int(self._found.workspace))

    def choose(self) -> bool:
        """Choose an algorithm; whether there is one."""
        preference = self._made("cublasLtMatmulPreference")
        self._set("cublasLtMatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        for attribute, nbytes in zip(_ALIGNMENTS, self._alignments(), strict=True):
            self._set("cublasLtMatmulPreference", preference, attribute, ctypes.c_uint32(nbytes))
        b, a, y = self._layouts
        asked = self._blas.handle, self._product, b, a, y, y, preference
        count = ctypes.c_int(0)
        try:
            self._blas.library.call(
                "cublasLtMatmulAlgoGetHeuristic", *asked, 1, ctypes.byref(self._found), ctypes.byref(count)
            )
        except LibraryRefusal:
            return False
        return count.value == 1 and not self._found.state

    def launch(self, operands: Sequence[Any], workspace: Any) -> None:
        """Issue them on arrays of a, b, perhaps what is not looked at, and y."""
        given = operands[1], operands[0], operands[-1]
        (layout_b, layout_a, layout_y), found = self._layouts, self._found
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        space = begin_of(workspace) if found.workspace else None
        for each in self._products:
            b, a, y = (array.address + start for array, start in zip(given, each.starts, strict=True))
            matrices = b, layout_b, a, layout_a, zero, y, layout_y, y, layout_y
            how = ctypes.byref(found.algorithm), space, found.workspace, self._blas.stream
            self._blas.library.call("cublasLtMatmul", self._blas.handle, self._product, one, *matrices, *how)

    def _layout(self, matrices: StridedMatrices, batch: int, kind: int) -> ctypes.c_void_p:
        rows, columns = matrices.rows, matrices.columns
        layout = self._made("cublasLtMatrixLayout", kind, rows, columns, rows)
        self._set("cublasLtMatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(batch))
        self._set("cublasLtMatrixLayout", layout, _BATCH_OFFSET, ctypes.c_int64(matrices.stride))
        return layout

    def _alignments(self) -> tuple[int, int, int, int]:
        """What the addresses of the first matrices of B, A, y and y are multiples of, in bytes."""
        b, a, y = (math.gcd(ALIGNED, *some) for some in zip(*(each.starts for each in self._products), strict=True))
        return b, a, y, y


class Transposition(_Described):
    """Copies dense matrices of one size to their transposes."""

    def __init__(self, blas: Blas, rows: int, columns: int, dtype: np.dtype[np.generic]) -> None:
        super().__init__(blas)
        kind, _, factor = _TYPES[dtype]
        self._one, self._zero = factor(1), factor(0)
        self._transform = self._made("cublasLtMatrixTransformDesc", kind)
        self._set("cublasLtMatrixTransformDesc", self._transform, _TRANSFORM_FLIPPED, ctypes.c_int32(1))
        self._source = self._made("cublasLtMatrixLayout", kind, columns, rows, columns)
        self._target = self._made("cublasLtMatrixLayout", kind, rows, columns, rows)

    def launch(self, source: int, target: int) -> None:
        """Issue the copy from one address to another."""
        given = ctypes.byref(self._one), source, self._source, ctypes.byref(self._zero), None, None
        made = target, self._target, self._blas.stream
        self._blas.library.call("cublasLtMatrixTransform", self._blas.handle, self._transform, *given, *made)
