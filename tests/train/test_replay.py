"""Histories that are trained again from their ledger: to the same bits, whoever was slow, late or killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import FeedError, LedgerError
from flowrt.train import Close, Offer, Policy, Record, WaitUntil
from flowrt.train.batches import LONG

if TYPE_CHECKING:
    from pathlib import Path

REPLICAS = 3
Batch = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class InTurn(Policy):
    """Keeps all updates but that of one replica, another one in each version."""

    spared: int = 0

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        kept = tuple(offer.replica for offer in offers if offer.replica != self.spared)
        return Close(kept) if len(kept) == REPLICAS - 1 else WaitUntil(offers=len(offers) + 1)

    def after(self, record: Record) -> Policy:
        return replace(self, spared=(self.spared + 1) % REPLICAS)


def batches() -> Iterator[Batch]:
    rng = np.random.default_rng(5)
    while True:
        yield {"x": rng.normal(size=(4, 3)).astype(np.float32)}


def noisy(policy: Any, **options: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    """A trainer whose steps depend on the order of sums, on what was drawn at random and on every step before."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(np.ones((3, 5), np.float32), name="w")
        noise = fr.random.normal((4, 5), seed=7)
        return fr.mean(fr.square(inputs["x"] @ w + noise))

    settings = {"optimizer": fr.optim.Momentum(0.05, 0.9), "replicas": REPLICAS, "policy": policy, **options}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss, {"x": fr.Spec("float32", (None, 3))}, name="model", **settings)
    return graph, trainer


async def state(session: fr.Session, graph: fr.Graph) -> dict[str, bytes]:
    """The bytes of all variables, those of the optimiser too."""
    names = [variable.resource.name for variable in graph.variables]
    values = await session.run([variable.__tensor__() for variable in graph.variables])
    return {name: np.asarray(value).tobytes() for name, value in zip(names, values, strict=True)}


HERE = {"server_device": "", "worker_device": ""}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("long", [LONG, 0.0], ids=["quick", "slow"])
async def test_a_history_of_one_process_is_trained_again_from_its_begin_and_from_a_checkpoint(
    tmp_path: Path, long: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.train.batches.LONG", long)  # after which only who lacks a batch is handed one
    for late in ("drop", "requeue"):
        path = tmp_path / f"{late}.ledger"
        graph, trainer = noisy(fr.train.FirstOf(2), late=late, **HERE)
        async with fr.Session(graph, options=fr.Options(seed=3)) as session:
            training = trainer.steps(session, batches(), ledger=path)
            kept = [(await anext(training)).kept for _ in range(12)]
            await training.aclose()
            expected = await state(session, graph)
        graph, trainer = noisy(fr.train.FirstOf(2), late=late, **HERE)
        checkpoints = fr.Checkpoints(tmp_path / late)
        async with fr.Session(graph, options=fr.Options(seed=3), checkpoints=checkpoints) as session:
            again = trainer.replay(session, path, batches())
            first = [(await anext(again)).kept for _ in range(5)]
            await again.aclose()
            await session.save()
            rest = [report.kept async for report in trainer.replay(session, fr.Ledger(path), batches())]
            assert first + rest == kept
            assert await state(session, graph) == expected
        assert not [*(tmp_path / late).glob("*.ledger")]  # what happens again is written down already


@pytest.mark.timeout(120)
async def test_a_history_of_a_cluster_with_slow_and_killed_workers_is_trained_again(tmp_path: Path) -> None:
    for policy in (fr.train.FirstOf(2), fr.train.Deadline(0.05), fr.train.Adaptive()):
        path = tmp_path / f"{type(policy).__name__}.ledger"
        graph, trainer = noisy(policy)
        slow = {"/job:worker/task:1": fr.delays.Exponential(0.01)}
        async with (
            fr.LocalCluster(ps=1, worker=REPLICAS, delays=slow) as cluster,
            fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
        ):
            training = trainer.steps(session, batches(), ledger=path)
            for step in range(20):
                if step == 10:
                    cluster.processes["/job:worker/task:2"].kill()
                await anext(training)
            await training.aclose()
            expected = await state(session, graph)
        assert fr.Ledger(path).violations == ()
        graph, trainer = noisy(policy)
        async with (
            fr.LocalCluster(ps=1, worker=REPLICAS) as cluster,
            fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
            asyncio.timeout(30),
        ):
            steps = [report.step async for report in trainer.replay(session, path, batches())]
            assert steps == list(range(1, fr.Ledger(path).version + 1))
            assert await state(session, graph) == expected


@pytest.mark.timeout(120)
async def test_a_history_in_which_replicas_came_is_trained_again_where_all_are_there(tmp_path: Path) -> None:
    path = tmp_path / "model.ledger"
    settings: dict[str, Any] = {"policy": fr.train.AllOf(), "replicas": (1, REPLICAS)}
    graph, trainer = noisy(**settings)
    async with (
        fr.LocalCluster(ps=1, worker=1) as cluster,
        fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
    ):
        training = trainer.steps(session, batches(), ledger=path)
        kept = [(await anext(training)).kept for _ in range(3)]
        await cluster.add("worker")
        while len(kept[-1]) < 2:
            kept.append((await anext(training)).kept)
        await training.aclose()
        expected = await state(session, graph)
    graph, trainer = noisy(**settings)
    async with (
        fr.LocalCluster(ps=1, worker=REPLICAS) as cluster,
        fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
    ):
        again = [report.kept async for report in trainer.replay(session, path, batches())]
        assert again[: len(kept)] == kept
        assert await state(session, graph) == expected


async def trained(path: Path, policy: Any, runs: Sequence[int], **options: Any) -> dict[str, bytes]:
    """What the variables come to in so many steps of one run after another."""
    graph, trainer = noisy(policy, **HERE, **options)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session:
        begin = 0
        for steps in runs:
            training = trainer.steps(session, islice(batches(), begin, None), ahead=0, ledger=path)
            for _ in range(steps):
                await anext(training)
            await training.aclose()
            begin = fr.Ledger(path).drawn
        return await state(session, graph)


async def trained_again(path: Path, policy: Any, **options: Any) -> dict[str, bytes]:
    graph, trainer = noisy(policy, **HERE, **options)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session, asyncio.timeout(30):
        steps = [report.step async for report in trainer.replay(session, path, batches())]
        assert steps == list(range(1, fr.Ledger(path).version + 1))
        return await state(session, graph)


async def test_a_history_longer_than_what_servers_are_told_at_once_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.train.replay.SETS_BYTES", 4)
    path = tmp_path / "model.ledger"
    for late in ("drop", "requeue"):
        path = tmp_path / f"{late}.ledger"
        expected = await trained(path, fr.train.FirstOf(2), [6, 5], late=late)
        assert await trained_again(path, fr.train.FirstOf(2), late=late) == expected


@pytest.mark.parametrize("overlap", [0, 1])
async def test_what_replicas_keep_from_round_to_round_begins_anew_where_it_did(tmp_path: Path, overlap: int) -> None:
    policy = fr.train.LocalSteps(2, outer=fr.optim.SGD(1.0), overlap=overlap)
    expected = await trained(tmp_path / "model.ledger", policy, [3, 4])
    assert await trained_again(tmp_path / "model.ledger", policy) == expected


async def test_rounds_after_some_that_did_not_count_are_trained_again_where_nothing_was_kept_of_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.ledger"
    policy = fr.train.LocalSteps(2, InTurn(), outer=fr.optim.SGD(1.0))
    expected = await trained(path, policy, [6], optimizer=fr.optim.SGD(0.05))
    assert await trained_again(path, policy, optimizer=fr.optim.SGD(0.05)) == expected


async def test_rounds_after_some_that_did_not_count_are_refused_where_something_was_kept_of_them(
    tmp_path: Path,
) -> None:
    for name, settings in (("slots", {}), ("ahead", {"optimizer": fr.optim.SGD(0.05)})):
        policy = fr.train.LocalSteps(2, InTurn(), outer=fr.optim.SGD(1.0), overlap=int(name == "ahead"))
        await trained(tmp_path / name, policy, [6], **settings)
        with pytest.raises(LedgerError, match=r"replica \d counts in version \d after rounds that did not"):
            await trained_again(tmp_path / name, policy, **settings)


async def test_rounds_are_not_trained_again_from_the_middle_of_a_run_where_something_was_kept(tmp_path: Path) -> None:
    policy = fr.train.LocalSteps(2, outer=fr.optim.SGD(1.0))
    await trained(tmp_path / "model.ledger", policy, [2, 4])
    graph, trainer = noisy(policy, **HERE)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session:
        training = trainer.replay(session, tmp_path / "model.ledger", batches())
        for _ in range(3):
            await anext(training)
        await training.aclose()
        with pytest.raises(LedgerError, match="had kept something by version 3; begin where their run did, at 2"):
            await anext(trainer.replay(session, tmp_path / "model.ledger", batches()))


async def test_what_is_not_what_it_was_is_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "model.ledger"
    graph, trainer = noisy(fr.train.AllOf(), **HERE)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session:
        training = trainer.steps(session, batches(), ledger=path)
        for _ in range(3):
            await anext(training)
        await training.aclose()
    for policy, seed, expected in (
        (fr.train.FirstOf(3), 3, "policy was .*AllOf.* and is .*FirstOf"),
        (fr.train.AllOf(), 4, r"seed was 3, and is 4; open the session with options=fr.Options\(seed=3\)"),
        (fr.train.Async(), 3, "keeps stale updates"),
    ):
        graph, trainer = noisy(policy, **HERE)
        async with fr.Session(graph, options=fr.Options(seed=seed)) as session:
            with pytest.raises(LedgerError, match=expected):
                trainer.replay(session, path, batches())
    graph, trainer = noisy(fr.train.AllOf(), **HERE)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session:
        few = [batch for batch, _ in zip(batches(), range(2), strict=False)]
        with pytest.raises(FeedError, match="was kept, and there are only 2 to train with again"):
            assert [report async for report in trainer.replay(session, path, few)]
