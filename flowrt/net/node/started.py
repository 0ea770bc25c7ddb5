"""The steps that one master has started on a node.

Law: a step that was started is answered by exactly one `Done` when it has ended here, however it ends; before that is
said, nothing of it is left. (Of a silent plan's that ended well none is said, as who has what it sent says so. And
another one may follow for a step that had ended well: what it sent may be lost.) A step takes a task only if it has to
wait for more than a value, or to compute for long. One that computes once all has come that others push runs by one
call then, if that is possible; else the step machine finds the values where they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import BrokenStream, FlowrtError, InternalError, StepCancelled
from flowrt.net.wire.steps import Done, Start, make_done
from flowrt.sched.effects import handler_of
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.rendezvous import DEAD, Pushed, Waiter

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.net.node.plans import ReadyPlan
    from flowrt.sched.host.rendezvous import Array, Dead, StepKey
    from flowrt.sched.running import StepRun


@dataclass(slots=True, eq=False)
class _Started:
    """A step in progress: of which plan, and the parent of its task."""

    start: Start
    key: StepKey
    ready: ReadyPlan | None
    tasks: asyncio.TaskGroup
    coming: Waiter | None = None  # for all that is to come before it can run
    run: StepRun | None = None
    fetches: Sequence[Array | Dead] = ()  # without a run
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
        step = self._steps[number] = _Started(start, (self._epoch, number), ready, tasks)
        self._go_on(step)

    def _go_on(self, step: _Started, error: Exception | None = None) -> None:
        """Run a step now, or once all has come that it takes; or end it, if something is wrong."""
        try:
            if error is not None:
                raise error
            if step.ready is None:
                raise InternalError(f"plan {step.start.plan} is not registered on {self._host.task}")
            self._host.check_open()
            self._run(step, step.ready)
        except Exception as failure:
            self._end(step, failure)

    def _run(self, step: _Started, ready: ReadyPlan) -> None:
        start, meet = step.start, self._host.rendezvous
        came = meet.here(step.key, ready.comes) if ready.comes else ()
        if came is None:
            step.coming = Waiter(partial(self._go_on, step))
            meet.gather(step.key, ready.comes, step.coming)
            return
        made = ready.run_now((*start.feeds, *came), start.number, start.seed)
        if made is None:
            self._begin(step, ready)
            return
        step.fetches = made if not ready.goes else made[: ready.fetches]
        left = [(node, made[at]) for node, at in ready.goes if not self._push(step.key, node, made[at])]
        if left:
            self._wait_for(step, self._send(step, left))
        else:
            self._end(step)

    def _push(self, key: StepKey, node: PlanNode, value: Array) -> bool:
        """Send a value; answers whether that was possible at once, as it mostly is."""
        edge, peer, remote = node.attrs["edge"], node.attrs["peer"], self._host.remote
        if self._host.rendezvous.give(key, edge, value):
            return True
        return remote is not None and remote.push(peer, key, edge, value) is Pushed.SENT

    async def _send(self, step: _Started, left: Iterable[tuple[PlanNode, Array]]) -> None:
        """End a step by sending what there was no way for."""
        context = RunContext(step.key, step.start.number, step.start.seed)
        try:
            for node, value in left:
                await handler_of(node)(self._host, context, node, (value,))
        except asyncio.CancelledError:  # the task, which the step refers to, would hold it, and its frames the step
            self._end_cancelled(step)
        except Exception as error:
            self._end(step, error)
        else:
            self._end(step)

    def _begin(self, step: _Started, ready: ReadyPlan) -> None:
        """Have the step machine run it."""
        start = step.start
        self._host.rendezvous.open(step.key, ready.received(start.edges, start.values))
        look = partial(self._look, step)
        step.run = ready.executor.begin(start.feeds, RunContext(step.key, start.number, start.seed), look)
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

    def _look(self, step: _Started) -> None:
        """See what has become of a step."""
        run = step.run
        if run is None or step.task is not None:
            return
        if run.error is not None:
            self._end(step, run.error)
        elif run.done:
            self._end(step)
        elif run.needs_task:
            self._wait_for(step, self._finish(step, run))

    def _wait_for(self, step: _Started, rest: Coroutine[Any, Any, None]) -> None:
        """Have a step end in a task."""
        step.task = step.tasks.create_task(rest)
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
        self._let_go(step)
        if error is not None:
            name, text = self._report(error, f"step {number}")
            self._say(Done(number, error=name, text=text))
        elif step.ready is not None and not step.ready.silent:
            fetches = step.fetches if step.run is None else step.run.fetched()
            self._say(make_done(number, tuple([None if v is DEAD else v for v in fetches]), "", ""))

    def _let_go(self, step: _Started) -> None:
        if step.coming is not None:
            step.coming.withdraw()
        if step.run is not None:
            step.run.stop()
        self._host.rendezvous.close(step.key)
        del self._steps[step.start.number]
