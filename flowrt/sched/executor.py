"""Runs one plan on one host: obeys the step machine, computes what is ready, waits for what is not.

Law: this file decides nothing about readiness, deadness or lifetimes; `StepMachine` does. Short computations run on the
loop's own thread, because a hop to a lane costs about 40 µs; long ones run in lanes; effects are tasks. Every task
has the run as its parent, and a run that fails or is cancelled leaves no task, buffer or held variable behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import flowrt.sched.replica  # noqa: F401  (adds its ops to EFFECTS)
from flowrt.errors import DeadTensorError, FlowrtError, GraphError
from flowrt.kernels.launch import RUN_WORDS, SEED, STEP
from flowrt.kernels.table import ALIASES, KERNELS
from flowrt.sched.effects import EFFECTS
from flowrt.sched.machine import ALL_DEAD, Kind, StepMachine, Topology
from flowrt.sched.regions import READ, WRITES, Region, find_regions, resource_of
from flowrt.sched.rendezvous import DEAD, Array, Dead
from flowrt.sched.single import NodeRunner, read_variable, variable_spec, write_variable
from flowrt.sched.tape import Tape, Tapes

if TYPE_CHECKING:
    from flowrt.plan import Plan, PlanNode
    from flowrt.sched.host import Host, RunContext
    from flowrt.sched.variables import Name

Outputs: TypeAlias = "Sequence[Array | Dead]"

INLINE_SECONDS = 50e-6  # a hop to a lane and back costs about as much
INLINE_BYTES = 1 << 18  # a single kernel that touches more runs in a lane
YIELD_EVERY = 256  # inline units between two looks at the loop

NOTHING: frozenset[Name] = frozenset()


class Action(Enum):
    """How a unit is carried out."""

    TAPE = "tape"
    COMPUTE = "compute"
    READ = "read"
    WRITE = "write"
    SWITCH = "switch"
    MERGE = "merge"
    EFFECT = "effect"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What the machine sees as one node: a node of the plan, or a region that runs as a tape."""

    action: Action
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]  # plan values
    outputs: tuple[int, ...]
    control: tuple[int, ...]  # plan nodes
    reads: frozenset[Name] = NOTHING
    writes: frozenset[Name] = NOTHING
    region: Region | None = None


_ACTIONS = {"switch": Action.SWITCH, "merge": Action.MERGE, "no_op": Action.NOTHING, READ: Action.READ}
_KINDS = {Action.SWITCH: Kind.SWITCH, Action.MERGE: Kind.MERGE}


def action_of(node: PlanNode) -> Action:
    """How a single node is carried out; raises `GraphError` for an op that nothing here carries out."""
    if node.op in _ACTIONS:
        return _ACTIONS[node.op]
    if node.op in WRITES:
        return Action.WRITE
    if node.op in EFFECTS:
        return Action.EFFECT
    if node.op == "constant" or node.op in ALIASES or (node.op, "cpu") in KERNELS:
        return Action.COMPUTE
    raise GraphError(f"{node.where()}: no kernel of {node.op} is installed on this node")


def is_structural(op: str) -> bool:
    """Whether the executor carries ``op`` out by itself, without a kernel."""
    return op in _ACTIONS or op in WRITES or op in EFFECTS or op == "constant"


def breaks_tape(node: PlanNode) -> bool:
    """Whether a node must be run by the machine itself."""
    return action_of(node) in (Action.SWITCH, Action.MERGE, Action.EFFECT)


class Executor:
    """A plan made ready to run on a host, any number of times, also concurrently."""

    def __init__(self, plan: Plan, host: Host, *, tapes: bool = True) -> None:
        self.plan = plan
        self.host = host
        self.tapes = Tapes(plan)
        self.units = self._group(tapes)
        self.runners = [NodeRunner(node) if action_of(node) is Action.COMPUTE else None for node in plan.nodes]
        self._number_values()
        for node in plan.nodes:
            if node.op == READ or node.op in WRITES:
                host.variables.declare(resource_of(node), variable_spec(node))

    def _group(self, tapes: bool) -> list[Unit]:
        plan = self.plan
        starts = plan.value_starts()
        regions = find_regions(plan, breaks_tape) if tapes else ()
        inside = {n for region in regions for n in region.nodes}
        units = [
            Unit(
                Action.TAPE,
                region.nodes,
                region.inputs,
                region.outputs,
                region.control,
                frozenset(region.reads),
                frozenset(region.writes),
                region,
            )
            for region in regions
        ]
        for position, node in enumerate(plan.nodes):
            if position not in inside:
                outputs = tuple(range(starts[position], starts[position + 1]))
                reads = frozenset([resource_of(node)]) if node.op == READ else NOTHING
                writes = frozenset([resource_of(node)]) if node.op in WRITES else NOTHING
                units.append(Unit(action_of(node), (position,), node.inputs, outputs, node.control, reads, writes))
        return units

    def _number_values(self) -> None:
        """Number the values that units exchange, as the machine wants them: feeds, then outputs in unit order."""
        plan, units = self.plan, self.units
        self._value_id = {i: i for i in range(len(plan.feeds))}
        self._plan_value = list(range(len(plan.feeds)))
        for unit in units:
            for value in unit.outputs:
                self._value_id[value] = len(self._plan_value)
                self._plan_value.append(value)
        unit_of = {node: i for i, unit in enumerate(units) for node in unit.nodes}
        self.fetch_ids = [self._value_id[v] for v in plan.fetches]
        self.topology = Topology(
            kinds=[self._kind(unit) for unit in units],
            inputs=[tuple(self._value_id[v] for v in unit.inputs) for unit in units],
            outputs=[len(unit.outputs) for unit in units],
            controls=[tuple(dict.fromkeys(unit_of[n] for n in unit.control)) for unit in units],
            feeds=len(plan.feeds),
            keep=frozenset(self.fetch_ids),
        )

    def _kind(self, unit: Unit) -> Kind:
        if unit.action is Action.EFFECT and self.plan.nodes[unit.nodes[0]].op == "send":
            return Kind.SEND
        return _KINDS.get(unit.action, Kind.PLAIN)

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """Run the plan and answer its fetches. Cancelling the caller cancels the run and waits for its kernels."""
        self.host.check_open()
        run = _Run(self, feeds, context)
        try:
            await run.drive()
        except BaseExceptionGroup as group:
            raise _first_error(group) from None
        return run.fetches()

    def run_now(self, feeds: Sequence[Array], context: RunContext) -> list[Array] | None:
        """The fetches, where the plan is one short tape whose variables are free; else None, and nothing was done."""
        if len(self.units) != 1 or self.units[0].region is None:
            return None
        unit = self.units[0]
        tape = self.tape(unit, [feeds[v] for v in unit.inputs])
        if tape is None or tape.predicted_seconds > INLINE_SECONDS:
            return None
        with self.host.variables.held_now(unit.reads, unit.writes) as held:
            if not held:
                return None
            outputs = self.run_tape(unit, tape, [feeds[v] for v in unit.inputs], run_words(context))
        values = dict(zip(unit.outputs, outputs, strict=True))
        return [values[v] if v in values else np.array(feeds[v]) for v in self.plan.fetches]

    def tape(self, unit: Unit, inputs: Sequence[Array]) -> Tape | None:
        """The region's tape for these inputs, or None where its shapes depend on values computed inside."""
        assert unit.region is not None
        return self.tapes.get(unit.region, inputs)

    def run_tape(self, unit: Unit, tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run a region whose variables are held."""
        variables = self.host.variables
        for name in unit.writes:
            variables.target(name)
        return tape.run(words, inputs, [variables.value(name) for name in tape.variables])

    def run_singly(self, unit: Unit, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run a region's nodes one after the other, where it has no tape. Its variables are held."""
        starts, values = self.plan.value_starts(), dict(zip(unit.inputs, inputs, strict=True))
        for position in unit.nodes:
            outputs = self.compute(position, [values[v] for v in self.plan.nodes[position].inputs], words)
            values.update(zip(range(starts[position], starts[position + 1]), outputs, strict=True))
        return [values[v] for v in unit.outputs]

    def compute(self, position: int, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        """Carry out one synchronous node; the variable it touches is held."""
        node, runner = self.plan.nodes[position], self.runners[position]
        if runner is not None:
            return runner(inputs, words)
        if node.op == READ:
            return (read_variable(node, self.host.variables),)
        if node.op in WRITES:
            write_variable(node, inputs[0], self.host.variables)
        return ()


def run_words(context: RunContext) -> Array:
    """The words that kernels of a run may look at."""
    words = np.zeros(RUN_WORDS, np.int64)
    words[STEP], words[SEED] = context.number, context.seed
    return words


class _Run:
    """One run in progress."""

    def __init__(self, executor: Executor, feeds: Sequence[Array], context: RunContext) -> None:
        self.executor = executor
        self.context = context
        self.host = executor.host
        self.machine = StepMachine(executor.topology)
        self.words = run_words(context)
        self.values: dict[int, Array | Dead] = dict(enumerate(feeds))
        self.ready: deque[int] = deque()
        self.woken = asyncio.Event()
        self.fed = {id(array) for array in feeds}

    async def drive(self) -> None:
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
        inputs = self._inputs(activation)
        work = self._work(unit, inputs)
        if work is None:
            return False
        if not (unit.reads or unit.writes):
            self._complete(activation, work())
            return True
        with self.host.variables.held_now(unit.reads, unit.writes) as held:
            if held:
                self._complete(activation, work())
        return held

    def _work(self, unit: Unit, inputs: Sequence[Array]) -> Callable[[], Outputs] | None:
        """What to call for a unit that is short enough for the loop's thread."""
        executor = self.executor
        if unit.action is Action.TAPE:
            tape = executor.tape(unit, inputs)
            if tape is None or tape.predicted_seconds > INLINE_SECONDS:
                return None
            return lambda: executor.run_tape(unit, tape, inputs, self.words)
        if sum(a.nbytes for a in inputs) > INLINE_BYTES:
            return None
        return lambda: executor.compute(unit.nodes[0], inputs, self.words)

    async def _finish_later(self, activation: int) -> None:
        unit = self._unit(activation)
        if unit.action is Action.EFFECT:
            node = self.executor.plan.nodes[unit.nodes[0]]
            outputs = await EFFECTS[node.op](self.host, self.context, node, self._inputs(activation))
        else:
            async with self.host.variables.hold(unit.reads, unit.writes):
                outputs = await self.host.lanes.run(self._compute, unit, self._inputs(activation))
        self._complete(activation, outputs)

    def _compute(self, unit: Unit, inputs: Sequence[Array]) -> Outputs:
        if unit.action is not Action.TAPE:
            return self.executor.compute(unit.nodes[0], inputs, self.words)
        tape = self.executor.tape(unit, inputs)
        if tape is None:
            return self.executor.run_singly(unit, inputs, self.words)
        return self.executor.run_tape(unit, tape, inputs, self.words)

    def _unit(self, activation: int) -> Unit:
        return self.executor.units[activation % len(self.executor.units)]

    def _inputs(self, activation: int) -> list[Any]:
        values = self.values
        return [values.get(i, DEAD) for i in self.machine.inputs(activation)]

    def _complete(self, activation: int, outputs: Outputs, dead: int = 0) -> None:
        """Tell the machine that a unit is done, and do as it says."""
        for i, (instance, value) in enumerate(zip(self.machine.outputs(activation), outputs, strict=True)):
            if value is DEAD:
                dead |= 1 << i
            elif not dead >> i & 1:
                self.values[instance] = value
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
        out = []
        for value, instance in zip(self.executor.plan.fetches, self.executor.fetch_ids, strict=True):
            array = self.values.get(instance, DEAD)
            if isinstance(array, Dead):
                raise DeadTensorError(self._why_dead(value))
            shared = id(array) in self.fed or not array.flags.owndata or not array.flags.writeable
            out.append(np.array(array) if shared else array)
        return out

    def _why_dead(self, value: int) -> str:
        plan = self.executor.plan
        starts = plan.value_starts()
        producer = {v: n for n in range(len(plan.nodes)) for v in range(starts[n], starts[n + 1])}
        seen, look = set(), deque([value])
        while look:
            node = producer.get(look.popleft())
            if node is None or node in seen:
                continue
            seen.add(node)
            if plan.nodes[node].op == "switch":
                fetched = plan.nodes[producer[value]]
                return f"{fetched.where()} was fetched, but {plan.nodes[node].where()} took the other side"
            look.extend(plan.nodes[node].inputs)
        return f"value {value} was fetched, but it is dead"


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
