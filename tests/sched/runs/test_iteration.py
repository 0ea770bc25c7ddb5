"""The drivers of a run: what they post and when, whatever the network and the client do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from iteration_world import COUNT, RUN, FakeHost, World, begun

from flowrt.base.device import CLIENT
from flowrt.base.errors import NodeLost, RemoteError
from flowrt.delays import parse
from flowrt.sched.drivers.inquiries import Lacking, Look, Settle
from flowrt.sched.drivers.messages import ApplyOrder, Ended, Failed, Held, Lost, NewVersion, Report, Seen, Stop, Update
from flowrt.sched.drivers.way import bundled
from flowrt.sched.replica import replica as replica_module
from flowrt.sched.replica.replica import Replica
from flowrt.sched.runs import iterations as iterations_module
from flowrt.sched.runs.iterations import Iterations, left_from_data
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


def world(*args: Any, **kwargs: Any) -> AbstractAsyncContextManager[World]:
    return begun(World(*args, **kwargs))


def outcomes(made: World, version: int) -> dict[int, tuple[int, Outcome]]:
    """By replica: the batch and the outcome of its tower of ``version``."""
    return {replica: (batch, OUTCOMES[code]) for replica, batch, code, *_ in made.reports()[version].receipts}


# ── permission ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("servers", [1, 2])
async def test_variables_move_as_far_as_is_allowed_and_updates_are_computed_meanwhile(servers: int) -> None:
    async with world(2, servers) as made:
        for replica in range(2):
            made.give(replica, 1, 2, 3, 4)
        made.settle()
        assert made.state() == [(0, 0)] * servers
        assert made.used == [(0, 0, 1), (1, 0, 1)]  # held, and not ordered
        made.allow(1)
        made.settle()
        assert made.state() == [(-1, 1)] * servers
        assert made.used[2:] == [(0, 1, 2), (1, 1, 2)]
        made.allow(4)
        made.settle()
        assert made.state() == [(-4, 4)] * servers
        assert [report.version for report in made.reports()] == [0, 1, 2, 3]
        assert [report.told for report in made.reports()] == [(1,), (2,), (3,), (4,)]


async def test_nodes_go_on_without_the_client_as_far_as_it_allowed_and_it_hears_all_of_it_later() -> None:
    async with world(2) as made:
        made.allow(3)
        for replica in range(2):
            made.give(replica, 1, 2, 3, 4)
        made.settle(without=[CLIENT])
        assert made.state() == [(-3, 3)]
        made.settle()
        assert len(made.reports()) == 3


@pytest.mark.parametrize("rows", [False, True])
async def test_batches_of_one_message_are_used_in_order_and_each_once_however_often_they_come(rows: bool) -> None:
    async with world(1, rows=rows) as made:
        made.allow(9)
        made.give_together(0, 1, 2, 3)
        made.settle()
        made.give_together(0, 2, 3, 4)  # posted again, with one more
        made.give_together(0, 6, 7)  # the one before them is lost
        made.settle()
        assert made.used == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4)]
        made.give_together(0, 5, 6, 7)
        made.settle()
        assert made.used[4:] == [(0, 4, 5), (0, 5, 6), (0, 6, 7)]


@pytest.mark.parametrize("rows", [False, True])
async def test_a_step_costs_an_update_and_a_version_for_each_replica_and_a_report(rows: bool) -> None:
    async with world(3, rows=rows) as made:
        for replica in range(3):
            made.give(replica, 1, 2, 3, 4, 5)
        made.allow(2)
        made.settle()
        sent: list[str] = []
        deliver = made.deliver

        def count(sender: str, receiver: str) -> None:
            sent.append(type(made.ways[sender, receiver][0]).__name__)
            deliver(sender, receiver)

        made.deliver = count  # type: ignore[method-assign]
        made.allow(4)
        made.settle()
        assert {kind: sent.count(kind) for kind in set(sent)} == {"NewVersion": 6, "Update": 6, "Report": 2}


@pytest.mark.parametrize(("take", "spoiled", "expected"), [(None, (), [3]), (2, (), [2, 1]), (2, (0,), [1, 2])])
async def test_a_server_tells_of_what_it_holds_once_that_may_make_a_set_and_of_what_it_refused_at_once(
    take: int | None, spoiled: tuple[int, ...], expected: list[int]
) -> None:
    async with world(3, 2, take=take) as made:
        made.spoiled.update(spoiled)
        told: list[Held] = []
        deliver = made.deliver

        def note(sender: str, receiver: str) -> None:
            if isinstance(message := made.ways[sender, receiver][0], Held):
                told.append(message)
            deliver(sender, receiver)

        made.deliver = note  # type: ignore[method-assign]
        for replica in range(3):
            made.give(replica, 1, 2)
        made.settle()
        assert [len(message.replicas) for message in told] == expected
        assert [replica for message in told if not message.finite for replica in message.replicas] == [*spoiled]
        made.allow(1)
        made.settle()
        assert made.state() == [(-1, 1)] * 2


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_replica_without_a_batch_announces_the_one_that_comes_and_begins_at_once() -> None:
    async with world(2) as made:
        made.allow(9)
        made.give(0, 1)
        made.settle()
        assert made.used == [(0, 0, 1)]
        made.give(1, 1)
        made.settle()
        assert made.state() == [(-1, 1)]
        assert outcomes(made, 0) == {0: (1, Outcome.KEPT), 1: (1, Outcome.KEPT)}


async def test_each_batch_is_spent_once_and_the_run_ends_with_them() -> None:
    async with world(2, take=1) as made:
        made.give(0, 1, 2, 3)
        made.give(1, 1)
        made.allow(99, totals=(3, 1))
        made.settle()
        assert made.ended() is None  # what its client has not seen may be to be used again
        made.allow(99, len(made.reports()), totals=(3, 1))
        made.settle()
        spent = [
            (r, batch) for version in range(len(made.reports())) for r, (batch, _) in outcomes(made, version).items()
        ]
        assert len(spent) == len(set(spent))
        assert made.ended() == Ended(RUN, made.state()[0][1])
        assert made.state()[0][1] >= 3


async def test_batches_that_come_again_or_beyond_a_lost_one_are_not_used_twice_or_out_of_turn() -> None:
    async with world(1) as made:
        made.allow(9)
        made.give(0, 1, 1, 3, 2, 1, 3)
        made.settle()
        assert made.used == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]


# ── who is late, lost or wrong ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_next_version_cuts_a_tower_off_and_its_replica_goes_on_with_that() -> None:
    async with world(2, take=1) as made:
        made.towers[1].slow = True
        made.allow(1)
        for replica in range(2):
            made.give(replica, 1, 2, 3)
        made.settle()
        await asyncio.sleep(0)  # the tower begins
        made.allow(2)
        made.settle()
        for _ in range(5):  # it is cut off, and the next one begins
            await asyncio.sleep(0)
        made.towers[1].go.set()
        made.towers[1].slow = False
        for _ in range(5):
            await asyncio.sleep(0)
        made.settle()
        assert made.state() == [(-2, 2)]
        assert outcomes(made, 0) == {0: (1, Outcome.KEPT), 1: (1, Outcome.LATE)}
        assert outcomes(made, 1) == {0: (2, Outcome.KEPT), 1: (2, Outcome.LATE)}
        assert (1, 0, 1) not in made.used
        assert (1, 2, 3) in made.used


async def test_a_replica_that_says_nothing_is_told_two_versions_and_then_only_the_newest() -> None:
    async with world(2, take=1) as made:
        frozen = made.workers[1]
        made.give(0, *range(1, 9))
        made.give(1, 1, 2)
        made.settle()
        made.allow(7)
        made.settle(without=[frozen])
        assert made.state() == [(-7, 7)]
        waiting = made.ways[made.servers[0], frozen]
        assert [message.version for message in waiting if isinstance(message, NewVersion)] == [1, 2]
        late = [version for version in range(7) if 1 in outcomes_before(made, version)]
        assert len(late) <= 2  # it is booked no more batches than it has
        made.settle()
        assert made.nodes[frozen]._replicas[RUN, 1]._at == [7]


async def test_a_replica_goes_on_though_it_heard_of_other_versions_from_one_server_than_from_another() -> None:
    async with world(2, 2, take=1) as made:
        behind = made.workers[1]
        made.give(1, 1)
        made.give(0, *range(1, 9))
        made.settle(without=[behind])
        for server in made.servers:
            made.deliver(behind, server)  # it listens
        made.allow(5)
        made.settle(without=[behind])
        for _ in range(2):
            made.deliver(made.servers[1], behind)
        made.break_way(made.servers[0], behind)
        made.settle()
        assert made.state() == [(-5, 5)] * 2
        assert (1, 5, 1) in made.used


def outcomes_before(made: World, version: int) -> dict[int, Any]:
    made.client += [message for message in made.ways[made.servers[0], CLIENT] if message not in made.client]
    return outcomes(made, version)


async def test_a_replica_that_waits_for_rows_of_versions_gone_by_is_told_the_newest() -> None:
    async with world(2, take=1, rows=True) as made:
        made.allow(9)
        made.give(0, 1)
        made.settle()
        made.give(1, 1)
        made.give(0, *range(2, 7))
        made.settle(without=[made.workers[1]])
        assert made.state() == [(-6, 6)]
        made.settle()
        assert made.used[-1] == (1, 6, 1)


async def test_updates_that_are_not_finite_end_the_run_and_move_nothing() -> None:
    async with world(2) as made:
        made.spoiled.add(1)
        made.allow(9)
        for replica in range(2):
            made.give(replica, 1, 2)
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert "lower the learning rate" in ended.text
        assert made.state() == [(0, 0)]


async def test_a_lost_replica_is_done_without_while_there_are_enough() -> None:
    async with world(3, take=2) as made:
        made.allow(9)
        for replica in (0, 1):
            made.give(replica, 1, 2)
        made.tell(made.servers[0], Lost(RUN, 2))
        made.settle()
        assert made.state() == [(-2, 2)]
        made.tell(made.servers[0], Lost(RUN, 1))
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert ended.error == "NodeLost"


async def test_a_replica_that_was_begun_again_is_told_what_it_was_told_before() -> None:
    async with world(2, take=1) as made:
        made.settle()
        server, worker = made.servers[0], made.workers[1]
        made.tell(server, Lost(RUN, 1))
        made.settle()
        made.nodes[server].hear(worker, Seen(RUN, 1, -1, (), 1))
        assert [message.version for message in made.ways[server, worker] if isinstance(message, NewVersion)] == [0]


async def test_nobody_posts_to_a_replica_that_is_lost() -> None:
    async with world(2, 2, take=1) as made:
        gone = made.workers[1]
        made.allow(9)
        made.tell(made.servers[0], Lost(RUN, 1))
        made.settle()
        made.give(0, 1, 2, 3)
        made.settle(without=[gone])
        assert made.state() == [(-3, 3)] * 2
        assert not any(left for (_, peer), left in made.ways.items() if peer == gone)
        for task in made.servers:
            made.nodes[task].broken(gone, "")
        assert not any(left for (_, peer), left in made.ways.items() if peer == gone)


async def test_a_tower_that_fails_ends_the_run_with_its_error() -> None:
    async with world(2) as made:

        def fail(feeds: list[Any], number: int) -> list[Any]:
            raise ZeroDivisionError("by nothing")

        made.towers[1].compute = fail
        made.give(1, 1)
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert (ended.error, ended.text) == (
            "InternalError",
            "on /job:worker/task:1: ZeroDivisionError: by nothing",
        )


def short_of_memory(feeds: list[Any], number: int) -> list[Any]:
    raise MemoryError("no room")


async def test_a_tower_that_has_no_memory_is_done_without_and_its_replica_goes_on_with_the_next_version() -> None:
    async with world(3, take=2) as made:
        able, made.towers[1].compute = made.towers[1].compute, short_of_memory
        made.allow(9)
        made.give(1, 1, 2)
        made.settle()
        made.towers[1].compute = able
        for replica in (0, 2):
            made.give(replica, 1, 2)
        made.settle()
        kept, lost = Outcome.KEPT, Outcome.LOST
        assert outcomes(made, 0) == {0: (1, kept), 1: (1, lost), 2: (1, kept)}
        assert [report.errors for report in made.reports()] == [((1, "ResourceError", "out of memory: no room"),), ()]
        assert (1, 1, 2) in made.used


async def test_a_replica_hears_of_new_versions_however_often_its_tower_had_no_memory() -> None:
    async with world(3, take=2) as made:
        able = made.towers[1].compute
        made.towers[1].compute = lambda feeds, number: (short_of_memory if number < 3 else able)(feeds, number)
        made.allow(9)
        for replica in range(3):
            made.give(replica, *range(1, 7))
        made.settle()
        assert any(replica == 1 and version >= 3 for replica, version, _ in made.used)


async def test_where_too_few_towers_have_memory_the_run_ends_with_that_error() -> None:
    async with world(3, take=2) as made:
        made.towers[0].compute = made.towers[1].compute = short_of_memory
        made.allow(9)
        made.give(0, 1)
        made.settle()
        assert made.ended() is None
        made.give(1, 1)
        made.settle()
        ended = made.ended()
        assert ended is not None
        short = "out of memory: no room"
        told = f"on /job:worker/task:0: {short}; on /job:worker/task:1: {short}"
        assert (ended.error, ended.text) == ("ResourceError", told)
        assert made.state() == [(0, 0)]


@pytest.mark.parametrize("lost_first", [False, True])
async def test_where_a_replica_is_lost_beside_one_without_memory_the_run_ends_with_both(lost_first: bool) -> None:
    async with world(3, take=2) as made:
        made.towers[0].compute = short_of_memory
        made.allow(9)
        if not lost_first:
            made.give(0, 1)
            made.settle()
        made.tell(made.servers[0], Lost(RUN, 1))
        made.settle()
        if lost_first:
            assert made.ended() is None
            made.give(0, 1)
            made.settle()
        ended = made.ended()
        assert ended is not None
        assert ended.error == "NodeLost"
        assert "replicas lost [0, 1]" in ended.text
        assert "replica 1 is /job:worker/task:1" in ended.text
        assert ended.text.endswith("; replica 0: out of memory: no room")


@pytest.mark.parametrize("version", [0, 1])
async def test_batches_that_only_replicas_without_memory_had_left_are_not_gone_in_silence(version: int) -> None:
    async with world(2, take=1) as made:
        made.allow(9, totals=(version + 1, version))
        for number in range(version):
            made.give(0, number + 1)
            made.settle()
            made.give(1, number + 1)
            made.settle()
        made.towers[0].compute = short_of_memory
        made.give(0, version + 1)
        made.settle()
        made.allow(9, len(made.reports()), totals=(version + 1, version))
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert (ended.error, ended.text) == ("ResourceError", "on /job:worker/task:0: out of memory: no room")


async def test_a_server_without_memory_for_what_a_replica_asks_ends_the_run() -> None:
    async with world(3, 2, take=2) as made:
        made.allow(9)
        made.settle()
        made.nodes[made.servers[0]].hear(made.servers[1], Failed(RUN, 0, 1, 1, "ResourceError", "out of memory: rows"))
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert (ended.error, ended.text) == ("ResourceError", f"on {made.servers[1]}: out of memory: rows")


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("server", [0, 1])
async def test_where_a_version_cannot_be_told_the_run_ends_after_the_reports(slow: bool, server: int) -> None:
    async with world(2, 2) as made:
        variables = made.hosts[made.servers[server]].variables
        value = variables.value

        def value_once_moved(name: Any, spec: Any) -> Any:
            if value(("", "step"), COUNT) == 1:
                raise MemoryError("no room")
            return value(name, spec)

        variables.value = value_once_moved  # type: ignore[method-assign]
        made.applies[server].slow = slow
        made.allow(9)
        for replica in range(2):
            made.give(replica, 1)
        made.settle()
        if slow:
            made.applies[server].go.set()
            for _ in range(3):
                await asyncio.sleep(0)
            made.settle()
        ended = made.ended()
        assert ended is not None
        assert (ended.error, ended.text) == ("ResourceError", "out of memory: no room")
        if not server:
            assert [type(message) for message in made.client] == [Report, Ended]


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_was_ordered_is_applied_by_all_before_the_run_is_stopped_and_nothing_else() -> None:
    async with world(2, 2) as made:
        for replica in range(2):
            made.give(replica, 1, 2)
        made.settle()
        made.allow(9)  # server 0 applies, and orders server 1 to
        assert made.state() == [(-1, 1), (0, 0)]
        stopping = asyncio.ensure_future(made.nodes[made.servers[0]].answer(Stop(RUN), "epoch", none))
        await asyncio.sleep(0)
        assert not stopping.done()
        made.settle()
        assert await stopping == 1
        assert made.state() == [(-1, 1)] * 2
        assert [node.going for node in made.nodes.values()] == [0] * 4


async def test_when_the_client_is_gone_all_apply_what_was_ordered_and_nothing_else() -> None:
    async with world(2, 2) as made:
        for replica in range(2):
            made.give(replica, 1, 2)
        made.settle()
        made.allow(9)
        for node in made.nodes.values():
            node.ended("epoch")
        made.settle()
        assert made.state() == [(-1, 1)] * 2


async def test_what_was_ordered_is_applied_however_late_a_server_hears_of_it_after_the_client_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterations_module, "SETTLE_SECONDS", 0.0)
    async with world(2, 2) as made:
        for replica in range(2):
            made.give(replica, 1, 2)
        made.settle()
        made.allow(9)
        made.ways[made.servers[0], made.servers[1]].clear()  # the order is lost, which server 0 does not know yet
        assert await made.nodes[made.servers[0]].answer(Stop(RUN, patient=True), "epoch", none) == -1
        for task in (made.servers[1], *made.workers):
            await made.nodes[task].answer(Stop(RUN, patient=True), "epoch", none)
        made.settle()
        assert made.state() == [(-1, 1), (0, 0)]
        made.break_way(made.servers[0], made.servers[1])
        made.settle()
        assert made.state() == [(-1, 1)] * 2
        assert [node.going for node in made.nodes.values()] == [0] * 4


async def test_nothing_is_ordered_while_the_client_is_away() -> None:
    async with world(2) as made:
        made.give(0, 1)
        made.allow(1)
        made.alive = False
        made.give(1, 1)
        made.settle()
        assert made.state() == [(0, 0)]
        made.alive = True
        made.nodes[made.servers[0]].broken(CLIENT, "epoch")
        made.settle()
        assert made.state() == [(-1, 1)]


async def test_who_comes_while_a_client_is_away_waits_until_all_have_applied_what_was_ordered_for_that() -> None:
    async with world(1, 2) as made:
        made.give(0, 1)
        made.settle()
        made.allow(1)
        node = made.nodes[made.servers[0]]
        await node.come_to_rest()  # the client is there, and sees to itself
        made.alive = False
        coming = asyncio.ensure_future(node.come_to_rest())
        await asyncio.sleep(0)
        assert not coming.done()
        assert made.state() == [(-1, 1), (0, 0)]
        made.settle()
        await coming
        assert made.state() == [(-1, 1)] * 2


async def test_nobody_waits_for_a_server_whose_process_is_gone_to_apply_what_was_ordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds in ("SETTLE_SECONDS", "REST_SECONDS"):
        monkeypatch.setattr(iterations_module, seconds, 1000.0)
    async with world(1, 3, births=("a", "b", "c")) as made:
        made.give(0, 1)
        made.settle()
        made.allow(1)
        node, gone = made.nodes[made.servers[0]], made.servers[1]
        made.alive = False
        waiting = [asyncio.ensure_future(node.come_to_rest()) for _ in range(2)]
        stopping = asyncio.ensure_future(node.answer(Stop(RUN), "epoch", none))
        node.lost(gone, "the one before b")
        made.settle(without=[gone, made.servers[2]])
        node.lost(gone, "b")
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*waiting, stopping))  # for the third one, which is there
        made.settle(without=[gone])
        await asyncio.wait(waiting)
        assert await stopping == -1  # of one that is gone nobody knows what it made
        assert made.state() == [(-1, 1), (0, 0), (-1, 1)]
        assert made.nodes[made.servers[2]].going == 0
        await node.come_to_rest()


async def test_who_lacks_what_a_server_has_is_told_to_whoever_looks_until_the_container_is_reset() -> None:
    async with world() as made:
        node, look = made.nodes[made.servers[0]], Look("", "trainer", ("step",))
        await node.answer(Lacking("", "trainer", 3, ("/job:ps/task:1",)), "one", none)
        assert (await node.answer(look, "other", none))[2] == (3, ("/job:ps/task:1",))
        node.reset("another")
        assert (await node.answer(look, "other", none))[2] == (3, ("/job:ps/task:1",))
        node.reset("")
        assert (await node.answer(look, "other", none))[2] == (0, ())


async def left_on(made: World) -> Any:
    """What server 0 keeps."""
    look = Look("", "trainer", ("step",))
    _, left, _ = await made.nodes[made.servers[0]].answer(look, "other", none)
    return left_from_data(left)


async def test_reports_that_a_client_is_not_known_to_have_had_are_kept_for_the_next_one() -> None:
    async with world(2) as made:
        for replica in range(2):
            made.give(replica, 1, 2, 3, 4)
        made.allow(3)
        made.settle()
        made.allow(4, seen=2)
        made.settle()
        made.alive = False
        made.nodes[made.servers[0]].ended("epoch")
        left = await left_on(made)
        assert left.unseen == tuple(made.reports()[2:])
        assert [report.version for report in left.unseen] == [2, 3]
        assert left.client == ""


async def test_what_an_opening_made_whole_is_reported_too() -> None:
    async with world(2, 2) as made:
        for replica in range(2):
            made.give(replica, 1)
        made.settle()
        made.allow(1)
        made.ways[made.servers[0], made.servers[1]].clear()
        for node in made.nodes.values():
            node.ended("epoch")
        coordination = made.nodes[made.servers[0]]._coordination(RUN)
        coordination.give_up()
        assert (await left_on(made)).order == (0, (0, 1))
        for task in reversed(made.servers):
            await made.nodes[task].answer(Settle(RUN, 0, (0, 1)), "other", none)
        assert made.state() == [(-1, 1)] * 2
        left = await left_on(made)
        assert left.order is None
        assert [[(r, b, OUTCOMES[code]) for r, b, code, *_ in report.receipts] for report in left.unseen] == [
            [(0, 1, Outcome.KEPT), (1, 1, Outcome.KEPT)]
        ]


async def test_a_second_client_is_refused_by_the_name_of_the_first_while_that_one_is_there() -> None:
    async with world(1) as made:
        with pytest.raises(RemoteError, match="being trained by somebody"):
            await made.begin_server(0, run=8, epoch="another")
        made.nodes[made.servers[0]].ended("epoch")
        await made.begin_server(0, run=8, epoch="another")


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_server_that_missed_its_order_still_has_what_it_needs_to_catch_up(stopped: bool) -> None:
    async with world(2, 2) as made:
        for replica in range(2):
            made.give(replica, 1)
        made.settle()
        made.allow(1)
        way = made.ways[made.servers[0], made.servers[1]]
        late = list(way)
        way.clear()  # and nobody is told
        if stopped:
            await made.nodes[made.servers[1]].answer(Stop(RUN), "other", none)
            for order in late:  # of a run that is over there
                made.nodes[made.servers[1]].hear(made.servers[0], order)
        look = Look("", "trainer", ("step",))
        said = [await made.nodes[task].answer(look, "other", none) for task in made.servers]
        lefts = [left_from_data(left) for _, left, _ in said]
        assert [version for version, _, _ in said] == [1, 0]
        assert lefts[0] is not None
        assert lefts[1] is not None
        assert lefts[0].order == (0, (0, 1))
        assert lefts[1].held == {(0, 0), (1, 0)}
        await made.nodes[made.servers[1]].answer(Settle(RUN, 0, (0, 1)), "other", none)
        assert made.state() == [(-1, 1)] * 2


@pytest.mark.parametrize("says", [ApplyOrder, Settle])
async def test_an_order_tells_what_each_update_is_multiplied_by_also_to_whom_it_comes_late(says: type[Any]) -> None:
    async with world(2, 2, combine=True) as made:
        for replica in range(2):
            made.give(replica, 1)
        made.settle()
        order, task = says(RUN, 0, (0, 1), (0.5, 0.125)), made.servers[1]
        if says is ApplyOrder:
            made.nodes[task].hear(made.servers[0], order)
        else:
            await made.nodes[task].answer(Stop(RUN), "other", none)
            await made.nodes[task].answer(order, "other", none)
        assert made.state() == [(0, 0), (-0.625, 1)]


def none(plan: int) -> Any:
    raise AssertionError("no plan is asked for")


# ── a network that loses ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Update, NewVersion, ApplyOrder])
async def test_what_was_lost_with_a_way_is_posted_again(kind: type[Any]) -> None:
    async with world(2, 2) as made:
        made.allow(3)
        for replica in range(2):
            made.give(replica, 1, 2, 3, 4)
        lost = 0
        while waiting := [way for way, left in made.ways.items() if left]:
            way = waiting[0]
            if isinstance(made.ways[way][0], kind) and lost < 3:
                lost += 1
                made.break_way(*way)
            else:
                made.deliver(*way)
        assert lost == 3
        assert made.state() == [(-3, 3)] * 2


async def random_steps(
    made: World, rng: random.Random, steps: int, act: Callable[[World, random.Random], None]
) -> None:
    for _ in range(steps):
        waiting = [way for way, left in made.ways.items() if left]
        if waiting and rng.random() < 0.9:
            way = rng.choice(waiting)
            if rng.random() < 0.03:
                made.break_way(*way)
            elif rng.random() < 0.05 and way[1] != CLIENT:
                made.nodes[way[1]].hear(way[0], made.ways[way][0])  # it will come again
            else:
                made.deliver(*way)
        else:
            act(made, rng)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_lost_repeated_or_reordered_all_servers_apply_the_same_sets_once(
    seed: int, rows: bool
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    replicas, servers = rng.randint(1, 4), rng.randint(1, 3)
    given, allowed = [0] * replicas, 0

    def act(made: World, rng: random.Random) -> None:
        nonlocal allowed
        replica = rng.randrange(replicas)
        if rng.random() < 0.5 and given[replica] < 30:
            given[replica] += 1
            made.give(replica, given[replica])
        else:
            allowed = min(allowed + 1, 12)
            made.allow(allowed)

    async with world(replicas, servers, take=rng.randint(1, replicas), rows=rows, combine=seed % 2 > 0) as made:
        await random_steps(made, rng, 1500, act)
        for replica in range(replicas):
            made.give(replica, *range(given[replica] + 1, 31))
        made.allow(12)
        for task in made.servers:  # the last word of each way may have been lost with it
            for peer in (*made.servers, *made.workers):
                made.break_way(task, peer)
                made.break_way(peer, task)
        made.break_way(made.servers[0], CLIENT)
        made.settle()
        assert made.state() == [(-12, 12)] * servers
        spent = [(r, batch) for version in range(12) for r, (batch, _) in outcomes(made, version).items()]
        assert len(spent) == len(set(spent))
        kept = [
            (replica, version, batch)
            for version in range(12)
            for replica, (batch, outcome) in outcomes(made, version).items()
            if outcome is Outcome.KEPT
        ]
        assert set(kept) <= set(made.used)


async def test_a_server_that_was_started_again_before_its_run_begins_there_is_lost() -> None:
    made = World()
    (task,) = made.servers
    made.hosts[task] = FakeHost(task)
    made.nodes[task] = made._node(made.hosts[task])
    with pytest.raises(NodeLost, match=f"trainer has no variables on {task} any more: it was started again"):
        await made.begin_server(0)
    await made.aclose()


# ── what nobody waits for ────────────────────────────────────────────────────────────────────────────────────────────


def _fails(*given: Any) -> None:
    raise RuntimeError("no way on")


async def test_what_fails_in_a_replica_as_a_computation_ends_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as made:
        made.towers[0].slow = True
        made.give(0, 1)
        made.settle()
        (replica,) = made.nodes[made.workers[0]]._replicas.values()
        assert replica.task is not None
        monkeypatch.setattr(Replica, "_go_on", _fails)
        made.towers[0].go.set()
        await asyncio.wait([replica.task])
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert "no way on" in ended.text


async def test_what_fails_in_a_replica_as_it_says_something_again_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(1) as made:
        monkeypatch.setattr(Replica, "broken", _fails)
        made.break_way(made.workers[0], made.servers[0])
        made.settle()
        ended = made.ended()
        assert ended is not None
        assert "no way on" in ended.text


class Delayed(World):
    """Batches reach replicas a moment late."""

    def _node(self, host: FakeHost) -> Iterations:
        if host.task in self.workers:
            host.delay = parse("0.001 at input")
        return super()._node(host)


async def test_what_fails_in_a_replica_that_is_delayed_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "_admit", _fails)
    made, posted = Delayed(1), asyncio.Queue[Any]()
    made.nodes[made.workers[0]]._send = lambda peer, epoch, message: posted.put_nowait(message)
    async with begun(made):
        made.give(0, 1)
        while not isinstance(message := await posted.get(), Ended):
            pass
        assert "no way on" in message.text


async def test_an_update_that_there_is_no_memory_to_post_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [MemoryError("none is left")]

    def scarce(parts: Any) -> Any:
        if failures:
            raise failures.pop()
        return bundled(parts)

    monkeypatch.setattr(replica_module, "bundled", scarce)
    async with world(2, take=1) as made:
        made.allow(1)
        for replica in range(2):
            made.settle()
            made.give(replica, 1, 2)
        made.settle()
        assert made.ended() is None
        assert made.reports()[0].errors == ((0, "ResourceError", "out of memory: none is left"),)
        assert outcomes(made, 0) == {0: (1, Outcome.LOST), 1: (1, Outcome.KEPT)}
