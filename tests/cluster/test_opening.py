"""Sessions that open while some nodes do not answer: they wait for those that they need, for others not for long."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_plans import PS, WORKERS
from process_world import until_lost
from sim_loop import simulate

import flowrt as fr
from flowrt.base.device import Device
from flowrt.base.errors import NodeLost
from flowrt.cluster.cluster import LocalCluster
from flowrt.net.master.master import Master
from flowrt.net.master.meeting import LEAST, TIMES, Meetings
from flowrt.net.wire.messages import Register
from flowrt.passes.needs import can_do_without
from flowrt.session import cluster_runner
from flowrt.session.cluster_runner import ClusterRunner

if TYPE_CHECKING:
    from pathlib import Path

SERVERS = PS, "/job:ps/task:1"
INPUTS = {"x": fr.Spec("float32", (None, 3))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    return fr.sum(fr.Variable(np.zeros((3,), np.float32), name="w") * fr.mean(inputs["x"], axis=0))


def batches() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones((2, 3), np.float32)}


def training(policy: Any, replicas: Any = 3, **how: Any) -> tuple[fr.Graph, Any]:
    with fr.Graph() as graph:
        return graph, fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=replicas, policy=policy, **how)


@asynccontextmanager
async def stopped(cluster: LocalCluster, *tasks: str) -> AsyncIterator[None]:
    """Nodes that stand still while the block runs."""
    processes = [cluster.processes[task] for task in tasks]
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is needed is waited for longer than any test takes."""
    monkeypatch.setitem(Master.__init__.__kwdefaults__, "patience", 1000.0)


async def test_a_session_opens_soon_without_a_stopped_node_that_training_can_do_without(patient: None) -> None:
    graph, trainer = training(fr.train.FirstOf(2))
    async with (
        LocalCluster(ps=1, worker=3) as cluster,
        stopped(cluster, WORKERS[1]),
        asyncio.timeout(40),
        fr.Session(graph, cluster=cluster) as session,
    ):
        assert session.lost == {WORKERS[1]}
        steps = trainer.steps(session, batches())
        assert [(await anext(steps)).kept for _ in range(3)] == [(0, 2)] * 3
        cluster.processes[WORKERS[1]].send_signal(signal.SIGCONT)
        async for report in steps:
            if 1 in report.kept:
                break
        await steps.aclose()


@pytest.mark.parametrize(("servers", "restored"), [(2, False), (3, True)])
async def test_a_session_opens_soon_without_a_server_whose_variables_another_holds(
    servers: int, restored: bool, patient: None, tmp_path: Path
) -> None:
    async with LocalCluster(ps=servers, worker=2) as cluster, asyncio.timeout(60):
        for number in range(4):
            graph, trainer = training(None, 2, servers=servers, copies=2)
            checkpoints = fr.Checkpoints(tmp_path) if restored else None
            async with fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session:
                lost = [PS] if number in (1, 2) else []
                await until_lost(session._open_here(), *lost)  # of a busy machine others may come later, too
                (value,) = await session.run(trainer.variables)
                assert value.tolist() == [-2.0 * number] * 3, "read, or restored, where another has it"
                steps = trainer.steps(session, batches())
                assert [(await anext(steps)).rolled_back for _ in range(2)] == [None] * 2
                await steps.aclose()
                if restored:
                    await session.save()
            if number == 0:
                cluster.processes[PS].kill()
                await cluster.processes[PS].wait()
            elif number == 2:
                await cluster.respawn(PS)


async def test_where_nobody_has_anything_a_server_is_waited_for_that_may_have_all(patient: None) -> None:
    graph, trainer = training(None, 2, servers=2, copies=2)
    with graph:
        assigned = trainer.variables[0].assign([1.0, 2.0, 3.0])
    async with LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        async with fr.Session(graph, cluster=cluster) as session:
            await session.run(assigned)
        cluster.processes[SERVERS[1]].kill()
        await cluster.processes[SERVERS[1]].wait()
        await cluster.respawn(SERVERS[1])
        async with stopped(cluster, PS):
            opening = asyncio.ensure_future(fr.Session(graph, cluster=cluster).__aenter__())
            done, _ = await asyncio.wait([opening], timeout=2 * LEAST)
            assert not done
        session = await opening
        assert (await session.run(trainer.variables[0])).tolist() == [1.0, 2.0, 3.0]
        await session.__aexit__(None, None, None)


async def test_a_stopped_node_that_is_needed_is_waited_for_until_it_goes_on(patient: None) -> None:
    graph, _ = training(fr.train.AllOf(), 2)
    async with LocalCluster(ps=1, worker=2) as cluster, asyncio.timeout(40):
        session = fr.Session(graph, cluster=cluster)
        async with stopped(cluster, WORKERS[1]):
            opening = asyncio.ensure_future(session.__aenter__())
            done, _ = await asyncio.wait([opening], timeout=2 * LEAST)
            assert not done
        await opening
        assert session.lost == frozenset()
        await session.__aexit__(None, None, None)


@pytest.mark.parametrize("restored", [False, True], ids=["new", "restored"])
async def test_a_server_that_dies_just_as_a_session_opens_is_waited_for_and_given_its_values(
    restored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, trainer = training(fr.train.AllOf(), 1)
    ask, killed = ClusterRunner.inventory, list[Any]()

    async def lose_it_then_ask(runner: ClusterRunner, wanted: Any = None) -> Any:
        if not killed:
            killed.append(cluster.processes[PS])
            killed[0].kill()
            while not runner.lost:
                await runner.wait_changed(runner.lost, runner.suspects)
            raise runner.why_lost(PS)
        return await ask(runner, wanted)

    async with LocalCluster(ps=1, worker=1, restart=True) as cluster, asyncio.timeout(40):
        if restored:
            async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
                steps = trainer.steps(session, batches())
                await anext(steps)
                await steps.aclose()
                await session.save()
            graph, trainer = training(fr.train.AllOf(), 1)
        monkeypatch.setattr(ClusterRunner, "inventory", lose_it_then_ask)
        async with fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session:
            assert killed
            assert (await session.run(trainer.variables[0])).tolist() == [-1.0 * restored] * 3


@pytest.mark.parametrize("victim", [PS, WORKERS[1]])
async def test_a_node_that_dies_just_as_a_session_opens_is_not_waited_for_where_it_can_be_done_without(
    victim: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, killed = ClusterRunner.inventory, list[Any]()

    async def lose_it_then_ask(runner: ClusterRunner, wanted: Any = None) -> Any:
        if not killed:
            killed.append(cluster.processes[victim])
            killed[0].kill()
            while not runner.lost:
                await runner.wait_changed(runner.lost, runner.suspects)
            raise runner.why_lost(victim)
        return await ask(runner, wanted)

    monkeypatch.setattr(cluster_runner, "PATIENCE", 1000.0)
    graph, trainer = training(fr.train.FirstOf(1), 2, servers=2, copies=2)
    async with LocalCluster(ps=2, worker=2) as cluster, asyncio.timeout(60):
        for opened in range(2):
            async with fr.Session(graph, cluster=cluster) as session:
                assert (await session.run(trainer.variables[0])).tolist() == [-1.0 * opened] * 3
                steps = trainer.steps(session, batches())
                assert (await anext(steps)).step == opened + 1
                await steps.aclose()
            monkeypatch.setattr(ClusterRunner, "inventory", lose_it_then_ask)
        assert killed


# ── who is waited for, in virtual time ───────────────────────────────────────────────────────────────────────────────


def meet(
    answers: dict[str, tuple[float, float]], needed: frozenset[str] = frozenset(), patience: float = 5.0
) -> tuple[float, dict[str, NodeLost]]:
    """When tasks were met that answer, and are there, after so many seconds, and who was not."""

    async def run() -> tuple[float, dict[str, NodeLost]]:
        meetings = Meetings(dict.fromkeys(answers, ("localhost", 1)), needed.isdisjoint)

        async def one(task: str) -> NodeLost | None:
            first, then = answers[task]
            await asyncio.sleep(min(first, patience))
            if first > patience:
                return NodeLost(f"{task} is not there")
            meetings.answered(task)
            await asyncio.sleep(then)
            return None

        absent = await meetings.held(one)
        return asyncio.get_running_loop().time(), absent

    return simulate(random.Random(0), run)


def test_who_does_not_answer_is_waited_for_as_others_took_three_times_over() -> None:
    quick, slow, never = (0.01, 0.01), (0.9, 0.1), (99.0, 0.0)
    when, absent = meet({PS: quick, WORKERS[0]: quick, WORKERS[1]: never})
    assert when == pytest.approx(LEAST, abs=1e-3)
    assert "did not answer within 0.5 s" in str(absent[WORKERS[1]])
    when, absent = meet({PS: quick, WORKERS[0]: slow, WORKERS[1]: never})
    assert (when, [*absent]) == (pytest.approx(TIMES * 1.0, abs=1e-3), [WORKERS[1]])
    when, absent = meet({PS: quick, WORKERS[0]: slow, WORKERS[1]: (2.5, 0.1)})
    assert (when, [*absent]) == (pytest.approx(2.6, abs=1e-3), [])


def test_who_answers_is_waited_for_however_busy_and_so_is_who_is_needed_or_the_only_one_of_its_job() -> None:
    quick, busy, never = (0.01, 0.01), (0.01, 4.0), (99.0, 0.0)
    assert meet({PS: quick, WORKERS[0]: quick, WORKERS[1]: busy}) == (pytest.approx(4.01, abs=1e-3), {})
    for answers, needed in (
        ({PS: quick, WORKERS[0]: quick, WORKERS[1]: never}, frozenset({WORKERS[1]})),
        ({PS: never, WORKERS[0]: quick, WORKERS[1]: quick}, frozenset()),
    ):
        when, absent = meet(answers, needed)
        assert when == pytest.approx(5.0, abs=1e-3)
        assert [str(why) for why in absent.values()] == [f"{next(iter(absent))} is not there"]


def devices(*tasks: str) -> list[Device]:
    return [Device.parse(f"{task}/device:cpu:0") for task in tasks]


def test_a_graph_can_do_without_nodes_that_it_does_not_name_and_without_replicas_beyond_those_that_are_enough() -> None:
    there = devices(PS, WORKERS[0])
    with fr.Graph() as plain:
        fr.constant(1.0)
    assert can_do_without(plain, (), {WORKERS[1]}, there)
    assert not can_do_without(plain, [WORKERS[1]], {WORKERS[1]}, there)
    with fr.Graph() as naming, fr.device(WORKERS[1]):
        fr.constant(1.0)
    assert not can_do_without(naming, (), {WORKERS[1]}, there)
    with fr.Graph() as on_a_gpu, fr.device("/job:worker/device:cuda"):
        fr.constant(1.0)
    assert not can_do_without(on_a_gpu, (), {WORKERS[1]}, there)
    graph, _ = training(fr.train.FirstOf(1), 2)
    assert can_do_without(graph, (), {WORKERS[1]}, there)
    assert not can_do_without(graph, (), {PS}, devices(*WORKERS[:2])), "its variables lie there"
    assert not can_do_without(training(fr.train.AllOf(), 2)[0], (), {WORKERS[1]}, there)
    assert can_do_without(training(fr.train.AllOf(), (1, 2))[0], (), {WORKERS[1]}, there)
    twice, _ = training(None, 2, servers=2, copies=2)
    assert can_do_without(twice, (), {PS}, devices(SERVERS[1], *WORKERS))
    assert not can_do_without(twice, [PS], {PS}, devices(SERVERS[1], *WORKERS))
    assert not can_do_without(twice, (), set(SERVERS), devices(*WORKERS))
    with twice, fr.device(PS):
        fr.Variable(1.0, name="alone")
    assert not can_do_without(twice, (), {PS}, devices(SERVERS[1], *WORKERS)), "nobody has that, too"
    with fr.Graph() as both:
        fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(1.0), replicas=2, policy=fr.train.FirstOf(1))
        with fr.device(WORKERS[1]):
            fr.constant(1.0)
    assert not can_do_without(both, (), {WORKERS[1]}, there), "something else is to run there"


async def test_a_node_that_has_a_step_and_is_restarted_before_others_have_it_has_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered, ask = asyncio.Event(), Master._ask

    async def noted(self: Master, task: str, message: Any) -> Any:
        answer = await ask(self, task, message)
        if task == PS and isinstance(message, Register):
            registered.set()
        return answer

    monkeypatch.setattr(Master, "_ask", noted)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        made = []
        for server in SERVERS:
            with fr.device(server):
                made.append(fr.exp(x))
    async with fr.LocalCluster(ps=2) as cluster, fr.Session(graph, cluster=cluster) as session, asyncio.timeout(30):
        async with stopped(cluster, SERVERS[1]):
            running = asyncio.ensure_future(session.run(made, {x: np.zeros(3, np.float32)}))
            await registered.wait()
            cluster.processes[PS].kill()
            await cluster.processes[PS].wait()
            await cluster.respawn(PS)
            runner = session._open_here()
            while PS in runner.lost or PS not in runner.losses:
                await runner.wait_changed(runner.lost, runner.suspects)
        np.testing.assert_array_equal(await running, np.ones((2, 3)))


async def test_a_session_opens_without_the_replica_whose_model_says_what_variables_start_from() -> None:
    def drawing(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(fr.random.normal((3,), seed=1) * 2, name="w")
        return fr.sum(w * fr.mean(inputs["x"], axis=0))

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(drawing, INPUTS, fr.optim.SGD(1.0), replicas=(1, 2))
    async with fr.LocalCluster(ps=1, worker=2) as cluster:
        cluster.processes[WORKERS[0]].kill()
        await cluster.processes[WORKERS[0]].wait()
        async with fr.Session(graph, cluster=cluster) as session, aclosing(trainer.steps(session, batches())) as steps:
            assert (await anext(steps)).kept == (1,)


async def test_initial_values_are_the_same_whether_others_are_there_already() -> None:
    with fr.Graph(seed=4) as graph:
        with fr.device(PS):
            a = fr.Variable(fr.random.normal((3,)), name="a")
        with fr.device(SERVERS[1]):
            b = fr.Variable(a.read() + fr.random.normal((3,)), name="b")
    async with fr.LocalCluster(ps=2) as cluster:
        async with fr.Session(graph, cluster=cluster) as session:
            first = await session.run([a, b])
        cluster.processes[SERVERS[1]].kill()
        await cluster.processes[SERVERS[1]].wait()
        await cluster.respawn(SERVERS[1])
        async with fr.Session(graph, cluster=cluster) as session:
            np.testing.assert_array_equal(await session.run([a, b]), first)
