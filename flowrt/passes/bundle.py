"""Have small values that one task tells another at one moment travel as one.

Law: pure, a pass on a placed step. Values of one dtype that go the same way are joined where they are made, and taken
apart where they are wanted, by the client too, if the same lies behind all of them: the same values of other tasks,
feeds, and ops that wait for something else; and if they lead alike. Then one region makes them (`flowrt.sched.regions`
says why), so none of them leaves later than it did, and none waits for what it did not wait for before: no cycle comes
about. What a switch may leave dead, what decides sizes and what lies in another memory than the host's travels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from flowrt.base.attributes import frozen
from flowrt.base.traits import traits_of
from flowrt.op import is_effect, lookup, sizing
from flowrt.passes.partition import Part
from flowrt.passes.step import FED, StepNode, in_order

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.base.spec import Spec
    from flowrt.passes.place import Supports
    from flowrt.passes.step import Ref, StepGraph

SMALL = 1 << 15
"""Bytes of a value: what it costs to receive one by itself, a larger one takes to be copied."""
TOGETHER = 1 << 20
"""Bytes of a bundle."""
CLIENT = ""
"""The client, among the tasks that want values."""
BRANCHING = frozenset({"switch", "merge", "enter", "exit", "next_iteration"})
Markers: TypeAlias = int  # a set of markers, as bits
Place: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Route:
    """From one device to that of another task, or to the client."""

    source: Device
    target: Device | None

    @property
    def task(self) -> str:
        """Who wants what goes there."""
        return CLIENT if self.target is None else self.target.host


class Bundled(NamedTuple):
    """A ``step`` with bundles, where its nodes are, how many ``values`` travel in bundles, and how its fetches answer
    those that were asked for."""

    step: StepGraph
    placement: Mapping[int, Device]
    values: int = 0
    parts: tuple[Part | int, ...] = ()  # all as they are, if there are none


def bundle(step: StepGraph, placement: Mapping[int, Device], supports: Supports, *, fetched: bool) -> Bundled:
    """``step`` with bundles; those of what is ``fetched``, too, where a client takes them apart."""
    ways = _crossing(step, placement, supports)
    if fetched:
        ways |= _leaving(step, placement, supports)
    if len(ways) < 2:
        return Bundled(step, placement)
    made = _Bundles(step, placement)
    for (way, _), refs in _made_together(step, placement, ways).items():
        for some in _chunks(step, refs):
            made.add(way, some)
    return made.rewritten() if made.values else Bundled(step, placement)


def _leaving(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> dict[tuple[Ref, str], _Route]:
    """The values that may travel to the client in bundles, and their ways."""
    refs = [ref for ref in dict.fromkeys(step.fetches) if ref[0] != FED]
    return {
        (ref, CLIENT): _Route(placement[ref[0]], None)
        for ref in refs
        if placement[ref[0]].is_host and _may_join(step, ref, supports)
    }


def _crossing(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> dict[tuple[Ref, str], _Route]:
    """The values that may travel between tasks in bundles, by the task that wants them, and their ways."""
    if len({device.host for device in placement.values()}) < 2:
        return {}
    found: dict[tuple[Ref, str], _Route | None] = {}
    for node in step.nodes.values():
        target = placement[node.id]
        for position, ref in enumerate(node.inputs):
            if ref[0] == FED or (source := placement[ref[0]]).host == target.host:
                continue
            way: _Route | None = _Route(source, target)
            fits = source.is_host and target.is_host and _may_join(step, ref, supports)
            if not fits or position in sizing(node.op.name, node.attrs, len(node.inputs)):
                way = None
            if found.setdefault((ref, target.host), way) != way:
                found[ref, target.host] = None
    return {crossing: way for crossing, way in found.items() if way is not None}


def _may_join(step: StepGraph, ref: Ref, supports: Supports) -> bool:
    spec, op = step.spec(ref), step.nodes[ref[0]].op.name
    if not (spec.known and 0 < spec.nbytes <= SMALL) or op == "constant" or traits_of(op).elsewhere is not None:
        return False
    return supports("concat", [spec.dtype, spec.dtype], "cpu")


def _made_together(
    step: StepGraph, placement: Mapping[int, Device], ways: Mapping[tuple[Ref, str], _Route]
) -> dict[tuple[_Route, Any], list[Ref]]:
    """The values of each way and dtype that the same lies behind."""
    handed = _handed(step, placement, ways)
    branches: set[int] = set()  # nodes that may be dead, or run several times
    for node in step.nodes.values():
        if node.op.name in BRANCHING or not branches.isdisjoint(node.before):
            branches.add(node.id)
    found: dict[tuple[_Route, Any], list[Ref]] = {}
    for (ref, _), way in ways.items():
        if ref[0] not in branches:
            alike = step.spec(ref).dtype, handed[ref[0]], step.lead.get(ref[0])
            found.setdefault((way, alike), []).append(ref)
    return found


def _handed(
    step: StepGraph, placement: Mapping[int, Device], ways: Mapping[tuple[Ref, str], _Route]
) -> dict[int, Markers]:
    """What must have come, or have been waited for, on a node's device before who wants its values can have them.

    Values that go one way, and that the same lies behind, come there at one moment.
    """
    handed: dict[int, Markers] = {}
    numbers: dict[Any, int] = {}

    def marker(key: Any) -> Markers:
        return 1 << numbers.setdefault(key, len(numbers))

    for node in step.nodes.values():
        here, found = placement[node.id], 0
        for ref in node.inputs:
            if ref[0] == FED:
                found |= marker((ref, here.host))
            elif placement[ref[0]] == here:
                found |= handed[ref[0]]
            elif placement[ref[0]].host != here.host and (ref, here.host) in ways:
                found |= marker((ways[ref, here.host], handed[ref[0]]))
            else:
                found |= marker((ref, here))
        for source in (*node.control, *node.after):
            found |= handed[source] if placement[source] == here else marker((source, here))
        waits = node.op.name in BRANCHING or is_effect(node.op.name)
        handed[node.id] = found | marker(node.id) if waits else found
    return handed


def _chunks(step: StepGraph, refs: Sequence[Ref]) -> Iterator[list[Ref]]:
    """``refs`` in parts of at most `TOGETHER` bytes."""
    some: list[Ref] = []
    nbytes = 0
    for ref in refs:
        size = step.spec(ref).nbytes
        if some and nbytes + size > TOGETHER:
            yield some
            some, nbytes = [], 0
        some.append(ref)
        nbytes += size
    yield some


class _Bundles:
    """The nodes that join values and take them apart, as they come together."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device]) -> None:
        self._step = step
        self._placement = dict(placement)
        self._order = {i: place for place, i in enumerate(step.nodes)}
        self._places: dict[int, Place] = {i: (place, 0, 0) for i, place in self._order.items()}
        self._wanted: dict[tuple[Ref, str], int] = {}  # by whom first
        for node in step.nodes.values():
            for ref in node.inputs:
                self._wanted.setdefault((ref, placement[node.id].host), self._order[node.id])
        self._made: dict[int, StepNode] = {}
        self._lead = dict(step.lead)
        self._joined: dict[tuple[Ref, ...], Ref] = {}
        self._apart: dict[tuple[Ref, str], Ref] = {}  # by the task that wants it
        self._fetched: dict[Ref, tuple[Ref, int, int]] = {}  # in which they come to the client, from where to where
        self._next = step.free
        self.values = 0

    def add(self, way: _Route, refs: Sequence[Ref]) -> None:
        """Have ``refs`` go that way in one."""
        if len(refs) < 2:
            return
        self.values += len(refs)
        whole, at = self._join(way.source, tuple(refs)), 0
        first = min(self._wanted.get((ref, way.task), 0) for ref in refs), -1
        for ref in refs:
            spec = self._step.spec(ref)
            end = at + spec.nbytes // spec.dtype.itemsize
            if way.target is None:
                self._fetched[ref] = whole, at, end
            else:
                part = self._insert("getitem", ref, (whole,), {"key": ((at, end, None),)}, way.target, first)
                self._apart[ref, way.task] = self._shaped(part, ref, spec.shape, way.target, first)
            at = end

    def _join(self, device: Device, refs: tuple[Ref, ...]) -> Ref:
        if refs not in self._joined:
            last = max(self._order[source] for source, _ in refs), 1
            flat = [self._shaped(ref, ref, (-1,), device, last) for ref in refs]
            attrs = {"_many": len(refs), "axis": 0}
            self._joined[refs] = whole = self._insert("concat", refs[0], tuple(flat), attrs, device, last)
            if lead := self._step.lead.get(refs[0][0]):
                self._lead[whole[0]] = lead
        return self._joined[refs]

    def _shaped(self, ref: Ref, of: Ref, shape: tuple[int | None, ...], device: Device, place: tuple[int, int]) -> Ref:
        if self._spec(ref).rank == len(shape) == 1:
            return ref
        dims = self._insert("constant", of, (), {"value": frozen(np.array(shape, np.int64))}, device, place)
        return self._insert("reshape", of, (ref, dims), {}, device, place)

    def _insert(
        self,
        op: str,
        of: Ref,
        inputs: tuple[Ref, ...],
        attrs: Mapping[str, Any],
        device: Device,
        place: tuple[int, int],
    ) -> Ref:
        """A node that is there for the value ``of``."""
        number, origin, known = self._next, self._step.nodes[of[0]], lookup(op)
        self._next += 1
        outputs = known.infer([self._spec(ref) for ref in inputs], attrs)
        name = f"{origin.name}/bundled_{number}"
        self._made[number] = StepNode(number, known, name, inputs, outputs, attrs, (), origin.site)
        self._placement[number], self._places[number] = device, (*place, number)
        return number, 0

    def _spec(self, ref: Ref) -> Spec:
        return self._made[ref[0]].outputs[ref[1]] if ref[0] in self._made else self._step.spec(ref)

    def rewritten(self) -> Bundled:
        """The step as it is now."""
        wanted = {source for (source, _), _ in self._apart}
        nodes = dict(self._made)
        for node in self._step.nodes.values():
            if wanted.isdisjoint(node.before):
                nodes[node.id] = node
                continue
            task = self._placement[node.id].host
            inputs = tuple([self._apart.get((ref, task), ref) for ref in node.inputs])
            nodes[node.id] = node.rewired(inputs, node.control, node.after)
        nodes = in_order(nodes, key=self._places.__getitem__)
        fetches, parts = self._answers()
        step = replace(self._step, nodes=nodes, fetches=fetches, lead=self._lead)
        return Bundled(step, self._placement, self.values, parts)

    def _answers(self) -> tuple[tuple[Ref, ...], tuple[Part | int, ...]]:
        """What is fetched now, and how that answers what was."""
        fetches: list[Ref] = []
        parts: list[Part | int] = []
        places: dict[Ref, int] = {}
        for ref in self._step.fetches:
            whole, start, stop = self._fetched.get(ref, (ref, 0, 0))
            if ref not in self._fetched or whole not in places:
                places[whole] = len(fetches)
                fetches.append(whole)
            place = places[whole]
            spec = self._step.spec(ref)
            parts.append(Part(place, start, stop, spec.concrete) if ref in self._fetched else place)
        return tuple(fetches), tuple(parts)
