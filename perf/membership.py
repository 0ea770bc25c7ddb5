"""What replicas that are not there cost, and how soon one that comes counts.

First, of a trainer of 2 replicas and one of 2 to ``--most`` with two nodes up, in turn: seconds to build the graph, to
open the session and to have the first step's report. Then, while training goes on: seconds from the moment that a node
says it is ready until a report has kept its replica's update; and from SIGTERM until its process has ended.

    python perf/membership.py [--most 32] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

WIDTH, LAYERS = 64, 6


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    h = inputs["x"]
    for layer in range(LAYERS):
        w = fr.Variable(fr.random.normal((WIDTH, WIDTH), stddev=0.1, seed=layer), name=f"w{layer}")
        h = fr.nn.relu(h @ w)
    return fr.mean(fr.nn.softmax_cross_entropy(h, inputs["y"]))


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        yield {"x": rng.normal(size=(32, WIDTH)).astype("float32"), "y": rng.integers(0, WIDTH, 32).astype("int32")}


def build(replicas: Any, policy: Any) -> tuple[fr.Graph, Any]:
    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float32", (None, WIDTH)), "y": fr.Spec("int32", (None,))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.01), replicas=replicas, policy=policy)
    return graph, trainer


async def begin(replicas: Any) -> tuple[float, float, float]:
    """Seconds to build, to open, and to the first report."""
    times = [time.perf_counter()]
    graph, trainer = build(replicas, fr.train.FirstOf(2))
    times.append(time.perf_counter())
    async with fr.LocalCluster(ps=1, worker=2, threads=1) as cluster:
        up = time.perf_counter() - times[-1]
        async with fr.Session(graph, cluster=cluster) as session:
            times.append(time.perf_counter() - up)
            await anext(trainer.steps(session, batches()))
            times.append(time.perf_counter() - up)
    built, opened, first = np.diff(times)
    return float(built), float(opened), float(first)


async def come_and_go(most: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds until a node that was added counts, and until one that is removed has ended."""
    counts, ends = [], []
    graph, trainer = build((1, most), fr.train.FirstOf(1))
    async with fr.LocalCluster(ps=1, worker=1, threads=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        steps = trainer.steps(session, batches())
        await anext(steps)
        for _ in range(repeats + 1):  # the first one has the tower compiled
            adding = asyncio.ensure_future(cluster.add("worker"))
            ready = 0.0
            async for report in steps:
                if adding.done():
                    ready = ready or time.perf_counter()
                    if 1 in report.kept or 1 in report.late:
                        break
            counts.append(time.perf_counter() - ready)
            began = time.perf_counter()
            removing = asyncio.ensure_future(cluster.remove(adding.result()))
            async for _ in steps:
                if removing.done():
                    break
            ends.append(time.perf_counter() - began)
        await steps.aclose()
    return counts[1:], ends[1:]


def told(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f} s ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(this_machine.describe())
    ranges: list[Any] = [2, (2, given.most)]
    asyncio.run(begin(2))  # kernels that were never compiled here are now
    found: dict[str, list[tuple[float, float, float]]] = {str(replicas): [] for replicas in ranges}
    for _ in range(given.repeats):
        for replicas in ranges:
            found[str(replicas)].append(asyncio.run(begin(replicas)))
    print(f"{'replicas':10}{'build':>27}{'open':>27}{'first step':>27}")
    for name, times in found.items():
        print(f"{name:10}" + "".join(f"{told(list(column)):>27}" for column in zip(*times, strict=True)))
    counts, ends = asyncio.run(come_and_go(given.most, given.repeats))
    print(f"from ready until it counts {told(counts)}, from SIGTERM until it has ended {told(ends)}")


if __name__ == "__main__":
    main()
