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
from flowrt.errors import FlowrtError
from flowrt.kernels.fused import ordered_variant
from flowrt.kernels.names import remember
from flowrt.kernels.store import cache_folder, entry_address, found_symbol, is_stored, name_of

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
    try:
        variant = ordered_variant(request)
        if found_symbol(variant) != symbol:
            return "the parent's kernels differ from these"
        entry_address(variant)
        name = name_of(variant)
        if name is not None:
            remember(cache_folder(), name, symbol)
    except (FlowrtError, ValueError, TypeError, KeyError) as error:
        return " ".join(str(error).split()) or repr(error)
    return "" if is_stored(symbol) else "the cache cannot be written"


if __name__ == "__main__":
    main()
    sys.exit(0)
