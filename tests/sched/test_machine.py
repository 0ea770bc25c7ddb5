"""The step machine against what the papers say, by equality; then against sequential evaluation, in any order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from machine_world import DEAD, Draft, Program, Run

from flowrt.base.errors import GraphError, InternalError
from flowrt.sched.machine import ALL_DEAD, Next, StepMachine
from flowrt.sched.topology import NodeKind, Topology

if TYPE_CHECKING:
    from collections.abc import Callable


def counting(parallel: int, body_work: int = 1) -> tuple[Draft, list[int]]:
    """Feeds: start, limit, total; adds the counter to the total."""
    draft = Draft(feeds=3)

    def body(state: list[int], constants: list[int]) -> list[int]:
        total = draft.node(*state)
        for _ in range(body_work):
            total = draft.node(total)
        return [draft.node(state[0], kernel=lambda got: got[0] + 1), total]

    return draft, draft.loop([0, 2], [1], body, parallel)


# The root frame


def diamond() -> Topology:
    draft = Draft()
    top = draft.node()
    return draft.topology(draft.node(draft.node(top), draft.node(top)))


def test_a_value_is_freed_after_its_last_reader() -> None:
    machine = StepMachine(diamond())
    assert machine.start() == Next(launch=[0], free=[])
    assert machine.complete(0) == Next(launch=[1, 2], free=[])
    assert machine.complete(2) == Next(launch=[], free=[])
    assert machine.complete(1) == Next(launch=[3], free=[0])
    assert not machine.done
    assert machine.complete(3) == Next(launch=[], free=[1, 2])
    assert machine.done


def test_a_value_that_nobody_reads_is_freed_when_produced_and_an_unread_feed_at_once() -> None:
    draft = Draft(feeds=2)
    draft.node(0, outputs=2)
    machine = StepMachine(draft.topology(3))
    assert machine.start() == Next(launch=[0], free=[1])
    assert machine.complete(0) == Next(launch=[], free=[0, 2])


def test_a_value_read_twice_by_one_node_arrives_and_is_freed_once() -> None:
    draft = Draft(feeds=1)
    draft.node(draft.node(0), 1)
    machine = StepMachine(draft.topology(2, 0))
    assert machine.start() == Next(launch=[0], free=[])
    assert machine.complete(0) == Next(launch=[1], free=[])
    assert machine.complete(1) == Next(launch=[], free=[1])


def test_a_control_input_delays_a_launch() -> None:
    draft = Draft()
    draft.node()
    draft.node(after=[0])
    machine = StepMachine(draft.topology(0, 1))
    assert machine.start() == Next(launch=[0], free=[])
    assert machine.complete(0) == Next(launch=[1], free=[])


def test_an_empty_step_is_done_at_once() -> None:
    machine = StepMachine(Draft(feeds=1).topology(0))
    assert not machine.done
    assert machine.start() == Next(launch=[], free=[])
    assert machine.done


def test_completing_what_does_not_run_is_a_bug() -> None:
    machine = StepMachine(diamond())
    machine.start()
    with pytest.raises(InternalError):
        machine.complete(3)
    machine.complete(0)
    with pytest.raises(InternalError):
        machine.complete(0)
    with pytest.raises(InternalError):
        machine.complete(4)


# Deadness


def conditional() -> Draft:
    """Feeds 0 data, 1 pred; nodes 0 switch (2, 3), 1 on false (4), 2 on true (5), 3 merge (6)."""
    draft = Draft(feeds=2)
    false, true = draft.switch(0, 1)
    draft.merge(draft.node(false), draft.node(true))
    return draft


def test_a_merge_takes_the_branch_that_was_taken_and_the_other_never_runs() -> None:
    machine = StepMachine(conditional().topology(4, 6))
    assert machine.start() == Next(launch=[0], free=[])
    assert machine.complete(0, dead=0b01) == Next(launch=[2], free=[0, 1])
    assert machine.complete(2) == Next(launch=[3], free=[3])
    assert machine.merged(3) == 1
    assert machine.complete(3) == Next(launch=[], free=[5])
    assert machine.done
    assert machine.dead(4)
    assert not machine.dead(6)


def test_deadness_runs_down_long_chains_and_frees_what_dead_nodes_would_have_read() -> None:
    draft = conditional()
    value = draft.makers[2] + 2
    for _ in range(20_000):
        value = draft.node(value, 1)
    machine = StepMachine(draft.topology(value))
    machine.start()
    assert machine.complete(0, dead=0b01) == Next(launch=[2], free=[0, 1])
    assert machine.dead(value)


def test_a_dead_node_waits_for_all_its_inputs_before_it_is_over() -> None:
    draft = Draft(feeds=1)
    draft.node(0)
    draft.node(0)
    draft.node(1, 2)
    machine = StepMachine(draft.topology(3))
    machine.start()
    assert machine.complete(0, dead=ALL_DEAD) == Next(launch=[], free=[])
    assert not machine.dead(3)
    assert machine.complete(1) == Next(launch=[], free=[0, 2])
    assert machine.dead(3)
    assert machine.done


def test_deadness_passes_along_control_edges_but_not_into_a_merge() -> None:
    draft = Draft(feeds=2)
    false, true = draft.switch(0, 1)
    lost = draft.makers[draft.node(false)]
    draft.node(true, after=[lost])
    draft.merge(true, false, after=[lost])
    machine = StepMachine(draft.topology(5, 6))
    machine.start()
    assert machine.complete(0, dead=0b01) == Next(launch=[3], free=[0, 1])
    assert machine.complete(3) == Next(launch=[], free=[true])
    assert machine.dead(5)
    assert not machine.dead(6)


def test_a_send_is_launched_with_a_dead_input_so_that_the_other_end_hears_of_it() -> None:
    draft = Draft(feeds=2)
    false, true = draft.switch(0, 1)
    for side in (false, true):
        draft.node(side, kind=NodeKind.SEND, outputs=0)
    machine = StepMachine(draft.topology())
    assert machine.start() == Next(launch=[0], free=[])
    assert sorted(machine.complete(0, dead=0b01).launch) == [1, 2]
    assert machine.dead(2)
    assert not machine.dead(3)
    assert machine.complete(1) == Next(launch=[], free=[])
    assert machine.complete(2) == Next(launch=[], free=[3])
    assert machine.done


def test_a_merge_launches_once_and_lets_a_second_live_input_go() -> None:
    draft = Draft(feeds=1)
    draft.merge(draft.node(0), draft.node(0))
    machine = StepMachine(draft.topology(3))
    assert machine.start() == Next(launch=[0, 1], free=[])
    assert machine.complete(1) == Next(launch=[2], free=[])
    assert machine.merged(2) == 1
    assert machine.complete(0) == Next(launch=[], free=[1, 0])
    assert machine.complete(2) == Next(launch=[], free=[2])
    assert machine.done


def test_a_merge_of_dead_inputs_is_dead_and_a_merge_of_feeds_is_ready() -> None:
    draft = Draft(feeds=2)
    false, _ = draft.switch(0, 1)
    draft.merge(false, draft.node(false))
    draft.merge(0, 1)
    machine = StepMachine(draft.topology(5, 6))
    assert machine.start() == Next(launch=[0, 3], free=[])
    assert machine.merged(3) == 0
    machine.complete(0, dead=0b01)
    assert machine.dead(5)
    assert machine.complete(3) == Next(launch=[], free=[0])
    assert machine.done


# Failure


def test_after_a_failure_nothing_launches() -> None:
    machine = StepMachine(diamond())
    machine.start()
    machine.complete(0)
    machine.fail()
    assert not machine.done
    assert machine.complete(1) == Next(launch=[], free=[])
    assert machine.complete(2) == Next(launch=[], free=[0])
    assert machine.done


def test_a_node_that_failed_is_completed_dead_and_lets_its_inputs_go() -> None:
    machine = StepMachine(diamond())
    machine.start()
    machine.complete(0)
    machine.fail()
    assert machine.complete(1) == Next(launch=[], free=[])
    assert machine.complete(2, dead=ALL_DEAD) == Next(launch=[], free=[0, 1])
    assert machine.done


def test_a_step_cancelled_before_it_starts_launches_nothing() -> None:
    machine = StepMachine(diamond())
    machine.fail()
    assert machine.start() == Next(launch=[], free=[])
    assert machine.done


# Frames


def test_a_frame_is_entered_iterated_and_left() -> None:
    draft = Draft(feeds=2)
    (out,) = draft.loop([0], [1], lambda state, _: [draft.node(*state)])
    enter, merge, limit, less, switch, leave, body, move = range(8)
    topology = draft.topology(out)
    machine, nodes, values = StepMachine(topology), len(topology.kinds), topology.values
    assert machine.start() == Next(launch=[enter, limit], free=[])
    home, first, second = 1, 2, 3
    assert machine.outputs(enter) == range(first * values + 2, first * values + 3)
    assert machine.outputs(limit) == range(home * values + 4, home * values + 5)
    assert machine.complete(limit) == Next(launch=[], free=[1])
    assert machine.complete(enter) == Next(launch=[first * nodes + merge], free=[0])
    assert machine.merged(first * nodes + merge) == 0
    assert machine.complete(first * nodes + merge) == Next(launch=[first * nodes + less], free=[first * values + 2])
    assert machine.inputs(first * nodes + less) == [first * values + 3, home * values + 4]
    assert machine.complete(first * nodes + less) == Next(launch=[first * nodes + switch], free=[])
    taken = machine.complete(first * nodes + switch, dead=0b01)
    assert taken == Next(launch=[first * nodes + body], free=[first * values + 3, first * values + 5])
    assert machine.complete(first * nodes + body) == Next(launch=[first * nodes + move], free=[first * values + 7])
    assert machine.outputs(first * nodes + move).start == second * values + 10
    moved = machine.complete(first * nodes + move)
    assert moved == Next(launch=[second * nodes + merge], free=[first * values + 9])
    assert machine.merged(second * nodes + merge) == 1
    machine.complete(second * nodes + merge)
    machine.complete(second * nodes + less)
    left = machine.complete(second * nodes + switch, dead=0b10)
    assert left.launch == [second * nodes + leave]
    assert machine.outputs(second * nodes + leave) == range(out, out + 1)
    assert machine.complete(second * nodes + leave) == Next(launch=[], free=[second * values + 6, home * values + 4])
    assert machine.done


@pytest.mark.parametrize("parallel", [1, 2, 10])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_loop_counts_to_n_within_its_slots(limit: int, parallel: int) -> None:
    draft, exits = counting(parallel, body_work=20)
    run = Run(draft, exits, [0, limit, 100])
    run.drive()
    assert run.fetched() == [limit, 100 + sum(range(limit))]
    assert run.most_slots <= 1 + 1 + parallel + 1


def test_parallel_iterations_overlap_but_no_more_than_allowed() -> None:
    def lead(parallel: int) -> int:
        draft, exits = counting(parallel)
        slow, _, count = range(draft.makers[exits[1]] + 1, draft.makers[exits[1]] + 4)  # the body's nodes
        run, finished, most = Run(draft, exits, [0, 30, 0]), 0, 0
        run.obey(run.machine.start())
        while run.running:
            most = max(most, run.launches[count] - finished)
            activation = min(run.running, key=lambda running: running % len(draft.kinds) == slow)
            finished += activation % len(draft.kinds) == slow
            run.finish(activation)
        assert run.fetched() == [30, sum(range(30))]
        return most

    # The slow nodes form a chain, but the count runs ahead of them as far as it may.
    assert [lead(parallel) for parallel in (1, 2, 8)] == [1, 2, 8]


def test_a_long_loop_keeps_its_memory() -> None:
    draft, exits = counting(parallel=4)
    run = Run(draft, exits, [0, 5_000, 0])
    run.drive()
    assert run.fetched() == [5_000, sum(range(5_000))]
    assert run.most_slots <= 7
    assert len(run.machine._slots) <= 7


def test_a_loop_inside_a_dead_branch_is_dead_and_leaves_nothing() -> None:
    draft = Draft(feeds=3)
    false, true = draft.switch(0, 1)
    lost = draft.loop([false], [2], lambda state, _: state)
    run = Run(draft, [*lost, true], [5, 1, 9])
    run.drive()
    assert run.fetched() == [DEAD, 5]
    assert set(run.launches) == {0, draft.makers[false] + 3}  # the switch, and the live constant's ENTER


def test_nested_loops_multiply() -> None:
    draft = Draft(feeds=4)  # 0 zero, 1 outer limit, 2 inner limit, 3 total

    def outer(state: list[int], constants: list[int]) -> list[int]:
        _, inner_limit, zero = constants
        step = draft.loop([zero, state[1]], [inner_limit], inner, parallel=3)
        return [draft.node(state[0], kernel=lambda got: got[0] + 1), step[1]]

    def inner(state: list[int], _: list[int]) -> list[int]:
        return [draft.node(value, kernel=lambda got: got[0] + 1) for value in state]

    exits = draft.loop([0, 3], [1, 2, 0], outer, parallel=2)
    run = Run(draft, exits, [0, 40, 7, 1])
    run.drive()
    assert run.fetched() == [40, 281]
    assert run.most_slots <= 1 + 4 + 3 * 5


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(("limit", "before"), [(0, 0), (3, 1)])
def test_the_first_iteration_is_not_over_before_every_enter_has_come(
    is_constant: bool, limit: int, before: int
) -> None:
    draft = Draft(feeds=2)
    (out,) = draft.loop([0], [1], lambda state, _: [draft.node(state[0], kernel=lambda got: got[0] + 1)], parallel=1)
    value = draft.node(0)
    late, body = draft.makers[value], draft.makers[out] + 1
    draft.enter(value, "loop0", is_constant, parallel=1)  # nobody reads it
    run = Run(draft, [out], [0, limit])
    run.obey(run.machine.start())
    while others := [activation for activation in run.running if activation != late]:
        run.finish(others[0])
    assert run.launches[body] == before
    assert any(slot is not None for slot in run.machine._slots[1:])
    while run.running:
        run.finish(next(iter(run.running)))
    assert run.machine.done
    assert run.values == {out: limit}
    assert all(slot is None for slot in run.machine._slots[1:])


def test_a_variable_that_dies_stays_dead_while_its_loop_goes_on() -> None:
    draft = Draft(feeds=3)

    def body(state: list[int], _: list[int]) -> list[int]:
        _, if_odd = draft.switch(state[1], state[0])
        return [draft.node(state[0], kernel=lambda got: got[0] + 1), if_odd]

    exits = draft.loop([0, 2], [1], body)
    draft.inputs[3] += (draft.enter(2, "loop0"),)  # its merge hears from two ENTERs at first, then from none
    run = Run(draft, exits, [0, 4, 9])
    run.drive()
    assert run.fetched() == [4, DEAD]
    assert all(slot is None for slot in run.machine._slots[1:])


def test_leaving_a_frame_twice_by_one_exit_is_refused() -> None:
    draft = Draft(feeds=1)
    merge = draft.merge(draft.enter(0, "f"), 4)
    assert draft.node(merge, kind=NodeKind.NEXT_ITERATION) == 3
    draft.inputs[1] = (1, 3)
    draft.node(merge, kind=NodeKind.EXIT)
    run = Run(draft, [], [0])
    with pytest.raises(GraphError, match="two iterations of frame f left by it"):
        run.drive()


# Topologies that cannot run


def broken_cycle() -> Topology:
    return Topology([NodeKind.PLAIN] * 2, [(1,), (0,)], [1, 1], [(), ()])


def broken_crossing() -> Topology:
    draft = Draft(feeds=1)
    draft.node(draft.enter(0, "f"), 0)
    return draft.topology()


def broken_frame(frame: str, parallel: int) -> Callable[[], Topology]:
    draft = Draft(feeds=1)
    draft.enter(0, frame, parallel=parallel)
    return draft.topology


def broken_exit() -> Topology:
    draft = Draft(feeds=1)
    draft.node(0, kind=NodeKind.EXIT)
    return draft.topology()


def broken_fetch() -> Topology:
    draft = Draft(feeds=1)
    return draft.topology(draft.enter(0, "f"))


def broken_loop() -> Topology:
    draft = Draft(feeds=1)
    seen = draft.enter(0, "f")
    merge = draft.merge(seen, 4)
    draft.node(draft.node(merge, seen), kind=NodeKind.NEXT_ITERATION)
    return draft.topology()


def broken_merge() -> Topology:
    draft = Draft(feeds=1)
    draft.node(draft.merge(draft.enter(0, "f")), kind=NodeKind.NEXT_ITERATION)
    return draft.topology()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (broken_cycle, "cycle"),
        (broken_crossing, "reads from f and the step"),
        (broken_frame("", 1), "needs a frame name"),
        (broken_frame("f", 0), "parallel_iterations >= 1"),
        (broken_exit, "outside every frame"),
        (broken_fetch, "cannot be fetched"),
        (broken_loop, "does not reach it in every iteration"),
        (broken_merge, "in some iteration no input arrives"),
    ],
)
def test_a_topology_that_could_never_finish_is_refused(build: Callable[[], Topology], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        build()


# Random programs in random order, against sequential evaluation


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_in_any_order_compute_what_sequential_evaluation_does(seed: int) -> None:
    for case in range(150):
        name = f"{seed}/{case}"
        print("seed", name)
        rng = random.Random(name)
        program = Program(rng)
        feeds = [rng.randrange(100) for _ in range(3)]
        expected = program.evaluate(feeds)
        run = Run(program.draft, program.keep, feeds, strict=case % 5 == 0)
        run.drive(rng)
        assert run.fetched() == expected
        assert {node: run.launches[node] for node in program.evaluated} == program.evaluated
        assert set(run.values) == {v for v, got in zip(program.keep, expected, strict=True) if got is not DEAD}


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_that_fail_stop_and_list_what_they_hold(seed: int) -> None:
    for case in range(100):
        print("seed", name := f"fail {seed}/{case}")
        rng = random.Random(name)
        program = Program(rng)
        run = Run(program.draft, program.keep, [rng.randrange(100) for _ in range(3)])
        run.drive(rng, fail_after=rng.randint(1, 40))
