"""Training whose updates are packed between hosts: what is applied is what they came as, and is trained again so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.train.compression import LEAST

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]
SIZE = 3 * LEAST + 5


@pytest.fixture
def hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this host talk as those of several do."""
    monkeypatch.setenv("FLOWRT_TRANSPORT", "tcp")


def numbers(seed: int, size: int = SIZE) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 10.0 ** rng.integers(-6, 6, size)).astype(np.float32)


def naive_bfloat16(array: Array) -> Array:
    """What numbers are once they were the nearest bfloat16s, of which two here are never equally near."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16) % 2) >> 16 << 16).astype(np.uint32).view(np.float32)


def summed(inputs: dict[str, fr.Tensor]) -> Any:
    """A loss whose gradients are what is fed: a long one, a short one, one of float64, and one of a table's rows."""
    long = fr.Variable(np.zeros(SIZE, np.float32), name="long")
    short = fr.Variable(np.zeros(LEAST - 1, np.float32), name="short")
    wide = fr.Variable(np.zeros(SIZE, np.float64), name="wide")
    table = fr.Variable(np.zeros((50, 3), np.float32), name="table")
    x = inputs["x"]
    rows = fr.nn.embedding_lookup(table, inputs["ids"])
    sums = [fr.sum(long * x), fr.sum(short * x[: LEAST - 1]), fr.sum(rows * x[:6].reshape((2, 3)))]
    return fr.add_n(sums) + fr.astype(fr.sum(wide * fr.astype(x, "float64")), "float32")


def trainer_of(loss: Any = summed, **settings: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    inputs = {"x": fr.Spec("float32", (SIZE,)), "ids": fr.Spec("int32", (None,))}
    with fr.Graph() as graph:
        optimizer = settings.pop("optimizer", fr.optim.SGD(1.0))
        trainer = fr.train.Replicated(loss, inputs, optimizer, **{"replicas": 2, "name": "model", **settings})
    return graph, trainer


def batches() -> Iterator[dict[str, Array]]:
    return ({"x": numbers(seed), "ids": np.array([seed % 50, 7], np.int32)} for seed in count())


async def state(session: fr.Session, graph: fr.Graph) -> dict[str, Array]:
    names = [variable.resource.name for variable in graph.variables]
    values = await session.run([variable.__tensor__() for variable in graph.variables])
    return dict(zip(names, map(np.asarray, values), strict=True))


async def trained(steps: int = 1, jobs: dict[str, int] | None = None, **settings: Any) -> dict[str, Array]:
    """What variables come to, and ``packed``, how updates were."""
    graph, trainer = trainer_of(**settings)
    async with (
        fr.LocalCluster(**(jobs or {"ps": 1, "worker": 2})) as cluster,
        fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
        asyncio.timeout(60),
    ):
        given = batches()
        async for report in trainer.steps(session, islice(given, 2 * steps)):
            assert report.kept == (0, 1)
        return await state(session, graph) | {"packed": np.array(trainer.packing_in(session).how)}


# ── what is applied ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(120)
async def test_variables_move_by_the_mean_of_what_came_and_all_that_is_short_or_wide_is_exact(
    hosts_apart: None,
) -> None:
    found = await trained(compression="bfloat16")
    one, other = numbers(0), numbers(1)
    assert found["packed"] == "bfloat16"
    assert np.array_equal(found["long"], -(naive_bfloat16(one) + naive_bfloat16(other)) / 2)
    assert not np.array_equal(found["long"], -(one + other) / 2)
    assert np.array_equal(found["short"], -(one + other)[: LEAST - 1] / 2)
    assert np.array_equal(found["wide"], -(one.astype(np.float64) + other) / 2)
    expected = np.zeros((50, 3), np.float32)
    for seed, rounded in enumerate((naive_bfloat16(one), naive_bfloat16(other))):
        for row, each in zip((seed, 7), rounded[:6].reshape(2, 3), strict=True):
            expected[row] -= each / 2
    np.testing.assert_allclose(found["table"], expected, rtol=1e-6)


@pytest.mark.timeout(120)
async def test_on_one_host_nothing_is_packed_unless_processes_are_to_talk_as_if_there_were_several() -> None:
    found = await trained(compression="bfloat16")
    assert found["packed"] == ""
    assert np.array_equal(found["long"], -(numbers(0) + numbers(1)) / 2)


@pytest.mark.timeout(180)
async def test_whatever_makes_one_update_of_a_set_and_copies_of_servers_come_to_the_same_bits(
    hosts_apart: None,
) -> None:
    settings: dict[str, Any] = {"compression": "bfloat16", "optimizer": fr.optim.Momentum(0.1, 0.9)}
    expected = await trained(steps=4, **settings)
    twice = await trained(steps=4, jobs={"ps": 2, "worker": 2}, servers=2, copies=2, **settings)
    combined = await trained(steps=4, policy=fr.train.Deadline(30.0), **settings)
    for found in (twice, combined):
        for name, value in expected.items():
            if not name.startswith("step"):
                assert np.array_equal(found[name], value), name


@pytest.mark.timeout(120)
async def test_an_update_that_barely_is_finite_moves_by_finite_numbers_and_one_that_is_not_is_refused(
    hosts_apart: None,
) -> None:
    graph, trainer = trainer_of(compression="bfloat16", replicas=1)
    barely, not_at_all = np.full(SIZE, 3.4e38, np.float32), np.ones(SIZE, np.float32)
    not_at_all[-1] = np.nan
    given = [{"x": x, "ids": np.array([1, 2], np.int32)} for x in (barely, not_at_all)]
    async with (
        fr.LocalCluster(ps=1, worker=1) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        training = trainer.steps(session, given)
        await anext(training)
        with pytest.raises(fr.FlowrtError, match=r"not finite \[0\]"):
            await anext(training)
        found = (await state(session, graph))["long"]
    assert np.isfinite(found).all()
    assert np.allclose(found, -3.4e38, rtol=2**-8)


@pytest.mark.timeout(120)
async def test_local_steps_send_packed_how_far_they_have_come(hosts_apart: None) -> None:
    policy = fr.train.LocalSteps(2, outer=fr.optim.SGD(1.0))
    graph, trainer = trainer_of(compression="bfloat16", policy=policy)
    async with (
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        async for _ in trainer.steps(session, [next(batches())] * 4):
            pass
        found = (await state(session, graph))["long"]
    assert np.array_equal(found, -2 * naive_bfloat16(numbers(0)))


# ── a history ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(180)
async def test_a_packed_history_with_late_and_lost_updates_is_trained_again_to_the_bit_and_on_one_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = tmp_path / "model.ledger", {"replicas": 3, "policy": fr.train.FirstOf(2)}
    monkeypatch.setenv("FLOWRT_TRANSPORT", "tcp")
    graph, trainer = trainer_of(compression="bfloat16", optimizer=fr.optim.Momentum(0.1, 0.9), **settings)
    slow = {"/job:worker/task:1": fr.delays.Exponential(0.01)}
    async with (
        fr.LocalCluster(ps=1, worker=3, delays=slow) as cluster,
        fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
        asyncio.timeout(60),
    ):
        training = trainer.steps(session, batches(), ledger=path)
        for step in range(12):
            if step == 8:
                cluster.processes["/job:worker/task:2"].kill()
            await anext(training)
        await training.aclose()
        expected = await state(session, graph)
    ledger = fr.Ledger(path)
    assert ledger.violations == ()
    assert {version.compression for version in ledger.versions} == {"bfloat16"}
    monkeypatch.delenv("FLOWRT_TRANSPORT")
    graph, trainer = trainer_of(optimizer=fr.optim.Momentum(0.1, 0.9), **settings)
    async with (
        fr.LocalCluster(ps=1, worker=3) as cluster,
        fr.Session(graph, cluster=cluster, options=fr.Options(seed=3)) as session,
        asyncio.timeout(60),
    ):
        async for _ in trainer.replay(session, path, batches()):
            pass
        found = await state(session, graph)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def test_what_is_no_compression_is_refused_where_the_trainer_is_built() -> None:
    with pytest.raises(GraphError, match=r"test_compression.py:\d+: compression='zip': expected 'bfloat16'"):
        trainer_of(compression="zip")
