"""Make one node of elementwise nodes of one shape that feed each other, so that memory is read and written once.

Law: nodes are taken in an order in which everything comes after what it waits for. A node that can be fused opens a
group, or joins the open groups it takes values from; whoever else waits for an open group is put off until nothing
else can go on, and then closes it. All that a group waits for was done when its members joined, and nothing done
depends on an open group: so groups never wait for each other in a circle, each is convex, and open ones may be joined.
A reduction of what no group makes is offered to those that read it, too, before any is closed.

The members of a group run on one device, under the same sides of switches, and behind the same effects, so that no
value waits for a queue or a transfer that it did not wait for before. Sizes that only a step knows are equal as far as
inference tells; where a step finds them different, the members are computed one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import NAMES, as_dtype
from flowrt.base.traits import RowSpace
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.passes.additions import find_additions, put_back, spell_out
from flowrt.passes.joining import joined, outside, users_of
from flowrt.passes.reductions import is_reduction, sums_over_axes
from flowrt.passes.rows import common_rows, is_link, may_take, reduced_axes
from flowrt.passes.step import FED, NO_GUARDS, Ref, StepGraph, StepNode, guards_of
from flowrt.passes.views import find_views, join_parts

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.base.spec import Shape

Fusible: TypeAlias = Callable[[str, Sequence[Any], str], bool]
"""Whether an op on these dtypes (inputs, then outputs) is computed entry by entry on that kind of device."""

MAX_MEMBERS = 64
MAX_INPUTS = 20  # each is a stream of memory of its own
MAX_REDUCTIONS = 8  # each holds some values in the nearest cache
MAX_SEEN = 256  # of the nodes that wait for a reduction

LEADS = 8  # bits
BREAKING = frozenset({"switch", "merge"})  # what lies behind them is of their side


@valueclass
class _Key:
    """What a node shares with the others of its group: where and behind what they run, and their elements' shape."""

    side: Any
    dims: Shape | None  # None where it computes nothing, so that only what is one for each row can have it join


@dataclass(slots=True, eq=False)
class _Group:
    """An open group: nodes of one side, in the order they joined."""

    side: Any
    rows: RowSpace
    members: list[int] = field(default_factory=list)
    inputs: set[Ref] = field(default_factory=set)
    size: int = 0  # how many ops its members are
    reductions: int = 0  # among its members


def fuse(
    step: StepGraph, placement: Mapping[int, Device], fusible: Fusible, *, regions: bool = True
) -> tuple[StepGraph, dict[int, Device]]:
    """``step`` with groups of elementwise nodes as nodes ``fused``, and where its nodes run.

    A group bears the id and name of its last member. ``regions`` says whether what waits for the same effects runs as
    one, with its variables held.
    """
    step = join_parts(sums_over_axes(step), placement)
    behind = markers(step, placement)
    first = step.free
    additions = find_additions(step, placement, behind, first) if regions else []
    wide = spell_out(step, additions)
    sources = {number: a.write.id for a in additions for number in (a.number, a.read.id)}
    where = {**{number: placement[source] for number, source in sources.items()}, **placement}
    behind = {**{number: behind[source] for number, source in sources.items()}, **behind}
    groups = [group.members for group in _Grouping(wide, _keys(wide, where, behind, fusible)).groups()]
    groups = [members for members in groups if min(members) < first]  # a sum by itself is put back
    made = _rewritten(wide, groups, where, first)
    return put_back(made, additions), where


# ── which nodes may stand together ───────────────────────────────────────────────────────────────────────────────────


def _keys(
    step: StepGraph, placement: Mapping[int, Device], behind: Mapping[int, int], fusible: Fusible
) -> dict[int, _Key]:
    """For every node that can be fused, what it must share with the others of its group."""
    guards = guards_of(step)
    keys: dict[int, _Key] = {}
    names = {key: (str(device), str(device.kind)) for key, device in {id(d): d for d in placement.values()}.items()}
    fusible = lru_cache(None)(fusible)
    for node in step.nodes.values():
        device, kind = names[id(placement[node.id])]
        side = (device, guards.get(node.id, NO_GUARDS), behind[node.id])
        if is_reduction(step, node) and fusible("add", (node.outputs[0].dtype,) * 3, kind):
            keys[node.id] = _Key(side, step.spec(node.inputs[0]).dims)
        elif is_link(node) and fusible("add", (node.outputs[0].dtype,) * 3, kind):
            keys[node.id] = _Key(side, None)
        elif _is_member(step, node) and all(fusible(*scalar, kind) for scalar in _scalar_ops(step, node)):
            keys[node.id] = _Key(side, node.outputs[0].dims)
    return keys


def _is_member(step: StepGraph, node: StepNode) -> bool:
    if node.op.effect or node.op.stateful or not node.inputs:
        return False
    if len(node.outputs) != 1 and not is_program(node):
        return False
    out = node.outputs[0]
    if not out.dims or (out.dtype.kind in "iu" and out.rank < 2):  # inference may compute with small integers
        return False  # and what scalars have to gain is nanoseconds
    if None in [step.spec(ref).dims for ref in node.inputs]:
        return False
    return not node.attrs or not any(isinstance(value, np.ndarray) for value in node.attrs.values())


def _scalar_ops(step: StepGraph, node: StepNode) -> Sequence[tuple[str, tuple[Any, ...]]]:
    """What computes an entry of a node's results, and on which dtypes: a sum of many is a chain of sums of two."""
    dtypes = tuple([step.spec(ref).dtype for ref in node.inputs])
    if is_program(node):
        members: Any = node.attrs["members"]
        return _scalars_of(members, dtypes)
    if node.op.name == "add_n":
        return [("add", dtypes[:1] * 3)]
    return [(node.op.name, (*dtypes, node.outputs[0].dtype))]


@lru_cache(maxsize=64)
def _scalars_of(members: Any, dtypes: tuple[Any, ...]) -> Sequence[tuple[str, tuple[Any, ...]]]:
    """The ops of a program, each on its dtypes."""
    of = [*dtypes, *[as_dtype(dtype) for _, _, dtype, _ in members]]
    made = of[len(dtypes) :]
    return [(op, (*[of[n] for n in operands], out)) for (op, operands, _, _), out in zip(members, made, strict=True)]


def markers(step: StepGraph, placement: Mapping[int, Device]) -> dict[int, int]:
    """What each node waits for that may take its time, and its lead, as the bits of one integer: effects, switches,
    other devices."""
    behind: dict[int, int] = {}
    bits: dict[int, int] = {}
    for node in step.nodes.values():
        mask, here = 0, placement[node.id]
        for source in node.before:
            mask |= behind.get(source, 0)
            before = step.nodes[source]
            crosses = placement[source] is not here and placement[source] != here
            if crosses or before.op.effect or before.op.name in BREAKING:
                mask |= 1 << bits.setdefault(source, len(bits))
        behind[node.id] = mask
    return {i: mask << LEADS | step.lead.get(i, 0) for i, mask in behind.items()} if step.lead else behind


# ── the groups ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Grouping:
    """The nodes of a step as they are done one by one, and the groups open among them."""

    def __init__(self, step: StepGraph, keys: Mapping[int, _Key]) -> None:
        self._step, self._keys = step, keys
        self._position = {i: place for place, i in enumerate(step.nodes)}
        self._followers: dict[int, list[int]] = {}
        self._waiting: dict[int, int] = {}  # nodes before that are neither done nor in an open group
        for node in step.nodes.values():
            self._waiting[node.id] = len(node.before)
            for source in node.before:
                self._followers.setdefault(source, []).append(node.id)
        self._open: dict[int, _Group] = {}  # member → its group
        self._reductions = {i for i in keys if is_reduction(step, step.nodes[i])}  # whose results no member can take
        self._offered: set[int] = (
            set()
        )  # reductions that were put off once, for a group to open that reads what they reduce
        self._closed: list[_Group] = []
        self._ready = [(self._position[i], i) for i, count in self._waiting.items() if not count]
        self._put_off: list[tuple[int, int, int]] = []

    def groups(self) -> list[_Group]:
        """All groups, of one node or more."""
        while self._ready or self._put_off:
            if self._ready:
                _, node = heapq.heappop(self._ready)
                self._take(node)
            else:
                self._make_way(heapq.heappop(self._put_off)[-1])
        for group in {id(group): group for group in self._open.values()}.values():
            self._close(group)
        return self._closed

    def _take(self, i: int) -> None:
        """Do a node, let it join the open groups it waits for, or put it off."""
        before, key = self._groups_before(i), self._keys.get(i)
        if not before and self._may_stand_beside(i):
            before = self._groups_reading(i)
            if not before and i not in self._offered:
                self._offered.add(i)
                heapq.heappush(self._put_off, (-1, self._position[i], i))
                return
        rows = self._fits(i, before)
        if before and rows is None:
            heapq.heappush(self._put_off, (self._urgency(i, before), self._position[i], i))
            return
        if key is not None and rows is not None:
            self._join(i, before, rows)
        for follower in self._followers.get(i, ()):
            self._waiting[follower] -= 1
            if not self._waiting[follower]:
                heapq.heappush(self._ready, (self._position[follower], follower))

    def _urgency(self, i: int, groups: Sequence[_Group]) -> int:
        """Those that will join a group come first, and writes, for which nobody waits to compute, last."""
        if any(self._is_alike(i, group) for group in groups) and not self._waits_for_reduction(i):
            return 0
        return 2 if self._step.nodes[i].op.stateful else 1

    def _may_stand_beside(self, i: int) -> bool:
        """Whether a node reduces what is there already, but not rows to numbers, which opens a group by itself."""
        return i in self._reductions and not reduced_axes(self._step, self._step.nodes[i])

    def _groups_reading(self, i: int) -> list[_Group]:
        """An open group, if any, that reads what the reduction ``i`` does, can take it in, and loses nobody by that."""
        taken, groups = self._step.nodes[i].inputs[0], {id(group): group for group in self._open.values()}.values()
        fits = (g for g in groups if taken in g.inputs and self._is_alike(i, g) and self._fits(i, [g]) is not None)
        return [group for group in islice(fits, 1) if not self._is_awaited(i, group)]

    def _is_awaited(self, i: int, group: _Group) -> bool:
        """Whether what waits for the reduction ``i`` might join ``group``, were the reduction no part of it."""
        seen, stack = {i}, [i]
        while stack:
            for n in self._followers.get(stack.pop(), ()):
                if self._is_alike(n, group) or len(seen) > MAX_SEEN:
                    return True
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        return False

    def _groups_before(self, i: int) -> list[_Group]:
        opened = self._open
        found = [opened[source] for source in self._step.nodes[i].before if source in opened]
        return list({id(group): group for group in found}.values()) if len(found) > 1 else found

    def _fits(self, i: int, groups: Sequence[_Group]) -> RowSpace | None:
        """The rows of the group that node ``i`` makes of ``groups``, or opens by itself; None where it does neither."""
        key = self._keys.get(i)
        if key is None:
            return None
        node = self._step.nodes[i]
        size, reductions, inputs = size_of(node), int(i in self._reductions), len(node.inputs)
        for group in groups:
            if group.side != key.side:
                return None
            size, reductions, inputs = (
                size + group.size,
                reductions + group.reductions,
                inputs + len(group.inputs),
            )
        if size > MAX_MEMBERS or reductions > MAX_REDUCTIONS:
            return None
        rows = self._rows(i, groups, key)
        few = inputs <= MAX_INPUTS or len(self._inputs(i, groups)) <= MAX_INPUTS
        return rows if few else None

    def _rows(self, i: int, groups: Sequence[_Group], key: _Key) -> RowSpace | None:
        node = self._step.nodes[i]
        if not groups:
            opens = key.dims is not None and (i not in self._reductions or reduced_axes(self._step, node) > 0)
            return RowSpace(key.dims) if opens and key.dims is not None else None
        other = [group for group in groups if group.rows.dims != key.dims or group.rows.along]
        if not other and not self._waits_for_reduction(i):
            return groups[0].rows
        read = {n for n in node.before if n in self._reductions and n in self._open}
        members = {member for group in groups for member in group.members}
        rows = common_rows(self._step, [self._step.nodes[n] for n in read], [group.rows for group in groups])
        whole = rows is not None and read <= {source for source, _ in node.inputs}
        return rows if rows is not None and whole and may_take(rows, self._step, node, members) else None

    def _waits_for_reduction(self, i: int) -> bool:
        """Whether a node waits for what an open group adds up."""
        before = self._step.nodes[i].before
        return not self._reductions.isdisjoint(before) and any(
            s in self._reductions and s in self._open for s in before
        )

    def _inputs(self, i: int, groups: Sequence[_Group]) -> set[Ref]:
        """What the groups and node ``i`` together take from outside."""
        own = {ref for ref in self._step.nodes[i].inputs if self._open.get(ref[0]) not in groups or ref[0] == FED}
        return own.union(*(group.inputs for group in groups))

    def _is_alike(self, i: int, group: _Group) -> bool:
        key = self._keys.get(i)
        return key is not None and group.side == key.side and group.rows.dims == key.dims

    def _join(self, i: int, groups: Sequence[_Group], rows: RowSpace) -> None:
        """Let node ``i`` open a group, or join those there are, which are one from now on."""
        inputs = self._inputs(i, groups)
        joined = groups[0] if groups else _Group(self._keys[i].side, rows)
        if len(groups) > 1:
            joined.members = [n for group in groups for n in group.members]
            joined.reductions = sum(group.reductions for group in groups)
            joined.size = sum(group.size for group in groups)
            self._open.update(dict.fromkeys(joined.members, joined))
        joined.rows, joined.inputs = rows, inputs
        joined.members.append(i)
        joined.size += size_of(self._step.nodes[i])
        joined.reductions += i in self._reductions
        self._open[i] = joined

    def _make_way(self, i: int) -> None:
        """Close what node ``i`` was put off for and cannot join, if it still cannot."""
        groups = self._groups_before(i)
        if groups and self._fits(i, groups) is None:
            others = [group for group in groups if not self._is_alike(i, group)]
            for group in others or groups:
                self._close(group)
        heapq.heappush(self._ready, (self._position[i], i))

    def _close(self, group: _Group) -> None:
        group.members[:-1] = sorted(group.members[:-1], key=self._position.__getitem__)
        self._closed.append(group)
        for member in group.members:
            del self._open[member]


# ── the rewriting ────────────────────────────────────────────────────────────────────────────────────────────────────


def _rewritten(step: StepGraph, grouped: Sequence[Sequence[int]], where: Mapping[int, Device], first: int) -> StepGraph:
    """``step`` with each of the groups as one node; nodes from ``first`` on were added by this pass."""
    users = users_of(step)
    inside = {i for members in grouped for i in members}
    views = find_views(step, where, users, inside) - inside
    groups = [(members, _views_of(step, members, views)) for members in grouped]
    groups = [(members, read) for members, read in groups if len(members) + len(read) > 1]
    if not groups:
        return step
    refs: dict[Ref, Ref] = {}
    home: dict[int, int] = {}
    made: dict[int, StepNode] = {}
    for members, read in groups:
        own = set(members)
        leaving = [ref for i in members if not users[i] <= own for ref in _leaving(step, i, users[i] - own)]
        node = fused_node(step, [*read, *members], leaving, max(i for i in members if i < first))
        made[node.id] = node
        refs |= {ref: (node.id, number) for number, ref in enumerate(leaving)}
        home |= dict.fromkeys(members, node.id)
    left = replace(step, nodes={i: node for i, node in step.nodes.items() if i not in views}) if views else step
    return joined(left, made, home, refs)


def _leaving(step: StepGraph, i: int, users: Collection[int]) -> Sequence[Ref]:
    """What of the results of node ``i`` its ``users`` take."""
    if len(step.nodes[i].outputs) == 1:
        return [(i, 0)]
    taken = {*(step.fetches if FED in users else ()), *(ref for n in users if n != FED for ref in step.nodes[n].inputs)}
    return [(i, k) for k in range(len(step.nodes[i].outputs)) if (i, k) in taken]


def _views_of(step: StepGraph, members: Sequence[int], views: Collection[int]) -> list[int]:
    """The views that a group reads."""
    return list(dict.fromkeys(source for i in members for source, _ in step.nodes[i].inputs if source in views))


def fused_node(step: StepGraph, members: Sequence[int], leaving: Sequence[Ref], number: int) -> StepNode:
    """The node of a group, under the id and name of its member ``number``."""
    nodes = [step.nodes[i] for i in members]
    inside = set(members)
    inputs = tuple(dict.fromkeys([ref for node in nodes for ref in node.inputs if ref[0] not in inside]))
    numbers = {ref: number for number, ref in enumerate(inputs)}
    program: list[tuple[Attr, ...]] = []
    for node in nodes:
        program += members_of(node, numbers, len(inputs) + len(program))
    leaving = leaving or [(members[-1], 0)]  # a target, or what only order is wanted of
    results = tuple([numbers[ref] for ref in leaving])
    attrs: dict[str, Attr] = {"_many": len(inputs), "members": tuple(program), "results": results}
    last = step.nodes[number]
    return StepNode(
        id=last.id,
        op=lookup("fused"),
        name=last.name,
        inputs=inputs,
        outputs=tuple([step.spec(ref) for ref in leaving]),
        attrs=attrs,
        control=outside([node.control for node in nodes], inside),
        site=last.site,
        after=outside([node.after for node in nodes], inside),
    )


def is_program(node: StepNode) -> bool:
    """Whether a node is a program by itself, from the graph on: see `flowrt.ops.fused.in_one`."""
    return node.op.name == "fused"


def size_of(node: StepNode) -> int:
    """How many members of a program a node makes."""
    members: Any = node.attrs["members"] if is_program(node) else (node,)
    return len(members)


def members_of(node: StepNode, numbers: dict[Ref, int], first: int) -> list[tuple[Attr, ...]]:
    """A node as members of a program, the values of which are numbered from ``first``; its results are noted there."""
    taken = [numbers[ref] for ref in node.inputs]
    if not is_program(node):
        numbers[node.id, 0] = first
        return [(node.op.name, tuple(taken), NAMES[node.outputs[0].dtype], tuple(sorted(node.attrs.items())))]
    members: Any = node.attrs["members"]
    results: Any = node.attrs["results"]
    number = [*taken, *range(first, first + len(members))]
    numbers |= {(node.id, k): number[n] for k, n in enumerate(results)}
    return [(op, tuple([number[n] for n in operands]), dtype, attrs) for op, operands, dtype, attrs in members]
