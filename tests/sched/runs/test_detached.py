"""Runs that go on without a client: what server 0 keeps of them, and hands out."""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from counting_client import HERE, PATH, cluster_file
from detached_client import built, source, used_by
from process_world import running
from programs import python

import flowrt as fr
from flowrt.base.device import CLIENT
from flowrt.sched.drivers.beginning import BeginReplica
from flowrt.sched.drivers.messages import Draw, Gone, Lost, Probe, Report
from flowrt.sched.policies import policy_to_data
from flowrt.sched.server import detached
from flowrt.sched.server.detached import Detached, DetachedTerms, Kept
from flowrt.sched.server.undriven import Undriven
from flowrt.train.detached import DetachedRun

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def report(version: int, size: int = 1) -> Report:
    return Report(7, version, ((0, version + 1, 0, 0.5, 0),), (1.0, np.ones(size)), 0.1, (1.0, 2.0, 3.0, 4.0), b"1234")


def versions(reports: Any) -> list[int]:
    return [each.version for each in reports]


class World:
    """Server 0's part of a run of two replicas; what it posts is in ``posted``."""

    def __init__(self, depth: int = 2, total: int = -1, **terms: Any) -> None:
        self.posted: list[tuple[str, Any]] = []
        role: Any = SimpleNamespace(
            run=7, version=3, replicas=("a", "b"), detached=tuple(DetachedTerms("job", depth, 1, 0, total, **terms))
        )
        way: Any = SimpleNamespace(post=lambda peer, message: self.posted.append((peer, message)))
        self.made = Detached(role, way)

    def told(self) -> list[Any]:
        """What was posted since."""
        posted, self.posted = self.posted, []
        return [(peer, m.number, m.identities) if isinstance(m, Draw) else (peer, m.version) for peer, m in posted]


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reports_are_kept_as_they_were_without_the_times_of_their_parts() -> None:
    kept = Kept(3)
    kept.add(report(3))
    (found,) = kept.between(0, 99)
    assert found.told[1].tolist() == [1.0]
    assert (found.version, found.receipts, found.times) == (3, report(3).receipts, b"")


def test_the_oldest_reports_are_dropped_where_there_is_no_room_and_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached, "KEPT", 20_000)
    kept = Kept(0)
    for version in range(10):
        kept.add(report(version, 500))
    assert versions(kept.between(0, 99)) == [6, 7, 8, 9]
    assert (kept.first, kept.dropped) == (6, 6)
    kept.add(report(10, 10_000))  # more than there is room for: one is kept all the same
    assert versions(kept.between(0, 99)) == [10]
    kept.forget(11)
    assert (kept.first, kept.dropped, len(kept)) == (11, 0, 0)


def test_no_more_reports_than_a_window_are_on_their_way_and_all_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "WINDOW", 3)
    world = World()
    for version in range(3, 8):
        world.made.report(report(version))
    assert world.told() == [(CLIENT, 3), (CLIENT, 4), (CLIENT, 5)]
    world.made.seen(4)
    assert world.told() == [(CLIENT, 6)]
    world.made.detach()
    world.made.report(report(8))
    assert world.told() == []
    assert world.made.attach() == (4, 0)
    assert world.told() == []
    world.made.seen(4)
    assert world.told() == [(CLIENT, 4), (CLIENT, 5), (CLIENT, 6)]
    world.made.seen(7)
    world.made.report(report(9))
    assert world.told() == [(CLIENT, 7), (CLIENT, 8), (CLIENT, 9)]
    world.made.seen(10)
    world.made.report(report(10))
    assert world.told() == [(CLIENT, 10)]


def test_who_has_yet_to_say_what_it_had_is_told_nothing_where_the_way_to_it_breaks() -> None:
    world = World()
    for version in range(3, 6):
        world.made.report(report(version))
    world.made.seen(4)
    world.told()
    world.made.tell_again()
    assert world.told() == [(CLIENT, 4), (CLIENT, 5)]
    world.made.detach()
    world.made.attach()
    world.made.tell_again()
    assert world.told() == [], "it would take them for those of a run that begins there"
    world.made.seen(4)
    assert world.told() == [(CLIENT, 4), (CLIENT, 5)]


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batches_are_named_to_replicas_that_have_begun_and_again_to_whom_they_may_not_have_reached() -> None:
    world = World()
    assert world.made.hand_out() is None
    assert world.told() == []
    world.made.arrived(1)
    assert world.told() == [("b", 1, (1, 3))]
    assert world.made.spend(1, 1, again=False) == (1,)
    assert world.made.hand_out() is None
    assert world.told() == [("b", 3, (4,))]
    world.made.arrived(1)
    assert world.told() == [("b", 2, (3, 4))]


def test_what_a_lost_replica_had_not_begun_others_have_and_none_twice() -> None:
    world = World(total=5)
    world.made.arrived(0)
    world.made.arrived(1)
    assert world.made.hand_out() is None
    assert world.told() == [("a", 1, (0, 2)), ("b", 1, (1, 3))]
    world.made.lose(1, 1)  # it has begun with its first
    assert world.made.hand_out() is None
    assert world.made.spend(0, 1, again=False) == (0,)
    assert world.made.hand_out() is None
    assert world.told() == [("a", 3, (3,))]
    assert world.made.join(1) == 2
    assert world.made.hand_out() == (3, 3)
    world.made.arrived(1)
    assert world.told() == [("b", 1, (1,)), ("b", 3, (4,))]


def test_batches_that_came_late_are_used_again_where_that_is_wanted() -> None:
    for requeues in (False, True):
        world = World(depth=1, total=2, requeues=requeues)
        world.made.arrived(0)
        assert world.made.hand_out() == (1, 1)
        assert world.made.spend(0, 1, again=True) == (0,)
        assert world.made.hand_out() == ((2, 1) if requeues else (1, 1))
        assert world.told() == [("a", 1, (0,)), *([("a", 2, (0,))] if requeues else [])]


# ── who is gone ──────────────────────────────────────────────────────────────────────────────────────────────────────


def undriven(posted: list[tuple[str, Any]], **terms: Any) -> Undriven:
    """Server 0's coordination of a run that goes on without a client."""
    role: Any = SimpleNamespace(
        run=7,
        version=3,
        servers=("p", "q"),
        replicas=("a", "b"),
        policy=policy_to_data(fr.train.FirstOf(1)),
        floor=0,
        staleness=0,
        keeps=False,
        detached=tuple(DetachedTerms("job", 2, 1, 0, -1, **terms)),
    )
    way: Any = SimpleNamespace(post=lambda peer, message: posted.append((peer, message)), clock=lambda: 0.0)
    nothing: Any = lambda *what: None  # noqa: E731
    return Undriven(role, way, nothing, nothing, nothing, lambda: True)


def test_a_server_is_said_something_where_the_way_to_it_broke_as_only_who_posts_learns_that_it_is_gone() -> None:
    posted: list[tuple[str, Any]] = []
    undriven(posted).broken("q")
    assert posted == [("q", Probe(7, -1))]


def test_news_of_a_process_that_comes_late_is_not_taken_for_the_loss_of_who_follows_it() -> None:
    made = undriven([], births=(("p", "one"), ("q", "two"), ("a", "three"), ("b", "four")))
    assert not made.lose_node("b", "one of a run before")
    assert made.lose_node("b", "four") == [Lost(7, 1, 0)]
    made.join(1, 1, 0, "five")
    assert not made.lose_node("b", "four")
    assert made.lose_node("b", "five") == made.lose_node("b", "") == [Lost(7, 1, 1)]
    made.lose_node("q", "one of a run before")
    assert not made.ending
    made.lose_node("q", "two")
    assert made.ending


# ── on processes ─────────────────────────────────────────────────────────────────────────────────────────────────────

IMPORTS = ["detached_client"]
KILLS = int(os.environ.get("FLOWRT_KILLS", 8))
DEPTH = 3  # batches of a replica that no report may account for: they are under way


async def attached(session: fr.Session, trainer: fr.train.Replicated, total: int) -> list[fr.train.StepReport]:
    """The reports of a detached run, to its end."""
    return [report async for report in trainer.steps(session, source(total), detached=True)]


class Seen:
    """What clients have seen of one run, which no two see otherwise."""

    def __init__(self) -> None:
        self.used: dict[int, list[int]] = {}  # by step, the batches that its report accounts for

    def take(self, step: int, used: list[int]) -> None:
        assert self.used.setdefault(step, used) == used

    async def read(self, client: asyncio.subprocess.Process) -> None:
        """What a client prints, until it is killed."""
        assert client.stdout is not None
        async for line in client.stdout:
            self.take(*json.loads(line))

    def check(self) -> None:
        """Every step was seen, no batch was used twice, and only those are unaccounted for that were under way."""
        assert sorted(self.used) == list(range(1, len(self.used) + 1))
        used = [identity for some in self.used.values() for identity in some]
        assert len(used) == len(set(used))
        assert len(set(range(max(used))).difference(used)) <= 2 * DEPTH


@pytest.mark.timeout(300)
async def test_whenever_clients_are_killed_training_goes_on_and_every_step_is_seen_and_no_batch_used_twice(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("FLOWRT_SEED", 1122))
    print(f"seed {seed}")
    rng, seen, (graph, trainer) = random.Random(seed), Seen(), built()
    async with fr.LocalCluster(ps=2, worker=2, imports=IMPORTS) as cluster:
        file, ledger = cluster_file(cluster, tmp_path), tmp_path / "trainer.ledger"
        command = [*python(), str(HERE / "detached_client.py"), file, "job", str(10**6), "-1", str(ledger)]
        for _ in range(KILLS):
            async with running(*command, env=PATH) as client:
                assert client.stdout is not None
                assert await client.stdout.readline() == b"begins\n"
                reading = asyncio.ensure_future(seen.read(client))
                await asyncio.sleep(rng.uniform(0.0, rng.choice([0.05, 0.5])))  # also while the run begins
                client.kill()
                await reading
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            if seen.used:
                first = await session.run(trainer.step)
                while await session.run(trainer.step) <= first + 3:
                    pass  # nobody is attached, and it goes on
            steps = trainer.steps(session, source(10**6), detached=True, ledger=ledger)
            at = int(await session.run(trainer.step))
            async for report in steps:
                seen.take(report.step, used_by(report))
                if report.step == at + 3:
                    assert await trainer.stop(session)
            seen.check()
            variables, step = await session.run([trainer.variables, trainer.step])
            assert variables == [-step] * 2
            assert step == len(seen.used)
    written = fr.Ledger(ledger)
    assert written.violations == ()
    assert written.version == step
    ends = [(made.version + 1, (made.kept, made.late, made.refused, made.lost)) for made in written.versions]
    told = {step: sorted([i for of in each for some in of.values() for i in some]) for step, each in ends}
    assert told == {step: sorted(used) for step, used in seen.used.items()}


async def trained(
    session: fr.Session, trainer: fr.train.Replicated, total: int, count: int
) -> list[fr.train.StepReport]:
    """The first reports of a detached run, which is left then."""
    reports: list[fr.train.StepReport] = []
    async with aclosing(trainer.steps(session, source(total), detached=True)) as steps:
        async for report in steps:
            reports.append(report)
            if len(reports) == count:
                break
    return reports


def steps_of(reports: Iterable[fr.train.StepReport]) -> list[int]:
    return [report.step for report in reports]


@pytest.mark.timeout(60)
async def test_a_detached_run_is_left_attached_to_refused_to_others_and_stopped() -> None:
    graph, trainer = built()
    async with fr.LocalCluster(ps=2, worker=2, imports=IMPORTS) as cluster:
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            assert steps_of(await trained(session, trainer, 10**6, 3)) == [1, 2, 3]
            assert steps_of(await trained(session, trainer, 10**6, 3)) == [4, 5, 6]
        async with fr.Session(graph, cluster=cluster, name="other") as other:
            told = "is being trained, detached, for session 'job'.*a session named 'job'.*`await trainer.stop"
            with pytest.raises(fr.RemoteError, match=told):
                await trained(other, trainer, 10**6, 1)
            with pytest.raises(fr.RemoteError, match=told):
                await anext(trainer.steps(other, source(4)))
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            steps = trainer.steps(session, source(10**6), detached=True)
            assert (await anext(steps)).step == 7
            async with fr.Session(graph, cluster=cluster, name="other") as other:
                assert await trainer.stop(other)
                assert not await trainer.stop(other)
            rest = [report.step async for report in steps]
            assert rest == list(range(8, rest[-1] + 1))
            variables, step = await session.run([trainer.variables, trainer.step])
            assert variables == [-step] * 2
            assert step == rest[-1]
            runner: Any = session._runner
            for node in (await runner._master.statistics()).values():
                assert node["iterations"] == 0


@pytest.mark.timeout(60)
async def test_who_stops_a_run_without_its_ledger_leaves_the_reports_to_who_has_it(tmp_path: Path) -> None:
    graph, trainer = built(servers=1)
    ledger = tmp_path / "ledger"

    async def some(session: fr.Session, count: int) -> list[fr.train.StepReport]:
        reports = []
        async for report in trainer.steps(session, source(10**6), detached=True, ledger=ledger):
            reports.append(report)
            if len(reports) == count:
                break
        return reports

    async with fr.LocalCluster(ps=1, worker=2, imports=IMPORTS) as cluster:
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            reports = await some(session, 3)
        async with fr.Session(graph, cluster=cluster, name="other") as other:
            while await other.run(trainer.step) < 20:
                pass  # nobody reads of these
            assert await trainer.stop(other)
            assert not await trainer.stop(other)
            made = int(await other.run(trainer.step))
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            reports += await some(session, 10**6)
            assert steps_of(reports) == list(range(1, made + 1))
            reports += await some(session, 3)
            assert await trainer.stop(session)
    used = used_by(*reports)
    assert len(used) == len(set(used))
    assert fr.Ledger(ledger).violations == ()


@pytest.mark.timeout(60)
async def test_a_detached_run_goes_on_without_a_replica_that_dies_and_who_attaches_brings_it_back() -> None:
    graph, trainer = built(servers=1)
    async with fr.LocalCluster(ps=1, worker=2, imports=IMPORTS) as cluster:
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            reports = await trained(session, trainer, 10**6, 3)
        cluster.processes["/job:worker/task:1"].kill()
        await cluster.processes["/job:worker/task:1"].wait()
        await asyncio.sleep(0.5)
        await cluster.respawn("/job:worker/task:1")
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            alone = int(await session.run(trainer.step))
            async for report in trainer.steps(session, source(10**6), detached=True):
                reports.append(report)
                if report.step > alone + 1 and 1 in (*report.kept, *report.late):  # the first of two counts
                    break
            assert steps_of(reports) == list(range(1, reports[-1].step + 1))
            used = used_by(*reports)
            assert len(used) == len(set(used))
            assert len(set(range(max(used))).difference(used)) <= 2 * DEPTH
            assert await trainer.stop(session)


async def test_a_replica_that_server_0_takes_for_lost_before_it_has_begun_again_is_begun_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the server's own link to a node that was killed breaks late, and the node that follows it is there."""
    told, said, begin = asyncio.Event(), [], DetachedRun._command

    async def begin_late(run: Any, task: str, message: Any) -> None:
        if isinstance(message, BeginReplica) and message.incarnation:
            said.append(message.incarnation)
            if message.incarnation == 1:
                run._post(0, Lost(message.run, 1, 1))
                await told.wait()
        await begin(run, task, message)

    def hear(run: Any, peer: str, message: Any) -> None:
        if isinstance(message, Gone) and message.incarnation == 1:
            told.set()
        heard(run, peer, message)

    heard = DetachedRun.hear
    monkeypatch.setattr(DetachedRun, "_command", begin_late)
    monkeypatch.setattr(DetachedRun, "hear", hear)
    graph, trainer = built(servers=1)
    async with (
        fr.LocalCluster(ps=1, worker=2, imports=IMPORTS) as cluster,
        fr.Session(graph, cluster=cluster, name="job") as session,
    ):
        await trained(session, trainer, 10**6, 3)
        cluster.processes["/job:worker/task:1"].kill()
        await cluster.respawn("/job:worker/task:1")
        async for report in trainer.steps(session, source(10**6), detached=True):
            if said and 1 in (*report.kept, *report.late):
                break
        assert said[:2] == [1, 2]
        assert await trainer.stop(session)


async def test_a_replica_that_server_0_says_is_lost_while_a_client_attaches_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, begin, attach = [], DetachedRun._command, DetachedRun._attach

    async def command(run: Any, task: str, message: Any) -> None:
        if isinstance(message, BeginReplica):
            said.append((message.replica, message.incarnation))
        await begin(run, task, message)

    async def attach_as_one_is_lost(run: Any, number: int) -> bool:
        attached = await attach(run, number)
        run.hear(run._program.servers[0], Gone(number, 1, 0, 3))
        return attached

    graph, trainer = built(servers=1)
    async with (
        fr.LocalCluster(ps=1, worker=2, imports=IMPORTS) as cluster,
        fr.Session(graph, cluster=cluster, name="job") as session,
    ):
        async with aclosing(trainer.steps(session, source(10**6), detached=True)) as steps:
            async for report in steps:
                if report.step >= 3 and not trainer.statistics().lost:  # also who was silent at the begin takes part
                    break
        monkeypatch.setattr(DetachedRun, "_command", command)
        monkeypatch.setattr(DetachedRun, "_attach", attach_as_one_is_lost)
        async for _ in trainer.steps(session, source(10**6), detached=True):
            if said:
                break
        assert said == [(1, 1)]
        assert await trainer.stop(session)


@pytest.mark.timeout(60)
async def test_checkpoints_of_a_detached_run_are_of_one_version(tmp_path: Path) -> None:
    graph, trainer = built()
    async with fr.LocalCluster(ps=2, worker=2, imports=IMPORTS) as cluster:
        checkpoints = fr.Checkpoints(tmp_path, every_steps=3)
        async with fr.Session(graph, cluster=cluster, name="job", checkpoints=checkpoints) as session:
            await trained(session, trainer, 10**6, 8)
            assert await trainer.stop(session)
            await session.reset()
    checkpoints = fr.Checkpoints(tmp_path)
    async with (
        fr.LocalCluster(ps=2, worker=2) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
    ):
        variables, step = await session.run([trainer.variables, trainer.step])
        assert step == checkpoints.step >= 6
        assert variables == [-step] * 2


@pytest.mark.timeout(60)
async def test_nothing_is_restored_into_what_a_run_trains_that_is_not_the_sessions_own(tmp_path: Path) -> None:
    graph, trainer = built()

    def saved() -> fr.Checkpoints:
        return fr.Checkpoints(tmp_path, every_steps=3)

    async with fr.LocalCluster(ps=2, worker=2, imports=IMPORTS) as cluster:
        async with fr.Session(graph, cluster=cluster, name="job", checkpoints=saved()) as session:
            await trained(session, trainer, 10**6, 8)
        checkpoints = saved()
        async with fr.Session(graph, cluster=cluster, name="job", checkpoints=checkpoints) as session:
            assert checkpoints.step == checkpoints.saves()[-1][1] > 0
            with pytest.raises(fr.CheckpointError, match=r"being trained, of .* by session 'job'.*no checkpoint is"):
                await session.restore()
            await trained(session, trainer, 10**6, 3)
            assert await trainer.stop(session)
            variables, step = await session.run([trainer.variables, trainer.step])
            assert variables == [-step] * 2
            async with aclosing(trainer.steps(session, source(10**6))) as steps:
                await anext(steps)
                async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as other:
                    report = await anext(steps)
                    variables, step = await other.run([trainer.variables, trainer.step])
                    assert (variables, step) == ([-step] * 2, report.step)
            restored = await session.restore()
            assert restored == await session.run(trainer.step) < step


async def test_what_cannot_be_detached_is_said_at_the_line_that_asks() -> None:
    graph, trainer = built(servers=1)
    async with (
        fr.LocalCluster(ps=1, worker=2, imports=IMPORTS) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        with pytest.raises(fr.GraphError, match=r"test_detached.py:.*needs a session with a name"):
            trainer.steps(session, source(4), detached=True)
        with pytest.raises(fr.GraphError, match=r"test_detached.py:.*needs a source that nodes read themselves"):
            trainer.steps(session, iter(source(4)), detached=True)
