"""Variables of parameter servers that are held twice: a server dies, and nothing that was reported is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.sched.drivers.inquiries import Hash, Look
from flowrt.train import copies as copies_module
from flowrt.train import following, holding
from flowrt.train.copies import Copies, _copying

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.train.reports import Reports

INPUTS = {"x": fr.Spec("float32", (None, 3))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    """One whose gradient is what it is fed, for each of four variables: updates are counted by what they leave."""
    a, *others = [fr.Variable(np.zeros((3,), np.float32), name=name) for name in "abcd"]
    for other in others:
        a = a + other
    return fr.sum(a * fr.mean(inputs["x"], axis=0))


def batches() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones((2, 3), np.float32)}


async def coming(count: int) -> AsyncIterator[dict[str, np.ndarray]]:
    """As `batches`, each a little later than it is asked for: one is on its way at any time."""
    for batch in islice(batches(), count):
        await asyncio.sleep(0.002)
        yield batch


class Training:
    """A trainer whose servers' variables are held twice, on a cluster."""

    def __init__(self, cluster: fr.LocalCluster, session: fr.Session, trainer: fr.train.Replicated) -> None:
        self.cluster, self.session, self.trainer = cluster, session, trainer

    async def kill(self, *tasks: str) -> None:
        for task in tasks:
            self.cluster.processes[task].kill()
        for task in tasks:
            await self.cluster.processes[task].wait()
        runner = self.session._open_here()
        while not runner.lost.issuperset(tasks):
            await runner.wait_changed(runner.lost, runner.suspects)

    async def revive(self, task: str) -> None:
        await self.cluster.respawn(task)
        runner = self.session._open_here()
        while task in runner.lost:
            await runner.wait_changed(runner.lost, runner.suspects)

    async def check(self, report: fr.train.StepReport) -> None:
        """All variables are where this report says, wherever they are read."""
        step, values = await self.session.run([self.trainer.step, self.trainer.variables])
        assert step == report.step
        for value in values:
            np.testing.assert_array_equal(value, np.full(3, -report.step, np.float32))

    async def check_equal(self) -> None:
        """Each task holds what the one before it does, too, to the bit."""
        runner, copies = self.session._open_here(), await self.trainer.copies_on(self.session)
        for task in copies.tasks:
            names = Hash(tuple(copies._holders.variables[task]))
            one, other = [await runner.command(each, names) for each in (task, copies._holders.after(task))]
            assert one == other != b""


@asynccontextmanager
async def training(
    servers: int = 2,
    policy: fr.train.Policy | None = None,
    checkpoints: fr.Checkpoints | None = None,
    optimizer: Any = None,
) -> AsyncIterator[Training]:
    with fr.Graph() as graph:
        optimizer = optimizer or fr.optim.Momentum(1.0, momentum=0.0)
        trainer = fr.train.Replicated(loss_fn, INPUTS, optimizer, replicas=2, policy=policy, servers=servers, copies=2)
    async with (
        fr.LocalCluster(ps=servers, worker=2) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
        asyncio.timeout(90),
    ):
        yield Training(cluster, session, trainer)


async def follow(steps: Reports, report: fr.train.StepReport | None, count: int) -> fr.train.StepReport:
    """The report of the step that is so many further on; none is left out, and none comes twice."""
    last = 0 if report is None else report.step
    for _ in range(count):
        report = await anext(steps)
        assert report.step == last + 1
        assert np.isfinite(report.loss)
        last = report.step
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("servers", "victims", "policy"),
    [
        (2, (0, 1), fr.train.FirstOf(1)),
        (2, (1, 0), fr.train.AllOf()),
        (3, (0, 2), fr.train.FirstOf(1)),
    ],
)
async def test_a_server_dies_and_no_step_is_lost(servers: int, victims: tuple[int, ...], policy: Any) -> None:
    """One after another, each back before the next: so those that are left have what the first to die had alone."""
    async with training(servers, policy) as at:
        steps = at.trainer.steps(at.session, batches())
        report = await follow(steps, None, 5)
        for victim in victims:
            task = f"/job:ps/task:{victim}"
            await at.kill(task)
            report = await follow(steps, report, 10)
            await at.check(report)
            await at.revive(task)
            report = await follow(steps, report, 3)
            await at.check(report)
            await at.check_equal()
        await steps.aclose()


async def test_batches_that_are_awaited_while_a_server_dies_are_all_used() -> None:
    async with training(2, fr.train.AllOf()) as at:
        steps = at.trainer.steps(at.session, coming(2 * 80))
        report = await follow(steps, None, 5)
        await at.kill("/job:ps/task:0")
        report = await follow(steps, report, 10)
        await at.revive("/job:ps/task:0")
        report = await follow(steps, report, 65)
        assert [report async for report in steps] == []
        await at.check(report)


def take_for_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers follow whatever the size of what they are to hold, and of updates."""
    monkeypatch.setattr(copies_module, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(holding, "LITTLE", 1)
    monkeypatch.setattr(following, "ARRIVE_SECONDS", 60.0)  # however busy this machine is


@pytest.mark.parametrize(
    ("servers", "policy", "optimizer"),
    [
        (2, fr.train.FirstOf(1), None),
        (2, fr.train.AllOf(), fr.optim.Adam(0.1)),
        (3, fr.train.Deadline(0.005, at_least=1), None),
    ],
)
async def test_what_is_large_is_given_to_a_server_while_the_others_go_on(
    servers: int, policy: Any, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows what they hold and apply, to the bit; nothing is copied while they rest."""
    take_for_large(monkeypatch)
    async with training(servers, policy, optimizer=optimizer) as at:
        steps, task = at.trainer.steps(at.session, batches()), "/job:ps/task:0"
        report = await follow(steps, None, 5)
        copies = await at.trainer.copies_on(at.session)
        monkeypatch.setattr(copies, "_copy", None)
        for _ in range(2):
            await at.kill(task)
            report = await follow(steps, report, 10)
            await at.revive(task)
            while copies.gone:
                report = await follow(steps, report, 1)
            await at.check_equal()
            report = await follow(steps, report, 3)
            await at.check_equal()
        await steps.aclose()


async def test_what_a_program_writes_while_a_server_follows_is_not_missing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_for_large(monkeypatch)
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
        assigns = [v.assign(np.full(3, 100.0, np.float32)) for v in trainer.variables]
    async with (
        fr.LocalCluster(ps=2, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        at, task = Training(cluster, session, trainer), "/job:ps/task:0"
        steps = trainer.steps(session, batches())
        report = await follow(steps, None, 5)
        copies = await trainer.copies_on(session)
        await at.kill(task)
        report = await follow(steps, report, 5)
        await at.revive(task)
        report = await follow(steps, report, 1)
        while not copies._following:
            report = await follow(steps, report, 1)
        await session.run(assigns)
        while copies.gone:
            report = await follow(steps, report, 1)
        await at.check_equal()
        (moved,) = {float(number) for value in await session.run(trainer.variables) for number in value}
        assert moved > 50 - report.step
        await steps.aclose()


@pytest.mark.parametrize("victim", ["/job:ps/task:0", "/job:ps/task:1"])
async def test_a_server_that_is_stopped_is_done_without_and_has_all_again_once_it_goes_on(victim: str) -> None:
    async with training(2, fr.train.FirstOf(1)) as at:
        steps = at.trainer.steps(at.session, batches())
        report = await follow(steps, None, 5)
        copies = await at.trainer.copies_on(at.session)
        at.cluster.processes[victim].send_signal(signal.SIGSTOP)
        try:
            while victim not in copies.gone:
                report = await follow(steps, report, 1)
            report = await follow(steps, report, 10)
            await at.check(report)
        finally:
            at.cluster.processes[victim].send_signal(signal.SIGCONT)
        while copies.gone:
            report = await follow(steps, report, 1)
        report = await follow(steps, report, 3)
        await at.check(report)
        await at.check_equal()
        await steps.aclose()


async def test_what_is_kept_beside_the_variables_survives_too() -> None:
    """Adam's moments and its count: the same numbers, to the bit, as without a fault."""
    found = []
    for dies in (False, True):
        async with training(optimizer=fr.optim.Adam(0.1), policy=fr.train.AllOf()) as at:
            steps = at.trainer.steps(at.session, batches())
            report = await follow(steps, None, 4)
            if dies:
                await at.kill("/job:ps/task:0")
            await follow(steps, report, 4)
            found.append(await at.session.run(at.trainer.variables))
            await steps.aclose()
    np.testing.assert_array_equal(*found)


async def test_reads_predictions_and_saves_go_to_who_stands_in_while_nothing_trains(tmp_path: Path) -> None:
    checkpoints = fr.Checkpoints(tmp_path)
    async with training(checkpoints=checkpoints) as at:
        read = at.session.compile(at.trainer.variables)
        steps = at.trainer.steps(at.session, batches())
        report = await follow(steps, None, 3)
        await steps.aclose()
        await at.check(report)
        await read()
        await at.kill("/job:ps/task:1")
        await at.check(report)
        assert [float(value[0]) for value in await read()] == [-3.0] * 4
        assert await at.session.save() == 3
        assert await at.session.restore() == 3
        await at.check(report)
        await at.revive("/job:ps/task:1")  # with nothing
        await at.check(report)
        steps = at.trainer.steps(at.session, batches())
        await at.check(await follow(steps, report, 2))
        await at.check_equal()
        await steps.aclose()


async def test_what_a_program_writes_is_written_twice() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
        assigns = [v.assign(np.full(3, 100.0, np.float32)) for v in trainer.variables]
    for ahead in (0, 2):
        async with (
            fr.LocalCluster(ps=2, worker=2) as cluster,
            fr.Session(graph, cluster=cluster) as session,
            asyncio.timeout(60),
        ):
            at = Training(cluster, session, trainer)
            steps = trainer.steps(session, batches(), ahead=ahead)
            await follow(steps, None, 3)
            await session.run(assigns)
            await anext(steps)
            await at.kill("/job:ps/task:0")
            report = await anext(steps)
            values = await session.run(trainer.variables)
            assert all(value[0] > 50 - report.step for value in values)
            assert len({value[0] for value in values}) == 1 or ahead  # which may move between two of the writes
            await steps.aclose()


@pytest.mark.parametrize("servers", [2, 3])  # where there are three, one has a copy left of what is undone
async def test_where_both_that_held_something_are_lost_training_goes_back_to_a_checkpoint(
    servers: int, tmp_path: Path
) -> None:
    async with training(servers, checkpoints=fr.Checkpoints(tmp_path, every_steps=4)) as at:
        steps = at.trainer.steps(at.session, batches())
        report = await follow(steps, None, 6)
        assert at.session.checkpoints is not None
        await at.session.checkpoints.wait_saved()
        both = "/job:ps/task:0", "/job:ps/task:1"
        for _ in range(2):  # the second time, all had been held twice as the run began
            await at.kill(*both)
            for task in both:
                await at.revive(task)
            report = await anext(steps)
            assert report.rolled_back is not None
            assert report.rolled_back.step == report.step - 1 == 4
            await at.check(report)
            await at.check_equal()
        await at.kill(both[1])
        await at.check(await follow(steps, report, 2))
        await steps.aclose()


async def test_where_both_are_lost_and_there_is_no_checkpoint_training_ends() -> None:
    async with training() as at:
        steps = at.trainer.steps(at.session, batches())
        await follow(steps, None, 2)
        await at.kill("/job:ps/task:0", "/job:ps/task:1")
        with pytest.raises(fr.NodeLost, match="lost"):
            await follow(steps, None, 5)


async def test_another_session_goes_on_from_what_the_servers_hold_that_are_left() -> None:
    """One with nothing of the first but the nodes; then a third one, when the server is back with nothing."""
    server = "/job:ps/task:0"
    async with fr.LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        step = 0
        for number in range(3):
            with fr.Graph() as graph:
                trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
            async with fr.Session(graph, cluster=cluster) as session:
                steps = trainer.steps(session, batches())
                for _ in range(3):
                    step += 1
                    assert (await anext(steps)).step == step
                await steps.aclose()
                for value in await session.run(trainer.variables):
                    np.testing.assert_array_equal(value, np.full(3, -step, np.float32))
            if number == 0:
                cluster.processes[server].kill()
                await cluster.processes[server].wait()
            elif number == 1:
                await cluster.respawn(server)


async def test_what_a_session_restores_it_trains_on_though_copies_were_newer(tmp_path: Path) -> None:
    async with fr.LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        for restored in (0, 2):
            with fr.Graph() as graph:
                trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
            async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
                if restored:
                    await session.restore(restored)
                steps = trainer.steps(session, batches())
                for step in range(restored + 1, 5):
                    report = await anext(steps)
                    assert (report.step, report.rolled_back) == (step, None)
                    if step % 2 == 0:
                        await session.save()
                await Training(cluster, session, trainer).check(report)
                await steps.aclose()


async def test_a_server_that_dies_before_a_new_session_trains_is_stood_in_for(tmp_path: Path) -> None:
    async with fr.LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        for trained in (0, 2):
            with fr.Graph() as graph:
                trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
            async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
                at = Training(cluster, session, trainer)
                if trained:
                    await at.kill("/job:ps/task:0")
                    assert [value[0] for value in await session.run(trainer.variables)] == [-2.0] * 4
                    assert await session.restore(1) == 1
                    assert [value[0] for value in await session.run(trainer.variables)] == [-1.0] * 4
                    await at.revive("/job:ps/task:0")  # with nothing
                steps = trainer.steps(session, batches())
                for step in (1, 2) if not trained else (2, 3):
                    report = await anext(steps)
                    assert (report.step, report.rolled_back) == (step, None)
                    await session.save()
                await at.check(report)
                await steps.aclose()


@pytest.mark.parametrize(("victim", "restores"), [(0, False), (1, True)])
async def test_what_is_written_while_a_server_stands_still_holds_once_it_goes_on(
    victim: int, restores: bool, tmp_path: Path
) -> None:
    """For a session that knows nothing of who wrote it: the server still has what was before, be that newer."""

    def trainer() -> tuple[fr.Graph, fr.train.Replicated, list[Any]]:
        with fr.Graph() as graph:
            made = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2)
            return graph, made, [v.assign(np.full(3, 100.0, np.float32)) for v in made.variables]

    task, expected = f"/job:ps/task:{victim}", -1.0 if restores else 100.0
    async with fr.LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        graph, first, _ = trainer()
        async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
            steps = first.steps(session, batches())
            await follow(steps, None, 1)
            await session.save()
            await anext(steps)
            await steps.aclose()
        cluster.processes[task].send_signal(signal.SIGSTOP)
        try:
            graph, _, assigns = trainer()
            async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
                await (session.restore(1) if restores else session.run(assigns))
        finally:
            cluster.processes[task].send_signal(signal.SIGCONT)
        for _ in range(2):  # before it is whole again, and after
            graph, third, _ = trainer()
            async with fr.Session(graph, cluster=cluster) as session:
                assert [value[0] for value in await session.run(third.variables)] == [expected] * 4
                steps = third.steps(session, batches())
                await anext(steps)
                await steps.aclose()
                expected -= 1.0
                assert [value[0] for value in await session.run(third.variables)] == [expected] * 4
                await Training(cluster, session, third).check_equal()


async def test_servers_that_die_at_random_moments_lose_nothing() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with training(3, fr.train.FirstOf(1)) as at:
        steps = at.trainer.steps(at.session, batches(), ahead=1)
        report = await follow(steps, None, 3)
        for _ in range(4):
            task = f"/job:ps/task:{rng.randrange(3)}"
            asyncio.get_running_loop().call_later(rng.random() * 0.02, at.cluster.processes[task].kill)
            report = await follow(steps, report, 50)
            await at.cluster.processes[task].wait()
            await at.revive(task)
            report = await follow(steps, report, 3)
        await steps.aclose()
        await at.check_equal()


def test_copies_that_make_no_sense_are_refused() -> None:
    def made(**how: Any) -> Any:
        with fr.Graph():
            return fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, **how)

    for copies in (0, 3, True, "2", 1.5):
        with pytest.raises(fr.GraphError, match=r"test_copies\.py:\d+.* expected 1, or 2"):
            made(servers=2, copies=copies)
    with pytest.raises(fr.GraphError, match="copies=2 with servers=1"):
        made(copies=2)


async def test_two_servers_on_one_task_are_no_copies_of_each_other() -> None:
    with fr.Graph() as graph:
        where = {"server_device": "", "worker_device": ""}
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2, copies=2, **where)
    async with fr.Session(graph) as session:
        with pytest.raises(fr.GraphError, match=r"all its servers are on .*two tasks"):
            await anext(trainer.steps(session, batches()))


def test_the_version_is_copied_once_all_else_is() -> None:
    """Else a copy that is cut off, as its client dies, looks whole to the next client."""
    step, spec = ("", "trainer/step"), fr.Spec("float64", (3,))
    variables = {("", "v"): (spec, "cpu:0"), ("", "w"): (spec, "cpu:0"), step: (fr.Spec("int64", ()), "cpu:0")}
    takes = _copying(variables, 2, "a", "b")["b"].nodes
    assigned = [node for node in takes if node.op == "assign"]
    assert [node.attrs["resource"] for node in assigned] == ["v", "w", "trainer/step"]
    assert [[takes[before] for before in node.control] for node in assigned] == [[], [], assigned[:2]]


@pytest.mark.parametrize(
    ("behind", "copied", "gone"),
    [(3, 5, {"a"}), (3, 4, {"a"}), (4, 5, set()), (4, 4, set()), (3, 3, set()), (5, 5, set())],
)
async def test_a_server_counts_no_more_that_is_two_versions_behind_where_its_copy_is_not(
    behind: int, copied: int, gone: set[str]
) -> None:
    """It was silent while another client trained; one version behind is who was told last to apply an update."""
    own, copies = {"a": behind, "b": 5, "c": 5}, {"a": 5, "b": copied, "c": 5}  # by who holds the copy

    async def command(task: str, look: Look) -> tuple[Any, ...]:
        return (own if look.versions == (task,) else copies)[task], (), (0, ())

    runner = SimpleNamespace(keepers=[], lost=frozenset(), suspects=frozenset(), losses={}, command=command)
    trainer: Any = SimpleNamespace(container="", name="trainer")
    session: Any = SimpleNamespace(_open_here=lambda: runner)
    holders = holding.Holders(("a", "b", "c"), {task: {} for task in own}, {task: (task,) for task in own})
    lead: Any = None
    assert await Copies(session, trainer, holders, lead).find_gone() == gone
