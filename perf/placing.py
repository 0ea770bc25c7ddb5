"""A step of towers beside each other, on nodes of one thread: all on one node, and where `fr.placement.Auto` has them.

    python perf/placing.py                     # 2 towers on 2 nodes
    python perf/placing.py --towers 3 --nodes 2 --size 512

What one node takes over what several take is shown as predicted and as measured; losses are compared. Rounds are
interleaved; medians and spread (lowest and highest). A trace says for how much of what the least busy node computes
another one computes, too, which tells more than time does where nodes share cores with other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # flowrt as it lies here

import machine  # before NumPy, see there
import numpy as np

import flowrt as fr

LAYERS, BATCH, STEPS = 3, 128, 10


def build(towers: int, size: int) -> tuple[fr.Graph, Any, list[Any]]:
    """A graph, what it is fed, and a training step's fetches."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (BATCH, size), name="x")
        ends = []
        for tower in range(towers):
            h = x
            for layer in range(LAYERS):
                start = fr.random.normal((size, size), stddev=size**-0.5, seed=tower * LAYERS + layer)
                h = fr.tanh(h @ fr.Variable(start, name=f"tower{tower}/w{layer}"))
            ends.append(fr.mean(h))
        loss = fr.square(fr.add_n(ends) - 1)
        train = fr.optim.SGD(0.01).minimize(loss)
    return graph, x, [loss, train]


def together(path: Path) -> list[float]:
    """For each step that was traced, the share of what the least busy node computed while others did."""
    steps: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "launch":
            spans = steps.setdefault(event["args"]["step"], {}).setdefault(event["pid"], [])
            spans.append((event["ts"], event["ts"] + event["dur"]))
    found = []
    for nodes in steps.values():
        least = min(nodes.values(), key=lambda spans: sum(end - begin for begin, end in spans))
        others = [span for spans in nodes.values() if spans is not least for span in spans]
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in least for b in others)
        found.append(both / sum(end - begin for begin, end in least))
    return found


async def main() -> None:
    """Measure, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("towers", 2), ("nodes", 2), ("size", 768), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(machine.describe())
    data = np.random.default_rng(0).normal(size=(BATCH, options.size)).astype("float32")
    steps, losses, seconds, shares = {}, {}, {}, {}
    async with AsyncExitStack() as stack:
        for name, placement in (("one node", None), ("Auto", fr.placement.Auto())):
            cluster = await stack.enter_async_context(fr.LocalCluster(worker=options.nodes, threads=1))
            graph, x, fetches = build(options.towers, options.size)
            session = await stack.enter_async_context(fr.Session(graph, cluster=cluster, placement=placement))
            steps[name] = session.compile(fetches, feeds=[x])
            losses[name] = [float((await steps[name](data))[0]) for _ in range(STEPS)]
            seconds[name] = []
            if placement is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "steps.json"
                    async with session.tracing(path):
                        for _ in range(STEPS):
                            await steps[name](data)
                    shares[name] = together(path)
                print(str(await session.explain(fetches)).splitlines()[1].strip())
        for _ in range(options.rounds):
            for name, step in steps.items():
                began = time.perf_counter()
                for _ in range(STEPS):
                    await step(data)
                seconds[name].append((time.perf_counter() - began) / STEPS)
    assert np.allclose(losses["one node"], losses["Auto"], rtol=1e-5), losses
    for name, taken in seconds.items():
        print(f"{name}: {1e3 * np.median(taken):.2f} ms a step ({1e3 * min(taken):.2f} to {1e3 * max(taken):.2f})")
    for name, found in shares.items():
        share = f"{np.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        print(f"{name}: of what the least busy node computes, others compute at the same time {share}")
    ratios = [one / auto for one, auto in zip(seconds["one node"], seconds["Auto"], strict=True)]
    print(f"one node takes {np.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    asyncio.run(main())
