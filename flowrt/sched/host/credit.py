"""How much a task may hold of values that nobody can use yet, and who goes on where that is used up.

Law: pure. A value is made or fetched *ahead* while there is credit for it, and its credit returns when it is consumed:
not when it has arrived, nor when it lies in a queue's line. Without credit only what is *wanted* is made and fetched:
what goes into a place that waits for it, and depends on nothing but computations and on values that others are as sure
of (`flowrt.sched.demand` says when). Of those that are wanted for one way (a peer, a queue, or this task itself) the
oldest step always goes on, credit or not.

So credit never holds up what could give some back. Of all that is wanted anywhere, take the oldest step: it is the
oldest on its way, so it goes on; what it fetches is asked for from tasks where its step is again the oldest; edges
within a step make no circle, so that ends at computations, and values that are taken as soon as they are made. It is
consumed, and then another one is the oldest. What is not wanted holds no place, and waits for just what it would have
waited for had it been there. A value larger than all credit is held alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from flowrt.sched.host.rendezvous import StepKey

Order: TypeAlias = tuple[int, str]
"""A step's number, and its epoch: the same order on all tasks."""


def way_to(peer: str) -> str:
    """The way of what a peer takes."""
    return f"to {peer}"


@dataclass(slots=True, eq=False)
class Want:
    """What is wanted on a ``way``: ``then`` is called, from `Credit.settle`, when it may be made."""

    way: str
    order: Order
    nbytes: int
    then: Callable[[], None]
    going: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class _Way:
    waiting: list[tuple[Order, int, Want]] = field(default_factory=list)  # a heap
    going: list[Order] = field(default_factory=list)


class Credit:
    """A task's credit of ``limit`` bytes. ``later`` has a call made soon, by whoever may make some."""

    def __init__(self, limit: int, later: Callable[[Callable[[], None]], object]) -> None:
        self.limit = limit
        self.held = 0
        self._later = later
        self._due = False
        self._ways: dict[str, _Way] = {}
        self._numbers = count()

    @property
    def ways(self) -> int:
        """On how many ways something is wanted, or under way."""
        return len(self._ways)

    def try_hold(self, nbytes: int) -> bool:
        """Take credit for a value that is made ahead, if there is enough."""
        if self.held and self.held + nbytes > self.limit:
            return False
        self.held += nbytes
        return True

    def hold(self, nbytes: int) -> None:
        """Take credit for what is there, or will be; less than nothing gives some back."""
        self.held += nbytes
        if nbytes < 0:
            self._look()

    def want(self, way: str, key: StepKey, nbytes: int, then: Callable[[], None]) -> Want:
        """Ask for ``nbytes`` of values on a ``way``; they are taken where ``then`` is called."""
        want = Want(way, (key[1], key[0]), nbytes, then)
        heapq.heappush(self._ways.setdefault(way, _Way()).waiting, (want.order, next(self._numbers), want))
        self._look()
        return want

    def end(self, want: Want) -> None:
        """It was consumed, or is given up."""
        if not want.over:
            want.over, want.then = True, _nothing
            if want.going:
                self._leave(want.way, want.order)
            self._look()

    @contextmanager
    def sending(self, way: str, key: StepKey, nbytes: int) -> Iterator[None]:
        """A value is on its ``way`` while the block runs, though its step may have done with it."""
        order = key[1], key[0]
        found = self._ways.setdefault(way, _Way())
        found.going.append(order)
        self.held += nbytes
        try:
            yield
        finally:
            self._leave(way, order)
            self.hold(-nbytes)

    def _leave(self, name: str, order: Order) -> None:
        way = self._ways[name]
        way.going.remove(order)
        if not (way.going or way.waiting):
            del self._ways[name]

    def _look(self) -> None:
        if not self._due and any(way.waiting for way in self._ways.values()):
            self._due = True
            self._later(self.settle)

    def settle(self) -> None:
        """Let go on whoever may: the oldest of every way, and others, oldest first, while there is credit."""
        self._due = False
        while True:
            first = [way for way in self._ways.values() if self._next(way) is not None]
            first.sort(key=lambda way: way.waiting[0])
            allowed = next((way for way in first if self._may_go(way)), None)
            if allowed is None:
                break
            want = heapq.heappop(allowed.waiting)[2]
            want.going = True
            allowed.going.append(want.order)
            self.held += want.nbytes
            want.then()
        for name in [name for name, way in self._ways.items() if not (way.waiting or way.going)]:
            del self._ways[name]

    @staticmethod
    def _next(way: _Way) -> Want | None:
        while way.waiting and way.waiting[0][2].over:
            heapq.heappop(way.waiting)
        return way.waiting[0][2] if way.waiting else None

    def _may_go(self, way: _Way) -> bool:
        want = way.waiting[0][2]
        return self.held + want.nbytes <= self.limit or all(want.order <= other for other in way.going)


def _nothing() -> None:
    """What is over wants nothing."""
