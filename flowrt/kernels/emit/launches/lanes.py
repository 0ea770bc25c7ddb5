"""Entries alike of an iteration of scalars, computed by loops over memory on the stack, which LLVM makes vectors of.

A value of an iteration is one of LLVM's, or a `Spot` among others that lie side by side: such a loop reads these where
they are. Others are brought together first, constants once, ahead of all iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flowrt.kernels.composite.iteration import LEAST_LANES, LaneValues
from flowrt.kernels.emit.abi import WORD
from flowrt.kernels.emit.compose import Composition, Independent, infer_narrow, infer_types


@dataclass(frozen=True, slots=True)
class Spot:
    """Entry ``index`` of those that lie side by side from ``start`` on, and its value, if that is loaded."""

    start: Any
    index: int
    kind: Any
    value: Any = None

    def place(self, builder: Any) -> Any:
        """A pointer to it."""
        return builder.gep(self.start, [ir.Constant(WORD, self.index)])


@dataclass(frozen=True, slots=True)
class TypedLanes:
    """Entries alike whose members Numba has typed: as they are, narrow ones and what tells whether these fit."""

    facts: LaneValues
    composition: Composition
    narrow: tuple[Composition, Composition] | None


def typed_lanes(typing_context: Any, lanes: LaneValues) -> TypedLanes:
    """Entries alike whose members Numba has typed and lowered."""
    narrow = infer_narrow(typing_context, lanes.expression)
    return TypedLanes(lanes, infer_types(typing_context, lanes.expression), narrow)


class _Rolled(Independent):
    """A loop that is not unrolled before it can be made one of vectors."""

    def _close(self, branch: Any, interleaved: int) -> None:
        super()._close(branch, interleaved)
        loop, module = branch.metadata["llvm.loop"], branch.module
        fact = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
        loop.operands = (*loop.operands, fact)


class LanesEmitter:
    """Emits entries alike; ``ahead`` is a block before all iterations, and ``fixed`` are values known there."""

    def __init__(self, context: Any, builder: Any, ahead: Any, fixed: Sequence[Any]) -> None:
        self._context, self._builder, self._ahead = context, builder, ahead
        self._fixed = {id(value) for value in fixed}
        self._brought: dict[tuple[int, ...], Any] = {}

    def scalar(self, value: Any) -> Any:
        """A value as one of LLVM's."""
        if not isinstance(value, Spot):
            return value
        if value.value is not None:
            return value.value
        return self._context.unpack_value(self._builder, value.kind, value.place(self._builder))

    def is_fixed(self, value: Any) -> bool:
        """Whether a value is known ahead of all iterations."""
        return id(value.value if isinstance(value, Spot) else value) in self._fixed

    def flag_ahead(self) -> Any:
        """A place for a bit that is 0 ahead of all iterations."""
        place = cgutils.alloca_once(self._builder, ir.IntType(1))
        with self._builder.goto_block(self._ahead):
            self._builder.store(ir.Constant(ir.IntType(1), 0), place)
        return place

    def emit(self, lanes: TypedLanes, values: Sequence[Any]) -> list[Spot]:
        """The results of every member, lane by lane."""
        count, composition = lanes.facts.count, lanes.composition
        known: list[Any] = []
        places: list[Any] = []
        for kind, taken in zip(composition.kinds, lanes.facts.taken, strict=False):
            is_one = len(taken) == 1
            known.append(self.scalar(values[taken[0]]) if is_one else None)
            places.append(None if is_one else self.together(kind, [values[i] for i in taken]))
        kinds = composition.kinds[len(known) :]
        results = [self._memory(kind, count) for kind in kinds]
        if lanes.narrow is None:
            self._each(count, composition, known, places, results)
        else:
            narrow, fits = lanes.narrow
            with self._builder.if_else(self._fits(count, fits, known, places)) as (then, otherwise):
                with then:
                    self._each(count, narrow, known, places, results)
                with otherwise:
                    self._each(count, composition, known, places, results)
        return [Spot(start, i, kind) for start, kind in zip(results, kinds, strict=True) for i in range(count)]

    def together(self, kind: Any, values: Sequence[Any]) -> Any:
        """A pointer to where values lie side by side, brought there if need be."""
        found = side_by_side(values)
        if found is not None:
            return found.place(self._builder)
        loaded = [value.value if isinstance(value, Spot) else value for value in values]
        if self._fixed.issuperset(map(id, loaded)):
            name = tuple(map(id, loaded))
            if name not in self._brought:
                with self._builder.goto_block(self._ahead):
                    self._brought[name] = self._stored(kind, loaded)
            return self._brought[name]
        return self._stored(kind, [self.scalar(value) for value in values])

    def _stored(self, kind: Any, values: Sequence[Any]) -> Any:
        memory = self._memory(kind, len(values))
        for number, value in enumerate(values):
            self._context.pack_value(self._builder, kind, value, self._builder.gep(memory, [ir.Constant(WORD, number)]))
        return memory

    def _memory(self, kind: Any, count: int) -> Any:
        return memory(self._context, self._builder, kind, count)

    # Loops

    def _each(
        self, count: int, composition: Composition, known: Sequence[Any], places: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Compute all members for every lane."""
        loop = _Rolled(self._builder)
        with loop.loop(self._builder, ir.Constant(WORD, count)) as index:
            values = self._values(composition, known, places, index, loop)
            for kind, value, start in zip(composition.kinds[len(known) :], values[len(known) :], results, strict=True):
                data = self._context.data_model_manager[kind].as_data(self._builder, value)
                loop.mark(self._builder.store(data, self._builder.gep(start, [index])))

    def _fits(self, count: int, fits: Composition, known: Sequence[Any], places: Sequence[Any]) -> Any:
        """Whether narrow members do for every lane."""
        builder, loop, wide = self._builder, _Rolled(self._builder), ir.IntType(32)
        beyond = cgutils.alloca_once_value(builder, ir.Constant(wide, 0))
        with loop.loop(builder, ir.Constant(WORD, count)) as index:
            values = self._values(fits, known, places, index, loop)
            for number in fits.expression.results:
                fit = self._context.cast(builder, values[number], fits.kinds[number], types.boolean)
                flag = builder.zext(builder.not_(fit), wide)
                builder.store(builder.or_(builder.load(beyond), flag), beyond)
        return builder.icmp_unsigned("==", builder.load(beyond), ir.Constant(wide, 0))

    def _values(
        self, composition: Composition, known: Sequence[Any], places: Sequence[Any], index: Any, loop: Independent
    ) -> list[Any]:
        """All values of a lane."""
        taken = list(known)
        for number, place in enumerate(places):
            if place is not None:
                data = self._builder.load(self._builder.gep(place, [index]))
                loop.mark(data)
                taken[number] = self._context.data_model_manager[composition.kinds[number]].from_data(
                    self._builder, data
                )
        return composition.emit(self._context, self._builder, taken, loop.mark)


def memory(context: Any, builder: Any, kind: Any, count: int) -> Any:
    """Room for so many entries side by side."""
    found = cgutils.alloca_once(builder, context.get_data_type(kind), size=count)
    found.align = 32
    return found


def side_by_side(values: Sequence[Any]) -> Spot | None:
    """The first of values that lie side by side in their order; None where they do not."""
    first = values[0]
    if not isinstance(first, Spot):
        return None
    for number, value in enumerate(values, first.index):
        if not isinstance(value, Spot) or value.start is not first.start or value.index != number:
            return None
    return first


class CarriedState:
    """What a loop carries: many entries of one kind that follow one another lie side by side on the stack, the others
    in places that LLVM makes registers of."""

    def __init__(
        self, context: Any, builder: Any, kinds: Sequence[Any], first: Sequence[Any], lanes: LanesEmitter
    ) -> None:
        self._context, self._builder, self._lanes = context, builder, lanes
        self._runs = list(_runs(kinds))
        self._places: list[Any] = []
        for start, end in self._runs:
            kind = kinds[start]
            many = end - start >= LEAST_LANES
            place = memory(context, builder, kind, end - start) if many else _place(context, builder, kind)
            self._places.append(place)
        self._kinds = kinds
        self.store(first)

    def values(self) -> list[Any]:
        """What is carried at present."""
        found: list[Any] = []
        for (start, end), place in zip(self._runs, self._places, strict=True):
            kind = self._kinds[start]
            if end - start >= LEAST_LANES:
                found += [Spot(place, i, kind) for i in range(end - start)]
            else:
                found.append(self._builder.load(place))
        return found

    def store(self, answers: Sequence[Any]) -> None:
        """Carry other values on, which may be some of those carried so far."""
        moved = [self._moved(answers[start:end]) for start, end in self._runs]
        for (start, end), place, (source, values) in zip(self._runs, self._places, moved, strict=True):
            if end - start < LEAST_LANES:
                self._builder.store(values[0], place)
            elif source is not None:
                cgutils.raw_memcpy(self._builder, place, source, ir.Constant(WORD, end - start), self._bytes(start))
            else:
                for number, value in enumerate(values):
                    spot = Spot(place, number, self._kinds[start])
                    self._context.pack_value(self._builder, spot.kind, value, spot.place(self._builder))

    def _moved(self, answers: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Where values lie side by side, and not in what is to be written; else the values."""
        found = side_by_side(answers) if len(answers) >= LEAST_LANES else None
        if found is not None and not any(found.start is place for place in self._places):
            return found.place(self._builder), []
        return None, [self._lanes.scalar(value) for value in answers]

    def _bytes(self, start: int) -> int:
        return int(self._context.get_abi_sizeof(self._context.get_data_type(self._kinds[start])))


def _place(context: Any, builder: Any, kind: Any) -> Any:
    return cgutils.alloca_once(builder, context.get_value_type(kind))


def _runs(kinds: Sequence[Any]) -> list[tuple[int, int]]:
    """Stretches of many entries of one kind, and others one by one."""
    found, start = [], 0
    for end in range(1, len(kinds) + 1):
        if end < len(kinds) and kinds[end] == kinds[start]:
            continue
        many = end - start >= LEAST_LANES
        found += [(start, end)] if many else [(i, i + 1) for i in range(start, end)]
        start = end
    return found
