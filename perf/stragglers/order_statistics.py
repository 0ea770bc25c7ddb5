"""Real steps that keep the first m of n updates, beside the order statistics of the delays that are injected.

Every worker's updates are late by a shifted exponential: ``least`` and an exponential of mean ``mean``. A step that
keeps the first m of n then takes the m-th of n such delays, least + mean * (1/n + 1/(n-1) + ... + 1/(n-m+1)) (Rényi),
and what the runtime itself takes. Nodes draw delays from the seed, so what was drawn is known, too: beside that, only
the runtime is left.

    python perf/stragglers/order_statistics.py
    python perf/stragglers/order_statistics.py --replicas 8 --steps 200 --least 0.05
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import numpy as np
from experiment import Finding, run

import flowrt as fr

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

INPUTS = {"x": fr.Spec("float32", (None, 8))}


def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
    w = fr.Variable(np.zeros((8, 1), np.float32), name="w")
    return fr.mean(fr.square(inputs["x"] @ w))


async def train(cluster: fr.LocalCluster, replicas: int, keep: int, steps: int, seed: int) -> list[tuple[int, float]]:
    """The version and the seconds of each step that keeps the first ``keep`` updates."""
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=replicas, policy=fr.train.FirstOf(keep)
        )
    batches = itertools.repeat({"x": np.ones((4, 8), np.float32)})
    async with fr.Session(graph, cluster=cluster, options=fr.Options(seed=seed)) as session:
        reports = trainer.steps(session, batches)
        found = [await anext(reports) for _ in range(steps + 1)]
        await reports.aclose()
    return [(report.step - 1, report.seconds) for report in found[1:]]  # the first one compiles


async def train_all(options: argparse.Namespace, delay: fr.delays.Delay) -> np.ndarray:
    """Versions and seconds [m, steps, 2]."""
    workers = {f"/job:worker/task:{i}": delay for i in range(options.replicas)}
    async with fr.LocalCluster(ps=1, worker=options.replicas, delays=workers) as cluster:
        kept = range(1, options.replicas + 1)
        return np.array([await train(cluster, options.replicas, keep, options.steps, options.seed) for keep in kept])


def drawn(delay: fr.delays.Delay, versions: np.ndarray, keep: int, options: argparse.Namespace) -> float:
    """The mean of the ``keep``-th of what the nodes drew for these versions."""
    rngs = ((np.random.default_rng((options.seed, int(v))), int(v)) for v in versions)
    return float(np.mean([np.sort(delay.sample(rng, v, options.replicas))[keep - 1] for rng, v in rngs]))


def measure(options: argparse.Namespace) -> Finding:
    n = options.replicas
    delay = fr.delays.ShiftedExponential(options.least, options.mean)
    trained = asyncio.run(train_all(options, delay))
    versions, seconds = trained[..., 0], trained[..., 1]
    kept = np.arange(1, n + 1)
    theory = options.least + options.mean * np.cumsum(1 / (n + 1 - kept))
    draws = np.array([drawn(delay, versions[m - 1], m, options) for m in kept])
    measured, spread = seconds.mean(axis=1), seconds.std(axis=1) / np.sqrt(options.steps)
    off = measured / theory - 1
    beyond = measured - draws
    for m, *row in zip(kept, theory, draws, measured, spread, off, strict=True):
        print("first {} of {}: theory {:.4f} s, drawn {:.4f}, measured {:.4f} ± {:.4f}: {:+.1%}".format(m, n, *row))
    worst = int(np.abs(off).argmax())
    sentence = (
        f"Steps that keep the first m of {n} updates take the m-th order statistic of the injected delays: within "
        f"{abs(off[worst]):.1%} of theory for every m (worst m = {kept[worst]}, {options.steps} steps each), and "
        f"{1e3 * np.median(beyond):.1f} ms more than the delays that were drawn."
    )

    def draw(figure: Figure) -> None:
        axes = figure.gca()
        axes.plot(kept, theory, label="order statistic")
        axes.errorbar(kept, measured, 2 * spread, fmt="o", capsize=3, label="measured steps, ± 2 standard errors")
        axes.plot(kept, draws, "x", label="the delays that were drawn")
        axes.set(xlabel=f"updates kept of {n}", ylabel="seconds a step", title=str(delay))
        axes.legend()

    figures = {
        "kept": kept,
        "theory_seconds": theory,
        "drawn_seconds": draws,
        "measured_seconds": measured,
        "standard_error": spread,
        "off_theory": off,
        "beyond_drawn_seconds": beyond,
    }
    return Finding(sentence, figures, draw)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--least", type=float, default=0.12, help="seconds; default: %(default)s")
    parser.add_argument("--mean", type=float, default=0.02, help="seconds beyond; default: %(default)s")


if __name__ == "__main__":
    run(__file__, measure, replicas=6, steps=100, add=add)
