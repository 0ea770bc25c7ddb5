"""What wall clocks that jump do to training: every two seconds by an hour, a day or 400 days, forth and back.

    .venv/bin/python perf/chaos/clocks.py [--seconds 20]

The program and all nodes run with a library of C before the system's, which tells the time so; it needs ``cc``.
Meanwhile a worker is killed and another one stopped, and a parameter server is killed. Printed: what training makes of
it to the bit, and the longest time without a step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(Path(__file__).parent)]

import records  # noqa: E402
from training import Receipts, batches, build  # noqa: E402

import flowrt as fr  # noqa: E402

REPLICAS, SERVERS, KEEP = 4, 2, 3
STALL = 5.0  # seconds without a step
JUMPING = "FLOWRT_CHAOS_PRELOADED"  # what else is preloaded, in a process whose clock jumps
SOURCE = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    static const long by[] = {0, 3600, -3600, 86400 * 400, -86400};
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return by[now.tv_sec / 2 % 5];
}
int clock_gettime(clockid_t clock, struct timespec *told) {
    int failed = syscall(SYS_clock_gettime, clock, told);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *told, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec, told->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
"""


async def train(seconds: float) -> records.Row:
    """Train while clocks jump and nodes end and stop."""
    graph, trainer = build(REPLICAS, fr.train.FirstOf(KEEP), SERVERS, copies=2)
    receipts, stalls, walls = Receipts(), [0.0], [time.time()]
    loop = asyncio.get_running_loop()
    async with (
        fr.LocalCluster(ps=SERVERS, worker=REPLICAS, threads=1, restart=True) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):

        def tell(task: str, number: signal.Signals) -> None:
            cluster.processes[task].send_signal(number)

        def begin() -> None:
            tell("/job:worker/task:0", signal.SIGKILL)
            tell("/job:worker/task:1", signal.SIGSTOP)
            loop.call_later(seconds / 4, tell, "/job:worker/task:1", signal.SIGCONT)
            loop.call_later(seconds / 2, tell, "/job:ps/task:0", signal.SIGKILL)

        began = last = time.monotonic()
        loop.call_later(seconds / 8, begin)
        async for report in trainer.steps(session, batches()):
            receipts.add(report)
            now = time.monotonic()
            stalls.append(now - last)
            last = now
            walls.append(time.time())
            if now - began > seconds:
                break
            await asyncio.sleep(0.005)
        await receipts.check(session, trainer)
    violations = receipts.violations
    if max(stalls[2:]) > STALL:
        violations.append(f"{max(stalls):.1f} s without a step")
    jumps = sum(abs(b - a) > 1800 for a, b in pairwise(walls))
    assert jumps, "the clock of this process goes on as ever"
    samples, counts = {"longest time without a step": [max(stalls[2:])]}, {"steps": receipts.steps, "jumps": jumps}
    fault = "wall clocks jump by 1 h to 400 days, forth and back, while nodes are killed and stopped"
    return records.row(23, fault, 1, violations, samples=samples, counts=counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    given: Any = parser.parse_args()
    if JUMPING not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/clock.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=SOURCE.encode(), check=True)
            before = os.environ.get("LD_PRELOAD", "")
            environment = {**os.environ, JUMPING: before, "LD_PRELOAD": f"{library} {before}"}
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    logging.disable(logging.WARNING)
    row = asyncio.run(train(given.seconds))
    records.show([row])
    if given.json:
        os.environ["LD_PRELOAD"] = os.environ[JUMPING]
        records.write(given.json / f"clocks-{given.seconds:g}.json", [row])
    return 1 if row["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
