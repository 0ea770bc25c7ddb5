"""Which batch goes to which replica: each is known by its identity, and ends with one replica.

The *identity* of a batch is its place, from 0 on, in the order in which its source is drawn, over all runs that draw
from it. A replica knows its batches by numbers of its own, 1, 2, … in each run, and uses them in that order. Here is
which identity is which number of whom, of all that are handed out and not accounted for. It owns

- who is next: replicas in turn, each at most ``depth`` batches beyond what it is known to have spent;
- what it is handed: what came back, the oldest first, and then what is new;
- what of a lost replica's comes back: what it had not spent, once server 0 has said how far it came. Until then another
  may not have it, for the lost one's update may be on its way and count.

It must not know values, messages, versions or what becomes of updates. Nobody is handed one identity twice unless the
first time ended without a use, or the caller says by `requeue` that it is to be used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import takewhile

from flowrt.base.errors import InternalError


class Handing:
    """Hands identities out to ``replicas`` replicas, each ``depth`` more than it has spent.

    New ones begin with ``first`` and end before ``total``, if that is known; ``returned`` are handed out before them.
    """

    def __init__(
        self, replicas: int, depth: int, first: int = 0, returned: Iterable[int] = (), total: int | None = None
    ) -> None:
        self.depth = depth
        self._rests = False  # all have as many as may be, and nobody has spent one since
        self.first = self.new = first  # the next identity that nobody was handed yet
        self.total = total
        self.given = [0] * replicas  # by replica, the number of its newest batch
        self.spent = [0] * replicas
        self._held: list[dict[int, int]] = [{} for _ in range(replicas)]  # by replica: number → identity, in order
        self._came_back = sorted(returned)  # a heap
        self._lost: set[int] = set()
        self._doubtful: set[int] = set()  # lost, and not known how far they came
        self._excused: set[int] = set()
        self._left: set[int] = set()
        self._turn = 0

    # ── handing out ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def due(self) -> tuple[int, int] | None:
        """What is handed out next: (replica, identity). None where nobody may have a batch, or there is none."""
        if self._rests or (identity := self.identity) is None:
            return None
        given, spent, depth, count = self.given, self.spent, self.depth, len(self.given)
        turn = self._turn % count
        if given[turn] - spent[turn] < depth and self._may_have(turn):  # as mostly
            return turn, identity
        for replicas in (range(turn + 1, count), range(turn)):
            for replica in replicas:
                if given[replica] - spent[replica] < depth and self._may_have(replica):
                    return replica, identity
        self._rests = True
        return None

    def lacks(self, enough: int) -> bool:
        """Whether somebody who may have one has fewer than ``enough`` that it is not known to have spent."""
        given, spent = self.given, self.spent
        return any(given[r] - spent[r] < enough and self._may_have(r) for r in range(len(given)))

    @property
    def identity(self) -> int | None:
        """The batch that is handed out next: one that came back, or else a new one; None where there is none."""
        if self._came_back:
            return self._came_back[0]
        return self.new if self.total is None or self.new < self.total else None

    def hand(self, replica: int, identity: int) -> int:
        """Hand out what is `due`; answers which number it is there."""
        if self._came_back:
            heappop(self._came_back)
        else:
            self.new += 1
        self._turn = replica + 1
        number = self.given[replica] = self.given[replica] + 1
        self._held[replica][number] = identity
        return number

    def next(self) -> tuple[int, int, int] | None:
        """Hand out a batch: (replica, number, identity). None where none is `due`."""
        if (due := self.due) is None:
            return None
        replica, identity = due
        return replica, self.hand(replica, identity), identity

    def end(self, total: int) -> None:
        """There is no batch with an identity of ``total`` or above."""
        self.total = total

    @property
    def over(self) -> bool:
        """Whether nothing is left to hand out, and nothing comes back but what is yet said to be used again."""
        return self.identity is None and not self._doubtful

    # ── what is known of it ──────────────────────────────────────────────────────────────────────────────────────────

    def held(self, replica: int) -> dict[int, int]:
        """Of what a replica was handed, and is not accounted for, number → identity, in order; not to be changed."""
        return self._held[replica]

    @property
    def open(self) -> list[int]:
        """Every identity that was handed out, or came back, and is not accounted for, in order."""
        return sorted([*self._came_back, *(identity for held in self._held for identity in held.values())])

    def spend(self, replica: int, number: int) -> list[int]:
        """All batches of a replica up to ``number`` are used; answers those not accounted for before, which now are."""
        if number > self.spent[replica]:
            self.spent[replica] = number
        if self.given[replica] - number < self.depth:
            self._rests = False
        held = self._held[replica]
        return [*map(held.pop, takewhile(number.__ge__, (*held,)))]

    def requeue(self, *identities: int) -> None:
        """Batches that were accounted for are to be used again, before new ones."""
        for identity in identities:
            heappush(self._came_back, identity)

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────

    def lose(self, replica: int) -> None:
        """Hand nothing to a replica until it joins again. What it holds waits for `confirm_lost`."""
        self._lost.add(replica)
        self._doubtful.add(replica)

    def confirm_lost(self, replica: int, spent: int) -> list[int]:
        """The replica that was lost had spent its first ``spent`` batches: what it had beyond comes back.

        Answers that. Batches that it had spent are accounted for as others are, by `spend`. Said again, or of one that
        is not lost, it changes nothing.
        """
        if replica not in self._doubtful:
            return []
        self._doubtful.discard(replica)
        back = self._take(replica, [k for k in self._held[replica] if k > spent])
        self.requeue(*back)
        return back

    def join(self, replica: int, number: int) -> None:
        """A replica that was lost takes part again, with batches numbered from ``number`` + 1 on.

        Raises `InternalError` where it is not known what came back of the lost one's, or it was handed more than that.
        """
        if replica in self._doubtful or number < self.given[replica]:
            raise InternalError(
                f"replica {replica} joins after batch {number}: it was handed {self.given[replica]}, "
                f"{'and it is not known' if replica in self._doubtful else 'and it is known'} how many it had spent"
            )
        self._lost.discard(replica)
        self._left.discard(replica)
        self.given[replica] = self.spent[replica] = number
        self._rests = False

    def excuse(self, replica: int) -> None:
        """Hand nothing to a replica that may be lost or frozen, until it is included again; it keeps what it has."""
        self._excused.add(replica)

    def include(self, replica: int) -> None:
        """Hand a replica batches again that was excused."""
        self._excused.discard(replica)
        self._rests = False

    def leave(self, replica: int) -> None:
        """Hand nothing more to a replica that is about to go. It is said to be lost when it has gone."""
        self._left.add(replica)

    def begin_again(self) -> None:
        """Another run begins: numbers begin with 1, and what is not accounted for comes back. Nobody is lost."""
        for replica, held in enumerate(self._held):
            self.requeue(*self._take(replica, list(held)))
        self.given[:] = self.spent[:] = [0] * len(self.given)
        for some in (self._lost, self._doubtful, self._excused, self._left):
            some.clear()
        self._rests = False

    def _may_have(self, replica: int) -> bool:
        return not (replica in self._lost or replica in self._excused or replica in self._left)

    def _take(self, replica: int, numbers: list[int]) -> list[int]:
        held = self._held[replica]
        return [held.pop(number) for number in numbers]
