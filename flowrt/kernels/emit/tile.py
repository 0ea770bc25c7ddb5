"""The machine code of register tiles: what `flowrt.kernels.tiles.micro` names, as LLVM with explicit vectors.

A tile is an object of its own; a stub is put where a kernel calls it.

LLVM splits vectors wider than the machine's, so every width compiles and computes the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from flowrt.kernels.emit.lowering import written_object
from flowrt.kernels.emit.rowcode import ROW_EMITTERS
from flowrt.kernels.emit.vectors import VectorCode
from flowrt.kernels.tiles.micro import START_BIAS, START_STORED, Stub

_WORD, _LANE = ir.IntType(64), ir.IntType(32)


def emit_tile(kind: str, rows: str, vectors: str, width: str, dtype: str, symbol: str) -> bytes:
    """The object code of a tile (see `micro.Tile`): a C function ``symbol`` of so many integers as its kind takes."""
    count, emitter = _EMITTERS[kind]
    size = np.dtype(dtype).itemsize
    element = {4: ir.FloatType(), 8: ir.DoubleType()}[size]
    vector = ir.VectorType(element, int(width) // size)
    stub = Stub(kind, int(rows), int(vectors), int(width))

    def write(module: Any) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * count), symbol)
        builder = ir.IRBuilder(function.append_basic_block())
        emitter(VectorCode(builder, element, size, vector), stub, function.args)
        builder.ret_void()

    return written_object(write, symbol)


def implementation(stub: Stub) -> Any:
    """The intrinsic that stands for ``stub``: its first argument is an array of the dtype, the others are integers."""
    if stub.kind == "call":
        return _call
    count, emitter = _EMITTERS[stub.kind]

    @intrinsic
    def call(typing_context: Any, like: Any, words: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_value_type(like.dtype)
            size = context.get_abi_sizeof(element)
            vector = ir.VectorType(element, max(stub.width // size, 1))
            emitter(VectorCode(builder, element, size, vector), stub, cgutils.unpack_tuple(builder, args[1], count))
            return context.get_dummy_value()

        return types.void(like, types.UniTuple(types.intp, count)), codegen

    return call


@intrinsic
def _call(typing_context: Any, address: Any, words: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(builder, args[1], len(words))
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(given))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, len(words))), codegen


def _tile(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    a, rows, b, taps, count, depth, a_step, b_step, c, places, start, bias, floor = words
    builder, lanes = code.builder, code.lanes
    a, b, c, bias = (code.pointer(address) for address in (a, b, c, bias))
    tables = [code.pointer(address, _WORD) for address in (rows, places, taps)]
    row = [code.at(a, builder.load(code.at(tables[0], r))) for r in range(stub.rows)]
    zero, nothing = ir.Constant(_WORD, 0), ir.Constant(code.vector, [0.0] * lanes)
    together = 2 if stub.kind == "tile" and stub.vectors == 1 else 1  # terms with sums apart, to have enough of those
    cells = list(itertools.product(range(stub.rows), range(stub.vectors)))
    sums = [{cell: cgutils.alloca_once(builder, code.vector) for cell in cells} for _ in range(together)]

    def out(r: int) -> Any:
        return code.at(c, builder.load(code.at(tables[1], r)))

    def each(value: Callable[[int, int], Any], of: int = 0) -> None:
        for cell in cells:
            builder.store(value(*cell), sums[of][cell])

    stored = builder.icmp_signed("==", start, ir.Constant(_WORD, START_STORED))
    for of in range(together):
        each(lambda r, v: nothing, of)
    with builder.if_then(builder.icmp_signed("==", start, ir.Constant(_WORD, START_BIAS))):
        each(lambda r, v: code.load(code.at(bias, v * lanes)))
    for r in range(stub.rows):  # what is stored there is far, and needed only when the sums are done
        code.prefetch(out(r))
        code.prefetch(code.at(out(r), stub.vectors * lanes - 1))
    factor = ir.Constant(_WORD, together)
    turns, steps = builder.sdiv(depth, factor), [builder.mul(step, factor) for step in (a_step, b_step)]
    done = [builder.mul(turns, step) for step in steps]
    with code.steps(count, [zero], [ir.Constant(_WORD, 2)]) as (tap,):
        here = [code.at(p, builder.load(code.at(tables[2], tap))) for p in row]
        right = code.at(b, builder.load(code.at(tables[2], tap, 1)))
        with code.steps(turns, [zero, zero], steps) as (ap, bp):
            for of in range(together):
                _multiply(code, stub, [code.at(p, ap) for p in here], code.at(right, bp), sums[of])
                ap, bp = code.opaque(builder.add(ap, a_step)), code.opaque(builder.add(bp, b_step))
        if together > 1:
            with builder.if_then(builder.icmp_signed("!=", builder.srem(depth, factor), zero)):
                _multiply(code, stub, [code.at(p, done[0]) for p in here], code.at(right, done[1]), sums[0])
    if together > 1:
        each(lambda r, v: builder.fadd(builder.load(sums[0][r, v]), builder.load(sums[1][r, v])))
    with builder.if_then(stored):
        each(lambda r, v: builder.fadd(builder.load(sums[0][r, v]), code.load(code.at(out(r), v * lanes))))
    with builder.if_then(builder.icmp_signed("!=", floor, zero)):
        each(lambda r, v: code.not_negative(builder.load(sums[0][r, v])))
    for r in range(stub.rows):
        place = out(r)
        for v in range(stub.vectors):
            code.store(builder.load(sums[0][r, v]), code.at(place, v * lanes))


def _multiply(
    code: VectorCode, stub: Stub, here: Sequence[Any], right: Any, sums: Mapping[tuple[int, int], Any]
) -> None:
    """Add one term of each row's product with the vectors at ``right`` to the sums."""
    own = stub.kind != "tile"  # each column has a left operand of its own

    def part(place: Any, v: int) -> Any:
        return code.load(code.at(place, v * code.lanes))

    def add(r: int, v: int, factor: Any, vector: Any) -> None:
        place = sums[r, v]
        code.builder.store(code.multiply_add(factor, vector, code.builder.load(place)), place)

    if stub.vectors > stub.rows and not own:  # then there are registers for a factor of each row
        factors = [code.broadcast(place) for place in here]
        for v in range(stub.vectors):
            vector = part(right, v)
            for r, factor in enumerate(factors):
                add(r, v, factor, vector)
        return
    vectors = [part(right, v) for v in range(stub.vectors)]
    for r, place in enumerate(here):
        shared = None if own else code.broadcast(place)
        for v in range(stub.vectors):
            add(r, v, shared or part(place, v), vectors[v])


def _dots(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    a, b, step, c, across, start, depth = words
    builder, zero = code.builder, ir.Constant(_WORD, 0)
    a, b, c = (code.pointer(address) for address in (a, b, c))
    rows = [code.at(b, builder.mul(step, ir.Constant(_WORD, r))) for r in range(stub.rows)]
    places = [code.at(c, builder.mul(across, ir.Constant(_WORD, r))) for r in range(stub.rows)]
    sums = [[cgutils.alloca_once(builder, code.vector) for _ in range(stub.vectors)] for _ in rows]
    totals = [cgutils.alloca_once(builder, code.element) for _ in rows]
    for each in itertools.chain(*sums):
        builder.store(ir.Constant(code.vector, [0.0] * code.lanes), each)
    stride = code.lanes * stub.vectors
    turns = builder.sdiv(depth, ir.Constant(_WORD, stride))
    with code.steps(turns, [zero], [ir.Constant(_WORD, stride)]) as (p,):
        factors = [code.load(code.at(a, p, v * code.lanes)) for v in range(stub.vectors)]
        for row, each in zip(rows, sums, strict=True):
            for v, factor in enumerate(factors):
                vector = code.load(code.at(row, p, v * code.lanes))
                builder.store(code.multiply_add(factor, vector, builder.load(each[v])), each[v])
    stored = builder.icmp_signed("==", start, ir.Constant(_WORD, START_STORED))
    for place, each, total in zip(places, sums, totals, strict=True):
        parts = [
            builder.extract_element(builder.load(v), ir.Constant(_LANE, i)) for i in range(code.lanes) for v in each
        ]
        while len(parts) > 1:
            parts = [builder.fadd(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        builder.store(parts[0], total)
        with builder.if_then(stored):
            builder.store(builder.fadd(builder.load(place), parts[0]), total)
    done = builder.mul(turns, ir.Constant(_WORD, stride))
    with code.steps(builder.sub(depth, done), [done], [ir.Constant(_WORD, 1)]) as (p,):
        factor = builder.load(code.at(a, p))
        for row, total in zip(rows, totals, strict=True):
            builder.store(builder.fadd(builder.load(total), builder.fmul(factor, builder.load(code.at(row, p)))), total)
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(total), place)


def _copy(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, step, target, target_step, count = words
    zero = ir.Constant(_WORD, 0)
    source, target = code.pointer(source), code.pointer(target)
    with code.steps(count, [zero, zero], [step, target_step]) as (s, t):
        for v in range(stub.vectors):
            code.store(code.load(code.at(source, s, v * code.lanes)), code.at(target, t, v * code.lanes))


def _transpose(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, step, target, target_step = words
    source, target = code.pointer(source), code.pointer(target)
    rows = [code.load(code.at(source, code.builder.mul(step, ir.Constant(_WORD, i)))) for i in range(code.lanes)]
    half = 1
    while half < code.lanes:  # swap the off-diagonal blocks of every square of twice ``half``
        turned = list(rows)
        for i in range(code.lanes):
            if not i & half:
                low = [j if not j & half else code.lanes + j - half for j in range(code.lanes)]
                high = [j + half if not j & half else code.lanes + j for j in range(code.lanes)]
                turned[i] = code.shuffle(rows[i], rows[i + half], low)
                turned[i + half] = code.shuffle(rows[i], rows[i + half], high)
        rows, half = turned, 2 * half
    for i, value in enumerate(rows):
        code.store(value, code.at(target, code.builder.mul(target_step, ir.Constant(_WORD, i))))


def _clear(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    builder, byte, flag = code.builder, ir.IntType(8), ir.IntType(1)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), byte, _WORD, flag])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memset.p0i8.i64")
    nbytes = builder.mul(words[1], ir.Constant(_WORD, code.size))
    builder.call(function, [code.pointer(words[0], byte), ir.Constant(byte, 0), nbytes, ir.Constant(flag, 0)])


def _move(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, step, across, target, target_step, rows, columns = words
    zero, one = ir.Constant(_WORD, 0), ir.Constant(_WORD, 1)
    source, target = code.pointer(source), code.pointer(target)
    with code.steps(rows, [zero, zero], [step, target_step]) as (s, t):
        from_row, to_row = code.at(source, s), code.at(target, t)
        with code.steps(columns, [zero, zero], [across, one]) as (i, j):
            code.builder.store(code.builder.load(code.at(from_row, i)), code.at(to_row, j))


def _move_listed(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, places, target, others, rows, columns = words
    zero, one = ir.Constant(_WORD, 0), ir.Constant(_WORD, 1)
    source, target = code.pointer(source), code.pointer(target)
    places, others = code.pointer(places, _WORD), code.pointer(others, _WORD)
    with code.steps(rows, [zero], [one]) as (r,):
        from_row = code.at(source, code.builder.load(code.at(places, r)))
        to_row = code.at(target, code.builder.load(code.at(others, r)))
        with code.steps(columns, [zero], [one]) as (j,):
            code.builder.store(code.builder.load(code.at(from_row, j)), code.at(to_row, j))


def _spread(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, step, target, target_step, count, across, target_across, parts, vectors = words
    zero, lanes = ir.Constant(_WORD, 0), ir.Constant(_WORD, code.lanes)
    source, target = code.pointer(source), code.pointer(target)
    with code.steps(count, [zero, zero], [step, target_step]) as (s, t):
        from_row, to_row = code.at(source, s), code.at(target, t)
        with code.steps(parts, [zero, zero], [across, target_across]) as (i, j):
            here, there = code.at(from_row, i), code.at(to_row, j)
            with code.steps(vectors, [zero], [lanes]) as (k,):
                code.store(code.load(code.at(here, k)), code.at(there, k))


def _put(code: VectorCode, stub: Stub, words: Sequence[Any]) -> None:
    source, target, across, count, bias, floor = words
    builder, zero = code.builder, ir.Constant(_WORD, 0)
    more, nothing = cgutils.alloca_once(builder, code.element), ir.Constant(code.element, 0.0)
    builder.store(ir.Constant(code.element, -0.0), more)  # which changes nothing that it is added to
    with builder.if_then(builder.icmp_signed("!=", bias, zero)):
        builder.store(builder.load(code.pointer(bias)), more)
    biased, floored = builder.load(more), builder.icmp_signed("!=", floor, zero)
    source, target = code.pointer(source), code.pointer(target)
    with code.steps(count, [zero, zero], [ir.Constant(_WORD, 1), across]) as (i, j):
        value = builder.fadd(builder.load(code.at(source, i)), biased)
        dropped = builder.and_(floored, builder.fcmp_ordered("<", value, nothing))
        builder.store(builder.select(dropped, nothing, value), code.at(target, j))


_EMITTERS: dict[str, tuple[int, Callable[..., None]]] = {  # with how many words each takes
    "tile": (13, _tile),
    "beside": (13, _tile),
    "dots": (7, _dots),
    "copy": (5, _copy),
    "transpose": (4, _transpose),
    "clear": (2, _clear),
    "move": (7, _move),
    "move_listed": (6, _move_listed),
    "spread": (9, _spread),
    "put": (6, _put),
    **ROW_EMITTERS,
}
