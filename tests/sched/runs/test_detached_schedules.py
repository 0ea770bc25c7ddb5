"""Whole detached runs in seeded orders of everything that happens: clients that come, leave and die, and replicas too.

What nobody may see: a version twice or not at all, a batch counted twice, or one that no report accounts for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from schedule_world import Violation, World
from sim_loop import simulate
from test_schedules import BRIEF, LONG, Length, drawn

from flowrt.base.errors import LedgerError
from flowrt.base.valueclass import valueclass
from flowrt.data.order import BatchOrder
from flowrt.data.sources import Source
from flowrt.ledger.writer import LedgerWriter
from flowrt.sched.drivers.messages import Gone
from flowrt.sched.policies import FirstOf
from flowrt.sched.replica import reading
from flowrt.sched.server import detached
from flowrt.session.resting import Rests
from flowrt.train.detached import DetachedRun

SEEDS = 16
WINDOW = 4
DEPTH = 3  # batches of a replica that nobody may account for in the end: they are under way


@valueclass
class Numbered(Source):
    """A batch is its identity."""

    order: BatchOrder

    @property
    def specs(self) -> Any:
        return {}


class SimReader:
    """Reads as in `reading.Reader`, in virtual time."""

    world: World

    def __init__(self, role: Any, task: str, admit: Any) -> None:
        self._admit, self._drawn, self._due = admit, role.given * role.steps, 0.0

    def draw(self, number: int, identities: Iterable[int]) -> None:
        loop = asyncio.get_running_loop()
        for place, identity in enumerate(identities, number):
            if place == self._drawn + 1:
                self._drawn = place
                self._due = max(self._due, loop.time()) + self.world.while_(0.02) + 1e-6
                loop.call_at(self._due, self._admit, place, (np.array([identity, 0, 0], np.int64),))

    def use(self, number: int) -> None:
        """Nothing is bounded here."""

    async def run(self) -> None:
        await asyncio.Event().wait()


@contextmanager
def reading_in(world: World) -> Iterator[None]:
    """Replicas of the world read in its time, and few reports are on their way: each that is may break the way anew."""
    before, SimReader.world = (reading.Reader, detached.WINDOW), world
    reading.Reader, detached.WINDOW = SimReader, WINDOW  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        reading.Reader, detached.WINDOW = before  # type: ignore[misc]


class Seen:
    """What clients have seen of a run over ``total`` batches, which it is checked against."""

    def __init__(self, world: World, total: int) -> None:
        self.world, self.total = world, total
        self.batches: dict[int, dict[int, Sequence[int]]] = {}  # by version
        self.next = 0  # the version whose report a client that is not killed has next

    async def client(self, epoch: str, count: int | None) -> bool:
        """Attach, or begin, and read so many reports, or all; answers whether the run has come to its end."""
        steps = self.world.client(epoch)
        steps._detached, steps._session.rests = "job", Rests()  # type: ignore[misc]
        training, last = steps.run(Numbered(BatchOrder(self.total, 1, False, 0, 1, False))), None
        try:
            while count is None or count > 0:
                report = await anext(training)
                version = report.step - 1
                if last is not None and version != last + 1:
                    raise Violation(f"version {version} comes after {last}")
                if version > self.next:
                    raise Violation(f"version {version} comes, {self.next} was not seen")
                last = version
                self.note(version, report.batches)
                count = None if count is None else count - 1
                await asyncio.sleep(self.world.while_(0.05))
        except StopAsyncIteration:
            return True
        finally:
            if self.world.runners[epoch].alive:
                await training.aclose()
        return False

    @property
    def ended(self) -> bool:
        """Whether a client has had the run's end: the next one would begin another."""
        newest = self.world.hosts[self.world.servers[0]].iterations._newest.get(("", "trainer"))
        return newest is not None and newest.coordination._goes_on and newest.coordination._released

    def note(self, version: int, batches: Any) -> None:
        if self.batches.setdefault(version, batches) != batches:
            raise Violation(f"version {version} is reported of {batches} and of {self.batches[version]}")
        self.next = max(self.next, version + 1)

    def check(self) -> None:
        """Every version was seen, and every batch accounted for once, but for those under way at the end."""
        made = self.world.hosts[self.world.servers[0]].applied
        assert sorted(self.batches) == list(range(len(made)))
        told = [identity for each in self.batches.values() for some in each.values() for identity in some]
        if len(set(told)) != len(told) and self.world.late == "drop":
            raise Violation(f"batches are accounted for twice: {sorted(told)}")
        counted = [batch for updates in made for _, batch in updates]
        if not set(counted) <= set(told) or len(set(counted)) != len(counted):
            raise Violation(f"counted were {sorted(counted)}, told {sorted(told)}")
        if len(told) < self.total - DEPTH * len(self.world.replicas):
            raise Violation(
                f"of {self.total} batches {sorted(set(range(self.total)) - set(told))} are not accounted for"
            )


@asynccontextmanager
async def left_whole(world: World) -> AsyncIterator[None]:
    """The world, which is whole in the end, and whose ledger, if clients write one, then knows of everything."""
    try:
        with TemporaryDirectory() as folder:
            world.ledger = Path(folder) / "trainer.ledger" if world.rng.random() < 0.5 else None
            yield
            await asyncio.sleep(100)
            world.check_whole()
            if world.ledger is not None:
                world.check_ledger()
        if going := [task for task, host in world.hosts.items() if host.iterations.going]:
            raise Violation(f"all is over, and something still goes on on {going}")
    finally:
        await world.aclose()


async def clients_come_and_go(rng: random.Random, length: Length, deaths: int = 0) -> None:
    """Client after client attaches, and leaves, is cancelled or killed; the last one reads to the end."""
    world, total = drawn(rng, length), rng.randint(length.some(10), length.some(60))
    world.allowed = 1 << 40
    for _ in range(min(deaths, world.spare)):
        lose_later(world, rng, length)
    seen = Seen(world, total)
    with reading_in(world):
        async with left_whole(world):
            for number in range(rng.randint(0, 4)):
                await one_client(seen, rng, length, f"client {number}")
                await asyncio.sleep(rng.choice([0.0, rng.uniform(0.0, length.seconds(1.0))]))
                if seen.ended:
                    break
            if not seen.ended:
                async with asyncio.timeout(2000):
                    assert await seen.client("the last", None)
            seen.check()


@contextmanager
def killed_as_it_writes(world: World, epoch: str, records: int) -> Iterator[None]:
    """A client is killed as it is about to write a record to its ledger, after so many."""
    written, append = itertools.count(), LedgerWriter._append

    def write(writer: LedgerWriter, record: Any) -> None:
        if writer is world.clients[epoch]._ledger and next(written) == records:
            world.kill_client(epoch)
        append(writer, record)

    LedgerWriter._append = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        LedgerWriter._append = append  # type: ignore[method-assign]


async def one_client(seen: Seen, rng: random.Random, length: Length, epoch: str) -> None:
    world, how = seen.world, rng.choice(["killed", "killed", "cancelled", "leaves"])
    if how == "killed" and world.ledger is not None and rng.random() < 0.5:
        with killed_as_it_writes(world, epoch, rng.randrange(length.some(40))), suppress(LedgerError):
            await seen.client(epoch, None)
        return
    if not seen.batches and how == "cancelled":
        how = "leaves"  # who is cancelled while the run begins ends it
    body = asyncio.ensure_future(seen.client(epoch, rng.randint(1, length.some(12))))
    if how == "leaves":
        await asyncio.wait([body], timeout=500)
    else:
        await asyncio.wait([body], timeout=rng.uniform(0.0, length.seconds(0.6)))
        if how == "killed":
            world.kill_client(epoch)
        body.cancel()
        await asyncio.wait([body])
    if not body.cancelled():
        body.result()
    world.kill_client(epoch)  # its session ends


def lose_later(world: World, rng: random.Random, length: Length) -> None:
    """A replica's node ends some time, which clients learn and, from its link, server 0."""
    replica, loop = rng.randrange(len(world.replicas)), asyncio.get_running_loop()

    def lose() -> None:
        server, task = world.hosts[world.servers[0]], world.replicas[replica]
        birth = world.hosts[task].birth
        world.restart(replica)
        loop.call_later(world.while_(world.faults.unknown), server.iterations.lost, task, birth)

    loop.call_later(rng.uniform(0.0, length.seconds(1.0)), lose)


async def replicas_die_detached(rng: random.Random, length: Length) -> None:
    """So do replicas, whose nodes are started again: who attaches then has them take part."""
    await clients_come_and_go(rng, length, deaths=2)


SCENARIOS = {scenario.__name__: scenario for scenario in (clients_come_and_go, replicas_die_detached)}


@pytest.mark.parametrize("scenario", SCENARIOS.values())
def test_whoever_comes_leaves_and_dies_every_version_is_seen_and_every_batch_is_accounted_for_once(
    scenario: Any,
) -> None:
    first = int(os.environ.get("FLOWRT_SEED", 1122))
    for seed in range(first, first + SEEDS):
        print(f"seed {seed}")
        rng = random.Random(seed)
        simulate(rng, lambda rng=rng: scenario(rng, LONG))


def test_who_needs_no_permission_orders_what_all_have_offered() -> None:
    rng = random.Random(7000129)  # once nobody asked whether a version may be ordered that was not allowed yet
    simulate(rng, lambda: replicas_die_detached(rng, BRIEF))


def test_nobody_begins_a_replica_again_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, rest = list[bool](), DetachedRun.rest

    async def rest_as_one_is_lost(run: Any) -> None:
        await rest(run)
        run.hear(run._program.servers[0], Gone(run.number, 1, run._incarnations[1], 0))
        begun.append(bool(run._joining))

    async def leaves() -> None:
        world = World(random.Random(1), FirstOf(1), replicas=2, servers=1)
        world.allowed = 1 << 40
        seen = Seen(world, 40)
        with reading_in(world):
            async with left_whole(world):
                with monkeypatch.context() as patched:
                    patched.setattr(DetachedRun, "rest", rest_as_one_is_lost)
                    assert not await seen.client("one", 3)
                assert await seen.client("another", None)
                seen.check()

    simulate(random.Random(1), leaves)
    assert begun
    assert not any(begun)
