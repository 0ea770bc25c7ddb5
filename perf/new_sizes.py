"""What a step takes whose batch has a size that it never had, beside one of a size that it knows.

Sentences, graphs and queries come in ever other sizes, and each is a recording of the step's tape. An MLP of `--layers`
layers is trained by SGD on batches of 1 to so many rows, each size once; then on the last of them again and again. CPU
time, as others disturb it less; and the calls of Python functions of one recording, which nobody disturbs.

    python perf/new_sizes.py
    python perf/new_sizes.py --layers 1 --width 8
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import machine
import numpy as np

import flowrt as fr


def build(layers: int, width: int) -> tuple[fr.Graph, Any, Any]:
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float32", (None, width), name="x")
        h = x
        for layer in range(layers):
            w = fr.Variable(fr.random.normal((width, width), stddev=width**-0.5), name=f"w{layer}")
            h = fr.relu(h @ w + fr.Variable(fr.zeros((width,)), name=f"b{layer}"))
        loss = fr.mean(fr.square(h - x))
        return graph, x, [loss, fr.optim.SGD(0.01).minimize(loss)]


async def seconds(step: Any, sizes: Sequence[int], width: int) -> list[float]:
    taken = []
    for rows in sizes:
        batch = np.ones((rows, width), np.float32)
        began = time.process_time()
        await step(batch)
        taken.append(time.process_time() - began)
    return taken


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    asked = parser.parse_args()
    print(machine.describe())
    graph, x, fetches = build(asked.layers, asked.width)
    async with fr.Session(graph) as session:
        step = session.compile(fetches, feeds=[x])
        await seconds(step, range(1, 20), asked.width)
        new = await seconds(step, range(20, 120), asked.width)
        known = await seconds(step, [119] * 100, asked.width)
        calls = cProfile.Profile()
        calls.enable()
        await seconds(step, range(120, 140), asked.width)
        calls.disable()
    for what, found in (("a new size", new), ("a known one", known)):
        print(f"{what}: {1e3 * statistics.median(found):.3f} ms of CPU ({1e3 * min(found):.3f} at best)")
    print(f"calls of a step of a new size: {pstats.Stats(calls).total_calls // 20:,}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    asyncio.run(main())
