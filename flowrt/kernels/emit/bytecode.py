"""The machine code of what `flowrt.kernels.tiles.bytes` names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

if TYPE_CHECKING:
    from flowrt.kernels.emit.vectors import VectorCode
    from flowrt.kernels.tiles.micro import Stub

TOGETHER = 16  # bytes of a row that are multiplied at once: as int16 they fill a vector of 32 bytes
_WORD, _LANE, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_BYTES, _SHORTS, _PRODUCTS = (ir.VectorType(ir.IntType(bits), TOGETHER) for bits in (8, 16, 32))
_SUMS = ir.VectorType(_LANE, TOGETHER // 2)


def _byte_dots(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    """Sums in registers, of products of two neighbours each: one instruction, where the machine has pmaddwd."""
    a, b, depth, c, across = words
    builder, stride = code.builder, ir.Constant(_WORD, TOGETHER)
    left = [_row(code, a, depth, r) for r in range(stub.rows)]
    right = [_row(code, b, depth, q) for q in range(stub.vectors)]
    cells = list(itertools.product(range(stub.rows), range(stub.vectors)))
    sums = {cell: cgutils.alloca_once(builder, _SUMS) for cell in cells}
    totals = {cell: cgutils.alloca_once(builder, _LANE) for cell in cells}
    for each in sums.values():
        builder.store(ir.Constant(_SUMS, [0] * _SUMS.count), each)
    turns = builder.udiv(depth, stride)
    with code.steps(turns, [ir.Constant(_WORD, 0)], [stride]) as (p,):
        columns = [_widened(code, row, p) for row in right]
        for r, row in enumerate(left):
            factors = _widened(code, row, p)
            for q, column in enumerate(columns):
                added = _in_pairs(code, builder.mul(factors, column))
                builder.store(builder.add(builder.load(sums[r, q]), added), sums[r, q])
    for cell in cells:
        parts = [builder.extract_element(builder.load(sums[cell]), ir.Constant(_LANE, i)) for i in range(_SUMS.count)]
        while len(parts) > 1:
            parts = [builder.add(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        builder.store(parts[0], totals[cell])
    done = builder.mul(turns, stride)
    with code.steps(builder.sub(depth, done), [done], [ir.Constant(_WORD, 1)]) as (p,):
        for r, q in cells:
            x, z = (builder.sext(builder.load(code.at(row, p)), _LANE) for row in (left[r], right[q]))
            builder.store(builder.add(builder.load(totals[r, q]), builder.mul(x, z)), totals[r, q])
    for (r, q), total in totals.items():
        place = builder.add(c, builder.mul(across, ir.Constant(_WORD, r)))
        builder.store(builder.load(total), code.at(code.pointer(place, _LANE), q))


def _row(code: VectorCode, base: Any, nbytes: Any, number: int) -> Any:
    return code.pointer(code.builder.add(base, code.builder.mul(nbytes, ir.Constant(_WORD, number))), _BYTE)


def _widened(code: VectorCode, row: Any, p: Any) -> Any:
    """Bytes from the ``p``-th on, as int32 of which LLVM knows that they are int16."""
    place = code.builder.bitcast(code.at(row, p), _BYTES.as_pointer())
    found = code.builder.load(place, align=1)
    return code.builder.sext(code.builder.sext(found, _SHORTS), _PRODUCTS)


def _in_pairs(code: VectorCode, products: Any) -> Any:
    even, odd = (code.shuffle(products, products, list(range(first, TOGETHER, 2))) for first in (0, 1))
    return code.builder.add(even, odd)


BYTE_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {"byte_dots": (5, _byte_dots)}
