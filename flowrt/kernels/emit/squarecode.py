"""The machine code of what `flowrt.kernels.tiles.squares` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

if TYPE_CHECKING:
    from flowrt.kernels.emit.vectors import VectorCode
    from flowrt.kernels.tiles.micro import Stub

_WORD = ir.IntType(64)


def _transpose_part(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, across, read, target, below, written = words
    builder, lanes = code.builder, min(code.lanes, stub.rows)
    code = type(code)(builder, code.element, code.size, ir.VectorType(code.element, lanes))
    first, out = code.pointer(source), code.pointer(target)
    lines = [cgutils.alloca_once_value(builder, ir.Constant(code.vector, None)) for _ in range(lanes)]
    for n, line in enumerate(lines):
        with builder.if_then(builder.icmp_signed(">", read, ir.Constant(_WORD, n))):
            builder.store(code.load(code.at(first, builder.mul(across, ir.Constant(_WORD, n)))), line)
    rows = [builder.load(line) for line in lines]
    half = 1
    while half < lanes:  # swap the off-diagonal blocks of every square of twice ``half``
        transposed = list(rows)
        for i in range(lanes):
            if not i & half:
                low = [j if not j & half else lanes + j - half for j in range(lanes)]
                high = [j + half if not j & half else lanes + j for j in range(lanes)]
                transposed[i] = code.shuffle(rows[i], rows[i + half], low)
                transposed[i + half] = code.shuffle(rows[i], rows[i + half], high)
        rows, half = transposed, 2 * half
    for n, row in enumerate(rows):
        with builder.if_then(builder.icmp_signed(">", written, ir.Constant(_WORD, n))):
            code.store(row, code.at(out, builder.mul(below, ir.Constant(_WORD, n))))


SQUARE_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {"transpose_part": (6, _transpose_part)}
"""With how many words each takes."""
