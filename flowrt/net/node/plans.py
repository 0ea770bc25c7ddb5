"""The plans that masters register with a task: made ready and let go in lanes, a piece at a time.

Decoding and freeing hold the GIL, and with it the event loop: of a large plan at once for a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from flowrt.base import codec
from flowrt.base.collection import free_each, passed_over
from flowrt.base.device import CLIENT
from flowrt.base.errors import InternalError, ResourceError
from flowrt.base.plan import let_go, plan_from_parts
from flowrt.net.link import checked, is_small
from flowrt.net.wire.frames import NoRoom
from flowrt.sched.drivers.closed import Closed
from flowrt.sched.executor import Executor

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.base.spec import Spec
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.lanes import Lanes
    from flowrt.sched.host.rendezvous import Array


@dataclass(slots=True, eq=False)
class ReadyPlan:
    """A registered plan, and the specs of what it receives.

    Of one that only computes between what others push here and what it pushes itself, ``comes`` are the edges of that,
    and ``goes`` the nodes that send this, each with its place among what a run answers. Of one that is ``silent``
    nobody has to be told that a run has ended well.
    """

    executor: Executor
    receives: Mapping[int, Spec]
    comes: tuple[int, ...] = ()
    goes: tuple[tuple[PlanNode, int], ...] = ()
    silent: bool = False
    _closed: Closed | None = None  # as which it ran last

    @property
    def fetches(self) -> int:
        """How many of what a run answers are fetches."""
        return len(self.executor.plan.fetches)

    def run_now(self, given: Sequence[Any], number: int, seed: int) -> list[Array] | None:
        """The fetches, where the plan is a short tape that was made before, and its variables are free; else None.

        ``given`` are its feeds, and then what came; behind the fetches is what goes. Raises what is wrong with feeds.
        While the host is traced, what comes and goes is left to the step machine, which tells of that.
        """
        if self.executor.host.tracer is not None and (self.comes or self.goes):
            return None
        closed = self._closed
        if closed is None or closed.seed != seed:
            alone = self.executor.alone if self.comes or self.goes else None
            closed = self._closed = Closed(self.executor, seed, "the client", alone)
        return closed.run_now(given, number)

    def received(self, edges: Sequence[int], values: Sequence[Any]) -> dict[int, Array]:
        """What the plan receives, as it came with the start; raises what is wrong with it."""
        return {
            edge: checked(value, self.receives[edge], f"the feed on edge {edge}")
            for edge, value in zip(edges, values, strict=True)
        }


@passed_over()
def make_ready(data: Array | NoRoom, host: Host, silent: bool = False) -> ReadyPlan:
    """The plan that a master sent, ready to run on ``host``; raises what is wrong with it, and holds none of it."""
    if isinstance(data, NoRoom):
        raise data.error(f"a plan for {host.task}")
    plan = plan_from_parts(codec.unpack_parts(codec.bytes_of(data)))
    nodes = list(plan.nodes)
    try:
        return _ready(plan, host, silent)
    except Exception as error:
        clear_frames(error.__traceback__)
        del plan
        let_go(nodes)
        raise


def _ready(plan: Plan, host: Host, silent: bool) -> ReadyPlan:
    if plan.task != host.task:
        raise InternalError(f"{host.task} got a plan of {plan.task}")
    receives = {n.attrs["edge"]: n.outputs[0] for n in plan.nodes if n.op == "recv"}
    executor = Executor(plan, host)
    return ReadyPlan(executor, receives, *_pushed(executor), silent)


def _pushed(executor: Executor) -> tuple[tuple[int, ...], tuple[tuple[PlanNode, int], ...]]:
    """What a plan that is a region between them receives and sends, where all of that is always pushed."""
    alone, task = executor.alone, executor.host.task
    if alone is None or alone.is_closed:
        return (), ()
    specs = executor.plan.value_specs()
    comes = [(node, node.outputs[0]) for node in alone.receives]
    goes = [(node, specs[node.inputs[0]]) for node in alone.sends]
    if not all(_is_pushed(spec, node.attrs["peer"], task) for node, spec in (*comes, *goes)):
        return (), ()
    at = {value: place for place, value in enumerate(alone.wanted)}
    sends = tuple([(node, at[node.inputs[0]]) for node in alone.sends])
    return tuple([node.attrs["edge"] for node in alone.receives]), sends


def _is_pushed(spec: Spec, peer: str, task: str) -> bool:
    """Whether values of ``spec`` between a task and ``peer`` always go unasked."""
    return is_small(spec) and peer not in (CLIENT, task)


async def dismantle_in(lanes: Lanes, plans: list[ReadyPlan]) -> None:
    """`dismantle` in a lane; where there can be none, they go as anything does that nobody holds."""
    with suppress(ResourceError):
        await lanes.run(dismantle, plans)


def dismantle(plans: list[ReadyPlan]) -> None:
    """Free plans that only ``plans`` holds any more."""
    nodes = [node for plan in plans for node in plan.executor.plan.nodes]
    parts = [part for plan in plans for part in vars(plan.executor).values()]
    plans.clear()
    free_each(parts)
    let_go(nodes)
