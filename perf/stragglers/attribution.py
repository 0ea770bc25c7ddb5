"""Faults of five kinds are injected into real processes: does training name the right one, and how soon?

One parameter server and some workers train a small network. One after another, for three seconds each with as long
between, a worker computes slowly, gets its batches late, has a slow link, is stopped (SIGSTOP) or held in every step,
the server applies slowly, or the source of batches is slow for all. What training says (`StepReport.slow`) is compared
with what was done: the first diagnosis after a fault began counts, and it must come within 3 s. Half of the faults
strike while all updates are waited for, half while the first n - 1 are.

    python perf/stragglers/attribution.py                     # 10 faults: two minutes
    python perf/stragglers/attribution.py --faults 40
    python perf/stragglers/attribution.py --undisturbed 10 --out /tmp/quiet    # minutes: any diagnosis is a false alarm
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from experiment import Finding, run

import flowrt as fr

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

CAUSES = ("compute", "input", "link", "server", "frozen")
LIMIT = 3.0  # seconds within which a fault is to be named
LASTS, BETWEEN, WARM = 3.2, 3.6, 5.0  # seconds of a fault, behind it, and before the first
BATCH, WIDTH, CLASSES = 128, 64, 10


Said = tuple[float, tuple[fr.train.Slow, ...]]  # a diagnosis, and when it was made


@dataclass(frozen=True)
class Fault:
    """What is done, from ``begins`` seconds of its run on; ``replica`` is None where it concerns all."""

    cause: str
    replica: int | None
    seconds: float
    begins: float
    how: str

    @property
    def delays(self) -> dict[str, fr.delays.Delay]:
        """By task, how it is slower meanwhile."""
        match self.how:
            case "source" | "stop":
                return {}
            case "latency":
                delay: fr.delays.Delay = fr.delays.Link(1e12, self.seconds)
            case at:
                delay = fr.delays.Constant(self.seconds, at=at)
        task = "/job:ps/task:0" if self.replica is None else f"/job:worker/task:{self.replica}"
        return {task: delay.during(self.begins, self.begins + LASTS, unit="seconds")}


@dataclass
class Named:
    """What was said of a fault: the first diagnosis, how long after its begin, and whether dropping would help."""

    fault: Fault
    cause: str = "nothing"
    replica: int | None = None
    after: float = float("nan")
    helps: bool = False

    @property
    def right(self) -> bool:
        """Whether cause, replica and advice are."""
        same = (self.cause, self.replica) == (self.fault.cause, self.fault.replica)
        return same and self.after <= LIMIT and self.helps == (self.fault.replica is not None)


def faults(count: int, replicas: int, rng: random.Random) -> Iterator[Fault]:
    """As many of each cause as there can be, in random order."""
    causes = [CAUSES[i % len(CAUSES)] for i in range(count)]
    rng.shuffle(causes)
    for cause in causes:
        ways = {"input": ("input", "source"), "link": ("push", "latency"), "frozen": ("stop", "frozen")}.get(
            cause, (cause,)
        )
        how = rng.choice(ways)
        replica = None if how in ("server", "source") else rng.randrange(replicas)
        yield Fault(cause, replica, rng.uniform(0.03, 0.3), 0.0, how)


def build(replicas: int, policy: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    """A network with one hidden layer."""

    def loss_fn(given: dict[str, fr.Tensor]) -> Any:
        hidden = fr.Variable(fr.random.normal((WIDTH, 256), stddev=0.1, seed=1), name="hidden")
        out = fr.Variable(np.zeros((256, CLASSES), np.float32), name="out")
        logits = fr.nn.relu(given["x"] @ hidden) @ out
        return fr.mean(fr.nn.softmax_cross_entropy(logits, given["y"]))

    inputs = {"x": fr.Spec("float32", (None, WIDTH)), "y": fr.Spec("int32", (None,))}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.01), replicas, policy=policy)
    return graph, trainer


def batches(slow: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """The same one without end, each so many seconds late."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int32)}
    while True:
        if seconds := slow():
            time.sleep(seconds)
        yield batch


async def observe(
    replicas: int, policy: Any, seconds: float, wanted: list[Fault], told: Callable[[float, tuple[Any, ...]], None]
) -> int:
    """Train for so long while these faults strike; ``told`` gets each diagnosis that differs, and when it was made.

    Answers the number of steps.
    """
    graph, trainer = build(replicas, policy)
    delays: dict[str, fr.delays.Delay] = {}
    for fault in wanted:
        for task, delay in fault.delays.items():
            delays[task] = delays[task] + delay if task in delays else delay
    cluster = fr.LocalCluster(ps=1, worker=replicas, delays=delays)
    async with cluster, fr.Session(graph, cluster=cluster) as session:
        async for report in trainer.steps(session, batches(float)):  # what is compiled once is there from here on
            if report.step == 20:
                break
        began = time.monotonic()

        def late() -> float:
            now = time.monotonic() - began
            return next(
                (f.seconds / replicas for f in wanted if f.how == "source" and 0 <= now - f.begins < LASTS), 0.0
            )

        async def strike() -> None:
            """Stop and continue processes."""
            for fault in wanted:
                if fault.how == "stop":
                    process = cluster.processes[f"/job:worker/task:{fault.replica}"]
                    for at, what in ((fault.begins, signal.SIGSTOP), (fault.begins + LASTS, signal.SIGCONT)):
                        await asyncio.sleep(at - (time.monotonic() - began))
                        process.send_signal(what)

        async def look() -> None:
            before: set[tuple[str, int | None]] = set()
            while True:
                await asyncio.sleep(0.02)
                slow = trainer.tally.attribution.slow
                now = {(found.cause, found.replica) for found in slow}
                if now != before:
                    told(time.monotonic() - began, slow)
                before = now

        tasks = [asyncio.ensure_future(strike()), asyncio.ensure_future(look())]
        try:
            steps = 0
            async with asyncio.timeout(seconds):
                async for _ in trainer.steps(session, batches(late)):
                    steps += 1
        except TimeoutError:
            return steps
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return steps


def named(wanted: list[Fault], said: list[Said]) -> list[Named]:
    """The first diagnosis while each fault went on."""
    found = []
    for fault in wanted:
        those = [(at, slow) for at, slow in said if fault.begins <= at <= fault.begins + LASTS and slow]
        mine = Named(fault)
        if those:
            at, (slow, *_) = those[0]
            mine = Named(fault, slow.cause, slow.replica, at - fault.begins, slow.helps)
        found.append(mine)
    return found


def alarms(wanted: list[Fault], said: list[Said]) -> list[str]:
    """What was said while there was no fault, nor had been one for as long as it takes to be forgotten."""
    return [
        f"{at:.1f} s: {slow[0]}"
        for at, slow in said
        if slow and not any(f.begins <= at <= f.begins + LASTS + BETWEEN for f in wanted)
    ]


def try_faults(options: argparse.Namespace) -> Finding:
    """Inject, compare, and count."""
    todo = list(faults(options.faults, options.replicas, random.Random(options.seed)))
    policies = (fr.train.AllOf(), fr.train.FirstOf(options.replicas - 1))
    found, wrong = list[Named](), list[str]()
    for policy, mine in zip(policies, (todo[::2], todo[1::2]), strict=True):
        those, beside = inject(options.replicas, policy, mine)
        found += those
        wrong += beside
    right = [one for one in found if one.right]
    shared = [one for one in found if one.fault.replica is None]
    after = [one.after for one in right]
    sentence = (
        f"{len(right)} of {len(found)} faults ({100 * len(right) / len(found):.0f}%) were named right within "
        f"{LIMIT:g} s, the median after {statistics.median(after or [float('nan')]):.1f} s; that dropping will not "
        f"help was said in {sum(one.right for one in shared)} of {len(shared)} cases where it does not; "
        f"{len(wrong)} false alarms between them."
    )
    matrix = {
        cause: {
            said: sum(one.fault.cause == cause and one.cause == said for one in found) for said in (*CAUSES, "nothing")
        }
        for cause in CAUSES
    }
    return Finding(sentence, {"matrix": matrix, "seconds": after, "alarms": wrong}, lambda plot: draw(plot, matrix))


def inject(replicas: int, policy: Any, wanted: list[Fault]) -> tuple[list[Named], list[str]]:
    """What was said of these faults, one after another, and when there was none."""
    placed = [replace(fault, begins=WARM + number * (LASTS + BETWEEN)) for number, fault in enumerate(wanted)]
    said = list[Said]()
    length = WARM + len(placed) * (LASTS + BETWEEN)
    asyncio.run(observe(replicas, policy, length, placed, lambda at, slow: said.append((at, slow))))
    found = named(placed, said)
    for one in found:
        fault = one.fault
        what = f"{fault.cause} of {fault.replica} by {fault.how}, {1e3 * fault.seconds:.0f} ms"
        verdict = f"{'right' if one.right else 'WRONG'}: {one.cause} of {one.replica} after {one.after:.2f} s"
        print(f"{policy!r:19} {what:40} {verdict}", flush=True)
    return found, alarms(placed, said)


def be_undisturbed(options: argparse.Namespace) -> Finding:
    """Count what is said of training that nothing disturbs."""
    said: list[Said] = []
    steps = asyncio.run(
        observe(
            options.replicas,
            fr.train.AllOf(),
            60 * options.undisturbed,
            [],
            lambda at, slow: said.append((at, slow)),
        )
    )
    wrong = alarms([], said)
    print(*wrong, sep="\n")
    sentence = f"{len(wrong)} false alarms in {options.undisturbed:g} undisturbed minutes, {steps} steps."
    return Finding(sentence, {"alarms": wrong, "steps": steps}, lambda plot: plot.gca().set_title(sentence))


def draw(plot: Figure, matrix: dict[str, dict[str, int]]) -> None:
    """The confusion matrix."""
    axes = plot.gca()
    counts = np.array([list(row.values()) for row in matrix.values()])
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(counts.shape[1]), [*CAUSES, "nothing"])
    axes.set_yticks(range(counts.shape[0]), CAUSES)
    axes.set_xlabel("named")
    axes.set_ylabel("injected")
    axes.grid(False)
    for i, j in itertools.product(*map(range, counts.shape)):
        if counts[i, j]:
            axes.text(j, i, str(counts[i, j]), ha="center", va="center")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=10, help="how many; default: %(default)s")
    parser.add_argument("--undisturbed", type=float, default=0.0, metavar="MINUTES", help="inject nothing for so long")


def measure(options: argparse.Namespace) -> Finding:
    return be_undisturbed(options) if options.undisturbed else try_faults(options)


if __name__ == "__main__":
    run(__file__, measure, replicas=4, steps=1, add=add)
