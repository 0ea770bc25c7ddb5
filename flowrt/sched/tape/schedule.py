"""How several threads share a tape: which launches go together, in how many chunks, and what waits for what.

Law: pure; times and touched bytes in, a schedule out. Two launches that touch a byte, one of them writing, run in the
tape's order, and nothing else does: whose memory is used again, an update in place and a variable that is read before
it is written are all the same to this file. Results never depend on a schedule.

A *task* is a stretch of the tape that one thread runs in order, or one long launch whose units several threads share
in *chunks*. Since stretches follow the tape's order, tasks wait only for earlier ones, and cannot wait for each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.regions.recorded import Launch
    from flowrt.sched.regions.regions import Region

CHUNK = 2e-6  # seconds: handing a chunk to another core costs about 0.2 µs
CHUNKS_PER_THREAD = 3  # so that a thread which falls behind is waited for a third of a part
TASK = 1e-6  # launches shorter than this are run in stretches of about as much
TINY = 50e-9  # seconds: of launches that are shorter on average, handing over costs what it saves
OVERHEAD = 0.2e-6  # seconds a chunk costs beside its work
WORTHWHILE = 50e-6  # seconds: waking a thread and sharing caches with it costs about half as much
GAIN = 0.85  # of the time alone that sharing must at least come down to
MOST_CHUNKS = 1 << 18
NOBODYS: Mapping[int, float] = MappingProxyType({})


@valueclass
class Task:
    """Launches ``first`` up to ``stop``, which wait for the tasks ``after``; several ``chunks`` only of one launch.

    One that is the caller's ``own`` is run by nobody else: a loop, whose iterations all may share.
    """

    first: int
    stop: int
    chunks: int
    after: tuple[int, ...]
    own: bool = False


@valueclass
class Schedule:
    """Tasks in the tape's order, and a guess of the seconds that they take."""

    tasks: tuple[Task, ...]
    seconds: float

    @property
    def chunks(self) -> int:
        """How many chunks of all tasks threads can take."""
        return sum(task.chunks for task in self.tasks)


def worth_a_look(seconds: Sequence[float], threads: int, worthwhile: float = WORTHWHILE) -> bool:
    """Whether a tape of launches that take so long may be worth dividing, whatever waits for what."""
    alone = sum(seconds)
    return threads > 1 and alone >= worthwhile and alone >= TINY * len(seconds)


def divide(
    seconds: Sequence[float],
    units: Sequence[int],
    after: Sequence[Iterable[int]],
    threads: int,
    *,
    own: Mapping[int, float] = NOBODYS,
    worthwhile: float = WORTHWHILE,
) -> Schedule | None:
    """A schedule for launches of these times and units, each after others; None where one thread is about as good.

    ``own`` are loops whose iterations all threads share, and the seconds that these then take.
    """
    alone = sum(seconds)
    if not worth_a_look(seconds, threads, worthwhile):
        return None
    seconds = [own.get(number, each) for number, each in enumerate(seconds)]
    stretch = max(TASK, sum(seconds) * threads * CHUNKS_PER_THREAD / MOST_CHUNKS)
    stretches = _stretches(seconds, units, stretch, threads, own)
    home = [number for number, (first, stop, _) in enumerate(stretches) for _ in range(first, stop)]
    tasks, last = [], None
    for number, (first, stop, chunks) in enumerate(stretches):
        before = {home[launch] for position in range(first, stop) for launch in after[position]} - {number}
        if first in own:
            before |= set() if last is None else {last}
            last = number
        tasks.append(Task(first, stop, chunks, tuple(sorted(before)), first in own))
    expected = _expected(tasks, seconds, threads)
    return Schedule(tuple(tasks), expected) if expected < GAIN * alone else None


def _stretches(
    seconds: Sequence[float], units: Sequence[int], stretch: float, threads: int, own: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """(first, stop, chunks) of each task."""
    out: list[tuple[int, int, int]] = []
    first, held = 0, 0.0
    for position, each in enumerate(seconds):
        chunks = min(units[position], threads * CHUNKS_PER_THREAD, int(each / CHUNK))
        apart = chunks > 1 or position in own
        if apart or held + each > stretch:
            if position > first:
                out.append((first, position, 1))
            first, held = position, 0.0
        if apart:
            out.append((position, position + 1, max(chunks, 1)))
            first = position + 1
        else:
            held += each
    if first < len(seconds):
        out.append((first, len(seconds), 1))
    return out


def _expected(tasks: Sequence[Task], seconds: Sequence[float], threads: int) -> float:
    """The longest chain of tasks, or all work spread evenly, whichever is more."""
    ends: list[float] = []
    work = 0.0
    for task in tasks:
        cost = sum(seconds[task.first : task.stop]) + task.chunks * OVERHEAD
        work += cost
        ends.append(max((ends[number] for number in task.after), default=0.0) + cost / min(task.chunks, threads))
    return max([work / threads, *ends])


@dataclass(slots=True)
class _Bytes:
    """Who touched what under one slot: ``starts`` are where stretches of one history begin; the last has no end."""

    starts: list[int] = field(default_factory=lambda: [0])
    writers: list[int] = field(default_factory=lambda: [-1])
    readers: list[list[int]] = field(default_factory=lambda: [[]])

    def _cut(self, place: int) -> int:
        """The stretch that begins at ``place``."""
        found = bisect_left(self.starts, place)
        if found == len(self.starts) or self.starts[found] != place:
            self.starts.insert(found, place)
            self.writers.insert(found, self.writers[found - 1])
            self.readers.insert(found, list(self.readers[found - 1]))
        return found

    def read(self, launch: int, begin: int, end: int) -> set[int]:
        """Whom a reader waits for."""
        first, stop = self._cut(begin), self._cut(end)
        for number in range(first, stop):
            self.readers[number].append(launch)
        return set(self.writers[first:stop])

    def write(self, launch: int, begin: int, end: int) -> set[int]:
        """Whom a writer waits for."""
        first, stop = self._cut(begin), self._cut(end)
        before = set(self.writers[first:stop]).union(*self.readers[first:stop])
        self.starts[first:stop] = [begin]
        self.writers[first:stop] = [launch]
        self.readers[first:stop] = [[]]
        return before


def hazards(launches: Sequence[Launch]) -> list[set[int]]:
    """For each launch the earlier ones with which it shares memory that one of the two writes."""
    touched = [list(launch.stretches()) for launch in launches]
    memory = {stretch.slot: _Bytes() for stretches in touched for stretch in stretches if stretch.written}
    out = []
    for number, stretches in enumerate(touched):
        before: set[int] = set()
        for stretch in stretches:
            if not stretch.written and stretch.slot in memory:  # where nobody writes, nobody waits
                before |= memory[stretch.slot].read(number, stretch.begin, stretch.end)
        for stretch in stretches:
            if stretch.written:
                before |= memory[stretch.slot].write(number, stretch.begin, stretch.end)
        out.append(before - {-1, number})  # what it writes itself, it need not wait for
    return out


class Ordered(Protocol):
    """A launch as far as nodes order it: see `recording.Launch`."""

    @property
    def node(self) -> int: ...
    @property
    def also(self) -> tuple[int, ...]: ...
    @property
    def control(self) -> tuple[int, ...]: ...


def control(plan: Plan, launches: Sequence[Ordered], region: Region | None = None) -> list[set[int]]:
    """For each launch the earlier ones that must have succeeded before it, whatever memory they touch.

    They are the launches of ``region``, by default of all of ``plan``. Only what lies in it is looked at: it is convex.
    """
    if not any(launch.control for launch in launches):
        return [set() for _ in launches]
    done: dict[int, set[int]] = {}  # plan node → the launches that it is done with
    for number, launch in enumerate(launches):
        for position in (launch.node, *launch.also):
            done.setdefault(position, set()).add(number)
    nodes, first = (range(len(plan.nodes)), plan.value_starts()) if region is None else (region.nodes, region.first)
    waits: dict[int, set[int]] = {}

    def before(number: int) -> set[int]:
        """What a launch waits for, asked for once all that comes before it has been looked at."""
        found = waits.get(number)
        if found is None:
            control = launches[number].control
            found = waits[number] = {n for position in control for n in done.get(position, ()) if n < number}
        return found

    def made_by(value: int) -> int:
        """The node of these that makes a value; -1 where none does."""
        place = bisect_right(first, value, 0, len(nodes)) - 1
        made = place >= 0 and value < first[place] + len(plan.nodes[nodes[place]].outputs)
        return nodes[place] if made else -1

    for position in nodes:
        if position not in done:  # nothing is launched for it: it is done when all before it is
            node = plan.nodes[position]
            sources = {*node.control, *map(made_by, node.inputs)}
            done[position] = _last(set().union(*[done[source] for source in sources if source in done]), before)
    return [before(number) for number in range(len(launches))]


def _last(numbers: set[int], before: Callable[[int], set[int]]) -> set[int]:
    """Those of some launches that none of the others waits for: or of writes in a row each would name all before it."""
    return numbers.difference(*map(before, numbers)) if len(numbers) > 1 else numbers
