"""Entries in order and random draws on one thread, beside NumPy: CPU time of the quickest of many runs.

Short rows, long ones, and one row alone. NumPy's sort and argsort are its quickest, which are not stable; for `top_k`
stands `argpartition`, which puts what it finds in no order. Every result is checked against NumPy's stable sort.

    python perf/sorting.py float32 int64
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf.machine import describe  # isort: skip  (before NumPy)

import numpy as np

import flowrt as fr

Array = np.ndarray[Any, Any]
SHAPES = ((100_000, 10), (1000, 100), (1000, 1000), (1, 1_000_000))
SECONDS, DRAWN, LOOKED_FOR = 0.5, 1_000_000, 100_000


def quickest(function: Callable[[], Any]) -> float:
    """The least CPU time of many calls, in milliseconds."""
    for _ in range(3):
        function()
    least, end = float("inf"), time.process_time() + SECONDS
    while time.process_time() < end:
        start = time.process_time()
        function()
        least = min(least, time.process_time() - start)
    return least * 1e3


def cases(dtype: str) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """What is measured: its name, flowrt's way and NumPy's."""
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        x = (rng.normal(size=shape) * 1e5).astype(dtype)
        line, values, k = np.sort(x[0]), x.reshape(-1)[:LOOKED_FOR], 3 if shape[1] == 10 else 10
        check(x, line, values, k)
        name = f"{dtype}[{shape[0]},{shape[1]}]"
        yield f"sort {name}", lambda x=x: fr.sort(x), lambda x=x: np.sort(x)
        yield f"argsort {name}", lambda x=x: fr.argsort(x), lambda x=x: np.argsort(x)
        yield f"top_k {k} of {name}", lambda x=x, k=k: fr.top_k(x, k), lambda x=x, k=k: np.argpartition(x, -k)[:, -k:]
        yield (
            f"searchsorted of {LOOKED_FOR} in {dtype}[{shape[1]}]",
            lambda line=line, values=values: fr.searchsorted(line, values),
            lambda line=line, values=values: np.searchsorted(line, values),
        )


def draws() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    rng, size = np.random.default_rng(0), (DRAWN,)
    yield "randint", lambda: fr.random.randint(size, 0, 100, seed=1), lambda: rng.integers(0, 100, size)
    yield "permutation", lambda: fr.random.permutation(DRAWN, seed=1), lambda: rng.permutation(DRAWN)
    yield (
        "truncated_normal, and NumPy's normal",
        lambda: fr.random.truncated_normal(size, seed=1),
        lambda: rng.normal(size=size),
    )


def check(x: Array, line: Array, values: Array, k: int) -> None:
    order = np.argsort(x, kind="stable")
    np.testing.assert_array_equal(fr.argsort(x), order)
    np.testing.assert_array_equal(fr.sort(x), np.take_along_axis(x, order, -1))
    np.testing.assert_array_equal(fr.top_k(x, k)[0], np.take_along_axis(x, order, -1)[:, : -k - 1 : -1])
    np.testing.assert_array_equal(fr.searchsorted(line, values), np.searchsorted(line, values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtypes", nargs="*", default=["float32", "int64", "float64"])
    given = parser.parse_args()
    print(describe())
    for measured in (*map(cases, given.dtypes), draws()):
        for name, ours, numpys in measured:
            mine, other = quickest(ours), quickest(numpys)
            print(f"{name:46} {mine:8.2f} ms   NumPy {other:8.2f} ms   {other / mine:5.2f} times as fast")


if __name__ == "__main__":
    main()
