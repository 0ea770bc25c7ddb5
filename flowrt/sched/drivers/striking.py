"""Where injected delays strike on a node (`flowrt.delays`): a driver's computing, reading and posting, and its link.

Law: nothing here holds the loop but a freeze, which is meant to; messages keep their order. What is drawn follows from
the seed of the run, the version and the delay alone, so that nodes with the same delay draw the same common factors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.delays import Link
from flowrt.sched.drivers.messages import Update
from flowrt.sched.drivers.tasks import sleep_until

if TYPE_CHECKING:
    from flowrt.delays import Delay
    from flowrt.sched.drivers.tasks import Tasks

HEAD = 64  # bytes of a message beside its arrays, about
Then = Callable[[], None]
Clock = Callable[[], float]


class Striking:
    """The delay of a node as it strikes driver ``number`` of ``count``: a replica of its run, or a server."""

    def __init__(
        self, delay: Delay, tasks: Tasks, clock: Clock, seed: int, number: int, count: int, do: Callable[[Then], None]
    ) -> None:
        self._delay, self._seed, self._number, self._count, self._do = delay, seed, number, count, do
        self._clock, self._began = clock, clock()
        self._reading, self._pushing = Lane(tasks, clock), Lane(tasks, clock)

    def seconds(self, version: int, place: str) -> float:
        """By how much ``version`` is slower at ``place``; what comes before the first one counts to it."""
        version = max(version, 0)
        rng = np.random.default_rng((self._seed, version))
        now = self._clock() - self._began
        return float(self._delay.sample(rng, version, self._count, now, (place,))[self._number])

    def freeze(self, version: int) -> None:
        """Be frozen, if that is what strikes: whatever else goes on in this loop waits, as in a stopped process."""
        if seconds := self.seconds(version, "frozen"):
            time.sleep(seconds)

    def read(self, version: int, then: Then) -> None:
        """Call ``then`` when a batch is read, of which one is read at a time."""
        self._reading.carry(self.seconds(version, "input"), 0.0, partial(self._do, then))

    def push(self, message: Any, send: Then) -> None:
        """Have a message sent, an update as much later as it is slower."""
        if isinstance(message, Update):
            self._pushing.carry(0.0, self.seconds(message.version, "push"), partial(self._do, send))
        else:
            send()


class Slowness:
    """The delay of the node ``task``: strikes its drivers, and its way to all others, which they have in common.

    Windows in seconds begin for a driver when its run begins, for the way with the first message.
    """

    def __init__(self, delay: Delay, task: str, tasks: Tasks, clock: Clock) -> None:
        self._delay, self._task, self._tasks, self._clock = delay, task, tasks, clock
        self._links = tuple(part for part in delay.parts if isinstance(part, Link))
        self._out, self._in = Lane(tasks, clock), Lane(tasks, clock)
        self._began: float | None = None
        self._step = 0

    def of(self, seed: int, number: int, count: int, do: Callable[[Then], None] = lambda then: then()) -> Striking:
        """How it strikes driver ``number`` of ``count``, which is to ``do`` what is late."""
        return Striking(self._delay, self._tasks, self._clock, seed, number, count, do)

    def send(self, peer: str, message: Any, then: Then) -> None:
        """Call ``then`` when ``message`` may leave for ``peer``."""
        self._carry(self._out, peer, message, then)

    def receive(self, peer: str, message: Any, then: Then) -> None:
        """Call ``then`` when ``message`` has come from ``peer``."""
        self._carry(self._in, peer, message, then)

    def _carry(self, lane: Lane, peer: str, message: Any, then: Then) -> None:
        if not self._links or peer == self._task:
            then()
            return
        if self._began is None:
            self._began = self._clock()
        self._step = max(self._step, getattr(message, "version", 0))
        now, size = self._clock() - self._began, size_of(message)
        slow = [link for link in self._links if link.strikes(self._step, now)]
        lane.carry(sum(size / link.bytes_per_second for link in slow), sum(link.latency for link in slow), then)


class Lane:
    """What goes through one after another: each takes its seconds, and comes out later by its latency."""

    def __init__(self, tasks: Tasks, clock: Clock) -> None:
        self._tasks, self._clock = tasks, clock
        self._free = 0.0
        self._waiting: deque[tuple[float, Then]] = deque()
        self._going = False

    def carry(self, seconds: float, latency: float, then: Then) -> None:
        """Call ``then`` after what came before: at once, if nothing waits and it takes no time."""
        now = self._clock()
        self._free = max(self._free, now) + seconds
        if self._free + latency <= now and not self._going:
            then()
            return
        self._waiting.append((self._free + latency, then))
        if not self._going:
            self._going = True
            self._tasks.start(self._go())

    async def _go(self) -> None:
        try:
            while self._waiting:
                await sleep_until(self._waiting[0][0], self._clock)
                self._waiting.popleft()[1]()
        finally:
            self._going = False


def size_of(value: Any) -> int:
    """About how many bytes a message is, or a value in it."""
    if isinstance(value, (tuple, list)):
        return sum(map(size_of, value))
    if is_dataclass(value):
        return HEAD + sum(size_of(getattr(value, each.name)) for each in fields(value))
    return int(getattr(value, "nbytes", 0))
