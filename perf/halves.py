"""What floats of 16 bits take where memory takes the time, beside float32: ops that are fused, sums, rows of a table.

Each is a compiled step on variables larger than all caches, in turns; printed are the median milliseconds, the median
deviation from them, and how long each takes beside float32. What each computes is compared with float32's.

    python perf/halves.py [--threads 1] [--millions 16] [--rounds 25]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr
from flowrt.kernels.store.background import wait_compiled

KINDS = ("float32", "bfloat16", "float16")
WIDTH = 64


def steps_of(kind: str, size: int, threads: int) -> dict[str, Callable[[], Any]]:
    """By name what is measured; the numbers are such as all three hold."""
    dtype = fr.Spec(kind).dtype
    rng = np.random.default_rng(0)
    x, y = ((rng.integers(-64, 65, size) / 64).astype(dtype) for _ in range(2))
    with fr.Graph() as graph:
        a, b, c = fr.Variable(x, name="a"), fr.Variable(y, name="b"), fr.Variable(np.zeros(size, dtype), name="c")
        table = fr.Variable(x.reshape(-1, WIDTH), name="table")
        rows = fr.constant(rng.integers(0, size // WIDTH, size // WIDTH // 2))
        measured = {
            "c = a + b": c.assign(a + b),
            "c = relu(a / 2 + b) - b / 4": c.assign(fr.relu(a * 0.5 + b) - b * 0.25),
            "sum of squares": fr.sum(fr.square(fr.astype(a, "float32"))),
            "rows of a table": fr.take(table, rows),
        }
    session = fr.BlockingSession(graph, options=fr.Options(threads=threads)).__enter__()
    made = {name: session.compile(fetch) for name, fetch in measured.items()}
    answer: dict[str, Callable[[], Any]] = dict(made)
    answer["c"] = lambda: session.run(c)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--millions", type=int, default=16, help="numbers in a variable")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    print(this_machine.describe())
    steps = {kind: steps_of(kind, options.millions << 20, options.threads) for kind in KINDS}
    names = [name for name in steps["float32"] if name != "c"]
    for name in names:
        for _ in range(3):
            found = {kind: made[name]() for kind, made in steps.items()}
            wait_compiled(120)
        found = {kind: np.asarray(made["c"]() if name[0] == "c" else found[kind]) for kind, made in steps.items()}
        for array in found.values():
            np.testing.assert_allclose(array.astype("float32"), found["float32"], rtol=2**-7, atol=2**-7)
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind, made in steps.items():
                began = time.perf_counter()
                made[name]()
                taken[kind].append(1e3 * (time.perf_counter() - began))
        medians = {kind: float(np.median(times)) for kind, times in taken.items()}
        for kind, times in taken.items():
            spread = float(np.median(np.abs(np.array(times) - medians[kind])))
            beside = medians[kind] / medians["float32"]
            print(f"{name:30s} {kind:9s} {medians[kind]:7.2f} ms ± {spread:5.2f}   {beside:5.2f} of float32")


if __name__ == "__main__":
    main()
