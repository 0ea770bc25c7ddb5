"""What a turn of a loop costs: of scalars, of a small matrix product, of an LSTM-like cell forward and back.

python perf/loops.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine as this_machine
import numpy as np

import flowrt as fr

TURNS = 10_000
TIME, BATCH, INPUTS, UNITS = 64, 32, 64, 128


def scalars(dtype: str) -> tuple[fr.Graph, Any, list[Any], list[Any], Callable[[Any], None]]:
    """while i < n: i, s = i + 1, s + i"""
    with fr.Graph() as graph:
        n, zero = fr.placeholder(dtype, ()), np.zeros((), dtype)
        total = fr.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (zero, zero))[1]

    def check(got: Any) -> None:
        assert int(got) == TURNS * (TURNS - 1) // 2

    return graph, total, [n], [np.asarray(TURNS, dtype)], check


def products() -> tuple[fr.Graph, Any, list[Any], list[Any], Callable[[Any], None]]:
    """A vector times a matrix of 16 by 16, again and again: nested launches."""
    matrix = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))[0].astype(np.float32)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (1, 16))
        y = fr.while_loop(lambda i, y: i < TURNS, lambda i, y: (i + 1, y @ matrix), (0, x))[1]

    def check(got: Any) -> None:  # a rotation keeps the length
        assert abs(np.linalg.norm(got) - 4) < 1e-2

    return graph, y, [x], [np.ones((1, 16), np.float32)], check


def cell(gradient: bool) -> tuple[fr.Graph, Any, list[Any], list[Any], Callable[[Any], None]]:
    """A scan of an LSTM-like cell, and its gradient with respect to the weights."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(TIME, BATCH, INPUTS)).astype(np.float32)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", xs.shape)
        w = fr.Variable(fr.random.normal((INPUTS, 4 * UNITS), stddev=0.1, seed=1))
        u = fr.Variable(fr.random.normal((UNITS, 4 * UNITS), stddev=0.1, seed=2))
        zeros = fr.zeros((BATCH, UNITS))

        def turn(carry: Any, row: Any) -> Any:
            h, c = carry
            gates = row @ w + h @ u
            i, f, g, o = (gates[:, n * UNITS : (n + 1) * UNITS] for n in range(4))
            c = fr.sigmoid(f) * c + fr.sigmoid(i) * fr.tanh(g)
            h = fr.sigmoid(o) * fr.tanh(c)
            return (h, c), h

        loss = fr.sum(fr.scan(turn, (zeros, zeros), x)[1])
        fetches = [loss, *fr.gradients(loss, [w, u])] if gradient else loss

    def check(got: Any) -> None:
        assert np.all(np.isfinite(got[0] if gradient else got))

    return graph, fetches, [x], [xs], check


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "while, int32 scalars": (lambda: scalars("int32"), TURNS),
    "while, int64 scalars": (lambda: scalars("int64"), TURNS),
    "while, [1,16] @ [16,16]": (products, TURNS),
    f"scan, cell {INPUTS} to {UNITS}, batch {BATCH}, forward": (lambda: cell(False), TIME),
    f"scan, cell {INPUTS} to {UNITS}, batch {BATCH}, forward and back": (lambda: cell(True), TIME),
}


def measure(build: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call of the compiled step."""
    graph, fetches, feeds, values, check = build()
    with fr.BlockingSession(graph) as session:
        step = session.compile(fetches, feeds)
        for _ in range(3):
            check(step(*values))
        out: list[float] = []
        while sum(out) < seconds:
            begin = time.perf_counter()
            step(*values)
            out.append(time.perf_counter() - begin)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    results = {}
    for what, (build, turns) in CASES.items():
        ordered = sorted(measure(build, arguments.seconds))
        tenth = len(ordered) // 10
        results[what] = {
            "best": ordered[0] / turns,
            "median": statistics.median(ordered) / turns,
            "p90": ordered[-tenth - 1] / turns,
        }
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "seconds per turn": results}))
        return
    print(this_machine.describe())
    print("nanoseconds per turn: median (best to 90th percentile), millions of turns per second at the median")
    for what, r in results.items():
        best, median, late = (1e9 * r[name] for name in ("best", "median", "p90"))
        print(f"{what:52} {median:10.2f}  ({best:.2f} to {late:.2f})  {1e3 / median:10.3f}")


if __name__ == "__main__":
    main()
