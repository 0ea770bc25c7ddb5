"""Numba's part of expressions: the members' functions called one after another, for LLVM to make one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from flowrt.kernels.emit.abi import ONE, WORD, ZERO
from flowrt.kernels.emit.lowering import Lowered
from flowrt.kernels.language.composing import narrowed

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression


@lru_cache(1024)
def scalar_function(function: Callable[..., Any]) -> Any:
    """``function`` compiled for scalars, once for all expressions it is part of."""
    return Lowered(function, inlined=True)


def _cast(context: Any, builder: Any, value: Any, kind: Any, wanted: Any) -> Any:
    """A value of another type. Processors differ in what they make of a float that the integers of a type do not hold,
    even between one number and vectors: see `ops.astype`."""
    if not isinstance(kind, types.Float) or not isinstance(wanted, types.Integer):
        return context.cast(builder, value, kind, wanted)
    if wanted.bitwidth < 64:
        whole = _nearest_integer(builder, value, 32 if wanted.signed or wanted.bitwidth < 32 else 64, "s")
        return builder.trunc(whole, ir.IntType(wanted.bitwidth)) if whole.type.width > wanted.bitwidth else whole
    signed = _nearest_integer(builder, value, 64, "s")
    if wanted.signed:
        return signed
    negative = builder.fcmp_ordered("<", value, ir.Constant(value.type, 0.0))
    return builder.select(negative, signed, _nearest_integer(builder, value, 64, "u"))


def _nearest_integer(builder: Any, value: Any, bits: int, sign: str) -> Any:
    """The integer that a float is rounded to toward zero, or the nearest that there is; 0 for NaN."""
    kind = ir.IntType(bits)
    function = ir.FunctionType(kind, [value.type])
    return builder.call(
        builder.module.declare_intrinsic(f"llvm.fpto{sign}i.sat", (kind, value.type), function), [value]
    )


@dataclass(frozen=True, slots=True)
class Composition:
    """An expression whose members' types are inferred."""

    expression: Expression
    kinds: tuple[Any, ...]  # Numba's type of every value
    calls: tuple[tuple[Any, Any] | None, ...]  # each member's dispatcher type and signature; None where it reduces

    def emit(
        self,
        context: Any,
        builder: Any,
        known: Sequence[Any],
        mark: Callable[[Any], None] | None = None,
        wanted: Collection[int] | None = None,
    ) -> list[Any]:
        """LLVM's values of all the values, as far as they follow from those ``known``; others are None in both.

        Only those ``wanted`` are computed, if that is given. Members' calls are given to ``mark``, since what is said
        of a call holds for what they load from tables.
        """
        values = [*known, *[None] * (len(self.kinds) - len(known))]
        first = len(self.expression.inputs)
        for number, (member, call) in enumerate(zip(self.expression.members, self.calls, strict=True), first):
            taken = [values[i] for i in member.operands]
            asked = wanted is None or number in wanted
            if asked and call is not None and values[number] is None and None not in taken:
                dispatcher, signature = call
                apply = context.get_function(dispatcher, signature)
                context.add_linking_libs(getattr(apply, "libs", ()))
                block, start = builder.block, len(builder.block.instructions)
                found = apply(builder, taken)
                for instruction in block.instructions[start:]:
                    if mark is not None and isinstance(instruction, ir.CallInstr):
                        mark(instruction)
                values[number] = _cast(context, builder, found, signature.return_type, self.kinds[number])
        return values


def infer_types(typing_context: Any, expression: Expression) -> Composition:
    """Let Numba infer and compile the members for their operands' types."""
    kinds = tuple(numpy_support.from_dtype(dtype) for dtype in expression.dtypes)
    calls: list[tuple[Any, Any] | None] = []
    for member in expression.members:
        if member.reduces_row:
            calls.append(None)
            continue
        dispatcher = typeof(scalar_function(member.function))
        taken = tuple(kinds[i] for i in member.operands)
        calls.append((dispatcher, typing_context.resolve_function_type(dispatcher, taken, {})))
    return Composition(expression, kinds, tuple(calls))


def infer_narrow(typing_context: Any, expression: Expression) -> tuple[Composition, Composition] | None:
    """The same of narrow functions, if there are any, and of what tells whether all of them fit; see `narrowed`."""
    found = narrowed(expression)
    return found and (infer_types(typing_context, found[0]), infer_types(typing_context, found[1]))


def composed(expression: Expression) -> Any:
    """A function for compiled code that takes a tuple of the inputs and answers a tuple of the results."""

    @intrinsic
    def apply(typing_context: Any, values: Any) -> Any:
        composition = infer_types(typing_context, expression)
        count = len(expression.inputs)
        answer = types.Tuple([composition.kinds[i] for i in expression.results])

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = cgutils.unpack_tuple(builder, args[0]) if count else []
            cast = [
                context.cast(builder, value, kind, composition.kinds[i])
                for i, (value, kind) in enumerate(zip(given, signature.args[0].types, strict=True))
            ]
            found = composition.emit(context, builder, cast)
            return context.make_tuple(builder, answer, [found[i] for i in expression.results])

        return answer(values), codegen

    return apply


class _Distinct(ir.values.MDValue):  # type: ignore[misc]
    """A metadata node that is one of its kind, whatever it holds; it may hold itself."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, [], name=str(len(module.metadata)))

    __eq__, __hash__ = object.__eq__, object.__hash__  # else all that hold the same would be one

    def descr(self, buf: list[str]) -> None:
        held = ", ".join(str(operand.get_reference()) for operand in self.operands)
        buf += [f"distinct !{{{held}}}", "\n"]


class Independent:
    """Says of a loop's loads and stores that none depends on another iteration's, so that LLVM need not compare
    addresses.

    An output may then be an input's memory: entry by entry what is written has been read.
    """

    def __init__(self, builder: Any) -> None:
        self._module = builder.module
        self._group = _Distinct(self._module)

    def mark(self, access: Any) -> None:
        """Say it of a load or a store."""
        access.set_metadata("llvm.access.group", self._group)

    @contextmanager
    def loop(self, builder: Any, end: Any, first: Any = ZERO, interleaved: int = 0) -> Iterator[Any]:
        """Emit the body for the indices from ``first`` to ``end``, and yield them: so many vectors ``interleaved``."""
        before = builder.basic_block
        check, body, done = (builder.append_basic_block(f"elements.{name}") for name in ("check", "body", "done"))
        builder.branch(check)
        builder.position_at_end(check)
        index = builder.phi(WORD)
        builder.cbranch(builder.icmp_signed("<", index, end), body, done)
        builder.position_at_end(body)
        yield index
        index.add_incoming(first, before)
        index.add_incoming(builder.add(index, ONE, flags=("nsw",)), builder.basic_block)
        self._close(builder.branch(check), interleaved)
        builder.position_at_end(done)

    def _close(self, branch: Any, interleaved: int) -> None:
        loop = _Distinct(self._module)
        facts = [[ir.MetaDataString(self._module, "llvm.loop.parallel_accesses"), self._group]]
        if interleaved:
            name = ir.MetaDataString(self._module, "llvm.loop.interleave.count")
            facts.append([name, ir.Constant(ir.IntType(32), interleaved)])
        loop.operands = (loop, *(self._module.add_metadata(fact) for fact in facts))
        branch.set_metadata("llvm.loop", loop)
