"""What a synchronous step of replicated training costs where nothing is computed: one server, some workers, processes.

A worker's loss is half the sum of the squares of what it reads, so that its gradient is what it reads: a scalar,
100 MB, or 32 random rows of a table. A step waits for all workers and moves the variable by the mean. Beside flowrt, on
the same work in the same run: bare sockets, gloo's parameter server and all-reduce, PyTorch's DistributedDataParallel,
TensorFlow's in-graph towers and SyncReplicasOptimizer, and ray's actors; see sides/. Every side's variable is compared
with what so many steps make of it. Sides that are not installed (scripts/peers tf torch ray) are left out.

What each process spends is the kernel's count, the messages that it sends are flowrt's. The floor is what no step can
do without: bare sockets' step, which is two hops and the copies of the network, and one copy of what a step moves, in
memory.

    python perf/null_step.py                                   # scalar, 4 workers, every side
    python perf/null_step.py dense rows-256MB --workers 2 4
    python perf/null_step.py scalar --workers 32 --sides flowrt sockets
    python perf/null_step.py dense --write                     # and into docs/performance.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import machine as this_machine
from compare import versions
from several import Side, asked, memcpy_seconds, parser, remembering, run, show, spending, table
from sides.null_step import data as null_data

SIDES = {
    "flowrt": ("flowrt", ""),
    "flowrt-ahead": ("flowrt", "ahead"),
    "flowrt-tcp": ("flowrt", "tcp"),
    "flowrt-bfloat16": ("flowrt", "bfloat16"),
    "flowrt-int8": ("flowrt", "int8"),
    "flowrt-shares": ("flowrt", "shares"),
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
DENSE_ONLY = {"gloo-allreduce", "flowrt-shares", "flowrt-bfloat16", "flowrt-int8"}
WHOLE_TABLE_IN_EACH = {"ddp"}  # left out where a table is of gigabytes
ROW_FLOATS = null_data.ROWS_A_STEP * null_data.WIDTH


def suited(names: Sequence[str], workload: str) -> Iterator[str]:
    """The sides that can do this work in the memory of an ordinary machine."""
    rows = workload in null_data.TABLES
    for name in names:
        if not (rows and name in DENSE_ONLY) and not (workload == "rows-2.5GB" and name in WHOLE_TABLE_IN_EACH):
            yield name


def where(workload: str, sides: Sequence[Side]) -> Iterator[str]:
    """Where a step's time goes, of flowrt's side: how busy its processes are, beside what a step cannot do without."""
    moved = 4 * null_data.floats(workload) if workload not in null_data.TABLES else 4 * ROW_FLOATS
    for side in sides:
        if side.name.startswith("flowrt"):
            yield f"- {spending(side)}"
            yield f"- {remembering(side)}"
    floor = next((side for side in sides if side.name == "sockets"), None)
    if floor is not None:
        yield (
            f"- The floor: two hops of bare sockets {1e3 * floor.median:.3f} ms; "
            f"one copy in memory of what a worker reads {1e3 * memcpy_seconds(moved):.3f} ms"
        )


def main() -> None:
    options = parser(__doc__, WHAT, list(SIDES))
    options.add_argument("--threads", type=int, default=1, help="of kernels, in each process")
    a = asked(options, WHAT)
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
            chosen = {name: SIDES[name] for name in suited(a.sides, workload)}
            arguments = ("--workers", str(workers))
            measuring = {"rounds": a.rounds, "seconds": a.seconds, "threads": a.threads}
            sides, failed = run("null_step", workload, chosen, *arguments, **measuring)
            show(heading, about, [*table(sides, failed), *where(workload, sides)], a.write)


if __name__ == "__main__":
    main()
