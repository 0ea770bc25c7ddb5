"""Compiled kernels on disk: each variant is compiled once per machine, by one process, and loaded without a compiler.

Files are named by a hash of everything that decides their content (kernel sources, dtypes, ranks, CPU, versions),
written whole under a lock (`locking`) and checked by digest when read, so any number of processes may share the folder.
Only files of this user or of root are taken, from a folder of theirs, that no one else may write: who may is told of,
once. Where the folder cannot be used, kernels are compiled anew by each process. The folder is bounded: the files
written longest ago go first.
"""

from __future__ import annotations

import hashlib
import linecache
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass
from flowrt.kernels.store.bundle import Bundle, bundle_path, is_trusted, open_bundle, open_trusted
from flowrt.kernels.store.compiling import compiled, note_missing, only_looks
from flowrt.kernels.store.fingerprint import fingerprint
from flowrt.kernels.store.loading import load_object
from flowrt.kernels.store.locking import check_wanted, held, locked
from flowrt.kernels.store.names import symbol_by_name
from flowrt.kernels.store.sources import sources
from flowrt.kernels.store.surroundings import identity

if TYPE_CHECKING:
    from flowrt.kernels.composite.scalar_loop import ScalarProgram
    from flowrt.kernels.language.table import Kernel

_DIGEST = 32
_KEPT = 8192  # objects of about 5 KiB
_log = logging.getLogger(__name__)
_load_lock = threading.RLock()
_entries: dict[str, int] = {}


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$FLOWRT_CACHE``, else ``flowrt`` in the user's cache folder."""
    given = os.environ.get("FLOWRT_CACHE")
    if given:
        return Path(given)
    above = os.environ.get("XDG_CACHE_HOME")
    if above:
        return Path(above) / "flowrt"
    try:
        return Path.home() / ".cache" / "flowrt"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"flowrt-{os.geteuid()}"


MAKERS = (
    "flowrt.kernels.emit.entries",
    "flowrt.kernels.emit.abi",
    "flowrt.kernels.emit.compose",
    "flowrt.kernels.language.expression",
    "flowrt.kernels.emit.lowering",
    "flowrt.kernels.emit.roundings",
    "flowrt.kernels.emit.processor",
    "flowrt.kernels.emit.elementwise",
    "flowrt.kernels.emit.odometer",
    "flowrt.kernels.emit.folds",
    "flowrt.kernels.emit.rows",
    "flowrt.kernels.fusion.row_plan",
    "flowrt.kernels.emit.reshaping",
)


@cache
def _surroundings() -> bytes:
    """What every object depends on: the compilers, the interpreter's bytecode, the machine and how entries are made."""
    return identity().encode() + sources(MAKERS)


@valueclass
class Variant:
    """One of the entries a kernel is compiled to: for these dtypes, ranks (see `launch.Step`) and kinds of words."""

    kernel: Kernel
    dtypes: tuple[Any, ...]
    ranks: tuple[int, ...] = ()
    words: str = ""

    def address(self) -> int:
        """Where a kernel that calls this one finds it."""
        return entry_address(self)


def bundle() -> Bundle:
    """The bundle in the present folder, an empty one if there is none. Looked for once per folder."""
    return _bundle_in(cache_folder())


@lru_cache(8)
def _bundle_in(folder: Path) -> Bundle:
    return open_bundle(bundle_path(folder))


def name_of(variant: Variant) -> str | None:
    """What the variant goes by without a look at its code: for kernels made of what stands in this package's files."""
    kernel = variant.kernel
    functions = [kernel.function] if kernel.expression is None else [m.function for m in kernel.expression.members]
    if not all(map(_stands_in_a_file, functions)):
        return None
    at = [f"{f.__module__}.{f.__qualname__}:{f.__code__.co_firstlineno}" for f in functions]
    if kernel.expression is not None:
        members = zip(at, kernel.expression.members, strict=True)
        at = [f"{place} {member.op} {member.operands} {member.dtype}" for place, member in members]
        at += [
            str([d.name for d in kernel.expression.inputs]),
            f"{kernel.expression.results} {kernel.expression.folds}",
        ]
    what = f"{kernel.entry} {kernel.form.value} {[str(d) for d in variant.dtypes]}"
    return f"{' '.join(at)} {what} {list(variant.ranks)} {variant.words}"


def _stands_in_a_file(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is one of this package's that is what it is by its place alone."""
    made = function.__closure__ is not None or function.__defaults__ or function.__kwdefaults__
    return str(function.__module__).startswith("flowrt.kernels.") and not made


@lru_cache(4096)
def symbol_of(variant: Variant) -> str:
    """The name of the variant's entry, which no other bears."""
    asked = name_of(variant)
    known = None if asked is None else _symbol_by_name(asked, variant.kernel.expression is not None)
    return known or found_symbol(variant)


def _symbol_by_name(name: str, composed: bool) -> str | None:
    return bundle().names.get(name) or (symbol_by_name(cache_folder(), name) if composed else None)


def found_symbol(variant: Variant) -> str:
    """The same, from all that decides the entry's content."""
    kernel, dtypes = variant.kernel, [str(d) for d in variant.dtypes]
    shape = f"|{kernel.entry}|{kernel.form.value}|{dtypes}|{list(variant.ranks)}|{variant.words}|{kernel.cost}|"
    code = _surroundings() + shape.encode() + fingerprint(kernel.expression or kernel.function).encode()
    name = re.sub(r"[^A-Za-z0-9_]", "_", kernel.entry)
    return f"flowrt_{name}_{hashlib.blake2b(code, digest_size=16).hexdigest()}"


def is_compiled(variant: Variant) -> bool:
    """Whether the variant's object is loaded or in the folder, so that its address is a matter of microseconds."""
    return is_there(symbol_of(variant))


def is_nested_compiled(kind: str) -> bool:
    """The same of the entry that runs loops (``loop``) or branches (``cond``)."""
    return is_there(part_symbol(_NESTED[kind]))


def is_many_compiled() -> bool:
    """The same of the entry that runs several steps as one."""
    return is_there(part_symbol(_MANY))


def is_there(symbol: str) -> bool:
    """Whether that object is loaded or in the folder."""
    return symbol in _entries or is_stored(symbol)


def is_stored(symbol: str) -> bool:
    """Whether the folder holds the object of that name."""
    return symbol in bundle() or _read(cache_folder() / f"{symbol}.o") is not None


def entry_address(variant: Variant) -> int:
    """The address of a variant's entry, compiled first if no process on this machine has done so yet.

    Raises `GraphError` where the kernel does not compile.
    """
    symbol = symbol_of(variant)
    return _address(symbol, lambda: _compiled(variant, symbol))


def variant_code(variant: Variant) -> bytes:
    """The object that holds a variant's entry, like `entry_address` without loading it."""
    symbol = symbol_of(variant)
    return object_code(symbol, lambda: _compiled(variant, symbol))


def part_code(part: Part) -> bytes:
    """The object that holds a part's entry."""
    symbol = part_symbol(part)
    return object_code(symbol, lambda: part.emit(symbol))


def _compiled(variant: Variant, symbol: str) -> bytes:
    from flowrt.kernels.emit.entries import emit

    kernel, dtypes = variant.kernel, variant.dtypes
    try:
        return emit(kernel, dtypes, variant.ranks, variant.words, symbol)
    except Exception as error:  # Numba's are of many classes, and its own bugs look like a kernel's
        names = ", ".join(str(d) for d in dtypes)
        where, reason = complaint(str(error) or repr(error), kernel.function)
        raise GraphError(
            f"{kernel.op} of ({names}): its {kernel.device} kernel {kernel.function.__qualname__} ({where}) does "
            f"not compile: {reason}"
        ) from error


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREAMBLE = ("Failed in ", "- Resolution failure", "During: ")
_ALLOCATES = ("NRT required", "Only accept returning of array")


def complaint(text: str, function: Callable[..., Any]) -> tuple[str, str]:
    """Where in ``function``'s file the compiler stopped, and why, from its lengthy ``text``."""
    code = function.__code__
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines()]
    at = re.search(rf" at {re.escape(code.co_filename)} \((\d+)\)", text)
    where = f"{os.path.basename(code.co_filename)}:{at.group(1) if at else code.co_firstlineno}"
    if any(sign in text for sign in _ALLOCATES):
        line = linecache.getline(code.co_filename, int(at.group(1))).strip() if at else ""
        return where, (
            f"it allocates (an array, list, or error with values){f' in `{line}`' if line else ''}, which no kernel "
            "may: fill the outputs entry by entry; x.reshape(-1) and slices are views; or declare scratch="
        )
    said = [line for line in lines if line and not line.startswith(_PREAMBLE)] or [text]
    hint = "; a helper that a kernel calls is decorated with @numba.njit" if "Untyped global name" in said[0] else ""
    return where, (" ".join(said[:2]) if said[0].endswith(":") else said[0]) + hint


@valueclass
class Part:
    """An object that is no kernel: who emits it (a module's function, given these arguments and the symbol).

    ``others`` are the modules that decide its content beside that one and those that decide every object's.
    """

    name: str
    module: str
    function: str
    arguments: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def makers(self) -> tuple[str, ...]:
        """All modules of its own that decide its content."""
        return (self.module, *self.others)

    def emit(self, symbol: str) -> bytes:
        code: bytes = getattr(import_module(self.module), self.function)(*self.arguments, symbol)
        return code


_LOOPS = {
    name: Part(f"loop_{name}", "flowrt.kernels.emit.launches.tape", "emit_loop", (name,), ("flowrt.kernels.run.board",))
    for name in ("alone", "shared", "help")
}
_CALLS = ("flowrt.kernels.run.direct", "flowrt.kernels.launch")
_DIRECT = Part("direct", "flowrt.kernels.emit.launches.direct", "emit_direct", (), _CALLS)
_AT_ONCE = Part(
    "at_once",
    "flowrt.kernels.emit.launches.at_once",
    "emit_at_once",
    (),
    ("flowrt.kernels.run.at_once", "flowrt.kernels.emit.launches.direct", *_CALLS),
)
_LOOP_MAKERS = ("flowrt.kernels.composite.nested", "flowrt.kernels.run.board", "flowrt.kernels.emit.launches.tape")
_NESTED = {
    kind: Part(f"nested_{kind}", "flowrt.kernels.emit.launches.nested", "emit_nested", (kind,), _LOOP_MAKERS)
    for kind in ("loop", "cond")
}
SCALAR_LOOP_MAKERS = (
    "flowrt.kernels.composite.turn",
    "flowrt.kernels.composite.scalar_loop",
    "flowrt.kernels.emit.launches.scalar_loop",
    "flowrt.kernels.emit.launches.nested",
    *_LOOP_MAKERS,
    "flowrt.kernels.emit.launches.lanes",
    "flowrt.kernels.composite.epilogue",
    "flowrt.kernels.composite.many",
    "flowrt.kernels.ops.slices",
)
_EPILOGUE = Part(
    "epilogue", "flowrt.kernels.emit.launches.epilogue", "emit_epilogue", (), ("flowrt.kernels.composite.epilogue",)
)
_MANY = Part("many", "flowrt.kernels.emit.launches.many", "emit_many", (), ("flowrt.kernels.composite.many",))
PARTS = (*_LOOPS.values(), _DIRECT, _AT_ONCE, *_NESTED.values(), _EPILOGUE, _MANY)


def loop_address(name: str = "alone") -> int:
    """The address of one of the loops that run tapes: ``alone``, ``shared`` with helpers, or to ``help``."""
    return part_address(_LOOPS[name])


def direct_address() -> int:
    """The address of the C function behind `direct`'s callables."""
    return part_address(_DIRECT)


def at_once_address() -> int:
    """The address of the C function behind `at_once`'s callables."""
    return part_address(_AT_ONCE)


def nested_address(kind: str) -> int:
    """The address of the entry that runs loops (``loop``) or branches (``cond``)."""
    return part_address(_NESTED[kind])


def epilogue_address() -> int:
    """The address of the entry that runs a product's units, each with what is to be done with its results."""
    return part_address(_EPILOGUE)


def many_address() -> int:
    """The address of the entry that runs several steps as one."""
    return part_address(_MANY)


@cache
def part_symbol(part: Part) -> str:
    """The name of the part's entry."""
    known = bundle().names.get(part.name)
    if known is not None:
        return known
    code = _surroundings() + sources(part.makers)
    return f"flowrt_{part.name}_{hashlib.blake2b(code, digest_size=16).hexdigest()}"


def part_address(part: Part) -> int:
    """The address of the part's entry, compiled first if need be."""
    symbol = part_symbol(part)
    return _address(symbol, lambda: part.emit(symbol))


@lru_cache(1024)
def scalar_loop_symbol(program: ScalarProgram) -> str:
    """The name of the entry that runs loops of scalars of that program."""
    return symbol_by_name(cache_folder(), program.text()) or found_loop_symbol(program)


def found_loop_symbol(program: ScalarProgram) -> str:
    """The same, from all that decides the entry's content."""
    code = _surroundings() + sources(SCALAR_LOOP_MAKERS) + fingerprint(program).encode()
    return f"flowrt_scalar_loop_{hashlib.blake2b(code, digest_size=16).hexdigest()}"


def scalar_loop_address(program: ScalarProgram) -> int:
    """The address of that entry, compiled first if need be."""
    symbol = scalar_loop_symbol(program)

    def compile_program() -> bytes:
        from flowrt.kernels.emit.launches.scalar_loop import emit_scalar_loop

        return emit_scalar_loop(program, symbol)

    return _address(symbol, compile_program)


def _address(symbol: str, compile_object: Callable[[], bytes]) -> int:
    found = _entries.get(symbol)
    if found is None and only_looks():
        if not is_stored(symbol):
            note_missing(symbol)
        return 0
    if found is None:
        with held(_load_lock):
            found = _entries.get(symbol)
            if found is None:
                found = bundle().address(symbol) or load_object(symbol, object_code(symbol, compile_object))
                _entries[symbol] = found
    return found


def object_code(symbol: str, compile_object: Callable[[], bytes]) -> bytes:
    """The object named ``symbol``: from the folder, or made and put there, by one process at a time."""
    path = cache_folder() / f"{symbol}.o"
    code = bundle().code(symbol) or _read(path)
    if code is not None:
        return code
    if not is_trusted(path.parent):
        return _made(symbol, compile_object)
    with locked(path.with_suffix(".lock"), path.exists) as alone:
        code = _read(path)  # another process may have written it while we waited
        if code is None:
            code = _made(symbol, compile_object)
            _write(path, code, alone)
    return code


def _made(symbol: str, compile_object: Callable[[], bytes]) -> bytes:
    check_wanted()
    _log.debug("compiling %s", symbol)
    with compiled(symbol):
        return compile_object()


def _digest(path: Path, code: bytes) -> bytes:
    return hashlib.blake2b(code, key=path.stem.encode()[-64:], digest_size=_DIGEST).digest()


def _read(path: Path) -> bytes | None:
    """The object at ``path``, if there is one that is whole, of that name, and written by someone we trust."""
    handle = open_trusted(path)
    if handle is None:
        return None
    with open(handle, "rb") as file:
        data = file.read()
    code, digest = data[:-_DIGEST], data[-_DIGEST:]
    return code if code and digest == _digest(path, code) else None


def _write(path: Path, code: bytes, alone: bool) -> None:
    """Put an object in its place, whole; ``alone``: its lock is held, so nobody else writes it now."""
    partial = path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        if alone:
            _tidy(path)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(code + _digest(path, code))
        os.replace(partial, path)
    except OSError as error:  # a full or read-only disk costs a compilation next time, nothing else
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        _warn_not_kept(path.parent, error.strerror)


@cache
def _warn_not_kept(folder: Path, why: str) -> None:
    """Once: who is told that kernels are compiled once would wait for them in each process without knowing why."""
    _log.warning(
        "kernels cannot be kept in %s (%s); name another folder in FLOWRT_CACHE, or each process compiles them anew",
        folder,
        why,
    )


def _tidy(path: Path) -> None:
    """Remove what a killed writer of this object left, whose lock we hold, and the oldest of too many objects."""
    for dead in path.parent.glob(f"{path.stem}.*.part"):
        dead.unlink(missing_ok=True)
    objects = [entry for entry in os.scandir(path.parent) if entry.name.endswith(".o")]
    if len(objects) >= _KEPT:
        for old in sorted(objects, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)[: _KEPT // 8]:
            Path(old.path).unlink(missing_ok=True)
