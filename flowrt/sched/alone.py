"""A plan that computes one region, between what comes and what goes: its inputs are there before, its outputs go after.

Law: pure. What receives and sends a plan has beside its region are such that to have all that comes first, then to run
the region, and then to send all is what the step machine would do, too: the region waits for all that is received, and
nothing is sent that it does not make. A region of a device whose memory is not the host's is a `Visit`, where nothing
but what is brought of it comes after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.device import is_apart
from flowrt.base.plan import PlanFeed
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.units import Unit


@valueclass
class Alone:
    """The ``unit`` that is a plan's one region.

    ``given`` are the values that are there before it: the plan's feeds, and then what ``receives`` answer; ``feeds``
    says what they are. ``wanted`` are those that go after it: the plan's fetches, and then what ``sends`` send besides.
    """

    unit: Unit
    receives: tuple[PlanNode, ...]
    sends: tuple[PlanNode, ...]
    feeds: tuple[PlanFeed, ...]
    given: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Which of what is given each input of the region is."""
        at = {value: place for place, value in enumerate(self.given)}
        return tuple([at[value] for value in self.unit.inputs])

    @property
    def is_closed(self) -> bool:
        """Whether it exchanges nothing with others while it runs."""
        return not (self.receives or self.sends)


def find_alone(plan: Plan, units: Sequence[Unit]) -> Alone | None:
    """The one region of a plan of these units that computes nothing else, if it is such a plan."""
    regions = [unit for unit in units if unit.region is not None]
    around = {unit.nodes[0]: unit for unit in units if unit.region is None}
    if len(regions) != 1 or any(plan.nodes[position].op not in ("recv", "send") for position in around):
        return None
    region = regions[0]
    comes = {n: unit for n, unit in around.items() if plan.nodes[n].op == "recv"}
    goes = {n: unit for n, unit in around.items() if plan.nodes[n].op == "send"}
    if not (_waits_for_all(region, comes) and _makes_all(region, goes, {*region.nodes, *comes})):
        return None
    fed, received = range(len(plan.feeds)), [unit.outputs[0] for unit in comes.values()]
    fetched, sent = {*plan.fetches}, dict.fromkeys([unit.inputs[0] for unit in goes.values()])
    wanted = (*plan.fetches, *[value for value in sent if value not in fetched])
    if not fetched <= {*fed, *region.outputs}:
        return None
    receives, sends = (tuple([plan.nodes[n] for n in some]) for some in (comes, goes))
    feeds = (*plan.feeds, *[PlanFeed(node.name, node.outputs[0], node.site) for node in receives])
    return Alone(region, receives, sends, feeds, (*fed, *received), wanted)


def _waits_for_all(region: Unit, comes: dict[int, Unit]) -> bool:
    """Whether a region waits for all that comes, which itself waits for nothing, and for nothing else."""
    inputs, control = {*region.inputs}, {*region.control}
    awaited = all(unit.outputs[0] in inputs or n in control for n, unit in comes.items())
    return awaited and control <= {*comes} and not any(unit.control for unit in comes.values())


def _makes_all(region: Unit, goes: dict[int, Unit], before: set[int]) -> bool:
    """Whether a region makes all that goes, which waits for nothing but what was ``before``."""
    outputs = {*region.outputs}
    return all(unit.inputs[0] in outputs and before.issuperset(unit.control) for unit in goes.values())


@valueclass
class Visit:
    """The ``unit`` of a plan that is issued to a device; ``wanted`` are, for each fetch, the value it is brought of."""

    unit: Unit
    wanted: tuple[int, ...]


def find_visit(plan: Plan, units: Sequence[Unit]) -> Visit | None:
    """The region of a plan of these units that does nothing else but bring its results to the host, if it is such."""
    issued = [unit for unit in units if unit.issued is not None]
    if len(issued) != 1:
        return None
    (unit,) = issued
    fed = range(len(plan.feeds))
    source = {value: value for value in (*fed, *unit.outputs)}
    for other in units:
        if other is not unit:
            node = plan.nodes[other.nodes[0]]
            brings = node.op == "bring" and not is_apart(node.device) and not other.control
            if not brings or other.inputs[0] not in unit.outputs:
                return None
            source[other.outputs[0]] = other.inputs[0]
    if unit.control or not set(unit.inputs) <= set(fed) or not set(plan.fetches) <= source.keys():
        return None
    return Visit(unit, tuple(source[value] for value in plan.fetches))
