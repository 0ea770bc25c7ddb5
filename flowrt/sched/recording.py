"""What a region comes to once its inputs' shapes are known: the launches in order, and where every value lies.

Law: pure; it runs inference, picks kernels and lays out memory, and touches none. The order is the plan's. An alias
shares its input's place; what inference finds out by itself (shapes and their arithmetic) becomes a constant. A value
that leaves the region is computed straight into memory that leaves with it; inputs and constants that leave are passed
on as they are. A variable is read where it lies, unless a write comes before the last use of what was read, or what was
read leaves: then it is copied at the moment of the read.

Slots of the bases: the run's words, the arena, the running thread's local memory, the region's inputs, its fresh
outputs, its variables, its constants.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import GraphError, SpecError
from flowrt.kernels.launch import COPY_OP, Operand, Step, apply_kernel
from flowrt.kernels.table import ALIASES
from flowrt.op import lookup
from flowrt.sched.arena import aligned, lay_out
from flowrt.sched.regions import CONSTANT, READ, WRITES, Name, Region, resource_of, variable_spec
from flowrt.spec import Spec, value_known

if TYPE_CHECKING:
    from flowrt.plan import Plan, PlanNode

WORDS_SLOT, ARENA_SLOT, LOCAL_SLOT, FIRST_SLOT = 0, 1, 2, 3
UPDATES = {"assign_add": "add", "assign_sub": "subtract"}  # op that writes → the kernel's op on (variable, value)

BYTES_PER_SECOND = 4e9  # one core reading and writing memory
FLOPS_PER_SECOND = 20e9  # one core in a BLAS
SECONDS_PER_STEP = 50e-9
NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


class DataDependent(SpecError):
    """A shape inside the region depends on values that the region itself computes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an entry: its operands' places, and the plan's node it is part of."""

    step: Step
    places: tuple[Operand, ...]
    node: int


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Where one of the region's outputs comes from: fresh memory (both None), an input, or a constant."""

    spec: Spec
    input: int | None = None
    constant: np.ndarray[Any, Any] | None = None

    @property
    def fresh(self) -> bool:
        return self.input is None and self.constant is None


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A region on concrete specs, ready to be compiled into a tape. Sizes are in bytes."""

    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]
    variables: tuple[Name, ...]
    variable_specs: tuple[Spec, ...]
    constants: tuple[np.ndarray[Any, Any], ...]
    arena_bytes: int
    local_bytes: int  # that each thread has for itself
    value_bytes: int  # of everything in the arena, did nothing share its memory
    predicted_seconds: float

    @property
    def output_bytes(self) -> int:
        return sum(output.spec.nbytes for output in self.outputs if output.fresh)


def record(plan: Plan, region: Region, inputs: Sequence[Spec]) -> Recording:
    """Lay ``region`` out for inputs of these concrete specs; those of ``shape_inputs`` carry their values.

    Raises `SpecError` naming the node that does not fit, `DataDependent` where the shapes cannot be known beforehand.
    """
    recorder = _Recorder(plan, region, inputs)
    recorder.infer()
    recorder.decide_outputs()
    recorder.launch()
    return recorder.recording()


@dataclass(slots=True, eq=False)
class _Storage:
    """A stretch of memory under some slot; in the arena from ``first`` to ``last``, in the order of nodes."""

    slot: int
    nbytes: int = 0
    first: int = 0
    last: int = 0
    offset: int = 0


@dataclass(slots=True)
class _Uses:
    """The life of one value and of its aliases: made by node ``first``, last read by node ``last``."""

    first: int
    last: int


@dataclass(slots=True)
class _Cost:
    nbytes: float = 0
    flops: float = 0
    launches: int = 0

    @property
    def seconds(self) -> float:
        moving, computing = self.nbytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND
        return moving + computing + self.launches * SECONDS_PER_STEP


@dataclass(slots=True)
class _Pending:
    step: Step
    storages: list[_Storage]
    node: int


@dataclass(slots=True)
class _Recorder:
    plan: Plan
    region: Region
    inputs: Sequence[Spec]
    specs: dict[int, Spec] = field(default_factory=dict)
    roots: dict[int, int] = field(default_factory=dict)  # value → the value whose memory it shares
    uses: dict[int, _Uses] = field(default_factory=dict)  # root → its life
    homes: dict[int, _Storage] = field(default_factory=dict)  # root → its memory
    memory: dict[Name, _Storage] = field(default_factory=dict)
    held: dict[Name, Spec] = field(default_factory=dict)
    writes: dict[Name, list[int]] = field(default_factory=dict)
    constants: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # root → its array
    outputs: list[Output] = field(default_factory=list)
    leaves: dict[int, list[int]] = field(default_factory=dict)  # root → slots of the fresh outputs it becomes
    pending: list[_Pending] = field(default_factory=list)
    arena: list[_Storage] = field(default_factory=list)
    local_bytes: int = 0
    cost: _Cost = field(default_factory=_Cost)

    # Shapes, aliases and lifetimes

    def infer(self) -> None:
        for value, spec in zip(self.region.inputs, self.inputs, strict=True):
            self.specs[value], self.roots[value], self.uses[value] = spec, value, _Uses(-1, -1)
        for index, (position, first) in enumerate(zip(self.region.nodes, self.region.first, strict=True)):
            node = self.plan.nodes[position]
            outputs = self._infer(node)
            for value, spec in enumerate(outputs, first):
                self.specs[value] = spec
                self.roots[value] = self.roots[node.inputs[0]] if node.op in ALIASES else value
                self.uses.setdefault(self.roots[value], _Uses(index, index))
            if node.op == CONSTANT:
                self.constants[first] = np.ascontiguousarray(node.attrs["value"])
            elif _inferred_whole(node, outputs):
                self.constants |= {value: _frozen(spec) for value, spec in enumerate(outputs, first)}
                continue  # it reads nothing when the tape runs
            elif node.op == READ or node.op in WRITES:
                self._touch(node, index)
            for value in node.inputs:
                self.uses[self.roots[value]].last = index

    def _infer(self, node: PlanNode) -> tuple[Spec, ...]:
        try:
            outputs = lookup(node.op).infer([self.specs[v] for v in node.inputs], node.attrs)
        except SpecError as error:
            raise SpecError(f"{node.where()}: {error}") from None
        if len(outputs) != len(node.outputs):
            raise SpecError(f"{node.where()}: the plan expects {len(node.outputs)} outputs, the op has {len(outputs)}")
        for spec, expected in zip(outputs, node.outputs, strict=True):
            if not spec.known:
                raise DataDependent(f"{node.where()}: the shape of {spec} depends on values computed beside it")
            if not expected.accepts(spec.dtype, spec.shape):
                raise SpecError(f"{node.where()}: the plan expects {expected}, the step gives {spec}")
        return outputs

    def _touch(self, node: PlanNode, index: int) -> None:
        name, spec = resource_of(node), variable_spec(node)
        known = self.held.setdefault(name, spec)
        if not known.accepts(spec.dtype, spec.concrete):
            raise GraphError(f"{node.where()}: the variable {name[1]!r} is {known} elsewhere in the plan, {spec} here")
        if node.op in WRITES:
            self.writes.setdefault(name, []).append(index)

    # Where values lie

    def decide_outputs(self) -> None:
        """Say where each of the region's outputs comes from, and give all that is not in the arena its slot."""
        sources = {value: number for number, value in enumerate(self.region.inputs)}
        slot = FIRST_SLOT + len(sources)
        for value in self.region.outputs:
            root, spec = self.roots[value], self.specs[value]
            self.outputs.append(Output(spec, sources.get(root), self.constants.get(root)))
            if self.outputs[-1].fresh:
                self.leaves.setdefault(root, []).append(slot)
                slot += 1
        self.memory = {name: _Storage(slot + number) for number, name in enumerate(self.region.variables)}
        slot += len(self.memory)
        self.homes |= {value: _Storage(FIRST_SLOT + number) for value, number in sources.items()}
        self.homes |= {root: _Storage(slot + number) for number, root in enumerate(self.constants)}

    def _make_home(self, value: int) -> _Storage:
        """Memory for a value that is computed or copied."""
        life = self.uses[value]
        leaves = self.leaves.get(value)
        home = _Storage(leaves[0]) if leaves else self._in_arena(self.specs[value].nbytes, life.first, life.last)
        self.homes[value] = home
        return home

    def _in_arena(self, nbytes: int, first: int, last: int) -> _Storage:
        self.arena.append(_Storage(ARENA_SLOT, nbytes, first, last))
        return self.arena[-1]

    def _in_local(self, specs: Sequence[Spec]) -> list[_Storage]:
        """Places in the running thread's own memory, which each launch has for itself."""
        places, end = [], 0
        for spec in specs:
            places.append(_Storage(LOCAL_SLOT, spec.nbytes, offset=end))
            end += aligned(spec.nbytes)
        self.local_bytes = max(self.local_bytes, end)
        return places

    # Launches

    def launch(self) -> None:
        for index, (position, first) in enumerate(zip(self.region.nodes, self.region.first, strict=True)):
            node = self.plan.nodes[position]
            if node.op == READ:
                self._read(node, index, first)
            elif node.op in WRITES:
                self._write(node, index)
            elif node.outputs and node.op not in ALIASES and first not in self.constants:
                self._compute(node, index, range(first, first + len(node.outputs)))
        for root, slots in self.leaves.items():
            for slot in slots[1:]:
                specs = [self.specs[root]] * 2
                self._launch(self.uses[root].first, COPY_OP, [self.homes[root]], [_Storage(slot)], specs)

    def _compute(self, node: PlanNode, index: int, outputs: range) -> None:
        sources = [self.homes[self.roots[v]] for v in node.inputs]
        targets = [self._make_home(v) for v in outputs]
        self._launch(index, node.op, sources, targets, [self.specs[v] for v in (*node.inputs, *outputs)], node.attrs)

    def _read(self, node: PlanNode, index: int, value: int) -> None:
        name = resource_of(node)
        writes = self.writes.get(name, [])
        after = bisect_right(writes, index)
        overtaken = after < len(writes) and writes[after] < self.uses[value].last
        if not overtaken and value not in self.leaves:
            self.homes[value] = self.memory[name]
            return
        self._launch(index, COPY_OP, [self.memory[name]], [self._make_home(value)], [self.specs[value]] * 2)

    def _write(self, node: PlanNode, index: int) -> None:
        memory, value = self.memory[resource_of(node)], self.homes[self.roots[node.inputs[0]]]
        spec = self.specs[node.inputs[0]]
        if node.op in UPDATES:
            self._launch(index, UPDATES[node.op], [memory, value], [memory], [spec] * 3)
        else:
            self._launch(index, COPY_OP, [value], [memory], [spec] * 2)

    def _launch(
        self,
        index: int,
        op: str,
        sources: Sequence[_Storage],
        targets: Sequence[_Storage],
        specs: Sequence[Spec],
        attrs: Mapping[str, Any] = NO_ATTRS,
    ) -> None:
        position, count = self.region.nodes[index], len(sources)
        try:
            application = apply_kernel(op, specs[:count], specs[count:], attrs, self.region.device.partition(":")[0])
        except GraphError as error:
            raise type(error)(f"{self.plan.nodes[position].where()}: {error}") from None
        scratch = [self._in_arena(spec.nbytes, index, index) for spec in application.scratch]
        storages = [*sources, *targets, *scratch, *self._in_local(application.local)]
        self.pending += [_Pending(step, storages, position) for step in application.steps]
        self.cost.launches += len(application.steps)
        self.cost.nbytes += sum(spec.nbytes for spec in specs)
        self.cost.flops += _flops(op, specs)

    def recording(self) -> Recording:
        offsets, total = lay_out([(s.nbytes, s.first, s.last) for s in self.arena])
        for storage, offset in zip(self.arena, offsets, strict=True):
            storage.offset = offset
        return Recording(
            launches=tuple(
                Launch(p.step, tuple(Operand(s.slot, s.offset) for s in p.storages), p.node) for p in self.pending
            ),
            outputs=tuple(self.outputs),
            variables=tuple(self.memory),
            variable_specs=tuple(self.held[name] for name in self.memory),
            constants=tuple(self.constants.values()),
            arena_bytes=total,
            local_bytes=self.local_bytes,
            value_bytes=sum(storage.nbytes for storage in self.arena),
            predicted_seconds=self.cost.seconds,
        )


def _inferred_whole(node: PlanNode, outputs: Sequence[Spec]) -> bool:
    """Whether inference alone has found all that the node computes, as it does of shapes and their arithmetic."""
    if not outputs or node.op in ALIASES or lookup(node.op).stateful:
        return False
    return all(spec.dtype.kind in "iu" and value_known(spec.value) and _fits(spec) for spec in outputs)


def _fits(spec: Spec) -> bool:
    """Whether the value lies within its dtype: Python's integers do not wrap as a kernel's would."""
    limits, value = np.iinfo(spec.dtype), spec.value
    entries = value if isinstance(value, tuple) else (value,)
    return all(isinstance(entry, int) and limits.min <= entry <= limits.max for entry in entries)


def _frozen(spec: Spec) -> np.ndarray[Any, Any]:
    array = np.array(spec.value, spec.dtype)
    array.setflags(write=False)
    return array


def predict(op: str, specs: Sequence[Spec]) -> float:
    """A rough guess of the seconds one op takes on operands (inputs, then outputs) of these concrete specs."""
    return _Cost(sum(spec.nbytes for spec in specs), _flops(op, specs), 1).seconds


def _flops(op: str, specs: Sequence[Spec]) -> float:
    """Roughly how many multiplications and additions an op does beyond touching its operands once."""
    if op != "matmul" and not op.startswith("conv"):
        return 0
    sizes = [spec.size for spec in specs[:3] if spec.dtype.kind == "f"]
    product = 2 * math.sqrt(math.prod(sizes))  # exact for matrices: sqrt(mk · kn · mn) = mkn
    return product if op == "matmul" else 3 * product  # a window of 3 by 3 has its square root in no operand's size
