"""Machine code in this process: images are mapped, what cannot be linked here is left to LLVM.

Law: memory is never writable and executable at once. An image is mapped to be written, its words are filled in, and
from then on it can only be read and run. It stays as long as the process does: anyone may hold an entry's address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import InternalError

if TYPE_CHECKING:
    from flowrt.kernels.store.image import Image, Words

PAGE = mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_WRITTEN, _RUN = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC


def load_object(symbol: str, code: bytes) -> int:
    """The address of the entry ``symbol`` of an object, which is now part of this process."""
    from flowrt.kernels.store.elf import Unlinkable  # which, like the linker, a process with a bundle does without
    from flowrt.kernels.store.linking import link

    try:
        image = link({symbol: code}, 8)
    except Unlinkable:
        return _load_with_llvm(symbol, code)
    return map_image(image) + image.parts[symbol].entry


def map_image(image: Image) -> int:
    """Where the image now lies in this process."""
    return _map_bytes(image.body, image.words)


def map_file(file: int, offset: int, size: int, words: Words) -> int:
    """The same for an image whose body is in a file: processes share what they do not write. Raises `OSError`."""
    at = _mapped(size, mmap.MAP_PRIVATE, file, offset)
    if at is not None:
        _fill(at, words)
        if _run(at, size):
            return at
        _system().munmap(at, size)
    return _map_bytes(os.pread(file, size, offset), words)  # as where nothing may run from that file system


def _map_bytes(body: bytes, words: Words) -> int:
    at = _mapped(len(body), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if at is None:
        raise InternalError(f"the system gives no memory of {len(body)} bytes for machine code")
    ctypes.memmove(at, body, len(body))
    _fill(at, words)
    if not _run(at, len(body)):
        raise InternalError("this process may not run code that it has written itself (mprotect says no)")
    return at


def _mapped(size: int, flags: int, file: int, offset: int) -> int | None:
    at = _system().mmap(None, size, _WRITTEN, flags, file, offset)
    return None if at == _FAILED else int(at)


def _fill(at: int, words: Words) -> None:
    """Put the addresses in their words."""
    for place, name in words.outside:
        ctypes.c_uint64.from_address(at + place).value = _address_outside(name)
    for place, target in words.own:
        ctypes.c_uint64.from_address(at + place).value = at + target


def _run(at: int, size: int) -> bool:
    # On machines whose caches of instructions do not follow stores, Linux makes a page that becomes executable right.
    return bool(_system().mprotect(at, size, _RUN) == 0)


@cache
def _address_outside(name: str) -> int:
    try:
        return ctypes.cast(getattr(_system(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise InternalError(f"a compiled kernel needs {name}, which this system's libraries do not have") from None


@cache
def _system() -> Any:
    """What every process has: C's library and its own."""
    library = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_int64]
    library.mmap.restype = ctypes.c_void_p
    library.mprotect.argtypes = [ctypes.c_void_p, word, number]
    library.munmap.argtypes = [ctypes.c_void_p, word]
    return library


# ── what is not linked here ──────────────────────────────────────────────────────────────────────────────────────────


@cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _load_with_llvm(symbol: str, code: bytes) -> int:
    import llvmlite.binding as llvm

    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(symbol)
    if not address:
        raise InternalError(f"the kernel object {symbol} holds no entry")
    return address
