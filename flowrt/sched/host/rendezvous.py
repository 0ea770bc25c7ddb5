"""Where the two ends of an edge meet: a value waits here for its taker, or the taker for it.

Law: keys are (step, edge). A send completes when its value is taken, or was pushed to where it is taken, so a plan that
has finished left nothing behind; closing a step drops its values and ends who waits for them, and a closed step is
never waited for again. A value that was pushed before its step began here waits for that; when there are too many such,
the step that was first is closed, and told so when it begins. Everything here belongs to one event loop. `net` fills
and drains the table for edges whose other end is elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flowrt.base.errors import FlowrtError, ResourceError, StepCancelled
from flowrt.base.valueclass import valueclass
from flowrt.sched.host.latest import Latest

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

StepKey: TypeAlias = tuple[str, int]
Array: TypeAlias = np.ndarray[Any, Any]

REMEMBERED_STEPS = 4096
EARLY = 1 << 12  # values that were pushed before their steps began


class Dead(Enum):
    """What travels in place of a tensor on the side of a switch that was not taken."""

    DEAD = "dead"


DEAD = Dead.DEAD


@valueclass
class Announced:
    """What comes in place of a large value: it is there to be pulled; of 0 bytes, it is made once it is pulled."""

    nbytes: int


Arrival: TypeAlias = "Array | Dead | Announced | FlowrtError"
Then: TypeAlias = Callable[[Any], None]


class Pushed(Enum):
    """What became of a value that was to be pushed."""

    SENT = "sent"
    ANNOUNCED = "announced"  # it will be pulled
    NO_WAY = "no way"  # to the peer, until one is opened


class Remote(Protocol):
    """How values are exchanged with other tasks, and messages sent to them."""

    async def pull(
        self, peer: str, key: StepKey, edge: int, spec: Spec, announced: int | None = None, expected: int = 0
    ) -> Array | Dead:
        """The value ``peer`` sends on ``edge`` of the step ``key``; ``announced`` is its bytes, where that is known.

        Of one that is ``expected`` to have so many, but may be small, it is what is pushed where that comes first.
        """

    def pulls(self, peer: str, spec: Spec) -> bool:
        """Whether values of ``spec`` are to be pulled from ``peer``; else they are pushed, or announced."""

    def push(self, peer: str, key: StepKey, edge: int, value: Array | Dead | None) -> Pushed:
        """Send a value that nobody has asked for yet, if it is small, or else announce it.

        None stands for one that will be made as soon as it is asked for.
        """

    async def open_way(self, peer: str, key: StepKey) -> None:
        """Make it possible to push to ``peer``. Raises `LinkBroken` where it cannot be reached."""

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


class Listeners:
    """Those who listen now; what is said to them is said to each in turn."""

    def __init__(self) -> None:
        self._those: list[Listener] = []

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Have ``listener`` be one of them while the block runs."""
        self._those.append(listener)
        try:
            yield
        finally:
            self._those.remove(listener)

    def hear(self, peer: str, message: Any) -> None:
        """See `Listener`, as of the others."""
        for listener in tuple(self._those):
            listener.hear(peer, message)

    def broken(self, peer: str, epoch: str) -> None:
        """A way is reached again that was broken."""
        for listener in tuple(self._those):
            listener.broken(peer, epoch)

    def ended(self, epoch: str) -> None:
        """A master is gone for good."""
        for listener in tuple(self._those):
            listener.ended(epoch)


class Waiter:
    """Who is to be told by a call: of a value, that its own was taken (None), or of an error."""

    __slots__ = ("_then",)

    def __init__(self, then: Then) -> None:
        self._then: Then | None = then

    def done(self) -> bool:
        return self._then is None

    def set_result(self, value: Any) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(value)

    def set_exception(self, error: Exception) -> None:
        self.set_result(error)

    def exception(self) -> None:
        """As a future's."""

    def withdraw(self) -> None:
        """Be told of nothing any more."""
        self._then = None


Taker: TypeAlias = "asyncio.Future[Any] | Waiter"


class Resident(Listener, Protocol):
    """A listener that a host keeps state and tasks of."""

    def reset(self, container: str | None) -> None:
        """The state of a container, or of all, was forgotten here."""

    async def aclose(self) -> None:
        """Wait for all that is done here, to let the host go."""


@dataclass(slots=True)
class _Step:
    values: dict[int, tuple[Arrival, Taker | None]] = field(default_factory=dict)
    takers: dict[int, Taker] = field(default_factory=dict)
    asked: dict[int, Callable[[], None]] = field(default_factory=dict)  # who is to be told of a taker
    begun: bool = False  # here: before, there are takers and what was pushed alone
    lacking: set[int] = field(default_factory=set)  # the edges that somebody waits for all of, without taking
    whole: Waiter | None = None  # who that is


class Rendezvous:
    """The edges of the steps in progress on one task."""

    def __init__(self) -> None:
        self._steps: dict[StepKey, _Step] = {}
        self._closed: Latest[StepKey, FlowrtError | None] = Latest(REMEMBERED_STEPS)
        self._early: dict[StepKey, int] = {}  # how many values came before the step
        self._early_values = 0

    @property
    def open_steps(self) -> int:
        """How many steps have begun and not ended."""
        return len(self._steps)

    def open(self, key: StepKey, ready: Mapping[int, Array] | None = None) -> None:
        """Begin a step; ``ready`` holds values that came with its start."""
        step = self._step(key)
        step.begun = True
        self._forget_early(key)
        for edge, value in (ready or {}).items():
            self._put(step, edge, value)

    def arrive(self, key: StepKey, edge: int, value: Arrival) -> None:
        """Take in what another task pushed, before or after the step began here; of one that has ended, nothing."""
        if key in self._closed:
            return
        step = self._step(key)
        if not self._put(step, edge, value) and not step.begun:
            self._early[key] = self._early.get(key, 0) + 1
            self._early_values += 1
            while self._early_values > EARLY:
                first = next(iter(self._early))
                text = f"step {first[1]}: more than {EARLY} values came for steps that had not begun here"
                self.close(first, ResourceError(text))

    def give(self, key: StepKey, edge: int, value: Array | Dead) -> bool:
        """Hand a value to who waits for it; answers whether somebody did."""
        step = self._steps.get(key)
        if step is None:
            self._check_goes_on(key)
            return False
        taker = step.takers.pop(edge, None)
        if taker is None or taker.done():
            return False
        taker.set_result(value)
        return True

    def leave(self, key: StepKey, edge: int, value: Array | Dead, taken: Taker) -> None:
        """Have a value wait for its taker; ``taken`` is told when it was taken."""
        self._step(key).values[edge] = (value, taken)

    async def send(self, key: StepKey, edge: int, value: Array | Dead) -> None:
        """Offer a value; returns once it is taken."""
        if self.give(key, edge, value):
            return
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.leave(key, edge, value, taken)
        step = self._steps[key]
        try:
            await taken
        finally:
            step.values.pop(edge, None)

    async def take(self, key: StepKey, edge: int) -> Array | Dead:
        """The value sent on ``edge``; waits for it, also before the step is opened here."""
        step = self._step(key)
        taker = self.expect(key, edge)
        try:
            value: Array | Dead = await taker
            return value
        except BaseException:
            if step.takers.get(edge) is taker:
                del step.takers[edge]
            if not (step.begun or step.takers or step.values) and self._steps.get(key) is step:
                del self._steps[key]  # which may never begin here
            raise

    def expect(self, key: StepKey, edge: int) -> asyncio.Future[Any]:
        """What will hold the value sent on ``edge``, or the error that the step is closed with."""
        taker: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.wait(key, edge, taker)
        return taker

    def wait(self, key: StepKey, edge: int, taker: Taker) -> None:
        """Have ``taker`` told of the value sent on ``edge``, which may be now."""
        step = self._step(key)
        if edge in step.values:
            _tell(taker, self.pick(key, edge))
            return
        step.takers[edge] = taker
        asked = step.asked.pop(edge, None)
        if asked is not None:
            asked()

    def pick(self, key: StepKey, edge: int) -> Arrival:
        """Take the value that waits here: see `holds`."""
        value, taken = self._steps[key].values.pop(edge)
        if taken is not None and not taken.done():
            taken.set_result(None)
        return value

    def here(self, key: StepKey, edges: Sequence[int]) -> list[Any] | None:
        """What waits here by all of these edges, which goes on waiting; None if one of them lacks."""
        step = self._steps.get(key)
        found = [] if step is None else [step.values[edge][0] for edge in edges if edge in step.values]
        return found if len(found) == len(edges) else None

    def gather(self, key: StepKey, edges: Sequence[int], whole: Waiter) -> None:
        """Begin a step, and have ``whole`` told once something waits here by all of these edges, of which one lacks."""
        step = self._step(key)
        step.begun = True
        self._forget_early(key)
        step.lacking, step.whole = set(edges).difference(step.values), whole

    def awaited(self, key: StepKey, edge: int) -> bool:
        """Whether somebody waits for the value of an edge."""
        taker = self._step(key).takers.get(edge)
        return taker is not None and not taker.done()

    def when_awaited(self, key: StepKey, edge: int, then: Callable[[], None]) -> None:
        """Have ``then`` called once somebody waits for the value of an edge, unless the step ends before."""
        self._step(key).asked[edge] = then

    def holds(self, key: StepKey, edge: int) -> bool:
        """Whether a value waits here already (it came with the step's start, or was pushed)."""
        step = self._steps.get(key)
        return step is not None and edge in step.values

    def close(self, key: StepKey, why: FlowrtError | None = None) -> None:
        """End a step: drop its values, end who waits for or on them. Closing twice is closing once."""
        step = self._steps.pop(key, None)
        self._forget_early(key)
        self._closed.setdefault(key, why)
        if step is None:
            return
        waiting = [taken for _, taken in step.values.values() if taken is not None]
        if waiting or step.takers or step.whole is not None:
            ended = why or StepCancelled(f"step {key[1]} has ended")
            for taker in (*waiting, *step.takers.values(), step.whole):
                fail(taker, ended)

    def close_epoch(self, epoch: str) -> None:
        """End every step of a master that is gone."""
        for key in [key for key in self._steps if key[0] == epoch]:
            self.close(key)

    def _step(self, key: StepKey) -> _Step:
        step = self._steps.get(key)
        if step is not None:
            return step
        self._check_goes_on(key)
        step = self._steps[key] = _Step()
        return step

    def _check_goes_on(self, key: StepKey) -> None:
        if key in self._closed:
            why = self._closed[key]
            raise StepCancelled(f"step {key[1]} has ended") if why is None else type(why)(*why.args)

    def _put(self, step: _Step, edge: int, value: Arrival) -> bool:
        """Hand a value to its taker, or keep it until there is one; answers whether there was."""
        taker = step.takers.pop(edge, None)
        if taker is not None and not taker.done():
            _tell(taker, value)
            return True
        step.values[edge] = (value, None)
        if edge in step.lacking:
            step.lacking.remove(edge)
            if not step.lacking and step.whole is not None:
                step.whole.set_result(None)
        return False

    def _forget_early(self, key: StepKey) -> None:
        if self._early:
            self._early_values -= self._early.pop(key, 0)


def _tell(taker: Taker, value: Arrival) -> None:
    if isinstance(value, FlowrtError):
        taker.set_exception(value)
    else:
        taker.set_result(value)


def fail(taker: Taker | None, error: Exception) -> None:
    """Tell an error to who waits, if somebody does."""
    if taker is not None and not taker.done():
        taker.set_exception(error)
        taker.exception()  # seen: who is cancelled at the same moment never looks at it


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
