"""The plans that masters register with a task: made ready and let go in lanes, a piece at a time.

Decoding and freeing hold the GIL, and with it the event loop: of a large plan at once for a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from flowrt.base import codec
from flowrt.base.collection import free_each, passed_over
from flowrt.base.errors import BrokenStream, InternalError
from flowrt.base.plan import let_go, plan_from_parts
from flowrt.net.link import checked
from flowrt.net.wire.frames import NoRoom
from flowrt.sched.executor import Executor

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.base.spec import Spec
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.rendezvous import Array


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPlan:
    """A registered plan, and the specs of what it receives."""

    executor: Executor
    receives: Mapping[int, Spec]

    def feeds(self, values: Sequence[Any]) -> Sequence[Array]:
        """The plan's feeds, as they came; raises what is wrong with them."""
        feeds = self.executor.plan.feeds
        if len(values) != len(feeds):
            raise BrokenStream(f"a plan of {len(feeds)} feeds was started with {len(values)}")
        return [checked(value, feed.spec, f"the feed {feed.name!r}") for feed, value in zip(feeds, values, strict=True)]

    def received(self, edges: Sequence[int], values: Sequence[Any]) -> dict[int, Array]:
        """What the plan receives, as it came with the start; raises what is wrong with it."""
        return {
            edge: checked(value, self.receives[edge], f"the feed on edge {edge}")
            for edge, value in zip(edges, values, strict=True)
        }


@passed_over()
def make_ready(data: Array | NoRoom, host: Host) -> ReadyPlan:
    """The plan that a master sent, ready to run on ``host``; raises what is wrong with it, and holds none of it."""
    if isinstance(data, NoRoom):
        raise data.error(f"a plan for {host.task}")
    plan = plan_from_parts(codec.unpack_parts(codec.bytes_of(data)))
    nodes = list(plan.nodes)
    try:
        return _ready(plan, host)
    except Exception as error:
        clear_frames(error.__traceback__)
        del plan
        let_go(nodes)
        raise


def _ready(plan: Plan, host: Host) -> ReadyPlan:
    if plan.task != host.task:
        raise InternalError(f"{host.task} got a plan of {plan.task}")
    receives = {n.attrs["edge"]: n.outputs[0] for n in plan.nodes if n.op == "recv"}
    return ReadyPlan(Executor(plan, host), receives)


def dismantle(plans: list[ReadyPlan]) -> None:
    """Free plans that only ``plans`` holds any more."""
    nodes = [node for plan in plans for node in plan.executor.plan.nodes]
    parts = [part for plan in plans for part in vars(plan.executor).values()]
    plans.clear()
    free_each(parts)
    let_go(nodes)
