"""How much memory a step takes, told before it runs, and by which tensors.

Law: pure; it plays the step through as the executor would, one unit after the other in the machine's order, and takes
and gives back exactly what `memory` would count: copies of strided feeds, buffers of tapes and what a crew's helpers
compute in (both kept for the next run), outputs, scratch, variables that begin, copies for fetches. Where units run at
the same time on several lanes, a step may take more. What cannot be told is left out, and named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec
from flowrt.base.traits import is_alias, writes
from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import apply_kernel
from flowrt.op import lookup
from flowrt.sched.host.arena import local_room
from flowrt.sched.host.memory import amount, counted
from flowrt.sched.loops.pieces import outputs_of
from flowrt.sched.loops.structured import STRUCTURED
from flowrt.sched.machine import StepMachine
from flowrt.sched.regions.lives import DataDependent, sizes_known
from flowrt.sched.regions.recorded import Recording
from flowrt.sched.regions.regions import READ, Name, Region, resources_of, variable_spec, variable_specs
from flowrt.sched.tape.recording import residents
from flowrt.sched.units import Action, Unit, connect

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

Record: TypeAlias = Callable[[Region, Sequence[Spec]], Recording]

BRANCHING = (Action.SWITCH, Action.MERGE, Action.MOVE)


@valueclass
class Footprint:
    """Bytes that one step takes: at most at one moment (``peak``), of which ``kept`` stay for the next step.

    ``begun`` are those of variables that the step gives their first value. ``left_out`` names what could not be told.
    """

    peak: int = 0
    kept: int = 0
    begun: int = 0
    left_out: tuple[str, ...] = ()


@valueclass
class HeldTensor:
    """A tensor of a step: its bytes, and the first and last node of its region, by place, that use its memory."""

    where: str
    what: str
    spec: Spec
    first: int
    last: int
    region: int = 0

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def __str__(self) -> str:
        return f"{self.where}: {self.spec}, {amount(self.nbytes)} ({self.what})"


@dataclass(slots=True, eq=False)
class _Allocation:
    nbytes: int
    values: int = 0  # that lie in it


@dataclass(slots=True)
class _Play:
    """One step, played through."""

    plan: Plan
    units: Sequence[Unit]
    record: Record
    begun: set[Name]
    specs: dict[int, Spec]
    helpers: int = 0
    helped: int = 0  # bytes that the helpers compute in
    lies: dict[int, _Allocation] = field(default_factory=dict)  # value → the counted memory it lies in
    owned: set[int] = field(default_factory=set)  # values that are arrays of their own
    now: int = 0
    peak: int = 0
    kept: int = 0
    begins: int = 0
    left_out: list[str] = field(default_factory=list)

    def take(self, nbytes: int) -> int:
        self.now += counted(nbytes)
        self.peak = max(self.peak, self.now)
        return counted(nbytes)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes

    def place(self, value: int, allocation: _Allocation) -> None:
        allocation.values += 1
        self.lies[value] = allocation

    def free(self, value: int) -> None:
        allocation = self.lies.pop(value, None)
        if allocation is not None:
            allocation.values -= 1
            if not allocation.values:
                self.give(allocation.nbytes)

    def make(self, value: int, spec: Spec) -> None:
        """An output of its own."""
        self.specs[value] = spec
        self.owned.add(value)
        self.place(value, _Allocation(self.take(spec.nbytes)))

    # Units

    def carry_out(self, unit: Unit) -> None:
        if unit.region is not None:
            self._run_tape(unit, unit.region)
            return
        node = self.plan.nodes[unit.nodes[0]]
        if unit.action is Action.WRITE:
            for name, spec in zip(resources_of(node), variable_specs(node), strict=True):
                self._begin(name, spec)
        elif unit.action is Action.READ:
            self.make(unit.outputs[0], variable_spec(node))
        elif unit.action is Action.ISSUE:
            self._issue(unit)
        elif unit.action is Action.BRING:
            self.make(unit.outputs[0], self._known(unit.inputs[0]))
        elif unit.action is Action.EFFECT or node.op in STRUCTURED:
            self.left_out.append(f"{node.where()}: what it holds is known only when it runs")
            self.specs.update(zip(unit.outputs, node.outputs, strict=True))
        elif unit.action is Action.COMPUTE:
            self._compute(unit, node)

    def _begin(self, name: Name, spec: Spec) -> None:
        if name not in self.begun:
            self.begun.add(name)
            self.begins += self.take(spec.nbytes)

    def _run_tape(self, unit: Unit, region: Region) -> None:
        made = self.record(region, [self._known(value) for value in unit.inputs])
        for name, spec in zip(made.variables, made.variable_specs, strict=True):
            if name in unit.begins:
                self._begin(name, spec)
        for value, output in zip(unit.outputs, made.outputs, strict=True):
            self.specs[value] = output.spec
            if output.fresh:
                self.make(value, output.spec)
            elif output.input is not None and unit.inputs[output.input] in self.lies:
                self.place(value, self.lies[unit.inputs[output.input]])
        self.kept += self.take(made.buffer_bytes)
        self._have_helped(local_room(made.local_bytes, self.helpers))

    def _have_helped(self, room: int) -> None:
        """The helpers' memory grows to ``room``; what it was before goes once that is there."""
        if room > self.helped:
            self.kept += self.take(room) - counted(self.helped)
            self.give(counted(self.helped))
            self.helped = room

    def _compute(self, unit: Unit, node: PlanNode) -> None:
        inputs = [self._known(value) for value in node.inputs]
        outputs = lookup(node.op).infer(inputs, node.attrs)
        for spec in outputs:
            if not spec.known:
                raise DataDependent(f"{node.where()}: the shape of {spec} depends on values")
        if not sizes_known(node, inputs):
            raise DataDependent(f"{node.where()}: the sizes of what it computes depend on values")
        if is_alias(node.op) or node.op == "constant" or not outputs:
            self.specs.update(zip(unit.outputs, outputs, strict=True))
            if is_alias(node.op) and node.inputs[0] in self.lies:
                self.place(unit.outputs[0], self.lies[node.inputs[0]])
            return
        application = apply_kernel(node.op, inputs, outputs, node.attrs)
        for value, spec in zip(unit.outputs, outputs, strict=True):
            self.make(value, spec)
        scratch = sum(self.take(spec.nbytes) for spec in (*application.scratch, *application.local))
        self.give(scratch)

    def _issue(self, unit: Unit) -> None:
        """What is on another device takes none of the host's memory."""
        starts = self.plan.value_starts()
        for position in unit.nodes:
            node = self.plan.nodes[position]
            outputs = outputs_of(node, [self._known(value) for value in node.inputs])
            self.specs.update(zip(range(starts[position], starts[position + 1]), outputs, strict=True))

    def _known(self, value: int) -> Spec:
        spec = self.specs[value]
        if not spec.known:
            raise DataDependent(f"the shape of {spec} is known only when the step runs")
        return spec

    def fetch(self) -> None:
        """Copies of what is fetched and is not the caller's own to have."""
        seen: set[int] = set()
        for value in self.plan.fetches:
            if value in seen or value not in self.owned:
                self.take(self._known(value).nbytes)
            seen.add(value)


def predict_peak(
    plan: Plan,
    units: Sequence[Unit],
    feeds: Sequence[Spec],
    *,
    record: Record,
    begun: Collection[Name] = (),
    helpers: tuple[int, int] = (0, 0),
    copied: Sequence[int] = (),
) -> Footprint:
    """What a run takes whose feeds have these specs, while the variables ``begun`` have their values.

    ``helpers`` are how many threads help a tape, and the bytes they have to compute in so far; ``copied`` are the bytes
    of each feed that is copied. Raises `SpecError` where the feeds do not fit the plan.
    """
    play = _Play(plan, units, record, set(begun), dict(enumerate(feeds)), *helpers)
    for nbytes in copied:
        play.take(nbytes)
    try:
        for unit in _played(play):
            play.carry_out(unit)
        play.fetch()
    except DataDependent as error:
        play.left_out.append(str(error))
    return Footprint(play.peak, play.kept, play.begins, tuple(play.left_out))


def _played(play: _Play) -> Iterator[Unit]:
    """The units in the order in which the executor carries them out; what nobody needs any more is given back."""
    if any(unit.action in BRANCHING for unit in play.units):
        raise DataDependent("which side of a switch is taken, or how often a loop iterates, is known only when it runs")
    wiring = connect(play.plan, play.units)
    value_of = {number: value for value, number in wiring.values.items()}
    machine = StepMachine(wiring.topology)
    said = machine.start()
    ready = deque(said.launch)
    while ready:
        activation = ready.popleft()
        yield play.units[activation % len(play.units)]
        said = machine.complete(activation)
        for number in said.free:
            play.free(value_of[number])
        ready.extend(said.launch)


def survey(plan: Plan, units: Sequence[Unit], feeds: Sequence[Spec], *, record: Record) -> list[HeldTensor]:
    """The tensors of a step as far as they are known beforehand, the largest first."""
    play = _Play(plan, units, record, set(), dict(enumerate(feeds)))
    found = [
        HeldTensor(f"variable {name[1]!r}", "variable", spec, -1, -1, -1)
        for name, spec in _variables(plan.nodes).items()
    ]
    with suppress(FlowrtError):  # what comes after the unknown is not known either
        for number, unit in enumerate(_played(play)):
            play.carry_out(unit)
            found += _tensors(play, unit, number)
    return sorted(found, key=lambda tensor: -tensor.nbytes)


def _variables(nodes: Iterable[PlanNode]) -> dict[Name, Spec]:
    touching = (node for node in nodes if node.op == READ or writes(node.op))
    both = (zip(resources_of(node), variable_specs(node), strict=True) for node in touching)
    return {name: spec for named in both for name, spec in named}


def _tensors(play: _Play, unit: Unit, number: int) -> Iterator[HeldTensor]:
    """What a unit that was just played computes."""
    nodes = play.plan.nodes
    if unit.region is not None:
        for held in residents(play.plan, unit.region, [play.specs[value] for value in unit.inputs]):
            yield HeldTensor(nodes[held.node].where(), held.what, held.spec, held.first, held.last, number)
        return
    for value in unit.outputs:
        if value in play.owned:
            yield HeldTensor(nodes[unit.nodes[0]].where(), "value", play.specs[value], 0, 0, number)
