"""The replica protocol, searched to exhaustion and walked at random; every planted mutant must be caught.

What holds in every state: all servers apply the same set to a version, each exactly once; every applied update was
held, finite, by every server, and was computed from that version in one try; every tower begun is receipted once. And
with enough replicas alive, the last version can be reached from every state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from policy_world import POLICIES, AllOfThoseLeft, Alternating, Patient, TellingApart
from replica_world import Violation, World, put, search

from flowrt.sched.policies import AllOf, Close, Deadline, FirstOf, Policy
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Outcome
from flowrt.sched.versions.quorum import Verdict
from flowrt.sched.versions.shard import Shard
from flowrt.sched.versions.standing import Standing

pytestmark = [  # a search computes and waits for nothing: it takes what the machine gives it
    pytest.mark.timeout(300),
    pytest.mark.settled,
]

FEW = {"joins": 0, "faults": 0}
CALM = {**FEW, "least": 3}
BROKEN = {"versions": 1, "joins": 0, "faults": 1}


@pytest.mark.timeout(240)
def test_no_reachable_state_breaks_the_protocol_when_a_replica_crashes_and_an_update_is_not_finite() -> None:
    found = search(World(FirstOf(2), replicas=3, versions=2, joins=0, faults=1))
    print(found)
    assert found.states > 90_000
    assert found.complete > 0


@pytest.mark.timeout(240)
def test_no_reachable_state_breaks_the_protocol_when_replacements_join() -> None:
    found = search(World(FirstOf(2), replicas=3, versions=2, joins=1, faults=0))
    print(found)
    assert found.states > 70_000
    assert found.complete > 0


def test_no_reachable_state_breaks_the_protocol_when_every_replica_is_needed() -> None:
    assert search(World(AllOf(), replicas=3, least=3, versions=2, faults=1)).complete > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_reachable_state_breaks_the_protocol_whatever_decides_and_whenever_it_is_woken(policy: Policy) -> None:
    least = 3 if policy == AllOf() else 2
    assert search(World(policy, replicas=3, least=least, **BROKEN)).complete > 0
    assert search(World(policy, replicas=3, versions=2, **CALM)).complete > 0


def test_no_reachable_state_breaks_the_protocol_when_what_was_seen_decides() -> None:
    assert search(World(TellingApart(), replicas=3, versions=2, **CALM)).complete > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("policy", "replicas", "floor", "versions"),
    [
        *((AllOf(), 3, 1, 2), (AllOf(), 3, 2, 2)),
        *((Deadline(1.0), 3, 1, 1), (Patient(), 3, 2, 1)),  # time multiplies states: three in a version,
        *((Deadline(1.0), 2, 1, 2), (Patient(), 2, 2, 2)),  # and two from one to the next
    ],
    ids=str,
)
def test_no_reachable_state_breaks_the_protocol_when_replicas_come_and_go(
    policy: Policy, replicas: int, floor: int, versions: int
) -> None:
    found = search(World(policy, replicas=replicas, least=floor, floor=floor, versions=versions, joins=1, faults=0))
    print(found)
    assert found.complete > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("floor", [0, 1])
def test_no_reachable_state_breaks_the_protocol_when_a_replica_leaves_and_comes_again(floor: int) -> None:
    policy: Policy = AllOf() if floor else FirstOf(1)
    found = search(World(policy, replicas=2, least=1, floor=floor, versions=2, joins=1, faults=0, leaves=1))
    print(found)
    assert found.complete > 0


def test_coordinators_that_differ_in_what_was_not_measured_have_one_number() -> None:
    world = World(FirstOf(2))
    first = world.values[world.start.coordinator]
    assert world.number(replace(first, square=float("nan"))) == world.number(replace(first, square=float("nan")))


@dataclass
class Net:
    """Two servers, a coordinator and replicas, joined by a network that loses, repeats and reorders."""

    rng: random.Random
    policy: Policy
    replicas: int = 4
    servers: int = 2
    versions: int = 3
    flight: list[tuple] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator.start(
            self.policy, self.replicas, self.servers, allowed=self.versions, remember=self.versions
        )
        self.shards: list[Shard[Any]] = [Shard.start(self.replicas) for _ in range(self.servers)]
        self.alive = [True] * self.replicas
        self.tries: dict[tuple[int, int], frozenset[int]] = {}
        self.written: list[list[tuple]] = [[] for _ in range(self.servers)]
        self.clock = 0.0
        self.faults = self.replicas - 2  # crashes and broken updates per run: enough can always count

    def run(self) -> None:
        for _ in range(20_000):
            if self.coordinator.version == self.versions:
                return
            if self.flight and (len(self.flight) > 30 or self.rng.random() < 0.7):
                self.deliver()
            else:
                self.send()
        raise AssertionError(f"stuck: {self.coordinator}")

    def deliver(self) -> None:
        index = self.rng.randrange(len(self.flight))
        name, *arguments = self.flight[index]
        fate = self.rng.random()
        if fate < 0.7:  # else it stays in flight and comes again
            self.flight.pop(index)
        if fate > 0.3:  # else it is lost
            getattr(self, name)(*arguments)

    def send(self) -> None:
        """A replica fails, begins or pushes, perhaps again; a set is announced or a publication told, perhaps again."""
        self.clock += self.rng.random()
        self.coordinator = self.coordinator.tick(self.clock)
        replica, version = self.rng.randrange(self.replicas), self.coordinator.version
        if not self.alive[replica]:
            self.coordinator = self.coordinator.lost(replica)
            return
        if self.faults and self.rng.random() < 0.01:
            self.faults, self.alive[replica] = self.faults - 1, False
            return
        before = self.coordinator.begun(replica)
        if not before and self.coordinator.decided(version) is None:
            self.coordinator = self.coordinator.ready(replica, self.coordinator.spent[replica] + 1, self.clock)
        if self.coordinator.begun(replica) and (version, replica) not in self.tries:
            spoil = self.faults > 0 and self.rng.random() < 0.05
            self.faults -= spoil
            self.tries[version, replica] = frozenset({self.rng.randrange(self.servers)} if spoil else ())
        server = self.rng.randrange(self.servers)
        mine = [key for key in self.tries if key[1] == replica]
        if mine:
            self.flight.append(("push", server, *(mine[-1] if self.rng.random() < 0.8 else self.rng.choice(mine))))
        if self.rng.random() < 0.3:
            self.announce(server, max(0, version - self.rng.randrange(2)))
        if self.written[server] and self.rng.random() < 0.3:
            self.flight.append(("publish", server, len(self.written[server]) - 1))

    def announce(self, server: int, version: int) -> None:
        self.coordinator, _ = self.coordinator.order(self.clock)
        chosen = self.coordinator.decided(version)
        if chosen is not None:
            self.flight.append(("apply", server, version, chosen))

    def push(self, server: int, version: int, replica: int) -> None:
        finite = server not in self.tries[version, replica]
        shard, verdict = self.shards[server].hold(version, replica, (version, replica), finite)
        assert verdict is not Verdict.LATE or shard.version > version or shard.taken is not None
        self.shards[server] = shard
        if verdict is not Verdict.LATE:
            self.flight.append(("report", server, version, replica, verdict is not Verdict.REFUSED))

    def report(self, server: int, version: int, replica: int, finite: bool) -> None:
        self.coordinator, _ = self.coordinator.held(server, version, replica, finite, self.clock)

    def apply(self, server: int, version: int, chosen: tuple[int, ...]) -> None:
        shard, updates = self.shards[server].take(version, chosen)
        if updates is not None and self.rng.random() < 0.2:
            self.shards[server] = shard.give_back(version)
        elif updates is not None:
            self.written[server].append(updates)
            self.shards[server] = shard.applied(version)

    def publish(self, server: int, version: int) -> None:
        self.coordinator = self.coordinator.publish(server, version, self.clock)


@pytest.mark.parametrize("seed", [20_160_404])
def test_random_interleavings_with_loss_repeats_and_crashes_keep_the_servers_equal(seed: int) -> None:
    print(f"seeds {seed} to {seed + 1_199}")
    spared = [policy for policy in POLICIES if policy != AllOf()]
    for run in range(seed, seed + 1_200):
        net = Net(random.Random(run), spared[run % len(spared)])
        net.run()
        for version in range(net.versions):
            assert_one_set_everywhere(net, version, run)
        assert all(len(log) == net.versions for log in net.written), run


def assert_one_set_everywhere(net: Net, version: int, run: int) -> None:
    chosen, receipts = net.coordinator.decided(version), net.coordinator.receipts(version)
    assert chosen is not None, run
    assert receipts is not None, run
    assert net.policy.least(net.replicas) <= len(chosen) <= (net.policy.size(net.replicas) or net.replicas), run
    assert not any(net.tries[version, replica] for replica in chosen), run
    assert all(log[version] == tuple((version, replica) for replica in chosen) for log in net.written), run
    assert [receipt.replica for receipt in receipts] == sorted(r for v, r in net.tries if v == version), run
    assert tuple(r.replica for r in receipts if r.outcome is Outcome.KEPT) == chosen, run


class TakesAnyVersion(Shard):
    def take(self, version: int, replicas: tuple[int, ...]) -> Any:
        return super().take(self.version, replicas)


class AppliesTwice(Shard):
    def take(self, version: int, replicas: tuple[int, ...]) -> Any:
        return self, super().take(version, replicas)[1]

    def _owed(self, version: int, done: str) -> None:
        """Nobody checks."""


class ChoosesItself(Shard):
    """The trap: a server applies what came first here."""

    def take(self, version: int, replicas: tuple[int, ...]) -> Any:
        here = tuple(replica for replica, update in enumerate(self.held) if update is not None)
        return super().take(version, here[: len(replicas)])


class KeepsLate(Shard):
    def hold(self, version: int, replica: int, update: Any, finite: bool) -> Any:
        return super().hold(self.version, replica, update, finite)


class AcceptsNotFinite(Shard):
    def hold(self, version: int, replica: int, update: Any, finite: bool) -> Any:
        return super().hold(version, replica, update, True)


class ForgetsNothing(Shard):
    def applied(self, version: int) -> Any:
        newer = tuple(version + 1 if update else version for update in self.held)
        return replace(super().applied(version), held=self.held, computed=newer)


class CountsRepeats(Coordinator):
    def _gather(self, server: int, replica: int, *said: Any) -> Any:
        return super()._gather(1 - server if server in self.holders[replica] else server, replica, *said)


class OffersEarly(Coordinator):
    def _gather(self, server: int, replica: int, *said: Any) -> Any:
        early = replace(self, holders=put(self.holders, replica, frozenset({1 - server})))
        return super(OffersEarly, early)._gather(server, replica, *said)


class FixesAgain(Coordinator):
    def held(self, server: int, version: int, replica: int, *said: Any) -> Any:
        if version == self.version and self.quorum.closed_at is not None and self.standing[replica] is Standing.RUNNING:
            reopened = replace(
                self, quorum=replace(self.quorum, offers=self.quorum.offers[1:], kept=(), closed_at=None)
            )
            return reopened._gather(server, replica, version, *said, 0.0)
        return super().held(server, version, replica, *said)


class IgnoresRefusals(Coordinator):
    def held(self, server: int, version: int, replica: int, finite: bool, *said: Any) -> Any:
        return super().held(server, version, replica, True, *said)


class TriesAgain(Coordinator):
    def joined(self, replica: int) -> Any:
        back = super().joined(replica)
        return back._stand(replica, Standing.IDLE) if self.standing[replica] is Standing.LOST else back


class OpensEarly(Coordinator):
    def publish(self, server: int, version: int, *said: Any) -> Any:
        first = super().publish(server, version, *said)
        return first if first.version > version else super(OpensEarly, first).publish(1 - server, version, *said)


class WakesAgain(Coordinator):
    """A timer that fired fires again."""

    @property
    def due(self) -> Any:
        return self.quorum.opened + self.quorum.wakes if self.quorum.wakes < 9 else None


class AsksAfterTheClose(Coordinator):
    def held(self, server: int, version: int, replica: int, *said: Any) -> Any:
        late = version == self.version and self.quorum.closed_at is not None
        if late and self.standing[replica] is Standing.RUNNING:
            return replace(self, quorum=self.quorum.ask(self._may_offer(), 0.0)), Verdict.LATE
        return super().held(server, version, replica, *said)


class NeverWakes(Coordinator):
    @property
    def due(self) -> Any:
        return None


class KeepsTheTimer(Coordinator):
    def _open_next(self, now: float) -> Any:
        following = super()._open_next(now)
        return replace(following, quorum=replace(following.quorum, wakes=self.quorum.wakes))


class ForgetsToSayWhoIsLost(Coordinator):
    def _stand(self, replica: int, standing: Standing) -> Any:
        return replace(self, standing=put(self.standing, replica, standing))


class HopesForTheLost(Coordinator):
    def _may_offer(self, beside: int = -1) -> tuple[int, ...]:
        gone = {r for r, standing in enumerate(self.standing) if standing in (Standing.LOST, Standing.ABSENT)}
        return tuple(sorted({*super()._may_offer(beside), *gone} - {beside}))


class OrdersAllThatIsThere(Coordinator):
    def order(self, now: float) -> Any:
        ordered, chosen = super().order(now)
        return ordered, chosen and tuple(sorted(offer.replica for offer in self.quorum.offers))


class ReceiptsAllThatIsThere(Coordinator):
    def _account(self) -> Any:
        ledger, whole = super()._account(), Standing.WHOLE
        kept = (r._replace(outcome=Outcome.KEPT) if self.standing[r.replica] is whole else r for r in ledger.receipts)
        return replace(ledger, receipts=tuple(kept))


class MissesWhoIsThere(Coordinator):
    def _record(self, now: float) -> Any:
        return replace(super()._record(now), missing=tuple((r, 0.0) for r in range(self.quorum.replicas)))


class NamesAnother(Deadline):
    """A policy that closes with a replica that has not offered."""

    def decide(self, offers: Any, able: Any, now: float) -> Any:
        return Close((offers[0].replica, *able))


class ReceiptsOnlyTheKept(Coordinator):
    def _account(self) -> Any:
        ledger = super()._account()
        return replace(ledger, receipts=tuple(r for r in ledger.receipts if r.outcome is Outcome.KEPT))


class NeverGivesUp(Coordinator):
    def stuck(self) -> None:
        return None


class ForgetsTheDecision(Coordinator):
    def _open_next(self, now: float) -> Any:
        return replace(super()._open_next(now), history=())


NOT_HELD = "is in the set, its update is not held here"
MUTANTS = [
    (TakesAnyVersion, FEW, NOT_HELD),
    (AppliesTwice, FEW, "applied version 0 after 1 versions"),
    (ChoosesItself, FEW, "which some server does not hold"),
    (KeepsLate, CALM, r"version 1 applied \(0, "),
    (AcceptsNotFinite, BROKEN, r"version 0 applied \(0, \(1,\)"),
    (ForgetsNothing, FEW, r"version 1 applied \(0, "),
    (CountsRepeats, FEW, NOT_HELD),
    (OffersEarly, FEW, NOT_HELD),
    (FixesAgain, FEW, "the set of version 0 was fixed again"),
    (IgnoresRefusals, BROKEN, NOT_HELD),
    (TriesAgain, {"versions": 1, "faults": 0}, "version 0 is torn"),
    (OpensEarly, FEW, "pushed version 1, this server is at 0"),
    (ReceiptsOnlyTheKept, FEW, r"towers of \[0, 1, 2\] had begun"),
    (NeverGivesUp, BROKEN, "no way on"),
    (ForgetsTheDecision, FEW, "version 0 is forgotten"),
]
DECIDING: list[tuple[type, Policy, dict[str, int], str]] = [
    (WakesAgain, Patient(), CALM, r"version 0 is decided: its set .* is fixed"),
    (AsksAfterTheClose, FirstOf(1), CALM, r"version 0 is decided: its set .* is fixed"),
    (NeverWakes, Patient(), CALM, "given up although it could close"),
    (KeepsTheTimer, Patient(), CALM, "failed in decide: IndexError"),
    (ForgetsToSayWhoIsLost, AllOfThoseLeft(), FEW, "given up although it could close"),
    (HopesForTheLost, AllOfThoseLeft(), FEW, "no way on"),
    (OrdersAllThatIsThere, Patient(), CALM, r"\(0, 1, 2\) was ordered, the set is"),
    (ReceiptsAllThatIsThere, Patient(), CALM, "the set is .*, receipts are"),
    (MissesWhoIsThere, Alternating(), CALM, "a record that cannot be"),
]


@pytest.mark.parametrize(("mutant", "world", "symptom"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_the_search_catches(mutant: type, world: dict[str, int], symptom: str) -> None:
    part = "shard" if issubclass(mutant, Shard) else "coordinator"
    with pytest.raises(Violation, match=symptom):
        search(World(FirstOf(2), **world, **{part: mutant}))


@pytest.mark.parametrize(("mutant", "policy", "world", "symptom"), DECIDING, ids=[m.__name__ for m, *_ in DECIDING])
def test_the_search_catches_of_deciding(mutant: Any, policy: Policy, world: dict[str, int], symptom: str) -> None:
    with pytest.raises(Violation, match=symptom):
        search(World(policy, **world, coordinator=mutant))


def test_the_search_catches_a_policy_that_names_who_has_not_offered() -> None:
    with pytest.raises(Violation, match="which has not offered; choose among"):
        search(World(NamesAnother(1.0), **CALM))
