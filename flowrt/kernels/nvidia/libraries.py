"""Which steps NVIDIA's libraries carry out instead of the twins: products by cuBLASLt, convolutions by cuDNN.

Where a library is not installed, or has no way of going about a step, the twin does it, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.kernels.nvidia.blas import Blas
from flowrt.kernels.nvidia.calls import CudaCallError, Stream
from flowrt.kernels.nvidia.convolutions import DIRECTIONS, as_product, convolution
from flowrt.kernels.nvidia.dnn import Dnn
from flowrt.kernels.nvidia.products import strided_products
from flowrt.kernels.ops.linalg import STORED_ON_CUDA, matmul_on_cuda

if TYPE_CHECKING:
    from flowrt.kernels.cuda.copies import LibraryLaunch
    from flowrt.kernels.launch import LaunchStep
    from flowrt.kernels.nvidia.products import StridedProduct

_log = logging.getLogger(__name__)


class CudaLibraries:
    """The libraries of one GPU, for what is issued on one stream of its; see `flowrt.kernels.cuda.copies.Libraries`.

    Each is opened when a step first asks for it, in the thread that has the GPU's context.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._opened: dict[Callable[..., Any], Any] = {}
        self._ways: dict[Callable[..., Any], Callable[[LaunchStep], LibraryLaunch | None]] = {
            matmul_on_cuda: self._product,
            **{twin: partial(self._product, stored=dtype) for dtype, twin in STORED_ON_CUDA.items()},
            **dict.fromkeys(DIRECTIONS, self._convolution),
        }

    def prepare(self, step: LaunchStep) -> LibraryLaunch | None:
        way = self._ways.get(step.kernel.function)
        return way(step) if way else None

    def close(self) -> None:
        for library in self._opened.values():
            if library is not None:
                library.close()
        self._opened.clear()

    def _product(self, step: LaunchStep, stored: str = "") -> LibraryLaunch | None:
        products = strided_products(step, stored)
        return self._multiplied(products) if products else None

    def _multiplied(self, products: Sequence[StridedProduct]) -> LibraryLaunch | None:
        blas = self._blas()
        return blas.prepare(products) if blas else None

    def _convolution(self, step: LaunchStep) -> LibraryLaunch | None:
        asked = convolution(step)
        if asked is None:
            return None
        product = as_product(asked)
        if product is not None:
            return self._multiplied([product])
        blas, dnn = self._blas(), self._open(Dnn, "convolutions are computed by flowrt's own kernels")
        return dnn.prepare(asked, blas) if blas and dnn else None

    def _blas(self) -> Any:
        return self._open(Blas, "matrices are multiplied by flowrt's own tiles")

    def _open(self, library: Callable[[Stream], Any], otherwise: str) -> Any:
        """A library; None, and a line in the log, where it is not installed."""
        if library not in self._opened:
            try:
                self._opened[library] = library(self._stream)
            except (RuntimeError, OSError, AttributeError, CudaCallError) as error:  # not there, or another version
                why = str(error).partition("\n")[0] or type(error).__name__
                _log.info("%s: %s; pip install flowrt[cuda13], or [cuda12]", otherwise, why)
                self._opened[library] = None
        return self._opened[library]
