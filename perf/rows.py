"""Rows of tables that lie anywhere: gathering, bags, grouping and sparse updates on one thread, warm and cold.

GB/s of the rows that must be touched: read once for each index where they are gathered, read and written once for each
different row where they are moved. Beside them NumPy's take and add.at (as often as the machine copies rows of that
size at random, and adds them), and one copy of consecutive memory. Warm is the least of many runs over several drawn
batches, cold the median of runs after other memory went through the caches. Every result is checked against NumPy's.

    python perf/rows.py zipf wide
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf.machine import describe  # isort: skip  (before NumPy)

import numpy as np

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.base.spec import Spec
from flowrt.kernels.launch import RUN_WORDS, prepare
from flowrt.sched.host.memory import Memory

Array = np.ndarray[Any, Any]
BATCHES, COLD_RUNS, SECONDS = 4, 7, 0.2
RATE, ACCUMULATED, EPSILON = 0.05, 0.1, 1e-10
RNG = np.random.default_rng(0)
ELSEWHERE = np.ones(16 << 20)  # 128 MiB, more than caches hold


@dataclass(frozen=True, slots=True)
class Case:
    """A table of so many rows and columns, of which ``bags`` times ``size`` are asked for; how they are drawn."""

    name: str
    rows: int
    columns: int
    bags: int
    size: int
    draw: Callable[[int, int], Array]
    dtype: str = "float32"


def zipf(rows: int, count: int) -> Array:
    return (RNG.zipf(1.2, count) - 1) % rows


def uniform(rows: int, count: int) -> Array:
    return RNG.integers(0, rows, count)


def equal(rows: int, count: int) -> Array:
    return np.full(count, rows // 3)


CASES = (
    Case("zipf", 200_000, 64, 1024, 8, zipf),
    Case("uniform", 200_000, 64, 1024, 8, uniform),
    Case("equal", 200_000, 64, 1024, 8, equal),
    Case("small batch", 200_000, 64, 32, 8, zipf),
    Case("bags of one", 200_000, 64, 1024, 1, zipf),
    Case("bags of 100", 200_000, 64, 1024, 100, zipf),
    Case("narrow", 1_000_000, 16, 4096, 8, uniform),
    Case("wide", 10_000, 512, 1024, 8, uniform),
    Case("double", 200_000, 64, 1024, 8, zipf, "float64"),
)


class Kernel:
    """An op on arrays, to be run on one thread."""

    def __init__(self, op: str, inputs: Sequence[Array], outputs: Sequence[Array], **attrs: Any) -> None:
        specs = [[Spec(a.dtype, a.shape) for a in arrays] for arrays in (inputs, outputs)]
        prepared = prepare(op, specs[0], specs[1], attrs)
        scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
        self._held = (*inputs, *outputs, *scratch)
        self._places = [array.ctypes.data for array in self._held]
        self._words = np.zeros(RUN_WORDS, np.int64)
        self._run = prepared.run

    def __call__(self) -> None:
        self._run(self._words.ctypes.data, self._places)
        assert not self._words[0]


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(runs: Sequence[Callable[[], Any]]) -> tuple[float, float]:
    """Seconds warm and cold."""
    warm, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(warm) < 2:
        warm.append(statistics.mean(timed(run) for run in runs))
    cold = []
    for number in range(COLD_RUNS):
        ELSEWHERE.__iadd__(1)
        cold.append(timed(runs[number % len(runs)]))
    return min(warm), statistics.median(cold)


def table(case: Case, start: float | None = None) -> Array:
    """As a variable lies in memory."""
    made = Memory().lasting((case.rows, case.columns), np.dtype(case.dtype))
    made[...] = RNG.standard_normal(made.shape, np.float32) if start is None else start
    return made


def measured(case: Case) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """(what, bytes, seconds warm and cold)."""
    held, kept, dtype = table(case), table(case, ACCUMULATED), np.dtype(case.dtype)
    batches = [case.draw(case.rows, case.bags * case.size).astype(np.int32) for _ in range(BATCHES)]
    many, row = case.bags * case.size, case.columns * dtype.itemsize
    rows, means = np.empty((many, case.columns), dtype), np.empty((case.bags, case.columns), dtype)
    gathers = [Kernel("take", [held, ids], [rows], axis=0, absent=False) for ids in batches]
    yield "take", many * row, measure(gathers)
    np.testing.assert_array_equal(rows, held[batches[(COLD_RUNS - 1) % BATCHES]])
    yield "NumPy take", many * row, measure([_taking(held, ids, rows) for ids in batches])
    shaped = [ids.reshape(case.bags, case.size) for ids in batches]
    how = {"axes": 1, "mean": True, "absent": False}
    yield "bag", many * row, measure([Kernel("bag", [held, ids], [means], **how) for ids in shaped])
    expected = held[shaped[(COLD_RUNS - 1) % BATCHES]].mean(1)
    np.testing.assert_allclose(means, expected, rtol=1e-4, atol=1e-5)

    values, number = RNG.standard_normal(means.shape).astype(dtype), np.int64(case.bags)
    groups = [np.empty(3 * many + 2, np.int32) for _ in batches]
    grouping = [
        Kernel("group_rows", [ids, np.asarray(number)], [made], size=case.rows, absent=False)
        for ids, made in zip(batches, groups, strict=True)
    ]
    yield "group (of indices)", many * 4, measure(grouping)
    different = statistics.mean(np.unique(ids).size for ids in batches)
    settings = np.array([RATE, EPSILON, 0, 0, 0, 0, 0, 0], dtype)
    _check(case, grouping[0], groups[0], batches[0], values)
    yield "add", 2 * different * row, measure([Kernel("add_rows", [values, g, settings], [held]) for g in groups])
    spread = [np.repeat(values, case.size, 0)] * BATCHES
    adding = [_adding(held, ids, each) for ids, each in zip(batches, spread, strict=True)]
    yield "NumPy add.at", 2 * different * row, measure(adding)
    moving = [Kernel("adagrad_rows", [values, g, settings], [held, kept]) for g in groups]
    yield "AdaGrad", 4 * different * row, measure(moving)


def _taking(held: Array, ids: Array, rows: Array) -> Callable[[], Any]:
    return lambda: np.take(held, ids, axis=0, out=rows, mode="clip")


def _adding(held: Array, ids: Array, values: Array) -> Callable[[], Any]:
    return lambda: np.add.at(held, ids, values)


def _check(case: Case, group: Kernel, groups: Array, ids: Array, values: Array) -> None:
    """That AdaGrad moves what occurs as NumPy would."""
    group()
    held, kept = (np.full((case.rows, case.columns), ACCUMULATED, case.dtype) for _ in range(2))
    settings = np.array([RATE, EPSILON, 0, 0, 0, 0, 0, 0], case.dtype)
    Kernel("adagrad_rows", [values, groups, settings], [held, kept])()
    slope = np.zeros(held.shape)
    np.add.at(slope, ids, np.repeat(values, case.size, 0))
    expected = ACCUMULATED - RATE * slope / (np.sqrt(ACCUMULATED + slope**2) + EPSILON)
    np.testing.assert_allclose(held, expected, rtol=1e-3, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*(case.name for case in CASES), []])
    chosen = parser.parse_args().cases
    print(describe())
    target = np.empty_like(ELSEWHERE)
    seconds = min(timed(lambda: np.copyto(target, ELSEWHERE)) for _ in range(3))
    print(f"copying consecutive memory: {2 * target.nbytes / seconds / 1e9:.1f} GB/s read and written")
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        shape = f"{case.rows:,} x {case.columns} {case.dtype}, {case.bags} bags of {case.size}"
        print(f"\n{case.name}: {shape:<50} {'warm us':>9} {'GB/s':>6} {'cold us':>9} {'GB/s':>6}")
        for what, nbytes, (warm, cold) in measured(case):
            figures = (warm * 1e6, nbytes / warm / 1e9, cold * 1e6, nbytes / cold / 1e9)
            print("  {:<{width}} {:9.1f} {:6.1f} {:9.1f} {:6.1f}".format(what, *figures, width=len(case.name) + 50))


if __name__ == "__main__":
    main()
