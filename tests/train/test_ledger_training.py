"""Ledgers that training writes: over runs of one client and of several, on checkpoints, and after a kill."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from counting_client import HERE, PATH, cluster_file, counted, counting, ones
from process_world import running

import flowrt as fr
from flowrt.base.errors import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

Batch = dict[str, np.ndarray[Any, Any]]


def numbered(first: int = 0) -> Iterator[Batch]:
    """Batches that are their identities."""
    for number in itertools.count(first):
        yield {"x": np.full(1, number, np.float64)}


def summing(**options: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    """A trainer whose variable is minus the sum of the means of what counted."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        return fr.Variable(np.zeros(1), name="w") * fr.sum(inputs["x"])

    with fr.Graph() as graph:
        options = {"replicas": 2, "server_device": "", "worker_device": "", "name": "model", **options}
        inputs = {"x": fr.Spec("float64", (None,))}
        trainer = fr.train.Replicated(lambda given: fr.sum(loss(given)), inputs, fr.optim.SGD(1.0), **options)
    return graph, trainer


async def take(trainer: fr.train.Replicated, session: fr.Session, batches: Any, steps: int, **options: Any) -> None:
    training = trainer.steps(session, batches, **options)
    for _ in range(steps):
        await anext(training)
    await training.aclose()


async def test_what_counted_is_what_the_ledger_says_was_kept_over_several_iterations(tmp_path: Path) -> None:
    path = tmp_path / "model.ledger"
    graph, trainer = summing()
    async with fr.Session(graph) as session:
        await take(trainer, session, numbered(), 4, ledger=path)
        first = fr.Ledger(path)
        await take(trainer, session, numbered(first.drawn), 3, ledger=path)
        (w, step) = await session.run([trainer.variables[0], trainer.step])
    ledger = fr.Ledger(path)
    assert (first.version, ledger.version, int(step)) == (4, 7, 7)
    assert [len(v.kept) for v in ledger.versions] == [2] * 7
    assert -w[0] == sum(sum(version.kept_batches) / 2 for version in ledger.versions)
    assert (ledger.count("kept"), ledger.count("handed"), ledger.violations) == (14, 0, ())
    assert ledger.count("unused") == ledger.drawn - 14
    assert trainer.statistics().dropped_batches >= ledger.count("unused")


async def test_a_source_is_gone_on_with_where_it_was_left_and_no_batch_of_it_is_left_out(tmp_path: Path) -> None:
    source = fr.data.arrays({"x": np.arange(12.0).reshape(12)}, batch=1, shuffle=False, epochs=1)
    graph, trainer = summing()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
        await take(trainer, session, source, 2)
        assert [report.step async for report in trainer.steps(session, source)] == [3, 4, 5, 6]
        assert (await session.run(trainer.variables[0]))[0] == -sum(range(12)) / 2
    ledger = fr.Ledger(tmp_path / "model.ledger")
    assert (ledger.count("kept"), ledger.drawn, ledger.violations) == (12, 12, ())


async def test_steps_that_a_restored_checkpoint_undoes_are_lost_or_with_requeue_done_again(tmp_path: Path) -> None:
    source = fr.data.arrays({"x": np.arange(12.0)}, batch=1, shuffle=False, epochs=1)
    for late, lost in (("drop", 4), ("requeue", 0)):
        graph, trainer = summing(late=late)
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / late)) as session:
            await take(trainer, session, source, 2)
            await session.save()
            await take(trainer, session, source, 2)
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / late)) as session:
            steps = [report.step async for report in trainer.steps(session, source)]
        ledger = fr.Ledger(tmp_path / late / "model.ledger")
        assert steps == list(range(3, 7 - lost // 2))
        assert (ledger.count("lost"), ledger.count("kept"), ledger.violations) == (lost, 12 - lost, ())
        assert [undone["version"] for undone in ledger.to_data()["undone"]] == [2]


async def test_a_ledger_that_another_writes_is_no_ledger_for_this_one(tmp_path: Path) -> None:
    (one, first), (two, second) = summing(), summing()
    async with fr.Session(one) as session, fr.Session(two) as other:
        training = first.steps(session, numbered(), ledger=tmp_path / "a.ledger")
        await anext(training)
        with pytest.raises(LedgerError, match="one at a time does"):
            await anext(second.steps(other, numbered(), ledger=tmp_path / "a.ledger"))
        await training.aclose()
        await take(second, other, numbered(), 1, ledger=tmp_path / "a.ledger")


@pytest.mark.timeout(120)
async def test_a_client_that_is_killed_leaves_a_ledger_that_the_next_one_completes(tmp_path: Path) -> None:
    graph, trainer = counting(2)
    path = tmp_path / "steps.ledger"
    async with fr.LocalCluster(ps=2, worker=2) as cluster:
        file = cluster_file(cluster, tmp_path)
        for seconds in (0.0, 0.05, 0.1):
            program = [str(HERE / "counting_client.py"), file, "2", "job", str(path)]
            async with running(sys.executable, *program, env=PATH) as client:
                assert client.stdout is not None
                await client.stdout.readline()
                await asyncio.sleep(seconds)  # at whatever moment that is
                client.kill()
                await client.wait()
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            await take(trainer, session, ones(), 2, ledger=path)
            at = await counted(session, trainer)
    ledger = fr.Ledger(path)
    assert (ledger.version, len(ledger.versions), ledger.count("kept")) == (at, at, at)
    assert (ledger.violations, ledger.count("handed"), ledger.to_data()["runs"]) == ((), 0, 4)
