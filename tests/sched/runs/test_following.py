"""Who leads and who follows, driven by hand: what is lost is told again, and who lags too far is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrt.base.errors import RemoteError, ResourceError
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.sched.drivers.following import Follow, Had, Lead, Passed
from flowrt.sched.drivers.tasks import Tasks
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.variables import Variables
from flowrt.sched.runs.followings import Followings
from flowrt.sched.server import follower, leading, led
from flowrt.sched.server.follower import Follower
from flowrt.sched.server.leading import Leader
from flowrt.sched.server.led import Led

A, B = "/job:ps/task:0", "/job:ps/task:1"
W, STEP = ("", "w"), ("", "step")
SPECS = {W: Spec("float32", (5,)), STEP: Spec("int64", ())}


class Node:
    """A host with variables, and what is posted from it."""

    def __init__(self, task: str) -> None:
        self.posted: list[Any] = []
        self.variables, self.memory = Variables(task), Memory()
        host = SimpleNamespace(
            task=task, variables=self.variables, memory=self.memory, inventory=self.variables.inventory
        )
        self.way: Any = SimpleNamespace(
            host=host,
            tasks=Tasks(),
            post=lambda peer, message: self.posted.append(message),
            context=lambda *of: None,
            compute=self.compute,
        )

    def hold(self, version: int) -> None:
        for name, spec in SPECS.items():
            self.variables.declare(name, spec)
        self.variables.begin(W, np.full(5, version, np.float32))
        self.variables.begin(STEP, np.array(version, np.int64))

    def value(self, name: tuple[str, str]) -> Any:
        return self.variables.value(name, SPECS[name])

    def move(self, made: int, update: Any) -> None:
        """Variables are written in place, but for what is lent."""
        self.variables.part(frozenset(SPECS), lambda name, array: array.copy())
        self.value(W)[...] += update
        self.value(STEP)[...] = made

    def compute(self, plan: Any, feeds: Any, context: Any, then: Any, failed: Any) -> None:
        self.move(int(feeds[0]), feeds[1])
        then([])

    def told(self) -> list[Any]:
        posted, self.posted = self.posted, []
        return posted


class World:
    """One that leads from version 3 on, and one that follows; ``reached`` says at which version the first begins."""

    def __init__(self) -> None:
        self.ahead, self.behind, self.version = Node(A), Node(B), 3
        self.ahead.hold(3)
        plan = SimpleNamespace(plan=SimpleNamespace(feeds=(PlanFeed("made", SPECS[STEP]), PlanFeed("u", SPECS[W]))))
        variables = (tuple((*name, spec.dtype.name, spec.dims) for name, spec in SPECS.items()),)
        follow = Follow(7, "", "trainer", (A,), variables, 3, 0, ((-1, -1), (0, 0)), 0)
        self.leader = Leader(Lead(7, 1, B, (W, STEP), 3, (1,)), self.ahead.way)
        self.follower = Follower(follow, plan, self.behind.way)  # type: ignore[arg-type]

    async def begin(self) -> None:
        await self.follower.ready()
        self.leader.reach(3)

    def step(self, led: Led | None = None) -> bool:
        """A version is applied; answers whether that was said, where it may have to wait."""
        update, said = np.full(5, 10.0**-self.version, np.float32), [led is None]
        self.ahead.move(self.version + 1, update)
        if led is None:
            self.leader.moved(self.version, [[np.zeros(2), update]], True)
        else:
            led.moved(self.version, [[np.zeros(2), update]], True, lambda: said.append(True))
        self.version += 1
        return said[-1]

    def exchange(self) -> None:
        """All that is on its way comes."""
        while self.ahead.posted or self.behind.posted:
            for message in self.ahead.told():
                self.follower.hear(A, message)
            for message in self.behind.told():
                self.leader.had(message.number)

    def check(self) -> None:
        assert self.follower.version == self.version
        for name in SPECS:
            np.testing.assert_array_equal(self.behind.value(name), self.ahead.value(name))


async def test_who_follows_holds_to_the_bit_what_others_do_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "PIECE", 8)
    monkeypatch.setattr(leading, "WINDOW", 16)
    world = World()
    await world.begin()
    assert world.leader.begun.result()
    assert [message.number for message in world.ahead.posted] == [0, 1]
    world.step()
    world.exchange()
    assert await world.follower.caught()
    world.step()
    world.step()
    world.exchange()
    world.check()
    assert not await asyncio.wait_for(asyncio.ensure_future(world.follower.arrive(5)), 5)
    assert not world.behind.variables.inventory()


async def test_nobody_has_caught_up_before_it_has_applied_a_version_as_that_may_have_to_be_compiled() -> None:
    world = World()
    await world.begin()
    world.exchange()
    catching = asyncio.ensure_future(world.follower.caught())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not catching.done()
    world.step()
    world.exchange()
    async with asyncio.timeout(10):
        assert await catching
    world.check()


async def test_what_is_lost_with_its_way_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "PIECE", 8)
    world = World()
    await world.begin()
    for lost in range(8):
        world.step()
        told = world.ahead.told()
        for message in told[: lost % 3]:
            world.follower.hear(A, message)
        had = world.behind.told()
        for message in had[:lost]:
            world.leader.had(message.number)
        world.leader.broken()
        world.follower.broken(A)
    world.exchange()
    world.check()
    assert await world.follower.arrive(world.version)
    world.follower.close()
    await world.follower.end()
    world.check()


async def test_who_lags_too_far_is_given_up_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "LEAST_KEPT", 60)
    world = World()
    await world.begin()
    for _ in range(4):
        world.step()
    assert world.leader.over
    assert world.ahead.posted[-1] == Passed(7, -1, 0, ())
    world.exchange()
    assert not await world.follower.caught()
    await world.follower.end()
    assert not world.behind.variables.inventory()
    assert not any(isinstance(message, Had) for message in world.behind.told())


@pytest.mark.parametrize("error", [ResourceError, RuntimeError])
async def test_who_cannot_have_memory_for_what_is_to_come_is_given_up(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: Any) -> None:
        raise error("no memory")

    monkeypatch.setattr(follower, "touched", refuse)
    world = World()
    await world.begin()
    world.exchange()
    assert not await world.follower.caught()
    await world.follower.end()
    assert not world.behind.variables.inventory()


async def test_nobody_leads_from_a_version_that_is_over_or_while_others_write() -> None:
    late, written = World(), World()
    late.leader.reach(4)
    assert not late.leader.begun.result()
    assert written.ahead.variables.try_hold(frozenset(), frozenset([W]))
    written.leader.reach(3)
    assert not written.leader.begun.result()


async def test_versions_are_made_at_half_the_pace_of_who_catches_up_until_it_has() -> None:
    world, those = World(), Led()
    those.add(world.leader)
    await world.begin()
    assert all(world.step(those) for _ in range(8))  # while the variables are told nobody waits
    world.leader.had(1)  # one piece for each of the two
    world.leader.had(2)
    made = 0
    for had in range(3, 40):
        while world.leader._behind <= max(1, world.leader._allowed):
            waits = not world.step(those)
            made += 1
            assert waits == world.leader.lags
        world.leader.had(had)
        if world.leader._behind <= 1:
            break
    assert (had, made) == (16, 7)
    those.close()


async def test_an_applied_version_is_said_once_who_waits_for_it_has_caught_up_or_is_gone() -> None:
    world, those = World(), Led()
    those.add(world.leader)
    await world.begin()
    world.exchange()
    said: list[int] = []

    def move() -> None:
        update = np.zeros(5, np.float32)
        those.moved(3 + len(world.leader._updates), [[np.zeros(2), update]], True, lambda: said.append(len(said)))

    move()
    move()
    assert said == [0]
    world.leader.had(3)
    assert said == [0, 1]
    move()
    assert said == [0, 1]
    world.leader.close()
    assert said == [0, 1, 2]
    move()
    assert said == [0, 1, 2, 3]
    those.close()


async def test_who_does_nothing_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led, "PATIENCE", 0.0)
    world, those, said = World(), Led(), asyncio.Event()
    those.add(world.leader)
    await world.begin()
    world.exchange()
    world.step(those)
    those.moved(4, [[np.zeros(2), np.zeros(5, np.float32)]], True, said.set)
    assert not said.is_set()
    async with asyncio.timeout(10):
        await said.wait()
    assert all(world.step(those) for _ in range(5))
    world.leader.had(3)
    assert not world.step(those)
    those.close()


async def test_too_many_bytes_of_updates_wait_for_no_more_while_the_variables_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leading, "LEAST_KEPT", 60)
    world, those = World(), Led()
    those.add(world.leader)
    await world.begin()
    assert [world.step(those), world.step(those)] == [True, False]
    assert not world.leader.over
    world.exchange()
    assert not world.leader.lags
    those.close()


async def test_nobody_follows_for_a_client_that_is_gone_by_then() -> None:
    tasks, over = Tasks(), asyncio.Event()
    followings = Followings(tasks)
    before: Any = SimpleNamespace(asked=SimpleNamespace(container="", group="g"), end=over.wait)
    followings._followers[1] = before  # who followed before: its end is waited for
    about = Follow(2, "", "g", (), (), 0, 0, (), 0)
    never: Any = None  # neither plans, a way nor servers are asked for
    asking = asyncio.create_task(followings.answer(about, "client", never, never, never))
    await asyncio.sleep(0)
    followings.ended("client")
    await asyncio.sleep(0)
    over.set()
    with pytest.raises(RemoteError, match="nobody here follows so"):
        await asking
    assert not followings._followers
    await tasks.aclose()


async def test_who_ends_while_others_are_asked_after_does_not_follow() -> None:
    followings = Followings(Tasks())
    about = SimpleNamespace(container="", group="g")

    async def end() -> None:
        followings._followers.pop(2, None)

    for follow in (1, 2):
        who: Any = SimpleNamespace(asked=about, over=True, arrived=False, end=end)
        followings._followers[follow] = who
    assert not await followings.away("", "g", "client")
