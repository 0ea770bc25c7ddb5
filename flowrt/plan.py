"""What crosses from meaning to doing: the frozen description of one task's part of a step.

Values are numbered: a plan's feeds come first, then every node's outputs in node order. Nodes stand in a topological
order of their data and control inputs; only a merge refers to what comes later, a ``next_iteration``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from flowrt.errors import BrokenStream, SpecError
from flowrt.spec import Spec
from flowrt.valueclass import valueclass


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
        starts = [len(self.feeds)]
        for node in self.nodes:
            starts.append(starts[-1] + len(node.outputs))
        return starts

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
        bodies = [value for value in attrs.values() if isinstance(value, Plan)]
        if not bodies:
            return ()
        return tuple(dict.fromkeys(key for body in bodies for node in body.nodes for key in resources_in(node.attrs)))
    return tuple((str(attrs.get("container", "")), str(each)) for each in (name, *slots))


def spec_to_data(spec: Spec) -> dict[str, Any]:
    """A spec as the codec takes it."""
    return {"dtype": spec.dtype.name, "shape": spec.dims, "value": spec.value}


def spec_from_data(data: Any) -> Spec:
    """The spec that `spec_to_data` made ``data`` of."""
    return Spec(data["dtype"], data["shape"], data["value"])


def attrs_to_data(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes for the codec: a body becomes a map, which no other attribute is."""
    return {name: plan_to_data(value) if isinstance(value, Plan) else value for name, value in attrs.items()}


def attrs_from_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that `attrs_to_data` wrote; raises `BrokenStream` for a body that is none."""
    attrs = {name: plan_from_data(value) if isinstance(value, dict) else value for name, value in data.items()}
    for value in attrs.values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return attrs


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """``plan`` as plain data for the codec."""
    return {
        "task": plan.task,
        "feeds": [{"name": f.name, "spec": spec_to_data(f.spec), "site": f.site} for f in plan.feeds],
        "fetches": plan.fetches,
        "nodes": [
            {
                "op": n.op,
                "name": n.name,
                "inputs": n.inputs,
                "outputs": [spec_to_data(s) for s in n.outputs],
                "attrs": attrs_to_data(n.attrs),
                "control": n.control,
                "device": n.device,
                "site": n.site,
            }
            for n in plan.nodes
        ],
    }


def plan_from_data(data: Any) -> Plan:
    """The plan that `plan_to_data` wrote, checked; raises `BrokenStream` for anything else."""
    try:
        feeds = tuple(PlanFeed(str(f["name"]), spec_from_data(f["spec"]), str(f["site"])) for f in data["feeds"])
        nodes = tuple(_node_from_data(n) for n in data["nodes"])
        plan = Plan(str(data["task"]), nodes, feeds, tuple(int(v) for v in data["fetches"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, SpecError) as error:
        raise BrokenStream(f"not a plan: {error!r}") from error
    _check_order(plan)
    return plan


def _node_from_data(data: Any) -> PlanNode:
    return PlanNode(
        str(data["op"]),
        str(data["name"]),
        tuple(int(v) for v in data["inputs"]),
        tuple(spec_from_data(s) for s in data["outputs"]),
        attrs_from_data(data["attrs"]),
        tuple(int(c) for c in data["control"]),
        str(data["device"]),
        str(data["site"]),
    )


def _check_order(plan: Plan) -> None:
    starts = plan.value_starts()
    turns = _next_turns(plan, starts)
    for position, node in enumerate(plan.nodes):
        inputs = [v for v in node.inputs if v not in turns] if node.op == "merge" else node.inputs
        _check_range(node.where(), inputs, starts[position])
        _check_range(node.where(), node.control, position)
    _check_range("fetches", plan.fetches, starts[-1])


def _next_turns(plan: Plan, starts: Sequence[int]) -> frozenset[int]:
    """What a merge may refer to although it comes later: it is of the turn before."""
    return frozenset(start for start, node in zip(starts, plan.nodes, strict=False) if node.op == "next_iteration")


def _check_range(where: str, ids: Sequence[int], bound: int) -> None:
    for i in ids:
        if not 0 <= i < bound:
            raise BrokenStream(f"not a plan: {where} refers to {i}, which does not come before it")
