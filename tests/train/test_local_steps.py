"""Local steps: several on each replica between two versions, against the same in NumPy; in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"x": fr.Spec("float32", (None, 3)), "y": fr.Spec("float32", (None, 1))}
TRUTH = np.array([[1.0], [-2.0], [0.5]], np.float32)
RATE, MOMENTUM = 0.05, 0.9
Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    b = fr.Variable(np.zeros((1,), np.float32), name="b")
    return fr.mean(fr.square(inputs["x"] @ w + b - inputs["y"])), {"largest": fr.max(inputs["x"])}


def batches(count: int, sizes: Sequence[int] = (8,), seed: int = 0) -> list[Batch]:
    """So many batches; the i-th has as many samples as ``sizes`` says, around and around."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(sizes[i % len(sizes)], 3)).astype(np.float32) for i in range(count)]
    return [{"x": x, "y": x @ TRUTH + 1} for x in xs]


def trainer_of(policy: Any, replicas: int, *, fn: Any = loss_fn, inputs: Any = INPUTS, **more: Any) -> Any:
    optimizer = more.pop("optimizer", None) or fr.optim.Momentum(RATE, MOMENTUM)
    return fr.train.Replicated(fn, inputs, optimizer, replicas, policy, server_device="", worker_device="", **more)


async def trained(trainer: Any, graph: fr.Graph, given: Any) -> tuple[list[fr.train.StepReport], list[Array]]:
    async with fr.Session(graph) as session:
        reports = [report async for report in trainer.steps(session, given)]
        return reports, await session.run(trainer.variables)


class DiLoCo:
    """Algorithm 1 of the paper on the linear model: momentum inside, Nesterov's outside, weights by samples.

    With an ``overlap`` so many steps of a round go on from where the one before ended, before they are moved to theta.
    """

    def __init__(self, replicas: int, outer: tuple[float, float] = (0.7, 0.9), overlap: int = 0) -> None:
        self.rate, self.momentum = outer
        self.overlap = overlap
        self.ended: list[list[Array]] = []  # where each replica did
        self.theta = [np.zeros((3, 1)), np.zeros(1)]
        self.outer = [np.zeros((3, 1)), np.zeros(1)]
        self.inner = [[np.zeros((3, 1)), np.zeros(1)] for _ in range(replicas)]

    def round(self, given: Sequence[Sequence[Batch]], kept: Sequence[int] | None = None) -> float:
        """One round, each replica with its batches; the mean loss."""
        differences, losses, samples, ended = [], [], [], []
        for replica, mine in enumerate(given):
            begun = self.ended[replica] if self.overlap and self.ended else self.theta
            local = [value.copy() for value in begun]
            for step, batch in enumerate(mine):
                if step == self.overlap:
                    local = [here + new - old for here, new, old in zip(local, self.theta, begun, strict=True)]
                error = batch["x"] @ local[0] + local[1] - batch["y"]
                losses.append((error**2).mean())
                gradients = [2 * batch["x"].T @ error / len(error), 2 * error.mean(0)]
                for i, gradient in enumerate(gradients):
                    self.inner[replica][i] = MOMENTUM * self.inner[replica][i] + gradient
                    local[i] = local[i] - RATE * self.inner[replica][i]
            differences.append([begun - made for begun, made in zip(self.theta, local, strict=True)])
            ended.append(local)
            samples.append(sum(len(batch["x"]) for batch in mine))
        self.ended = ended
        for i in range(2):
            mean = sum(n * d[i] for n, d in zip(samples, differences, strict=True)) / sum(samples)
            self.outer[i] = self.momentum * self.outer[i] + mean
            self.theta[i] = self.theta[i] - self.rate * (mean + self.momentum * self.outer[i])
        return float(np.mean(losses))


def rounds(given: Sequence[Batch], replicas: int, k: int) -> Iterator[list[Sequence[Batch]]]:
    """The batches of each replica in each whole round, as they are handed out: in turn."""
    mine = [given[replica::replicas] for replica in range(replicas)]
    for step in range(len(given) // (replicas * k)):
        yield [each[step * k : (step + 1) * k] for each in mine]


# ── what it computes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("replicas", "k", "servers", "overlap"), [(2, 1, 1, 0), (2, 4, 2, 0), (3, 3, 1, 0), (2, 4, 2, 1), (3, 3, 1, 2)]
)
async def test_it_is_diloco(replicas: int, k: int, servers: int, overlap: int) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(k, overlap=overlap), replicas, servers=servers)
    given, expected = batches(replicas * k * 6), DiLoCo(replicas, overlap=overlap)
    reports, got = await trained(trainer, graph, given)
    losses = [expected.round(each) for each in rounds(given, replicas, k)]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-4)
    largest = np.mean([batch["x"].max() for each in list(rounds(given, replicas, k))[-1] for batch in each])
    assert reports[-1].metrics["largest"] == pytest.approx(largest, rel=1e-6)
    for value, right in zip(got, expected.theta, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6)


async def test_one_step_by_sgd_and_a_plain_outer_step_is_synchronous_training() -> None:
    made = []
    for policy in (fr.train.AllOf(), fr.train.LocalSteps(1, outer=fr.optim.SGD(1.0))):
        with fr.Graph() as graph:
            trainer = trainer_of(policy, 3, optimizer=fr.optim.SGD(0.1))
        made.append(await trained(trainer, graph, batches(30)))
    (all_of, w), (local, again) = made
    assert [report.loss for report in local] == pytest.approx([report.loss for report in all_of], rel=1e-5)
    for value, right in zip(again, w, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


async def test_updates_weigh_by_their_samples() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(2), 2)
    given, expected = batches(24, sizes=(1, 30, 5)), DiLoCo(2)
    _, got = await trained(trainer, graph, given)
    for each in rounds(given, 2, 2):
        expected.round(each)
    for value, right in zip(got, expected.theta, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6)


async def test_a_last_round_of_too_few_batches_is_not_a_step_and_its_batches_are_dropped() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(4), 2)
    reports, _ = await trained(trainer, graph, batches(8 * 3 + 7))
    assert [report.kept for report in reports] == [(0, 1)] * 3
    assert trainer.statistics().dropped_batches == 7


async def test_batches_are_drawn_as_they_are_used_and_not_by_whole_rounds() -> None:
    drawn = 0

    def source() -> Iterator[Batch]:
        nonlocal drawn
        for batch in batches(1000):
            drawn += 1
            yield batch

    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(100), 2)
    async with fr.Session(graph) as session:
        async for report in trainer.steps(session, source()):
            assert drawn <= 2 * (100 * report.step + 100 + 2)
            if report.step == 2:
                break


# ── what replicas keep ───────────────────────────────────────────────────────────────────────────────────────────────


def drawing(inputs: dict[str, fr.Tensor]) -> Any:
    """A model that notes what it draws in each step."""
    w = fr.Variable(np.zeros((), np.float32), name="w")
    seen = fr.Variable(np.zeros(4, np.float32), name="seen", trainable=False)
    draw = fr.random.uniform((1,))
    with fr.control_dependencies([seen.assign(fr.concat([seen[1:], draw]))]):
        return fr.square(w - fr.mean(inputs["x"])) + 0.0 * fr.sum(draw)


async def test_random_ops_draw_anew_in_each_local_step() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(2), 1, fn=drawing, inputs={"x": INPUTS["x"]})
    _, (_, seen) = await trained(trainer, graph, [{"x": batch["x"]} for batch in batches(4)])
    assert len(set(seen.tolist())) == 4
    assert (seen > 0).all()


def with_running_mean(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    mean = fr.Variable(np.zeros((), np.float32), name="mean", trainable=False)
    with fr.control_dependencies([mean.assign(mean * 0.5 + fr.mean(inputs["x"]))]):
        return fr.mean(fr.square(inputs["x"] @ w - inputs["y"]))


@pytest.mark.parametrize("overlap", [0, 1])
async def test_statistics_that_the_model_writes_become_the_mean_of_the_replicas(overlap: int) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(3, overlap=overlap), 2, fn=with_running_mean)
    given = batches(2 * 3 * 2)
    _, (_, mean) = await trained(trainer, graph, given)
    expected, made = 0.0, [0.0, 0.0]
    for each in rounds(given, 2, 3):
        begun = list(made) if overlap else [expected] * 2
        made = list(begun)
        for replica, mine in enumerate(each):
            for step, batch in enumerate(mine):
                made[replica] += (expected - begun[replica]) * (step == overlap)
                made[replica] = made[replica] * 0.5 + batch["x"].mean()
        expected = float(np.mean(made))
    assert mean == pytest.approx(expected, rel=1e-5)


def counting(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    count = fr.Variable(np.zeros((), np.int64), name="count", trainable=False)
    with fr.control_dependencies([count.assign_add(1)]):
        return fr.mean(fr.square(inputs["x"] @ w - inputs["y"]))


def test_a_model_that_counts_steps_by_itself_is_refused_with_the_way_around() -> None:
    with fr.Graph(), pytest.raises(fr.GraphError, match=r"test_local_steps.*'count'.*make it a float"):
        trainer_of(fr.train.LocalSteps(3), 2, fn=counting)


def with_table(inputs: dict[str, fr.Tensor]) -> Any:
    table = fr.Variable(np.ones((20, 2), np.float32), name="table")
    return fr.mean(fr.square(fr.nn.embedding_lookup(table, inputs["ids"]) - inputs["y"]))


async def test_a_table_is_moved_by_rows_in_local_steps_and_travels_whole() -> None:
    rng = np.random.default_rng(3)
    given = [
        {"ids": rng.integers(0, 20, 4).astype(np.int32), "y": rng.normal(size=(4, 2)).astype(np.float32)}
        for _ in range(12)
    ]
    inputs = {"ids": fr.Spec("int32", (None,)), "y": fr.Spec("float32", (None, 2))}
    with fr.Graph() as graph:
        policy = fr.train.LocalSteps(3, outer=fr.optim.SGD(1.0))
        trainer = trainer_of(policy, 2, fn=with_table, inputs=inputs, optimizer=fr.optim.SGD(0.5))
    _, (table,) = await trained(trainer, graph, given)
    expected = np.ones((20, 2))
    for each in rounds(given, 2, 3):
        made = [expected.copy(), expected.copy()]
        for mine, local in zip(each, made, strict=True):
            for batch in mine:
                gradient = np.zeros_like(local)
                np.add.at(gradient, batch["ids"], 2 * (local[batch["ids"]] - batch["y"]) / batch["y"].size)
                local -= 0.5 * gradient
        expected = np.mean(made, axis=0)
    np.testing.assert_allclose(table, expected, rtol=1e-5)


async def test_what_the_inner_optimiser_keeps_begins_anew_once_it_is_not_finite() -> None:
    """And the replica's updates count again."""
    given = batches(2 * 2 * 6)
    given[4] = {**given[4], "y": given[4]["y"] * np.float32(np.nan)}  # the first of replica 0 in the second round
    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(2, fr.train.Deadline(60)), 2)
    reports, got = await trained(trainer, graph, given)
    assert [report.refused for report in reports] == [(), (0,), (), (), (), ()]
    assert [report.kept for report in reports] == [(0, 1), (1,), *[(0, 1)] * 4]
    assert all(np.isfinite(value).all() for value in got)


async def test_checkpoints_have_the_outer_optimisers_state_and_nothing_of_the_replicas(tmp_path: Path) -> None:
    def build() -> tuple[fr.Graph, Any]:
        with fr.Graph() as graph:
            return graph, trainer_of(fr.train.LocalSteps(2), 2)

    given, expected = batches(2 * 2 * 6), DiLoCo(2)
    for each in list(rounds(given, 2, 2))[:3]:
        expected.round(each)
    graph, trainer = build()
    assert {v.name for v in graph.variables} == {"w", "b", "replicated/step", "w/outer/momentum", "b/outer/momentum"}
    async with fr.Session(graph, checkpoints=fr.Checkpoints(str(tmp_path))) as session:
        async for report in trainer.steps(session, given):
            if report.step == 3:
                await session.save()
                break
    expected.inner = [[np.zeros((3, 1)), np.zeros(1)] for _ in range(2)]  # begins anew
    for each in list(rounds(given, 2, 2))[3:]:
        expected.round(each)
    graph, trainer = build()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(str(tmp_path))) as session:
        steps = [report.step async for report in trainer.steps(session, given[12:])]
        got = await session.run(trainer.variables)
    assert steps == [4, 5, 6]
    for value, right in zip(got, expected.theta, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6)


def test_a_graph_with_local_steps_travels_as_bytes() -> None:
    with fr.Graph() as graph:
        trainer_of(fr.train.LocalSteps(2), 2)
    again = fr.Graph.from_bytes(graph.to_bytes())
    assert [v.name for v in again.variables] == [v.name for v in graph.variables]
    assert [r.kind for r in again.resources.values()] == [r.kind for r in graph.resources.values()]


async def test_a_metric_of_several_shapes_in_one_round_is_an_error_that_says_so() -> None:
    def per_example(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
        each = fr.square(inputs["x"] @ w - inputs["y"])
        return fr.mean(each), {"each": each}

    with fr.Graph() as graph:
        trainer = trainer_of(fr.train.LocalSteps(2), 1, fn=per_example)
    given = batches(2, sizes=(2, 3))
    async with fr.Session(graph) as session:
        with pytest.raises(fr.SpecError, match=r"no mean over local steps: it is \[2, 1\] and \[3, 1\]; answer one"):
            async for _report in trainer.steps(session, given):
                pass
