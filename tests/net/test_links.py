"""The links of a node to others: who is said to be gone, where processes follow one another as one task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.base.errors import LinkBroken
from flowrt.net import links
from flowrt.net.door.tokens import new_token
from flowrt.net.door.transport import serve
from flowrt.net.link import Allowance, LinkStore
from flowrt.net.links import Links
from flowrt.net.wire.frames import allocate_array
from flowrt.net.wire.messages import Serve, from_data, to_hello
from flowrt.sched.drivers.messages import Probe
from flowrt.sched.host.rendezvous import Budget, Rendezvous

HERE, THERE = "/job:a/task:0", "/job:b/task:0"
TOKEN = new_token()


@asynccontextmanager
async def process(
    birth: str, port: int = 0, hears: Callable[[Any], None] = lambda message: None
) -> AsyncIterator[tuple[str, int]]:
    """One that is `THERE`, and ``hears`` what is posted to it; answers where."""

    async def attend(connection: Any) -> None:
        async for message in connection:
            hears(from_data(message))

    hello = to_hello(Serve(THERE, (), birth=birth))
    async with serve("127.0.0.1", port, TOKEN, attend, hello=hello) as opened:
        yield "127.0.0.1", opened.port


class Told:
    """What who posts was told, and waits for."""

    def __init__(self) -> None:
        self.gone: list[tuple[tuple[str, int], str]] = []
        self.was_gone, self._broken = asyncio.Event(), asyncio.Event()
        store = LinkStore(Rendezvous(), Budget(1), Allowance(), lambda epoch: True, allocate_array)
        self.links = Links(HERE, TOKEN, store, lambda peer, link: self._broken.set(), self._hear)

    def _hear(self, peer: str, address: tuple[str, int], birth: str) -> None:
        assert peer == THERE
        self.gone.append((address, birth))
        self.was_gone.set()

    async def post(self, address: tuple[str, int]) -> list[tuple[tuple[str, int], str]]:
        """Try to reach an address, once all ways are known to be broken that are; answers who was found to be gone."""
        self.gone.clear()
        async with asyncio.timeout(10):
            while len(self.links):
                self._broken.clear()
                await self._broken.wait()
            self.links.post(THERE, address, Probe(1, 0))
            await asyncio.wait(self.links._openers)
        return self.gone


async def test_who_follows_another_as_a_task_is_not_taken_for_it_wherever_it_is() -> None:
    told = Told()
    async with told.links:
        async with process("first") as place:
            assert await told.post(place) == []
        assert await told.post(place) == [(place, "first")], "nobody listens there any more"
        assert await told.post(place) == [(place, "")], "nor who may have come meanwhile"
        async with process("second", place[1]):
            assert await told.post(place) == []
        async with process("third") as other:
            assert await told.post(other) == [(other, "second")]
        assert await told.post(place) == [(place, "")], "the third is elsewhere"
        assert await told.post(other) == [(other, "third")]


async def test_who_follows_another_at_its_address_before_that_is_missed_is_not_taken_for_it() -> None:
    told = Told()
    async with told.links:
        async with process("first") as place:
            await told.post(place)
        async with process("second", place[1]):
            assert await told.post(place) == [(place, "first")]


async def test_who_asks_for_the_same_link_at_once_gets_one_and_its_end_forgets_no_other() -> None:
    told = Told()
    async with process("first") as place, asyncio.timeout(10), told.links, asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(told.links.to(THERE, place)) for _ in range(2))
        assert await first is await second

        async def run() -> None:
            pass

        before: Any = SimpleNamespace(run=run, peer=THERE)  # which was closed, and ends only now
        await told.links._run(before, place)
        assert told.links.standing(place) is await first


async def test_what_is_posted_while_a_link_is_being_opened_goes_in_order_and_the_oldest_is_lost_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "WAITING", 3)
    heard, all_came = list[int](), asyncio.Event()

    def hears(probe: Any) -> None:
        heard.append(probe.run)
        if probe.run == 9:
            all_came.set()

    async with process("first", hears=hears) as place, asyncio.timeout(10), Told().links as opened:
        for number in range(5):
            opened.post(THERE, place, Probe(number, 0))
        await asyncio.wait(opened._openers)
        opened.post(THERE, place, Probe(9, 0))
        await all_came.wait()
    assert heard == [2, 3, 4, 9]
    opened.post(THERE, place, Probe(10, 0))  # which nobody sends any more


async def test_who_is_another_task_than_was_meant_is_not_linked_to() -> None:
    async with process("first") as place, asyncio.timeout(10), Told().links as opened:
        with pytest.raises(LinkBroken, match="is not /job:c/task:0"):
            await opened.to("/job:c/task:0", place)
        assert opened.standing(place) is None
        assert (await opened.to(THERE, place)).peer == THERE


@pytest.mark.parametrize(("seconds", "gone"), [(30.0, False), (-1.0, True)])
async def test_who_cannot_be_reached_and_refuses_nothing_is_gone_after_a_while(
    seconds: float, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GIVEN_UP", seconds)

    async def no_way(*how: Any) -> Any:
        raise LinkBroken("no way")

    told = Told()
    monkeypatch.setattr(told.links, "_open", no_way)
    async with told.links:
        place = ("127.0.0.1", 1)
        assert await told.post(place) == ([(place, "")] if gone else [])


async def test_who_cannot_be_reached_is_tried_less_and_less_often_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RETRY", 0.001)
    monkeypatch.setattr(links, "SELDOM", 0.004)
    reached = False

    async def perhaps(*how: Any) -> Any:
        if not reached:
            raise LinkBroken("no way")
        return SimpleNamespace(closed=False, post=lambda message: True, close=lambda: None)

    told, place, pauses = Told(), ("127.0.0.1", 1), []
    monkeypatch.setattr(told.links, "_open", perhaps)
    async with told.links:
        for _ in range(4):
            await told.post(place)
            pauses.append(told.links._pauses[place])
        assert pauses == [0.001, 0.002, 0.004, 0.004]
        reached = True
        await told.post(place)
        assert (told.links._pauses, told.links._since) == ({}, {})


async def test_that_a_link_broke_which_stood_is_told_with_the_link() -> None:
    told, broke = Told(), asyncio.Queue[Any]()
    told.links._broken = lambda peer, link: broke.put_nowait((peer, link))
    async with asyncio.timeout(10), told.links:
        async with process("first") as place:
            link = await told.links.to(THERE, place)
        assert await broke.get() == (THERE, link)


async def test_links_that_stand_and_those_that_are_tried_again_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SELDOM", 1000.0)
    monkeypatch.setattr(links, "RETRY", 2000.0)
    told = Told()
    async with process("first") as gone:
        pass
    async with process("second") as place, asyncio.timeout(10), told.links:
        await told.post(place)
        told.links.post(THERE, gone, Probe(1, 0))
        await told.was_gone.wait()
