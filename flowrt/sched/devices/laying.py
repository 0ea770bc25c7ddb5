"""A region of a device, laid out for inputs of one set of specs: its launches in order, and where every value lies.

Law: it runs inference and has kernels made ready, and touches no memory. Lives, and whose memory a value shares, are
those of the host's tapes (`sched.regions`). What is computed and stays lies in one stretch of memory; what leaves has
memory of its own; a variable is written where it lies. Launches come in *stretches*: whatever may fail is waited for
before a variable is written, so a step that fails has written nothing that came after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec
from flowrt.base.traits import traits_of, writes
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.sched.host.arena import lay_out
from flowrt.sched.regions.lives import BRING, Lives, find_lives
from flowrt.sched.regions.regions import READ, Name, Region, resource_of, resources_of, variable_spec, variable_specs
from flowrt.sched.regions.sharing import Sharing, share

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.devices.driver import Array, Kernel

Evaluate: TypeAlias = "Callable[[str, Sequence[Array], Sequence[Spec], Mapping[str, Any]], Sequence[Array]]"
"""Computes an op on the host, of arrays, into arrays of these specs."""
CopyKernels: TypeAlias = "Callable[[int], Kernel]"
"""Makes what copies so many bytes within the device, as a kernel of two operands."""
PrepareKernel: TypeAlias = "Callable[[PlanNode, str, Sequence[Spec], Sequence[Spec], Mapping[str, Any]], Kernel]"
"""Has the kernel of a node made ready: for the op, on inputs and outputs of these specs."""

BYTES = Spec("uint8", (0,))
COMPUTED_ONCE = 1 << 16  # bytes that a node makes of constants, to be computed once


class In(Enum):
    """Whose memory it is that a value lies in."""

    REGION = "the region's own"
    INPUT = "an input's"
    OUTPUT = "that of a value that leaves"
    VARIABLE = "a variable's"
    CONSTANT = "a constant's"


@dataclass(slots=True, eq=False)
class Home:
    """Where a value lies: ``place`` is its offset in the region's memory, else the number of what it lies in.

    In the region's memory it is alive from the ``first`` to the ``last`` node, in the order of nodes.
    """

    memory: In
    place: int = 0
    spec: Spec = BYTES
    first: int = 0
    last: int = 0


@valueclass
class PlacedKernel:
    """A kernel on operands that lie somewhere, for the plan's node at that position."""

    kernel: Kernel
    operands: tuple[Home, ...]
    node: int


@valueclass
class Leaving:
    """A value that leaves: its spec, and where it lies."""

    spec: Spec
    home: Home
    node: int  # that makes it


@valueclass
class LaidTensor:
    """Memory that the plan's ``node`` asks for where nodes are issued one by one, until the ``last`` node, by place."""

    spec: Spec
    node: int
    first: int
    last: int
    scratch: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RegionLayout:
    """What a region comes to. ``written`` are the inputs, by number, that are copied in, and where to.

    ``variables`` and their specs are numbered as homes number them; ``changed`` are those that are written. So are
    ``constants``, each with the node that makes it. ``tensors`` are what it needs without a piece of memory for all, in
    the order of nodes.
    """

    stretches: tuple[tuple[PlacedKernel, ...], ...]
    written: tuple[tuple[int, Home], ...]
    outputs: tuple[Leaving, ...]
    variables: tuple[Name, ...]
    specs: tuple[Spec, ...]
    changed: frozenset[Name]
    constants: tuple[tuple[Array, int], ...]
    nbytes: int
    tensors: tuple[LaidTensor, ...]

    @property
    def launches(self) -> int:
        """How many kernels are launched, and bytes copied within the device."""
        return sum(map(len, self.stretches))


@valueclass
class _Whole:
    """A kernel as `share` sees what computes a node: one launch."""

    kernel: Kernel
    reads: int
    operands: tuple[int, ...]

    @property
    def steps(self) -> tuple[_Whole, ...]:
        return (self,)

    @property
    def may_fail(self) -> bool:
        return self.kernel.may_fail

    def may_overwrite(self, output: int, operand: int) -> bool:
        asked: Callable[[int, int], bool] | None = getattr(self.kernel, "may_overwrite", None)
        return operand not in self.operands or (asked is not None and asked(output, operand))


def lay(
    plan: Plan,
    region: Region,
    inputs: Sequence[Spec],
    prepare: PrepareKernel,
    copies: CopyKernels,
    evaluate: Evaluate,
) -> RegionLayout:
    """Lay ``region`` out for inputs of these concrete specs; those of ``shape_inputs`` carry their values.

    What is computed of constants alone is one itself: ``evaluate`` answers it, or raises `FlowrtError`.
    Raises `SpecError` naming the node that does not fit, `DataDependent` where the shapes cannot be known beforehand.
    """
    lives = find_lives(plan, region, inputs)
    _compute_once(lives, evaluate)
    kernels: dict[int, _Whole] = {}
    for index, node, _ in lives.nodes():
        if lives.computes(index) and node.op != BRING:
            specs, taken = lives.operands(index), len(node.inputs)
            kernel = prepare(node, node.op, specs[:taken], specs[taken:], node.attrs)
            kernels[index] = _Whole(kernel, taken, tuple(range(len(specs))))
    layer = _Layer(lives, kernels, share(lives, kernels), prepare, copies, _last_writes(plan))
    layer.decide_outputs()
    layer.issue()
    return layer.layout()


def _last_writes(plan: Plan) -> Mapping[Name, int]:
    """The position of the last node of the plan that writes each variable."""
    writers = ((position, node) for position, node in enumerate(plan.nodes) if writes(node.op))
    return {name: position for position, node in writers for name in resources_of(node)}


def _compute_once(lives: Lives, evaluate: Evaluate) -> None:
    """Compute once what needs nothing but constants: a launch takes long, however little it does."""
    for index, node, values in lives.nodes():
        outputs = [lives.specs[value] for value in values]
        known = all(lives.roots[value] in lives.constants for value in node.inputs)
        if not known or not lives.computes(index) or lookup(node.op).stateful:
            continue
        if sum(spec.nbytes for spec in outputs) <= COMPUTED_ONCE:
            inputs = [lives.constants[lives.roots[v]].reshape(lives.specs[v].concrete) for v in node.inputs]
            with suppress(FlowrtError):  # it fails again in the step, where its error belongs
                for value, array in zip(values, evaluate(node.op, inputs, outputs, node.attrs), strict=True):
                    lives.know(value, array)


@dataclass(slots=True)
class _Layer:
    lives: Lives
    kernels: Mapping[int, _Whole]
    sharing: Sharing
    prepare: PrepareKernel
    copies: CopyKernels
    last_writes: Mapping[Name, int]
    homes: dict[int, Home] = field(default_factory=dict)  # root → where it lies
    memory: dict[Name, Home] = field(default_factory=dict)
    leaving: dict[int, Home] = field(default_factory=dict)  # root that has memory of its own
    within: list[Home] = field(default_factory=list)
    taken: list[tuple[int, Home]] = field(default_factory=list)  # inputs, and where they are copied to
    stretches: list[list[PlacedKernel]] = field(default_factory=lambda: [[]])
    open_ended: bool = False  # whether something in the last stretch may fail

    # Where values lie

    def decide_outputs(self) -> None:
        """Give all that does not lie in the region's memory its place."""
        lives, region = self.lives, self.lives.region
        self.memory = {name: Home(In.VARIABLE, number) for number, name in enumerate(region.variables)}
        self.homes = {root: Home(In.CONSTANT, number) for number, root in enumerate(lives.constants)}
        self.homes |= {root: self.memory[name] for root, name in self.sharing.homed.items()}
        for value in region.outputs:
            root = lives.roots[value]
            if root not in self.homes and root not in region.inputs and not self._is_lent(root):
                self.leaving.setdefault(root, Home(In.OUTPUT, len(self.leaving)))

    def _is_lent(self, root: int) -> bool:
        """Whether a value is what a variable holds, which nothing of the plan writes while it is looked at.

        A variable that is looked at is written elsewhere, and what is recorded of it is lost.
        """
        lives, index = self.lives, self.lives.of[root].first
        node = lives.node(index)
        if node.op != READ or self.sharing.written[resource_of(node)]:
            return False
        return self.last_writes.get(resource_of(node), -1) < lives.region.nodes[index]

    def _home_of(self, value: int) -> Home:
        """Where a value lies that a launch takes."""
        root = self.lives.roots[value]
        if root not in self.homes:
            self.homes[root] = self._within(self.lives.specs[root], -1, self.lives.of[root].last)
            self.taken.append((root, self.homes[root]))
        return self.homes[root]

    def _make(self, value: int) -> Home:
        """A place for what is computed, and for all that will be written over it."""
        if value in self.homes:
            return self.homes[value]
        members = self.sharing.in_place(value)
        of, last = self.lives.of, members[-1]
        home = self.leaving.get(last) or self._within(self.lives.specs[value], of[value].first, of[last].last)
        self.homes.update((member, home) for member in members)
        return home

    def _within(self, spec: Spec, first: int, last: int) -> Home:
        self.within.append(Home(In.REGION, 0, spec, first, last))
        return self.within[-1]

    # Launches

    def issue(self) -> None:
        """Go through the nodes in the plan's order."""
        for index, node, values in self.lives.nodes():
            if node.op == READ:
                self._read(index, node, values[0])
            elif writes(node.op):
                if index not in self.sharing.carried:
                    self._write(index, node)
            elif node.op == BRING:
                if self.lives.computes(index):
                    self._bring(index, node, values[0])
            elif index in self.kernels:
                homes = [*(self._home_of(v) for v in node.inputs), *(self._make(v) for v in values)]
                writing = any(v in self.sharing.homed for v in values)
                self._launch(index, self.kernels[index].kernel, homes, writing)

    def _read(self, index: int, node: PlanNode, value: int) -> None:
        name = resource_of(node)
        if value in self.leaving or self.sharing.is_overtaken(name, index, self.lives.of[value]):
            self._copy(index, self.memory[name], self._make(value), self.lives.specs[value])
        else:
            self.homes[value] = self.memory[name]

    def _bring(self, index: int, node: PlanNode, value: int) -> None:
        root, home = self.lives.roots[node.inputs[0]], self._make(value)
        if root in self.lives.region.inputs:
            home.first = -1  # it is there before the first node
            self.taken.append((root, home))
        else:
            self._copy(index, self._home_of(node.inputs[0]), home, self.lives.specs[value])

    def _write(self, index: int, node: PlanNode) -> None:
        update = traits_of(node.op).update
        assert update is not None
        specs = [self.lives.specs[v] for v in node.inputs]
        homes, held = [self._home_of(v) for v in node.inputs], variable_spec(node)
        if update.rows:
            tables = [self.memory[name] for name in resources_of(node)]
            kernel = self.prepare(node, node.op, specs, variable_specs(node), node.attrs)
            self._launch(index, kernel, [*homes, *tables], writing=True)
            return
        memory = self.memory[resource_of(node)]
        if update.whole is None:
            self._copy(index, homes[0], memory, held, writing=True)
            return
        kernel = self.prepare(node, update.whole, [held, held], [held], {})
        whole = _Whole(kernel, 2, (0, 1, 2))
        target = memory if whole.may_overwrite(2, 0) and not kernel.may_fail else self._within(held, index, index)
        self._launch(index, kernel, [memory, homes[0], target], writing=target is memory)
        if target is not memory:
            self._copy(index, target, memory, held, writing=True)

    def _copy(self, index: int, source: Home, target: Home, spec: Spec, writing: bool = False) -> None:
        if spec.nbytes:
            self._add(PlacedKernel(self.copies(spec.nbytes), (source, target), self.lives.region.nodes[index]), writing)

    def _launch(self, index: int, kernel: Kernel, homes: Sequence[Home], writing: bool = False) -> None:
        scratch = [self._within(spec, index, index) for spec in kernel.scratch]
        self._add(PlacedKernel(kernel, (*homes, *scratch), self.lives.region.nodes[index]), writing)

    def _add(self, launch: PlacedKernel, writing: bool) -> None:
        if writing and self.open_ended:
            self.stretches.append([])
            self.open_ended = False
        self.stretches[-1].append(launch)
        self.open_ended |= launch.kernel.may_fail

    def layout(self) -> RegionLayout:
        offsets, total = lay_out([(home.spec.nbytes, home.first, home.last) for home in self.within])
        for home, offset in zip(self.within, offsets, strict=True):
            home.place = offset
        lives, region = self.lives, self.lives.region
        numbers = {value: number for number, value in enumerate(region.inputs)}
        return RegionLayout(
            stretches=tuple(tuple(stretch) for stretch in self.stretches if stretch),
            written=tuple((numbers[root], home) for root, home in self.taken),
            outputs=tuple(self._leaving(value, numbers) for value in region.outputs),
            variables=tuple(self.memory),
            specs=tuple(lives.held[name] for name in self.memory),
            changed=frozenset(region.writes),
            constants=tuple(
                (np.ascontiguousarray(array), region.nodes[lives.of[root].first])
                for root, array in lives.constants.items()
            ),
            nbytes=total,
            tensors=tuple(self._tensors()),
        )

    def _tensors(self) -> Iterator[LaidTensor]:
        lives, region = self.lives, self.lives.region
        leaving = {lives.roots[value] for value in region.outputs}
        for index, _, values in lives.nodes():
            for value in values if lives.computes(index) else ():
                last = len(region.nodes) if value in leaving else lives.of[value].last
                yield LaidTensor(lives.specs[value], region.nodes[index], index, last)
            for spec in self.kernels[index].kernel.scratch if index in self.kernels else ():
                yield LaidTensor(spec, region.nodes[index], index, index, scratch=True)

    def _leaving(self, value: int, numbers: Mapping[int, int]) -> Leaving:
        root = self.lives.roots[value]
        home = Home(In.INPUT, numbers[root]) if root in numbers else self.homes[root]
        place = max(self.lives.of[root].first, 0)
        return Leaving(self.lives.specs[value].without_value(), home, self.lives.region.nodes[place])
