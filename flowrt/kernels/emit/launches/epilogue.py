"""The machine code of `EpilogueStep`: an entry that runs a product unit by unit, and another step on what each made."""

from __future__ import annotations

from flowrt.kernels.composite.epilogue import AT, ENTRY, EPILOGUE, PRODUCT, ROWS
from flowrt.kernels.emit.entries import call_entry, object_code, word_at


def _units(bases: int, block: int, begin: int, end: int) -> None:
    product, product_at = word_at(block, PRODUCT + ENTRY), block + 8 * word_at(block, PRODUCT + AT)
    epilogue, epilogue_at = word_at(block, EPILOGUE + ENTRY), block + 8 * word_at(block, EPILOGUE + AT)
    m, n, rows = word_at(block, ROWS), word_at(block, ROWS + 1), word_at(block, ROWS + 2)
    count = (m + rows - 1) // rows
    for unit in range(begin, end):
        call_entry(product, bases, product_at, unit, unit + 1)
        matrix, row = unit // count, unit % count * rows
        first = (matrix * m + row) * n
        call_entry(epilogue, bases, epilogue_at, first, first + min(rows, m - row) * n)


def emit_epilogue(symbol: str) -> bytes:
    """The object code of that entry."""
    return object_code(_units, symbol)
