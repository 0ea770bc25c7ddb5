"""What `copies=2` is worth and what it costs: parameter servers killed while they apply, and the time and memory of it.

Kills: a server is killed with SIGKILL at a random moment of a step, most of which is spent applying updates. Every step
must be reported once, in order, and the variables must have been moved once by each; a stall is the longest that the
client waits for a report until all servers take part again. Cost: steps with one copy and with two, in turns.

    python perf/copies.py kills --kills 100 --servers 2 [--json docs/reliability]
    python perf/copies.py cost
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(ROOT / "perf" / "chaos")]

import numpy as np  # noqa: E402
import records  # noqa: E402
from machine import describe  # noqa: E402

import flowrt as fr  # noqa: E402

VARIABLES = 4
WIDTH, COUNT = 64, 32  # of a table: numbers in a row, and rows that a step moves
STALL = 1.0  # seconds that a server's death may cost
INPUTS, ROWS = {"x": fr.Spec("float32", (None, 1))}, {"rows": fr.Spec("int32", (None,))}


def build(size: int, servers: int, copies: int, policy: fr.train.Policy, replicas: int, table: bool = False) -> Any:
    """A trainer whose gradients are ones, so that a variable tells how often it was moved, and what tells that.

    Of a ``table`` that is so of the first rows, and no others are moved.
    """

    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        x = fr.mean(inputs["x"])
        variables = [fr.Variable(np.zeros((size,), np.float32), name=f"v{i}") for i in range(VARIABLES)]
        return sum((fr.sum(v * x) for v in variables[1:]), fr.sum(variables[0] * x))

    def loss_of_rows(inputs: dict[str, fr.Tensor]) -> Any:
        tables = [fr.Variable(fr.zeros((size // WIDTH, WIDTH)), name=f"v{i}") for i in range(VARIABLES)]
        return fr.add_n([fr.sum(fr.nn.embedding_lookup(each, inputs["rows"])) for each in tables])

    with fr.Graph() as graph:
        optimizer = fr.optim.SGD(1.0) if table else fr.optim.Momentum(1.0, 0.0)
        loss, inputs = (loss_of_rows, ROWS) if table else (loss_fn, INPUTS)
        trainer = fr.train.Replicated(loss, inputs, optimizer, replicas, policy, servers=servers, copies=copies)
        moved = trainer.variables
        if table:
            moved = [fr.nn.embedding_lookup(each, np.arange(COUNT, dtype=np.int32)) for each in moved]
    return graph, trainer, moved


def batches(table: bool = False) -> Iterator[dict[str, Any]]:
    while True:
        yield {"rows": np.arange(COUNT, dtype=np.int32)} if table else {"x": np.ones((1, 1), np.float32)}


class Killing:
    """Follows the steps of a trainer whose servers are killed."""

    def __init__(
        self, cluster: fr.LocalCluster, session: fr.Session, trainer: fr.train.Replicated, moved: Any, table: bool
    ) -> None:
        self.cluster, self.session, self.trainer, self.moved = cluster, session, trainer, moved
        self.steps = trainer.steps(session, batches(table))
        self.last = 0
        self.usual: list[float] = []
        self.stalls: list[float] = []
        self.wrong: list[str] = []

    async def follow(self) -> float:
        """The seconds until the next report, which has to be of the next step."""
        begin = time.perf_counter()
        report = await anext(self.steps)
        if report.step != self.last + 1:
            self.wrong.append(f"step {report.step} follows {self.last}")
        self.last = report.step
        return time.perf_counter() - begin

    async def check(self) -> None:
        step, values = await self.session.run([self.trainer.step, self.moved])
        moved = {float(number) for value in values for number in (value.min(), value.max())}
        if step != self.last or moved != {-float(self.last)}:
            self.wrong.append(f"after step {self.last} variables are at {step}, moved by {sorted(moved)}")

    async def kill(self, rng: random.Random, task: str) -> None:
        """Kill a server, and go on until it takes part again."""
        self.usual += [await self.follow() for _ in range(5)]
        delay = rng.random() * 2 * statistics.median(self.usual)
        asyncio.get_running_loop().call_later(delay, self.cluster.processes[task].kill)
        worst, copies = 0.0, await self.trainer.copies_on(self.session)
        while not copies.gone:
            worst = max(worst, await self.follow())
        await self.check()
        while copies.gone:
            worst = max(worst, await self.follow())
        self.stalls.append(worst)
        await self.check()


async def kills(
    count: int, seconds: float, servers: int, size: int, policy: fr.train.Policy, seed: int, table: bool
) -> records.Row:
    """Kill servers in turn, and print what came of it."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    graph, trainer, moved = build(size, servers, 2, policy, 2, table)
    async with (
        fr.LocalCluster(ps=servers, worker=2, restart=True) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        killing = Killing(cluster, session, trainer, moved, table)
        while len(killing.stalls) < count and time.monotonic() < end:
            await killing.kill(rng, f"/job:ps/task:{len(killing.stalls) % servers}")
        await killing.steps.aclose()
    stalls = sorted(killing.stalls)
    print(
        f"{len(stalls)} kills of {servers} servers in turn, {policy}, {VARIABLES * size * 4 >> 20} MiB of variables, "
        f"seed {seed}: {killing.last} steps, median step {statistics.median(killing.usual) * 1e3:.1f} ms; "
        f"lost or repeated {len(killing.wrong)}; stall median {statistics.median(stalls) * 1e3:.0f} ms, "
        f"p95 {stalls[int(0.95 * (len(stalls) - 1))] * 1e3:.0f}, most {stalls[-1] * 1e3:.0f}"
    )
    for wrong in killing.wrong:
        print("  ", wrong)
    fault = f"SIGKILL of one of {servers} parameter servers in the middle of a step, {VARIABLES * size * 4 >> 20} MiB"
    fault += " of tables" if table else ""
    late = [f"training stopped for {stall:.2f} s" for stall in stalls if stall > STALL]
    counts = {"steps": killing.last}
    return records.row(34, fault, len(stalls), [*killing.wrong, *late], samples={"stall": stalls}, counts=counts)


async def cost(size: int, steps: int, turns: int) -> None:
    seconds: dict[int, list[float]] = {1: [], 2: []}
    memory: dict[int, list[int]] = {1: [], 2: []}
    for turn in range(2 * turns):
        copies = (1, 2)[(turn + turn // 2) % 2]
        graph, trainer, _ = build(size, 2, copies, fr.train.AllOf(), 2)
        async with fr.LocalCluster(ps=2, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
            iterating = trainer.steps(session, batches())
            for _ in range(20):
                await anext(iterating)
            begin = time.perf_counter()
            for _ in range(steps):
                await anext(iterating)
            seconds[copies].append((time.perf_counter() - begin) / steps)
            pids = [process.pid for task, process in cluster.processes.items() if task.startswith("/job:ps")]
            memory[copies].append(sum(map(proportional, pids)) // len(pids))
            await iterating.aclose()
    print(f"{VARIABLES * size * 4 / (1 << 20):.3g} MiB of variables with as many slots, 2 servers, 2 replicas:")
    for copies, each in seconds.items():
        spread = f"{min(each) * 1e3:.2f} to {max(each) * 1e3:.2f}"
        kept = statistics.median(memory[copies]) / 1024
        print(f"  copies={copies}: step {statistics.median(each) * 1e3:.2f} ms ({spread}), {kept:.0f} MiB a server")


def proportional(pid: int) -> int:
    """The memory of a process in KiB, what it shares counted as its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "cost"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no more are killed")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--size", type=int, default=1 << 20, help="numbers in each of the variables")
    parser.add_argument("--table", action="store_true", help="steps move a few rows of the variables")
    parser.add_argument("--policy", choices=["first", "all"], default="first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    options = parser.parse_args()
    logging.getLogger("flowrt").setLevel(logging.ERROR)
    print(describe())
    policy = fr.train.FirstOf(1) if options.policy == "first" else fr.train.AllOf()
    if options.what == "kills":
        how = (options.kills, options.seconds, options.servers, options.size, policy, options.seed, options.table)
        row = asyncio.run(kills(*how))
        if options.json:
            records.write(
                options.json
                / f"servers-{options.servers}-{options.size}{'-table' * options.table}-{options.seed}.json",
                [row],
            )
    else:
        for size in (64, options.size):
            asyncio.run(cost(size, options.steps, options.turns))


if __name__ == "__main__":
    main()
