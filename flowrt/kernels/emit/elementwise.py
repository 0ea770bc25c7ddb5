"""The entries of scalar functions: loops over any strides that call an expression for every element.

After the operands the block holds: inner length, number of outer dims, product of the outer dims, each operand's inner
stride, then per outer dim (last first) its size and a stride for each operand. Strides are in elements. The range is
one of elements, in the order of the odometer; it may begin and end within a row.

Where values are reduced, the operands after the results are the totals, with stride 0 along what they are reduced over,
and a unit of work is a stretch of elements with totals of its own, one after another in memory. Four kinds of words
follow then: elements of a unit, elements altogether, and for each reduction its size and what the sums of a mean are
multiplied by. So totals do not depend on how the units are shared out.

Totals may be wider than values, and a loop computes all of its vectors as short as those of its widest type. Where that
would cost more than it saves (`_is_costly`), the values of some elements are computed first, into memory that stays in
the nearest cache, and reduced by loops behind; short rows that follow one another in memory are computed together.

Costly ops are long chains of instructions that wait for each other, so several vectors go through them side by side.
Some are long or have branches only for few arguments: where none of a block's is such, a loop without these takes it.

An output may be an input's memory, entry for entry. Where an output overlaps an input otherwise, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from flowrt.kernels.emit.abi import ENTRY, ONE, WORD, ZERO, operand_address, pointer, word
from flowrt.kernels.emit.compose import Composition, Independent, infer_narrow, infer_types
from flowrt.kernels.emit.odometer import in_blocks, larger, outer_position, rows_between, smaller
from flowrt.kernels.emit.reductions import GROUP, Reducing, add_groups, add_lanes, no_lanes

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

BLOCK = 1024  # elements that are computed before their values are reduced by loops behind, or looked at before
SIDE_BY_SIDE, WHOLE = 4, 32  # vectors that are computed side by side, and elements that are whole ones everywhere
CHEAP = 8  # members of one instruction or two that are computed in short vectors sooner than written down


def _is_costly(expression: Expression) -> bool:
    """Whether an expression's values take longer to compute in short vectors than to write down and read again."""
    dtypes = expression.dtypes
    widens = any(
        held.itemsize > dtypes[n].itemsize for (n, _), held in zip(expression.reductions, expression.held, strict=True)
    )
    return widens and (len(expression.members) > CHEAP or expression.costly)


def scalar_loops(expression: Expression, pattern: Sequence[int]) -> Any:
    """An intrinsic (bases, block, begin, end) that applies ``expression`` along any strides.

    ``pattern`` holds the inner strides of the operands, inputs before results, where they are known: 0 or 1 each. Where
    it is empty, those with at most one input of stride 0 are told apart when the entry runs.
    """

    @intrinsic
    def scalars(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        composition = infer_types(typing_context, expression)
        narrow = infer_narrow(typing_context, expression)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Loops(context, builder, composition, narrow, args).emit(pattern)
            return context.get_dummy_value()

        return ENTRY, codegen

    return scalars


class _Loops:
    """The code of one entry as it is emitted. Operands are the inputs, then the results."""

    def __init__(
        self,
        context: Any,
        builder: Any,
        composition: Composition,
        narrow: tuple[Composition, Composition] | None,
        args: Sequence[Any],
    ) -> None:
        self._context, self._builder, self._composition, self._narrow = context, builder, composition, narrow
        bases, block, self._begin, self._end = args
        expression = composition.expression
        self._inputs = len(expression.inputs)
        self._reduced = [n for n, _ in expression.reductions]
        kinds = composition.kinds
        self._reductions = [
            Reducing(op, kinds[n], numpy_support.from_dtype(held))
            for (n, op), held in zip(expression.reductions, expression.held, strict=True)
        ]
        self._kinds = [*kinds[: self._inputs], *(kinds[n] for n in expression.results)]
        self._first_total = len(self._kinds)
        self._kinds += [reduction.held for reduction in self._reductions]
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
        self._reductions_behind = _is_costly(expression)
        apart = [
            n for n in self._reduced if self._reductions_behind and n not in expression.results
        ]  # not written anyway
        self._buffers = {n: self._buffer(context.data_model_manager[kinds[n]].get_data_type()) for n in apart}

    def _buffer(self, kind: Any) -> Any:
        buffer = cgutils.alloca_once(self._builder, kind, size=BLOCK)
        buffer.align = 64  # a store across two lines of the cache takes twice as long
        return buffer

    def emit(self, pattern: Sequence[int]) -> None:
        builder = self._builder
        cases = self._cases(pattern)
        if self._reductions:
            self._units(cases[0])
            return
        alone = builder.and_(builder.icmp_signed("==", self._begin, ZERO), builder.icmp_signed("==", self._end, ONE))
        with builder.if_else(alone) as (then, otherwise):
            with then:  # a scalar; the first element lies where the operands begin, whatever their strides
                self._element(self._composition, self._starts, [None] * self._inputs, None)
            with otherwise:
                self._range(cases)

    def _range(self, cases: Sequence[Sequence[Any]]) -> None:
        """Compute the elements of the range. Those of a single row, as short ones mostly are, cost nothing beside."""
        builder = self._builder
        if self._composition.expression.costly:  # beside which a look at dims and strides is nothing
            self._odometer(cases)
            return
        with builder.if_else(builder.icmp_signed("==", self._outer_dims, ZERO)) as (then, otherwise):
            with then:
                strides = cases[0] if len(cases) == 1 else self._strides
                at = [self._moved(p, self._begin, stride) for p, stride in zip(self._starts, strides, strict=True)]
                self._rows(at, builder.sub(self._end, self._begin), cases)
            with otherwise:
                self._odometer(cases)

    def _odometer(self, cases: Sequence[Sequence[Any]]) -> None:
        """Compute the elements of the range row by row."""
        with rows_between(self._builder, self._begin, self._end, self._inner) as (number, first, count, _):
            at = outer_position(self._builder, self._table, self._outer_dims, number, self._starts)
            at = [self._moved(p, first, stride) for p, stride in zip(at, self._strides, strict=True)]
            self._rows(at, count, cases)

    def _units(self, steps: Sequence[Any]) -> None:
        """Reduce the units of the range, each by itself."""
        builder, count = self._builder, len(self._kinds)
        behind = builder.mul(self._outer_dims, ir.Constant(WORD, count + 1))
        words = builder.gep(self._table, [behind])
        length, total = builder.load(words), builder.load(builder.gep(words, [ONE]))
        together, strides = self._rows_together(steps) if self._reductions_behind else (None, [])
        with cgutils.for_range(builder, builder.sub(self._end, self._begin)) as iteration:
            unit = builder.add(self._begin, iteration.index)
            begin = builder.mul(unit, length)
            end = builder.add(begin, length)
            end = builder.select(builder.icmp_signed("<", end, total), end, total)
            own, sizes = [], []
            for number, (start, reduction) in enumerate(
                zip(self._starts[self._first_total :], self._reductions, strict=True)
            ):
                size = builder.load(builder.gep(words, [ir.Constant(WORD, 2 + 2 * number)]))
                own.append(builder.gep(start, [builder.mul(unit, size)]))
                sizes.append(size)
                with cgutils.for_range(builder, size) as entry:
                    builder.store(reduction.neutral(), builder.gep(own[-1], [entry.index]))
            starts = [*self._starts[: self._first_total], *own]
            with rows_between(builder, begin, end, self._inner, together) as (row, first, here, rows):
                at = outer_position(builder, self._table, self._outer_dims, row, starts)
                at = [self._moved(p, first, s) for p, s in zip(at, self._strides, strict=True)]
                if self._reductions_behind:
                    self._rows_and_reductions(at, here, rows, steps, strides)
                else:
                    self._row(at, here, steps)
            for number, (start, size) in enumerate(zip(own, sizes, strict=True)):
                if self._reductions[number].op == "mean":
                    self._scale(start, size, builder.load(builder.gep(words, [ir.Constant(WORD, 3 + 2 * number)])))

    def _scale(self, totals: Any, size: Any, factor: Any) -> None:
        """Multiply so many totals by the float64 whose bits are ``factor``."""
        builder = self._builder
        by = builder.bitcast(factor, ir.DoubleType())
        with cgutils.for_range(builder, size) as entry:
            place = builder.gep(totals, [entry.index])
            builder.store(builder.fmul(builder.load(place), by), place)

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
        """Compute elements that lie in one row, beginning at ``at``, and reduce their values."""
        if self._narrow is None:
            self._elements(self._composition, at, count, steps)
            return
        with in_blocks(self._builder, count, BLOCK) as (start, many):
            here = [self._moved(place, start, step) for place, step in zip(at, steps, strict=True)]
            for composition in self._compositions(here, many, steps):
                self._elements(composition, here, many, steps)

    def _compositions(self, at: Sequence[Any], count: Any, steps: Sequence[Any]) -> Iterator[Composition]:
        """What a block of elements is to be emitted for: the functions of narrow arguments, and those of all."""
        if self._narrow is None:
            yield self._composition
            return
        narrow, fits = self._narrow
        with self._builder.if_else(self._all_fit(fits, at, count, steps)) as (then, otherwise):
            with then:
                yield narrow
            with otherwise:
                yield self._composition

    def _all_fit(self, fits: Composition, at: Sequence[Any], count: Any, steps: Sequence[Any]) -> Any:
        """Whether every element's arguments are narrow; the flags are as wide as what is looked at, as vectors want."""
        builder, independent = self._builder, Independent(self._builder)
        wide = ir.IntType(8 * max(dtype.itemsize for dtype in fits.expression.inputs))
        beyond = cgutils.alloca_once_value(builder, ir.Constant(wide, 0))
        known = self._known(fits, at, steps, independent)
        with independent.loop(builder, count) as index:
            places = [self._moved(place, index, step) for place, step in zip(at, steps, strict=True)]
            values = self._values(fits, places, known, independent)
            for number in fits.expression.results:
                narrow = self._context.cast(builder, values[number], fits.kinds[number], types.boolean)
                flag = builder.zext(builder.not_(narrow), wide)
                builder.store(builder.or_(builder.load(beyond), flag), beyond)
        return builder.icmp_unsigned("==", builder.load(beyond), ir.Constant(wide, 0))

    def _elements(self, composition: Composition, at: Sequence[Any], count: Any, steps: Sequence[Any]) -> None:
        independent = Independent(self._builder)
        known = self._known(composition, at, steps, independent)
        totals = self._row_totals(at, steps)
        for index in self._indices(count, independent):
            places = [self._moved(place, index, step) for place, step in zip(at, steps, strict=True)]
            values = self._element(composition, places, known, independent)
            for number, value in enumerate(self._reduced):
                own = totals.get(number)
                place = places[self._first_total + number] if own is None else own
                self._combine(number, place, values[value], independent if own is None else None)
        for number, total in totals.items():
            self._builder.store(self._builder.load(total), at[self._first_total + number])

    def _indices(self, count: Any, independent: Independent) -> Iterator[Any]:
        """The index of each loop over elements that are computed, which the body is to be emitted for.

        Long chains fill the processor where several vectors go through them; what is left over has a loop of its own.
        """
        first = ZERO
        if self._composition.expression.costly:
            first = self._builder.and_(count, ir.Constant(WORD, -WHOLE))
            with independent.loop(self._builder, first, interleaved=SIDE_BY_SIDE) as index:
                yield index
        with independent.loop(self._builder, count, first) as index:
            yield index

    def _known(
        self, composition: Composition, at: Sequence[Any], steps: Sequence[Any], independent: Independent
    ) -> list[Any]:
        """The values that are the same all along the row."""
        fixed = [self._load(i, at[i], independent) if steps[i] is ZERO else None for i in range(self._inputs)]
        return composition.emit(self._context, self._builder, fixed)

    def _row_totals(self, at: Sequence[Any], steps: Sequence[Any]) -> dict[int, Any]:
        """For each reduction of the whole row, a variable that LLVM keeps in registers."""
        builder, first = self._builder, self._first_total
        whole = [number for number in range(len(self._reductions)) if steps[first + number] is ZERO]
        return {number: cgutils.alloca_once_value(builder, builder.load(at[first + number])) for number in whole}

    def _combine(self, number: int, place: Any, value: Any, independent: Independent | None) -> None:
        """Take one value into the total at ``place``."""
        held = self._builder.load(place)
        combined = self._reductions[number].combine(self._context, self._builder, held, value, independent is None)
        stored = self._builder.store(combined, place)
        if independent is not None:
            independent.mark(held)
            independent.mark(stored)

    def _element(
        self, composition: Composition, places: Sequence[Any], known: Sequence[Any], independent: Independent | None
    ) -> list[Any]:
        """Compute one element and write its results; answers all of its values."""
        values = self._values(composition, places, known, independent)
        for i, result in enumerate(composition.expression.results, self._inputs):
            stored = self._builder.store(self._models[i].as_data(self._builder, values[result]), places[i])
            if independent is not None:
                independent.mark(stored)
        return values

    def _values(
        self, composition: Composition, places: Sequence[Any], known: Sequence[Any], independent: Independent | None
    ) -> list[Any]:
        """Read one element of the inputs and compute all values of it."""
        values = list(known)
        for i in range(self._inputs):
            if values[i] is None:
                values[i] = self._load(i, places[i], independent)
        mark = None if independent is None else independent.mark
        return composition.emit(self._context, self._builder, values, mark)

    # ── reductions behind
    # ──────────────────────────────────────────────────────────────────────────────────────────────

    def _rows_together(self, steps: Sequence[Any]) -> tuple[Callable[[Any], Any], list[Any]]:
        """How many rows from one on may be computed as one, since all operands but the totals go on where they end; and
        how far the totals of one row are from the next one's.
        """
        builder, inner, first = self._builder, self._inner, self._first_total
        size, most = (cgutils.alloca_once_value(builder, ONE) for _ in range(2))
        strides = [cgutils.alloca_once_value(builder, ZERO) for _ in self._reductions]
        with builder.if_then(builder.icmp_signed(">", self._outer_dims, ZERO)):
            builder.store(builder.load(self._table), size)
            apart = [
                builder.load(builder.gep(self._table, [ir.Constant(WORD, 1 + i)])) for i in range(len(self._kinds))
            ]
            goes_on = builder.icmp_signed(">", inner, ZERO)
            for stride, step in zip(apart[:first], steps[:first], strict=True):
                goes_on = builder.and_(goes_on, builder.icmp_signed("==", stride, builder.mul(inner, step)))
            with builder.if_then(goes_on):
                builder.store(larger(builder, ONE, builder.udiv(ir.Constant(WORD, BLOCK), inner)), most)
            for place, stride in zip(strides, apart[first:], strict=True):
                builder.store(stride, place)
        size, most, *strides = (builder.load(place) for place in (size, most, *strides))
        return lambda row: smaller(builder, most, builder.sub(size, builder.urem(row, size))), strides

    def _rows_and_reductions(
        self, at: Sequence[Any], count: Any, rows: Any, steps: Sequence[Any], strides: Sequence[Any]
    ) -> None:
        """Compute so many elements that follow one another, of one row or several whole ones, and reduce their
        values."""
        builder = self._builder
        several = builder.icmp_signed(">", rows, ONE)
        with in_blocks(builder, count, BLOCK) as (start, many):
            here = [self._moved(place, start, step) for place, step in zip(at, steps, strict=True)]
            for composition in self._compositions(here, many, steps):
                self._elements_apart(composition, here, many, steps)
            length = builder.select(several, self._inner, many)
            for number, stride in enumerate(strides):
                source, step = self._written(self._reduced[number], here, steps)
                total = self._first_total + number
                with cgutils.for_range(builder, rows) as iteration:
                    row = self._moved(source, builder.mul(iteration.index, length), step)
                    place = builder.gep(here[total], [builder.mul(iteration.index, stride)])
                    self._reduction(number, row, step, length, place, steps[total])

    def _elements_apart(self, composition: Composition, at: Sequence[Any], count: Any, steps: Sequence[Any]) -> None:
        """Compute elements that follow one another; what is to be reduced, and no result, goes to the buffers."""
        builder, independent = self._builder, Independent(self._builder)
        known = self._known(composition, at, steps, independent)
        for index in self._indices(count, independent):
            places = [self._moved(place, index, step) for place, step in zip(at, steps, strict=True)]
            values = self._element(composition, places, known, independent)
            for n, buffer in self._buffers.items():
                data = self._model_of(n).as_data(builder, values[n])
                independent.mark(builder.store(data, builder.gep(buffer, [index])))

    def _written(self, value: int, here: Sequence[Any], steps: Sequence[Any]) -> tuple[Any, Any]:
        """Where a value was written down, and how far one is from the next."""
        if value in self._buffers:
            return self._buffers[value], ONE
        result = self._inputs + self._composition.expression.results.index(value)
        return here[result], steps[result]

    def _reduction(self, number: int, source: Any, step: Any, many: Any, place: Any, total_step: Any) -> None:
        """Take values into the total at ``place``, or each into its own from there on; float32 are added in groups."""
        builder, reduction, model = self._builder, self._reductions[number], self._model_of(self._reduced[number])
        if total_step is not ZERO:
            independent = Independent(builder)
            with independent.loop(builder, many) as index:
                taken = builder.load(self._moved(source, index, step))
                independent.mark(taken)
                own = self._moved(place, index, total_step)
                self._combine(number, own, model.from_data(builder, taken), independent)
            return
        total, first = cgutils.alloca_once_value(builder, builder.load(place)), ZERO
        if reduction.adds_singles:
            with builder.if_then(builder.icmp_signed(">=", many, GROUP)):
                lanes = no_lanes(builder)
                add_groups(builder, source, many, lanes)
                builder.store(builder.fadd(builder.load(total), add_lanes(builder, lanes)), total)
            first = builder.and_(many, builder.neg(GROUP))
        with cgutils.for_range_slice(builder, first, many, ONE, WORD) as (index, _):
            taken = builder.load(self._moved(source, index, step))
            self._combine(number, total, model.from_data(builder, taken), None)
        builder.store(builder.load(total), place)

    def _model_of(self, value: int) -> Any:
        return self._context.data_model_manager[self._composition.kinds[value]]

    def _load(self, operand: int, place: Any, independent: Independent | None) -> Any:
        loaded = self._builder.load(place)
        if independent is not None:
            independent.mark(loaded)
        return self._models[operand].from_data(self._builder, loaded)

    def _moved(self, place: Any, index: Any, stride: Any) -> Any:
        if stride is ZERO:
            return place
        return self._builder.gep(place, [index if stride is ONE else self._builder.mul(index, stride)])
