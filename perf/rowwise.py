"""Kernels of rows written by hand against the same made of their formula by the emitter of rows, shape by shape.

Each family is an op and the program that it stands for, as `passes/fuse` would have it (`FORMULAS`); both are run as a
tape runs them, by one thread or by two with half of the units each. Microseconds, the least of many short runs taken
by turns, and how many times as long the hand-written one takes. What both answer is compared first.

    python perf/rowwise.py [softmax ...] [--dtypes float64] [--rows 32 512 4096] [--columns 8 64 1000] [--threads 2]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["FLOWRT_FUSED"] = "wait"  # the program as it is once it is compiled

from perf.machine import describe  # isort: skip  (before NumPy)

import numpy as np

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.base.spec import Spec
from flowrt.kernels.launch import RUN_WORDS, Prepared, apply_kernel, prepare

Array = np.ndarray[Any, Any]
KEPT, LEFT = ({"axis": (-1,), "keepdims": keep} for keep in (True, False))
COLUMN = {"axis": -1}
POWERS = [("max", (0,), KEPT), ("subtract", (0, -1), {}), ("exp", (-1,), {}), ("sum", (-1,), KEPT)]

# Of each op: how many inputs, its attributes, and its program: (op, operands, attributes), where operands that are
# negative count back from the member itself; the last members are the results.
FORMULAS: dict[str, tuple[int, dict[str, Any], list[tuple[str, tuple[int, ...], dict[str, Any]]]]] = {
    "softmax": (1, COLUMN, [*POWERS, ("reciprocal", (-1,), {}), ("multiply", (-3, -1), {})]),
    "log_softmax": (1, COLUMN, [*POWERS, ("log", (-1,), {}), ("subtract", (-4, -1), {})]),
    "cross_entropy": (
        2,
        {},
        [*POWERS, ("log", (-1,), {}), ("subtract", (-1, -4), {}), ("multiply", (1, -1), {}), ("sum", (-1,), LEFT)],
    ),
}


def program(op: str, dtype: str) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The members of an op's formula, as `fused` takes them, and its results."""
    inputs, _, formula = FORMULAS[op]
    members = []
    for n, (name, operands, how) in enumerate(formula, inputs):
        taken = tuple(i if i >= 0 else n + i for i in operands)
        members.append((name, taken, dtype, tuple(how.items())))
    return tuple(members), (inputs + len(members) - 1,)


def drawn(op: str, rows: int, columns: int, dtype: str) -> list[Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)).astype(dtype)
    weights = rng.random((rows, columns)).astype(dtype)
    return [x, weights / weights.sum(1, keepdims=True)][: FORMULAS[op][0]]


class Side:
    """One way to compute an op: what it answers, and how long ``times`` runs of it take."""

    def __init__(self, prepared: Prepared, arrays: list[Array], output: Spec, threads: int) -> None:
        self.answer = np.empty(output.concrete, output.dtype)
        self._prepared, self._threads, self._words = prepared, threads, np.zeros(RUN_WORDS, np.int64)
        self._memory, self._bases = [], []
        for _ in range(threads):
            scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
            addresses = [a.ctypes.data for a in (*arrays, self.answer, *scratch)]
            self._memory.append((arrays, scratch))
            self._bases.append(prepared.bases(self._words.ctypes.data, addresses))

    def once(self) -> Array:
        self._part(0, 1, 1)
        return self.answer

    def _part(self, thread: int, of: int, times: int) -> None:
        at = ctypes.addressof(self._bases[thread])
        for _ in range(times):
            for entry, block, units in self._prepared._calls:
                entry(at, block, units * thread // of, units * (thread + 1) // of)

    def seconds(self, times: int) -> float:
        """Of one run, where each thread goes on with its part without waiting for others."""
        others = [threading.Thread(target=self._part, args=(n, self._threads, times)) for n in range(1, self._threads)]
        begin = time.perf_counter()
        for other in others:
            other.start()
        self._part(0, self._threads, times)
        for other in others:
            other.join()
        return (time.perf_counter() - begin) / times


def least(first: Callable[[int], float], second: Callable[[int], float], seconds: float) -> tuple[float, float]:
    """The least that each takes, by turns."""
    times = max(int(0.002 / max(first(3), 1e-7)), 1)
    found, stop = [float("inf"), float("inf")], time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for n, side in enumerate((first, second)):
            found[n] = min(found[n], side(times))
    return found[0], found[1]


def compare(op: str, rows: int, columns: int, dtype: str, threads: int, seconds: float) -> tuple[float, float]:
    arrays = drawn(op, rows, columns, dtype)
    specs = [Spec(a.dtype, a.shape) for a in arrays]
    output = Spec(dtype, (rows,) if FORMULAS[op][2][-1][2] is LEFT else (rows, columns))
    members, results = program(op, dtype)
    made = apply_kernel("fused", specs, [output], {"members": members, "results": results})
    hand = Side(prepare(op, specs, [output], FORMULAS[op][1]), arrays, output, threads)
    emitted = Side(Prepared(made, len(specs) + 1), arrays, output, threads)
    np.testing.assert_allclose(hand.once(), emitted.once(), 1e-4, 1e-6)
    return least(hand.seconds, emitted.seconds, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=list(FORMULAS))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float64"])
    parser.add_argument("--rows", nargs="*", type=int, default=[32, 512, 4096])
    parser.add_argument("--columns", nargs="*", type=int, default=[2, 10, 64, 256, 1000, 4096])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.08, help="for each case")
    options = parser.parse_args()
    print(describe())
    print("microseconds by hand and emitted, and by how much the hand-written one takes longer")
    for threads in options.threads:
        for op in options.ops:
            for dtype in options.dtypes:
                print(f"\n{op} {dtype}, threads: {threads}\n{'':8}" + "".join(f"{n:>22} rows" for n in options.rows))
                for columns in options.columns:
                    line = f"{columns:8}"
                    for rows in options.rows:
                        hand, emitted = compare(op, rows, columns, dtype, threads, options.seconds)
                        line += f"{hand * 1e6:11.1f}{emitted * 1e6:9.1f}{hand / emitted:7.2f}"
                    print(line, flush=True)


if __name__ == "__main__":
    main()
