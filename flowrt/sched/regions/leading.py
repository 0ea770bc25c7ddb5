"""A region in parts, where what it sends is to leave before all of it is done.

Law: pure. What leads is decided beforehand (`flowrt.passes.send_early`); here it is found what that needs. Each part
has all that the sends of one lead need and that is in no part before: so edges go only to the same part or a later one,
and as the region is convex, the parts are, too. What touches a variable whose value is replaced is in one part: others
may write in between, and what they wrote would be lost. Constants are in every part that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flowrt.base.traits import traits_of
from flowrt.sched.regions.regions import CONSTANT, READ, Region, regions_of, resources_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

SEND, BRING = "send", "bring"


class LeadingSend(NamedTuple):
    """By how much a ``value`` of a region leads that is sent; ``brought`` is the node that first brings it out of a
    device's memory, -1 where none has to."""

    lead: int
    value: int
    brought: int


def leading_sends(plan: Plan) -> list[LeadingSend]:
    """What of a plan goes ahead of what waits for the same, the first one first."""
    sends = [node for node in plan.nodes if node.op == SEND and node.attrs.get("lead")]
    if not sends:
        return []
    starts = plan.value_starts()
    brings = {starts[n]: n for n, node in enumerate(plan.nodes) if node.op == BRING}
    found = []
    for node in sends:
        lead, value, brought = int(node.attrs["lead"]), node.inputs[0], brings.get(node.inputs[0], -1)
        found.append(LeadingSend(lead, value if brought < 0 else plan.nodes[brought].inputs[0], brought))
    return sorted(found, key=lambda send: -send.lead)


def parts_of(plan: Plan, region: Region, sends: Sequence[LeadingSend]) -> tuple[Region, ...]:
    """The parts of ``region``, by the ``sends`` that lead, in the order in which they run; itself, if it is one."""
    made = set(region.outputs)
    leads = dict.fromkeys(send.lead for send in sends if send.value in made)
    if not leads:
        return (region,)
    needs = _Needs(plan, region)
    groups = [needs.of([send.value for send in sends if send.lead == lead]) for lead in leads]
    groups.append(needs.rest())
    groups = [group for group in groups if group]
    anywhere = {n for group in groups for n in group if needs.is_anywhere(n)}
    if len(groups) < 2:
        return (region,)
    return regions_of(plan, groups, anywhere, region.outputs)


def brought_out(part: Region, sends: Sequence[LeadingSend]) -> tuple[int, ...]:
    """The nodes that bring what a part makes and sends ahead out of a device's memory: what comes after it waits for
    them, as a device does one thing after another."""
    return tuple(send.brought for send in sends if send.brought >= 0 and send.value in part.outputs)


class _Needs:
    """What is needed of a region, and not done yet."""

    def __init__(self, plan: Plan, region: Region) -> None:
        self._nodes, self._region = plan.nodes, region
        self._makers = {
            first + output: n
            for n, first in zip(region.nodes, region.first, strict=True)
            for output in range(len(plan.nodes[n].outputs))
        }
        self._inside = set(region.nodes)
        read = {self._makers.get(value) for n in region.nodes for value in plan.nodes[n].inputs}
        waited = {before for n in region.nodes for before in plan.nodes[n].control}
        leaving = {self._makers[value] for value in region.outputs}
        self._anywhere = {n for n in region.nodes if n in read and self._is_constant(n)} - waited - leaving
        self._together = self._touching()
        self._done: set[int] = set()

    def is_anywhere(self, position: int) -> bool:
        """Whether a node is in every part that reads it."""
        return position in self._anywhere

    def _is_constant(self, position: int) -> bool:
        node = self._nodes[position]
        return node.op == CONSTANT and not node.control

    def _touching(self) -> dict[int, list[int]]:
        """By each node that touches a variable whose value is replaced, all that do."""
        touching: dict[tuple[str, str], list[int]] = {}
        replaced: set[tuple[str, str]] = set()
        for n in self._region.nodes:
            node, update = self._nodes[n], traits_of(self._nodes[n].op).update
            if node.op == READ or update is not None:
                for name in resources_of(node):
                    touching.setdefault(name, []).append(n)
                    replaced.update([name] if update is not None and update.replaces else ())
        found: dict[int, list[int]] = {}
        for all_that_do in (touching[name] for name in replaced):
            for n in all_that_do:
                found.setdefault(n, []).extend(all_that_do)
        return found

    def of(self, values: Sequence[int]) -> list[int]:
        """The nodes that these values need, in order; from now on they are done."""
        return self._taken(self._makers[value] for value in values if value in self._makers)

    def rest(self) -> list[int]:
        """All that is left."""
        return self._taken(n for n in self._region.nodes if n not in self._anywhere)

    def _taken(self, wanted: Iterator[int]) -> list[int]:
        found, look = set[int](), list(wanted)
        while look:
            n = look.pop()
            if n in found or n in self._done or n not in self._inside:
                continue
            found.add(n)
            node = self._nodes[n]
            look += [self._makers[value] for value in node.inputs if value in self._makers]
            look += node.control
            look += self._together.get(n, ())
        self._done |= found - self._anywhere
        return sorted(found) if found - self._anywhere else []
