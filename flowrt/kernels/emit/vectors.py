"""LLVM code on vectors: what the machine code of tiles and of moves of rows is written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

_WORD, _LANE = ir.IntType(64), ir.IntType(32)


class VectorCode:
    """Loads, stores and arithmetic on vectors of one dtype; addresses are in bytes, steps in elements."""

    def __init__(self, builder: Any, element: Any, size: int, vector: Any) -> None:
        self.builder, self.element, self.size, self.vector = builder, element, size, vector
        self.lanes: int = vector.count

    def pointer(self, address: Any, kind: Any = None) -> Any:
        return self.builder.inttoptr(address, (kind or self.element).as_pointer())

    def at(self, pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            step = ir.Constant(_WORD, offset) if isinstance(offset, int) else offset
            pointer = self.builder.gep(pointer, [step])
        return pointer

    def load(self, pointer: Any) -> Any:
        place = self.builder.bitcast(pointer, self.vector.as_pointer())
        return self.builder.load(place, align=self.size)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, self.vector.as_pointer()), align=self.size)

    def broadcast(self, pointer: Any) -> Any:
        value = self.builder.load(pointer)
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_LANE, 0))
        return self.builder.shuffle_vector(first, undefined, self._mask([0] * self.lanes))

    def prefetch(self, pointer: Any) -> None:
        """Have the line at ``pointer`` brought near while something else is computed."""
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), flag, flag, flag])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        place = self.builder.bitcast(pointer, ir.IntType(8).as_pointer())
        self.builder.call(function, [place, *(ir.Constant(flag, n) for n in (0, 3, 1))])  # to read, all levels, data

    def opaque(self, value: Any) -> Any:
        """The integer, of which LLVM knows nothing: else it would keep a pointer for every place that adds it."""
        kind = ir.FunctionType(_WORD, [_WORD])
        return self.builder.asm(kind, "", "=r,0", [value], side_effect=False)

    def shuffle(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(a, b, self._mask(order))

    def _mask(self, order: Sequence[int]) -> Any:
        return ir.Constant(ir.VectorType(_LANE, len(order)), list(order))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fmuladd.v{self.lanes}f{8 * self.size}"  # fused where the machine can
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b, c])

    def not_negative(self, value: Any) -> Any:
        """The value, or 0 where it is negative; NaN stays."""
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        return self.builder.select(self.builder.fcmp_ordered("<", value, zero), zero, value)

    @contextmanager
    def steps(self, count: Any, starts: Sequence[Any], steps: Sequence[Any]) -> Iterator[list[Any]]:
        """A loop of ``count`` iterations (none where it is not positive) with values that grow by a step each
        iteration."""
        builder = self.builder
        before = builder.block
        body, after = builder.append_basic_block("turn"), builder.append_basic_block("turned")
        builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_WORD, 0)), body, after)
        builder.position_at_end(body)
        values = [builder.phi(_WORD) for _ in (count, *starts)]
        yield values[1:]
        steps = [ir.Constant(_WORD, -1), *steps]
        for value, start, step in zip(values, (count, *starts), steps, strict=True):
            value.add_incoming(start, before)
            value.add_incoming(builder.add(value, step), builder.block)
        left = builder.add(values[0], ir.Constant(_WORD, -1))
        iteration = builder.cbranch(builder.icmp_signed(">", left, ir.Constant(_WORD, 0)), body, after)
        iteration.set_metadata("llvm.loop", _as_written(builder.module))
        builder.position_at_end(after)


def _as_written(module: Any) -> Any:
    """A loop's metadata that keeps LLVM from unrolling it: the addresses of several iterations overflow the
    registers."""
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([option, option])
    loop.operands = (loop, option)  # a loop's metadata begins with itself
    return loop
