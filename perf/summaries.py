"""What summaries cost a training loop, in microseconds: of the caller's thread, and of the writer's own.

A report is one of a trainer of 4 replicas; a histogram is of 10,000 floats. The caller only notes what it is told; what
the writer's thread takes is time of the interpreter, which it gives back after half a millisecond, or of another core.
PyTorch's writer, where ``--peer`` says in which folder it is installed, is told the same scalars and histograms.

    python perf/summaries.py
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

REPLICAS = 4
VALUES = np.random.default_rng(0).normal(size=10_000).astype(np.float32)


def loss_fn(inputs: dict[str, Any]) -> Any:
    w = fr.Variable(np.ones((8, 1), np.float32), name="w")
    product = inputs["x"] @ w
    return fr.mean(fr.square(product)), {"mean": fr.mean(product)}


def batches(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": rng.normal(size=(4, 8)).astype(np.float32)}


async def reports_of(steps: int) -> list[Any]:
    """Of a trainer in this process."""
    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float32", (None, 8))}
        anywhere = {"server_device": "", "worker_device": ""}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.01), replicas=REPLICAS, **anywhere)
    async with fr.Session(graph) as session:
        return [report async for report in trainer.steps(session, batches(REPLICAS * steps))]


def measure(tell: Callable[[int], None], flush: Callable[[], None], calls: int) -> tuple[float, float]:
    """CPU microseconds of a call: of this thread, and of all others until it is written."""
    mine, all_of_us = time.thread_time(), time.process_time()
    for number in range(calls):
        tell(number)
    mine = time.thread_time() - mine
    flush()
    return 1e6 * mine / calls, 1e6 * (time.process_time() - all_of_us - mine) / calls


def flowrts(folder: str, reports: list[Any]) -> dict[str, tuple[Callable[[int], None], Callable[[], None]]]:
    writer = fr.summary.Writer(folder, flush_seconds=60)
    told: dict[str, Callable[[int], None]] = {
        "report": lambda number: writer.report(reports[number % len(reports)]),
        "scalar": lambda number: writer.scalar("loss", 0.5, number),
        "histogram": lambda number: writer.histogram("weights", VALUES, number),
    }
    return {what: (tell, writer.flush) for what, tell in told.items()}


def torchs(folder: str) -> dict[str, tuple[Callable[[int], None], Callable[[], None]]]:
    """PyTorch's, where it is found; its queue, whose caller waits where it holds ten events, is made longer."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return {}
    writer = SummaryWriter(folder, max_queue=1_000_000)
    told: dict[str, Callable[[int], None]] = {
        "scalar": lambda number: writer.add_scalar("loss", 0.5, number),
        "histogram": lambda number: writer.add_histogram("weights", VALUES, number, bins=30),
    }
    return {what: (tell, writer.flush) for what, tell in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="a folder that PyTorch was installed into")
    arguments = parser.parse_args()
    if arguments.peer is not None:
        sys.path.append(str(arguments.peer))
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "flowrt": flowrts(f"{folder}/flowrt", asyncio.run(reports_of(200))),
            "torch": torchs(f"{folder}/torch"),
        }
        cases = [(side, what, *case) for side, found in sides.items() for what, case in found.items()]
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for side, what, tell, flush in cases:
                taken.setdefault((side, what), []).append(measure(tell, flush, arguments.calls))
    print(this_machine.describe())
    print("CPU microseconds of a call, median of the rounds: the caller's, the writer's")
    for (side, what), rounds in taken.items():
        caller, thread = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"{side:8} {what:10} {caller:8.1f} {thread:8.1f}")


if __name__ == "__main__":
    main()
