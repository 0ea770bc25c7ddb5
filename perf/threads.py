"""One tape on one thread and on several: what the crew gains, and that results are the same bits.

A wide graph of medium nodes, one large elementwise node, a chain of matrix products, and 1,000 scalar adds, which must
stay on one thread. Blocking steps; the variants take turns in one process, so that what else runs disturbs both alike.

    python perf/threads.py [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

Build = Callable[[fr.Tensor], fr.Tensor]


def wide(x: fr.Tensor) -> fr.Tensor:
    branches = []
    for _ in range(8):
        y = x
        for _ in range(4):
            y = fr.tanh(y)
        branches.append(y)
    return fr.add_n(branches)


def products(x: fr.Tensor) -> fr.Tensor:
    for _ in range(6):
        x = fr.matmul(x, x) * 0.01
    return x


def adds(x: fr.Tensor) -> fr.Tensor:
    for _ in range(1000):
        x = x + 1.0
    return x


CASES: dict[str, tuple[tuple[int, ...], Build]] = {
    "8 branches of 4 tanh of 16,384": ((1 << 14,), wide),
    "one tanh of 1,048,576": ((1 << 20,), fr.tanh),
    "6 products of 256 by 256": ((256, 256), products),
    "1,000 scalar adds": ((), adds),
}


def steps(stack: ExitStack, shape: tuple[int, ...], build: Build, threads: int) -> Callable[..., Any]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", shape, name="x")
        y = build(x)
    session = stack.enter_context(fr.BlockingSession(graph, options=fr.Options(optimize=False, threads=threads)))
    return session.compile(y, [x])


def timed(step: Callable[..., Any], data: Any) -> float:
    began = time.perf_counter()
    step(data)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=300)
    arguments = parser.parse_args()
    print(this_machine.describe())
    print(f"microseconds per step: median (least), on one thread and on {arguments.threads}")
    for name, (shape, build) in CASES.items():
        data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        with ExitStack() as stack:
            variants = [steps(stack, shape, build, threads) for threads in (1, arguments.threads)]
            for _ in range(8):  # compile, and learn
                alone, shared = (np.asarray(step(data)) for step in variants)
                assert alone.tobytes() == shared.tobytes()
            seconds: list[list[float]] = [[], []]
            for _ in range(arguments.repeat):
                for number, step in enumerate(variants):
                    step(data)  # wakes who slept while the other had its turn
                    seconds[number].append(timed(step, data))
        figures = [f"{statistics.median(s) * 1e6:9.1f} ({min(s) * 1e6:.1f})" for s in seconds]
        ratio = min(seconds[0]) / min(seconds[1])
        print(f"{name:32} {figures[0]:>24} {figures[1]:>24}   least to least: {ratio:.2f}")


if __name__ == "__main__":
    main()
