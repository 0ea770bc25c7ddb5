"""Has the nodes of a session note what they do, asks them for it again and again, and for the time.

Law: a node that cannot answer is named, and ends nothing: what it had handed over by then counts. One that comes again
begins anew, as another process.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from flowrt.base.errors import FlowrtError, GraphError
from flowrt.sched.drivers.inquiries import TellTrace
from flowrt.sched.host.await_all import await_all
from flowrt.sched.host.tracer import now
from flowrt.sched.runs.tracing import unpacked
from flowrt.tracing.clocks import Alignment, ClockSample, clock_sample
from flowrt.tracing.timeline import ProcessNotes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowrt.base.device import Device
    from flowrt.sched.host.tracer import Tracer

CHUNK = 1 << 14  # slices that a node hands over at once
PERIOD = 0.25  # seconds between two times that all are asked
CLIENT_NAME = "client"
PATIENCE = 5.0  # seconds that a node may take to answer; then what it has is left


class TracedRunner(Protocol):
    """What runs the steps that are traced: see `session.runners.Runner`."""

    @property
    def client(self) -> str | None: ...

    @property
    def devices(self) -> Sequence[Device]: ...

    def why_lost(self, task: str) -> FlowrtError: ...

    def trace(self, tracer: Tracer | None) -> None: ...

    async def command(self, task: str, message: Any) -> Any: ...


QUESTIONS = 8  # about the time, to each node, at the begin and at the end


class Collected:
    """What one process has handed over: ``most`` slices, and what is beyond that is counted."""

    def __init__(self, task: str) -> None:
        self.notes = ProcessNotes(task)
        self.samples: list[ClockSample] = []
        self.chunk = 0
        self.left_out = 0  # by us

    def add(self, descriptions: Iterable[Any], notes: Iterable[Any], room: int) -> int:
        """Take what came, as far as there is room for so many slices; answers how many were taken."""
        self.notes.descriptions += descriptions
        taken = 0
        for note in notes:
            weight = slices_of(note)
            if taken + weight > room:
                self.left_out += weight
                continue
            taken += weight
            self.notes.notes.append(note)
        return taken


def slices_of(note: Any) -> int:
    """How many slices come of a note at most."""
    about = note[-1]
    return 1 + len(about.get("times", b"")) // 8 + len(about.get("stamps", b"")) // 32


class Collecting:
    """What the nodes of ``runner`` note, up to ``most`` slices of all together."""

    def __init__(self, runner: TracedRunner, most: int) -> None:
        self._runner, self._left = runner, most
        self.own = Collected(CLIENT_NAME if runner.client is not None else runner.devices[0].host)
        self._number = secrets.randbits(62)
        self._found: dict[tuple[str, str], Collected] = {}  # by task and process
        self._newest: dict[str, Collected] = {}
        self.missing: dict[str, str] = {}  # by task: why what it did is not all there

    @property
    def _tasks(self) -> list[str]:
        if self._runner.client is None:
            return []
        return sorted({device.host for device in self._runner.devices})

    async def begin(self) -> None:
        """Have all note what they do. Raises `GraphError` where another session traces one."""
        await self._visit_all(QUESTIONS, strict=True)

    async def go_on(self) -> None:
        """Ask all for what they have, again and again."""
        while True:
            await asyncio.sleep(PERIOD)
            await self._visit_all(1)

    async def end(self) -> None:
        """Have them stop, and take what is left."""
        await self._visit_all(QUESTIONS, on=False)
        for task in self._newest.keys() - set(self._tasks):
            self.missing.setdefault(task, str(self._runner.why_lost(task)))

    async def _visit_all(self, questions: int, *, on: bool = True, strict: bool = False) -> None:
        await await_all(self._visit(task, questions, on, strict) for task in self._tasks)

    async def _visit(self, task: str, questions: int, on: bool, strict: bool) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                for _ in range(questions):
                    await self._ask(task, 0, on)
                while await self._ask(task, CHUNK, on):
                    pass
        except (FlowrtError, TimeoutError) as error:
            if strict and isinstance(error, GraphError):
                raise
            self.missing[task] = str(error) or f"{task} did not answer within {PATIENCE:g} s"
        else:
            self.missing.pop(task, None)

    async def _ask(self, task: str, most: int, on: bool) -> bool:
        """Ask a node for so many slices, or for the time alone; answers whether it has more."""
        newest = self._newest.get(task)
        chunk, asked = 0 if newest is None else newest.chunk, now()
        said, birth, data, more, dropped = await self._runner.command(task, TellTrace(self._number, chunk, most, on))
        sample = clock_sample(asked, said, now())
        part = self._newest[task] = self._found.setdefault((task, birth), Collected(task))
        part.samples.append(sample)
        part.notes.dropped = dropped
        if data is not None:
            part.chunk = chunk + 1
            self._add(part, *unpacked(data))
        return bool(more)

    def holds(self, task: str) -> bool:
        """Whether anything that a task did has come."""
        return any(part.notes.notes for (of, _), part in self._found.items() if of == task)

    def take(self, tracer: Tracer) -> None:
        """Take what this process has noted itself."""
        self._add(self.own, *tracer.take())
        self.own.notes.dropped = tracer.dropped

    def _add(self, part: Collected, descriptions: Iterable[Any], notes: Iterable[Any]) -> None:
        self._left -= part.add(descriptions, notes, self._left)

    def processes(self) -> list[ProcessNotes]:
        """What all have handed over, this process first, their clocks aligned with its."""
        self.own.notes.dropped += self.own.left_out
        for part in self._found.values():
            part.notes.alignment = Alignment(part.samples)
            part.notes.dropped += part.left_out
        return [self.own.notes, *(self._found[key].notes for key in sorted(self._found))]
