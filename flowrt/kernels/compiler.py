"""The helper process: compiles the orders that come in by lines, each into the cache, and says when it is there.

Run by `background` as ``python -m flowrt.kernels.compiler``. It ends when its input does, or after a while without
orders, since a compiler takes much memory.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.base.errors import FlowrtError
from flowrt.kernels.composite.scalar_loop import LOOP, found_loop_symbol, read_program, scalar_loop_address
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.variants import ENTRY, entry_address, found_symbol, name_of, requested, variant_code
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.names import remember
from flowrt.kernels.store.objects import is_stored
from flowrt.kernels.store.parts import PART, part_symbol, requested_part

Order: TypeAlias = tuple[str | None, Callable[[], Any]]  # the symbol that it has here, and what compiles it
NICE = 10
IDLE_SECONDS = 30.0


def main() -> None:
    with suppress(OSError):
        os.nice(NICE)
    rest = b""
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            symbol, _, request = line.decode().partition(" ")
            os.write(1, f"{symbol} {carry_out(symbol, request)}".rstrip().encode() + b"\n")


def carry_out(symbol: str, request: str) -> str:
    """Compile one order; what went wrong, or nothing."""
    kinds = {LOOP: _loop, ENTRY: _entry, PART: _part}
    ordered = next((kinds[kind] for kind in kinds if request.startswith(kind)), _fused)
    try:
        found, compile_it = ordered(request)
        if found != symbol:
            return "the parent's kernels differ from these"
        compile_it()
    except (FlowrtError, ValueError, TypeError, LookupError) as error:
        return " ".join(str(error).split()) or repr(error)
    return "" if is_stored(symbol) else "the cache cannot be written"


# ── what is ordered ──────────────────────────────────────────────────────────────────────────────────────────────────


def _fused(request: str) -> Order:
    """With what it needs; known by its name afterwards."""
    variant, *ends = ordered_variants(request)
    symbol = found_symbol(variant)

    def compile_it() -> None:
        for each in (*ends, variant):
            entry_address(each)
        name = name_of(variant)
        if name is not None:
            remember(cache_folder(), name, symbol)

    return symbol, compile_it


def _loop(request: str) -> Order:
    program = read_program(request.removeprefix(LOOP))
    symbol = found_loop_symbol(program)

    def compile_it() -> None:
        scalar_loop_address(program)
        remember(cache_folder(), program.text(), symbol)

    return symbol, compile_it


def _entry(request: str) -> Order:
    variant = requested(request)
    return found_symbol(variant), lambda: variant_code(variant)


def _part(request: str) -> Order:
    part = requested_part(request)
    return part_symbol(part), part.code


if __name__ == "__main__":
    main()
    sys.exit(0)
