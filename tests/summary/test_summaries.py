"""What graphs and trainers tell: in sessions of both kinds, on clusters, and in reports."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from board_world import Board, counts, records

import flowrt as fr
from flowrt.summary.training import OUTCOMES, PARTS

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"x": fr.Spec("float32", (None, 8))}


def model() -> tuple[fr.Graph, Any, Any]:
    """A graph that tells its loss, its variable, the gradient of that and its batch; its placeholder and train op."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4, 4), name="x")
        w = fr.Variable(np.ones(4, np.float32), name="w")
        with fr.name_scope("model"):
            loss = fr.sum(fr.square(fr.sum(x * w, axis=1)))
            fr.summary.scalar("loss", loss)
        fr.summary.histogram("w", w, buckets=2)
        fr.summary.histogram("gradient/w", *fr.gradients(loss, [w]), buckets=3)
        fr.summary.image("batch", x, most=1)
        train = fr.optim.SGD(0.01).minimize(loss)
    return graph, x, train


def batches(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": rng.normal(size=(4, 8)).astype(np.float32)}


def loss_fn(inputs: dict[str, Any]) -> Any:
    w = fr.Variable(np.ones((8, 1), np.float32), name="w")
    product = inputs["x"] @ w
    with fr.name_scope("inner"):
        fr.summary.scalar("largest", fr.max(product))
    return fr.mean(fr.square(product)), {"mean": fr.mean(product)}


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_blocking_step_answers_what_the_graph_tells(tmp_path: Path) -> None:
    graph, x, train = model()
    told = fr.summary.merged(graph)
    with fr.summary.Writer(tmp_path) as writer, fr.BlockingSession(graph) as session:
        step = session.compile([train, told], [x])
        for number in range(5):
            _, values = step(np.full((4, 4), 0.1, np.float32))
            writer.summaries(values, number)
    board = Board(tmp_path)
    assert board.names == ["model/loss", "w", "gradient/w", "batch"]
    losses = list(board.scalars("model/loss").values())
    assert losses[0] == pytest.approx(4 * 0.16)
    assert losses == sorted(losses, reverse=True)
    assert counts(board.values("w")[4]) == [0, 4]
    assert len(board.values("gradient/w")) == 5
    assert board.values("batch")[0][:2].tolist() == [b"4", b"4"]


@pytest.mark.asyncio
async def test_a_session_run_answers_it_beside_other_things(tmp_path: Path) -> None:
    graph, x, train = model()
    async with fr.summary.Writer(tmp_path) as writer, fr.Session(graph) as session:
        feeds = {x: np.ones((4, 4), np.float32)}
        answer = await session.run({"train": train, "told": fr.summary.merged(graph)}, feeds)
        writer.summaries(answer["told"], 7)
        await session.run(train, feeds)  # who does not fetch it computes nothing for it
    assert Board(tmp_path).scalars("model/loss") == {7: 64}


def test_rows_of_a_gradient_are_told_as_they_are(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        table = fr.Variable(np.zeros((1000, 2), np.float32), name="table")
        loss = fr.sum(fr.nn.embedding_lookup(table, fr.constant([1, 5, 7])) * 3.0)
        (gradient,) = fr.gradients(loss, [table])
        fr.summary.histogram("rows", gradient, buckets=1)
    with fr.summary.Writer(tmp_path) as writer, fr.BlockingSession(graph) as session:
        writer.summaries(session.run(fr.summary.merged(graph)), 0)
    assert Board(tmp_path).values("rows")[0].tolist() == [[3, 3, 6]]


@pytest.mark.parametrize(
    ("tell", "error", "words"),
    [
        (lambda x: fr.summary.scalar("x", x), fr.SpecError, "the scalar 'x' must be one number"),
        (lambda x: fr.summary.scalar("", fr.sum(x)), fr.GraphError, "has a name"),
        (lambda x: fr.summary.scalar("x", 3.0), fr.GraphError, "of an array, use writer.scalar"),
        (lambda x: fr.summary.image("x", fr.sum(x)), fr.SpecError, "[height, width, channels]"),
        (
            lambda x: fr.while_loop(lambda i: i < 3, lambda i: fr.summary.scalar("i", i) or i + 1, fr.constant(0)),
            fr.GraphError,
            "have it answer 'i', and tell that",
        ),
        (lambda x: [fr.summary.histogram("x", x) for _ in range(2)], fr.GraphError, "'x' already; choose another name"),
    ],
)
def test_what_a_graph_cannot_tell_is_refused(tell: Any, error: type[Exception], words: str) -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (3, 3))
        with pytest.raises(error) as raised:
            tell(x)
    assert words in str(raised.value)
    assert "test_summaries.py" in str(raised.value)


def test_a_graph_that_tells_nothing_says_how_it_would() -> None:
    with fr.Graph() as graph:
        fr.constant(1)
    with pytest.raises(fr.GraphError, match=r"write fr\.summary\.scalar"):
        fr.summary.merged(graph)
    with pytest.raises(fr.GraphError, match=r"takes an fr\.Graph"):
        fr.summary.merged(3)  # type: ignore[arg-type]
    with pytest.raises(fr.GraphError, match="needs a graph"):
        fr.summary.scalar("x", np.float32(3))


def test_names_are_told_apart_by_scopes() -> None:
    with fr.Graph() as graph:
        for scope in "ab":
            with fr.name_scope(scope):
                fr.summary.scalar("x", fr.constant(1.0))
    assert [told.name for told in fr.summary.merged(graph)] == ["a/x", "b/x"]


# ── trainers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def trained(tmp_path: Path, policy: Any, steps: int = 12, **settings: Any) -> tuple[Board, list[Any]]:
    """Train in this process, with all reports written; answers what is read, and the reports."""

    async def train() -> list[Any]:
        with fr.Graph() as graph:
            trainer = fr.train.Replicated(
                loss_fn, INPUTS, fr.optim.SGD(0.01), replicas=2, policy=policy, server_device="", worker_device=""
            )
            for variable in trainer.variables:
                fr.summary.histogram(variable.name, variable, buckets=1)
        told, reports = fr.summary.merged(graph), []
        async with fr.summary.Writer(tmp_path, **settings) as writer, fr.Session(graph) as session:
            async for report in trainer.steps(session, batches(2 * steps)):
                reports.append(report)
                writer.report(report)
                if report.step % 5 == 0:
                    writer.summaries(await session.run(told), report.step)
        return reports

    reports = asyncio.run(train())
    return Board(tmp_path), reports


def test_a_trainers_run_is_written_step_by_step(tmp_path: Path) -> None:
    board, reports = trained(tmp_path, fr.train.AllOf())
    steps = [report.step for report in reports]
    assert len(steps) == 12
    assert board.scalars("loss") == {report.step: np.float32(report.loss) for report in reports}
    assert board.scalars("step/seconds") == {report.step: np.float32(report.seconds) for report in reports}
    for metric in ("mean", "inner/largest"):
        told = {report.step: np.float32(report.metrics[metric]) for report in reports}
        assert board.scalars(f"metrics/{metric}") == told
    assert board.scalars("step/kept") == dict.fromkeys(steps, 2)
    assert list(board.values("w")) == [5, 10]
    absent = [*OUTCOMES[1:], "staleness", "skipped"]  # which no step had
    assert not {f"step/{what}" for what in absent} & set(board.names)


def test_replicas_are_summed_up_whenever_something_is_written(tmp_path: Path) -> None:
    board, reports = trained(tmp_path, fr.train.AllOf(), flush_seconds=60)
    for replica in range(2):
        assert board.scalars(f"kept/replica {replica}") == {12: 12}
        took = [
            seconds for report in reports for who, _, _, seconds, _ in report.measured[0].receipts if who == replica
        ]
        assert board.scalars(f"latency/replica {replica}")[12] == pytest.approx(np.median(took))
        assert board.scalars(f"latency p95/replica {replica}")[12] == pytest.approx(np.quantile(took, 0.95))
        times = {part: board.scalars(f"{part}/replica {replica}")[12] for part in PARTS}
        assert all(seconds >= 0 for seconds in times.values())
        assert times["compute"] == pytest.approx(
            np.median([report.times[replica].compute for report in reports if replica in report.times])
        )
        assert board.scalars(f"slow/replica {replica}") == {12: 1}
    assert board.plugin("custom_scalars__config__") == "custom_scalars"


class Told:
    """A report as `Training` reads it."""

    def __init__(self, step: int, **others: Any) -> None:
        given = {"kept": (0,), "loss": 1.0, "seconds": 0.1, "metrics": {}, "noise_scale": math.nan, "skipped": False}
        empty = dict.fromkeys(("late", "lost", "refused", "staleness", "slow"), ())
        self.__dict__.update({"step": step, "rolled_back": None, "measured": None, **empty, **given, **others})


def write(folder: Path, *reports: Told) -> Board:
    with fr.summary.Writer(folder) as writer:
        for report in reports:
            writer.report(report)  # type: ignore[arg-type]
    return Board(folder)


def test_what_only_some_policies_tell_is_there_where_they_do(tmp_path: Path) -> None:
    board = write(
        tmp_path,
        Told(1),
        Told(2, kept=(0, 1), late=(2, 3), staleness=(0, 3), noise_scale=7.5),
        Told(3, staleness=(0,), skipped=True, metrics={"each": np.ones(3), "one": np.ones((1, 1))}),
    )
    assert board.scalars("step/staleness") == {2: 1.5, 3: 0}
    assert board.scalars("step/noise scale") == {2: 7.5}
    assert board.scalars("step/late") == {2: 2, 3: 0}
    assert [board.scalars(f"late/replica {replica}")[3] for replica in range(4)] == [0, 0, 1, 1]
    assert board.scalars("step/skipped") == {3: 1}
    assert "metrics/each" not in board.names  # which is no number
    assert board.scalars("metrics/one") == {3: 1}


def test_who_is_slow_is_told_when_that_changes(tmp_path: Path) -> None:
    from flowrt.train.diagnosis import Slow

    slow = [(Slow(1, "compute", factor, True, 0.2, 0.1),) for factor in (2.0, 2.5)]
    board = write(tmp_path, Told(1), Told(2, slow=slow[0], kept=(0, 1)), Told(3, slow=slow[1]), Told(4))
    texts = board.text("slow")
    assert list(texts) == [2, 4]
    assert texts[2].startswith("replica 1 is slow: its steps take 2 times as long")
    assert texts[4] == "nobody is slow any more"


def test_steps_that_are_undone_are_taken_back(tmp_path: Path) -> None:
    from flowrt.train.going_back import RolledBack

    back = RolledBack(("/job:ps/task:0",), 2, 4, 0.5)
    board = write(
        tmp_path, *(Told(step, loss=step) for step in range(1, 5)), Told(3, loss=30.0, rolled_back=back), Told(4)
    )
    assert board.scalars("loss") == {1: 1, 2: 2, 3: 30, 4: 1}
    assert "/job:ps/task:0" in board.text("rolled back")[3]


def test_a_replicas_model_tells_scalars_alone_and_each_once() -> None:
    def tells(what: Any) -> Any:
        def build(inputs: dict[str, Any]) -> Any:
            w = fr.Variable(np.ones((8, 1), np.float32), name="w")
            what(w)
            return fr.mean(inputs["x"] @ w), {"size": fr.sum(w)}

        with fr.Graph():
            fr.train.Replicated(build, INPUTS, fr.optim.SGD(0.01), replicas=2)

    with pytest.raises(fr.GraphError, match="tells the histogram 'w'; what each replica computes"):
        tells(lambda w: fr.summary.histogram("w", w))
    with pytest.raises(fr.GraphError, match="answers the metric 'size', and tells it, too"):
        tells(lambda w: fr.summary.scalar("size", fr.sum(w)))


@pytest.mark.asyncio
async def test_reports_of_a_cluster_tell_who_was_late(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.01), replicas=3, policy=fr.train.FirstOf(2))
    slow = {"/job:worker/task:2": "0.05"}
    reports = []
    async with (
        fr.LocalCluster(ps=1, worker=3, delays=slow) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        fr.summary.Writer(tmp_path, flush_seconds=60) as writer,
    ):
        async for report in trainer.steps(session, batches(3 * 40)):
            reports.append(report)
            writer.report(report)
            if report.step == 20:
                break
    board = Board(tmp_path)
    for outcome in ("kept", "late"):
        for replica in range(3):
            times = sum(replica in getattr(report, outcome) for report in reports)
            assert board.scalars(f"{outcome}/replica {replica}") == {20: times}
    assert board.scalars("kept/replica 0")[20] > board.scalars("kept/replica 2")[20]
    assert len(records(writer.path)) == 1 + 20 + 1  # the head, a step each, and what is of the replicas
