"""Training whose right result is known to the bit, and a client of it as a process of its own.

The client's program: ``python training_world.py SETTINGS``, with the fields of `Settings` as JSON. It prints a line of
JSON for each report, and at the end one with a digest of the variables.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import flowrt as fr
from flowrt.base.errors import LinkBroken
from flowrt.train.opening import agree

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]


@dataclass(frozen=True)
class Settings:
    """What is trained, and where: ``model`` is one of `MODELS`, ``keep`` how many replicas count (0: all)."""

    model: str
    replicas: int = 2
    servers: int = 1
    keep: int = 0
    size: int = 1000
    steps: int = 10
    ahead: int = 0
    first: int = 0  # the first batch of a ledger that this client has
    pause: float = 0.0  # seconds that the client takes for each report
    jobs: Mapping[str, tuple[str, ...]] | None = None  # of a cluster; this process alone where there are none
    token_file: str = ""

    @property
    def policy(self) -> Any:
        return fr.train.FirstOf(self.keep) if self.keep else fr.train.AllOf()

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def approach(settings: Settings) -> tuple[Any, dict[str, fr.Spec], Any]:
    """Two variables of ``size`` numbers that go towards the batches' numbers, by sums whose bits tell their order."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        parts = [fr.Variable(np.zeros(settings.size, np.float32), name=f"w{i}") for i in range(2)]
        return fr.add_n([fr.sum(fr.square(w - inputs["x"])) * np.float32(0.5) for w in parts])

    return loss, {"x": fr.Spec("float32", ())}, fr.optim.Momentum(0.1, 0.9)


def approached(settings: Settings) -> Iterator[Batch]:
    rng = np.random.default_rng(5)
    for _ in range(settings.steps * settings.replicas):
        yield {"x": rng.normal(size=()).astype(np.float32)}


def ledger(settings: Settings) -> tuple[Any, dict[str, fr.Spec], Any]:
    """Two variables with an entry for each batch: minus how often the batch counted, by how many count in a version."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        parts = [fr.Variable(np.zeros(settings.size), name=f"w{i}") for i in range(2)]
        return fr.add_n([fr.sum(w * inputs["x"]) for w in parts])

    return loss, {"x": fr.Spec("float64", (settings.size,))}, fr.optim.SGD(1.0)


def entries(settings: Settings) -> Iterator[Batch]:
    for number in range(settings.first, settings.size):
        yield {"x": np.eye(1, settings.size, number)[0]}


def rows(settings: Settings) -> tuple[Any, dict[str, fr.Spec], Any]:
    """A table of ``size`` rows and a matrix: the gradient of the table is that of the rows that a batch names."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        table = fr.Variable(np.zeros((settings.size, 16), np.float32), name="table")
        w = fr.Variable(np.ones((16, 1), np.float32), name="w")
        return fr.mean(fr.square(fr.nn.embedding_lookup(table, inputs["i"]) @ w - inputs["y"]))

    inputs = {"i": fr.Spec("int64", (None,)), "y": fr.Spec("float32", (None, 1))}
    return loss, inputs, fr.optim.SGD(0.05)


def named_rows(settings: Settings) -> Iterator[Batch]:
    rng = np.random.default_rng(6)
    for _ in range(settings.steps * settings.replicas):
        y = rng.normal(size=(32, 1)).astype(np.float32)
        yield {"i": rng.integers(0, settings.size, 32), "y": y}


MODELS: dict[str, tuple[Callable[[Settings], Any], Callable[[Settings], Iterator[Batch]]]] = {
    "approach": (approach, approached),
    "ledger": (ledger, entries),
    "rows": (rows, named_rows),
}


@dataclass(frozen=True)
class Trained:
    """What came of training: the reports, as plain data, and the variables."""

    reports: list[dict[str, Any]]
    step: int
    values: list[Array]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(value.tobytes())
        return digest.hexdigest()


def build(settings: Settings, *, cluster: bool = True) -> tuple[fr.Graph, Any]:
    loss, inputs, optimizer = MODELS[settings.model][0](settings)
    where: dict[str, Any] = {} if cluster else {"server_device": "", "worker_device": ""}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss,
            inputs,
            optimizer,
            replicas=settings.replicas,
            policy=settings.policy,
            servers=settings.servers,
            **where,
        )
    return graph, trainer


async def train(
    settings: Settings, cluster: Any = None, tell: Callable[[dict[str, Any]], Any] = lambda report: None
) -> Trained:
    """Train ``steps`` steps; ``tell`` is called with each report, and may answer something to be awaited."""
    graph, trainer = build(settings, cluster=cluster is not None)
    reports = []
    more: dict[str, Any] = {"ahead": settings.ahead} if settings.ahead else {}
    async with fr.Session(graph, cluster=cluster) as session:
        steps = trainer.steps(session, MODELS[settings.model][1](settings), **more)
        async for report in steps:
            reports.append({name: getattr(report, name) for name in ("step", "kept", "late", "lost", "refused")})
            if (wait := tell(reports[-1])) is not None:
                await wait
            if report.step >= settings.steps:
                break
        await steps.aclose()
        step, values = await _read(session, trainer)
    return Trained(reports, int(step), values)


async def _read(session: fr.Session, trainer: Any) -> Any:
    """The version and the variables, asked for again where a connection breaks meanwhile."""
    while True:
        try:
            return await session.run([trainer.step, trainer.variables])
        except LinkBroken:
            continue


async def state(settings: Settings, cluster: Any) -> Trained:
    """The version and the variables as the next client finds them, once the servers have come to rest."""
    graph, trainer = build(settings)
    async with fr.Session(graph, cluster=cluster) as session:
        await agree(session._open_here(), await trainer.program(session), trainer.name)
        step, values = await session.run([trainer.step, trainer.variables])
    return Trained([], int(step), values)


def check_ledger(settings: Settings, trained: Trained) -> None:
    """Every version was made by as many batches as count, each of which counted once, on every server alike."""
    count = settings.keep or settings.replicas
    first, *others = (np.rint(-count * value).astype(int) for value in trained.values)
    assert all(np.array_equal(first, other) for other in others), "servers counted different batches"
    assert set(first.tolist()) <= {0, 1}, f"batches {np.flatnonzero((first < 0) | (first > 1))} counted more than once"
    assert first.sum() == count * trained.step, (first.sum(), count, trained.step)
    for report in trained.reports:
        assert len(report["kept"]) == count, report
    steps = [report["step"] for report in trained.reports]
    assert steps == list(range(trained.step - len(steps) + 1, trained.step + 1)), steps


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))

    def tell(report: dict[str, Any]) -> Any:
        print(json.dumps(report), flush=True)
        return asyncio.sleep(settings.pause) if settings.pause else None

    assert settings.jobs is not None
    trained = asyncio.run(train(settings, fr.ClusterSpec(settings.jobs, settings.token_file), tell))
    print(json.dumps({"digest": trained.digest, "step": trained.step}), flush=True)


if __name__ == "__main__":
    main()
