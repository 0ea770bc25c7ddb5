"""What an iteration of a loop of scalars computes: expressions, lanes, lookups and loops inside, one after another.

Law: pure data, told apart by what it holds. An iteration's values are numbered: its inputs first, then what each part
makes: an expression the result of every member, lanes those of every member lane by lane, a lookup what it found, a
loop inside what it carried last and how many iterations it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.composing import express
from flowrt.kernels.language.expression import Expression

PlainMember: TypeAlias = "tuple[str, tuple[int, ...], str]"
"""An op, the numbers of the values it takes, and its result's dtype."""


LEAST_LANES = 8
"""Entries alike that are worth a loop of vectors."""


@valueclass
class LaneValues:
    """An expression of ``count`` entries alike: for each input the values it takes lane by lane, or the one of all."""

    expression: Expression
    taken: tuple[tuple[int, ...], ...]
    count: int


@valueclass
class InnerLoop:
    """A loop inside an iteration, which names that iteration's values by their numbers.

    It takes at most ``limit`` iterations and the value ``count`` of them, and none where the value ``guard`` is false.
    """

    cond: ScalarIteration | None
    body: ScalarIteration
    first: tuple[int, ...]
    captured: tuple[int, ...]
    limit: int | None
    count: int | None
    guard: int | None

    @property
    def taken(self) -> tuple[int, ...]:
        """The numbers of all the values that it takes."""
        return (*self.first, *self.captured, *(n for n in (self.count, self.guard) if n is not None))


@valueclass
class Lookup:
    """Entries of a table, read at the value ``index`` by that iteration's values: those at ``offsets`` from row
    ``index``.

    The value ``table`` is the address of the table, ``size`` how many rows it has, ``pitch`` entries apart; or the
    values ``entries`` are the table. An index below 0 counts from the end; where it may be ``absent``, the least int64
    reads 0. One that is out of range fails, unless the value ``guard`` is false; what is read then is 0. Without an
    index the offsets are those from where the table begins. ``number`` is that of the lookup in the program.
    """

    table: int
    size: int
    index: int | None
    guard: int | None
    pitch: int
    offsets: tuple[int, ...]
    dtype: np.dtype[Any]
    number: int
    entries: tuple[int, ...] = ()
    absent: bool = False

    @property
    def taken(self) -> tuple[int, ...]:
        """The numbers of all the values that it takes."""
        named = self.entries or (self.table,)
        if self.index is None:
            return named
        return (*named, self.size, self.index, *(() if self.guard is None else (self.guard,)))

    def renumbered(self, final: Callable[[int], int]) -> Lookup:
        """The lookup by other numbers of the same values."""
        return replace(
            self,
            table=0 if self.entries else final(self.table),
            size=0 if self.index is None else final(self.size),
            index=None if self.index is None else final(self.index),
            guard=None if self.guard is None else final(self.guard),
            entries=tuple(map(final, self.entries)),
        )


Part: TypeAlias = "Expression | LaneValues | Lookup | InnerLoop"


@valueclass
class ScalarIteration:
    """The body or the condition of a loop of scalars; ``results`` are the numbers of what it answers."""

    inputs: tuple[np.dtype[Any], ...]
    parts: tuple[Part, ...]
    results: tuple[int, ...]

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The dtype of every value, by number."""
        found = self.inputs
        for part in self.parts:
            found += made_by(part)
        return found

    @property
    def answers(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes of what it answers."""
        dtypes = self.dtypes
        return tuple(dtypes[i] for i in self.results)

    @property
    def depth(self) -> int:
        """How many loops around a lookup there are at most, the iteration's own included; 0 where there is no
        lookup."""
        return max((_depth(part) for part in self.parts), default=0)


def _depth(part: Part) -> int:
    if isinstance(part, InnerLoop):
        inside = max(part.body.depth, 0 if part.cond is None else part.cond.depth)
        return inside and inside + 1
    return int(isinstance(part, Lookup))


def made_by(part: Part) -> tuple[np.dtype[Any], ...]:
    """The dtypes of the values that a part of an iteration makes."""
    if isinstance(part, Expression):
        return tuple(member.dtype for member in part.members)
    if isinstance(part, LaneValues):
        return tuple(member.dtype for member in part.expression.members for _ in range(part.count))
    if isinstance(part, Lookup):
        return (part.dtype,) * len(part.offsets)
    return (*part.body.answers, np.dtype(np.int64))


def make_iteration(
    inputs: Sequence[Any],
    parts: Sequence[Sequence[PlainMember] | LaneValues | Lookup | InnerLoop],
    results: Sequence[int],
) -> ScalarIteration:
    """The iteration of these parts, whose expressions are lists of members.

    Raises `GraphError` where a member is none of scalars, or where a value is used that does not come before.
    """
    known = tuple(np.dtype(d) for d in inputs)
    made: list[Part] = []
    for part in parts:
        if isinstance(part, InnerLoop):
            _check(part, len(known))
            made.append(part)
        elif isinstance(part, Lookup):
            _check_lookup(part, known)
            made.append(part)
        elif isinstance(part, LaneValues):
            _check_lanes(part, known)
            made.append(part)
        else:
            numbers = tuple(range(len(known), len(known) + len(part)))
            made.append(express(tuple(map(str, known)), tuple(part), numbers))
        known += made_by(made[-1])
    if any(not 0 <= i < len(known) for i in results):
        raise GraphError(f"an iteration of {len(known)} values cannot answer {tuple(results)}")
    return ScalarIteration(known[: len(inputs)], tuple(made), tuple(results))


def _check(loop: InnerLoop, known: int) -> None:
    if any(not 0 <= i < known for i in loop.taken):
        raise GraphError(f"a loop inside an iteration takes values {loop.taken}, of which only {known} come before")
    taken = len(loop.first) + len(loop.captured)
    for iteration, answers in ((loop.body, len(loop.first)), (loop.cond, 1)):
        if iteration is not None and (len(iteration.inputs) != taken or len(iteration.results) != answers):
            raise GraphError(f"a loop that carries {len(loop.first)} of {taken} values does not fit its bodies")


def make_lanes(
    inputs: Sequence[Any], members: Sequence[PlainMember], taken: Sequence[Sequence[int]], count: int
) -> LaneValues:
    """Entries alike, which answer every member. Raises `GraphError` where one is none of scalars."""
    numbers = tuple(range(len(inputs), len(inputs) + len(members)))
    return LaneValues(express(tuple(inputs), tuple(members), numbers), tuple(map(tuple, taken)), count)


def _check_lanes(lanes: LaneValues, known: Sequence[np.dtype[Any]]) -> None:
    for dtype, taken in zip(lanes.expression.inputs, lanes.taken, strict=True):
        if len(taken) not in (1, lanes.count) or any(not 0 <= i < len(known) or known[i] != dtype for i in taken):
            raise GraphError(f"{lanes.count} lanes of {dtype} cannot be of the values {taken}")


def _check_lookup(lookup: Lookup, known: Sequence[np.dtype[Any]]) -> None:
    if any(not 0 <= i < len(known) for i in lookup.taken):
        raise GraphError(f"a lookup takes values {lookup.taken}, of which only {len(known)} come before")
    if lookup.index is not None and known[lookup.index] != np.int64:
        raise GraphError(f"a lookup at {known[lookup.index]}, which is no int64")
    if any(known[i] != lookup.dtype for i in lookup.entries):
        raise GraphError(f"a lookup of {lookup.dtype} in entries of other dtypes")


def plain_iteration(iteration: ScalarIteration | None) -> Any:
    """The iteration as lists of numbers and names; see `read_iteration`."""
    if iteration is None:
        return None
    return [[d.name for d in iteration.inputs], [_plain_part(part) for part in iteration.parts], iteration.results]


def _plain_part(part: Part) -> list[Any]:
    if isinstance(part, Expression):
        return [[m.op, m.operands, m.dtype.name] for m in part.members]
    if isinstance(part, LaneValues):
        members = [[m.op, m.operands, m.dtype.name] for m in part.expression.members]
        return ["lanes", [d.name for d in part.expression.inputs], members, part.taken, part.count]
    if isinstance(part, Lookup):
        place = [part.table, part.size, part.index, part.guard, part.pitch]
        return ["lookup", *place, part.offsets, part.dtype.name, part.number, part.entries, part.absent]
    bodies = [plain_iteration(part.cond), plain_iteration(part.body)]
    return ["loop", *bodies, part.first, part.captured, part.limit, part.count, part.guard]


def read_iteration(plain: Any) -> ScalarIteration | None:
    """The iteration that was written so. Raises as `make_iteration` does."""
    if plain is None:
        return None
    inputs, parts, results = plain
    return make_iteration(inputs, [_read_part(part) for part in parts], results)


def _read_part(plain: Any) -> list[PlainMember] | LaneValues | Lookup | InnerLoop:
    if plain[0] == "lanes":
        inputs, members, taken, count = plain[1:]
        return make_lanes(inputs, [(op, tuple(operands), dtype) for op, operands, dtype in members], taken, count)
    if plain[0] == "lookup":
        *facts, offsets, dtype, number, entries, absent = plain[1:]
        return Lookup(*(*facts, tuple(offsets), np.dtype(dtype), number, tuple(entries), absent))
    if plain[0] != "loop":
        return [(op, tuple(operands), dtype) for op, operands, dtype in plain]
    cond, body, first, captured, *rest = plain[1:]
    inside = read_iteration(body)
    if inside is None:
        raise GraphError("a loop inside an iteration has no body")
    return InnerLoop(read_iteration(cond), inside, tuple(first), tuple(captured), *rest)
