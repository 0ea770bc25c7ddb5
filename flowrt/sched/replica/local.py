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

from flowrt.base.errors import SpecError
from flowrt.sched.drivers.tasks import sleep_until

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginReplica
    from flowrt.sched.drivers.closed import Closed, Runnable
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array

TOGETHER = 0.25  # seconds for which a lane takes steps without the loop: going there and back costs 1 to 2 ms of a
LEAST = 1e-4  # busy processor; and the least that they are believed to have taken


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
        differ: Runnable,
        merge: Closed | None,
        way: Way,
    ) -> None:
        self._role, self._way = role, way
        self._step, self._start, self._load, self._differ, self._merge = step, start, load, differ, merge
        self._together = 1  # steps that take `TOGETHER`, by how long those took that were taken last
        self._fresh = False  # the slots have values, and as far as is known finite ones
        self._begun: Round | None = None  # the next one, without its version

    async def run(
        self,
        version: int,
        values: Sequence[Sequence[Any]],
        first: int,
        batch: Callable[[int], Awaitable[Sequence[Any]]],
        there: Callable[[int], Sequence[Any] | None],
    ) -> tuple[list[Array], int]:
        """One round from the ``values`` of a version, as servers told them, with the batches from ``first`` on.

        ``batch`` waits for a batch, ``there`` answers one if that need not be waited for.

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
                await self._go_on(begun, role.overlap, version, await batch(begun.next), there)
            await self._run(self._merge, loaded, number)
        else:
            begun = Round(first)
            await self._run(self._load, loaded, number)
        while len(begun.told) < role.steps:
            await self._go_on(begun, role.steps, version, await batch(begun.next), there)
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
                await self._go_on(begun, self._role.overlap, version, given, there)
        except Exception:
            return
        self._begun = begun

    async def _go_on(
        self,
        begun: Round,
        most: int,
        version: int,
        given: Sequence[Any],
        there: Callable[[int], Sequence[Any] | None],
    ) -> None:
        """Take the next step of a round with what is ``given``, and as many more, up to ``most``, as go on together."""
        role, striking, clock = self._role, self._way.striking, self._way.clock
        number, batches = version * role.steps + len(begun.told), [given]
        most = 1 if striking is not None else min(most - len(begun.told), self._together)
        while len(batches) < most and (more := there(begun.next + len(batches))) is not None:
            batches.append(more)
        told = await self._take([[batch[i] for _, i in role.feeds] for batch in batches], number)
        begun.told += told
        begun.samples += sum(map(samples_of, batches[: len(told)]))
        if striking is not None:
            await sleep_until(clock() + striking.seconds(version, "compute"), clock)

    async def _take(self, fed: Sequence[Sequence[Any]], number: int) -> list[list[Array]]:
        """What steps tell, each with what it is ``fed``: the first, and those after it that a lane went on with."""
        role, clock = self._role, self._way.clock
        if (fetches := await self._run_now(self._step, fed[0], number)) is not None:
            return [fetches]
        began = clock()
        found = await self._way.run_several(self._step, fed, (number, role.replica, role.replicas))
        self._together = int(TOGETHER * len(found) / max(clock() - began, LEAST))
        return found

    async def _run(self, plan: Runnable, values: Sequence[Any], number: int) -> list[Array]:
        """The fetches of a plan. ``number`` counts the replica's local steps: what random ops draw depends on it."""
        role = self._role
        if (fetches := await self._run_now(plan, values, number)) is not None:
            return fetches
        return await self._way.run_plan(plan, values, (number, role.replica, role.replicas))

    async def _run_now(self, plan: Runnable, values: Sequence[Any], number: int) -> list[Array] | None:
        """The fetches of a short plan; None of another."""
        fetches = plan.run_now(values, number)
        if fetches is not None:
            await asyncio.sleep(0)  # many short steps must not keep a newer version from being heard of
        return fetches


def samples_of(batch: Sequence[Any]) -> int:
    """How many entries along the first axis the first value of a batch has; 0 where it has no axis."""
    shape = np.shape(batch[0]) if len(batch) else ()
    return shape[0] if shape else 0


def _mean(values: Sequence[Array]) -> Array:
    """The mean, in float64 where that says more; of one value itself. Raises `SpecError` where there is none."""
    if len(shapes := {value.shape for value in values}) > 1:
        told = " and ".join(str([*shape]) for shape in sorted(shapes))
        raise SpecError(
            f"a metric has no mean over local steps: it is {told}; answer one number of it, as fr.mean makes"
        )
    return values[0] if len(values) == 1 else np.asarray(np.mean(values, axis=0, dtype=np.float64))
