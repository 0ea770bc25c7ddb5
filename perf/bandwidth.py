"""Whole steps of ops that memory bounds, as a share of what memory gives: flowrt, and torch and JAX beside it.

First what the machine streams: a copy (reads and writes) and a triad ``a = b + 3 c`` of arrays that together fill half
a core's second cache, some of the third, and far more than all. Then each case of sides/bandwidth/cases.py:
microseconds of a compiled step, GB/s of the least that it must move, the share that is of the triad's where the arrays
lie that it is given and answers, and how long the peers take. Least of many runs; the sides' answers are compared.

    python perf/bandwidth.py batch_norm layer_norm [--peers torch jax] [--threads 2] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine as this_machine
import numpy as np
from sides.bandwidth.cases import CASES, best

HERE = Path(__file__).resolve().parent
PEERS = Path.home() / ".cache" / "flowrt-peers"
PLACES = {"second cache": 96 << 10, "third cache": 3 << 20, "memory": 32 << 20}  # bytes of one of three arrays
AT_RANDOM = "dropout"

Found = dict[str, tuple[float, list[float]]]


def streams(threads: int, seconds: float) -> dict[str, float]:
    """GB/s of the triad in each place, printed beside those of the copy and of one thread."""
    found = {}
    for place, size in PLACES.items():
        b, c = (np.random.default_rng(seed).normal(size=size // 4).astype(np.float32) for seed in (0, 1))
        for count in sorted({1, threads}):
            copy = 2 * size / streaming(lambda b, c: -b, b, c, count, seconds) / 1e9
            found[place] = 3 * size / streaming(lambda b, c: b + c * 3.0, b, c, count, seconds) / 1e9
            print(f"  {place:14}{count:2} threads: copy {copy:5.1f}, triad {found[place]:5.1f} GB/s")
    return found


def streaming(program: Callable[[Any, Any], Any], b: Any, c: Any, threads: int, seconds: float) -> float:
    """Seconds of a compiled step over two arrays."""
    import flowrt as fr
    from flowrt.kernels.store.background import wait_compiled

    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", b.shape) for _ in range(2)]
        made = program(*feeds)
    with fr.BlockingSession(graph, options=fr.Options(threads=threads)) as session:
        step = session.compile([made], feeds)
        for _ in range(3):
            step(b, c)
            wait_compiled(60)
        return best(lambda: step(b, c), seconds)


def side(name: str, cases: list[str], threads: int, seconds: float) -> Found:
    """What one library needs for the cases, in a process of its own."""
    python = Path(sys.executable) if name == "flowrt" else PEERS / name / "bin" / "python"
    if not python.exists():
        return {}
    program = [python, "-m", f"sides.bandwidth.{name}", str(seconds), *cases]
    surroundings = {**os.environ, "THREADS": str(threads)}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=1200, check=False, env=surroundings, cwd=HERE
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return {case: (taken, sums) for case, (taken, sums) in json.loads(done.stdout.splitlines()[-1]).items()}


def lies(case: str) -> str:
    """Where the arrays of a case lie: the first place that is large enough."""
    size = 4 * CASES[case].held
    return next((place for place, each in PLACES.items() if size <= 4 * each), "memory")


def line(case: str, sides: dict[str, Found], triads: dict[str, float]) -> str:
    taken, sums = sides["flowrt"][case]
    rate = 4 * CASES[case].moved / taken / 1e9
    text = f"{case:34}{1e6 * taken:9.0f}{rate:8.1f}{rate / triads[lies(case)]:7.2f}"
    others = [found[case][0] for name, found in sides.items() if name != "flowrt" and case in found]
    text += "".join(f"{1e6 * other:9.0f}" for other in others)
    text += f"{min(others) / taken:8.2f}" if others else ""
    for name, found in sides.items():
        if case in found and AT_RANDOM not in case and not np.allclose(found[case][1], sums, rtol=1e-3, atol=0.5):
            text += f"  {name} answers {found[case][1]}, not {sums}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME", help="torch, jax")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--seconds", type=float, default=0.3, help="for each side of each case")
    a = parser.parse_args()
    print(f"{this_machine.describe()}, {a.threads} threads")
    triads = streams(a.threads, a.seconds)
    cases = [name for name in CASES if not a.names or name.startswith(tuple(a.names))]
    sides = {name: side(name, cases, a.threads, a.seconds) for name in ("flowrt", *a.peers)}
    beside = [name for name in a.peers if sides[name]]
    heads = "".join(f"{name:>9}" for name in beside) + (f"{'ratio':>8}" if beside else "")
    print(f"{'':34}{'us':>9}{'GB/s':>8}{'share':>7}{heads}")
    for case in cases:
        print(line(case, sides, triads))


if __name__ == "__main__":
    main()
