"""Tables saved while steps write some of their rows: what is saved is what a run without saves had at that step."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_world import read_checkpoint

import flowrt as fr
from flowrt.checkpoints import shards
from flowrt.sched.host.spares import Spares

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 1 << 13


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps go on between any two pieces that are written."""
    monkeypatch.setattr(shards, "PIECE", 5000)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def model(kind: str) -> tuple[fr.Graph, Any, Any, Any]:
    """A graph, the ids of a step, that step, and one that moves everything."""
    with fr.Graph() as graph:
        ids = fr.placeholder("int64", (None,))
        wide = fr.Variable(fr.random.normal((ROWS, 24), seed=1), name="wide")
        narrow = fr.Variable(fr.random.normal((ROWS,), seed=2), name="narrow")
        if kind == "scattered":
            ones = fr.ones_like(fr.take(narrow, ids))
            move = fr.group(narrow.scatter_add(ids, ones), wide.scatter_update(ids, fr.take(wide, ids) + 1))
        else:
            loss = fr.sum(fr.square(fr.take(wide, ids))) + fr.sum(fr.square(fr.take(narrow, fr.abs(ids))))
            move = {"SGD": fr.optim.SGD(0.1), "Adam": fr.optim.Adam(0.1)}[kind].minimize(loss)
        dense = fr.group(wide.assign_add(fr.ones_like(wide)), narrow.assign(fr.multiply(narrow, 2)))
    return graph, ids, move, dense


async def train(checkpoints: fr.Checkpoints | None, kind: str, *, dense: bool) -> dict[int, list[Any]]:
    """The values after every twentieth step of two hundred; every third save is cancelled."""
    graph, ids, move, all_of_it = model(kind)
    rng, found = np.random.default_rng(7), {}
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        step, saving = session.compile([move], feeds=[ids]), None
        for number in range(1, 201):
            if dense and number % 33 == 0:
                await session.run(all_of_it)
            else:
                await step(rng.integers(0, ROWS, rng.integers(0, 200)))
            if number % 20 == 0 and checkpoints is None:
                found[number] = await session.run(list(graph.variables))
            elif number % 20 == 0:
                if saving is not None:
                    await saving
                saving = asyncio.ensure_future(session.save())
                await asyncio.sleep(0)
                assert checkpoints.is_saving
                if number % 60 == 0:
                    saving.cancel()
                    await asyncio.wait([saving])
                    saving = None
            await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", ["scattered", "SGD", "Adam"])
async def test_a_table_of_which_steps_write_rows_is_saved_as_it_was(
    kind: str, dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [("", v.name) for v in model(kind)[0].variables]
    wanted = await train(None, kind, dense=dense)
    copied: list[str] = []
    copy = Spares.copy

    def counted(self: Spares, name: Any, array: Any) -> Any:
        copied.append(name[1])
        return copy(self, name, array)

    monkeypatch.setattr(Spares, "copy", counted)
    checkpoints = fr.Checkpoints(tmp_path, keep=100)
    await train(checkpoints, kind, dense=dense)
    saves = checkpoints.saves()
    assert [step for _, step in saves if step % 60] == [20, 40, 80, 100, 140, 160, 200]
    for number, step in saves:
        saved = read_checkpoint(tmp_path, number, step).variables
        for name, value in zip(names, wanted[step], strict=True):
            np.testing.assert_array_equal(saved[name], value, strict=True)
    assert dense or not {"wide", "narrow"} & set(copied)


@pytest.mark.timeout(120)
async def test_what_a_server_saves_of_a_table_beside_training_is_of_one_version(tmp_path: Path) -> None:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        table = fr.Variable(fr.zeros((ROWS, 24)), name="table", partition=2)
        return fr.sum(fr.take(table, inputs["ids"]))

    with fr.Graph() as graph:
        inputs = {"ids": fr.Spec("int64", (None,))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(1.0), replicas=1, servers=2)
    rng = np.random.default_rng(11)
    batches = [{"ids": rng.integers(0, ROWS, 100)} for _ in range(120)]
    checkpoints = fr.Checkpoints(tmp_path, every_steps=7, keep=100)
    async with (
        fr.LocalCluster(ps=2, worker=1) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
    ):
        async for _ in trainer.steps(session, iter(batches), ahead=4):
            pass
    assert len(checkpoints.saves()) > 3
    for number, step in checkpoints.saves():
        saved = read_checkpoint(tmp_path, number, step).variables
        version = next(int(value) for (_, name), value in saved.items() if "step" in name)
        wanted = np.zeros((ROWS, 24), np.float32)
        for batch in batches[:version]:
            np.subtract.at(wanted, batch["ids"], 1)
        np.testing.assert_array_equal(saved["", "table"], wanted)
