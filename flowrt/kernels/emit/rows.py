"""The entries of expressions that reduce rows: for each row some loops over its entries, as `row_plan` says.

The operands are the inputs, the results, the totals of what is reduced otherwise, memory for the entries of one row
that are kept, and perhaps for the narrow totals of some rows. The block is that of `scalar_loops`, but its inner dim is
a whole row, along which an operand's stride is 0 or 1; a unit of work is some rows, with totals of its own, one after
another in memory. Its words are: rows of a unit, rows altogether, and for each total its size and what a mean is
multiplied by in the end.

Sums of float32 are added up in their own type over `BLOCK` entries, some in each lane of a vector, and in float64 from
block to block: few enough for an error no larger than that of adding in pairs. Totals of columns likewise over
`TOGETHER` rows, where there is memory for such: half as wide they cost half as much, and the loops' vectors stay whole.

An output may be an input's memory, entry for entry: nothing is written before the last loop, and no row but by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from flowrt.base.traits import held_dtype
from flowrt.base.valueclass import valueclass
from flowrt.kernels.emit.abi import ENTRY, ONE, WORD, ZERO, operand_address, pointer, word
from flowrt.kernels.emit.compose import Composition, Independent, infer_types
from flowrt.kernels.emit.odometer import in_blocks, outer_position
from flowrt.kernels.emit.reductions import Reducing
from flowrt.kernels.fusion.row_plan import Loop, RowPlan, narrow_totals, plan_rows

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

BLOCK = 512
TOGETHER = 16  # what each total of columns takes in before it is added to the wide one


def row_loops(expression: Expression, pattern: Sequence[int]) -> Any:
    """An intrinsic (bases, block, begin, end) that applies ``expression`` to rows.

    ``pattern`` holds the strides of the operands along a row: 0 or 1 each.
    """

    @intrinsic
    def rows(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        composition = infer_types(typing_context, expression)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _RowLoops(context, builder, composition, args, pattern).emit()
            return context.get_dummy_value()

        return ENTRY, codegen

    return rows


@valueclass
class _Sum:
    """A reduction in the making: variables for its total, and for that of a block where this is of a shorter type."""

    value: int
    whole: Reducing
    total: Any
    within: Reducing
    short: Any


class _RowLoops:
    """The code of one entry as it is emitted."""

    def __init__(
        self, context: Any, builder: Any, composition: Composition, args: Sequence[Any], pattern: Sequence[int]
    ) -> None:
        self._context, self._builder, self._composition = context, builder, composition
        bases, block, self._begin, self._end = args
        self._expression = expression = composition.expression
        self._inputs, results = len(expression.inputs), len(expression.results)
        by_row = [not stride for stride in pattern[self._inputs : self._inputs + results]]
        self._plan: RowPlan = plan_rows(expression, [not stride for stride in pattern[: self._inputs]], by_row)
        kinds, self._first_total = composition.kinds, self._inputs + results
        self._totals = [
            Reducing(op, kinds[n], numpy_support.from_dtype(held_dtype(op, expression.dtypes[n])))
            for n, op in expression.reductions
        ]
        self._first_kept = self._first_total + len(self._totals)
        first_narrow = self._first_kept + len(self._plan.kept)
        narrow = narrow_totals(expression, pattern) if len(pattern) > first_narrow else ()
        self._narrow = {number: first_narrow + at for at, number in enumerate(narrow)}  # the operand of each
        operands = [*kinds[: self._inputs], *(kinds[n] for n in expression.results)]
        operands += [*(reduction.held for reduction in self._totals), *(kinds[n] for n in self._plan.kept)]
        operands += [self._totals[number].kind for number in narrow]
        self._models = [context.data_model_manager[kind] for kind in operands]
        self._starts = [
            pointer(builder, operand_address(builder, bases, block, i), model.get_data_type())
            for i, model in enumerate(self._models)
        ]
        count = len(operands)
        self._steps = [ONE if stride else ZERO for stride in pattern]
        self._length, self._dims = (word(builder, block, 2 * count + i) for i in range(2))
        words = pointer(builder, block, WORD)
        self._table = builder.gep(words, [ir.Constant(WORD, 3 * count + 3)])
        self._words = builder.gep(self._table, [builder.mul(self._dims, ir.Constant(WORD, count + 1))])

    # ── units and rows ───────────────────────────────────────────────────────────────────────────────────────────────

    def emit(self) -> None:
        """Compute the units of the range, each by itself."""
        builder = self._builder
        many, every = (self._word(i) for i in range(2))
        with cgutils.for_range(builder, builder.sub(self._end, self._begin)) as iteration:
            unit = builder.add(self._begin, iteration.index)
            first = builder.mul(unit, many)
            left = builder.sub(every, first)
            rows = builder.select(builder.icmp_signed("<", left, many), left, many)
            own = [self._cleared(number, unit) for number in range(len(self._totals))]
            starts = [*self._starts[: self._first_total], *own, *self._starts[self._first_kept :]]
            if self._narrow:
                with in_blocks(builder, rows, self._rows_together()) as (start, some):
                    self._clear_narrow()
                    self._rows(builder.add(first, start), some, starts)
                    self._widen(own)
            else:
                self._rows(first, rows, starts)
            for number, start in enumerate(own):
                self._scale(number, start)

    def _rows(self, first: Any, count: Any, starts: Sequence[Any]) -> None:
        with cgutils.for_range(self._builder, count) as row:
            number = self._builder.add(first, row.index)
            self._row(outer_position(self._builder, self._table, self._dims, number, starts))

    def _word(self, number: int) -> Any:
        return self._builder.load(self._builder.gep(self._words, [ir.Constant(WORD, number)]))

    def _cleared(self, number: int, unit: Any) -> Any:
        """Where a unit's own total begins, which nothing is in yet."""
        builder, size = self._builder, self._word(2 + 2 * number)
        start = builder.gep(self._starts[self._first_total + number], [builder.mul(unit, size)])
        with cgutils.for_range(builder, size) as entry:
            builder.store(self._totals[number].neutral(), builder.gep(start, [entry.index]))
        return start

    def _rows_together(self) -> Any:
        """How many rows narrow totals take in: more where these are for several rows, each of its own columns."""
        builder, size = self._builder, self._word(2 + 2 * min(self._narrow))
        for number in self._narrow:
            other = self._word(2 + 2 * number)
            size = builder.select(builder.icmp_signed("<", other, size), other, size)
        return builder.mul(builder.udiv(size, self._length), ir.Constant(WORD, TOGETHER))

    def _clear_narrow(self) -> None:
        builder = self._builder
        for number, place in self._narrow.items():
            with cgutils.for_range(builder, self._word(2 + 2 * number)) as entry:
                builder.store(ir.Constant(ir.FloatType(), 0.0), builder.gep(self._starts[place], [entry.index]))

    def _widen(self, own: Sequence[Any]) -> None:
        """Add the narrow totals to a unit's ``own``."""
        builder = self._builder
        for number, place in self._narrow.items():
            independent, reduction = Independent(builder), self._totals[number]
            with independent.loop(builder, self._word(2 + 2 * number)) as index:
                into = builder.gep(own[number], [index])
                held, value = builder.load(into), builder.load(builder.gep(self._starts[place], [index]))
                stored = builder.store(reduction.combine(self._context, builder, held, value, False), into)
                for access in (held, value, stored):
                    independent.mark(access)

    def _scale(self, number: int, start: Any) -> None:
        builder, reduction = self._builder, self._totals[number]
        if reduction.op != "mean":
            return
        factor = builder.bitcast(self._word(3 + 2 * number), ir.DoubleType())
        with cgutils.for_range(builder, self._word(2 + 2 * number)) as entry:
            place = builder.gep(start, [entry.index])
            builder.store(builder.fmul(builder.load(place), factor), place)

    def _row(self, at: Sequence[Any]) -> None:
        """Compute one row, whose operands begin ``at``."""
        fixed = [self._load(i, at[i]) if self._steps[i] is ZERO else None for i in range(self._inputs)]
        for loop in self._plan.loops:
            fixed = self._fixed(fixed, loop.before)
            for reduction in self._loop(loop, at, fixed):
                fixed[reduction.value] = self._reduced(reduction)
        fixed = self._fixed(fixed, self._plan.behind)
        for result in self._plan.row_results:
            place = self._inputs + result
            data = self._models[place].as_data(self._builder, fixed[self._expression.results[result]])
            self._builder.store(data, at[place])

    def _fixed(self, known: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
        return self._composition.emit(self._context, self._builder, known, wanted=wanted)

    def _reduced(self, reduction: _Sum) -> Any:
        """What a member reduced the row to, of its own type."""
        builder, kind = self._builder, self._composition.kinds[reduction.value]
        total = builder.load(reduction.total)
        if reduction.whole.op == "mean":
            total = builder.fdiv(total, builder.sitofp(self._length, total.type))
        return self._context.cast(builder, total, reduction.whole.held, kind)

    # ── one loop over a row ──────────────────────────────────────────────────────────────────────────────────────────

    def _loop(self, loop: Loop, at: Sequence[Any], fixed: Sequence[Any]) -> list[_Sum]:
        """Emit one of the loops over a row; answers its reductions."""
        builder = self._builder
        reductions = [self._begun(n) for n in loop.reductions]
        totals = {number: self._total(number, at) for number in loop.totals}
        sums = {n: made for n, made in totals.items() if made is not None}
        columns = [n for n in totals if n not in sums]
        every = [(self._member(reduction.value).operands[0], reduction) for reduction in reductions]
        every += [(self._expression.reductions[n][0], made) for n, made in sums.items()]
        short = [(n, reduction) for n, reduction in every if reduction.short is not reduction.total]
        if short:
            with in_blocks(builder, self._length, BLOCK) as (start, many):
                for _, reduction in short:
                    builder.store(reduction.within.neutral(), reduction.short)
                here = [self._moved(place, start, step) for place, step in zip(at, self._steps, strict=True)]
                self._entries(loop, here, many, fixed, every, columns)
                for _, reduction in short:
                    whole, part = builder.load(reduction.total), builder.load(reduction.short)
                    part = self._context.cast(builder, part, reduction.within.held, reduction.whole.held)
                    builder.store(builder.fadd(whole, part), reduction.total)
        else:
            self._entries(loop, at, self._length, fixed, every, columns)
        for number, made in sums.items():
            builder.store(builder.load(made.total), at[self._first_total + number])
        return reductions

    def _begun(self, n: int) -> _Sum:
        """The member ``n``, which reduces the row, before its first entry."""
        taken = self._member(n).operands[0]
        held = held_dtype(self._member(n).op, self._expression.dtypes[taken])
        whole = Reducing(self._member(n).op, self._composition.kinds[taken], numpy_support.from_dtype(held))
        return self._sum(n, whole, whole.neutral())

    def _total(self, number: int, at: Sequence[Any]) -> _Sum | None:
        """The total of the expression's reduction ``number``, if it is one for all of the row."""
        place = self._first_total + number
        if self._steps[place] is ONE:
            return None
        return self._sum(self._expression.reductions[number][0], self._totals[number], self._builder.load(at[place]))

    def _sum(self, value: int, whole: Reducing, begin: Any) -> _Sum:
        builder = self._builder
        total = cgutils.alloca_once_value(builder, begin)
        if whole.kind != types.float32 or whole.op not in ("sum", "mean"):
            return _Sum(value, whole, total, whole, total)
        within = Reducing("sum", types.float32, types.float32)
        return _Sum(value, whole, total, within, cgutils.alloca_once(builder, ir.FloatType()))

    def _entries(
        self,
        loop: Loop,
        at: Sequence[Any],
        count: Any,
        fixed: Sequence[Any],
        every: Sequence[tuple[int, _Sum]],
        columns: Sequence[int],
    ) -> None:
        """Compute ``count`` entries that lie one after another."""
        builder, independent = self._builder, Independent(self._builder)
        with independent.loop(builder, count) as index:
            places = [self._moved(place, index, step) for place, step in zip(at, self._steps, strict=True)]
            values = list(fixed)
            for i in loop.reads:
                values[i] = self._load(i, places[i], independent)
            for n in loop.again:
                values[n] = self._load(self._place_kept(n), places[self._place_kept(n)], independent)
            values = self._composition.emit(self._context, builder, values, independent.mark, loop.computes)
            for result in loop.writes:
                self._store(self._inputs + result, values[self._expression.results[result]], places, independent)
            for n in loop.keeps:
                self._store(self._place_kept(n), values[n], places, independent)
            for n, reduction in every:
                total = builder.load(reduction.short)
                builder.store(reduction.within.combine(self._context, builder, total, values[n], True), reduction.short)
            for number in columns:
                self._add_to_column(number, values[self._expression.reductions[number][0]], places, independent)

    def _add_to_column(self, number: int, value: Any, places: Sequence[Any], independent: Independent) -> None:
        """Take an entry into the total of its column."""
        builder, reduction = self._builder, self._totals[number]
        place = places[self._narrow.get(number, self._first_total + number)]
        if number in self._narrow:
            reduction = Reducing("sum", reduction.kind, reduction.kind)
        held = builder.load(place)
        stored = builder.store(reduction.combine(self._context, builder, held, value, False), place)
        for access in (held, stored):
            independent.mark(access)

    def _member(self, n: int) -> Any:
        return self._expression.members[n - self._inputs]

    def _place_kept(self, n: int) -> int:
        return self._first_kept + self._plan.kept.index(n)

    def _load(self, operand: int, place: Any, independent: Independent | None = None) -> Any:
        loaded = self._builder.load(place)
        if independent is not None:
            independent.mark(loaded)
        return self._models[operand].from_data(self._builder, loaded)

    def _store(self, operand: int, value: Any, places: Sequence[Any], independent: Independent) -> None:
        data = self._models[operand].as_data(self._builder, value)
        independent.mark(self._builder.store(data, places[operand]))

    def _moved(self, place: Any, index: Any, step: Any) -> Any:
        return place if step is ZERO else self._builder.gep(place, [index])
