"""One run of a trainer whose updates may be stale, searched to exhaustion: towers outlive the version they began in.

What holds in every state, beside what `test_stream_protocol` says: no update moves a version that is newer by more than
the bound than what it was computed from, whatever is heard of it again; its one receipt names both, and its batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from policy_world import Hasty
from replica_world import Violation, search
from stream_world import Replica, Streams

from flowrt.sched.policies import Async, BoundedStaleness
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.shard import Shard
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from flowrt.sched.policies import Policy

pytestmark = [  # a search computes and waits for nothing: it takes what the machine gives it
    pytest.mark.timeout(300),
    pytest.mark.settled,
]

ONE: dict[str, Any] = {"servers": 1}
LONG: dict[str, Any] = {"versions": 3, "batches": (3, 1), **ONE}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("policy", "world"),
    [
        (Async(), ONE),
        (BoundedStaleness(0), ONE),
        (BoundedStaleness(1), {"deaths": True, "batches": (2, 1), **ONE}),
        (Hasty(1), LONG),
        (Hasty(1), {"losses": 1, "batches": (2, 1), **ONE}),
        (Hasty(1), {"faults": 1, "batches": (2, 1), **ONE}),
        (Hasty(2), {"versions": 3, "batches": (2, 2), **ONE}),
        (Hasty(1), {"batches": (1, 1)}),
    ],
)
def test_no_reachable_state_of_a_run_with_stale_updates_breaks_the_protocol(
    policy: Policy, world: dict[str, Any]
) -> None:
    found = search(Streams(policy, **world))
    print(found)
    assert found.complete > 0


# Servers.


class HoldsAgain(Shard):
    """What was applied is news when it comes again."""

    def expects(self, version: int, replica: int) -> bool:
        again = replace(self, computed=(self.version - self.staleness - 1,) * len(self.held))
        return super(HoldsAgain, again).expects(version, replica) and self.held[replica] is None


class HoldsWhatIsTooOld(Shard):
    """What is a version too old is kept."""

    @classmethod
    def start(cls, replicas: int, version: int = 0, staleness: int = 0) -> Any:
        return super().start(replicas, version, staleness + 1)


class DropsWhatGoesOn(Shard):
    """Forgets at the next version what may count in that."""

    def applied(self, version: int) -> Any:
        return replace(super().applied(version), held=(None,) * len(self.held))


class KeepsTheOlder(Shard):
    """A newer update does not take the place of one that is held."""

    def expects(self, version: int, replica: int) -> bool:
        return super().expects(version, replica) and self.held[replica] is None


# The coordinator.


class TakesWhatIsTooOld(Coordinator):
    """Cuts nobody off, and counts what comes."""

    def oldest(self, replica: int) -> int:
        return self.since[replica]

    def _is_late(self, version: int) -> bool:
        return False


class TakesUpdatesOfEarlierBatches(Coordinator):
    """An update of a batch that has its receipt is one of the next."""

    def oldest(self, replica: int) -> int:
        return max(0, self.version - self.quorum.policy.staleness)


class ReceiptsWhatGoesOn(Coordinator):
    """A tower that goes on has a receipt with each version."""

    def _account(self) -> Any:
        return super(ReceiptsWhatGoesOn, replace(self, computed=(-9,) * len(self.computed)))._account()


class SpendsAgainWhatGoesOn(Coordinator):
    """Whoever has a batch begins each version with it."""

    def _open_next(self, now: float) -> Any:
        opened = super()._open_next(now)
        going = [r for r, batch in enumerate(opened.spent) if batch == self.spent[r] and opened.begun(r)]
        return replace(opened, book=opened.book.spend(*filter(opened.book.waits, going)))


class ForgetsWhatIsWhole(Coordinator):
    """What became whole after a set was fixed is not offered to the next version."""

    def _open_next(self, now: float) -> Any:
        return super(ForgetsWhatIsWhole, replace(self, waiting=()))._open_next(now)


class ForgetsWhoHolds(Coordinator):
    """Of what goes on it is not known any more who holds it, but that all do counts."""

    def _open_next(self, now: float) -> Any:
        opened = super()._open_next(now)
        whole = (Standing.RUNNING if each is Standing.WHOLE else each for each in opened.standing)
        return replace(opened, standing=tuple(whole), quorum=replace(opened.quorum, offers=()))


class NamesNoVersions(Coordinator):
    """An order does not say what its updates were computed from."""

    @property
    def versions(self) -> tuple[int, ...]:
        return ()


# Replicas.


class BeginsWithEachVersion(Streams):
    """A replica drops what it has under way for a newer version, from the next batch."""

    def is_under_way(self, one: Replica) -> bool:
        return one.sent[0] >= one.heard[0]


class GoesOnForEver(Streams):
    """A replica does not hear that what it has under way is too old."""

    def is_under_way(self, one: Replica) -> bool:
        return one.sent[0] >= one.heard[3] - 1


NOT_HELD = "is in the set, its update is not held here"
MUTANTS: list[tuple[type, Policy, dict[str, Any], str]] = [
    (HoldsAgain, Async(), {"batches": (2,), **ONE}, "no way on"),
    (DropsWhatGoesOn, Hasty(1), ONE, NOT_HELD),
    (KeepsTheOlder, Async(), {"faults": 1, "batches": (2, 1)}, "no way on"),
    (TakesWhatIsTooOld, Hasty(1), LONG, NOT_HELD),
    (TakesWhatIsTooOld, Hasty(1), {"shard": HoldsWhatIsTooOld, **LONG}, "version 2 applied .* after 2 versions"),
    (TakesUpdatesOfEarlierBatches, Async(), ONE, NOT_HELD),
    (ReceiptsWhatGoesOn, Async(), ONE, "is made of"),
    (SpendsAgainWhatGoesOn, Async(), ONE, "batches spent are"),
    (ForgetsWhatIsWhole, Async(), ONE, "given up although"),
    (ForgetsWhoHolds, Async(), ONE, "is made of"),
    (NamesNoVersions, Async(), ONE, NOT_HELD),
    (BeginsWithEachVersion, Async(), ONE, NOT_HELD),
    (GoesOnForEver, Hasty(1), LONG, "no way on"),
]


@pytest.mark.parametrize(
    ("mutant", "policy", "world", "symptom"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS]
)
def test_the_search_catches(mutant: type, policy: Policy, world: dict[str, Any], symptom: str) -> None:
    if issubclass(mutant, Streams):
        made = mutant(policy, **world)
    else:
        part = "shard" if issubclass(mutant, Shard) else "coordinator"
        made = Streams(policy, **world, **{part: mutant})
    with pytest.raises(Violation, match=symptom):
        search(made)
