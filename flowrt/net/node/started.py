"""The steps that one master has started on a node.

Law: a step that was started is answered by exactly one `Done` when it has ended here, however it ends; before that is
said, nothing of it is left. (Another one may follow for a step that had ended well: what it sent may be lost.) A step
takes a task only if it has to wait for more than a value, or to compute for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from flowrt.base.errors import BrokenStream, FlowrtError, InternalError, StepCancelled
from flowrt.net.link import checked
from flowrt.net.wire.messages import Done, Start
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.rendezvous import Array, Dead, Waiter

if TYPE_CHECKING:
    from flowrt.net.node.plans import ReadyPlan
    from flowrt.sched.host.rendezvous import StepKey
    from flowrt.sched.running import StepRun


@dataclass(slots=True, eq=False)
class _Started:
    """A step in progress: ``values`` are those of the edges that its end is to bring."""

    start: Start
    key: StepKey
    values: dict[int, Array | Dead] = field(default_factory=dict)
    run: StepRun | None = None
    task: asyncio.Task[None] | None = None
    why: FlowrtError | None = None  # it is being cancelled


class Started:
    """The steps of the master of ``epoch``, which is told of their ends by ``say``. ``report`` names an error."""

    def __init__(
        self,
        host: Host,
        epoch: str,
        say: Callable[[Done], None],
        report: Callable[[BaseException, str], tuple[str, str]],
    ) -> None:
        self._host = host
        self._epoch = epoch
        self._say = say
        self._report = report
        self._steps: dict[int, _Started] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def start(self, start: Start, ready: ReadyPlan | None, tasks: asyncio.TaskGroup) -> None:
        """Run a step as far as that is possible now; what has to wait goes on by itself, or in one of ``tasks``."""
        if start.number in self._steps:
            raise BrokenStream(f"step {start.number} was started twice")
        step = self._steps[start.number] = _Started(start, (self._epoch, start.number))
        try:
            if ready is None:
                raise InternalError(f"plan {start.plan} is not registered on {self._host.task}")
            self._open(step, ready)
            look = partial(self._look, step, tasks)
            context = RunContext(step.key, start.number, start.seed)
            step.run = ready.executor.begin((), context, look)
        except Exception as error:
            self._end(step, error)
        else:
            look()

    def abort(self, number: int, why: FlowrtError | None = None) -> None:
        """End a step, begun or not: of one that is not in progress, say so."""
        why = why or StepCancelled(f"step {number} was aborted")
        step = self._steps.get(number)
        if step is None:
            self._host.rendezvous.close((self._epoch, number))  # what other tasks sent here may have come before
            self._say(Done(number, error=type(why).__name__, text=str(why)))
        elif step.task is None:
            self._end(step, why)
        else:
            step.why = why
            step.task.cancel()

    def abort_all(self) -> None:
        """End all, as their master is gone."""
        for number in list(self._steps):
            self.abort(number)

    def _open(self, step: _Started, ready: ReadyPlan) -> None:
        start, meet = step.start, self._host.rendezvous
        fed: dict[int, Array] = {}
        for edge, value in zip(start.edges, start.values, strict=True):
            fed[edge] = checked(value, ready.receives[edge], f"the feed on edge {edge}")
        meet.open(step.key, fed)
        for edge in start.wanted:
            meet.wait(step.key, edge, Waiter(partial(step.values.__setitem__, edge)))

    def _look(self, step: _Started, tasks: asyncio.TaskGroup) -> None:
        """See what has become of a step."""
        run = step.run
        if run is None or step.task is not None:
            return
        if run.error is not None:
            self._end(step, run.error)
        elif run.done:
            self._end(step)
        elif run.needs_task:
            step.task = tasks.create_task(self._finish(step, run))
            step.task.add_done_callback(lambda _: self._end_cancelled(step))  # if that was before it began

    async def _finish(self, step: _Started, run: StepRun) -> None:
        try:
            self._end(step, await run.finish())
        except asyncio.CancelledError:
            self._end_cancelled(step)

    def _end_cancelled(self, step: _Started) -> None:
        self._end(step, step.why or StepCancelled(f"step {step.start.number} was aborted"))

    def _end(self, step: _Started, error: BaseException | None = None) -> None:
        """Let go of all that a step has here, and say how it ended."""
        number = step.start.number
        if self._steps.get(number) is not step:
            return
        if step.run is not None:
            step.run.stop()
        self._host.rendezvous.close(step.key)
        del self._steps[number]
        if error is None and len(step.values) < len(step.start.wanted):
            error = InternalError(f"step {number} of {self._host.task} ended without all values that it was to bring")
        if error is not None:
            name, text = self._report(error, f"step {number}")
            self._say(Done(number, error=name, text=text))
        else:
            values = [step.values[edge] for edge in step.start.wanted]
            self._say(Done(number, step.start.wanted, tuple(None if isinstance(v, Dead) else v for v in values)))
