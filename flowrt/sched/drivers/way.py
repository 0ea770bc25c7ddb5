"""What the drivers of one run have in common: how they post, and how they compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base import codec
from flowrt.base.errors import ResourceError
from flowrt.sched.drivers.tasks import sleep_until
from flowrt.sched.host.host import RunContext

if TYPE_CHECKING:
    import asyncio

    from flowrt.sched.drivers.closed import Closed, Runnable
    from flowrt.sched.drivers.striking import Striking
    from flowrt.sched.drivers.tasks import Tasks
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.rendezvous import Array

Send: TypeAlias = Callable[[str, str, Any], None]
"""How a message is posted to a task, or to the client of an epoch: see `rendezvous.Remote.post`."""
Then: TypeAlias = "Callable[[list[Array]], None]"
Failed: TypeAlias = Callable[[BaseException], None]
StepOf: TypeAlias = tuple[int, int, int]
"""The step in which a replica computes a version, or, as one replica more, a server applies it: (version, replica, how
many replicas there are)."""
MOST, BUNDLE = 768, "bundle"  # values that a message holds as they are; what stands for more


class Unread:
    """Stands for a batch that could not be read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass(eq=False, slots=True)
class Way:
    """How a driver of a run reaches the others, computes, and knows the time.

    ``epoch`` is its client's master's, ``origin`` that of whose plans it computes. While the host is traced, messages
    are sent by ``noting``, which notes them. Where the host is to be slow, ``striking`` says by how much. ``fell`` is
    called with what a task of the driver raised, or what it was to `do`, which nobody awaits.
    """

    host: Host
    epoch: str
    run: int
    seed: int
    tasks: Tasks
    send: Send
    clock: Callable[[], float] = time.monotonic
    striking: Striking | None = None
    origin: str = ""
    noting: Send | None = None
    fell: Failed | None = None

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Have ``work`` run as a task of the driver's."""
        return self.tasks.start(work, self.fell)

    def do(self, call: Callable[[], None]) -> None:
        """Do what nobody waits for, in no task: what it raises is told as that of one."""
        try:
            call()
        except Exception as error:
            if self.fell is None:
                raise
            self.fell(error)

    def post(self, peer: str, message: Any) -> None:
        """Send a message, if there is a way to send it by: who is told that it broke posts again."""
        if self.striking is None:
            send = self.send if self.host.tracer is None else self.noting or self.send
            send(peer, self.epoch, message)
        else:
            self.striking.push(message, lambda: self.send(peer, self.epoch, message))

    def compute(
        self, plan: Runnable, feeds: Sequence[Array], step: StepOf, then: Then, failed: Failed, at: str = ""
    ) -> asyncio.Task[None] | None:
        """Call ``then`` with the plan's fetches, or ``failed``: before this returns, if the plan is short.

        Answers the task that it runs in otherwise; cancelled, that calls neither. Delays of the host that strike ``at``
        that place, if it is one, strike here.
        """
        if at and self.striking is not None:
            self.striking.freeze(step[0])
            if late := self.striking.seconds(step[0], at):
                return self.start(self._compute(plan, feeds, step, then, failed, late))
        try:
            fetches = plan.run_now(feeds, step[0])
        except Exception as error:
            failed(error)
            return None
        if fetches is None:
            return self.start(self._compute(plan, feeds, step, then, failed))
        then(fetches)
        return None

    async def _compute(
        self, plan: Runnable, feeds: Sequence[Array], step: StepOf, then: Then, failed: Failed, late: float = 0.0
    ) -> None:
        try:
            fetches = await self.run_plan(plan, feeds, step)
            await sleep_until(self.clock() + late, self.clock)
        except Exception as error:
            failed(error)
        else:
            then(fetches)

    async def run_plan(self, plan: Runnable, feeds: Sequence[Array], step: StepOf) -> list[Array]:
        """The plan's fetches, as a step of its own.

        What random ops draw depends on the version alone: the same when it is computed again.
        """
        with self._context(step) as context:
            return await plan.run(feeds, context)

    async def run_several(self, plan: Closed, fed: Sequence[Sequence[Array]], step: StepOf) -> list[list[Array]]:
        """As `run_plan`, for runs one after another, the first of them that of ``step``: see `Closed.run_several`."""
        with self._context(step) as context:
            return await plan.run_several(fed, context)

    @contextmanager
    def _context(self, step: StepOf) -> Iterator[RunContext]:
        context = RunContext((self.origin, _step_number(self.run, *step)), step[0], self.seed)
        try:
            yield context
        finally:
            self.host.rendezvous.close(context.key)


def may_be(birth: str, other: str) -> bool:
    """Whether two processes are one, for all that is known: a birth is empty where nobody can name it."""
    return not birth or not other or birth == other


def bundled(values: Sequence[Any]) -> tuple[Any, ...]:
    """``values`` as they travel: more of them than a message may hold beside others, as one array of bytes."""
    if len(values) <= MOST:
        return tuple(values)
    return BUNDLE, np.frombuffer(codec.pack(tuple(values)), np.uint8)


def unbundled(values: Sequence[Any]) -> Sequence[Any]:
    """What `bundled` was given. Raises `ResourceError` where there was no memory to receive it."""
    if not values or not isinstance(values[0], str):
        return values
    if not isinstance(values[1], np.ndarray):
        raise ResourceError(f"{len(values)} values of a run were not received: {values[1]}")
    found: Sequence[Any] = codec.unpack(codec.bytes_of(values[1]))
    return found


def _step_number(run: int, version: int, replica: int, replicas: int) -> int:
    """The number of the step in which a replica computes ``version``, or (``replica`` = ``replicas``) it is applied.

    It is below zero, where no step of a session's is, and no other run's but by chance.
    """
    return -1 - (run + version * (replicas + 1) + replica) % (1 << 62)
