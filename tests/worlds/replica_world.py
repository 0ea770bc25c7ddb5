"""Every state that the replica protocol can reach: the shipped coordinator and shards, and the world around them.

The world owns what the protocol cannot see: which towers pushed what, who is alive, what servers were told, what each
really wrote. It drives `Coordinator` and `Shard` by their public methods alone; they are values, so an answer is
computed once per (value, event) and remembered by number.

The network is a set. What was sent may be delivered at any time, in any order, again, or never. A message is therefore
never taken out: losing it only forbids deliveries, so every state of the nodes that a lossy run reaches is reached
here too. Loss matters for progress: there, what a crashed replica had sent does not count as deliverable.

States are kept up to a renaming of replicas and of servers: nothing in the protocol depends on their numbers, and the
initial state is the same under all renamings.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from policy_world import TellingApart

from flowrt.base.collection import held_back
from flowrt.base.errors import GraphError, InternalError
from flowrt.base.valueclass import replace
from flowrt.sched.policies import AllOf, Close
from flowrt.sched.versions.book import Book
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Outcome
from flowrt.sched.versions.quorum import Verdict
from flowrt.sched.versions.shard import Shard
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.sched.policies import Policy
    from flowrt.sched.versions.quorum import Quorum

SERVERS = (0, 1)


class Violation(Exception):
    """The protocol did what it must not."""


class State(NamedTuple):
    """One state of the world. An update is (replica, version, index of the try that computed it)."""

    coordinator: int
    shards: tuple[int, ...]
    hands: tuple[tuple, ...]  # by server: the (version, updates) that are being written
    tries: tuple[tuple, ...]  # by replica: (version, servers whose part is not finite, sender crashed since)
    reports: tuple[int, ...]  # by replica: a bit per (version, finite, server) reported to the coordinator
    alive: tuple[bool, ...]
    applied: tuple[int, ...]  # by server: how many versions it has written
    written: tuple  # (version, updates) of the newest version that a server has written
    told: tuple  # every (version, set) that servers were told to apply
    calm: bool  # nothing has failed yet
    clock: float  # the newest time that the coordinator was woken at: no other passes
    joins: int  # replacements that may still come
    faults: int  # updates that may still be not finite
    leaves: int  # replicas that may still leave


class Values:
    """The values that a world asks: each has a number, and each question is put once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self.answers: dict[tuple, tuple] = {}
        self.renamed: dict[tuple, int] = {}

    def number(self, value: Any) -> int:
        """A number for ``value``, the same for equal ones. NaN is one value here: what was not measured is alike."""
        if isinstance(value, Coordinator) and math.isnan(value.square):
            value = replace(value, square=math.nan)
        found = self.numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found

    def ask(self, number: int, method: str, *arguments: Any) -> tuple[int, Any]:
        """Call ``method`` of a value; its answer, with the value that follows as a number."""
        key = (number, method, arguments)
        found = self.answers.get(key)
        if found is None:
            found = self.answers[key] = self.answer(number, method, *arguments)
        return found

    def answer(self, number: int, method: str, *arguments: Any) -> tuple[int, Any]:
        """What `ask` remembers."""
        asked = self.values[number]
        try:
            answer = getattr(asked, method)(*arguments)
        except (InternalError, GraphError) as error:
            raise Violation(f"{method}{arguments}: {error}") from error
        value, extra = answer if isinstance(answer, tuple) else (answer, None)
        return number if value is asked else self.number(value), extra

    def renumbered(self, number: int, order: tuple[int, ...], servers: tuple[int, ...]) -> int:
        key = (number, order, servers)
        if key not in self.renamed:
            self.renamed[key] = self.number(renamed(self.values[number], order, servers))
        return self.renamed[key]


class Facts(NamedTuple):
    """What a coordinator says of itself."""

    version: int
    begun: tuple[bool, ...]  # by replica, whether it has begun the version
    stuck: bool
    due: float | None


class World(Values):
    """The protocol for ``versions`` versions, with ``least`` replicas alive at all times."""

    def __init__(
        self,
        policy: Policy,
        *,
        replicas: int = 3,
        least: int = 2,
        versions: int = 2,
        joins: int = 1,
        faults: int = 1,
        floor: int = 0,
        leaves: int = 0,
        coordinator: type[Coordinator] = Coordinator,
        shard: type[Shard] = Shard,
    ) -> None:
        super().__init__()
        self.least, self.versions, self.replicas, self.floor = least, versions, range(replicas), floor
        self.square = (1.0,) if policy.measures else ()  # of every update and mean, on each server
        self.arrivals: dict[tuple, list[tuple]] = {}
        self.news: dict[tuple, list[tuple]] = {}
        self.events: dict[tuple, tuple] = {}
        self.facts: dict[int, Facts] = {}
        self.columns: dict[Any, int] = {}
        self.views: dict[int, tuple[int, ...]] = {}
        self.sizes: dict[int, tuple] = {}
        first = coordinator.start(policy, replicas, len(SERVERS), allowed=versions, remember=1, floor=floor)
        empty = self.number(shard.start(replicas))
        none, nothing = (False,) * replicas, ((),) * replicas
        alive = tuple(not gone for gone in none)
        self.start = State(
            self.number(first),
            (empty, empty),
            ((), ()),
            nothing,
            (0,) * replicas,
            alive,
            (0, 0),
            (),
            (),
            True,
            0.0,
            joins,
            faults,
            leaves,
        )

    def done(self, state: State) -> bool:
        return self._facts(state.coordinator).version == self.versions

    def _facts(self, number: int) -> Facts:
        """What the coordinator of that number says, asked once."""
        found = self.facts.get(number)
        if found is None:
            value = self.values[number]
            begun = tuple(value.begun(replica) > 0 for replica in self.replicas)
            found = self.facts[number] = Facts(value.version, begun, value.stuck() is not None, value.due)
        return found

    def steps(self, state: State) -> Iterator[tuple[bool, State]]:
        """Every state that follows, and whether a network that loses what crashed replicas sent still leads there."""
        for replica in self.replicas:
            yield from self._tower(state, replica)
            yield from self._life(state, replica)
            yield from self._pushes(state, replica)
            yield from self._reports(state, replica)
        for server in SERVERS:
            yield from self._applies(state, server)
            for version in range(state.applied[server]):
                yield True, self._coordinate(state, "publish", server, version, state.clock, *self.square)[0]
        version, _, stuck, due = self._facts(state.coordinator)
        if version < self.versions and stuck:
            coordinator = self.values[state.coordinator]
            if state.calm or self._would_close(coordinator.quorum):
                raise Violation(f"a version was given up although it could close: {coordinator}")
            yield True, self._coordinate(state, "abandon", state.clock)[0]
        if version < self.versions and due is not None:
            yield True, self._wake(state, due)

    def _wake(self, state: State, due: float) -> State:
        """The time comes that the policy waits for, sooner or later than anything else."""
        woken = state._replace(clock=max(state.clock, due))
        return self._coordinate(woken, "tick", woken.clock)[0]

    def _coordinate(self, state: State, method: str, *arguments: Any) -> tuple[State, Any]:
        number, answer, chosen = self._event(state.coordinator, state.clock, method, *arguments)
        if number == state.coordinator:
            return state, answer
        told, before, version = state.told, self._facts(state.coordinator).version, self._facts(number).version
        if version > before:
            self._account(state, before, self.values[number])
        if chosen is not None:
            if any(ordered == version for ordered, _ in told):
                raise Violation(f"version {version} was ordered twice")
            told = (*told, (version, chosen))
        after = state._replace(coordinator=number, told=told)
        return (after if version == before else self._past(after, before)), answer

    def _event(self, number: int, clock: float, method: str, *arguments: Any) -> tuple[int, Any, Any]:
        """What a coordinator comes to by an event and the order that is then due, its answer, and the set ordered."""
        key = (number, clock, method, arguments)
        found = self.events.get(key)
        if found is None:
            after, answer = self.answer(number, method, *arguments)
            chosen = None
            if after != number:
                self._check_decision(self.values[number], self.values[after])
                after, chosen = self.answer(after, "order", clock)
                value = self.values[after]
                if chosen is not None and chosen != value.decided(value.version):
                    raise Violation(f"{chosen} was ordered, the set is {value.decided(value.version)}")
            found = self.events[key] = after, answer, chosen
        return found

    def _check_decision(self, before: Coordinator, after: Coordinator) -> None:
        version = before.version
        if after.version == version and after.decided(version) != before.decided(version) is not None:
            raise Violation(f"the set of version {version} was fixed again: {after.decided(version)}")

    def _past(self, state: State, version: int) -> State:
        """Blur what was sent for a published version: every part and report of a tower that began may still come.

        That is more than can happen, so nothing is missed, and what did happen no longer tells states apart.
        """
        reports = list(state.reports)
        for replica in self.replicas:
            reports[replica] &= ~(15 << 4 * version)
            if any(began == version for began, _, _ in state.tries[replica]):
                reports[replica] |= bit(version, True, 0) | bit(version, True, 1)
        tries = tuple(
            tuple((began, (), True) if began == version else (began, broken, orphan) for began, broken, orphan in mine)
            for mine in state.tries
        )
        return state._replace(tries=tries, reports=tuple(reports), written=())

    def _account(self, state: State, version: int, coordinator: Coordinator) -> None:
        try:
            decided, receipts = coordinator.decided(version), coordinator.receipts(version) or ()
        except InternalError as error:
            raise Violation(str(error)) from error
        begun = [r for r in self.replicas if any(began == version for began, _, _ in state.tries[r])]
        if [receipt.replica for receipt in receipts] != begun:
            raise Violation(f"towers of {begun} had begun, receipts are {receipts}")
        kept = tuple(receipt.replica for receipt in receipts if receipt.outcome is Outcome.KEPT)
        if kept != decided or (kept and not self._is_set(kept, coordinator.quorum.policy)):
            raise Violation(f"the set is {decided}, receipts are {receipts}")
        late = [receipt.replica for receipt in receipts if receipt.outcome is Outcome.LATE]
        if late and isinstance(coordinator.quorum.policy, AllOf):
            raise Violation(f"the set is {decided}, though {late} were there")

    def _would_close(self, quorum: Quorum) -> bool:
        """Whether the policy, told that nobody can come any more, makes do with what is there."""
        enough = len(quorum.offers) >= quorum.least
        return enough and isinstance(quorum.policy.decide(quorum.offers, (), math.inf), Close)

    def _is_set(self, kept: tuple[int, ...], policy: Policy) -> bool:
        if self.floor:
            return len(kept) >= policy.least(self.floor) and policy.size(len(kept)) in (None, len(kept))
        size = policy.size(len(self.replicas))
        return len(kept) >= policy.least(len(self.replicas)) if size is None else len(kept) == size

    def _tower(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        version, has_begun, _, _ = self._facts(state.coordinator)
        if not state.alive[replica] or version >= self.versions or has_begun[replica]:
            return
        batch = self.values[state.coordinator].spent[replica] + 1
        begun, _ = self._coordinate(state, "ready", replica, batch, state.clock)
        if not self._facts(begun.coordinator).begun[replica]:
            return
        for broken in ((), (0,), (1,), SERVERS) if state.faults else ((),):
            tries = put(state.tries, replica, (*state.tries[replica], (version, broken, False)))
            yield (
                not broken,
                begun._replace(tries=tries, faults=state.faults - bool(broken), calm=state.calm and not broken),
            )

    def _life(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        coordinator = self.values[state.coordinator]
        believed = coordinator.alive[replica] or coordinator.standing[replica] is Standing.RUNNING
        if state.alive[replica]:
            if state.leaves and coordinator.alive[replica] and sum(coordinator.alive) > self.least:
                left, _ = self._coordinate(state, "left", replica)
                yield False, left._replace(leaves=state.leaves - 1, calm=False)
            if sum(state.alive) > self.least:
                sent = tuple((version, broken, True) for version, broken, _ in state.tries[replica])
                alive, tries = put(state.alive, replica, False), put(state.tries, replica, sent)
                yield False, state._replace(alive=alive, tries=tries, calm=False)
        elif believed:
            yield True, self._coordinate(state, "lost", replica)[0]
        elif state.joins:
            joined, _ = self._coordinate(state, "joined", replica)
            yield False, joined._replace(alive=put(state.alive, replica, True), joins=state.joins - 1)

    def _pushes(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        key = (replica, state.tries[replica], state.reports[replica], state.shards)
        if key not in self.arrivals:
            self.arrivals[key] = list(self._arriving(*key))
        for fair, shards, reports in self.arrivals[key]:
            yield fair, state._replace(shards=shards, reports=put(state.reports, replica, reports))

    def _arriving(self, replica: int, tries: tuple, before: int, shards: tuple[int, ...]) -> Iterator[tuple]:
        """What a part of an update that arrives makes of shards and reports, where it changes any."""
        for index, (version, broken, orphan) in enumerate(tries):
            for server in SERVERS:
                finite = server not in broken
                update = (replica, version, index)
                number, verdict = self.ask(shards[server], "hold", version, replica, update, finite)
                reports = before
                if verdict is not Verdict.LATE:
                    reports |= bit(version, verdict is not Verdict.REFUSED, server)
                if number != shards[server] or reports != before:
                    yield not orphan, put(shards, server, number), reports

    def _reports(self, state: State, replica: int) -> Iterator[tuple[bool, State]]:
        key = (state.coordinator, replica, state.reports[replica], state.clock)
        if key not in self.news:
            told = ((said, self._event(key[0], state.clock, "held", *said)) for said in self._said(*key[1:]))
            self.news[key] = [said for said, (after, *_) in told if after != key[0]]
        for said in self.news[key]:
            yield True, self._coordinate(state, "held", *said)[0]

    def _said(self, replica: int, reports: int, clock: float) -> Iterator[tuple]:
        for version in range(self.versions):
            for server in SERVERS:
                for finite in (False, True):
                    if reports & bit(version, finite, server):
                        yield server, version, replica, finite, clock, *self.square

    def _applies(self, state: State, server: int) -> Iterator[tuple[bool, State]]:
        hands = state.hands[server]
        for version, replicas in state.told:
            number, updates = self.ask(state.shards[server], "take", version, replicas)
            if updates is not None:
                held = (*hands, (version, updates))
                shards = put(state.shards, server, number)
                yield True, state._replace(shards=shards, hands=put(state.hands, server, held))
        for index, (version, updates) in enumerate(hands):
            left = put(state.hands, server, (*hands[:index], *hands[index + 1 :]))
            for method in ("applied", "give_back"):
                shards = put(state.shards, server, self.ask(state.shards[server], method, version)[0])
                after = state._replace(shards=shards, hands=left)
                yield True, self._write(after, server, version, updates) if method == "applied" else after

    def _write(self, state: State, server: int, version: int, updates: tuple) -> State:
        if state.applied[server] != version:
            raise Violation(f"server {server} applied version {version} after {state.applied[server]} versions")
        for replica, computed, index in updates:
            if computed != version or state.tries[replica][index][1]:
                raise Violation(f"version {version} applied {state.tries[replica][index]}")
            if any(not state.reports[replica] & bit(version, True, other) for other in SERVERS):
                raise Violation(f"version {version} applied replica {replica}, which some server does not hold")
        if state.written and state.written[0] == version and state.written[1] != updates:
            raise Violation(f"version {version} is torn: {state.written[1]} here, {updates} there")
        if (version, tuple(replica for replica, _, _ in updates)) not in state.told:
            raise Violation(f"version {version} applied {updates}, told {state.told}")
        applied = put(state.applied, server, version + 1)
        return state._replace(applied=applied, written=(version, updates))

    # Renaming: the same state under other numbers of replicas and servers.

    def canonical(self, state: State) -> State:
        """The representative of all states that are ``state`` up to a renaming."""
        first, second = (
            (done, len(writing), self._size(shard))
            for done, writing, shard in zip(state.applied, state.hands, state.shards, strict=True)
        )
        if first < second:
            return self._sorted(state)
        if first > second:
            return self._sorted(self._swap(state))
        return min(self._sorted(state), self._sorted(self._swap(state)))

    def _size(self, shard: int) -> tuple:
        if shard not in self.sizes:
            value = self.values[shard]
            self.sizes[shard] = (sum(update is not None for update in value.held), len(value.refused))
        return self.sizes[shard]

    def _sorted(self, state: State) -> State:
        first, second = state.shards
        views = self._view(state.coordinator), self._view(first), self._view(second)
        columns = list(zip(*views, state.tries, state.reports, state.alive, strict=True))
        order = tuple(sorted(self.replicas, key=columns.__getitem__))
        return state if order == tuple(self.replicas) else self._rename(state, order)

    def _view(self, number: int) -> tuple[int, ...]:
        """A number for what a value says of each replica, the same for equal words."""
        found = self.views.get(number)
        if found is None:
            said = (view(self.values[number], replica) for replica in self.replicas)
            found = tuple(self.columns.setdefault(one, len(self.columns)) for one in said)
            self.views[number] = found
        return found

    def _rename(self, state: State, order: tuple[int, ...]) -> State:
        name = {old: new for new, old in enumerate(order)}
        return state._replace(
            coordinator=self.renumbered(state.coordinator, order, SERVERS),
            shards=tuple(self.renumbered(shard, order, SERVERS) for shard in state.shards),
            hands=tuple(tuple((version, called(u, name)) for version, u in hands) for hands in state.hands),
            tries=pick(state.tries, order),
            reports=pick(state.reports, order),
            alive=pick(state.alive, order),
            written=state.written and (state.written[0], called(state.written[1], name)),
            told=tuple((version, tuple(sorted(name[r] for r in chosen))) for version, chosen in state.told),
        )

    def _swap(self, state: State) -> State:
        other = SERVERS[::-1]
        return state._replace(
            coordinator=self.renumbered(state.coordinator, tuple(self.replicas), other),
            shards=state.shards[::-1],
            hands=state.hands[::-1],
            tries=tuple(tuple(swapped(one) for one in tries) for tries in state.tries),
            reports=tuple(bits(reports) for reports in state.reports),
            applied=state.applied[::-1],
        )


def clock(value: Coordinator) -> float:
    """The time, where none passes but what a policy waits for: when the open version was decided, else opened."""
    return value.quorum.opened if value.quorum.closed_at is None else value.quorum.closed_at


def put(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def pick(items: tuple, order: tuple[int, ...]) -> tuple:
    return tuple(items[old] for old in order)


def called(updates: tuple, name: dict[int, int]) -> tuple:
    return tuple(sorted((name[replica], version, index) for replica, version, index in updates))


def swapped(one: tuple) -> tuple:
    version, broken, orphan = one
    return version, tuple(sorted(1 - server for server in broken)), orphan


def bit(version: int, finite: bool, server: int) -> int:
    return 1 << (4 * version + 2 * finite + server)


def bits(reports: int) -> int:
    """The same reports with the two servers' bits exchanged."""
    return (reports & 0x5555) << 1 | (reports & 0xAAAA) >> 1


def view(value: Any, replica: int) -> tuple:
    """What a coordinator or a shard says of one replica, without its number."""
    if isinstance(value, Coordinator):
        receipts = tuple(r.outcome.value for ledger in value.history for r in ledger.receipts if r.replica == replica)
        book, began = (value.book.given[replica], value.book.spent[replica]), value.began[replica]
        offered = [(i, offer.seconds) for i, offer in enumerate(value.quorum.offers) if offer.replica == replica]
        standing = value.standing[replica].value, tuple(offered), replica in value.quorum.kept
        tower = value.since[replica], value.computed[replica], value.holders[replica]
        return standing, tower, value.alive[replica], receipts, book, began
    update = value.held[replica]
    return update and update[1:], replica in value.refused, value.taken is not None and replica in value.taken


def renamed(value: Any, order: tuple[int, ...], servers: tuple[int, ...]) -> Any:
    """A coordinator or a shard of which replicas and servers have other numbers."""
    name = {old: new for new, old in enumerate(order)}
    if isinstance(value, Shard):
        held = tuple(update and (name[update[0]], *update[1:]) for update in pick(value.held, order))
        taken = value.taken and tuple(sorted(name[r] for r in value.taken))
        refused = frozenset(name[r] for r in value.refused)
        return replace(value, held=held, computed=pick(value.computed, order), refused=refused, taken=taken)
    book, history = value.book, []
    for ledger in value.history:
        receipts = sorted((r._replace(replica=name[r.replica]) for r in ledger.receipts), key=lambda r: r.replica)
        decided = tuple(sorted(name[r] for r in ledger.decided))
        history.append(replace(ledger, decided=decided, receipts=tuple(receipts)))
    offers = tuple(replace(offer, replica=name[offer.replica]) for offer in value.quorum.offers)
    policy = value.quorum.policy
    if isinstance(policy, TellingApart):
        policy = policy.renamed(order)
    kept = tuple(sorted(name[r] for r in value.quorum.kept))
    return replace(
        value,
        quorum=replace(value.quorum, policy=policy, offers=offers, kept=kept),
        book=Book(pick(book.given, order), pick(book.spent, order), book.totals and pick(book.totals, order)),
        standing=pick(value.standing, order),
        holders=tuple(frozenset(servers[s] for s in holders) for holders in pick(value.holders, order)),
        since=pick(value.since, order),
        computed=pick(value.computed, order),
        began=pick(value.began, order),
        alive=pick(value.alive, order),
        squares=pick(value.squares, order),
        published=frozenset(servers[s] for s in value.published),
        history=tuple(history),
    )


class Search(NamedTuple):
    """What an exhaustive search found."""

    states: int
    transitions: int
    complete: int


@held_back()  # states are many, and none is garbage
def search(world: World) -> Search:
    """Visit every state; raise `Violation` for a forbidden one and for one that cannot reach the last version."""
    start = world.canonical(world.start)
    numbers, states = {start: 0}, [start]  # by its representative's number, under whatever numbers it was met
    sources, targets, transitions = array("i"), array("i"), 0
    for source, state in enumerate(states):  # grows while it is read: breadth first
        for fair, after in world.steps(state):
            if after is state:
                continue
            transitions += 1
            target = numbers.get(after, -1)
            if target < 0:
                same = world.canonical(after)
                target = numbers[after] = numbers.setdefault(same, len(states))
                if target == len(states):
                    states.append(same)
            if fair:
                sources.append(source)
                targets.append(target)
    complete = [number for number, state in enumerate(states) if world.done(state)]
    stuck = unreached(len(states), sources, targets, complete)
    if stuck is not None:
        raise Violation(f"no way on from {states[stuck]}: {world.values[states[stuck].coordinator]}")
    return Search(len(states), transitions, len(complete))


def unreached(count: int, sources: array, targets: array, goals: list[int]) -> int | None:
    """The first node from which no goal can be reached."""
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    reached, frontier = bytearray(count), goals
    for goal in goals:
        reached[goal] = 1
    while frontier:
        found = []
        for node in frontier:
            for source in before[node]:
                if not reached[source]:
                    reached[source] = 1
                    found.append(source)
        frontier = found
    return reached.find(0) if not all(reached) else None
