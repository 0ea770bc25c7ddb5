"""Who waits for whom when several threads share a tape, judged by the memory that launches touch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from flowrt.op import no_gradient
from flowrt.sched.regions.recorded import Stretch
from flowrt.sched.tape.schedule import (
    CHUNK,
    CHUNKS_PER_THREAD,
    MOST_CHUNKS,
    TINY,
    WORTHWHILE,
    Task,
    control,
    divide,
    hazards,
    worth_a_look,
)
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


@no_gradient
@op
def schedule_test_both(x: Spec) -> tuple[Spec, Spec]:
    """Two of what ``x`` is one of."""
    return x, x


@dataclass(frozen=True)
class Touching:
    """A launch that is nothing but the memory it touches, and what it waits for."""

    touched: tuple[Stretch, ...] = ()
    node: int = 0
    control: tuple[int, ...] = ()
    also: tuple[int, ...] = ()

    def stretches(self) -> tuple[Stretch, ...]:
        return self.touched


def reads(slot: int, begin: int, end: int) -> Stretch:
    return Stretch(slot, begin, end, False)


def writes(slot: int, begin: int, end: int) -> Stretch:
    return Stretch(slot, begin, end, True)


def after(*launches: tuple[Stretch, ...]) -> list[list[int]]:
    return [sorted(each) for each in hazards([Touching(touched) for touched in launches])]  # type: ignore[misc]


def test_a_reader_waits_for_the_writer_and_the_next_writer_for_all_readers() -> None:
    launches = ((writes(1, 0, 8),), (reads(1, 0, 8),), (reads(1, 4, 8),), (writes(1, 0, 8),), (reads(1, 0, 4),))
    assert after(*launches) == [[], [0], [0], [0, 1, 2], [3]]


def test_those_who_only_read_do_not_wait_for_each_other() -> None:
    assert after((reads(2, 0, 8),), (reads(2, 0, 8),), (reads(2, 3, 5),)) == [[], [], []]


def test_parts_and_slots_are_told_apart() -> None:
    launches = ((writes(1, 0, 8),), (writes(1, 8, 16),), (writes(2, 0, 8),), (reads(1, 7, 9),), (reads(1, 0, 7),))
    assert after(*launches) == [[], [], [], [0, 1], [0]]


def test_what_works_in_place_does_not_wait_for_itself() -> None:
    assert after((writes(1, 0, 8),), (reads(1, 0, 8), writes(1, 0, 8)), (reads(1, 0, 8),)) == [[], [0], [1]]


@pytest.mark.parametrize("seed", range(100))
def test_hazards_are_those_of_every_byte_alone(seed: int) -> None:
    rng = random.Random(seed)
    launches = []
    for _ in range(rng.randrange(1, 25)):
        touched = []
        for _ in range(rng.randrange(4)):
            begin = rng.randrange(12)
            touched.append(Stretch(rng.randrange(2), begin, begin + rng.randrange(1, 6), rng.random() < 0.4))
        launches.append(Touching(tuple(touched)))
    cells: dict[tuple[int, int], tuple[int, set[int]]] = {}  # byte → its last writer, and who read it since
    expected: list[set[int]] = [set() for _ in launches]
    for number, launch in enumerate(launches):
        for stretch in launch.touched:
            for byte in range(stretch.begin, stretch.end):
                writer, readers = cells.get((stretch.slot, byte), (-1, set()))
                expected[number] |= {writer, *(readers if stretch.written else ())} - {-1, number}
        for stretch in sorted(launch.touched, key=lambda s: s.written):
            for byte in range(stretch.begin, stretch.end):
                writer, readers = cells.get((stretch.slot, byte), (-1, set()))
                cell = (number, set()) if stretch.written else (writer, readers | {number})
                cells[(stretch.slot, byte)] = cell  # type: ignore[assignment]
    assert hazards(launches) == expected, f"seed {seed}"  # type: ignore[arg-type]


def test_a_short_tape_or_one_thread_is_not_divided() -> None:
    nothing: list[set[int]] = [set()] * 4
    assert divide([10e-6] * 4, [1000] * 4, nothing, 2) is None
    assert divide([1.0] * 4, [1000] * 4, nothing, 1) is None
    assert divide([], [], [], 4) is None
    many: list[set[int]] = [set()] * 20_000
    assert divide([10e-9] * 20_000, [1] * 20_000, many, 4) is None
    assert divide([100e-9] * 20_000, [1] * 20_000, many, 4) is not None


def test_what_is_worth_a_look_takes_long_enough_in_launches_that_do() -> None:
    assert worth_a_look([WORTHWHILE], 2)
    assert not worth_a_look([WORTHWHILE * 0.99], 2)
    assert worth_a_look([TINY * 10_000, *[0.0] * 9_999], 2)  # as much as they have to take, to the bit
    assert not worth_a_look([WORTHWHILE], 1)
    assert not worth_a_look([TINY * 0.99] * 10_000, 2)


def test_loops_that_all_threads_share_wait_for_one_another() -> None:
    schedule = divide([1.0] * 3, [1] * 3, [set(), set(), set()], 2, own={0: 0.5, 2: 0.5})
    assert schedule is not None
    assert [(task.own, task.after) for task in schedule.tasks] == [(True, ()), (False, ()), (True, (0,))]
    assert [task.chunks for task in schedule.tasks] == [1, 1, 1]


def test_a_chain_that_cannot_be_split_is_not_divided() -> None:
    chain = [{i - 1} if i else set[int]() for i in range(10)]
    assert divide([1e-3] * 10, [1] * 10, chain, 4) is None


def test_independent_launches_are_tasks_of_their_own() -> None:
    schedule = divide([1e-3] * 3, [1] * 3, [set(), set(), {0, 1}], 2)
    assert schedule is not None
    assert schedule.tasks == (Task(0, 1, 1, ()), Task(1, 2, 1, ()), Task(2, 3, 1, (0, 1)))
    assert schedule.seconds == pytest.approx(2e-3, rel=0.01)


def test_a_long_launch_is_cut_into_chunks_no_shorter_than_is_worth_it() -> None:
    for seconds, units, chunks in [(1.0, 1000, 6), (1.0, 5, 5), (3.5 * CHUNK, 1000, 3), (3.5 * CHUNK, 2, 2)]:
        schedule = divide([seconds, 1.0], [units, 1000], [set(), {0}], 2)
        assert schedule is not None
        assert [task.chunks for task in schedule.tasks] == [chunks, 2 * CHUNKS_PER_THREAD]


def test_stretches_of_a_long_tape_are_long_enough_that_chunks_never_are_too_many() -> None:
    short, count = 5 * CHUNK, 50  # alone worth a task
    seconds = [MOST_CHUNKS * short] * 2 + [short] * count
    schedule = divide(seconds, [1] * len(seconds), [set()] * len(seconds), 2)
    assert schedule is not None
    together = 2 * 2 * CHUNKS_PER_THREAD  # their share of what two long ones take, which each thread has in chunks
    assert [task.stop - task.first for task in schedule.tasks] == [1, 1] + [together] * (count // together) + [
        count % together
    ]


def test_short_launches_go_together_and_wait_for_what_any_of_them_waits_for() -> None:
    seconds = [1e-3, 1e-7, 1e-7, 1e-3, 1e-7]
    waits: list[set[int]] = [set(), {0}, {1}, set(), {1, 3}]
    schedule = divide(seconds, [1000, 1, 1, 1000, 1], waits, 2)
    assert schedule is not None
    assert schedule.tasks == (Task(0, 1, 6, ()), Task(1, 3, 1, (0,)), Task(3, 4, 6, ()), Task(4, 5, 1, (1, 2)))


@pytest.mark.parametrize("seed", range(100))
def test_every_launch_is_in_one_task_and_tasks_wait_only_for_earlier_ones(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 200)
    seconds = [rng.choice([1e-8, 1e-7, 1e-6, 5e-6, 1e-4, 1e-2]) for _ in range(count)]
    waits = [set(rng.sample(range(i), min(i, rng.randrange(3)))) for i in range(count)]
    threads = rng.randrange(2, 9)
    schedule = divide(seconds, [rng.choice([1, 1, 7, 10**6]) for _ in seconds], waits, threads)
    if schedule is None:
        return
    assert [n for task in schedule.tasks for n in range(task.first, task.stop)] == list(range(count))
    home = {n: number for number, task in enumerate(schedule.tasks) for n in range(task.first, task.stop)}
    for number, task in enumerate(schedule.tasks):
        assert task.chunks == 1 or task.stop == task.first + 1
        assert all(before < number for before in task.after)
        needed = {home[before] for n in range(task.first, task.stop) for before in waits[n]} - {number}
        assert set(task.after) == needed, f"seed {seed}"
    assert schedule.seconds >= sum(seconds) / threads


def test_control_passes_through_nodes_that_launch_nothing() -> None:
    from tape_world import PlanMaker

    make = PlanMaker()
    x = make.feed("float32", (2,))
    y = make.node("negative", x)  # node 0
    alias = make.node("reshape", y, make.constant([2]))  # nodes 1 and 2
    make.node("no_op", control=[2])  # node 3
    make.node("square", x, control=[3])  # node 4
    plan = make.plan(alias)
    launches = [Touching(node=0), Touching(node=4, control=(3,))]
    assert control(plan, launches) == [set(), {0}]  # type: ignore[arg-type]
    assert control(plan, launches[:1]) == [set()]  # type: ignore[arg-type]


def test_nodes_that_one_launch_computes_do_not_make_it_wait_for_itself_or_for_what_follows() -> None:
    from tape_world import PlanMaker

    make = PlanMaker()
    x = make.feed("float32", (2,))
    make.node("negative", x)  # node 0
    make.node("square", x, control=[0])  # node 1
    last = make.node("square", x, control=[1])  # node 2
    launches = [Touching(node=0), Touching(node=1, also=(2,), control=(0, 1)), Touching(node=1)]
    assert control(make.plan(last), launches) == [set(), {0}, set()]  # type: ignore[arg-type]


def test_control_passes_through_the_second_output_of_a_node() -> None:
    from tape_world import PlanMaker

    make = PlanMaker()
    x = make.feed("float32", (2, 2))
    y = make.node("schedule_test_both", x)  # node 0
    alias = make.node("reshape", y + 1, make.constant([4]))  # nodes 1 and 2
    make.node("square", x, control=[2])  # node 3
    launches = [Touching(node=0), Touching(node=3, control=(2,))]
    assert control(make.plan(alias), launches) == [set(), {0}]  # type: ignore[arg-type]
