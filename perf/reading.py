"""Batches that the client reads and sends, beside batches that the workers read: seconds of a step, and the client's.

Both train on the same npz file, mapped, and take the same batches, in turn in one session; what all steps' losses come
to is checked. The model takes next to no time: a step is what its batches cost. The client's seconds are of its
processor, for a step.

    python perf/reading.py                          # digits, then batches of 1, 4 and 8 MB, with 4 workers
    FLOWRT_TRANSPORT=tcp python perf/reading.py 4   # as between machines, but for their network
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np

import flowrt as fr

WIDTH = 1024
DIGITS = (32, 64)  # rows and numbers of a row


def save(path: Path, rows: int, width: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    np.savez(path, x=x)


def build(workers: int, width: int) -> tuple[fr.Graph, fr.train.Replicated]:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        w = fr.Variable(np.ones((width,), np.float32), name="w")
        return fr.mean(inputs["x"] * w)

    with fr.Graph() as graph:
        spec = fr.Spec("float32", (None, width))
        return graph, fr.train.Replicated(loss_fn, {"x": spec}, fr.optim.SGD(0.0), replicas=workers)


async def timed(trainer: fr.train.Replicated, session: fr.Session, batches: object) -> tuple[float, float, float]:
    """Seconds of a step, the client's of its processor, and what the losses come to."""
    began, spent, losses = 0.0, 0.0, []
    async for report in trainer.steps(session, batches):
        if not losses:
            began, spent = time.perf_counter(), time.process_time()
        losses.append(float(report.loss))
    steps = len(losses) - 1
    return (time.perf_counter() - began) / steps, (time.process_time() - spent) / steps, math.fsum(losses)


async def measure(workers: int, batch: int, width: int, steps: int, rounds: int, path: Path) -> str:
    save(path, max(4 * batch, 1797), width)
    source = fr.data.npz(path, batch=batch, shuffle=True)
    per_epoch = source.batches_per_epoch or 1
    source = fr.data.npz(path, batch=batch, epochs=-(-steps * workers // per_epoch))
    graph, trainer = build(workers, width)
    found: dict[str, list[tuple[float, float]]] = {"client": [], "workers": []}
    async with fr.LocalCluster(ps=1, worker=workers) as cluster, fr.Session(graph, cluster=cluster) as session:
        for turn in range(rounds + 1):
            sums = set()
            for side, batches in (("client", iter(source)), ("workers", source)):
                wall, spent, total = await timed(trainer, session, batches)
                sums.add(round(total, 4))
                if turn:  # the first prepares kernels
                    found[side].append((wall, spent))
            assert len(sums) == 1, f"they trained on other batches: {sums}"
    sides = [
        f"{side} {1e3 * np.median(walls):7.2f} ({1e3 * min(walls):.2f} to {1e3 * max(walls):.2f}), "
        f"of the client {1e3 * np.median(spents):.2f}"
        for side, (walls, spents) in ((side, tuple(zip(*times, strict=True))) for side, times in found.items())
    ]
    ratio = np.median([c[0] / w[0] for c, w in zip(*found.values(), strict=True)])
    return f"{batch * width * 4 / 1e6:6.3f} MB   ms a step: {';  '.join(sides)}   {ratio:.2f} times"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[0, 1, 4, 8], help="MB of a batch; 0 for digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    print(f"{machine.describe()}; {a.workers} workers; by {os.environ.get('FLOWRT_TRANSPORT', 'shared memory')}")
    for size in a.sizes:
        batch, width = (size * 10**6 // (4 * WIDTH), WIDTH) if size else DIGITS
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "some.npz"
            print(asyncio.run(measure(a.workers, batch, width, a.steps, a.rounds, path)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
