"""The drivers of a run whose replicas take local steps: every round is whole, whatever is lost or cut off."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from iteration_world import NUMBER, RUN, FakePlan, World, begun

from flowrt.base.device import CLIENT
from flowrt.sched.drivers.messages import Ended
from flowrt.sched.replica.stopwatch import Phase, Stopwatch
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from flowrt.sched.drivers.beginning import BeginReplica

K = 4


class LocalWorld(World):
    """A `World` in which a replica's local steps take 1/K from its copy of the variable: `K` of them make an update.

    With an ``overlap`` so many of them are taken before their version is there.
    """

    def __init__(self, *args: Any, overlap: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overlap = overlap
        replicas, servers = len(self.workers), len(self.servers)
        self.copies = [0.0] * replicas
        self.marks = [0.0] * replicas
        self.taken: list[list[int]] = [[] for _ in range(replicas)]  # the batches by which a copy has moved
        self.updates: dict[tuple[int, int], list[int]] = {}  # by replica and version, those of the last update
        self.merges: list[tuple[int, int, int]] = []  # (replica, version, steps that were taken before it)
        self.steps = [FakePlan([NUMBER], self._step(r)) for r in range(replicas)]
        self.numbers: list[tuple[int, int]] = []  # (replica, number that random ops draw by) of each local step
        self.plans = [
            *self.steps,
            *(FakePlan([NUMBER] * servers, self._load(r)) for r in range(replicas)),
            *(FakePlan([NUMBER] * servers, self._differ(r)) for r in range(replicas)),
            *(FakePlan([], self._start(r)) for r in range(replicas)),
            *(FakePlan([NUMBER] * servers, self._merge(r)) for r in range(replicas)),
        ]
        self.starts: list[tuple[int, int]] = []  # (replica, number) of each time that what is kept had first values
        self.kept_is_finite = True

    def _start(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(values: list[Any], number: int) -> list[Any]:
            self.starts.append((replica, number))
            return []

        return compute

    def _load(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(values: list[Any], number: int) -> list[Any]:
            assert all(value == -(number // K) for value in values), f"version {number // K} of {values}"
            self.copies[replica], self.taken[replica] = float(values[0]), []
            return []

        return compute

    def _merge(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(values: list[Any], number: int) -> list[Any]:
            assert all(value == -(number // K) for value in values), f"version {number // K} of {values}"
            self.copies[replica] += float(values[0]) - self.marks[replica]
            self.merges.append((replica, number // K, len(self.taken[replica])))
            return []

        return compute

    def _step(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(feeds: list[Any], number: int) -> list[Any]:
            self.copies[replica] -= 1 / K
            self.taken[replica].append(int(feeds[0]))
            self.used.append((replica, number // K, int(feeds[0])))
            self.numbers.append((replica, number))
            return [np.array(float(feeds[0]))]

        return compute

    def _differ(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(values: list[Any], number: int) -> list[Any]:
            finite = [np.array(replica not in self.spoiled)] * len(values)  # each server's part
            self.updates[replica, number // K], self.taken[replica] = self.taken[replica], []
            self.marks[replica] = self.copies[replica]
            return [*(value - self.copies[replica] for value in values), *finite, np.array(self.kept_is_finite)]

        return compute

    async def begin_replica(self, number: int) -> None:
        begun: list[BeginReplica] = []

        class Asked:
            async def answer(self, role: BeginReplica, *_: Any) -> None:
                begun.append(role)

        node, self.nodes[self.workers[number]] = self.nodes[self.workers[number]], Asked()  # type: ignore[assignment]
        await super().begin_replica(number)
        self.nodes[self.workers[number]] = node
        replicas, told = len(self.workers), tuple((server, 0) for server in range(len(self.servers)))
        role = replace(
            *begun,
            feeds=((-1, 0),),
            steps=K,
            load=replicas + number,
            loaded=told,
            differ=2 * replicas + number,
            differed=told,
            start=3 * replicas + number,
            overlap=self.overlap,
            merge=4 * replicas + number if self.overlap else -1,
        )
        await node.answer(role, "epoch", self.plans.__getitem__)  # type: ignore[arg-type]

    async def go_on(self) -> None:
        """Let all happen that can."""
        for _ in range(200):
            self.settle()
            await asyncio.sleep(0)


def world(*args: Any, **kwargs: Any) -> AbstractAsyncContextManager[LocalWorld]:
    return begun(LocalWorld(*args, **kwargs))


def receipts(made: World) -> list[list[tuple[int, int, Outcome]]]:
    """By version: (replica, group of batches, outcome)."""
    return [[(r, group, OUTCOMES[code]) for r, group, code, *_ in report.receipts] for report in made.reports()]


async def test_what_local_steps_keep_has_its_first_values_before_the_first_round_and_after_one_that_spoilt_it() -> None:
    async with world(1) as made:
        made.allow(9)
        made.give(0, *range(1, K + 1))
        await made.go_on()
        assert made.starts == [(0, 0)]
        made.kept_is_finite = False
        made.give(0, *range(K + 1, 2 * K + 1))
        await made.go_on()
        assert made.starts == [(0, 0)]
        made.give(0, *range(2 * K + 1, 3 * K + 1))
        await made.go_on()
        assert made.starts == [(0, 0), (0, 2 * K)]


async def test_what_local_steps_keep_begins_anew_too_where_they_went_too_far_to_be_told() -> None:
    async with world(2, take=1) as made:
        made.spoiled = {0}
        made.allow(9)
        for replica in range(2):
            made.give(replica, *range(1, K + 1))
            await made.go_on()
        made.spoiled = set()
        made.give(0, *range(K + 1, 2 * K + 1))
        await made.go_on()
        assert [number for replica, number in made.starts if replica == 0] == [0, K]


async def test_a_round_uses_its_batches_as_they_come_and_is_announced_when_it_has_all() -> None:
    async with world(2) as made:
        made.allow(9)
        made.give(0, 1, 2, 3)
        await made.go_on()
        assert made.used == [(0, 0, 1), (0, 0, 2), (0, 0, 3)]
        made.give(0, 4, 5)
        made.give(1, 1, 2, 3, 4)
        await made.go_on()
        assert made.state() == [(-1, 1)]
        assert receipts(made) == [[(0, 1, Outcome.KEPT), (1, 1, Outcome.KEPT)]]
        assert made.reports()[0].told == (2.5,)
        assert made.used[-1] == (0, 1, 5)
        assert [number for replica, number in made.numbers if replica == 0] == [0, 1, 2, 3, 4]


async def test_a_round_that_a_newer_version_cuts_off_before_it_had_its_batches_uses_them_in_the_next() -> None:
    async with world(2, take=1) as made:
        made.allow(1)
        made.give(1, 1, 2)
        made.give(0, 1, 2, 3, 4)
        await made.go_on()
        assert made.state() == [(-1, 1)]
        assert receipts(made) == [[(0, 1, Outcome.KEPT)]]
        made.allow(2)
        made.give(1, 3, 4)
        await made.go_on()
        assert made.state() == [(-2, 2)]
        assert receipts(made)[1] == [(1, 1, Outcome.KEPT)]
        assert [used for used in made.used if used[0] == 1] == [(1, 0, 1), (1, 0, 2)] + [(1, 1, i) for i in range(1, 5)]


async def test_a_round_that_is_cut_off_with_all_its_batches_is_late_and_they_are_spent() -> None:
    async with world(2, take=1) as made:
        made.steps[1].slow = True
        made.allow(1)
        made.give(0, *range(1, 9))
        made.give(1, *range(1, 13))
        await made.go_on()
        assert receipts(made) == [[(0, 1, Outcome.KEPT), (1, 1, Outcome.LATE)]]
        made.steps[1].slow = False
        made.steps[1].go.set()
        made.allow(2)
        await made.go_on()
        assert made.state() == [(-2, 2)]
        assert receipts(made)[1] == [(0, 2, Outcome.KEPT), (1, 2, Outcome.LATE)]
        assert [used for used in made.used if used[0] == 1] == [(1, 2, i) for i in range(9, 13)]


async def test_a_run_ends_with_the_last_whole_round() -> None:
    async with world(2) as made:
        made.allow(99, totals=(2, 2))
        made.give(0, *range(1, 11))
        made.give(1, *range(1, 9))
        await made.go_on()
        made.allow(99, 2, totals=(2, 2))
        await made.go_on()
        assert made.ended() == Ended(RUN, 2)
        assert made.state() == [(-2, 2)]


async def test_steps_of_the_next_round_are_taken_while_an_update_and_its_version_travel() -> None:
    async with world(2, overlap=2) as made:
        made.give(0, *range(1, 8))
        made.give(1, 1, 2, 3, 4, 5)
        await made.go_on()  # no version is made before it is allowed
        assert [used for used in made.used if used[0] == 0] == [
            *((0, 0, i) for i in range(1, 5)),
            *((0, 1, i) for i in range(5, 7)),
        ]
        assert [used for used in made.used if used[0] == 1][4:] == [(1, 1, 5)]
        made.allow(9)
        await made.go_on()
        assert made.merges == [(0, 1, 2)]
        assert made.used[-1] == (0, 1, 7)
        made.give(1, 6)  # only now, and yet it is taken before the version is merged
        await made.go_on()
        assert made.merges == [(0, 1, 2), (1, 1, 2)]
        made.give(0, 8)
        made.give(1, 7, 8)
        await made.go_on()
        assert made.state() == [(-2, 2)]
        assert made.updates == {(r, v): list(range(v * K + 1, v * K + K + 1)) for r in range(2) for v in range(2)}


async def test_steps_ahead_are_not_cut_off_by_the_version_that_they_are_of() -> None:
    async with world(1, overlap=2) as made:
        differ = made.plans[2]
        differ.slow = True
        made.give(0, *range(1, 9))
        made.allow(9)
        await made.go_on()
        made.steps[0].slow = True
        differ.go.set()
        await made.go_on()
        assert made.state() == [(-1, 1)]  # of which it is told while it takes the first step after it
        made.steps[0].go.set()
        await made.go_on()
        assert made.merges == [(0, 1, 2)]
        assert made.state() == [(-2, 2)]
        assert made.updates[0, 1] == [5, 6, 7, 8]


async def test_long_steps_whose_batches_are_there_are_taken_together_once_their_time_is_known() -> None:
    async with world(1, overlap=2) as made:
        step = made.steps[0]
        step.slow = True
        step.go.set()
        made.allow(9)
        made.give(0, 1, 2, 3)
        await made.go_on()
        assert step.together == [1, 2]
        made.give(0, *range(4, 10))
        await made.go_on()
        assert step.together == [1, 2, 1, 2, 2, 1]  # the next round's first two, its others, and what is there after it
        assert made.used == [(0, (n - 1) // K, n) for n in range(1, 10)]
        assert [number for _, number in made.numbers] == list(range(9))
        assert made.state() == [(-2, 2)]
        assert made.reports()[0].told == (2.5,)


async def test_nothing_is_taken_ahead_of_what_is_not_finite_and_the_next_version_is_loaded() -> None:
    async with world(1, overlap=2) as made:
        made.kept_is_finite = False
        made.give(0, *range(1, 9))
        await made.go_on()
        assert made.taken == [[]]
        made.allow(9)
        await made.go_on()
        assert made.state() == [(-2, 2)]
        assert not made.merges


async def test_a_round_after_one_that_was_cut_off_begins_with_its_version_alone() -> None:
    async with world(2, take=1, overlap=2) as made:
        made.allow(1)
        made.give(1, 1, 2)
        made.give(0, 1, 2, 3, 4)
        await made.go_on()
        made.allow(2)
        made.give(1, 3, 4)
        await made.go_on()
        assert made.state() == [(-2, 2)]
        assert made.updates[1, 1] == [1, 2, 3, 4]
        assert not made.merges


async def test_steps_that_were_taken_ahead_begin_one_round() -> None:
    async with world(2, take=1, overlap=2) as made:
        made.give(1, *range(1, 7))
        await made.go_on()
        made.allow(1)
        await made.go_on()
        made.give(0, *range(1, 5))
        made.allow(2)
        await made.go_on()  # which cuts the round off that began with them
        made.allow(3)
        made.give(1, 7, 8)
        await made.go_on()
        assert made.state() == [(-3, 3)]
        assert made.updates[1, 2] == [5, 6, 7, 8]
        assert made.merges == [(1, 1, 2)]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_is_lost_or_reordered_every_round_that_counts_is_whole_and_used_once(
    seed: int, overlap: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    replicas, servers = rng.randint(1, 3), rng.randint(1, 2)
    given, allowed = [0] * replicas, 0
    async with world(replicas, servers, take=rng.randint(1, replicas), overlap=overlap) as made:
        for _ in range(1500):
            ways = [way for way, left in made.ways.items() if left]
            replica, chance = rng.randrange(replicas), rng.random()
            if chance < 0.6 and ways:
                way = rng.choice(ways)
                if rng.random() < 0.02:
                    made.break_way(*way)
                    if CLIENT not in way:
                        made.break_way(*reversed(way))
                else:
                    made.deliver(*way)
            elif chance < 0.8 and given[replica] < 60:
                given[replica] += 1
                made.give(replica, given[replica])
            elif chance < 0.85:
                allowed = min(allowed + 1, 8)
                made.allow(allowed)
            else:
                await asyncio.sleep(0)
        for replica in range(replicas):
            made.give(replica, *range(given[replica] + 1, 61))
        made.allow(8)
        for task in made.servers:
            for peer in (*made.servers, *made.workers):
                made.break_way(task, peer)
                made.break_way(peer, task)
        made.break_way(made.servers[0], CLIENT)
        await made.go_on()
        assert made.state() == [(-8, 8)] * servers
        spent = [(replica, group) for version in receipts(made) for replica, group, _ in version]
        assert len(spent) == len(set(spent))
        for version, each in enumerate(receipts(made)):
            for replica, group, outcome in each:
                if outcome is Outcome.KEPT:
                    assert made.updates[replica, version] == list(range((group - 1) * K + 1, group * K + 1))


def test_a_stopwatch_adds_up_what_local_steps_wait_for_and_compute() -> None:
    now = 100.0
    watch = Stopwatch(lambda: now)
    watch.arrive()
    watch.start(3)
    for waited in (1.0, 2.0):
        now += 10.0
        watch.wait(3, Phase.INPUT)
        now += waited
        watch.start(3)
    now += 5.0
    assert watch.so_far()[:6] == (3, Phase.COMPUTE, 100.0, 3.0, 25.0, now)
    assert struct.unpack("=5d", watch.post())[:4] == (100.0, 3.0, 25.0, now)
