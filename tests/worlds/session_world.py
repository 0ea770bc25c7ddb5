"""What session tests share: every way to run a step, a cancellation at any suspension point, and what must be left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

import flowrt as fr
from flowrt.kernels.run.direct import BLOCKED, HOLDERS
from flowrt.op import no_gradient
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

WAYS = [fr.Options(optimize=optimize, tapes=tapes, seed=1) for optimize in (True, False) for tapes in (True, False)]
every_way = pytest.mark.parametrize("options", WAYS, ids=[f"optimize={w.optimize},tapes={w.tapes}" for w in WAYS])


@no_gradient
@op
def world_checked(x: Spec) -> Spec:
    """The vector ``x``, or a failure where an entry is negative."""
    return x


@fr.kernel("world_checked")
def world_checked_kernel(x: Any, y: Any, run: Any) -> None:
    for i in range(x.size):
        y[i] = x[i]
        if x[i] < 0:
            run[0] = 1


@no_gradient
@op
def world_slow(x: Spec) -> Spec:
    """``x`` after a while: for a vector of n float64, about n * 30 ms at 2.4 GHz."""
    return x


@fr.kernel("world_slow")
def world_slow_kernel(x: Any, y: Any) -> None:
    for i in range(x.size):
        value = x[i]
        for _ in range(10_000_000):
            value = value * 0.999999999 + 1e-9
        y[i] = value


class CancelAt:
    """Awaits ``work``, and cancels it where it suspends for the ``k``-th time; ``suspensions`` counts them."""

    def __init__(self, work: Awaitable[Any], k: int) -> None:
        self._work = work
        self._k = k
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                waits_for = inner.throw(error) if error is not None else next(inner)
            except StopIteration as stop:
                return stop.value
            self.suspensions += 1
            error = None
            try:
                if self.suspensions == self._k:
                    task = asyncio.current_task()
                    assert task is not None
                    asyncio.get_running_loop().call_soon(task.cancel)
                yield waits_for
            except BaseException as thrown:
                error = thrown


async def cancel_everywhere(work: Callable[[], Awaitable[Any]], check: Callable[[], Any], most: int = 60) -> int:
    """Run ``work`` again and again, cancelled at its 1st, 2nd … suspension, and ``check`` after each."""

    async def once(at: CancelAt) -> None:
        await at

    for k in range(1, most):
        at = CancelAt(work(), k)
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(once(at))
        try:
            await task
        except asyncio.CancelledError:
            assert task.cancelled()
        assert asyncio.all_tasks() == before
        found = check()
        if asyncio.iscoroutine(found):
            await found
        if at.suspensions < k:
            return k - 1
    raise AssertionError(f"still suspending after {most} cancellations")


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop turn until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110  (what is waited for has no event to wait for)
        await asyncio.sleep(0)


def lanes() -> list[str]:
    """The names of flowrt's threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("flowrt")]


def host_of(session: Any) -> Any:
    """The host of an open in-process session."""
    return session._runner._host


def holders(variables: Any, name: Any) -> tuple[int, int]:
    """How many hold a variable to read it, and how many to write it."""
    slot, known = variables._slots[name], [one() for one in variables._together]
    assert not any(one.words[BLOCKED] < 0 or one.words[HOLDERS] < 0 for one in known if one is not None)
    direct = [(one.words[HOLDERS], one) for one in known if one is not None]
    readers, writers = (sum(count for count, one in direct if name in getattr(one, to)) for to in ("reads", "writes"))
    return slot.readers + readers, slot.writers + writers


def assert_quiet(session: Any) -> None:
    """Nothing waits, holds or is held on the session's host."""
    host = host_of(session)
    assert not session._running
    assert host.rendezvous.open_steps == 0
    assert not host.variables._waiting
    assert not any(any(holders(host.variables, name)) for name in host.variables._slots)
    for queue in host._queues.values():
        found = queue.statistics()
        assert (found.waiting_enqueues, found.waiting_dequeues) == (0, 0)
