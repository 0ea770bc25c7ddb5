"""The helper process: compiles the orders that come in by lines, each into the cache, and says when it is there.

Run by `background` as ``python -m flowrt.kernels.compiler``. It ends when its input does, or after a while without
orders, since a compiler takes much memory.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.base.errors import FlowrtError
from flowrt.kernels.composite.scalar_loop import LOOP, found_loop_symbol, read_program, scalar_loop_address
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.variants import ENTRY, entry_address, found_symbol, name_of, requested, variant_code
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.names import remember
from flowrt.kernels.store.objects import is_stored
from flowrt.kernels.store.parts import PART, part_code, part_symbol, requested_part

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
    kinds = {LOOP: _compile_loop, ENTRY: _compile_entry, PART: _compile_part}
    compile_ordered = next((kinds[kind] for kind in kinds if request.startswith(kind)), _compile_fused)
    try:
        if not compile_ordered(symbol, request):
            return "the parent's kernels differ from these"
    except (FlowrtError, ValueError, TypeError, LookupError) as error:
        return " ".join(str(error).split()) or repr(error)
    return "" if is_stored(symbol) else "the cache cannot be written"


def _compile_fused(symbol: str, request: str) -> bool:
    """Whether that symbol is what is asked for; if so, it and what it needs is now compiled, and known by its name."""
    variant, *ends = ordered_variants(request)
    if found_symbol(variant) != symbol:
        return False
    for each in (*ends, variant):
        entry_address(each)
    name = name_of(variant)
    if name is not None:
        remember(cache_folder(), name, symbol)
    return True


def _compile_loop(symbol: str, request: str) -> bool:
    program = read_program(request.removeprefix(LOOP))
    if found_loop_symbol(program) != symbol:
        return False
    scalar_loop_address(program)
    remember(cache_folder(), program.text(), symbol)
    return True


def _compile_entry(symbol: str, request: str) -> bool:
    variant = requested(request)
    if found_symbol(variant) != symbol:
        return False
    variant_code(variant)
    return True


def _compile_part(symbol: str, request: str) -> bool:
    part = requested_part(request)
    if part_symbol(part) != symbol:
        return False
    part_code(part)
    return True


if __name__ == "__main__":
    main()
    sys.exit(0)
