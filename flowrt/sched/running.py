"""One run of a plan in progress: obeys the step machine.

Law: this file decides nothing about readiness, deadness or lifetimes; `StepMachine` does. A run goes on by itself, in
the calls that tell it of news, as long as what is ready is short or need only be told when it may go on: most steps of
a cluster are nothing else, and take no task. What is left is for `StepRun.finish`, in a task: long computations run in
lanes, and effects that wait are tasks, whose parent is the run. A run that fails or is stopped leaves no task, buffer
or held variable behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.base.errors import DeadTensorError, FlowrtError, ResourceError
from flowrt.kernels.launch import RUN_WORDS, SEED, STEP, drawn_as
from flowrt.sched.ahead import Ahead
from flowrt.sched.demand import LARGE
from flowrt.sched.effects import AT_ONCE, Later, await_arrival, handler_of, line_up, open_and_push, receive
from flowrt.sched.host.await_all import errors_in
from flowrt.sched.host.rendezvous import DEAD, Array, Dead, Pushed, Waiter
from flowrt.sched.host.segments import has_own_slot
from flowrt.sched.machine import ALL_DEAD, StepMachine
from flowrt.sched.run_trace import RunTrace
from flowrt.sched.tape.tape import cancel
from flowrt.sched.units import APART, Action, Unit

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.demand import Demands, Goal
    from flowrt.sched.host.host import Host, RunContext
    from flowrt.sched.ready import Computing, ReadyRun
    from flowrt.sched.units import Wiring

Outputs: TypeAlias = "Sequence[Array | Dead]"

INLINE_SECONDS = 200e-6  # a hop to a lane and back costs about as much on a virtual machine, 50 µs on bare metal
YIELD_EVERY = 256  # inline units between two looks at the loop


class Carrying(Protocol):
    """A plan made ready, and who carries out its units: `executor.Executor`."""

    plan: Plan
    host: Host
    units: tuple[Unit, ...]
    wiring: Wiring
    demands: Demands | None
    sizes: dict[int, int]

    def lend(self, unit: Unit) -> list[Array] | None: ...

    def runner_of(self, unit: Unit) -> Computing: ...

    def carry_out(self, unit: Unit, ready: ReadyRun, inputs: Sequence[Array], words: Array) -> Sequence[Array]: ...

    async def finish(
        self, unit: Unit, inputs: Sequence[Any], words: Array, stop: Callable[[], None]
    ) -> Sequence[Any]: ...


class StepRun:
    """One run in progress."""

    def __init__(
        self,
        executor: Carrying,
        feeds: Sequence[Array],
        context: RunContext,
        news: Callable[[], None] | None = None,
    ) -> None:
        self.executor = executor
        self.context = context
        self.host = executor.host
        self.machine = StepMachine(executor.wiring.topology)
        self.words = run_words(context.number, context.seed)
        self.feeds = feeds
        self.values: dict[int, Array | Dead] = dict(enumerate(feeds))
        self.ready: deque[int] = deque()
        self.error: BaseException | None = None  # that it failed with
        self._news = news
        self._left: deque[int] = deque()  # ready as well, but only for a task
        self._waiters: dict[int, Waiter] = {}  # by activation: who will be told
        self._tasks: list[Coroutine[Any, Any, None]] = []  # for a task, beside units
        self._ahead: Ahead | None = None
        if executor.demands is not None:
            self._ahead = Ahead(executor.demands, self.host.credit, context.key, executor.sizes, self)
        tracer = self.host.tracer
        self._trace = None if tracer is None else RunTrace(tracer, executor.plan, context)
        self._begun = self._advancing = self._driven = False
        self._woken = asyncio.Event()

    # ── by itself ──

    @property
    def done(self) -> bool:
        """Whether it has come to its end, and has not failed."""
        return self._begun and self.machine.done

    @property
    def needs_task(self) -> bool:
        """Whether it goes on only in `finish`."""
        return bool(self._left or self.ready or self._tasks)

    def begin(self) -> None:
        """Go as far as that is possible now. Whenever there are news later, ``news`` is called."""
        self._start()
        self._advance()

    def stop(self) -> None:
        """Be told of nothing any more."""
        for waiter in self._waiters.values():
            waiter.withdraw()
        self._waiters.clear()
        for task in self._tasks:
            task.close()
        self._tasks.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None  # which refers to this
        if self._trace is not None:
            self._trace.end()

    def _advance(self) -> None:
        self._advancing = True
        try:
            for _ in range(YIELD_EVERY):
                if not self.ready or self.error is not None:
                    break
                activation = self.ready.popleft()
                if not self._start_inline(activation):
                    self._leave(activation)
        except Exception as error:
            self.error = error
        finally:
            self._advancing = False

    def _resume(self, activation: int, answer: Any) -> None:
        """Go on after an effect, told what came of it: see `effects.at_once`."""
        self._waiters.pop(activation, None)
        if isinstance(answer, Exception):
            self.error = answer
        elif answer is Later.TASK:
            if self._ahead is not None:
                self._ahead.announced(activation)
            if self._may_start(activation):
                self._left.append(activation)
        else:
            self._complete(activation, answer)
        self._go_on()

    def _go_on(self) -> None:
        """Something is ready that was not: see what can be done, and tell."""
        self._woken.set()
        if not (self._driven or self._advancing):
            self._advance()
            if self._news is not None:
                self._news()

    # ── what is put off: see `flowrt.sched.ahead` ──

    def _may_start(self, activation: int) -> bool:
        """Whether a unit may be carried out now, or is put off."""
        return self._ahead is None or activation >= len(self.executor.units) or self._ahead.may_start(activation)

    def _leave(self, activation: int) -> None:
        """Leave a unit for a task; one that is put off and receives waits for word that its value is there."""
        if self._may_start(activation):
            self._left.append(activation)
        elif (node := self._receiver(activation)) is not None:
            then = partial(self._resume, activation)
            self._waiters[activation] = await_arrival(self.host, self.context, node, then)

    def _receiver(self, activation: int) -> PlanNode | None:
        """The node of a unit that receives."""
        unit = self._unit(activation)
        node = self.executor.plan.nodes[unit.nodes[0]]
        return node if unit.action is Action.EFFECT and node.op == "recv" else None

    def is_over(self, unit: int) -> bool:
        """Whether a unit has completed, or died."""
        return self.machine.over(unit)

    def call(self, goal: Goal, then: Callable[[], None]) -> Callable[[], None]:
        """Have ``then`` called once a goal's value would be consumed at once."""
        if goal.node is not None and goal.node.op == "send":
            self._offer(goal.node, then)
        elif goal.node is not None:
            return line_up(self.host, self.context, goal.node, goal.rows, then)
        else:
            then()
        return lambda: None

    def _offer(self, node: PlanNode, then: Callable[[], None]) -> None:
        """Have ``then`` called when a value is asked for that is not made yet."""
        edge, peer, meet, remote = node.attrs["edge"], node.attrs["peer"], self.host.rendezvous, self.host.remote
        if meet.awaited(self.context.key, edge):
            then()
            return
        meet.when_awaited(self.context.key, edge, then)
        if remote is None or peer == self.host.task:
            return
        if remote.push(peer, self.context.key, edge, None) is Pushed.NO_WAY:
            self._tasks.append(open_and_push(remote, peer, self.context.key, edge))
            self._go_on()

    def go(self, units: Iterable[int]) -> None:
        """Carry out units that were put off."""
        for unit in units:
            if self._receiver(unit) is None:
                self.ready.append(unit)
                continue
            if (waiter := self._waiters.pop(unit, None)) is not None:
                waiter.withdraw()
            self._left.append(unit)
        self._go_on()

    # ── in a task ──

    async def finish(self) -> BaseException | None:
        """Run to the end; answers what went wrong first.

        A task group's frames hold the errors that hold those frames, and those that started a unit hold the group,
        which knows the task that fails. They are cleared, and the error is not raised while the group is handled, which
        it would then hold: or the run's values would stay until they are collected.
        """
        try:
            await self._drive()
        except BaseExceptionGroup as group:
            first = _first_error(group)
            clear_frames(group.__traceback__)
            clear_frames(first.__traceback__)
            return ResourceError(f"out of memory: {first}") if isinstance(first, MemoryError) else first
        except asyncio.CancelledError as cancelled:
            clear_frames(cancelled.__traceback__)
            raise
        return None

    async def _drive(self) -> None:
        self._driven = True
        try:
            if not self._begun:
                self._start()
            async with asyncio.TaskGroup() as group:
                while not self.machine.done:
                    await self._start_ready(group)
                    if self.error is not None:
                        raise self.error
                    if not self.machine.done:
                        self._woken.clear()
                        await self._woken.wait()
        finally:
            self.stop()

    def _start(self) -> None:
        self._begun = True
        self._obey(self.machine.start())

    async def _start_ready(self, group: asyncio.TaskGroup) -> None:
        started = 0
        while self._left or self.ready or self._tasks:
            if self._tasks:
                group.create_task(self._tasks.pop())
                continue
            if self._left:
                group.create_task(self._finish_later(self._left.popleft()))
                continue
            activation = self.ready.popleft()
            started += 1
            if not self._start_inline(activation):
                self._leave(activation)
            if started % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    # ── one unit ──

    def _start_inline(self, activation: int) -> bool:
        """Carry a unit out here and now, if it is short and need not wait, or see that it is told when it may go on."""
        unit = self._unit(activation)
        if unit.action is Action.EFFECT:
            return self._try_effect(activation, unit)
        if not self._may_start(activation):
            return True
        match unit.action:
            case Action.NOTHING:
                self._complete(activation, ())
            case Action.MOVE:
                self._complete(activation, self._inputs(activation))
            case Action.SWITCH:
                data, pred = self._inputs(activation)
                self._complete(activation, (data, data), dead=1 if bool(pred) else 2)
            case Action.MERGE:
                position = self.machine.merged(activation)
                value = self.values[self.machine.inputs(activation)[position]]
                self._complete(activation, (value, np.asarray(position, np.int64)))
            case _:
                return self._compute_inline(activation, unit)
        return True

    def _try_effect(self, activation: int, unit: Unit) -> bool:
        node = self.executor.plan.nodes[unit.nodes[0]]
        if self._trace is not None:
            self._trace.wait(activation, node)
        attempt = AT_ONCE.get(node.op)
        if attempt is None or (self._expected(activation, node) and not self._came(node)):
            return False
        then = partial(self._resume, activation)
        answer = attempt(self.host, self.context, node, self._inputs(activation), then)
        if isinstance(answer, Waiter):
            self._waiters[activation] = answer
        elif isinstance(answer, Exception):
            raise answer
        elif isinstance(answer, Later):
            return False
        else:
            self._complete(activation, answer)
        return True

    def _expected(self, activation: int, node: PlanNode) -> int:
        """The room for what is received of a size that the plan does not say, and was large last.

        It is asked for at once, as its peer would else have to tell first that it is there, and how large. There is
        some more room than it took, as sizes that values decide come to about the same.
        """
        if node.op != "recv" or node.outputs[0].known:
            return 0
        last = self.executor.sizes.get(activation, 0)
        return last + last // 4 if last > LARGE else 0

    def _came(self, node: PlanNode) -> bool:
        return self.host.rendezvous.holds(self.context.key, node.attrs["edge"])

    def _compute_inline(self, activation: int, unit: Unit) -> bool:
        inputs, executor, variables = self._inputs(activation), self.executor, self.host.variables
        if unit.reads and (lent := executor.lend(unit)) is not None:
            self._complete(activation, lent)
            return True
        ready = None if unit.action in APART else executor.runner_of(unit).known(inputs)
        if ready is None or ready.expected_seconds > INLINE_SECONDS:
            return False
        if not (unit.reads or unit.writes):
            self._complete(activation, executor.carry_out(unit, ready, inputs, self.words))
            return True
        if not variables.try_hold(unit.reads, unit.writes):
            return False
        try:
            outputs = executor.carry_out(unit, ready, inputs, self.words)
        finally:
            variables.release(unit.reads, unit.writes)
        self._complete(activation, outputs)
        return True

    async def _finish_later(self, activation: int) -> None:
        unit, inputs = self._unit(activation), self._inputs(activation)
        outputs: Outputs
        if unit.action is Action.EFFECT:
            node = self.executor.plan.nodes[unit.nodes[0]]
            if expected := self._expected(activation, node):
                outputs = await receive(self.host, self.context, node, expected)
            else:
                outputs = await handler_of(node)(self.host, self.context, node, inputs)
        else:
            async with self.host.variables.hold(unit.reads, unit.writes):
                outputs = await self.executor.finish(unit, inputs, self.words, partial(cancel, self.words))
        self._complete(activation, outputs)

    def _unit(self, activation: int) -> Unit:
        return self.executor.units[activation % len(self.executor.units)]

    def _inputs(self, activation: int) -> list[Any]:
        values = self.values
        return [values.get(i, DEAD) for i in self.machine.inputs(activation)]

    def _complete(self, activation: int, outputs: Outputs, dead: int = 0) -> None:
        """Tell the machine that a unit is done, and do as it says."""
        values = self.values
        if self._trace is not None:
            self._trace.complete(activation, self._inputs(activation), outputs)
        for i, (instance, value) in enumerate(zip(self.machine.outputs(activation), outputs, strict=True)):
            if value is DEAD:
                dead |= 1 << i
            elif not dead >> i & 1:
                values[instance] = value
        ahead = self._ahead
        if ahead is not None:
            ahead.made(activation, self._sizes(activation, outputs))
        if dead and dead == (1 << len(outputs)) - 1:
            dead = ALL_DEAD
        self._obey(self.machine.complete(activation, dead))
        if ahead is not None:
            ahead.completed(activation)
        self._woken.set()

    def _sizes(self, activation: int, outputs: Outputs) -> dict[int, int]:
        made = zip(self.machine.outputs(activation), outputs, strict=True)
        return {instance: value.nbytes for instance, value in made if isinstance(value, np.ndarray)}

    def _obey(self, said: Any) -> None:
        for instance in said.free:
            self.values.pop(instance, None)
            if self._ahead is not None:
                self._ahead.freed(instance)
        self.ready.extend(said.launch)

    def fetched(self) -> list[Array | Dead]:
        """The fetched values, as they are."""
        return [self.values.get(instance, DEAD) for instance in self.executor.wiring.fetches]

    def fetches(self) -> list[Array]:
        """The fetched values, none of them anyone else's memory."""
        arrays = self.fetched()
        for value, array in zip(self.executor.plan.fetches, arrays, strict=True):
            if isinstance(array, Dead):
                raise DeadTensorError(self._why_dead(value))
        return own([array for array in arrays if not isinstance(array, Dead)], self.feeds, self.host.memory.copy)

    def _why_dead(self, value: int) -> str:
        """What was fetched, and the switch that took the other side: one that was itself alive."""
        nodes, starts = self.executor.plan.nodes, self.executor.plan.value_starts()
        producer = {v: n for n in range(len(nodes)) for v in range(starts[n], starts[n + 1])}
        fetched = producer[value]
        seen, look = set(), deque([fetched])
        while look:
            node = look.popleft()
            if node in seen:
                continue
            seen.add(node)
            dead = [v for v in nodes[node].inputs if self._is_dead(v)]
            if nodes[node].op == "switch" and not dead:
                return f"{nodes[fetched].where()} was fetched, but {nodes[node].where()} took the other side"
            look.extend(producer[v] for v in dead if v in producer)
            look.extend(nodes[node].control)
        return f"{nodes[fetched].where()} was fetched, but it is dead"

    def _is_dead(self, value: int) -> bool:
        """Whether a value is dead, as far as the machine knows it; one inside a tape may be."""
        known = self.executor.wiring.values.get(value)
        return known is None or self.machine.dead(known)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that began a failure: the first of ours, else the first of all."""
    errors = errors_in(group)
    kinds = FlowrtError, Exception, BaseException
    return next(error for kind in kinds for error in errors if isinstance(error, kind))


def run_words(number: int, seed: int) -> Array:
    """The words that kernels of a run may look at."""
    words = np.zeros(RUN_WORDS, np.int64)
    words[STEP], words[SEED] = drawn_as(number), seed
    return words


def own(arrays: Sequence[Array], feeds: Sequence[Array], copy: Callable[[Array], Array] = np.array) -> list[Array]:
    """The arrays, copied where they are someone else's memory (a feed's, a constant's) or one another's."""
    seen = {id(array) for array in feeds}
    out = []
    for array in arrays:
        mine = array
        whole = array.base is None or has_own_slot(array)
        if id(array) in seen or not whole or not array.flags.writeable:
            mine = copy(array)
        seen.add(id(array))
        out.append(mine)
    return out
