"""A parameter server is lost whose variables nobody else holds: training goes back to the newest checkpoint, and on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.finishing import first

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.train.reports import Reports

SERVERS = ("/job:ps/task:0", "/job:ps/task:1")
INPUTS = {"x": fr.Spec("float32", (None, 3))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    """One whose gradient is what it is fed, for each of two variables: updates are counted by what they leave."""
    a = fr.Variable(np.zeros((3,), np.float32), name="a")
    b = fr.Variable(np.zeros((3,), np.float32), name="b")
    return fr.sum((a + b) * fr.mean(inputs["x"], axis=0))


def batches(count: int = 10**6) -> Iterator[dict[str, np.ndarray]]:
    for _ in range(count):
        yield {"x": np.ones((2, 3), np.float32)}


class Training:
    """A trainer with two servers and two replicas on a cluster, with checkpoints."""

    def __init__(self, cluster: fr.LocalCluster, session: fr.Session, trainer: fr.train.Replicated) -> None:
        self.cluster, self.session, self.trainer = cluster, session, trainer

    async def kill(self, task: str, sign: signal.Signals = signal.SIGKILL) -> None:
        self.cluster.processes[task].send_signal(sign)
        await self.cluster.processes[task].wait()

    async def lost(self, task: str) -> None:
        """Wait until the session knows that a task is lost."""
        runner = self.session._open_here()
        while task not in runner.lost:
            await runner.wait_changed(runner.lost, runner.suspects)

    async def state(self) -> list[Any]:
        step, (a, b) = await self.session.run([self.trainer.step, self.trainer.variables])
        return [step, *a, *b]


@asynccontextmanager
async def training(
    path: Path,
    *,
    every: int | None = 5,
    policy: fr.train.Policy | None = None,
    restart: bool = False,
    fn: Callable[[dict[str, fr.Tensor]], Any] = loss_fn,
) -> AsyncIterator[Training]:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(fn, INPUTS, fr.optim.SGD(1.0), replicas=2, policy=policy, servers=2)
    async with (
        fr.LocalCluster(ps=2, worker=2, restart=restart) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(path, every_steps=every)) as session,
        asyncio.timeout(60),
    ):
        yield Training(cluster, session, trainer)


async def until_rolled_back(steps: Reports) -> tuple[fr.train.StepReport, int]:
    """The first report after something was undone, and the last step before it."""
    before = 0
    async for report in steps:
        if report.rolled_back is not None:
            return report, before
        before = report.step
    raise AssertionError("the batches came to their end")


@pytest.mark.parametrize("victim", SERVERS)
async def test_training_goes_back_to_the_newest_checkpoint_and_on(victim: str, tmp_path: Path) -> None:
    async with training(tmp_path, restart=True) as at:
        steps = at.trainer.steps(at.session, batches())
        for _ in range(12):
            assert (await anext(steps)).rolled_back is None
        await at.kill(victim)
        report, before = await until_rolled_back(steps)
        told = report.rolled_back
        assert told is not None
        assert told.lost == (victim,)
        assert told.step % 5 == 0
        assert told.until == max(before, 12)
        assert list(told.undone) == list(range(told.step + 1, told.until + 1))
        assert report.step == told.step + 1
        assert await at.state() == [report.step, *[-float(report.step)] * 6]
        assert (await anext(steps)).step == report.step + 1
        await steps.aclose()


@pytest.mark.parametrize("victim", SERVERS)
async def test_training_waits_for_a_server_that_is_stopped_and_nothing_is_undone(victim: str, tmp_path: Path) -> None:
    async with training(tmp_path) as at:
        steps, runner, told = at.trainer.steps(at.session, batches()), at.session._open_here(), list[int]()
        for _ in range(12):
            told.append((await anext(steps)).step)
        at.cluster.processes[victim].send_signal(signal.SIGSTOP)
        coming = asyncio.ensure_future(anext(steps))
        try:
            while victim not in runner.suspects:  # what was under way when it was stopped may yet come
                await first(asyncio.shield(coming), runner.wait_changed(runner.lost, runner.suspects))
                if coming.done():
                    told.append(coming.result().step)
                    coming = asyncio.ensure_future(anext(steps))
        finally:
            at.cluster.processes[victim].send_signal(signal.SIGCONT)
        report = await coming
        assert report.rolled_back is None
        assert [*told, report.step] == list(range(1, report.step + 1))
        assert await at.state() == [report.step, *[-float(report.step)] * 6]
        await steps.aclose()


async def test_before_the_first_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    async with training(tmp_path, every=None) as at:
        steps = at.trainer.steps(at.session, batches())
        for _ in range(3):
            await anext(steps)
        await at.kill(SERVERS[1])
        await at.cluster.respawn(SERVERS[1])
        report, before = await until_rolled_back(steps)
        assert report.step == 1
        assert report.rolled_back is not None
        assert list(report.rolled_back.undone) == list(range(1, max(before, 3) + 1))
        assert await at.state() == [1, *[-1.0] * 6]
        await steps.aclose()


@pytest.mark.parametrize("victim", SERVERS)
async def test_it_begins_anew_with_the_values_that_were_drawn_first(victim: str, tmp_path: Path) -> None:
    def drawing(inputs: dict[str, fr.Tensor]) -> Any:
        a = fr.Variable(fr.random.normal((3,)), name="a")
        b = fr.Variable(a.read() + fr.random.normal((3,)), name="b")  # on the other server
        return fr.sum((a + b) * fr.mean(inputs["x"], axis=0))

    async with training(tmp_path, every=None, fn=drawing) as at:
        first = await at.state()
        steps = at.trainer.steps(at.session, batches())
        for _ in range(2):
            await anext(steps)
            await at.kill(victim)
            await at.cluster.respawn(victim)
            report, _ = await until_rolled_back(steps)
            assert "from step 0, with the values that it began with" in str(report.rolled_back)
            assert await at.state() == [1, *np.asarray(first[1:], np.float32) - 1]
        await steps.aclose()


async def test_batches_of_steps_under_way_are_used_once_there_is_a_server_again(tmp_path: Path) -> None:
    async with training(tmp_path, every=None, policy=fr.train.AllOf()) as at:
        steps = at.trainer.steps(at.session, batches(40))
        for _ in range(5):
            await anext(steps)
        await at.session.save()
        await at.kill(SERVERS[0])
        await at.cluster.respawn(SERVERS[0])
        reports = [report async for report in steps]
        undone = sum(len(r.rolled_back.undone) for r in reports if r.rolled_back is not None)
        kept = sum(len(r.kept) for r in reports)
        assert 5 + len(reports) - undone == reports[-1].step
        # what was applied, and never reported, is lost with the server: two batches a step, two steps at most
        assert 30 - 4 <= kept <= 30


async def test_a_second_loss_meanwhile_is_waited_for_too(tmp_path: Path) -> None:
    async with training(tmp_path) as at:
        steps = at.trainer.steps(at.session, batches())
        for _ in range(7):
            await anext(steps)
        await at.kill(SERVERS[0])
        coming = asyncio.ensure_future(until_rolled_back(steps))
        await at.lost(SERVERS[0])
        await at.kill(SERVERS[1])
        await at.cluster.respawn(SERVERS[0])
        await at.cluster.respawn(SERVERS[1])
        report, _ = await coming
        assert report.rolled_back is not None
        assert set(SERVERS) == set(report.rolled_back.lost)
        assert await at.state() == [report.step, *[-float(report.step)] * 6]
        await steps.aclose()


async def waiting(at: Training) -> tuple[Reports, asyncio.Future[Any]]:
    """An iteration that waits for a server, and its next report."""
    steps = at.trainer.steps(at.session, batches())
    await anext(steps)
    await at.kill(SERVERS[0])
    coming = asyncio.ensure_future(until_rolled_back(steps))
    await at.lost(SERVERS[0])
    return steps, coming


async def test_an_iteration_that_waits_for_a_server_can_be_left(tmp_path: Path) -> None:
    async with training(tmp_path) as at:
        steps, coming = await waiting(at)
        coming.cancel()
        await asyncio.wait([coming])
        await steps.aclose()
        assert not at.session._iterating


async def test_a_session_that_closes_ends_an_iteration_that_waits(tmp_path: Path) -> None:
    async with training(tmp_path) as at:
        _, coming = await waiting(at)
    with pytest.raises(fr.ClosedError, match="training was ended"):
        await coming
