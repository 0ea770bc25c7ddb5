"""The entries of scalar functions: loops over any strides that call an expression for every element.

After the operands the block holds: inner length, number of outer dims, product of the outer dims, each operand's inner
stride, then per outer dim (last first) its size and a stride for each operand. Strides are in elements. The range is
one of elements, in the order of the odometer; it may begin and end within a row.

Where values are added up, the operands after the results are sums in float64, with stride 0 along what they are summed
over, and a unit of work is a stretch of elements with sums of its own, one after another in memory. Four kinds of words
follow then: elements of a unit, elements altogether, and for each sum its size and what it is multiplied by in the end.
So sums do not depend on how the units are shared out.

An output may be an input's memory, entry for entry. Where an output overlaps an input otherwise, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from flowrt.kernels.abi import ENTRY, ONE, WORD, ZERO, operand_address, pointer, word
from flowrt.kernels.compose import Composition, Independent, infer_types

if TYPE_CHECKING:
    from flowrt.kernels.expression import Expression


NO_SUMS: Mapping[int, Any] = MappingProxyType({})
_DOUBLE = ir.DoubleType()


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
        self._folds = expression.folds
        self._kinds = [*composition.kinds[: self._inputs], *(composition.kinds[n] for n in expression.results)]
        self._kinds += [types.float64] * len(self._folds)
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
        if self._folds:
            self._units(cases[0])
            return
        alone = builder.and_(builder.icmp_signed("==", self._begin, ZERO), builder.icmp_signed("==", self._end, ONE))
        with builder.if_else(alone) as (then, otherwise):
            with then:  # a scalar; the first element lies where the operands begin, whatever their strides
                self._element(self._starts, [None] * self._inputs, None)
            with otherwise, _rows_between(builder, self._begin, self._end, self._inner) as (number, first, count):
                at = _outer_position(builder, self._table, self._outer_dims, number, self._starts)
                at = [self._moved(p, first, stride) for p, stride in zip(at, self._strides, strict=True)]
                self._rows(at, count, cases)

    def _units(self, steps: Sequence[Any]) -> None:
        """Add up the units of the range, each by itself."""
        builder, count = self._builder, len(self._kinds)
        behind = builder.mul(self._outer_dims, ir.Constant(WORD, count + 1))
        words = builder.gep(self._table, [behind])
        length, total = builder.load(words), builder.load(builder.gep(words, [ONE]))
        with cgutils.for_range(builder, builder.sub(self._end, self._begin)) as turn:
            unit = builder.add(self._begin, turn.index)
            begin = builder.mul(unit, length)
            end = builder.add(begin, length)
            end = builder.select(builder.icmp_signed("<", end, total), end, total)
            own, scales = [], []
            for number, start in enumerate(self._starts[count - len(self._folds) :]):
                size = builder.load(builder.gep(words, [ir.Constant(WORD, 2 + 2 * number)]))
                own.append((builder.gep(start, [builder.mul(unit, size)]), size))
                scales.append(builder.load(builder.gep(words, [ir.Constant(WORD, 3 + 2 * number)])))
                with cgutils.for_range(builder, size) as entry:
                    builder.store(ir.Constant(_DOUBLE, 0.0), builder.gep(own[-1][0], [entry.index]))
            starts = [*self._starts[: count - len(self._folds)], *(start for start, _ in own)]
            with _rows_between(builder, begin, end, self._inner) as (row, first, here):
                at = _outer_position(builder, self._table, self._outer_dims, row, starts)
                self._row([self._moved(p, first, s) for p, s in zip(at, self._strides, strict=True)], here, steps)
            for (start, size), scale in zip(own, scales, strict=True):
                factor = builder.bitcast(scale, _DOUBLE)
                with cgutils.for_range(builder, size) as entry:
                    place = builder.gep(start, [entry.index])
                    builder.store(builder.fmul(builder.load(place), factor), place)

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
        sums = self._sums(at, steps)
        with independent.loop(self._builder, count) as index:
            places = [self._moved(place, index, step) for place, step in zip(at, steps, strict=True)]
            self._element(places, known, independent, sums)
        for place, total in sums.items():
            self._builder.store(self._builder.load(total), at[place])

    def _sums(self, at: Sequence[Any], steps: Sequence[Any]) -> dict[int, Any]:
        """For each operand that sums up the whole row, a variable that LLVM keeps in registers."""
        folded = range(len(self._kinds) - len(self._folds), len(self._kinds))
        return {
            i: cgutils.alloca_once_value(self._builder, self._builder.load(at[i])) for i in folded if steps[i] is ZERO
        }

    def _element(
        self,
        places: Sequence[Any],
        known: Sequence[Any],
        independent: Independent | None,
        sums: Mapping[int, Any] = NO_SUMS,
    ) -> None:
        values = list(known)
        for i in range(self._inputs):
            if values[i] is None:
                values[i] = self._load(i, places[i], independent)
        mark = None if independent is None else independent.mark
        values = self._composition.emit(self._context, self._builder, values, mark)
        for i, result in enumerate(self._composition.expression.results, self._inputs):
            stored = self._builder.store(self._models[i].as_data(self._builder, values[result]), places[i])
            if independent is not None:
                independent.mark(stored)
        for i, value in enumerate(self._folds, len(self._kinds) - len(self._folds)):
            self._add(values[value], self._composition.kinds[value], places[i], sums.get(i), independent)

    def _add(self, value: Any, kind: Any, place: Any, total: Any, independent: Independent | None) -> None:
        """Add a value to the row's ``total``, if that is one for all of its elements, else to the sum at ``place``."""
        builder = self._builder
        wide = self._context.cast(builder, value, kind, types.float64)
        held = builder.load(place if total is None else total)
        stored = builder.store(builder.fadd(held, wide, flags=("reassoc", "nsz")), place if total is None else total)
        if total is None and independent is not None:
            independent.mark(held)
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
    here = cgutils.alloca_once(builder, WORD)
    last = builder.sub(dims, ONE)
    with cgutils.for_range(builder, dims) as dim:
        entry = builder.gep(table, [builder.mul(dim.index, width)])
        rest = builder.load(left)
        builder.store(rest, here)
        with builder.if_then(
            builder.icmp_signed("<", dim.index, last)
        ):  # the last dim, often the only, divides nothing
            size = builder.load(entry)
            builder.store(builder.urem(rest, size), here)
            builder.store(builder.udiv(rest, size), left)
        for i, place in enumerate(moved):
            stride = builder.load(builder.gep(entry, [ir.Constant(WORD, i + 1)]))
            builder.store(builder.add(builder.load(place), builder.mul(builder.load(here), stride)), place)
    return [builder.gep(start, [builder.load(place)]) for start, place in zip(starts, moved, strict=True)]
