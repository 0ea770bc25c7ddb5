"""What stale updates and local steps cost: held-out loss after the same batches, against how stale updates were.

Replicas on worker processes, each delayed by a random time a batch, read handwritten digits until they have used as
many batches as `AllOf` uses in ``--steps`` steps: waiting for all, with bounds on staleness, without one, and with k
local steps between two versions. All at one learning rate, each from ``--seeds`` seeds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from digits import batches, digits
from experiment import Finding, run

import flowrt as fr

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

HIDDEN, BATCH, TEST = 128, 32, 360
IMAGES, LABELS = fr.Spec("float32", (None, 64)), fr.Spec("int32", (None,))


@dataclass(frozen=True)
class Way:
    """One way to train: its name in the plot, its policy, and how many batches an update is made of."""

    name: str
    policy: fr.train.Policy
    each: int = 1


WAYS = (
    Way("AllOf", fr.train.AllOf()),
    *(Way(f"bound {bound}", fr.train.BoundedStaleness(bound)) for bound in (1, 2, 4, 8)),
    Way("Async", fr.train.Async()),
    *(Way(f"k = {k}", fr.train.LocalSteps(k, outer=fr.optim.SGD(1.0)), k) for k in (2, 5, 10, 25)),
)


def build(way: Way, replicas: int, rate: float, seed: int) -> tuple[fr.Graph, fr.train.Replicated, Any]:
    """The trainer, and what answers held-out loss and accuracy."""

    def logits(images: fr.Tensor) -> fr.Tensor:
        w1 = fr.Variable(fr.random.normal((64, HIDDEN), stddev=(2 / 64) ** 0.5, seed=seed), name="w1")
        b1 = fr.Variable(np.zeros(HIDDEN, np.float32), name="b1")
        w2 = fr.Variable(fr.random.normal((HIDDEN, 10), stddev=(1 / HIDDEN) ** 0.5, seed=seed + 1), name="w2")
        return fr.nn.relu(images @ w1 + b1) @ w2

    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        return fr.mean(fr.nn.softmax_cross_entropy(logits(inputs["images"]), inputs["labels"]))

    def judge_fn(inputs: dict[str, fr.Tensor]) -> tuple[fr.Tensor, fr.Tensor]:
        scores = logits(inputs["images"])
        right = fr.equal(fr.astype(fr.argmax(scores, axis=-1), "int32"), inputs["labels"])
        loss = fr.mean(fr.nn.softmax_cross_entropy(scores, inputs["labels"]))
        return loss, fr.mean(fr.astype(right, "float32"))

    with fr.Graph() as graph, fr.container(way.name):
        inputs = {"images": IMAGES, "labels": LABELS}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(rate), replicas=replicas, policy=way.policy)
        return graph, trainer, trainer.share(judge_fn, inputs)


async def train(way: Way, cluster: fr.LocalCluster, options: argparse.Namespace, seed: int) -> Mapping[str, float]:
    """Train until enough batches have counted; what came of it."""
    learnt, held_out = digits(TEST)
    graph, trainer, judge = build(way, options.replicas, options.rate, seed)
    wanted, counted, stale = options.replicas * options.steps, 0, list[int]()
    async with fr.Session(graph, cluster=cluster) as session:
        training = trainer.steps(session, batches(learnt, BATCH, seed))
        began = time.perf_counter()
        while counted < wanted:
            report = await anext(training)
            counted += way.each * len(report.kept)
            stale += report.staleness
            if report.step == 1:
                began = time.perf_counter()  # what compiling takes is no part of it
        seconds = time.perf_counter() - began
        loss, accuracy = await judge(session, held_out)
        await training.aclose()
        await session.reset()
    return {
        "staleness": statistics.fmean(stale),
        "stalest": max(stale),
        "seconds": seconds,
        "loss": float(loss),
        "accuracy": float(accuracy),
    }


async def train_all(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """By way, what came of each seed."""
    workers = [f"/job:worker/task:{i}" for i in range(options.replicas)]
    delay = fr.delays.Exponential(options.delay)
    found: dict[str, dict[str, list[float]]] = {}
    async with fr.LocalCluster(ps=1, worker=options.replicas, delays=dict.fromkeys(workers, delay)) as cluster:
        for way in WAYS:
            runs = [await train(way, cluster, options, options.seed + 10 * i) for i in range(options.seeds)]
            found[way.name] = {name: [run[name] for run in runs] for name in runs[0]}
            means = {name: statistics.fmean(values) for name, values in found[way.name].items()}
            print(
                f"{way.name:8}  staleness {means['staleness']:5.2f}  held-out loss {means['loss']:.4f}  "
                f"accuracy {means['accuracy']:.4f}  {means['seconds']:5.2f} s",
                flush=True,
            )
    return found


def measure(options: argparse.Namespace) -> Finding:
    found = asyncio.run(train_all(options))

    def mean(way: str, name: str) -> float:
        return statistics.fmean(found[way][name])

    quicker = mean("AllOf", "seconds") / mean("Async", "seconds")
    sentence = (
        f"After {options.steps} batches of each of {options.replicas} replicas the held-out loss is "
        f"{mean('AllOf', 'loss'):.3f} where all were waited for, {mean('Async', 'loss'):.3f} with Async, in "
        f"1/{quicker:.1f} of the time and with updates {mean('Async', 'staleness'):.1f} versions old, and "
        f"{mean('k = 10', 'loss'):.3f} with 10 local steps."
    )
    return Finding(sentence, found, lambda figure: draw(figure, found), size=(8.0, 3.6))


def draw(figure: Figure, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Held-out loss against staleness, against local steps, and against time."""
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for way in WAYS:
        runs = found[way.name]
        x, loss = statistics.fmean(runs["staleness"]), statistics.fmean(runs["loss"])
        colour = "C1" if way.each > 1 else "C2" if way.name == "Async" else "C0"
        at = [(right, statistics.fmean(runs["seconds"]))]
        at += [(middle, float(way.each))] if way.each > 1 else [(left, x)]
        at += [(middle, 1.0)] if way.name == "AllOf" else []
        for axes, place in at:
            axes.plot([place] * len(runs["loss"]), runs["loss"], ".", color=colour, alpha=0.4)
            axes.plot(place, loss, "o", color=colour)
            axes.annotate(way.name, (place, loss), textcoords="offset points", xytext=(4, 4), fontsize=7)
    left.set(xlabel="mean staleness, versions", ylabel="held-out loss")
    middle.set(xlabel="local steps k", xscale="log")
    right.set(xlabel="seconds")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way; default: %(default)s")
    parser.add_argument("--rate", type=float, default=1.0, help="the learning rate; default: %(default)s")
    parser.add_argument("--delay", type=float, default=0.004, help="mean seconds a batch; default: %(default)s")


if __name__ == "__main__":
    run(__file__, measure, replicas=4, steps=100, add=add_options)
