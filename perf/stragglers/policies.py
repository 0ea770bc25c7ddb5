"""Every policy on real processes with injected delays: seconds of training to a held-out loss.

One parameter server and six workers train handwritten digits, by two dense layers and by a small convolutional net. A
worker takes a while for each batch, and in four scenes one of them takes longer: always; at random, as all do; until it
is killed; and until it recovers. What counts is the time from the first step until the loss on images that nobody
trained on is low enough, looks at it included; a training that does not count comes first, by which nodes have compiled
what all of them run. All begin with the same weights, at one learning rate. Several seeds are tried, by policies that
took half as long again as the best one with the first seed only then. Where PyTorch is installed (scripts/peers torch),
its DistributedDataParallel does the same beside them; its looks are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from digits import batches, digits
from experiment import Finding, run

import flowrt as fr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH, TEST, RATE = 32, 360, 0.4
USUAL, SLOW = 0.02, 0.12  # seconds that a batch takes, and takes the slow worker
CHANGES = 12  # the step at which one dies, or has recovered
TARGETS = {"dense": 0.45, "convolutional": 0.6}  # held-out losses
LIMIT = 20.0  # seconds of training after which nothing is waited for any more
BEHIND = 1.5  # times as long as the best policy with the first seed: who took that is not tried with others
STALE = ("BoundedStaleness", "Async", "LocalSteps")  # policies by which replicas go on with what they have
PERF = Path(__file__).resolve().parents[1]
Found: TypeAlias = "dict[str, dict[str, dict[str, float]]]"  # by scene, model and policy, the seconds


@dataclass(frozen=True)
class Scene:
    """What happens to the last worker, and how long all take beside that."""

    name: str
    delay: str  # of the last one
    others: str = f"{USUAL}"
    dies: bool = False


SCENES = (
    Scene("constant", f"{SLOW}"),
    Scene("random", f"{USUAL / 2} + exponential:{USUAL * 1.5}", f"{USUAL / 2} + exponential:{USUAL * 1.5}"),
    Scene("dying", f"{USUAL}", dies=True),
    Scene("recovering", f"{USUAL} + {SLOW - USUAL} during :{2 * CHANGES}"),
)


def policies(replicas: int) -> dict[str, fr.train.Policy]:
    """All that there are, with numbers that a user might choose."""
    return {
        "Adaptive": fr.train.Adaptive(),
        "AllOf": fr.train.AllOf(),
        f"FirstOf({replicas - 1})": fr.train.FirstOf(replicas - 1),
        f"FirstOf({replicas // 2})": fr.train.FirstOf(replicas // 2),
        f"Deadline({1.5 * USUAL:g})": fr.train.Deadline(1.5 * USUAL),
        "BoundedStaleness(2)": fr.train.BoundedStaleness(2),
        "Async": fr.train.Async(),
        "LocalSteps(2)": fr.train.LocalSteps(2, fr.train.FirstOf(replicas - 1), outer=fr.optim.SGD(1.0)),
    }


# ── what is trained ──────────────────────────────────────────────────────────────────────────────────────────────────


def weights(model: str, seed: int) -> dict[str, np.ndarray]:
    """The first ones, the same on every side."""
    rng = np.random.default_rng(seed)
    shapes = {"dense": ((64, 128), (128, 10)), "convolutional": ((3, 3, 1, 16), (256, 10))}[model]
    made = [rng.standard_normal(shape) * math.sqrt(2 / math.prod(shape[:-1])) for shape in shapes]
    return {f"w{number}": w.astype(np.float32) for number, w in enumerate(made)}


def scores(model: str, images: fr.Tensor, seed: int) -> fr.Tensor:
    """For each digit: of two dense layers, or of a convolution, its largest values and a dense layer."""
    first, last = (fr.Variable(value, name=name) for name, value in weights(model, seed).items())
    if model == "dense":
        return fr.nn.relu(fr.reshape(images, (-1, 64)) @ first) @ last
    seen = fr.nn.max_pool2d(fr.nn.relu(fr.nn.conv2d(images, first)), 2)
    return fr.reshape(seen, (-1, 256)) @ last


def build(
    model: str, policy: fr.train.Policy, replicas: int, seed: int, name: str
) -> tuple[fr.Graph, fr.train.Replicated, fr.train.Predictor]:
    """The trainer, with variables of its own in the container ``name``, and what answers the held-out loss."""

    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        found = scores(model, inputs["images"], seed)
        return fr.mean(fr.nn.softmax_cross_entropy(found, inputs["labels"]))

    inputs = {"images": fr.Spec("float32", (None, 8, 8, 1)), "labels": fr.Spec("int32", (None,))}
    with fr.Graph() as graph, fr.container(name):
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(RATE), replicas=replicas, policy=policy)
        return graph, trainer, trainer.share(loss_fn, inputs)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def train(
    scene: Scene, model: str, name: str, policy: fr.train.Policy, cluster: fr.LocalCluster, options: Any
) -> float:
    """Seconds from the first step to the held-out loss, looks at that included; infinite if that does not come.

    Without the looks, replicas that go on meanwhile would train for nothing.
    """
    learnt, held_out = digits(TEST, (8, 8, 1))
    graph, trainer, judge = build(model, policy, options.replicas, options.seed, f"{model} {name}")
    victim = f"/job:worker/task:{options.replicas - 1}"
    began, counted, killed = 0.0, 0, False
    async with fr.Session(graph, cluster=cluster) as session:
        training = trainer.steps(session, batches(learnt, BATCH, options.seed))
        try:
            while True:
                async with asyncio.timeout(LIMIT):
                    report = await anext(training)
                if report.step == 1:  # until then the nodes get ready
                    await judge(session, held_out)
                    began = time.perf_counter()
                seconds = time.perf_counter() - began
                before, counted = counted, counted + len(report.kept)
                if scene.dies and not killed and counted >= CHANGES * options.replicas:
                    killed = True
                    cluster.processes[victim].kill()
                look = counted // (2 * options.replicas) > before // (2 * options.replicas)
                if look and float(await judge(session, held_out)) <= TARGETS[model]:
                    return time.perf_counter() - began
                if seconds > LIMIT or report.step == options.steps:
                    break
        except (fr.NodeLost, TimeoutError):
            pass  # it cannot go on without
        finally:
            await training.aclose()
            if killed:
                await cluster.processes[victim].wait()
                await cluster.respawn(victim)
    return math.inf


async def train_all(options: argparse.Namespace, first: Found | None) -> Found:
    """By scene, model and policy, the seconds; after a ``first`` run those of policies that were not far behind."""
    found: Found = {}
    for scene in (scene for scene in SCENES if scene.name in options.scenes):
        others = {f"/job:worker/task:{i}": scene.others for i in range(options.replicas - 1)}
        delays: Any = {**others, f"/job:worker/task:{options.replicas - 1}": scene.delay}
        found[scene.name] = {model: {} for model in TARGETS}
        async with fr.LocalCluster(ps=1, worker=options.replicas, delays=delays) as cluster:
            for model, took in found[scene.name].items():
                warm = fr.train.FirstOf(options.replicas - 1)
                await train(replace(scene, dies=False), model, "to get warm", warm, cluster, options)
                tried = _contenders(first[scene.name][model]) if first else policies(options.replicas)
                for name, policy in policies(options.replicas).items():
                    if name in tried:
                        took[name] = await train(scene, model, name, policy, cluster, options)
        for model, took in found[scene.name].items():
            took.update({} if first else beside(scene, model, options))
            said = "  ".join(f"{name} {seconds:.2f}" for name, seconds in took.items())
            print(f"{scene.name}, {model}: {said}", flush=True)
    return found


def _contenders(took: dict[str, float]) -> set[str]:
    """Those that may be the best, and Adaptive."""
    return {name for name, seconds in took.items() if seconds < BEHIND * min(took.values())} | {"Adaptive"}


# ── PyTorch ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def torch() -> Path | None:
    """The Python that has PyTorch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    python = Path(os.environ.get("FLOWRT_PEERS", cache / "flowrt-peers")) / "torch" / "bin" / "python"
    return python if python.exists() else None


def beside(scene: Scene, model: str, options: argparse.Namespace) -> Mapping[str, float]:
    """The seconds of DistributedDataParallel, where it is installed."""
    python = torch()
    if python is None:
        return {}
    delays = [scene.others] * (options.replicas - 1) + [scene.delay]
    learnt, held_out = digits(TEST, (8, 8, 1))
    source = batches(learnt, BATCH, options.seed)
    rounds = 200
    rng = np.random.default_rng(options.seed)
    waits = [[float(fr.delays.parse(d).sample(rng, step, 1, 0.0)[0]) for d in delays] for step in range(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        some = [next(source) for _ in range(rounds * options.replicas)]
        np.savez(
            path,
            images=np.stack([batch["images"] for batch in some]),
            labels=np.stack([batch["labels"] for batch in some]),
            test_images=held_out["images"],
            test_labels=held_out["labels"],
            waits=np.array(waits),
            **weights(model, options.seed),
        )
        settings = {
            "model": model,
            "rate": RATE,
            "target": TARGETS[model],
            "dies": CHANGES if scene.dies else -1,
            "limit": LIMIT,
        }
        ended = subprocess.run(
            [python, "-m", "sides.policies.torch", path, json.dumps(settings)],
            cwd=PERF,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if ended.returncode:
        print(f"DistributedDataParallel failed: {ended.stderr[-400:]}", flush=True)
        return {}
    return {"torch DDP": float(ended.stdout.splitlines()[-1])}


# ── what came of it ──────────────────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace) -> Finding:
    """Train by every policy in every scene."""
    if torch() is None:
        print("DistributedDataParallel is left out: scripts/peers torch installs it.")
    runs: list[Found] = []
    for seed in range(options.seed, options.seed + options.runs):
        one = argparse.Namespace(**{**vars(options), "seed": seed})
        runs.append(asyncio.run(train_all(one, runs[0] if runs else None)))
    found, every, same = _means(runs), _ratios(runs, ()), _ratios(runs, STALE)
    worst = [f"{max(same[scene].values()):.2f} ({scene}; {max(every[scene].values()):.2f})" for scene in found]
    sentence = (
        "Adaptive, told nothing, takes this many times as long to the same held-out loss as the best policy without "
        f"stale values (and as the best of all), in the worse of two models: {', '.join(worst)}"
    )
    if options.runs > 1:
        sentence += f"; means of {options.runs} runs, in which its own time differed by up to {_deviation(runs):.0%}"
    figures = {"seconds": found, "runs": runs, "ratio": same, "ratio_to_all": every, "targets": TARGETS}
    return Finding(f"{sentence}.", figures, lambda plot: _draw(plot, found), (9.0, 6.0))


def _means(runs: list[Found]) -> Found:
    """By scene, model and policy, the mean of what the ``runs`` took in which it was tried."""
    return {
        scene: {
            model: {
                name: float(np.mean([run[scene][model][name] for run in runs if name in run[scene][model]]))
                for name in took
            }
            for model, took in models.items()
        }
        for scene, models in runs[0].items()
    }


def _ratios(runs: list[Found], without: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """By scene and model, the time of Adaptive over the least one, of policies that were tried in all ``runs``.

    Not those whose names begin as given.
    """
    ratios: dict[str, dict[str, float]] = {}
    for scene, models in _means(runs).items():
        for model, took in models.items():
            tried = [name for name in runs[-1][scene][model] if not name.startswith(without)]
            ratios.setdefault(scene, {})[model] = took["Adaptive"] / min(took[name] for name in tried)
    return ratios


def _deviation(runs: list[Found]) -> float:
    """The standard deviation of Adaptive's seconds over their mean: the largest of all scenes and models."""
    took = [[run[scene][model]["Adaptive"] for run in runs] for scene, models in runs[0].items() for model in models]
    return max(float(np.std(seconds) / np.mean(seconds)) for seconds in took)


def _draw(plot: Figure, found: Found) -> None:
    panels = plot.subplots(len(TARGETS), len(found), sharex="col", sharey=True, squeeze=False)
    for column, (scene, models) in enumerate(found.items()):
        for row, (model, took) in enumerate(models.items()):
            axes, names = panels[row][column], list(took)[::-1]
            most = max(seconds for seconds in took.values() if math.isfinite(seconds))
            colors = ["tab:blue" if name == "Adaptive" else "silver" for name in names]
            axes.barh(names, [min(took[name], 1.1 * most) for name in names], color=colors)
            for place, name in enumerate(names):
                if not math.isfinite(took[name]):
                    axes.text(0, place, " never", va="center", fontsize=8)
            axes.set_title(f"{scene}, {model}", fontsize=9)
            axes.tick_params(labelsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("s to the loss", fontsize=9)


def _add(parser: argparse.ArgumentParser) -> None:
    names = [scene.name for scene in SCENES]
    parser.add_argument(
        "--runs", type=int, choices=range(1, 33), metavar="N", default=2, help="by so many seeds (default: 2)"
    )
    parser.add_argument("--scenes", nargs="+", choices=names, default=names, help="default: all four")


if __name__ == "__main__":
    run(__file__, measure, replicas=6, steps=1000, add=_add)
