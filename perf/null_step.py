"""What a synchronous step of replicated training costs where nothing is computed: one server, some workers, processes.

A worker's loss is half the sum of the squares of what it reads, so that its gradient is what it reads: a scalar,
100 MB, or 32 random rows of a table. A step waits for all workers and moves the variable by the mean. Beside flowrt, on
the same work in the same run: bare sockets, gloo's parameter server and all-reduce, PyTorch's DistributedDataParallel,
TensorFlow's in-graph towers and SyncReplicasOptimizer, and ray's actors; see sides/. Every side's variable is compared
with what so many steps make of it. Sides that are not installed (scripts/peers tf torch ray) are left out.

All sides of a case run at once and are measured in turns; a side's figure is the median step of the median round. What
each process spends is the kernel's count. The floor is what no step can do without: bare sockets' step, which is two
hops and the copies of the network, and one copy of what a step moves, in memory.

    python perf/null_step.py                                   # scalar, 4 workers, every side
    python perf/null_step.py dense rows-256MB --workers 2 4
    python perf/null_step.py scalar --workers 32 --sides flowrt sockets
    python perf/null_step.py dense --write                     # and into docs/performance.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import machine as this_machine
import numpy as np
import section
from compare import PAUSE_SECONDS, READY_SECONDS, Case, Failed, Process, versions
from sides import null_data
from spending import Counts, Spent

SIDES = {
    "flowrt": ("flowrt", ""),
    "flowrt-ahead": ("flowrt", "ahead"),
    "sockets": ("sockets", ""),
    "gloo-ps": ("torch", "ps"),
    "gloo-allreduce": ("torch", "allreduce"),
    "ddp": ("torch", "ddp"),
    "tf-ingraph": ("tf", "ingraph"),
    "tf-sync": ("tf", "sync"),
    "ray": ("ray", ""),
}
WHAT = {
    "scalar": "a scalar",
    "dense": "100 MB",
    "rows-2.5MB": "32 rows of a table of 10,000",
    "rows-256MB": "32 rows of a table of 1,000,000",
    "rows-2.5GB": "32 rows of a table of 10,000,000",
}
DENSE_ONLY = {"gloo-allreduce"}
WHOLE_TABLE_IN_EACH = {"ddp"}  # left out where a table is of gigabytes


@dataclass(slots=True)
class Side:
    """One side of one case: seconds of every step, round by round, and what its processes spent on each."""

    name: str
    process: Process
    roles: dict[str, int]
    rounds: list[list[float]] = field(default_factory=list)
    spent: list[dict[str, Spent]] = field(default_factory=list)
    segments: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        before = Counts.now(self.roles)
        times = self.process.measure(seconds)
        after = Counts.now(self.roles)
        self.rounds.append(times)
        self.spent.append({role: (after.roles[role] - before.roles[role]).each(len(times)) for role in self.roles})
        self.segments.append((after.segments - before.segments) / len(times))

    @property
    def medians(self) -> list[float]:
        return [statistics.median(times) for times in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.medians)

    def of(self, *roles: str) -> Spent:
        """What a step costs the processes whose role begins so: medians over the rounds, summed over processes."""
        return sum((self._of(role) for role in self.roles if role.startswith(roles)), Spent())

    def _of(self, role: str) -> Spent:
        middle = statistics.median
        costs = [spent[role] for spent in self.spent]
        return Spent(*(middle(getattr(cost, name) for cost in costs) for name in ("cpu", "switches", "faults")))


def suited(names: Sequence[str], workload: str) -> Iterator[str]:
    """The sides that can do this work in the memory of an ordinary machine."""
    rows = workload in null_data.TABLES
    for name in names:
        if not (rows and name in DENSE_ONLY) and not (workload == "rows-2.5GB" and name in WHOLE_TABLE_IN_EACH):
            yield name


def run_case(workload: str, workers: int, a: argparse.Namespace) -> tuple[list[Side], dict[str, str]]:
    """Measure every side in turns; answers them, and why others were left out."""
    case = Case(workload, workload, WHAT[workload], {}, 1.0, ("--workers", str(workers)), script="null_step")
    sides: list[Side] = []
    failed: dict[str, str] = {}
    running: list[Process] = []
    try:
        for name in suited(a.sides, workload):
            try:
                process = Process(*SIDES[name], case, a.threads)
                running.append(process)
                sides.append(Side(name, process, process.answer(READY_SECONDS)["roles"]))
            except (Failed, FileNotFoundError) as why:
                failed[name] = str(why)
        for _ in range(a.rounds):
            for side in sides:
                time.sleep(PAUSE_SECONDS)
                side.measure(a.seconds)
        for side in list(sides):
            if not side.process.end().get("right"):
                sides.remove(side)
                failed[side.name] = "its variable is not what so many steps make of it"
        return sides, failed
    finally:
        for process in running:
            process.kill()


def memcpy_seconds(count: int) -> float:
    """The median time in which so many bytes are copied within memory that is there already."""
    source, into = np.ones(max(1, count), np.uint8), np.zeros(max(1, count), np.uint8)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(into, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def lines(workload: str, workers: int, sides: Sequence[Side], failed: dict[str, str]) -> Iterator[str]:
    """A Markdown table, fastest side first, and where the time goes."""
    flowrt = next((side for side in sides if side.name == "flowrt"), None)
    yield (
        "| side | a step (lowest to highest round) | its time over flowrt's | CPU: server, a worker, client "
        "| switches | TCP segments |"
    )
    yield "|---|---|---|---|---|---|"
    for side in sorted(sides, key=lambda side: side.median):
        ratio = "-"
        if flowrt is not None and side is not flowrt:
            ratios = [theirs / ours for theirs, ours in zip(side.medians, flowrt.medians, strict=True)]
            ratio = f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
        cpu = ", ".join(
            f"{1e3 * seconds:.3f}" if seconds else "-"
            for seconds in (side.of("server").cpu, side.of("worker").cpu / workers, side.of("client").cpu)
        )
        everybody = side.of(*side.roles)
        yield (
            f"| {side.name} | {1e3 * side.median:.3f} ms ({1e3 * min(side.medians):.3f} to "
            f"{1e3 * max(side.medians):.3f}) | {ratio} | {cpu} ms | {everybody.switches:.1f} | "
            f"{statistics.median(side.segments):.1f} |"
        )
    yield ""
    for name, why in failed.items():
        yield f"- {name} was left out: {why}"
    yield from where(workload, sides)


def where(workload: str, sides: Sequence[Side]) -> Iterator[str]:
    """Where a step's time goes, of flowrt's side: how busy its processes are, beside what a step cannot do without."""
    moved = 4 * null_data.floats(workload) if workload not in null_data.TABLES else null_data.ROWS_A_STEP * 256
    floor = next((side for side in sides if side.name == "sockets"), None)
    for side in (side for side in sides if side.name.startswith("flowrt")):
        parts = []
        for role in side.roles:
            cost = side.of(role)
            parts.append(f"{role} {1e3 * cost.cpu:.3f} ms ({cost.switches:.1f} switches, {cost.faults:.0f} faults)")
        yield f"- {side.name}'s step of {1e3 * side.median:.3f} ms, by process: {', '.join(parts)}"
    if floor is not None:
        yield (
            f"- The floor: two hops of bare sockets {1e3 * floor.median:.3f} ms; "
            f"one copy in memory of what a worker reads {1e3 * memcpy_seconds(moved):.3f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(WHAT))
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, per side and round")
    parser.add_argument("--threads", type=int, default=1, help="of kernels, in each process")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    a = parser.parse_args()
    if unknown := set(a.cases) - set(WHAT):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(WHAT)}")
    about = [
        f"{this_machine.describe()}.",
        f"Peers: {versions('tf', 'torch', 'ray')}. "
        f"{a.rounds} rounds of {a.seconds:g} s; {a.threads} threads a process.",
    ]
    print("\n".join(about), flush=True)
    for workload in a.cases or ["scalar"]:
        for workers in a.workers:
            heading = f"### A synchronous step of {WHAT[workload]}, {workers} worker{'s' * (workers > 1)}"
            print(f"\n{heading}", file=sys.stderr, flush=True)
            table = list(lines(workload, workers, *run_case(workload, workers, a)))
            print("\n".join(["", heading, "", *table]), flush=True)
            if a.write:
                section.put(heading, [*about, "", *table])


if __name__ == "__main__":
    main()
