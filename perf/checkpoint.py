"""What a checkpoint costs: the time to save and to restore, what steps take meanwhile, and the client's memory.

    python perf/checkpoint.py [--mib 1024] [--steps 12] [--saves 2] [--folder FOLDER]
    python perf/checkpoint.py --mib 256 --moved 1024 --steps 500     # a table, of which each step moves so many rows

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
MANY = 40  # steps are not told one by one
NARROW = 64  # columns of a table of which steps move some rows


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


def table(mib: int) -> tuple[fr.Graph, fr.train.Replicated, list[fr.Tensor]]:
    rows = mib * MIB // (4 * NARROW)

    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        whole = fr.Variable(fr.zeros((rows, NARROW)), name="table", partition=2)
        return fr.sum(fr.take(whole, inputs["ids"]))

    with fr.Graph() as graph:
        inputs = {"ids": fr.Spec("int64", (None,))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(1.0), replicas=1, servers=2)
        rows_of_it = [fr.take(trainer.variables[0], [0])]
    return graph, trainer, rows_of_it


def check(rows: list[np.ndarray], step: int) -> None:
    """A step takes 1 off every entry."""
    assert all((row == -step).all() for row in rows), (rows, step)


def batches(count: int, moved: int, mib: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        ids = rng.integers(1, mib * MIB // (4 * NARROW), moved)
        yield {"ids": np.append(ids, 0)} if moved else {"x": np.ones((2, 3), np.float32)}


def resident(what: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


async def measure(mib: int, steps: int, saves: int, moved: int, folder: Path) -> None:
    graph, trainer, rows = table(mib) if moved else model(mib)
    checkpoints = fr.Checkpoints(folder, every_steps=steps, keep=1)
    async with (
        fr.LocalCluster(ps=2, worker=1) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
    ):
        before = resident("VmRSS")
        given = batches(steps * (saves + 1) - 1, moved, mib)
        alone, after = await train(trainer, session, checkpoints, steps, given)
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
            told = f"{len(beside)} steps"
            if len(beside) < MANY:
                told = " ".join(f"{seconds:.3f}" for seconds in beside) + " s"
            print(f"  beside the save due at step {due}: {told}, mean {mean:.2f}, slowest {slowest:.2f} medians")
        print(f"slowest step without a save: {max(alone) / undisturbed:.2f} medians")
        print(f"save, waited for: {tell(written)}, {mib / statistics.median(written):.0f} MiB/s")
        print(f"restore: {tell(read)}, {mib / statistics.median(read):.0f} MiB/s")
        print(f"the client grew by {grown:.0f} MiB in training and saving, by {resident('VmHWM') - before:.0f} in all")


async def train(
    trainer: fr.train.Replicated,
    session: fr.Session,
    checkpoints: fr.Checkpoints,
    steps: int,
    given: Iterator[dict[str, np.ndarray]],
) -> tuple[list[float], dict[int, list[float]]]:
    """The seconds of steps with no save under way, and of those with one, by the step at which it was due, which is
    the first of them. The first steps of all are left out."""
    alone: list[float] = []
    after: dict[int, list[float]] = {}
    at, warm = time.perf_counter(), 2
    async for report in trainer.steps(session, given):
        now = time.perf_counter()
        if report.step > warm:
            asked = report.step % steps == 0
            beside = asked or checkpoints.is_saving
            (after.setdefault(report.step // steps * steps, []) if beside else alone).append(now - at)
        at = now
    return alone, after


def tell(seconds: list[float]) -> str:
    """The median, and from where to where they go."""
    return f"{statistics.median(seconds):.4f} s ({min(seconds):.4f} to {max(seconds):.4f}, {len(seconds)} of them)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--moved", type=int, default=0, help="rows of one table that a step moves; 0: all of a model")
    parser.add_argument("--folder", help="where to save; by default a temporary folder")
    given = parser.parse_args()
    print(describe())
    print(f"{given.mib} MiB on two servers, one worker, {given.steps} steps between saves")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        asyncio.run(measure(given.mib, given.steps, given.saves, given.moved, Path(folder)))


if __name__ == "__main__":
    main()
