"""NVIDIA's libraries of C functions: found where they are installed, and called by their signatures.

ctypes lets other threads of Python's go on meanwhile. A dozen functions of either library are called, so that nobody
needs a further package for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrt.kernels.nvidia.calls import CudaCallError

WORKSPACE_AT, MEMORY_AT = 256, 64  # what addresses are multiples of: of a library's workspace, and of tensors


def room_for(nbytes: int) -> int:
    """The bytes of a tensor that a workspace of so many fits into, wherever that lies."""
    return nbytes + WORKSPACE_AT - MEMORY_AT if nbytes else 0


def begin_of(workspace: Any) -> int:
    """Where a workspace begins in memory that has room for it."""
    return int(-(-workspace.address // WORKSPACE_AT) * WORKSPACE_AT)


class LibraryRefusal(CudaCallError):
    """A library does not do that, at least not with such sizes or addresses; nothing has been done."""


class CudaLibrary:
    """Functions of one of NVIDIA's libraries that answer a status.

    ``explains`` names the one that tells what it means; ``refuses`` says whether it is a refusal. Raises an error that
    says where it was looked for where the library is not installed.
    """

    def __init__(
        self, name: str, signatures: Mapping[str, Sequence[Any]], explains: str, refuses: Callable[[int], bool]
    ) -> None:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # which cuda-bindings depends on

        self._library = ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
        self._explains, self._refuses = getattr(self._library, explains), refuses
        self._explains.restype, self._explains.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        for function, arguments in signatures.items():
            getattr(self._library, function).argtypes = tuple(arguments)

    def call(self, function: str, *arguments: Any) -> None:
        """Call it; raises `LibraryRefusal`, and `CudaCallError` for any other answer but success."""
        status = getattr(self._library, function)(*arguments)
        if status:
            text = (self._explains(status) or b"unknown").decode()
            error = LibraryRefusal if self._refuses(status) else CudaCallError
            raise error(function, status, text, "see its documentation")

    def made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """What a function makes: it is told first where to put the handle."""
        handle = ctypes.c_void_p()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle
