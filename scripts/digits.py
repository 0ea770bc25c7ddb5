"""Train a classifier of handwritten digits with replicas on worker processes, while one of them is slow.

Four ways to train are compared on the same model and data:

  all        every step waits for the update of every replica
  first      every step keeps the first updates (--take of them) and drops the rest
  adaptive   every step keeps as many as are worth waiting for, by what it has seen
  yardstick  as many replicas as `first` keeps, all of them on workers without a delay

At the end there is a table, and the same as one line of JSON.
"""

from __future__ import annotations

import os
import signal
import sys

IGNORED = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as under nohup: then it stays ignored
if not IGNORED:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until there is something to tidy up

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import flowrt as fr

POLICIES = ("all", "first", "adaptive", "yardstick")
RATE, MOMENTUM, HIDDEN = 0.5, 0.9, 256
IMAGES, LABELS = fr.Spec("float32", (None, 64)), fr.Spec("int32", (None,))
Batch = dict[str, np.ndarray]


# ── the data and the model ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8 by 8 pixels, less the mean image, and the digits they show."""

    train: Batch
    test: Batch

    @staticmethod
    def load() -> Digits:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
        mean = x_train.mean(axis=0)
        return Digits(_batch(x_train - mean, y_train), _batch(x_test - mean, y_test))

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        """Random batches without end."""
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(self.train["labels"]))
            for start in range(0, len(order) - size + 1, size):
                yield {name: array[order[start : start + size]] for name, array in self.train.items()}


def _batch(images: np.ndarray, labels: np.ndarray) -> Batch:
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


def build_logits(images: fr.Tensor, seed: int) -> fr.Tensor:
    """Two dense layers: images [n, 64] to a score for each digit, [n, 10]."""
    w1 = fr.Variable(fr.random.normal((64, HIDDEN), stddev=(2 / 64) ** 0.5, seed=seed), name="w1")
    b1 = fr.Variable(np.zeros(HIDDEN, np.float32), name="b1")
    w2 = fr.Variable(fr.random.normal((HIDDEN, 10), stddev=(1 / HIDDEN) ** 0.5, seed=seed), name="w2")
    b2 = fr.Variable(np.zeros(10, np.float32), name="b2")
    return fr.nn.relu(images @ w1 + b1) @ w2 + b2


def build_trainer(policy: str, options: argparse.Namespace) -> tuple[fr.Graph, fr.train.Replicated, Any]:
    """The graph of one policy: replicas that train, and a function that answers the digits it sees."""

    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        logits = build_logits(inputs["images"], options.seed)
        return fr.mean(fr.nn.softmax_cross_entropy(logits, inputs["labels"]))

    def predict_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        return fr.argmax(build_logits(inputs["images"], options.seed), axis=-1)

    workers = workers_of(policy, options)
    with fr.Graph() as graph, fr.container(policy):
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"images": IMAGES, "labels": LABELS},
            optimizer=fr.optim.Momentum(RATE, MOMENTUM),
            replicas=len(workers),
            policy=policy_of(policy, options),
            servers=options.ps,
            server_device="" if options.local else "/job:ps/task:{}",
            worker_device="" if options.local else workers,
        )
        predict = trainer.share(predict_fn, inputs={"images": IMAGES})
    return graph, trainer, predict


def policy_of(policy: str, options: argparse.Namespace) -> fr.train.Policy:
    match policy:
        case "first":
            return fr.train.FirstOf(options.take)
        case "adaptive":
            return fr.train.Adaptive()
        case _:
            return fr.train.AllOf()


def workers_of(policy: str, options: argparse.Namespace) -> list[str]:
    """The worker of each replica: all of them, or for the yardstick only such as have no delay."""
    workers = [f"/job:worker/task:{i}" for i in range(options.replicas)]
    if policy != "yardstick":
        return workers
    undelayed = [worker for worker in workers if worker not in options.delays]
    return undelayed[: options.take]


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Result:
    """What training by one policy came to."""

    seconds: list[float]  # per step, without the first, in which the nodes get ready
    statistics: fr.train.Statistics
    accuracy: float

    def figures(self) -> dict[str, Any]:
        replicas = self.statistics.replicas
        return {
            "median_step_s": round(float(np.median(self.seconds)), 5),
            "p95_step_s": round(float(np.quantile(self.seconds, 0.95)), 5),
            "steps_per_s": round(len(self.seconds) / sum(self.seconds), 3),
            "kept": {str(i): replica.kept for i, replica in enumerate(replicas)},
            "late": {str(i): replica.late for i, replica in enumerate(replicas)},
            "lost": list(self.statistics.lost),
            "accuracy": round(self.accuracy, 4),
        }


async def train(policy: str, cluster: Any, digits: Digits, options: argparse.Namespace, display: Display) -> Result:
    """Train from the start (or from a checkpoint) for so many steps, and test."""
    graph, trainer, predict = build_trainer(policy, options)
    saved = fr.Checkpoints(Path(options.checkpoints) / policy, every_steps=10) if options.checkpoints else None
    seconds: list[float] = []
    async with fr.Session(graph, cluster=cluster, checkpoints=saved, name=policy) as session:
        batches = digits.batches(options.batch, options.seed)
        async with aclosing(trainer.steps(session, batches)) as reports:
            async for report in reports:
                seconds.append(report.seconds)
                display.step(policy, len(seconds), report, trainer.statistics().lost)
                if len(seconds) == options.steps:
                    break
        answers = await predict(session, images=digits.test["images"])
    accuracy = float(np.mean(answers == digits.test["labels"]))
    return Result(seconds[1:] or seconds, trainer.statistics(), accuracy)


@asynccontextmanager
async def nodes(digits: Digits, options: argparse.Namespace, display: Display) -> AsyncIterator[Any]:
    """Parameter servers and workers as processes on this machine; nothing at all if everything runs in this one."""
    if options.local:
        yield None
        return

    async def compile_kernels() -> None:
        """One step here, so that the nodes find every kernel on disk and do not compile the same ones at once."""
        small = argparse.Namespace(**{**vars(options), "local": True, "checkpoints": None, "steps": 2, "replicas": 1})
        await train("all", None, digits, small, Display(2, quiet=True))

    jobs = {"ps": options.ps, "worker": options.replicas}
    display.say(f"starting {options.ps} ps and {options.replicas} workers (the first time, compiling takes a while)")
    cluster: Any
    if options.on == "ray":
        little = {job: {"num_cpus": 0.1} for job in jobs}  # the model is tiny: any machine has room for its nodes
        cluster = fr.launch.ray.Cluster(**jobs, delays=options.delays, warm=compile_kernels, resources=little)
    else:
        cluster = fr.LocalCluster(**jobs, delays=options.delays, warm=compile_kernels)
    async with cluster:
        yield cluster


def whole(cluster: Any) -> bool:
    """Whether every node still runs; Ray starts those again that do not."""
    processes = getattr(cluster, "processes", {})
    return all(process.returncode is None for process in processes.values())


async def run(options: argparse.Namespace, display: Display) -> dict[str, Result]:
    """Train by each policy in turn, on nodes that are all there."""
    digits, results = Digits.load(), dict[str, Result]()
    left = list(options.policies)
    while left:
        async with nodes(digits, options, display) as cluster:
            while left and whole(cluster):
                results[left[0]] = await train(left[0], cluster, digits, options, display)
                left.pop(0)
    return results


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Display:
    """Progress: a line that changes on a terminal, plain lines elsewhere, nothing if ``quiet``."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self._steps = steps
        self._quiet = quiet
        terminal = sys.stdout.isatty()
        self.console = Console(width=None if terminal else 110)
        self._live = Live(console=self.console, refresh_per_second=10) if terminal and not quiet else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        if not self._quiet:
            self.console.print(text, highlight=False)

    def step(self, policy: str, step: int, report: fr.train.StepReport, lost: Sequence[str]) -> None:
        late = ", ".join(map(str, report.late)) or "none"
        line = (
            f"{policy:<9}  step {step:>4} of {self._steps}   loss {report.loss:6.3f}   "
            f"{1000 * report.seconds:7.1f} ms   late: {late}" + (f"   lost: {', '.join(lost)}" if lost else "")
        )
        last = step == self._steps
        if self._live is not None:
            self._live.update(Text("" if last else line))
            if last:
                self.console.print(line, highlight=False)
        elif last or step == 1 or step % 10 == 0:
            self.say(line)

    def table(self, results: dict[str, Result]) -> None:
        table = Table("policy", title="handwritten digits", caption="kept and late: updates of replica 0, 1, 2, ...")
        for name in ("median step", "p95 step", "steps/s", "kept", "late", "accuracy"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("lost", overflow="fold")
        for policy, result in results.items():
            row = result.figures()
            times = f"{1000 * row['median_step_s']:.1f} ms", f"{1000 * row['p95_step_s']:.1f} ms"
            counts = (" ".join(map(str, row[key].values())) for key in ("kept", "late"))
            lost = "\n".join(row["lost"]) or "none"
            table.add_row(policy, *times, f"{row['steps_per_s']:.1f}", *counts, f"{row['accuracy']:.4f}", lost)
        self.console.print(table)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", choices=[*POLICIES, "compare"], default="compare", help="default: all four in turn")
    parser.add_argument("--replicas", type=int, default=4, help="workers, one replica on each (default 4)")
    parser.add_argument("--take", type=int, help="updates that `first` keeps (default: all but one)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=int, default=60, help="steps to train for, by each policy (default 60)")
    parser.add_argument("--batch", type=int, default=64, help="images per replica and step (default 64)")
    parser.add_argument(
        "--slow",
        action="append",
        metavar="worker:N=DELAY",
        help="let worker N wait so long between its gradient and its push; may be repeated. DELAY is in seconds, or "
        "exponential:MEAN, uniform:LOWEST,HIGHEST, lognormal:MEDIAN,SIGMA; 'none' slows nobody "
        "(default: the last worker, 0.2)",
    )
    parser.add_argument("--local", action="store_true", help="run everything in this process: no nodes, no delays")
    parser.add_argument(
        "--on",
        choices=("processes", "ray"),
        default="processes",
        help="what the nodes are: processes of this machine (default), or actors of Ray, of the cluster that "
        "RAY_ADDRESS names or one on this machine",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches (default 0)")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there every 10 steps, and go on from there")
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    options = parser.parse_args(arguments)
    check(options, parser)
    return options


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Complete the options, and refuse what cannot be."""
    for name in ("replicas", "ps", "steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.local and options.slow:
        parser.error("--slow delays a node, and --local starts none")
    if options.local and options.on == "ray":
        parser.error("--local starts no nodes, and --on ray says what they are")
    options.take = max(1, options.replicas - 1) if options.take is None else options.take
    if not 1 <= options.take <= options.replicas:
        parser.error(f"--take must be from 1 to {options.replicas}, the number of replicas")
    slow = options.slow or ([] if options.local else [f"worker:{options.replicas - 1}=0.2"])
    options.delays = {}
    for text in slow:
        match = re.fullmatch(r"worker:(\d+)=(.+)", text)
        if match is not None and int(match[1]) < options.replicas:
            options.delays[f"/job:worker/task:{match[1]}"] = match[2]
        elif text != "none":
            parser.error(f"--slow {text}: write worker:N=DELAY with N from 0 to {options.replicas - 1}, or none")
    options.policies = POLICIES if options.policy == "compare" else (options.policy,)
    if "yardstick" in options.policies and len(workers_of("yardstick", options)) < options.take:
        parser.error(f"the yardstick needs {options.take} workers without a delay; take fewer, or slow fewer")


async def until_interrupted(options: argparse.Namespace) -> int:
    """Run the command. Ctrl-C cancels it once; what was begun is tidied up, then the exit status is 130."""
    task, interrupted = asyncio.current_task(), []

    def interrupt() -> None:
        if not interrupted and task is not None:
            interrupted.append(True)
            task.cancel()

    if not IGNORED:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    display = Display(options.steps, quiet=options.json)
    try:
        with display:
            results = await run(options, display)
    except (asyncio.CancelledError, fr.FlowrtError) as error:
        if interrupted:
            return 130
        print(f"scripts/train: {error or 'cancelled'}", file=sys.stderr)
        return 1
    if not options.json:
        display.table(results)
    print(json.dumps({"policies": {policy: result.figures() for policy, result in results.items()}}), flush=True)
    return 0


if __name__ == "__main__":
    status = asyncio.run(until_interrupted(parse(sys.argv[1:])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and done
    sys.exit(status)
