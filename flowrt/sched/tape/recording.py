"""What a region comes to once its inputs' shapes are known: the launches in order, and where every value lies.

Law: pure; it runs inference, picks kernels and lays out memory, and touches none. The order is the plan's. An alias
shares its input's place; what inference finds out by itself (shapes and their arithmetic) becomes a constant. A value
that leaves the region is computed straight into memory that leaves with it; inputs and constants that leave are passed
on as they are. A variable is read where it lies, unless a write comes before the last use of what was read, or what was
read leaves: then it is copied at the moment of the read. What is written over what, and what is computed straight into
a variable, `sharing` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.base.traits import traits_of, writes
from flowrt.base.valueclass import valueclass
from flowrt.kernels.composite.many import ManyStep
from flowrt.kernels.fusion.fused import WORTH_BYTES
from flowrt.kernels.language.table import edition
from flowrt.kernels.launch import COPY_OP, Application, LaunchStep, Operand, apply_kernel
from flowrt.sched.host.arena import aligned, lay_out
from flowrt.sched.loops.nesting import apply_structured
from flowrt.sched.loops.structured import PURE_STRUCTURED
from flowrt.sched.regions.alike import Found, again
from flowrt.sched.regions.cost import Cost
from flowrt.sched.regions.lives import Lives, find_lives
from flowrt.sched.regions.recorded import ARENA_SLOT, FIRST_SLOT, LOCAL_SLOT, Launch, Output, Recording, RowWrite
from flowrt.sched.regions.regions import READ, Name, Region, resource_of, resources_of, variable_specs
from flowrt.sched.regions.sharing import Sharing, share
from flowrt.sched.tape.gathering import gather
from flowrt.sched.tape.schedule import control

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.kernels.launch import Launchable
    from flowrt.kernels.store.background import CompileOrder

NO_BYTES = Spec("uint8", (0,))
NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


def record(plan: Plan, region: Region, inputs: Sequence[Spec]) -> Recording:
    """Lay ``region`` out for inputs of these concrete specs; those of ``shape_inputs`` carry their values.

    Raises `SpecError` naming the node that does not fit, `DataDependent` where the shapes cannot be known beforehand.
    """
    return _recorder(plan, region, inputs).recording()


@valueclass
class ResidentTensor:
    """A tensor that a region computes, or the scratch of a launch: made by the plan's ``node``, in memory from the
    ``first`` to the ``last`` node of the region that needs it, by place. It may share that memory with those before it.
    """

    node: int
    what: str
    spec: Spec
    first: int
    last: int


def residents(plan: Plan, region: Region, inputs: Sequence[Spec]) -> list[ResidentTensor]:
    """What is in memory while a region runs on inputs of these specs, its variables, inputs and constants apart."""
    recorder = _recorder(plan, region, inputs)
    lives, found = recorder.lives, []
    homed = {id(home) for home in recorder.homes.values()}
    for index, _, values in lives.nodes():
        for value in values:
            home = recorder.homes.get(value)
            if home is None or home.slot >= recorder.first_variable or not home.slot:
                continue
            leaves, life = value in recorder.leaves, lives.of[value]
            last = len(region.nodes) - 1 if leaves else life.last
            what = "output" if leaves else "value"
            found.append(ResidentTensor(region.nodes[index], what, lives.specs[value], life.first, last))
    for storage in recorder.arena:
        if id(storage) not in homed:
            place = region.nodes[storage.first]
            found.append(ResidentTensor(place, "scratch", storage.spec, storage.first, storage.last))
    return found


def _recorder(plan: Plan, region: Region, inputs: Sequence[Spec]) -> _Recorder:
    lives = find_lives(plan, region, inputs)
    applications = _apply_nodes(lives)
    recorder = _Recorder(lives, applications, share(lives, applications))
    recorder.decide_outputs()
    recorder.launch()
    return recorder


def _apply_nodes(lives: Lives) -> dict[int, Application]:
    """What computes each node: one for all nodes that do the same, as many do in long graphs."""
    latest, kernels = lives.region.latest, edition()
    found: Found = {}
    applications: dict[int, Application] = {}
    for index, node, _ in lives.nodes():
        if lives.computes(index):
            specs = lives.operands(index)
            key = (kernels, lives.kinds[index], *specs)
            known = again(found, latest.applied, key)
            if known is None:
                known = found[key] = _apply_node(lives, index, node, specs)
            applications[index] = known
    latest.inferred = lives.inferred
    latest.applied = {key: known for key, known in found.items() if not (known.orders or known.wishes)}
    return applications


def _apply_node(lives: Lives, index: int, node: PlanNode, specs: Sequence[Spec]) -> Application:
    inputs = len(node.inputs)
    if node.op in PURE_STRUCTURED:
        device, bodies = lives.region.device, lives.region.latest.bodies
        return apply_structured(node.op, specs[:inputs], specs[inputs:], node.attrs, device, record, bodies)
    return _apply(lives, index, node.op, specs, inputs, node.attrs)


def _apply(
    lives: Lives, index: int, op: str, specs: Sequence[Spec], inputs: int, attrs: Mapping[str, Any] = NO_ATTRS
) -> Application:
    try:
        return apply_kernel(op, specs[:inputs], specs[inputs:], attrs, lives.region.device.partition(":")[0])
    except GraphError as error:
        raise type(error)(f"{lives.node(index).where()}: {error}") from None


@dataclass(slots=True, eq=False)
class _Storage:
    """A stretch of memory under some slot; in the arena from ``first`` to ``last``, in the order of nodes."""

    slot: int
    spec: Spec = NO_BYTES
    first: int = 0
    last: int = 0
    offset: int = 0


@dataclass(slots=True)
class _Pending:
    step: Launchable
    storages: list[_Storage]
    sizes: tuple[int, ...]
    node: int
    index: int  # of that node in the region
    control: tuple[int, ...]
    seconds: float
    also: tuple[int, ...] = ()


@dataclass(slots=True)
class _Recorder:
    lives: Lives
    applications: Mapping[int, Application]
    sharing: Sharing
    homes: dict[int, _Storage] = field(default_factory=dict)  # root → its memory
    memory: dict[Name, _Storage] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    leaves: dict[int, list[int]] = field(default_factory=dict)  # root → slots of the fresh outputs it becomes
    pending: list[_Pending] = field(default_factory=list)
    arena: list[_Storage] = field(default_factory=list)
    private: list[_Storage] = field(default_factory=list)  # slots that launches set themselves
    row_writes: list[tuple[int, tuple[Name, ...], _Storage, Spec]] = field(default_factory=list)  # nodes, and RowWrites
    copying: dict[Spec, Application] = field(default_factory=dict)  # what copies values of one spec
    first_variable: int = 0  # its slot; constants follow
    local_bytes: int = 0
    value_bytes: int = 0
    cost: Cost = field(default_factory=Cost)
    orders: list[CompileOrder] = field(default_factory=list)
    wishes: Counter[CompileOrder] = field(default_factory=Counter)  # with the bytes that they would save together
    longest: float = 0.0

    # Where values lie

    def decide_outputs(self) -> None:
        """Say where each of the region's outputs comes from, and give all that is not in the arena its slot."""
        lives, region = self.lives, self.lives.region
        sources = {value: number for number, value in enumerate(region.inputs)}
        slot = FIRST_SLOT + len(sources)
        for value in region.outputs:
            root, spec = lives.roots[value], lives.specs[value]
            self.outputs.append(Output(spec, sources.get(root), lives.constants.get(root)))
            if self.outputs[-1].fresh:
                self.leaves.setdefault(root, []).append(slot)
                slot += 1
        self.first_variable = slot
        self.memory = {name: _Storage(slot + number) for number, name in enumerate(region.variables)}
        slot += len(self.memory)
        self.homes |= {value: _Storage(FIRST_SLOT + number) for value, number in sources.items()}
        self.homes |= {root: _Storage(slot + number) for number, root in enumerate(lives.constants)}
        self.homes |= {root: self.memory[name] for root, name in self.sharing.homed.items()}

    def _home(self, value: int) -> _Storage:
        """Memory for a value that is computed or copied, and for all that will be written over it."""
        if value not in self.leaves:
            self.value_bytes += self.lives.specs[value].nbytes
        if value in self.homes:
            return self.homes[value]
        members = self.sharing.in_place(value)
        last, spec = members[-1], self.lives.specs[value]
        leaves, of = self.leaves.get(last), self.lives.of
        home = _Storage(leaves[0]) if leaves else self._in_arena(spec, of[value].first, of[last].last)
        self.homes.update((member, home) for member in members)
        return home

    def _in_arena(self, spec: Spec, first: int, last: int) -> _Storage:
        self.arena.append(_Storage(ARENA_SLOT, spec, first, last))
        return self.arena[-1]

    def _in_local(self, specs: Sequence[Spec]) -> list[_Storage]:
        """Places in the running thread's own memory, which each launch has for itself."""
        places, end = [], 0
        for spec in specs:
            places.append(_Storage(LOCAL_SLOT, spec, offset=end))
            end += aligned(spec.nbytes)
        self.local_bytes = max(self.local_bytes, end)
        return places

    # Launches

    def launch(self) -> None:
        lives = self.lives
        carries: dict[int, list[int]] = {}  # place of a node → the plan nodes that assignments it carries out wait for
        for assignment, place in self.sharing.carried.items():
            carries.setdefault(place, []).extend(lives.node(assignment).control)
        for index, node, values in lives.nodes():
            if node.op == READ:
                self._read(node, index, values[0])
            elif writes(node.op):
                if index not in self.sharing.carried:
                    self._write(node, index)
            elif index in self.applications:
                homes = [self.homes[lives.roots[v]] for v in node.inputs] + [self._home(v) for v in values]
                control = tuple(dict.fromkeys((*node.control, *carries.get(index, ()))))
                self._launch(index, node.op, self.applications[index], homes, lives.operands(index), control)
        for root, slots in self.leaves.items():
            for slot in slots[1:]:
                self._copy(lives.of[root].first, self.homes[root], _Storage(slot), lives.specs[root], ())

    def _read(self, node: PlanNode, index: int, value: int) -> None:
        name = resource_of(node)
        if value in self.leaves or self.sharing.is_overtaken(name, index, self.lives.of[value]):
            self._copy(index, self.memory[name], self._home(value), self.lives.specs[value], node.control)
        else:
            self.homes[value] = self.memory[name]

    def _write(self, node: PlanNode, index: int) -> None:
        update = traits_of(node.op).update
        assert update is not None
        if update.rows:
            homes = [self.homes[self.lives.roots[v]] for v in node.inputs]
            homes += [self.memory[name] for name in resources_of(node)]
            specs = [*self.lives.operands(index), *variable_specs(node)]
            application = _apply(self.lives, index, node.op, specs, len(node.inputs), node.attrs)
            self.row_writes.append((self.lives.region.nodes[index], resources_of(node), homes[1], specs[1]))
            self._launch(index, node.op, application, homes, specs, node.control)
            return
        memory, value = self.memory[resource_of(node)], self.homes[self.lives.roots[node.inputs[0]]]
        spec = self.lives.specs[node.inputs[0]]
        op, specs = update.whole, [spec] * 3
        if op is None:
            self._copy(index, value, memory, spec, node.control)
            return
        self._launch(index, op, _apply(self.lives, index, op, specs, 2), [memory, value, memory], specs, node.control)

    def _copy(self, index: int, source: _Storage, target: _Storage, spec: Spec, control: tuple[int, ...]) -> None:
        application = self.copying.get(spec)
        if application is None:
            application = self.copying[spec] = _apply(self.lives, index, COPY_OP, [spec] * 2, 1)
        self._launch(index, COPY_OP, application, [source, target], [spec] * 2, control)

    def _launch(
        self,
        index: int,
        op: str,
        application: Application,
        homes: Sequence[_Storage],
        specs: Sequence[Spec],
        control: tuple[int, ...],
    ) -> None:
        """Plan the steps of one op on operands (inputs, then outputs) that lie in ``homes``."""
        scratch = [self._in_arena(spec, index, index) for spec in application.scratch]
        storages = [*homes, *scratch, *self._in_local(application.local)]
        private = [_Storage(len(self.private) + i) for i in range(application.slots)]
        self.private += private
        storages += private
        sizes = tuple([spec.nbytes for spec in (*specs, *application.scratch, *application.local)])
        position = self.lives.region.nodes[index]
        seconds = self.cost.add(op, specs, len(application.steps)) / max(len(application.steps), 1)
        self.pending += [
            _Pending(step, storages, sizes, position, index, control, seconds) for step in application.steps
        ]
        self.orders += application.orders
        for order, saved in application.wishes:
            self.wishes[order] += saved
        self.longest += application.longest_seconds

    def gather(self) -> None:
        """Make one of small launches where the order allows; what they touch is in memory until they run."""
        reached = [*accumulate((p.index for p in self.pending), max), len(self.lives.region.nodes) - 1]
        made: list[_Pending] = []
        for numbers, before in gather(self.pending, control(self.lives.plan, self.pending, self.lives.region)):
            members = [self.pending[number] for number in numbers]
            until = reached[before]
            for p in members:
                for storage in p.storages:
                    if storage.last < until and storage.slot == ARENA_SLOT:
                        storage.last = until
            made.append(_as_one(members) if len(members) > 1 else members[0])
        self.pending = made

    def recording(self) -> Recording:
        """What was recorded. Where everything lies is known once small launches are gathered."""
        self.gather()
        total = self._place()
        worth = [order for order, saved in self.wishes.items() if saved >= WORTH_BYTES]
        return Recording(
            launches=self._launches(),
            outputs=tuple(self.outputs),
            variables=tuple(self.memory),
            variable_specs=tuple(self.lives.held[name] for name in self.memory),
            constants=tuple(self.lives.constants.values()),
            arena_bytes=total,
            local_bytes=self.local_bytes,
            slots=len(self.private),
            value_bytes=self.value_bytes,
            predicted_seconds=self.cost.seconds,
            longest_seconds=self.longest,
            row_writes=self._row_writes(),
            orders=tuple(dict.fromkeys([*self.orders, *worth])),
            wishes=tuple((order, saved) for order, saved in self.wishes.items() if saved < WORTH_BYTES),
        )

    def _place(self) -> int:
        """Give places in the arena their offsets, and what launches keep for themselves its slots; answers the bytes
        of the arena."""
        offsets, total = lay_out([(s.spec.nbytes, s.first, s.last) for s in self.arena])
        for storage, offset in zip(self.arena, offsets, strict=True):
            storage.offset = offset
        first = FIRST_SLOT + len(self.lives.region.inputs) + sum(output.fresh for output in self.outputs)
        first += len(self.memory) + len(self.lives.constants)
        for number, storage in enumerate(self.private, first):
            storage.slot = number
        return total

    def _launches(self) -> tuple[Launch, ...]:
        told = {id(p.storages): p.storages for p in self.pending}  # members of one group have theirs in common
        operands = {key: tuple([Operand(s.slot, s.offset) for s in told[key]]) for key in told}
        return tuple(
            Launch(p.step, operands[id(p.storages)], p.node, p.sizes, p.control, p.seconds, p.also)
            for p in self.pending
        )

    def _row_writes(self) -> tuple[RowWrite, ...]:
        """The writes of rows, in the order of the launches that begin them."""
        first_of = {node: n for n, p in reversed([*enumerate(self.pending)]) for node in (p.node, *p.also)}
        found = [
            RowWrite(first_of[node], names, Operand(groups.slot, groups.offset), spec)
            for node, names, groups, spec in self.row_writes
        ]
        return tuple(sorted(found, key=lambda write: write.launch))


def _as_one(members: Sequence[_Pending]) -> _Pending:
    """Launches that do not depend on one another, as one."""
    steps = tuple(p.step for p in members if isinstance(p.step, LaunchStep))
    first, *others = dict.fromkeys(p.node for p in members)
    return _Pending(
        ManyStep(steps, tuple(len(p.storages) for p in members)),
        [storage for p in members for storage in p.storages],
        tuple(size for p in members for size in p.sizes),
        first,
        members[0].index,
        tuple(dict.fromkeys(node for p in members for node in p.control)),
        sum(p.seconds for p in members),
        tuple(others),
    )
