"""The peak memory of training steps: as predicted, as counted while they run, and as the process grows by.

    python perf/memory.py [CASE ...]

Each case runs in a process of its own, with one thread and with two. A first step loads kernels and begins variables;
then all that was kept for later steps is let go, and one more step is watched: the prediction for it, the high-water
mark of what was counted, and that of the resident set, each above what there was before. What grows by less than 64 MiB
is shown beside, though pages of Python's and of code are much of it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
from sides.harness import Settings, Side
from sides.steps import flowrt as side

import flowrt as fr
from flowrt.base.spec import spec_of

SMALL = 64 << 20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # else glibc keeps what was let go once, and nothing is seen to grow
WIDTH, LAYERS, ROWS = 256, 8, 65536


def wide(a: Settings) -> Side:
    """A multilayer perceptron on so many rows that a step takes more than half a gigabyte."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, WIDTH), name="x")
        y = x
        for i in range(LAYERS):
            w = fr.Variable(fr.random.normal((WIDTH, WIDTH), stddev=0.05, seed=i), name=f"w{i}")
            y = fr.relu(y @ w)
        loss = fr.mean(fr.square(y - x))
        train = fr.optim.Momentum(0.01, 0.9).minimize(loss)
    step, batch = side._session(graph, a).compile([loss, train], [x]), np.ones((ROWS, WIDTH), np.float32)
    return Side(lambda: float(step(batch)[0]))


CASES: dict[str, Callable[[Settings], Side]] = {
    "W3": side.mlp,
    "W4": side.cnn,
    "W5": side.lstm,
    "W7": side.embedding,
    "residual": side.residual,
    "gru": side.gru,
    "wide": wide,
}


class Watched:
    """A session whose compiled steps are run and looked at one by one."""

    def __init__(self, session: fr.BlockingSession) -> None:
        self.session = session
        self.figures: list[int] = []

    def compile(self, fetches: Any, feeds: Any) -> Callable[..., Any]:
        return lambda *values: self.run(fetches, dict(zip(feeds, values, strict=True)))

    def run(self, fetches: Any, feeds: dict[Any, Any]) -> Any:
        """A step; the figures of the last are kept."""
        inner = self.session._session
        memory = inner._open()._host.memory
        memory.reclaim()
        gc.collect()
        held, before = memory.held, status("VmRSS")
        memory.forget_peak()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        answer = self.session.run(fetches, feeds)
        counted, grown = memory.statistics().peak - held, status("VmHWM") - before
        executor = inner._step(fetches, tuple(feeds)).registered
        predicted = executor.footprint([spec_of(np.asarray(a)) for a in feeds.values()]).peak
        self.figures = [predicted, counted, grown]
        return answer


def status(key: str) -> int:
    """Bytes that Linux says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def watch(name: str, threads: int) -> None:
    """Run a case here, and print its figures."""
    opened: list[Watched] = []
    plain = side._session

    def session(graph: fr.Graph, a: Settings, **options: Any) -> Any:
        opened.append(Watched(plain(graph, a, **options)))
        return opened[-1]

    side._session = session  # type: ignore[assignment]
    running = CASES[name](Settings(name, "", threads))
    for _ in range(3):
        running.step()
    print(*opened[0].figures)


def main(names: list[str]) -> None:
    print(machine.describe())
    print(f"{'':10} {'threads':>7} {'predicted':>11} {'counted':>11} {'RSS grew':>11}  MiB; RSS ÷ predicted")
    for name in names or CASES:
        for threads in (1, 2):
            command = [sys.executable, __file__, "--watch", name, str(threads)]
            done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True)
            predicted, counted, grown = map(int, done.stdout.split())
            beside = f"{grown / predicted:.2f}" + ("" if predicted >= SMALL else " (small)")
            columns = " ".join(f"{n / 2**20:11.2f}" for n in (predicted, counted, grown))
            print(f"{name:10} {threads:7} {columns}  {beside}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1:])
