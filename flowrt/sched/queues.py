"""Bounded queues of tuples of arrays.

Law: waiters are served strictly in order. An enqueue of several elements and a ``dequeue_many`` happen at once or not
at all; a cancelled one changed nothing; a completed one stands. After `close`, enqueues raise and dequeues drain what
is left. A queue belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.errors import GraphError, QueueClosedError
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.spec import Spec

Element: TypeAlias = tuple[np.ndarray[Any, Any], ...]


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
    elements: list[Element]
    done: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _Take:
    count: int
    up_to: bool  # fewer, but some, will do once the queue is closed
    done: asyncio.Future[list[Element]]


class Queue:
    """A FIFO queue holding at most ``capacity`` elements."""

    def __init__(self, name: str, capacity: int, specs: Sequence[Spec] = ()) -> None:
        if capacity < 1:
            raise GraphError(f"queue {name!r}: the capacity must be at least 1, got {capacity}")
        self.name = name
        self.specs = tuple(specs)  # of an element's components
        self.capacity = capacity
        self.closed = False
        self._elements: deque[Element] = deque()
        self._puts: deque[_Put] = deque()
        self._takes: deque[_Take] = deque()

    def __len__(self) -> int:
        return len(self._elements)

    def statistics(self) -> QueueStatistics:
        """How full the queue is and how many wait at either end."""
        return QueueStatistics(
            self.name, self.capacity, len(self._elements), len(self._puts), len(self._takes), self.closed
        )

    async def enqueue(self, elements: list[Element]) -> None:
        """Add the elements at once, waiting until all of them fit."""
        if len(elements) > self.capacity:
            raise GraphError(
                f"queue {self.name!r}: {len(elements)} elements never fit into a capacity of {self.capacity}"
            )
        if self.closed:
            raise self._closed_error("nothing can be enqueued")
        put = _Put(elements, asyncio.get_running_loop().create_future())
        self._puts.append(put)
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
        if count > self.capacity:
            raise GraphError(f"queue {self.name!r}: {count} elements never gather in a capacity of {self.capacity}")
        if count == 0:
            return []
        take = _Take(count, up_to, asyncio.get_running_loop().create_future())
        self._takes.append(take)
        self._settle()
        try:
            return await take.done
        except asyncio.CancelledError:
            if take in self._takes:
                self._takes.remove(take)
            elif not take.done.cancelled() and take.done.exception() is None:
                self._elements.extendleft(reversed(take.done.result()))
            self._settle()
            raise

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Let nothing more in; waiting enqueues are still served unless cancelled. Closing twice is closing once."""
        self.closed = True
        if cancel_pending_enqueues:
            while self._puts:
                put = self._puts.popleft()
                _fail(put.done, self._closed_error("the pending enqueue was cancelled"))
        self._settle()

    def _retract(self, put: _Put) -> None:
        """Undo a cancelled enqueue, unless some of its elements were taken already: then it is done, and stands."""
        if put in self._puts:
            self._puts.remove(put)
        else:
            mine = {id(element) for element in put.elements}
            kept = deque(element for element in self._elements if id(element) not in mine)
            if len(self._elements) - len(kept) == len(put.elements):
                self._elements = kept
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
        have = len(self._elements)
        if have >= take.count or (ended and take.up_to and have):
            self._takes.popleft()
            take.done.set_result([self._elements.popleft() for _ in range(min(have, take.count))])
            return True
        if ended:
            self._takes.popleft()
            _fail(take.done, self._closed_error(f"{have} elements are left, {take.count} were asked for"))
            return True
        return False

    def _serve_put(self) -> bool:
        while self._puts and self._puts[0].done.done():
            self._puts.popleft()
        if not self._puts:
            return False
        full = len(self._elements) + len(self._puts[0].elements) > self.capacity
        if full and not self._takes:  # a take that waits is served in the same breath, and leaves room for the rest
            return False
        put = self._puts.popleft()
        self._elements.extend(put.elements)
        put.done.set_result(None)
        return True

    def _closed_error(self, what: str) -> QueueClosedError:
        return QueueClosedError(f"queue {self.name!r} is closed: {what}")


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: who is cancelled at the same moment never looks at it
