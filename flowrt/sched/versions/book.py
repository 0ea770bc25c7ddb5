"""The book of batches: which each replica has been given, and how many of them are spent.

Each replica has batches of its own, numbered 1, 2, … as they are handed to it, and uses them in that order. A batch is
spent at the moment that the replica is booked to begin a version with it, never again and never given back. So what
is spent of a replica is one number, and a replica that is told this number knows what it may still use.

The book must not know versions or who is alive: that is the coordinator's.
"""

from __future__ import annotations

from flowrt.base.errors import InternalError
from flowrt.base.valueclass import put, replace, stateclass


@stateclass
class Book:
    """How far each replica is in its batches.

    Args:
        given: By replica, how many batches it has said to have been given; more may be on their way.
        spent: By replica, how many it has begun a version with.
        totals: By replica, how many it will ever be given; None while that is not known.
    """

    given: tuple[int, ...]
    spent: tuple[int, ...]
    totals: tuple[int, ...] | None = None

    @classmethod
    def start(cls, replicas: int) -> Book:
        """The book of ``replicas`` replicas that have been given nothing."""
        return cls((0,) * replicas, (0,) * replicas)

    def waits(self, replica: int) -> bool:
        """Whether ``replica`` has a batch that is not spent."""
        return self.given[replica] > self.spent[replica]

    @property
    def waiting(self) -> list[int]:
        """The replicas that have a batch that is not spent."""
        pairs = zip(self.given, self.spent, strict=True)
        return [replica for replica, (given, spent) in enumerate(pairs) if given > spent]

    def expects(self, replica: int) -> bool:
        """Whether ``replica`` has a batch that is not spent, or may still be given one."""
        return self.totals is None or self.totals[replica] > self.spent[replica]

    def give(self, replica: int, total: int) -> Book:
        """Note that ``replica`` has been given its first ``total`` batches. Fewer change nothing."""
        return self if total <= self.given[replica] else replace(self, given=put(self.given, replica, total))

    def spend(self, *replicas: int) -> Book:
        """Spend the next batch of each of ``replicas``. Raises `InternalError` where none waits."""
        spent = list(self.spent)
        for replica in replicas:
            if spent[replica] >= self.given[replica]:
                raise InternalError(f"replica {replica} is to begin, its {spent[replica]} batches are spent")
            spent[replica] += 1
        return replace(self, spent=tuple(spent))

    def withdraw(self, replica: int) -> Book:
        """Note that ``replica`` has nothing any more of what is not spent: it is gone, and its batches with it."""
        return replace(self, given=put(self.given, replica, self.spent[replica]))

    def skip(self, replica: int, number: int) -> Book:
        """Note that batches of ``replica`` up to ``number`` will not be used. Fewer than are spent change nothing."""
        if number <= self.spent[replica]:
            return self
        given = max(number, self.given[replica])
        return replace(self, given=put(self.given, replica, given), spent=put(self.spent, replica, number))

    def exhausted(self, totals: tuple[int, ...]) -> Book:
        """Note how many batches each replica will ever be given. Said again it may be more of some, never fewer."""
        if len(totals) != len(self.given):
            raise InternalError(f"the batches of {len(totals)} replicas are counted, expected {len(self.given)}")
        return replace(self, totals=tuple(map(max, totals, self.totals or totals)))
