"""Nodes that come late, end and come again, freeze and thaw: they serve as soon as they are there."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from cluster_plans import PS, WORKERS, relay
from process_world import until_lost
from test_cluster import SCALAR, Numbers, driving

import flowrt as fr
from flowrt.base.errors import GraphError, NodeLost, ResourceError
from flowrt.cluster.cluster import LocalCluster


async def test_a_node_that_comes_late_or_again_is_used_for_what_was_registered_before() -> None:
    async with LocalCluster(ps=1, worker=2) as cluster:
        cluster.processes[WORKERS[1]].kill()
        await cluster.processes[WORKERS[1]].wait()
        async with driving(cluster, patience=0.2) as master:
            assert master.peers.lost == {WORKERS[1]}
            assert [d.host for d in master.peers.devices] == [PS, WORKERS[0]]
            run = Numbers(master)
            for turn in range(2):
                await cluster.respawn(WORKERS[1])
                async with asyncio.timeout(10):
                    await until_lost(master)
                if turn == 0:
                    step = await master.register(**relay(WORKERS[0], WORKERS[1], SCALAR))
                assert (await run(step, np.asarray(1.0)))[0] == 4.0
                cluster.processes[WORKERS[1]].kill()
                async with asyncio.timeout(10):
                    await cluster.processes[WORKERS[1]].wait()
                    await until_lost(master, WORKERS[1])
                with pytest.raises(NodeLost, match=rf"{WORKERS[1]} \(.*\) was lost: "):
                    await run(step, np.asarray(1.0))


async def test_a_node_that_was_silent_for_too_long_is_begun_with_anew() -> None:
    async with (
        LocalCluster(ps=1, worker=2) as cluster,
        driving(cluster, beat=0.03) as master,
    ):
        step = await master.register(**relay(WORKERS[0], WORKERS[1], SCALAR))
        run = Numbers(master)

        async def runs() -> Any:
            """What the step gives: others, too, may be silent for as long on a busy machine."""
            while True:
                await until_lost(master)
                with suppress(NodeLost):
                    return (await run(step, np.asarray(1.0)))[0]

        for _ in range(2):
            assert await runs() == 4.0
            os.kill(cluster.processes[WORKERS[1]].pid, signal.SIGSTOP)
            async with asyncio.timeout(10):
                while WORKERS[1] not in master.peers.lost:
                    await master.wait_changed(master.peers.lost, master.peers.suspects)
            os.kill(cluster.processes[WORKERS[1]].pid, signal.SIGCONT)
            async with asyncio.timeout(10):
                await until_lost(master)


async def test_a_node_that_ends_is_started_again_where_that_is_wanted() -> None:
    async with LocalCluster(worker=2, restart=True) as cluster, driving(cluster) as master:
        step = await master.register(**relay(WORKERS[0], WORKERS[1], SCALAR))
        first = cluster.processes[WORKERS[1]]
        first.kill()
        async with asyncio.timeout(20):
            await until_lost(master, WORKERS[1])
            await until_lost(master)
        assert cluster.processes[WORKERS[1]] is not first
        assert (await Numbers(master)(step, np.asarray(1.0)))[0] == 4.0
        with pytest.raises(GraphError, match=f"{WORKERS[0]} runs"):
            await cluster.respawn(WORKERS[0])


async def test_a_node_that_two_start_again_at_once_is_started_once() -> None:
    class Counted(LocalCluster):
        spawned = 0
        comes = asyncio.Event()  # once a process was spawned that is not ready yet

        async def _spawn(self, *how: Any, **more: Any) -> Any:
            self.spawned += 1
            return await super()._spawn(*how, **more)

        async def _ready(self, *how: Any) -> str:
            self.comes.set()
            return await super()._ready(*how)

    async def late(cluster: Counted, do: Callable[[str], Awaitable[None]]) -> None:
        await cluster.comes.wait()
        await do(WORKERS[1])

    async with Counted(worker=2) as cluster:
        cluster.processes[WORKERS[1]].kill()
        await cluster.processes[WORKERS[1]].wait()
        again = cluster.respawn
        await asyncio.gather(again(WORKERS[1]), again(WORKERS[1]), late(cluster, again))
        assert cluster.spawned == 3
        cluster.comes.clear()
        cluster.processes[WORKERS[1]].kill()
        await cluster.processes[WORKERS[1]].wait()
        came, gone, refused = await asyncio.gather(
            again(WORKERS[1]), late(cluster, cluster.remove), late(cluster, again), return_exceptions=True
        )
        assert (came, gone, type(refused)) == (None, None, GraphError)
        assert cluster.spawned == 4


async def test_a_node_that_does_not_come_up_again_in_time_is_told_of_and_ended() -> None:
    class Hanging(LocalCluster):
        """One whose nodes hang as they start, where ``before`` has them do."""

        before: tuple[str, ...] = ()

        def _where(self, task: str) -> tuple[tuple[str, ...], str]:
            return self.before, "127.0.0.1"

    async with Hanging(worker=2) as cluster:
        cluster.processes[WORKERS[1]].kill()
        cluster.before, cluster._startup = ("sh", "-c", "exec sleep 1000"), 0.1
        with pytest.raises(ResourceError, match=f"{WORKERS[1]} did not come up within 0.1 s"):
            await cluster.respawn(WORKERS[1])
        assert cluster.processes[WORKERS[1]].returncode == -signal.SIGTERM


INPUTS = {"x": fr.Spec("float32", (None, 3))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    """One whose gradient is what it is fed, for each of two variables: updates are counted by what they leave."""
    a = fr.Variable(np.zeros((3,), np.float32), name="a")
    b = fr.Variable(np.zeros((3,), np.float32), name="b")
    return fr.sum((a + b) * fr.mean(inputs["x"], axis=0))


def batches() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones((2, 3), np.float32)}


async def test_replicas_whose_nodes_end_again_and_again_take_part_again() -> None:
    rng = random.Random(7)
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=3, policy=fr.train.FirstOf(2), servers=2
        )
    seen = asyncio.Event()

    class Patient(LocalCluster):
        """One that starts no node again before it was seen that it is lost."""

        async def respawn(self, task: str) -> None:
            await seen.wait()
            seen.clear()
            await super().respawn(task)

    async with (
        Patient(ps=2, worker=3, restart=True) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        steps, count = trainer.steps(session, batches()), 0

        async def until(sign: Callable[[fr.train.StepReport], bool]) -> None:
            nonlocal count
            async for report in steps:
                count += 1
                assert len(report.kept) == 2
                if sign(report):
                    return

        for _ in range(3):
            victim = rng.randrange(3)
            cluster.processes[f"/job:worker/task:{victim}"].kill()
            await until(lambda _: bool(trainer.statistics().lost))
            assert trainer.statistics().lost == (f"/job:worker/task:{victim}",)
            seen.set()
            await until(lambda _: not trainer.statistics().lost)
            await until(lambda report, victim=victim: victim in report.kept)  # type: ignore[misc]
        await steps.aclose()
        step, (a, b) = await session.run([trainer.step, trainer.variables])
        assert step == count
        assert (a == -count).all()
        assert (b == -count).all()


async def test_a_replica_whose_node_comes_late_takes_part_from_then_on() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, policy=fr.train.FirstOf(1))
    async with LocalCluster(ps=1, worker=2) as cluster, asyncio.timeout(60):
        cluster.processes[WORKERS[1]].kill()
        await cluster.processes[WORKERS[1]].wait()
        async with fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            assert [(await anext(steps)).kept for _ in range(3)] == [(0,)] * 3
            await cluster.respawn(WORKERS[1])
            async for report in steps:
                if 1 in report.kept:
                    break


async def test_a_frozen_replica_is_at_one_batch_and_is_handed_one_more_at_most() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=3, policy=fr.train.FirstOf(2))
    async with (
        LocalCluster(ps=1, worker=3) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        steps = trainer.steps(session, batches())
        for _ in range(20):
            await anext(steps)
        process = cluster.processes[WORKERS[1]]
        process.send_signal(signal.SIGSTOP)
        late = 0
        async for report in steps:
            late += 1 in report.late
            if any(slow.cause == "frozen" for slow in report.slow):  # so its node is suspect
                break
        process.send_signal(signal.SIGCONT)
        assert late <= 2
        async for report in steps:
            if 1 in report.kept:
                break
        await steps.aclose()


@pytest.mark.parametrize("servers", [1, 2])
async def test_who_is_back_counts_though_another_is_stopped_meanwhile(servers: int) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=3, policy=fr.train.FirstOf(2), servers=servers
        )
    async with (
        LocalCluster(ps=servers, worker=3, restart=True) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        steps, count = trainer.steps(session, batches()), 0
        async for report in steps:
            count += 1
            assert report.step == count
            if count == 5:
                stopped = cluster.processes[WORKERS[1]]
                stopped.send_signal(signal.SIGSTOP)
                cluster.processes[WORKERS[0]].kill()
            if count > 5 and report.kept == (0, 2):
                break
        stopped.send_signal(signal.SIGCONT)
        async for report in steps:
            count += 1
            if 1 in report.kept:
                break
        await steps.aclose()
        step, (a, b) = await session.run([trainer.step, trainer.variables])
        assert step == count
        assert (a == -count).all()
        assert (b == -count).all()


async def test_a_run_begins_and_ends_without_a_node_that_is_stopped() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=3, policy=fr.train.FirstOf(2))
    async with LocalCluster(ps=1, worker=3) as cluster, fr.Session(graph, cluster=cluster) as session:
        process = cluster.processes[WORKERS[1]]
        process.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):  # it is lost after 30 s only
                steps = trainer.steps(session, batches())
                assert [(await anext(steps)).kept for _ in range(3)] == [(0, 2)] * 3
                await steps.aclose()
                steps = trainer.steps(session, batches())
                await anext(steps)
        finally:
            process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            async for report in steps:
                if 1 in report.kept:
                    break
            await steps.aclose()


async def test_a_run_that_begins_while_no_replica_answers_waits_for_them_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, policy=fr.train.FirstOf(1))
    async with LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        processes = [cluster.processes[task] for task in WORKERS[:2]]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        steps, runner = trainer.steps(session, batches()), session._open_here()
        coming = asyncio.ensure_future(anext(steps))
        try:
            async with asyncio.timeout(20):  # they are lost after 30 s only
                while not runner.suspects.issuperset(WORKERS[:2]):
                    await runner.wait_changed(runner.lost, runner.suspects)
                await asyncio.sleep(0)
            assert not coming.done()
            assert "replicated waits for /job:worker/task:0, /job:worker/task:1" in caplog.text
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            assert (await coming).step == 1
            await steps.aclose()


async def test_a_session_opens_without_waiting_for_a_node_that_is_stopped_and_holds_nothing_that_it_wants() -> None:
    async with LocalCluster(ps=1, worker=2) as cluster, driving(cluster) as master:
        process = cluster.processes[WORKERS[1]]
        process.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                assert await master.inventory([]) == {}
            everything = asyncio.ensure_future(master.inventory())
            other = asyncio.ensure_future(master.inventory([("", "w")]))
            done, _ = await asyncio.wait([everything, other], timeout=0.5)
            assert not done
        finally:
            process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            assert await everything == await other == {}


async def test_a_session_opens_though_a_node_dies_that_was_asked_what_it_holds() -> None:
    async with LocalCluster(ps=1, worker=2) as cluster, driving(cluster) as master, asyncio.timeout(20):
        process = cluster.processes[WORKERS[1]]
        process.send_signal(signal.SIGSTOP)
        everything = asyncio.ensure_future(master.inventory())
        done, _ = await asyncio.wait([everything], timeout=0.2)
        assert not done
        process.kill()
        assert await everything == {}
        assert master.peers.lost == {WORKERS[1]}
