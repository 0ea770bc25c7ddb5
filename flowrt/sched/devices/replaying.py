"""Regions of a plan carried out on a device as one: laid out once for inputs of the same shapes, then issued whole.

Law: everything here is called in the device's lane. What a region needs is taken before anything of it is issued; where
that does not fit in one piece, it is left to who issues node by node. A region that runs again is recorded where the
device can: then its memory, its outputs' and its variables' stay where they are, so it is run that way only while
nobody else looks at any of these. What is recorded is idle memory between runs, and goes where memory is short.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import DeviceLost, FlowrtError, ResourceError, StepCancelled
from flowrt.base.plan import Plan
from flowrt.base.spec import Spec, replace_value, spec_of, value_known
from flowrt.base.valueclass import valueclass
from flowrt.kernels.launch import STATUS, check, run_kernel
from flowrt.sched.devices.blame import Naming, finish, finished_though_it_fails, prepared
from flowrt.sched.devices.laying import Home, In, PlacedKernel, RegionLayout, lay
from flowrt.sched.devices.memory import Arena, DeviceArray
from flowrt.sched.devices.staging import Copying, Staging, stage
from flowrt.sched.host.latest import Latest
from flowrt.sched.regions.lives import DataDependent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.base.plan import PlanNode
    from flowrt.sched.devices.driver import Array, Kernel, RecordedLaunches
    from flowrt.sched.devices.holding import Holding
    from flowrt.sched.devices.looping import BodyUnit
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.units import Unit

_log = logging.getLogger(__name__)
Value: TypeAlias = "DeviceArray | Array"
LAID_OUT = 64  # layouts of a region that are kept, each for inputs of other sizes
RECORDED = 8  # of them that keep memory
TURNS = 2  # recordings of one layout, where what one has made is still looked at when it runs again
RENEWED = 16  # times that one is recorded anew, as its variables lie elsewhere, before that is given up


@dataclass(slots=True, eq=False)
class _DeviceMemory:
    """Where a run of a layout computes: a piece for what stays, an array for each value that leaves, the variables'."""

    within: DeviceArray
    outputs: list[DeviceArray]
    variables: list[DeviceArray]
    constants: list[DeviceArray]

    @property
    def places(self) -> tuple[int, ...]:
        """Which memory the variables lie in."""
        return tuple(array.storage.number for array in self.variables)

    @property
    def is_alone(self) -> bool:
        """Whether nobody looks at what left the last time."""
        return all(array.is_alone for array in self.outputs)


@valueclass
class _Stretch:
    """A recording of launches, the words of those that are of the layout, and whether any of these may fail."""

    recorded: RecordedLaunches
    launches: tuple[PlacedKernel, ...]
    words: Array
    may_fail: bool


@dataclass(slots=True, eq=False)
class _Again:
    """What is recorded of a layout: with the memory that it is for, and a recording of each stretch.

    ``taken`` are the inputs, by number, that are copied in and where to, but for those that ``staging`` has copied;
    ``changed`` are the variables that are written.
    """

    memory: _DeviceMemory
    places: tuple[int, ...]
    stretches: list[_Stretch]
    staging: Staging
    taken: list[tuple[int, Any]]
    changed: list[DeviceArray]
    seen: int  # `Holding.changes` when the variables were found where they are


@dataclass(slots=True, eq=False)
class _Known:
    layout: RegionLayout
    constants: list[DeviceArray] | None = None
    again: list[_Again] = field(default_factory=list)
    runs: int = 0
    renewed: int = 0


class WholeRegions:
    """Carries out regions of one plan on one device, whose variables are held."""

    def __init__(self, plan: Plan, arena: Arena, holding: Holding) -> None:
        self._plan, self._arena, self._holding = plan, arena, holding
        self._specs = plan.value_specs()
        self._known: defaultdict[Region, Latest[Any, _Known | None]] = defaultdict(partial(Latest, LAID_OUT))
        self._copies: dict[int, Kernel] = {}
        self._part = getattr(arena.driver, "part", None)
        self._record = getattr(arena.driver, "record", None)
        arena.keepers.add(self)

    def carry_out(self, unit: Unit | BodyUnit, inputs: Sequence[Value], words: Array) -> list[Value] | None:
        """The outputs of a region, once all of it is done; None where it is to be issued node by node."""
        region = unit.issued
        if region is None or self._part is None:
            return None
        known = self._find(region, inputs)
        if known is None:
            return None
        try:
            found = self._run(region, known, unit, inputs, words)
            self._holding.begin_all(known.layout.changed)
        finally:
            self._holding.begin_none()
        return found

    def let_go(self) -> None:
        """Have nothing recorded any more, nor constants there, as memory is short."""
        for layouts in self._known.values():
            for known in layouts.values():
                if known is not None:
                    known.again.clear()
                    known.constants = None

    # ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, region: Region, inputs: Sequence[Value]) -> _Known | None:
        sizes, layouts = region.shape_inputs, self._known[region]
        key: Any = tuple([(type(array), array.dtype, array.shape) for array in inputs])
        if sizes:
            deciding = zip(region.inputs, inputs, strict=True)
            key = key, *[a.tobytes() for value, a in deciding if value in sizes and isinstance(a, np.ndarray)]
        if key in layouts:
            layouts.move_to_end(key)
            return layouts[key]
        specs = [
            spec_of(array) if value in sizes and isinstance(array, np.ndarray) else self._planned(value, array)
            for value, array in zip(region.inputs, inputs, strict=True)
        ]
        known = layouts[key] = self._lay(region, specs)
        return known

    def _planned(self, value: int, array: Value) -> Spec:
        """The spec of an input, with what the plan knows of its value: a constant elsewhere may decide sizes here."""
        known = self._specs[value].value
        return replace_value(Spec(array.dtype, array.shape), known if value_known(known) else None)

    def _lay(self, region: Region, specs: Sequence[Spec]) -> _Known | None:
        if any(has_bodies(self._plan.nodes[position]) for position in region.nodes):
            return None
        try:
            prepare = partial(prepared, self._arena.driver)
            return _Known(lay(self._plan, region, specs, prepare, self._copying, run_kernel))
        except DataDependent:
            return None

    def _copying(self, nbytes: int) -> Kernel:
        return self._copies.setdefault(nbytes, Copying(self._arena.driver.copy, nbytes))

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, known: _Known, unit: Unit | BodyUnit) -> _DeviceMemory | None:
        """Memory for a run; None where there is none in such pieces."""
        try:
            return self._in_pieces(known, unit)
        except ResourceError:
            self._holding.begin_none()
        self._check(known.layout)
        return None

    def _in_pieces(self, known: _Known, unit: Unit | BodyUnit) -> _DeviceMemory:
        layout, arena, first = known.layout, self._arena, self._plan.nodes[unit.nodes[0]]
        constants = known.constants or [
            arena.hold(array, self._plan.nodes[node].where()) for array, node in layout.constants
        ]
        known.constants = constants  # which are let go of where there is no memory for the rest
        within = arena.empty(Spec("uint8", (layout.nbytes,)), f"{layout.launches} launches from {first.where()} on")
        made: dict[int, DeviceArray] = {}
        for leaving in layout.outputs:
            if leaving.home.memory is In.OUTPUT and leaving.home.place not in made:
                made[leaving.home.place] = arena.empty(leaving.spec, self._plan.nodes[leaving.node].where())
        outputs = [made[number] for number in range(len(made))]
        return _DeviceMemory(within, outputs, self._variables(layout, unit), constants)

    def _check(self, layout: RegionLayout) -> None:
        """Raise `ResourceError` where the region does not fit, however it is issued: before anything of it is."""
        there = [
            (tensor.spec, where if not tensor.scratch else f"{where}, scratch", tensor.first, tensor.last)
            for tensor in layout.tensors
            for where in (self._plan.nodes[tensor.node].where(),)
        ]
        variables = zip(layout.variables, layout.specs, strict=True)
        hold = self._holding
        moved = [(spec, hold.where(name)) for name, spec in variables if not hold.is_here(name, spec)]
        self._arena.check([*((spec, where, -1, len(there)) for spec, where in moved), *there])

    def _variables(self, layout: RegionLayout, unit: Unit | BodyUnit) -> list[DeviceArray]:
        hold = self._holding
        return [
            hold.beginning(name, spec)
            if name in unit.begins
            else hold.own(name, spec)
            if name in layout.changed
            else hold.held(name, spec)
            for name, spec in zip(layout.variables, layout.specs, strict=True)
        ]

    def _at(self, home: Home, memory: _DeviceMemory) -> Any:
        match home.memory:
            case In.REGION:
                assert self._part is not None
                return self._part(memory.within.storage.memory, home.place, max(1, home.spec.nbytes))
            case In.OUTPUT:
                return memory.outputs[home.place].storage.memory
            case In.VARIABLE:
                return memory.variables[home.place].storage.memory
            case _:
                return memory.constants[home.place].storage.memory

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self, region: Region, known: _Known, unit: Unit | BodyUnit, inputs: Sequence[Value], words: Array
    ) -> list[Value] | None:
        layout = known.layout
        known.runs += 1
        again = next((again for again in known.again if again.memory.is_alone), None)
        if again is not None:
            if self._is_where_it_was(again, layout, unit):
                return self._replay(region, layout, again, inputs, words)
            if again in known.again:  # or it went as memory was short
                known.again.remove(again)
            known.renewed += 1
        again = None
        memory = self._take(known, unit)
        if memory is None:
            return None
        taken = [(number, self._at(home, memory)) for number, home in layout.written]
        if self._record is not None and len(known.again) < TURNS and known.runs > 1 and known.renewed < RENEWED:
            again = self._recorded(region, layout, memory, inputs, taken)
            if again is not None:
                known.again.append(again)
                return self._replay(region, layout, again, inputs, words)
            known.renewed = RENEWED
        self._write(region, taken, inputs)
        self._issue(layout, memory, words)
        return self._outputs(layout, memory, inputs)

    def _is_where_it_was(self, again: _Again, layout: RegionLayout, unit: Unit | BodyUnit) -> bool:
        """Whether all variables lie where they were recorded, and nobody else looks at those that are written.

        Where there is no memory for one that does not, beside what is recorded, they do not.
        """
        if again.seen == self._holding.changes and all(array.is_alone for array in again.changed):
            return True
        try:
            again.memory.variables = self._variables(layout, unit)
        except ResourceError:
            self._holding.begin_none()
            return False
        again.seen = self._holding.changes
        return again.memory.places == again.places

    def _write(self, region: Region, taken: Sequence[tuple[int, Any]], inputs: Sequence[Value]) -> None:
        """Bring the inputs to where they are taken from."""
        driver, done = self._arena.driver, f", brought to {self._arena.device.name}"
        for number, place in taken:
            value = inputs[number]
            with Naming(self._made_by(region.inputs[number]), done):
                if isinstance(value, DeviceArray):
                    driver.copy(value.storage.memory, place, value.nbytes)
                elif value.nbytes:
                    driver.write(place, np.ascontiguousarray(value))

    def _made_by(self, value: int) -> Iterator[PlanNode | str]:
        """The node that makes a value, or the feed that it is."""
        feeds = self._plan.feeds
        if value < len(feeds):
            yield f"{feeds[value].name!r} ({feeds[value].site})"
        else:
            yield self._plan.nodes[bisect_right(self._plan.value_starts(), value) - 1]

    def _issue(self, layout: RegionLayout, memory: _DeviceMemory, words: Array) -> None:
        """Launch one after another."""
        for stretch in layout.stretches:
            left = np.tile(words, (len(stretch), 1))
            with finished_though_it_fails(self._arena.driver):
                for launch, own in zip(stretch, left, strict=True):
                    if words[STATUS]:
                        raise StepCancelled(f"{self._plan.nodes[launch.node].where()} was not begun")
                    with Naming(self._nodes([launch])):
                        launch.kernel.launch([self._at(home, memory) for home in launch.operands], own)
            finish(self._arena.driver, self._nodes(stretch))
            self._look(stretch, left)

    def _recorded(
        self,
        region: Region,
        layout: RegionLayout,
        memory: _DeviceMemory,
        inputs: Sequence[Value],
        taken: Sequence[tuple[int, Any]],
    ) -> _Again | None:
        """The layout as the device does it again; None where it cannot, or has no memory for what that takes beside."""
        assert self._record is not None
        kept = list(_with_memory(self._known[region]))
        for known in kept[: max(0, len(kept) - RECORDED + 1)]:
            known.again.clear()
        told: list[list[Any]] = [
            [(launch.kernel, [self._at(home, memory) for home in launch.operands]) for launch in stretch]
            for stretch in layout.stretches
        ]
        try:
            with Naming(self._nodes([launch for stretch in layout.stretches for launch in stretch])):
                staging = self._staged(layout, memory, inputs, taken)
                if told:
                    told[0] = [*staging.before, *told[0]]
                    told[-1] += staging.after
                recorded = [self._record(stretch) for stretch in told]
        except DeviceLost:
            raise
        except FlowrtError as error:
            if not isinstance(error, ResourceError):
                _log.warning("%s launches each time anew what it cannot record: %s", self._arena.device.name, error)
            return None
        starts = (len(staging.before), *(0 for _ in recorded))
        stretches = [
            _Stretch(one, launches, one.words[start : start + len(launches)], any(a.kernel.may_fail for a in launches))
            for one, launches, start in zip(recorded, layout.stretches, starts, strict=False)
        ]
        left = [(number, place) for number, place in taken if number not in staging.sent]
        named = zip(layout.variables, memory.variables, strict=True)
        changed = [array for name, array in named if name in layout.changed]
        return _Again(memory, memory.places, stretches, staging, left, changed, self._holding.changes)

    def _staged(
        self, layout: RegionLayout, memory: _DeviceMemory, inputs: Sequence[Value], taken: Sequence[tuple[int, Any]]
    ) -> Staging:
        """What a recording brings in of the host's memory, and out into it."""
        if not layout.stretches:
            return Staging()
        given = [
            (number, Spec(value.dtype, value.shape), place)
            for number, place in taken
            for value in (inputs[number],)
            if isinstance(value, np.ndarray)
        ]
        made = [
            (number, leaving.spec, self._at(leaving.home, memory))
            for number, leaving in enumerate(layout.outputs)
            if leaving.home.memory in (In.OUTPUT, In.VARIABLE)
        ]
        return stage(self._arena.driver, given, made)

    def _replay(
        self, region: Region, layout: RegionLayout, again: _Again, inputs: Sequence[Value], words: Array
    ) -> list[Value]:
        """Have it done again; a stretch is waited for that may fail, and the last."""
        for number, staged in again.staging.sent.items():
            staged[...] = inputs[number]
        self._write(region, again.taken, inputs)
        for stretch in again.stretches:
            if words[STATUS]:
                raise StepCancelled(f"{self._plan.nodes[stretch.launches[0].node].where()} was not begun")
            stretch.recorded.words[:] = words
            with Naming(self._nodes(stretch.launches)):
                stretch.recorded.replay()
                self._arena.driver.finish()
            if stretch.may_fail:
                self._look(stretch.launches, stretch.words)
        found = self._outputs(layout, again.memory, inputs)
        for number, brought in again.staging.fetched.items():
            value = found[number]
            assert isinstance(value, DeviceArray)
            value.brought = brought
        return found

    def _nodes(self, stretch: Sequence[PlacedKernel]) -> Iterator[PlanNode]:
        return (self._plan.nodes[launch.node] for launch in stretch)

    def _look(self, stretch: Sequence[PlacedKernel], words: Array) -> None:
        """What became of the launches that may fail."""
        for number in words[:, STATUS].nonzero()[0].tolist():
            launch = stretch[number]
            if launch.kernel.may_fail:
                node = self._plan.nodes[launch.node]
                check(words[number], node.op, node.where)

    def _outputs(self, layout: RegionLayout, memory: _DeviceMemory, inputs: Sequence[Value]) -> list[Value]:
        """What leaves, as views, by which can be told whether somebody still looks at what is kept for the next run."""
        found: list[Value] = []
        for leaving in layout.outputs:
            home, spec = leaving.home, leaving.spec
            match home.memory:
                case In.INPUT:
                    value = inputs[home.place]
                    seen = value.seen_as(spec) if isinstance(value, DeviceArray) else value.reshape(spec.concrete)
                    found.append(seen)
                case In.OUTPUT:
                    found.append(memory.outputs[home.place].seen_as(spec))
                case In.VARIABLE:
                    found.append(memory.variables[home.place].seen_as(spec))
                case _ if may_size(layout.constants[home.place][0]):  # which those who infer shapes must see
                    found.append(layout.constants[home.place][0].reshape(spec.concrete))
                case _:
                    found.append(memory.constants[home.place].seen_as(spec))
        return found


def _with_memory(layouts: Mapping[Any, _Known | None]) -> Iterator[_Known]:
    """Those of which something is recorded, which keeps memory."""
    return (known for known in layouts.values() if known is not None and known.again)


def has_bodies(node: PlanNode) -> bool:
    """Whether a node is a loop or a branch."""
    return any(isinstance(value, Plan) for value in node.attrs.values())


def may_size(array: Array) -> bool:
    """Whether an array may decide the size of something: inference sees what is in it."""
    return value_known(spec_of(array).value)
