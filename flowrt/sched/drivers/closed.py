"""Plans that nodes run over and over by themselves: by one C call where `sched.tape.direct` has a plan for it.

Law: nothing is decided here but who is asked first. What cannot be run at once, for whatever reason, is left to the
executor, which answers the same. Kernels trust what they are fed: a direct call takes nothing but what its plan was
made for, and anything else is `checked` first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrt.base.errors import ResourceError, SpecError
from flowrt.kernels.launch import REPEATED, drawn_as
from flowrt.kernels.run.direct import Direct
from flowrt.sched.running import INLINE_SECONDS
from flowrt.sched.tape.direct import Numbers

if TYPE_CHECKING:
    import ctypes

    from flowrt.base.plan import Plan, PlanFeed
    from flowrt.sched.alone import Alone
    from flowrt.sched.executor import Executor
    from flowrt.sched.host.host import RunContext
    from flowrt.sched.host.rendezvous import Array


class Told(Numbers):
    """Numbers of runs that the caller puts into ``base``, for those until the next. The host has the ``gate``."""

    def __init__(self, gate: ctypes.Array[ctypes.c_int64]) -> None:
        super().__init__()
        self.counter: Any = itertools.repeat(0)  # what is added to `base`
        self.gate = gate


class Runnable(Protocol):
    """What a driver runs: a `Closed`, or what does more than that alone."""

    def run_now(self, feeds: Sequence[Array], number: int) -> list[Array] | None: ...

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]: ...


class Closed:
    """A plan as its executor runs it, for one loop; all runs draw from one ``seed``.

    It is fed what came from others: ``whose``, for people. Of one that receives and sends, ``alone`` says so: then
    `run_now` takes what was received with the feeds, and answers what is to be sent with the fetches.
    """

    def __init__(self, executor: Executor, seed: int, whose: str = "others", alone: Alone | None = None) -> None:
        self.executor = executor
        self.seed = seed
        self.whose = whose
        self._alone = alone
        self._numbers, self._number = Told(executor.direct_gate), 0
        # where a value is fetched twice, each has memory of its own, which is more than one call does
        fetches, fed = executor.plan.fetches if alone is None else alone.wanted, len(executor.plan.feeds)
        self._wanted = fetches
        self._passed = [(place, feed) for place, feed in enumerate(fetches) if feed < fed]
        self._made = [place for place, value in enumerate(fetches) if value >= fed]
        twice = len(set(fetches)) < len(fetches)
        self._direct = None if twice else Direct(self._run_plainly, range(len(self._made)), list)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.executor.plan

    def run_now(self, feeds: Sequence[Array], number: int) -> list[Array] | None:
        """As `Executor.run_now`: the fetches of a short tape that was made before, if its variables are free.

        What is fetched of the feeds is they, which nobody may change. Raises as `checked` does.
        """
        self._number = number
        if self._direct is None:
            return self._run_plainly(*feeds)
        self._numbers.base[0] = number if number < REPEATED else drawn_as(number)
        found: list[Any] | None = self._direct.call(*feeds)
        if found is None:
            return None
        fetches = [*map(np.asarray, found)]  # one number comes as a scalar
        for place, feed in self._passed:
            fetches.insert(place, feeds[feed])
        return fetches

    def _run_plainly(self, *feeds: Array) -> list[Array] | None:
        fed, alone = self.plan.feeds, self._alone
        checked(feeds if alone is None else feeds[: len(fed)], fed, self.whose)
        if alone is None:
            fetches = self.executor.run_now(feeds, self._number, self.seed)
        elif not all(map(_fits, feeds[len(fed) :], alone.feeds[len(fed) :])):
            return None
        else:
            fetches = self.executor.run_alone(feeds, self._number, self.seed)
        if fetches is None or self._direct is None:
            return fetches
        made = [self._wanted[place] for place in self._made]
        plan = self.executor.direct_plan(feeds, self._numbers, self.seed, INLINE_SECONDS, made)
        if plan is not None:
            self._direct.choose(plan)
        return fetches if not self._passed else [fetches[place] for place in self._made]

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """As `Executor.run`. Raises as `checked` does."""
        return await self.executor.run(checked(feeds, self.plan.feeds, self.whose), context)

    async def run_several(self, fed: Sequence[Sequence[Array]], context: RunContext) -> list[list[Array]]:
        """As `Executor.run_several`. Raises as `checked` does."""
        return await self.executor.run_several([checked(feeds, self.plan.feeds, self.whose) for feeds in fed], context)


def checked(values: Sequence[Any], feeds: Iterable[PlanFeed], whose: str) -> list[Array]:
    """``values``, if they are what a plan is fed.

    Raises `ResourceError` where there was no memory to receive one, and `SpecError` for what does not fit.
    """
    for value, feed in zip(values, feeds, strict=True):
        spec = feed.spec
        if type(value) is np.ndarray and value.dtype is spec.dtype and value.shape == spec.dims:
            continue  # as nearly always
        if not hasattr(value, "dtype"):
            raise ResourceError(f"{feed.name} ({feed.site}) of {whose} was not received: {value}")
        if not spec.accepts(value.dtype, value.shape):
            got = f"{value.dtype}{list(value.shape)}"
            raise SpecError(f"{feed.name} ({feed.site}) of {whose}: expected {spec}, {got} came")
    return list(values)


def _fits(value: Any, feed: PlanFeed) -> bool:
    """Whether what was received is what a plan says comes there."""
    return isinstance(value, np.ndarray) and feed.spec.accepts(value.dtype, value.shape)
