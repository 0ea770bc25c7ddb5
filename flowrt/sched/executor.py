"""A plan made ready to run on one host: its units, and how each is computed.

Law: short computations run on the loop's own thread, because a hop to a lane costs 50 to 200 µs; long ones run in
lanes. When a unit is computed is not decided here: see `flowrt.sched.running`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.collection import held_back
from flowrt.base.errors import DeadTensorError, ResourceError
from flowrt.base.spec import Spec, spec_of
from flowrt.base.traits import writes
from flowrt.kernels.launch import STATUS, STEP
from flowrt.kernels.store.locking import while_wanted
from flowrt.sched.alone import find_alone, find_visit
from flowrt.sched.demand import find_demands
from flowrt.sched.footprint import Footprint, predict_peak, survey
from flowrt.sched.host.latest import Latest
from flowrt.sched.host.memory import amount
from flowrt.sched.host.shielded import EndedAnyway
from flowrt.sched.host.tracer import now
from flowrt.sched.regional import RegionRunner
from flowrt.sched.regions.regions import READ, resource_of, resources_of, variable_spec, variable_specs
from flowrt.sched.run_trace import TracedIssuer, note_prepared, note_step, note_wait
from flowrt.sched.running import INLINE_SECONDS, StepRun, own, run_words
from flowrt.sched.single import Runners
from flowrt.sched.tape.direct import Numbers, direct_plan
from flowrt.sched.tape.interrupts import Noted, Unbroken
from flowrt.sched.tape.tape import Tape, cancel
from flowrt.sched.tape.tapes import Tapes
from flowrt.sched.tape.timing import note_node, shapes_of
from flowrt.sched.units import NOTHING, Action, Unit, connect, find_units
from flowrt.sched.visits import VisitRunner

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.alone import Alone
    from flowrt.sched.devices.device import ApartDevice, Issuing, OpenDevice
    from flowrt.sched.host.host import Host, RunContext
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.host.variables import Name
    from flowrt.sched.ready import Computing, ReadyRun

ADMITTED = 256  # shapes of feeds that need not be looked at again
LENT_BYTES = 1 << 18  # variables below this are copied, and then written without a thought
LARGEST = 8  # tensors that a refusal names
AT_ANY_TIME = nullcontext()


class Executor:
    """A plan made ready to run on a host, any number of times, also concurrently."""

    @held_back()
    def __init__(self, plan: Plan, host: Host, *, tapes: bool = True) -> None:
        self.plan = plan
        self.host = host
        self._single_nodes = not tapes
        self.memory, self.direct_gate = host.memory, host.direct_gate
        self.units = find_units(plan, tapes=tapes)
        regions = sum(unit.region is not None for unit in self.units)
        self.tapes = Tapes(plan, regions=regions, memory=self.memory)
        self._runners = Runners(plan, host, tapes=tapes)
        self._regional = {
            unit: RegionRunner(plan, unit, unit.region, host, self.tapes, self._runners)
            for unit in self.units
            if unit.region is not None
        }
        self._issuers: dict[str, Issuing] = {}  # by device, made when first asked for
        self._visit = self._find_visit()
        self.wiring = connect(plan, self.units)
        self.demands = find_demands(plan, self.units, self.wiring.topology)
        self.sizes: dict[int, int] = {}  # by unit that may be put off: the bytes that it made last
        self._admitted: Latest[tuple[tuple[int, ...], ...], None] = Latest(ADMITTED)  # shapes fed that fit
        self.alone = alone = find_alone(plan, self.units)
        self._places = () if alone is None else alone.places
        self._straight = alone is not None and alone.unit.inputs == alone.given
        self._direct = alone is not None and alone.unit.outputs == alone.wanted
        self._lendable = _lendable(plan, self.units, host.task)
        for node in plan.nodes:
            if node.op == READ or writes(node.op):
                for name, spec in zip(resources_of(node), variable_specs(node), strict=True):
                    host.variables.declare(name, spec, node.device)

    @held_back()
    def footprint(self, feeds: Sequence[Spec]) -> Footprint:
        """What a run with feeds of these specs takes; raises `SpecError` where they do not fit."""
        begun = frozenset(self.host.inventory())
        record, helpers = self.tapes.record, self.host.helpers
        return predict_peak(self.plan, self.units, feeds, record=record, begun=begun, helpers=helpers)

    def _admit(self, feeds: Sequence[Array]) -> None:
        """Raise `ResourceError` where a run with such feeds cannot fit, the first time that there are such."""
        shapes = _shapes(feeds)
        if shapes in self._admitted or (self._single_nodes and self.memory.limit is None):
            return
        need = self.footprint([spec_of(array) for array in feeds]).peak - self.tapes.idle_bytes
        if not self.memory.room_for(need):
            self.memory.reclaim()
            if not self.memory.room_for(need + self.tapes.idle_bytes):
                raise ResourceError(self._why_too_large(feeds, need))
        self._admitted[shapes] = None

    def _why_too_large(self, feeds: Sequence[Array], need: int) -> str:
        found = survey(self.plan, self.units, [spec_of(array) for array in feeds], record=self.tapes.record)
        largest = "; ".join(map(str, found[:LARGEST]))
        return f"the step needs {amount(need)} of memory, and {self.memory.shortage()}. Its largest tensors: {largest}"

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """Run the plan and answer its fetches. Cancelling the caller cancels the run and waits for its kernels.

        Where it came to its end all the same, it is cancelled by `EndedAnyway`.
        """
        self.host.check_open()
        feeds = as_arrays(feeds)
        self._admit(feeds)
        if self._visit is not None:
            fetches = await self._visit.run(feeds, context)
        else:
            fetches = next(iter(await self._run_in_lane([feeds], context)), None)
        if fetches is not None:
            return fetches
        by_machine = StepRun(self, feeds, context)
        try:
            failure = await by_machine.finish()
        except asyncio.CancelledError:
            with suppress(DeadTensorError):
                if by_machine.done and by_machine.error is None:
                    raise EndedAnyway(by_machine.fetches()) from None
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # whose frames refer to this one
        return by_machine.fetches()

    async def run_several(self, fed: Sequence[Sequence[Array]], context: RunContext) -> list[list[Array]]:
        """The fetches of runs one after another, numbered from the context's on, which nobody comes between.

        They are of the first of those ``fed``, and of as many more as go on in a lane that nobody waits for. Cancelling
        the caller cancels all of them.
        """
        self.host.check_open()
        fed = [as_arrays(feeds) for feeds in fed]
        for feeds in fed:
            self._admit(feeds)
        return await self._run_in_lane(fed, context) or [await self.run(fed[0], context)]

    def begin(self, feeds: Sequence[Any], context: RunContext, news: Callable[[], None]) -> StepRun:
        """Run the plan as far as that takes no waiting; ``news`` is called whenever the run got further, or failed.

        The caller looks then what has become of it: see `StepRun.done`, `StepRun.error` and `StepRun.needs_task`.
        """
        self.host.check_open()
        feeds = as_arrays(feeds)
        self._admit(feeds)
        run = StepRun(self, feeds, context, news)
        run.begin()
        return run

    def run_now(
        self, feeds: Sequence[Array], number: int, seed: int, within: float = INLINE_SECONDS
    ) -> list[Array] | None:
        """The fetches, where the plan is one tape that was made before and its variables are free; else None.

        Only a tape that is expected to take no more than ``within`` seconds is run; infinity is for callers whose
        thread is theirs to hold, who may wait for another device, too. Where it answers None, nothing was done. May be
        called from any thread.
        """
        if self._visit is not None:
            given = as_arrays(feeds)
            known = within == math.inf and _shapes(given) in self._admitted
            return self._visit.run_now(given, number, seed) if known else None
        return self.run_alone(feeds, number, seed, within) if self.alone is None or self.alone.is_closed else None

    def run_alone(
        self, given: Sequence[Array], number: int, seed: int, within: float = INLINE_SECONDS
    ) -> list[Array] | None:
        """As `run_now`, of a plan that may receive and send: what is ``given`` before, and wanted after, `Alone` says.

        To send what is to be sent is the caller's.
        """
        alone, given = self.alone, as_arrays(given)
        inputs, tape = self._made(given)
        if alone is None or tape is None or tape.expected_seconds > within:
            return None
        unit, tracer = alone.unit, self.host.tracer
        variables, holds = self.host.variables, bool(unit.reads or unit.writes)
        with Unbroken() if holds else AT_ANY_TIME:
            if holds and not variables.try_hold(unit.reads, unit.writes):
                return None
            words, began = run_words(number, seed), 0 if tracer is None else now()
            try:
                with Noted(words):
                    outputs = self._regional[unit].run(tape, inputs, words)
            finally:
                if holds:
                    variables.release(unit.reads, unit.writes)
                if tracer is not None:
                    note_step(tracer, self.plan, began, number)
        if self._direct and not tape.passes_on:
            return outputs
        return self._answers(alone, outputs, given)

    async def _run_in_lane(self, fed: Sequence[Sequence[Array]], context: RunContext) -> list[list[Array]]:
        """The fetches of one run after another, where the plan is one long tape that was made before and its variables
        are free; else none.

        The machine would do just this, but in several turns of the loop.
        """
        alone = self.alone
        if alone is None or not alone.is_closed:
            return []
        made = [self._made(feeds) for feeds in fed]
        unit, tape = alone.unit, made[0][1]
        if tape is None or tape.expected_seconds <= INLINE_SECONDS:
            return []
        variables = self.host.variables
        alike = takewhile(lambda other: other[1] is tape, made)
        runs = [(inputs, run_words(context.number + n, context.seed)) for n, (inputs, _) in enumerate(alike)]
        if not variables.try_hold(unit.reads, unit.writes):
            return []

        def stop() -> None:
            for _, words in runs:
                cancel(words)

        try:
            outputs = await self.host.lanes.run(self._carry_out_several, unit, runs, stop=stop)
        finally:
            variables.release(unit.reads, unit.writes)
        return [self._answers(alone, each, feeds) for each, feeds in zip(outputs, fed, strict=False)]

    def _made(self, given: Sequence[Array]) -> tuple[Sequence[Array], Tape | None]:
        """The inputs of a plan that is one region, made of what is given, and its tape, if there is one already."""
        alone = self.alone
        if alone is None or alone.unit.region is None:
            return given, None
        inputs = given if self._straight else [given[place] for place in self._places]
        return inputs, self.tapes.made(alone.unit.region, inputs)

    def _answers(self, alone: Alone, outputs: Sequence[Array], given: Sequence[Array]) -> list[Array]:
        """What is wanted of a plan that is one region, none of it anyone else's memory."""
        values = dict(zip(alone.given, given, strict=True)) | dict(zip(alone.unit.outputs, outputs, strict=True))
        return own([values[v] for v in alone.wanted], given, self.memory.copy)

    def direct_plan(
        self,
        given: Sequence[Array],
        numbers: Numbers,
        seed: int,
        within: float,
        wanted: Sequence[int] | None = None,
    ) -> tuple[Any, ...] | None:
        """The plan of a direct call for arrays like these, which `run_alone` has just run; None where there is none.

        It answers what is ``wanted``, by default all that `Alone` says.
        """
        alone, tape = self.alone, self._made(given)[1]
        if alone is None or tape is None or tape.expected_seconds > within or self.host.tracer is not None:
            return None
        unit, wanted = alone.unit, alone.wanted if wanted is None else wanted
        if set(unit.outputs) != set(wanted) or (unit.region is not None and unit.region.shape_inputs):
            return None  # a direct call looks at the shapes of what it is given, not at values that decide others
        if tape.recording.orders or not tape.is_settled:
            return None  # one that waits for better kernels, or knows not its speed yet, is asked for anew every time
        return direct_plan(self.host, unit, tape, dict(zip(alone.given, given, strict=True)), wanted, numbers, seed)

    def runner_of(self, unit: Unit) -> Computing:
        """What computes a unit of the host's own."""
        return self._runners[unit.nodes[0]] if unit.region is None else self._regional[unit]

    def lend(self, unit: Unit) -> list[Array] | None:
        """The outputs of a unit that only reads variables for others to see: their memory, uncopied.

        None for all other units; where the variables are not free; and where neighbours see memory
        (`sched.host.segments`), who must be lent copies.
        """
        reads = self._lendable.get(unit.nodes)
        variables = self.host.variables
        if reads is None or self.memory.segments is not None or not variables.try_hold(unit.reads, NOTHING):
            return None
        try:
            return [variables.lend(name, spec) for name, spec in reads]
        finally:
            variables.release(unit.reads, NOTHING)

    async def finish(self, unit: Unit, inputs: Sequence[Any], words: Array, stop: Callable[[], None]) -> Sequence[Any]:
        """Run a unit whose variables are held in the lane of its device, and wait for it."""
        where = self.plan.nodes[unit.nodes[0]].device
        device = self.host.devices[where]
        match unit.action:
            case Action.BRING:
                return (await self._bring(device, self.plan.nodes[unit.nodes[0]], inputs[0], int(words[STEP])),)
            case Action.ISSUE:
                return await device.run(self._issuer(self.host.apart(where)).carry_out, unit, inputs, words, stop=stop)
        return await device.run(self.carry_out_timed, unit, inputs, words, stop=stop)

    async def _bring(self, device: OpenDevice, node: PlanNode, value: Any, number: int) -> Any:
        tracer, began = self.host.tracer, now()
        brought = await device.take(value, node.where())
        if tracer is not None:
            note_wait(tracer, node, began, number, {"shapes": shapes_of([value], [brought])})
        return brought

    def _issuer(self, device: ApartDevice) -> Issuing:
        if device.name not in self._issuers:
            issuer = device.issuer(self.plan, self.host.variables)
            self._issuers[device.name] = TracedIssuer(issuer, self.plan, self.host)
        return self._issuers[device.name]

    def _find_visit(self) -> VisitRunner | None:
        """What runs the plan, where it is one region of another device's."""
        visit = None if self._single_nodes else find_visit(self.plan, self.units)
        if visit is None:
            return None
        device = self.host.apart(self.plan.nodes[visit.unit.nodes[0]].device)
        return VisitRunner(self.plan, visit, self.host, device, self._issuer(device))

    def carry_out(self, unit: Unit, ready: ReadyRun, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        """Run a unit that need not wait, and whose variables are held, on the calling thread."""
        tracer = self.host.tracer
        began = 0 if tracer is None else now()
        try:
            outputs = self.runner_of(unit).run(ready, inputs, words)
        except MemoryError as error:
            raise ResourceError(f"{self.plan.nodes[unit.nodes[0]].where()}: out of memory: {error}") from error
        if tracer is not None and unit.region is None:  # a region's tapes say themselves what they did
            note_node(tracer, self.plan.nodes[unit.nodes[0]], inputs, outputs, began, int(words[STEP]))
        return outputs

    def carry_out_timed(self, unit: Unit, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        """The same in a lane; learns how long the unit takes, since what it is predicted to take is a guess."""
        with while_wanted(lambda: not words[STATUS]):
            tracer, asked = self.host.tracer, now()
            ready = self.runner_of(unit).ready(inputs)
            if tracer is not None:
                note_prepared(tracer, self.plan.nodes[unit.nodes[0]], asked, int(words[STEP]))
            began = time.perf_counter()
            outputs = self.carry_out(unit, ready, inputs, words)
        ready.took(time.perf_counter() - began)
        return outputs

    def _carry_out_several(self, unit: Unit, runs: Sequence[tuple[Sequence[Array], Array]]) -> list[Sequence[Array]]:
        """Run a unit with each of these inputs and words, until somebody waits for the lane, but at least once."""
        outputs = []
        for inputs, words in runs:
            tracer, began = self.host.tracer, now()
            outputs.append(self.carry_out_timed(unit, inputs, words))
            if tracer is not None:
                note_step(tracer, self.plan, began, int(words[STEP]))
            if self.host.lanes.wanted:
                break
        return outputs


def _lendable(plan: Plan, units: Sequence[Unit], task: str) -> dict[tuple[int, ...], list[tuple[Name, Spec]]]:
    """By their nodes, the units that read variables for other tasks alone, and what they read: large enough to lend."""
    found, starts = {}, plan.value_starts()
    for unit in units:
        nodes, made = [plan.nodes[n] for n in unit.nodes], set(unit.outputs)
        if any(node.op != READ for node in nodes) or not made.isdisjoint(plan.fetches):
            continue
        users = [node for node in plan.nodes if not made.isdisjoint(node.inputs)]
        read = {starts[n]: (resource_of(node), variable_spec(node)) for n, node in zip(unit.nodes, nodes, strict=True)}
        sent = all(node.op == "send" and node.attrs["peer"] != task for node in users)
        if sent and sum(spec.nbytes for _, spec in read.values()) >= LENT_BYTES:
            found[unit.nodes] = [read[value] for value in unit.outputs]
    return found


def _shapes(arrays: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    return tuple([array.shape for array in arrays])


def as_arrays(feeds: Sequence[Any]) -> list[Array]:
    """The feeds as they are, but NumPy's scalars as arrays: kernels are told where an array's entries begin."""
    return [array if isinstance(array, np.ndarray) else np.asarray(array) for array in feeds]
