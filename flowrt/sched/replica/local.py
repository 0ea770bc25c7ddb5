"""What a replica computes between two versions where it takes steps of its own: local steps, each with one batch.

Law: a round begins with the values of a version and ends with how far the replica has come from them; nobody else
hears of what lies between. It may be cut off anywhere: the next one loads what it needs, and what a replica keeps from
round to round, its own optimiser's slots, only has to be finite. If that is no longer so, the slots begin anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.sched.drivers.tasks import sleep_until

if TYPE_CHECKING:
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.drivers.messages import BeginReplica
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array


class Rounds:
    """The rounds of one replica. ``step`` is run with each batch, the other plans as `BeginReplica` says."""

    def __init__(
        self, role: BeginReplica, step: Closed, start: Closed | None, load: Closed, differ: Closed, way: Way
    ) -> None:
        self._role, self._way = role, way
        self._step, self._start, self._load, self._differ = step, start, load, differ
        self._fresh = False  # the slots have values, and as far as is known finite ones

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
        role, striking, late = self._role, self._way.striking, 0.0
        if striking is not None:
            striking.freeze(version)
            late = striking.seconds(version, "compute")
        numbers = range(version * role.steps, (version + 1) * role.steps)
        if self._start is not None and not self._fresh:
            await self._run(self._start, (), numbers[0])
            self._fresh = True
        await self._run(self._load, [values[server][i] for server, i in role.loaded], numbers[0])
        told: list[list[Array]] = []
        samples = 0
        for number in numbers:
            given = await batch(first + number - numbers[0])
            told.append(await self._run(self._step, [given[i] for _, i in role.feeds], number))
            samples += samples_of(given)
            await sleep_until(self._way.clock() + late, self._way.clock)
        differed = [values[server][i] for server, i in role.differed]
        *made, finite = await self._run(self._differ, differed, numbers[-1])
        self._fresh = bool(finite) and all(bool(made[i]) for checks in role.finite for i in checks)
        return [*(_mean(column) for column in zip(*told, strict=True)), *made], samples

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
