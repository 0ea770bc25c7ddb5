"""One run of a trainer, searched to exhaustion: its batches, what replicas are told, and what its client allows.

What holds in every state: a version is ordered once, when the client has asked for it and not once the run ends;
servers never hold different versions of one number; every batch is spent once, in order, with one receipt, and the
variables hold exactly those whose receipt says so. And every state leads on, without another fault, to the last
version, to the end of the batches, or, without a client, to all servers at one version.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from policy_world import AllOfThoseLeft, Patient
from replica_world import Violation, put, search
from stream_world import Replica, Streams

from flowrt.sched.policies import AllOf, Deadline, FirstOf
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Outcome
from flowrt.sched.versions.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.sched.policies import Policy

pytestmark = [  # a search computes and waits for nothing: it takes what the machine gives it
    pytest.mark.timeout(300),
    pytest.mark.settled,
]

ONE: dict[str, Any] = {"servers": 1}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("policy", "world"),
    [
        (FirstOf(1), {"losses": 1, **ONE}),
        (FirstOf(1), {"faults": 1, "deaths": True, **ONE}),
        (FirstOf(1), {"versions": 3, "batches": (3, 1), **ONE}),
        (AllOf(), {"deaths": True}),
        (AllOf(), {"losses": 1}),
        (FirstOf(1), {"batches": (2, 1)}),
        (Deadline(1.0), {"batches": (1, 1), "losses": 1, **ONE}),
        (Deadline(1.0), {"deaths": True, "batches": (2, 1), **ONE}),
        (Patient(), ONE),
        (AllOfThoseLeft(), {"batches": (2, 1), "losses": 1, **ONE}),
    ],
)
def test_no_reachable_state_of_a_run_breaks_the_protocol(policy: Policy, world: dict[str, Any]) -> None:
    found = search(Streams(policy, **world))
    print(found)
    assert found.complete > 0


class TellsOnlyOfTheBatch(Streams):
    """A replica that does not begin learns nothing of the batches that were spent without it."""

    def told(self, one: Replica, coordinator: Coordinator, replica: int) -> tuple[int, int, bool, int]:
        version, _, begun, since = super().told(one, coordinator, replica)
        return version, coordinator.begun(replica) or one.heard[1], begun, since


class WaitsToBeTold(Streams):
    """A replica that was given a batch too late to be told of it waits for the next version."""

    def _computes(self, state: Any, replica: int) -> Iterator[Any]:
        return super()._computes(state, replica) if state.replicas[replica].heard[2] else iter(())


class BeginsWithTheLast(Streams):
    """A replica that begins by itself takes the newest batch it has."""

    def batch(self, one: Replica) -> int:
        return one.heard[1] if one.heard[2] else max(one.given, one.heard[1] + 1)


class BeginsWithoutSpending(Coordinator):
    def _open_next(self, now: float) -> Any:
        return replace(super()._open_next(now), book=self.book)


class HoldsWithoutSpending(Coordinator):
    def held(self, server: int, version: int, replica: int, *said: Any) -> Any:
        if version == self.version and self.standing[replica] is Standing.IDLE and self.quorum.closed_at is None:
            return self._stand(replica, Standing.RUNNING)._gather(server, replica, version, *said, 0.0)
        return super().held(server, version, replica, *said)


class GivesBackWhatIsLate(Coordinator):
    def _open_next(self, now: float) -> Any:
        late = [receipt.replica for receipt in self._account().receipts if receipt.outcome is Outcome.LATE]
        book = self.book
        for replica in late:
            book = replace(book, spent=put(book.spent, replica, book.spent[replica] - 1))
        return super(GivesBackWhatIsLate, replace(self, book=book))._open_next(now)


class ReceiptsTheNextBatch(Coordinator):
    def _account(self) -> Any:
        ledger = super()._account()
        return replace(ledger, receipts=tuple(r._replace(batch=r.batch + 1) for r in ledger.receipts))


class KeepsOnReceiptWhatCameLate(Coordinator):
    def _account(self) -> Any:
        ledger = super()._account()
        return replace(ledger, receipts=tuple(r._replace(outcome=Outcome.KEPT) for r in ledger.receipts))


class ExpectsMoreForEver(Coordinator):
    def _may_offer(self, beside: int = -1) -> tuple[int, ...]:
        idle = {r for r, standing in enumerate(self.standing) if self.alive[r] and standing is Standing.IDLE}
        return tuple(sorted({*super()._may_offer(beside), *idle} - {beside}))


class EndsBeforeTheLastBatch(Coordinator):
    def _may_offer(self, beside: int = -1) -> tuple[int, ...]:
        idle = {r for r, standing in enumerate(self.standing) if standing is Standing.IDLE and not self.book.waits(r)}
        return tuple(replica for replica in super()._may_offer(beside) if replica not in idle)


class OrdersUnasked(Coordinator):
    def order(self, now: float) -> Any:
        ordered, chosen = super(OrdersUnasked, replace(self, allowed=self.version + 1)).order(now)
        return replace(ordered, allowed=self.allowed), chosen


class OrdersForNobody(Coordinator):
    def order(self, now: float) -> Any:
        ordered, chosen = super(OrdersForNobody, replace(self, closing=False)).order(now)
        return replace(ordered, closing=self.closing), chosen


class OrdersAgain(Coordinator):
    def order(self, now: float) -> Any:
        return super(OrdersAgain, replace(self, ordered_at=None)).order(now)


class DropsTheOrderAtTheEnd(Coordinator):
    def close(self) -> Any:
        return replace(self, closing=True, ordered_at=None)


class SaysItIsSettled(Coordinator):
    @property
    def settled(self) -> bool:
        return True


MUTANTS: list[tuple[type, Policy, dict[str, Any], str]] = [
    (TellsOnlyOfTheBatch, FirstOf(1), ONE, "a batch is applied twice"),
    (WaitsToBeTold, AllOf(), ONE, "no way on"),
    (BeginsWithTheLast, FirstOf(1), ONE, "is made of"),
    (BeginsWithoutSpending, FirstOf(1), ONE, "batches spent are"),
    (HoldsWithoutSpending, AllOf(), ONE, "receipts are"),
    (GivesBackWhatIsLate, FirstOf(1), ONE, "after that of batch"),
    (ReceiptsTheNextBatch, FirstOf(1), ONE, "receipts are"),
    (KeepsOnReceiptWhatCameLate, FirstOf(1), ONE, "receipts are"),
    (ExpectsMoreForEver, AllOf(), {"batches": (1, 1), **ONE}, "no way on"),
    (EndsBeforeTheLastBatch, AllOf(), ONE, "given up although 2 replicas have batches"),
    (OrdersUnasked, FirstOf(1), ONE, "version 0 was ordered, the client asked for 0"),
    (OrdersForNobody, FirstOf(1), {"deaths": True, **ONE}, "although the run ends"),
    (OrdersAgain, FirstOf(1), ONE, "version 0 was ordered after 1 versions"),
    (DropsTheOrderAtTheEnd, FirstOf(1), {"deaths": True}, "settled although"),
    (SaysItIsSettled, FirstOf(1), {"deaths": True}, "settled although"),
]


@pytest.mark.parametrize(
    ("mutant", "policy", "world", "symptom"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS]
)
def test_the_search_catches(mutant: type, policy: Policy, world: dict[str, Any], symptom: str) -> None:
    with_mutant = mutant(policy, **world) if issubclass(mutant, Streams) else None
    with pytest.raises(Violation, match=symptom):
        search(with_mutant or Streams(policy, **world, coordinator=mutant))
