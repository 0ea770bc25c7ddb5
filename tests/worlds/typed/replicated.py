"""Replicated training over processes, as a program of types has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np

import flowrt as fr


def loss_fn(inputs: dict[str, fr.Tensor]) -> tuple[fr.Tensor, dict[str, fr.Tensor]]:
    w = fr.Variable(np.zeros((64, 10), "float32"), name="w")
    logits = inputs["images"] @ w
    loss = fr.mean(fr.nn.softmax_cross_entropy(logits, inputs["labels"]))
    return loss, {"largest": fr.max(logits)}


def predict(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
    w = fr.Variable(np.zeros((64, 10), "float32"), name="w")
    return fr.argmax(inputs["images"] @ w, axis=-1)


with fr.Graph() as graph:
    trainer = fr.train.Replicated(
        loss_fn,
        inputs={"images": fr.Spec("float32", (None, 64)), "labels": fr.Spec("int32", (None,))},
        optimizer=fr.optim.Adam(0.1),
        replicas=2,
        policy=fr.train.FirstOf(1),
    )
    predictor = trainer.share(predict, inputs={"images": fr.Spec("float32", (None, 64))})


def batches(steps: int) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    for _ in range(2 * steps):
        images = rng.normal(size=(32, 64)).astype("float32")
        yield {"images": images, "labels": images[:, :10].argmax(1).astype("int32")}


async def main() -> list[float]:
    losses: list[float] = []
    cluster = fr.LocalCluster(ps=1, worker=2, delays={"/job:worker/task:1": fr.delays.Constant(0.01)})
    async with cluster, fr.Session(graph, cluster=cluster) as session:
        async for report in trainer.steps(session, batches(5)):
            print(report.step, report.loss, report.kept, report.late, report.seconds)
            losses.append(report.loss)
        chosen = await predictor(session, {"images": np.zeros((3, 64), "float32")})
        print(chosen, trainer.statistics())
        for address, process in cluster.processes.items():
            print(address, process.pid)
    return losses


async def checkpointed(folder: str) -> None:
    checkpoints = fr.Checkpoints(folder, every_steps=10, keep=2)
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        await session.save()
        await session.restore()


def simulated() -> float:
    found = fr.simulate(fr.train.FirstOf(3), fr.delays.Exponential(0.1), replicas=4, steps=100)
    return float(found.seconds.sum())


if __name__ == "__main__":
    try:
        print(asyncio.run(main()))
    except fr.NodeLost as error:
        print(error)
