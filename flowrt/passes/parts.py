"""Look rows up in tables that are split by rows, and move them: by few nodes, and one message to or from each home.

Law: a pass on a placed step. What `flowrt.ops.routing` builds for such tables is right wherever the parts lie: each by
itself, and of sizes that values decide. Here it is known what lies where, and what nodes are made of it have sizes that
follow from the number of indices (`flowrt.ops.parts`):

    all parts lie together    `take_parts` there
    they lie apart            each home, as the device of some parts is called, packs the rows of these, cuts off what
                              is no row and sends them; who wants them puts them, and its own, in their places
    values to move rows by    as they are, by groups of all, where rows are moved beside them; else packed by home

Every home has all indices then, and finds out by itself what is its; where `route_rows` is not to be done again (they
are many bytes beside rows), what lies apart stays as it was. What is sent goes before rows are moved beside it. A node
that is made bears the id of one that it stands for, and waits for all that those waited for; who waited for them waits
for it. Where nodes would wait for each other all stays as it was.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.op import lookup
from flowrt.passes.joining import joined, outside, readers_of
from flowrt.passes.step import FED, StepNode, keep_needed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.passes.place import Supports
    from flowrt.passes.step import Ref, StepGraph

INT64 = np.dtype("int64")
STARTS, FOUND, ORDER, BACK = range(4)
"""What `route_rows` answers."""


def take_together(
    step: StepGraph, placement: Mapping[int, Device], supports: Supports
) -> tuple[StepGraph, Mapping[int, Device]]:
    """``step`` with its lookups in parts, and moves of their rows, by few nodes; and where all its nodes run."""
    if all(node.op.name != "part_of" for node in step.nodes.values()):
        return step, placement
    found = _Rewriting(step, placement, supports)
    found.look_up()
    found.move()
    if not found.made:
        return step, placement
    try:
        made = joined(replace(step, nodes={**step.nodes, **found.made}), found.made, found.instead)
    except GraphError:
        return step, placement
    return keep_needed(made, made.nodes), found.where


@dataclass(slots=True, eq=False)
class _Move:
    """The rows of one part that are moved: their groups, and each write with the values of all indices."""

    group: StepNode
    writes: list[tuple[StepNode, Ref]]


@dataclass(slots=True, eq=False)
class _Moves:
    """Of the indices that ``route`` deals out, by part; ``cut`` are the values that left a device before."""

    route: StepNode
    parts: dict[int, _Move] = field(default_factory=dict)
    cut: dict[tuple[Ref, int], StepNode] = field(default_factory=dict)


class _Rewriting:
    """The nodes that are ``made`` of a placed step, by id, and ``where`` all are; ``instead`` of some others stand."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> None:
        self._step, self._supports = step, supports
        self._readers = readers_of(step)
        self._asked = {*step.targets, *(source for source, _ in step.fetches)}
        self._free = itertools.count(step.free)
        self._packs: dict[tuple[int, tuple[int, ...]], StepNode] = {}
        self.made: dict[int, StepNode] = {}
        self.where = dict(placement)
        self.instead: dict[int, int] = {}

    # What there is

    def _maker(self, ref: Ref, op: str) -> StepNode | None:
        """What makes ``ref``, if that is a node of ``op``."""
        node = None if ref[0] == FED else self._step.nodes[ref[0]]
        return node if node is not None and node.op.name == op else None

    def _only_for(self, node: StepNode, reader: StepNode) -> bool:
        """Whether nobody but ``reader`` has any use of a node."""
        return [other.id for other in self._readers[node.id]] == [reader.id] and node.id not in self._asked

    def _part(self, ref: Ref, part: Attr = None) -> tuple[StepNode, Ref] | None:
        """The node that takes a part, this one if it is given, and what it is taken of."""
        node = self._maker(ref, "part_of")
        if node is None or part not in (None, node.attrs["part"]):
            return None
        return node, node.inputs[0]

    def _everywhere(self, route: StepNode) -> bool:
        """Whether whoever wants to know where rows go finds out by itself."""
        return bool(route.attrs["again"]) and not route.control

    def _runs(self, op: str, dtype: np.dtype[Any], *devices: Device) -> bool:
        kinds = {device.kind or "" for device in devices}
        return all(self._supports(op, [dtype, INT64, dtype], kind) for kind in kinds)

    # What is made

    def _make(
        self,
        mine: int,
        like: StepNode,
        op: str,
        inputs: Sequence[Ref],
        attrs: Mapping[str, Attr],
        device: Device,
        instead_of: Sequence[StepNode] = (),
    ) -> StepNode:
        """A node of ``op`` called as ``like``, under the number ``mine``; it waits for all that others waited for."""
        specs = [self.made[i].outputs[o] if i in self.made else self._step.spec((i, o)) for i, o in inputs]
        gone = {mine, *(node.id for node in instead_of)}
        control, after = (outside((getattr(node, name) for node in instead_of), gone) for name in ("control", "after"))
        outputs = lookup(op).infer(specs, attrs)
        made = StepNode(mine, lookup(op), like.name, tuple(inputs), outputs, attrs, control, like.site, after)
        self.instead |= {node.id: mine for node in instead_of if node.id != mine}
        self.made[mine], self.where[mine] = made, device
        return made

    def _packed(self, route: StepNode, homes: tuple[int, ...]) -> StepNode:
        """Where the rows of parts come to lie that have these homes, numbered."""
        key = route.id, homes
        if key not in self._packs:
            inputs = (route.id, STARTS), (route.id, FOUND)
            where = self.where[route.id]
            self._packs[key] = self._make(next(self._free), route, "pack_parts", inputs, {"homes": homes}, where)
        return self._packs[key]

    def _put(
        self,
        mine: int,
        like: StepNode,
        sources: Mapping[int, tuple[Ref, str]],
        places: str,
        pack: StepNode,
        device: Device,
        instead_of: Sequence[StepNode] = (),
    ) -> StepNode:
        """A node that puts rows of parts at ``places``, of each part those of its source that something tells."""
        route = pack.inputs[0][0]
        vectors = *((route, output) for output in (STARTS, FOUND, ORDER, BACK)), (pack.id, 0)
        rows = tuple(way for _, way in sources.values())
        attrs: dict[str, Attr] = {"parts": tuple(sources), "rows": rows, "places": places, "_many": len(sources)}
        inputs = *(ref for ref, _ in sources.values()), *vectors
        return self._make(mine, like, "move_parts", inputs, attrs, device, instead_of)

    def _cut(self, rows: StepNode, pack: StepNode, home: int) -> StepNode:
        """What of packed ``rows`` some home has."""
        inputs, where = ((rows.id, 0), (pack.id, 1)), self.where[rows.id]
        return self._make(next(self._free), rows, "part_of", inputs, {"part": 2 * home}, where)

    # Lookups

    def look_up(self) -> None:
        """Find the lookups, and make nodes of each."""
        for node in self._step.nodes.values():
            if node.op.name == "take":
                self._look_up(node)

    def _look_up(self, last: StepNode) -> None:
        joined, route = self._maker(last.inputs[0], "join_parts"), self._maker(last.inputs[1], "route_rows")
        if joined is None or route is None or last.inputs[1] != (route.id, BACK) or not self._only_for(joined, last):
            return
        bounds = self._maker(route.inputs[1], "constant")
        if bounds is None or joined.inputs[-2:] != ((route.id, STARTS), (route.id, ORDER)):
            return
        found = [self._take(ref, joined, route, part) for part, ref in enumerate(joined.inputs[:-2])]
        takes = [take for take in found if take is not None]
        here, dtype = self.where[last.id], last.outputs[0].dtype
        devices = {self.where[take.id]: None for take in takes}
        if len(takes) < len(found):
            return
        if len(devices) == 1 and self._runs("take_parts", dtype, *devices):
            inputs = *(take.inputs[0] for take in takes), route.inputs[0]
            lie: tuple[int, ...] = tuple(np.asarray(bounds.attrs["value"]).tolist())
            attrs: dict[str, Attr] = {"bounds": lie, "absent": route.attrs["absent"], "_many": len(takes)}
            self._make(last.id, last, "take_parts", inputs, attrs, next(iter(devices)), (joined, *takes, last))
        elif self._everywhere(route) and self._runs("move_parts", dtype, here, *devices):
            self._stitch(last, joined, takes, route)

    def _take(self, ref: Ref, joined: StepNode, route: StepNode, part: int) -> StepNode | None:
        """The node that takes the rows of one part, for that lookup alone."""
        take = self._maker(ref, "take")
        if take is None or take.attrs["axis"] not in (0, -len(take.outputs[0].dims or ())):
            return None
        mine = self._part(take.inputs[1], part)
        right = mine is not None and mine[0].inputs == ((route.id, FOUND), (route.id, STARTS))
        return take if right and self._only_for(take, joined) else None

    def _stitch(self, last: StepNode, joined: StepNode, takes: Sequence[StepNode], route: StepNode) -> None:
        """Have each home pack its rows, and all be put together in the place of ``last``."""
        here, homes = self.where[last.id], _numbered([self.where[take.id] for take in takes])
        pack, at_home = self._packed(route, homes), [joined, last]
        sources: dict[int, tuple[Ref, str]] = {}
        for home in range(max(homes) + 1):
            mine = {part: (takes[part].inputs[0], "found") for part in range(len(takes)) if homes[part] == home}
            those = [takes[part] for part in mine]
            device = self.where[those[0].id]
            if device == here:
                at_home += those
            else:
                rows = self._put(those[0].id, those[0], mine, "numbers", pack, device, those)
                mine = dict.fromkeys(mine, ((self._cut(rows, pack, home).id, 0), "numbers"))
            sources |= mine
        self._put(last.id, last, dict(sorted(sources.items())), "order", pack, here, at_home)

    # Moves

    def move(self) -> None:
        """Find the moves of rows, and make nodes of each."""
        found: dict[int, _Moves] = {}
        for group in self._step.nodes.values():
            mine = self._part(group.inputs[0]) if group.op.name == "group_rows" else None
            route = None if mine is None else self._maker(mine[1], "route_rows")
            if mine is None or route is None or group.id in self._asked:
                continue
            part, writes = cast("int", mine[0].attrs["part"]), list(self._writes(group, route, mine[0]))
            if writes and len(writes) == len(self._readers[group.id]):
                found.setdefault(route.id, _Moves(route)).parts[part] = _Move(group, writes)
        for moves in found.values():
            self._move(moves)

    def _writes(self, group: StepNode, route: StepNode, mine: StepNode) -> Iterator[tuple[StepNode, Ref]]:
        """The writes of one part's rows by ``group`` that do nothing else, and the values of all indices for them."""
        if mine.inputs != ((route.id, FOUND), (route.id, STARTS)):
            return
        for write in self._readers[group.id]:
            values = self._part(write.inputs[0], mine.attrs["part"])
            dealt = None if values is None else self._maker(values[1], "take")
            if values is None or dealt is None or values[0].inputs[1] != (route.id, STARTS):
                continue
            along = dealt.attrs["axis"] in (0, -len(self._step.spec(dealt.inputs[0]).dims or ()))
            beside = self.where[write.id] == self.where[group.id]
            if along and beside and dealt.inputs[1] == (route.id, ORDER) and write.inputs[1] == (group.id, 0):
                yield write, dealt.inputs[0]

    def _move(self, moves: _Moves) -> None:
        """Make nodes of what can be: what is sent leaves before rows are moved beside it."""
        route, everywhere = moves.route, self._everywhere(moves.route)
        count = self._step.spec((route.id, STARTS)).concrete[0] - 1
        homes = _numbered([self.where[moves.parts[p].group.id] if p in moves.parts else None for p in range(count)])
        beside: list[StepNode] = []
        for part, move in moves.parts.items():
            device = self.where[move.group.id]
            if not (everywhere or self.where[route.id] == device) or not self._runs("group_part", INT64, device):
                continue
            lie = {self._lies(values, route) for _, values in move.writes}
            if lie == {device} or len({*homes}) == 1:
                self._regroup(move, part, (route.id, ORDER), (route.id, BACK), [values for _, values in move.writes])
                beside += [write for write, _ in move.writes]
            elif everywhere and self._runs("move_parts", INT64, *lie):
                cut = [(self._dealt(moves, values, homes, homes[part]).id, 0) for _, values in move.writes]
                self._regroup(move, part, (self._packed(route, homes).id, 0), cut[0], cut)
        for write in beside:
            sent = (cut.id for cut in moves.cut.values() if self.where[cut.id] == self.where[write.id])
            self.made[write.id] = replace(self.made[write.id], after=(*write.after, *sent))

    def _lies(self, values: Ref, route: StepNode) -> Device:
        return self.where[route.id if values[0] == FED else values[0]]

    def _dealt(self, moves: _Moves, values: Ref, homes: tuple[int, ...], home: int) -> StepNode:
        """Those of ``values`` that some home is sent."""
        if (values, home) not in moves.cut:
            mine = {part: (values, "order") for part, its in enumerate(homes) if its == home}
            pack, like = self._packed(moves.route, homes), moves.parts[next(iter(mine))].group
            rows = self._put(next(self._free), like, mine, "numbers", pack, self._lies(values, moves.route))
            moves.cut[values, home] = self._cut(rows, pack, home)
        return moves.cut[values, home]

    def _regroup(self, move: _Move, part: int, numbers: Ref, like: Ref, values: Sequence[Ref]) -> None:
        """Have ``values`` move the rows, by groups that tell them by their ``numbers``."""
        route = self._part(move.group.inputs[0])
        assert route is not None
        dealt = route[1][0]
        self._make(
            move.group.id,
            move.group,
            "group_part",
            ((dealt, STARTS), (dealt, FOUND), numbers, like),
            {"part": part, "size": move.group.attrs["size"]},
            self.where[move.group.id],
            (move.group,),
        )
        for (write, _), ref in zip(move.writes, values, strict=True):
            self.made[write.id] = replace(write, inputs=(ref, *write.inputs[1:]))


def _numbered(devices: Sequence[Device | None]) -> tuple[int, ...]:
    """By part the number of its device, in the order in which they come; of each that is unknown one of its own."""
    keys = [part if device is None else device for part, device in enumerate(devices)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)
