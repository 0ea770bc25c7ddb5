"""Every state that a trainer can reach over several runs: clients that begin, die and look, servers that start again.

`opening.decide`, the coordinator and the shards are the shipped ones; what clients and servers do about a decision is
written here, as drivers do it. Answers age: servers are asked one by one, and a request of a client that has died may
still arrive, and again. Updates of one batch each are there as soon as they may be. A restored checkpoint is written at
once, and while nothing is trained.

What is in the variables of a server is told by the sets that made it: (run, replicas), version after version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from replica_world import Values, Violation, clock, put

from flowrt.base.valueclass import replace as left_as
from flowrt.sched.policies import FirstOf
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.opening import Apply, End, Go, Going, Left, Refuse, Said, decide
from flowrt.sched.versions.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flowrt.sched.policies import Policy

NONE = -1
KEEP_ONE = FirstOf(1)
SAME = (NONE, ())  # in the variables of all servers


class Server(NamedTuple):
    """One server: its variables, and its part of the newest run that it knows of."""

    written: tuple = ()  # (run, replicas) of every version
    run: int = NONE
    ended: bool = True
    shard: int = NONE
    hand: tuple = ()  # (version, replicas) being written
    goes_on: bool = False  # server 0 of a detached run: all have begun, and it needs no client


class Client(NamedTuple):
    """One client, which begins at most one run, of its own number."""

    stage: str = "away"  # then "looks", "asks", "drives", "stops", and "over"
    said: tuple[int, ...] = ()  # what servers have answered
    before: tuple[int, ...] = ()  # what they had answered when it was last in doubt
    asks: tuple = ()  # the request on its way: its kind, the server, and what it says
    asked: int = 0  # versions before this one may be applied
    most: int = 0  # and it will ask for no more than those before this one
    alive: bool = True
    noticed: bool = False  # server 0 knows that it is dead
    run: int = NONE  # a detached one that it attached to; its own has its number


class State(NamedTuple):
    """One state of the world."""

    servers: tuple[Server, ...]
    coordinator: int  # server 0's
    clients: tuple[Client, ...]
    told: tuple  # (run, version, replicas) that was ordered
    saved: tuple  # a checkpoint
    deaths: int
    restarts: int
    restores: int
    hasty: int  # times that server 0 ends a run before all have obeyed
    whole: bool  # no server was started again


class Runs(Values):
    """Up to ``clients`` runs of at most ``each`` versions, ``versions`` in all, over ``servers``; ``policy`` decides.

    Clients begin ``together``, or one when those before have died or ended. A ``detached`` run goes on without a
    client, to the last version; clients attach to it, and leave it to itself or stop it.
    """

    def __init__(
        self,
        *,
        clients: int = 2,
        versions: int = 2,
        each: int = 2,
        replicas: int = 2,
        together: bool = False,
        servers: int = 2,
        deaths: int = 1,
        restarts: int = 0,
        restores: int = 0,
        hasty: int = 0,
        detached: bool = False,
        opening: Callable[..., Any] = decide,
        coordinator: type[Coordinator] = Coordinator,
        policy: Policy = KEEP_ONE,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.versions, self.each, self.opening, self.kind = versions, each, opening, coordinator
        self.servers, self.replicas, self.together = range(servers), range(replicas), together
        self.session = "job" if detached else ""
        self.decisions: dict[tuple[int, ...], Any] = {}
        self.start = State(
            (Server(),) * servers, NONE, (Client(),) * clients, (), (), deaths, restarts, restores, hasty, whole=True
        )

    def canonical(self, state: State) -> State:
        """The state without what makes no difference any more: sets that all servers hold, orders that all obeyed."""
        written = [server.written for server in state.servers]
        same = next(
            (i for i, sets in enumerate(zip(*written, strict=False)) if len(set(sets)) > 1), min(map(len, written))
        )
        servers = tuple(
            server._replace(written=(SAME,) * same + server.written[same:]) if same else server
            for server in state.servers
        )
        told = tuple(order for order in state.told if any(self._may_obey(server, order) for server in servers))
        return state._replace(servers=servers, told=told)

    def _may_obey(self, server: Server, order: tuple) -> bool:
        return self.obeys(server, order[0]) and self.values[server.shard].version <= order[1]

    def done(self, state: State) -> bool:
        """Whether all is quiet: nobody drives, nothing is to be applied, and all servers, if none was lost, agree."""
        if any(client.stage not in ("away", "over") for client in state.clients):
            return False
        first = state.servers[0]
        going = first.run != NONE and not first.ended
        if going and not (first.goes_on and self.values[state.coordinator].version == self.versions):
            return False
        return not state.whole or len({server.written for server in state.servers}) == 1

    def steps(self, state: State) -> Iterator[tuple[bool, State]]:
        """Every state that follows, and whether it does so without another fault or client."""
        for number, client in enumerate(state.clients):
            yield from self._client(state, number, client)
        for number, server in enumerate(state.servers):
            yield from self._server(state, number, server)
            if state.restarts:
                yield False, self._restarted(state, number)
        yield from self._coordinates(state)
        if state.restores and state.saved and all(server.ended for server in state.servers):
            servers = tuple(server._replace(written=state.saved) for server in state.servers)
            yield False, state._replace(servers=servers, restores=state.restores - 1)

    def _restarted(self, state: State, number: int) -> State:
        after = state._replace(servers=put(state.servers, number, Server()), restarts=state.restarts - 1, whole=False)
        return after if number else after._replace(coordinator=NONE)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _client(self, state: State, number: int, client: Client) -> Iterator[tuple[bool, State]]:
        if not client.alive:
            if client.asks:
                yield False, self._request(state, number, client)[0]
            first = state.servers[0]
            driven = first.run == number and not first.ended and not first.goes_on
            if driven and not self.values[state.coordinator].closing:
                closing = self._hear(state, "close")
                yield True, self._put(closing, number, client._replace(noticed=True, asked=0, most=0))
            return
        if state.deaths and client.stage not in ("away", "over"):
            dead = client._replace(stage="over", said=(), before=(), alive=False)
            yield False, self._put(state._replace(deaths=state.deaths - 1), number, dead)
        match client.stage:
            case "away":
                if all(self._lets_begin(before) for before in state.clients[:number]):
                    looks = client._replace(stage="looks", said=(NONE,) * len(self.servers))
                    apart = len({server.written for server in state.servers}) > 1
                    yield state.whole and apart, self._put(state, number, looks)
            case "looks":
                for server in self.asked(client):
                    if client.said[server] == NONE:
                        said = put(client.said, server, self.number(self.said(state, server)))
                        yield True, self._put(state, number, self._decided(client._replace(said=said), state))
            case "asks" | "stops":
                yield from self._requests(state, number, client)
            case "drives":
                if client.asked < client.most and not self.session:
                    more = self._put(state, number, client._replace(asked=client.asked + 1))
                    drives = state.servers[0].run == number and not state.servers[0].ended
                    yield True, self._hear(more, "allow", client.asked + 1) if drives else more
                run = number if client.run == NONE else client.run
                yield True, self._put(state, number, client._replace(stage="stops", asks=("stop", 0, run)))
                if self.session:
                    yield True, self._put(state, number, Client("over"))

    def _all_know(self, state: State, run: int) -> bool:
        return all(server.run == run for server in state.servers)

    def asked(self, client: Client) -> tuple[int, ...]:
        """The servers that may be asked now: server 0, on which runs begin and end, is the last one."""
        return (0,) if NONE not in client.said[1:] else tuple(self.servers[1:])

    def _lets_begin(self, before: Client) -> bool:
        """Whether a later client may begin. Their numbers mean nothing, so the first is the first."""
        return before.stage != "away" if self.together else before.stage == "over"

    def _put(self, state: State, number: int, client: Client) -> State:
        return state._replace(clients=put(state.clients, number, client))

    def said(self, state: State, number: int) -> Said:
        """What a server answers."""
        server, order, driver = state.servers[number], None, ""
        version = len(server.written) or None
        if server.run == NONE:
            return Said(f"ps:{number}", version)
        if not server.ended and number:  # nothing else counts, and fewer answers make fewer states
            return Said(f"ps:{number}", None, Left(server.run, 0, ended=False))
        shard = self.values[server.shard]
        if number == 0:
            coordinator = self.values[state.coordinator]
            order = None if coordinator.settled else (coordinator.version, coordinator.decided(coordinator.version))
            driver = "" if state.clients[server.run].noticed else "somebody"
        held = frozenset((replica, shard.version) for replica, update in enumerate(shard.held) if update is not None)
        left = Left(server.run, shard.version, held, order, server.ended, driver)
        if server.goes_on and not server.ended:
            left = left_as(left, client="somebody", detached=self.session)
        return Said(f"ps:{number}", version, left)

    def _decided(self, client: Client, state: State) -> Client:
        """What a client does as soon as all servers have answered."""
        if NONE in client.said:
            return client
        if client.said not in self.decisions:
            told = [self.values[said] for said in client.said]
            self.decisions[client.said] = self.opening("trainer", told, *([self.session] if self.session else []))
        looks = client._replace(stage="looks", said=(NONE,) * len(self.servers))
        match self.decisions[client.said]:
            case Go(version):
                asks, most = ("begin", 0, version), min(version + self.each, self.versions)
                return client._replace(stage="asks", said=(), before=(), asks=asks, asked=version, most=most)
            case Going(run) if not self._all_know(state, run):  # a server was started again
                return client._replace(stage="asks", said=(), asks=("stop", 0, run))
            case Going(run):
                return client._replace(stage="drives", said=(), before=(), run=run)
            case End(run, server):
                return client._replace(stage="asks", said=(), asks=("stop", server, run))
            case Apply(run, version, replicas, servers):
                return client._replace(stage="asks", said=(), asks=("apply", servers[0], (run, version, replicas)))
            case Refuse(text) if "being trained" in text:
                return Client("over")
            case Refuse(text):
                if not self.sure(client):
                    return looks._replace(before=client.said)
                if state.whole:
                    raise Violation(f"refused although no server was started again: {text}")
                return Client("over")
        raise AssertionError

    def sure(self, client: Client) -> bool:
        """Whether servers that seem apart are: all have said so twice."""
        return client.before == client.said

    def _requests(self, state: State, number: int, client: Client) -> Iterator[tuple[bool, State]]:
        """A request is answered, and its client goes on."""
        kind, server, _ = client.asks
        after, answer = self._request(state, number, client)
        if answer is None:
            if after is not state:
                yield True, after
            return
        looks = client._replace(stage="looks", said=(NONE,) * len(self.servers), asks=())
        last = server == self.servers[-1]
        if kind == "begin":
            if not answer:
                others = put(state.clients, number, Client())
                if state.whole and not self.together and not any(other.asks for other in others):
                    raise Violation(f"{client} cannot begin, and nobody else does: {state.servers}")
                client = client._replace(stage="stops", asks=("stop", 0, number))
            elif not last:
                client = client._replace(asks=("begin", server + 1, client.asks[2]))
            else:
                there = {one.written for one in after.servers if one.run == number}
                if len(there) > 1:
                    raise Violation(f"a run begins on {after.servers}")
                client = client._replace(asks=("go on", 0, number))
                if not self.session:
                    client = client._replace(stage="drives", asks=())
        elif kind == "go on":
            client = client._replace(stage="drives", asks=())
        elif client.stage == "stops":
            over = Client("over")
            client = over if last else client._replace(asks=("stop", server + 1, client.asks[2]))
        else:
            client = looks
        yield True, self._put(after, number, client)

    def _request(self, state: State, number: int, client: Client) -> tuple[State, bool | None]:
        """What a request does on its server: whether it was granted, or None if its answer waits."""
        kind, at, what = client.asks
        server = state.servers[at]
        match kind:
            case "begin":
                return self._begin(state, number, at, what)
            case "go on":
                goes_on = server._replace(goes_on=server.goes_on or server.run == what)
                return state._replace(servers=put(state.servers, at, goes_on)), True
            case "stop" if server.run != what or server.ended:
                return state, True
            case "stop" if at == 0:
                closed = self._hear(state, "close")
                return closed, None
            case "stop" if server.hand:
                return state, None
            case "stop":
                return state._replace(servers=put(state.servers, at, server._replace(ended=True))), True
            case "apply":
                run, version, replicas = what
                knows = server.run == run
                return self._obey(state, at, version, replicas) if knows else state, True
        raise AssertionError

    def _begin(self, state: State, run: int, at: int, version: int) -> tuple[State, bool]:
        server = state.servers[at]
        if server.run == run:
            return state, True
        if not self.free(state, at) or server.hand or not self.at(server, version):
            return state, False
        began = Server(server.written, run, False, self.number(Shard.start(len(self.replicas), version)))
        after = state._replace(servers=put(state.servers, at, began))
        if at:
            return after, True
        coordinator = self.kind.start(self.policy, len(self.replicas), len(self.servers), version=version, remember=1)
        return after._replace(coordinator=self.number(coordinator)), True

    def free(self, state: State, at: int) -> bool:
        """Whether a server may take part in a new run."""
        return state.servers[at].ended

    def at(self, server: Server, version: int) -> bool:
        """Whether a server's variables are at the version at which a run is to begin."""
        return len(server.written) == version

    # ── server 0 ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self, state: State) -> float:
        return 0.0 if state.coordinator == NONE else clock(self.values[state.coordinator])

    def _hear(self, state: State, method: str, *arguments: Any) -> State:
        """The coordinator hears something, and gives the order that is due."""
        if state.coordinator == NONE:
            return state
        number, _ = self.ask(state.coordinator, method, *arguments)
        number, chosen = self.ask(number, "order", clock(self.values[number]))
        if number == state.coordinator:
            return state
        if chosen is not None:
            run, value = state.servers[0].run, self.values[number]
            if value.closing or not (state.servers[0].goes_on or value.version < state.clients[run].asked):
                raise Violation(f"version {value.version} was ordered for nobody in run {run}: {state.clients[run]}")
            if any(told[:2] == (run, value.version) for told in state.told):
                raise Violation(f"version {value.version} was ordered twice in run {run}")
            told = state._replace(coordinator=number, told=(*state.told, (run, value.version, chosen)))
            return self._obey(told, 0, value.version, chosen)
        return state._replace(coordinator=number)

    def _coordinates(self, state: State) -> Iterator[tuple[bool, State]]:
        first = state.servers[0]
        if first.run == NONE or first.ended:
            return
        coordinator = self.values[state.coordinator]
        if first.goes_on and coordinator.allowed <= coordinator.version < self.versions:
            yield True, self._hear(state, "allow", coordinator.version + 1)
        if coordinator.due is not None:
            yield True, self._hear(state, "tick", max(coordinator.due, self._now(state)))
        for number, server in enumerate(state.servers):
            if number == 0 or server.run != first.run:
                continue
            shard = self.values[server.shard]
            for replica in self.replicas:
                if shard.held[replica] is not None:
                    yield True, self._hear(state, "held", number, shard.version, replica, True, self._now(state))
            if shard.version > coordinator.version:
                yield True, self._hear(state, "publish", number, shard.version - 1, self._now(state))
        gone = any(server.run != first.run for server in state.servers)
        if not coordinator.closing or first.hand:
            return
        ended = state._replace(servers=put(state.servers, 0, first._replace(ended=True)))
        if coordinator.settled or gone:
            yield True, ended
        elif state.hasty and not state.deaths and state.clients[-1].stage == "away":
            yield False, ended._replace(hasty=state.hasty - 1)

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _server(self, state: State, number: int, server: Server) -> Iterator[tuple[bool, State]]:
        if server.run == NONE:
            return
        first, shard = state.servers[0], self.values[server.shard]
        if number and first.run == server.run and first.ended and not server.ended and not server.hand:
            yield False, state._replace(servers=put(state.servers, number, server._replace(ended=True)))
        if self._open(state, server.run) == shard.version < self.versions:
            for replica in self.replicas:
                held, _ = self.ask(server.shard, "hold", shard.version, replica, replica, True)
                after = state._replace(servers=put(state.servers, number, server._replace(shard=held)))
                if number == 0 and held != server.shard:
                    after = self._hear(after, "held", 0, shard.version, replica, True, self._now(state))
                yield True, after
        for run, version, replicas in state.told:
            if self.obeys(server, run):
                yield True, self._obey(state, number, version, replicas)
        if server.hand:
            after = self._write(state, number, server)
            driven = number == 0 and not server.ended
            yield True, self._hear(after, "publish", 0, server.hand[0], self._now(state)) if driven else after

    def _open(self, state: State, run: int) -> int:
        """The version that replicas compute in a run, which all servers have told them of; NONE if they do not."""
        if state.servers[0].ended or any(server.run != run for server in state.servers):
            return NONE
        return self.values[state.coordinator].version

    def obeys(self, server: Server, run: int) -> bool:
        """Whether a server heeds an order of ``run``, which may be of a server 0 that is no more."""
        return server.run == run and not server.ended

    def _obey(self, state: State, number: int, version: int, replicas: tuple[int, ...]) -> State:
        server = state.servers[number]
        shard, updates = self.ask(server.shard, "take", version, replicas)
        if updates is None:
            return state
        taken = server._replace(shard=shard, hand=(version, replicas))
        return state._replace(servers=put(state.servers, number, taken))

    def _write(self, state: State, number: int, server: Server) -> State:
        version, replicas = server.hand
        shard, _ = self.ask(server.shard, "applied", version)
        written = (*server.written, (server.run, replicas))
        if len(server.written) != version:
            raise Violation(f"version {version} is applied by a server that is at {len(server.written)}")
        for other in state.servers:
            if other.run == server.run and other.written[: version + 1] != written[: len(other.written)]:
                raise Violation(f"torn: {written} here, {other.written} there")
        servers = put(state.servers, number, server._replace(written=written, shard=shard, hand=()))
        saved = state.saved
        if state.restores and not saved and all(len(one.written) == 1 for one in servers):
            saved = written
        return state._replace(servers=servers, saved=saved)
