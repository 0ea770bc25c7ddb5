"""Adaptive on nodes: whom it waits for, while real processes are slow and recover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np

import flowrt as fr
from flowrt.train import Adaptive


def batches(size: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(1)
    while True:
        x = rng.normal(size=(size, 5)).astype(np.float32)
        yield {"x": x, "y": (x.sum(axis=1) + 5 * rng.normal(size=size)).astype(np.float32)}


async def test_a_slow_node_is_waited_for_no_longer_until_it_recovers() -> None:
    """All take 20 ms for a batch, the last 150 ms more in its first 60 steps."""

    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        w = fr.Variable(np.zeros((5, 1), np.float32), name="w")
        return fr.mean(fr.square(fr.matmul(inputs["x"], w)[:, 0] - inputs["y"]))

    given = {"x": fr.Spec("float32", (8, 5)), "y": fr.Spec("float32", (8,))}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, given, fr.optim.SGD(0.01), 4, policy=Adaptive())
    delays = dict.fromkeys([f"/job:worker/task:{i}" for i in range(3)], "0.02")
    delays["/job:worker/task:3"] = "0.02 + 0.15 during :60"
    kept: list[tuple[int, ...]] = []
    reasons: list[str] = []
    async with (
        asyncio.timeout(120),
        fr.LocalCluster(ps=1, worker=4, delays=delays) as nodes,
        fr.Session(graph, cluster=nodes) as session,
    ):
        async for report in trainer.steps(session, batches(8)):
            kept.append(report.kept)
            reasons.append(report.why)
            if report.step == 150:
                break
    print(kept, reasons[40:60])
    assert sum(3 in each for each in kept[30:60]) <= 6
    assert sum(3 in each for each in kept[60:]) >= 5
    assert any(" of 4: " in why and "worth" in why for why in reasons[30:60])
