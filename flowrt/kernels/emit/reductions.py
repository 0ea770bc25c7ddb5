"""What `reductions` come to in LLVM's terms: an operation marked as reorderable, or the operator itself for
integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import numpy_support

from flowrt.kernels.emit.abi import INLINED, WORD
from flowrt.kernels.language import reductions

_LANES = 8
_SINGLES, _DOUBLES = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(ir.DoubleType(), _LANES)
GROUP = ir.Constant(WORD, 4 * _LANES)
LOOSE = ("reassoc", "nsz", "contract")


def _extreme(name: str, flags: tuple[str, ...] = ("nsz",)) -> Callable[[Any, Any], Any]:
    def build(builder: Any, args: Any) -> Any:
        kind = args[0].type
        function = builder.module.declare_intrinsic(name, (kind,), ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, args, fastmath=flags)

    return build


OPERATIONS: dict[Callable[..., Any], tuple[Callable[[Any, Any], Any], Callable[..., Any]]] = {
    reductions.add_loosely: (lambda builder, args: builder.fadd(*args, flags=LOOSE), lambda x, y: x + y),
    reductions.multiply_loosely: (lambda builder, args: builder.fmul(*args, flags=LOOSE), lambda x, y: x * y),
    reductions.larger_loosely: (_extreme("llvm.maximum"), lambda x, y: x if x >= y else y),
    reductions.smaller_loosely: (_extreme("llvm.minimum"), lambda x, y: x if x <= y else y),
}


@cache
def bind_reductions() -> None:
    """Let compiled kernels call the reductions."""
    for reduction, (build, exact) in OPERATIONS.items():
        overload(reduction, strict=False, jit_options=INLINED)(_chosen(_instruction(build), exact))


def _instruction(build: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def instruction(typing_context: Any, x: Any, y: Any) -> Any:
        return x(x, x), lambda context, builder, signature, args: build(builder, args)

    return instruction


def _chosen(instruction: Any, exact: Callable[..., Any]) -> Callable[..., Any]:
    def choose(x: Any, y: Any) -> Any:
        if isinstance(x, types.Float):
            return lambda x, y: instruction(x, y)
        return exact

    return choose


@dataclass(frozen=True, slots=True)
class Reducing:
    """How values of Numba's type ``kind`` are reduced into a total of type ``held``, by the op of that name."""

    op: str
    kind: Any
    held: Any

    @property
    def adds_singles(self) -> bool:
        """Whether it adds up float32."""
        return self.op in ("sum", "mean") and self.kind == types.float32

    def neutral(self) -> Any:
        """The constant that a total begins with."""
        dtype = numpy_support.as_dtype(self.held)
        if self.op in ("max", "min"):
            value = _least(dtype) if self.op == "max" else _greatest(dtype)
        else:
            value = int(self.op in ("prod", "all"))
        if dtype.kind == "f":
            return ir.Constant(ir.DoubleType() if dtype.itemsize == 8 else ir.FloatType(), float(value))
        return ir.Constant(ir.IntType(8 * dtype.itemsize), int(value))

    def combine(self, context: Any, builder: Any, total: Any, value: Any, in_row: bool) -> Any:
        """The total with one more value, of those of a row or not; both totals are as they lie in memory."""
        if self.held == types.boolean:
            truth = builder.zext(context.is_true(builder, self.kind, value), total.type)
            return builder.or_(total, truth) if self.op in ("any", "max") else builder.and_(total, truth)
        wide = context.cast(builder, value, self.kind, self.held)
        if self.op in ("max", "min"):
            return _extreme_of(self.op, self.held, in_row)(builder, total, wide)
        if isinstance(self.held, types.Float):
            operation = builder.fmul if self.op == "prod" else builder.fadd
            return operation(total, wide, flags=LOOSE)
        return builder.mul(total, wide) if self.op == "prod" else builder.add(total, wide)


def _extreme_of(op: str, kind: Any, in_row: bool) -> Callable[[Any, Any, Any], Any]:
    if not isinstance(kind, types.Float):
        found = _extreme(f"llvm.{'s' if kind.signed else 'u'}{op}", ())
    elif in_row:
        found = _extreme("llvm.maximum" if op == "max" else "llvm.minimum")
    else:
        return _apart("llvm.maxnum" if op == "max" else "llvm.minnum")
    return lambda builder, total, value: found(builder, [total, value])


def _apart(name: str) -> Callable[[Any, Any, Any], Any]:
    """A reduction of two floats beside others: LLVM has vectors of ``llvm.maximum`` only to reduce rows with, and would
    write what it takes for one of the two by a masked store.
    """
    choose = _extreme(name, ("nnan", "nsz"))

    def build(builder: Any, total: Any, value: Any) -> Any:
        is_nan = builder.fcmp_unordered("uno", total, value)
        return builder.select(is_nan, builder.fadd(total, value), choose(builder, [total, value]))

    return build


def _least(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else 0 if dtype.kind == "b" else np.iinfo(dtype).min


def _greatest(dtype: np.dtype[Any]) -> Any:
    return np.inf if dtype.kind == "f" else 1 if dtype.kind == "b" else np.iinfo(dtype).max


# ── sums of float32 ──────────────────────────────────────────────────────────────────────────────────────────────────
# Widening each would take most of the time, so four are added up as they are: two roundings, where pairwise sums in
# float32 come to as many as the logarithm of their length. Lanes are as many on every machine, and so are the bits.


def no_lanes(builder: Any) -> Any:
    """A variable of float64 lanes, all of them 0."""
    zeros = ir.Constant(_DOUBLES, [0.0] * _LANES)
    lanes = cgutils.alloca_once_value(builder, zeros)
    builder.store(zeros, lanes)
    return lanes


def add_groups(builder: Any, singles: Any, many: Any, lanes: Any) -> None:
    """Add the whole groups among ``many`` float32 to the ``lanes``."""
    groups = builder.udiv(many, GROUP)
    with cgutils.for_range(builder, groups) as iteration:
        start = builder.gep(singles, [builder.mul(iteration.index, GROUP)])
        places = [builder.gep(start, [ir.Constant(WORD, n * _LANES)]) for n in range(4)]
        a, b, c, d = (builder.load(builder.bitcast(place, _SINGLES.as_pointer()), align=4) for place in places)
        added = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        builder.store(builder.fadd(builder.load(lanes), builder.fpext(added, _DOUBLES)), lanes)


def add_lanes(builder: Any, lanes: Any) -> Any:
    """The sum of the lanes."""
    held = builder.load(lanes)
    sums = [builder.extract_element(held, ir.Constant(ir.IntType(32), n)) for n in range(_LANES)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [builder.fadd(x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]
