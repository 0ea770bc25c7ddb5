"""A region's values once its inputs' shapes are known: their specs, whose memory they share, and how long they live.

Law: pure; it runs inference and knows no kernel and no memory. An alias shares its root's memory, and its uses count as
the root's. What inference finds out by itself (shapes and their arithmetic) becomes a constant, and reads nothing.
Equal small constants, as an optimiser needs for every variable, are one. Moments are places among the region's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, SpecError
from flowrt.base.plan import Plan
from flowrt.base.spec import MAX_VALUE_SIZE, Spec, value_known
from flowrt.base.traits import Arranged, is_alias, traits_of, writes
from flowrt.op import PROGRAMS, lookup
from flowrt.sched.regions.alike import Found, again
from flowrt.sched.regions.regions import CONSTANT, READ, Name, Region, resources_of, size_operands, variable_specs

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode


BRING = "bring"
SMALL = 64  # bytes: a line of memory


class DataDependent(SpecError):
    """A shape inside the region depends on values that the region itself computes."""


@dataclass(slots=True)
class Life:
    """The life of one value and of its aliases: made by node ``first``, last read by node ``last``."""

    first: int
    last: int


@dataclass(slots=True, eq=False)
class Lives:
    """What `find_lives` found. A root is a value that shares nobody's memory; ``roots`` maps every value to its own.

    ``touches`` are the places of the nodes that read or write each variable, in order; ``held`` is what it holds.
    """

    plan: Plan
    region: Region
    specs: dict[int, Spec] = field(default_factory=dict)
    roots: dict[int, int] = field(default_factory=dict)
    of: dict[int, Life] = field(default_factory=dict)  # by root
    constants: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # root → its array
    equals: dict[Any, int] = field(default_factory=dict)  # what a small constant is → the first such, a root
    held: dict[Name, Spec] = field(default_factory=dict)
    touches: dict[Name, list[int]] = field(default_factory=dict)
    kinds: tuple[int, ...] = ()
    inferred: Found = field(default_factory=dict)  # by kind and inputs

    def nodes(self) -> Sequence[tuple[int, PlanNode, range]]:
        """Each node with its place and the values it makes."""
        return self.region.latest.nodes

    def node(self, index: int) -> PlanNode:
        """The region's node in that place."""
        return self.region.latest.nodes[index][1]

    def outputs(self, index: int) -> range:
        """The values that a node makes."""
        return self.region.latest.nodes[index][2]

    def operands(self, index: int) -> list[Spec]:
        """The specs of a node's inputs, then of its outputs."""
        _, node, made = self.region.latest.nodes[index]
        return [self.specs[value] for value in (*node.inputs, *made)]

    def know(self, value: int, array: np.ndarray[Any, Any]) -> None:
        """That a value is a constant: the same as an equal one before, where it is small."""
        if array.nbytes <= SMALL:
            self.roots[value] = self.equals.setdefault((array.dtype, array.shape, array.tobytes()), value)
        if self.roots[value] == value:
            self.constants[value] = array

    def computes(self, index: int) -> bool:
        """Whether a kernel makes the node's outputs."""
        node = self.node(index)
        value = self.region.first[index]
        return bool(node.outputs) and node.op != READ and self.roots[value] == value and value not in self.constants


def find_lives(plan: Plan, region: Region, inputs: Sequence[Spec]) -> Lives:
    """Follow the values of ``region`` for inputs of these concrete specs; those of ``shape_inputs`` carry their values.

    Raises `SpecError` naming the node that does not fit, `DataDependent` where the shapes cannot be known beforehand.
    """
    lives = Lives(plan, region, kinds=region.latest.kinds_of(plan, region.nodes, region.first))
    for value, spec in zip(region.inputs, inputs, strict=True):
        lives.specs[value], lives.roots[value], lives.of[value] = spec, value, Life(-1, -1)
    specs, roots, of, fixed = lives.specs, lives.roots, lives.of, region.latest.fixed
    for index, node, values in lives.nodes():
        outputs = node.outputs if index in fixed else _infer(lives, node, index)
        for value, spec in zip(values, outputs, strict=True):
            specs[value] = spec
            roots[value] = root = roots[node.inputs[0]] if _shares(lives, node, spec) else value
            if root == value:
                of[root] = Life(index, index)
        if node.op == CONSTANT:
            lives.know(values[0], np.ascontiguousarray(node.attrs["value"]))
        elif inferred_whole(node, outputs):
            for value, spec in zip(values, outputs, strict=True):
                lives.know(value, known_array(spec))
            continue  # it reads nothing when the tape runs
        elif node.op == READ or writes(node.op):
            _touch(lives, node, index)
        unread = traits_of(node.op).unread
        for place, value in enumerate(node.inputs):
            if place not in unread:
                of[roots[value]].last = index
    return lives


def infer(node: PlanNode, inputs: Sequence[Spec]) -> tuple[Spec, ...]:
    """The specs of what a node makes of inputs of these; raises `SpecError` where they do not fit it or the plan."""
    try:
        outputs = lookup(node.op).infer(inputs, node.attrs)
    except SpecError as error:
        raise SpecError(f"{node.where()}: {error}") from None
    if len(outputs) != len(node.outputs):
        raise SpecError(f"{node.where()}: the plan expects {len(node.outputs)} outputs, the op has {len(outputs)}")
    for made, expected in zip(outputs, node.outputs, strict=True):
        if made.dims is not None and not expected.accepts(made.dtype, made.dims):
            raise SpecError(f"{node.where()}: the plan expects {expected}, the step gives {made}")
    return outputs


def sizes_known(node: PlanNode, inputs: Sequence[Spec]) -> bool:
    """Whether the values are known that decide how much a node computes, where its outputs' sizes need not tell.

    A program may sum what it has repeated.
    """
    if node.op not in PROGRAMS:
        return True
    return all(value_known(inputs[n].value) or inputs[n].dtype.kind not in "iu" for n in size_operands(node))


def _infer(lives: Lives, node: PlanNode, index: int) -> tuple[Spec, ...]:
    """The specs of what a node makes."""
    inputs = [lives.specs[value] for value in node.inputs]
    key = (lives.kinds[index], *inputs)
    known: tuple[Spec, ...] | None = again(lives.inferred, lives.region.latest.inferred, key)
    if known is not None:
        return known
    if not sizes_known(node, inputs):
        raise DataDependent(f"{node.where()}: the sizes of what is computed depend on values computed beside it")
    try:
        outputs = infer(node, inputs)
    except SpecError as error:
        if not any(isinstance(attr, Plan) for attr in node.attrs.values()):
            raise
        raise DataDependent(str(error)) from None  # of a body, which may never run
    for spec in outputs:
        if not spec.known:
            raise DataDependent(f"{node.where()}: the shape of {spec} depends on values computed beside it")
    lives.inferred[key] = outputs
    return outputs


def _shares(lives: Lives, node: PlanNode, output: Spec) -> bool:
    """Whether the output is the first input as it lies in memory: always, or since there is nothing to do.

    What may decide sizes stays in the host's memory, where those who infer shapes see it.
    """
    if node.op == BRING:
        return output.dtype.kind in "iu" and output.rank <= 1 and output.size <= MAX_VALUE_SIZE
    traits = traits_of(node.op)
    if not traits.idle_if_alike:
        return traits.view is Arranged.RESHAPED
    source = lives.specs[node.inputs[0]]
    return (source.dtype, source.dims) == (output.dtype, output.dims)


def _touch(lives: Lives, node: PlanNode, index: int) -> None:
    for name, spec in zip(resources_of(node), variable_specs(node), strict=True):
        known = lives.held.setdefault(name, spec)
        if not known.accepts(spec.dtype, spec.concrete):
            raise GraphError(f"{node.where()}: the variable {name[1]!r} is {known} elsewhere in the plan, {spec} here")
        lives.touches.setdefault(name, []).append(index)


def inferred_whole(node: PlanNode, outputs: Sequence[Spec]) -> bool:
    """Whether inference alone has found all that the node computes, as it does of shapes and their arithmetic."""
    if not outputs or outputs[0].value is None or is_alias(node.op) or lookup(node.op).stateful:
        return False
    return all(spec.dtype.kind in "iu" and value_known(spec.value) and _fits(spec) for spec in outputs)


def _fits(spec: Spec) -> bool:
    """Whether the value lies within its dtype: Python's integers do not wrap as a kernel's would."""
    limits, value = np.iinfo(spec.dtype), spec.value
    entries = value if isinstance(value, tuple) else (value,)
    return all(isinstance(entry, int) and limits.min <= entry <= limits.max for entry in entries)


def known_array(spec: Spec) -> np.ndarray[Any, Any]:
    """The value that a spec knows."""
    array = np.array(spec.value, spec.dtype)
    array.setflags(write=False)
    return array
