"""The entries of scalar functions: loops over any strides that call an expression for every element.

After the operands the block holds: inner length, number of outer dims, product of the outer dims, each operand's inner
stride, then per outer dim (last first) its size and a stride for each operand. Strides are in elements. The range is
one of elements, in the order of the odometer; it may begin and end within a row.

An output may be an input's memory, entry for entry. Where an output overlaps an input otherwise, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from flowrt.kernels.abi import ENTRY, ONE, WORD, ZERO, operand_address, pointer, word
from flowrt.kernels.compose import Composition, Independent, infer_types

if TYPE_CHECKING:
    from flowrt.kernels.expression import Expression


def scalar_loops(expression: Expression, pattern: Sequence[int]) -> Any:
    """An intrinsic (bases, block, begin, end) that applies ``expression`` along any strides.

    ``pattern`` holds the inner strides of the operands, inputs before results, where they are known: 0 or 1 each. Where
    it is empty, those with at most one input of stride 0 are told apart when the entry runs.
    """

    @intrinsic
    def scalars(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        composition = infer_types(typing_context, expression)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Loops(context, builder, composition, args).emit(pattern)
            return context.get_dummy_value()

        return ENTRY, codegen

    return scalars


class _Loops:
    """The code of one entry as it is emitted. Operands are the inputs, then the results."""

    def __init__(self, context: Any, builder: Any, composition: Composition, args: Sequence[Any]) -> None:
        self._context, self._builder, self._composition = context, builder, composition
        bases, block, self._begin, self._end = args
        expression = composition.expression
        self._inputs = len(expression.inputs)
        self._kinds = [*composition.kinds[: self._inputs], *(composition.kinds[n] for n in expression.results)]
        count = len(self._kinds)
        self._models = [context.data_model_manager[kind] for kind in self._kinds]
        self._starts = [
            pointer(builder, operand_address(builder, bases, block, i), model.get_data_type())
            for i, model in enumerate(self._models)
        ]
        head = 2 * count
        self._inner, self._outer_dims = (word(builder, block, head + i) for i in range(2))
        self._strides = [word(builder, block, head + 3 + i) for i in range(count)]
        self._table = builder.gep(pointer(builder, block, WORD), [ir.Constant(WORD, head + 3 + count)])

    def emit(self, pattern: Sequence[int]) -> None:
        builder = self._builder
        cases = self._cases(pattern)
        alone = builder.and_(builder.icmp_signed("==", self._begin, ZERO), builder.icmp_signed("==", self._end, ONE))
        with builder.if_else(alone) as (then, otherwise):
            with then:  # a scalar; the first element lies where the operands begin, whatever their strides
                self._element(self._starts, [None] * self._inputs, None)
            with otherwise, _rows_between(builder, self._begin, self._end, self._inner) as (number, first, count):
                at = _outer_position(builder, self._table, self._outer_dims, number, self._starts)
                at = [self._moved(p, first, stride) for p, stride in zip(at, self._strides, strict=True)]
                self._rows(at, count, cases)

    def _cases(self, pattern: Sequence[int]) -> list[list[Any]]:
        """Inner strides that are constants, so that LLVM makes vectors of the elements, or one of a single element."""
        if pattern:
            return [[ONE if stride else ZERO for stride in pattern]]
        count = len(self._kinds)
        cases: list[list[Any]] = [[ONE] * count]
        if self._inputs > 1:
            cases += [[ZERO if i == j else ONE for i in range(count)] for j in range(self._inputs)]
        return [*cases, self._strides]

    def _rows(self, at: Sequence[Any], count: Any, cases: Sequence[Sequence[Any]]) -> None:
        if len(cases) == 1:
            self._row(at, count, cases[0])
            return
        builder, fits = self._builder, cgutils.true_bit
        for stride, step in zip(self._strides, cases[0], strict=True):
            fits = builder.and_(fits, builder.icmp_signed("==", stride, step))
        with builder.if_else(fits) as (then, otherwise):
            with then:
                self._row(at, count, cases[0])
            with otherwise:
                self._rows(at, count, cases[1:])

    def _row(self, at: Sequence[Any], count: Any, steps: Sequence[Any]) -> None:
        independent = Independent(self._builder)
        fixed = [self._load(i, at[i], independent) if steps[i] is ZERO else None for i in range(self._inputs)]
        known = self._composition.emit(self._context, self._builder, fixed)  # what is the same all along the row
        with independent.loop(self._builder, count) as index:
            places = [self._moved(place, index, step) for place, step in zip(at, steps, strict=True)]
            self._element(places, known, independent)

    def _element(self, places: Sequence[Any], known: Sequence[Any], independent: Independent | None) -> None:
        values = list(known)
        for i in range(self._inputs):
            if values[i] is None:
                values[i] = self._load(i, places[i], independent)
        values = self._composition.emit(self._context, self._builder, values)
        for i, result in enumerate(self._composition.expression.results, self._inputs):
            stored = self._builder.store(self._models[i].as_data(self._builder, values[result]), places[i])
            if independent is not None:
                independent.mark(stored)

    def _load(self, operand: int, place: Any, independent: Independent | None) -> Any:
        loaded = self._builder.load(place)
        if independent is not None:
            independent.mark(loaded)
        return self._models[operand].from_data(self._builder, loaded)

    def _moved(self, place: Any, index: Any, stride: Any) -> Any:
        if stride is ZERO:
            return place
        return self._builder.gep(place, [index if stride is ONE else self._builder.mul(index, stride)])


@contextmanager
def _rows_between(builder: Any, begin: Any, end: Any, inner: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Emit the body as a loop over the rows of ``inner`` elements that the elements [begin, end) lie in.

    Yields the row's number, the first of its elements to visit, and how many. Only a range that begins after the first
    row costs a division.
    """
    place = cgutils.alloca_once_value(builder, begin)  # the next element
    number = cgutils.alloca_once(builder, WORD)
    first = cgutils.alloca_once(builder, WORD)
    builder.store(begin, place)
    builder.store(ZERO, number)
    builder.store(begin, first)
    some = builder.icmp_signed("<", begin, end)  # where there is nothing, ``inner`` may be 0
    with builder.if_then(builder.and_(some, builder.icmp_signed(">=", begin, inner))):
        builder.store(builder.udiv(begin, inner), number)
        builder.store(builder.urem(begin, inner), first)
    check, body, done = (builder.append_basic_block(f"rows.{name}") for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    builder.cbranch(builder.icmp_signed("<", builder.load(place), end), body, done)
    builder.position_at_end(body)
    start, left = builder.load(first), builder.sub(end, builder.load(place))
    whole = builder.sub(inner, start)
    count = builder.select(builder.icmp_signed("<", left, whole), left, whole)
    yield builder.load(number), start, count
    builder.store(builder.add(builder.load(number), ONE), number)
    builder.store(builder.add(builder.load(place), count), place)
    builder.store(ZERO, first)
    builder.branch(check)
    builder.position_at_end(done)


def _outer_position(builder: Any, table: Any, dims: Any, index: Any, starts: Sequence[Any]) -> list[Any]:
    """The operands' addresses at the ``index``-th combination of the outer dims."""
    left = cgutils.alloca_once_value(builder, index)
    moved = [cgutils.alloca_once_value(builder, ZERO) for _ in starts]
    builder.store(index, left)
    for place in moved:
        builder.store(ZERO, place)
    width = ir.Constant(WORD, len(starts) + 1)
    with cgutils.for_range(builder, dims) as dim:
        entry = builder.gep(table, [builder.mul(dim.index, width)])
        size, rest = builder.load(entry), builder.load(left)
        here = builder.urem(rest, size)
        builder.store(builder.udiv(rest, size), left)
        for i, place in enumerate(moved):
            stride = builder.load(builder.gep(entry, [ir.Constant(WORD, i + 1)]))
            builder.store(builder.add(builder.load(place), builder.mul(here, stride)), place)
    return [builder.gep(start, [builder.load(place)]) for start, place in zip(starts, moved, strict=True)]
