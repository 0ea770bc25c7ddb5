"""When a step may be run by one direct call: it is one tape that lies straight between feeds and fetches.

Law: a plan is made after a run that went well in the caller's thread, so what it needs is compiled, its variables are
there, and it is known whether a crew is of use. It has a buffer of its own, and one call at a time. It lets the GIL go
while it runs, unless that takes longer than what is run.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.launch import REPEATED
from flowrt.kernels.run.direct import MOST_OUTPUTS, RunTerms, plan_words
from flowrt.sched.host.memory import counted
from flowrt.sched.tape.interrupts import note_plan

if TYPE_CHECKING:
    from flowrt.sched.host.host import Host
    from flowrt.sched.tape.tape import Tape
    from flowrt.sched.units import Unit

Array: TypeAlias = np.ndarray[Any, Any]

_NO_VARIABLES = (ctypes.c_int64 * 3)()
KEPT_SECONDS = 20e-6  # for which a tape keeps the GIL: to have it again from who took it may cost 50


class Numbers:
    """The numbers of a session's runs, each above those before it; and whether the session is open, as a word."""

    def __init__(self) -> None:
        self.counter = itertools.count(1)
        self._aside = itertools.count(-1, -1)
        self._again = itertools.count(REPEATED, REPEATED)
        self.base = (ctypes.c_int64 * 1)()
        self.gate = (ctypes.c_int64 * 1)()

    def fresh(self) -> int:
        """A number above that of every run so far. From any thread."""
        return self.base[0] + next(self.counter)

    def next(self) -> int:
        """What `fresh` would answer; takes nothing."""
        return self.base[0] + int(repr(self.counter)[len("count(") : -1])  # the one way to look at it without a turn

    def aside(self) -> int:
        """A number, below 0, for a run beside the program's own, whose draws must not hang on it."""
        return next(self._aside)

    def initial(self, place: int) -> int:
        """A number, each time another one, for the run that gives the ``place``-th group of variables initial values.

        What is drawn hangs on the place alone: not on how often that is done, nor on what has run before.
        """
        return place + next(self._again)

    def skip(self, number: int) -> None:
        """Number the runs to come from at least ``number``."""
        self.base[0] += max(0, number - self.next())


def direct_plan(
    host: Host,
    unit: Unit,
    tape: Tape,
    given: Mapping[int, Array],
    wanted: Sequence[int],
    numbers: Numbers,
    seed: int,
) -> tuple[Any, ...] | None:
    """The plan of a direct call for arrays like those of a run that just ended; None where there can be none.

    ``given`` are its arguments in order, by the values of the step's plan that they are; ``wanted`` are outputs of the
    tape. The plan is kept with the tape for as long as the variables lie where they lay, and runs are numbered and
    drawn for as they were.
    """
    variables, crew = host.variables, host.lanes.crew
    made = tape.direct
    if made is not None and made[:2] == (variables.changes, (numbers, seed)):
        return made[2]
    if tape.passes_on or len(tape.recording.outputs) > MOST_OUTPUTS:
        return None
    together = variables.together(unit.reads, unit.writes)
    if together is None:
        return None
    changes, memory = variables.changes, together.memory  # in this order: what comes between outdates the plan
    needed = zip(tape.variables, tape.recording.variable_specs, strict=True)
    found = [variables.find(name, spec) for name, spec in needed]
    laid = [value for value in found if value is not None and value.flags.c_contiguous]
    if memory is None or len(laid) < len(found):
        return None
    buffer, place, first = tape.lay(seed, laid, crew)
    cells = {value: first + 8 * number for number, value in enumerate(unit.inputs)}
    arguments = [(spec_of(array), cells.get(value, 0)) for value, array in given.items()]
    after = first + 8 * len(unit.inputs)
    specs = [output.spec for output in tape.recording.outputs]
    made_at = dict(zip(unit.outputs, [(spec, after + 8 * number) for number, spec in enumerate(specs)], strict=True))
    made_there = [made_at[value] for value in dict.fromkeys(wanted)]
    outputs = [(spec, cell, _maker(tape, spec)) for spec, cell in made_there]

    def fail(reached: int, status: int, number: int) -> None:
        raise tape.failure(buffer, reached, status, number)

    terms = RunTerms(
        numbers.gate,
        numbers.counter,
        numbers.base,
        variables.words if laid else _NO_VARIABLES,
        changes if laid else 0,
        together.words,
        memory if laid else (),
        variables.grant,
        tape.expected_seconds > KEPT_SECONDS,
        fail,
    )
    # not the variables' memory: where that is let go, ``changes`` have changed
    plan = (*plan_words(place, terms, arguments, outputs), together, buffer, tape, crew)
    tape.direct = changes, (numbers, seed), plan
    note_plan(buffer, plan[0])
    return plan


def _maker(tape: Tape, spec: Spec) -> Callable[[], Array] | None:
    """Who makes an output, where that is more than asking NumPy."""
    return partial(tape.fresh_output, spec.concrete, spec.dtype) if counted(spec.nbytes) else None
