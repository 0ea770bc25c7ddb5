"""Credit returns when a value is consumed: who goes on where there is none, and that all do in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from credit_world import NBYTES, Program, World
from sim_loop import simulate

from flowrt.sched.host.credit import Credit, Want


class Wanting:
    """A credit of 10 bytes, and the steps that went on, in order."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.credit = Credit(10, self.due.append)
        self.went: list[int] = []

    def want(self, way: str, number: int, nbytes: int) -> Want:
        return self.credit.want(way, ("epoch", number), nbytes, lambda: self.went.append(number))

    def settle(self) -> list[int]:
        """Who goes on now."""
        self.went.clear()
        while self.due:
            self.due.pop()()
        return self.went


def test_ahead_is_made_what_there_is_credit_for_and_a_value_above_it_alone() -> None:
    credit = Wanting().credit
    assert credit.try_hold(6)
    assert not credit.try_hold(5)
    assert credit.try_hold(4)
    credit.hold(-10)
    assert credit.try_hold(50)
    assert not credit.try_hold(1)
    credit.hold(-50)
    assert credit.held == 0


def test_without_credit_the_oldest_of_every_way_goes_on_and_the_next_when_it_has_ended() -> None:
    world = Wanting()
    world.credit.hold(10)
    wants = {n: world.want("a", n, 4) for n in (3, 1, 2)} | {n: world.want("b", n, 4) for n in (5, 4)}
    assert world.settle() == [1, 4]
    world.credit.end(wants[1])
    assert world.settle() == [2]
    older = world.want("a", 0, 4)
    assert world.settle() == [0]  # though another goes on, which is younger
    world.credit.end(wants[2])
    assert world.settle() == []  # not while an older one goes on
    world.credit.end(older)
    assert world.settle() == [3]


def test_with_credit_all_go_on_that_it_is_enough_for_oldest_first() -> None:
    world = Wanting()
    wants = [world.want("a", n, 4) for n in (3, 2, 1, 0)]
    assert world.settle() == [0, 1]
    world.credit.hold(-4)
    assert world.settle() == [2]
    world.credit.end(wants[0])  # who waits may give up
    world.credit.hold(-12)
    assert world.settle() == []
    assert world.credit.held == -4


def test_of_one_step_all_goes_on_that_is_wanted_for_one_way() -> None:
    world = Wanting()
    world.credit.hold(10)
    for nbytes in (4, 5):
        world.want("a", 1, nbytes)
    assert world.settle() == [1, 1]
    assert world.credit.held == 19


def test_what_is_on_its_way_to_a_peer_holds_credit_and_keeps_younger_ones_back() -> None:
    world = Wanting()
    world.credit.hold(10)
    with world.credit.sending("a", ("epoch", 1), 4):
        assert world.credit.held == 14
        world.want("a", 2, 4)
        assert world.settle() == []
    assert world.settle() == [2]
    assert world.credit.ways == 1


async def _run_to_the_end(program: Program, world: World, what: str) -> None:
    async with asyncio.TaskGroup() as group:
        runs = [(step, group.create_task(world.run(step))) for step in program.steps]
        for step, work in runs:
            if not step.queues:  # what has nothing to do with queues goes on though they are full
                assert not any(done.error for done in await work), what
        runs += [(step, group.create_task(world.run(step))) for step in program.drains]
        for _, work in runs:
            assert not any(done.error for done in await work), what


@pytest.mark.parametrize("credit", [1, 2 * NBYTES, 1 << 40])
def test_every_program_comes_to_its_end_and_all_credit_returns(credit: int) -> None:
    for seed in range(30):
        rng = random.Random(f"{credit} {seed}")

        async def run(rng: random.Random = rng, what: str = f"credit {credit}, seed {seed}") -> None:
            program, world = Program(rng, 24), World(rng, credit)
            async with world.open():
                await _run_to_the_end(program, world, what)
                await asyncio.sleep(1)
                assert world.left() == (0, 0, 0), what

        simulate(rng, run)


def test_steps_that_are_aborted_at_random_moments_give_all_credit_and_their_places_back() -> None:
    for seed in range(30):
        rng = random.Random(seed)

        async def run(rng: random.Random = rng, what: str = f"seed {seed}") -> None:
            program, world = Program(rng, 24), World(rng, rng.choice([1, 2 * NBYTES]))
            async with world.open():
                runs = [asyncio.ensure_future(world.run(step)) for step in program.steps + program.drains]
                for work in rng.sample(runs, len(runs)):
                    await asyncio.sleep(rng.random() * 1e-3)
                    work.cancel()
                await asyncio.gather(*runs, return_exceptions=True)
                await asyncio.sleep(1)
                assert world.left() == (0, 0, 0), what

        simulate(rng, run)
