"""A server dies whose variables others hold too: every moment of a run, searched to exhaustion.

The coordinator, the shards, what servers remember of orders and `opening.decide` are the shipped ones. Messages may be
delivered late or never, one server dies at any moment, and those that are left end the run and open the next. Then they
come to one version by the sets that were ordered; it is no older than any that was reported; and whatever was applied
and never reported is known, with its set and its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from replica_world import Violation

from flowrt.base.collection import held_back
from flowrt.base.valueclass import replace
from flowrt.sched.drivers.messages import ApplyOrder, Report
from flowrt.sched.policies import AllOf, FirstOf, Policy
from flowrt.sched.server.standing_in import left_with_orders, report_of
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.opening import Apply, Go, Left, Said, decide
from flowrt.sched.versions.shard import Shard

pytestmark = [  # a search computes and waits for nothing: it takes what the machine gives it
    pytest.mark.timeout(300),
    pytest.mark.settled,
]

NOW = 0.0


class Server(NamedTuple):
    """A server: its shard, what it is applying, the orders that it heard, and the sets that made its variables."""

    shard: Shard[int]
    hand: tuple[int, ...] | None = None
    heard: tuple[ApplyOrder, ...] = ()
    written: tuple[tuple[int, ...], ...] = ()


class State(NamedTuple):
    """A run before a server dies. ``orders`` were given, ``reports`` made; the client has had the first ``seen``."""

    coordinator: Coordinator
    servers: tuple[Server, ...]
    orders: tuple[ApplyOrder, ...] = ()
    seen: int = 0


def put(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


class World:
    """A run of ``versions`` versions over ``servers``, of which the client allows ``ahead`` beyond what it has seen."""

    def __init__(self, policy: Policy, servers: int, *, versions: int = 2, replicas: int = 2, ahead: int = 0) -> None:
        self.versions, self.replicas, self.ahead = versions, range(replicas), ahead
        coordinator = Coordinator.start(policy, replicas, servers, allowed=1 + ahead, remember=1)
        for replica in self.replicas:
            coordinator = coordinator.ready(replica, versions + 1, NOW)
        self.start = State(coordinator, (Server(Shard.start(replicas)),) * servers)

    def steps(self, state: State) -> Iterator[State]:
        """Every state that follows."""
        coordinator = state.coordinator
        for number, server in enumerate(state.servers):
            if server.shard.version == coordinator.version < self.versions:
                for replica in self.replicas:
                    held, verdict = server.shard.hold(coordinator.version, replica, replica, finite=True)
                    if verdict.name == "HELD":
                        after = state._replace(servers=put(state.servers, number, server._replace(shard=held)))
                        heard, _ = coordinator.held(number, coordinator.version, replica, True, NOW)
                        yield self._ordered(after._replace(coordinator=heard))
            for order in state.orders:
                if number and order.version == server.shard.version and server.hand is None:
                    yield state._replace(servers=put(state.servers, number, obeying(server, order)))
            if server.hand is not None:
                yield state._replace(servers=put(state.servers, number, wrote(server)))
            if server.shard.version > coordinator.version and number not in coordinator.published:
                heard = coordinator.publish(number, server.shard.version - 1, NOW)
                yield self._ordered(state._replace(coordinator=heard))
        if state.seen < coordinator.version:
            allowed = coordinator.allow(state.seen + 2 + self.ahead)
            yield self._ordered(state._replace(coordinator=allowed, seen=state.seen + 1))

    def _ordered(self, state: State) -> State:
        coordinator, replicas = state.coordinator.order(NOW)
        if replicas is None:
            return state._replace(coordinator=coordinator)
        batches = tuple(coordinator.spent[replica] for replica in replicas)
        order = ApplyOrder(0, coordinator.version, replicas, batches=batches, told=(1.0,))
        first = obeying(state.servers[0], order)
        return state._replace(
            coordinator=coordinator, servers=put(state.servers, 0, first), orders=(*state.orders, order)
        )


def obeying(server: Server, order: ApplyOrder) -> Server:
    shard, updates = server.shard.take(order.version, order.replicas)
    assert updates is not None
    return server._replace(shard=shard, hand=order.replicas, heard=(*server.heard, order))


def wrote(server: Server) -> Server:
    assert server.hand is not None
    shard = server.shard.applied(server.shard.version)
    return server._replace(shard=shard, hand=None, written=(*server.written, server.hand))


def left_of(state: State, number: int) -> Left:
    """What a server that has ended the run says of it, as `Server.left` does."""
    server, coordinator = state.servers[number], state.coordinator
    held = frozenset((r, server.shard.version) for r, update in enumerate(server.shard.held) if update is not None)
    left = Left(0, server.shard.version, held)
    if number:
        return left_with_orders(left, server.heard, number)
    unseen = tuple(report_of(order) for order in state.orders if state.seen <= order.version < coordinator.version)
    left = replace(left, unseen=unseen)
    if coordinator.settled:
        return left
    order = state.orders[-1]
    if order.version < left.version:
        left = replace(left, unseen=(*unseen, report_of(order)))
    return replace(left, order=(order.version, order.replicas))


def open_without(state: State, dead: int, opening: Callable[..., Any]) -> None:
    """Those that are left end the run, and open the next; raises `Violation` where something is lost."""
    numbers = [number for number in range(len(state.servers)) if number != dead]
    servers = tuple(wrote(server) if server.hand is not None else server for server in state.servers)
    state = state._replace(servers=servers)
    for _ in range(3):
        said = [Said(f"ps:{n}", len(state.servers[n].written), left_of(state, n)) for n in numbers]
        match opening("trainer", said):
            case Go(version, unseen):
                check(state, [state.servers[n] for n in numbers], version, unseen)
                return
            case Apply(_, version, replicas, behind):
                for server in (numbers[place] for place in behind):
                    one = obeying(state.servers[server], ApplyOrder(0, version, replicas))._replace(
                        heard=state.servers[server].heard
                    )
                    state = state._replace(servers=put(state.servers, server, wrote(one)))
            case other:
                raise Violation(f"{other} without server {dead} of {state}")
    raise Violation(f"no end without server {dead} of {state}")


def check(state: State, servers: Sequence[Server], version: int, unseen: Sequence[Report]) -> None:
    if len({server.written for server in servers}) > 1:
        raise Violation(f"torn: {servers}")
    if version < state.coordinator.version or version != len(servers[0].written):
        raise Violation(f"version {version} of {servers}, {state.coordinator.version} were reported")
    for order in state.orders[:version]:
        if servers[0].written[order.version] != order.replicas:
            raise Violation(f"{order} was given, {servers[0].written} applied")
    known = {report.version: report for report in unseen}
    for order in state.orders[state.seen : version]:
        report = known.get(order.version)
        if report is None or {r: b for r, b, *_ in report.receipts} != dict(
            zip(order.replicas, order.batches, strict=True)
        ):
            raise Violation(f"{order} was applied, and is not known: {unseen}")


@held_back()  # states are many, and none is garbage
def search(world: World, opening: Callable[..., Any] = decide) -> int:
    """Visit every state, and have each server die in each; answers how many there are."""
    seen, left = {world.start}, [world.start]
    while left:
        state = left.pop()
        for dead in range(len(state.servers)):
            open_without(state, dead, opening)
        for after in world.steps(state):
            if after not in seen:
                seen.add(after)
                left.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("policy", "servers", "more"),
    [
        (FirstOf(1), 2, {"ahead": 1, "versions": 3}),
        (AllOf(), 2, {"ahead": 2}),
        (FirstOf(1), 3, {"ahead": 1}),
        (AllOf(), 3, {"replicas": 1, "ahead": 1}),
    ],
)
def test_whoever_dies_and_whenever_nothing_that_was_reported_is_lost(
    policy: Policy, servers: int, more: dict[str, Any]
) -> None:
    assert search(World(policy, servers, **more)) > 100


def asks_the_first_alone(trainer: str, said: Sequence[Said]) -> Any:
    others = [replace(one, left=None if one.left is None else replace(one.left, order=None)) for one in said[1:]]
    return decide(trainer, [said[0], *others])


def forgets_what_was_not_reported(trainer: str, said: Sequence[Said]) -> Any:
    found = decide(trainer, said)
    return replace(found, unseen=()) if isinstance(found, Go) else found


def applies_what_it_holds(trainer: str, said: Sequence[Said]) -> Any:
    found = decide(trainer, said)
    left = said[-1].left
    if isinstance(found, Apply) and left is not None and left.held:
        return replace(found, replicas=tuple(replica for replica, _ in sorted(left.held))[-1:])
    return found


@pytest.mark.parametrize(
    ("mutant", "servers", "symptom"),
    [
        (asks_the_first_alone, 3, "Refuse"),
        (forgets_what_was_not_reported, 2, "is not known"),
        (applies_what_it_holds, 3, "torn"),
    ],
)
def test_the_search_catches_an_opening_that(mutant: Any, servers: int, symptom: str) -> None:
    with pytest.raises(Violation, match=symptom):
        search(World(FirstOf(1), servers, ahead=1), mutant)
