"""Replicated training on processes: servers share the variables, nobody waits for the slow, the dead are named."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base import codec
from flowrt.net.master.peers import Peers
from flowrt.net.wire.messages import Command, from_data
from flowrt.train.enough import Late, explained

if TYPE_CHECKING:
    from flowrt.net.peer import Peer

INPUTS = {"x": fr.Spec("float32", (None, 3)), "y": fr.Spec("float32", (None, 1))}
TRUTH = np.array([[1.0], [-2.0], [0.5]], np.float32)


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    b = fr.Variable(np.zeros((1,), np.float32), name="b")
    return fr.mean(fr.square(inputs["x"] @ w + b - inputs["y"]))


def predict_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    return inputs["x"] @ w + fr.Variable(np.zeros((1,), np.float32), name="b")


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(8, 3)).astype(np.float32)
        yield {"x": x, "y": x @ TRUTH + 1}


async def some(steps: Any, count: int) -> list[fr.train.StepReport]:
    return [await anext(steps) for _ in range(count)]


async def kill(cluster: fr.LocalCluster, task: str) -> None:
    cluster.processes[task].kill()
    await cluster.processes[task].wait()


async def test_the_slow_are_not_waited_for_and_the_dead_are_named() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=4, policy=fr.train.FirstOf(2))
        predict = trainer.share(predict_fn, {"x": INPUTS["x"]})
    slow, first, second = (f"/job:worker/task:{i}" for i in (3, 0, 2))
    async with (
        fr.LocalCluster(ps=1, worker=4, delays={slow: "30"}) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, batches())
        reports = await some(steps, 20)
        assert all(len(report.kept) == 2 and 3 not in report.kept for report in reports)
        assert any(3 in report.late for report in reports)

        await kill(cluster, first)
        reports = await some(steps, 30)
        assert reports[-1].kept == (1, 2)
        async with asyncio.timeout(10):
            while trainer.statistics().lost != (first,):  # steps may be reported before the client hears of it
                await some(steps, 1)
        answer = await predict(session, x=np.eye(3, dtype=np.float32))
        np.testing.assert_allclose(answer, TRUTH + 1, atol=0.3)

        await kill(cluster, second)
        cluster.processes[slow].kill()
        with pytest.raises(fr.NodeLost, match=rf"training stopped at step .*{first}.*{second}"):
            async with asyncio.timeout(10):
                await some(steps, 100)
        with pytest.raises(fr.NodeLost, match=f"training cannot begin: .*needs 2 of 4 replicas.*{first}, {second}"):
            await some(trainer.steps(session, batches()), 1)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ([1], "at step 5: version 4 needs 2 updates; replica 0: out of memory"),
        ([1, 2], "at step 5: .* needs 2 of 3 replicas, and 2 were lost: /job:worker/task:1, /job:worker/task:2"),
    ],
)
def test_lost_nodes_are_told_where_they_are_why_training_stopped_and_else_all_that_is(
    gone: list[int], says: str
) -> None:
    nodes = [f"/job:worker/task:{n}" for n in range(3)]
    trainer: Any = SimpleNamespace(policy=fr.train.FirstOf(2), replicas=3, least=2, nodes=nodes)
    told = fr.NodeLost("version 4 needs 2 updates; replica 0: out of memory")
    assert re.fullmatch(f"training stopped {says}", str(explained(trainer, told, gone, 4)))


def test_a_run_is_begun_anew_once_where_who_is_back_counts_for_the_next_version_and_others_are_silent() -> None:
    nobody: frozenset[str] = frozenset()
    trainer = SimpleNamespace(nodes=["a", "b", "c"], replicas=3, least=2, floor=0)
    runner, told = SimpleNamespace(lost=nobody, suspects=nobody, leaving=nobody), list[BaseException]()
    late = Late(trainer, runner, told.append)  # type: ignore[arg-type]
    late.note(0, 5)
    late.note(2, 5)  # only b is left for that version, which may have had what was whole of those that are back
    runner.suspects = runner.leaving = frozenset({"b"})  # it ends in order, with its update
    late.look(5)
    assert not told
    runner.leaving = nobody
    late.look(4)
    late.look(6)
    assert not told
    late.look(5)
    late.look(5)
    assert told == [late.why]


async def test_a_model_that_writes_what_lies_on_a_server_is_told_what_to_do() -> None:
    def normalised(inputs: dict[str, fr.Tensor]) -> Any:
        seen = fr.Variable(np.zeros((3,), np.float32), name="seen", trainable=False)
        mean = fr.mean(inputs["x"], axis=0)
        with fr.control_dependencies([seen.assign(0.9 * seen + 0.1 * mean)]):
            return loss_fn({**inputs, "x": inputs["x"] - mean})

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(normalised, INPUTS, fr.optim.SGD(0.1), replicas=1)
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        with pytest.raises(fr.GraphError, match=r"'seen.*\(.*test_r.*, which lies on /job:ps/task:0; .* a metric"):
            await some(trainer.steps(session, batches()), 1)


async def test_two_servers_apply_one_set_of_updates_to_their_halves() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=2, servers=2)
    assert [variable.device for variable in trainer.variables] == ["/job:ps/task:0", "/job:ps/task:1"]
    source, w, b = batches(), np.zeros((3, 1)), np.zeros(1)
    for _ in range(5):
        pair = next(source), next(source)
        x, y = (np.concatenate([batch[name] for batch in pair]) for name in "xy")
        error = x @ w + b - y
        w, b = w - 0.2 * x.T @ error / len(x), b - 0.2 * error.mean(0)
    async with fr.LocalCluster(ps=2, worker=2) as cluster:
        async with fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            await some(steps, 5)
            await steps.aclose()
        async with fr.Session(graph, cluster=cluster) as later:
            assert await later.run(trainer.step) == 5
            got = await later.run(trainer.variables)
    np.testing.assert_allclose(got[0], w, rtol=1e-4)
    np.testing.assert_allclose(got[1], b, rtol=1e-4)


def countdown(inputs: dict[str, fr.Tensor]) -> Any:
    """A loss whose every step, at a rate of 1, takes 1 off each of two variables."""
    a, b = (fr.Variable(np.zeros((), np.float32), name=name) for name in "ab")
    return a + b + 0.0 * fr.mean(inputs["x"])


async def test_a_step_that_is_left_in_progress_is_applied_by_all_servers_or_by_none() -> None:
    seed = int(os.environ.get("FLOWRT_SEED", 1122))
    print(f"seed {seed}")
    rng = random.Random(seed)
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2)
    assert {variable.device for variable in trainer.variables} == {"/job:ps/task:0", "/job:ps/task:1"}
    async with (
        fr.LocalCluster(ps=2, worker=2, delays={"/job:worker/task:0": "exponential:0.002"}) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        for _ in range(40):
            steps = trainer.steps(session, batches())
            await anext(steps)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 0.05)):
                    await some(steps, 100)
            step, (a, b) = await session.run([trainer.step, trainer.variables])
            assert (a, b) == (-step, -step)


async def test_a_replica_whose_connection_breaks_trains_on() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2)
    async with (
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, batches())
        for number in range(12):
            (report,) = await some(steps, 1)
            assert report.kept == (0, 1)
            if number % 3 == 0:
                session._runner._master.peers["/job:worker/task:0"].control.cut()  # type: ignore[union-attr]
        await steps.aclose()
        assert trainer.statistics().lost == ()
        step, (a, b) = await session.run([trainer.step, trainer.variables])
        assert step >= 12
        assert (a, b) == (-step, -step)
        assert session.lost == frozenset()


async def test_a_run_begins_and_ends_though_the_way_breaks_at_each_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say, cut = Peers.say, set[tuple[str, str]]()

    async def say_and_cut(peers: Peers, peer: Peer, message: Any, *args: Any) -> bool:
        said = await say(peers, peer, message, *args)
        if isinstance(message, Command):
            asked = type(from_data(codec.unpack(message.data.data))).__name__
            if (peer.task, asked) not in cut:
                cut.add((peer.task, asked))
                peer.control.cut()
        return said

    monkeypatch.setattr(Peers, "say", say_and_cut)
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2)
    async with (
        fr.LocalCluster(ps=2, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(30),
    ):
        steps = trainer.steps(session, batches())
        assert [report.kept for report in await some(steps, 3)] == [(0, 1)] * 3
        await steps.aclose()
        step, (a, b) = await session.run([trainer.step, trainer.variables])
        assert (a, b) == (-step, -step)
        assert session.lost == frozenset()
    assert {asked for _, asked in cut} == {"Look", "BeginServer", "BeginReplica", "Stop"}


@pytest.mark.parametrize("servers", [1, 2])
async def test_without_checkpoints_a_lost_server_ends_training_with_an_error_that_names_it(servers: int) -> None:
    one, last = fr.train.FirstOf(1), f"/job:ps/task:{servers - 1}"
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=2, policy=one, servers=servers)
    async with (
        fr.LocalCluster(ps=servers, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, batches())
        await some(steps, 2)
        await kill(cluster, last)
        what = f"training stopped at step .*: lost the parameter servers {last}: .*; with fr.Checkpoints of"
        with pytest.raises(fr.NodeLost, match=what):
            async with asyncio.timeout(30):
                await some(steps, 10_000)
        with pytest.raises(fr.NodeLost, match=f"training cannot begin: lost the parameter servers {last}"):
            await some(trainer.steps(session, batches()), 1)


async def test_a_second_client_is_refused_by_the_first_ones_name_and_may_train_when_that_one_has_ended() -> None:
    graphs, trainers = [], []
    for _ in range(2):
        with fr.Graph() as graph:
            trainers.append(fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2, servers=2))
            graphs.append(graph)
    async with fr.LocalCluster(ps=2, worker=2) as cluster, fr.Session(graphs[1], cluster=cluster) as second:
        async with fr.Session(graphs[0], cluster=cluster, name="the first") as first:
            steps = trainers[0].steps(first, batches())
            await some(steps, 2)
            with pytest.raises(fr.RemoteError, match=r"being trained by session 'the first', process \d+"):
                await anext(trainers[1].steps(second, batches()))
            assert [report.step for report in await some(steps, 2)] == [3, 4]
        steps = trainers[1].steps(second, batches())
        assert [report.step for report in await some(steps, 2)] == [5, 6]
        await steps.aclose()
        step, (a, b) = await second.run([trainers[1].step, trainers[1].variables])
        assert (step, a, b) == (6, -6, -6)


async def test_steps_ahead_are_made_while_the_loops_body_is_slow() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2)
    async with fr.LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        steps = trainer.steps(session, batches(), ahead=4)
        assert (await anext(steps)).step == 1
        async with asyncio.timeout(10):
            while (await session.run(trainer.step)) < 5:
                pass
        assert [report.step for report in await some(steps, 3)] == [2, 3, 4]
        await steps.aclose()
        step, (a, b) = await session.run([trainer.step, trainer.variables])
        assert 4 <= step <= 8
        assert (a, b) == (-step, -step)


async def test_a_model_of_more_variables_than_a_message_holds_values_trains() -> None:
    def many(inputs: dict[str, fr.Tensor]) -> Any:
        found = [fr.Variable(np.zeros((), np.float32), name=f"v{i}") for i in range(600)]
        return fr.add_n(found) + 0.0 * fr.mean(inputs["x"])

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(many, INPUTS, fr.optim.SGD(1.0), replicas=4)
    async with fr.LocalCluster(ps=1, worker=4) as cluster, fr.Session(graph, cluster=cluster) as session:
        steps = trainer.steps(session, batches())
        await some(steps, 3)
        await steps.aclose()
        assert {float(value) for value in await session.run(trainer.variables)} == {-3.0}


async def test_who_is_taken_over_while_training_is_told_so() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(countdown, INPUTS, fr.optim.SGD(1.0), replicas=2)
    with fr.Graph() as other:
        fr.Variable(np.zeros(()), name="other")
    async with (
        asyncio.timeout(40),
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(graph, cluster=cluster, name="me") as session,
    ):
        steps = trainer.steps(session, batches())
        await some(steps, 2)
        async with fr.Session(other, cluster=cluster, name="me"):
            with pytest.raises(fr.FlowrtError, match="another one took its nodes over"):
                await some(steps, 100)


async def test_a_server_waits_for_what_it_needs_of_another_to_move_its_variables() -> None:
    with fr.Graph() as graph:
        with fr.device("/job:ps/task:0"):
            rate = fr.Variable(np.float32(0.1), name="rate", trainable=False)
            lower = rate.assign(rate * 0.5)
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(rate), replicas=2, servers=2)
    given, w, b = list(itertools.islice(batches(), 24)), np.zeros((3, 1)), np.zeros(1)
    async with fr.LocalCluster(ps=2, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        steps = trainer.steps(session, given)
        for step in range(12):
            assert (await anext(steps)).step == step + 1
            if step == 5:
                await session.run(lower)
            x, y = (np.concatenate([one[name] for one in given[2 * step : 2 * step + 2]]) for name in "xy")
            error, by = x @ w + b - y, 0.1 if step <= 5 else 0.05
            w, b = w - by * 2 * x.T @ error / len(x), b - by * 2 * error.mean(0)
        found = await session.run(trainer.variables)
    np.testing.assert_allclose(found[0], w, rtol=1e-4)
    np.testing.assert_allclose(found[1], b, rtol=1e-4)
