"""What a checkpoint costs: the time to save and to restore, what steps take meanwhile, and the client's memory.

    python perf/checkpoint.py [--mib 1024] [--steps 12] [--saves 2] [--folder FOLDER]

Trains a model of so many MiB on two parameter servers with one worker, all on this machine. After every ``--steps``
steps a save begins, beside the steps that follow. A step is measured from report to report, the one that asks for the
save with its answer. Restored values are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

import flowrt as fr

MIB = 1 << 20
COLUMNS, VARIABLES = 256, 16


def model(mib: int) -> tuple[fr.Graph, fr.train.Replicated, list[fr.Tensor]]:
    rows = mib * MIB // (4 * COLUMNS * VARIABLES)

    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        variables = [fr.Variable(fr.zeros((rows, COLUMNS)), name=f"v{number}") for number in range(VARIABLES)]
        return fr.add_n([fr.sum(v) for v in variables]) * fr.mean(inputs["x"])

    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float32", (None, 3))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(1.0), replicas=1, servers=2)
        rows = [variable[0] for variable in trainer.variables]
    return graph, trainer, rows


def check(rows: list[np.ndarray], step: int) -> None:
    """A step takes 1 off every entry."""
    assert all((row == -step).all() for row in rows), (rows, step)


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    for _ in range(count):
        yield {"x": np.ones((2, 3), np.float32)}


def resident(what: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


async def measure(mib: int, steps: int, saves: int, folder: Path) -> None:
    graph, trainer, rows = model(mib)
    checkpoints = fr.Checkpoints(folder, every_steps=steps, keep=1)
    async with (
        fr.LocalCluster(ps=2, worker=1) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
    ):
        before = resident("VmRSS")
        alone, after = await train(trainer, session, checkpoints, steps, saves)
        await checkpoints.wait_saved()
        written = []
        for _ in range(saves):
            began = time.perf_counter()
            await session.save()
            written.append(time.perf_counter() - began)
        grown = resident("VmHWM") - before
        read = []
        for _ in range(saves):
            began = time.perf_counter()
            await session.restore()
            read.append(time.perf_counter() - began)
        check([await session.run(row) for row in rows], checkpoints.step)
        undisturbed = statistics.median(alone)
        print(f"steps without a save: median {tell(alone)}")
        for due, beside in after.items():
            mean, slowest = statistics.mean(beside) / undisturbed, max(beside) / undisturbed
            told = " ".join(f"{seconds:.3f}" for seconds in beside)
            print(f"  beside the save due at step {due}: {told} s, mean {mean:.2f}, slowest {slowest:.2f} medians")
        print(f"slowest step without a save: {max(alone) / undisturbed:.2f} medians")
        print(f"save, waited for: {tell(written)}, {mib / statistics.median(written):.0f} MiB/s")
        print(f"restore: {tell(read)}, {mib / statistics.median(read):.0f} MiB/s")
        print(f"the client grew by {grown:.0f} MiB in training and saving, by {resident('VmHWM') - before:.0f} in all")


async def train(
    trainer: fr.train.Replicated, session: fr.Session, checkpoints: fr.Checkpoints, steps: int, saves: int
) -> tuple[list[float], dict[int, list[float]]]:
    """The seconds of steps with no save under way, and of those with one, by the step at which it was due, which is
    the first of them. The first steps of all are left out."""
    alone: list[float] = []
    after: dict[int, list[float]] = {}
    at, warm = time.perf_counter(), 2
    async for report in trainer.steps(session, batches(steps * (saves + 1) - 1)):
        now = time.perf_counter()
        if report.step > warm:
            asked = report.step % steps == 0
            beside = asked or checkpoints.is_saving
            (after.setdefault(report.step // steps * steps, []) if beside else alone).append(now - at)
        at = now
    return alone, after


def tell(seconds: list[float]) -> str:
    """The median, and from where to where they go."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} of them)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--folder", help="where to save; by default a temporary folder")
    given = parser.parse_args()
    print(describe())
    print(f"{given.mib} MiB on two servers, one worker, {given.steps} steps between saves")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        asyncio.run(measure(given.mib, given.steps, given.saves, Path(folder)))


if __name__ == "__main__":
    main()
