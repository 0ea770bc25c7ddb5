"""What a replica's stopwatch tells of a version, by a clock that the test moves; and what comes of it in a report."""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from dataclasses import dataclass

import numpy as np
import pytest
from iteration_world import RUN, World

from flowrt.sched.drivers.messages import Doing, Pending, Probe, Report
from flowrt.sched.drivers.pulse import BEAT, LONGEST, SHARE, Pulse, next_beat
from flowrt.sched.replica.stopwatch import Phase, Stopwatch


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def posted(watch: Stopwatch) -> tuple[float, ...]:
    return struct.unpack("=5d", watch.post())


def test_a_version_is_divided_into_waiting_for_its_batch_and_computing() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.arrive()
    clock.now = 101.0
    watch.wait(3, Phase.INPUT)
    clock.now = 104.0
    assert watch.so_far() == (3, Phase.INPUT, 100.0, 3.0, 0.0, 104.0, 0.0, 3.0)
    watch.start(3)
    clock.now = 106.0
    assert watch.so_far() == (3, Phase.COMPUTE, 100.0, 3.0, 2.0, 106.0, 0.0, 2.0)
    assert posted(watch) == (100.0, 3.0, 2.0, 106.0, 0.0)
    clock.now = 107.0
    assert watch.so_far() == (3, Phase.POSTED, 100.0, 3.0, 2.0, 106.0, 0.0, 1.0)


def test_rows_are_part_of_what_is_pulled() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.arrive()
    watch.wait(0, Phase.ROWS)
    clock.now = 105.0
    watch.start(0)
    clock.now = 106.0
    assert posted(watch) == (105.0, 0.0, 1.0, 106.0, 0.0)


def test_a_version_may_wait_for_rows_behind_its_batch() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.arrive()
    for phase in (Phase.INPUT, Phase.ROWS, Phase.ROWS):
        watch.wait(0, phase)
        clock.now += 1.0
    watch.start(0)
    clock.now += 4.0
    assert posted(watch) == (102.0, 1.0, 4.0, 107.0, 0.0)


def test_the_local_steps_of_a_version_are_computed_one_after_the_other() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in (1.0, 2.0, 4.0):
        watch.start(0)
        clock.now += seconds
    assert posted(watch) == (0.0, 0.0, 7.0, 107.0, 0.0)


def test_a_batch_is_waited_for_though_its_version_is_overtaken() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for version in range(3):
        watch.arrive()
        watch.wait(version, Phase.INPUT)
        clock.now += 1.0
    watch.start(2)
    assert posted(watch) == (102.0, 3.0, 0.0, 103.0, 0.0)


def test_what_is_computed_and_not_posted_yet_is_being_pushed() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start(0)
    clock.now = 102.0
    watch.stop()
    clock.now = 105.0
    assert watch.so_far()[1:] == (Phase.PUSH, 0.0, 0.0, 2.0, 102.0, 0.0, 3.0)
    assert posted(watch) == (0.0, 0.0, 2.0, 102.0, 0.0)


def test_who_still_computes_for_an_older_version_computes() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start(0)
    clock.now = 101.0
    watch.arrive()
    clock.now = 103.0
    watch.end()
    watch.start(1)
    clock.now = 104.0
    assert posted(watch) == (101.0, 0.0, 3.0, 104.0, 0.0)


def test_what_a_node_was_held_for_is_told_of_the_version_in_which_it_was() -> None:
    clock, held = Clock(), Clock(5.0)
    watch = Stopwatch(clock, held)
    watch.start(0)
    clock.now = 100.5  # until which the loop did not turn
    watch.leave()
    held.now, clock.now = 7.0, 103.0
    assert posted(watch) == (0.0, 0.0, 3.0, 103.0, 2.5)
    watch.start(1)
    watch.leave()
    assert posted(watch)[-1] == 0.0


def test_what_is_computed_at_once_and_takes_long_was_held() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for version, (seconds, held) in enumerate(((0.005, 0.0), (0.5, 0.5))):
        watch.start(version)
        clock.now += seconds
        assert struct.unpack("=5d", watch.post(at_once=True))[-1] == pytest.approx(held)


def test_of_towers_that_are_cut_off_one_is_spared_now_and_then_but_not_for_ever() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    spared = []
    for _ in range(300):
        watch.start(0)
        clock.now += 0.01
        spared.append(watch.spares())
    lengths = [len(list(group)) for is_spared, group in itertools.groupby(spared) if is_spared]
    assert lengths[:-1] == [50, 50], "half a second each"
    assert spared[:50] == [False] * 50, "after half a second"


def test_how_long_towers_are_cut_off_counts_from_the_first() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    spared = []
    for clock.now in (100.0, 100.25, 100.375, 100.5):
        spared.append(watch.spares())
    assert spared == [False, False, False, True]


def test_who_is_in_time_now_and_then_has_all_others_cut_off() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for number in range(300):
        watch.start(number)
        clock.now += 0.01
        assert not watch.spares()
        if number % 40 == 39:
            watch.post()


async def test_a_loop_that_does_not_turn_is_held() -> None:
    pulse = Pulse(lambda: True)
    pulse.start()
    await asyncio.sleep(2 * BEAT)
    before, began = pulse.held(), time.monotonic()
    seen = []

    def hold() -> None:
        time.sleep(0.3)
        seen.append(pulse.held() - before)

    asyncio.get_running_loop().call_soon(hold)
    await asyncio.sleep(2 * BEAT)
    found, took = pulse.held() - before, time.monotonic() - began  # which is long where others have the processor
    assert 0.2 < seen[0] <= found, "before the loop turns again"
    assert found <= took + BEAT
    pulse.stop()


def test_who_computes_for_long_beats_more_rarely_but_never_too_rarely() -> None:
    beats, computed = [], 0.0
    while computed < 10.0:
        beats.append(next_beat(computed))
        assert beats[-1] <= max(BEAT, SHARE * computed)
        computed += beats[-1]
    assert beats == sorted(beats)
    assert (beats[0], beats[-1]) == (BEAT, LONGEST)
    assert len(beats) < 160, "where it beat 1000 times"


async def test_a_report_holds_the_times_of_every_replica_in_order() -> None:
    world = World(2)
    await world.begin()
    for replica in range(2):
        world.give(replica, 1, 2)
    world.allow(2)
    world.settle()
    first, second = (message for message in world.client if isinstance(message, Report))
    for report in (first, second):
        opened, fixed, ordered, applied = report.stages
        assert opened <= fixed <= ordered <= applied
        rows = np.frombuffer(report.times).reshape(-1, 11).tolist()
        assert {row[0] for row in rows} == {0, 1}
        for _, version, told, phase, pulled, waited, computed, ended, _, came, whole in rows:
            assert (version, phase, waited) == (report.version, Phase.POSTED, 0.0)
            assert told <= pulled <= ended - computed <= ended <= came <= whole <= fixed
    assert second.stages[0] == first.stages[-1]
    await world.aclose()


async def test_who_is_asked_says_what_it_does() -> None:
    world = World(2, take=1)
    await world.begin()
    world.give(0, 1)
    world.settle()
    for task, replica in ((world.workers[0], 0), (world.workers[1], 1), (world.servers[0], -1)):
        world.tell(task, Probe(RUN, replica))
    world.settle()
    done, waits, pending = world.client[-3:]
    assert [type(message) for message in (done, waits, pending)] == [Doing, Doing, Pending]
    assert done.times[:2] == (0, Phase.POSTED)
    assert waits.times[:2] == (0, Phase.INPUT)
    assert waits.times[-1] > 0
    assert pending.came == (0,)
    opened, fixed, ordered = pending.stages
    assert opened >= fixed >= 0 > ordered, "the set is fixed, and the client has not allowed it"
    await world.aclose()
