"""Carries out the ops of replicated training on a host: obeys `Shard` and `Coordinator`, which decide.

Law: a group is one server's part of one trainer, found by (container, group, server). The values decide; this file
keeps the newest of each, wakes those who wait for a set, checks numbers and averages arrays. A message of another run
of the trainer changes nothing: an update is late, any other op raises `StepCancelled`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.errors import FlowrtError, GraphError, InternalError, NodeLost, StepCancelled
from flowrt.sched.coordinator import Cause, Coordinator, Outcome, Stuck
from flowrt.sched.effects import effect
from flowrt.sched.quorum import AllOf, FirstOf, Policy, Verdict
from flowrt.sched.shard import Shard

if TYPE_CHECKING:
    from flowrt.plan import PlanNode
    from flowrt.sched.host import Host, RunContext
    from flowrt.sched.rendezvous import Array

Parts: TypeAlias = "tuple[Array, ...]"
T = TypeVar("T")

VERDICTS = tuple(Verdict)
"""What the verdict codes of `hold_update` and `offer_update` mean."""
OUTCOMES = tuple(Outcome)
"""What the outcome codes of `publish_version` mean."""

INLINE_BYTES = 1 << 18  # looking at more takes longer than a hop to a lane


def policy_to_data(policy: Policy) -> tuple[Any, ...]:
    """``policy`` as an attribute of `start_group`; raises `GraphError` for one that nodes do not know."""
    match policy:
        case AllOf():
            return ("all",)
        case FirstOf(updates):
            return ("first", updates)
        case _:
            raise GraphError(f"{policy!r} is not a policy; use AllOf() or FirstOf(m)")


def policy_from_data(data: Sequence[Any]) -> Policy:
    """The policy that `policy_to_data` wrote."""
    match tuple(data):
        case ("all",):
            return AllOf()
        case ("first", int(updates)):
            return FirstOf(updates)
        case _:
            raise GraphError(f"{data!r} is not a policy that this node knows")


@dataclass(eq=False, slots=True)
class Group:
    """What one server keeps of one run of a trainer; only server 0 has a coordinator."""

    run: int
    shard: Shard[Parts]
    coordinator: Coordinator | None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def decide(self, coordinator: Coordinator) -> None:
        """Go on with ``coordinator``, and wake who waits for what it knows."""
        self.coordinator = coordinator
        self.wake()

    def wake(self) -> None:
        """Let all who wait for news look again."""
        self.changed.set()
        self.changed = asyncio.Event()


def _key(node: PlanNode) -> tuple[str, str, int]:
    return node.attrs["container"], node.attrs["group"], node.attrs.get("server", 0)


def _find(host: Host, node: PlanNode, turn: Array) -> Group | None:
    """The group, or None if ``turn`` is of another run of the trainer."""
    group: Group | None = host.replicas.get(_key(node))
    return group if group is not None and group.run == int(turn[0]) else None


def _need(host: Host, node: PlanNode, turn: Array) -> Group:
    group = _find(host, node, turn)
    if group is None:
        raise StepCancelled(f"{node.where()}: another run of the trainer has begun on {host.task}, or it was reset")
    return group


def _coordinator(group: Group, node: PlanNode) -> Coordinator:
    if group.coordinator is None:
        raise InternalError(f"{node.where()}: only server 0 coordinates")
    return group.coordinator


def _code(verdict: Verdict) -> Array:
    return np.asarray(VERDICTS.index(verdict), np.int64)


async def _in_lane_if_long(host: Host, nbytes: int, function: Callable[..., T], *args: Any) -> T:
    return function(*args) if nbytes <= INLINE_BYTES else await host.lanes.run(function, *args)


@effect
async def start_group(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Begin a group of replicas anew at a version; who waits for the one before finds it gone."""
    run, version = (int(n) for n in inputs[0])
    attrs = node.attrs
    replicas, server = attrs["replicas"], attrs["server"]
    coordinator = None
    if server == 0:
        policy = policy_from_data(attrs["policy"])
        coordinator = Coordinator.start(policy, replicas, attrs["servers"], version=version, allowed=1 << 62)
    before: Group | None = host.replicas.get(_key(node))
    host.replicas[_key(node)] = Group(run, Shard.start(replicas, version), coordinator)
    if before is not None:
        before.wake()
    return ()


@effect
async def begin_update(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Whether the replica may compute an update of that version."""
    group = _find(host, node, inputs[0])
    if group is None:
        return (np.asarray(False),)
    coordinator, replica = _coordinator(group, node), node.attrs["replica"]
    may = int(inputs[0][1]) == coordinator.version and not coordinator.begun(replica)
    if may:
        coordinator = coordinator.ready(replica, coordinator.spent[replica] + 1)
        may = coordinator.begun(replica) > 0
    group.decide(coordinator)
    return (np.asarray(may),)


@effect
async def hold_update(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Keep copies of an update's parts on this server, unless they come late or are not finite."""
    turn, *parts = inputs
    nbytes = sum(part.nbytes for part in parts)
    kept, finite = await _in_lane_if_long(host, nbytes, _keep, parts)
    group = _find(host, node, turn)
    if group is None:
        return (_code(Verdict.LATE),)
    group.shard, verdict = group.shard.hold(int(turn[1]), node.attrs["replica"], kept, finite)
    return (_code(verdict),)


def _keep(parts: Sequence[Array]) -> tuple[Parts, bool]:
    """Copies of ``parts``, which outlive the step's memory, and whether all their numbers are finite."""
    return tuple(np.array(part) for part in parts), all(bool(np.isfinite(part).all()) for part in parts)


@effect
async def offer_update(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Tell the coordinator what every server said of an update; answers its verdict."""
    turn, *verdicts = inputs
    group = _find(host, node, turn)
    if group is None:
        return (_code(Verdict.LATE),)
    replica, version, now = node.attrs["replica"], int(turn[1]), time.monotonic()
    coordinator, last = _coordinator(group, node), Verdict.LATE
    for server, code in enumerate(verdicts):
        said = VERDICTS[int(code)]
        if said is Verdict.LATE:
            last = Verdict.LATE
            break
        coordinator, last = coordinator.held(server, version, replica, said is not Verdict.REFUSED, now)
    group.decide(coordinator)
    return (_code(last),)


@effect
async def await_quorum(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """The replicas that a version is made of, once that is decided. Raises where it cannot be any more."""
    while True:
        group = _need(host, node, inputs[0])
        coordinator = _coordinator(group, node)
        decided = coordinator.decided(int(inputs[0][1]))
        if decided is not None:
            group.coordinator, _ = coordinator.order()
            return (np.array(decided, np.int64),)
        stuck = coordinator.stuck()
        if stuck is not None:
            raise _why(stuck)
        await group.changed.wait()


def _why(stuck: Stuck) -> FlowrtError:
    if stuck.cause is Cause.LOST:
        return NodeLost(str(stuck))
    return FlowrtError(f"{stuck}; lower the learning rate, or clip the gradients by optim.clip_by_global_norm")


@effect
async def take_updates(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """The mean of the decided replicas' updates held here, once per version."""
    turn, replicas = inputs
    group = _need(host, node, turn)
    group.shard, updates = group.shard.take(int(turn[1]), tuple(int(replica) for replica in replicas))
    if updates is None:
        raise InternalError(f"{node.where()}: version {int(turn[1])} is applied already")
    nbytes = sum(part.nbytes for update in updates for part in update)
    return await _in_lane_if_long(host, nbytes, _means, updates)


def _means(updates: Sequence[Parts]) -> Parts:
    """The mean of each part, added up in replica order, so that it does not depend on who came first."""
    return tuple(_mean(column) for column in zip(*updates, strict=True))


def _mean(arrays: Sequence[Array]) -> Array:
    total = np.array(arrays[0])
    for array in arrays[1:]:
        total += array
    total /= len(arrays)
    return total


@effect
async def publish_shard(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Note that this server's shard is at the next version, which is answered."""
    group = _need(host, node, inputs[0])
    group.shard = group.shard.applied(int(inputs[0][1]))
    return (np.asarray(group.shard.version, np.int64),)


@effect
async def publish_version(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Open the next version; answers what became of every replica's update."""
    turn, *versions = inputs
    group, version = _need(host, node, turn), int(turn[1])
    coordinator = _coordinator(group, node)
    for server in range(len(versions)):
        coordinator = coordinator.publish(server, version)
    group.decide(coordinator)
    receipts = coordinator.receipts(version) or ()
    replicas = np.array([receipt.replica for receipt in receipts], np.int64)
    return replicas, np.array([OUTCOMES.index(receipt.outcome) for receipt in receipts], np.int64)


@effect
async def lose_replicas(host: Host, context: RunContext, node: PlanNode, inputs: Sequence[Array]) -> Sequence[Array]:
    """Tell the coordinator, if the group is still there, of replicas that will not come back."""
    turn, replicas = inputs
    group = _find(host, node, turn)
    if group is not None:
        coordinator = _coordinator(group, node)
        for replica in replicas:
            coordinator = coordinator.lost(int(replica))
        group.decide(coordinator)
    return ()
