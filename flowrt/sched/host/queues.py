"""Bounded queues of tuples of arrays; `orders` says which element leaves next.

Law: waiters are served strictly in order. An enqueue of several elements and a ``dequeue_many`` happen at once or not
at all; a cancelled one changed nothing; a completed one stands. After `close`, enqueues raise and dequeues drain what
is left. Elements are made, or copied, when there is room for them; a place in the line can be had before they are
there, by who is sure of them. A queue belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError, QueueClosedError
from flowrt.base.valueclass import valueclass
from flowrt.sched.host.orders import order_of
from flowrt.sched.host.rendezvous import fail

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.spec import Spec
    from flowrt.sched.host.orders import Element, Taken

FIFO = ("fifo",)


@valueclass
class QueueStatistics:
    """A queue at one moment."""

    name: str
    capacity: int
    size: int
    waiting_enqueues: int
    waiting_dequeues: int
    closed: bool


@dataclass(eq=False, slots=True)
class _Put:
    count: int
    make: Callable[[], list[Element]] | None = None  # not there yet: only its place in the line is
    turn: Callable[[], None] | None = None  # to be told once that there is room
    elements: list[Element] = field(default_factory=list)  # in the queue, once there are any
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def tell_turn(self) -> None:
        turn, self.turn = self.turn, None
        if turn is not None:
            turn()


@dataclass(eq=False, slots=True)
class _Take:
    count: int
    up_to: bool  # fewer, but some, will do once the queue is closed
    done: asyncio.Future[list[Taken]]


class Queue:
    """A queue holding at most ``capacity`` elements.

    Where some stay as long as more may come, the others are as many as go in or out at once: so there is room for all
    who want to put some in, or enough for who wants to take some.
    """

    def __init__(
        self, name: str, capacity: int, specs: Sequence[Spec] = (), order: Sequence[Attr] = FIFO, seed: int = 0
    ) -> None:
        if capacity < 1:
            raise GraphError(f"queue {name!r}: the capacity must be at least 1, got {capacity}")
        self.name = name
        self.specs = tuple(specs)  # of an element's components
        self.capacity = capacity
        self.order = tuple(order)
        self.closed = False
        self._elements = order_of(self.order, seed)
        self._kept = self._elements.kept
        self._at_once = capacity - self._kept
        self._puts: deque[_Put] = deque()
        self._lined_up: dict[Hashable, _Put] = {}
        self._takes: deque[_Take] = deque()

    def __len__(self) -> int:
        return len(self._elements)

    def statistics(self) -> QueueStatistics:
        """How full the queue is and how many wait at either end."""
        return QueueStatistics(
            self.name, self.capacity, len(self._elements), len(self._puts), len(self._takes), self.closed
        )

    def line_up(self, holder: Hashable, count: int, turn: Callable[[], None]) -> None:
        """Take a place in the line for ``count`` elements of ``holder``, who is told when there is room for them.

        Whoever comes later waits for these elements: who holds a place must be sure of them.
        """
        if self.closed or count > self._at_once:
            turn()  # to be told the error
            return
        put = self._lined_up[holder] = _Put(count, turn=turn)
        self._puts.append(put)
        self._settle()

    def step_back(self, holder: Hashable) -> None:
        """Give up a place that was never filled, if there is one."""
        put = self._lined_up.pop(holder, None)
        if put is not None and put in self._puts:
            self._puts.remove(put)
            self._settle()

    async def enqueue(self, elements: list[Element]) -> None:
        """Add the elements at once, waiting until all of them fit."""
        await self.enqueue_made(len(elements), lambda: elements)

    async def enqueue_made(self, count: int, make: Callable[[], list[Element]], holder: Hashable = None) -> None:
        """Add ``count`` elements at once, which are made when they fit, in the place of ``holder`` if that has one."""
        put = self._lined_up.pop(holder, None)
        if count > self._at_once:
            if put is not None:
                self._puts.remove(put)
                self._settle()
            raise GraphError(f"queue {self.name!r}: {count} elements never fit into {self._room()}")
        if put is None:
            if self.closed:
                raise self._closed_error("nothing can be enqueued")
            put = _Put(count)
            self._puts.append(put)
        put.count, put.make = count, make
        self._settle()
        try:
            await put.done
        except asyncio.CancelledError:
            self._retract(put)
            raise

    async def dequeue(self, count: int, *, up_to: bool = False) -> list[Element]:
        """Take ``count`` elements at once; with ``up_to`` a closed queue gives what is left, if anything is."""
        if count < 0:
            raise GraphError(f"queue {self.name!r}: cannot take {count} elements")
        if count > self._at_once:
            raise GraphError(f"queue {self.name!r}: {count} elements never gather in {self._room()}")
        if count == 0:
            return []
        take = _Take(count, up_to, asyncio.get_running_loop().create_future())
        self._takes.append(take)
        self._settle()
        try:
            return [element for _, _, element in await take.done]
        except asyncio.CancelledError:
            if take in self._takes:
                self._takes.remove(take)
            elif not take.done.cancelled() and take.done.exception() is None:
                for taken in take.done.result():
                    self._elements.give_back(taken)
            self._settle()
            raise

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Let nothing more in; waiting enqueues are still served unless cancelled. Closing twice is closing once."""
        self.closed = True
        if cancel_pending_enqueues:
            while self._puts:
                put = self._puts.popleft()
                fail(put.done, self._closed_error("the pending enqueue was cancelled"))
                put.tell_turn()
            self._lined_up.clear()
        self._settle()

    def _retract(self, put: _Put) -> None:
        """Undo a cancelled enqueue, unless some of its elements were taken already: then it is done, and stands."""
        if put in self._puts:
            self._puts.remove(put)
        else:
            self._elements.remove(put.elements)
        self._settle()

    def _settle(self) -> None:
        moved = True
        while moved:
            moved = self._serve_take() or self._serve_put()

    def _serve_take(self) -> bool:
        while self._takes and self._takes[0].done.done():
            self._takes.popleft()
        if not self._takes:
            return False
        take, ended = self._takes[0], self.closed and not self._puts
        have = len(self._elements) - (0 if ended else self._kept)
        if have >= take.count or (ended and take.up_to and have):
            self._takes.popleft()
            take.done.set_result([self._elements.take() for _ in range(min(have, take.count))])
            return True
        if ended:
            self._takes.popleft()
            fail(take.done, self._closed_error(f"{have} elements are left, {take.count} were asked for"))
            return True
        return False

    def _serve_put(self) -> bool:
        while self._puts and self._puts[0].done.done():
            self._puts.popleft()
        if not self._puts:
            return False
        put = self._puts[0]
        full = len(self._elements) + put.count > self.capacity
        if full and not self._takes:  # a take that waits is served in the same breath, and leaves room for the rest
            return False
        if put.make is None:
            put.tell_turn()
            return False
        self._puts.popleft()
        try:
            put.elements = put.make()
        except Exception as error:
            fail(put.done, error)
        else:
            for element in put.elements:
                self._elements.add(element)
            put.done.set_result(None)
        put.make = None
        return True

    def _room(self) -> str:
        return f"a capacity of {self.capacity}{f', of which {self._kept} stay' if self._kept else ''}"

    def _closed_error(self, what: str) -> QueueClosedError:
        return QueueClosedError(f"queue {self.name!r} is closed: {what}")
