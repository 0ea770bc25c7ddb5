"""Plans that nodes run over and over by themselves: by one C call where `sched.tape.direct` has a plan for it.

Law: nothing is decided here but who is asked first. What cannot be run at once, for whatever reason, is left to the
executor, which answers the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.run.direct import Direct
from flowrt.sched.executor import INLINE_SECONDS
from flowrt.sched.tape.direct import Numbers

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.sched.executor import Executor
    from flowrt.sched.host.host import RunContext
    from flowrt.sched.host.rendezvous import Array


class Told(Numbers):
    """Numbers of runs that the caller tells: each run has the one that was told last."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Any = itertools.repeat(0)  # what is added to `base`
        self.gate[0] = 1

    def tell(self, number: int) -> None:
        """The next runs are to have that number."""
        self.base[0] = number


class Closed:
    """A plan as its executor runs it, for one loop; all runs draw from one ``seed``."""

    def __init__(self, executor: Executor, seed: int) -> None:
        self.executor = executor
        self.seed = seed
        self._numbers, self._number = Told(), 0
        # where a value is fetched twice, each has memory of its own, which is more than one call does
        fetches, fed = executor.plan.fetches, len(executor.plan.feeds)
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

        What is fetched of the feeds is they, which nobody may change.
        """
        self._number = number
        if self._direct is None:
            return self.executor.run_now(feeds, number, self.seed)
        self._numbers.tell(number)
        found: list[Any] | None = self._direct.call(*feeds)
        if found is None:
            return None
        fetches = [np.asarray(value) for value in found]  # one number comes as a scalar
        for place, feed in self._passed:
            fetches.insert(place, feeds[feed])
        return fetches

    def _run_plainly(self, *feeds: Array) -> list[Array] | None:
        fetches = self.executor.run_now(feeds, self._number, self.seed)
        if fetches is not None and self._direct is not None:
            made = [self.plan.fetches[place] for place in self._made]
            plan = self.executor.direct_plan(feeds, self._numbers, self.seed, INLINE_SECONDS, made)
            if plan is not None:
                self._direct.choose(plan)
        return fetches if fetches is None or not self._passed else [fetches[place] for place in self._made]

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """As `Executor.run`."""
        return await self.executor.run(feeds, context)
