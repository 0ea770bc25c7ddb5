"""Local steps over a slow network: the pace of k steps between two versions, and the loss they come to.

Digits, with smoothed labels, by a small model in this process, and by one of 11 MB over links of 1 Gbit/s, servers and
replicas each behind its own: that of a single server carries all updates. *Local* is what as many processes make side
by side that train alone and send nothing. Up to 16 of the local steps, but no more than half of them, overlap with what
travels. The loss is that of held-out images, after as many batches as synchronous training had.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from experiment import Finding, run
from shaped import cluster_behind_links, described, run_behind_links

import flowrt as fr

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

SMALL, LARGE = (128,), (1152, 1152, 1152)
RATES = {SMALL: 0.05, LARGE: 0.03}
INPUTS = {"images": fr.Spec("float32", (None, 64)), "labels": fr.Spec("int32", (None,))}
HELD_OUT = 360
SMOOTHING = 0.1
LEAST = 16  # versions, for a small model, of which more local steps make too few
Batch = dict[str, np.ndarray]
Widths = tuple[int, ...]


def digits() -> tuple[Batch, Batch]:
    """Scikit-learn's digits: those to train with, and those held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("int32")
    parts = (slice(HELD_OUT, None), slice(HELD_OUT))
    train, test = ({"images": images[part], "labels": labels[part]} for part in parts)
    return train, test


def batches(size: int, seed: int) -> Iterator[Batch]:
    """Random batches without end."""
    train, rng = digits()[0], np.random.default_rng(seed)
    while True:
        chosen = rng.integers(0, len(train["labels"]), size)
        yield {name: array[chosen] for name, array in train.items()}


def model(widths: Widths) -> Any:
    """The loss of dense layers: cross-entropy with labels that are `SMOOTHING` of all classes."""

    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        rng, made = np.random.default_rng(1), inputs["images"]
        sizes = [64, *widths, 10]
        for layer, (before, after) in enumerate(pairwise(sizes)):
            first = (rng.normal(size=(before, after)) * np.sqrt(2 / before)).astype("float32")
            w, b = fr.Variable(first, name=f"w{layer}"), fr.Variable(np.zeros(after, "float32"), name=f"b{layer}")
            made = (fr.relu(made) if layer else made) @ w + b
        labels = fr.one_hot(inputs["labels"], 10) * np.float32(1 - SMOOTHING) + np.float32(SMOOTHING / 10)
        return fr.mean(fr.nn.softmax_cross_entropy(made, labels))

    return loss_fn


def policy_of(k: int) -> fr.train.Policy:
    """Local steps, or synchronous training for 0."""
    return fr.train.LocalSteps(k, overlap=min(16, k // 2)) if k else fr.train.AllOf()


def optimizer(widths: Widths) -> fr.optim.Optimizer:
    return fr.optim.Momentum(RATES[widths], 0.9)


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def loss_of(widths: Widths, k: int, options: argparse.Namespace) -> float:
    """The loss of held-out images after ``steps`` batches of each replica, all in this process."""
    return asyncio.run(_loss_of(widths, k, options))


async def _loss_of(widths: Widths, k: int, options: argparse.Namespace) -> float:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            model(widths), INPUTS, optimizer(widths), options.replicas, policy_of(k), server_device="", worker_device=""
        )
        held_out = trainer.share(model(widths), INPUTS)
    async with fr.Session(graph) as session:
        async for report in trainer.steps(session, batches(options.batch, options.seed)):
            if report.step * (k or 1) >= options.steps:
                break
        return float(await held_out(session, digits()[1]))


# ── the pace ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def slowly(k: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Over slow links, of each version but the first: batches a second of each replica, and the seconds that these
    computed; and the held-out loss.

    The most local steps are taken until they are ``steps``, others for as many versions as are to be timed.
    """
    replicas = arguments["replicas"]
    versions = arguments["steps"] // k if k == max(arguments["k"]) else 1 + arguments["rounds"]
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(model(LARGE), INPUTS, optimizer(LARGE), replicas, policy_of(k))
        held_out = trainer.share(model(LARGE), INPUTS)
    paces, computing = [], []
    async with (
        cluster_behind_links(arguments["servers"], replicas, arguments["gigabits"]) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        async for report in trainer.steps(session, batches(arguments["batch"], arguments["seed"])):
            paces.append((k or 1) / report.seconds)
            computing.append([times.compute for times in report.times.values()])
            if report.step == versions:
                break
        loss = float(await held_out(session, digits()[1]))
    return {"paces": paces[1:], "computing": computing[1:], "loss": loss}


def alone(size: int) -> None:
    """Train without replicas, from a line of the input until the next one; print batches a second."""
    with fr.Graph() as graph:
        inputs = {name: fr.placeholder(spec.dtype, spec.dims, name=name) for name, spec in INPUTS.items()}
        loss = model(LARGE)(inputs)
        train = optimizer(LARGE).minimize(loss)
    source = batches(size, 0)
    with fr.BlockingSession(graph) as session:
        step = session.compile([loss, train], feeds=list(inputs.values()))
        for _ in range(20):
            step(*next(source).values())
        print("ready", flush=True)
        sys.stdin.readline()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < 4.0:
            step(*next(source).values())
            count += 1
        print(count / (time.perf_counter() - began), flush=True)


def paces_alone(replicas: int, size: int) -> list[float]:
    """Batches a second of processes that train side by side and send nothing."""
    command = [sys.executable, __file__, "--alone", str(size)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(replicas)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(process.communicate()[0]) for process in processes]


async def all_slowly(arguments: dict[str, Any]) -> dict[str, Any]:
    found = {k: await slowly(k, arguments) for k in (0, *arguments["k"])}
    local = paces_alone(arguments["replicas"], arguments["batch"])
    return {"links": described(arguments["gigabits"]), "local": local, "slowly": found}


# ── what was found ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace) -> Finding:
    names = ("replicas", "servers", "steps", "batch", "seed", "gigabits", "k", "rounds")
    found = run_behind_links(__file__, {name: getattr(options, name) for name in names})
    local, most = float(np.mean(found["local"])), max(options.k)
    slow = {int(k): each for k, each in found["slowly"].items()}
    paces = {k: float(np.median(each["paces"])) / local for k, each in slow.items()}
    for k, pace in paces.items():
        print(f"{called(k)}: {pace:.1%} of the local pace, {local:.1f} batches a second and replica", flush=True)
    losses = {
        "digits": {k: loss_of(SMALL, k, options) for k in (0, *options.k) if k * LEAST <= options.steps},
        "11 MB": {0: loss_of(LARGE, 0, options), most: slow[most]["loss"]},
    }
    for name, each in losses.items():
        for k, loss in each.items():
            print(f"{name}, {called(k)}: held-out loss {loss:.4f}", flush=True)
    worst = max(loss / each[0] - 1 for each in losses.values() for k, loss in each.items() if k)
    sentence = (
        f"Over links of {found['links']}, {options.servers} of them a server's, LocalSteps({most}) trains a model of "
        f"11 MB at {paces[most]:.0%} of the pace "
        f"of {options.replicas} processes that train alone, where synchronising with every batch makes {paces[0]:.0%}; "
        f"after as many batches no held-out loss, of this model or of a small one with fewer local steps, is more "
        f"than {max(worst, 0.0):.1%} above synchronous training's."
    )
    figures = {**found, "of_local": paces, "losses": losses}
    return Finding(sentence, figures, lambda plot: draw(plot, paces, losses), (9.0, 4.0))


def called(k: int) -> str:
    return f"k = {k}" if k else "every batch"


def draw(plot: Figure, paces: dict[int, float], losses: dict[str, dict[int, float]]) -> None:
    left, right = plot.subplots(1, 2)
    left.bar([str(k) if k else "every\nbatch" for k in paces], list(paces.values()))
    left.axhline(0.9, color="0.4", linestyle="--", linewidth=1)
    left.set(xlabel="local steps", ylabel="pace over slow links, of local pace", ylim=(0, 1.05))
    for name, each in losses.items():
        right.plot([max(k, 1) for k in each], [loss / each[0] for loss in each.values()], "o-", label=name)
    right.axhline(1.01, color="0.4", linestyle="--", linewidth=1)
    right.set(xlabel="local steps", ylabel="held-out loss, of synchronous training's", xscale="log")
    right.legend()


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--k", type=int, nargs="+", default=[16, 192], help="local steps; default: %(default)s")
    parser.add_argument("--batch", type=int, default=256, help="samples of a batch; default: %(default)s")
    parser.add_argument("--servers", type=int, default=1, help="parameter servers; default: %(default)s")
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second, of each link; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="versions that are timed; default: %(default)s")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--measure", text]:
            print(json.dumps(asyncio.run(all_slowly(json.loads(text)))))
        case ["--alone", text]:
            alone(int(text))
        case _:
            run(__file__, measure, replicas=2, steps=768, add=add)
