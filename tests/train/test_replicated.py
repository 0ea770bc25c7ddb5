"""Replicated training within one process: what is built, what a step keeps, and what is left when it ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.sched.drivers.messages import Seen, Update
from flowrt.train.batches import EARLIER, LONG, TOGETHER
from flowrt.train.steps import Steps

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"x": fr.Spec("float32", (None, 3)), "y": fr.Spec("float32", (None, 1))}
TRUTH = np.array([[1.0], [-2.0], [0.5]], np.float32)
RATE = 0.1


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    b = fr.Variable(np.zeros((1,), np.float32), name="b")
    return fr.mean(fr.square(inputs["x"] @ w + b - inputs["y"])), {"largest": fr.max(inputs["x"])}


def trainer_of(policy: Any = None, *, replicas: int = 3, fn: Any = loss_fn, **more: Any) -> fr.train.Replicated:
    optimizer = more.pop("optimizer", None) or fr.optim.SGD(RATE)
    return fr.train.Replicated(fn, INPUTS, optimizer, replicas, policy, server_device="", worker_device="", **more)


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(8, 3)).astype(np.float32) for _ in range(count)]
    return [{"x": x, "y": x @ TRUTH + 1} for x in xs]


async def reports_of(trainer: fr.train.Replicated, session: fr.Session, source: Any) -> list[fr.train.StepReport]:
    return [report async for report in trainer.steps(session, source)]


async def nothing_left_running() -> bool:
    """Whether what still runs ends by itself: a kernel's thread is waited for, however long it gets no core."""
    gc.collect()
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        _, going = await asyncio.wait(left, timeout=10)
        if going:
            return False
    return True


# ── what it computes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("servers", [1, 2, 3])
async def test_all_of_the_replicas_together_train_as_one_on_the_whole_batch(servers: int) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.AllOf(), servers=servers)
    given = batches(12)
    w, b = np.zeros((3, 1)), np.zeros(1)
    async with fr.Session(graph) as session:
        reports = await reports_of(trainer, session, given)
        got = await session.run(trainer.variables)
    for step, report in enumerate(reports):
        x, y = (np.concatenate([g[name] for g in given[3 * step : 3 * step + 3]]) for name in "xy")
        error = x @ w + b - y
        largest = np.mean([g["x"].max() for g in given[3 * step : 3 * step + 3]])
        assert (report.loss, report.metrics["largest"]) == pytest.approx(((error**2).mean(), largest), rel=1e-4)
        assert (report.step, report.kept, report.late) == (step + 1, (0, 1, 2), ())
        w, b = w - RATE * 2 * x.T @ error / len(x), b - RATE * 2 * error.mean(0)
    assert len(reports) == 4
    np.testing.assert_allclose(got[0], w, rtol=1e-4)
    np.testing.assert_allclose(got[1], b, rtol=1e-4)


async def test_the_first_two_of_three_are_kept_and_the_third_is_late() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2), optimizer=fr.optim.Momentum(0.05, 0.9))
    async with fr.Session(graph) as session:
        reports = await reports_of(trainer, session, batches(400))
        w = await session.run(trainer.variables[0])
    assert all(len(report.kept) == 2 and not report.refused and not report.lost for report in reports)
    assert all(set(report.kept).isdisjoint(report.late) for report in reports)
    np.testing.assert_allclose(w, TRUTH, atol=0.02)
    seen = trainer.statistics()
    assert seen.steps == len(reports)
    assert sum(replica.kept for replica in seen.replicas) == 2 * seen.steps
    assert sum(replica.late for replica in seen.replicas) == sum(len(report.late) for report in reports)
    assert seen.dropped_batches >= sum(replica.late for replica in seen.replicas)
    assert seen.lost == ()


async def test_training_goes_on_where_the_variables_are() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        first = await reports_of(trainer, session, batches(6))
        second = await reports_of(trainer, session, batches(6))
        assert [report.step for report in first + second] == [1, 2, 3, 4]
        assert await session.run(trainer.step) == 4
    assert second[0].loss < first[0].loss


async def test_batches_may_come_asynchronously_and_a_last_round_too_small_is_not_a_step() -> None:
    async def source() -> AsyncIterator[dict[str, np.ndarray]]:
        for batch in batches(8):
            await asyncio.sleep(0)
            yield batch

    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        assert len(await reports_of(trainer, session, source())) == 2
    assert trainer.statistics().dropped_batches == 2
    assert await nothing_left_running()


# ── what does not count ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_waits_for_a_report_draws_until_replicas_have_all_that_they_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(step=LONG)  # each draw takes as long as there is for all at once
    monkeypatch.setattr("flowrt.train.batches.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.AllOf(), replicas=1)
    left = iter(batches(100))
    async with fr.Session(graph) as session:
        steps = trainer.steps(session, left)
        for _ in range(20):
            await anext(steps)
        await steps.aclose()
    assert 100 - len(list(left)) >= 20 + EARLIER + TOGETHER


def poisoned(count: int, every: int) -> Iterator[dict[str, np.ndarray]]:
    for i, batch in enumerate(batches(count)):
        yield {**batch, "y": batch["y"] * np.float32(np.nan)} if i % every == 1 else batch


async def test_an_update_that_is_not_finite_is_refused_and_the_others_count() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2))
    async with fr.Session(graph) as session:
        source = poisoned(9, every=9)
        reports = await reports_of(trainer, session, source)
        assert np.isfinite(await session.run(trainer.variables[0])).all()
    assert 1 not in reports[0].kept
    assert len(reports[0].kept) == 2
    assert trainer.statistics().replicas[1].refused + trainer.statistics().replicas[1].late >= 1


async def test_too_few_finite_updates_stop_training_and_change_nothing() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.AllOf())
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FlowrtError, match=r"not finite \[1\].*lower the learning rate"):
            await reports_of(trainer, session, poisoned(9, every=9))
        assert (await session.run(trainer.variables[0]) == 0).all()
        assert await nothing_left_running()


async def test_what_is_not_finite_on_one_server_moves_nothing_on_another() -> None:
    """Each server is told of its own part alone."""

    def of_two_variables(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        w, b = (fr.Variable(np.ones(3, np.float32), name=name) for name in "wb")
        return fr.sum(w) + fr.sum(b * inputs["y"])

    for poison in (np.nan, np.inf, -np.inf):
        with fr.Graph() as graph:
            trainer = trainer_of(fr.train.AllOf(), fn=of_two_variables, servers=2)
        given = batches(6)
        given[4]["y"] = given[4]["y"] * 0 + np.float32(poison)  # replica 1's, in the second step
        async with fr.Session(graph) as session:
            with pytest.raises(fr.FlowrtError, match=r"not finite \[1\]"):
                await reports_of(trainer, session, given)
            assert await session.run(trainer.step) == 1
            w, b = await session.run(trainer.variables)
        assert (w == np.float32(1 - RATE)).all()
        assert np.isfinite(b).all()


async def test_messages_of_another_run_of_the_trainer_change_nothing() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        task = session._runner.devices[0].host  # type: ignore[union-attr]
        wrong = tuple(np.full(variable.shape, 1e9, np.float32) for variable in trainer.variables)
        reports = []
        async for report in trainer.steps(session, batches(12)):
            for replica in range(3):  # as of this version, and the next
                for version in (report.step, report.step + 1):
                    session._runner.post(task, Update(1, version, replica, 9, wrong, (np.zeros(()),)))  # type: ignore[union-attr]
                    session._runner.post(task, Seen(1, replica, version))  # type: ignore[union-attr]
            reports.append(report)
        (w, _) = await session.run(trainer.variables)
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert np.abs(w).max() < 10


async def endless() -> AsyncIterator[dict[str, np.ndarray]]:
    """One batch, and then none, for ever."""
    yield batches(1)[0]
    await asyncio.Event().wait()


async def test_nodes_take_in_the_plans_of_all_replicas_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(replicas=4)
    async with fr.Session(graph) as session:
        runner, towers, all_there = session._open(), 0, asyncio.Event()
        install = runner.install

        async def install_with_all(plans: Any) -> int:
            nonlocal towers
            towers += 1
            if towers == trainer.replicas:
                all_there.set()
            try:
                async with asyncio.timeout(10):
                    await all_there.wait()
            except TimeoutError:
                raise AssertionError(f"{towers} of 4") from None
            return await install(plans)

        monkeypatch.setattr(runner, "install", install_with_all)
        assert len(await reports_of(trainer, session, batches(8))) == 2


async def test_an_iteration_is_told_when_another_begins_or_the_state_is_reset() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        for end, error in ((lambda: again(trainer, session), fr.ClosedError), (session.reset, fr.StepCancelled)):
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(_error_of(anext(trainer.steps(session, endless()))))
                for _ in range(100):  # the iteration gets to its wait without leaving the loop
                    await asyncio.sleep(0)
                assert session._runner._host.iterations.going == 4  # type: ignore[union-attr]
                await end()
            assert isinstance(waiting.result(), error)
        assert await nothing_left_running()


async def again(trainer: fr.train.Replicated, session: fr.Session) -> None:
    assert len(await reports_of(trainer, session, batches(3))) == 1


async def _error_of(awaitable: Any) -> BaseException | None:
    try:
        await awaitable
    except fr.FlowrtError as error:
        return error
    return None


# ── lost replicas ────────────────────────────────────────────────────────────────────────────────────────────────────


async def losing(
    trainer: fr.train.Replicated, session: fr.Session, source: Any, gone: dict[int, int]
) -> AsyncIterator[fr.train.StepReport]:
    """The reports of a session in which some replicas are lost from a given step on, as if their nodes had died."""
    steps = Steps(trainer, session, 0)
    async for report in steps.run(source):
        yield report
        for replica, step in gone.items():
            if report.step >= step:
                steps._run.lose(replica)


async def test_training_goes_on_without_a_lost_replica_while_the_policy_can_be_met() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2))
    async with fr.Session(graph) as session:
        reports = [report async for report in losing(trainer, session, batches(24), {1: 3})]
    assert reports[-1].step >= 8
    assert all(report.kept == (0, 2) for report in reports[4:])  # an update that was whole counted
    assert trainer.statistics().lost == ("replica 1",)
    assert await nothing_left_running()


async def test_too_many_lost_replicas_stop_training_with_an_error_that_names_them() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2))
    async with fr.Session(graph) as session:
        with pytest.raises(fr.NodeLost, match=r"step [56]: FirstOf.*2 of 3.*2 were lost: replica 0, replica 2"):
            _ = [report async for report in losing(trainer, session, batches(40), {0: 1, 2: 4})]
        assert await session.run(trainer.step) in (4, 5)
        assert await nothing_left_running()


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_breaking_out_leaves_nothing_running() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(1))
    async with fr.Session(graph) as session:
        async for report in trainer.steps(session, batches(1000)):
            if report.step == 3:
                break
        assert await nothing_left_running()
        assert await session.run(trainer.step) == 3


async def test_cancelling_in_mid_step_leaves_nothing_running() -> None:
    entered = asyncio.Event()

    async def source() -> AsyncIterator[dict[str, np.ndarray]]:
        for batch in batches(4):
            yield batch
        await asyncio.Event().wait()

    async def train() -> None:
        async for _ in trainer.steps(session, source()):
            entered.set()

    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train())
            await entered.wait()
            await asyncio.sleep(0)
            training.cancel()
        assert await nothing_left_running()
        assert await session.run(trainer.step) == 1


async def test_closing_the_session_ends_an_iteration() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2))
    async with fr.Session(graph) as session:
        steps = trainer.steps(session, batches(1000))
        await anext(steps)
    with pytest.raises(fr.ClosedError):
        await anext(steps)
    assert await nothing_left_running()


@pytest.mark.parametrize("wrong", [{"x": np.zeros((8, 3), np.float32)}, {"x": 1, "y": 2, "z": 3}, [1, 2]])
async def test_a_batch_with_other_names_is_an_error(wrong: Any) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"a batch is a mapping with \['x', 'y'\]"):
            await reports_of(trainer, session, [wrong])
        assert await nothing_left_running()


async def test_a_batch_of_another_dtype_stops_training_with_the_feed_error() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"expected float32\[\?,3\], got float64\[8,3\]"):
            await reports_of(trainer, session, [{"x": np.zeros((8, 3)), "y": np.zeros((8, 1), np.float32)}] * 3)
        assert await nothing_left_running()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (5, "a source of fr.data, not 5"),
        (batches, "call it, and give what it answers"),
        (batches(1)[0], r"not one with \['x', 'y'\]; write \[batch\]"),
    ],
)
async def test_batches_that_are_none_are_an_error_and_the_session_trains_on(wrong: Any, told: str) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.GraphError, match=told):
            trainer.steps(session, wrong)
        assert len(await reports_of(trainer, session, batches(3))) == 1


@pytest.mark.parametrize("size", [1, 1 << 21])  # a step of the second takes long enough to be computed in lanes
async def test_a_metric_of_several_shapes_in_one_step_is_an_error_that_names_it_and_the_step_counts(size: int) -> None:
    def per_example(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(np.zeros(size, np.float32), name="w")
        each = fr.reshape(inputs["y"], (-1,))
        return fr.mean(fr.square(w)) + fr.mean(each), {"each": each}

    def rows(*counts: int) -> list[dict[str, np.ndarray]]:
        return [{"x": np.ones((n, 3), np.float32), "y": np.ones((n, 1), np.float32)} for n in counts]

    with fr.Graph() as graph:
        trainer = trainer_of(fn=per_example, replicas=2)
    async with fr.Session(graph) as session, asyncio.timeout(60):
        with pytest.raises(fr.SpecError, match=r"the metric 'each' has no mean .*: it is \[2\] and \[3\]; answer one"):
            await reports_of(trainer, session, rows(4, 4, 3, 2))
        assert await nothing_left_running()
        assert [report.step for report in await reports_of(trainer, session, rows(1, 1))] == [3]


async def test_who_begins_to_train_while_another_iteration_begins_ends_that() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(replicas=2)
    async with fr.Session(graph) as session:
        first = asyncio.ensure_future(_error_of(reports_of(trainer, session, endless())))
        for _ in range(20):  # it has begun, and waits for nodes
            await asyncio.sleep(0)
        assert session._iterating
        assert len(await reports_of(trainer, session, batches(4))) == 2
        assert isinstance(await first, fr.ClosedError)
        assert await nothing_left_running()


async def test_a_session_of_another_graph_is_refused() -> None:
    with fr.Graph():
        trainer = trainer_of()
    with fr.Graph() as graph:
        trainer_of()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.GraphError, match="takes a session of the graph that 'replicated' was built in"):
            trainer.steps(session, batches(3))


async def test_batches_that_fail_to_begin_leave_session_and_ledger_as_they_were(tmp_path: Path) -> None:
    class Unreadable:
        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            raise OSError("no such disk")

    with fr.Graph() as graph:
        trainer = trainer_of()
    async with fr.Session(graph) as session:
        for _ in range(2):
            with pytest.raises(OSError, match="no such disk"):
                async for _report in trainer.steps(session, Unreadable(), ledger=tmp_path / "ledger"):
                    pass
        assert [report.step async for report in trainer.steps(session, batches(3), ledger=tmp_path / "ledger")] == [1]


# ── what is built ────────────────────────────────────────────────────────────────────────────────────────────────────


def big_and_small(inputs: dict[str, fr.Tensor]) -> Any:
    with fr.name_scope("layer"):
        a = fr.Variable(np.zeros((3, 10), np.float32), name="a")
    b = fr.Variable(np.zeros((10, 1), np.float32), name="b")
    c = fr.Variable(np.zeros((1,), np.float32), name="c")
    return fr.mean(fr.square(inputs["x"] @ a @ b + c - inputs["y"]))


def test_variables_are_created_once_and_go_to_the_server_with_the_fewest_bytes() -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(big_and_small, INPUTS, fr.optim.Momentum(0.1, 0.9), replicas=2, servers=2)
    assert [(v.name, v.device) for v in trainer.variables] == [
        ("layer/a", "/job:ps/task:0"),
        ("b", "/job:ps/task:1"),
        ("c", "/job:ps/task:1"),
    ]
    assert {v.name for v in graph.variables} == {
        *("layer/a", "b", "c"),
        *("layer/a/momentum", "b/momentum", "c/momentum"),
        *("replicated/step", "replicated/step_1"),
    }
    assert trainer.nodes == ("/job:worker/task:0", "/job:worker/task:1")
    assert trainer.servers == ("/job:ps/task:0", "/job:ps/task:1")
    towers = [n for n in graph.nodes if n.name.startswith("replicated/replica_1/") and n.op.name == "square"]
    assert [str(n.device) for n in towers] == ["/job:worker/task:1"]


def copies_that_differ(*second: Any) -> Any:
    """A model whose second copy asks for the variables ``second`` rather than one float32[2] named 'w'."""
    asked = iter([[("w", np.zeros(2, "f4"), True)], second])

    def build(inputs: dict[str, fr.Tensor]) -> Any:
        made = [fr.Variable(value, name=name, trainable=trainable) for name, value, trainable in next(asked)]
        return fr.sum(made[0]) if made else fr.mean(inputs["x"])

    return build


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((("other", np.zeros(2, "f4"), True),), r"'other' float32\[2\] where the first copy created 'w' float32\[2\]"),
        ((("w", np.zeros(3, "f4"), True),), r"'w' float32\[3\] where the first copy created 'w' float32\[2\]"),
        ((("w", np.zeros(2, "f4"), False),), r"'w' float32\[2\] \(not trainable\) where"),
        ((("w", np.zeros(2, "f4"), True), ("u", np.zeros(1, "f4"), True)), r"'u' float32\[1\], after the 1 that"),
        ((), r"replica 1 of 'replicated' asked for 0 of the 1 variables.* next is 'w' float32\[2\]"),
    ],
)
def test_copies_that_differ_are_an_error_that_names_both(second: Any, message: str) -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match=message):
        trainer_of(fn=copies_that_differ(*second))


@pytest.mark.parametrize(
    "answer",
    [lambda inputs, w: inputs["x"] @ w, lambda inputs, w: fr.argmax(inputs["x"]), lambda inputs, w: None],
    ids=["matrix", "integer", "nothing"],
)
def test_a_loss_that_is_not_a_float_scalar_is_an_error_with_the_fix(answer: Any) -> None:
    def fn(inputs: dict[str, fr.Tensor]) -> Any:
        return answer(inputs, fr.Variable(np.zeros((3, 1), np.float32), name="w"))

    with fr.Graph(), pytest.raises(fr.SpecError, match=r"loss must be a float scalar, as fr\.mean"):
        trainer_of(fn=fn)


def test_inputs_and_metrics_that_are_none_are_an_error_that_says_what_they_are() -> None:
    def wrong_name(inputs: dict[str, fr.Tensor]) -> Any:
        return fr.sum(inputs["X"])

    with fr.Graph(), pytest.raises(fr.GraphError, match="there is no input 'X'; inputs= names 'x', 'y'"):
        trainer_of(fn=wrong_name)
    with fr.Graph(), pytest.raises(fr.SpecError, match=r"the metrics of replica 0 .* are \{name: metric\}, not 5"):
        trainer_of(fn=lambda inputs: (loss_fn(inputs)[0], 5))
    listed: Any = ["x", "y"]
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"inputs maps names to fr\.Spec.* not \['x', 'y'\]"):
        fr.train.Replicated(loss_fn, listed, fr.optim.SGD(RATE), 2)
    with fr.Graph():
        trainer = trainer_of()
        with pytest.raises(fr.GraphError, match="there is no input 'X'"):
            trainer.share(wrong_name, {"x": INPUTS["x"]})
        with pytest.raises(fr.GraphError, match="inputs maps names"):
            trainer.share(predict_fn, {"x": wrong_name})  # type: ignore[dict-item]


@pytest.mark.parametrize("where", ["/job:worker/task:{x}", "/job:worker/task:{}{}", "/job:{", None, 3])
def test_devices_that_are_none_are_an_error_that_says_what_is_meant(where: Any) -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match="does not say where 3 copies are; write their devices, or one"):
        fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=3, worker_device=where)


def test_an_optimizer_that_is_a_class_is_an_error() -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"optimizer is an instance, such as fr.optim.SGD\(0.1\)"):
        fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD, replicas=3)  # type: ignore[arg-type]


def test_a_policy_that_the_replicas_cannot_meet_is_an_error() -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"FirstOf\(4\) of 3 replicas can never be met"):
        trainer_of(fr.train.FirstOf(4))
    with fr.Graph(), pytest.raises(fr.GraphError, match="is not a policy"):
        trainer_of("all")
    with pytest.raises(fr.GraphError, match="needs a graph"):
        trainer_of()


# ── shared functions ─────────────────────────────────────────────────────────────────────────────────────────────────


def predict_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    return {"y": inputs["x"] @ w}


async def test_a_shared_function_sees_the_trained_variables() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.FirstOf(2))
        predict = trainer.share(predict_fn, {"x": INPUTS["x"]})
    assert len([v for v in graph.variables if v.name == "w"]) == 1
    async with fr.Session(graph) as session:
        await reports_of(trainer, session, batches(60))
        w = await session.run(trainer.variables[0])
        x = batches(1, seed=1)[0]["x"]
        for answer in (await predict(session, {"x": x}), await predict(session, x=x)):
            np.testing.assert_allclose(answer["y"], x @ w, rtol=1e-5)
        with pytest.raises(fr.FeedError, match=r"is a mapping with \['x'\], got \['z'\]"):
            await predict(session, z=x)


def test_a_shared_function_cannot_bring_variables_of_its_own() -> None:
    with fr.Graph():
        trainer = trainer_of()
        with pytest.raises(fr.GraphError, match=r"the shared function .*'more' .*, after the 2 that"):
            trainer.share(lambda inputs: loss_fn(inputs)[0] + fr.Variable(0.0, name="more"), INPUTS)
