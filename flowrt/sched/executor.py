"""Runs one plan on one host: obeys the step machine, computes what is ready, waits for what is not.

Law: this file decides nothing about readiness, deadness or lifetimes; `StepMachine` does. Short computations run on the
loop's own thread, because a hop to a lane costs 50 to 200 µs; long ones run in lanes; effects are tasks. Every task
has the run as its parent, and a run that fails or is cancelled leaves no task, buffer or held variable behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import numpy as np

from flowrt.collection import held_back
from flowrt.errors import DeadTensorError, FlowrtError, ResourceError
from flowrt.kernels.launch import RUN_WORDS, SEED, STATUS, STEP
from flowrt.kernels.locking import while_wanted
from flowrt.sched.direct import Numbers, direct_plan
from flowrt.sched.effects import handler_of
from flowrt.sched.footprint import Footprint, predict_peak, survey
from flowrt.sched.interrupts import Noted, Unbroken
from flowrt.sched.machine import ALL_DEAD, StepMachine
from flowrt.sched.memory import amount
from flowrt.sched.regions import READ, WRITES, resources_of, variable_spec
from flowrt.sched.rendezvous import DEAD, Array, Dead
from flowrt.sched.segments import has_own_slot
from flowrt.sched.single import NodeRunner, Runners, read_variable, write_variable
from flowrt.sched.tape import CANCELLED, Tape, Tapes, address
from flowrt.sched.units import Action, Unit, connect, find_units
from flowrt.spec import Spec, spec_of

if TYPE_CHECKING:
    from flowrt.plan import Plan
    from flowrt.sched.host import Host, RunContext
    from flowrt.sched.variables import Name

Outputs: TypeAlias = "Sequence[Array | Dead]"

INLINE_SECONDS = 200e-6  # a hop to a lane and back costs about as much on a virtual machine, 50 µs on bare metal
INLINE_BYTES = 1 << 18  # a variable above this is copied in a lane
ADMITTED = 256  # shapes of feeds that need not be looked at again
LARGEST = 8  # tensors that a refusal names
AT_ANY_TIME = nullcontext()
YIELD_EVERY = 256  # inline units between two looks at the loop


class Executor:
    """A plan made ready to run on a host, any number of times, also concurrently."""

    @held_back()
    def __init__(self, plan: Plan, host: Host, *, tapes: bool = True) -> None:
        self.plan = plan
        self.host = host
        self.memory = host.memory
        self.units = find_units(plan, tapes=tapes)
        regions = sum(unit.region is not None for unit in self.units)
        self.tapes = Tapes(plan, regions=regions, memory=self.memory)
        self.runners = Runners(plan, host.memory)
        self.wiring = connect(plan, self.units)
        self._single_nodes = not tapes
        self._admitted: OrderedDict[tuple[tuple[int, ...], ...], None] = OrderedDict()  # shapes fed that fit
        self._alone = self.units[0] if len(self.units) == 1 and self.units[0].region is not None else None
        self._straight = self._alone is not None and self._alone.inputs == tuple(range(len(plan.feeds)))
        self._direct = self._alone is not None and self._alone.outputs == plan.fetches
        for node in plan.nodes:
            if node.op == READ or node.op in WRITES:
                for name in resources_of(node):
                    host.variables.declare(name, variable_spec(node))

    @held_back()
    def footprint(self, feeds: Sequence[Spec]) -> Footprint:
        """What a run with feeds of these specs takes; raises `SpecError` where they do not fit."""
        begun = frozenset(self.host.inventory())
        record, helpers = self.tapes.record, self.host.helpers
        return predict_peak(self.plan, self.units, feeds, record=record, begun=begun, helpers=helpers)

    def _admit(self, feeds: Sequence[Array]) -> None:
        """Raise `ResourceError` where a run with such feeds cannot fit, the first time that there are such."""
        shapes = tuple([array.shape for array in feeds])
        if shapes in self._admitted or (self._single_nodes and self.memory.limit is None):
            return
        need = self.footprint([spec_of(array) for array in feeds]).peak - self.tapes.idle_bytes
        if not self.memory.room_for(need):
            self.memory.reclaim()
            if not self.memory.room_for(need + self.tapes.idle_bytes):
                raise ResourceError(self._why_too_large(feeds, need))
        self._admitted[shapes] = None
        if len(self._admitted) > ADMITTED:
            self._admitted.popitem(last=False)

    def _why_too_large(self, feeds: Sequence[Array], need: int) -> str:
        found = survey(self.plan, self.units, [spec_of(array) for array in feeds], record=self.tapes.record)
        largest = "; ".join(map(str, found[:LARGEST]))
        return f"the step needs {amount(need)} of memory, and {self.memory.shortage()}. Its largest tensors: {largest}"

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """Run the plan and answer its fetches. Cancelling the caller cancels the run and waits for its kernels."""
        self.host.check_open()
        feeds = as_arrays(feeds)
        self._admit(feeds)
        fetches = await self._run_in_lane(feeds, context)
        if fetches is not None:
            return fetches
        run = _Run(self, feeds, context)
        failure = await run.finish()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # whose frames refer to this one
        return run.fetches()

    def run_now(
        self, feeds: Sequence[Array], number: int, seed: int, within: float = INLINE_SECONDS
    ) -> list[Array] | None:
        """The fetches, where the plan is one tape that was made before and its variables are free; else None.

        Only a tape that is expected to take no more than ``within`` seconds is run; infinity is for callers whose
        thread is theirs to hold. Where it answers None, nothing was done. May be called from any thread.
        """
        unit = self._alone
        if unit is None or unit.region is None:
            return None
        feeds = as_arrays(feeds)
        inputs = feeds if self._straight else [feeds[v] for v in unit.inputs]
        tape = self.tapes.made(unit.region, inputs)
        if tape is None or tape.expected_seconds > within:
            return None
        variables, holds = self.host.variables, bool(unit.reads or unit.writes)
        with Unbroken() if holds else AT_ANY_TIME:
            if holds and not variables.try_hold(unit.reads, unit.writes):
                return None
            words = run_words(number, seed)
            try:
                with Noted(words):
                    outputs = self.run_tape(unit, tape, inputs, words)
            finally:
                if holds:
                    variables.release(unit.reads, unit.writes)
        if self._direct and not tape.passes_on:
            return outputs
        return self._answers(unit, outputs, feeds)

    async def _run_in_lane(self, feeds: Sequence[Array], context: RunContext) -> list[Array] | None:
        """The fetches, where the plan is one long tape that was made before and its variables are free; else None.

        The machine would do just this, but in several turns of the loop.
        """
        unit = self._alone
        if unit is None or unit.region is None:
            return None
        inputs = [feeds[v] for v in unit.inputs]
        tape = self.tapes.made(unit.region, inputs)
        if tape is None or tape.expected_seconds <= INLINE_SECONDS:
            return None
        variables, words = self.host.variables, run_words(context.number, context.seed)
        if not variables.try_hold(unit.reads, unit.writes):
            return None

        def stop() -> None:
            words[STATUS] = CANCELLED

        try:
            outputs = await self.host.lanes.run(self._run_timed, unit, tape, inputs, words, stop=stop)
        finally:
            variables.release(unit.reads, unit.writes)
        return self._answers(unit, outputs, feeds)

    def _run_timed(self, unit: Unit, tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
        """`run_tape` in a lane; learns how long it takes."""
        began = time.perf_counter()
        outputs = self.run_tape(unit, tape, inputs, words)
        tape.took(time.perf_counter() - began)
        return outputs

    def _answers(self, unit: Unit, outputs: Sequence[Array], feeds: Sequence[Array]) -> list[Array]:
        """The fetches of a plan that is one unit, none of them anyone else's memory."""
        made = dict(zip(unit.outputs, outputs, strict=True))
        return own([made[v] if v in made else feeds[v] for v in self.plan.fetches], feeds, self.memory.copy)

    def direct_plan(self, feeds: Sequence[Array], numbers: Numbers, seed: int, within: float) -> tuple[Any, ...] | None:
        """The plan of a direct call for feeds like these, which `run_now` has just run; None where there is none."""
        unit = self._alone
        if unit is None or unit.region is None or set(unit.outputs) != set(self.plan.fetches):
            return None
        tape = self.tapes.made(unit.region, feeds if self._straight else [feeds[v] for v in unit.inputs])
        if tape is None or tape.expected_seconds > within:
            return None
        if tape.recording.orders or not tape.is_settled:
            return None  # one that waits for better kernels, or knows not its speed yet, is asked for anew every time
        return direct_plan(self, unit, tape, feeds, numbers, seed)

    def is_short(self, unit: Unit, inputs: Sequence[Array]) -> bool:
        """Whether a unit that need not wait is better carried out on the loop's own thread than in a lane."""
        if unit.region is not None:
            tape = self.tapes.made(unit.region, inputs)
            return tape is not None and tape.expected_seconds <= INLINE_SECONDS
        if unit.action is Action.COMPUTE:
            return self.runners[unit.nodes[0]].expected_seconds(inputs) <= INLINE_SECONDS
        return variable_spec(self.plan.nodes[unit.nodes[0]]).nbytes <= INLINE_BYTES

    def carry_out(self, unit: Unit, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        """Run a unit that need not wait, and whose variables are held, on the calling thread."""
        try:
            if unit.region is None:
                return self._compute(unit.nodes[0], inputs, words)
            tape = self.tapes.get(unit.region, inputs)
            return self._run_singly(unit, inputs, words) if tape is None else self.run_tape(unit, tape, inputs, words)
        except MemoryError as error:
            raise ResourceError(f"{self.plan.nodes[unit.nodes[0]].where()}: out of memory: {error}") from error

    def carry_out_timed(self, unit: Unit, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        """`carry_out` in a lane; learns how long the unit takes, since what it is predicted to take is a guess."""
        tape = None if unit.region is None else self.tapes.get(unit.region, inputs)
        runner = self.runners[unit.nodes[0]] if unit.action is Action.COMPUTE else None
        began = time.perf_counter()
        with while_wanted(lambda: not words[STATUS]):
            outputs = self.carry_out(unit, inputs, words)
        seconds = time.perf_counter() - began
        if tape is not None:
            tape.took(seconds)
        elif runner is not None:
            runner.took(inputs, seconds)
        return outputs

    def run_tape(self, unit: Unit, tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run a region whose variables are held. One that it begins has its value once all of the region is done."""
        crew, variables = self.host.lanes.crew, self.host.variables
        laid = tape.laid
        if laid is not None and laid[0] is variables and laid[1] == variables.changes:
            alive = [reference() for reference in laid[3]]  # should someone reset them while the tape runs
            if laid[1] == variables.changes:
                outputs = tape.run_at(words, inputs, laid[2], crew=crew)
                del alive
                return outputs
        changes, memory = variables.changes, []
        begun: dict[Name, Array] = {}
        for name, spec in zip(tape.variables, tape.recording.variable_specs, strict=True):
            value = variables.find(name, spec) if name in unit.begins else variables.value(name, spec)
            if value is None:
                value = begun[name] = self.memory.lasting(spec.concrete, spec.dtype)
            memory.append(value)
        places = [address(value) for value in memory]
        outputs = tape.run_at(words, inputs, places, crew=crew)
        for name, value in begun.items():
            variables.begin(name, value)
        if not begun:
            tape.laid = variables, changes, places, [ref(value) for value in memory]
        return outputs

    def _run_singly(self, unit: Unit, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run a region's nodes one after the other, where it has no tape."""
        starts, values = self.plan.value_starts(), dict(zip(unit.inputs, inputs, strict=True))
        for position in unit.nodes:
            outputs = self._compute(position, [values[v] for v in self.plan.nodes[position].inputs], words)
            values.update(zip(range(starts[position], starts[position + 1]), outputs, strict=True))
        return [values[v] for v in unit.outputs]

    def _compute(self, position: int, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        node = self.plan.nodes[position]
        if node.op == READ:
            return (read_variable(node, self.host.variables, self.memory),)
        if node.op in WRITES:
            write_variable(node, inputs, words, self.host.variables, self.memory)
            return ()
        return self.runners[position](inputs, words)


def run_words(number: int, seed: int) -> Array:
    """The words that kernels of a run may look at."""
    words = np.zeros(RUN_WORDS, np.int64)
    words[STEP], words[SEED] = number, seed
    return words


def as_arrays(feeds: Sequence[Any]) -> list[Array]:
    """The feeds as they are, but NumPy's scalars as arrays: kernels are told where an array's entries begin."""
    return [array if isinstance(array, np.ndarray) else np.asarray(array) for array in feeds]


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


class _Run:
    """One run in progress."""

    def __init__(self, executor: Executor, feeds: Sequence[Array], context: RunContext) -> None:
        self.executor = executor
        self.context = context
        self.host = executor.host
        self.machine = StepMachine(executor.wiring.topology)
        self.words = run_words(context.number, context.seed)
        self.feeds = feeds
        self.values: dict[int, Array | Dead] = dict(enumerate(feeds))
        self.ready: deque[int] = deque()
        self.woken = asyncio.Event()

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
        self._obey(self.machine.start())
        async with asyncio.TaskGroup() as group:
            while not self.machine.done:
                await self._start_ready(group)
                if not self.machine.done:
                    self.woken.clear()
                    await self.woken.wait()

    async def _start_ready(self, group: asyncio.TaskGroup) -> None:
        started = 0
        while self.ready:
            activation = self.ready.popleft()
            started += 1
            if not self._start_inline(activation):
                group.create_task(self._finish_later(activation))
            if started % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _start_inline(self, activation: int) -> bool:
        """Carry a unit out here and now, if it is short and need not wait."""
        unit = self._unit(activation)
        match unit.action:
            case Action.EFFECT:
                return False
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

    def _compute_inline(self, activation: int, unit: Unit) -> bool:
        inputs, executor, variables = self._inputs(activation), self.executor, self.host.variables
        runner = executor.runners[unit.nodes[0]] if unit.action is Action.COMPUTE else None
        if isinstance(runner, NodeRunner) and (ready := runner.known(inputs)) is not None:
            if ready.expected_seconds > INLINE_SECONDS:
                return False
            self._complete(activation, runner.run(ready, inputs, self.words))
            return True
        if not executor.is_short(unit, inputs):
            return False
        if not (unit.reads or unit.writes):
            self._complete(activation, executor.carry_out(unit, inputs, self.words))
            return True
        if not variables.try_hold(unit.reads, unit.writes):
            return False
        try:
            outputs = executor.carry_out(unit, inputs, self.words)
        finally:
            variables.release(unit.reads, unit.writes)
        self._complete(activation, outputs)
        return True

    async def _finish_later(self, activation: int) -> None:
        unit, inputs = self._unit(activation), self._inputs(activation)
        outputs: Outputs
        if unit.action is Action.EFFECT:
            node = self.executor.plan.nodes[unit.nodes[0]]
            outputs = await handler_of(node)(self.host, self.context, node, inputs)
        else:
            async with self.host.variables.hold(unit.reads, unit.writes):
                work = self.executor.carry_out_timed
                outputs = await self.host.lanes.run(work, unit, inputs, self.words, stop=self._stop)
        self._complete(activation, outputs)

    def _stop(self) -> None:
        """Have this run's tapes stop after their present nodes."""
        self.words[STATUS] = CANCELLED

    def _unit(self, activation: int) -> Unit:
        return self.executor.units[activation % len(self.executor.units)]

    def _inputs(self, activation: int) -> list[Any]:
        values = self.values
        return [values.get(i, DEAD) for i in self.machine.inputs(activation)]

    def _complete(self, activation: int, outputs: Outputs, dead: int = 0) -> None:
        """Tell the machine that a unit is done, and do as it says."""
        values = self.values
        for i, (instance, value) in enumerate(zip(self.machine.outputs(activation), outputs, strict=True)):
            if value is DEAD:
                dead |= 1 << i
            elif not dead >> i & 1:
                values[instance] = value
        if dead and dead == (1 << len(outputs)) - 1:
            dead = ALL_DEAD
        self._obey(self.machine.complete(activation, dead))
        self.woken.set()

    def _obey(self, said: Any) -> None:
        for instance in said.free:
            self.values.pop(instance, None)
        self.ready.extend(said.launch)

    def fetches(self) -> list[Array]:
        """The fetched values, none of them anyone else's memory."""
        arrays = [self.values.get(instance, DEAD) for instance in self.executor.wiring.fetches]
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
    errors = list(_leaves(group))
    for kind in (FlowrtError, Exception, BaseException):
        for error in errors:
            if isinstance(error, kind):
                return error
    return group


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for error in group.exceptions:
        out += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return out
