"""Which batches a supply hands to which replicas, and when it sends them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import ClosedError, FeedError
from flowrt.base.spec import Spec
from flowrt.sched.drivers.messages import Allow, Gone, Join, Lost
from flowrt.train import batches
from flowrt.train.batches import EARLIER, LACKED, LONG, LOOKED_AT, TOGETHER, Batches, Supply
from flowrt.train.run import Run

DEPTH = 3


class Handing:
    """A supply whose batches are their numbers, repeated ``size`` times; ``sent`` is (replica, number, batches)."""

    def __init__(self, numbers: Iterable[int], replicas: int = 2, size: int = 1, depth: int = DEPTH) -> None:
        self.sent: list[tuple[int, int, list[int]]] = []
        self.drawn = 0
        tensor: Any = SimpleNamespace(spec=Spec("float32", (size,)))
        source = Batches(self._drawn(numbers, size), ["x"])
        self.supply = Supply(source, [{"x": tensor}] * replicas, depth, self._give, np.ascontiguousarray)
        self.supply.begin(lambda: None)

    def _drawn(self, numbers: Iterable[int], size: int) -> Iterable[dict[str, Any]]:
        for number in numbers:
            self.drawn += 1
            yield {"x": np.full(size, number, "float32")}

    def _give(self, replica: int, number: int, identities: Any, batches: Any) -> None:
        self.sent.append((replica, number, [int(values[0][0]) for values in batches]))
        assert len(identities) == len(batches)

    def step(self, number: int) -> None:
        """All replicas have spent their first batches, up to that one."""
        for replica in range(len(self.supply.given)):
            self.supply.spend(replica, number)
        self.supply.fill()

    def has(self, replica: int) -> int:
        """How many batches the replica was sent; they came in order."""
        numbers = [first + i for r, first, batches in self.sent if r == replica for i in range(len(batches))]
        assert numbers == list(range(1, len(numbers) + 1))
        return len(numbers)


def test_small_batches_go_several_in_a_message_and_none_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches.time, "perf_counter", float)  # however busy this machine is
    handing = Handing(itertools.count())
    for step in range(30):
        handing.step(step)
        assert all(handing.has(replica) >= step + DEPTH + EARLIER for replica in (0, 1))
    assert handing.drawn <= 2 * (30 + DEPTH + TOGETHER)
    together = [len(batches) for _, _, batches in handing.sent[2 * DEPTH :]]
    assert set(together) == {TOGETHER}
    every = [number for _, _, batches in sorted(handing.sent, key=lambda sent: sent[1]) for number in batches]
    assert sorted(every) == list(range(len(every)))


def test_large_batches_go_one_by_one_and_none_is_drawn_beyond_those_that_are_sent() -> None:
    handing = Handing(itertools.count(), size=1 << 14)
    for step in range(5):
        handing.step(step)
        assert handing.has(0) == handing.has(1) == step + DEPTH
        assert handing.drawn == 2 * (step + DEPTH)


def test_all_batches_go_that_there_are() -> None:
    for count in range(1, 20):
        handing = Handing(range(count))
        for step in range(count):
            handing.step(step)
        assert handing.supply.over
        assert handing.supply.given == [handing.has(0), handing.has(1)]
        assert sum(handing.supply.given) == count


def test_batches_go_that_were_drawn_before_an_error_of_their_source() -> None:
    def failing() -> Iterable[int]:
        yield from range(9)
        raise ValueError("no more")

    handing = Handing(failing())
    handing.step(0)
    handing.step(1)
    assert isinstance(handing.supply.error, ValueError)
    assert handing.supply.given == [handing.has(0), handing.has(1)] == [5, 4]


def test_what_is_sent_again_is_all_that_is_not_accounted_for() -> None:
    handing = Handing(itertools.count(), replicas=1)
    handing.step(0)
    handing.sent.clear()
    handing.supply.give_again(0)
    assert handing.has(0) == handing.supply.given[0]
    handing.step(2)
    assert handing.has(0) >= 2 + DEPTH


def test_who_joins_again_is_sent_batches_numbered_from_there_on() -> None:
    handing = Handing(itertools.count())
    handing.step(0)
    handing.supply.lose(0)
    handing.supply.confirm_lost(0, 0)
    number = handing.supply.given[0] + 2  # it had begun another life meanwhile
    handing.supply.join(0, number)
    handing.sent.clear()
    handing.supply.fill()
    assert next(first for replica, first, _ in handing.sent if replica == 0) == number + 1


def test_batches_are_written_down_before_they_are_handed_out() -> None:
    handing, written = Handing(range(3), replicas=1), list[tuple[int, int]]()

    def hand(replica: int, first: int, identities: Any) -> None:
        written.append((replica, first))
        assert [sent[:2] for sent in handing.sent] == written[:-1]

    ledger: Any = SimpleNamespace(hand=hand)
    handing.supply.ledger = ledger
    handing.supply.fill()
    assert [sent[:2] for sent in handing.sent] == written != []


def test_of_a_slow_source_no_more_is_drawn_at_once_than_replicas_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    handing, clock = Handing(itertools.count()), itertools.count(step=LONG)
    monkeypatch.setattr(batches.time, "perf_counter", lambda: float(next(clock)))
    for step in range(20):
        before = handing.drawn
        handing.step(step)
        assert all(handing.has(replica) >= step + DEPTH for replica in (0, 1))
        assert handing.drawn - before <= (2 * DEPTH + 1 if step == 0 else 3)


def test_what_there_is_no_time_to_complete_waits_for_what_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handing, clock = Handing(itertools.count(), replicas=8), itertools.count(step=LONG / 64)
    monkeypatch.setattr(batches.time, "perf_counter", lambda: float(next(clock)))
    for step in range(60):
        handing.step(step)
        assert all(handing.has(replica) >= step + DEPTH for replica in range(8))
    assert {len(sent) for _, _, sent in handing.sent[16 * DEPTH :]} == {TOGETHER}


def test_all_messages_are_full_where_somebody_fills_as_long_as_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    handing, clock = Handing(itertools.count(), replicas=32), itertools.count(step=LONG / 16)
    monkeypatch.setattr(batches.time, "perf_counter", lambda: float(next(clock)))
    for step in range(60):
        handing.step(step)
        while handing.supply.fill():
            assert all(handing.has(replica) >= step + DEPTH for replica in range(32))
        assert handing.supply.given == [step + DEPTH + EARLIER + TOGETHER - 1] * 32
    assert {len(sent) for _, _, sent in handing.sent[32 * DEPTH :]} == {TOGETHER}


def test_of_many_batches_ahead_no_more_than_some_are_drawn_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches.time, "perf_counter", itertools.count(step=LONG).__next__)
    handing = Handing(itertools.count(), depth=10**6)
    assert handing.supply.fill()
    assert 2 * LACKED <= handing.drawn < 3 * LACKED


@pytest.mark.parametrize("buffers", [1, 2, 5])
@pytest.mark.parametrize("parts", [False, True])
def test_a_source_may_write_a_batch_where_an_earlier_one_was(buffers: int, parts: bool) -> None:
    whole = np.empty((buffers, 1), np.float32)
    kept = [whole[n] if parts else np.empty(1, np.float32) for n in range(buffers)]

    def drawn() -> Iterable[dict[str, Any]]:
        for number in range(90):
            kept[number % buffers][:] = number
            yield {"x": kept[number % buffers]}

    handing, given = Handing(()), list[Any]()
    handing.supply._source = Batches(drawn(), ["x"])
    handing.supply._give = lambda replica, number, identities, batches: given.extend(batches)
    for step in range(30):
        handing.step(step)
    assert len(given) > 60
    assert sorted(int(values[0][0]) for values in given) == list(range(len(given)))


def test_what_is_new_each_time_is_not_copied_for_long() -> None:
    handing, made, given = Handing(()), list[Any](), list[Any]()

    def drawn() -> Iterable[dict[str, Any]]:
        while True:
            made.append(np.zeros(1, np.float32))
            yield {"x": made[-1]}

    handing.supply._source = Batches(drawn(), ["x"])
    handing.supply._give = lambda replica, number, identities, batches: given.extend(v for (v,) in batches)
    for step in range(9):
        handing.step(step)
    ours = {id(array) for array in made}
    assert len(given) - sum(id(array) in ours for array in given) == LOOKED_AT


def test_of_a_slow_source_whoever_lacks_some_is_handed_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handing, clock = Handing(itertools.count(), replicas=3), itertools.count(step=LONG)
    monkeypatch.setattr(batches.time, "perf_counter", lambda: float(next(clock)))
    handing.step(0)
    handing.supply.excuse(2)
    for step in range(1, 2 * DEPTH):
        handing.step(step)
    assert handing.has(2) < 2 * DEPTH - 1
    handing.supply.include(2)
    handing.supply.fill()
    assert handing.has(2) >= 2 * DEPTH - 1 + DEPTH, "all may be waiting for it, so nobody comes to fill again"


def test_who_is_excused_is_handed_nothing_until_it_is_included_again() -> None:
    handing = Handing(itertools.count(), size=1 << 14)
    handing.step(0)
    handing.supply.excuse(1)
    for step in range(1, 6):
        handing.step(step)
    assert (handing.has(0), handing.has(1)) == (5 + DEPTH, DEPTH)
    handing.supply.include(1)
    handing.supply.fill()
    assert handing.has(1) == 5 + DEPTH


def test_whoever_fills_is_told_that_nothing_is_left_as_totals_are_to_be_said_then() -> None:
    handing, told = Handing(range(2 * DEPTH), size=1 << 14), []
    handing.step(0)
    assert not handing.supply.over
    handing.supply.spend(0, 2)  # as where a replica joins while nobody waits for a report
    handing.supply.begin(lambda: told.append(handing.supply.over))
    handing.supply.fill()
    assert told == [True]


class Nodes:
    """The nodes of a run of two replicas, as its client sees them: what is posted, and what beginning one does."""

    lost = suspects = leaving = frozenset[str]()

    def __init__(self, supply: Supply) -> None:
        self.posted: list[Any] = []
        self.losses: dict[str, int] = {}
        self.births: dict[str, str] = {}
        self.begins: Callable[[], None] = lambda: None
        tally = SimpleNamespace(lose=lambda replica, task: None, join=lambda replica: None)
        alone = {"local_steps": 1, "copies": 1, "floor": 0, "least": 1, "policy": fr.train.FirstOf(1)}
        nodes = ("/job:worker/task:0", "/job:worker/task:1")
        trainer: Any = SimpleNamespace(
            **alone, name="t", replicas=2, nodes=nodes, servers=("/job:ps/task:0",), tally=tally
        )
        session: Any = SimpleNamespace(_open_here=lambda: self)
        self.run = Run(trainer, session, supply)
        begin_replicas = [lambda **about: about] * 2
        program: Any = SimpleNamespace(servers=trainer.servers, replicas=nodes, begin_replicas=begin_replicas)
        self.run._program, self.run._losses = program, [0, 0]

    def post(self, task: str, message: Any) -> None:
        self.posted.append(message)

    async def command(self, task: str, message: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(message, Join):
            return 0, 0, message.given
        return self.begins()

    @property
    def totals(self) -> tuple[int, ...] | None:
        """What server 0 was told of last, and forgets then: how many batches there are."""
        said = [message.totals for message in self.posted if isinstance(message, Allow)]
        self.posted.clear()
        return said[-1] if said else None


async def test_how_many_batches_there_are_is_said_again_after_each_loss_and_once_a_replica_is_back() -> None:
    nodes = Nodes((handing := Handing(range(3))).supply)
    run, turns = nodes.run, range(4)
    waiting = asyncio.create_task(run.next(0))
    for _ in turns:
        await asyncio.sleep(0)
    assert nodes.totals == (2, 1)
    run.lose(1)
    run.hear("", Gone(run.number, 1, 0, 0))
    for _ in turns:
        await asyncio.sleep(0)
    assert nodes.totals == (3, 1)
    assert handing.has(0) == 3
    await run._begin_again(1)
    for _ in turns:
        await asyncio.sleep(0)
    assert nodes.totals == (3, 1)
    run.fail(ClosedError("that is all"))
    with pytest.raises(ClosedError):
        await waiting


async def test_a_replica_whose_loss_is_heard_of_before_it_is_known_to_have_begun_again_is_lost() -> None:
    nodes = Nodes(Handing(range(3)).supply)
    run = nodes.run
    run.lose(1)
    nodes.begins = lambda: run.hear("", Gone(run.number, 1, 1, 0, "its device is lost"))
    await run._begin_again(1)
    assert nodes.posted[-1] == Lost(run.number, 1, 1)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_batch_of_other_names_is_refused_from_either_kind_of_source(waits: bool) -> None:
    given = [{"x": 1}, {"x": 1, "z": 1}]

    async def coming() -> AsyncIterator[dict[str, Any]]:
        for batch in given:
            yield batch

    source = Batches(coming() if waits else given, ["x"])
    assert (await source.wait_next() if waits else source.next()) == {"x": 1}
    with pytest.raises(FeedError, match="z"):
        _ = await source.wait_next() if waits else source.next()


async def test_what_is_drawn_between_two_runs_waits_for_the_next_one_which_hears_of_the_end() -> None:
    """An asynchronous source goes on while a run is changed for another, to which nothing may be given yet."""
    handing, asked, may_come = Handing(()), asyncio.Event(), asyncio.Event()

    async def coming() -> AsyncIterator[dict[str, Any]]:
        yield {"x": np.zeros(1, "float32")}
        asked.set()
        await may_come.wait()
        yield {"x": np.ones(1, "float32")}

    supply, told = handing.supply, []
    supply._source = Batches(coming(), ["x"])
    supply.begin(lambda: told.append("before"))
    supply.fill()
    async with asyncio.timeout(10):
        await asked.wait()
        supply.rest()
        supply.begin_again()
        handing.sent.clear()
        may_come.set()
        assert supply._drawing is not None
        await supply._drawing
        assert (handing.sent, told) == ([], [])
        supply.begin(lambda: told.append("after"))
        supply.fill()
        while supply._drawing is not None:
            await supply._drawing
    assert sorted(batch for _, _, batches in handing.sent for batch in batches) == [0, 1]
    assert told == ["after"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no more"), "no more"),
        (asyncio.CancelledError(), "the iterator of batches was cancelled within: what it awaits was"),
    ],
)
async def test_an_asynchronous_source_that_fails_between_two_runs_fails_the_next_one(
    error: BaseException, said: str
) -> None:
    handing, asked, may_fail = Handing(()), asyncio.Event(), asyncio.Event()

    async def failing() -> AsyncIterator[dict[str, Any]]:
        asked.set()
        await may_fail.wait()
        raise error
        yield {}

    supply, told = handing.supply, []
    supply._source = Batches(failing(), ["x"])
    supply.fill()
    async with asyncio.timeout(10):
        await asked.wait()
        supply.rest()
        may_fail.set()
        assert supply._drawing is not None
        await supply._drawing
    supply.begin(lambda: told.append(str(supply.error)))
    supply.fill()
    assert told == [said]
