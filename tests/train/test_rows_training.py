"""Replicated training of tables: rows are gathered where they lie, and come and go as rows, whatever the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import FlowrtError
from flowrt.sched.drivers.messages import AskedRows, NewVersion, Wants
from flowrt.sched.replica.asking import Asking
from flowrt.sched.server.gathering import Gathering

WIDTH, RATE = 4, 0.25
SIZES = {"users": 500, "items": 300, "small": 8, "tied": 80}
INPUTS = {"ids": fr.Spec("int32", (None,)), "bags": fr.Spec("int64", (None, 3)), "scale": fr.Spec("float32", ())}
Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


def start(name: str) -> Array:
    rng = np.random.default_rng(len(name))
    size = (WIDTH, 2) if name == "w" else (SIZES[name], WIDTH)
    return rng.normal(size=size).astype(np.float32)


def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
    """Of rows, of bags of rows, of a small table's rows, and of a table that is read whole as well."""
    v = {name: fr.Variable(start(name), name=name) for name in (*SIZES, "w")}
    ids = given["ids"]
    rows = fr.nn.embedding_lookup(v["users"], ids) + fr.nn.embedding_lookup(v["small"], ids % 8)
    hidden = (
        rows + fr.take(v["users"], 499 - ids) * given["scale"] + fr.mean(fr.take(v["items"], given["bags"]), axis=1)
    )
    z = hidden @ v["w"]
    tied = fr.sum(fr.square(v["tied"])) + fr.sum(fr.take(v["tied"], ids % 80))
    return 0.01 * fr.sum(fr.square(z)) + 0.001 * tied


def slopes(v: dict[str, Array], batch: Batch) -> tuple[float, dict[str, Array]]:
    """The loss, and its dense derivatives."""
    ids, bags, scale = batch["ids"], batch["bags"], batch["scale"]
    hidden = v["users"][ids] + v["small"][ids % 8] + v["users"][499 - ids] * scale + v["items"][bags].mean(1)
    z = hidden @ v["w"]
    loss = 0.01 * (z**2).sum() + 0.001 * ((v["tied"] ** 2).sum() + v["tied"][ids % 80].sum())
    d = {name: np.zeros_like(value) for name, value in v.items()}
    dh = 0.02 * z @ v["w"].T
    d["w"] = 0.02 * hidden.T @ z
    np.add.at(d["users"], ids, dh)
    np.add.at(d["users"], 499 - ids, dh * scale)
    np.add.at(d["small"], ids % 8, dh)
    np.add.at(d["items"], bags, dh[:, None] / 3)
    d["tied"] = 0.002 * v["tied"]
    np.add.at(d["tied"], ids % 80, 0.001)
    return float(loss), d


def trained(batches: list[Batch], replicas: int) -> tuple[list[float], dict[str, Array]]:
    """The losses and the variables in the end, where all updates count."""
    v, losses = {name: start(name).astype(np.float64) for name in (*SIZES, "w")}, []
    for first in range(0, len(batches), replicas):
        found = [slopes(v, batch) for batch in batches[first : first + replicas]]
        losses.append(float(np.mean([loss for loss, _ in found])))
        for name in v:
            v[name] = v[name] - RATE * sum(d[name] for _, d in found) / replicas
    return losses, v


def batches_of(rng: np.random.Generator, count: int, sizes: tuple[int, ...] = (5, 1, 0, 7)) -> list[Batch]:
    made = []
    for n in (sizes[i % len(sizes)] for i in range(count)):
        ids = rng.integers(0, 500, n) if n < 7 else rng.integers(0, 3, n)  # the last with many that are equal
        made.append(
            {"ids": ids.astype("int32"), "bags": rng.integers(0, 300, (n, 3)), "scale": np.float32(rng.random())}
        )
    return made


def trainer_of(replicas: int, policy: Any = None, fn: Callable[..., Any] = loss_fn, **more: Any) -> fr.train.Replicated:
    return fr.train.Replicated(fn, INPUTS, fr.optim.SGD(RATE), replicas, policy, **more)


HERE = {"server_device": "", "worker_device": ""}


async def check_training(trainer: fr.train.Replicated, session: fr.Session, batches: list[Batch]) -> None:
    reports = [report async for report in trainer.steps(session, batches)]
    losses, expected = trained(batches, trainer.replicas)
    np.testing.assert_allclose([report.loss for report in reports], losses, rtol=1e-4, atol=1e-5)
    for variable, value in zip(trainer.variables, await session.run(trainer.variables), strict=True):
        np.testing.assert_allclose(
            value, expected[variable.name.split("/")[-1]], rtol=1e-4, atol=1e-5, err_msg=variable.name
        )


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("servers", [1, 3])
async def test_training_by_rows_is_the_dense_training(servers: int, optimize: bool) -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(2, servers=servers, **HERE)
    async with fr.Session(graph, options=fr.Options(optimize=optimize)) as session:
        await check_training(trainer, session, batches_of(np.random.default_rng(servers), 12))


async def test_training_by_rows_is_the_dense_training_on_a_cluster() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(2, servers=2)
    async with fr.LocalCluster(ps=2, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        await check_training(trainer, session, batches_of(np.random.default_rng(7), 24))


async def test_a_table_of_which_rows_alone_are_taken_is_not_told() -> None:
    with fr.Graph() as graph:
        trainer = trainer_of(2, **HERE)
    async with fr.Session(graph) as session:
        begin = (await trainer.program(session)).begin_servers[0]
        told = {name for _, name in begin(run=1, version=0, client="", policy=()).values}
        assert told == {v.name for v in trainer.variables} - {v.name for v in trainer.variables[:2]}


async def test_rows_are_of_the_version_that_is_computed_whoever_is_late() -> None:
    """All batches are alike, so that each version follows from the one before, whichever updates were kept."""
    batch = batches_of(np.random.default_rng(3), 1)[0]

    async def source() -> Any:
        for n in range(400):
            if n % 3 == 0:
                await asyncio.sleep(0)  # so that replicas wait for batches now and then
            yield batch

    with fr.Graph() as graph:
        trainer = trainer_of(3, fr.train.FirstOf(2), **HERE)
    async with fr.Session(graph) as session:
        reports = [report async for report in trainer.steps(session, source(), ahead=2)]
    losses, _ = trained([batch] * len(reports), 1)
    np.testing.assert_allclose([report.loss for report in reports], losses, rtol=1e-3, atol=1e-4)
    assert len(reports) > 50


async def test_an_update_of_rows_that_are_not_finite_is_refused() -> None:
    good = batches_of(np.random.default_rng(5), 1)[0]
    bad = {**good, "scale": np.float32(np.nan)}
    with fr.Graph() as graph:
        trainer = trainer_of(3, fr.train.FirstOf(2), **HERE)
    async with fr.Session(graph) as session:
        (report,) = [report async for report in trainer.steps(session, [bad, good, good])]
        assert report.kept == (1, 2)
        assert all(np.isfinite(value).all() for value in await session.run(trainer.variables))


async def test_rows_that_a_table_has_not_end_the_training_by_an_error_that_names_the_op() -> None:
    good = batches_of(np.random.default_rng(5), 1)[0]
    bad = {**good, "bags": good["bags"] + 300}
    with fr.Graph() as graph:
        trainer = trainer_of(2, **HERE)
    async with fr.Session(graph) as session:
        before = await session.run(trainer.variables)
        with pytest.raises(FlowrtError, match=r"(take|mean|bag).*test_rows_training.py.*an index is out of range"):
            _ = [report async for report in trainer.steps(session, [good, bad])]
        for one, other in zip(before, await session.run(trainer.variables), strict=True):
            np.testing.assert_array_equal(one, other)


# ── who asks, and who gives, without a network ───────────────────────────────────────────────────────────────────────


class Way:
    """Keeps what is posted, and computes sums: at once, or when it is told to."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.later: list[Callable[[], None]] | None = None
        self.tasks = self

    def post(self, peer: str, message: Any) -> None:
        self.posted.append(message)

    def context(self, version: int, replica: int, replicas: int) -> tuple[int, ...]:
        return version, replica

    def compute(self, plan: Any, feeds: list[Array], context: Any, then: Callable[..., None], failed: Any) -> None:
        found = [feeds[0] + context[0]]
        if self.later is None:
            then(found)
        else:
            self.later.append(lambda: then(found))

    def start(self, work: Coroutine[Any, None, None]) -> None:
        assert self.later is not None

        def whole() -> None:
            with pytest.raises(StopIteration):
                work.send(None)

        self.later.append(whole)

    async def run_plan(self, plan: Any, feeds: list[Array], context: tuple[int, int]) -> list[Array]:
        return [feeds[0] + context[0]]

    def go_on(self) -> list[Any]:
        """What was posted, once what was put off is computed."""
        waiting, self.later = self.later or [], None
        for each in waiting:
            each()
        posted, self.posted = self.posted, []
        return posted


PLAN: Any = SimpleNamespace(
    plan=SimpleNamespace(feeds=[SimpleNamespace(spec=fr.Spec("int64", (None,)), name="", site="")]),
    run_now=lambda feeds, version: [feeds[0] + version],
)
LONG: Any = SimpleNamespace(plan=PLAN.plan, run_now=lambda feeds, version: None)
SERVER: Any = SimpleNamespace(run=1, server=0, replicas=("a", "b"), group="t", staleness=0)


def wants(number: int, version: int = -1) -> Wants:
    return Wants(1, 1, number, version, (np.array([number]),))


def test_a_server_gives_rows_of_the_batch_after_the_last_or_of_the_one_asked_for() -> None:
    way: Any = Way()
    gathering = Gathering(SERVER, PLAN, way, lambda *error: None, lambda: None)
    assert gathering.give(1, 7) == (0, ())
    for number in (1, 2):
        gathering.hear(wants(number), 7)
    assert [gathering.give(1, version) for version in (8, 9, 10)] == [(1, ([9],)), (2, ([11],)), (0, ())]
    assert way.go_on() == []
    gathering.hear(wants(3), 10)
    gathering.hear(wants(2, 10), 10)  # the replica has not used it yet: the next is 3 again
    gathering.hear(wants(2, 9), 10)  # and of a version that is no more, nothing comes
    assert [(m.version, m.number, m.rows) for m in way.go_on()] == [(10, 2, ([12],))]
    assert gathering.give(1, 11)[0] == 3
    assert gathering.give(0, 11) == (0, ())


def test_batches_that_are_named_far_ahead_are_given_rows_in_turn() -> None:
    way: Any = Way()
    gathering = Gathering(SERVER, PLAN, way, lambda *error: None, lambda: None)
    for number in range(1, 200):
        gathering.hear(wants(number), 0)
    assert [gathering.give(1, version)[0] for version in range(1, 200)] == list(range(1, 200))


def test_rows_that_take_long_come_behind_their_version() -> None:
    way: Any = Way()
    way.later, rested = [], []
    gathering = Gathering(SERVER, LONG, way, lambda *error: None, lambda: rested.append(True))
    gathering.hear(wants(4), 0)
    assert gathering.give(1, 5) == (4, ())
    assert not gathering.rests
    assert [(type(m), m.version, m.number, m.rows) for m in way.go_on()] == [(AskedRows, 5, 4, ([9],))]
    assert (gathering.rests, rested) == (True, [True])


class Asker:
    """A replica's asking, of batches that are their own numbers; the second server has no rows."""

    def __init__(self, plan: Any = None) -> None:
        self.way: Any = Way()
        self.batches: dict[int, Any] = {}
        role: Any = SimpleNamespace(run=1, replica=1, replicas=2, servers=("a", "b"), wants=((0,), ()), group="t")
        self.asking = Asking(role, plan, self.way, self.batches.__setitem__)

    def come(self, *numbers: int) -> list[Any]:
        for number in numbers:
            self.asking.come(number, [np.array([number])])
        self.asking.say()
        return self.asked()

    def asked(self) -> list[Any]:
        return [(m.number, m.version) for m in self.way.go_on()]

    def has(self, version: int, number: int) -> bool:
        return self.asking.has(version, number, self.batches[number])

    def told(self, version: int, number: int, *rows: Any) -> None:
        self.asking.hear(NewVersion(1, version, 0, 1, 0, False, version, (), number, rows))


def test_a_replica_asks_again_for_rows_that_its_server_did_not_foresee_once() -> None:
    asker = Asker()
    assert asker.come(1, 2) == [(1, -1), (2, -1)]
    asker.told(5, 1, "rows")
    assert (asker.has(5, 1), asker.asking.rows_of(0), asker.asked()) == (True, ("rows",), [])
    asker.told(6, 3, "others")
    assert [asker.has(6, 2), asker.has(6, 2), asker.asked()] == [False, False, [(2, 6)]]
    asker.asking.hear(AskedRows(1, 6, 0, 1, 2, ("rows",)))
    assert asker.has(6, 2)


def test_a_replica_waits_for_rows_that_come_behind_their_version() -> None:
    asker = Asker()
    asker.come(1)
    asker.told(5, 1)
    assert [asker.has(5, 1), asker.asked()] == [False, []]
    asker.asking.broken(0, asker.batches)
    assert asker.asked() == [(1, 5)]


def test_batches_are_admitted_in_order_however_long_it_takes_to_tell_their_rows() -> None:
    asker = Asker(PLAN)
    asker.way.later = []
    for number in (1, 2):
        asker.asking.come(number, [np.array([number])])
    assert asker.batches == {}
    assert asker.asked() == []
    assert asker.batches == {1: [[1], [2]], 2: [[2], [4]]}
    assert asker.asking.with_update() == [((1, ([1],)), (2, ([2],))), ()]
    for number in range(3, 2000):  # however many, one after another
        asker.asking.come(number, [np.array([number])])
    assert sorted(asker.batches) == list(range(1, 2000))
    asker = Asker(PLAN)
    asker.way.later = []
    for number in range(1, 2000):
        asker.asking.come(number, [np.array([number])])
    asker.way.go_on()
    assert sorted(asker.batches) == list(range(1, 2000))
