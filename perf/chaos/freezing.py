"""What a worker that is stopped (SIGSTOP) does to training, and when it counts again: FirstOf(3) of four.

    .venv/bin/python perf/chaos/freezing.py [--seconds 60] [--step 0.02]

Printed: the median step before and while it is stopped, how many batches it was handed meanwhile, when it was named as
suspect, and how long after SIGCONT its update counted. Workers sleep for the time of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(Path(__file__).parent)]

import records  # noqa: E402
from training import Receipts, batches, build  # noqa: E402

import flowrt as fr  # noqa: E402

REPLICAS, KEEP, VICTIM = 4, 3, 1
CALM = 8.0  # seconds before, that the stop is compared with
SLOWER, SOON, SUSPECT, MORE = 1.1, 2.0, 3.0, 1  # what is promised: times, seconds, seconds, batches


async def freeze(seconds: float, step: float) -> dict[str, Any]:
    """Train, stop one worker for a while, and train on until it counts again; answers what was seen."""
    graph, trainer = build(REPLICAS, fr.train.FirstOf(KEEP))
    tasks = [f"/job:worker/task:{replica}" for replica in range(REPLICAS)]
    receipts, clock, times = Receipts(), time.monotonic, list[float]()
    async with (
        fr.LocalCluster(ps=1, worker=REPLICAS, threads=1, delays=dict.fromkeys(tasks, step)) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, batches())

        async def until(sign: Callable[[fr.train.StepReport], bool]) -> list[float]:
            begin = len(times)
            async with asyncio.timeout(seconds + 60):
                async for report in steps:
                    receipts.add(report)
                    times.append(clock())
                    if sign(report):
                        break
            return times[begin:]

        begin = clock()
        await until(lambda _: clock() - begin > 2.0)
        begin = clock()
        calm = await until(lambda _: clock() - begin > CALM)
        process = cluster.processes[tasks[VICTIM]]
        process.send_signal(signal.SIGSTOP)
        stopped, suspect, handed = clock(), list[float](), 0

        def look(report: fr.train.StepReport) -> bool:
            nonlocal handed
            assert report.measured is not None
            handed += VICTIM in report.late and report.measured[0].stages[0] > stopped  # the version was opened since
            if not suspect and tasks[VICTIM] in session._open().suspects:
                suspect.append(clock() - stopped)
            return clock() - stopped > seconds

        during = await until(look)
        process.send_signal(signal.SIGCONT)
        back = clock()
        after = (await until(lambda report: VICTIM in report.kept))[-1] - back
        await until(lambda _: clock() - back > after + 1.0)
        await steps.aclose()
        await receipts.check(session, trainer)
    return {
        "seconds": seconds,
        "before": _median(calm),
        "during": _median(during),
        "suspect": suspect[0] if suspect else float("inf"),
        "handed": handed,
        "again": after,
        "violations": receipts.violations,
    }


def _median(times: list[float]) -> float:
    return statistics.median(b - a for a, b in pairwise(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=0.02, help="seconds that an update takes to compute")
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    seen = asyncio.run(freeze(options.seconds, options.step))
    slower = seen["during"] / seen["before"]
    broken = [
        *seen["violations"],
        *(["the median step was slower"] if slower > SLOWER else []),
        *(["it was handed batches"] if seen["handed"] > MORE else []),
        *(["it was named late"] if seen["suspect"] > SUSPECT else []),
        *(["it counted again late"] if seen["again"] > SOON else []),
    ]
    figure = (
        f"median step {1000 * seen['during']:.1f} ms, {slower:.2f} times the undisturbed; suspect after "
        f"{seen['suspect']:.1f} s; {seen['handed']} batches handed to it meanwhile; counted again "
        f"{seen['again']:.2f} s after SIGCONT"
    )
    row = records.row(4, f"SIGSTOP of one of {REPLICAS} for {options.seconds:g} s", 1, broken, figure)
    records.show([row])
    if options.json:
        records.write(options.json / f"freezing-{options.seconds:g}.json", [row])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
