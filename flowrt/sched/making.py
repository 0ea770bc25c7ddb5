"""A turn of scalars in the making: entries of small tensors by their numbers, and what is made of them.

Law: pure. A value is an array of numbers, in the value's shape: so what moves entries is an operation on that array.
What is too large, or computed by no function of scalars, raises `Unfit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.kernels.expression import is_scalar_function
from flowrt.kernels.table import broadcast, find_kernel
from flowrt.kernels.turn import InnerLoop, Lookup, PlainMember, Turn, make_turn

if TYPE_CHECKING:
    from flowrt.plan import PlanNode

Entries: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""A value: the number of every entry, in the value's shape."""

MOST_MEMBERS = 640
"""A longer body is worth its launches, and would take long to compile."""
MOST_COSTLY = 24
"""Entries, beyond one of each op, of functions that are computed one by one here, and by a launch in vectors."""
MOST_ENTRIES = 256
"""Of one value."""


@dataclass(frozen=True, slots=True)
class Table:
    """A value that is left in memory: the number of the constant that is its address."""

    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Value: TypeAlias = "Entries | Table"


class Unfit(Exception):
    """What is to be unrolled is not of few scalars, or not of functions of scalars; the text says what it has."""


@lru_cache(1024)
def _is_member(op: str, dtypes: tuple[np.dtype[Any], ...]) -> bool:
    """Whether ``op`` on these dtypes (inputs, then output) is a function of scalars of flowrt's own."""
    found = find_kernel(op, "cpu", dtypes)
    return found is not None and found.layout is broadcast and is_scalar_function(op, dtypes)


@dataclass(slots=True)
class Shared:
    """What all turns of a program share: constants; those of them that the kernel shall not know; captured tables, by
    the constant that is their address; others, which are to be kept; the nodes that look something up."""

    constants: list[np.generic] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    captured: dict[int, int] = field(default_factory=dict)
    held: list[np.ndarray[Any, Any]] = field(default_factory=list)
    looks: list[PlanNode] = field(default_factory=list)

    def known(self) -> tuple[int | None, ...]:
        """The constants as far as the kernel shall know them: much follows from a divisor, little from a factor."""
        return tuple(None if n in self.unknown or c.dtype.kind == "f" else int(c) for n, c in enumerate(self.constants))

    def word(self, value: int) -> int:
        """The number of a constant that the kernel finds in its block."""
        self.unknown.add(len(self.constants))
        self.constants.append(np.int64(value))
        return -len(self.constants)

    def captured_table(self, operand: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Table:
        """A captured operand as a table."""
        place = self.word(0)
        self.captured[-1 - place] = operand
        return Table(place, shape, dtype)

    def constant_table(self, array: np.ndarray[Any, Any]) -> Table:
        """An array as a table."""
        self.held.append(np.ascontiguousarray(array))
        return Table(self.word(self.held[-1].ctypes.data), array.shape, array.dtype)


@dataclass(slots=True)
class Making:
    """A turn in the making. Entries are known by numbers: inputs, then what is made; constants, which all turns of a
    program share, from -1 downwards."""

    inputs: Sequence[np.dtype[Any]]
    shared: Shared
    parts: list[list[PlainMember] | Lookup | Inside] = field(default_factory=list)
    made: list[np.dtype[Any]] = field(default_factory=list)
    members: int = 0
    costly: int = 0
    longest: float = 0.0

    def dtype(self, number: int) -> np.dtype[Any]:
        """The dtype of an entry."""
        if number < 0:
            return self.shared.constants[-1 - number].dtype
        return self.inputs[number] if number < len(self.inputs) else self.made[number - len(self.inputs)]

    def constant(self, array: Any) -> Entries:
        """Constants as entries."""
        flat = np.ravel(np.asarray(array))
        check_entries(flat.size)
        first = len(self.shared.constants)
        self.shared.constants += list(flat)
        return (-1 - np.arange(first, first + flat.size, dtype=np.int64)).reshape(np.shape(array))

    def member(self, op: str, operands: Sequence[int], dtype: np.dtype[Any]) -> int:
        """The number of what ``op`` makes of entries."""
        if not _is_member(op, (*map(self.dtype, operands), dtype)):
            raise Unfit(f"{op}, which is no function of scalars")
        if not self.parts or not isinstance(self.parts[-1], list):
            self.parts.append([])
        part = self.parts[-1]
        assert isinstance(part, list)
        part.append((op, tuple(map(int, operands)), str(dtype)))
        self.count(1)
        return self._number([dtype])[0]

    def lookup(self, found: Lookup) -> list[int]:
        """The numbers of what a lookup finds."""
        self.parts.append(found)
        self.count(len(found.taken) + len(found.offsets))
        return self._number([found.dtype] * len(found.offsets))

    def inside(self, loop: Inside) -> list[int]:
        """The numbers of what a loop inside makes: what it carries last, and how many turns it took."""
        self.parts.append(loop)
        self.count(loop.unrolled.members, loop.unrolled.costly)
        self.longest += loop.longest
        return self._number([*map(self.dtype, loop.first), np.dtype(np.int64)])

    def count(self, members: int, costly: int = 0) -> None:
        """Count so many more members, and such entries of costly functions, and see that there are not too many."""
        self.members += members
        self.costly += costly
        if self.members > MOST_MEMBERS or self.costly > MOST_COSTLY:
            most = f"{MOST_MEMBERS} and {MOST_COSTLY} are worth one kernel"
            raise Unfit(f"{self.members} functions of scalars and {self.costly} entries of costly ones: {most}")

    def _number(self, dtypes: list[np.dtype[Any]]) -> list[int]:
        first = len(self.inputs) + len(self.made)
        self.made += dtypes
        return list(range(first, first + len(dtypes)))

    def turn(self, results: Sequence[Entries]) -> Turn:
        """The turn that answers ``results``; its inputs are followed by all the program's constants."""
        shift, count = len(self.inputs), len(self.shared.constants)

        def final(number: int) -> int:
            return shift - 1 - number if number < 0 else number if number < shift else number + count

        constants = tuple(range(shift, shift + count))
        parts: list[Any] = [
            part.loop(final, constants)
            if isinstance(part, Inside)
            else part.renumbered(final)
            if isinstance(part, Lookup)
            else [(op, tuple(map(final, operands)), dtype) for op, operands, dtype in part]
            for part in self.parts
        ]
        dtypes = [*self.inputs, *(c.dtype for c in self.shared.constants)]
        return make_turn(dtypes, parts, [final(int(n)) for n in flat(results)])


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The turns of a loop in the making, and what they answer."""

    cond: Making | None
    test: Sequence[Entries]
    body: Making
    answers: Sequence[Entries]

    @property
    def members(self) -> int:
        return self.body.members + (0 if self.cond is None else self.cond.members)

    @property
    def costly(self) -> int:
        return self.body.costly + (0 if self.cond is None else self.cond.costly)

    @property
    def longest(self) -> float:
        """What the loops inside a turn may come to beside what they are predicted to."""
        return self.body.longest + (0.0 if self.cond is None else self.cond.longest)

    def turns(self) -> tuple[Turn | None, Turn]:
        """The condition's turn and the body's."""
        return None if self.cond is None else self.cond.turn(self.test), self.body.turn(self.answers)


@dataclass(frozen=True, slots=True)
class Inside:
    """A loop inside a turn in the making."""

    unrolled: Unrolled
    first: Sequence[int]
    captured: Sequence[int]
    limit: int | None
    count: int | None
    guard: int | None
    longest: float

    def loop(self, final: Callable[[int], int], constants: tuple[int, ...]) -> InnerLoop:
        """The loop, by what numbers are in the end; its inputs end with all constants, too."""
        return InnerLoop(
            *self.unrolled.turns(),
            tuple(map(final, self.first)),
            (*map(final, self.captured), *constants),
            self.limit,
            None if self.count is None else final(self.count),
            None if self.guard is None else final(self.guard),
        )


def flat(values: Sequence[Entries]) -> list[int]:
    """The numbers of all entries of some values."""
    return [int(n) for value in values for n in np.ravel(value)]


def numbered(shapes: Sequence[tuple[int, ...]]) -> list[Entries]:
    """Values of these shapes whose entries are numbered one after another."""
    found, first = [], 0
    for shape in shapes:
        size = math.prod(shape)
        check_entries(size)
        found.append(np.arange(first, first + size, dtype=np.int64).reshape(shape))
        first += size
    return found


def check_entries(size: int) -> None:
    """Raise `Unfit` where a value has more than `MOST_ENTRIES` entries."""
    if size > MOST_ENTRIES:
        raise Unfit(f"a value of {size} entries, above {MOST_ENTRIES}")
