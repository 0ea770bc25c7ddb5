"""The machine code of what `flowrt.kernels.tiles.rowmoves` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils

from flowrt.kernels.emit.bytecode import BYTE_EMITTERS
from flowrt.kernels.emit.reductions import GROUP, add_groups, add_lanes, no_lanes
from flowrt.kernels.emit.sortcode import SORT_EMITTERS
from flowrt.kernels.emit.squarecode import SQUARE_EMITTERS

if TYPE_CHECKING:
    from flowrt.kernels.emit.vectors import VectorCode
    from flowrt.kernels.tiles.micro import Stub

LINE = 64  # bytes; what follows a row's first two lines, the machine asks for by itself
EARLY = 1024  # bytes: so far ahead a sum asks for what it reads, which may lie in the next row
_WORD, _LANE, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_ZERO, _ONE, _FOUR = (ir.Constant(_WORD, n) for n in (0, 1, 4))
_AHEAD = 12  # as `rowmoves.AHEAD`

# From so many bytes to so many a row is moved as parts of so many, which overlap where it is shorter
PARTS = (
    *((n, n, n, 1) for n in (1, 2, 4, 8, 16, 32)),
    *((3, 3, 2, 2), (5, 7, 4, 2), (9, 15, 8, 2), (17, 31, 16, 2), (33, 63, 32, 2), (64, 127, 32, 4)),
)
LONG = 128  # bytes from which on C's library moves a row


def _asking(to_write: int) -> Callable[[VectorCode, Stub, Sequence[Any]], None]:
    def ask(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
        builder, (address, nbytes) = code.builder, words
        last = builder.sub(builder.add(address, nbytes), ir.Constant(_WORD, 1))
        second = builder.add(address, ir.Constant(_WORD, LINE))
        _prefetch(code, address, to_write)
        _prefetch(code, builder.select(builder.icmp_unsigned("<", second, last), second, last), to_write)

    return ask


def _prefetch(code: VectorCode, address: Any, to_write: int) -> None:
    pointer = code.pointer(address, _BYTE)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _LANE, _LANE, _LANE])
    function = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0i8")
    code.builder.call(function, [pointer, *(ir.Constant(_LANE, word) for word in (to_write, 3, 1))])


def _move_bytes(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    _copy(code, *words)


def _copy(code: VectorCode, source: Any, target: Any, nbytes: Any) -> None:
    pointers = [code.pointer(target, _BYTE), code.pointer(source, _BYTE)]
    cgutils.raw_memcpy(code.builder, *pointers, nbytes, 1)


def _move_rows(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, down, target, below, nbytes, rows = words

    def move_all(move: Callable[[Any, Any], None]) -> None:
        with code.steps(rows, [source, target], [down, below]) as (one, other):
            move(one, other)

    _by_length(code, nbytes, move_all)


def _gather_rows(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    table, numbers, target, nbytes, count = words
    builder, kind = code.builder, ir.IntType(8 * stub.rows)
    first, last = code.pointer(numbers, kind), builder.sub(count, _ONE)

    def row(place: Any) -> Any:
        number = builder.load(code.at(first, place))
        return builder.add(table, builder.mul(builder.sext(number, _WORD) if stub.rows < 8 else number, nbytes))

    def move_all(move: Callable[[Any, Any], None]) -> None:
        with code.steps(count, [_ZERO, target], [_ONE, nbytes]) as (j, other):
            later = builder.add(j, ir.Constant(_WORD, _AHEAD))
            _prefetch(code, row(builder.select(builder.icmp_signed("<", later, last), later, last)), 0)
            move(row(j), other)

    _by_length(code, nbytes, move_all)


def _by_length(code: VectorCode, nbytes: Any, move_all: Callable[[Callable[[Any, Any], None]], None]) -> None:
    """Emit a loop for each class of lengths, given how a row of such is moved from one address to another."""
    builder = code.builder

    def between(low: int, high: int) -> Any:
        above = builder.icmp_signed(">=", nbytes, ir.Constant(_WORD, low))
        return builder.and_(above, builder.icmp_signed("<=", nbytes, ir.Constant(_WORD, high)))

    for low, high, size, parts in PARTS:
        with builder.if_then(between(low, high)):
            move_all(partial(_move_parts, code, nbytes, size, parts))
    with builder.if_then(builder.icmp_signed(">=", nbytes, ir.Constant(_WORD, LONG))):
        move_all(lambda source, target: _copy(code, source, target, nbytes))


def _move_parts(code: VectorCode, nbytes: Any, size: int, parts: int, source: Any, target: Any) -> None:
    """Half of the parts from the row's beginning on, the others up to its end; all are read before one is written."""
    builder = code.builder
    kind = ir.IntType(8 * size) if size <= 8 else ir.VectorType(_BYTE, size)
    ahead = [ir.Constant(_WORD, n * size) for n in range((parts + 1) // 2)]
    offsets = ahead + [builder.sub(nbytes, ir.Constant(_WORD, n * size)) for n in range(1, parts // 2 + 1)]
    found = [builder.load(code.pointer(builder.add(source, offset), kind), align=1) for offset in offsets]
    for value, offset in zip(found, offsets, strict=True):
        builder.store(value, code.pointer(builder.add(target, offset), kind), align=1)


def _add_row(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    """Groups of vectors, then single vectors, then entries."""
    builder, (a, count, total) = code.builder, words
    if not isinstance(code.element, ir.FloatType):
        return
    lanes, row, place = no_lanes(builder), code.pointer(a), code.pointer(total, ir.DoubleType())
    left, each = builder.urem(count, GROUP), ir.Constant(_WORD, lanes.type.pointee.count)
    with code.steps(builder.udiv(count, GROUP), [_ZERO], [GROUP]) as (t,):
        for line in range(0, 4 * GROUP.constant, LINE):
            code.prefetch(code.at(row, t, (EARLY + line) // 4))
        add_groups(builder, code.at(row, t), GROUP, lanes)
    some = ir.VectorType(code.element, lanes.type.pointee.count)
    with code.steps(builder.udiv(left, each), [builder.sub(count, left)], [each]) as (t,):
        singles = builder.load(builder.bitcast(code.at(row, t), some.as_pointer()), align=code.size)
        builder.store(builder.fadd(builder.load(lanes), builder.fpext(singles, lanes.type.pointee)), lanes)
    builder.store(add_lanes(builder, lanes), place)
    left = builder.urem(count, each)
    with code.steps(left, [builder.sub(count, left)], [ir.Constant(_WORD, 1)]) as (t,):
        single = builder.fpext(builder.load(code.at(row, t)), ir.DoubleType())
        builder.store(builder.fadd(builder.load(place), single), place)


def _in_blocks(code: VectorCode, stub: Stub, columns: Any, add: Callable[[Any, int, int], None]) -> None:
    """Have all columns of some rows added up: in blocks of all vectors, then of one, then one by one.

    ``add`` is given a block's first column, and how many lanes its vectors have, and how many these are.
    """
    done = _ZERO
    for lanes, vectors in ((code.lanes, stub.vectors), (code.lanes, 1), (1, 1)):
        each = ir.Constant(_WORD, lanes * vectors)
        blocks = code.builder.sdiv(code.builder.sub(columns, done), each)
        with code.steps(blocks, [done], [each]) as (column,):
            add(column, lanes, vectors)
        done = code.builder.add(done, code.builder.mul(blocks, each))


class _Sums:
    """Sums of one ``kind``, side by side, that are held in registers; they begin as zeros."""

    def __init__(self, builder: Any, kind: ir.VectorType, count: int) -> None:
        self._builder, self._kind = builder, kind
        self._held = [cgutils.alloca_once(builder, kind) for _ in range(count)]
        for held in self._held:
            builder.store(ir.Constant(kind, None), held)

    def add(self, number: int, more: Any) -> None:
        held, builder = self._held[number], self._builder
        plus = builder.add if isinstance(self._kind.element, ir.IntType) else builder.fadd
        builder.store(plus(builder.load(held), more), held)

    def load(self, target: Any) -> None:
        """Begin with what lies at ``target``, the address of the first entry of all."""
        for place, held in zip(self._places(target), self._held, strict=True):
            self._builder.store(self._builder.load(place, align=_align(self._kind)), held)

    def store(self, target: Any) -> None:
        for place, held in zip(self._places(target), self._held, strict=True):
            self._builder.store(self._builder.load(held), place, align=_align(self._kind))

    def _places(self, target: Any) -> list[Any]:
        return [_vector_at(self._builder, target, self._kind, number) for number in range(len(self._held))]


def _vector_at(builder: Any, row: Any, kind: ir.VectorType, number: int) -> Any:
    return builder.bitcast(builder.gep(row, [ir.Constant(_WORD, number * kind.count)]), kind.as_pointer())


def _align(kind: ir.VectorType) -> int:
    """Vectors lie where their entries may."""
    return 8 if isinstance(kind.element, ir.DoubleType) else 4


def _add_rows(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    a, step, rows, count, y, columns = words
    builder, numbers = code.builder, code.pointer(rows, ir.IntType(8 * stub.rows))

    def add(column: Any, lanes: int, vectors: int) -> None:
        kind = ir.VectorType(code.element, lanes)
        sums, source = _Sums(builder, kind, vectors), code.at(code.pointer(a), column)
        with code.steps(count, [_ZERO], [_ONE]) as (j,):
            number = builder.load(code.at(numbers, j))
            row = code.at(source, builder.mul(builder.sext(number, _WORD) if stub.rows < 8 else number, step))
            for v in range(vectors):
                sums.add(v, builder.load(_vector_at(builder, row, kind, v), align=code.size))
        sums.store(code.at(code.pointer(y), column))

    _in_blocks(code, stub, columns, add)


def _add_fours(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    rows, count, total, columns, start = words
    builder, first = code.builder, code.pointer(rows, _WORD)
    if isinstance(code.element, ir.IntType):
        return

    def add(column: Any, lanes: int, vectors: int) -> None:
        narrow, wide = ir.VectorType(code.element, lanes), ir.VectorType(ir.DoubleType(), lanes)
        sums, target = _Sums(builder, wide, vectors), code.at(code.pointer(total, ir.DoubleType()), column)
        with builder.if_then(builder.icmp_signed("!=", start, _ZERO)):
            sums.load(target)

        def row(j: Any) -> Any:
            return code.at(code.pointer(builder.load(code.at(first, j))), column)

        def entries(row: Any, v: int) -> Any:
            found = builder.load(_vector_at(builder, row, narrow, v), align=code.size)
            return builder.fpext(found, wide) if narrow != wide else found

        left = builder.urem(count, _FOUR)
        with code.steps(builder.udiv(count, _FOUR), [_ZERO], [_FOUR]) as (j,):
            some = [row(builder.add(j, ir.Constant(_WORD, n))) for n in range(4)]
            for v in range(vectors):
                one, two, three, four = (entries(each, v) for each in some)
                sums.add(v, builder.fadd(builder.fadd(one, two), builder.fadd(three, four)))
        with code.steps(left, [builder.sub(count, left)], [_ONE]) as (j,):
            single = row(j)
            for v in range(vectors):
                sums.add(v, entries(single, v))
        sums.store(target)

    _in_blocks(code, stub, columns, add)


def _add_to_rows(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    """Whole vectors of a row, then what is left of it entry by entry."""
    values, numbers, count, target, columns = words
    builder, kind = code.builder, ir.IntType(8 * stub.rows)
    source, first, table = code.pointer(values), code.pointer(numbers, kind), code.pointer(target)
    add = builder.add if isinstance(code.element, ir.IntType) else builder.fadd
    lanes = ir.Constant(_WORD, code.lanes)
    left = builder.urem(columns, lanes)
    with code.steps(count, [_ZERO, _ZERO], [_ONE, columns]) as (j, place):
        number = builder.load(code.at(first, j))
        row = code.at(table, builder.mul(builder.sext(number, _WORD) if stub.rows < 8 else number, columns))
        more = code.at(source, place)
        with code.steps(
            builder.udiv(columns, ir.Constant(_WORD, code.lanes)), [_ZERO], [ir.Constant(_WORD, code.lanes)]
        ) as (k,):
            code.store(add(code.load(code.at(row, k)), code.load(code.at(more, k))), code.at(row, k))
        with code.steps(left, [builder.sub(columns, left)], [_ONE]) as (k,):
            builder.store(add(builder.load(code.at(row, k)), builder.load(code.at(more, k))), code.at(row, k))


ROW_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {  # with how many words each takes
    "fetch": (2, _asking(0)),
    "claim": (2, _asking(1)),
    "move_bytes": (3, _move_bytes),
    "move_rows": (6, _move_rows),
    "gather_rows": (5, _gather_rows),
    "add_row": (3, _add_row),
    "add_rows": (6, _add_rows),
    "add_fours": (5, _add_fours),
    "add_to_rows": (5, _add_to_rows),
    **SORT_EMITTERS,
    **SQUARE_EMITTERS,
    **BYTE_EMITTERS,
}
