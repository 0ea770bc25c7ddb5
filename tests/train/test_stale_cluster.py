"""Training with stale updates on processes: what servers make of them is what was promised, replayed in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flowrt as fr

ROWS, WIDE, RATE = 256, 512, 0.05  # the matrix is half a MiB: replicas read it where servers told it
INPUTS = {"x": fr.Spec("float32", (None, ROWS)), "y": fr.Spec("float32", (None, WIDE))}
X = np.random.default_rng(0).normal(size=(8, ROWS)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, WIDE)).astype(np.float32)
SLOW = "/job:worker/task:2"


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((ROWS, WIDE), np.float32), name="w")
    b = fr.Variable(np.zeros((WIDE,), np.float32), name="b")
    return fr.sum(fr.square(inputs["x"] @ w + b - inputs["y"])) / (8.0 * ROWS)


def predict_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((ROWS, WIDE), np.float32), name="w")
    return inputs["x"] @ w + fr.Variable(np.zeros((WIDE,), np.float32), name="b")


def batches() -> Iterator[dict[str, np.ndarray]]:
    """The same for everybody, so that an update follows from the version that it was computed from."""
    while True:
        yield {"x": X, "y": Y}


def made(policy: fr.train.Policy) -> tuple[fr.Graph, fr.train.Replicated, fr.train.Predictor]:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(RATE), replicas=3, policy=policy)
        return graph, trainer, trainer.share(predict_fn, {"x": INPUTS["x"]})


def replayed(reports: list[fr.train.StepReport], weigh: Any) -> np.ndarray:
    """What the predictor answers after those reports, each update weighed by ``weigh(its set's staleness)``."""
    versions = [(np.zeros((ROWS, WIDE)), np.zeros(WIDE))]
    for report in reports:
        w, b = versions[-1]
        for staleness, weight in zip(report.staleness, weigh(report.staleness), strict=True):
            seen, offset = versions[-1 - staleness]
            error = (X @ seen + offset - Y) / (4.0 * ROWS)
            w, b = w - RATE * weight * (X.T @ error), b - RATE * weight * error.sum(axis=0)
        versions.append((w, b))
    w, b = versions[-1]
    return X @ w + b


@pytest.mark.timeout(120)
async def test_what_a_slow_replica_computes_counts_where_updates_are_applied_as_they_come() -> None:
    graph, trainer, predict = made(fr.train.Async())
    async with (
        fr.LocalCluster(ps=2, worker=3, delays={SLOW: "0.05"}) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        training, reports, of_the_slow = trainer.steps(session, batches()), list[fr.train.StepReport](), list[int]()
        while len(of_the_slow) < 3 or max(of_the_slow) < 2:  # others may be as slow for a while
            reports.append(await anext(training))
            of_the_slow = [report.staleness[0] for report in reports if report.kept == (2,)]
        answer = await predict(session, {"x": X})
        await training.aclose()
    np.testing.assert_allclose(answer, replayed(reports, lambda stale: [1 / (1 + stale[0])]), rtol=1e-3, atol=1e-5)
    assert all(len(report.kept) == 1 and not report.late and not report.lost for report in reports)
    assert reports[-1].loss < reports[0].loss
    slow = trainer.statistics().replicas[2]
    assert (slow.kept, slow.late, slow.max_staleness) == (len(of_the_slow), 0, max(of_the_slow))
    assert slow.mean_staleness == pytest.approx(np.mean(of_the_slow))


@pytest.mark.timeout(120)
async def test_nobody_gets_further_ahead_of_the_slowest_than_the_bound() -> None:
    graph, trainer, predict = made(fr.train.BoundedStaleness(2))
    async with (
        fr.LocalCluster(ps=2, worker=3, delays={SLOW: "0.02"}) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        training = trainer.steps(session, batches())
        reports = [await anext(training) for _ in range(30)]
        while not any(2 in report.staleness for report in reports):  # as where nobody is quick
            reports.append(await anext(training))
        answer = await predict(session, {"x": X})
        await training.aclose()

    def weigh(stale: tuple[int, ...]) -> list[float]:
        return [1 / (len(stale) * (1 + each)) for each in stale]

    np.testing.assert_allclose(answer, replayed(reports, weigh), rtol=1e-3, atol=1e-5)
    assert not any(report.late or report.lost for report in reports)
    assert max(staleness for report in reports for staleness in report.staleness) == 2
    for three in zip(reports, reports[1:], reports[2:], strict=False):  # none is two versions behind in the third
        assert {0, 1, 2} == {replica for report in three for replica in report.kept}


@pytest.mark.timeout(120)
async def test_a_bound_of_zero_gives_the_bits_of_waiting_for_all() -> None:
    answers = []
    async with fr.LocalCluster(ps=2, worker=3) as cluster:
        for policy in (fr.train.AllOf(), fr.train.BoundedStaleness(0)):
            graph, trainer, predict = made(policy)
            async with fr.Session(graph, cluster=cluster) as session:
                training = trainer.steps(session, batches())
                reports = [await anext(training) for _ in range(7)]
                answers.append(await predict(session, {"x": X}))
                await training.aclose()
                await session.reset()
            assert all(report.kept == (0, 1, 2) and report.staleness == (0, 0, 0) for report in reports)
    assert answers[0].tobytes() == answers[1].tobytes()
