"""What a region comes to: launches in order, and where every value lies. `tape.recording` makes it.

Slots of the bases: the run's words, the arena, the running thread's local memory, the region's inputs, its fresh
outputs, its variables, its constants, and what loops and branches point at from iteration to iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.sched.host.arena import ALIGNMENT

if TYPE_CHECKING:
    from typing import Any

    from flowrt.base.spec import Spec
    from flowrt.kernels.launch import Launchable, Operand
    from flowrt.kernels.store.background import CompileOrder
    from flowrt.sched.regions.regions import Name

WORDS_SLOT, ARENA_SLOT, LOCAL_SLOT, FIRST_SLOT = 0, 1, 2, 3


@valueclass
class Stretch:
    """Bytes that a launch touches: from ``begin`` up to ``end`` of a slot."""

    slot: int
    begin: int
    end: int
    written: bool


@valueclass
class Launch:
    """One call of an entry: its operands' places and sizes, and the plan's node it is part of.

    ``also`` are other nodes that it is part of. ``control`` are plan nodes that must be done before it and may share no
    memory with it: those that its nodes wait for, and those that an assignment waits for which this launch carries out
    by writing straight to the variable.
    """

    step: Launchable
    places: tuple[Operand, ...]
    node: int
    sizes: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    seconds: float = 0.0  # roughly
    also: tuple[int, ...] = ()

    def stretches(self) -> Iterator[Stretch]:
        """The shared memory it reads and writes; what it writes may also be read by it."""
        for position, number in enumerate(self.step.operands):
            place, nbytes = self.places[number], self.sizes[number]
            if nbytes and place.slot != LOCAL_SLOT:
                yield Stretch(place.slot, place.offset, place.offset + nbytes, position >= self.step.reads)


@valueclass
class RowWrite:
    """A write of some rows of the variables ``names``, by a launch: where the ``groups`` of their indices lie then."""

    launch: int
    names: tuple[Name, ...]
    place: Operand
    groups: Spec


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Where one of the region's outputs comes from: fresh memory (both None), an input, or a constant."""

    spec: Spec
    input: int | None = None
    constant: np.ndarray[Any, Any] | None = None

    @property
    def fresh(self) -> bool:
        """Whether the tape makes it: it is neither an input nor a constant."""
        return self.input is None and self.constant is None


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A region on concrete specs, ready to be compiled into a tape. Sizes are in bytes."""

    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]
    variables: tuple[Name, ...]
    variable_specs: tuple[Spec, ...]
    constants: tuple[np.ndarray[Any, Any], ...]
    arena_bytes: int
    local_bytes: int  # that each thread has for itself
    slots: int  # of the bases, behind the constants, that launches set themselves
    value_bytes: int  # of all that is computed and does not leave, did nothing share its memory
    predicted_seconds: float
    longest_seconds: float  # a guess, of loops whose iterations values count; infinite where without a limit
    row_writes: tuple[RowWrite, ...] = ()  # in the order of their launches
    orders: tuple[CompileOrder, ...] = ()  # what, once it is compiled, makes a better recording
    wishes: tuple[tuple[CompileOrder, int], ...] = ()  # what would, too, and saves too few bytes for an order

    @property
    def output_bytes(self) -> int:
        """What a run takes for the outputs it makes."""
        return sum(output.spec.nbytes for output in self.outputs if output.fresh)

    @property
    def buffer_bytes(self) -> int:
        """What a run takes for the arena and for one thread's own memory, wherever that may begin."""
        return self.arena_bytes + self.local_bytes + ALIGNMENT
