"""What a step costs beside its work, awaited and blocking, in microseconds.

A small step feeds a vector of 8 floats, does three ops and fetches; a long one, 8 times tanh of 131,072 floats, is
awaited in a lane: what it takes more than the blocking one is the hop there and back.

    python perf/overhead.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import machine as this_machine
import numpy as np

import flowrt as fr

WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a vector, and how often it is called."""

    text: str
    feed: np.ndarray
    layers: int
    calls: int

    def build(self) -> tuple[fr.Graph, fr.Tensor, fr.Tensor]:
        with fr.Graph() as graph:
            x = y = fr.placeholder("float32", self.feed.shape, name="x")
            for _ in range(self.layers):
                y = fr.tanh(y * 2.0 + 1.0)
        return graph, x, y

    def check(self, got: np.ndarray) -> None:
        want = self.feed
        for _ in range(self.layers):
            want = np.tanh(want * 2 + 1)
        np.testing.assert_allclose(got, want, rtol=1e-4)


def cases(calls: int) -> dict[str, Case]:
    small, large = (np.linspace(-1, 1, size, dtype=np.float32) for size in (8, 1 << 17))
    return {
        "small": Case("three ops on 8 floats", small, 1, calls),
        "long": Case("8 times three ops on 131,072 floats", large, 8, max(1, calls // 20)),
    }


async def awaited(case: Case) -> list[float]:
    graph, x, y = case.build()
    async with fr.Session(graph) as session:
        step = session.compile(y, [x])
        for _ in range(WARM_UP):
            case.check(await step(case.feed))
        out = []
        for _ in range(case.calls):
            begin = time.perf_counter()
            await step(case.feed)
            out.append(time.perf_counter() - begin)
        return out


def blocking(case: Case) -> list[float]:
    graph, x, y = case.build()
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        for _ in range(WARM_UP):
            case.check(step(case.feed))
        out = []
        for _ in range(case.calls):
            begin = time.perf_counter()
            step(case.feed)
            out.append(time.perf_counter() - begin)
        return out


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e6 * s for s in seconds)
    tenth = len(ordered) // 10
    return {"median": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-tenth - 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    results = {
        f"{name}, {how}": summary(measure(case))
        for name, case in cases(arguments.calls).items()
        for how, measure in (("awaited", lambda case: asyncio.run(awaited(case))), ("blocking", blocking))
    }
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "us": results}))
        return
    print(this_machine.describe())
    print("; ".join(f"{name}: {case.text}" for name, case in cases(1).items()))
    print("microseconds: median (p10 to p90)")
    for what, r in results.items():
        print(f"{what:16} {r['median']:6.1f}  ({r['p10']:.1f} to {r['p90']:.1f})")


if __name__ == "__main__":
    main()
