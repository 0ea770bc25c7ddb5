"""What of the values that a task exchanges with its client goes with the start and the end of a step.

Law: pure. What a plan says is small is a feed or a fetch of it, as in a step that has no client: it comes with the
start, or goes with the end, so a task that exchanges nothing else has nothing to wait for. All else is received and
sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flowrt.base.device import CLIENT
from flowrt.base.plan import Plan, PlanFeed, PlanNode
from flowrt.base.valueclass import maker, valueclass
from flowrt.net.link import INLINE, is_small

_make_node = maker(PlanNode)


@valueclass
class ClosedPlan:
    """A plan that is ``fed`` what would come by these edges, and whose fetches would go by those of ``fetched``."""

    plan: Plan
    fed: tuple[int, ...]
    fetched: tuple[int, ...]


def close(plan: Plan, given: Collection[int]) -> ClosedPlan:
    """The plan to ship for one that the client gives values by the edges ``given``, and that sends values to it."""
    fed, fetched = _to_and_fro(plan, given)
    if not fed and not fetched:
        return ClosedPlan(plan, (), ())
    nodes, starts, away = plan.nodes, plan.value_starts(), {*fed, *fetched}
    left = [position for position in range(len(nodes)) if position not in away]
    values = [value for position in (*fed, *left) for value in range(starts[position], starts[position + 1])]
    value = {old: new for new, old in enumerate(values)}
    place = {old: new for new, old in enumerate(left)}
    feeds = tuple([PlanFeed(node.name, node.outputs[0], node.site) for node in (nodes[position] for position in fed)])
    fetches = tuple([value[nodes[position].inputs[0]] for position in fetched])
    edges = [tuple([nodes[position].attrs["edge"] for position in some]) for some in (fed, fetched)]
    moved = tuple([_moved(nodes[position], value, place) for position in left])
    return ClosedPlan(Plan(plan.task, moved, feeds, fetches), *edges)


def _to_and_fro(plan: Plan, given: Collection[int]) -> tuple[list[int], list[int]]:
    """The nodes that receive from the client what becomes a feed, and those that send it what becomes a fetch."""
    fed: list[int] = []
    fetched: list[int] = []
    if plan.feeds or plan.fetches:  # they are others', as there is no client
        return fed, fetched
    specs, waited_for = plan.value_specs(), {position for node in plan.nodes for position in node.control}
    for position, node in enumerate(plan.nodes):
        if node.attrs.get("peer") != CLIENT:
            continue
        if node.op == "recv" and node.attrs["edge"] in given and is_small(node.outputs[0]) and not node.control:
            fed.append(position)
        elif node.op == "send" and is_small(specs[node.inputs[0]]) and position not in waited_for:
            fetched.append(position)
    return fed[:INLINE], fetched[:INLINE]


def _moved(node: PlanNode, value: Mapping[int, int], place: Mapping[int, int]) -> PlanNode:
    """``node`` where values and nodes have these numbers; what has none is there before anything begins."""
    inputs = tuple([value[each] for each in node.inputs])
    control = tuple([place[each] for each in node.control if each in place])
    moved: PlanNode = _make_node(node.op, node.name, inputs, node.outputs, node.attrs, control, node.device, node.site)
    return moved
