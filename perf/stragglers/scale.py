"""Simulated training with 8 to 4,096 replicas, where servers, links and the one coordinator have a capacity.

The model. A tower takes T seconds, log-normal, in some steps longer for all; one in 70 takes as long again (what the
published runs of 100 workers show). Every 4 replicas bring a server with a link of 10 Gbit/s each way; values and
updates are 100 MB for each second of a tower, shared out evenly over the servers. A version is told to one replica
after the other, and updates are taken in one after the other, as links can carry them; servers apply 10 GB/s of them.
Beside that, server 0 coordinates: of every update and every telling it takes COST seconds of CPU, which is measured
first: what a parameter server spends on an empty step with 4 real workers, halved between the two.

How it is shown: the step of AllOf, and of the m of n that makes most progress (a step of k updates is worth
k / (k + B), with B = 256), and where the coordinator saturates: steps take half as long again as with one that costs
nothing.

    python perf/stragglers/scale.py
    python perf/stragglers/scale.py --replicas 512 --towers 0.1 --cost 5e-5
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import numpy as np
from experiment import Finding, run
from spending import Counts

import flowrt as fr

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

BYTES_PER_TOWER_SECOND = 100e6
LINK, APPLY = 1.25e9, 10e9  # bytes a second
REPLICAS_PER_SERVER = 4
NOISE_SCALE = 256.0
SPARED = (0.0, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3)  # shares of the replicas that are not waited for
WARM, MEASURED, WORKERS = 200, 1500, 4  # steps; workers that the coordinator's cost is measured with

INPUTS = {"x": fr.Spec("float32", ())}


def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
    return fr.Variable(np.zeros((), np.float32), name="w") * inputs["x"]


async def cost() -> float:
    """Seconds of CPU of a parameter server for each update of an empty step, and as much for telling a version."""
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=WORKERS)
    batches = itertools.repeat({"x": np.float32(1)})
    async with fr.LocalCluster(ps=1, worker=WORKERS) as cluster, fr.Session(graph, cluster=cluster) as session:
        reports = trainer.steps(session, batches)
        server = {"ps": cluster.processes["/job:ps/task:0"].pid}
        for _ in range(WARM):
            await anext(reports)
        before = Counts.now(server).roles["ps"]
        for _ in range(MEASURED):
            await anext(reports)
        spent = Counts.now(server).roles["ps"] - before
        await reports.aclose()
    return spent.cpu / MEASURED / WORKERS / 2


def one_by_one(ready: np.ndarray, seconds: float) -> np.ndarray:
    """When each is done that is ready then, of whom one at a time takes so many seconds, by who is ready first."""
    order = np.argsort(ready, kind="stable")
    before = seconds * np.arange(len(ready))
    done = np.empty(len(ready))
    done[order] = np.maximum.accumulate(ready[order] - before) + before + seconds
    return done


def simulate(keep: int, n: int, tower: float, cost: float, options: argparse.Namespace) -> fr.simulation.Simulation:
    towers = fr.delays.Correlated(fr.delays.LogNormal(1, 0.03), fr.delays.LogNormal(tower, 0.05)) + fr.delays.Pauses(
        70, tower
    )
    servers = max(1, n // REPLICAS_PER_SERVER)
    part = tower * BYTES_PER_TOWER_SECOND / servers
    told = np.arange(1, n + 1) * max(cost, part / LINK)

    def delays(rng: np.random.Generator, step: int) -> np.ndarray:
        computed = told + towers.sample(rng, step, n)
        return one_by_one(one_by_one(computed, part / LINK), cost)

    return fr.simulate(
        fr.train.FirstOf(keep),
        delays,
        replicas=n,
        steps=options.steps,
        seed=options.seed,
        overhead=keep * part / APPLY,
        noise_scale=NOISE_SCALE,
    )


def rate(simulation: fr.simulation.Simulation) -> float:
    """Progress a second."""
    return float(simulation.worth.sum() / simulation.seconds.sum())


def scaled(tower: float, cost: float, options: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each number of replicas."""
    rows = []
    for n in (2**i for i in range(3, options.replicas.bit_length())):
        kept = sorted({max(1, round(n * (1 - share))) for share in SPARED})
        runs = {keep: simulate(keep, n, tower, cost, options) for keep in kept}
        best = max(kept, key=lambda keep: rate(runs[keep]))
        free = simulate(n, n, tower, 0.0, options)
        row = {
            "replicas": n,
            "all_seconds": runs[n].seconds.mean(),
            "free_seconds": free.seconds.mean(),
            "best_kept": best,
            "best_seconds": runs[best].seconds.mean(),
            "gain": rate(runs[best]) / rate(runs[n]) - 1,
            "coordinator_share": 2 * n * cost / runs[n].seconds.mean(),
        }
        print(
            f"tower {tower:g} s, {n:4d} replicas: all {row['all_seconds']:.4g} s ({row['free_seconds']:.4g} with a "
            f"coordinator that costs nothing), best {best}: {row['best_seconds']:.4g} s, {row['gain']:+.1%} progress",
            flush=True,
        )
        rows.append(row)
    return rows


def saturation(rows: list[dict[str, float]]) -> float:
    """How many replicas make steps half as long again as with a coordinator that costs nothing, interpolated."""
    ratio = np.array([row["all_seconds"] / row["free_seconds"] for row in rows])
    sizes = np.log2([row["replicas"] for row in rows])
    if ratio[-1] < 1.5:
        return float("inf")
    return float(2 ** np.interp(1.5, np.maximum.accumulate(ratio), sizes))


def measure(options: argparse.Namespace) -> Finding:
    each = options.cost or asyncio.run(cost())
    print(f"the coordinator takes {1e6 * each:.0f} µs for each update, and as much to tell each replica of a version")
    tables = {tower: scaled(tower, each, options) for tower in options.towers}
    ends = {tower: saturation(rows) for tower, rows in tables.items()}
    gains = [row["gain"] for rows in tables.values() for row in rows if row["replicas"] >= 64]
    where = ", ".join(
        f"{'beyond ' + str(tables[t][-1]['replicas']) if np.isinf(end) else f'about {end:.0f}'} with towers of {t:g} s"
        for t, end in ends.items()
    )
    sentence = (
        f"One coordinator, at {1e6 * each:.0f} µs for an update and as much to tell a version, saturates at {where}; "
        f"keeping the best m of n gains {min(gains):.0%} to {max(gains):.0%} progress from 64 replicas on."
    )

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for tower, rows in tables.items():
            sizes = [row["replicas"] for row in rows]
            (line,) = left.loglog(sizes, [row["all_seconds"] / tower for row in rows], "o-", label=f"{tower:g} s, all")
            left.loglog(
                sizes, [row["best_seconds"] / tower for row in rows], "--", color=line.get_color(), label="best m of n"
            )
            left.loglog(sizes, [row["free_seconds"] / tower for row in rows], ":", color=line.get_color())
            right.semilogx(sizes, [100 * row["gain"] for row in rows], "o-", label=f"towers of {tower:g} s")
        left.set(xlabel="replicas", ylabel="step, in towers", title="dotted: a coordinator that costs nothing")
        right.set(xlabel="replicas", ylabel="progress gained, %", title="best m of n beside all")
        for axes in (left, right):
            axes.legend(fontsize=8)

    figures = {
        "coordinator_seconds": each,
        "towers": {f"{tower:g}": rows for tower, rows in tables.items()},
        "saturates_at_replicas": {f"{tower:g}": end for tower, end in ends.items()},
    }
    return Finding(sentence, figures, draw, (10.0, 4.0))


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--towers", type=float, nargs="+", default=[0.01, 0.1, 1.0], help="seconds of a tower")
    parser.add_argument("--cost", type=float, help="seconds that the coordinator takes for each update; else measured")


if __name__ == "__main__":
    run(__file__, measure, replicas=4096, steps=40, add=add)
