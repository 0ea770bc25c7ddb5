"""Whose end of a step says that others have ended it, too.

Law: pure. A task all of whose work goes into small values that it pushes to one other has ended well once that one
has, which needed them all: it need not say so. Where a node may be passed over, nothing follows from an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.net.link import is_small

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowrt.base.plan import Plan


def ends_of(plans: Mapping[str, Plan]) -> dict[str, tuple[str, ...]]:
    """By task of a step: those that have ended it well where that one has."""
    straight = not any(node.op == "switch" for plan in plans.values() for node in plan.nodes)
    readers = {task: reader_of(plan) for task, plan in plans.items()} if straight else {}
    ends = {task: [task] for task in plans}
    for ended in ends.values():
        for task in ended:  # of which there are more meanwhile
            ended += [sender for sender, reader in readers.items() if reader == task and sender not in ended]
    return {task: tuple(ended) for task, ended in ends.items()}


def reader_of(plan: Plan) -> str | None:
    """The one that a plan sends to, where all that it does goes into what it pushes there."""
    starts, specs = plan.value_starts(), plan.value_specs()
    used = {value for node in plan.nodes for value in node.inputs}
    waited_for = {position for node in plan.nodes for position in node.control}
    readers: set[str] = set()
    for position, node in enumerate(plan.nodes):
        if node.op == "send":
            if not is_small(specs[node.inputs[0]]):
                return None
            readers.add(node.attrs["peer"])
        elif position not in waited_for and used.isdisjoint(range(starts[position], starts[position + 1])):
            return None
    return readers.pop() if len(readers) == 1 and not plan.fetches else None
