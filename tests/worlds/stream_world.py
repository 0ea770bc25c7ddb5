"""Every state that one run of a trainer can reach, with batches, pushed versions and permission; no message is kept.

The coordinator and the shards are the shipped ones. The world owns the rest of the rules, which drivers obey: a replica
begins the newest version that it has heard of, with the batch that it was told or the one after those spent, unless
what it has begun may still count; what is held, applied, ordered and announced is said from what its sender is at, so
that all of it can be said again after a connection broke. Nothing here needs what was said before: each step hears what
another *would* say now, or does not.

That covers a network which loses, repeats and delays. What a replica hears late it could have heard at once and acted
upon late, an older version than it knows means nothing to it, and one that it never hears of it skips. What servers and
the coordinator hear late is of a version that is closed, or of one whose sender would say the same again. But where
updates may be stale, what was applied may be heard of again, while it would not be too old: that is kept, and said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from replica_world import Values, Violation, clock, pick, put

from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Outcome
from flowrt.sched.versions.shard import Shard
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.sched.policies import Policy

NOTHING, FAILED = (-1, 0, False, 0), (-1,)


class Replica(NamedTuple):
    """One replica: what it was given, heard and did."""

    left: int  # batches that it will yet be given
    given: int
    heard: tuple[int, int, bool, int]  # the newest version it knows, batches spent, whether it begins, since when
    sent: tuple  # (version, batch, servers whose part is not finite) of its newest update; FAILED if there is none
    before: tuple  # the update before that, if it is not too old
    alive: bool
    receipted: int  # batches that have their receipt


class State(NamedTuple):
    """One state of the world. An update is (replica, version, batch)."""

    coordinator: int
    shards: tuple[int, ...]
    hands: tuple[tuple, ...]  # by server: the (version, updates) that are being written
    replicas: tuple[Replica, ...]
    variables: tuple[tuple, ...]  # by server: the updates written, version after version
    told: tuple  # the sets that were ordered, version after version, with what they were computed from
    said: tuple  # (server, version, replica) of updates that are held no more, and not too old
    asked: int  # the client asked for so many versions
    client: bool
    calm: bool  # nothing has failed yet
    losses: int  # replicas that may still be lost, or fail
    faults: int  # updates that may still be not finite


class Streams(Values):
    """One run of ``versions`` versions, each replica with ``batches`` batches, of which ``depth`` are on their way."""

    def __init__(
        self,
        policy: Policy,
        *,
        batches: tuple[int, ...] = (2, 2),
        servers: int = 2,
        versions: int = 2,
        depth: int = 2,
        deaths: bool = False,
        losses: int = 0,
        faults: int = 0,
        coordinator: type[Coordinator] = Coordinator,
        shard: type[Shard] = Shard,
    ) -> None:
        super().__init__()
        self.versions, self.depth, self.deaths, self.staleness = versions, depth, deaths, policy.staleness
        self.servers, self.replicas = range(servers), range(len(batches))
        first = coordinator.start(policy, len(batches), servers, remember=1).exhausted(batches)
        self.start = State(
            self.number(first),
            (self.number(shard.start(len(batches), 0, policy.staleness)),) * servers,
            ((),) * servers,
            tuple(Replica(left, 0, NOTHING, (), (), True, 0) for left in batches),
            ((),) * servers,
            (),
            (),
            asked=0,
            client=True,
            calm=True,
            losses=losses,
            faults=faults,
        )

    def done(self, state: State) -> bool:
        """Whether this may be the end: no more can be done, or, without a client, all servers are at one version."""
        coordinator = self.values[state.coordinator]
        if not state.client:
            return coordinator.closing and coordinator.settled and len({len(one) for one in state.variables}) == 1
        return coordinator.version == self.versions or coordinator.stuck() is not None

    def steps(self, state: State) -> Iterator[tuple[bool, State]]:
        """Every state that follows, and whether it does so without another fault."""
        yield from self._client(state)
        for replica in self.replicas:
            yield from self._hears(state, replica)
            yield from self._computes(state, replica)
            yield from self._pushes(state, replica)
            yield from self._fails(state, replica)
        for server in self.servers:
            yield from self._reports(state, server)
            yield from self._applies(state, server)
        self._check_end(state)

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self, state: State) -> float:
        return clock(self.values[state.coordinator])

    def _tell(self, state: State, method: str, *arguments: Any) -> State:
        """The coordinator hears something, and gives the order that is due."""
        number, _ = self.ask(state.coordinator, method, *arguments)
        if number == state.coordinator:
            return state
        before = self.values[state.coordinator].version
        if self.values[number].version > before:
            state = self._account(state, before, self.values[number])
        number, chosen = self.ask(number, "order", clock(self.values[number]))
        if chosen is not None:
            version = self.values[number].version
            if len(state.told) != version:
                raise Violation(f"version {version} was ordered after {len(state.told)} versions")
            if version >= state.asked:
                raise Violation(f"version {version} was ordered, the client asked for {state.asked}")
            if self.values[number].closing:
                raise Violation(f"version {version} was ordered although the run ends")
            state = state._replace(told=(*state.told, (chosen, self.values[number].versions)))
        return state._replace(coordinator=number)

    def _account(self, state: State, version: int, coordinator: Coordinator) -> State:
        """Compare the receipts of a version with what the servers wrote, and with those before."""
        if any(len(written) <= version for written in state.variables):
            raise Violation(f"version {version + 1} opened, the servers have written {state.variables}")
        receipts = coordinator.receipts(version) or ()
        kept = tuple((r.replica, version - r.staleness, r.batch) for r in receipts if r.outcome is Outcome.KEPT)
        if kept != state.variables[0][version]:
            raise Violation(f"version {version} is made of {state.variables[0][version]}, receipts are {receipts}")
        replicas = state.replicas
        for receipt in receipts:
            one = replicas[receipt.replica]
            if receipt.batch != one.receipted + 1:
                raise Violation(f"receipt {receipt} after that of batch {one.receipted}")
            replicas = put(replicas, receipt.replica, one._replace(receipted=receipt.batch))
        for replica, one in enumerate(replicas):
            if coordinator.spent[replica] != one.receipted + bool(coordinator.begun(replica)):
                raise Violation(
                    f"batches spent are {coordinator.spent}, replica {replica} has {one.receipted} receipts"
                )
        oldest = coordinator.version - self.staleness
        replicas = tuple(one if one.before and one.before[0] >= oldest else one._replace(before=()) for one in replicas)
        said = tuple(held for held in state.said if held[1] >= oldest)
        return state._replace(replicas=replicas, said=said)

    def _check_end(self, state: State) -> None:
        coordinator = self.values[state.coordinator]
        if coordinator.settled and any(len(written) < len(state.told) for written in state.variables):
            raise Violation(f"settled although {state.told} are ordered, written are {state.variables}")
        if not state.calm or coordinator.closing or coordinator.stuck() is None:
            return
        able = sum(
            one.left + one.given > one.receipted or coordinator.begun(replica) > 0
            for replica, one in enumerate(state.replicas)
        )
        if able >= coordinator.quorum.least:
            raise Violation(f"given up although {able} replicas have batches: {coordinator.stuck()}")

    def _client(self, state: State) -> Iterator[tuple[bool, State]]:
        if (due := self.values[state.coordinator].due) is not None:
            yield True, self._tell(state, "tick", max(due, self._now(state)))
        yield True, self._tell(state, "allow", state.asked)
        if not state.client:
            yield True, self._tell(state, "close")
            return
        if state.asked < self.versions:
            yield True, state._replace(asked=state.asked + 1)
        if self.deaths:
            yield False, state._replace(client=False)
        for replica, one in enumerate(state.replicas):
            if one.left and one.given < one.receipted + self.depth:
                more = one._replace(left=one.left - 1, given=one.given + 1)
                yield True, state._replace(replicas=put(state.replicas, replica, more))

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hears(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        one, coordinator = state.replicas[replica], self.values[state.coordinator]
        if not one.alive:
            return
        heard = self.told(one, coordinator, replica)
        if heard > one.heard:  # the same version twice is luck: servers tell of each once
            fair = heard[0] > one.heard[0]
            yield fair, state._replace(replicas=put(state.replicas, replica, one._replace(heard=heard)))
        yield True, self._tell(state, "ready", replica, one.given, self._now(state))

    def told(self, one: Replica, coordinator: Coordinator, replica: int) -> tuple[int, int, bool, int]:
        """What a replica is told of the open version."""
        begun = coordinator.begun(replica) > 0
        return coordinator.version, coordinator.spent[replica], begun, coordinator.oldest(replica)

    def batch(self, one: Replica) -> int:
        """The batch that a replica computes the version it has heard of from."""
        _, spent, begun, _ = one.heard
        return spent if begun else spent + 1

    def _computes(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        one = state.replicas[replica]
        version, batch = one.heard[0], self.batch(one)
        if not one.alive or version < 0 or version == self.versions or batch > one.given:
            return
        if one.sent and self.is_under_way(one):
            return
        before = one.sent if one.sent and one.sent[2] != FAILED and version - one.sent[0] <= self.staleness else ()
        one = one._replace(before=before)
        for broken in ((), *(((server,) for server in self.servers) if state.faults else ())):
            after = put(state.replicas, replica, one._replace(sent=(version, batch, broken)))
            calm, faults = state.calm and not broken, state.faults - bool(broken)
            yield not broken, state._replace(replicas=after, calm=calm, faults=faults)
        if state.losses:
            after = put(state.replicas, replica, one._replace(sent=(version, batch, FAILED)))
            yield False, state._replace(replicas=after, calm=False, losses=state.losses - 1)

    def is_under_way(self, one: Replica) -> bool:
        """Whether what a replica has begun last may count, as far as it knows."""
        return one.sent[0] >= one.heard[3]

    def _pushes(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        one = state.replicas[replica]
        for sent in (one.sent, one.before):
            if not sent or sent[2] == FAILED:
                continue
            version, batch, broken = sent
            fair = one.alive and sent is one.sent
            for server in self.servers:
                finite = server not in broken
                number, _ = self.ask(state.shards[server], "hold", version, replica, (replica, version, batch), finite)
                if number != state.shards[server]:
                    yield fair, state._replace(shards=put(state.shards, server, number))

    def _fails(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        """A replica is lost, or only believed to be; or its tower failed, and it goes on with the next version."""
        one, coordinator = state.replicas[replica], self.values[state.coordinator]
        if not one.alive and coordinator.alive[replica]:
            yield True, self._tell(state, "lost", replica)
        if state.losses and one.alive:
            gone, left = put(state.replicas, replica, one._replace(alive=False)), state.losses - 1
            yield False, state._replace(replicas=gone, calm=False, losses=left)
            yield False, self._tell(state._replace(calm=False, losses=left), "lost", replica)
        failed = one.sent and one.sent[2] == FAILED and coordinator.may_count(replica, one.sent[0])
        if failed and one.alive and coordinator.standing[replica] in (Standing.IDLE, Standing.RUNNING):
            yield True, self._tell(self._tell(state, "lost", replica), "joined", replica)

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reports(self, state: State, server: int) -> Iterator[tuple[bool, State]]:
        shard = self.values[state.shards[server]]
        for replica in self.replicas:
            if shard.held[replica] is not None or replica in shard.refused:
                finite = replica not in shard.refused
                said = (server, shard.computed[replica], replica, finite, self._now(state))
                yield True, self._tell(state, "held", *said)
        for other, version, replica in state.said:
            if other == server:
                yield False, self._tell(state, "held", server, version, replica, True, self._now(state))
        if state.variables[server]:
            yield True, self._tell(state, "publish", server, len(state.variables[server]) - 1, self._now(state))

    def _applies(self, state: State, server: int) -> Iterator[tuple[bool, State]]:
        for version, (replicas, versions) in enumerate(state.told):
            number, updates = self.ask(state.shards[server], "take", version, replicas, versions)
            if updates is not None:
                shards, hands = put(state.shards, server, number), put(state.hands, server, (version, updates))
                yield True, state._replace(shards=shards, hands=hands)
        if state.hands[server]:
            version, updates = state.hands[server]
            free = state._replace(hands=put(state.hands, server, ()))
            number, _ = self.ask(state.shards[server], "give_back", version)
            yield True, free._replace(shards=put(state.shards, server, number))
            number, _ = self.ask(state.shards[server], "applied", version)
            yield True, self._write(free._replace(shards=put(state.shards, server, number)), server, version, updates)

    def _write(self, state: State, server: int, version: int, updates: tuple) -> State:
        written = state.variables[server]
        if len(written) != version or any(not 0 <= version - computed <= self.staleness for _, computed, _ in updates):
            raise Violation(f"version {version} applied {updates} after {len(written)} versions")
        if len({(replica, batch) for one in (*written, updates) for replica, _, batch in one}) != sum(
            len(one) for one in (*written, updates)
        ):
            raise Violation(f"a batch is applied twice: {updates} after {written}")
        for other in state.variables:
            if other[: version + 1] != (*written, updates)[: len(other)]:
                raise Violation(f"version {version} is torn: {updates} here, {other} there")
        said = {(server, computed, replica) for replica, computed, _ in updates if self.staleness}
        variables = put(state.variables, server, (*written, updates))
        return state._replace(variables=variables, said=tuple(sorted({*state.said, *said})))

    # ── renaming ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def canonical(self, state: State) -> State:
        """The representative of all states that are ``state`` up to a renaming of two replicas."""
        if self.staleness or len(self.replicas) != 2 or state.replicas[0] < state.replicas[1]:
            return state
        other = self._exchanged(state)
        return other if state.replicas[0] > state.replicas[1] else min(state, other)

    def _exchanged(self, state: State) -> State:
        order, servers = (1, 0), tuple(self.servers)

        def called(updates: tuple) -> tuple:
            return tuple(sorted((1 - replica, version, batch) for replica, version, batch in updates))

        return state._replace(
            coordinator=self.renumbered(state.coordinator, order, servers),
            shards=tuple(self.renumbered(shard, order, servers) for shard in state.shards),
            hands=tuple(hand and (hand[0], called(hand[1])) for hand in state.hands),
            replicas=pick(state.replicas, order),
            variables=tuple(tuple(called(updates) for updates in written) for written in state.variables),
            told=tuple((tuple(sorted(1 - replica for replica in chosen)), ()) for chosen, _ in state.told),
        )
