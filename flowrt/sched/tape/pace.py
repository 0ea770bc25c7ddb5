"""How fast a tape runs, what that says of sharing it, and the memory that the threads sharing it have in common.

Law: a `Pace` learns from its tape's first runs how long each launch takes, and asks `schedule` whether several threads
are worth their trouble; before, a guess decides. It changes nothing that a tape computes. A `Share` belongs to one
buffer and holds what one run at a time needs beside that buffer; its words are laid out as `kernels.run.board` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.kernels.run import board as at
from flowrt.sched.host.lanes import aligned_zeros
from flowrt.sched.tape.schedule import WORTHWHILE, Schedule, control, divide, hazards, worth_a_look

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.regions.recorded import Launch
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.tape.laid_loops import LaidLoop

Array: TypeAlias = "np.ndarray[Any, Any]"

LEARNING = 3  # timed runs: the first is cold, and any may be disturbed
CLOCK = 20  # nanoseconds of a launch's time that are the clock's
GUESS_FROM = 1e-3  # seconds that a tape must be guessed to take to be shared before it was timed
DIVIDING = 50e-6  # seconds that it takes to divide a tape, for each launch: one that runs but once must win them
ITERATION = 10e-6  # seconds that an iteration must take to be shared: from one to the next nobody falls asleep
NO_LOOPS: Mapping[Any, Any] = MappingProxyType({})


class Division:
    """A schedule as the loops read it; immutable. ``loops`` are the divisions of loops whose iterations are shared."""

    __slots__ = ("chunks", "count", "followers", "loops", "schedule", "tasks", "threads")

    def __init__(self, schedule: Schedule, threads: int, loops: Mapping[LaidLoop, Division] = NO_LOOPS) -> None:
        self.schedule, self.threads, self.loops = schedule, threads, loops
        self.count, self.chunks = len(schedule.tasks), schedule.chunks
        followers: list[list[int]] = [[] for _ in schedule.tasks]
        for number, task in enumerate(schedule.tasks):
            for before in task.after:
                followers[before].append(number)
        self.followers = np.array([n for each in followers for n in each] or [0], np.int64)
        self.tasks = np.empty((self.count, at.TASK_WORDS), np.int64)
        stop = 0
        for number, task in enumerate(schedule.tasks):
            start, stop = stop, stop + len(followers[number])
            self.tasks[number] = (task.first, task.stop, task.chunks, start, stop, len(task.after), task.own)


class Share:
    """What one run of a divided tape at a time needs beside its buffer: counters, and the helpers' words and bases.

    ``nodes`` and ``row`` are addresses: of the launches, and of the caller's words and bases. ``local`` is the helpers'
    own memory, in equal parts. ``board`` is the crew's, ``loops`` are the shares of loops, by their cells.
    """

    __slots__ = ("_local", "_words", "address", "division", "loops", "nodes_at")

    def __init__(self, division: Division, nodes: int, row: int, row_words: int, local: Array, board: int) -> None:
        self.division, self.nodes_at, self._local = division, nodes, local
        self.loops: dict[int, Share] = {
            loop.cell: Share(inner, loop.nodes.ctypes.data, row, row_words, local, board)
            for loop, inner in division.loops.items()
        }
        helpers = division.threads - 1
        counters = -(-(at.COUNTERS_END + at.TASK_COUNTERS * division.count + division.chunks) // 16) * 16
        self._words = aligned_zeros(counters + helpers * row_words)
        self.address = int(self._words.ctypes.data)
        self._words[at.NODES], self._words[at.ROW], self._words[at.ROW_WORDS] = nodes, row, row_words
        self._words[at.TASKS], self._words[at.TASK_COUNT] = division.tasks.ctypes.data, division.count
        self._words[at.FOLLOWERS], self._words[at.CHUNKS] = division.followers.ctypes.data, division.chunks
        self._words[at.ROWS] = self.address + 8 * counters
        self._words[at.LOCAL], self._words[at.LOCAL_BYTES] = local.ctypes.data, local.nbytes // helpers
        self._words[at.BOARD], self._words[at.SPAN + 1] = board, division.schedule.tasks[-1].stop

    def time(self, times: int) -> None:
        """Have the next run add each launch's nanoseconds to the words at ``times``, if there are any."""
        self._words[at.TIMES] = times

    def stamp(self, stamps: int) -> None:
        """Have runs that are timed write down at ``stamps`` which thread ran which chunk, and when; nowhere if 0."""
        self._words[at.STAMPS] = stamps

    def lanes(self, rows: Array) -> Array:
        """Whose words these are, by address: 0 for the caller, helpers from 1 on."""
        helpers = (rows - self._words[at.ROWS]) // (8 * self._words[at.ROW_WORDS]) + 1
        return np.where(rows == self._words[at.ROW], 0, helpers)


class Pace:
    """What a tape knows of its speed. ``division`` says how a crew of ``threads`` shares it, None: not at all.

    ``loops`` are those among the launches, by number.
    """

    def __init__(
        self,
        plan: Plan,
        launches: Sequence[Launch],
        threads: int,
        loops: Mapping[int, LaidLoop] = NO_LOOPS,
        region: Region | None = None,
    ) -> None:
        self.threads = threads
        self.left = LEARNING
        self.division: Division | None = None
        self._launches = launches
        self._units = [launch.step.units for launch in launches]
        self._after: list[set[int]] | None = None
        self._plan, self._region = plan, region
        self._fastest: Array | None = None
        self._loops = loops
        self._iterations: dict[LaidLoop, Array] = {}  # what each launch of an iteration took at least
        if threads < 2 or (
            sum(self._units) < 2 and not any(one.divisible for loop in loops.values() for one in loop.all())
        ):
            self.left = 0
        elif sum(launch.seconds for launch in launches) > max(GUESS_FROM, 2 * DIVIDING * len(launches)):
            self.decide([launch.seconds for launch in launches])

    def learn(self, nanoseconds: Array, iterations: Mapping[LaidLoop, Array | None] = NO_LOOPS) -> None:
        """What each launch took in a whole run, and in an iteration of each loop. May be called from any thread."""
        for loop, taken in iterations.items():
            if taken is not None:
                known = self._iterations.get(loop)
                self._iterations[loop] = taken if known is None else np.minimum(known, taken)
        fastest = self._fastest
        self._fastest = fastest = nanoseconds if fastest is None else np.minimum(fastest, nanoseconds)
        self.left -= 1
        if self.left == 0:
            self.decide(_seconds(fastest))
            self._after = self._fastest = None
            self._iterations.clear()

    def decide(self, seconds: Sequence[float]) -> None:
        """Divide the tape anew for launches that take so long."""
        if not worth_a_look(seconds, self.threads):
            self.division = None
            return
        if self._after is None:
            pairs = zip(hazards(self._launches), control(self._plan, self._launches, self._region), strict=True)
            self._after = [shared | ordered for shared, ordered in pairs]
        self.division = self._divided(seconds, self._units, self._after, self._loops, WORTHWHILE)

    def _divided(
        self,
        seconds: Sequence[float],
        units: Sequence[int],
        after: Sequence[Iterable[int]],
        loops: Mapping[int, LaidLoop],
        worthwhile: float,
    ) -> Division | None:
        """A division of launches, loops among them: these whole, or their iterations shared, whichever is better."""
        own: dict[int, float] = {}
        within: dict[LaidLoop, Division] = {}
        for number, loop in loops.items():
            if loop in self._iterations:
                inner = _seconds(self._iterations[loop])
                made = self._divided(inner, loop.units, loop.after, loop.inside, ITERATION)
                if made is not None:
                    own[number] = seconds[number] * made.schedule.seconds / sum(inner)
                    within |= {loop: made, **made.loops}
        shared = divide(seconds, units, after, self.threads, own=own, worthwhile=worthwhile)
        whole = divide(seconds, units, after, self.threads, worthwhile=worthwhile) if own else None
        if shared is not None and (whole is None or shared.seconds <= whole.seconds):
            return Division(shared, self.threads, within)
        return None if whole is None else Division(whole, self.threads)


def _seconds(nanoseconds: Array) -> list[float]:
    """The time of each launch, without the clock's."""
    found: list[float] = (np.maximum(nanoseconds - CLOCK, 1) * 1e-9).tolist()
    return found
