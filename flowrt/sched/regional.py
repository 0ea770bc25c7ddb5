"""What computes a region: the tape for inputs of one set of shapes, or piece after piece where it has none.

Law: the region's variables are held by whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import ref

from flowrt.base.spec import Spec
from flowrt.kernels.launch import STEP
from flowrt.sched.host.latest import Latest
from flowrt.sched.host.tracer import now
from flowrt.sched.loops.pieces import find_pieces
from flowrt.sched.piecewise import Piecewise
from flowrt.sched.ready import LONG
from flowrt.sched.regions.regions import resource_of, variable_spec
from flowrt.sched.single import read_in_place
from flowrt.sched.tape.tape import Tape, address
from flowrt.sched.tape.timing import note_node

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.host.variables import Name
    from flowrt.sched.loops.pieces import Piece
    from flowrt.sched.ready import ReadyRun
    from flowrt.sched.regions.recorded import RowWrite
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.single import Runners
    from flowrt.sched.tape.tapes import Tapes
    from flowrt.sched.units import Unit

FEW = 8  # values that decide shapes, for each of which the whole region is laid out when it first comes
KNOWN = 64  # sets of shapes whose pieces are kept


class RegionRunner:
    """Computes the region of a unit. May be called from any thread."""

    def __init__(self, plan: Plan, unit: Unit, region: Region, host: Host, tapes: Tapes, runners: Runners) -> None:
        self._plan, self._unit, self._region, self._host = plan, unit, region, host
        self._tapes, self._runners = tapes, runners
        self._pieces: Latest[tuple[tuple[int, ...], ...], Sequence[Piece]] = Latest(KNOWN)

    def known(self, inputs: Sequence[Array]) -> Tape | None:
        """The tape for inputs like these, if it was made before: compiles nothing."""
        return self._tapes.made(self._region, inputs)

    def ready(self, inputs: Sequence[Array]) -> ReadyRun:
        """The tape for inputs like these; `LONG` where shapes depend on values made inside, or on ever other values."""
        tapes, region = self._tapes, self._region
        if not region.shape_inputs or self._host.memory.limit is not None or tapes.made_of(region) < FEW:
            return tapes.get(region, inputs) or LONG
        return tapes.again(region, inputs) or LONG

    def run(self, ready: ReadyRun, inputs: Sequence[Array], words: Array) -> list[Array]:
        """The outputs. A variable that the region begins has its value once the tape that begins it is done."""
        if not isinstance(ready, Tape):
            return self._run_in_pieces(inputs, words)
        tape, unit, variables = ready, self._unit, self._host.variables
        if variables.lent and variables.still_lent(unit.writes):
            return self._run_beside_lookers(tape, inputs, words)
        crew, laid = self._host.lanes.crew, tape.laid
        if laid is not None and laid[0] is variables and laid[1] == variables.changes:
            alive = [reference() for reference in laid[3]]  # should someone reset them while the tape runs
            if laid[1] == variables.changes:
                outputs = tape.run(words, inputs, laid[2], crew=crew, tracer=self._host.tracer)
                del alive
                return outputs
        return self._run_tape(tape, inputs, words)

    def _run_tape(self, tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
        """The outputs of a tape of the region, or of a piece of it."""
        variables = self._host.variables
        changes = variables.changes
        memory, begun = self._memory(tape)
        places = [address(value) for value in memory]
        host = self._host
        outputs = tape.run(words, inputs, places, crew=host.lanes.crew, tracer=host.tracer)
        for name, value in begun.items():
            variables.begin(name, value)
        if not begun:
            tape.laid = variables, changes, places, [ref(value) for value in memory]
        return outputs

    def _run_beside_lookers(self, tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run it where somebody looks at variables that it writes, and goes on to see what they hold now."""
        unit, variables, spares = self._unit, self._host.variables, self._host.spares
        whole = frozenset(tape.variables[number] for number in tape.whole_writes)
        staying = variables.part(unit.writes - whole, spares.copy, unit.by_rows)
        before = partial(self._keep_rows, staying) if staying else None
        memory, begun = self._memory(tape)
        lent, values = variables.still_lent(whole), dict(zip(tape.variables, memory, strict=True))
        moved = begun | {name: spares.memory(name, values[name]) for name in lent}
        places = [address(value) for value in {**values, **moved}.values()]
        old = [address(value) for value in memory] if lent else ()
        crew, tracer = self._host.lanes.crew, self._host.tracer
        outputs = tape.run(words, inputs, places, crew=crew, before=before, old=old, tracer=tracer)
        for name, value in moved.items():
            variables.begin(name, value)
        return outputs

    def _memory(self, tape: Tape) -> tuple[list[Array], dict[Name, Array]]:
        """Where the tape's variables lie, and those among them that have no value before it has run."""
        variables, memory = self._host.variables, []
        begun: dict[Name, Array] = {}
        for name, spec in zip(tape.variables, tape.recording.variable_specs, strict=True):
            value = variables.find(name, spec) if name in self._unit.begins else variables.value(name, spec)
            if value is None:
                value = begun[name] = self._host.memory.lasting(spec.concrete, spec.dtype)
            memory.append(value)
        return memory, begun

    def _keep_rows(self, staying: frozenset[Name], write: RowWrite, groups: Array) -> None:
        self._host.keep_rows(staying.intersection(write.names), groups)

    @cached_property
    def _starts(self) -> Sequence[int]:
        return self._plan.value_starts()

    @cached_property
    def _piecewise(self) -> Piecewise:
        return Piecewise(self._plan, self._host.memory, self._run_tape, self._run_singly)

    def _run_in_pieces(self, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run one piece after another; node by node where somebody looks at variables meanwhile."""
        variables = self._host.variables
        if variables.lent and variables.still_lent(self._unit.writes):
            return self._run_singly(self._region, inputs, words)
        shapes = tuple([array.shape for array in inputs])
        pieces = self._pieces.get(shapes)
        if pieces is None:
            specs = [Spec(array.dtype, array.shape) for array in inputs]
            pieces = self._pieces[shapes] = find_pieces(self._plan, self._region, specs)
        return self._piecewise.run(self._region, pieces, inputs, words)

    def _run_singly(self, region: Region, inputs: Sequence[Array], words: Array) -> list[Array]:
        """Run the nodes of the region, or of a piece of it, one after the other."""
        plan, starts, tracer = self._plan, self._starts, self._host.tracer
        values = dict(zip(region.inputs, inputs, strict=True))
        in_place = read_in_place(plan, region.nodes, region.outputs) if region.reads else frozenset()
        for position in region.nodes:
            node = plan.nodes[position]
            if position in in_place:
                values[starts[position]] = self._host.variables.value(resource_of(node), variable_spec(node))
                continue
            given, began = [values[v] for v in node.inputs], 0 if tracer is None else now()
            outputs = self._runners[position](given, words)
            if tracer is not None:
                note_node(tracer, node, given, outputs, began, int(words[STEP]))
            values.update(zip(range(starts[position], starts[position + 1]), outputs, strict=True))
        return [values[v] for v in region.outputs]
