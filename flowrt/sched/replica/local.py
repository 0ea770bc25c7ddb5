"""What a replica computes between two versions where it takes steps of its own: local steps, each with one batch.

Law: a round begins with the values of a version and ends with how far the replica has come from them; nobody else
hears of what lies between. It may be cut off anywhere: the next one loads what it needs, and what a replica keeps from
round to round, its own optimiser's slots, only has to be finite. If that is no longer so, the slots begin anew.

With an *overlap* the first steps of a round are always taken with what the round before came to, if that came to its
end and was finite: while the update and the next version travel, as far as batches are there, the others once it has
come. Then the version is merged with how far these steps have come. So what is computed does not hang on when it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.sched.drivers.tasks import sleep_until

if TYPE_CHECKING:
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.drivers.messages import BeginReplica
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array


@dataclass(slots=True)
class Round:
    """How far a round has come: what its steps told, with the batches from ``first`` on, and of how many samples."""

    first: int
    told: list[list[Array]] = field(default_factory=list)
    samples: int = 0

    @property
    def next(self) -> int:
        """The number of the batch of its next step."""
        return self.first + len(self.told)


class Rounds:
    """The rounds of one replica. ``step`` is run with each batch, the other plans as `BeginReplica` says."""

    def __init__(
        self,
        role: BeginReplica,
        step: Closed,
        start: Closed | None,
        load: Closed,
        differ: Closed,
        merge: Closed | None,
        way: Way,
    ) -> None:
        self._role, self._way = role, way
        self._step, self._start, self._load, self._differ, self._merge = step, start, load, differ, merge
        self._fresh = False  # the slots have values, and as far as is known finite ones
        self._begun: Round | None = None  # the next one, without its version

    async def run(
        self,
        version: int,
        values: Sequence[Sequence[Any]],
        first: int,
        batch: Callable[[int], Awaitable[Sequence[Any]]],
    ) -> tuple[list[Array], int]:
        """One round from the ``values`` of a version, as servers told them, with the batches from ``first`` on.

        Answers means over its steps of what the client is told and the fetches of the update, and of how many samples
        these were made. A delay of the host strikes in each step.
        """
        role, striking = self._role, self._way.striking
        if striking is not None:
            striking.freeze(version)
        begun, self._begun = self._begun, None
        number = version * role.steps
        if self._start is not None and not self._fresh:
            await self._run(self._start, (), number)
            self._fresh = True
        loaded = [values[server][i] for server, i in role.loaded]
        if begun is not None and begun.first == first and self._merge is not None:
            while len(begun.told) < role.overlap:
                await self._go_on(begun, version, await batch(begun.next))
            await self._run(self._merge, loaded, number)
        else:
            begun = Round(first)
            await self._run(self._load, loaded, number)
        while len(begun.told) < role.steps:
            await self._go_on(begun, version, await batch(begun.next))
        differed = [values[server][i] for server, i in role.differed]
        *made, finite = await self._run(self._differ, differed, number + role.steps - 1)
        self._fresh = bool(finite) and all(bool(made[i]) for checks in role.finite for i in checks)
        return [*(_mean(column) for column in zip(*begun.told, strict=True)), *made], begun.samples

    async def run_ahead(self, version: int, first: int, there: Callable[[int], Sequence[Any] | None]) -> None:
        """The steps of a round that need not wait for its ``version``, with the batches that are ``there``.

        The round before has come to its end. Where a step fails, the round begins without these, and fails by itself.
        """
        if self._merge is None or not self._fresh:
            return
        begun = Round(first)
        try:
            while len(begun.told) < self._role.overlap and (given := there(begun.next)) is not None:
                await self._go_on(begun, version, given)
        except Exception:
            return
        self._begun = begun

    async def _go_on(self, begun: Round, version: int, given: Sequence[Any]) -> None:
        """Take the next step of a round."""
        role, striking, clock = self._role, self._way.striking, self._way.clock
        number = version * role.steps + len(begun.told)
        begun.told.append(await self._run(self._step, [given[i] for _, i in role.feeds], number))
        begun.samples += samples_of(given)
        if striking is not None:
            await sleep_until(clock() + striking.seconds(version, "compute"), clock)

    async def _run(self, plan: Closed, values: Sequence[Any], number: int) -> list[Array]:
        """The fetches of a plan. ``number`` counts the replica's local steps: what random ops draw depends on it."""
        role = self._role
        fetches = plan.run_now(values, number)
        if fetches is None:
            return await self._way.run_plan(plan, values, (number, role.replica, role.replicas))
        await asyncio.sleep(0)  # many short steps must not keep a newer version from being heard of
        return fetches


def samples_of(batch: Sequence[Any]) -> int:
    """How many entries along the first axis the first value of a batch has; 0 where it has no axis."""
    shape = np.shape(batch[0]) if len(batch) else ()
    return shape[0] if shape else 0


def _mean(values: Sequence[Array]) -> Array:
    """The mean, in float64 where that says more; of one value itself."""
    return values[0] if len(values) == 1 else np.asarray(np.mean(values, axis=0, dtype=np.float64))
