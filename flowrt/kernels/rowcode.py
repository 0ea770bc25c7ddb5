"""The machine code of what `flowrt.kernels.rowmoves` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

if TYPE_CHECKING:
    from flowrt.kernels.micro import Stub
    from flowrt.kernels.tile import _Code

LINE = 64  # bytes; what follows a row's first two lines, the machine asks for by itself
_WORD, _LANE, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_ZERO = ir.Constant(_WORD, 0)


def _asking(to_write: int) -> Callable[[_Code, Stub, Sequence[Any]], None]:
    def ask(code: _Code, stub: Stub, words: Sequence[Any]) -> None:
        builder, (address, nbytes) = code.builder, words
        last = builder.sub(builder.add(address, nbytes), ir.Constant(_WORD, 1))
        second = builder.add(address, ir.Constant(_WORD, LINE))
        _prefetch(code, address, to_write)
        _prefetch(code, builder.select(builder.icmp_unsigned("<", second, last), second, last), to_write)

    return ask


def _prefetch(code: _Code, address: Any, to_write: int) -> None:
    pointer = code.pointer(address, _BYTE)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _LANE, _LANE, _LANE])
    function = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0i8")
    code.builder.call(function, [pointer, *(ir.Constant(_LANE, word) for word in (to_write, 3, 1))])


def _move_bytes(code: _Code, stub: Stub, words: Sequence[Any]) -> None:
    source, target, nbytes = words
    pointers = [code.pointer(target, _BYTE), code.pointer(source, _BYTE)]
    cgutils.raw_memcpy(code.builder, *pointers, nbytes, 1)


def _add_rows(code: _Code, stub: Stub, words: Sequence[Any]) -> None:
    """Columns in blocks of all vectors, then of one, then one by one."""
    columns, done = words[5], _ZERO
    for lanes, vectors in ((code.lanes, stub.vectors), (code.lanes, 1), (1, 1)):
        each = ir.Constant(_WORD, lanes * vectors)
        blocks = code.builder.sdiv(code.builder.sub(columns, done), each)
        with code.steps(blocks, [done], [each]) as (column,):
            _add_block(code, stub.rows, words, column, lanes, vectors)
        done = code.builder.add(done, code.builder.mul(blocks, each))


def _add_block(code: _Code, index_bytes: int, words: Sequence[Any], column: Any, lanes: int, vectors: int) -> None:
    a, step, rows, count, y, _, start = words
    builder = code.builder
    kind = ir.VectorType(code.element, lanes)
    add = builder.add if isinstance(code.element, ir.IntType) else builder.fadd

    def at(place: Any, v: int) -> Any:
        return builder.bitcast(code.at(place, v * lanes), kind.as_pointer())

    target, source = code.at(code.pointer(y), column), code.at(code.pointer(a), column)
    numbers = code.pointer(rows, ir.IntType(8 * index_bytes))
    sums = [cgutils.alloca_once(builder, kind) for _ in range(vectors)]
    for total in sums:
        builder.store(ir.Constant(kind, None), total)
    with builder.if_then(builder.icmp_signed("!=", start, _ZERO)):
        for v, total in enumerate(sums):
            builder.store(builder.load(at(target, v), align=code.size), total)
    with code.steps(count, [_ZERO], [ir.Constant(_WORD, 1)]) as (j,):
        number = (
            builder.sext(builder.load(code.at(numbers, j)), _WORD)
            if index_bytes < 8
            else builder.load(code.at(numbers, j))
        )
        row = code.at(source, builder.mul(number, step))
        for v, total in enumerate(sums):
            builder.store(add(builder.load(total), builder.load(at(row, v), align=code.size)), total)
    for v, total in enumerate(sums):
        builder.store(builder.load(total), at(target, v), align=code.size)


ROW_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {  # with how many words each takes
    "fetch": (2, _asking(0)),
    "claim": (2, _asking(1)),
    "move_bytes": (3, _move_bytes),
    "add_rows": (7, _add_rows),
}
