"""What a server's work on updates costs: to look at one, and to move a variable by the mean of several.

    python perf/means.py [--mib 96] [--replicas 4] [--rounds 15]

One dense variable of so many MiB, SGD. Beside flowrt's compiled steps stand NumPy's own ways to do the same, and one
copy of the variable: what memory can do. Rounds are interleaved; medians and spread (tenth to ninetieth percentile).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import machine
import numpy as np

import flowrt as fr
from flowrt.train.updates import all_finite, fed_like, mean_of, parts_of

RATE = 1e-3


def measured(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round; the first rounds, in which kernels are made, do not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 5):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    return {name: seconds[5:] for name, seconds in taken.items()}


def main() -> None:
    """Measure, check, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("mib", 96.0), ("replicas", 4), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    a = parser.parse_args()
    size = int(a.mib * 2**20 / 4)
    updates = [np.random.default_rng(r).normal(size=size).astype("float32") for r in range(a.replicas)]
    with fr.Graph() as graph:
        variable = fr.Variable(np.zeros(size, "float32"), name="w")
        fed = [fed_like([variable + 0]) for _ in updates]
        finite = all_finite([(fed[0][0], variable)])
        mean = mean_of([member[0] for member in fed])
        move = fr.optim.SGD(RATE).apply_gradients([(mean, variable)])
    own, other, block = np.zeros(size, "float32"), np.empty(size, "float32"), 1 << 16

    def numpy_finite() -> bool:
        return all(np.isfinite(updates[0][i : i + block]).all() for i in range(0, size, block))

    def numpy_move() -> None:
        for i in range(0, size, block):
            total = updates[0][i : i + block].copy()
            for update in updates[1:]:
                total += update[i : i + block]
            total /= a.replicas
            total *= np.float32(RATE)
            own[i : i + block] -= total

    def numpy_whole() -> None:
        total = updates[0].copy()
        for update in updates[1:]:
            total += update
        total /= a.replicas

    print(machine.describe())
    with fr.BlockingSession(graph) as session:
        check = session.compile(finite, [parts_of(fed[0])[0]])
        apply = session.compile([move], [part for member in fed for part in parts_of(member)])
        ways = {
            "one copy, NumPy": lambda: np.copyto(other, updates[0]),
            "look at one update, NumPy in blocks": numpy_finite,
            "look at one update": lambda: check(updates[0]),
            "the mean alone, NumPy": numpy_whole,
            "mean and SGD, NumPy in blocks": numpy_move,
            "mean and SGD": lambda: apply(*updates),
        }
        found = measured(ways, a.rounds)
        np.testing.assert_array_equal(session.run(variable), own)
    for name, seconds in found.items():
        low, middle, high = (float(np.quantile(seconds, q)) * 1e3 for q in (0.1, 0.5, 0.9))
        print(f"{name:36} {middle:10.4f} ms  ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
