"""Lookups and sparse updates of a table split by rows, beside the whole one: in one process, and on two servers.

Each step looks up rows by ids that are drawn anew; with an optimiser it moves them, too. What comes of the table is
compared with the whole one's, bit by bit. Prints the machine, and medians with quartiles in milliseconds.

    python perf/split_tables.py                          # 1,024 ids into rows of 64 floats, in 2 and 8 parts
    python perf/split_tables.py --ids 32 65536 --columns 1 512 --parts 2 --here
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

ROWS = 1 << 15
MAKERS = {None: None, "Adam": lambda: fr.optim.Adam(0.1), "AdaGrad": lambda: fr.optim.AdaGrad(0.1)}


def build(columns: int, parts: int | None, optimizer: str | None, device: str) -> tuple[fr.Graph, Any, Any, Any]:
    """A graph with its ids, its table, and what a step fetches."""
    make = MAKERS[optimizer]
    with fr.Graph() as graph:
        ids = fr.placeholder("int64", (None,))
        with fr.device(device):
            table = fr.Variable(fr.random.normal((ROWS, columns), seed=1), name="table", partition=parts)
        rows = fr.take(table, ids)
        fetches = [fr.sum(rows)]
        if make is not None:
            fetches.append(make().minimize(fr.sum(fr.square(rows))))
    return graph, ids, table, fetches


async def measure(made: Any, cluster: Any, count: int, steps: int) -> tuple[list[float], Any]:
    """A step's quartiles in milliseconds, after a quarter of the steps, and what became of the table."""
    graph, ids, table, fetches = made
    given, seconds = np.random.default_rng(0), []
    async with fr.Session(graph, cluster=cluster) as session:
        step = session.compile(fetches, feeds=[ids])
        for _ in range(steps):
            drawn = given.integers(0, ROWS, count)
            began = time.perf_counter()
            await step(drawn)
            seconds.append(time.perf_counter() - began)
        value = await session.run(table)
        await session.reset()
    return [1e3 * s for s in quantiles(seconds[steps // 4 :], n=4)], value


async def compare(cluster: Any, where: str, count: int, columns: int, parts: Sequence[int], steps: int) -> None:
    device = "/job:ps" if cluster is not None else ""
    for optimizer in MAKERS:
        told, want = [], None
        for number in (None, *parts):
            (low, middle, high), value = await measure(build(columns, number, optimizer, device), cluster, count, steps)
            want = value if want is None else want
            np.testing.assert_array_equal(value, want)
            told.append(f"{'whole' if number is None else f'{number} parts'} {middle:.3f} ({low:.3f} to {high:.3f})")
        what = "looked up" if optimizer is None else f"and moved by {optimizer}"
        print(f"{where}, {count} ids, {columns} columns, {what}: {', '.join(told)}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, nargs="+", default=[1024])
    parser.add_argument("--columns", type=int, nargs="+", default=[64])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--here", action="store_true", help="in this process alone")
    given = parser.parse_args()
    print(this_machine.describe())
    cases = [(count, columns) for count in given.ids for columns in given.columns]
    for count, columns in cases:
        await compare(None, "one process", count, columns, given.parts, given.steps)
    if not given.here:
        async with fr.LocalCluster(ps=2, worker=1) as cluster:
            for count, columns in cases:
                await compare(cluster, "two servers", count, columns, given.parts, given.steps)


if __name__ == "__main__":
    asyncio.run(main())
