"""Training whose updates are packed between hosts: what is applied is what they came as, and is trained again so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count, islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError, LedgerError
from flowrt.ledger.__main__ import summary
from flowrt.ledger.writer import LedgerWriter
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome
from flowrt.train.accounts import setup_of
from flowrt.train.compression import LEAST
from flowrt.train.replay import _rounds_from

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


def naive_int8(array: Array) -> Array:
    """What numbers are once they were, in blocks of 1,024, whole numbers from -127 to 127 times one."""
    again = np.zeros_like(array)
    for first in range(0, array.size, 1024):
        block = array[first : first + 1024]
        largest = np.abs(block).max()
        again[first : first + 1024] = np.rint(block * (np.float32(127) / largest)) * (largest / np.float32(127))
    return again


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
@pytest.mark.parametrize(("compression", "naive"), [("bfloat16", naive_bfloat16), ("int8", naive_int8)])
async def test_variables_move_by_the_mean_of_what_came_and_all_that_is_short_or_wide_is_exact(
    compression: str, naive: Any, hosts_apart: None
) -> None:
    found = await trained(compression=compression)
    one, other = numbers(0), numbers(1)
    assert found["packed"] == compression
    assert np.array_equal(found["long"], -(naive(one) + naive(other)) / 2)
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
    settings: dict[str, Any] = {"compression": "int8", "optimizer": fr.optim.Momentum(0.1, 0.9)}
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


@pytest.mark.timeout(120)
async def test_what_is_too_small_for_int8_beside_others_moves_variables_all_the_same(hosts_apart: None) -> None:
    x = np.ones(SIZE, np.float32)
    x[::LEAST] = 1000
    assert not naive_int8(x)[1:LEAST].any()  # by itself it would never move anything
    graph, trainer = trainer_of(compression="int8")
    async with (
        fr.LocalCluster(ps=1, worker=2) as cluster,
        fr.Session(graph, cluster=cluster) as session,
        asyncio.timeout(60),
    ):
        async for _ in trainer.steps(session, [{"x": x, "ids": np.array([1, 2], np.int32)}] * 2 * 60):
            pass
        found = (await state(session, graph))["long"]
    assert np.abs(found + 60 * x).max() <= 1000 / 127 / 2 + 0.1  # what is left of the last updates, and roundings


# ── a history ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(180)
@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
async def test_a_packed_history_with_late_and_lost_updates_is_trained_again_to_the_bit_and_on_one_host_too(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = tmp_path / "model.ledger", {"replicas": 3, "policy": fr.train.FirstOf(2)}
    monkeypatch.setenv("FLOWRT_TRANSPORT", "tcp")
    graph, trainer = trainer_of(compression=compression, optimizer=fr.optim.Momentum(0.1, 0.9), **settings)
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
    assert {version.compression for version in ledger.versions} == {compression}
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
    with pytest.raises(GraphError, match=r"test_compression.py:\d+: compression='zip': expected 'bfloat16' or 'int8'"):
        trainer_of(compression="zip")


def test_int8_beside_a_loss_whose_scale_changes_is_refused_where_the_trainer_is_built() -> None:
    """Updates would count that move nothing, and what they left would go on."""
    with pytest.raises(GraphError, match=r"test_compression.py:\d+: compression='int8' .* take 'bfloat16', or "):
        trainer_of(compression="int8", optimizer=fr.LossScaled(fr.optim.SGD(1.0)))
    trainer_of(compression="int8", optimizer=fr.LossScaled(fr.optim.SGD(1.0), grow_every=None))


async def test_a_client_attaches_to_a_run_by_a_trainer_that_packs_alike_alone_and_its_ledger_says_where_that_began(
    tmp_path: Path,
) -> None:
    x = np.stack([numbers(seed, LEAST) for seed in range(8)])
    source = fr.data.arrays({"x": x}, batch=1, epochs=None)

    def built(compression: str | None) -> tuple[fr.Graph, fr.train.Replicated]:
        def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
            return fr.sum(inputs["x"] * fr.Variable(np.zeros(LEAST, np.float32), name="w"))

        with fr.Graph() as graph:
            spec = {"x": fr.Spec("float32", (None, LEAST))}
            return graph, fr.train.Replicated(loss_fn, spec, fr.optim.SGD(0.1), replicas=1, compression=compression)

    async def look(cluster: fr.Cluster, compression: str | None, steps: int, ledger: str, stop: bool = False) -> None:
        graph, trainer = built(compression)
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            seen = 0
            async for _ in trainer.steps(session, source, detached=True, ledger=tmp_path / ledger):
                seen += 1
                if seen == steps:
                    break
            if stop:
                await trainer.stop(session)

    async with fr.LocalCluster(ps=1, worker=1) as cluster, asyncio.timeout(60):
        await look(cluster, "int8", 3, "first")
        with pytest.raises(GraphError, match="as compression='int8', not None; attach by a trainer with the same"):
            await look(cluster, None, 1, "other")
        await look(cluster, "int8", 4, "second", stop=True)
        found = fr.Ledger(tmp_path / "second")
        assert found.versions[0].version >= 3
        assert {(version.begun, version.compression) for version in found.versions} == {(0, "int8")}
        begin = found.versions[0].version
        with pytest.raises(LedgerError, match=f"replicas had kept something by version {begin}; begin where their"):
            _rounds_from(found, found.versions, built("int8")[1])


async def test_a_history_is_refused_in_which_a_replica_of_int8_began_again_and_is_told_apart_by_its_batches(
    tmp_path: Path,
) -> None:
    graph, trainer = trainer_of(compression="int8", server_device="", worker_device="")
    kept = OUTCOMES.index(Outcome.KEPT)
    async with fr.Session(graph, options=fr.Options(seed=3)) as session:
        ledger = LedgerWriter(tmp_path / "model.ledger", setup_of(trainer, session))
        ledger.begin(7, 0, compression="int8")
        for version in range(3):
            for replica in range(2):
                ledger.hand(replica, 1 + version, [2 * version + replica])
            if version == 1:
                ledger.returned(1, [])  # its update of this version has come, and counts
            receipts = [(replica, 1 + version, kept, 0.1, 0) for replica in range(2)]
            ledger.made(SimpleNamespace(version=version, receipts=receipts, identities=()))
        ledger.close()
        found = fr.Ledger(tmp_path / "model.ledger")
        assert "\nupdates travel as int8\n" in summary(found)
        versions = found.versions
        assert [version.anew for version in versions] == [frozenset(), frozenset(), frozenset({1})]
        with pytest.raises(
            LedgerError, match=r"replica 1, which was lost, counts in version 2\. bfloat16 leaves nothing"
        ):
            async for _ in trainer.replay(session, tmp_path / "model.ledger", batches()):
                pass
