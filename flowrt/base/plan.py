"""What crosses from meaning to doing: the frozen description of one task's part of a step.

Values are numbered: a plan's feeds come first, then every node's outputs in node order. Nodes stand in a topological
order of their data and control inputs; only a merge refers to what comes later, a ``next_iteration``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from flowrt.base.errors import BrokenStream, SpecError
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass

DEEPEST = 16  # bodies inside bodies
LONG = 1 << 10  # inputs of a node that travel as one array, as a part has room for a bounded number of values
_FEW, _MADE = 4, 1 << 12  # so many outputs of a node are made once for all that have the like, of so many kinds

# what reading a plan out of data that is none trips over
_NO_PLAN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, SpecError)


@valueclass
class PlanNode:
    """One op to run: ``inputs`` are value ids, ``control`` node positions, ``device`` is local (``cpu:0``)."""

    op: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[Spec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    control: tuple[int, ...] = ()
    device: str = "cpu:0"
    site: str = ""

    def where(self) -> str:
        """How errors name this node."""
        return f"{self.op} {self.name!r} ({self.site})"


@valueclass
class PlanFeed:
    """A value the step is given; ``name`` and ``site`` are for errors."""

    name: str
    spec: Spec
    site: str = ""


@valueclass
class Plan:
    """One task's part of a step. ``fetches`` are value ids; every node is run.

    A value on a switch's dead side may be fetched only where ``fetches`` raise `DeadTensorError` for it.
    """

    task: str
    nodes: tuple[PlanNode, ...]
    feeds: tuple[PlanFeed, ...] = ()
    fetches: tuple[int, ...] = ()

    def value_starts(self) -> list[int]:
        """The id of the first output of each node, and one past the last value."""
        return _starts(self.feeds, self.nodes)

    def value_specs(self) -> list[Spec]:
        """The static spec of every value, by id."""
        return [feed.spec for feed in self.feeds] + [spec for node in self.nodes for spec in node.outputs]


def resources_in(attrs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The (container, name) of what a node of these attributes works on: ``resource``, then its ``slots``; or all that
    its bodies work on."""
    if not attrs:
        return ()
    name, slots = attrs.get("resource"), attrs.get("slots", ())
    if name is None or not isinstance(slots, tuple):
        if Plan not in map(type, attrs.values()):
            return ()
        bodies = [value for value in attrs.values() if isinstance(value, Plan)]
        return tuple(dict.fromkeys(key for body in bodies for node in body.nodes for key in resources_in(node.attrs)))
    first = str(attrs.get("container", "")), str(name)
    return (first, *[(first[0], str(slot)) for slot in slots]) if slots else (first,)


def spec_to_data(spec: Spec) -> dict[str, Any]:
    """A spec as the codec takes it."""
    return {"dtype": spec.dtype.name, "shape": spec.dims, "value": spec.value}


def spec_from_data(data: Any) -> Spec:
    """The spec that `spec_to_data` made ``data`` of."""
    return Spec(data["dtype"], data["shape"], data["value"])


def attrs_to_data(attrs: Mapping[str, Any], body: Callable[[Plan], Any] | None = None) -> dict[str, Any]:
    """Attributes for the codec: a body becomes a map (``body`` makes it), which no other attribute is."""
    write = body or plan_to_data
    return {name: write(value) if isinstance(value, Plan) else value for name, value in attrs.items()}


def attrs_from_data(data: Mapping[str, Any], body: Callable[[Any], Plan] | None = None) -> dict[str, Any]:
    """The attributes that `attrs_to_data` wrote; raises `BrokenStream` for a body that is none."""
    read = body or plan_from_data
    attrs = {name: read(value) if isinstance(value, dict) else value for name, value in data.items()}
    for value in attrs.values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return attrs


# ── as one message ───────────────────────────────────────────────────────────────────────────────────────────────────


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """``plan`` as plain data for the codec."""
    return {
        "task": plan.task,
        "feeds": [_feed_to_data(feed) for feed in plan.feeds],
        "fetches": plan.fetches,
        "nodes": [_node_to_data(node, plan_to_data) for node in plan.nodes],
    }


def plan_from_data(data: Any) -> Plan:
    """The plan that `plan_to_data` wrote, checked; raises `BrokenStream` for anything else."""
    try:
        feeds = tuple(_feed_from_data(f) for f in data["feeds"])
        nodes = tuple(_node_from_data(n, plan_from_data) for n in data["nodes"])
        plan = Plan(str(data["task"]), nodes, feeds, tuple(int(v) for v in data["fetches"]))
    except _NO_PLAN as error:
        raise BrokenStream(f"not a plan: {error!r}") from error
    _check_order(plan.feeds, plan.nodes, plan.fetches)
    return plan


# ── in parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_to_parts(plan: Plan) -> Iterator[dict[str, Any]]:
    """``plan`` as plain data in small parts: its head, then each feed and each node.

    A node holds but the heads of its bodies, whose feeds and nodes come right after it.
    """
    yield _head(plan)
    yield from _inside(plan, 0)


def plan_from_parts(parts: Iterator[Any]) -> Plan:
    """The plan that `plan_to_parts` wrote, checked; raises `BrokenStream` for anything else."""
    plan = _read_parts(_next(parts), parts, 0)
    for _ in parts:
        raise BrokenStream("not a plan: more parts came than its heads tell of")
    return plan


def too_large(part: Mapping[str, Any]) -> str:
    """What an error says of a part that is beyond what a part may be."""
    if "op" not in part:
        return "a plan's head or feed"
    return (
        f"{part['op']} {part['name']!r} ({part['site']}), of {len(part['outputs'])} outputs, is too large to be sent "
        "to another task; make several of it, with fewer outputs or shorter attributes"
    )


def let_go(nodes: list[PlanNode]) -> None:
    """Free nodes that only ``nodes`` holds any more, and their bodies', one by one.

    To free those of a large plan at once would hold the GIL as long as to decode it at once.
    """
    while nodes:
        nodes += [n for value in nodes.pop().attrs.values() if isinstance(value, Plan) for n in value.nodes]


def _head(plan: Plan) -> dict[str, Any]:
    return {"task": plan.task, "feeds": len(plan.feeds), "fetches": plan.fetches, "nodes": len(plan.nodes)}


def _inside(plan: Plan, depth: int) -> Iterator[dict[str, Any]]:
    if depth > DEEPEST:
        raise SpecError(f"a plan holds bodies inside bodies, more than {DEEPEST} deep")
    yield from map(_feed_to_data, plan.feeds)
    for node in plan.nodes:
        yield _node_to_data(node, _head)
        for value in node.attrs.values():
            if isinstance(value, Plan):
                yield from _inside(value, depth + 1)


def _read_parts(head: Any, parts: Iterator[Any], depth: int) -> Plan:
    if depth > DEEPEST:
        raise BrokenStream(f"not a plan: bodies inside bodies, more than {DEEPEST} deep")

    def body(head: Any) -> Plan:
        return _read_parts(head, parts, depth + 1)

    nodes: list[PlanNode] = []
    try:
        task, fetches = str(head["task"]), tuple(int(v) for v in head["fetches"])
        feeds = tuple(_feed_from_data(_next(parts)) for _ in range(_count(head["feeds"])))
        nodes.extend(_node_from_data(_next(parts), body) for _ in range(_count(head["nodes"])))
        _check_order(feeds, nodes, fetches)
    except BrokenStream:
        let_go(nodes)
        raise
    except _NO_PLAN as error:
        let_go(nodes)
        raise BrokenStream(f"not a plan: {error!r}") from error
    return Plan(task, tuple(nodes), feeds, fetches)


def _count(told: Any) -> int:
    if type(told) is not int or told < 0:
        raise ValueError(f"{told!r:.80} is not a number of parts")
    return told


def _next(parts: Iterator[Any]) -> Any:
    for part in parts:
        return part
    raise BrokenStream("not a plan: fewer parts came than its heads tell of")


def _feed_to_data(feed: PlanFeed) -> dict[str, Any]:
    return {"name": feed.name, "spec": spec_to_data(feed.spec), "site": feed.site}


def _feed_from_data(data: Any) -> PlanFeed:
    return PlanFeed(str(data["name"]), spec_from_data(data["spec"]), str(data["site"]))


def _node_to_data(node: PlanNode, body: Callable[[Plan], Any]) -> dict[str, Any]:
    return {
        "op": node.op,
        "name": node.name,
        "inputs": _numbers_to_data(node.inputs),
        "outputs": [spec_to_data(s) for s in node.outputs],
        "attrs": attrs_to_data(node.attrs, body),
        "control": _numbers_to_data(node.control),
        "device": node.device,
        "site": node.site,
    }


def _numbers_to_data(numbers: tuple[int, ...]) -> Any:
    return numbers if len(numbers) <= LONG else np.asarray(numbers, np.int64)


def _node_from_data(data: Any, body: Callable[[Any], Plan]) -> PlanNode:
    return PlanNode(
        str(data["op"]),
        str(data["name"]),
        tuple(int(v) for v in data["inputs"]),
        _outputs_from_data(data["outputs"]),
        attrs_from_data(data["attrs"], body),
        tuple(int(c) for c in data["control"]),
        str(data["device"]),
        str(data["site"]),
    )


def _outputs_from_data(data: Any) -> tuple[Spec, ...]:
    told = tuple([(each["dtype"], each["shape"], each["value"]) for each in data])
    return _outputs(told) if len(told) <= _FEW else tuple([Spec(*each) for each in told])


@lru_cache(_MADE)
def _outputs(told: tuple[tuple[Any, Any, Any], ...]) -> tuple[Spec, ...]:
    """The outputs of all nodes that are alike in them: most of a large plan's nodes are, and the collector looks at
    every object that there is."""
    return tuple([Spec(*each) for each in told])


def _check_order(feeds: Sequence[PlanFeed], nodes: Sequence[PlanNode], fetches: Sequence[int]) -> None:
    starts = _starts(feeds, nodes)
    iterations = _next_iterations(nodes, starts)
    for position, node in enumerate(nodes):
        inputs = [v for v in node.inputs if v not in iterations] if node.op == "merge" else node.inputs
        _check_range(node.where(), inputs, starts[position])
        _check_range(node.where(), node.control, position)
    _check_range("fetches", fetches, starts[-1])


def _starts(feeds: Sequence[PlanFeed], nodes: Iterable[PlanNode]) -> list[int]:
    """The id of the first output of each node, and one past the last value."""
    return list(accumulate((len(node.outputs) for node in nodes), initial=len(feeds)))


def _next_iterations(nodes: Sequence[PlanNode], starts: Sequence[int]) -> frozenset[int]:
    """What a merge may refer to although it comes later: it is of the iteration before."""
    return frozenset(start for start, node in zip(starts, nodes, strict=False) if node.op == "next_iteration")


def _check_range(where: str, ids: Sequence[int], bound: int) -> None:
    for i in ids:
        if not 0 <= i < bound:
            raise BrokenStream(f"not a plan: {where} refers to {i}, which does not come before it")
