"""The entries that kernels are compiled to: what each goes by, and where it is.

Law: a symbol tells all that decides an entry's code; a name, which takes no look at the code, stands for a symbol only
where the bundle or the helper wrote down which.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.spec import as_dtype
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.bits import on_bits
from flowrt.kernels.language.own import writes_an_input
from flowrt.kernels.language.table import KERNELS, RegisteredKernel
from flowrt.kernels.store.fingerprint import fingerprint
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.names import symbol_by_name
from flowrt.kernels.store.objects import address_of, bundle, is_there, object_code
from flowrt.kernels.store.parts import made_by, surroundings

ENTRY = "entry "  # how the request of a variant begins


@valueclass
class Variant:
    """One of the entries a kernel is compiled to: for these dtypes, ranks (see `launch.Step`) and kinds of words.

    The first ``guarded`` of its arrays are read only: to write into one does not compile.
    """

    kernel: RegisteredKernel
    dtypes: tuple[Any, ...]
    ranks: tuple[int, ...] = ()
    words: str = ""
    guarded: int = 0

    def address(self) -> int:
        """Where a kernel that calls this one finds it."""
        return entry_address(self)


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
            f"{kernel.expression.results} {kernel.expression.reductions}",
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
    shape += f"{variant.guarded}|" if variant.guarded else ""
    code = surroundings() + shape.encode() + fingerprint(kernel.expression or kernel.function).encode()
    name = re.sub(r"[^A-Za-z0-9_]", "_", kernel.entry)
    return f"flowrt_{name}_{hashlib.blake2b(code, digest_size=16).hexdigest()}"


def is_compiled(variant: Variant) -> bool:
    """Whether the variant's object is loaded or in the folder, so that its address is a matter of microseconds."""
    return is_there(symbol_of(variant))


def entry_address(variant: Variant) -> int:
    """The address of a variant's entry, compiled first if no process on this machine has done so yet.

    Raises `GraphError` where the kernel does not compile.
    """
    symbol = symbol_of(variant)
    return address_of(symbol, lambda: _compiled(variant, symbol), lambda: request_of(variant))


def request_of(variant: Variant) -> str:
    """What `requested` makes the variant of, in another process: by its kernel's place in the table.

    Nothing where it has none there. What may stand in that place elsewhere has another symbol.
    """
    kernel = variant.kernel
    entered = KERNELS.get((kernel.op, kernel.device), [])  # the last one first
    for number, first in enumerate(reversed(entered)):
        for step, one in enumerate((first, *first.then)):
            if one is kernel:
                dtypes = [np.dtype(dtype).name for dtype in variant.dtypes]
                shape = variant.ranks, variant.words, variant.guarded
                return ENTRY + json.dumps([kernel.op, kernel.device, number, step, dtypes, *shape])
    return ""


def requested(request: str) -> Variant:
    """The variant that `request_of` was asked for."""
    op, device, number, step, dtypes, ranks, words, guarded = json.loads(request.removeprefix(ENTRY))
    first = KERNELS[op, device][-1 - number]
    kernel = (first, *first.then)[step]
    return Variant(kernel, tuple(map(as_dtype, dtypes)), tuple(ranks), words, guarded)


def variant_code(variant: Variant) -> bytes:
    """The object that holds a variant's entry, like `entry_address` without loading it."""
    symbol = symbol_of(variant)
    return object_code(symbol, lambda: _compiled(variant, symbol))


def _compiled(variant: Variant, symbol: str) -> bytes:
    kernel, dtypes = variant.kernel, variant.dtypes
    try:
        return _emitted(variant, symbol)
    except Exception as error:  # Numba's are of many classes, and its own bugs look like a kernel's
        names = ", ".join(str(d) for d in dtypes)
        where, reason = _what_is_wrong(variant, symbol, error)
        raise GraphError(
            f"{kernel.op} of ({names}): its {kernel.device} kernel {kernel.function.__qualname__} ({where}) does "
            f"not compile: {reason}"
        ) from error


def _emitted(variant: Variant, symbol: str) -> bytes:
    kernel = variant.kernel
    if kernel.expression is not None:
        kernel = replace(kernel, expression=on_bits(kernel.expression))
    what = (kernel, variant.dtypes, variant.ranks, variant.words, variant.guarded)
    return made_by("flowrt.kernels.emit.entries", "emit", *what, symbol)


def _what_is_wrong(variant: Variant, symbol: str, error: Exception) -> tuple[str, str]:
    """Where a kernel does not compile, and why: what it may not write is named where that alone keeps it from it."""
    found = complaint(str(error) or repr(error), variant.kernel.function)
    if not variant.guarded:
        return found
    try:
        _emitted(replace(variant, guarded=0), symbol)
    except Exception as other:
        return complaint(str(other) or repr(other), variant.kernel.function)
    return found[0], writes_an_input(variant.kernel.function, variant.guarded, len(variant.dtypes))


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
