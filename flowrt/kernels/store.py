"""Compiled kernels on disk: each variant is compiled once per machine, by one process, and loaded with llvmlite alone.

Files are named by a hash of everything that decides their content (kernel sources, dtypes, ranks, CPU, versions),
written whole under a lock and checked by digest when read, so any number of processes may share the folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm

from flowrt.errors import InternalError
from flowrt.kernels import blas

if TYPE_CHECKING:
    from flowrt.kernels.table import Kernel

_DIGEST = 32
# What the code around a kernel would call to turn an error into a Python exception; kernels have none.
_RAISING = (
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_unpickle",
    "numba_do_raise",
    "numba_runtime_build_excinfo_struct",
)
_load_lock = threading.RLock()
_entries: dict[str, int] = {}


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$FLOWRT_CACHE``, else ``flowrt`` in the user's cache folder."""
    given = os.environ.get("FLOWRT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowrt"


@cache
def _surroundings() -> bytes:
    """What every object depends on: the compilers, the interpreter's bytecode, the CPU and how entries are made."""
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in ("emit.py", "blas.py"))
    cpu = llvm.get_host_cpu_name() + llvm.get_host_cpu_features().flatten()
    return b"|".join(
        [version("numba").encode(), version("llvmlite").encode(), sys.version.encode(), cpu.encode(), sources]
    )


def fingerprint(function: Callable[..., Any]) -> str:
    """Everything that decides what ``function`` compiles to: its code, and the helpers and constants it refers to."""
    return _fingerprint(function, frozenset())


def _fingerprint(function: Callable[..., Any], seen: frozenset[Any]) -> str:
    if function in seen:
        return "recursion"
    cells = {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)}
    known = {**function.__globals__, **cells}
    parts = _code_parts(function.__code__)
    for name in sorted(_names(function.__code__)):
        if name in known:
            parts.append(f"{name}={_describe(known[name], seen | {function})}")
    return ";".join(parts)


def _describe(value: Any, seen: frozenset[Any]) -> str:
    if inspect.isfunction(value):
        return _fingerprint(value, seen)
    return value.__name__ if inspect.ismodule(value) else repr(value)


def _code_parts(code: CodeType) -> list[str]:
    parts = [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), repr(code.co_freevars)]
    for constant in code.co_consts[0 if code.co_name == "<lambda>" else 1 :]:
        parts += _code_parts(constant) if isinstance(constant, CodeType) else [repr(constant)]
    return parts


def _names(code: CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)


@lru_cache(4096)
def _symbol(kernel: Kernel, dtypes: tuple[Any, ...], ranks: tuple[int, ...], words: str) -> str:
    code = fingerprint(kernel.function)
    shape = f"|{kernel.op}|{kernel.form.value}|{[str(d) for d in dtypes]}|{list(ranks)}|{words}|"
    digest = hashlib.blake2b(_surroundings() + shape.encode() + code.encode(), digest_size=16).hexdigest()
    return f"flowrt_{kernel.op}_{digest}"


def entry_address(kernel: Kernel, dtypes: Sequence[Any], ranks: Sequence[int], words: str) -> int:
    """The address of a variant's entry, compiled first if no process on this machine has done so yet."""
    symbol = _symbol(kernel, tuple(dtypes), tuple(ranks), words)

    def compile_variant() -> bytes:
        from flowrt.kernels.emit import emit

        return emit(kernel, dtypes, ranks, words, symbol)

    return _address(symbol, compile_variant)


def loop_address() -> int:
    """The address of the loop that runs tapes."""
    symbol = f"flowrt_loop_{hashlib.blake2b(_surroundings(), digest_size=16).hexdigest()}"

    def compile_loop() -> bytes:
        from flowrt.kernels.emit import emit_loop

        return emit_loop(symbol)

    return _address(symbol, compile_loop)


def _address(symbol: str, compile_object: Callable[[], bytes]) -> int:
    found = _entries.get(symbol)
    if found is None:
        with _load_lock:
            found = _entries.get(symbol)
            if found is None:
                found = _load(symbol, _object(symbol, compile_object))
                _entries[symbol] = found
    return found


def _object(symbol: str, compile_object: Callable[[], bytes]) -> bytes:
    path = cache_folder() / f"{symbol}.o"
    code = _read(path)
    if code is not None:
        return code
    with _locked(path.with_suffix(".lock")):
        code = _read(path)  # another process may have written it while we waited
        if code is None:
            code = compile_object()
            _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code, digest = data[:-_DIGEST], data[-_DIGEST:]
    return code if hashlib.blake2b(code, digest_size=_DIGEST).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        partial.write_bytes(code + hashlib.blake2b(code, digest_size=_DIGEST).digest())
        os.replace(partial, path)
    except OSError:  # a full or read-only disk costs a compilation next time, nothing else
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    except OSError:
        yield
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


@cache
def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    stub = ctypes.CFUNCTYPE(None)(_unreachable)
    _kept.append(stub)
    for name in _RAISING:
        llvm.add_symbol(name, ctypes.cast(stub, ctypes.c_void_p).value)
    return engine


_kept: list[Any] = []


def _unreachable() -> None:
    raise InternalError("a compiled kernel tried to raise a Python error")


def _load(symbol: str, code: bytes) -> int:
    engine = _engine()
    for name in blas.GEMM:
        if name.encode() in code:
            llvm.add_symbol(name, blas.resolve(name))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(symbol)
    if not address:
        raise InternalError(f"the kernel object {symbol} holds no entry; delete {cache_folder()} and try again")
    return address
