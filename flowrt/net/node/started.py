"""The steps that one master has started on a node.

Law: a step that was started is answered by exactly one `Done` when it has ended here, however it ends; before that is
said, nothing of it is left. (Another one may follow for a step that had ended well: what it sent may be lost.) A step
takes a task only if it has to wait for more than a value, or to compute for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flowrt.base.errors import BrokenStream, FlowrtError, InternalError, StepCancelled
from flowrt.net.wire.steps import Done, Start, make_done
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.rendezvous import Dead

if TYPE_CHECKING:
    from flowrt.net.node.plans import ReadyPlan
    from flowrt.sched.host.rendezvous import StepKey
    from flowrt.sched.running import StepRun


@dataclass(slots=True, eq=False)
class _Started:
    """A step in progress."""

    number: int
    key: StepKey
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
        number = start.number
        if number in self._steps:
            raise BrokenStream(f"step {number} was started twice")
        step = self._steps[number] = _Started(number, (self._epoch, number))
        try:
            if ready is None:
                raise InternalError(f"plan {start.plan} is not registered on {self._host.task}")
            self._host.check_open()
            fetches = ready.run_now(start.feeds, number, start.seed)
            if fetches is None:
                self._begin(step, start, ready, tasks)
                return
        except Exception as error:
            self._end(step, error)
        else:
            self._let_go(step)
            self._say(make_done(number, tuple(fetches), "", ""))

    def _begin(self, step: _Started, start: Start, ready: ReadyPlan, tasks: asyncio.TaskGroup) -> None:
        self._host.rendezvous.open(step.key, ready.received(start.edges, start.values))
        look = partial(self._look, step, tasks)
        step.run = ready.executor.begin(start.feeds, RunContext(step.key, step.number, start.seed), look)
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
        self._end(step, step.why or StepCancelled(f"step {step.number} was aborted"))

    def _end(self, step: _Started, error: BaseException | None = None) -> None:
        """Let go of all that a step has here, and say how it ended."""
        number = step.number
        if self._steps.get(number) is not step:
            return
        self._let_go(step)
        if error is None:
            fetches = () if step.run is None else step.run.fetched()
            self._say(make_done(number, tuple([None if isinstance(v, Dead) else v for v in fetches]), "", ""))
        else:
            name, text = self._report(error, f"step {number}")
            self._say(Done(number, error=name, text=text))

    def _let_go(self, step: _Started) -> None:
        if step.run is not None:
            step.run.stop()
        self._host.rendezvous.close(step.key)
        del self._steps[step.number]
