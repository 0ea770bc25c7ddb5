"""An iteration of scalars in the making: entries of small tensors by their numbers, and what is made of them.

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

from flowrt.base.spec import is_float, is_half
from flowrt.kernels.composite.iteration import (
    LEAST_LANES,
    InnerLoop,
    LaneValues,
    Lookup,
    PlainMember,
    ScalarIteration,
    make_iteration,
    make_lanes,
)
from flowrt.kernels.language.composing import is_scalar_function
from flowrt.kernels.language.table import broadcast, find_kernel, is_costly

if TYPE_CHECKING:
    from flowrt.kernels.composite.scalar_loop import LookedUp

Entries: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""A value: the number of every entry, in the value's shape."""

MOST_MEMBERS = 640
"""A longer body is worth its launches, and would take long to compile."""
MOST_COSTLY = 24
"""Entries, beyond one of each op, of functions that are computed one by one here, and by a launch in vectors."""
MANY_LANES, MANY_MEMBERS = 32, 8
"""So many entries alike, or members of them, are computed in a loop although each is an instruction or two."""
MOST_ENTRIES = 256
"""Of one value."""


@dataclass(frozen=True, slots=True)
class TableAddress:
    """A value that is left in memory: the number of the constant that is its address."""

    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Value: TypeAlias = "Entries | TableAddress"


class Unfit(Exception):
    """What is to be unrolled is not of few scalars, or not of functions of scalars; the text says what it has."""


@lru_cache(1024)
def _is_member(op: str, dtypes: tuple[np.dtype[Any], ...]) -> bool:
    """Whether ``op`` on these dtypes (inputs, then output) is a function of scalars of flowrt's own."""
    found = find_kernel(op, "cpu", dtypes)
    return found is not None and found.layout is broadcast and is_scalar_function(op, dtypes)


@dataclass(slots=True)
class SharedValues:
    """What all iterations of a program share: constants; those of them that the kernel shall not know; captured tables,
    by the constant that is their address; others, which are to be kept; the nodes that look something up."""

    constants: list[np.generic] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    captured: dict[int, int] = field(default_factory=dict)
    held: list[np.ndarray[Any, Any]] = field(default_factory=list)
    looks: list[LookedUp] = field(default_factory=list)

    def known(self) -> tuple[int | None, ...]:
        """The constants as far as the kernel shall know them: much follows from a divisor, little from a factor."""
        return tuple(None if n in self.unknown or is_float(c.dtype) else int(c) for n, c in enumerate(self.constants))

    def word(self, value: int) -> int:
        """The number of a constant that the kernel finds in its block."""
        self.unknown.add(len(self.constants))
        self.constants.append(np.int64(value))
        return -len(self.constants)

    def captured_table(self, operand: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TableAddress:
        """A captured operand as a table."""
        place = self.word(0)
        self.captured[-1 - place] = operand
        return TableAddress(place, shape, dtype)

    def constant_table(self, array: np.ndarray[Any, Any]) -> TableAddress:
        """An array as a table."""
        self.held.append(np.ascontiguousarray(array))
        return TableAddress(self.word(self.held[-1].ctypes.data), array.shape, array.dtype)


@dataclass(slots=True)
class Alike:
    """Entries alike in the making: the entries they take, lane by lane or one for all, and members that take the
    inputs by their numbers and members, counted from 0, from -1 downwards."""

    count: int
    taken: list[tuple[int, ...]] = field(default_factory=list)
    members: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    made: list[tuple[int, ...]] = field(default_factory=list)

    def operand(self, lanes: tuple[int, ...]) -> int:
        """Which operand of a member those entries are."""
        if lanes in self.made:
            return -1 - self.made.index(lanes)
        one = lanes[:1] if len(set(lanes)) == 1 else lanes
        if one not in self.taken:
            self.taken.append(one)
        return self.taken.index(one)

    @property
    def is_worth_loop(self) -> bool:
        """Whether a loop over memory is faster than members one by one, which LLVM may find vectors in."""
        costly = any(is_costly(op) for op, _, _ in self.members)
        return costly or self.count >= MANY_LANES or len(self.members) >= MANY_MEMBERS

    def one_by_one(self, final: Callable[[int], int]) -> list[PlainMember]:
        """The members of every lane, by what numbers are in the end."""
        found = []
        for op, operands, kind in self.members:
            lanes = [self.taken[n] if n >= 0 else self.made[-1 - n] for n in operands]
            found += [(op, tuple(final(of[i % len(of)]) for of in lanes), kind) for i in range(self.count)]
        return found

    def lanes(self, dtype: Callable[[int], np.dtype[Any]], final: Callable[[int], int]) -> LaneValues:
        """The lanes, by what numbers are in the end."""
        inputs = len(self.taken)
        members = [
            (op, tuple(n if n >= 0 else inputs - 1 - n for n in operands), kind) for op, operands, kind in self.members
        ]
        dtypes = [str(dtype(taken[0])) for taken in self.taken]
        return make_lanes(dtypes, members, [tuple(map(final, taken)) for taken in self.taken], self.count)


@dataclass(slots=True)
class Making:
    """An iteration in the making. Entries are known by numbers: inputs, then what is made; constants, which all
    iterations of a program share, from -1 downwards."""

    inputs: Sequence[np.dtype[Any]]
    shared: SharedValues
    parts: list[list[PlainMember] | Alike | Lookup | LoopInside] = field(default_factory=list)
    made: list[np.dtype[Any]] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)  # of what is made, the part that makes it
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

    def alike(self, op: str, operands: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[int]:
        """The numbers of what ``op`` makes of entries lane by lane: together with others alike, where all that it takes
        is there before them or made in the same lanes."""
        if not _is_member(op, (*(self.dtype(lanes[0]) for lanes in operands), dtype)):
            raise Unfit(f"{op}, which is no function of scalars")
        place, part = self._part_for(operands)
        part.members.append((op, tuple(part.operand(lanes) for lanes in operands), str(dtype)))
        self.count(-(-part.count // LEAST_LANES))
        part.made.append(tuple(self._number([dtype] * part.count, place)))
        return list(part.made[-1])

    def _part_for(self, operands: Sequence[tuple[int, ...]]) -> tuple[int, Alike]:
        """The last part of as many lanes, if it can hold what takes these; else a new one."""
        count = len(operands[0])
        for place in reversed(range(len(self.parts))):
            part = self.parts[place]
            if isinstance(part, Alike) and part.count == count:
                others = [n for lanes in operands if lanes not in part.made for n in lanes]
                if all(self._maker(n) < place for n in others):
                    return place, part
                break
        made = Alike(count)
        self.parts.append(made)
        return len(self.parts) - 1, made

    def are_made_alike(self, lanes: tuple[int, ...]) -> bool:
        """Whether entries are made lane by lane."""
        place = self._maker(lanes[0])
        return place >= 0 and isinstance(self.parts[place], Alike)

    def lie_together(self, lanes: tuple[int, ...]) -> bool:
        """Whether entries are constants, one for all, or will lie side by side in memory."""
        first, *_, last = lanes
        if max(lanes) < 0 or len(set(lanes)) == 1:
            return True
        if lanes != tuple(range(first, first + len(lanes))):
            return False
        place = self._maker(first)
        return place == self._maker(last) and (place < 0 or isinstance(self.parts[place], Alike | LoopInside))

    def _maker(self, number: int) -> int:
        """The part that makes an entry; -1 where it is there before."""
        return -1 if number < len(self.inputs) else self.makers[number - len(self.inputs)]

    def lookup(self, found: Lookup) -> list[int]:
        """The numbers of what a lookup finds."""
        self.parts.append(found)
        self.count(len(found.taken) + len(found.offsets))
        return self._number([found.dtype] * len(found.offsets))

    def inside(self, loop: LoopInside) -> list[int]:
        """The numbers of what a loop inside makes: what it carries last, and how many iterations it took."""
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

    def _number(self, dtypes: list[np.dtype[Any]], place: int = -1) -> list[int]:
        first = len(self.inputs) + len(self.made)
        self.made += dtypes
        self.makers += [place % len(self.parts)] * len(dtypes)
        return list(range(first, first + len(dtypes)))

    def iteration(self, results: Sequence[Entries]) -> ScalarIteration:
        """The iteration that answers ``results``; its inputs are followed by all the program's constants."""
        shift, count = len(self.inputs), len(self.shared.constants)
        order = sorted(range(len(self.makers)), key=self.makers.__getitem__)
        places = {shift + number: shift + count + place for place, number in enumerate(order)}

        def final(number: int) -> int:
            return shift - 1 - number if number < 0 else places.get(number, number)

        constants = tuple(range(shift, shift + count))
        kept = self._loops()
        parts = [self._final_part(part, n in kept, final, constants) for n, part in enumerate(self.parts)]
        dtypes = [*self.inputs, *(c.dtype for c in self.shared.constants)]
        if any(map(is_half, (*dtypes, *self.made))):
            raise Unfit("floats of 16 bits, which are held in memory alone")
        return make_iteration(dtypes, parts, [final(int(n)) for n in flat(results)])

    def _loops(self) -> set[int]:
        """The parts of entries alike that are computed in loops: those worth it, and what takes theirs from memory."""
        kept: set[int] = set()
        for place, part in enumerate(self.parts):
            if isinstance(part, Alike) and (part.is_worth_loop or any(self._maker(n) in kept for n, *_ in part.taken)):
                kept.add(place)
        return kept

    def _final_part(self, part: Any, kept: bool, final: Callable[[int], int], constants: tuple[int, ...]) -> Any:
        match part:
            case LoopInside():
                return part.loop(final, constants)
            case Lookup():
                return part.renumbered(final)
            case Alike():
                return part.lanes(self.dtype, final) if kept else part.one_by_one(final)
        return [(op, tuple(map(final, operands)), dtype) for op, operands, dtype in part]


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The iterations of a loop in the making, and what they answer."""

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
        """What the loops inside an iteration may come to beside what they are predicted to."""
        return self.body.longest + (0.0 if self.cond is None else self.cond.longest)

    def iterations(self) -> tuple[ScalarIteration | None, ScalarIteration]:
        """The condition's iteration and the body's."""
        return None if self.cond is None else self.cond.iteration(self.test), self.body.iteration(self.answers)


@dataclass(frozen=True, slots=True)
class LoopInside:
    """A loop inside an iteration in the making."""

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
            *self.unrolled.iterations(),
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
