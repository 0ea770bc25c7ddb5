"""What a partition of 10 s does to training: of a worker, a server, or the client, both ways and one way.

    .venv/bin/python perf/chaos/partitions.py [--seconds 10] [--only worker:1 ...] [--ways both to from]

Each node is in a network namespace of its own; the router drops packets silently. Printed for each cut: the longest
time without a step while it lasted, how long after healing the next step came and who was cut off counted again, and
whether any update was applied twice, or not by all servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(Path(__file__).parent)]

import network  # noqa: E402
import records  # noqa: E402
from nodes import Cluster  # noqa: E402
from training import Receipts, batches, build  # noqa: E402

import flowrt as fr  # noqa: E402

REPLICAS, SERVERS, KEEP = 4, 2, 3
TASKS = [*(f"/job:ps/task:{i}" for i in range(SERVERS)), *(f"/job:worker/task:{i}" for i in range(REPLICAS))]
PACE = 0.005  # seconds that the client takes for a report: the machine is to have time for other things
SAMPLES = {
    "next step after healing, s": "next step after healing",
    "counts again after, s": "counted again after",
    "longest stall, s": "longest time without a step",
}
WITHIN = 5.0  # seconds after healing in which training is to go on


async def partition(net: network.Network, task: str, way: str, seconds: float) -> dict[str, Any]:
    """Train, cut a task off, heal, train on; answers what was seen."""
    graph, trainer = build(REPLICAS, fr.train.FirstOf(KEEP), SERVERS)
    replica = int(task.rpartition(":")[2]) if "worker" in task else None
    receipts, clock = Receipts(), time.monotonic
    seen: dict[str, Any] = {"cut off": task, "way": way, "seconds": seconds}
    loop = asyncio.get_running_loop()
    async with Cluster(net, ps=SERVERS, worker=REPLICAS, threads=1) as cluster, fr.Session(graph, cluster=cluster) as s:
        steps = trainer.steps(s, batches())
        times = [clock()]

        async def until(sign: Any) -> None:
            async with asyncio.timeout(60):
                async for report in steps:
                    receipts.add(report)
                    times.append(clock())
                    if sign(report):
                        return
                    await asyncio.sleep(PACE)

        began = clock()
        await until(lambda _: clock() - began > 2.0)
        seen["median step, ms"] = round(1000 * _median(times), 2)
        net.cut(task, way)
        cut, before = clock(), len(times)
        loop.call_later(seconds, net.heal, task)
        await until(lambda _: clock() - cut >= seconds)
        during, healed = [cut, *times[before:]], cut + seconds
        seen["longest stall, s"] = round(max(b - a for a, b in zip(during, [*during[1:], healed], strict=True)), 2)
        seen["next step after healing, s"] = round(max(0.0, times[-1] - healed), 2)
        if replica is not None:
            await until(lambda report: replica in report.kept)
            seen["counts again after, s"] = round(clock() - healed, 2)
        again = clock()
        await until(lambda _: clock() - again > 1.0)
        await steps.aclose()
        await receipts.check(s, trainer)
    seen["steps"], seen["violations"] = receipts.steps, receipts.violations
    if seen["next step after healing, s"] > WITHIN:
        seen["violations"].append(f"the next step came {seen['next step after healing, s']:.1f} s after healing")
    return seen


def _median(times: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in pairwise(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", default=["worker:1", "ps:0", "ps:1", "client"], help="who is cut off")
    parser.add_argument("--ways", nargs="+", default=[network.BOTH, network.TO, network.FROM])
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    options = parser.parse_args()
    network.enter()
    logging.disable(logging.WARNING)
    rows = []
    for who in options.only:
        task = who if who == network.CLIENT else "/job:{}/task:{}".format(*who.split(":"))
        found = []
        for way in options.ways:
            with network.Network(TASKS) as net:
                found.append(asyncio.run(partition(net, task, way, options.seconds)))
            print(json.dumps(found[-1]), flush=True)
        rows.append(_row(who, options, found))
    records.show(rows)
    if options.json:
        which = "-".join([*options.only, *options.ways]).replace(":", "")
        records.write(options.json / f"partitions-{options.seconds:g}-{which}.json", rows)
    return 1 if any(row["violations"] for row in rows) else 0


def _row(who: str, options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> records.Row:
    name = {"w": f"worker {who[7:]}", "p": f"parameter server {who[3:]}", "c": "the client"}[who[0]]
    fault = f"{name} of {REPLICAS} workers, {SERVERS} servers and a client cut off for {options.seconds:g} s"
    samples = {name: [one[key] for one in found if key in one] for key, name in SAMPLES.items()}
    violations = [violation for one in found for violation in one["violations"]]
    seen = {name: seconds for name, seconds in samples.items() if seconds}
    return records.row(5, f"{fault}, both ways or one way", len(found), violations, samples=seen)


if __name__ == "__main__":
    sys.exit(main())
