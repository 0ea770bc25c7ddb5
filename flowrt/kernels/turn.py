"""What a turn of a loop of scalars computes: expressions and loops inside, one after another.

Law: pure data, told apart by what it holds. A turn's values are numbered: its inputs first, then what each part makes:
an expression the result of every member, a loop inside what it carried last and how many turns it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels.expression import Expression, express
from flowrt.valueclass import valueclass

PlainMember: TypeAlias = "tuple[str, tuple[int, ...], str]"
"""An op, the numbers of the values it takes, and its result's dtype."""


@valueclass
class InnerLoop:
    """A loop inside a turn, which names that turn's values by their numbers.

    It takes at most ``limit`` turns and the value ``count`` of them, and none where the value ``guard`` is false.
    """

    cond: Turn | None
    body: Turn
    first: tuple[int, ...]
    captured: tuple[int, ...]
    limit: int | None
    count: int | None
    guard: int | None


@valueclass
class Turn:
    """The body or the condition of a loop of scalars; ``results`` are the numbers of what it answers."""

    inputs: tuple[np.dtype[Any], ...]
    parts: tuple[Expression | InnerLoop, ...]
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


def made_by(part: Expression | InnerLoop) -> tuple[np.dtype[Any], ...]:
    """The dtypes of the values that a part of a turn makes."""
    if isinstance(part, Expression):
        return tuple(member.dtype for member in part.members)
    return (*part.body.answers, np.dtype(np.int64))


def make_turn(
    inputs: Sequence[Any], parts: Sequence[Sequence[PlainMember] | InnerLoop], results: Sequence[int]
) -> Turn:
    """The turn of these parts, whose expressions are lists of members.

    Raises `GraphError` where a member is none of scalars, or where a value is used that does not come before.
    """
    known = tuple(np.dtype(d) for d in inputs)
    made: list[Expression | InnerLoop] = []
    for part in parts:
        if isinstance(part, InnerLoop):
            _check(part, len(known))
            made.append(part)
        else:
            numbers = tuple(range(len(known), len(known) + len(part)))
            made.append(express(tuple(map(str, known)), tuple(part), numbers))
        known += made_by(made[-1])
    if any(not 0 <= i < len(known) for i in results):
        raise GraphError(f"a turn of {len(known)} values cannot answer {tuple(results)}")
    return Turn(known[: len(inputs)], tuple(made), tuple(results))


def _check(loop: InnerLoop, known: int) -> None:
    used = [*loop.first, *loop.captured, *(n for n in (loop.count, loop.guard) if n is not None)]
    if any(not 0 <= i < known for i in used):
        raise GraphError(f"a loop inside a turn takes values {used}, of which only {known} come before")
    taken = len(loop.first) + len(loop.captured)
    for turn, answers in ((loop.body, len(loop.first)), (loop.cond, 1)):
        if turn is not None and (len(turn.inputs) != taken or len(turn.results) != answers):
            raise GraphError(f"a loop that carries {len(loop.first)} of {taken} values does not fit its bodies")


def plain_turn(turn: Turn | None) -> Any:
    """The turn as lists of numbers and names; see `read_turn`."""
    if turn is None:
        return None
    return [[d.name for d in turn.inputs], [_plain_part(part) for part in turn.parts], turn.results]


def _plain_part(part: Expression | InnerLoop) -> list[Any]:
    if isinstance(part, Expression):
        return [[m.op, m.operands, m.dtype.name] for m in part.members]
    bodies = [plain_turn(part.cond), plain_turn(part.body)]
    return ["loop", *bodies, part.first, part.captured, part.limit, part.count, part.guard]


def read_turn(plain: Any) -> Turn | None:
    """The turn that was written so. Raises as `make_turn` does."""
    if plain is None:
        return None
    inputs, parts, results = plain
    return make_turn(inputs, [_read_part(part) for part in parts], results)


def _read_part(plain: Any) -> list[PlainMember] | InnerLoop:
    if plain[0] != "loop":
        return [(op, tuple(operands), dtype) for op, operands, dtype in plain]
    cond, body, first, captured, *rest = plain[1:]
    inside = read_turn(body)
    if inside is None:
        raise GraphError("a loop inside a turn has no body")
    return InnerLoop(read_turn(cond), inside, tuple(first), tuple(captured), *rest)
