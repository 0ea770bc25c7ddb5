"""Look rows up in tables that lie together, and move them, without dealing them out to the tables first.

Law: a pass on a placed step. What `flowrt.ops.routing` builds for tables that are split by rows is right wherever the
parts lie, and has sizes that values decide. Where a lookup is done on one device, one node takes the rows of all parts;
where a part's rows are moved on the device that dealt them out, that is by groups of all values, as they are. The node
that is left bears the id of the last, and waits for all that the others waited for; who waited for those waits for it.
Where nodes would wait for each other all stays as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.op import lookup
from flowrt.passes.joining import joined
from flowrt.passes.step import FED, keep_needed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.passes.place import Supports
    from flowrt.passes.step import Ref, StepGraph, StepNode

STARTS, FOUND, ORDER, BACK = range(4)
"""What `route_rows` answers."""


def take_together(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> StepGraph:
    """``step`` with lookups in parts that lie together, and moves of their rows, each as one."""
    if all(node.op.name != "part_of" for node in step.nodes.values()):
        return step
    found = _Found(step, placement, supports)
    made = {node.id: node for node in (*found.lookups(), *found.moves())}
    if not made:
        return step
    try:
        step = joined(step, made, found.instead)
        return keep_needed(step, step.nodes)
    except GraphError:
        return step


class _Found:
    """The lookups and moves of a placed step that are done in one place; ``instead`` of nodes, by id, others stand."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> None:
        self._step, self._placement, self._supports = step, placement, supports
        self._readers: dict[int, list[StepNode]] = {}
        for node in step.nodes.values():
            for source in {source for source, _ in node.inputs}:
                self._readers.setdefault(source, []).append(node)
        self._asked = {*step.targets, *(source for source, _ in step.fetches)}
        self.instead: dict[int, int] = {}

    def _maker(self, ref: Ref, op: str) -> StepNode | None:
        """What makes ``ref``, if that is a node of ``op``."""
        node = None if ref[0] == FED else self._step.nodes[ref[0]]
        return node if node is not None and node.op.name == op else None

    def _only_for(self, node: StepNode, reader: StepNode) -> bool:
        """Whether nobody but ``reader``, beside it, has any use of a node."""
        alone = [other.id for other in self._readers[node.id]] == [reader.id] and node.id not in self._asked
        return alone and self._placement[node.id] == self._placement[reader.id]

    def _part(self, ref: Ref, part: Attr = None) -> tuple[StepNode, Ref] | None:
        """The node that takes a part, this one if it is given, and what it is taken of."""
        node = self._maker(ref, "part_of")
        if node is None or part not in (None, node.attrs["part"]):
            return None
        return node, node.inputs[0]

    # Lookups

    def lookups(self) -> Iterator[StepNode]:
        """A node that takes the rows of all parts for each lookup that is done on one device."""
        for node in self._step.nodes.values():
            if node.op.name == "take" and (made := self._lookup(node)) is not None:
                yield made

    def _lookup(self, last: StepNode) -> StepNode | None:
        joined, route = self._maker(last.inputs[0], "join_parts"), self._maker(last.inputs[1], "route_rows")
        if joined is None or route is None or last.inputs[1] != (route.id, BACK) or not self._only_for(joined, last):
            return None
        bounds = self._maker(route.inputs[1], "constant")
        numbers = None if bounds is None else bounds.attrs["value"]
        if not isinstance(numbers, np.ndarray) or joined.inputs[-2:] != ((route.id, STARTS), (route.id, ORDER)):
            return None
        takes = [self._take(ref, joined, route, part) for part, ref in enumerate(joined.inputs[:-2])]
        tables = [take.inputs[0] for take in takes if take is not None]
        dtypes = [*(self._step.spec(ref).dtype for ref in (*tables, route.inputs[0])), last.outputs[0].dtype]
        if len(tables) < len(takes) or not self._supports("take_parts", dtypes, self._placement[last.id].kind or ""):
            return None
        away = [joined, *(take for take in takes if take is not None)]
        self.instead |= {node.id: last.id for node in away}
        return replace(
            last,
            op=lookup("take_parts"),
            inputs=(*tables, route.inputs[0]),
            attrs={"bounds": tuple(numbers.tolist()), "_many": len(tables)},
            control=tuple(n for node in (*away, last) for n in node.control),
            after=tuple(n for node in (*away, last) for n in node.after),
        )

    def _take(self, ref: Ref, joined: StepNode, route: StepNode, part: int) -> StepNode | None:
        """The node that takes the rows of one part, for that lookup alone."""
        take = self._maker(ref, "take")
        if take is None or take.attrs["axis"] not in (0, -len(take.outputs[0].dims or ())):
            return None
        mine = self._part(take.inputs[1], part)
        right = mine is not None and mine[0].inputs == ((route.id, FOUND), (route.id, STARTS))
        return take if right and self._only_for(take, joined) else None

    # Moves

    def moves(self) -> Iterator[StepNode]:
        """For each part whose rows are moved where they were dealt out the nodes that group and move them."""
        for node in self._step.nodes.values():
            if node.op.name == "group_rows" and node.id not in self._asked:
                yield from self._moves(node)

    def _moves(self, group: StepNode) -> Iterator[StepNode]:
        """By the values of all, and groups of these; none where somebody groups or moves other values by them."""
        mine = self._part(group.inputs[0])
        route = None if mine is None else self._maker(mine[1], "route_rows")
        if mine is None or route is None or self._placement[route.id] != self._placement[group.id]:
            return
        part = mine[0].attrs["part"]
        if mine[0].inputs != ((route.id, FOUND), (route.id, STARTS)):
            return
        writes = self._readers.get(group.id, [])
        values = [self._values(write, group, route, part) for write in writes]
        if not writes or None in values:
            return
        yield replace(
            group,
            op=lookup("group_part"),
            inputs=tuple((route.id, output) for output in (STARTS, FOUND, ORDER, BACK)),
            attrs={"part": part, "size": group.attrs["size"]},
        )
        for write, whole in zip(writes, values, strict=True):
            if whole is not None:
                yield replace(write, inputs=(whole, *write.inputs[1:]))

    def _values(self, write: StepNode, group: StepNode, route: StepNode, part: Attr) -> Ref | None:
        """The values of all indices of which ``write`` moves rows by one part's, where it does nothing else."""
        if write.inputs[1:2] != ((group.id, 0),) or self._placement[write.id] != self._placement[group.id]:
            return None
        mine = self._part(write.inputs[0], part)
        dealt = None if mine is None else self._maker(mine[1], "take")
        if mine is None or dealt is None or mine[0].inputs[1] != (route.id, STARTS):
            return None
        whole = self._step.spec(dealt.inputs[0])
        along = dealt.attrs["axis"] in (0, -len(whole.dims or ()))
        return dealt.inputs[0] if dealt.inputs[1] == (route.id, ORDER) and along else None
