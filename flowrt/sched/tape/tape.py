"""Tapes: a region whose shapes are known, run by the compiled loop without the GIL.

Law: a tape is immutable, but for what it learns of its own speed; what one run writes to is a *buffer* (words, bases,
span and arena), borrowed for the run and kept for the next, so that any number of threads may run one tape at once.
Arenas are the region's, not the tape's (`arenas`).
What to launch and where values lie is decided in `recording`; here it is only compiled and called.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FlowrtError, GraphError, ResourceError, StepCancelled
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, STATUS, STEP
from flowrt.kernels.run.direct import ARRAY_DATA, RunPlace, available
from flowrt.kernels.store.compiling import batch
from flowrt.kernels.store.parts import DIRECT_PART, LOOP_PARTS
from flowrt.sched.host.memory import Memory, counted
from flowrt.sched.regions.misfits import PlanWithin
from flowrt.sched.regions.recorded import FIRST_SLOT, Launch, Recording, RowWrite
from flowrt.sched.tape.apart import WholeWrites, find_whole_writes, places_apart
from flowrt.sched.tape.arenas import MOST, Arenas, LentArena
from flowrt.sched.tape.laid_loops import clocks as time_loops
from flowrt.sched.tape.laid_loops import failed_at, find_loops
from flowrt.sched.tape.pace import Division, Pace, Share
from flowrt.sched.tape.recording import record
from flowrt.sched.tape.timing import LaunchTimes, describe_tape

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.base.spec import Spec
    from flowrt.sched.host.lanes import Crew
    from flowrt.sched.host.tracer import Tracer
    from flowrt.sched.regions.regions import Region

Array: TypeAlias = "np.ndarray[Any, Any]"

# Whose variables a tape was last run on, at which count of their changes, where they lay, and they themselves.
Laid: TypeAlias = "tuple[Any, int, Sequence[int], Sequence[Callable[[], Array | None]]]"

SURPRISE = 1e-3  # seconds that are too long for the loop's own thread, whatever else was predicted; cold runs take less
CANCELLED = -1  # what another thread writes to the status of a run's words to stop its tapes

_byte_of: Any = ctypes.c_char.from_buffer
_word_at = ctypes.c_int64.from_address
_arrays_are_known = available()
_address_of = ctypes.addressof

SPAN, WORDS, BASES = 0, 2, 2 + RUN_WORDS  # where a buffer's cells hold what


@cache
def _loop(name: str) -> Any:
    return ENTRY_TYPE(LOOP_PARTS[name].address())


def address(array: Array) -> int:
    """Where an array's entries begin. ``ctypes.data`` is right too, but five times as slow, ten times if read-only."""
    if _arrays_are_known:
        return _word_at(id(array) + ARRAY_DATA).value
    return int(array.ctypes.data)


def _seen(at: int, spec: Spec) -> Array:
    """What lies at an address, for as long as it lies there."""
    memory = memoryview((ctypes.c_char * spec.nbytes).from_address(at)).cast("B")
    return np.frombuffer(memory, spec.dtype).reshape(spec.concrete)


def _joined(blocks: Sequence[Array]) -> tuple[Array, Array]:
    """Blocks behind one another, and the address of each."""
    words = np.concatenate([*blocks, np.zeros(1, np.int64)])  # an array of nothing lies nowhere
    starts = np.cumsum([0, *(block.size for block in blocks)], dtype=np.int64)[:-1]
    return words, starts * words.itemsize + address(words)


def cancel(words: Array) -> None:
    """Have the tapes of a run with these words stop after their present nodes. From any thread."""
    words[STATUS] = CANCELLED


def corrected(guess: float, fastest: float) -> float:
    """The better of a guess and the fastest run so far: the smaller, unless every run has overshot the guess by far."""
    return fastest if fastest > max(10 * guess, SURPRISE) else min(guess, fastest)


class RunBuffer:
    """What one run of a tape writes to: the arena, and one row of cells: span, words, bases. Filled in one go."""

    __slots__ = ("__weakref__", "arena", "bases_at", "cells", "share", "span_at", "words_at")
    cells: Any
    arena: LentArena  # while a run is in the buffer

    def __init__(self, tape: Tape) -> None:
        self.cells = (ctypes.c_int64 * (WORDS + tape.row_words))()
        self.span_at = _address_of(self.cells)
        self.words_at, self.bases_at = self.span_at + 8 * WORDS, self.span_at + 8 * BASES
        self.share: Share | None = None
        for number, constant in enumerate(tape.recording.constants):
            self.cells[BASES + FIRST_SLOT + tape.dynamic + number] = address(constant)

    @property
    def number(self) -> int:
        """The number of the direct call that runs in the buffer."""
        return int(self.cells[WORDS + STEP])

    def stop(self) -> None:
        """Have a direct call that runs in the buffer stop after its present node. From any thread."""
        self.cells[WORDS + STATUS] = CANCELLED


class Tape:
    """A region for inputs of one set of specs, compiled. Runs on any number of threads at once.

    ``variables`` names what a run needs besides its inputs, in order; ``predicted_seconds`` is a rough guess of one
    run, ``expected_seconds`` a better one, infinite before the first, and for a loop that may iterate as often as it
    likes, however short it was so far; ``passes_on`` says whether some outputs are inputs or constants as they are.
    """

    def __init__(
        self,
        plan: Plan,
        region: Region,
        inputs: Sequence[Spec],
        *,
        memory: Memory | None = None,
        arenas: Arenas | None = None,
        recording: Recording | None = None,
        around: PlanWithin | None = None,
    ) -> None:
        self.memory = memory or Memory()
        self._arenas = arenas or Arenas(self.memory)
        self.recording = recording or record(plan, region, inputs)
        self.variables = self.recording.variables
        self.predicted_seconds = self.recording.predicted_seconds
        self.expected_seconds = self._fastest = math.inf
        self.arena_bytes = self.recording.arena_bytes
        self.launches = len(self.recording.launches)
        self.dynamic = len(inputs) + sum(o.fresh for o in self.recording.outputs) + len(self.variables)
        self._old = FIRST_SLOT + self.dynamic + len(self.recording.constants) + self.recording.slots
        row = RUN_WORDS + self._old + len(self.variables)
        self.row_words = -(-row // 16) * 16
        self.is_settled = False  # whether it is known of what use a crew is
        self.runs_alone = False  # whether that is none
        self.pace: Pace | None = None
        self._plan, self._within = plan, around or PlanWithin(plan)
        self._region, self._specs = region, inputs
        self._compile()
        self._fresh = [(o.spec.concrete, o.spec.dtype) for o in self.recording.outputs if o.fresh]
        self.passes_on = len(self._fresh) < len(self.recording.outputs)
        self._cells = slice(0, BASES + FIRST_SLOT + self.dynamic)
        self._buffers: deque[RunBuffer] = deque(maxlen=MOST)
        self.direct: tuple[int, tuple[Any, int], tuple[Any, ...]] | None = None  # see `sched.tape.direct`
        self.laid: Laid | None = None
        self._counted = any(counted(o.spec.nbytes) for o in self.recording.outputs if o.fresh)

    def __str__(self) -> str:
        first = self._plan.nodes[self._region.nodes[0]]
        return f"the region of {len(self._region.nodes)} nodes that begins with {first.where()}"

    @property
    def direct_bytes(self) -> int:
        """What direct calls compute in."""
        return 0 if self.direct is None else counted(self.recording.buffer_bytes)

    def took(self, seconds: float) -> None:
        """Learn from a whole run that took so long."""
        self._fastest = min(self._fastest, seconds)
        self.expected_seconds = max(corrected(self.predicted_seconds, self._fastest), self.recording.longest_seconds)

    def _compile(self) -> None:
        with batch(self._ask):
            blocks, entries = self._ask()
        launches = self.recording.launches
        self._words, blocks_at = _joined(blocks)
        units = np.array([launch.step.units for launch in launches], np.int64)
        self._nodes = np.stack([np.array(entries, np.int64), blocks_at, units], axis=1)
        self._nodes_at, self._loop = address(self._nodes), _loop("alone")
        self._loops = find_loops(launches, self._nodes, self._words, address(self._words))

    @cached_property
    def whole_writes(self) -> WholeWrites:
        """The variables whose new values may lie elsewhere than the old, as they are numbered: see `apart`."""
        return {} if self._loops else find_whole_writes(self.recording, self._first_variable)

    @cached_property
    def _apart(self) -> tuple[Array, Array]:
        """The launches for variables that lie apart, and their blocks."""
        old = {variable: self._old + variable for variable in self.whole_writes}
        blocks = [
            launch.step.block(places_apart(number, launch, self._first_variable, self.whole_writes, old))
            for number, launch in enumerate(self.recording.launches)
        ]
        nodes = self._nodes.copy()
        words, nodes[:, 1] = _joined(blocks)
        return nodes, words

    @property
    def _first_variable(self) -> int:
        """The slot of the first variable."""
        return FIRST_SLOT + self.dynamic - len(self.variables)

    def _ask(self) -> tuple[list[Array], list[int]]:
        """The launches' blocks and entries. Whatever the tape needs that may have to be compiled is asked for here."""
        blocks = [launch.step.block(launch.places) for launch in self.recording.launches]
        entries = [self._entry(launch) for launch in self.recording.launches]
        LOOP_PARTS["alone"].address()
        if available():
            DIRECT_PART.address()  # in this thread, which has time, rather than when a step is first run directly
        return blocks, entries

    def _entry(self, launch: Launch) -> int:
        try:
            return launch.step.address()
        except GraphError as error:
            raise type(error)(f"{self._plan.nodes[launch.node].where()}: {error}") from error

    def run(
        self,
        run_words: Array,
        inputs: Sequence[Array],
        places: Sequence[int] = (),
        crew: Crew | None = None,
        before: Callable[[RowWrite, Array], None] | None = None,
        old: Sequence[int] = (),
        tracer: Tracer | None = None,
    ) -> list[Array]:
        """The region's outputs, new arrays, for inputs of the tape's specs; the loop runs without the GIL.

        ``run_words`` (int64, see `launch`) are shared by all tapes of a run; setting their status, for instance to
        `CANCELLED`, from another thread stops each after its present node. The variables, C-contiguous and held by who
        calls, are to lie at the addresses ``places``, and are written there; they hold at those ``old``, if there are
        any, what they do so far: these differ for `whole_writes` alone. Where that is worth while, a ``crew`` helps, to
        the same bits; not where ``before`` each write of rows is to be told their groups. A ``tracer`` notes when each
        launch ran. Raises `FlowrtError` naming the node that failed, `StepCancelled` where it was stopped.
        """
        status, step, seed, _ = run_words.tolist()
        if status:
            raise StepCancelled(f"{self} was not begun")
        make: Callable[..., Array] = self.fresh_output if self._counted else np.empty
        fresh = [make(shape, dtype) for shape, dtype in self._fresh]
        kept = []  # what stands in for strided inputs, held while the loop runs
        buffer = self._take_buffer(self._arenas.take)
        try:
            cells = [0, self.launches, 0, step, seed, _address_of(_byte_of(run_words))]
            cells += buffer.words_at, buffer.arena.at, buffer.arena.at + self.arena_bytes
            for array in (*inputs, *fresh):
                try:
                    cells.append(_address_of(_byte_of(array)))
                except (TypeError, ValueError, BufferError):  # read-only, strided, or without a byte
                    kept.append(np.ascontiguousarray(array))
                    cells.append(int(kept[-1].ctypes.data))
            cells += places
            buffer.cells[self._cells] = cells
            nodes_at = self._nodes_at
            if old:
                start = BASES + self._old
                buffer.cells[start : start + len(old)] = old
                nodes_at = address(self._apart[0])
            times = None if tracer is None else LaunchTimes(self.launches)
            times_at = 0 if times is None else times.address
            if before is not None:
                self._run_with_stops(buffer, nodes_at, before, times_at)
            elif crew is None or self.runs_alone:
                self._loop(nodes_at, buffer.bases_at, buffer.span_at, times_at)
            else:
                self._run_with(crew, buffer, nodes_at, times)
            if tracer is not None and times is not None:
                times.tell(tracer, tracer.describe(self, self._describe), step)
            if buffer.cells[SPAN] < self.launches:
                raise self.failure(buffer, buffer.cells[SPAN], buffer.cells[WORDS + STATUS], step)
        finally:
            self._arenas.give(buffer.arena)
            del buffer.arena
            self._buffers.append(buffer)
        return self._leaving(inputs, fresh) if self.passes_on else fresh

    def lay(self, seed: int, variables: Sequence[Array], crew: Crew) -> tuple[Any, RunPlace, int]:
        """A buffer of its own without inputs, outputs and the run's number; where it lies, and its first input's cell.

        After the inputs follow the fresh outputs. Whoever runs in it keeps the buffer, the ``variables`` and the crew
        alive.
        """
        buffer = self._take_buffer(self._arenas.part_with)
        first = BASES + FIRST_SLOT + (self.dynamic - len(variables))
        head = [0, self.launches, 0, 0, seed, buffer.words_at, buffer.words_at]
        head += [buffer.arena.at, buffer.arena.at + self.arena_bytes]
        buffer.cells[: len(head)] = head
        buffer.cells[first : first + len(variables)] = [address(variable) for variable in variables]
        division, board = None if self.pace is None else self.pace.division, crew.board
        if division is None or board == 0:
            way = ("alone", self._nodes_at, buffer.bases_at, buffer.span_at)
        else:
            share = self._share(buffer, self._nodes_at, division, crew)
            share.time(0)
            self._lend(buffer, {cell: loop.address for cell, loop in share.loops.items()})
            way = ("shared", board, share.address, buffer.span_at)
        place = RunPlace(buffer.span_at, buffer.words_at, self.launches, (LOOP_PARTS[way[0]].address(), *way[1:]))
        return buffer, place, buffer.bases_at + 8 * FIRST_SLOT

    def _take_buffer(self, take: Callable[[int], LentArena]) -> RunBuffer:
        try:
            arena = take(self.recording.buffer_bytes)
        except ResourceError as error:
            raise ResourceError(f"{self}: its intermediate values: {error}") from error
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = RunBuffer(self)
        buffer.arena = arena
        return buffer

    def _describe(self) -> dict[str, Any]:
        """What it is, for who traces it."""
        return describe_tape(self._plan, self._region, self._specs, self.recording.launches)

    def _run_with_stops(
        self, buffer: RunBuffer, nodes_at: int, before: Callable[[RowWrite, Array], None], times_at: int
    ) -> None:
        """Run the launches one after another, and stop for what is to be done before each write of rows."""
        for write in self.recording.row_writes:
            buffer.cells[SPAN + 1] = write.launch
            self._loop(nodes_at, buffer.bases_at, buffer.span_at, times_at)
            if buffer.cells[SPAN] < write.launch:
                return  # it failed, or was stopped
            at = buffer.cells[BASES + write.place.slot] + write.place.offset
            before(write, _seen(at, write.groups))
        buffer.cells[SPAN + 1] = self.launches
        self._loop(nodes_at, buffer.bases_at, buffer.span_at, times_at)

    def _run_with(self, crew: Crew, buffer: RunBuffer, nodes_at: int, traced: LaunchTimes | None = None) -> None:
        """Run the launches with a crew's help where that pays, and learn what it costs from the first runs.

        When each launch ran is left in ``traced``, if that is given.
        """
        pace = self.pace
        if pace is None:
            crew.local(self.recording.local_bytes)  # now, so that no later run takes more than the first
            pace = self.pace = Pace(self._plan, self.recording.launches, crew.threads, self._loops, self._region)
        timed, began = pace.left > 0, time.perf_counter()
        times = LaunchTimes(self.launches) if timed and traced is None else traced
        times_at = 0 if times is None else times.address
        clocks = time_loops(self._loops) if timed else {}
        self._lend(buffer, {loop.cell: clock.address for loop, clock in clocks.items()})
        division = pace.division
        try:
            if traced is not None:
                traced.begin()
            board = 0 if division is None or crew.threads != division.threads else crew.board
            if division is None or board == 0:
                self._loop(nodes_at, buffer.bases_at, buffer.span_at, times_at)
            else:
                share = self._share(buffer, nodes_at, division, crew)
                if traced is None:
                    share.time(times_at)
                else:
                    traced.share(share)
                if not timed:
                    self._lend(buffer, {cell: loop.address for cell, loop in share.loops.items()})
                _loop("shared")(board, share.address, buffer.span_at, 0)
            if traced is not None:
                traced.end()
        finally:  # what is lent does not outlive this
            self._lend(buffer, {})
        if timed and times is not None and buffer.cells[SPAN] == self.launches:
            pace.learn(times.nanoseconds, {loop: clock.nanoseconds() for loop, clock in clocks.items()})
            self.took(time.perf_counter() - began)
        self.is_settled = pace.left <= 0
        self.runs_alone = self.is_settled and pace.division is None

    def _lend(self, buffer: RunBuffer, addresses: Mapping[int, int]) -> None:
        """Have those at these addresses share, or time, iterations of loops, by their cells; nobody those of others."""
        for outer in self._loops.values():
            for loop in outer.all():
                buffer.cells[BASES + loop.cell] = addresses.get(loop.cell, 0)

    def _share(self, buffer: RunBuffer, nodes_at: int, division: Division, crew: Crew) -> Share:
        """What a buffer needs to be divided."""
        share = buffer.share
        if share is None or (share.division, share.nodes_at) != (division, nodes_at):
            local = crew.local(self.recording.local_bytes)
            share = buffer.share = Share(division, nodes_at, buffer.words_at, self.row_words, local, crew.board)
        return share

    def fresh_output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for an output, counted."""
        try:
            return self.memory.output(shape, dtype)
        except ResourceError as error:
            raise ResourceError(f"{self}: its outputs: {error}") from error

    def _leaving(self, inputs: Sequence[Array], fresh: Sequence[Array]) -> list[Array]:
        """All outputs, where some are passed on."""
        left, leaving = iter(fresh), []
        for made in self.recording.outputs:
            if made.fresh:
                leaving.append(next(left))
                continue
            source = made.constant if made.input is None else inputs[made.input]
            assert source is not None
            leaving.append(np.ascontiguousarray(source).reshape(made.spec.concrete))
        return leaving

    def failure(self, buffer: RunBuffer, reached: int, status: int, number: int) -> FlowrtError:
        """The error for the run of that ``number`` that stopped at its launch ``reached`` in ``buffer``; another may be
        under way there."""
        bases = buffer.cells[BASES:]  # before it is seen whose they are
        launch = self.recording.launches[reached]
        if status not in (0, CANCELLED):
            return failed_at(self._within, launch, status, bases, buffer.number == number)
        return StepCancelled(f"stopped at {self._plan.nodes[launch.node].where()}")
