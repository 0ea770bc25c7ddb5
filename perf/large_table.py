"""A table that no server could hold: split over two, each under a limit of memory, and what its size costs a step.

    python perf/large_table.py [--gib 4] [--limit-gib 3] [--steps 60]

Each server's address space is limited (RLIMIT_AS, which counts all that it maps) before anything is put on it. Then a
table of a 64th of the size, and that of full size, are trained by turns, with lookups of as many rows; the whole on one
server under the same limit is shown to fail. Prints the machine, medians with quartiles, and what each process held.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

GIB, WIDTH, LOOKUPS = 1 << 30, 64, 1024


def trainer(rows: int, servers: int) -> tuple[fr.Graph, fr.train.Replicated]:
    def loss_fn(batch: dict[str, Any]) -> Any:
        start = fr.random.normal((rows, WIDTH), stddev=0.01, seed=1)
        table = fr.Variable(start, name="table", partition=servers if servers > 1 else None)
        return fr.mean(fr.square(fr.nn.embedding_lookup(table, batch["ids"]) - 1.0))

    with fr.Graph(seed=1) as graph:
        inputs = {"ids": fr.Spec("int64", (LOOKUPS,))}
        return graph, fr.train.Replicated(
            loss_fn, inputs, fr.optim.SGD(1000.0), replicas=1, servers=servers, split_above=None
        )


def batches(rows: int, steps: int) -> Iterator[dict[str, Any]]:
    given = np.random.default_rng(0)
    for _ in range(steps):
        yield {"ids": given.integers(0, rows, LOOKUPS)}


def most_held(pid: int) -> int:
    """The most memory that a process has held so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


class Training:
    """A trainer under way on a cluster of its own, whose servers have a limit of memory."""

    def __init__(self, cluster: fr.LocalCluster, reports: Any) -> None:
        self._cluster = cluster
        self._reports = reports
        self.seconds: list[float] = []
        self.loss = float("nan")

    async def step(self) -> None:
        report = await anext(self._reports)
        self.seconds.append(report.seconds)
        self.loss = report.loss

    def told(self, what: str) -> float:
        """The median of its steps, after a quarter of them; printed with all else."""
        low, middle, high = (1e3 * s for s in quantiles(self.seconds[len(self.seconds) // 4 :], n=4))
        held = ", ".join(f"{task} {most_held(p.pid) / GIB:.2f}" for task, p in self._cluster.processes.items())
        print(f"{what}: step {middle:.2f} ms ({low:.2f} to {high:.2f}), loss {self.loss:.4f}; GiB held: {held}")
        return middle


@asynccontextmanager
async def training(rows: int, servers: int, limit: int, steps: int) -> AsyncIterator[Training]:
    graph, made = trainer(rows, servers)
    async with fr.LocalCluster(ps=servers, worker=1) as cluster:
        for task, process in cluster.processes.items():
            if task.startswith("/job:ps"):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        async with fr.Session(graph, cluster=cluster) as session:
            yield Training(cluster, made.steps(session, batches(rows, steps)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--limit-gib", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print(this_machine.describe())
    limit, rows = int(given.limit_gib * GIB), int(given.gib * GIB) // (4 * WIDTH)
    async with (
        training(rows // 64, 2, limit, given.steps) as small,
        training(rows, 2, limit, given.steps) as large,
    ):
        for _ in range(given.steps):
            await small.step()
            await large.step()
        ratio = 1 / small.told(f"{given.gib / 64:g} GiB over two") * large.told(f"{given.gib:g} GiB over two")
    print(f"64 times the rows take {ratio:.2f} times a step")
    try:
        async with training(rows, 1, limit, 1) as whole:
            await whole.step()
    except fr.FlowrtError as error:
        print(f"whole, on one server of the same limit: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    else:
        print("whole, on one server of the same limit: it fits, so the limit shows nothing")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"this client held {peak / GIB:.2f} GiB at most")


if __name__ == "__main__":
    asyncio.run(main())
