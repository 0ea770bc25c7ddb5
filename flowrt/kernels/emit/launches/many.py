"""The machine code of `ManyStep`: an entry that runs the steps in its block."""

from __future__ import annotations

from flowrt.kernels.composite.many import AT, ENTRY, ROW, UNITS
from flowrt.kernels.emit.entries import call_entry, object_code, word_at


def _members(bases: int, block: int, begin: int, end: int) -> None:
    for number in range(begin, end):
        row = block + 8 * ROW * number
        call_entry(word_at(row, ENTRY), bases, block + 8 * word_at(row, AT), 0, word_at(row, UNITS))


def emit_many(symbol: str) -> bytes:
    """The object code of that entry."""
    return object_code(_members, symbol)
