"""Replicated training whose versions and updates are seen in memory: the same bits as by the port, whoever dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.net.stream.local import Local
from flowrt.sched.host.memory import Memory

pytestmark = pytest.mark.skipif(not Local(Memory()).segments, reason="needs Linux' files in memory")

ROWS, COLUMNS = 300, 500  # 600 kB: large enough to be seen
INPUTS = {"x": fr.Spec("float32", (None, ROWS))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.full((ROWS, COLUMNS), 0.1, np.float32), name="w")
    return fr.mean(fr.square(fr.tanh(inputs["x"] @ w) - 0.5))


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        yield {"x": rng.normal(size=(4, ROWS)).astype(np.float32)}


def program(replicas: int, policy: Any, servers: int = 1) -> tuple[fr.Graph, fr.train.Replicated]:
    with fr.Graph() as graph:
        return graph, fr.train.Replicated(
            loss_fn, INPUTS, fr.optim.Momentum(0.05, 0.9), replicas=replicas, servers=servers, policy=policy
        )


async def shared_bytes(session: fr.Session) -> dict[str, int]:
    runner: Any = session._runner
    return {task: told["bytes_shared"] for task, told in (await runner._master.statistics()).items()}


async def test_training_by_memory_and_by_port_comes_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for way in ("shared", "tcp"):
        monkeypatch.setenv("FLOWRT_TRANSPORT", way)
        graph, trainer = program(2, fr.train.AllOf())
        async with fr.LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            losses = [(await anext(steps)).loss for _ in range(12)]
            await steps.aclose()
            found[way] = losses, await session.run(trainer.variables[0])
            seen = await shared_bytes(session)
        nbytes = 4 * ROWS * COLUMNS
        if way == "shared":
            assert all(count >= 12 * nbytes for count in seen.values()), "versions down, updates up"
        else:
            assert not any(seen.values())
    assert found["shared"][0] == found["tcp"][0]
    assert np.array_equal(found["shared"][1], found["tcp"][1])


async def test_what_others_and_the_client_see_stays_whole_when_a_worker_is_killed() -> None:
    graph, trainer = program(3, fr.train.FirstOf(2))
    async with fr.LocalCluster(ps=1, worker=3) as cluster, fr.Session(graph, cluster=cluster) as session:
        before = await session.run(trainer.variables[0])
        reports = []
        async for report in trainer.steps(session, batches()):
            reports.append(report)
            if len(reports) == 10:
                cluster.processes["/job:worker/task:1"].kill()
            if len(reports) >= 60 and trainer.statistics().lost:  # of which the client hears beside the steps
                break
        assert reports[-1].kept == (0, 2)
        assert all(np.isfinite(report.loss) for report in reports)
        after = await session.run(trainer.variables[0])
        assert (before == np.float32(0.1)).all(), "what was fetched is the caller's own"
        assert not np.array_equal(before, after)
        assert trainer.statistics().lost == ("/job:worker/task:1",)
