"""NVIDIA's libraries of C functions: found where they are installed, and called by their signatures.

ctypes lets other threads of Python's go on meanwhile. A dozen functions of either library are called, so that nobody
needs a further package for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.kernels.cuda_calls import CudaCallError


class CudaLibrary:
    """Functions of one of NVIDIA's libraries that answer a status; ``explains`` names the one that tells what it means.

    Raises an error that says where it was looked for where the library is not installed.
    """

    def __init__(self, name: str, signatures: Mapping[str, Sequence[Any]], explains: str) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # which cuda-bindings depends on

        self._library = ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
        self._explains = getattr(self._library, explains)
        self._explains.restype, self._explains.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        for function, arguments in signatures.items():
            getattr(self._library, function).argtypes = tuple(arguments)

    def call(self, function: str, *arguments: Any) -> None:
        """Call it; raises `MemoryError`, and `CudaCallError` for any other answer but success."""
        status = getattr(self._library, function)(*arguments)
        if status:
            text = (self._explains(status) or b"unknown").decode()
            raise CudaCallError(function, status, text, "see its documentation")

    def made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function makes: it is told first where to put the handle."""
        handle = ctypes.c_void_p()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle
