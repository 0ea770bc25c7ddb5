"""What a step costs on a cluster: one tiny task, and two in a row, over real node processes on loopback.

The first feeds and fetches a scalar of one node; the second has one node double it for another, which doubles it for
the client. Medians, and the least, in microseconds.

    python perf/steps.py --steps 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import flowrt as fr
from perf.machine import describe


def build() -> tuple[fr.Graph, fr.Tensor, dict[str, fr.Tensor]]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (), name="x")
        with fr.device("/job:ps/task:0"):
            first = x + x
        with fr.device("/job:worker/task:0"):
            second = first + first
    return graph, x, {"one task": first, "two tasks": second}


async def measure(steps: int) -> dict[str, list[float]]:
    """Seconds of each step, by case."""
    graph, x, cases = build()
    use, seconds = np.float32(1.5), {}
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        for name, fetch in cases.items():
            step = session.compile(fetch, [x])
            for _ in range(20):
                await step(use)
            seconds[name] = [await timed(step, use) for _ in range(steps)]
    return seconds


async def timed(step: Any, use: Any) -> float:
    begin = time.perf_counter()
    await step(use)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop", help="of the master")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    options = parser.parse_args()
    factory = None
    if options.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        seconds = runner.run(measure(options.steps))
    if options.json:
        print(json.dumps({"machine": describe(), "loop": options.loop, "seconds": seconds}))
        return
    print(describe())
    print(f"a step on a cluster, master on {options.loop}, microseconds: median (least)")
    for name, each in seconds.items():
        print(f"{name:10} {statistics.median(each) * 1e6:7.0f}  ({min(each) * 1e6:.0f})")


if __name__ == "__main__":
    main()
