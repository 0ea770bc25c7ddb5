"""Where the two ends of an edge meet: a value waits here for its taker, or the taker for it.

Law: keys are (step, edge). A send completes when its value is taken, so a plan that has finished left nothing behind;
closing a step drops its values and cancels its waiters, and a closed step is never waited for again. Everything here
belongs to one event loop. `net` fills and drains the table for edges whose other end is elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.errors import StepCancelled

if TYPE_CHECKING:
    from flowrt.spec import Spec

StepKey: TypeAlias = tuple[str, int]
Array: TypeAlias = np.ndarray[Any, Any]

REMEMBERED_STEPS = 4096


class Dead(Enum):
    """What travels in place of a tensor on the side of a switch that was not taken."""

    DEAD = "dead"


DEAD = Dead.DEAD


class Remote(Protocol):
    """How values are fetched from other tasks, and messages sent to them."""

    async def pull(self, peer: str, key: StepKey, edge: int, spec: Spec) -> Array | Dead:
        """The value ``peer`` sends on ``edge`` of the step ``key``."""

    def post(self, peer: str, epoch: str, message: Any) -> None:
        """Send a message to a task that the master of ``epoch`` introduced, or to its client; returns at once.

        Messages to one peer arrive in order, or are lost with the way to it, which a `Listener` is told of. Arrays in
        a message stay unchanged until it has arrived. A message to oneself is heard in the loop's next turn.
        """


class Listener(Protocol):
    """Who is told of messages that are no pulls. It is called from the loop, returns at once, and raises nothing."""

    def hear(self, peer: str, message: Any) -> None:
        """``peer`` posted a message."""

    def broken(self, peer: str, epoch: str) -> None:
        """What was posted to ``peer`` may be lost, and from now on it may be reached again: post what still matters.

        ``epoch`` is the client's master where the peer is a client, else empty.
        """

    def ended(self, epoch: str) -> None:
        """The master of ``epoch`` is gone for good: nothing more comes from its client, and nothing arrives there."""


@dataclass(slots=True)
class _Step:
    values: dict[int, tuple[Array | Dead, asyncio.Future[None] | None]] = field(default_factory=dict)
    takers: dict[int, asyncio.Future[Array | Dead]] = field(default_factory=dict)
    begun: bool = False  # here: before, there are takers alone


class Rendezvous:
    """The edges of the steps in progress on one task."""

    def __init__(self) -> None:
        self._steps: dict[StepKey, _Step] = {}
        self._closed: OrderedDict[StepKey, None] = OrderedDict()

    @property
    def open_steps(self) -> int:
        """How many steps have begun and not ended."""
        return len(self._steps)

    def open(self, key: StepKey, ready: Mapping[int, Array] | None = None) -> None:
        """Begin a step; ``ready`` holds values that came with its start."""
        step = self._step(key)
        step.begun = True
        for edge, value in (ready or {}).items():
            taker = step.takers.pop(edge, None)
            if taker is not None and not taker.done():
                taker.set_result(value)
            else:
                step.values[edge] = (value, None)

    async def send(self, key: StepKey, edge: int, value: Array | Dead) -> None:
        """Offer a value; returns once it is taken."""
        step = self._step(key)
        taker = step.takers.pop(edge, None)
        if taker is not None and not taker.done():
            taker.set_result(value)
            return
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        step.values[edge] = (value, taken)
        try:
            await taken
        finally:
            step.values.pop(edge, None)

    async def take(self, key: StepKey, edge: int) -> Array | Dead:
        """The value sent on ``edge``; waits for it, also before the step is opened here."""
        step = self._step(key)
        taker = self.expect(key, edge)
        try:
            return await taker
        except BaseException:
            if step.takers.get(edge) is taker:
                del step.takers[edge]
            if not (step.begun or step.takers or step.values) and self._steps.get(key) is step:
                del self._steps[key]  # which may never begin here
            raise

    def expect(self, key: StepKey, edge: int) -> asyncio.Future[Array | Dead]:
        """What will hold the value sent on ``edge``, or the error that the step is closed with."""
        step = self._step(key)
        taker: asyncio.Future[Array | Dead] = asyncio.get_running_loop().create_future()
        if edge not in step.values:
            step.takers[edge] = taker
            return taker
        value, taken = step.values.pop(edge)
        if taken is not None and not taken.done():
            taken.set_result(None)
        taker.set_result(value)
        return taker

    def holds(self, key: StepKey, edge: int) -> bool:
        """Whether a value waits here already (it came with the step's start)."""
        step = self._steps.get(key)
        return step is not None and edge in step.values

    def close(self, key: StepKey) -> None:
        """End a step: drop its values, cancel who waits for or on them. Closing twice is closing once."""
        step = self._steps.pop(key, None)
        self._closed[key] = None
        while len(self._closed) > REMEMBERED_STEPS:
            self._closed.popitem(last=False)
        if step is None:
            return
        ended = StepCancelled(f"step {key[1]} has ended")
        for _, taken in step.values.values():
            _fail(taken, ended)
        for taker in step.takers.values():
            _fail(taker, ended)

    def close_epoch(self, epoch: str) -> None:
        """End every step of a master that is gone."""
        for key in [key for key in self._steps if key[0] == epoch]:
            self.close(key)

    def _step(self, key: StepKey) -> _Step:
        if key in self._closed:
            raise StepCancelled(f"step {key[1]} has ended")
        return self._steps.setdefault(key, _Step())


def _fail(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # seen: who is cancelled at the same moment never looks at it


class Budget:
    """Byte credits for tensors on their way here, given out in the order they are asked for.

    A tensor above the whole budget is admitted alone, so nothing waits for ever.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` (at most the whole budget) inside the block."""
        share = min(nbytes, self.total)
        await self._acquire(share)
        try:
            yield
        finally:
            self._release(share)

    async def _acquire(self, share: int) -> None:
        if not self._waiting and self.used + share <= self.total:
            self.used += share
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._release(share)
            else:
                self._grant()  # passes over it, to those it kept waiting
            raise

    def _release(self, share: int) -> None:
        self.used -= share
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            share, granted = self._waiting[0]
            if not granted.done():
                if self.used + share > self.total:
                    return
                self.used += share
                granted.set_result(None)
            self._waiting.popleft()
