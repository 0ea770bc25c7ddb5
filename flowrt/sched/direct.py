"""When a step may be run by one direct call: it is one short tape that lies straight between feeds and fetches.

Law: a plan is made after a run that went well in the caller's thread, so what it needs is compiled and its variables
are there. It keeps the GIL while it runs: hence only tapes that are over sooner than threads would take turns.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.kernels.direct import MOST_OUTPUTS, plan_words
from flowrt.spec import spec_of

if TYPE_CHECKING:
    from flowrt.sched.executor import Executor
    from flowrt.sched.tape import Tape
    from flowrt.sched.units import Unit

Array: TypeAlias = np.ndarray[Any, Any]

DIRECT_SECONDS = 50e-6


class Numbers:
    """The numbers of a session's runs, each above those before it; and whether the session is open, as a word."""

    def __init__(self) -> None:
        self.counter = itertools.count(1)  # 0 is the initialisation's
        self.base = (ctypes.c_int64 * 1)()
        self.gate = (ctypes.c_int64 * 1)()

    def fresh(self) -> int:
        """A number above that of every run so far. From any thread."""
        return self.base[0] + next(self.counter)

    def skip(self, number: int) -> None:
        """Number the runs to come from at least ``number``."""
        self.base[0] += max(0, number - self.fresh() - 1)


def direct_plan(
    executor: Executor, unit: Unit, tape: Tape, inputs: Sequence[Array], numbers: Numbers, seed: int
) -> tuple[Any, ...] | None:
    """The plan of a direct call for feeds like those of a run that just ended; None where there can be none.

    ``inputs`` are the feeds. The plan is kept with the tape for as long as the variables lie where they lay.
    """
    variables = executor.host.variables
    made = tape.direct
    if made is not None and made[0] == variables.words[1]:
        return made[1]
    if tape.passes_on or len(tape.recording.outputs) > MOST_OUTPUTS:
        return None
    changes, memory = variables.words[1], []
    for name, spec in zip(tape.variables, tape.recording.variable_specs, strict=True):
        value = variables.find(name, spec)
        if value is None or not value.flags.c_contiguous:
            return None
        memory.append(value)
    room, place, first = tape.lay(seed, memory)
    cells = {value: first + 8 * number for number, value in enumerate(unit.inputs)}
    arguments = [(spec_of(array), cells.get(value, 0)) for value, array in enumerate(inputs)]
    after = first + 8 * len(unit.inputs)
    outputs = [(output.spec, after + 8 * number) for number, output in enumerate(tape.recording.outputs)]

    def fail(reached: int, status: int) -> None:
        raise tape.failure(reached, status)

    words = plan_words(
        place, arguments, outputs, numbers.gate, variables.words, numbers.counter, numbers.base, fail, changes
    )
    plan = (*words, room, tape)  # not the variables' memory: where that is let go, ``changes`` have changed
    tape.direct = changes, plan
    return plan
