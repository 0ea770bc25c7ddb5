"""What a small step costs: feed a vector of 8 floats, three ops, fetch; awaited and blocking, in microseconds.

python perf/overhead.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import machine as this_machine
import numpy as np

import flowrt as fr


def build() -> tuple[fr.Graph, fr.Tensor, fr.Tensor]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (8,), name="x")
        y = fr.tanh(x * 2.0 + 1.0)
    return graph, x, y


async def awaited(calls: int, use: np.ndarray) -> list[float]:
    graph, x, y = build()
    async with fr.Session(graph) as session:
        step = session.compile(y, [x])
        check(await step(use), use)
        out = []
        for _ in range(calls):
            begin = time.perf_counter()
            await step(use)
            out.append(time.perf_counter() - begin)
        return out


def blocking(calls: int, use: np.ndarray) -> list[float]:
    graph, x, y = build()
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        check(step(use), use)
        out = []
        for _ in range(calls):
            begin = time.perf_counter()
            step(use)
            out.append(time.perf_counter() - begin)
        return out


def check(got: np.ndarray, x: np.ndarray) -> None:
    np.testing.assert_allclose(got, np.tanh(x * 2 + 1), rtol=1e-5)


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e6 * s for s in seconds)
    tenth = len(ordered) // 10
    return {"median": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-tenth - 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    use = np.linspace(-1, 1, 8, dtype=np.float32)
    results = {
        "awaited": summary(asyncio.run(awaited(arguments.calls, use))),
        "blocking": summary(blocking(arguments.calls, use)),
    }
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "us": results}))
        return
    print(this_machine.describe())
    print("a step of three ops on 8 floats, microseconds: median (p10 to p90)")
    for what, r in results.items():
        print(f"{what:9} {r['median']:6.1f}  ({r['p10']:.1f} to {r['p90']:.1f})")


if __name__ == "__main__":
    main()
