"""Decide on which device each node of a step runs.

Law: pure. What exists, what has a kernel where, and the user's rules are arguments; the answer is a map. A *home* is
what must share one device: the nodes of one variable or queue (where its memory is), or one node alone. A *family* is
the homes that colocation ties together; it shares a task, and a device as far as kernels allow. Constraints are
gathered over the entire graph, not the step, so a variable is in the same place in every step.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.device import ANYWHERE, HOST_KIND, Device
from flowrt.base.errors import PlacementError
from flowrt.base.plan import Plan
from flowrt.base.spec import is_half
from flowrt.base.traits import writes
from flowrt.graph import Node
from flowrt.passes.arrange import arrange
from flowrt.passes.known_sizes import StepSizes
from flowrt.passes.looping import runs_apart
from flowrt.passes.step import FED, StepGraph, StepNode

if TYPE_CHECKING:
    from flowrt.graph import Graph, Resource
    from flowrt.passes.arrange import Arrangement
    from flowrt.passes.estimates import Prediction

Supports: TypeAlias = Callable[[str, Sequence[np.dtype[Any]], str], bool]
"""(op name, dtypes of inputs then outputs, device kind) → whether the op runs there."""
_HOW_TO_HAVE = "fr.Options(devices=...) and a node's --devices say which to look for"
Home: TypeAlias = "tuple[str, str] | int"
"""(container, name) of a resource, or the index of a node that works on none."""


@dataclass(slots=True)
class _Family:
    """Homes that colocation ties together, what is asked of them, and who asked first for each part."""

    homes: dict[Home, list[Node]] = field(default_factory=dict)
    asked: dict[Home, Device] = field(default_factory=dict)
    stateful: bool = False
    constraint: Device = ANYWHERE
    askers: dict[str, str] = field(default_factory=dict)
    needed: list[StepNode] = field(default_factory=list)
    device: Device | None = None

    def in_step(self) -> _Family:
        """The family as it is at the beginning of a step."""
        return _Family(self.homes, self.asked, self.stateful, self.constraint, self.askers)


def place(
    step: StepGraph,
    *,
    devices: Sequence[Device],
    default: Device,
    supports: Supports,
    rules: Mapping[str, str],
    moved: list[str] | None = None,
    wishes: Mapping[Home, Device] | None = None,
) -> dict[int, Device]:
    """The device of each node of ``step``.

    ``rules`` map patterns of names (``embedding/*``) to devices and go before what the program says. What nothing ties
    down goes where it is among the ``wishes``, of `arranged`; without one it follows its first input, else its first
    consumer, else goes to ``default``, and variables always go to ``default``. Raises `PlacementError` where a device
    does not exist, constraints conflict, or a kernel is missing; but with a list of what was ``moved``, the kind of
    device that is asked for is a wish: what is elsewhere for want of a device or kernel is told there.
    """
    chooser = _Chooser(step, tuple(devices), default, supports, moved)
    if chooser.has_no_choice and not (rules or wishes) and _asks_for_nothing(step.graph) and chooser.runs_all():
        return dict.fromkeys(step.nodes, devices[0])
    homes, tied = _ties(step.graph, rules)
    families: dict[int, _Family] = {}
    mine: dict[int, _Family] = {}
    for node in step.nodes.values():
        known = tied[homes[node.id]]
        family = families.get(id(known)) or families.setdefault(id(known), known.in_step())
        family.needed.append(node)
        mine[node.id] = family
    if wishes:
        _heed(wishes, mine.values(), chooser)
    _choose(step, mine, tied, chooser)
    return {i: chooser.within(mine[i], homes[i], node) for i, node in step.nodes.items()}


def _heed(wishes: Mapping[Home, Device], families: Iterable[_Family], chooser: _Chooser) -> None:
    """Have families where they are wished; raises `PlacementError` where that is away of what holds a value there."""
    for family in families:
        wish = next((wishes[home] for home in family.homes if home in wishes), None)
        if family.device is None and wish is not None:
            if family.stateful and not chooser.has(wish):
                error = PlacementError(f"there is no device {wish}, where variables are that were placed there")
                error.missing = wish
                raise error
            family.device = chooser.pick(family, (wish,))


def arranged(
    graph: Graph,
    *,
    devices: Sequence[Device],
    default: Device,
    supports: Supports,
    rules: Mapping[str, str],
    prediction: Prediction,
) -> Arrangement:
    """Where what nothing ties down is predicted to be done soonest, for all steps of ``graph``.

    The parts of variables that are split go to as many tasks as they would otherwise. Raises as `place` does.
    """
    chooser = _Chooser(StepGraph(graph, {}, (), (), (), ()), tuple(devices), default, supports)
    homes, tied = _ties(graph, rules)
    spread = _spread(graph, tied, chooser)
    first = {id(family): next(iter(family.homes)) for family in tied.values()}

    def able(home: Home) -> Sequence[Device]:
        family = tied[home]
        part = next((spread[each] for each in family.homes if each in spread), None)
        return chooser.able(family) if part is None else (part,)

    return arrange(graph, [first[id(tied[home])] for home in homes], able, prediction)


def _asks_for_nothing(graph: Graph) -> bool:
    """Whether no node, variable or queue is asked to be anywhere: found once for all steps, as `_ties` are."""
    known = graph.derived if graph.finalized else {}
    if "asks for nothing" not in known:
        anywhere = all(node.device is ANYWHERE for node in graph.nodes)
        known["asks for nothing"] = anywhere and all(r.device is ANYWHERE for r in graph.resources.values())
    found: bool = known["asks for nothing"]
    return found


# ── what must be together ────────────────────────────────────────────────────────────────────────────────────────────


def _ties(graph: Graph, rules: Mapping[str, str]) -> tuple[Sequence[Home], Mapping[Home, _Family]]:
    """The home of each node, and the family of each home: found once for all steps of a graph that grows no more."""
    known = graph.derived if graph.finalized else {}
    key = "ties", tuple(rules.items())
    if key not in known:
        homes = _homes(graph)
        known[key] = homes, _families(graph, homes, _Rules(rules))
    found: tuple[Sequence[Home], Mapping[Home, _Family]] = known[key]
    return found


def _homes(graph: Graph) -> list[Home]:
    """The home of each node. What is kept beside a variable, and moved by one kernel with it, is at home there too."""
    resources = [node.resources for node in graph.nodes]
    owners = {slot: found[0] for found in resources for slot in found[1:]}
    return [owners.get(found[0], found[0]) if found else index for index, found in enumerate(resources)]


def _families(graph: Graph, homes: Sequence[Home], rules: _Rules) -> dict[Home, _Family]:
    """The family of each home of the graph: union-find over colocation, then constraints merged."""
    parent: dict[Home, Home] = {home: home for home in homes}

    def root(home: Home) -> Home:
        while parent[home] != home:
            parent[home] = parent[parent[home]]
            home = parent[home]
        return home

    for node in graph.nodes:
        for other in node.colocate:
            parent[root(homes[other.index])] = root(homes[node.index])
    families: dict[Home, _Family] = {}
    out: dict[Home, _Family] = {}
    for home, node in zip(homes, graph.nodes, strict=True):
        family = out.get(home)
        if family is None:
            top = root(home)
            family = out[home] = families.get(top) or families.setdefault(top, _Family())
        family.homes.setdefault(home, []).append(node)
        family.stateful |= isinstance(home, tuple)
    for family in families.values():
        for home, nodes in family.homes.items():
            if type(home) is int and nodes[0].device is ANYWHERE and not rules:
                continue  # as of most
            for asked, asker in _asked(graph, home, nodes, rules):
                family.asked[home] = asked
                if asked != ANYWHERE:
                    _constrain(family, asked, _described(asker))
    return out


def _asked(graph: Graph, home: Home, nodes: Sequence[Node], rules: _Rules) -> Iterable[tuple[Device, Resource | Node]]:
    """The constraints on one home, and who asks: a resource's own, not that of the code around a use of it."""
    resource = graph.resources.get(home) if isinstance(home, tuple) else None
    if resource is not None:
        own = [n.name for n in nodes if n.name.startswith(f"{resource.name}/")] if rules else []
        yield rules.over(resource.device, (resource.name, *own)), resource
        return
    for node in nodes:
        if node.device != ANYWHERE or rules:
            yield rules.over(node.device, (node.name,)), node


def _described(asker: Resource | Node) -> str:
    kind = asker.op.name if isinstance(asker, Node) else asker.kind
    return f"{kind} {asker.name!r} ({asker.site})"


def _constrain(family: _Family, asked: Device, asker: str) -> None:
    """Add what ``asker`` asks for to what the family's others did."""
    for part in ("job", "task", "kind", "index"):
        new, old = getattr(asked, part), getattr(family.constraint, part)
        if new is None:
            continue
        if old is not None and old != new:
            raise PlacementError(
                f"{asker} asks for {asked}, and {family.askers[part]}, with which it is colocated, is bound to "
                f"{family.constraint}; ask for one device, or do not colocate them"
            )
        family.askers.setdefault(part, asker)
        family.constraint = replace(family.constraint, **{part: new})


class _Rules:
    """Patterns of names, each with the device it asks for; the first that matches counts."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = [(re.compile(fnmatch.translate(glob)), Device.parse(name)) for glob, name in rules.items()]

    def __bool__(self) -> bool:
        return bool(self._rules)

    def over(self, device: Device, names: Sequence[str]) -> Device:
        """``device`` as refined by the first rule that matches one of ``names``."""
        for pattern, asked in self._rules:
            if any(pattern.match(name) for name in names):
                return asked.over(device)
        return device


# ── where to put it ──────────────────────────────────────────────────────────────────────────────────────────────────


def _spread(graph: Graph, tied: Mapping[Home, _Family], chooser: _Chooser) -> dict[Home, Device]:
    """Where the parts of variables go that are split by rows: each to the task that has the fewest bytes of such.

    These are the tasks that its constraint leaves, of the job of the first one that is preferred.
    """
    found: dict[Home, Device] = {}
    nbytes: dict[str, int] = {}
    for partition in graph.partitions.values():
        for shard, first, end in partition.pieces():
            home = partition.container, shard
            if partition.is_mirrored or home not in tied or any(other in found for other in tied[home].homes):
                continue  # beside another part, or what another is kept beside
            devices = chooser.spreading(tied[home])
            found[home] = device = min(devices, key=lambda device: nbytes.get(device.host, 0))
            nbytes[device.host] = nbytes.get(device.host, 0) + partition.spec_of(first, end).nbytes
    return found


def _choose(step: StepGraph, mine: Mapping[int, _Family], tied: Mapping[Home, _Family], chooser: _Chooser) -> None:
    """Give every family of the step a device: those tied down first, then along the edges."""
    spread = _spread(step.graph, tied, chooser) if step.graph.partitions else {}
    for family in mine.values():
        if family.device is None and family.stateful:
            where = next((spread[home] for home in family.homes if home in spread), None)
            family.device = chooser.pick(family, () if where is None else (where,))
    if chooser.has_no_choice:
        for family in mine.values():
            family.device = family.device or chooser.pick(family, ())
        return
    order = list(step.nodes.values())
    consumers = _consumers(step)

    def unplaced(nodes: Iterable[StepNode]) -> Iterator[StepNode]:
        return (node for node in nodes if mine[node.id].device is None)

    for node in unplaced(order):  # inputs come before their consumers
        _follow(mine[node.id], _sources(step, node, mine), chooser)
    for node in unplaced(reversed(order)):
        _follow(mine[node.id], [mine[i].device for i in consumers.get(node.id, ())], chooser)
    for node in unplaced(order):
        if node.inputs:
            _settle(mine[node.id], _sources(step, node, mine), chooser)
    for node in unplaced(order):
        _settle(mine[node.id], [mine[i].device for i in consumers.get(node.id, ())], chooser)


def _settle(family: _Family, others: Sequence[Device | None], chooser: _Chooser) -> None:
    """Choose now: where one of ``others`` is, or the default."""
    family.device = chooser.pick(family, [device for device in others if device is not None])


def _follow(family: _Family, others: Sequence[Device | None], chooser: _Chooser) -> None:
    """Choose where one of ``others`` is, if any is placed; a family that asks for a device chooses at once."""
    placed = [device for device in others if device is not None]
    if placed or family.constraint != ANYWHERE:
        family.device = chooser.pick(family, placed)


def _sources(step: StepGraph, node: StepNode, mine: Mapping[int, _Family]) -> list[Device | None]:
    """Where the inputs of ``node`` are. Reading a variable attracts nobody: parameters travel to their users."""
    return [mine[i].device for i, _ in node.inputs if i != FED and step.nodes[i].op.name != "read_variable"]


def _consumers(step: StepGraph) -> dict[int, list[int]]:
    """The users of each node's outputs. Writing a variable attracts only what has no inputs, such as constants."""
    out: dict[int, list[int]] = {}
    for node in step.nodes.values():
        writes = node.resource is not None
        for source, _ in node.inputs:
            if source != FED and not (writes and step.nodes[source].inputs):
                out.setdefault(source, []).append(node.id)
    return out


def with_halves(supports: Supports) -> Supports:
    """Whether a device computes an op on dtypes: in float32 what it does not on floats of 16 bits (see `widen`)."""

    def able(op: str, dtypes: Sequence[Any], kind: str) -> bool:
        found = supports(op, dtypes, kind)
        if found or writes(op):  # to what is of 16 bits
            return found
        wide = [np.dtype(np.float32) if is_half(dtype) else dtype for dtype in dtypes]
        return wide != list(dtypes) and supports(op, wide, kind)

    return able


class _Chooser:
    """Which devices there are, and which ops run on which."""

    def __init__(
        self,
        step: StepGraph,
        devices: tuple[Device, ...],
        default: Device,
        supports: Supports,
        moved: list[str] | None = None,
    ) -> None:
        self._step, self._devices, self._default = step, devices, default
        self._supports = with_halves(supports)
        self._moved = moved
        self._known: dict[tuple[Any, ...], bool] = {}
        self._sizes = StepSizes(step)
        self._matching: dict[Device, list[Device]] = {}
        self._task: dict[Device, list[Device]] = {}  # the devices of the same task
        self._within: dict[Home, Device] = {}
        tasks: dict[str, list[Device]] = {}
        for device in devices:
            self._task[device] = tasks.setdefault(device.host, [])
            self._task[device].append(device)

    @property
    def has_no_choice(self) -> bool:
        """Whether there is one device alone."""
        return len(self._devices) == 1

    def has(self, device: Device) -> bool:
        """Whether there is that device."""
        return device in self._task

    def runs_all(self) -> bool:
        """Whether the first device has kernels for all of the step."""
        kind = self._devices[0].kind or ""
        return all(self._runs(node, kind) for node in self._step.nodes.values())

    def pick(self, family: _Family, preferred: Sequence[Device]) -> Device:
        """The family's device: a preferred one or its task, the default or its task, else the first that can."""
        candidates = self._candidates(family)
        if len(candidates) == 1:
            return candidates[0]
        nodes = self._nodes(family)
        for device in self._by_preference(candidates, (*preferred, self._default)):
            if all(self._runs(node, device.kind or "") for node in nodes):
                return device
        return next(self._by_preference(candidates, (*preferred, self._default)))

    def able(self, family: _Family) -> list[Device]:
        """Where all of a family runs, in whichever step, or as much of it as may be; the default's task first."""
        candidates = list(dict.fromkeys(self._by_preference(self._candidates(family), (self._default,))))
        nodes = [node for home in family.homes.values() for node in home]
        return [d for d in candidates if all(self._runs(n, d.kind or "") for n in nodes)] or candidates[:1]

    def spreading(self, family: _Family) -> list[Device]:
        """A device of each task that the parts of a variable may be spread over, in order."""
        candidates = self._candidates(family)
        first = next(self._by_preference(candidates, (self._default,)))
        tasks = {device.host: device for device in reversed(candidates) if device.job == first.job}
        return list(tasks.values())[::-1]

    def _by_preference(self, candidates: Sequence[Device], preferred: Sequence[Device]) -> Iterator[Device]:
        for wanted in preferred:
            if wanted in candidates:
                yield wanted
            yield from (device for device in self._task.get(wanted, ()) if device in candidates)
        yield from candidates

    def within(self, family: _Family, home: Home, node: StepNode) -> Device:
        """The device of one home: the family's if it runs there, else another of the same task that runs it."""
        found = self._within.get(home)
        if found is None:
            found = self._within[home] = self._find_within(family, home, node)
        return found

    def _find_within(self, family: _Family, home: Home, node: StepNode) -> Device:
        assert family.device is not None
        if type(home) is int and self._runs(node, family.device.kind or ""):
            return family.device
        nodes: Sequence[StepNode | Node] = family.homes[home] if isinstance(home, tuple) else [node]
        asked = family.asked.get(home, ANYWHERE).kind is not None and not all(n.op.effect for n in nodes)
        movable = not asked or self._moved is not None
        for device in (family.device, *(self._task[family.device] if movable else [])):
            if all(self._runs(n, device.kind or "") for n in nodes):
                if asked and device is not family.device and self._moved is not None:
                    self._moved.append(self._why_moved(nodes, family.device, device))
                return device
        raise self._without_kernel(next(n for n in nodes if not self._runs(n, family.device.kind or "")), family)

    def _candidates(self, family: _Family) -> list[Device]:
        found = self._matching.get(family.constraint)
        if found is None:
            found = [d for d in self._devices if family.constraint.matches(d)]
            if not found and self._moved is not None and family.constraint.kind is not None:
                found = self._of_any_kind(family)
            self._matching[family.constraint] = found
        if not found:
            asker = next(iter(family.askers.values()))
            error = PlacementError(
                f"{asker}: there is no device {family.constraint}; there are {', '.join(map(str, self._devices))}"
                + (f"; {_HOW_TO_HAVE}" if family.constraint.kind not in (None, HOST_KIND) else "")
            )
            error.missing = family.constraint
            raise error
        return found

    def _of_any_kind(self, family: _Family) -> list[Device]:
        """The devices that meet a constraint but for the kind of device it asks for."""
        asked = replace(family.constraint, kind=None, index=None)
        found = [device for device in self._devices if asked.matches(device)]
        if found and self._moved is not None:
            asker = next(iter(family.askers.values()))
            self._moved.append(f"{asker} is elsewhere, as there is no device {family.constraint}")
        return found

    def _why_moved(self, nodes: Sequence[StepNode | Node], asked: Device, device: Device) -> str:
        node = next(n for n in nodes if not self._runs(n, asked.kind or ""))
        dtypes = ", ".join(map(str, self._dtypes(node)))
        return (
            f"{node.op.name} {node.name!r} ({node.site}) is on {device}, as {asked.kind} has no kernel for ({dtypes})"
        )

    def _nodes(self, family: _Family) -> list[StepNode | Node]:
        """Whose kernels decide: those of a resource in whichever step, so that it stays put; else those of the step."""
        if family.stateful:
            return [node for home, nodes in family.homes.items() if isinstance(home, tuple) for node in nodes]
        return list(family.needed)

    def _runs(self, node: StepNode | Node, kind: str) -> bool:
        if node.op.effect:
            return kind == "cpu"
        if kind != HOST_KIND and any(isinstance(value, Plan) for value in node.attrs.values()):
            return runs_apart(node.op.name, node.attrs, partial(self._sizes.fed_to, node), kind, self._supports)
        dtypes = self._dtypes(node)
        key = (node.op.name, dtypes, kind)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._supports(node.op.name, dtypes, kind)
        return found

    def _dtypes(self, node: StepNode | Node) -> tuple[np.dtype[Any], ...]:
        if isinstance(node, StepNode):
            spec = self._step.spec
            return (*[spec(ref).dtype for ref in node.inputs], *[made.dtype for made in node.outputs])
        return (*[t.dtype for t in node.inputs], *[t.dtype for t in node.outputs])

    def _without_kernel(self, node: StepNode | Node, family: _Family) -> PlacementError:
        kinds = sorted({d.kind or "" for d in self._devices})
        has = [kind for kind in kinds if self._runs(node, kind)]
        dtypes = ", ".join(map(str, self._dtypes(node)))
        fix = f"it has one on {', '.join(has)}" if has else f"it has none on any device here ({', '.join(kinds)})"
        if not has and not node.op.__module__.startswith("flowrt."):
            fix += f'; write one, @fr.kernel("{node.op.name}", on="cpu")'
        elif has:
            fix += f'; ask for that, as in fr.device("{has[0]}:0"), or for fr.Options(soft_placement=True)'
        return PlacementError(
            f"{node.op.name} {node.name!r} ({node.site}): no kernel for ({dtypes}) on {family.device}; {fix}"
        )
